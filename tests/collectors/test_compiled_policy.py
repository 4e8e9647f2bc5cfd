"""A policy called as one graph gives the batches of the policy called eagerly."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import distributions as d
from torch import nn
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.envs import ExplorationType, GymEnv, SerialEnv, set_exploration_type
from torchrl.modules import MaskedCategorical, OneHotCategorical, ProbabilisticActor, TanhNormal

from ppokit import GymCollector, LSTMModule, ObservationNormalizer, TensorActor
from tests.collectors.test_actor import assert_alike
from tests.collectors.test_collector import Wander, assert_same, collect, make_policy
from tests.collectors.test_policies import KINDS, make

# The same operations in the same order, so the same random numbers.
GRAPH = {"backend": "eager"}


def called_in_a_graph(policy: Any, **options: Any) -> GymCollector:
    n = options.setdefault("num_envs", 2)
    collector = GymCollector(policy=policy, frames_per_batch=8 * n, compile_policy=GRAPH, **options)
    collector.rollout()
    return collector


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_gives_what_the_policy_gives(kind: str):
    (policy, options), n = make(kind), 3
    assert "policy called in a graph" in repr(called_in_a_graph(policy, num_envs=n, **options))
    make_env = options.pop("make_env")
    found = collect(make_env, policy, n, compile_policy=GRAPH, **options)
    policy.register_forward_hook(lambda *_: None)  # called as a module
    assert_same(found, collect(make_env, policy, n, **options), rounded=("action_log_prob",))


def test_masked_choices():
    policy = ProbabilisticActor(
        TensorDictModule(nn.Linear(3, 3), ["observation"], ["logits"]),
        in_keys={"logits": "logits", "mask": "action_mask"},
        distribution_class=MaskedCategorical,
        return_log_prob=True,
    )
    options = {"categorical_action_encoding": True}
    make_env = partial(Wander, mask=True)
    found = collect(make_env, policy, 3, compile_policy=GRAPH, **options)
    for batch in found:
        assert batch["action_mask"].gather(-1, batch["action"].unsqueeze(-1)).all()
    assert_same(found, collect(make_env, policy, 3, **options), rounded=("action_log_prob",))


def test_an_observation_transform_is_in_the_graph():
    policy = make_policy(3, 4, TanhNormal)
    make_env = partial(Wander, actions="box")
    batches = [
        collect(make_env, policy, 2, observation_transform=ObservationNormalizer((3,)), **options)
        for options in ({"compile_policy": GRAPH}, {})
    ]
    assert_same(*batches, rounded=("action_log_prob",))


@pytest.mark.parametrize(("inputs", "outputs", "kind"), [(3, 3, d.Categorical), (3, 4, TanhNormal)])
def test_a_seed_gives_the_same_actions_again(inputs: int, outputs: int, kind: Any):
    """With Inductor, whose random numbers are others than torch's."""
    policy = make_policy(inputs, outputs, kind)
    discrete = kind is d.Categorical
    make_env = partial(Wander, actions="discrete" if discrete else "box")
    options = {"compile_policy": True, "categorical_action_encoding": discrete}
    first, second = (collect(make_env, policy, 2, **options) for _ in range(2))
    assert_same(first, second)
    for batch in first:
        with torch.no_grad():
            expected = policy.get_dist(batch).log_prob(batch["action"])
        torch.testing.assert_close(batch["action_log_prob"], expected, rtol=1e-4, atol=1e-4)
    actions = torch.cat([batch["action"] for batch in first], 1)
    assert actions.unique().numel() > 2


def _load(policy: Any) -> None:
    state = {key: value + 1 for key, value in policy.state_dict().items()}
    policy.load_state_dict(state)


def _exchange(policy: Any) -> None:
    policy.module[0].module[1] = nn.ReLU()


def _squash(policy: Any) -> None:
    policy.module[-1].distribution_kwargs["low"] = -3.0


def _grow(policy: Any) -> None:
    torch.manual_seed(5)
    policy.module[0].module[0] = nn.Linear(3, 7)
    policy.module[0].module[2] = nn.Linear(7, 4)


@pytest.mark.parametrize("change", [_load, _exchange, _squash, _grow])
def test_a_change_is_seen_at_the_next_batch(change: Callable[[Any], None]):
    results = []
    for compile_policy in (GRAPH, False):
        policy = make_policy(3, 4, TanhNormal, low=-1.0, high=1.0)
        collector = GymCollector(
            partial(Wander, actions="box"),
            policy,
            frames_per_batch=16,
            num_envs=2,
            compile_policy=compile_policy,
        )
        collector.set_seed(0)
        torch.manual_seed(0)
        batches = [collector.rollout()]
        change(policy)
        results.append([*batches, collector.rollout()])
    assert_same(*results, rounded=("action_log_prob",))


def test_a_hook_is_seen_at_the_next_batch():
    policy = make_policy(3, 4, TanhNormal)
    collector = called_in_a_graph(policy, make_env=partial(Wander, actions="box"))
    seen = []
    handle = policy.module[0].module[0].register_forward_hook(lambda *_: seen.append(1))
    with pytest.warns(RuntimeWarning, match="The policy is not compiled: .* a hook"):
        collector.rollout()
    assert seen
    assert "has a hook" in repr(collector)
    handle.remove()
    count = len(seen)
    collector.rollout()
    assert len(seen) == count
    assert "in a graph" in repr(collector)


def test_other_exploration_types_run_eagerly():
    policy = make_policy(3, 4, TanhNormal)
    kind: Any = ExplorationType.DETERMINISTIC
    options = {"make_env": partial(Wander, actions="box"), "n": 2, "exploration_type": kind}
    found = collect(policy=policy, compile_policy=GRAPH, **options)
    assert_same(found, collect(policy=policy, **options))


def test_recurrent_policies_run_eagerly():
    keys = {"in_key": "observation", "out_key": "hidden"}
    policy = ProbabilisticActor(
        TensorDictSequential(
            LSTMModule(input_size=3, hidden_size=4, **keys),
            TensorDictModule(nn.Linear(4, 3), ["hidden"], ["logits"]),
        ),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
    )
    with pytest.warns(RuntimeWarning, match="not compiled: it is recurrent"):
        called_in_a_graph(policy, make_env=Wander)


class Reads(nn.Linear):
    """Asks for the value of a tensor, which no graph can hold."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * (1.0 if float(input.sum()) > 0 else 2.0)


def test_a_policy_without_a_graph_is_called_eagerly():
    policy = ProbabilisticActor(
        TensorDictModule(Reads(3, 3), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
    )
    with pytest.warns(RuntimeWarning, match="not compiled: no graph can be captured"):
        collector = called_in_a_graph(policy, make_env=Wander)
    collector.rollout()  # without another warning
    assert "no graph can be captured" in repr(collector)


class Counts(nn.Linear):
    """Scales its output by the number of calls, which no graph can follow."""

    calls = 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(input) * (1 + 0.1 * self.calls)


def test_a_policy_that_changes_in_each_call_is_called_eagerly():
    results = []
    for compile_policy in (GRAPH, False):
        policy = make_policy(3, 4, TanhNormal)
        torch.manual_seed(2)
        policy.module[0].module[0] = Counts(3, 16)
        options = {"make_env": partial(Wander, actions="box"), "n": 2, "policy": policy}
        if compile_policy:
            with pytest.warns(RuntimeWarning, match="not compiled: .* changes in each call"):
                results.append(collect(compile_policy=compile_policy, **options))
        else:
            results.append(collect(**options))
    assert_same(*results, rounded=("action_log_prob",))


@pytest.mark.parametrize("kind", ["normal", "categorical"])
def test_parameters_that_are_infinite_raise(kind: str):
    policy, options = make(kind)
    collector = called_in_a_graph(policy, **options)
    with torch.no_grad():
        policy.module[0].module[2].bias.fill_(torch.inf)
    with pytest.raises(ValueError, match="is nan or inf"):
        collector.rollout()


def test_parameters_that_are_nan_raise():
    policy = make_policy(3, 4, TanhNormal)
    collector = called_in_a_graph(policy, make_env=partial(Wander, actions="box"))
    with torch.no_grad():
        policy.module[0].module[2].bias.fill_(torch.nan)
    with pytest.raises(ValueError, match="'loc' is nan"):
        collector.rollout()
    with pytest.raises(ValueError, match="'loc' is nan"):
        act(TensorActor(policy, compile=GRAPH), TensorDict({"observation": torch.randn(5, 3)}, [5]))


def test_workers_have_their_own_graphs():
    policy = make_policy(4, 2, OneHotCategorical)
    collector = MultiSyncCollector(
        [partial(GymEnv, "CartPole-v1")] * 2,
        policy,
        frames_per_batch=32,
        total_frames=64,
        collector_class=partial(GymCollector, compile_policy=GRAPH),
    )
    try:
        batches = list(collector)
    finally:
        collector.shutdown()
    for batch in batches:
        expected = policy.get_dist(batch).log_prob(batch["action"])
        torch.testing.assert_close(batch["action_log_prob"], expected)


# -- TensorActor -------------------------------------------------------------------


def act(policy: Any, given: TensorDict) -> TensorDict:
    """The same as torchrl's collectors do, from the same random numbers."""
    torch.manual_seed(4)
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        return policy(given.clone())


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_actor_writes_what_its_actor_writes(kind: str):
    actor, _ = make(kind)
    lean = TensorActor(actor, compile=GRAPH)
    for shape in [(5,), (2, 3), (7,)]:
        given = TensorDict({"observation": torch.randn(*shape, 3)}, shape)
        assert_alike(act(lean, given), act(actor, given))
    assert "called in a graph" in repr(lean)


def test_a_compiled_actor_can_be_copied_and_sent():
    actor = make_policy(3, 4, TanhNormal)
    lean = TensorActor(actor, compile=GRAPH)
    given = TensorDict({"observation": torch.randn(5, 3)}, [5])
    results = []
    for policy in (lean, copy.deepcopy(lean), pickle.loads(pickle.dumps(lean))):
        results.append(act(policy, given)["action"])
        assert "called in a graph" in repr(policy)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_compiled_actor_is_called_in_a_graph():
    counts = []
    backend = lambda graph, _: counts.append(1) or graph  # noqa: E731
    lean = TensorActor(make_policy(3, 4, TanhNormal), compile={"backend": backend})
    given = TensorDict({"observation": torch.randn(5, 3)}, [5])
    for _ in range(3):
        act(lean, given)
    assert len(counts) == 1


def test_a_compiled_actor_sees_changes_between_calls():
    actor = make_policy(3, 4, TanhNormal, low=-1.0, high=1.0)
    lean = TensorActor(actor, compile=GRAPH)
    given = TensorDict({"observation": torch.randn(5, 3)}, [5])
    for change in (_load, _exchange, _squash, _grow):
        change(actor)
        assert_alike(act(lean, given), act(actor, given))


def test_torchrls_collector_with_a_compiled_actor():
    policy = TensorActor(make_policy(4, 2, OneHotCategorical), compile=GRAPH)
    env = SerialEnv(2, partial(GymEnv, "CartPole-v1"))
    options = {"frames_per_batch": 32, "total_frames": 64}
    collector = Collector(env, policy, **options, auto_register_policy_transforms=False)
    batches = list(collector)
    for batch in batches:
        expected = policy.actor.get_dist(batch).log_prob(batch["action"])
        torch.testing.assert_close(batch["action_log_prob"], expected)
