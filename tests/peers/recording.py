"""What an example of torchrl's writes down while it runs: the losses of minibatches, and the time.

``PPOKIT_RECORD`` is the path of the file, JSON lines, one for each call.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import torch

from ppokit import GymCollector


def _write(**entry: Any) -> None:
    with open(os.environ["PPOKIT_RECORD"], "a") as file:
        file.write(json.dumps(entry) + "\n")


def record(losses: Any) -> Any:
    """Write the losses of a minibatch down, and return them."""
    items = losses.items() if hasattr(losses, "items") else [("loss", losses)]
    values = {k: v.detach().mean().item() for k, v in items if k.startswith("loss")}
    _write(losses=values)
    return losses


def clock(name: str) -> None:
    """Write the time down, in seconds: ``"start"`` of the training loop, and ``"end"``."""
    _write(clock=name, seconds=time.perf_counter())


def start(collector: Any) -> None:
    """Seed what is random from here on, and start the clock.

    Torchrl's collector has reset its environments, which were seeded before it was built.
    """
    if isinstance(collector, GymCollector):
        collector.set_seed(0)
    torch.manual_seed(1)
    clock("start")
