"""Figures of a run, from statistics or from torchrl's logs, and pictures of a trained policy.

Needs matplotlib: ``pip install ppokit[plot]``.
"""

from ppokit._runs import read_run
from ppokit.plotting.curves import PANELS, plot_run
from ppokit.plotting.pictures import plot_frames, record_episode

__all__ = ["PANELS", "plot_frames", "plot_run", "read_run", "record_episode"]
