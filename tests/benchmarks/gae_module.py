"""The GAE benchmark's second part: the modules, on batches with values and with a critic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.modules import MLP, ValueOperator
from torchrl.objectives.value import GAE as TorchRLGAE  # noqa: N811

import ppokit
from tests.benchmarks.data import GAMMA, LMBDA, Data, reference
from tests.benchmarks.gae_function import check
from tests.benchmarks.tables import Row, Shape, compare
from tests.benchmarks.timing import Call, interleave

CRITIC_SHAPES = ((1, 1000), (8, 2048), (64, 128), (4096, 32))
OBSERVATIONS = 11
MODULE, CRITIC = "module", "critic"
OURS, TORCHRL = "ppokit.GAE", ("torchrl GAE, loop", "torchrl GAE, vectorised")
BARE, FORWARD = "get and set", "one forward of the critic"


def module_rows(shapes: Iterable[Shape], seconds: float) -> Iterable[list[Row]]:
    """Yield the rows of one shape after the other, where the batch holds the values."""
    for shape in shapes:
        data = Data.draw(*shape)
        batch = _batch(data)
        batch.set("state_value", data.value)
        batch.set(("next", "state_value"), data.next_value)
        calls = {BARE: Call(partial(_get_and_set, batch.copy(), data.value))}
        yield _rows(MODULE, shape, batch, None, calls, reference(data), seconds)


def critic_rows(shapes: Iterable[Shape], seconds: float) -> Iterable[list[Row]]:
    """Yield the rows of one shape after the other, where a critic gives the values."""
    network = critic()
    for shape in shapes:
        batch, data = critic_batch(*shape, network)
        calls = {FORWARD: Call(partial(_forward, network, batch))}
        yield _rows(CRITIC, shape, batch, network, calls, reference(data), seconds)


def critic() -> ValueOperator:
    """Return the critic: three layers of 256."""
    torch.manual_seed(0)
    cells = [256, 256, 256]
    network = MLP(OBSERVATIONS, 1, num_cells=cells, activation_class=torch.nn.Tanh)
    return ValueOperator(network, in_keys=["observation"])


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
    shape: Shape,
    batch: TensorDict,
    network: ValueOperator | None,
    bound: dict[str, Call],
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
        errors[name] = check(name, module(own)["advantage"].squeeze(-1), truth)
        calls[name] = Call(partial(module, own))
    timings = interleave(calls, seconds=seconds)
    rows = [Row.of(part, name, shape, timing) for name, timing in timings.items()]
    for row in rows:
        row.max_error = errors.get(row.contender)
    compare(rows, peers=TORCHRL, bound=next(iter(bound)))
    return rows


def _get_and_set(batch: TensorDict, result: Tensor) -> None:
    for name in ("reward", "done", "terminated", "state_value"):
        batch.get(("next", name))
    batch.get("state_value")
    batch.set("advantage", result)
    batch.set("value_target", result)


def _forward(network: ValueOperator, batch: TensorDict) -> None:
    with torch.no_grad():
        network(batch.select("observation"))
