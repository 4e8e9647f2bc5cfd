"""The loss as torch's own compiler makes it: C++ on this machine, compiled and run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from ppokit import DualClipPPOLoss
from tests.blocks import make_critic, make_minibatch
from tests.objectives.test_fast import make_actor

pytestmark = [
    pytest.mark.slow,  # 10 s each
    # torch._inductor imports what is deprecated elsewhere in torch.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is depr:DeprecationWarning"),
    # tensordict asks for an option of torch._dynamo that is deprecated.
    pytest.mark.filterwarnings("ignore:torch._dynamo.config.inline_inbuilt_nn_mod:FutureWarning"),
]

ALL = {"dual_clip": 1.5, "clip_value": 0.2, "critic_loss_clip": 1.0, "kl_coeff": 0.1}


def results(loss: Any, batch: TensorDict) -> tuple[dict[str, Tensor], list[Tensor]]:
    """What the loss returns, and the gradient of all losses together."""
    torch.manual_seed(0)
    out = loss(batch)
    total = sum(value for name, value in out.items() if name.startswith("loss_"))
    parameters = [p for p in loss.parameters() if p.requires_grad]
    return out.detach().to_dict(), list(torch.autograd.grad(total, parameters))


def assert_same(loss: Any, batch: TensorDict) -> None:
    """Nothing is changed by compiling; a copy of a loss is not compiled."""
    tolerance = 1e-11 if batch["advantage"].dtype == torch.float64 else 1e-5
    expected, found = results(copy.deepcopy(loss), batch), results(loss, batch)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize(
    ("kind", "dtype", "options"),
    [
        ("normal", torch.float32, ALL),
        ("tanh-normal", torch.float64, {"entropy_bonus": False, **ALL}),
        ("categorical", torch.float32, {"normalize_advantage": True}),
        ("one-hot", torch.float64, ALL),
    ],
)
def test_it_is_the_same(kind: str, dtype: torch.dtype, options: dict[str, Any], functional: bool):
    torch._dynamo.reset()
    actor = make_actor(kind, dtype)
    loss = DualClipPPOLoss(actor, make_critic(dtype=dtype), functional=functional, **options)
    loss.to(dtype)
    batch = make_minibatch(actor, 16, dtype=dtype).clone()  # else an action can be its own mean
    loss.compile(fullgraph=True)
    for _ in range(3):
        assert_same(loss, batch)
    assert "path=tensors, compiled" in repr(loss)


@pytest.mark.parametrize("wrapper", [None, False])
def test_minibatches_of_many_sizes_and_masks(wrapper: bool | None):
    torch._dynamo.reset()
    actor = make_actor("categorical")
    loss = DualClipPPOLoss(actor, make_critic(), functional=False, **ALL)
    options = {} if wrapper is None else {"options": {"cpp_wrapper": wrapper}}
    loss.compile(dynamic=True, **options)
    for size in (16, 7, 33, 64):
        batch = make_minibatch(actor, size)
        assert_same(loss, batch)
        batch["collector", "mask"] = torch.arange(size) % 3 > 0
        batch["advantage"][0] = float("nan")
        assert_same(loss, batch)


def test_parameters_that_are_frozen_or_thawed():
    torch._dynamo.reset()
    actor, critic = make_actor("categorical"), make_critic()
    loss = DualClipPPOLoss(actor, critic, functional=False)
    batch = make_minibatch(actor, 16)
    loss.compile()
    for frozen in (True, False, True):
        for parameter in actor.parameters():
            parameter.requires_grad_(not frozen)
        assert_same(loss, batch)


def test_a_network_with_options_of_its_own():
    class Scaled(nn.Module):
        def __init__(self, network: nn.Module) -> None:
            super().__init__()
            self.network, self.scale, self.active = network, 2.0, True

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * self.network(x) if self.active else self.network(x)

    torch._dynamo.reset()
    actor, critic = make_actor("categorical"), make_critic()
    critic.module = scaled = Scaled(critic.module)
    loss = DualClipPPOLoss(actor, critic, functional=False)
    batch = make_minibatch(actor, 16)
    loss.compile()
    assert_same(loss, batch)
    scaled.active = False
    assert_same(loss, batch)
    scaled.active, scaled.scale = True, 3.0
    assert_same(loss, batch)
