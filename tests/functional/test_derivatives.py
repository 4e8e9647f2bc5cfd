"""Derivatives of the functions to the second order, and the functions under torch.compile."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from ppokit import functional
from ppokit.functional import clipped_surrogate, gae, kl_estimate, linear_scan

pytestmark = [
    pytest.mark.usefixtures("kernel"),
    # torch.compile itself makes an instance of autograd.Function, and torch warns of it.
    pytest.mark.filterwarnings(
        "ignore:<class 'torch.autograd.function.Function'> should not be instantiated"
        ":DeprecationWarning"
    ),
]

DONE = torch.tensor([[0, 0, 1, 0, 0, 1], [1, 0, 0, 1, 0, 0]]).bool().unsqueeze(-1)
TERMINATED = DONE & torch.tensor([[True], [False]]).unsqueeze(-1)
MASK = torch.ones(3, 5).bool()
MASK[0, 2:4] = MASK[2, 0] = False


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def number(x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64, requires_grad=True)


def returns(reward: Any, initial: Any, gamma: Any) -> Any:
    return functional.reversed_discounted_returns(reward, DONE, gamma=gamma, initial=initial)


def advantages(reward: Any, value: Any, next_value: Any, gamma: Any = 0.9, lmbda: Any = 0.8) -> Any:
    ends = {"done": DONE, "terminated": TERMINATED}
    return gae(reward, value, next_value, **ends, gamma=gamma, lmbda=lmbda)


def reversed_scan(x: Any, decay: Any, initial: Any) -> Any:
    return linear_scan(x, decay, initial=initial, reverse=True)


SIGNALS, PAIR = [(2, 6, 1)] * 3, [(20, 1)] * 2
CLIPPED: Any = partial(clipped_surrogate, clip_epsilon=(0.1, 0.3))
#: functions, shapes of their inputs, and inputs that are numbers
CASES: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], list[float]]] = {
    "scan": (reversed_scan, [(3, 6, 1), (3, 6, 1), (3, 1)], []),
    "returns": (returns, [(2, 6, 1), (2, 1)], [0.9]),
    "gae": (advantages, SIGNALS, []),
    "gae, discounts in tensors": (advantages, SIGNALS, [0.9, 0.8]),
    "surrogate": (CLIPPED, PAIR, []),
    "surrogate, dual clip": (partial(CLIPPED, dual_clip=2.0), PAIR, []),
    "mean": (partial(functional.masked_mean, mask=MASK), [(3, 5)], []),
    "mean of rows": (partial(functional.masked_mean, mask=MASK, dim=1), [(3, 5)], []),
    "deviation": (partial(functional.masked_std, mask=MASK), [(3, 5)], []),
    "deviation of rows": (partial(functional.masked_std, mask=MASK, dim=1), [(3, 5)], []),
    **{k: (partial(kl_estimate, estimator=k), [(20,)], []) for k in ("k1", "k2", "k3")},
}


@pytest.mark.parametrize("name", CASES)
def test_first_and_second_derivatives(name: str):
    function, shapes, numbers = CASES[name]
    inputs = (*(normal(*shape) for shape in shapes), *map(number, numbers))
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)


@pytest.mark.parametrize("name", CASES)
def test_compiles_without_a_graph_break(name: str):
    function, shapes, numbers = CASES[name]
    inputs = [*(normal(*shape) for shape in shapes), *map(number, numbers)]
    torch.compiler.reset()  # or it stops after eight of them
    compiled = torch.compile(lambda *x: function(*x), backend="aot_eager", fullgraph=True)
    found, expected = compiled(*inputs), function(*inputs)
    torch.testing.assert_close(found, expected)
    sums = ((x if torch.is_tensor(x) else x[0]).square().sum() for x in (found, expected))
    torch.testing.assert_close(*(torch.autograd.grad(x, inputs) for x in sums))
    if name.startswith("gae"):
        torch.testing.assert_close(compiled(*(x.detach() for x in inputs)), expected)
