"""One optimization step against the eager floor: networks, clipping and fused Adam alone.

It takes about twenty minutes.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torchrl.objectives import ClipPPOLoss
from tqdm import tqdm

from ppokit import DualClipPPOLoss, TrainingStep
from tests.benchmarks import loss_models as models
from tests.benchmarks.figures import draw_bars
from tests.benchmarks.report import Benchmark
from tests.benchmarks.runs import run_function
from tests.benchmarks.tables import Row, bullets, markdown, multiples, multiples_of, timed
from tests.benchmarks.timing import Call

FLOOR, OURS, TORCHRL = "eager floor", "ppokit's loss", "torchrl's loss"
SMALL, LARGE = 64, 4096  # frames
LARGEST, RATE = 0.5, 3e-4
CAPTURED = ("2x64, tanh-normal", "3x256, tanh-normal")
OPTIONS: dict[str, Any] = {"clip_epsilon": models.CLIP, "entropy_coeff": models.ENTROPY}

Make = Callable[[models.Model, TensorDict], Call]


def ppokit_loss(model: models.Model) -> DualClipPPOLoss:
    actor, _, head = model.modules()
    return DualClipPPOLoss(actor, head, dual_clip=models.DUAL_CLIP, **OPTIONS)


def torchrl_loss(model: models.Model) -> ClipPPOLoss:
    actor, _, head = model.modules()
    return ClipPPOLoss(actor, head, functional=False, **OPTIONS)


def adam_step(parameters: list[nn.Parameter], backward: Callable[[], object]) -> Call:
    optimizer = torch.optim.Adam(parameters, lr=RATE, fused=True)

    def run() -> None:
        backward()
        nn.utils.clip_grad_norm_(parameters, LARGEST)
        optimizer.step()
        optimizer.zero_grad()

    return Call(run)


def loop(make: Callable[[models.Model], Any]) -> Make:

    def call(model: models.Model, batch: TensorDict) -> Call:
        loss = make(model)

        def backward() -> None:
            out = loss(batch)
            total: Tensor = out[models.LOSSES[0]] + out[models.LOSSES[1]] + out[models.LOSSES[2]]
            total.backward()

        return adam_step(model.parameters(), backward)

    return call


def make_step(
    model: models.Model, loss: str = OURS, *, outside: bool = False, **options: Any
) -> Any:
    module: Any = ppokit_loss(model) if loss == OURS else torchrl_loss(model)
    optimizer = torch.optim.Adam(module.parameters(), lr=RATE, fused=True)
    if outside:
        optimizer.register_step_post_hook(lambda *_: None)
    return TrainingStep(module, optimizer, max_grad_norm=LARGEST, **options)


def training_step(loss: str, *, in_update: bool = False, **options: Any) -> Make:
    """Return a contender: a loss in a ``TrainingStep``, captured before it is timed."""

    def call(model: models.Model, batch: TensorDict) -> Call:
        step, frames = make_step(model, loss, **options), float(len(batch))
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="The training step runs eagerly")
            for _ in range(3):
                step(batch)
        if not in_update:
            return Call(lambda: step(batch))

        def prepare(_: int) -> None:
            step.begin()
            step.train_on(batch, frames)  # checks the guards

        return Call(lambda: step.train_on(batch, frames), prepare=prepare)

    return call


PATHS: dict[str, tuple[str, dict[str, Any]]] = {
    "eager step": ("in an eager `TrainingStep`", {}),
    "compiled, called": ("in a compiled step that is called alone, with guards", {"compile": True}),
    "compiled, in an update": (
        "in a compiled step as `PPOUpdate` calls it, without guards",
        {"compile": True, "in_update": True},
    ),
    "compiled, Adam outside": (
        "as in an update, with a hook on Adam, which keeps Adam out of the graph",
        {"compile": True, "in_update": True, "outside": True},
    ),
}
CONTENDERS: dict[str, tuple[str, Make]] = {
    FLOOR: (
        "networks forward, backward from given gradients, `clip_grad_norm_`, fused Adam",
        lambda model, batch: adam_step(model.parameters(), models.networks_alone(model, batch).run),
    ),
    "plain torch": (
        "CleanRL's loss on tensors; its norm and fused Adam as above",
        loop(models.PlainLoss),
    ),
    "plain torch, compiled": (
        "the same, its loss under `torch.compile`",
        loop(lambda model: torch.compile(models.PlainLoss(model), fullgraph=True)),
    ),
    "torchrl's loss, loop": (
        "`ClipPPOLoss(functional=False)` in the eight lines of a loop",
        loop(torchrl_loss),
    ),
    **{
        f"{loss}, {path}": (f"{name} {about}", training_step(loss, **options))
        for loss, name in ((OURS, "`DualClipPPOLoss`"), (TORCHRL, "`ClipPPOLoss`"))
        for path, (about, options) in PATHS.items()
    },
}
"""The description of each contender, and a function that makes its step."""


def stages(quick: bool) -> list[tuple[models.Setting, int, float]]:
    if quick:
        return [(models.SETTINGS[3], SMALL, 2.0)]
    small = [(setting, SMALL, 60.0) for setting in (*models.SETTINGS, *models.NORMAL)]
    return small + [(setting, LARGE, 90.0) for setting in models.SETTINGS[:2]]


def check_losses(model: models.Model, batch: TensorDict) -> None:
    """Raise an AssertionError unless the contenders compute the same losses."""
    expected, *found = (
        make(model)(batch) for make in (torchrl_loss, ppokit_loss, models.PlainLoss)
    )
    for losses in found:
        for name in ("loss_objective", "loss_critic"):
            torch.testing.assert_close(losses[name], expected[name], rtol=1e-5, atol=1e-5)


def stage_rows(setting: models.Setting, frames: int, seconds: float) -> list[Row]:
    torch._dynamo.reset()  # otherwise a second minibatch size compiles for dynamic shapes
    model = models.Model(setting)
    batch = models.minibatch(model, frames)
    check_losses(model, batch)
    calls = {name: make(models.Model(setting), batch) for name, (_, make) in CONTENDERS.items()}
    options: Any = {"seconds": seconds, "most": 400, "sample": 2e-2}
    return timed(setting.name, (frames, 1), calls, bound=FLOOR, **options)


def seconds_to_capture(name: str) -> float:
    """Return the seconds to capture the graphs of a full and of a smaller minibatch."""
    model = models.Model(next(setting for setting in models.SETTINGS if setting.name == name))
    batch, step = models.minibatch(model, SMALL), make_step(model, compile=True)
    step(batch.clone())  # eager: it makes Adam's state
    start = time.perf_counter()
    for part in (batch, batch[:32].clone()):
        step(part)
    return time.perf_counter() - start


def cold_and_warm(name: str) -> list[float]:
    function, arguments = "step.seconds_to_capture", {"name": name}
    with tempfile.TemporaryDirectory() as folder:
        return [run_function(function, arguments, TORCHINDUCTOR_CACHE_DIR=folder) for _ in range(2)]


def page(rows: Sequence[Row], captures: dict[str, list[float]]) -> str:
    capture = ""
    if captures:
        lines = [[name, f"{cold:.1f}", f"{warm:.1f}"] for name, (cold, warm) in captures.items()]
        table = markdown(["", "empty cache", "a later process"], lines)
        capture = f"Seconds to capture two graphs, of {SMALL} and of 32 frames:\n\n{table}\n\n"
    floors = [row for row in rows if row.contender == FLOOR]
    lines = [[row.part, f"{row.batch:,}", f"{row.median_us:,.0f}"] for row in floors]
    return f"""# One optimization step

Time of one step (losses, gradients, clipping, Adam) as a multiple of the eager floor of the same
run; float32, one thread.

![The multiple at {SMALL} frames](step.png)

{multiples(rows, FLOOR, "floor")}Microseconds of the floor:

{markdown(["", "frames", "microseconds"], lines)}

{capture}{bullets({name: about for name, (about, _) in CONTENDERS.items()})}

All take the same networks and the same minibatch, make the same three losses, clip the norm of the
gradients and step Adam. Capturing is not timed.
"""


def main() -> None:
    bench = Benchmark("step")
    names = tqdm([] if bench.quick else CAPTURED, desc="capture", unit="setting")
    captures = {name: cold_and_warm(name) for name in names}
    rows = bench.measure(partial(stage_rows, *stage) for stage in stages(bench.quick))
    small = multiples_of(row for row in rows if row.batch == SMALL)
    label = "time over the eager floor (median)"
    draw_bars(bench.file("png"), small, label=label, style=".2f")
    bench.write_page(page(rows, captures))


if __name__ == "__main__":
    main()
