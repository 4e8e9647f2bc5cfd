"""Collecting batches from gymnasium environments."""

from ppokit.collectors.collector import GymCollector
from ppokit.collectors.normalization import RunningObservationNorm

__all__ = ["GymCollector", "RunningObservationNorm"]
