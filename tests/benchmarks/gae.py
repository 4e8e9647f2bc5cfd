"""GAE of ppokit and of other libraries: the function and the module. It takes five minutes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from tests.benchmarks import gae_module, tables
from tests.benchmarks.data import QUICK_SHAPES, SHAPES, Data, check_advantage, reference_advantage
from tests.benchmarks.figures import draw_shapes
from tests.benchmarks.gae_contenders import COPY, contenders
from tests.benchmarks.report import Benchmark

FUNCTION = "function"


def function_rows(shape: tables.Shape, seconds: float) -> list[tables.Row]:
    data = Data.draw(*shape)
    found = {name: prepare(data) for name, (_, prepare) in contenders().items()}
    truth, errors = reference_advantage(data), {}
    for name, (call, read) in found.items():
        if read is not None:
            with call.within():
                errors[name] = check_advantage(name, read(call.run()).reshape(shape), truth)
    peers = [name for name in errors if not name.startswith("ppokit")]
    options = {"peers": peers, "bound": COPY, "errors": errors}
    calls = {name: call for name, (call, _) in found.items()}
    return tables.timed(FUNCTION, shape, calls, seconds=seconds, **options)


def stages(quick: bool) -> list[Callable[[], list[tables.Row]]]:
    shapes = QUICK_SHAPES if quick else SHAPES
    critic_shapes = shapes[:1] if quick else gae_module.CRITIC_SHAPES
    of_function, of_module, of_critic = (0.5, 0.3, 0.3) if quick else (16.0, 6.0, 8.0)
    return [
        *(partial(function_rows, shape, of_function) for shape in shapes),
        *(partial(gae_module.module_rows, shape, of_module) for shape in shapes),
        *(partial(gae_module.critic_rows, shape, of_critic) for shape in critic_shapes),
    ]


def ratios(rows: Sequence[tables.Row]) -> str:
    ours = [row for row in rows if row.contender == gae_module.OURS]
    return "\n\n".join(
        tables.pivot(ours, name, tables.ratio)
        for name in ("this_over_bound", "best_peer_over_this")
    )


def page(rows: Sequence[tables.Row]) -> str:
    parts = (FUNCTION, gae_module.MODULE, gae_module.CRITIC)
    function, module, critic = ([r for r in rows if r.part == part] for part in parts)
    ours = [row for row in function if row.contender.startswith("ppokit")]
    return f"""# GAE

Float32 tensors `[B, T, 1]`, 1% of the steps done, half of those terminated; one thread.

![Time per element over shapes](gae.png)

## The function

Microseconds a call:

{tables.pivot(function, "median_us", ",.1f")}

The time of the fastest other library as a multiple of ppokit's; above 1, ppokit is faster:

{tables.pivot(ours, "best_peer_over_this", tables.ratio)}

Multiples of the copy. It is the bound: GAE reads 14 bytes an element and writes 8.

{tables.pivot(function, "this_over_bound", tables.ratio)}

Largest error of the advantage against float64:

{tables.pivot(function, "max_error", ".1e")}

{tables.bullets({name: about for name, (about, _) in contenders().items()})}

## The module, values in the batch

Microseconds a call. "Get and set" reads the five inputs from the TensorDict and writes the two
outputs, and computes nothing.

{tables.pivot(module, "median_us", ",.1f")}

ppokit's module as a multiple of "get and set", and the better of torchrl's as one of ppokit's:

{ratios(module)}

## The module, with a critic

Milliseconds a call. The critic has {gae_module.OBSERVATIONS} inputs and three layers of 256.
torchrl's GAE has its default, `shifted=False`.

{tables.pivot(critic, "median_ms", ",.2f")}

ppokit's module as a multiple of one forward, and the better of torchrl's as one of ppokit's:

{ratios(critic)}
"""


def main() -> None:
    bench = Benchmark("gae", packages=("stable-baselines3", "tianshou", "numba"))
    rows = bench.measure(stages(bench.quick))
    names = {"the function": FUNCTION, "the module, values in the batch": gae_module.MODULE}
    groups = {name: [r for r in rows if r.part == part] for name, part in names.items()}
    bounds = (COPY, gae_module.BARE)
    draw_shapes(bench.file("png"), groups, bounds, "GAE, float32, one thread")
    bench.write_page(page(rows))


if __name__ == "__main__":
    main()
