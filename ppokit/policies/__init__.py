"""Policies on plain tensors: known distributions, and TensorActor."""

from ppokit.policies.actor import TensorActor

__all__ = ["TensorActor"]
