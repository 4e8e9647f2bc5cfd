"""actor_critic: a policy and a critic for the spaces of an environment."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import gymnasium as gym
import torch
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from tensordict.nn import (
    CompositeDistribution,
    TensorDictModule,
    TensorDictSequential,
)
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.data import Categorical, Composite, MultiCategorical
from torchrl.envs import EnvBase
from torchrl.modules import ProbabilisticActor, ValueOperator

from ppokit._batch import as_key, key_parts
from ppokit._checks import check_device, whole
from ppokit.networks.encoders import (
    MEMORIES,
    Body,
    Detached,
    Encoder,
    Inputs,
    RecurrentNetworks,
    encoders_of,
    orthogonal,
)
from ppokit.networks.heads import Head, make_head
from ppokit.recurrent import check_has_transformer
from ppokit.spaces import MASK, OnlySpaces, check_starts, wrap

_LAYERS: dict[str | Callable[[], nn.Module], Callable[..., nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
}
_BOOKKEEPING = ("step_count", "episode_reward", "is_init")  # of torchrl's transforms
_MASK = "_mask"  # no entry of a batch


def actor_critic(
    env_or_spaces: object,
    hidden: Sequence[int] = (64, 64),
    activation: str | Callable[[], nn.Module] = "tanh",
    *,
    encoder: Encoder | Mapping[NestedKey, Encoder] | None = None,
    memory: str | None = None,
    memory_size: int = 64,
    context: int = 64,
    layers: int = 1,
    heads: int = 4,
    critic_hidden: Sequence[int] | None = None,
    shared: bool = False,
    detach_critic: bool | None = None,
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
        hidden: units of each hidden layer, behind the encoder. For the features of an encoder
            alone, give ``hidden=()``.
        activation: ``"tanh"``, ``"relu"``, ``"elu"``, ``"gelu"``, ``"silu"``, or a function that
            makes a module.
        encoder: from an observation to features: ``"nature"`` (Mnih et al., 2015, Nature 518; 512
            features), ``"impala"`` (Espeholt et al., 2018, arXiv:1802.01561; 256) or ``"small"``
            (Young and Tian, 2019, arXiv:1903.03176; 128, for images of 10 x 10 to 32 x 32), for all
            images; a module, for the only observation; or a mapping of observations to these. A
            module is called with floats ``[N, *shape]`` (choices: one-hot vectors ``[N, F]``), and
            actor and critic have a copy each. By default images of at least 36 x 36 pass
            ``"nature"``, and everything else is flattened.
        memory: ``"lstm"`` (:class:`~ppokit.LSTMModule`), ``"gru"`` or ``"transformer"``
            (:class:`~ppokit.TransformerModule`, if torchrl has one) between encoder and hidden
            layers, with torch's initial weights; None for none.
        memory_size: units of the memory.
        context: of a transformer, at least the number of steps of the longest episode.
        layers: of a transformer.
        heads: of the attention of a transformer.
        critic_hidden: hidden layers of the critic; None for ``hidden``.
        shared: policy and critic share encoder and hidden layers; with a memory encoder and memory.
        detach_critic: the losses of a shared critic do not train what is shared. None: with a
            memory alone.
        squash: actions of a Box lie between its bounds (``TanhNormal``). Otherwise they have no
            bounds: wrap the environment in ``gymnasium.wrappers.ClipAction``.
        log_scale: initial logarithm of the scale of a normal distribution.
        in_keys: observations to read; None for all but the mask, and what torchrl's ``StepCounter``
            and ``RewardSum`` write.
        mask_key: an observation with a flag for each choice of a Discrete action; the default is
            used where it exists. Declare a mask of ``info`` in the observation space. None for no
            mask.
        device: of the modules; None for the environment's, or the CPU.

    Shape:
        - observations ``[*B, *shape]`` of any dtype; bytes are divided by the upper bound of
          their space (0 by 1), and choices become one-hot. An array of three or four dimensions (of
          two, if bytes) is an image: height and width are neighbours, a square or else the
          largest; others are channels, which come last if sizes do not tell.
        - action ``[*B, *action]``, its log-probability ``[*B]``, ``"state_value"`` ``[*B, 1]``.

    Returns:
        ``(actor, critic)``; with ``shared=True`` ``(actor, value_head, critic)``: the head, which
        reads the features of the actor, is for the loss, and the full critic for GAE. With a memory
        a named tuple: ``policy`` collects, ``actor`` and ``value`` are for the loss, ``critic`` for
        GAE.

    Raises:
        TypeError: ``env_or_spaces`` or an encoder is of another kind, or a space has no network.
        ValueError: an argument is out of range, a space does not start at 0, an observation or a
            part of an action has a name that the networks write, or ``squash`` meets bounds that
            are not finite.
        KeyError: the environment lacks one of ``in_keys``, or ``mask_key``.
        ImportError: ``memory="transformer"``, and the installed torchrl has no transformer.

    Example:
        >>> import torch
        >>> import gymnasium as gym
        >>> from ppokit.networks import actor_critic
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
    make_layer = cast("Callable[..., nn.Module]", _LAYERS.get(activation, activation))
    sizes = {"hidden": hidden, "critic_hidden": critic_hidden, "memory_size": [memory_size]}
    _check_options(sizes, memory, log_scale, make_layer, shared, detach_critic)
    critic_hidden = hidden if critic_hidden is None else critic_hidden
    in_keys = [in_keys] if isinstance(in_keys, str) else in_keys
    observations, actions = _specs(env_or_spaces, in_keys)
    _check_not_empty(observations=observations, actions=actions)
    check_device(device := getattr(env_or_spaces, "device", None) if device is None else device)
    mask = None if mask_key is None else as_key(mask_key)
    keys = _keys_to_read(observations, in_keys, mask)
    mask_spec = None if mask is None else observations.get(mask, None)
    specs = {key: observations[key] for key in keys}
    transformer = _transformer(memory, memory_size, context, layers, heads)
    encoders = encoders_of(encoder, specs)
    inputs = Inputs(specs, encoders, make_layer, memory, memory_size, transformer)
    body = inputs.body("", hidden, is_shared=shared)
    options = body.features, squash, log_scale, mask_spec, device
    of_actions = {as_key(k): make_head(x, *options) for k, x in actions.items(True, True)}
    actor = _actor(body, keys, of_actions, None if mask_spec is None else mask).to(device)
    if shared:
        own = inputs.behind(body, () if memory is None else critic_hidden)
        if memory is not None if detach_critic is None else detach_critic:
            own.network.insert(0, Detached())
    else:
        own = inputs.body("critic_", critic_hidden)
    own.network.append(orthogonal(nn.Linear(own.features, 1), 1.0))
    value = ValueOperator(own.network, in_keys=own.reads).to(device)
    if not own.modules:
        return actor, value
    critic = TensorDictSequential([*own.modules, value]).to(device)
    if memory is None:
        return actor, value, critic
    return RecurrentNetworks.of(actor, value, critic, is_shared=shared)


def _keys_to_read(
    observations: Composite, in_keys: Sequence[NestedKey] | None, mask: NestedKey | None
) -> list[NestedKey]:
    """Return the observations that the networks read; raise if there is none, or one is unknown."""
    there = [as_key(key) for key in observations.keys(True, True)]
    keys = [x for x in there if x != mask and key_parts(x)[-1] not in _BOOKKEEPING]
    keys = keys if in_keys is None else [as_key(key) for key in in_keys]
    unknown = [x for x in keys if x not in there]
    unknown += [mask] if mask not in (None, MASK, *there) else []
    if unknown or not keys:
        raise KeyError(f"in_keys or mask_key: {unknown} is not among the observations, {there}.")
    arrays = [x for x in keys if isinstance(observations[x].dtype, torch.dtype)]
    if len(arrays) < len(keys):
        raise TypeError(
            f"The observations {[x for x in keys if x not in arrays]} are no arrays. Name the "
            f"others, in_keys={arrays}, or encode these in an environment wrapper."
        )
    return keys


def _transformer(
    memory: str | None, size: int, context: int, layers: int, heads: int
) -> dict[str, int]:
    """Return the arguments of a transformer, if the memory is one and the options fit together."""
    if memory != "transformer":
        if (context, layers, heads) != (64, 1, 4):
            raise ValueError(f"context, layers and heads are for a transformer, not {memory!r}.")
        return {}
    check_has_transformer()
    for name, x in {"context": context, "layers": layers, "heads": heads}.items():
        whole().check(x, name)
    if size % heads:
        raise ValueError(f"memory_size={size} must be a multiple of heads={heads}.")
    return {"num_layers": layers, "num_heads": heads, "max_seq_len": context + 1}


def _check_options(
    hidden: Mapping[str, object],
    memory: str | None,
    log_scale: float,
    activation: object,
    shared: bool,
    detach_critic: bool | None,
) -> None:
    for name, sizes in hidden.items():
        if isinstance(sizes, spaces.Space):
            raise TypeError("Give both spaces as a pair: actor_critic((observations, actions)).")
        if sizes is None and name == "critic_hidden":
            continue
        if not (isinstance(sizes, Sequence) and all(isinstance(x, int) and x > 0 for x in sizes)):
            raise ValueError(f"{name} must be numbers of units such as (64, 64), got {sizes!r}.")
    if not callable(activation) or isinstance(activation, nn.Module):
        raise ValueError(
            f"activation must be one of {[*_LAYERS]} or a function that makes a module, such "
            f"as nn.Mish; got {activation!r}."
        )
    if not math.isfinite(log_scale):
        raise ValueError(f"log_scale must be a finite number, got {log_scale}.")
    if memory not in (None, *MEMORIES):
        raise ValueError(f"memory must be one of {[*MEMORIES]} or None, got {memory!r}.")
    if shared and memory is None and hidden["critic_hidden"] is not None:
        raise ValueError("A shared encoder has one size: leave critic_hidden out, or shared.")
    if detach_critic is not None and not shared:
        raise ValueError("detach_critic is for shared=True: a separate critic has its own layers.")


def _check_not_empty(**specs: Composite) -> None:
    for name, spec in specs.items():
        if spec.is_empty(True):
            raise ValueError(f"The space of {name} is empty: there is nothing to make layers for.")


class _Heads(nn.ModuleList):
    """The parameters of the distributions of all parts of an action."""

    def forward(self, features: Tensor) -> tuple[Tensor, ...]:
        outputs = [head(features) for head in self]
        return tuple(x for out in outputs for x in (out if isinstance(out, tuple) else (out,)))


def _actor(
    body: Body, keys: list[NestedKey], heads: dict[NestedKey, Head], mask: NestedKey | None
) -> Any:
    """Return the actor of a body, and of heads by the key of the action of each."""
    (key, head), *others = heads.items()
    layer = head.layer
    names: list[NestedKey] = [*head.parameters]
    reads: Any = names
    distribution, options, actions = head.distribution, head.options, [key]
    if others or key_parts(key)[-1] != "action":
        layer, reads, actions = _Heads(x.layer for x in heads.values()), ["params"], None
        names = [
            ("params", *key_parts(key), name) for key, x in heads.items() for name in x.parameters
        ]
        distribution = CompositeDistribution
        options = {
            "distribution_map": {key: x.distribution for key, x in heads.items()},
            "extra_kwargs": {key: x.options for key, x in heads.items()},
        }
    elif mask is not None:
        names, reads = ["logits"], {"logits": "logits", "mask": _MASK}
    entries = [*names, "state_value", *heads, *keys]
    pairs = itertools.combinations(map(key_parts, entries), 2)
    if taken := {as_key(b) for a, b in pairs if a[: len(b)] == b[: len(a)]}:
        raise ValueError(
            f"Rename {taken} of the observations or actions with a gymnasium wrapper: the networks "
            f"write {entries[: -len(keys)]} into a batch."
        )
    network = body.network.append(layer)
    modules: list[Any] = [*body.modules, TensorDictModule(network, body.reads, names)]
    if mask is not None:
        modules.append(TensorDictModule(Tensor.bool, [mask], [_MASK]))
    return ProbabilisticActor(
        TensorDictSequential(*modules),
        in_keys=reads,
        out_keys=actions,
        distribution_class=distribution,
        distribution_kwargs=options,
        return_log_prob=True,
    )


def _specs(env: Any, in_keys: Sequence[NestedKey] | None) -> tuple[Any, Any]:
    """Return torchrl's specs of observation and action, of one environment."""
    if isinstance(env, EnvBase):
        actions: Any = env.full_action_spec_unbatched.cpu()
        if agents := [x for x, y in actions.items(True) if isinstance(y, Composite) and y.shape]:
            raise ValueError(
                f"{agents} are groups of agents, and actor_critic makes networks of one. "
                "tutorials/multi_agent_ppo.py has networks for several."
            )
        return env.observation_spec_unbatched.cpu(), actions
    if isinstance(env, str):
        env = gym.make(env)
        env.close()
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
    is_tuple = isinstance(action, spaces.Tuple)
    if is_tuple and any(isinstance(x, spaces.Dict) or x != action[0] for x in action):
        action = spaces.Dict({f"part{i}": part for i, part in enumerate(action)})
    for space in (observation, action):
        check_starts(space)
    env = OnlySpaces(observation, action)
    actions = wrap(env, True, in_keys).full_action_spec
    # torchrl encodes observed choices as those of the action.
    kinds = {type(spec) for spec in actions.values(True, True)}
    draws_indices = bool(kinds & {Categorical, MultiCategorical})
    return wrap(env, draws_indices, in_keys).observation_spec, actions
