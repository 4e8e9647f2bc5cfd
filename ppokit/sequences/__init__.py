"""Sequences for truncated back-propagation through time."""

from ppokit.sequences.batcher import SequenceBatcher

__all__ = ["SequenceBatcher"]
