"""actor_critic: what the networks compute, shared encoders, copies, and bad arguments."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from tensordict import TensorDict
from torch import nn
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase, GymEnv, GymWrapper, StepCounter, TransformedEnv
from torchrl.modules import IndependentNormal, TanhNormal
from torchrl.objectives import ClipPPOLoss

from ppokit import GAE, DualClipPPOLoss
from ppokit.networks import actor_critic
from tests.networks.environments import (
    ACTIONS,
    BOX,
    CHOICE,
    FLAT,
    IMAGE,
    VECTOR,
    Spaces,
    assert_updates,
    collect,
    collect_by_torchrl,
    linear_layers,
    make_env,
)

# -- environments --------------------------------------------------------------------------


def test_every_kind_of_environment():
    single = gym.make("CartPole-v1")
    vector = SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2)
    torchrl = GymEnv("CartPole-v1", categorical_action_encoding=True)
    kinds = ["CartPole-v1", single, vector, torchrl, TransformedEnv(torchrl, StepCounter())]
    kinds.append((single.observation_space, single.action_space))
    expected = [(64, 4), (64,), (64, 64), (64,), (2, 64), (2,)]
    expected += [*expected[:4], (1, 64), (1,)]
    for env in kinds:
        networks = actor_critic(env)
        assert [tuple(x.shape) for net in networks for x in net.parameters()] == expected
    single.reset()  # none is closed
    vector.reset()
    vector.close()


# -- networks ------------------------------------------------------------------------------


def assert_orthogonal(layer: nn.Module, gain: float) -> None:
    weight = layer.weight.detach().flatten(1)
    weight = weight if weight.shape[0] <= weight.shape[1] else weight.T
    expected = gain**2 * torch.eye(len(weight))
    torch.testing.assert_close(weight @ weight.T, expected, atol=1e-5, rtol=1e-4)
    assert (layer.bias == 0).all()


@pytest.mark.parametrize("shared", [False, True])
def test_weights_are_orthogonal_with_the_gains_of_the_papers(shared: bool):
    actor, *critics = actor_critic((VECTOR, BOX), (5, 7), shared=shared)
    critic = critics[-1]
    for network, last in ((actor, 0.01), (critic, 1.0)):
        *hidden, head = linear_layers(network)
        for layer in hidden:
            assert_orthogonal(layer, math.sqrt(2))
        assert_orthogonal(head, last)
    if not shared:
        assert not torch.equal(linear_layers(actor)[0].weight, linear_layers(critic)[0].weight)


def test_convolutions_are_orthogonal():
    _, critic = actor_critic((IMAGE, CHOICE), hidden=())
    layers = [x for x in critic.modules() if isinstance(x, nn.Conv2d | nn.Linear)]
    assert [tuple(x.weight.shape[:2]) for x in layers[:3]] == [(32, 3), (64, 32), (64, 64)]
    for layer, gain in zip(layers, [math.sqrt(2)] * 4 + [1.0], strict=True):
        assert_orthogonal(layer, gain)


@pytest.mark.parametrize(
    ("activation", "kind"),
    [
        *(("tanh", nn.Tanh), ("relu", nn.ReLU), ("elu", nn.ELU), ("gelu", nn.GELU)),
        *(("silu", nn.SiLU), (nn.Mish, nn.Mish), (lambda: nn.LeakyReLU(0.2), nn.LeakyReLU)),
    ],
)
def test_activations(activation: Any, kind: Any):
    for network in actor_critic((VECTOR, CHOICE), activation=activation):
        assert len([x for x in network.modules() if type(x) is kind]) == 2


def test_sizes_of_hidden_layers():
    actor, critic = actor_critic((VECTOR, CHOICE), (), critic_hidden=[9, 8])
    assert [x.out_features for x in linear_layers(actor)] == [3]
    assert [x.out_features for x in linear_layers(critic)] == [9, 8, 1]


@pytest.mark.parametrize("squash", [False, True])
def test_log_scale_is_the_initial_one_and_does_not_depend_on_the_observation(squash: bool):
    actor, _ = actor_critic((VECTOR, BOX), log_scale=-1.25, squash=squash)
    batch = actor(TensorDict({"observation": torch.randn(6, 3)}, [6]))
    torch.testing.assert_close(batch["scale"], torch.full((6, 2), math.exp(-1.25)))
    assert [tuple(x.shape) for x in actor.parameters()][-1] == (2,)
    assert actor[-1].distribution_class is (TanhNormal if squash else IndependentNormal)


def test_device():
    networks = actor_critic((IMAGE, ACTIONS["Dict, nested"]), device="meta", squash=True)
    for network in networks:
        assert {x.device.type for x in network.state_dict().values()} == {"meta"}
    (steer,) = [x for x in networks[0][-1].distribution_kwargs["extra_kwargs"].values() if x]
    assert steer["low"].device.type == "meta"


def test_two_calls_with_one_seed_are_alike():
    first, second = ([torch.manual_seed(3), actor_critic("CartPole-v1")][1] for _ in "12")
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a.state_dict(), b.state_dict(), rtol=0, atol=0)


# -- shared --------------------------------------------------------------------------------


@pytest.mark.parametrize("actions", [*FLAT, "Dict"])
def test_a_shared_encoder_is_called_once_by_the_loss_and_learns_from_both_losses(actions: str):
    make = make_env(actions)
    actor, head, critic = networks = actor_critic(make(), shared=True)
    encoder = critic[0].module
    assert encoder is actor.module[0][0].module
    assert {id(x) for x in critic.parameters()} - {id(x) for x in actor.parameters()} == {
        id(x) for x in head.parameters()
    }
    batch = collect(make, actor)
    assert not [key for key in batch.keys(True) if str(key).startswith("_")]
    batch = GAE(gamma=0.9, lmbda=0.9, value_network=critic)(batch)
    expected = critic(batch.clone())["state_value"]
    torch.testing.assert_close(head(actor(batch.clone()))["state_value"], expected)
    loss, calls = DualClipPPOLoss(actor, head, entropy_coeff=0.01), []
    encoder.register_forward_hook(lambda *_: calls.append(1))
    losses = loss(batch)
    assert len(calls) == 1
    weight = linear_layers(encoder)[0].weight
    for name in ("loss_objective", "loss_critic"):
        (gradient,) = torch.autograd.grad(losses[name].sum(), [weight], retain_graph=True)
        assert gradient.abs().sum() > 0
    assert_updates(networks, batch)


def test_shared_with_torchrls_collector_and_loss():
    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    networks = actor_critic(env, shared=True)
    batch = collect_by_torchrl(env, networks[0])
    assert "_features" not in batch.keys()
    assert_updates(networks, batch, kind=ClipPPOLoss)


# -- copies ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("actions", ACTIONS)
def test_copies_and_states(actions: str, shared: bool):
    networks = actor_critic((VECTOR, ACTIONS[actions]), shared=shared)
    others = actor_critic((VECTOR, ACTIONS[actions]), shared=shared)
    for network, other in zip(networks, others, strict=True):
        other.load_state_dict(network.state_dict())
    batch = TensorDict({"observation": torch.randn(4, 3)}, [4])
    for copied in (others, copy.deepcopy(networks), pickle.loads(pickle.dumps(networks))):
        torch.manual_seed(1)
        expected = networks[0](batch.clone())
        torch.manual_seed(1)
        found = copied[0](batch.clone())
        torch.testing.assert_close(found.to_dict(), expected.to_dict(), rtol=0, atol=0)
        value, own = copied[-1](found)["state_value"], networks[-1](expected)["state_value"]
        assert torch.equal(value, own)


# -- bad input -----------------------------------------------------------------------------

UNBOUNDED = spaces.Box(-np.inf, 1, (2,), np.float32)
UNBOUNDED_DOUBLE = spaces.Box(-np.inf, np.inf, (2,), np.float64)
WIDE_MASK = spaces.Dict(observation=VECTOR, action_mask=spaces.MultiBinary(4))
UNEQUAL, EQUAL = ACTIONS["MultiDiscrete, unequal"], ACTIONS["MultiDiscrete, equal"]
CHOICES_FROM_1 = spaces.Dict(a=spaces.MultiDiscrete([3, 3], start=[0, 1]))
OBSERVED_FROM_2 = spaces.Tuple([spaces.Discrete(3, start=2)] * 2)
MATRICES = [spaces.MultiDiscrete([[2, 3], [3, 4]]), spaces.MultiDiscrete([[2, 2], [2, 2]])]
MATRICES += [spaces.Tuple([x] * 2) for x in (spaces.MultiDiscrete([2, 3]), ACTIONS["Tuple, alike"])]
GRAPH = spaces.Graph(spaces.Box(-1, 1, (2,)), None)
NO_ARRAYS = [spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3)]), MATRICES[0]]
SIZES: list[Any] = [64, "64", (0,), (-1,), (64.0,), ("a",), (None,)]
PARAMETERS = r"Rename {'loc'}.* write \['loc', 'scale', 'state_value', 'action'\]"
SQUASH: dict[str, Any] = {"squash": True}

BAD_TYPES: list[tuple[Any, dict[str, Any], str]] = [
    (3, {}, "takes an environment .* got 3"),
    ((VECTOR,), {}, r"or a pair \(observation space, action space\)"),
    ((VECTOR, BOX, BOX), {}, "or a pair"),
    ((3, 4), {}, "or a pair"),
    ((spaces.Text(3), BOX), {}, r"observations \['observation'\] are no arrays"),
    ((spaces.Dict(a=VECTOR, b=spaces.Text(3)), BOX), {}, r"\['b'\] are no .*in_keys=\['a'\]"),
    (
        (spaces.Dict(a=VECTOR, b=GRAPH), BOX),
        {},
        r"FilterObservation\(env, \['a'\]\).*in_keys=",
    ),
    ((spaces.Sequence(VECTOR), BOX), {}, "no encoding for observation"),
    ((VECTOR, spaces.Box(0, 3, (2,), np.int64)), {}, "no head for Bounded(?s:.*) A Box has float"),
    *(((VECTOR, space), {}, "no head for (?s:.*) have at most one dim") for space in MATRICES),
    *(((space, CHOICE), {}, "is no array. Flatten it") for space in NO_ARRAYS),
    (GymWrapper(Spaces(VECTOR, UNEQUAL)), {}, r"categorical_action_encoding=True\)"),
    ((VECTOR, spaces.Dict(t=ACTIONS["Tuple, unlike"])), {}, "of a Tuple, to give its parts names"),
]
BAD_KEYS: list[tuple[Any, dict[str, Any], str]] = [
    ((VECTOR, BOX), {"in_keys": ["x"]}, r"in_keys .*\['x'\] is not among .*observat"),
    ((VECTOR, BOX), {"in_keys": []}, r"in_keys .*\[\] is not among"),
    ((VECTOR, CHOICE), {"in_keys": ["action_mask"]}, r"\['action_mask'\] is not among"),
    ((VECTOR, CHOICE), {"mask_key": "x"}, r"mask_key: \[\'x\'\] is not among"),
]
BAD_VALUES: list[tuple[Any, dict[str, Any], str]] = [
    ((VECTOR, spaces.Discrete(3, start=1)), {}, "starts at 1, and"),
    ((VECTOR, CHOICES_FROM_1), {}, r"starts at \[0 1\], and (?s:.*)TransformAction"),
    ((OBSERVED_FROM_2, BOX), {}, "starts at 2, and .*TransformObservation"),
    ((VECTOR, UNBOUNDED), SQUASH, "finite, or equal. Leave"),
    (gym.wrappers.ClipAction(Spaces(VECTOR, BOX)), SQUASH, "not finite(?s:.*)ClipAction unbounds"),
    ((VECTOR, UNBOUNDED_DOUBLE), SQUASH, "not finite"),
    ((VECTOR, spaces.Box(1, 1)), SQUASH, "or equal. Leave"),
    ((spaces.Dict(loc=BOX, x=VECTOR), BOX), {}, PARAMETERS),
    ((spaces.Dict(params=BOX), ACTIONS["Dict"]), {}, r"Rename {'params'}"),
    ((spaces.Dict(gear=BOX), ACTIONS["Dict"]), {}, r"Rename {'gear'}"),
    ((spaces.Dict(state_value=BOX), CHOICE), {"shared": True}, r"Rename {'state_value'}"),
    ((VECTOR, spaces.Dict(id=CHOICE, params=BOX)), {}, r"Rename {'params'}"),
    ((WIDE_MASK, BOX), {}, r"this mask has shape \[4\], and the action is .*mask_key=None"),
    ((WIDE_MASK, CHOICE), {}, r"this mask has shape \[4\]"),
    (
        (WIDE_MASK, EQUAL),
        {},
        "for one Discrete.* the action is a Discrete of all combinations",
    ),
    ((VECTOR, BOX), {"activation": "swish"}, "'silu'.* got 'swish'"),
    ((VECTOR, BOX), {"activation": nn.Tanh()}, "such as nn.Mish; got Tanh"),
    ((VECTOR, BOX), {"activation": None}, "got None"),
    ((VECTOR, BOX), {"log_scale": math.nan}, "finite number, got nan"),
    ((VECTOR, BOX), {"shared": True, "critic_hidden": (64, 64)}, "one size: leave critic_hidden"),
    *(((VECTOR, BOX), {"hidden": size}, "^hidden must be numbers") for size in SIZES),
    *(((VECTOR, BOX), {"critic_hidden": size}, "^critic_hidden must be numbers") for size in SIZES),
    ((VECTOR, BOX), {"hidden": None}, "got None"),
]
BAD = [(TypeError, *x) for x in BAD_TYPES] + [(KeyError, *x) for x in BAD_KEYS]
BAD += [(ValueError, *x) for x in BAD_VALUES]


@pytest.mark.parametrize(("error", "env", "options", "message"), BAD)
def test_bad_arguments(error: Any, env: Any, options: dict[str, Any], message: str):
    with pytest.raises(error, match=message):
        actor_critic(env, **options)


class Agents(EnvBase):
    """The spaces of three agents in two batched environments, as torchrl's vmas has them."""

    def __init__(self) -> None:
        super().__init__(batch_size=[2])
        for name in ("observation", "action"):
            group = Composite({name: Unbounded((2, 3, 5))}, shape=[2, 3])
            setattr(self, f"{name}_spec", Composite(agents=group, shape=[2]))

    _reset: Any = None
    _step: Any = None
    _set_seed: Any = None


def test_groups_of_agents_raise():
    with pytest.raises(ValueError, match=r"\['agents'\] are groups .*multi_agent_ppo"):
        actor_critic(Agents())


def test_observations_and_actions_of_one_group_are_no_conflict():
    observations, actions = spaces.Dict(car=spaces.Dict(x=BOX)), spaces.Dict(car=ACTIONS["Dict"])
    for shared in (False, True):
        actor, *_ = actor_critic((observations, actions), shared=shared)
        batch = actor(TensorDict({"car": {"x": torch.randn(4, 2)}}, [4]))
        assert {"x", "gear", "steer"} <= set(batch["car"].keys())
