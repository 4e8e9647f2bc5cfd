"""The PPO loss, forward and backward, by ppokit, by TorchRL and written out on tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.objectives import ClipPPOLoss

from ppokit import DualClipPPOLoss
from tests.benchmarks import loss_models as models
from tests.benchmarks.figures import draw_multiples
from tests.benchmarks.report import Benchmark
from tests.benchmarks.tables import Row, bullets, multiples, pivot, timed
from tests.benchmarks.timing import Call

NETWORKS, TORCHRL, HEAD = "networks alone", "torchrl", "torchrl, critic's head"
SMALL, MIDDLE, LARGE = 64, 4096, 65_536  # frames
TOLERANCE = 1e-5  # of the losses and of their gradients, all with coefficients of 1
WEIGHTS = {name: 1 / models.ENTROPY if name == "loss_entropy" else 1.0 for name in models.LOSSES}
OPTIONS: dict[str, Any] = {"clip_epsilon": models.CLIP, "entropy_coeff": models.ENTROPY}


def ours(model: models.Model, **options: Any) -> DualClipPPOLoss:
    actor, _, head = model.modules()
    return DualClipPPOLoss(actor, head, dual_clip=models.DUAL_CLIP, **OPTIONS, **options)


def torchrl(model: models.Model, *, whole: bool = True) -> ClipPPOLoss:
    actor, critic, head = model.modules()
    return ClipPPOLoss(actor, critic if whole else head, functional=False, **OPTIONS)


def compiled_plain(model: models.Model, **options: Any) -> Any:
    return torch.compile(models.PlainLoss(model), fullgraph=True, **options)


@dataclass(frozen=True)
class Contender:
    """The description of a loss, and a function that makes it."""

    about: str
    make: Callable[[models.Model], Any]
    compiled: bool = False


CONTENDERS = {
    "ppokit": Contender("`ppokit.DualClipPPOLoss`, given the critic's head", ours),
    "ppokit, compiled": Contender(
        "the same under `torch.compile(loss, fullgraph=True)`, backward outside it",
        lambda model: torch.compile(ours(model), fullgraph=True),
        compiled=True,
    ),
    "ppokit, functional=True": Contender(
        "torchrl's default for losses", lambda model: ours(model, functional=True)
    ),
    "plain loss": Contender(
        "CleanRL's `ppo_continuous_action.py` loss on tensors, with the distribution and the "
        "critic loss of the others and CleanRL's three diagnostics",
        models.PlainLoss,
    ),
    "plain loss, compiled": Contender(
        "the same under `torch.compile(fullgraph=True)`, backward outside it",
        compiled_plain,
        compiled=True,
    ),
    "plain loss, C++ wrapper": Contender(
        "the same with Inductor's C++ wrapper, which `TrainingStep(compile=True)` turns on",
        lambda model: compiled_plain(model, options={"cpp_wrapper": True}),
        compiled=True,
    ),
    TORCHRL: Contender(
        "`torchrl.objectives.ClipPPOLoss`, `functional=False`; it has no dual clip", torchrl
    ),
    HEAD: Contender(
        "the same, given the critic's last layer, which reads the output of the actor's encoder",
        lambda model: torchrl(model, whole=False),
    ),
    "torchrl, compiled": Contender(
        "`ClipPPOLoss` with the whole critic under `torch.compile`, with graph breaks",
        lambda model: torch.compile(torchrl(model)),
        compiled=True,
    ),
}
PEERS = [name for name in CONTENDERS if not name.startswith("ppokit")]


def stages(quick: bool) -> list[Callable[[], list[Row]]]:
    settings = models.SETTINGS
    if quick:
        return [partial(stage_rows, setting, SMALL, 1.0) for setting in settings[3:]]
    return [
        *(partial(stage_rows, setting, SMALL, 15.0, compiled=True) for setting in settings),
        partial(stage_rows, settings[0], MIDDLE, 40.0, compiled=True),
        *(partial(stage_rows, setting, MIDDLE, 25.0) for setting in settings[1:]),
        partial(stage_rows, settings[0], LARGE, 120.0),
    ]


def stage_rows(
    setting: models.Setting, frames: int, seconds: float, compiled: bool = False
) -> list[Row]:
    """Return the rows of a stage. ``part`` is the setting."""
    torch._dynamo.reset()  # otherwise a second minibatch size compiles for dynamic shapes
    model = models.Model(setting)
    batch, parameters = models.minibatch(model, frames), model.parameters()
    losses = {
        name: who.make(model)
        for name, who in CONTENDERS.items()
        if compiled >= who.compiled and (setting.shared or name != HEAD)
    }
    errors = {name: check(name, losses, model, batch) for name in losses}

    def call(loss: Any) -> Call:
        def run() -> None:
            for parameter in parameters:
                parameter.grad = None
            out = loss(batch)
            sum(out[name] for name in models.LOSSES).backward()

        return Call(run)

    calls = {NETWORKS: models.networks_alone(model, batch)}
    calls |= {name: call(loss) for name, loss in losses.items()}
    # A sample is longer than elsewhere, because an update calls its loss many times in a row.
    options: Any = {"seconds": seconds, "most": 400, "sample": 2e-2, "errors": errors}
    shape = frames, 1
    for run in calls.values():  # a graph is captured again where tensordict's table of classes grew
        run.run()
    with torch._dynamo.config.patch(error_on_recompile=True):
        return timed(setting.name, shape, calls, peers=PEERS, bound=NETWORKS, **options)


def check(name: str, losses: dict[str, Any], model: models.Model, batch: TensorDict) -> float:
    """Return the distance of losses and gradients from torchrl's.

    Compiled code draws other random numbers, so its sampled entropy is not compared.

    Raises:
        RuntimeError: the distance is larger than rounding explains.
    """
    drawn = CONTENDERS[name].compiled and not model.setting.discrete
    names = [loss for loss in models.LOSSES if not (drawn and loss == "loss_entropy")]
    truth, found = (numbers(losses[x], model, batch, names) for x in (TORCHRL, name))
    error = (found - truth).abs().max().item()
    if not error < TOLERANCE:
        where = f"in {model.setting.name} with {len(batch)} frames"
        raise RuntimeError(f"{name} is {error:.1e} from torchrl's losses or gradients, {where}.")
    return error


def numbers(loss: Any, model: models.Model, batch: TensorDict, names: Iterable[str]) -> Tensor:
    """Return the named losses, and the gradient of their sum, in one vector."""
    parameters = model.parameters()
    for parameter in parameters:
        parameter.grad = None
    torch.manual_seed(0)
    out = loss(batch)
    named = torch.stack([WEIGHTS[name] * out[name].mean() for name in names])
    named.sum().backward()
    gradients = [x.grad.flatten() for x in parameters if x.grad is not None]
    return torch.cat([named.detach(), *gradients])


def main() -> None:
    bench = Benchmark("loss")
    rows = bench.measure(stages(bench.quick))
    small = [row for row in rows if row.batch == SMALL]
    title = f"PPO loss, forward and backward, {SMALL} frames, float32, one thread"
    label = "time over networks alone (median)"
    draw_multiples(bench.file("png"), small, NETWORKS, title, label=label)
    about = {NETWORKS: "both networks forward, and backward from given gradients"}
    there = {row.contender for row in rows}
    about |= {name: who.about for name, who in CONTENDERS.items() if name in there}
    absolute = pivot(
        [row for row in rows if row.contender in (NETWORKS, "ppokit")],
        "median_us",
        ",.0f",
        line=lambda row: f"{row.contender}, {row.batch:,} frames",
        column=lambda row: row.part,
    )
    bench.write_page(f"""# PPO loss: forward and backward

Time of the PPO loss and its gradients, as a multiple of the networks alone; float32, one thread.

![The multiple at {SMALL} frames](loss.png)

{multiples(rows, NETWORKS, NETWORKS)}Microseconds a call:

{absolute}

{bullets(about)}

All contenders get the same minibatch and the networks that the column names, and return the same
three losses. Before the clock starts they must agree on losses and gradients to {TOLERANCE:g}; a
sampled entropy is not compared if it is compiled. The networks alone are not compiled, so a
compiled loss can take less.
""")


if __name__ == "__main__":
    main()
