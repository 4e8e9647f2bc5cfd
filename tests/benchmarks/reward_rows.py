"""The rows of the reward benchmark, and what it found as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.benchmarks.data import Data
from tests.benchmarks.figures import draw
from tests.benchmarks.report import machine
from tests.benchmarks.reward_contenders import (
    COPY,
    LONGEST,
    Normalizer,
    copy,
    normalizers,
    return_spread,
    reward_spread,
)
from tests.benchmarks.tables import Row, Shape, compare, grid, ratio, versions, write_csv
from tests.benchmarks.timing import Timing, interleave

PART = "rewards"
TOLERANCE = 0.02  # of the scale: gymnasium's differs by up to 1%, a wrong rule's by far more


@dataclass
class RewardRow(Row):
    """A row with what the reward was divided by, and how many steps were timed."""

    scale: float | None = None
    timed_steps: int | None = None


def rows(shape: Shape, seconds: float) -> list[Row]:
    """Return the rows of a shape."""
    data = Data.draw(*shape)
    short = data.first(LONGEST)
    everyone = normalizers(data)
    scales = {n: check(n, who, data if who.ours else short) for n, who in everyone.items()}
    calls = {name: who.call for name, who in everyone.items()}
    calls[COPY] = copy(data)
    found: list[Row] = []
    for name, timing in interleave(calls, seconds=seconds).items():
        own = name == COPY or everyone[name].ours
        steps = shape[1] if own else min(shape[1], LONGEST)
        row = RewardRow.of(PART, name, shape, _longer(timing, shape[1] / steps))
        assert isinstance(row, RewardRow)
        found.append(replace(row, scale=scales.get(name), timed_steps=steps))
    peers = [name for name, who in everyone.items() if not who.ours]
    compare(found, peers=peers, bound=COPY)
    return found


def check(name: str, who: Normalizer, data: Data) -> float:
    """Return the scale after one pass; it must be the spread that the contender claims."""
    with who.call.within():
        who.call.prepare(1)
        who.call.run()
    scale = who.scale()
    truth = return_spread(data) if who.follows_returns else reward_spread(data)
    if not abs(scale - truth) < TOLERANCE * truth:
        raise RuntimeError(f"{name} divides by {scale:.4g}, and the spread is {truth:.4g}.")
    return scale


def _longer(timing: Timing, factor: float) -> Timing:
    return replace(
        timing,
        median=factor * timing.median,
        lower=factor * timing.lower,
        upper=factor * timing.upper,
    )


def write_report(folder: Path, rows: Sequence[Row]) -> Path:
    """Write rewards.csv, rewards.png and rewards.md, and return the last."""
    write_csv(folder / "rewards.csv", rows)
    draw(folder / "rewards.png", {"": rows}, [COPY], "Reward normalisation, float32, one thread")
    ours = [row for row in rows if row.contender.startswith("ppokit")]
    about = normalizers(Data.draw(1, 2)).items()
    text = f"""# Reward normalisation

Rewards `[B, T, 1]` in float32, 1% of the steps done; one thread. ppokit takes the batch at once;
the others take it step by step, as their environments would, from an environment that plays it
back. The contenders take turns, one sample of about 2 ms or more each a round, in an order drawn
anew; figures are medians over the rounds, and `rewards.csv` has the quartiles. Every call of
ppokit's gets a batch of its own, as a collector's next one would be, made ready before the clock
starts. Beyond {LONGEST:,} steps the others are timed on the first {LONGEST:,}, and their time is
scaled up in proportion. The allocator keeps what is freed, so that no one pays for page faults.
`python -m tests.benchmarks.rewards`

![Time per element over shapes](rewards.png)

Microseconds for the batch:

{grid(rows, "median_us", ",.0f")}

How many times as long the fastest of the others takes; above 1, ppokit is faster:

{grid(ours, "best_peer_over_this", ratio)}

How many times as long as the bound, a copy of what must be read (a reward, a done) and written:

{grid(ours, "this_over_bound", ratio)}

What the reward of the last step timed is divided by, after one pass:

{grid(rows, "scale", ".3f")}

{chr(10).join(f"- **{name}**: {who.about}." for name, who in about)}
- **{COPY}**: `copy_` of half as many bytes between two buffers that stay allocated: the bound.

The rules differ in one thing that no time shows: ppokit divides the whole batch by the spread after
it, the others each step by the spread up to there.

{machine()}
{versions("stable-baselines3")}
"""
    (folder / "rewards.md").write_text(text)
    return folder / "rewards.md"
