"""evaluate: returns and lengths of whole episodes, and training that goes on as without it."""

from __future__ import annotations

import copy
import io
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs.utils import ExplorationType, set_exploration_type

from ppokit import LSTMModule, ObservationNormalizer, TensorActor, evaluate
from ppokit.collectors.environments import seeds_from
from ppokit.networks import actor_critic
from tests.blocks import categorical_actor


class Countdown(gym.Env):
    """Episodes of lengths that depend on the seed; every step gives the environment's number."""

    observation_space = spaces.Box(-100, 100, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, reward: float = 1.0, lengths: tuple[int, ...] = (), fail_at: int = -1):
        self.reward, self.lengths, self.fail_at = reward, lengths, fail_at
        self.episode, self.steps, self.closed = -1, 0, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.episode, self.time = self.episode + 1, 0
        drawn = int(self.np_random.integers(1, 40))
        self.left = self.lengths[self.episode % len(self.lengths)] if self.lengths else drawn
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.steps += 1
        if self.steps == self.fail_at:
            raise RuntimeError("the simulator failed")
        self.left, self.time = self.left - 1, self.time + 1
        ends = self.left == 0
        odd = self.episode % 2 == 1
        return self.observe(), self.reward, ends and odd, ends and not odd, {}

    def observe(self) -> Any:
        return np.array([self.left, self.time], np.float32)

    def close(self) -> None:
        self.closed += 1


def by_hand(make: Any, policy: Any, episodes: int, seed: int, num_envs: int) -> list[list[float]]:
    """Return returns and lengths of a loop over gymnasium; each environment plays in turn."""
    each, found = -(-episodes // num_envs), []
    for env_seed in seeds_from(seed, num_envs, static=False):
        env = make()
        env.reset(seed=env_seed)  # the collector seeds, and then begins
        row = []
        for _ in range(each):
            observation, _ = env.reset()
            total, length, over = 0.0, 0, False
            while not over:
                entry = torch.as_tensor(observation, dtype=torch.float32)
                action = policy(TensorDict({"observation": entry}))["action"].numpy()
                observation, reward, terminated, truncated, _ = env.step(action)
                total, length, over = total + float(reward), length + 1, terminated or truncated
            row.append((total, length))
        env.close()
        found.append(row)
    played = [row[number] for number in range(each) for row in found][:episodes]
    return [list(column) for column in zip(*played, strict=True)]


MAKERS: dict[str, Any] = {
    "CartPole-v1": lambda: gym.make("CartPole-v1"),
    "Pendulum-v1": lambda: gym.wrappers.ClipAction(gym.make("Pendulum-v1", max_episode_steps=30)),
    "Countdown": Countdown,
}


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("name", MAKERS)
def test_returns_and_lengths_are_a_loops_over_gymnasium(name: str, num_envs: int):
    make = MAKERS[name]
    actor, _ = actor_critic(make())
    returns, lengths = evaluate(make, actor, episodes=7, seed=5, num_envs=num_envs)
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        expected = by_hand(make, actor, 7, 5, num_envs)
    assert returns.dtype is torch.float64
    assert lengths.dtype is torch.int64
    torch.testing.assert_close(returns.tolist(), expected[0], rtol=1e-5, atol=1e-3)
    assert lengths.tolist() == expected[1]


def test_an_id_and_a_list_are_taken_as_a_collector_takes_them():
    actor, _ = actor_critic("CartPole-v1")
    expected = evaluate("CartPole-v1", actor, episodes=6, seed=2, num_envs=3)
    for make in (["CartPole-v1"] * 3, lambda: gym.make("CartPole-v1")):
        found = evaluate(make, actor, episodes=6, seed=2, num_envs=3)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert len(evaluate(["CartPole-v1"] * 3, actor, episodes=4)[0]) == 4  # and without num_envs


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
@pytest.mark.parametrize("given", [True, False])
def test_vector_environments_give_the_same(mode: AutoresetMode, given: bool):
    actor, _ = actor_critic(Countdown())
    expected = evaluate(Countdown, actor, episodes=7, seed=3, num_envs=3)
    vector = SyncVectorEnv([Countdown] * 3, autoreset_mode=mode)
    make = vector if given else lambda: vector
    found = evaluate(make, actor, episodes=7, seed=3, num_envs=3 if given else 1)
    torch.testing.assert_close(found, expected)
    assert vector.closed


EPISODES: dict[str, tuple[list[tuple[float, tuple[int, ...]]], list[int], list[float]]] = {
    # The first episodes to end are the short ones of the second environment.
    "short ones do not count more often": (
        *([(1.0, (250,)), (2.0, (2,))], [250, 2] * 3, [250.0, 4.0] * 3),
    ),
    "longer than a batch of the collector, and several within one": (
        [(0.5, (1, 99, 100, 101, 1, 350))],
        [1, 99, 100, 101, 1, 350],
        [0.5, 49.5, 50.0, 50.5, 0.5, 175.0],
    ),
    "small rewards are added in double precision": ([(1 / 3, (2_000,))], [2_000], [2_000 / 3]),
}


@pytest.mark.parametrize("name", EPISODES)
def test_lengths_and_returns_of_given_episodes(name: str):
    given, lengths, returns = EPISODES[name]
    makers = [partial(Countdown, *arguments) for arguments in given]
    actor, _ = actor_critic(Countdown())
    found = evaluate(makers, actor, episodes=len(lengths), num_envs=len(makers))
    assert found[1].tolist() == lengths
    assert found[0].tolist() == pytest.approx(returns, rel=1e-7)


class Rewards(Countdown):
    """Two rewards, those of two agents."""

    reward_space = spaces.Box(-9, 9, (2,), np.float32)

    def step(self, action: Any) -> Any:
        observation, _, *flags = super().step(action)
        return observation, np.array([1.0, 2.0], np.float32), *flags


def test_several_rewards_give_several_returns():
    actor, _ = actor_critic(Countdown())
    returns, lengths = evaluate(lambda: Rewards(lengths=(3, 5)), actor, episodes=2)
    assert returns.tolist() == [[3.0, 6.0], [5.0, 10.0]]
    assert lengths.tolist() == [3, 5]


# -- training goes on as if there had been no evaluation -------------------------------------


def make_normalizer() -> ObservationNormalizer:
    normalizer = ObservationNormalizer(2)
    normalizer.update(TensorDict({"observation": 3 * torch.randn(50, 2) + 1}, [50]))
    return normalizer


@pytest.mark.parametrize("frozen", [False, True])
def test_statistics_are_frozen_and_the_flag_is_restored(frozen: bool):
    actor, _ = actor_critic(Countdown())
    normalizer = make_normalizer()
    if frozen:
        normalizer.freeze()
    before = copy.deepcopy(normalizer.state_dict())
    found = evaluate(Countdown, actor, episodes=5, observation_transform=normalizer, seed=1)
    torch.testing.assert_close(normalizer.state_dict(), before, rtol=0, atol=0)
    assert normalizer.frozen is frozen
    again = evaluate(Countdown, actor, episodes=5, observation_transform=normalizer, seed=1)
    torch.testing.assert_close(found, again, rtol=0, atol=0)


def test_the_transform_is_applied():
    """The policy pushes to the side to which the pole, as it sees it, leans."""

    class Lean(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.one_hot((x[..., 2] + 0.5 * x[..., 3] > 0).long(), 2)

    policy = TensorDictModule(Lean(), ["observation"], ["action"])
    mirror = TensorDictModule(torch.neg, ["observation"], ["observation"])
    options: dict[str, Any] = {"episodes": 3, "seed": 0}
    right, _ = evaluate("CartPole-v1", policy, **options)
    options["observation_transform"] = mirror
    wrong, _ = evaluate("CartPole-v1", policy, **options)
    assert right.min() > 100 > 20 > wrong.max()


def test_a_transform_that_cannot_be_frozen_is_not_updated():
    class Counts(TensorDictModule):
        count = 0

        def update(self, observations: TensorDict) -> None:
            self.count += observations.numel()

    transform = Counts(nn.Identity(), ["observation"], ["observation"])
    evaluate(Countdown, actor_critic(Countdown())[0], observation_transform=transform)
    assert transform.count == 0


class Noisy(nn.Module):
    """Draws in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.modes.append(self.training)
        return x


def test_modes_and_random_numbers_are_restored():
    noisy, inner = Noisy(), nn.BatchNorm1d(2).eval()
    network = nn.Sequential(noisy, inner, nn.Linear(2, 2))
    actor = categorical_actor(network)
    state, modes = torch.random.get_rng_state(), [x.training for x in actor.modules()]
    weights = copy.deepcopy(actor.state_dict())
    for seed in (None, 3):
        evaluate(Countdown, actor, episodes=2, seed=seed, exploration_type=ExplorationType.RANDOM)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [x.training for x in actor.modules()] == modes
    assert noisy.modes
    assert not any(noisy.modes)
    torch.testing.assert_close(actor.state_dict(), weights, rtol=0, atol=0)


def test_a_seed_repeats_random_actions_and_another_or_none_does_not():
    actor, _ = actor_critic("CartPole-v1")
    options: dict[str, Any] = {"episodes": 6, "exploration_type": ExplorationType.RANDOM}
    first, again, other = (evaluate("CartPole-v1", actor, **options, seed=x)[0] for x in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    deterministic = evaluate("CartPole-v1", actor, episodes=6, seed=1)[0]
    assert not torch.equal(first, deterministic)
    unseeded = [evaluate("CartPole-v1", actor, episodes=8)[0] for _ in range(2)]
    assert not torch.equal(*unseeded)  # their environments differ


@pytest.mark.parametrize("num_envs", [1, 3])
def test_a_recurrent_policy_starts_each_episode_without_memory(num_envs: int):
    lstm = LSTMModule(2, 4, in_key="observation", out_key="features")
    actor = categorical_actor(lstm, nn.Linear(4, 2), in_key="features")

    class Remembered(Countdown):
        """The reward is the action, which depends on all observations of the episode."""

        def step(self, action: Any) -> Any:
            observation, _, *others = super().step(action)
            return observation, float(action), *others

    options: dict[str, Any] = {"episodes": 6, "num_envs": num_envs}
    returns, _ = evaluate(lambda: Remembered(lengths=(5, 9)), actor, **options)
    each = returns.reshape(-1, num_envs)
    assert (each[0::2] == each[0]).all()
    assert (each[1::2] == each[1]).all()


@pytest.mark.parametrize("wrap", [lambda x: x, TensorActor])
def test_policies_of_a_collector(wrap: Any):
    actor, *_ = actor_critic("CartPole-v1", shared=True)
    expected = evaluate("CartPole-v1", actor, episodes=3, seed=0)
    found = evaluate("CartPole-v1", wrap(actor), episodes=3, seed=0)
    torch.testing.assert_close(found, expected)
    assert all(x.training for x in actor.modules())


@pytest.mark.parametrize("fail_at", [1, 150])
def test_an_error_of_the_environment_restores_everything_and_closes(fail_at: int):
    actor, _ = actor_critic(Countdown())
    actor.train()
    normalizer, made = make_normalizer(), []

    def make() -> gym.Env:
        made.append(Countdown(fail_at=fail_at))
        return made[-1]

    state = torch.random.get_rng_state()
    options: dict[str, Any] = {"observation_transform": normalizer, "seed": 0, "num_envs": 2}
    with pytest.raises(RuntimeError, match="the simulator failed"):
        evaluate(make, actor, episodes=100, **options)
    assert [env.closed for env in made] == [1, 1]
    assert not normalizer.frozen
    assert all(x.training for x in [*actor.modules(), *normalizer.modules()])
    assert torch.equal(torch.random.get_rng_state(), state)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"episodes": 0}, ValueError, "episodes must be a whole number of at least 1, got 0"),
    ({"episodes": -3}, ValueError, "got -3"),
    ({"episodes": 2.5}, ValueError, r"got 2\.5"),
    ({"episodes": None}, ValueError, "got None"),
    ({"num_envs": 0}, ValueError, "num_envs must be a whole number"),
    ({"seed": -1}, ValueError, "seed"),
    ({"make_env": 3}, TypeError, "make_env must be the id of an environment"),
    ({"make_env": ["CartPole-v1"] * 2, "num_envs": 3}, ValueError, "holds 2 environments"),
    ({"policy": 3}, TypeError, "policy must be a TensorDictModule, got int"),
    ({"policy": nn.Linear(4, 2)}, TypeError, "Wrap it, if it takes tensors"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str):
    policy = actor_critic("CartPole-v1")[0]
    arguments = {"make_env": "CartPole-v1", "policy": policy, **options}
    state, normalizer = torch.random.get_rng_state(), ObservationNormalizer(4)
    with pytest.raises(error, match=message):
        evaluate(**arguments, observation_transform=normalizer)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not normalizer.frozen
    assert policy.training


# -- long episodes --------------------------------------------------------------------------


@pytest.mark.parametrize("as_list", [False, True])
def test_max_steps_ends_episodes(as_list: bool):
    """An episode that is longer counts with the return so far."""
    make = partial(Countdown, 2.0, lengths=(3, 50, 7, 60))
    given: Any = [make, make] if as_list else make
    returns, lengths = evaluate(
        given, actor_critic(Countdown())[0], episodes=8, num_envs=2, max_steps=5, seed=0
    )
    assert sorted(lengths.tolist()) == [3, 3, 5, 5, 5, 5, 5, 5]
    assert torch.equal(returns, 2.0 * lengths)


def test_max_steps_of_an_id():
    _, lengths = evaluate("CartPole-v1", actor_critic("CartPole-v1")[0], episodes=2, max_steps=3)
    assert lengths.tolist() == [3, 3]


def test_max_steps_of_a_vector_environment_names_the_fix():
    make = partial(SyncVectorEnv, [Countdown] * 2)
    with pytest.raises(TypeError, match=r"SyncVectorEnv.*max_episode_steps"):
        evaluate(make, actor_critic(Countdown())[0], max_steps=3)
    vector = make()
    with pytest.raises(TypeError, match=r"SyncVectorEnv.*max_episode_steps"):
        evaluate(lambda: vector, actor_critic(Countdown())[0], max_steps=3)
    assert vector.closed
    with pytest.raises(TypeError, match="is or makes a Countdown"):
        evaluate(Countdown(), actor_critic(Countdown())[0], max_steps=3)
    with pytest.raises(ValueError, match="max_steps must be a whole number"):
        evaluate(Countdown, actor_critic(Countdown())[0], max_steps=0)


def test_a_bar_counts_episodes(monkeypatch: pytest.MonkeyPatch):
    import tqdm.auto

    class Bar(tqdm.auto.tqdm):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options | {"file": io.StringIO(), "disable": False, "delay": 0})
            bars.append(self)

    bars: list[Any] = []
    monkeypatch.setattr(tqdm.auto, "tqdm", Bar)
    evaluate(Countdown, actor_critic(Countdown())[0], episodes=5, num_envs=2, seed=0)
    assert [(x.n, x.total) for x in bars] == [(6, 6)]
