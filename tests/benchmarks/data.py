"""Random batches of rewards and values, and their advantage in float64."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor

from tests import reference

GAMMA, LMBDA = 0.99, 0.95
TOLERANCE = 1e-3  # above the errors of float32 and of torchrl's cut-off of small weights
SHAPES = ((1, 1000), (1, 4096), (8, 2048), (64, 128), (256, 512), (4096, 32), (8192, 32))
SHAPES += ((4096, 128), (16, 16384))
QUICK_SHAPES = ((64, 128), (256, 512))


@dataclass(frozen=True)
class Data:
    """A batch ``[B, T, 1]``; unless a step is done, its next value is that of the next step."""

    reward: Tensor
    value: Tensor
    next_value: Tensor
    done: Tensor
    terminated: Tensor

    @classmethod
    def draw(cls, batch: int, steps: int) -> Data:
        random = torch.Generator().manual_seed(0)
        drawn = partial(torch.randn, batch, generator=random)
        done = torch.rand(batch, steps, 1, generator=random) < 0.01
        terminated = done & (torch.rand(batch, steps, 1, generator=random) < 0.5)
        values = drawn(steps + 1, 1)
        return cls(
            reward=drawn(steps, 1),
            value=values[:, :-1].clone(),
            next_value=torch.where(done, drawn(steps, 1), values[:, 1:]),
            done=done,
            terminated=terminated,
        )

    def to(self, device: torch.device) -> Data:
        return Data(*(getattr(self, field.name).to(device) for field in fields(self)))

    def first(self, steps: int) -> Data:
        return Data(*(getattr(self, field.name)[:, :steps] for field in fields(self)))


def reference_advantage(data: Data) -> Tensor:
    """Return the advantage ``[B, T]`` in float64."""
    signals = (data.reward, data.value, data.next_value, data.done, data.terminated)
    return reference.gae(*signals, gamma=GAMMA, lmbda=LMBDA)[0].squeeze(-1)


def reference_deviation(data: Data) -> float:
    """Return the standard deviation of the open returns."""
    returns, _ = reference.reversed_discounted_returns(data.reward, data.done, gamma=GAMMA)
    return returns.std(correction=0).item()


def check_advantage(name: str, advantage: Tensor, truth: Tensor) -> float:
    """Return the largest error.

    Raises:
        RuntimeError: it is larger than rounding explains.
    """
    error = (advantage.double() - truth).abs().max().item()
    if not error < TOLERANCE:
        raise RuntimeError(f"{name} is off by {error:.2g} at {list(truth.shape)}: it is not GAE.")
    return error
