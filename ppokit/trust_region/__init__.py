"""Keeping the new policy near the one that collected the data."""

from ppokit.trust_region.adaptive_kl import AdaptiveKLCoeff
from ppokit.trust_region.early_stop import KLEarlyStopper, refuse_accumulated_gradients

__all__ = ["AdaptiveKLCoeff", "KLEarlyStopper", "refuse_accumulated_gradients"]
