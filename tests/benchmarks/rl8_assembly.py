"""Timing of ``tutorials/rl8_vectorized.py`` for :mod:`tests.benchmarks.rl8`.

``python -m tests.benchmarks.rl8_assembly JSON`` prints JSON. Arguments are ``mode`` ("speed" or
"profile"), ``num_envs``, ``horizon``, ``chunk`` (frames of a minibatch whose gradients are
accumulated, None for the whole batch), ``compile`` and ``rounds``.
"""

from __future__ import annotations

import copy
import json
import runpy
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector

from ppokit import GAE, DualClipPPOLoss
from tests.benchmarks.report import ROOT

CLIP = 5.0


def assemble(arguments: dict[str, Any]) -> dict[str, Any]:
    num_envs, horizon, chunk = (arguments[name] for name in ("num_envs", "horizon", "chunk"))
    options = ["--original", "--num-envs", num_envs, "--horizon", horizon, "--target", "inf"]
    options += ["--total-frames", num_envs * horizon]
    options += [] if chunk is None else ["--minibatch-size", chunk, "--accumulate-grads"]
    options += ["--compile"] if arguments.get("compile") else []
    with tempfile.TemporaryDirectory() as folder:
        script = str(ROOT / "tutorials" / "rl8_vectorized.py")
        sys.argv = [script, *map(str, options), "--out", f"{folder}/run"]
        return runpy.run_path(script)


def batches(names: dict[str, Any]) -> Any:
    return iter(
        Collector(
            names["env"],
            names["policy"],
            frames_per_batch=names["frames_per_batch"],
            total_frames=-1,
            auto_register_policy_transforms=False,
        )
    )


def speed(arguments: dict[str, Any]) -> dict[str, float]:
    names = assemble(arguments)
    collected, update = batches(names), names["update"]
    times: dict[str, list[float]] = {"collect": [], "step": []}
    for number in range(2 + arguments["rounds"]):
        started = time.perf_counter()
        batch = next(collected)
        between = time.perf_counter()
        update(batch)
        ended = time.perf_counter()
        if number >= 2:
            times["collect"].append(1e3 * (between - started))
            times["step"].append(1e3 * (ended - between))
    return {name: median(values) for name, values in times.items()}


class Clock:
    """Adds up the seconds of the parts of a step."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def __call__(self, part: str, call: Callable[..., Any], *args: Any) -> Any:
        started = time.perf_counter()
        result = call(*args)
        self.seconds[part] += time.perf_counter() - started
        return result


def profile(arguments: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of the parts of one update, each called by itself, and of a whole one."""
    names = assemble(arguments)
    update, gae = names["update"], names["update"].advantage
    scan = GAE(gamma=gae.gamma, lmbda=gae.lmbda, value_network=None, average_gae=True)
    networks = names["actor"].module[0].module, names["critic"].module
    loss = loss_of_outputs(update.step.loss)
    collected, seconds = next(batches(names)).clone(), defaultdict[str, list[float]](list)
    for number in range(1 + arguments["rounds"]):
        clock, batch = Clock(), collected.clone()
        clock("a whole step", update, collected.clone())
        clock("reward normalizer", update.reward_normalizer, batch)
        with torch.no_grad():
            rows = torch.cat([batch["observation"], batch["next", "observation"][:, -1:]], 1)
            for part in rows.split(gae.value_chunk_size):
                clock("GAE: its pass of the critic", networks[1], part)
            gae(batch)  # writes the values
            clock("GAE: the rest", scan, batch)
        _profile_epochs(clock, update, loss, networks, batch)
        if number:
            for name, value in clock.seconds.items():
                seconds[name].append(1e3 * value)
    return {name: median(values) for name, values in seconds.items()}


def _profile_epochs(clock: Clock, update: Any, loss: Any, networks: Any, batch: Any) -> None:
    frames = batch.select(*update.step.loss.entries(batch)).reshape(-1)
    size = update.minibatch_size or len(frames)
    parameters = list(update.step.loss.parameters())
    for _ in range(update.epochs):
        if size < len(frames):  # a minibatch of all frames is not shuffled
            order = torch.randperm(len(frames))
            frames = clock("shuffling", frames.__getitem__, order)
        for minibatch in frames.split(size):
            seen = minibatch["observation"]
            logits, value = (clock("networks, forward", each, seen) for each in networks)
            outputs = [x.detach().requires_grad_() for x in (logits, value)]
            clock("networks, backward", (logits.sum() + value.sum()).backward)
            minibatch = minibatch.clone(False).update(dict(zip(OUTPUTS, outputs, strict=True)))
            losses = clock("losses and diagnostics", loss, minibatch)
            total = losses["loss_objective"] + losses["loss_critic"]
            clock("losses and diagnostics", total.backward)
        clock("clipping and optimizer", torch.nn.utils.clip_grad_norm_, parameters, CLIP)
        clock("clipping and optimizer", update.step.optimizer.step)
        update.step.optimizer.zero_grad()


OUTPUTS = ("logits of the network", "value of the network")


def loss_of_outputs(loss: DualClipPPOLoss) -> DualClipPPOLoss:
    logits, value = OUTPUTS
    alone: Any = copy.deepcopy(loss)
    alone.actor_network.module[0] = TensorDictModule(nn.Identity(), [logits], ["logits"])
    alone.critic_network = TensorDictModule(nn.Identity(), [value], ["state_value"])
    return alone


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    given = json.loads(sys.argv[1])  # assemble() replaces sys.argv
    print(json.dumps({"speed": speed, "profile": profile}[given["mode"]](given)))
