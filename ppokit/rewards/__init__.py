"""Reward scaling."""

from ppokit.rewards.normalizer import RewardNormalizer

__all__ = ["RewardNormalizer"]
