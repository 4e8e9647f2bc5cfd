"""An environment with actions of several parts, and actors for it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from tensordict.nn import CompositeDistribution, TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torch import distributions as d
from torchrl.envs import EnvBase, GymWrapper, RenameTransform, TransformedEnv
from torchrl.modules import (
    LSTMModule,
    MaskedCategorical,
    MaskedOneHotCategorical,
    OneHotCategorical,
    ProbabilisticActor,
    TanhNormal,
)

from tests.blocks import actor_of

STEER, GEAR = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(3)
ACTIONS: dict[str, spaces.Space] = {
    "dict": spaces.Dict(steer=STEER, gear=GEAR),
    "one": spaces.Dict(brake=spaces.Box(0, 1, (), np.float32)),
    "named": spaces.Dict(steer=STEER, gear=GEAR),
    "nested": spaces.Dict(action=spaces.Dict(steer=STEER, gear=GEAR)),
    "deep": spaces.Dict(
        car=spaces.Dict(steer=STEER, gear=GEAR),
        horn=spaces.MultiBinary(2),
        lights=spaces.MultiDiscrete([3, 4]),
        dials=spaces.MultiDiscrete([3, 3]),
    ),
    "masked": spaces.Dict(gear=GEAR, dials=spaces.MultiDiscrete([3, 3])),
    "multi_discrete": spaces.MultiDiscrete([3, 4]),
    "alike": spaces.MultiDiscrete([3, 3]),
    "grid": spaces.MultiDiscrete([3, 4]),
    "pair": spaces.Tuple([spaces.Discrete(3)] * 2),
    "multi_binary": spaces.MultiBinary(4),
}
MASKS = {"masked": (3,), "grid": (3, 4)}


class Mixed(gym.Env):
    """Random observations; an episode ends by chance, or after nine steps, or both at once.

    The reward tells which action came in, in every part. With a mask among the observations, what
    it does not allow is an error; of a mask over a grid torchrl makes one choice of all its cells.
    """

    def __init__(self, actions: str = "dict") -> None:
        self.observation_space = spaces.Box(-9, 9, (3,), np.float32)
        self.action_space = copy.deepcopy(ACTIONS[actions])
        self.mask_shape = MASKS.get(actions)
        if self.mask_shape is not None:
            mask = spaces.Box(0, 1, self.mask_shape, np.int8)
            self.observation_space = spaces.Dict(
                observation=self.observation_space, action_mask=mask
            )

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.time = 0
        return self.observe()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        if self.mask_shape == (3, 4):
            action = np.array(divmod(action, 4))
        assert self.action_space.contains(action)
        if self.mask_shape is not None:
            choice = action["gear"] if isinstance(action, dict) else tuple(action)
            assert self.allowed[choice]
        numbers = spaces.flatten(self.action_space, action).astype(np.float64)
        self.time += 1
        reward = float(numbers @ np.arange(1, numbers.size + 1))
        observation, info = self.observe()
        return observation, reward, bool(self.np_random.random() < 0.1), self.time >= 9, info

    def observe(self) -> tuple[Any, dict]:
        observation = self.np_random.normal(size=3).astype(np.float32)
        if self.mask_shape is None:
            return observation, {}
        self.allowed = self.np_random.random(self.mask_shape) < 0.5
        self.allowed.flat[0] = True
        mask = self.allowed.astype(np.int8)
        return {"observation": observation, "action_mask": mask}, {}


class Several(d.Distribution):
    """Independent choices of three and of four, as a user writes it for a MultiDiscrete space."""

    def __init__(self, logits: Tensor, one_hot: bool = False) -> None:
        self.parts = [d.Categorical(logits=x) for x in logits.split((3, 4), -1)]
        self.one_hot = one_hot
        super().__init__(logits.shape[:-1], torch.Size([7 if one_hot else 2]), False)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        choices = [part.sample(sample_shape) for part in self.parts]
        if self.one_hot:
            pairs = zip(choices, (3, 4), strict=True)
            return torch.cat([nn.functional.one_hot(x, n) for x, n in pairs], -1)
        return torch.stack(choices, -1)

    def log_prob(self, value: Tensor) -> Tensor:
        choices: Iterable[Tensor] = value.unbind(-1)
        if self.one_hot:
            choices = [x.argmax(-1) for x in value.split((3, 4), -1)]
        pairs = zip(self.parts, choices, strict=True)
        return torch.stack([part.log_prob(x) for part, x in pairs]).sum(0)

    @property
    def deterministic_sample(self) -> Tensor:
        return self.sample()

    def entropy(self) -> Tensor:
        return torch.stack([part.entropy() for part in self.parts]).sum(0)


class Together(d.Independent):
    """Choices or bits that are scored together."""

    @property
    def deterministic_sample(self) -> Tensor:
        return self.base_dist.mode


def alike(logits: Tensor, one_hot: bool = False) -> d.Distribution:
    """Two choices of three."""
    kind: Any = OneHotCategorical if one_hot else d.Categorical
    choices = kind(logits=logits.unflatten(-1, (2, 3)))
    return Together(choices, 1)


def switches(logits: Tensor) -> d.Distribution:
    """Independent bits."""
    return Together(d.Bernoulli(logits=logits), 1)


class Cut(nn.Linear):
    """A linear layer, cut into pieces of these shapes."""

    def __init__(self, inputs: int, shapes: list[tuple[int, ...]]) -> None:
        self.shapes = [torch.Size(shape) for shape in shapes]
        super().__init__(inputs, sum(shape.numel() for shape in self.shapes))

    def forward(self, input: Tensor) -> Any:
        pieces = super().forward(input).split([shape.numel() for shape in self.shapes], -1)
        pairs = zip(pieces, self.shapes, strict=True)
        return tuple(piece.unflatten(-1, shape) for piece, shape in pairs)


class Exp(nn.Module):
    """The exponentials of some numbers."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.exp() for x in inputs)


class ToBool(nn.Module):
    """A mask with one flag for each choice, also of those of a grid."""

    def forward(self, mask: Tensor) -> Tensor:
        return (mask.flatten(-2) if mask.shape[-2:] == (3, 4) else mask).bool()


def make_mixed_actor(
    actions: str = "dict", *, categorical: bool = False, **more: Any
) -> ProbabilisticActor:
    """An actor for these actions; its choices are indices, or one-hot."""
    torch.manual_seed(0)
    choice: Any = d.Categorical if categorical else OneHotCategorical
    masked: Any = MaskedCategorical if categorical else MaskedOneHotCategorical
    encoding = {} if categorical else {"one_hot": True}
    heads: dict[Any, tuple[Any, dict[str, tuple[int, ...]], dict[str, Any]]]
    steer = (TanhNormal, {"loc": (2,), "scale": (2,)}, {})
    gear = (choice, {"logits": (3,)}, {})
    heads = {
        "one": {"brake": (TanhNormal, {"loc": (1,), "scale": (1,)}, {"low": 0.0})},
        "deep": {
            "horn": (d.Bernoulli, {"logits": (2,)}, {}),
            ("car", "gear"): gear,
            ("car", "steer"): steer,
            "lights": (Several, {"logits": (7,)}, encoding),
            "dials": (choice, {"logits": (2, 3)}, {}),
        },
        "masked": {
            "dials": (choice, {"logits": (2, 3)}, {}),
            "gear": (masked, {"logits": (3,)}, {}),
        },
    }.get(actions, {"steer": steer, "gear": gear})
    flat = {
        "multi_discrete": (Several, (7,), encoding),
        "alike": (alike, (6,), encoding),
        "pair": (alike, (6,), encoding),
        "multi_binary": (switches, (4,), {}),
    }
    to_bool = TensorDictModule(ToBool(), ["action_mask"], ["mask"])
    if actions == "grid":
        network = TensorDictModule(nn.Linear(3, 12), ["observation"], ["logits"])
        return actor_of(TensorDictSequential(network, to_bool), masked, ["logits", "mask"])
    if actions in flat:
        distribution, shape, options = flat[actions]
        network = TensorDictModule(nn.Linear(3, *shape), ["observation"], ["logits"])
        return actor_of(network, distribution, distribution_kwargs=options)
    shapes = {
        ("params", *((name,) if isinstance(name, str) else name), parameter): shape
        for name, (_, parameters, _) in heads.items()
        for parameter, shape in parameters.items()
    }
    scales = [key for key in shapes if key[-1] == "scale"]
    modules = [TensorDictModule(Cut(3, list(shapes.values())), ["observation"], list(shapes))]
    modules += [TensorDictModule(Exp(), scales, scales)] if scales else []
    if actions == "masked":
        to_bool.out_keys = [("params", "gear", "mask")]
        modules.append(to_bool)
    options = {
        "distribution_map": {name: distribution for name, (distribution, _, _) in heads.items()},
        "extra_kwargs": {name: extra for name, (_, _, extra) in heads.items()},
    }
    if actions in ("named", "nested"):
        options["name_map"] = {name: ("action", name) for name in heads}
    network = TensorDictSequential(*modules)
    more["distribution_kwargs"] = options
    return actor_of(network, CompositeDistribution, ["params"], **more)


def make_recurrent_actor() -> ProbabilisticActor:
    """An actor with a memory for the actions "nested", whose gears are indices."""
    torch.manual_seed(0)
    lstm = LSTMModule(3, 8, in_key="observation", out_key="embed")
    keys: Any = [("params", "steer", "loc"), ("params", "steer", "scale")]
    keys.append(("params", "gear", "logits"))
    heads = TensorDictModule(Cut(8, [(2,), (2,), (3,)]), ["embed"], keys)
    network = TensorDictSequential(lstm, heads, TensorDictModule(Exp(), [keys[1]], [keys[1]]))
    options = {
        "distribution_map": {"steer": TanhNormal, "gear": d.Categorical},
        "name_map": {"steer": ("action", "steer"), "gear": ("action", "gear")},
    }
    return actor_of(network, CompositeDistribution, ["params"], distribution_kwargs=options)


def torchrl_env(actions: str = "dict", *, categorical: bool = False) -> Callable[[], EnvBase]:
    """What makes torchrl's environment of these actions."""

    def make() -> EnvBase:
        env: Any = GymWrapper(Mixed(actions), categorical_action_encoding=categorical)
        if actions == "named":
            keys = {"in_keys": [], "out_keys": [], "in_keys_inv": ["steer", "gear"]}
            names = [("action", "steer"), ("action", "gear")]
            env = TransformedEnv(env, RenameTransform(**keys, out_keys_inv=names))
        return env

    return make
