"""Batches and critics for GAE, and torchrl's GAE beside it."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import nn
from torchrl.modules import ValueOperator
from torchrl.objectives.value import GAE as TorchRLGAE  # noqa: N811

from ppokit import GAE

DISCOUNTS = {"gamma": 0.97, "lmbda": 0.9}
#: for torchrl, which keeps numbers as float32
DOUBLES = {name: torch.tensor(x, dtype=torch.float64) for name, x in DISCOUNTS.items()}


def make_batch(
    b: int = 3, t: int = 7, *, dtype: torch.dtype = torch.float32, p: float = 0.3, seed: int = 0
) -> TensorDict:
    """A batch with terminated and truncated ends; next observations are consistent."""
    generator = torch.Generator().manual_seed(seed)
    observation = torch.randn(b, t + 1, 4, generator=generator, dtype=dtype)
    terminated = torch.rand(b, t, 1, generator=generator) < p / 2
    done = terminated | (torch.rand(b, t, 1, generator=generator) < p / 2)
    own = torch.randn(b, t, 4, generator=generator, dtype=dtype)
    following = torch.where(done, own, observation[:, 1:])
    reward = torch.randn(b, t, 1, generator=generator, dtype=dtype)
    return TensorDict(
        {
            "observation": observation[:, :-1],
            "next": {
                "observation": following,
                "reward": reward,
                "done": done,
                "terminated": terminated,
            },
        },
        [b, t],
        names=[None, "time"],
    )


class CountingCritic(nn.Module):
    """A linear critic that counts the rows it sees."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 1, dtype=dtype)
        self.rows = 0

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.rows += observation[..., 0].numel()
        return self.linear(observation)


def make_critic(dtype: torch.dtype = torch.float32) -> ValueOperator:
    return ValueOperator(CountingCritic(dtype), in_keys=["observation"])


def keys(batch: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
    return batch["advantage"], batch["value_target"]


def ours(batch: TensorDict, critic: ValueOperator | None, **kwargs) -> TensorDict:
    arguments = DISCOUNTS | kwargs
    return GAE(value_network=critic, **arguments)(batch.clone())


def theirs(batch: TensorDict, critic: ValueOperator | None, **kwargs) -> TensorDict:
    arguments = DISCOUNTS | kwargs
    return TorchRLGAE(value_network=critic, **arguments)(batch.clone())


def assert_same(a: TensorDict, b: TensorDict, atol: float = 1e-5) -> None:
    for x, y in zip(keys(a), keys(b), strict=True):
        torch.testing.assert_close(x, y, atol=atol, rtol=1e-5)


def pad(batch: TensorDict, by: int) -> tuple[TensorDict, torch.Tensor]:
    b, t = batch.batch_size
    padded = batch.new_zeros(b, t + by)
    assert padded is not None
    padded.names = batch.names
    padded[:, :t] = batch
    for key in (("next", "reward"), "observation", ("next", "observation")):
        padded[key][:, t:] = torch.nan
    mask = torch.zeros(b, t + by, dtype=torch.bool)
    mask[:, :t] = True
    padded["collector", "mask"] = mask
    return padded, mask
