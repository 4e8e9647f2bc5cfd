"""actor_critic: every space, what the networks compute, and one update of each."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from tensordict import TensorDict
from tensordict.nn import CompositeDistribution, set_composite_lp_aggregate
from torch import distributions as d
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import Composite, Unbounded
from torchrl.envs import (
    Compose,
    EnvBase,
    GymEnv,
    GymWrapper,
    InitTracker,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import (
    IndependentNormal,
    MaskedCategorical,
    MaskedOneHotCategorical,
    OneHotCategorical,
    ProbabilisticActor,
    TanhNormal,
    ValueOperator,
)
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives import value as torchrl_value

from ppokit import GAE, DualClipPPOLoss, GymCollector, PPOUpdate, TensorActor, TrainingStep
from ppokit.networks import actor_critic
from tests.networks.environments import (
    ACTIONS,
    BOX,
    CHOICE,
    IMAGE,
    OBSERVATIONS,
    VECTOR,
    Masked,
    Spaces,
    make_env,
)

FLAT = ["Box ()", "Box (2,)", "Box (2, 3)", "Discrete"]
FLAT += ["MultiDiscrete, unequal", "MultiDiscrete, equal", "MultiBinary"]


@pytest.fixture(autouse=True)
def _log_prob_of_each_part() -> Iterator[None]:
    with set_composite_lp_aggregate(False):
        yield


def make_update(networks: Any, *, kind: Any = DualClipPPOLoss, **options: Any) -> PPOUpdate:
    actor, critic_of_loss, *critic = networks
    loss = kind(actor, critic_of_loss, entropy_coeff=0.01, **options.pop("loss", {}))
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2)
    of_critic = {"gamma": 0.9, "lmbda": 0.9, "value_network": (*critic, critic_of_loss)[0]}
    return PPOUpdate(
        TrainingStep(loss, optimizer, **options),
        advantage=(GAE if kind is DualClipPPOLoss else torchrl_value.GAE)(**of_critic),
        minibatch_size=12,
        epochs=2,
        seed=0,
    )


def collect(make: Any, actor: Any, frames: int = 24, **options: Any) -> Any:
    collector = GymCollector(make, actor, frames_per_batch=frames, num_envs=2, **options)
    collector.set_seed(0)
    torch.manual_seed(1)
    batch = collector.rollout()
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


def draws_index(actor: Any) -> bool:
    return actor.module[-1].distribution_class is d.Categorical


# -- actions -------------------------------------------------------------------------------


@pytest.mark.parametrize("actions", ACTIONS)
def test_every_action_space_is_collected_and_updated_with_the_exact_kl(actions: str):
    make = make_env(actions)
    networks = actor_critic(make())
    batch = collect(make, networks[0])
    statistics = assert_updates(networks, batch, loss={"kl_coeff": 0.1})
    assert 0 < statistics["loss_kl"] < 1
    assert batch["state_value"].shape == (2, 12, 1)


def test_one_log_probability_for_all_parts():
    with set_composite_lp_aggregate(True):
        make = make_env("Dict, nested")
        networks = actor_critic(make())
        batch = collect(make, networks[0])
        assert batch["sample_log_prob"].shape == (2, 12)
        assert_updates(networks, batch)


@pytest.mark.parametrize("actions", ["Tuple, unlike", "Tuple of Dicts"])
def test_unlike_parts_of_a_tuple_have_names_also_without_the_wrapper(actions: str):
    wrapped, _ = actor_critic(make_env(actions)())
    actor, _ = actor_critic((VECTOR, ACTIONS[actions]))
    assert actor.out_keys == wrapped.out_keys
    assert "part0" in str(actor.out_keys)


@pytest.mark.parametrize("actions", ["Box ()", "Box (2,)", "Box (2, 3)", "Dict"])
def test_squashed_actions_lie_between_the_bounds(actions: str):
    def make() -> gym.Env:
        return Spaces(VECTOR, ACTIONS[actions])  # which raises for others

    networks = actor_critic(make(), squash=True, log_scale=1.0)
    batch = collect(make, networks[0])
    key = "steer" if actions == "Dict" else "action"
    assert batch[key].min() < -1.5
    assert batch[key].max() > 2.5
    assert_updates(networks, batch)


DISTRIBUTIONS = {
    "Box ()": (IndependentNormal, (1,)),
    "Box (2,)": (IndependentNormal, (2,)),
    "Box (2, 3)": (IndependentNormal, (2, 3)),
    "Discrete": (d.Categorical, ()),
    "MultiDiscrete, unequal": (d.Independent, (2,)),
    "MultiDiscrete, equal": (d.Independent, (2,)),
    "MultiBinary": (d.Independent, (4,)),
    "Dict": (CompositeDistribution, None),
}


@pytest.mark.parametrize("actions", DISTRIBUTIONS)
def test_the_distribution_and_the_shape_of_an_action(actions: str):
    kind, shape = DISTRIBUTIONS[actions]
    actor, critic = actor_critic((VECTOR, ACTIONS[actions]))
    assert type(actor) is ProbabilisticActor
    assert type(critic) is ValueOperator
    batch = TensorDict({"observation": torch.randn(5, 4, 3)}, [5, 4])
    assert isinstance(actor.get_dist(batch), kind)
    if shape is not None:
        drawn = actor(batch)
        assert drawn["action"].shape == (5, 4, *shape)
        assert drawn["action_log_prob"].shape == (5, 4)


BOTH = [(actions, categorical) for actions in (*FLAT, "Dict") for categorical in (False, True)]
BOTH.remove(("MultiDiscrete, unequal", False))  # raises, see BAD


@pytest.mark.parametrize(("actions", "categorical"), BOTH)
def test_torchrls_environments_in_both_encodings(actions: str, categorical: bool):
    env = GymWrapper(make_env(actions)(), categorical_action_encoding=categorical)
    networks = actor_critic(env)
    collector = Collector(
        env, networks[0], frames_per_batch=24, auto_register_policy_transforms=False
    )
    batch = next(iter(collector))
    collector.shutdown()
    assert_updates(networks, batch)


@pytest.mark.parametrize(("encoding", "kind"), [(False, OneHotCategorical), (True, d.Categorical)])
def test_the_encoding_of_a_torchrl_environment_gives_the_distribution(encoding: bool, kind: Any):
    env = GymEnv("CartPole-v1", categorical_action_encoding=encoding)
    actor, _ = actor_critic(env)
    batch = env.rollout(3, actor)
    assert actor[-1].distribution_class is kind
    assert batch["action"].shape[1:] == (() if encoding else (2,))


NUMBERS = torch.tensor([2, 4])


def test_a_multi_discrete_of_unequal_numbers_is_a_categorical_for_each_part():
    actor, _ = actor_critic((VECTOR, ACTIONS["MultiDiscrete, unequal"]))
    with torch.no_grad():
        for x in actor.parameters():
            x.add_(0.3 * torch.randn_like(x))
    batch = TensorDict({"observation": torch.randn(500, 3)}, [500])
    drawn = actor(batch.clone())
    assert (drawn["action"] < NUMBERS).all()
    assert [drawn["action"][:, i].unique().numel() for i in (0, 1)] == [2, 4]
    logits = drawn["logits"]
    assert (logits[:, 0, 2:] == -math.inf).all()
    parts = [d.Categorical(logits=logits[:, 0, :2]), d.Categorical(logits=logits[:, 1])]
    log_prob = parts[0].log_prob(drawn["action"][:, 0]) + parts[1].log_prob(drawn["action"][:, 1])
    torch.testing.assert_close(drawn["action_log_prob"], log_prob)
    found = actor.get_dist(batch)
    torch.testing.assert_close(found.entropy(), parts[0].entropy() + parts[1].entropy())
    best = torch.stack([part.probs.argmax(-1) for part in parts], -1)
    assert torch.equal(found.deterministic_sample, best)


def test_derivatives_of_unequal_numbers_are_a_categoricals_for_each_part():
    """Entropy, log-probability and KL, whose terms of absent choices are infinite differences."""
    networks = actor_critic((VECTOR, ACTIONS["MultiDiscrete, unequal"]))
    other = copy.deepcopy(networks[0])
    batch = TensorDict({"observation": torch.randn(6, 3)}, [6])
    with torch.no_grad():
        for x in networks[0].parameters():
            x.add_(0.3 * torch.randn_like(x))
    action = torch.tensor([[0, 3], [1, 0], [0, 2], [1, 1], [0, 0], [1, 3]])

    def gradients(loss: torch.Tensor) -> torch.Tensor:
        return torch.cat(
            [
                x.flatten()
                for x in torch.autograd.grad(loss, networks[0].parameters(), retain_graph=True)
            ]
        )

    def parts(actor: Any) -> list[Any]:
        logits = actor.get_dist(batch).base_dist.logits
        return [d.Categorical(logits=logits[:, 0, :2]), d.Categorical(logits=logits[:, 1])]

    found, before = networks[0].get_dist(batch), other.get_dist(batch)
    values = [found.entropy(), found.log_prob(action), d.kl_divergence(before, found)]
    new, old = parts(networks[0]), parts(other)
    expected = [
        sum(x.entropy() for x in new),
        sum(x.log_prob(action[:, i]) for i, x in enumerate(new)),
        sum(d.kl_divergence(a, b) for a, b in zip(old, new, strict=True)),
    ]
    for value, reference in zip(values, expected, strict=True):
        torch.testing.assert_close(value, reference)
        torch.testing.assert_close(gradients(value.sum()), gradients(reference.sum()))


def test_a_multi_binary_is_a_bernoulli_for_each_bit():
    actor, _ = actor_critic((VECTOR, ACTIONS["MultiBinary"]))
    batch = actor(TensorDict({"observation": torch.randn(50, 3)}, [50]))
    bits = d.Bernoulli(logits=batch["logits"])
    torch.testing.assert_close(batch["action_log_prob"], bits.log_prob(batch["action"]).sum(-1))
    torch.testing.assert_close(actor.get_dist(batch).entropy(), bits.entropy().sum(-1))
    with torch.no_grad():
        for x in actor.parameters():
            x.zero_()
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        assert (actor(batch)["action"] == 0).all()  # torch's mode is NaN


DETERMINISTIC = {
    "Box (2,)": lambda dist: dist.base_dist.loc,
    "Discrete": lambda dist: dist.probs.argmax(-1),
    "MultiDiscrete, equal": lambda dist: dist.base_dist.probs.argmax(-1),
    "MultiBinary": lambda dist: (dist.base_dist.probs > 0.5).float(),
}


@pytest.mark.parametrize("actions", DETERMINISTIC)
def test_deterministic_actions_are_the_most_probable(actions: str):
    actor, _ = actor_critic((VECTOR, ACTIONS[actions]))
    batch = TensorDict({"observation": torch.randn(20, 3)}, [20])
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        drawn = actor(batch)
    assert torch.equal(drawn["action"], DETERMINISTIC[actions](actor.get_dist(batch)))


def test_deterministic_squashed_actions_are_the_mean_between_the_bounds():
    actor, _ = actor_critic((VECTOR, BOX), squash=True)
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        drawn = actor(TensorDict({"observation": torch.randn(20, 3)}, [20]))
    torch.testing.assert_close(drawn["action"], 0.5 + 2.5 * drawn["loc"].tanh())


# -- masks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["action_mask", "allowed"])
@pytest.mark.parametrize("shared", [False, True])
def test_masked_choices_are_never_drawn(key: str, shared: bool):
    networks = actor_critic(Masked(key), mask_key=(key,), shared=shared)
    assert networks[-1].in_keys == ["observation"]
    batch = collect(lambda: Masked(key), networks[0], 100)
    dist = networks[0].get_dist(batch.clone())
    assert isinstance(dist, MaskedCategorical)
    assert (dist.probs[~batch[key].bool()] == 0).all()
    assert batch[key].bool().gather(-1, batch["action"].unsqueeze(-1)).all()
    assert_updates(networks, batch, loss={"kl_coeff": 0.1})
    torchrl = GymWrapper(Masked(key))
    actor, _ = actor_critic(torchrl, mask_key=key)
    assert actor[-1].distribution_class is MaskedOneHotCategorical
    torchrl.rollout(100, actor, break_when_any_done=False)


def test_without_a_mask_key_the_mask_is_an_observation():
    actor, critic = actor_critic(Masked(), mask_key=None)
    assert set(critic.in_keys) == {"observation", "action_mask"}
    assert actor[-1].distribution_class is d.Categorical


# -- observations --------------------------------------------------------------------------


@pytest.mark.parametrize("actions", ["Discrete", "Box (2,)"])
@pytest.mark.parametrize("observations", OBSERVATIONS)
def test_every_observation_space(observations: str, actions: str):
    """A collector encodes observed choices as those of the action: both encodings are here."""
    make = make_env(actions, observations)
    networks = actor_critic(make(), hidden=(8,))
    encoder = networks[1].module
    first, *_ = linear_layers(encoder[-3:])  # after those of a convolutional network
    assert first.in_features == OBSERVATIONS[observations][1]
    batch = collect(make, networks[0], 6)
    assert_updates(networks, batch)


@pytest.mark.parametrize("observations", ["float64", "Discrete", "Dict, nested", "MultiDiscrete"])
@pytest.mark.parametrize("categorical", [False, True])
def test_observations_of_torchrls_environments(observations: str, categorical: bool):
    make = make_env("Box (2,)", observations)
    transforms = Compose(StepCounter(), RewardSum(), InitTracker())
    env = TransformedEnv(GymWrapper(make(), categorical_action_encoding=categorical), transforms)
    networks = actor_critic(env)
    assert not {"step_count", "episode_reward", "is_init"} & set(networks[1].in_keys)
    with torch.no_grad():
        batch = env.rollout(6, networks[0], break_when_any_done=False)
    assert_updates(networks, batch.unsqueeze(0))
    several = SerialEnv(2, lambda: GymWrapper(make(), categorical_action_encoding=categorical))
    actor, critic = actor_critic(several)
    assert critic(several.rollout(3, actor))["state_value"].shape[-1] == 1


@pytest.mark.parametrize("categorical", [False, True])
def test_an_observed_choice_is_one_hot_in_the_network(categorical: bool):
    space = spaces.MultiDiscrete([4, 4])
    env = GymWrapper(Spaces(space, BOX), categorical_action_encoding=categorical)
    _, critic = actor_critic(env)
    one_hot = torch.tensor([[0, 0, 1, 0, 1, 0, 0, 0]])
    observed = torch.tensor([[2, 0]]) if categorical else one_hot.unflatten(-1, (2, 4)).bool()
    encode = critic.module[0]
    assert torch.equal(
        encode(observed.reshape(1, *env.observation_spec["observation"].shape)), one_hot.float()
    )


def test_bytes_are_divided_by_255():
    _, critic = actor_critic((spaces.Box(0, 255, (2,), np.uint8), CHOICE))
    encode = critic.module[0]
    pixels = torch.tensor([[0, 255], [51, 102]], dtype=torch.uint8)
    torch.testing.assert_close(encode(pixels), torch.tensor([[0.0, 1.0], [0.2, 0.4]]))


def test_a_layout_of_an_image_is_the_same_image():
    """Channels last, channels first and float pixels give the features of one another."""
    image = torch.randint(0, 256, (2, 5, 36, 40, 3), dtype=torch.uint8)
    torch.manual_seed(0)
    _, last = actor_critic((IMAGE, CHOICE))
    _, first = actor_critic((spaces.Box(0, 255, (3, 36, 40), np.uint8), CHOICE))
    _, floats = actor_critic((spaces.Box(0, 1, (36, 40, 3), np.float32), CHOICE))
    for other in (first, floats):
        other.load_state_dict(last.state_dict())
    (key,) = last.in_keys
    assert key == "pixels"
    expected = last.module(image)
    assert expected.shape == (2, 5, 1)
    torch.testing.assert_close(first.module(image.movedim(-1, -3)), expected)
    torch.testing.assert_close(floats.module(image / 255), expected)


def test_in_keys_choose_observations():
    both = spaces.Dict(a=VECTOR, b=spaces.Dict(c=VECTOR))
    _, critic = actor_critic((both, CHOICE), in_keys=[("b", "c")])
    assert critic.in_keys == [("b", "c")]
    actor, critic = actor_critic((both, CHOICE), in_keys=["a", ("b", "c")], shared=True)[::2]
    assert actor.in_keys == critic.in_keys == ["a", ("b", "c")]


# -- environments --------------------------------------------------------------------------


def numbered(env: Any) -> list[tuple[int, ...]]:
    torch.manual_seed(0)
    return [tuple(x.shape) for network in actor_critic(env) for x in network.parameters()]


def test_every_kind_of_environment():
    single = gym.make("CartPole-v1")
    vector = SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2)
    torchrl = GymEnv("CartPole-v1", categorical_action_encoding=True)
    kinds = ["CartPole-v1", single, vector, torchrl, TransformedEnv(torchrl, StepCounter())]
    kinds.append((single.observation_space, single.action_space))
    expected = [(64, 4), (64,), (64, 64), (64,), (2, 64), (2,)]
    expected += [*expected[:4], (1, 64), (1,)]
    for env in kinds:
        assert numbered(env) == expected
    single.reset()  # none is closed
    vector.reset()
    vector.close()


# -- networks ------------------------------------------------------------------------------


def linear_layers(network: nn.Module) -> list[nn.Linear]:
    return [x for x in network.modules() if isinstance(x, nn.Linear)]


@pytest.mark.parametrize("shared", [False, True])
def test_weights_are_orthogonal_with_the_gains_of_the_papers(shared: bool):
    actor, *critics = actor_critic((VECTOR, BOX), (5, 7), shared=shared)
    critic = critics[-1]
    for network, last in ((actor, 0.01), (critic, 1.0)):
        *hidden, head = linear_layers(network)
        for layer, gain in [(x, math.sqrt(2)) for x in hidden] + [(head, last)]:
            weight = layer.weight.detach()
            weight = weight if weight.shape[0] <= weight.shape[1] else weight.T
            expected = gain**2 * torch.eye(len(weight))
            torch.testing.assert_close(weight @ weight.T, expected, atol=1e-5, rtol=1e-4)
            assert (layer.bias == 0).all()
    if not shared:
        assert not torch.equal(linear_layers(actor)[0].weight, linear_layers(critic)[0].weight)


def test_convolutions_are_orthogonal():
    _, critic = actor_critic((IMAGE, CHOICE), hidden=())
    layers = [x for x in critic.modules() if isinstance(x, nn.Conv2d | nn.Linear)]
    assert [tuple(x.weight.shape[:2]) for x in layers[:3]] == [(32, 3), (64, 32), (64, 64)]
    for layer, gain in zip(layers, [2.0] * 4 + [1.0], strict=True):
        weight = layer.weight.detach().flatten(1)
        weight = weight if weight.shape[0] <= weight.shape[1] else weight.T
        torch.testing.assert_close(
            weight @ weight.T, gain * torch.eye(len(weight)), atol=1e-4, rtol=1e-3
        )


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
    for name in ("loss_objective", "loss_critic"):
        (gradient,) = torch.autograd.grad(
            losses[name].sum(), [linear_layers(encoder)[0].weight], retain_graph=True
        )
        assert gradient.abs().sum() > 0
    assert_updates(networks, batch)


def test_shared_with_torchrls_collector_and_loss():
    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    networks = actor_critic(env, shared=True)
    collector = Collector(
        env, networks[0], frames_per_batch=24, auto_register_policy_transforms=False
    )
    batch = next(iter(collector))
    collector.shutdown()
    assert "_features" not in batch.keys()
    assert_updates(networks, batch, kind=ClipPPOLoss)


# -- with the blocks -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("actions", [*FLAT, "Dict", "masked", "shared"])
def test_a_graph_updates_as_eager_code_does(actions: str):
    make = Masked if actions == "masked" else make_env(actions.replace("shared", "Discrete"))
    networks = actor_critic(make(), hidden=(8,), shared=actions == "shared")
    batch = collect(make, networks[0])
    found = []
    for compiled in (False, {"backend": "aot_eager"}):
        copies = copy.deepcopy(networks)
        update = make_update(copies, compile=compiled, loss={"kl_coeff": 0.1})
        update(batch.clone())
        found.append([x for network in copies for x in network.parameters()])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("actions", ["Box (2,)", "Discrete", "MultiDiscrete, equal", "MultiBinary"])
def test_torchrls_loss_gives_the_same_update(actions: str):
    make = make_env(actions)
    networks = actor_critic(make())
    batch, found = collect(make, networks[0]), []
    for kind in (DualClipPPOLoss, ClipPPOLoss):
        copies = copy.deepcopy(networks)
        make_update(copies, kind=kind)(batch.clone())
        found.append([x for network in copies for x in network.parameters()])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"squash": True}, {"actions": "Discrete"}])
def test_tensor_actor_and_collector_call_the_policy_on_tensors(options: dict[str, Any]):
    make = make_env(options.pop("actions", "Box (2,)"))
    actor, _ = actor_critic(make(), **options)
    plain, fast = collect(make, actor), collect(make, TensorActor(actor))
    torch.testing.assert_close(plain["action_log_prob"], fast["action_log_prob"])


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
WIDE_MASK = spaces.Dict(observation=VECTOR, action_mask=spaces.MultiBinary(4))
BAD: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "no environment": (3, {}, TypeError, "takes an environment .* got 3"),
    "one space": ((VECTOR,), {}, TypeError, r"or a pair \(observation space, action space\)"),
    "three spaces": ((VECTOR, BOX, BOX), {}, TypeError, "or a pair"),
    "no spaces": ((3, 4), {}, TypeError, "or a pair"),
    "text": ((spaces.Text(3), BOX), {}, TypeError, "is no array. Remove"),
    "a sequence": ((spaces.Sequence(VECTOR), BOX), {}, TypeError, "no encoding for observation"),
    "integers": (
        *((VECTOR, spaces.Box(0, 3, (2,), np.int64)), {}, TypeError),
        "no head for BoundedDiscrete(?s:.*) A Box has floating-point numbers",
    ),
    "a matrix of choices": (
        *((VECTOR, spaces.MultiDiscrete([[2, 3], [3, 4]])), {}, TypeError),
        "no head for (?s:.*) have at most one dimension",
    ),
    **{
        f"dimensions of {space}": (
            (VECTOR, space),
            {},
            TypeError,
            "no head for (?s:.*) have at most",
        )
        for space in (
            spaces.MultiDiscrete([[2, 2], [2, 2]]),
            spaces.Tuple([spaces.MultiDiscrete([2, 3])] * 2),
            spaces.Tuple([spaces.Tuple([CHOICE] * 2)] * 2),
        )
    },
    **{
        f"observed {space}": ((space, CHOICE), {}, TypeError, "is no array. Remove it")
        for space in (
            spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3)]),
            spaces.MultiDiscrete([[2, 3], [3, 2]]),
        )
    },
    "unequal numbers, one-hot": (
        *(GymWrapper(Spaces(VECTOR, ACTIONS["MultiDiscrete, unequal"])), {}, TypeError),
        r"categorical_action_encoding=True\)",
    ),
    "a choice from 1": ((VECTOR, spaces.Discrete(3, start=1)), {}, ValueError, "starts at 1, and"),
    "choices from 1": (
        *((VECTOR, spaces.Dict(a=spaces.MultiDiscrete([3, 3], start=[0, 1]))), {}, ValueError),
        r"starts at \[0 1\], and (?s:.*)TransformAction",
    ),
    "an observed choice from 1": (
        *((spaces.Tuple([spaces.Discrete(3, start=2)] * 2), BOX), {}, ValueError),
        "starts at 2, and .*TransformObservation",
    ),
    "no bound below": (
        (VECTOR, UNBOUNDED),
        {"squash": True},
        ValueError,
        "finite, or equal. Leave",
    ),
    "no bounds": (
        *(gym.wrappers.ClipAction(Spaces(VECTOR, BOX)), {"squash": True}, ValueError),
        "not finite(?s:.*)ClipAction unbounds it",
    ),
    "no bounds, float64": (
        *((VECTOR, spaces.Box(-np.inf, np.inf, (2,), np.float64)), {"squash": True}, ValueError),
        "not finite",
    ),
    "equal bounds": ((VECTOR, spaces.Box(1, 1)), {"squash": True}, ValueError, "or equal. Leave"),
    "an observation of the policy's name": (
        *((spaces.Dict(loc=BOX, x=VECTOR), BOX), {}, ValueError),
        r"Rename {'loc'}.* write \['loc', 'scale', 'state_value', 'action'\]",
    ),
    "an observation above them": (
        *((spaces.Dict(params=BOX), ACTIONS["Dict"]), {}, ValueError),
        r"Rename {'params'}",
    ),
    "an observation and an action": (
        *((spaces.Dict(gear=BOX), ACTIONS["Dict"]), {}, ValueError),
        r"Rename {'gear'}",
    ),
    "an observed value": (
        *((spaces.Dict(state_value=BOX), CHOICE), {"shared": True}, ValueError),
        r"Rename {'state_value'}",
    ),
    "parameters of an action": (
        *((VECTOR, spaces.Dict(id=CHOICE, params=BOX)), {}, ValueError),
        r"Rename {'params'}",
    ),
    "in_keys": (
        (VECTOR, BOX),
        {"in_keys": ["x"]},
        KeyError,
        r"in_keys .*\['x'\] is not among .*observat",
    ),
    "no in_keys": ((VECTOR, BOX), {"in_keys": []}, KeyError, r"in_keys .*\[\] is not among"),
    "mask_key": (
        (VECTOR, CHOICE),
        {"mask_key": "x"},
        KeyError,
        r"mask_key: \[\'x\'\] is not among",
    ),
    "a mask of a Box": (
        *((WIDE_MASK, BOX), {}, ValueError),
        r"this mask has shape \[4\] and the action is (?s:.*)mask_key=None",
    ),
    "a mask of another size": ((WIDE_MASK, CHOICE), {}, ValueError, r"this mask has shape \[4\]"),
    "a mask of two choices": (
        *((WIDE_MASK, ACTIONS["MultiDiscrete, equal"]), {}, ValueError),
        "make the action a Discrete of all combinations",
    ),
    "activation": ((VECTOR, BOX), {"activation": "swish"}, ValueError, "'silu'.* got 'swish'"),
    "a module": ((VECTOR, BOX), {"activation": nn.Tanh()}, ValueError, "such as nn.Mish; got Tanh"),
    "no activation": ((VECTOR, BOX), {"activation": None}, ValueError, "got None"),
    "log_scale": ((VECTOR, BOX), {"log_scale": math.nan}, ValueError, "finite number, got nan"),
    "two sizes": (
        *((VECTOR, BOX), {"shared": True, "critic_hidden": (64, 64)}, ValueError),
        "one size: leave critic_hidden out",
    ),
    **{
        f"{name}={sizes!r}": ((VECTOR, BOX), {name: sizes}, ValueError, f"^{name} must be numbers")
        for name in ("hidden", "critic_hidden")
        for sizes in (64, "64", (0,), (-1,), (64.0,), ("a",), (None,))
    },
    "hidden=None": ((VECTOR, BOX), {"hidden": None}, ValueError, "got None"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str):
    env, options, error, message = BAD[name]
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


def test_the_environment_that_torchrl_cannot_encode_says_how_to_wrap_it():
    with pytest.raises(TypeError, match="Of a Tuple action, give its parts names"):
        actor_critic((VECTOR, spaces.Dict(t=ACTIONS["Tuple, unlike"])))


def test_observations_and_actions_of_one_group_are_no_conflict():
    observations, actions = spaces.Dict(car=spaces.Dict(x=BOX)), spaces.Dict(car=ACTIONS["Dict"])
    for shared in (False, True):
        actor, *_ = actor_critic((observations, actions), shared=shared)
        batch = actor(TensorDict({"car": {"x": torch.randn(4, 2)}}, [4]))
        assert {"x", "gear", "steer"} <= set(batch["car"].keys())
