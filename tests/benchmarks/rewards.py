"""Reward normalization by ppokit, on a whole batch, and by other libraries, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tests.benchmarks import reward_contenders as contenders
from tests.benchmarks.data import QUICK_SHAPES, SHAPES, Data, reference_deviation
from tests.benchmarks.figures import draw_shapes
from tests.benchmarks.report import Benchmark
from tests.benchmarks.tables import Row, Shape, bullets, compare, pivot, ratio
from tests.benchmarks.timing import interleave

TOLERANCE = 0.02  # of the scale: gymnasium's differs by up to 1%


def shape_rows(shape: Shape, seconds: float) -> Sequence[Row]:
    data = Data.draw(*shape)
    short = data.first(contenders.LONGEST)
    found = contenders.normalizers(data)
    peers = [name for name in found if not name.startswith("ppokit")]
    scales = {n: checked_scale(n, x, short if n in peers else data) for n, x in found.items()}
    calls = {name: who.call for name, who in found.items()}
    timings = interleave(calls | {contenders.COPY: contenders.copy(data)}, seconds=seconds)
    rows = []
    for name, timing in timings.items():
        scale = max(1.0, shape[1] / contenders.LONGEST) if name in peers else 1.0
        rows.append(Row.of("rewards", name, shape, timing, scale=scale))
        rows[-1].more["scale"] = scales.get(name)
    return compare(rows, peers=peers, bound=contenders.COPY)


def checked_scale(name: str, who: contenders.Normalizer, data: Data) -> float:
    """Return the divisor after one pass over the data.

    Raises:
        RuntimeError: it is not the standard deviation that the contender's rule divides by.
    """
    with who.call.within():
        who.call.prepare(1)
        who.call.run()
    scale = who.scale()
    reward = data.reward.double().std(correction=0).item()
    truth = reference_deviation(data) if who.follows_returns else reward
    if not abs(scale - truth) < TOLERANCE * truth:
        raise RuntimeError(f"{name} divides by {scale:.4g} instead of {truth:.4g}.")
    return scale


def main() -> None:
    bench = Benchmark("rewards", packages=("stable-baselines3",))
    shapes, seconds = (QUICK_SHAPES, 1.0) if bench.quick else (SHAPES, 12.0)
    rows = bench.measure(partial(shape_rows, shape, seconds) for shape in shapes)
    title = "Reward normalization, float32, one thread"
    draw_shapes(bench.file("png"), {"": rows}, [contenders.COPY], title)
    ours = [row for row in rows if row.contender.startswith("ppokit")]
    about = {name: who.about for name, who in contenders.normalizers(Data.draw(1, 2)).items()}
    about[contenders.COPY] = "`copy_` of half as many bytes between two buffers: the bound"
    bench.write_page(f"""# Reward normalization

Rewards `[B, T, 1]` in float32, 1% of the steps done; one thread. ppokit takes the batch at once;
the others take it step by step, and their time beyond {contenders.LONGEST:,} steps is extrapolated.

![Time per element over shapes](rewards.png)

Microseconds for the batch:

{pivot(rows, "median_us", ",.0f")}

The time of the fastest other library as a multiple of ppokit's; above 1, ppokit is faster:

{pivot(ours, "best_peer_over_this", ratio)}

Multiples of the bound, a copy that reads a reward and a done flag and writes a reward:

{pivot(ours, "this_over_bound", ratio)}

The divisor of the last timed step's reward, after one pass:

{pivot(rows, lambda row: row.more["scale"], ".3f")}

{bullets(about)}

ppokit divides the whole batch by the standard deviation after it; the others divide each step by
the standard deviation up to that step.
""")


if __name__ == "__main__":
    main()
