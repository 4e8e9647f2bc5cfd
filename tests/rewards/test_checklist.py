"""What torchrl asks of every transform, in the eleven points of its own tests' base class."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import (
    Compose,
    EnvBase,
    GymEnv,
    ParallelEnv,
    RewardScaling,
    RewardSum,
    SerialEnv,
    TransformedEnv,
    check_env_specs,
)

from ppokit import RewardNormalizer
from tests.rewards.streams import DONE, RAW, REWARD, make_batch

forks = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"
)
OTHER_KEY = ("next", "unscaled")


def pendulum() -> EnvBase:
    return GymEnv("Pendulum-v1")


def transformed(raw_key: tuple[str, str] = RAW, make: Callable[[], EnvBase] = pendulum) -> EnvBase:
    return TransformedEnv(make(), RewardNormalizer(raw_key=raw_key))


def in_processes(make: Callable[[], EnvBase]) -> EnvBase:
    return ParallelEnv(2, make, mp_start_method="fork")


def check(env: EnvBase, raw_key: tuple[str, str] = RAW) -> None:
    """The specs hold, and the raw reward is there, under its name, beside another one."""
    try:
        check_env_specs(env)
        step = env.rollout(3)
    finally:
        env.close()
    assert not torch.equal(step[raw_key], step[REWARD])


# -- in environments


@pytest.mark.parametrize("raw_key", [RAW, OTHER_KEY])
def test_single_trans_env_check(raw_key):
    check(transformed(raw_key), raw_key)


def test_serial_trans_env_check():
    check(SerialEnv(2, partial(transformed, OTHER_KEY)), OTHER_KEY)


@forks
def test_parallel_trans_env_check():
    check(in_processes(partial(transformed, OTHER_KEY)), OTHER_KEY)


def test_trans_serial_env_check():
    check(transformed(make=partial(SerialEnv, 2, pendulum)))


@forks
def test_trans_parallel_env_check():
    check(transformed(make=partial(in_processes, pendulum)))


def test_transform_env_reset():
    env, plain = transformed(), pendulum()
    for each in (env, plain):
        each.set_seed(0)
    state = env.transform.state_dict()
    ours, theirs = env.reset(), plain.reset()
    assert sorted(ours.keys()) == sorted(theirs.keys())  # no reward yet, nor a raw one
    assert torch.equal(ours["observation"], theirs["observation"])
    for name, value in env.transform.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_transform_env_step():
    env, plain, alone = transformed(), pendulum(), RewardNormalizer()
    for each in (env, plain):
        each.set_seed(0)
    ours, theirs = env.reset(), plain.reset()
    for _ in range(3):
        action = env.action_spec.rand()
        ours = env.step(ours.set("action", action))
        theirs = plain.step(theirs.set("action", action))
        expected = theirs[REWARD].clone()
        batch = make_batch(expected[None], ids=[[0]], dtype=torch.float32)
        assert torch.equal(ours[RAW], expected)
        assert torch.equal(ours[REWARD], alone(batch)[REWARD][0, 0])
        ours, theirs = ours["next"], theirs["next"]


# -- without an environment


def rollout() -> TensorDictBase:
    """Four Pendulums, twelve steps, with rewards as they come."""
    env = SerialEnv(4, pendulum)
    env.set_seed(0)
    batch = env.rollout(12)
    env.close()
    return batch.select("observation", ("next", "observation"), REWARD, DONE)


def expected_rewards(raw: torch.Tensor) -> torch.Tensor:
    """What a new normaliser of default arguments does to a batch, as said in its docstring."""
    returns, total = [], torch.zeros(raw.shape[0], 1, dtype=torch.float64)
    for reward in raw.double().unbind(1):
        total = reward + 0.99 * total
        returns.append(total)
    variance = torch.stack(returns).var(correction=0)
    return (raw.double() / (variance + 1e-8).sqrt()).clamp(-10, 10).float()


def test_transform_no_env():
    batch = rollout()
    out = RewardNormalizer()(batch.clone())
    torch.testing.assert_close(out[REWARD], expected_rewards(batch[REWARD]))
    assert torch.equal(out[RAW], batch[REWARD])


def test_transform_compose():
    batch = rollout()
    doubled = RewardScaling(loc=0.0, scale=2.0, in_keys=[REWARD], out_keys=[REWARD])
    out = Compose(doubled, RewardNormalizer(raw_key=OTHER_KEY))(batch.clone())
    torch.testing.assert_close(out[REWARD], expected_rewards(2 * batch[REWARD]))
    assert torch.equal(out[OTHER_KEY], 2 * batch[REWARD])
    env = TransformedEnv(
        pendulum(), Compose(RewardNormalizer(), RewardSum(["raw_reward"], ["episode_raw_reward"]))
    )
    check_env_specs(env)
    steps = env.rollout(5)
    total = steps["next", "episode_raw_reward"]
    torch.testing.assert_close(total, steps[RAW].cumsum(-2))


def test_transform_model():
    """The model reads the scaled reward; its gradient reaches the model, not the statistics."""
    batch, model = rollout(), nn.Linear(1, 1)
    chain = nn.Sequential(RewardNormalizer(), TensorDictModule(model, [REWARD], ["predicted"]))
    out = chain(batch.clone())
    torch.testing.assert_close(out["predicted"], model(expected_rewards(batch[REWARD])))
    out["predicted"].sum().backward()
    assert model.weight.grad is not None


@pytest.mark.parametrize("invert", [False, True])
def test_transform_rb(invert):
    """Rewards are scaled when they are written, and samples hold them as they are."""
    batch, normalizer = rollout(), RewardNormalizer()
    buffer = ReplayBuffer(storage=LazyTensorStorage(100, ndim=2), batch_size=8)
    buffer.append_transform(normalizer, invert=invert)
    buffer.extend(batch)
    count = normalizer.count
    torch.testing.assert_close(buffer[:][REWARD], expected_rewards(batch[REWARD]))
    sample = buffer.sample()
    scale = normalizer.scale.float()
    torch.testing.assert_close(sample[REWARD] * scale, sample[RAW])
    assert normalizer.count == count == 48


def test_transform_inverse():
    """Writing goes through the inverse: there, too, rewards are scaled, and never twice."""
    batch, normalizer = rollout(), RewardNormalizer()
    out = normalizer.inv(batch.clone())
    torch.testing.assert_close(out[REWARD], expected_rewards(batch[REWARD]))
    with pytest.raises(ValueError, match="is normalised already"):
        normalizer.inv(out)
