"""Spaces and environments of any two of them, and updates of networks for them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.objectives import value as torchrl_value

from ppokit import GAE, DualClipPPOLoss, GymCollector, PPOUpdate, TrainingStep

VECTOR = spaces.Box(-1, 1, (3,), np.float32)
CHOICE = spaces.Discrete(3)
BOX = spaces.Box(-2, 3, (2,), np.float32)

ACTIONS: dict[str, spaces.Space] = {
    "Box ()": spaces.Box(-2, 3, (), np.float32),
    "Box (2,)": BOX,
    "Box (2, 3)": spaces.Box(-2, 3, (2, 3), np.float32),
    "Discrete": CHOICE,
    "MultiDiscrete, unequal": spaces.MultiDiscrete([2, 4]),
    "MultiDiscrete, equal": spaces.MultiDiscrete([3, 3]),
    "MultiBinary": spaces.MultiBinary(4),
    "Dict": spaces.Dict(steer=BOX, gear=CHOICE),
    "Dict of an action": spaces.Dict(action=CHOICE),
    "Dict, nested": spaces.Dict(
        car=spaces.Dict(steer=BOX, gear=CHOICE),
        horn=spaces.MultiBinary(2),
        lights=spaces.MultiDiscrete([2, 4]),
        dials=spaces.MultiDiscrete([3, 3]),
    ),
    "Tuple, alike": spaces.Tuple([CHOICE, CHOICE]),
    "Tuple, unlike": spaces.Tuple([CHOICE, BOX]),
    "Tuple of Dicts": spaces.Tuple([spaces.Dict(gear=CHOICE), spaces.Dict(gear=CHOICE)]),
}
FLAT = list(ACTIONS)[:7]  # of one part
IMAGE = spaces.Box(0, 255, (36, 40, 3), np.uint8)
OBSERVATIONS: dict[str, tuple[spaces.Space, int]] = {  # and the number of features
    "vector": (VECTOR, 3),
    "number": (spaces.Box(-1, 1, (), np.float32), 1),
    "matrix": (spaces.Box(-1, 1, (2, 3), np.float32), 6),
    "float64": (spaces.Box(-1, 1, (3,), np.float64), 3),
    "bytes": (spaces.Box(0, 255, (5,), np.uint8), 5),
    "integers": (spaces.Box(-5, 5, (2,), np.int64), 2),
    "image, HWC": (IMAGE, 512),
    "image, CHW": (spaces.Box(0, 255, (4, 36, 36), np.uint8), 512),
    "image, HW": (spaces.Box(0, 255, (40, 36), np.uint8), 512),
    "image of floats": (spaces.Box(0, 1, (36, 36, 1), np.float32), 512),
    "small image": (spaces.Box(0, 255, (7, 7, 3), np.uint8), 147),
    "Discrete": (spaces.Discrete(5), 5),
    "MultiDiscrete": (spaces.MultiDiscrete([4, 4]), 8),
    "MultiBinary": (spaces.MultiBinary(3), 3),
    "Dict": (spaces.Dict(image=IMAGE, speed=VECTOR, level=spaces.Discrete(4)), 519),
    "Dict, nested": (spaces.Dict(a=spaces.Dict(b=VECTOR, c=spaces.Discrete(2))), 5),
    "Tuple": (spaces.Tuple([VECTOR, VECTOR]), 6),
}


class Spaces(gym.Env):
    """Random observations of a space; actions of another are checked, and give the reward."""

    def __init__(self, observations: spaces.Space = VECTOR, actions: spaces.Space = CHOICE) -> None:
        self.observation_space = copy.deepcopy(observations)
        self.action_space = copy.deepcopy(actions)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.time = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.check(action)
        self.time += 1
        ends = bool(self.np_random.random() < 0.1)
        return self.observe(), float(self.np_random.normal()), ends, self.time >= 7, {}

    def observe(self) -> Any:
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observation_space.sample()

    def check(self, action: Any) -> None:
        if self.action_space.shape == ():  # torchrl has an array of one for a number
            action = np.reshape(action, ())
        assert self.action_space.contains(action), action


class Unbounded(Spaces):
    """An environment that takes actions beyond the bounds, which a normal distribution draws."""

    def check(self, action: Any) -> None:
        low = spaces.flatten(self.action_space, action)
        assert np.isfinite(low).all()


class Masked(Spaces):
    """A mask says which of three choices are possible; another one is an error."""

    def __init__(self, key: str = "action_mask") -> None:
        self.key = key
        super().__init__(spaces.Dict({"observation": VECTOR, key: spaces.MultiBinary(3)}))

    def observe(self) -> Any:
        observation = super().observe()
        observation[self.key][self.np_random.integers(3)] = 1
        self.allowed = observation[self.key]
        return observation

    def check(self, action: Any) -> None:
        assert self.allowed[action]


def make_env(actions: str = "Discrete", observations: str = "vector") -> Callable[[], Any]:
    """Return what makes an environment of these spaces, wrapped as the pages say."""
    kind: Any = Unbounded if "Box" in str(ACTIONS[actions]) else Spaces

    def make() -> Any:
        env = kind(OBSERVATIONS[observations][0], ACTIONS[actions])
        if actions in ("Tuple, unlike", "Tuple of Dicts"):
            parts = spaces.Dict({f"part{i}": x for i, x in enumerate(env.action_space)})
            env = gym.wrappers.TransformAction(env, lambda action: tuple(action.values()), parts)
        return env

    return make


# -- updates -----------------------------------------------------------------------------


def make_update(networks: Any, *, kind: Any = DualClipPPOLoss, **options: Any) -> PPOUpdate:
    actor, critic_of_loss, *critic = networks
    loss = kind(actor, critic_of_loss, entropy_coeff=0.01, **options.pop("loss", {}))
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2)
    of_critic = {"gamma": 0.9, "lmbda": 0.9, "value_network": (*critic, critic_of_loss)[0]}
    return PPOUpdate(
        TrainingStep(loss, optimizer, **options),
        advantage=(GAE if kind is DualClipPPOLoss else torchrl_value.GAE)(**of_critic),
        minibatch_size=6,
        epochs=2,
        seed=0,
    )


def updated(networks: Any, batch: Any, **options: Any) -> list[Tensor]:
    """The parameters of copies of the networks after an update."""
    copies = copy.deepcopy(networks)
    make_update(copies, **options)(batch.clone())
    return [x for network in copies for x in network.parameters()]


def collect(make: Any, actor: Any, frames: int = 24, **options: Any) -> Any:
    collector = GymCollector(make, actor, frames_per_batch=frames, num_envs=2, **options)
    collector.set_seed(0)
    torch.manual_seed(1)
    batch = collector.rollout()
    collector.shutdown()
    return batch


def collect_by_torchrl(env: Any, actor: Any) -> Any:
    options: Any = {"frames_per_batch": 24, "auto_register_policy_transforms": False}
    collector = Collector(env, actor, **options)
    batch = next(iter(collector))
    collector.shutdown()
    return batch


def assert_updates(networks: Any, batch: Any, **options: Any) -> Any:
    """Update once, and assert that all parameters of both networks moved and are finite."""
    parameters = {x for network in networks for x in network.parameters()}
    before = {x: x.detach().clone() for x in parameters}
    statistics = make_update(networks, **options)(batch)
    assert all(x.isfinite().all() for x in parameters)
    moved = [not torch.equal(x, before[x]) for x in parameters]
    assert sum(moved) >= len(moved) - 1
    return statistics


def linear_layers(network: nn.Module) -> list[nn.Linear]:
    return [x for x in network.modules() if isinstance(x, nn.Linear)]
