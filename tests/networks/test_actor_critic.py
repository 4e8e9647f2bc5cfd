"""actor_critic: every space, from the first batch to an update."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import set_composite_lp_aggregate
from torch import distributions as d
from torchrl.envs import (
    Compose,
    GymWrapper,
    InitTracker,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import (
    MaskedCategorical,
    MaskedOneHotCategorical,
    OneHotCategorical,
    ProbabilisticActor,
    ValueOperator,
)
from torchrl.objectives import ClipPPOLoss

from ppokit import DualClipPPOLoss
from ppokit.networks import actor_critic
from tests.networks.environments import (
    ACTIONS,
    BOX,
    CHOICE,
    FLAT,
    IMAGE,
    OBSERVATIONS,
    VECTOR,
    Masked,
    Spaces,
    assert_updates,
    collect,
    collect_by_torchrl,
    linear_layers,
    make_env,
    updated,
)

# -- actions -------------------------------------------------------------------------------


@pytest.mark.parametrize("actions", ACTIONS)
def test_every_action_space_is_collected_and_updated_with_the_exact_kl(actions: str):
    make = make_env(actions)
    networks = actor_critic(make())
    assert [type(network) for network in networks] == [ProbabilisticActor, ValueOperator]
    batch = collect(make, networks[0])
    statistics = assert_updates(networks, batch, loss={"kl_coeff": 0.1})
    assert 0 < statistics["loss_kl"] < 1
    assert batch["state_value"].shape == (2, 12, 1)
    assert actions not in FLAT or batch["action_log_prob"].shape == (2, 12)


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
    make = partial(Spaces, VECTOR, ACTIONS[actions])  # which raises for others
    networks = actor_critic(make(), squash=True, log_scale=1.0)
    batch = collect(make, networks[0])
    key = "steer" if actions == "Dict" else "action"
    assert batch[key].min() < -1.5
    assert batch[key].max() > 2.5
    assert_updates(networks, batch)


BOTH = [(actions, categorical) for actions in (*FLAT, "Dict") for categorical in (False, True)]
BOTH.remove(("MultiDiscrete, unequal", False))  # raises, see BAD


@pytest.mark.parametrize(("actions", "categorical"), BOTH)
def test_torchrls_environments_in_both_encodings(actions: str, categorical: bool):
    env = GymWrapper(make_env(actions)(), categorical_action_encoding=categorical)
    networks = actor_critic(env)
    batch = collect_by_torchrl(env, networks[0])
    if actions == "Discrete":
        kind = d.Categorical if categorical else OneHotCategorical
        assert networks[0][-1].distribution_class is kind
        assert batch["action"].shape[1:] == (() if categorical else (3,))
    assert_updates(networks, batch)


def test_a_multi_discrete_of_unequal_numbers_is_a_categorical_for_each_part():
    """Also in derivatives, though terms of absent choices are differences of infinite numbers."""
    actor, _ = actor_critic((VECTOR, ACTIONS["MultiDiscrete, unequal"]))
    other = copy.deepcopy(actor)
    with torch.no_grad():
        for x in actor.parameters():
            x.add_(0.3 * torch.randn_like(x))
    batch = TensorDict({"observation": torch.randn(500, 3)}, [500])
    drawn = actor(batch.clone())
    action = drawn["action"]
    assert (action < torch.tensor([2, 4])).all()
    assert [action[:, i].unique().numel() for i in (0, 1)] == [2, 4]
    assert (drawn["logits"][:, 0, 2:] == -math.inf).all()

    def gradients(loss: torch.Tensor) -> torch.Tensor:
        found = torch.autograd.grad(loss, actor.parameters(), retain_graph=True)
        return torch.cat([x.flatten() for x in found])

    def parts(actor: Any) -> list[Any]:
        logits = actor.get_dist(batch).base_dist.logits
        return [d.Categorical(logits=logits[:, 0, :2]), d.Categorical(logits=logits[:, 1])]

    found, before = actor.get_dist(batch), other.get_dist(batch)
    new, old = parts(actor), parts(other)
    log_prob = sum(x.log_prob(action[:, i]) for i, x in enumerate(new))
    torch.testing.assert_close(drawn["action_log_prob"], log_prob)
    kl = sum(d.kl_divergence(a, b) for a, b in zip(old, new, strict=True))
    for value, reference in (
        (found.entropy(), sum(x.entropy() for x in new)),
        (found.log_prob(action), log_prob),
        (d.kl_divergence(before, found), kl),
    ):
        torch.testing.assert_close(value, reference)
        torch.testing.assert_close(gradients(value.mean()), gradients(reference.mean()))
    best = torch.stack([part.probs.argmax(-1) for part in new], -1)
    assert torch.equal(found.deterministic_sample, best)


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
    observed = observed.reshape(1, *env.observation_spec["observation"].shape)
    assert torch.equal(encode(observed), one_hot.float())


def bytes_up_to(*largest: int) -> spaces.Box:
    return spaces.Box(np.zeros(2, np.uint8), np.array(largest, np.uint8), dtype=np.uint8)


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (bytes_up_to(255, 255), [[0.0, 1.0], [0.2, 0.4]]),
        (bytes_up_to(2, 2), [[0.0, 1.0], [0.5, 0.5]]),
        (bytes_up_to(5, 0), [[0.0, 0.0], [1.0, 0.0]]),
        (spaces.Box(0, 2, (2,), np.int8), [[0.0, 2.0], [1.0, 1.0]]),
    ],
    ids=str,
)
def test_bytes_are_divided_by_the_largest_of_their_space(space: spaces.Box, expected: Any):
    """Within a Dict, too; floats are not. A state holds bounds only where they differ."""
    differ = len(set(space.high.flatten().tolist())) > 1 and space.dtype == np.uint8
    values = torch.as_tensor(space.high).float() * torch.tensor(expected)
    values = torch.tensor(expected) if space.dtype == np.int8 else values.round()
    for observations in (space, spaces.Dict(a=space, b=spaces.Box(0, 1, (1,)))):
        _, critic = actor_critic((observations, CHOICE))
        first = critic.module[0]
        encode = first if isinstance(observations, spaces.Box) else first[0]
        given = values.to(torch.uint8 if space.dtype == np.uint8 else torch.int8)
        torch.testing.assert_close(encode(given), torch.tensor(expected))
        torch.testing.assert_close(encode(values), values)
        assert any("scale" in key for key in critic.state_dict()) == differ


def test_pixels_are_divided_by_the_largest_of_their_space():
    image = torch.randint(0, 8, (2, 36, 40, 3), dtype=torch.uint8)
    _, critic = actor_critic((spaces.Box(0, 7, (36, 40, 3), np.uint8), CHOICE))
    torch.testing.assert_close(critic.module(image), critic.module(image / 7))


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


@pytest.mark.parametrize("order", ["SHWC", "SCHW", "HWCS", "CHWS"])
@pytest.mark.parametrize("frames", [4, 1])
def test_frames_of_a_stack_are_channels(order: str, frames: int):
    sizes = {"S": frames, "H": 40, "W": 36, "C": 3}
    shape = [sizes[x] for x in order]
    stack = torch.randint(0, 256, (5, *shape), dtype=torch.uint8)
    _, critic = actor_critic((spaces.Box(0, 255, shape, np.uint8), CHOICE), hidden=())
    merged = [x for x in order if x not in "HW"]
    image = stack.permute(0, *(1 + order.index(x) for x in (*merged, "H", "W"))).flatten(1, 2)
    box = spaces.Box(0, 255, image.shape[1:], np.uint8)
    _, expected = actor_critic((box, CHOICE), hidden=())
    expected.load_state_dict(critic.state_dict())
    assert sum(x.numel() for x in critic.parameters()) < 500_000
    torch.testing.assert_close(critic.module(stack), expected.module(image))


def test_in_keys_choose_observations():
    both = spaces.Dict(a=VECTOR, b=spaces.Dict(c=VECTOR))
    _, critic = actor_critic((both, CHOICE), in_keys=[("b", "c")])
    assert critic.in_keys == [("b", "c")]
    actor, critic = actor_critic((both, CHOICE), in_keys=["a", ("b", "c")], shared=True)[::2]
    assert actor.in_keys == critic.in_keys == ["a", ("b", "c")]


# -- with the blocks -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("actions", [*FLAT, "Dict", "masked", "shared"])
def test_a_graph_updates_as_eager_code_does(actions: str):
    make = Masked if actions == "masked" else make_env(actions.replace("shared", "Discrete"))
    networks = actor_critic(make(), hidden=(8,), shared=actions == "shared")
    batch, graph = collect(make, networks[0]), {"backend": "aot_eager"}
    found = [updated(networks, batch, compile=x, loss={"kl_coeff": 0.1}) for x in (False, graph)]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("actions", ["Box (2,)", "Discrete", "MultiDiscrete, equal", "MultiBinary"])
def test_torchrls_loss_gives_the_same_update(actions: str):
    make = make_env(actions)
    networks = actor_critic(make())
    batch = collect(make, networks[0])
    found = [updated(networks, batch, kind=kind) for kind in (DualClipPPOLoss, ClipPPOLoss)]
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)
