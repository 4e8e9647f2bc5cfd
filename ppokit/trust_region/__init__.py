"""Keeping the new policy near the one that collected the data."""

from ppokit.trust_region.adaptive_kl import AdaptiveKLCoeff
from ppokit.trust_region.adaptive_rate import AdaptiveLearningRate
from ppokit.trust_region.early_stop import KLEarlyStopper

__all__ = ["AdaptiveKLCoeff", "AdaptiveLearningRate", "KLEarlyStopper"]
