"""The modules that compute GAE, on batches with values and with a critic."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.modules import ValueOperator
from torchrl.objectives.value import GAE as TorchRLGAE  # noqa: N811

import ppokit
from tests.benchmarks.data import GAMMA, LMBDA, Data, check_advantage, reference_advantage
from tests.benchmarks.networks import mlp
from tests.benchmarks.tables import Row, Shape, timed
from tests.benchmarks.timing import Call

CRITIC_SHAPES = ((1, 1000), (8, 2048), (64, 128), (4096, 32))
OBSERVATIONS = 11
MODULE, CRITIC = "module", "critic"
OURS, TORCHRL = "ppokit.GAE", ("torchrl GAE, loop", "torchrl GAE, vectorised")
BARE, FORWARD = "get and set", "one forward of the critic"


def module_rows(shape: Shape, seconds: float) -> list[Row]:
    data = Data.draw(*shape)
    batch = _batch(data)
    batch.set("state_value", data.value)
    batch.set(("next", "state_value"), data.next_value)
    bare = Call(partial(_get_and_set, batch.copy(), data.value))
    return _rows(MODULE, {BARE: bare}, batch, None, reference_advantage(data), seconds)


def critic_rows(shape: Shape, seconds: float) -> list[Row]:
    network = make_critic()
    batch, data = critic_batch(*shape, network)
    forward = Call(partial(_forward, network, batch))
    return _rows(CRITIC, {FORWARD: forward}, batch, network, reference_advantage(data), seconds)


def make_critic() -> ValueOperator:
    torch.manual_seed(0)
    return ValueOperator(mlp(OBSERVATIONS, 1, (256, 256, 256)), in_keys=["observation"])


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
) -> list[Row]:
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
    return timed(part, tuple(batch.shape), calls, seconds=seconds, **options)


def _get_and_set(batch: TensorDict, result: Tensor) -> None:
    for name in ("reward", "done", "terminated", "state_value"):
        batch.get(("next", name))
    batch.get("state_value")
    batch.set("advantage", result)
    batch.set("value_target", result)


def _forward(network: ValueOperator, batch: TensorDict) -> None:
    with torch.no_grad():
        network(batch.select("observation"))
