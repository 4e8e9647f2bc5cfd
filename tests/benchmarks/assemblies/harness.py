"""A training run with options: folder, resume, Ctrl-C, evaluations, checkpoint, figure."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import ppokit
from ppokit.plotting import PANELS, plot_run
from tests.benchmarks.assemblies.folders import begin_run, catch_interrupt, count, from_zero

#: options that a resumed run may have other values of
MAY_CHANGE = ("total_frames", "target", "seed", "out", "resume", "quick", "compile", "device")
DAMAGED = (EOFError, KeyError, RuntimeError, ValueError, pickle.UnpicklingError)


def options_of(name: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every run."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--total-frames", type=count)
    parser.add_argument("--target", type=float, help="end when the score has reached this")
    parser.add_argument("--seed", type=from_zero, default=0)
    parser.add_argument("--out", type=Path, default=Path("outputs") / name)
    parser.add_argument("--resume", action="store_true", help="continue the run in --out")
    parser.add_argument("--quick", action="store_true", help="a few seconds")
    return parser


class Run:
    """A run: its statistics of each batch, and how far it is.

    Args:
        parser: of the options, for errors.
        args: the options.
        parts: objects of the checkpoint, and lists, by name; ``"update"`` is one.
        may_change: further options that a resumed run may have other values of.
        map_location: where a checkpoint is loaded.
    """

    def __init__(
        self,
        parser: argparse.ArgumentParser,
        args: argparse.Namespace,
        parts: Mapping[str, Any],
        *,
        may_change: Sequence[str] = (),
        map_location: Any = None,
    ) -> None:
        self.args, self.error = args, parser.error
        self.checkpoint = args.out / "checkpoint.pt"
        self.history: list[dict[str, float]] = []
        constant = {k: v for k, v in vars(args).items() if k not in (*MAY_CHANGE, *may_change)}
        self.parts = {**parts, "history": self.history, "options": constant}
        if args.resume:
            self._load(map_location)
        self.frames = int(self.history[-1]["total_frames"]) if self.history else 0
        self.seconds = self.history[-1]["seconds"] if self.history else 0.0
        if self.frames >= args.total_frames:
            has = f"{self.checkpoint} has {self.frames} frames already"
            parser.error(f"{has}; raise --total-frames.")

    def _load(self, map_location: Any) -> None:
        if not self.checkpoint.exists():
            self.error(f"--resume: there is no {self.checkpoint}; run without --resume first.")
        try:
            saved = ppokit.load_checkpoint(self.checkpoint, self.parts, map_location=map_location)
        except DAMAGED as error:
            self.error(f"--resume: {self.checkpoint} is damaged, or of another run: {error!r}")
        for name, value in saved["options"].items():
            if value != self.parts["options"].get(name):
                option = f"--{name.replace('_', '-')} {value}"
                self.error(f"--resume: {self.checkpoint} is of another run, with {option}.")
        for name in saved.keys() - {"options"}:
            self.parts[name] += saved[name]

    def begin(self, name: str) -> None:
        """Make the folder; an earlier run there is renamed."""
        try:
            begin_run(self.args.out, name, resume=self.args.resume)
        except OSError as error:
            self.error(f"--out: {error}")

    def save(self) -> None:
        """Write the checkpoint, and the history as JSON."""
        ppokit.save_checkpoint(self.checkpoint, self.parts)
        unfinished = self.args.out / "unfinished"
        unfinished.write_text(json.dumps(self.history))
        os.replace(unfinished, self.args.out / "history.json")

    def train(
        self,
        collector: Any,
        *,
        update: Callable[[Any], Mapping[str, float]] | None = None,
        evaluate: Callable[[], Mapping[str, float]] | None = None,
        eval_every: int = 5,
        eval_frames: int | None = None,
        score: str = "eval_return",
        statistics: Callable[[Any], Mapping[str, float]] | None = None,
        time_before_update: bool = False,
        save_every: int = 10,
    ) -> None:
        """Train until the number of frames, the target of the score, or Ctrl-C.

        Args:
            collector: yields batches.
            update: trains on one; None for that of the checkpoint.
            evaluate: returns scores, every ``eval_every`` batches and at the end.
            eval_every: in batches.
            eval_frames: evaluate at multiples of so many frames, in place of ``eval_every``.
            score: entry of the history whose target ``--target`` is.
            statistics: returns further entries of a batch, before the update.
            time_before_update: ``"seconds"`` of a batch are until its statistics are known, and not
                until the end of its update.
            save_every: in batches.
        """
        update = update or self.parts["update"]
        started = time.perf_counter() - self.seconds
        total, target = self.args.total_frames, self.args.target
        with (
            catch_interrupt() as interrupt,
            tqdm(total=total, initial=self.frames, unit="frame") as progress,
        ):
            for batch in collector:
                own = {} if statistics is None else dict(statistics(batch))
                known = time.perf_counter() - started
                if not self.history and isinstance(update, ppokit.PPOUpdate):
                    update.validate(batch)
                is_due = len(self.history) % eval_every == 0
                if eval_frames is not None:
                    is_due = self.frames % eval_frames + batch.numel() >= eval_frames
                self.frames += batch.numel()
                row = {**update(batch), **own, "total_frames": float(self.frames)}
                row["seconds"] = known if time_before_update else time.perf_counter() - started
                is_last = interrupt.pressed or self.frames >= total
                is_last |= target is not None and row.get(score, -torch.inf) >= target
                if evaluate is not None and (is_last or is_due):
                    paused = time.perf_counter()
                    row |= evaluate()
                    started += time.perf_counter() - paused
                    is_last |= target is not None and row.get(score, -torch.inf) >= target
                self.history.append(row)
                progress.update(batch.numel())
                shown = {k: row[k] for k in ("episode_return", score, "kl") if k in row}
                progress.set_postfix({k: f"{v:.3g}" for k, v in shown.items()})
                if is_last or len(self.history) % save_every == 0:
                    self.save()
                if is_last:
                    break

    def draw(self, title: str, panels: Mapping[str, Sequence[str]] | None = None) -> None:
        """Draw the figure, and print the findings."""
        figure = plot_run(self.history, panels={**PANELS, **(panels or {})}, title=title)
        figure.savefig(self.args.out / "figure.png", dpi=120)
        print(f"Figures: {self.args.out}/*.png, checkpoint: {self.checkpoint}")
        for finding in ppokit.diagnose(self.history):
            print(finding)
