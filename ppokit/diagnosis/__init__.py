"""What the numbers of a run mean, in words, and what to try."""

from ppokit.diagnosis.diagnosis import Finding, diagnose

__all__ = ["Finding", "diagnose"]
