"""Schedules over frames."""

from ppokit.schedules.points import InterpSchedule, StepSchedule
from ppokit.schedules.scheduler import ParameterScheduler

__all__ = ["InterpSchedule", "ParameterScheduler", "StepSchedule"]
