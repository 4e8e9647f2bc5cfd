"""actor_critic: a policy and a critic for the spaces of an environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import torch
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from tensordict.nn import CompositeDistribution, TensorDictModule, TensorDictSequential
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.envs import EnvBase
from torchrl.modules import ProbabilisticActor, ValueOperator

from ppokit._keys import as_key, key_parts
from ppokit.collectors.spaces import MASK, OnlySpaces, wrap
from ppokit.networks.encoders import Encoder, orthogonal
from ppokit.networks.heads import Head, make_head

_ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "gelu": nn.GELU, "silu": nn.SiLU}
_BOOKKEEPING = ("step_count", "episode_reward", "is_init")  # of torchrl's transforms
_FEATURES, _MASK = "_features", "_mask"  # no entries of a batch


def actor_critic(
    env_or_spaces: Any,
    hidden: Sequence[int] = (64, 64),
    activation: str | Callable[[], nn.Module] = "tanh",
    *,
    critic_hidden: Sequence[int] | None = None,
    shared: bool = False,
    squash: bool = False,
    log_scale: float = -0.5,
    in_keys: Sequence[NestedKey] | None = None,
    mask_key: NestedKey | None = MASK,
    device: torch.device | str | None = None,
) -> Any:
    r"""Return a policy and a critic for the spaces of an environment.

    Both are plain torchrl modules. Weights are orthogonal with gain :math:`\sqrt 2`, in the last
    layer of the policy 0.01 and of the critic 1; biases are 0 (Andrychowicz et al., 2021,
    arXiv:2006.05990; Huang et al., 2022, "The 37 Implementation Details of PPO").

    The distribution follows the action space: ``IndependentNormal`` with a scale that does not
    depend on the observation (Box), ``Categorical`` (Discrete; of a torchrl environment with
    one-hot actions ``OneHotCategorical``), several choices or bits scored together
    (MultiDiscrete, MultiBinary), and a ``CompositeDistribution`` of these (Dict). Unlike
    parts of a Tuple are named ``"part0"``, ``"part1"``, ...; torchrl needs the environment wrapped
    in that way.

    Args:
        env_or_spaces: a gymnasium environment or vector environment, an id, a pair (observation
            space, action space), or a torchrl environment. It is not closed, nor stepped.
        hidden: units of each hidden layer. Images pass the Nature CNN before; for its 512 features
            alone, give ``hidden=()``.
        activation: ``"tanh"``, ``"relu"``, ``"elu"``, ``"gelu"``, ``"silu"``, or a function that
            makes a module.
        critic_hidden: hidden layers of the critic; None for ``hidden``.
        shared: policy and critic share encoder and hidden layers.
        squash: actions of a Box lie between its bounds (``TanhNormal``). Otherwise they have no
            bounds: wrap the environment in ``gymnasium.wrappers.ClipAction``.
        log_scale: initial logarithm of the scale of a normal distribution.
        in_keys: observations to read; None for all but the mask, and what torchrl's ``StepCounter``
            and ``RewardSum`` write.
        mask_key: an observation that says which choices of a Discrete action are possible; it is
            used where the environment has it. A mask in ``info`` is not seen in the spaces: declare
            it in the observation space. None for no mask.
        device: of the modules; None for the environment's, or the CPU.

    Shape:
        - observations ``[*B, *shape]`` of any dtype; bytes are divided by 255. An array of three
          dimensions (of two, if bytes) with sides of at least 36 is an image.
        - action ``[*B, *action]``, its log-probability ``[*B]``, ``"state_value"`` ``[*B, 1]``.

    Returns:
        ``(actor, critic)``; with ``shared=True`` ``(actor, value_head, critic)``: the head, which
        reads the features of the actor, is for the loss, and the full critic for GAE.

    Raises:
        TypeError: ``env_or_spaces`` is of another kind, or a space has no network.
        ValueError: an argument is out of range, a space does not start at 0, or ``squash`` meets
            bounds that are not finite.
        KeyError: the environment lacks one of ``in_keys``.

    Example:
        >>> import gymnasium as gym
        >>> actor, critic = actor_critic("CartPole-v1")
        >>> from tensordict import TensorDict
        >>> batch = actor(TensorDict({"observation": torch.zeros(5, 4)}, [5]))
        >>> batch["action"].shape, critic(batch)["state_value"].shape
        (torch.Size([5]), torch.Size([5, 1]))
        >>> actor, value_head, critic = actor_critic(
        ...     (gym.spaces.Box(0, 255, (84, 84, 4), "uint8"), gym.spaces.Discrete(6)),
        ...     hidden=(), shared=True)
        >>> sum(x.numel() for x in value_head.parameters())  # 512 features and a bias
        513
    """
    make_layer = _activation(activation)
    critic_hidden = hidden if critic_hidden is None else critic_hidden
    for name, sizes in (("hidden", hidden), ("critic_hidden", critic_hidden)):
        if isinstance(sizes, int | str) or any(int(size) != size or size < 1 for size in sizes):
            raise ValueError(f"{name} must be numbers of units such as (64, 64), got {sizes!r}.")
    if shared and critic_hidden is not hidden:
        raise ValueError("A shared encoder has one size: leave critic_hidden out, or shared.")
    observations, actions = _specs(env_or_spaces)
    device = getattr(env_or_spaces, "device", None) if device is None else device
    mask: Any = mask_key if mask_key in [*observations.keys(True, True)] else None
    keys = _keys(observations, in_keys, mask)
    specs = [observations[key] for key in keys]
    encoder = Encoder(specs, hidden, make_layer)
    heads = {
        as_key(key): make_head(
            spec,
            encoder.size,
            squash=squash,
            log_scale=log_scale,
            is_masked=mask is not None,
            device=device,
        )
        for key, spec in actions.items(True, True)
    }
    actor = _actor(encoder, keys, heads, mask, shared).to(device)
    own = encoder if shared else Encoder(specs, critic_hidden, make_layer)
    value: Any = orthogonal(nn.Linear(own.size, 1), 1.0)
    if shared:
        value_head: Any = ValueOperator(value, in_keys=[_FEATURES]).to(device)
        encode: Any = TensorDictModule(encoder, keys, [_FEATURES])
        return actor, value_head, TensorDictSequential(encode, value_head)
    own.hidden.append(value)
    return actor, ValueOperator(own, in_keys=keys).to(device)


class _Heads(nn.ModuleList):
    """The parameters of the distributions of all parts of an action."""

    def forward(self, features: Tensor) -> tuple[Tensor, ...]:
        outputs = [head(features) for head in self]
        return tuple(x for out in outputs for x in (out if isinstance(out, tuple) else (out,)))


def _actor(
    encoder: Encoder, keys: Any, heads: dict[NestedKey, Head], mask: Any, shared: bool
) -> Any:
    """Return the actor of an encoder and heads, by the key of the action of each."""
    (key, head), *others = heads.items()
    layer, names = head.layer, [*head.parameters]
    reads: Any = names
    distribution, options, actions = head.distribution, head.options, [key]
    if others or key_parts(key)[-1] != "action":
        layer, reads, actions = _Heads(x.layer for x in heads.values()), ["params"], None
        names: Any = [
            ("params", *key_parts(key), name) for key, x in heads.items() for name in x.parameters
        ]
        distribution: Any = CompositeDistribution
        options = {
            "distribution_map": {key: x.distribution for key, x in heads.items()},
            "extra_kwargs": {key: x.options for key, x in heads.items()},
        }
    elif mask is not None:
        names, reads = ["logits"], {"logits": "logits", "mask": _MASK}
    if shared:
        modules: list[Any] = [TensorDictModule(encoder, keys, [_FEATURES])]
        modules.append(TensorDictModule(layer, [_FEATURES], names))
    else:
        encoder.hidden.append(layer)
        modules = [TensorDictModule(encoder, keys, names)]
    if mask is not None:
        modules.append(TensorDictModule(_to_bool, [mask], [_MASK]))
    return ProbabilisticActor(
        TensorDictSequential(*modules),
        in_keys=reads,
        out_keys=actions,
        distribution_class=distribution,
        distribution_kwargs=options,
        return_log_prob=True,
    )


def _to_bool(mask: Tensor) -> Tensor:
    return mask.bool()


def _activation(activation: str | Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    found = _ACTIVATIONS.get(activation) if isinstance(activation, str) else activation
    if not callable(found) or isinstance(found, nn.Module):
        raise ValueError(
            f"activation must be one of {[*_ACTIVATIONS]} or a function that makes a module, such "
            f"as nn.Mish; got {activation!r}."
        )
    return found  # pyright: ignore[reportReturnType]


def _keys(
    observations: Any, in_keys: Sequence[NestedKey] | None, mask: NestedKey | None
) -> list[NestedKey]:
    there = [as_key(key) for key in observations.keys(True, True)]
    if in_keys is None:
        keys = [x for x in there if x != mask and key_parts(x)[-1] not in _BOOKKEEPING]
    else:
        keys = [as_key(key) for key in in_keys]
    absent = [key for key in keys if key not in there]
    if absent or not keys:
        raise KeyError(f"in_keys {absent or keys} are not among the observations, {there}.")
    return keys


def _specs(env: Any) -> tuple[Any, Any]:
    """Return torchrl's specs of observation and action, of one environment."""
    if isinstance(env, EnvBase):
        return env.observation_spec_unbatched.cpu(), env.full_action_spec_unbatched.cpu()
    if isinstance(env, str):
        made = gym.make(env)
        made.close()
        env = made
    if isinstance(env, VectorEnv):
        env = env.single_observation_space, env.single_action_space
    elif hasattr(env, "observation_space") and hasattr(env, "action_space"):
        env = env.observation_space, env.action_space
    if not (isinstance(env, tuple) and [isinstance(x, spaces.Space) for x in env] == [True] * 2):
        raise TypeError(
            "actor_critic takes an environment of gymnasium or torchrl, an id, or a pair "
            f"(observation space, action space); got {env!r}."
        )
    observation, action = env
    if isinstance(action, spaces.Tuple) and any(part != action[0] for part in action):
        action = spaces.Dict({f"part{i}": part for i, part in enumerate(action)})
    for space in (observation, action):
        _check_starts(space)
    wrapper = wrap(OnlySpaces(observation, action), True)
    return wrapper.observation_spec, wrapper.full_action_spec


def _check_starts(space: spaces.Space) -> None:
    """Raise for integers that do not start at 0: torchrl's specs start there."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for part in space.values() if isinstance(space, spaces.Dict) else space:
            _check_starts(part)
    start: Any = getattr(space, "start", 0)
    if torch.as_tensor(start).any():
        raise ValueError(
            f"{space} starts at {start}, and torchrl's encoding starts at 0: the environment would "
            "receive other actions. Wrap it in gymnasium.wrappers.TransformAction or "
            "TransformObservation."
        )
