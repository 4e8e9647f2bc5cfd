"""Collecting batches from gymnasium environments."""

from ppokit.collectors.actor import LeanActor
from ppokit.collectors.collector import GymCollector
from ppokit.collectors.normalization import RunningObservationNorm

__all__ = ["GymCollector", "LeanActor", "RunningObservationNorm"]
