"""Observations of mean 0 and spread 1, by the statistics of what was collected."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import DoubleToFloat, GymEnv, SerialEnv, TransformedEnv
from torchrl.modules import OneHotCategorical, TanhNormal

from ppokit import GymCollector, ObservationNormalizer, TensorActor
from tests.collectors.test_collector import collect, make_policy


@pytest.mark.parametrize("n", [1, 3])
def test_running_observation_norm(n: int):
    """The statistics of a batch are those of all before it; final observations are normalised."""
    norm, policy = ObservationNormalizer(4, out_key="normal"), make_policy(4, 2, OneHotCategorical)
    policy.module[0].in_keys = ["normal"]
    seen = []
    for batch in collect("CartPole-v1", policy, n, observation_transform=norm):
        for nested in (batch, batch["next"]):
            raw = nested["observation"].double()
            if seen:
                x = torch.cat(seen).double()
                raw = (raw - x.mean(0)) / (x.var(0, correction=0) + 1e-8).sqrt()
            expected = raw.clamp(-10, 10).float()
            torch.testing.assert_close(nested["normal"], expected, rtol=1e-5, atol=1e-5)
        seen.append(batch["observation"].flatten(0, 1))
    x = torch.cat(seen).double()
    torch.testing.assert_close(norm.mean, x.mean(0))
    torch.testing.assert_close(norm.variance, x.var(0, correction=0))


def test_a_frozen_norm_stands_still():
    norm = ObservationNormalizer(4, in_key="observation")
    policy, options = make_policy(4, 2, OneHotCategorical), {"observation_transform": norm}
    collector = GymCollector("CartPole-v1", policy, frames_per_batch=16, **options)
    collector.rollout()
    mean = norm.freeze().mean.clone()
    collector.rollout()
    assert norm.frozen
    assert torch.equal(norm.mean, mean)
    norm.unfreeze()
    collector.rollout()
    assert not torch.equal(norm.mean, mean)


def test_a_norm_brings_double_observations_to_single_precision():
    norm = ObservationNormalizer(9, clip=None)
    policy = make_policy(9, 2, TanhNormal)
    (batch,) = collect(
        "InvertedDoublePendulum-v5", policy, 2, batches=1, observation_transform=norm
    )
    env = TransformedEnv(SerialEnv(2, lambda: GymEnv("InvertedDoublePendulum-v5")), DoubleToFloat())
    env.set_seed(7)
    assert torch.equal(batch["observation"][:, 0], env.reset()["observation"])


def test_norm_of_a_large_mean():
    norm = ObservationNormalizer(())
    x = 1e6 + torch.randn(1000, dtype=torch.float64)
    for part in x.split(100):
        norm.update(TensorDict({"observation": part}, [100]))
    torch.testing.assert_close(norm.variance, x.var(correction=0))
    assert norm(TensorDict({"observation": x}, [1000]))["observation"].std() < 1.01
    assert pickle.loads(pickle.dumps(norm)).mean == norm.mean


def test_bad_norms():
    with pytest.raises(ValueError, match="clip must be positive, got 0"):
        ObservationNormalizer(3, clip=0)
    norm = ObservationNormalizer(3)
    with pytest.raises(ValueError, match=r"shape \[2, 4\], which does not end in \[3\]"):
        norm.update(TensorDict({"observation": torch.zeros(2, 4)}, [2]))
    with pytest.raises(KeyError, match="'observation' is not in the batch"):
        norm.update(TensorDict({"pixels": torch.zeros(2, 3)}, [2]))


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused_and_not_counted(odd: float):
    norm = ObservationNormalizer(4)
    x = torch.randn(2, 8, 4)
    norm.update(TensorDict({"observation": x}, [2, 8]))
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    x[1, 3, 2] = odd
    with pytest.raises(ValueError, match=r"beyond 1e\+150 in 1 of 64 places, first at \[1, 3, 2\]"):
        norm.update(TensorDict({"observation": x}, [2, 8]))
    for name, value in norm.state_dict().items():
        assert torch.equal(value, before[name])
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, 3] = False
    norm.update(TensorDict({"observation": x, ("collector", "mask"): mask}, [2, 8]))
    assert norm.mean.isfinite().all()
    assert norm.state_dict()["module.count"].unique().item() == 16 + 15


class TurnsNaN(gym.Wrapper):
    """CartPole whose second environment returns NaN after ten steps."""

    def __init__(self, number: int) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.number, self.steps = number, 0

    def step(self, action: Any) -> Any:
        self.steps += 1
        observation, *rest = super().step(action)
        return observation * (np.nan if self.number and self.steps == 10 else 1), *rest


@pytest.mark.parametrize("on_tensors", [True, False])
def test_the_environment_of_an_observation_that_is_nan_is_named(on_tensors: bool):
    norm, policy = ObservationNormalizer(4), make_policy(4, 2, OneHotCategorical)
    if not on_tensors:
        policy = TensorActor(policy)
    collector = GymCollector(
        [partial(TurnsNaN, 0), partial(TurnsNaN, 1)],
        policy,
        frames_per_batch=60,
        observation_transform=norm,
    )
    collector.set_seed(0)
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=r"nan or inf in 2 of \d+ places .*, first at \[1,"):
        collector.rollout()
    assert collector.closed
    assert not norm.state_dict()["module.count"].any()
