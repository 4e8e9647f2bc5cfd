"""GAE of ppokit and of other libraries: the function, the module, torch.compile.

``python -m tests.benchmarks.gae`` takes about five minutes and writes
``docs/benchmarks/gae.{csv,md,png}``. Other libraries take part if they are installed
(``pip install 'ppokit[bench]'``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from tests.benchmarks import gae_module, tables
from tests.benchmarks.data import QUICK_SHAPES, SHAPES, Data, check_advantage, reference
from tests.benchmarks.figures import draw_shapes
from tests.benchmarks.gae_contenders import COPY, contenders
from tests.benchmarks.memory import extra_memory
from tests.benchmarks.report import Benchmark

FUNCTION = "function"


def function_rows(shape: tables.Shape, seconds: float) -> list[tables.Row]:
    data = Data.draw(*shape)
    found = contenders()
    calls = {name: who.prepare(data) for name, who in found.items()}
    truth, errors = reference(data), {}
    for name, who in found.items():
        if who.advantage is not None:
            with calls[name].within():
                advantage = who.advantage(calls[name].run()).reshape(shape)
            errors[name] = check_advantage(name, advantage, truth)
    peers = [name for name, who in found.items() if not who.ours and name != COPY]
    options = {"peers": peers, "bound": COPY, "errors": errors}
    return tables.timed(FUNCTION, shape, calls, seconds=seconds, **options)


def stages(quick: bool) -> list[Callable[[], list[tables.Row]]]:
    shapes = QUICK_SHAPES if quick else SHAPES
    critic_shapes = shapes[:1] if quick else gae_module.CRITIC_SHAPES
    of_function, of_module, of_critic = (0.5, 0.3, 0.3) if quick else (16.0, 6.0, 8.0)
    return [
        *(partial(function_rows, shape, of_function) for shape in shapes),
        *(partial(gae_module.module_rows, shape, of_module) for shape in shapes),
        *(partial(gae_module.critic_rows, shape, of_critic) for shape in critic_shapes),
        *(partial(gae_module.compile_rows, n) for n in (() if quick else gae_module.COMPILE_STEPS)),
    ]


def add_memory(rows: Sequence[tables.Row]) -> None:
    rows = [row for row in rows if row.part == FUNCTION and row.contender != COPY]
    found = extra_memory(list(dict.fromkeys(row.shape for row in rows)))
    for row in rows:
        row.extra_kib = found.get((row.contender, *row.shape))


def memory_section(rows: Sequence[tables.Row]) -> str:
    if all(row.extra_kib is None for row in rows):
        return ""
    table = tables.pivot(rows, lambda row: row.extra_kib and row.extra_kib / 1024, ",.1f")
    return f"MiB at the peak of a call, beyond its results, to 0.2 MiB:\n\n{table}\n\n"


def module_ratios(rows: Sequence[tables.Row], bound: str) -> str:
    """Return ppokit's module as a multiple of the bound, and torchrl's as a multiple of it."""
    fields = {f"over {bound}": "this_over_bound", "torchrl's best over it": "best_peer_over_this"}
    ours = [row for row in rows if row.contender == gae_module.OURS]
    lines = [
        [head, *(tables.ratio(getattr(row, name)) for row in ours)] for head, name in fields.items()
    ]
    return tables.markdown(
        [f"`{gae_module.OURS}`", *(tables.shape_name(row.shape) for row in ours)], lines
    )


def compile_section(rows: Sequence[tables.Row]) -> str:
    if not rows:
        return ""
    lines = [[row.contender, f"{row.median_us / 1e6:.1f}", f"{row.max_error:.1e}"] for row in rows]
    return f"""## Compiling

`torch.compile(fullgraph=True)` of `ppokit.GAE` with that critic and a batch of 4 rows, to the end
of the first call, each in a new process with an empty cache.

{tables.markdown(["", "seconds", "largest difference from eager"], lines)}

"""


def page(rows: Sequence[tables.Row]) -> str:
    parts = (FUNCTION, gae_module.MODULE, gae_module.CRITIC, gae_module.COMPILE)
    function, module, critic, compiled = ([r for r in rows if r.part == part] for part in parts)
    ours = [row for row in function if row.contender.startswith("ppokit")]
    return f"""# GAE: time and memory

Float32 tensors `[B, T, 1]`, 1% of the steps done, half of those terminated; one thread. The
contenders take turns in a random order; figures are medians, and `gae.csv` has the quartiles.
`python -m tests.benchmarks.gae`

![Time per element over shapes](gae.png)

## The function

Microseconds a call:

{tables.pivot(function, "median_us", ",.1f")}

The time of the fastest other library as a multiple of ppokit's; above 1, ppokit is faster:

{tables.pivot(ours, "best_peer_over_this", tables.ratio)}

Multiples of the copy. It is the bound: GAE reads 14 bytes an element and writes 8.

{tables.pivot(function, "this_over_bound", tables.ratio)}

{memory_section(function)}Largest error of the advantage against float64:

{tables.pivot(function, "max_error", ".1e")}

{tables.bullets({name: who.about for name, who in contenders().items()})}

## The module, values in the batch

Microseconds a call. "Get and set" reads the five inputs from the TensorDict and writes the two
outputs, and computes nothing.

{tables.pivot(module, "median_us", ",.1f")}

{module_ratios(module, "get and set")}

## The module, with a critic

Milliseconds a call. The critic has {gae_module.OBSERVATIONS} inputs and three layers of 256.
torchrl's GAE has its default, `shifted=False`.

{tables.pivot(critic, "median_ms", ",.2f")}

{module_ratios(critic, "one forward")}

{compile_section(compiled)}"""


def main() -> None:
    packages = ("stable-baselines3", "tianshou", "numba", "skrl")
    bench = Benchmark("gae", __doc__, packages=packages)
    rows = bench.measure(stages(bench.quick))
    add_memory(rows)
    tables.write_rows(bench.file("csv"), rows)
    names = {"the function": FUNCTION, "the module, values in the batch": gae_module.MODULE}
    groups = {name: [r for r in rows if r.part == part] for name, part in names.items()}
    bounds = (COPY, gae_module.BARE)
    draw_shapes(bench.file("png"), groups, bounds, "GAE, float32, one thread")
    bench.write_page(page(rows))


if __name__ == "__main__":
    main()
