"""A policy called as one graph gives the batches of the policy called eagerly."""

from __future__ import annotations

import copy
import pickle
import random
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Bernoulli
from torchrl.envs import ExplorationType, set_exploration_type
from torchrl.modules import OneHotCategorical, ProbabilisticActor, TanhNormal

from ppokit import GymCollector, LSTMModule, ObservationNormalizer, TensorActor, _compiling
from ppokit._compiling import CompiledFunction
from ppokit.policies import compiled_policy
from tests.collectors.test_actor import assert_alike, call
from tests.collectors.test_collector import (
    Wander,
    assert_same,
    collect,
    collector_of,
    make_policy,
    make_recurrent_policy,
    rescored,
)
from tests.collectors.test_policies import make
from tests.marks import slow

# The same operations in the same order, so the same random numbers.
GRAPH = {"backend": "aot_eager"}
make_box_env = partial(Wander, actions="box")


def called_in_a_graph(policy: Any, make_env: Any = make_box_env, **options: Any) -> GymCollector:
    collector = collector_of(make_env, policy, compile_policy=GRAPH, **options)
    collector.rollout()
    return collector


OF_KINDS = ("normal", "independent normal, options", "tanh normal, bounds of tensors")
OF_KINDS += ("categorical", "one-hot")


@pytest.mark.parametrize("kind", OF_KINDS)
def test_a_graph_gives_the_batches_of_the_policy(kind: str):
    policy, options = make(kind)
    make_env = options.pop("make_env")
    found = collect(make_env, policy, 3, compile_policy=GRAPH, batches=2, **options)
    policy.register_forward_hook(lambda *_: None)  # called as a module
    assert_same(found, collect(make_env, policy, 3, batches=2, **options))


DETERMINISTIC = TensorDictModule(nn.Linear(3, 2), ["observation"], ["action"])


@pytest.mark.parametrize("policy", [make_policy(3, 4, TanhNormal), DETERMINISTIC])
def test_an_observation_transform_is_in_the_graph(policy: Any):
    batches = [
        collect(make_box_env, policy, 2, observation_transform=ObservationNormalizer(3), **options)
        for options in ({"compile_policy": GRAPH}, {})
    ]
    assert_same(*batches)


@pytest.mark.slow
def test_a_seed_gives_the_same_actions_again():
    """With Inductor, whose random numbers differ from torch's."""
    policy = make_policy(3, 4, TanhNormal)
    first, second = (collect(make_box_env, policy, 2, compile_policy=True) for _ in range(2))
    assert_same(first, second)
    for batch in first:
        with torch.no_grad():
            expected = policy.get_dist(batch).log_prob(batch["action"])
        torch.testing.assert_close(batch["action_log_prob"], expected, rtol=1e-4, atol=1e-4)
    assert torch.cat([batch["action"] for batch in first], 1).unique().numel() > 2


def load(policy: Any) -> None:
    policy.load_state_dict({key: value + 1 for key, value in policy.state_dict().items()})


def exchange(policy: Any) -> None:
    policy.module[0].module[1] = nn.ReLU()


def squash(policy: Any) -> None:
    policy.module[-1].distribution_kwargs["low"] = -3.0


def grow(policy: Any) -> None:
    torch.manual_seed(5)
    policy.module[0].module[0], policy.module[0].module[2] = nn.Linear(3, 7), nn.Linear(7, 4)


CHANGES: tuple[Callable[[Any], None], ...] = (load, exchange, squash, grow)


@pytest.mark.parametrize("worth", [3, 300])
def test_changes_are_seen_at_the_next_batch(worth: int, monkeypatch: pytest.MonkeyPatch):
    """Also by a graph that is called without guards for the rest of a batch."""
    monkeypatch.setattr(compiled_policy, "WORTH", worth)
    results = []
    for options in ({"compile_policy": GRAPH}, {}):
        policy = make_policy(3, 4, TanhNormal, low=-1.0, high=1.0)
        collector = collector_of(make_box_env, policy, **options)
        collector.set_seed(0)
        torch.manual_seed(0)
        batches = [collector.rollout()]
        for change in CHANGES:
            change(policy)
            batches.append(collector.rollout())
        results.append(batches)
    assert_same(*results)


def test_a_hook_is_seen_at_the_next_batch():
    policy, seen = make_policy(3, 4, TanhNormal), []
    collector = called_in_a_graph(policy)
    with policy.module[0].module[0].register_forward_hook(lambda *_: seen.append(1)):
        with pytest.warns(RuntimeWarning, match="The policy is not compiled: .* a hook"):
            collector.rollout()
        assert "has a hook" in repr(collector)
    count = len(seen)
    assert count > 0
    collector.rollout()
    assert len(seen) == count
    assert "in a graph" in repr(collector)


class Noisy(nn.Linear):
    """Draws a number by Python."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * random.uniform(0, 2)


class Scaled(nn.Linear):
    """Reads a number of NumPy from its class, which a graph can do only within Dynamo."""

    factor = np.float64(1.5)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * float(self.factor)


def with_layer(kind: type[nn.Linear]) -> ProbabilisticActor:
    policy = make_policy(3, 3, OneHotCategorical)
    policy.module[0].module[0] = kind(3, 16)
    return policy


@pytest.mark.parametrize("kind", [Noisy, slow(Scaled)])
@pytest.mark.filterwarnings("error")
def test_random_numbers_of_python_are_those_of_an_eager_policy(kind: type[nn.Linear]):
    found = []
    for options in ({"compile_policy": GRAPH}, {}):
        policy = with_layer(kind)
        random.seed(0)
        found.append((collect(Wander, policy, 2, batches=2, **options), random.getstate()))
    assert_same(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_dynamic_shapes_raise():
    policy = make_policy(3, 4, TanhNormal)
    with pytest.raises(ValueError, match="dynamic=True: of a TanhNormal"):
        GymCollector(make_box_env, policy, frames_per_batch=8, compile_policy={"dynamic": True})


class Reads(nn.Linear):
    """Reads the value of a tensor, which no graph can hold."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * (1.0 if float(input.sum()) > 0 else 2.0)


class Counts(nn.Linear):
    """Scales its output by the number of calls, which no graph can follow."""

    calls = 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(input) * (1 + 0.1 * self.calls)


@pytest.mark.parametrize(
    ("make_policy", "reason"),
    [
        (partial(make_recurrent_policy, LSTMModule), "it is recurrent"),
        (partial(with_layer, Reads), "no graph can be captured"),
        (partial(with_layer, Counts), "changed again after 8 captures"),
    ],
)
def test_policies_without_a_graph_run_eagerly(make_policy: Any, reason: str):
    torch.manual_seed(0)
    policy = make_policy()
    twin = copy.deepcopy(policy)
    with pytest.warns(RuntimeWarning, match=f"not compiled: .*{reason}"):
        found = collect(Wander, twin, 2, compile_policy=GRAPH)
    assert_same(found, collect(Wander, policy, 2))


def test_other_exploration_types_run_eagerly():
    policy = make_policy(3, 4, TanhNormal)
    options = {"n": 2, "exploration_type": ExplorationType.DETERMINISTIC}
    found = collect(make_box_env, policy, compile_policy=GRAPH, **options)
    assert_same(found, collect(make_box_env, policy, **options))


NOT_FINITE = [("categorical", torch.inf), ("tanh normal", torch.nan)]


@pytest.mark.parametrize(("kind", "value"), NOT_FINITE)
def test_parameters_that_are_not_finite_raise(kind: str, value: float):
    policy, options = make(kind)
    collector = called_in_a_graph(policy, **options)
    with torch.no_grad():
        policy.module[0].module[2].bias.fill_(value)
    with pytest.raises(ValueError, match="is nan or inf"):
        collector.rollout()
    if kind == "tanh normal":
        with pytest.raises(ValueError, match="'loc' is nan or inf"):
            call(TensorActor(policy, compile=GRAPH), 5)


def test_an_error_within_a_graph_names_the_entries():
    network = nn.Linear(3, 4)
    module = TensorDictModule(network, ["observation"], ["logits"])
    policy = ProbabilisticActor(module, ["logits"], distribution_class=Bernoulli)
    collector = called_in_a_graph(policy, partial(Wander, actions="multi_binary"))
    with torch.no_grad():
        network.bias.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"The policy raised: .*It was given 'observation'"):
        collector.rollout()


# -- TensorActor -------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["categorical", slow("tanh normal, bounds")])
def test_a_compiled_actor_writes_the_entries_of_its_actor(kind: str):
    actor, _ = make(kind)
    lean = TensorActor(actor, compile=GRAPH)
    for shape in [(5,), (2, 3), (7,)]:
        assert_alike(call(lean, *shape), call(actor, *shape))
    assert "called in a graph" in repr(lean)
    for twin in (copy.deepcopy(lean), pickle.loads(pickle.dumps(lean))):
        assert torch.equal(call(twin, 5)["action"], call(lean, 5)["action"])
        assert "called in a graph" in repr(twin)


def test_a_compiled_actor_is_captured_once_and_after_changes():
    captured = []
    backend = lambda graph, _: captured.append(1) or graph  # noqa: E731
    actor = make_policy(3, 4, TanhNormal, low=-1.0, high=1.0)
    lean = TensorActor(actor, compile={"backend": backend})
    for _ in range(3):
        call(lean, 5)
    assert len(captured) == 1
    for change in CHANGES:
        change(actor)
        assert_alike(call(lean, 5), rescored(actor, [call(actor, 5)])[0])


def test_threads_share_a_tensor_actor(monkeypatch: pytest.MonkeyPatch):
    """Each call has guards, whatever another thread has called."""
    forms: list[Any] = []
    monkeypatch.setattr(CompiledFunction, "form", lambda *args, **_: forms.append(args))
    actor, _ = make("categorical")
    lean, found = TensorActor(actor, compile={"backend": "eager"}), []
    for count in (5, 8):
        call(lean, count)

    def act(count: int) -> None:
        for _ in range(1_000):
            found.append(lean(TensorDict({"observation": torch.ones(count, 3)}, [count])))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=act, args=(count,)) for count in (5, 8)]
    with set_exploration_type(ExplorationType.RANDOM):  # of all threads
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    sys.setswitchinterval(before)
    assert len(found) == 2_000
    assert not forms


class Clamped(nn.Linear):
    """Looks at its input, which no graph holds."""

    def forward(self, input: Any) -> Any:
        return super().forward(input.clamp(-1, 1) if input.abs().max() > 1e9 else input)


@pytest.mark.filterwarnings("ignore:The policy is not compiled:RuntimeWarning")
def test_threads_share_a_tensor_actor_that_no_graph_holds():
    """A call of one thread does not end the capture of another."""
    errors: list[Exception] = []

    def act(lean: TensorActor, delay: float) -> None:
        time.sleep(delay)
        try:
            lean(TensorDict({"observation": torch.ones(5, 3)}, [5]))
        except Exception as error:
            errors.append(error)

    with set_exploration_type(ExplorationType.RANDOM):  # of all threads
        for trial in range(4):
            lean = TensorActor(with_layer(Clamped), compile={"backend": "eager"})
            delays = [0.02 * trial * n for n in range(4)]
            threads = [threading.Thread(target=act, args=(lean, delay)) for delay in delays]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert errors == []


class Config:
    doubles = False


class Alternates(nn.Linear):
    """Doubles the output of every other call."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.config = Config()

    def forward(self, input: Any) -> Any:
        self.config.doubles = not self.config.doubles
        return super().forward(input) * (1.0 + self.config.doubles)


def test_an_object_that_the_policy_changes_in_each_call(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled_policy, "WORTH", 3)
    network = Alternates(3, 3)
    module = TensorDictModule(network, ["observation"], ["logits"])
    policy = ProbabilisticActor(module, ["logits"], distribution_class=OneHotCategorical)
    collector = called_in_a_graph(policy, partial(Wander, actions="discrete"), frames_per_batch=28)
    for _ in range(4):
        is_doubled = not network.config.doubles
        batch = collector.rollout()
        factors = torch.ones_like(batch["logits"])
        factors[:, 0 if is_doubled else 1 :: 2] = 2.0
        with torch.no_grad():
            expected = nn.functional.linear(batch["observation"], network.weight, network.bias)
        torch.testing.assert_close(batch["logits"], expected * factors)
    collector.shutdown()


class Flagged(nn.Linear):
    flag = False

    def forward(self, input: Any) -> Any:
        return super().forward(input) + 100.0 * self.flag


@pytest.mark.parametrize("period", [1, 7])
def test_a_flag_that_the_environment_changes_within_batches(
    period: int, monkeypatch: pytest.MonkeyPatch
):
    """Later batches, in which nothing changes, are called in the graph of their flag."""
    monkeypatch.setattr(compiled_policy, "WORTH", 5)
    network, steps = Flagged(3, 3), [0]
    module = TensorDictModule(network, ["observation"], ["logits"])
    policy = ProbabilisticActor(
        module, ["logits"], distribution_class=OneHotCategorical, return_log_prob=True
    )

    class Flips(Wander):
        def step(self, action: Any) -> Any:
            steps[0] += 1
            if steps[0] <= 60 and steps[0] % period == 0:
                network.flag = not network.flag
            return super().step(action)

    collector = called_in_a_graph(policy, partial(Flips, actions="discrete"))
    for flag in (False, True, False, True):
        while steps[0] <= 60:
            collector.rollout()
        network.flag = flag
        for _ in range(3):
            batch = collector.rollout()
            with torch.no_grad():
                expected = network(batch["observation"])
            torch.testing.assert_close(batch["logits"], expected)
    collector.shutdown()


def test_an_environment_that_makes_torch_forget_its_graphs(monkeypatch: pytest.MonkeyPatch):
    """Also where no capture is left, as plain torch.compile does."""
    monkeypatch.setattr(compiled_policy, "WORTH", 3)
    steps, network = [0], nn.Linear(3, 3)
    module = TensorDictModule(network, ["observation"], ["logits"])
    policy = ProbabilisticActor(
        module, ["logits"], distribution_class=OneHotCategorical, return_log_prob=True
    )

    class Forgets(Wander):
        def step(self, action: Any) -> Any:
            steps[0] += 1
            if steps[0] == 60:
                monkeypatch.setattr(_compiling, "FREE_TRACES", 0)
            if steps[0] == 75:
                torch.compiler.reset()
            return super().step(action)

    collector = called_in_a_graph(policy, partial(Forgets, actions="discrete"))
    batch = collector.rollout()
    while steps[0] < 75:
        batch = collector.rollout()
    with torch.no_grad():
        expected = network(batch["observation"])
    torch.testing.assert_close(batch["logits"], expected)
    assert "in a graph" in repr(collector)
    collector.shutdown()
