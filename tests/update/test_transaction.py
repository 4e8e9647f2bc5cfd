"""An update that raises before its first step changes nothing; no update runs anything twice."""

from __future__ import annotations

import copy
import random
import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import ProbabilisticActor, ValueOperator

from ppokit import GAE, DualClipPPOLoss, PPOUpdate, RewardNormalizer
from ppokit.distributed import alone, resolve_group
from tests.blocks import ppo_update
from tests.test_state import assert_same_state, flat


class Draws(nn.Module):
    """Counts its calls and their rows, and draws from generators of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.of_numpy = torch.Generator(), np.random.default_rng(0)
        self.of_python = random.Random(0)
        self.rows: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows.append(x.shape[:-1].numel())
        draws = torch.rand((), generator=self.own), self.of_numpy.random(), self.of_python.random()
        return x + 1e-6 * (sum(draws) + np.random.random() + random.random() + torch.rand(()))


def make_update(**options: Any) -> PPOUpdate:
    torch.manual_seed(0)
    actor = ProbabilisticActor(
        TensorDictModule(nn.Sequential(Draws(), nn.Linear(3, 2)), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    critic = ValueOperator(nn.Sequential(Draws(), nn.Linear(3, 1)), in_keys=["observation"])
    loss = DualClipPPOLoss(actor, critic)
    gae = GAE(gamma=0.9, lmbda=0.9, value_network=critic)
    blocks: dict[str, Any] = {"advantage": gae, "reward_normalizer": RewardNormalizer(0.9)}
    optimizer = torch.optim.Adam(loss.parameters())
    return ppo_update(loss, optimizer, minibatch_size=4, epochs=1, seed=0, **blocks | options)


def make_batch(seed: int = 0) -> TensorDict:
    torch.manual_seed(seed)
    done = torch.zeros(2, 6, 1, dtype=torch.bool)
    batch = {
        "observation": torch.randn(2, 6, 3),
        "action": torch.randint(2, (2, 6)),
        "action_log_prob": torch.full((2, 6), -0.7),
        "collector": {"traj_ids": torch.tensor([[0], [1]]).expand(2, 6).clone()},
        "next": {
            "observation": torch.randn(2, 6, 3),
            "reward": torch.randn(2, 6, 1),
            "done": done,
            "terminated": done.clone(),
        },
    }
    return TensorDict(batch, [2, 6])  # pyright: ignore[reportArgumentType]


def draws_of(update: PPOUpdate) -> list[Draws]:
    return [module for module in update.step.loss.modules() if isinstance(module, Draws)]


def test_the_first_update_runs_every_network_once():
    update = make_update()
    update(make_batch())
    actor, critic = draws_of(update)
    assert actor.rows == [4] * 3
    assert critic.rows == [12, 2] + [4] * 3  # GAE: all frames, and the last of each row


def numbers() -> list[float]:
    return [random.random(), np.random.random(), float(torch.rand(()))]


def test_validate_advances_no_generator():
    update, batch = make_update(), make_batch()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    states = [
        (x.own.get_state(), x.of_numpy.random(), x.of_python.random()) for x in draws_of(update)
    ]
    expected = numbers()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    for module in draws_of(update):
        module.of_numpy, module.of_python = np.random.default_rng(0), random.Random(0)
    update.validate(batch)
    assert numbers() == expected
    for module, (state, of_numpy, of_python) in zip(draws_of(update), states, strict=True):
        assert torch.equal(module.own.get_state(), state)
        assert (module.of_numpy.random(), module.of_python.random()) == (of_numpy, of_python)


FAULTS: dict[str, Any] = {
    "the normalizer": lambda batch: batch["next", "reward"].fill_(torch.nan),
    "GAE": lambda batch: batch["next", "observation"][:, -1].fill_(torch.nan),
    "the loss": lambda batch: batch.set("action_log_prob", batch["action_log_prob"].unsqueeze(-1)),
    "a value": lambda batch: batch["action_log_prob"].fill_(torch.nan),
}


@pytest.mark.parametrize("updates", [0, 1])
@pytest.mark.parametrize("fault", FAULTS)
def test_an_update_that_raises_changes_neither_blocks_nor_batch(fault: str, updates: int):
    update, bad = make_update(), make_batch(1)
    for _ in range(updates):
        update(make_batch())
    FAULTS[fault](bad)
    before, state = bad.clone(), copy.deepcopy(flat(update.state_dict()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with pytest.raises((ValueError, FloatingPointError)):
            update(bad)
    assert_same_state(flat(update.state_dict()), state)
    torch.testing.assert_close(bad.to_dict(), before.to_dict(), rtol=0, atol=0, equal_nan=True)
    assert update(make_batch(1))["steps"] == 3


class Counted(nn.Module):
    """An advantage module with a state of its own, which raises where it is told to."""

    calls: torch.Tensor

    def __init__(self, fail_at: int) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))
        self.fail_at = fail_at

    def forward(self, batch: TensorDict) -> TensorDict:
        self.calls += 1
        if self.calls == self.fail_at:
            raise ValueError("no advantage")
        batch["advantage"] = torch.randn(*batch.shape, 1)
        return batch.set("value_target", torch.randn(*batch.shape, 1))


def test_the_state_of_the_advantage_module_is_restored():
    update = make_update(advantage=Counted(fail_at=2))
    update(make_batch())
    with pytest.raises(ValueError, match="no advantage"):
        update(make_batch(1))
    assert update.advantage.calls == 1


def test_disabled_collectives_are_of_one_thread(tmp_path: Any):
    dist.init_process_group("gloo", f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        seen: list[bool] = []
        with alone():
            thread = threading.Thread(target=lambda: seen.append(resolve_group(None) is not None))
            thread.start()
            thread.join()
            assert resolve_group(None) is None
            with alone():
                pass
            assert resolve_group(None) is None
        assert seen == [True]
        assert resolve_group(None) is not None
    finally:
        dist.destroy_process_group()
