"""GAE of ppokit and of other libraries: the function and the module. It takes five minutes.

The data are converted to each library's layout before the clock starts. The packages of the extra
``bench`` are needed; with ``--quick``, those that are not installed are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.modules import ValueOperator
from torchrl.objectives.value import GAE as TorchRLGAE  # noqa: N811
from torchrl.objectives.value import functional as torchrl_functional

import ppokit
from ppokit import functional, kernels
from tests.benchmarks import tables
from tests.benchmarks.data import (
    GAMMA,
    LMBDA,
    QUICK_SHAPES,
    SHAPES,
    Data,
    check_advantage,
    reference_advantage,
)
from tests.benchmarks.figures import draw_shapes
from tests.benchmarks.networks import mlp
from tests.benchmarks.report import Benchmark
from tests.benchmarks.timing import Call

CRITIC_SHAPES = ((1, 1000), (8, 2048), (64, 128), (4096, 32))
OBSERVATIONS = 11
FUNCTION, MODULE, CRITIC = "function", "module", "critic"
OURS, TORCHRL = "ppokit.GAE", ("torchrl GAE, loop", "torchrl GAE, vectorised")
BARE, FORWARD = "get and set", "one forward of the critic"
COPY = "copy of 22 bytes an element"
KERNEL = "Tianshou, bare kernel"  # no peer: it does less
REQUIRED = ("stable_baselines3", "tianshou")
Prepared = tuple[Call, Callable[[Any], Tensor] | None]
"""The call, and the function that reads the advantage ``[B, T]`` from its result."""


def contenders() -> dict[str, tuple[str, Callable[[Data], Prepared]]]:
    """Return the description of each contender, and the function that prepares its call."""
    module = "torchrl.objectives.value.functional"
    loop, vectorised = "generalized_advantage_estimate", "vec_generalized_advantage_estimate"
    found: dict[str, tuple[str, Callable[[Data], Prepared]]] = {}
    for name in kernels.available():
        about = f"`ppokit.functional.gae`, the kernel {name!r}"
        found[f"ppokit, {name}"] = about, partial(_functional, partial(kernels.use, name))
    found["torchrl, loop"] = f"`{module}.{loop}`", partial(_torchrl, loop)
    found["torchrl, vectorised"] = f"`{module}.{vectorised}`", partial(_torchrl, vectorised)
    if find_spec("stable_baselines3"):
        about = "`RolloutBuffer.compute_returns_and_advantage`, numpy, `[T, B]`; the values after "
        about += "truncations are added to the rewards before the clock starts"
        found["Stable-Baselines3"] = about, _stable_baselines3
    if find_spec("tianshou"):
        kernel = "`tianshou.algorithm.algorithm_base._gae`, numba, the rows laid end to end"
        about = f"{kernel}, the mask of next values, the ends of episodes and rows, and the returns"
        for name, dtype in (("", torch.float64), (", float32 rewards", torch.float32)):
            found[f"Tianshou{name}"] = about, partial(_tianshou, dtype, False)
        about = f"{kernel}, and the returns; mask and ends are made before the clock starts"
        found[KERNEL] = about, partial(_tianshou, torch.float64, True)
    about = (
        "its formula as a loop in torch over the steps of `[T, B]`; masks are made before the clock"
    )
    found["rl8's rule"] = about, _rl8
    found[COPY] = "`copy_` of 11 bytes an element between two buffers: the bound", _copy
    return found


def _first(result: tuple[Tensor, Tensor]) -> Tensor:
    return result[0].squeeze(-1)


def _functional(within: Any, data: Data) -> Prepared:
    arguments = (data.reward, data.value, data.next_value, data.done, data.terminated)
    return Call(lambda: functional.gae(*arguments, gamma=GAMMA, lmbda=LMBDA), within), _first


def _torchrl(name: str, data: Data) -> Prepared:
    arguments = (data.value, data.next_value, data.reward, data.done, data.terminated)
    function = getattr(torchrl_functional, name)
    return Call(lambda: function(GAMMA, LMBDA, *arguments)), _first


def _time_major(x: Tensor) -> Tensor:
    return x.squeeze(-1).mT.contiguous()


def _stable_baselines3(data: Data) -> Prepared:
    batch, steps, _ = data.reward.shape
    space = gymnasium.spaces.Box(-1, 1, (1,))
    buffer = import_module("stable_baselines3.common.buffers").RolloutBuffer(
        steps, space, space, "cpu", gae_lambda=LMBDA, gamma=GAMMA, n_envs=batch
    )
    done, truncated = _time_major(data.done).numpy(), data.done & ~data.terminated
    bootstrap = torch.where(truncated, GAMMA * data.next_value, 0)  # which it adds to the reward
    buffer.rewards = _time_major(data.reward + bootstrap).numpy()
    buffer.values = _time_major(data.value).numpy()
    buffer.episode_starts[1:] = done[:-1]
    last_values, last_done = data.next_value[:, -1], done[-1]

    def run() -> tuple[np.ndarray, np.ndarray]:
        buffer.compute_returns_and_advantage(last_values, last_done)
        return buffer.advantages, buffer.returns

    return Call(run), lambda result: torch.from_numpy(result[0]).mT


def _tianshou(reward_dtype: torch.dtype, bare: bool, data: Data) -> Prepared:
    """As ``compute_episodic_return`` does it. Its buffers hold rewards in float64."""
    jitted = import_module("tianshou.algorithm.algorithm_base")._gae
    steps, reward = data.reward.shape[1], data.reward.to(reward_dtype).flatten().numpy()
    inputs = (data.value, data.next_value, data.done, data.terminated)
    value, next_value, done, terminated = (x.flatten().numpy() for x in inputs)

    def mask_and_ends() -> tuple[np.ndarray, np.ndarray]:
        end = done | terminated
        end[steps - 1 :: steps] = True
        return next_value * ~terminated, end

    before = mask_and_ends() if bare else None

    def run() -> tuple[np.ndarray, np.ndarray]:
        masked, end = before or mask_and_ends()
        advantage = jitted(value, masked, reward, end, GAMMA, LMBDA)
        return advantage, advantage + value

    return Call(run), lambda result: torch.from_numpy(result[0])


def _rl8(data: Data) -> Prepared:
    reward, value, next_value = map(_time_major, (data.reward, data.value, data.next_value))
    bootstraps, goes_on = (1 - _time_major(x).float() for x in (data.terminated, data.done))

    def run() -> tuple[Tensor, Tensor]:
        advantage = torch.empty_like(reward)
        following = torch.zeros_like(reward[0])
        for t in reversed(range(reward.shape[0])):
            delta = reward[t] + GAMMA * next_value[t] * bootstraps[t] - value[t]
            following = delta + GAMMA * LMBDA * goes_on[t] * following
            advantage[t] = following
        return advantage, advantage + value

    return Call(run), lambda result: result[0].mT


def _copy(data: Data) -> Prepared:
    source = torch.zeros(11 * data.reward.numel(), dtype=torch.uint8, device=data.reward.device)
    target = torch.ones_like(source)
    return Call(lambda: target.copy_(source)), None


def function_rows(shape: tables.Shape, seconds: float) -> list[tables.Row]:
    data = Data.draw(*shape)
    found = {name: prepare(data) for name, (_, prepare) in contenders().items()}
    truth, errors = reference_advantage(data), {}
    for name, (call, read) in found.items():
        if read is not None:
            with call.within():
                errors[name] = check_advantage(name, read(call.run()).reshape(shape), truth)
    peers = [name for name in errors if not name.startswith("ppokit") and name != KERNEL]
    options = {"peers": peers, "bound": COPY, "errors": errors}
    calls = {name: call for name, (call, _) in found.items()}
    rows = tables.timed(FUNCTION, shape, calls, seconds=seconds, **options)
    kernel = {row.contender: row.median_us for row in rows}.get(KERNEL)
    for row in rows:
        row.more["bare_kernel_over_this"] = kernel and kernel / row.median_us
    return rows


def module_rows(shape: tables.Shape, seconds: float) -> list[tables.Row]:
    data = Data.draw(*shape)
    batch = _batch(data)
    batch.set("state_value", data.value)
    batch.set(("next", "state_value"), data.next_value)
    bare = Call(partial(_get_and_set, batch.copy(), data.value))
    return _rows(MODULE, {BARE: bare}, batch, None, reference_advantage(data), seconds)


def critic_rows(shape: tables.Shape, seconds: float) -> list[tables.Row]:
    torch.manual_seed(0)
    network = ValueOperator(mlp(OBSERVATIONS, 1, (256, 256, 256)), in_keys=["observation"])
    batch, data = critic_batch(*shape, network)
    forward = Call(partial(_forward, network, batch))
    return _rows(CRITIC, {FORWARD: forward}, batch, network, reference_advantage(data), seconds)


def critic_batch(rows: int, steps: int, network: ValueOperator) -> tuple[TensorDict, Data]:
    """Return a batch of observations, and the data with the critic's values of them."""
    data = Data.draw(rows, steps)
    random = torch.Generator().manual_seed(1)
    observed = torch.randn(rows, steps + 1, OBSERVATIONS, generator=random)
    final = torch.randn(rows, steps, OBSERVATIONS, generator=random)
    following = torch.where(data.done, final, observed[:, 1:])
    batch = _batch(data)
    batch.set("observation", observed[:, :-1].clone())
    batch.set(("next", "observation"), following)
    with torch.no_grad():
        value, next_value = (network.module(x) for x in (batch["observation"], following))
    return batch, replace(data, value=value, next_value=next_value)


def _batch(data: Data) -> TensorDict:
    signals = {"reward": data.reward, "done": data.done, "terminated": data.terminated}
    return TensorDict({"next": signals}, data.reward.shape[:-1])


def _rows(
    part: str,
    bound: dict[str, Call],
    batch: TensorDict,
    network: ValueOperator | None,
    truth: Tensor,
    seconds: float,
) -> list[tables.Row]:
    discounts = {"gamma": GAMMA, "lmbda": LMBDA, "value_network": network}
    modules = {OURS: ppokit.GAE(**discounts)}
    for name, vectorized in zip(TORCHRL, (False, True), strict=True):
        modules[name] = TorchRLGAE(**discounts, vectorized=vectorized)
    calls, errors = dict(bound), {}
    for name, module in modules.items():
        own = batch.copy()  # each writes into a batch of its own
        errors[name] = check_advantage(name, module(own)["advantage"].squeeze(-1), truth)
        calls[name] = Call(partial(module, own))
    options = {"peers": TORCHRL, "bound": next(iter(bound)), "errors": errors}
    return tables.timed(part, tuple(batch.shape), calls, seconds=seconds, **options)


def _get_and_set(batch: TensorDict, result: Tensor) -> None:
    for name in ("reward", "done", "terminated", "state_value"):
        batch.get(("next", name))
    batch.get("state_value")
    batch.set("advantage", result)
    batch.set("value_target", result)


def _forward(network: ValueOperator, batch: TensorDict) -> None:
    with torch.no_grad():
        network(batch.select("observation"))


def stages(quick: bool) -> list[Callable[[], list[tables.Row]]]:
    if missing := [name for name in REQUIRED if not quick and find_spec(name) is None]:
        raise ModuleNotFoundError(
            f"{', '.join(missing)}: not installed. The table needs every library: "
            'pip install -e ".[bench]", or pass --quick.'
        )
    shapes = QUICK_SHAPES if quick else SHAPES
    critic_shapes = shapes[:1] if quick else CRITIC_SHAPES
    of_function, of_module, of_critic = (0.5, 0.3, 0.3) if quick else (16.0, 6.0, 8.0)
    return [
        *(partial(function_rows, shape, of_function) for shape in shapes),
        *(partial(module_rows, shape, of_module) for shape in shapes),
        *(partial(critic_rows, shape, of_critic) for shape in critic_shapes),
    ]


def ratios(rows: Sequence[tables.Row]) -> str:
    ours = [row for row in rows if row.contender == OURS]
    names = ("this_over_bound", "best_peer_over_this")
    return "\n\n".join(tables.pivot(ours, name, tables.ratio) for name in names)


def page(rows: Sequence[tables.Row]) -> str:
    parts = (FUNCTION, MODULE, CRITIC)
    function, module, critic = ([r for r in rows if r.part == part] for part in parts)
    ours = [row for row in function if row.contender.startswith("ppokit")]
    return f"""# GAE

Float32 tensors `[B, T, 1]`, 1% of the steps done, half of those terminated; one thread.

![Time per element over shapes](gae.png)

## The function

Microseconds a call:

{tables.pivot(function, "median_us", ",.1f")}

The time of the fastest other library as a multiple of ppokit's; above 1, ppokit is faster.
Tianshou's bare kernel does less work, and is not in this table:

{tables.pivot(ours, "best_peer_over_this", tables.ratio)}

The time of Tianshou's bare kernel, likewise:

{tables.pivot(ours, lambda row: row.more["bare_kernel_over_this"], tables.ratio)}

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

Milliseconds a call. The critic has {OBSERVATIONS} inputs and three layers of 256.
torchrl's GAE has its default, `shifted=False`.

{tables.pivot(critic, "median_ms", ",.2f")}

ppokit's module as a multiple of one forward, and the better of torchrl's as one of ppokit's:

{ratios(critic)}
"""


def main() -> None:
    bench = Benchmark("gae", packages=("stable-baselines3", "tianshou", "numba"))
    rows = bench.measure(stages(bench.quick))
    names = {"the function": FUNCTION, "the module, values in the batch": MODULE}
    groups = {name: [r for r in rows if r.part == part] for name, part in names.items()}
    draw_shapes(bench.file("png"), groups, (COPY, BARE), "GAE, float32, one thread")
    bench.write_page(page(rows))


if __name__ == "__main__":
    main()
