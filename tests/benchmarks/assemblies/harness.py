"""A training run with options: its folder, Ctrl-C, evaluations, history, figure."""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tqdm import tqdm

import ppokit
from ppokit.plotting import PANELS, plot_run


def options_of(name: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every run."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--total-frames", type=count)
    parser.add_argument("--target", type=float, help="end when the score has reached this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("outputs") / name)
    parser.add_argument("--quick", action="store_true", help="a few seconds")
    return parser


def count(text: str) -> int:
    """Return an option's whole number of 1 or more, for the ``type`` of an argument."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return int(text)


@contextmanager
def catch_interrupt() -> Iterator[SimpleNamespace]:
    """Yield an object whose ``pressed`` is True after Ctrl-C; a second Ctrl-C interrupts."""
    interrupt = SimpleNamespace(pressed=False)

    def note(*_: Any) -> None:
        interrupt.pressed = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


class Run:
    """A run: its options, and the statistics of each batch, in a new folder.

    Args:
        parser: of the options.
        frames: the number of frames without ``--total-frames``.
        quick_frames: the same with ``--quick``.
        writes: False on a rank that writes nothing.
    """

    def __init__(
        self,
        parser: argparse.ArgumentParser,
        frames: int | None = None,
        quick_frames: int | None = None,
        *,
        writes: bool = True,
    ) -> None:
        self.args = args = parser.parse_args()
        if args.total_frames is None:
            args.total_frames = quick_frames if args.quick else frames
        self.frames, self.is_interrupted = 0, False
        self.history: list[dict[str, float]] = []
        if writes:
            if args.out.exists() and any(args.out.iterdir()):
                parser.error(f"--out: {args.out} is not empty.")
            args.out.mkdir(parents=True, exist_ok=True)
        torch.set_num_threads(1)
        torch.manual_seed(args.seed)

    @property
    def seconds(self) -> float:
        """Seconds of training, without evaluations."""
        return time.perf_counter() - self.started

    def train(
        self,
        collector: Any,
        update: Callable[[Any], Mapping[str, float]],
        title: str,
        *,
        panels: Mapping[str, Sequence[str]] | None = None,
        evaluate: Callable[[], Mapping[str, float]] | None = None,
        eval_every: int = 5,
        eval_frames: int | None = None,
        score: str = "eval_return",
        statistics: Callable[[Any], Mapping[str, float]] | None = None,
    ) -> None:
        """Train until the number of frames, the target of the score, or Ctrl-C, and finish.

        Args:
            collector: yields batches.
            update: trains on one.
            title: of the figure.
            panels: of the figure, besides those of every run.
            evaluate: returns scores, every ``eval_every`` batches and at the end.
            eval_every: in batches.
            eval_frames: evaluate at multiples of so many frames, in place of ``eval_every``.
            score: entry of the history whose target ``--target`` is.
            statistics: returns further entries of a batch, before the update.
        """
        collector.set_seed(self.args.seed)
        self.started = time.perf_counter()
        total, target = self.args.total_frames, self.args.target
        with catch_interrupt() as interrupt, tqdm(total=total, unit="frame") as progress:
            for batch in collector:
                own = {} if statistics is None else statistics(batch)
                if not self.history and isinstance(update, ppokit.PPOUpdate):
                    update.validate(batch)
                is_due = len(self.history) % eval_every == 0
                if eval_frames is not None:
                    is_due = self.frames % eval_frames + batch.numel() >= eval_frames
                self.frames += batch.numel()
                row = {**update(batch), "seconds": self.seconds, **own}
                row["total_frames"] = float(self.frames)
                is_last = interrupt.pressed or self.frames >= total
                if evaluate is not None and (is_last or is_due):
                    paused = time.perf_counter()
                    row |= evaluate()
                    self.started += time.perf_counter() - paused
                is_last |= target is not None and row.get(score, -torch.inf) >= target
                self.history.append(row)
                progress.update(batch.numel())
                shown = {k: row[k] for k in ("episode_return", score, "kl") if k in row}
                progress.set_postfix({k: f"{v:.3g}" for k, v in shown.items()})
                if is_last:
                    break
            self.is_interrupted = interrupt.pressed
        collector.shutdown()
        print(f"{title}: {score} {self.history[-1].get(score, float('nan')):.2f}")
        self.finish(title, panels)

    def finish(self, title: str, panels: Mapping[str, Sequence[str]] | None = None) -> None:
        """Write the history and the figure, and print the findings.

        An interrupted run leaves a file ``interrupted``.
        """
        if self.is_interrupted:
            (self.args.out / "interrupted").touch()
        figure = plot_run(self.history, panels={**PANELS, **(panels or {})}, title=title)
        figure.savefig(self.args.out / "figure.png", dpi=120)
        unfinished = self.args.out / "unfinished"
        unfinished.write_text(json.dumps(self.history))
        unfinished.replace(self.args.out / "history.json")
        for finding in ppokit.diagnose(self.history):
            print(finding)
