"""Gradients that a graph returns, or ranks average, are laid out as those of autograd."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from ppokit import TrainingStep
from tests.blocks import make_actor, make_minibatch, ppo_update
from tests.marks import slow
from tests.ranks import run_on_two_ranks
from tests.update.parts import make_loss, parameters_of

EAGER = {"backend": "eager"}
SGD, ADAM, ADAGRAD = torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad


class Pixels(nn.Module):
    """A convolution of images whose channels come last in the minibatch."""

    in_keys, out_keys = ("pixels",), ("loss_any",)

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 1))

    def forward(self, minibatch: Any) -> TensorDict:
        values = self.network(minibatch["pixels"].permute(0, 3, 1, 2))
        return TensorDict({"loss_any": values.square().mean()}, [])


def train(kind: Any, compile: Any, layout: torch.memory_format, **options: Any) -> Tensor:
    torch.manual_seed(0)
    loss = Pixels().double().to(memory_format=layout)
    optimizer = kind(loss.parameters(), lr=0.03, **options)
    step = TrainingStep(loss, optimizer, max_grad_norm=0.5, compile=compile)
    for _ in range(3):
        pixels = torch.rand(5, 6, 6, 3, dtype=torch.float64)
        step(TensorDict({"pixels": pixels}, [5]))
    assert step.graphs is None or step.graphs.reason is None
    return torch.cat([p.detach().flatten() for p in loss.parameters()])


FUSED: list[Any] = [(SGD, {"momentum": 0.9}), slow(ADAM, {"amsgrad": True}), slow(ADAGRAD, {})]


@pytest.mark.parametrize(("kind", "options"), FUSED)
@pytest.mark.parametrize("compile", [EAGER, slow(True)], ids=["eager", "inductor"])
def test_fused_optimizers_outside_of_the_graph(kind: Any, options: Any, compile: Any):
    """They take parameters and gradients for arrays in one order."""
    layout = torch.contiguous_format
    expected = train(kind, False, layout, **options)
    found = train(kind, compile, layout, fused=True, **options)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def train_on_rank(_: int) -> list[Tensor]:
    layouts = torch.contiguous_format, torch.channels_last
    return [
        train(ADAM, False, layout, fused=fused) for layout in layouts for fused in (False, True)
    ]


@pytest.mark.slow
def test_fused_optimizers_on_ranks(tmp_path: Path):
    for first, *others in run_on_two_ranks(train_on_rank, tmp_path):
        for other in others:
            torch.testing.assert_close(other, first, rtol=1e-9, atol=1e-12)


class Added(nn.Module):
    """Two biases that are added: their gradients are one tensor, of the sum an expanded one."""

    in_keys, out_keys = ("x",), ("loss_any",)

    def __init__(self, weighted: bool) -> None:
        super().__init__()
        self.u, self.v = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
        self.weighted = weighted

    def forward(self, minibatch: Any) -> TensorDict:
        y = self.u + self.v
        loss = (y * minibatch["x"]).mean() if self.weighted else y.sum()
        return TensorDict({"loss_any": loss}, [])


def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad.mul_(0.5)


@pytest.mark.parametrize("weighted", [True, False])
def test_a_hook_may_change_gradients_in_place(weighted: bool):
    results = []
    for compile in (False, EAGER):
        loss = Added(weighted)
        optimizer = SGD(loss.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(halve)
        step = TrainingStep(loss, optimizer, compile=compile)
        for seed in range(3):
            draws = torch.Generator().manual_seed(seed)
            step(TensorDict({"x": torch.randn(8, 4, generator=draws)}, [8]))
        results.append(parameters_of(loss))
    assert step.graphs is not None
    assert step.graphs.reason is None
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("size", [100.0, slow(1e4)])
def test_accumulated_float16_gradients_overflow_where_they_do_eagerly(size: float):
    """The weight of a minibatch belongs to what is computed in half precision."""
    results = []
    for compile in (False, EAGER):
        loss = make_loss()
        optimizer = ADAM(loss.parameters(), lr=1e-3)
        options: Any = {"amp_dtype": torch.float16, "nonfinite": "skip", "compile": compile}
        update = ppo_update(loss, optimizer, minibatch_size=4, accumulate_grads=True, **options)
        batch = make_minibatch(make_actor(), 32)
        batch["advantage"] = size * batch["advantage"]
        found = [update(batch.clone()) for _ in range(3)]
        counts = [(x["steps"], x["skipped"]) for x in found]
        results.append((counts, update.step.scaler.get_scale(), parameters_of(loss)))
    assert any(skipped for _, skipped in results[0][0])
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


class Tempered(nn.Module):
    """A squared error whose scale is trained, and told."""

    in_keys = ("x",)

    def __init__(self) -> None:
        super().__init__()
        self.log_temperature, self.network = nn.Parameter(torch.tensor(0.5)), nn.Linear(3, 2)

    def forward(self, minibatch: Any) -> TensorDict:
        y = self.network(minibatch["x"]).float() * self.log_temperature.exp()
        told = {"log_temperature": self.log_temperature, "bias": self.network.bias[0]}
        return TensorDict({"loss_any": (y - 1).square().mean()} | told)


@pytest.mark.parametrize("options", [{}, slow({"accumulate_grads": True})])
@pytest.mark.parametrize("compile", [False, EAGER])
def test_a_parameter_among_the_outputs_is_told_as_it_is_before_the_step(compile: Any, options: Any):
    torch.manual_seed(0)
    loss = Tempered()
    update = ppo_update(loss, ADAM(loss.parameters(), lr=0.1), epochs=1, compile=compile, **options)
    for _ in range(3):
        before = loss.log_temperature.item(), loss.network.bias[0].item()
        found = update(TensorDict({"x": torch.randn(8, 3)}, [8]))
        assert (found["log_temperature"], found["bias"]) == pytest.approx(before)


@pytest.mark.parametrize("compile", [False, slow(EAGER)])
def test_an_autocast_of_the_users_sees_the_parameters_of_each_step(compile: Any):
    """It keeps casts of parameters until it ends, which may be after the update."""
    results = []
    for cached in (False, True):
        torch.manual_seed(0)
        loss = Tempered()
        update = ppo_update(loss, SGD(loss.parameters(), lr=0.1), epochs=5, compile=compile)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            update(TensorDict({"x": torch.randn(8, 3)}, [8]))
        results.append(parameters_of(loss))
    torch.testing.assert_close(*results, rtol=0, atol=0)
