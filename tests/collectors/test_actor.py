"""TensorActor writes the entries of its actor, from the same random numbers."""

from __future__ import annotations

import copy
import pickle
import types
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModuleBase,
)
from torch import distributions as d
from torch import nn
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.envs import ExplorationType, GymEnv, set_exploration_type
from torchrl.modules import OneHotCategorical, TanhNormal

from ppokit import TensorActor
from tests.collectors.test_collector import assert_same, make_policy, reference
from tests.collectors.test_policies import KINDS, make
from tests.marks import slow
from tests.objectives.test_agents import make_networks

RANDOM, MODE = ExplorationType.RANDOM, ExplorationType.MODE


def call(policy: Any, *shape: int, kind: Any = RANDOM) -> TensorDict:
    torch.manual_seed(3)
    given = TensorDict({"observation": torch.randn(*shape, 3)}, shape)
    torch.manual_seed(4)
    with torch.no_grad(), set_exploration_type(kind):
        return policy(given)


def assert_alike(found: TensorDict, expected: TensorDict) -> None:
    assert set(found.keys()) == set(expected.keys())
    for key, value in expected.items():
        if key == "action_log_prob":
            torch.testing.assert_close(found[key], value, rtol=1e-5, atol=2e-6)
        else:
            assert torch.equal(found[key], value), key


@pytest.mark.parametrize("kind", KINDS)
def test_it_writes_the_entries_of_its_actor(kind: str):
    actor, _ = make(kind)
    lean = TensorActor(actor)
    assert (lean.in_keys, lean.out_keys) == (actor.in_keys, actor.out_keys)
    for shape in [(), (1,), (5,), (2, 3)]:
        assert_alike(call(lean, *shape), call(actor, *shape))
    assert "on tensors" in repr(lean)
    discrete = "categorical" in kind or "one-hot" in kind
    other = MODE if discrete else ExplorationType.DETERMINISTIC
    assert_alike(call(lean, 5, kind=other), call(actor, 5, kind=other))


@pytest.mark.parametrize("distribution", [d.Categorical, OneHotCategorical, TanhNormal])
def test_torchrls_collector_yields_the_same(distribution: Any):
    env, inputs = ("Pendulum-v1", 3) if distribution is TanhNormal else ("CartPole-v1", 4)
    options = {"low": -2.0, "high": 2.0} if distribution is TanhNormal else {}
    policy = make_policy(inputs, 2, distribution, **options)
    categorical = distribution is d.Categorical

    def make_env() -> GymEnv:
        return GymEnv(env, categorical_action_encoding=categorical, max_episode_steps=15)

    expected = reference(make_env, policy, 3)
    found = reference(make_env, TensorActor(policy), 3)
    assert_same(found, expected)


def test_it_follows_changes_of_the_actor():
    actor, _ = make("tanh normal")
    lean = TensorActor(actor)
    before = call(lean, 5)
    with torch.no_grad():
        next(actor.parameters()).mul_(2)
    assert not torch.equal(call(lean, 5)["loc"], before["loc"])
    actor.module[0].module[1] = nn.ReLU()
    assert_alike(call(lean, 5), call(actor, 5))
    called = []
    with actor.register_forward_hook(lambda *_: called.append(1)):
        call(lean, 5)
    assert called
    for twin in (copy.deepcopy(lean), pickle.loads(pickle.dumps(lean))):
        assert_alike(call(twin, 5), call(lean, 5))
        assert twin.actor is not actor


class Louder(ProbabilisticTensorDictModule):
    """Makes another distribution of the same parameters."""

    def get_dist(self, tensordict: TensorDict) -> Any:  # pyright: ignore
        return TanhNormal(tensordict["loc"], 3 * tensordict["scale"])


class Shifted(ProbabilisticTensorDictSequential):
    """Changes the parameters of its networks."""

    def get_dist_params(self, *args: Any, **kwargs: Any) -> Any:
        tensordict: Any = super().get_dist_params(*args, **kwargs)
        return tensordict.set("loc", tensordict["loc"] + 1)


@pytest.mark.parametrize("own", [Louder, Shifted, None])
def test_overridden_distributions_are_used(own: Any):
    make_head = own if own is Louder else ProbabilisticTensorDictModule
    make_actor = own if own is Shifted else ProbabilisticTensorDictSequential
    options: Any = {"distribution_class": TanhNormal, "return_log_prob": True}
    head = make_head(["loc", "scale"], ["action"], **options)
    if own is None:
        head.get_dist = types.MethodType(Louder.get_dist, head)
    actor = make_actor(*make("tanh normal")[0].module[:-1], head)
    lean = TensorActor(actor)
    assert_alike(call(lean, 5), call(actor, 5))
    assert "as a TensorDictModule" in repr(lean)


class Dictionary(nn.Module):
    """Returns logits that are NaN, and a dictionary."""

    def forward(self, x: torch.Tensor) -> Any:
        return x * torch.nan, {"x": x}


def test_bad_input():
    actor, _ = make("tanh normal")
    with torch.no_grad():
        next(actor.parameters()).fill_(torch.nan)
    with pytest.raises(ValueError, match="The policy's 'loc' is nan or inf in 4 of 4"):
        call(TensorActor(actor), 2)
    actor, _ = make("categorical")
    network, none = actor.module[0].module, nn.Threshold(torch.inf, -torch.inf)
    actor.module[0].module = nn.Sequential(network, none)  # no choice is possible
    with pytest.raises(ValueError, match="The policy's 'logits' is nan or inf"):
        call(TensorActor(actor), 2)
    actor.module[0].module, actor.module[0].out_keys = Dictionary(), ["logits", "more"]
    with pytest.raises(ValueError, match="The policy's 'logits' is nan or inf"):
        call(TensorActor(actor), 2)
    with pytest.raises(TypeError, match="must be a TensorDictModule, got Linear"):
        TensorActor(nn.Linear(1, 1))


@pytest.mark.parametrize("persistent", [True, False])
def test_its_parameters_and_state_are_the_actors(persistent: bool):
    actor, _ = make("tanh normal")
    actor.register_buffer("policy_version", torch.tensor(0), persistent=persistent)
    lean = TensorActor(actor)
    lean.load_state_dict(actor.state_dict())
    actor.load_state_dict(lean.state_dict())
    assert list(lean.state_dict()) == list(actor.state_dict())
    assert [*map(id, lean.modules())][1:] == [*map(id, actor.modules())][1:]
    of_actor = TensorDict.from_module(actor).keys(True)
    assert set(TensorDict.from_module(lean).keys(True)) == set(of_actor)
    lean.eval()
    assert not any(module.training for module in (lean, *actor.modules()))
    assert lean.double().policy_version is actor.policy_version  # a cast makes no second buffer
    lean.float()
    actor.policy_version.fill_(2)
    assert call(lean, 5)["policy_version"].eq(2).all()
    weights = TensorDict.from_module(actor).data.clone()
    weights["policy_version"].fill_(3)
    weights.to_module(lean)  # as torchrl's workers take weights
    assert call(lean, 5)["policy_version"].eq(3).all()
    actor.register_buffer("policy_version", torch.tensor(4))  # as a move to a device does
    assert call(lean, 5)["policy_version"].eq(4).all()
    assert lean.state_dict()["policy_version"] == 4


@pytest.mark.parametrize("kind", [Collector, slow(MultiSyncCollector), slow(MultiAsyncCollector)])
def test_torchrls_collectors_take_the_actors_weights(kind: Any):
    """The weights of the actor, of the lean one, and of none."""
    actor = make_policy(4, 2, OneHotCategorical)
    make_env = partial(GymEnv, "CartPole-v1")
    env = make_env() if kind is Collector else [make_env] * 2
    options = {"auto_register_policy_transforms": False} if kind is Collector else {}
    collector = kind(env, TensorActor(actor), frames_per_batch=32, total_frames=-1, **options)
    try:
        batches = iter(collector)
        batch = next(batches)
        for wanted, source in ((0, actor), (1, TensorActor(actor)), (0, None)):
            with torch.no_grad():
                actor.module[0].module[-1].bias.fill_(0.0)[wanted] = 1000.0
            weights = () if source is None else (TensorDict.from_module(source).data,)
            collector.update_policy_weights_(*weights)
            for _ in range(100 if kind is MultiAsyncCollector else 1):  # some are older
                batch = next(batches)
                if (batch["action"].argmax(-1) == wanted).all():
                    break
            assert (batch["action"].argmax(-1) == wanted).all()
    finally:
        collector.shutdown()


def test_agents_whose_actions_lie_in_a_group():
    actor, _ = make_networks("categorical", 2)
    lean = TensorActor(actor)
    assert "on tensors" in repr(lean)
    results = []
    for policy in (actor, lean):
        given = TensorDict({"agents": {"observation": torch.ones(5, 2, 4)}}, [5])
        torch.manual_seed(4)
        with torch.no_grad(), set_exploration_type(RANDOM):
            results.append(policy(given))
    assert set(results[0].keys(True, True)) == set(results[1].keys(True, True))
    for key in results[0].keys(True, True):
        torch.testing.assert_close(results[0][key], results[1][key])


class Offset(TensorDictModuleBase):
    """An actor with a parameter, a buffer and tied layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.in_keys: Any = ["observation"]
        self.out_keys: Any = ["action"]
        self.actor = self.tied = nn.Linear(4, 2)
        self.bias = nn.Parameter(torch.zeros(2))
        self.register_buffer("offset", torch.zeros(2))

    def forward(self, tensordict: Any) -> Any:
        return tensordict.set("action", self.tied(tensordict["observation"]) + self.bias)


def test_tensors_replaced_in_one_are_replaced_in_the_other():
    actor = Offset()
    lean, observed = TensorActor(actor), TensorDict({"observation": torch.zeros(4)})
    assert list(lean.state_dict()) == list(actor.state_dict())
    weights = {name: torch.full_like(x, 3.0) for name, x in lean.named_parameters()}
    found = torch.func.functional_call(lean, weights, (observed.clone(),))
    assert found["action"].tolist() == [6.0, 6.0]
    with TensorDict.from_module(lean).apply(torch.ones_like).to_module(lean):
        assert lean(observed.clone())["action"].tolist() == [2.0, 2.0]
    lean.bias = nn.Parameter(torch.full((2,), 5.0))
    assert actor.bias is lean.bias
    actor.offset = torch.ones(2)
    assert lean.offset is actor.offset
