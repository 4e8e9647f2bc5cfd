"""Collecting batches from gymnasium environments."""

from ppokit.collectors.collector import GymCollector
from ppokit.collectors.normalization import ObservationNormalizer

__all__ = ["GymCollector", "ObservationNormalizer"]
