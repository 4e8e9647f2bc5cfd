"""The rows of the loss benchmark, and what it found as text and as a figure."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from tensordict import TensorDict
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.cpp_builder import get_cpp_compiler

from tests.benchmarks.figures import OURS, plt
from tests.benchmarks.loss_contenders import (
    CLIP,
    ENTROPY,
    LOSSES,
    NETWORKS,
    OBSERVATIONS,
    SETTINGS,
    TORCHRL,
    Contender,
    Model,
    Setting,
    contenders,
    minibatch,
    networks_alone,
)
from tests.benchmarks.report import machine
from tests.benchmarks.tables import Row, compare, markdown, write_csv
from tests.benchmarks.timing import interleave

SMALL, MIDDLE, LARGE = 64, 4096, 65_536
TOLERANCE = 1e-5  # of the losses and of their gradients, all as with coefficients of 1
WEIGHTS = {name: 1 / ENTROPY if name == "loss_entropy" else 1.0 for name in LOSSES}
MOST = 400  # samples
SAMPLE = 2e-2  # seconds: an update calls its loss many times in a row, and so does a sample
PEERS = {  # of the others, with their colours
    "plain loss": "#ff7f0e",
    "plain loss, compiled": "#ffbb78",
    "plain loss, C++ wrapper": "#bcbd22",
    TORCHRL: "#d62728",
    "torchrl, critic's head": "#8c564b",
    "torchrl, compiled": "#ff9896",
}


@dataclass(frozen=True)
class Stage:
    """What is timed in one go."""

    setting: Setting
    frames: int
    seconds: float
    compiled: bool = False


STAGES = (
    *(Stage(setting, SMALL, 15.0, compiled=True) for setting in SETTINGS),
    Stage(SETTINGS[0], MIDDLE, 40.0, compiled=True),
    *(Stage(setting, MIDDLE, 25.0) for setting in SETTINGS[1:]),
    Stage(SETTINGS[0], LARGE, 120.0),
)
QUICK_STAGES = tuple(Stage(setting, SMALL, 1.0) for setting in SETTINGS[3:])


@dataclass
class LossRow(Row):
    """A row with how many graphs the loss was compiled to. ``part`` is the setting."""

    graphs: int | None = None


def rows(stage: Stage) -> list[LossRow]:
    """Return the rows of a stage."""
    torch._dynamo.reset()  # else a second size of minibatch compiles for all sizes
    model = Model(stage.setting)
    batch = minibatch(model, stage.frames)
    everyone = contenders(model, compiled=stage.compiled)
    checked = check(everyone, model, batch)
    calls = {NETWORKS: networks_alone(model, batch)}
    calls |= {name: who.step(model.parameters(), batch) for name, who in everyone.items()}
    with torch._dynamo.config.patch(error_on_recompile=True):
        timings = interleave(calls, seconds=stage.seconds, most=MOST, sample=SAMPLE)
    found = []
    for name, timing in timings.items():
        row = LossRow.of(stage.setting.name, name, (stage.frames, 1), timing)
        assert isinstance(row, LossRow)
        error, graphs = checked.get(name, (None, None))
        found.append(replace(row, max_error=error, graphs=graphs))
    compare(found, peers=PEERS, bound=NETWORKS)
    return found


def check(
    everyone: Mapping[str, Contender], model: Model, batch: TensorDict
) -> dict[str, tuple[float, int | None]]:
    """Return how far each one's losses are from torchrl's, and its graphs; compiles what is to be.

    Losses and gradients must be the same. Compiled code draws other random numbers: of it, a
    sampled entropy is not compared.
    """
    found: dict[str, tuple[float, int | None]] = {}
    for name, who in everyone.items():
        drawn = who.compiled and not model.setting.discrete
        names = [loss for loss in LOSSES if not (drawn and loss == "loss_entropy")]
        truth, true_gradients = _results(everyone[TORCHRL], model, batch, names)
        counters.clear()
        losses, gradients = _results(who, model, batch, names)
        graphs = counters["stats"]["unique_graphs"] if who.compiled else None
        error = max(WEIGHTS[loss] * abs(losses[loss] - truth[loss]) for loss in names)
        of_gradient = max(
            (a - b).abs().max().item() for a, b in zip(gradients, true_gradients, strict=True)
        )
        if not (error < TOLERANCE and of_gradient < TOLERANCE):
            raise RuntimeError(
                f"{name} is {error:.1e} from torchrl's losses and {of_gradient:.1e} from their "
                f"gradients, in {model.setting.name} with {len(batch)} frames."
            )
        if losses.get("dual_clip_fraction"):
            raise RuntimeError(f"The dual clip of {name} binds, which torchrl's loss lacks.")
        found[name] = error, graphs
    return found


def _results(
    who: Contender, model: Model, batch: TensorDict, names: Iterable[str]
) -> tuple[dict[str, float], list[Tensor]]:
    """Return all that a loss returns, and the gradient of the named losses together."""
    parameters = model.parameters()
    for parameter in parameters:
        parameter.grad = None
    torch.manual_seed(0)
    out = who.loss(batch)
    sum(WEIGHTS[name] * out[name] for name in names).backward()
    gradients = []
    for parameter in parameters:
        assert parameter.grad is not None
        gradients.append(parameter.grad)
    return {name: value.mean().item() for name, value in out.items()}, gradients


# -- the report --------------------------------------------------------------------


def write_report(folder: Path, rows: Sequence[LossRow]) -> Path:
    """Write loss.csv, loss.png and loss.md, and return the last."""
    write_csv(folder / "loss.csv", rows)
    draw(folder / "loss.png", [row for row in rows if row.batch == SMALL])
    sizes = dict.fromkeys(row.batch for row in rows)
    text = f"""# PPO loss: forward and backward

Time of the PPO loss and its gradients, as a multiple of the networks alone; float32, one thread.

![The multiple at {SMALL} frames](loss.png)

{"".join(_section(rows, frames) for frames in sizes)}Microseconds a call:

{_microseconds(rows)}

{_about(rows)}

All take the same networks and the same minibatch: {OBSERVATIONS} observations, and for actor and
critic the layers that the column names, each its own or, where it says so, shared. All return the
same three losses, which are summed and run backward, after the gradients are set to None: clip
{CLIP:g}, smooth-L1 critic, and entropy, which for tanh-normal is sampled. Before the clock starts
they must agree on losses and gradients to {TOLERANCE:g}; a sampled entropy is not compared where
it is compiled, for compiled code draws other numbers. The networks alone are not compiled, those
within a compiled loss are: such a loss can take less. The contenders take turns, one sample of
about 20 ms or more each a round, in an order drawn anew; figures are medians over the rounds.
`loss.csv` has the quartiles, and how far the losses are from torchrl's. The allocator keeps what is
freed, so that no one pays for page faults. `python -m tests.benchmarks.loss`

{machine()}
{_compiler(rows)}"""
    (folder / "loss.md").write_text(text)
    return folder / "loss.md"


def _section(rows: Sequence[LossRow], frames: int) -> str:
    own = [row for row in rows if row.batch == frames and row.contender != NETWORKS]
    lines = {name: name for name in _names(own)}
    cells = {(row.contender, row.part): f"{row.this_over_bound:.2f}" for row in own}
    table = _table(lines, _parts(own), cells)
    return f"Minibatches of {frames:,} frames, multiple of the networks alone:\n\n{table}\n\n"


def _microseconds(rows: Sequence[LossRow]) -> str:
    own = [row for row in rows if row.contender in (NETWORKS, "ppokit")]
    keys = dict.fromkeys((row.batch, row.contender) for row in own)
    lines = {key: f"{key[1]}, {key[0]:,} frames" for key in keys}
    cells = {((row.batch, row.contender), row.part): f"{row.median_us:,.0f}" for row in own}
    return _table(lines, _parts(own), cells)


def _table(
    lines: Mapping[Any, str], columns: Sequence[str], cells: Mapping[tuple[Any, str], str]
) -> str:
    body = [
        [text, *(cells.get((key, column), "") for column in columns)] for key, text in lines.items()
    ]
    return markdown(["", *columns], body)


def _parts(rows: Sequence[LossRow]) -> list[str]:
    return list(dict.fromkeys(row.part for row in rows))


def _names(rows: Sequence[LossRow]) -> list[str]:
    """Return the contenders in the order in which they are made, without the networks alone."""
    there = {row.contender for row in rows}
    return [name for name in contenders(Model(SETTINGS[-1]), compiled=True) if name in there]


def _about(rows: Sequence[LossRow]) -> str:
    everyone = contenders(Model(SETTINGS[-1]), compiled=True)
    lines = [
        f"- **{NETWORKS}**: both networks forward, and backward from gradients made ready before."
    ]
    for name in _names(rows):
        graphs = {row.graphs for row in rows if row.contender == name and row.graphs}
        counted = " and ".join(map(str, sorted(graphs)))
        about = everyone[name].about + (f"; graphs: {counted}" if graphs else "")
        lines.append(f"- **{name}**: {about}.")
    return "\n".join(lines)


def _compiler(rows: Sequence[LossRow]) -> str:
    """One sentence on what compiled the generated code, if any was."""
    if not any(row.graphs for row in rows):
        return ""
    printed = subprocess.check_output([get_cpp_compiler(), "--version"], text=True)
    return f"`torch.compile` took {printed.splitlines()[0]}.\n"


def draw(path: Path, rows: Sequence[LossRow]) -> None:
    """Draw a group of bars for each setting; ppokit's are blue."""
    parts, names = _parts(rows), _names(rows)
    width = 0.3  # of a bar
    figure, axis = plt.subplots(figsize=(15, 6), layout="constrained")
    colours = dict(zip([n for n in names if n.startswith("ppokit")], OURS, strict=False)) | PEERS
    middles, left = [], 0.0
    for part in parts:
        own = {row.contender: row for row in rows if row.part == part}
        there = [name for name in names if name in own]
        for name in there:
            height = own[name].this_over_bound or 0
            bar = axis.bar(left, height, width, color=colours[name])
            (text,) = axis.bar_label(bar, [f"{height:.2f}"], fontsize=8, padding=1)
            text.set_path_effects([withStroke(linewidth=2.5, foreground="white")])
            left += width
        middles.append(left - width * (len(there) + 1) / 2)
        left += 2 * width
    networks = axis.axhline(1, color="black", ls="--", lw=1.2, label=NETWORKS)
    patches = [Patch(color=colours[name], label=name) for name in names]
    axis.set_xticks(middles, parts)
    axis.set_xlim(-width, left - 2 * width)
    axis.set_ylabel("time over networks alone (median)")
    axis.set_title(f"PPO loss, forward and backward, {SMALL} frames, float32, one thread")
    axis.grid(alpha=0.3, axis="y")
    axis.set_axisbelow(True)
    axis.legend(
        handles=[*patches, networks], ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.08)
    )
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)
