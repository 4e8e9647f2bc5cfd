"""Losses."""

from ppokit.objectives.dual_clip import DualClipPPOLoss

__all__ = ["DualClipPPOLoss"]
