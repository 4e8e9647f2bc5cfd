"""ppokit on a GPU: scans, training steps, updates, memory. It takes seven minutes."""

from __future__ import annotations

import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from tests import isaac_lab
from tests.benchmarks import loss_models as models
from tests.benchmarks import memory, step
from tests.benchmarks.data import SHAPES, Data, check_advantage, reference_advantage
from tests.benchmarks.gae import COPY, contenders
from tests.benchmarks.report import Benchmark
from tests.benchmarks.tables import Row, markdown, multiples, pivot, ratio, shape_name, timed
from tests.benchmarks.timing import Call
from tests.isaac_env import CartPole

SCANS = (*SHAPES, (8_192, 2_048))
MOST_STEPS = 512  # of torchrl's loop, and of its vectorised form on many rows
GRAPH = "ppokit's loss, CUDA graph, in an update"
STEPS = (step.FLOOR, "plain torch", "plain torch, compiled", "torchrl's loss, loop")
STEPS += ("ppokit's loss, eager step", "ppokit's loss, compiled, in an update")
UPDATES = ((4_096, 24, (256,) * 3), (64, 128, (64,) * 2))
PEER = "Isaac Lab's loop, on torchrl"
ARMS = {"eager": False, "compiled": True, "graph": "cudagraphs"}


def on(device: torch.device, call: Call) -> Call:
    """Return a call that is timed until the device has finished."""
    finish = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    return replace(call, finish=finish)


def scan_rows(device: torch.device, shape: tuple[int, int], seconds: float) -> list[Row]:
    data, calls, errors = Data.draw(*shape), {}, {}
    truth = reference_advantage(data) if data.reward.numel() < 10**6 else None
    for name, (_, prepare) in contenders().items():
        if name not in (COPY, "torchrl, loop", "torchrl, vectorised") and "ppokit" not in name:
            continue  # numpy
        if name == "ppokit, native" and device.type != "cpu":
            continue
        if name.startswith("torchrl") and shape[1] > MOST_STEPS:
            continue
        call, read = prepare(data.to(device))
        if read is not None and truth is not None:
            with call.within():
                found = read(call.run()).reshape(shape).cpu()
            errors[name] = check_advantage(name, found, truth)
        calls[name] = on(device, call)
    options: Any = {"bound": COPY, "errors": errors, "seconds": seconds}
    return timed("scan", shape, calls, **options)


def step_rows(
    device: torch.device, setting: models.Setting, frames: int, seconds: float
) -> list[Row]:
    torch._dynamo.reset()

    def model() -> models.Model:
        made = models.Model(setting)
        for part in (made.body, made.policy, made.value):
            if part is not None:
                part.to(device)
        return made

    batch = models.minibatch(models.Model(setting), frames).to(device)
    makers = {name: step.CONTENDERS[name][1] for name in STEPS}
    if device.type == "cuda":
        makers[GRAPH] = step.training_step(step.OURS, in_update=True, compile="cudagraphs")
    calls = {name: on(device, make(model(), batch)) for name, make in makers.items()}
    options: Any = {"bound": step.FLOOR, "seconds": seconds, "sample": 2e-2}
    return timed(setting.name, (frames, 1), calls, **options)


@contextmanager
def counted_waits() -> Iterator[list[str]]:
    """Yield the list of the places at which the host waits for CUDA, except in a collector."""
    places: list[str] = []

    def note(message: Any, category: Any, filename: str, line: int, *_: Any) -> None:
        files = [frame.filename for frame in traceback.extract_stack()]
        is_wait = "synchronizing CUDA operation" in str(message)
        if is_wait and not any("torchrl/collectors" in file for file in files):
            places.append(f"{filename}:{line}")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode("default")


def updates(
    device: torch.device, rows: int, steps: int, hidden: Any, iterations: int
) -> list[list[str]]:
    """Return a line for each arm: milliseconds of an update, ratio, frames a second, waits."""
    cfg = isaac_lab.settings(num_steps_per_env=steps, hidden=hidden, max_iterations=iterations + 1)
    arms: dict[str, Any] = {}
    for name in (PEER, *ARMS):
        if name == "graph" and device.type != "cuda":
            continue
        env = CartPole(rows, device=str(device))
        parts = env, cfg, *isaac_lab.make_networks(env, cfg)
        if name == PEER:
            arms[name] = isaac_lab.train_with_torchrl(*parts)
        else:
            arms[name] = isaac_lab.page_program()(*parts, compile=ARMS[name])
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    of_all: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(iterations):
        for name, loop in arms.items():
            start = time.perf_counter()
            seconds[name].append(next(loop)["seconds_updating"])
            of_all[name].append(time.perf_counter() - start)
    lines = []
    for name, loop in arms.items():
        waits = "not counted"
        if device.type == "cuda":
            with counted_waits() as places:
                next(loop)
            waits = str(len(places))
        own, of_peer = median(seconds[name]), median(seconds[PEER])
        speed = rows * steps / median(of_all[name])
        lines.append([name, f"{1e3 * own:,.1f}", f"{of_peer / own:.2f}", f"{speed:,.0f}", waits])
    return lines


def transitions(device: torch.device, envs: int, iterations: int) -> float:
    """Return transitions a second of CartPole with updates, of the whole loop."""
    cfg = isaac_lab.settings(
        num_steps_per_env=16, max_iterations=iterations, num_learning_epochs=1, desired_kl=None
    )
    env = CartPole(envs, device=str(device))
    compile = "cudagraphs" if device.type == "cuda" else True
    loop = isaac_lab.page_program()(env, cfg, *isaac_lab.make_networks(env, cfg), compile=compile)
    return median([statistics["frames_per_second"] for statistics in loop][iterations // 2 :])


def peak_memory(block: str, shape: tuple[int, int]) -> float:
    """Return the peak of a block beyond the batch, as a multiple of the batch, on CUDA."""
    actor, critic, batch = memory.make_parts(*shape)
    work = memory.BLOCKS[block]((actor.cuda(), critic.cuda(), batch.cuda()))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    return (torch.cuda.max_memory_allocated() - before) / batch.bytes()


Part = tuple[list[Row], str]  # rows for the CSV file, and text for the page


def scans(device: torch.device, *, quick: bool) -> Part:
    shapes = SCANS[3:4] if quick else SCANS
    rows = [row for shape in shapes for row in scan_rows(device, shape, 1 if quick else 6)]
    return (
        rows,
        f"""## GAE

Microseconds a call; then multiples of a copy of as many bytes, which is the bound. Convolutions,
of which torchrl's vectorised GAE is one, are computed in float32 here, not in TF32, the default: it
would be off by 0.006.

{pivot(rows, "median_us", ",.1f")}

{pivot(rows, "this_over_bound", ratio)}
""",
    )


def steps(device: torch.device, *, quick: bool) -> Part:
    settings = [(setting, 64) for setting in models.SETTINGS[:2]] + [(models.SETTINGS[0], 24_576)]
    rows = [
        row
        for setting, frames in (settings[1:2] if quick else settings)
        for row in step_rows(device, setting, frames, 5 if quick else 20)
    ]
    return (
        rows,
        f"""## One optimization step

{multiples(rows, step.FLOOR, "floor")}""",
    )


def loops(device: torch.device, *, quick: bool) -> Part:
    head = ["", "ms an update", "times the first row's speed", "frames/s of the loop", "waits"]
    text = ""
    for rows, length, hidden in ((8, 8, (32,)),) if quick else UPDATES:
        lines = updates(device, rows, length, hidden, 3 if quick else 15)
        text += f"""## Updates of {shape_name((rows, length))}, networks of {list(hidden)} units

The last column counts how often the host waits for the device in an iteration, outside of the
collector.

{markdown(head, lines)}

"""
    envs = 64 if quick else 65_536
    speed = transitions(device, envs, 4 if quick else 20)
    return (
        [],
        f"""{text}## CartPole on the device

{envs:,} environments, 16 steps, one epoch of 4 minibatches: {speed:,.0f} transitions a second.
""",
    )


def memory_of_blocks(device: torch.device, *, quick: bool) -> Part:
    shapes = memory.QUICK_SHAPES if quick else memory.SHAPES
    lines = [
        [block, *(f"{peak_memory(block, shape):.2f}" for shape in shapes)]
        for block in memory.BLOCKS
    ]
    return (
        [],
        f"""## Peak memory

Beyond the batch, as a multiple of the size of the batch.

{markdown(["", *map(shape_name, shapes)], lines)}
""",
    )


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("There is no CUDA device: nothing was measured, and nothing is written.")
    bench, texts = Benchmark("device"), ["# ppokit on a GPU\n"]

    # torchrl's vectorised GAE is a convolution: in TF32, cuDNN's default, it is off by 0.006.
    torch.backends.cudnn.allow_tf32 = False

    def stage(part: Any) -> list[Row]:
        rows, text = part(torch.device("cuda"), quick=bench.quick)
        texts.append(text)
        tqdm.write(text)
        return rows

    bench.measure(partial(stage, part) for part in (scans, steps, loops, memory_of_blocks))
    bench.write_page("\n".join(texts))


if __name__ == "__main__":
    main()
