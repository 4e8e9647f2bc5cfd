"""A rank of the soak: the script, with a collector that tags frames and an update that counts.

``python -m tests.benchmarks.soak_rank FOLDER script.py options``
"""

from __future__ import annotations

import json
import os
import random
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

import ppokit

TAG = ("soak", "tag")  # [*B, 2]: the worker, and the number of its frame


class Tagger:
    """Writes the tag into each frame of a batch."""

    def __init__(self) -> None:
        self.worker, self.frames = random.SystemRandom().getrandbits(62), 0

    def __call__(self, batch: Any) -> Any:
        frames = torch.arange(self.frames, self.frames + batch.numel()).view(batch.shape)
        self.frames += batch.numel()
        return batch.set(TAG, torch.stack([torch.full_like(frames, self.worker), frames], -1))


class TaggingCollector(ppokit.GymCollector):
    """A GymCollector whose frames carry tags."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, postproc=Tagger(), **kwargs)


class CountingUpdate(ppokit.PPOUpdate):
    """Writes down the tags and the number of the frames of each update."""

    folder: Path

    def __call__(self, batch: Any) -> Any:
        tags = batch[TAG].reshape(-1, 2).contiguous().numpy().tobytes()
        row, rank = super().__call__(batch), os.environ["RANK"]
        with (self.folder / f"tags.{rank}").open("ab") as file:
            file.write(tags)
        with (self.folder / f"updates.{rank}").open("a") as file:
            file.write(json.dumps({"frames": row["frames"]}) + "\n")
        return row


if __name__ == "__main__":
    CountingUpdate.folder = Path(sys.argv[1])
    ppokit.GymCollector, ppokit.PPOUpdate = TaggingCollector, CountingUpdate
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="script")
