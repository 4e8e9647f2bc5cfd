"""Generalised advantage estimation."""

from ppokit.advantages.gae import GAE

__all__ = ["GAE"]
