"""What the GAE benchmark found, as text and as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks import gae_compile, gae_function, gae_module
from tests.benchmarks.contenders import COPY, contenders
from tests.benchmarks.figures import draw
from tests.benchmarks.report import machine
from tests.benchmarks.tables import Row, grid, markdown, ratio, shape_name, versions, write_csv

PEERS = ("stable-baselines3", "tianshou", "numba", "skrl")
BEST = "best_peer_over_this"
HEAD = """# GAE: time and memory

Float32 tensors `[B, T, 1]`, 1% of the steps done, half of those terminated; one thread. The
contenders take turns, one sample of about 2 ms or more each a round, in an order drawn anew;
figures are medians over the rounds, and `gae.csv` has the quartiles. Each contender's data lie
ready in the layout that its own library keeps. The allocator keeps what is freed, so that no one
pays for page faults. `python -m tests.benchmarks.gae`

![Time per element over shapes](gae.png)"""


def write_report(folder: Path, rows: Sequence[Row]) -> Path:
    """Write gae.csv, gae.png and gae.md, and return the last."""
    parts = {row.part: [r for r in rows if r.part == row.part] for row in rows}
    function, module = parts[gae_function.PART], parts[gae_module.MODULE]
    write_csv(folder / "gae.csv", rows)
    panels = {"the function": function, "the module, values in the batch": module}
    bounds = (COPY, gae_module.BARE)
    draw(folder / "gae.png", panels, bounds, "GAE, float32, one thread")
    sections = [HEAD, _function(function), _module(module), _critic(parts[gae_module.CRITIC])]
    if compiled := parts.get(gae_compile.PART):
        sections.append(_compile(compiled))
    sections.append(f"{machine()}\n{versions(*PEERS)}\n")
    (folder / "gae.md").write_text("\n\n".join(sections))
    return folder / "gae.md"


def _function(rows: Sequence[Row]) -> str:
    ours = [row for row in rows if row.contender.startswith("ppokit")]
    about = "\n".join(f"- **{name}**: {who.about}." for name, who in contenders().items())
    return f"""## The function

Microseconds a call:

{grid(rows, "median_us", ",.1f")}

How many times as long the fastest of the others takes; above 1, ppokit is faster:

{grid(ours, BEST, ratio)}

Times the copy. It is the bound: GAE reads 14 bytes an element and writes 8.

{grid(rows, "this_over_bound", ratio)}

{_memory(rows)}Largest error of the advantage against the same in float64:

{grid(rows, "max_error", ".1e")}

{about}

Stable-Baselines3 and skrl take no value of the observation after a truncation: it is in their
reward."""


def _memory(rows: Sequence[Row]) -> str:
    table = grid(rows, "extra_mib", ",.1f")
    if table.count("\n") < 2:
        return ""
    return f"""MiB at the peak of a call, beyond its results. Small shapes are left out: the system
counts pages to 0.2 MiB.

{table}

"""


def _module(rows: Sequence[Row]) -> str:
    ratios = {"over get and set": "this_over_bound", "torchrl's best over it": BEST}
    return f"""## The module, values in the batch

Microseconds a call. "Get and set" reads the five inputs from the TensorDict and writes the two
outputs, and computes nothing.

{grid(rows, "median_us", ",.1f")}

{_ratios(rows, ratios)}"""


def _critic(rows: Sequence[Row]) -> str:
    ratios = {"over one forward": "this_over_bound", "torchrl's best over it": BEST}
    return f"""## The module, with a critic

Milliseconds a call. The critic has {gae_module.OBSERVATIONS} inputs and three layers of 256. One
forward values the batch's observations once. torchrl's GAE is as it comes, with `shifted=False`.

{grid(rows, "median_ms", ",.2f")}

{_ratios(rows, ratios)}"""


def _ratios(rows: Sequence[Row], fields: dict[str, str]) -> str:
    ours = [row for row in rows if row.contender == gae_module.OURS]
    lines = [[head, *(ratio(getattr(row, name)) for row in ours)] for head, name in fields.items()]
    return markdown([f"`{gae_module.OURS}`", *(shape_name(row.shape) for row in ours)], lines)


def _compile(rows: Sequence[Row]) -> str:
    lines = [[row.contender, f"{row.median_us / 1e6:.1f}", f"{row.max_error:.1e}"] for row in rows]
    return f"""## Compiling

`torch.compile(fullgraph=True)` of `ppokit.GAE` with that critic, {gae_compile.BATCH} rows, to
the end of the first call. Each in a process of its own, with an empty cache.

{markdown(["", "seconds", "largest difference from eager"], lines)}"""
