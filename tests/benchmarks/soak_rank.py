"""A rank of the soak: the script, with a collector that tags frames and an update that counts.

``python -m tests.benchmarks.soak_rank FOLDER script.py options``
"""

from __future__ import annotations

import os
import random
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

import ppokit

TAG = ("soak", "tag")  # [*B, 2]: the worker, and the number of its frame


class TaggingCollector(ppokit.GymCollector):
    """A GymCollector whose frames carry tags."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, postproc=self.tag, **kwargs)
        self.worker, self.tagged = random.SystemRandom().getrandbits(62), 0

    def tag(self, batch: Any) -> Any:
        frames = torch.arange(self.tagged, self.tagged + batch.numel()).view(batch.shape)
        self.tagged += batch.numel()
        return batch.set(TAG, torch.stack([torch.full_like(frames, self.worker), frames], -1))


class CountingUpdate(ppokit.PPOUpdate):
    """Writes down the tags of the frames of each update."""

    folder: Path

    def __call__(self, batch: Any) -> Any:
        tags = batch[TAG].reshape(-1, 2).contiguous().numpy().tobytes()
        row = super().__call__(batch)
        with (self.folder / f"tags.{os.environ['RANK']}").open("ab") as file:
            file.write(tags)
        return row


if __name__ == "__main__":
    CountingUpdate.folder = Path(sys.argv[1])
    ppokit.GymCollector, ppokit.PPOUpdate = TaggingCollector, CountingUpdate
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="script")
