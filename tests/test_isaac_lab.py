"""The loop of the page on Isaac Lab, on environments with the interface of its wrapper."""

from __future__ import annotations

from statistics import mean
from typing import Any

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDictBase
from torchrl.envs.utils import check_env_specs

from ppokit.functional import _checks
from tests.isaac_env import CartPole, IsaacLike, Pendulum
from tests.isaac_lab import make_networks, page_program, settings, train_with_torchrl


@pytest.mark.parametrize("kind", [CartPole, Pendulum])
def test_the_environments_are_those_of_gymnasium(kind: type[IsaacLike]):
    env = kind(1)
    check_env_specs(env)
    name, scale = ("CartPole-v1", 1.0) if kind is CartPole else ("Pendulum-v1", 0.1)
    other: Any = gym.make(name).unwrapped
    for seed in range(20):
        other.reset(seed=seed)
        state = torch.as_tensor(other.state, dtype=torch.float32).unsqueeze(0)
        for action in (-1.0, 1.0, 1.0):
            state, reward, terminated = env.move(state, torch.tensor([[action]]))
            choice = int(action > 0) if kind is CartPole else [2 * action]
            observation, expected, is_out, _, _ = other.step(choice)
            assert env.observe(state)[0].tolist() == pytest.approx(observation.tolist(), abs=1e-5)
            assert float(reward) == pytest.approx(scale * expected, abs=1e-5)
            assert bool(terminated) == is_out


@pytest.mark.parametrize("program", [page_program(), train_with_torchrl], ids=["page", "torchrl"])
def test_the_loop_learns(program: Any):
    env, cfg = CartPole(64), settings(max_iterations=15, learning_rate=3e-3)
    env.set_seed(0)
    options: Any = {} if program is train_with_torchrl else {"compile": False}
    lengths, rates = [], []
    for statistics in program(env, cfg, *make_networks(env, cfg), **options):
        lengths.append(mean(env.pop_returns()))
        rates.append(statistics["lr"])
    assert len(lengths) == 15
    assert mean(lengths[-3:]) > 2.5 * mean(lengths[:3])
    assert len({*rates}) > 2


class WithoutFinalObservations(Pendulum):
    """The next observation of a finished step is NaN, as without ``compute_final_obs``."""

    def _step(self, tensordict: TensorDictBase) -> Any:
        out = super()._step(tensordict)
        for group in ("policy", "critic"):
            out[group] = torch.where(out["done"], torch.nan, out[group])
        return out


@pytest.mark.parametrize("on_device", [False, True])
def test_a_lost_final_observation_raises(on_device: bool, monkeypatch: pytest.MonkeyPatch):
    if on_device:
        monkeypatch.setattr(_checks, "reads_are_free", lambda _: False)
    env, cfg = WithoutFinalObservations(4, limit=10), settings(max_iterations=1)
    actor, critic = make_networks(env, cfg)
    before = [p.clone() for p in actor.parameters()]
    error, match = ValueError, "Return the true final observation from the environment"
    if on_device:
        error, match = FloatingPointError, "not finite: 'advantage', 'value_target'"
    with pytest.raises(error, match=match):
        next(page_program()(env, cfg, actor, critic, compile=False))
    for parameter, old in zip(actor.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
