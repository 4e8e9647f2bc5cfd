"""Whatever the policy is, GymCollector asks it as torchrl does, and stores what it writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    AddStateIndependentNormalScale,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictModuleWrapper,
    TensorDictSequential,
)
from torch import distributions as d
from torch import nn
from torchrl.envs import ExplorationType, GymEnv
from torchrl.modules import (
    IndependentNormal,
    OneHotCategorical,
    ProbabilisticActor,
    TanhNormal,
)
from torchrl.modules.distributions.discrete import ReparamGradientStrategy

from ppokit import GymCollector, TensorActor
from tests.collectors.test_collector import (
    Wander,
    assert_same,
    collect,
    make_policy,
    reference,
)

KINDS = {
    "normal": (d.Normal, {}),
    "independent normal": (IndependentNormal, {}),
    "independent normal, options": (IndependentNormal, {"upscale": 2.0, "event_dim": 1}),
    "tanh normal": (TanhNormal, {}),
    "tanh normal, bounds": (TanhNormal, {"low": -0.5, "high": 2.0}),
    "tanh normal, bounds of tensors": (
        TanhNormal,
        {"low": -torch.ones(2), "high": torch.tensor([1.0, 3.0])},
    ),
    "tanh normal, not safe": (TanhNormal, {"safe_tanh": False, "event_dims": 1}),
    "categorical": (d.Categorical, {}),
    "one-hot": (OneHotCategorical, {"grad_method": ReparamGradientStrategy.PassThrough}),
}


def make(kind: str) -> tuple[ProbabilisticActor, dict[str, Any]]:
    """A policy, and the options of a collector for it."""
    distribution, options = KINDS[kind]
    discrete = distribution in (d.Categorical, OneHotCategorical)
    policy = make_policy(3, 3 if discrete else 4, distribution, **options)
    encoding = {"categorical_action_encoding": distribution is d.Categorical}
    return policy, {
        "make_env": lambda: Wander(actions="discrete" if discrete else "box")
    } | encoding


def collector_of(policy: Any, *, n: int = 2, **options: Any) -> GymCollector:
    arguments = {"make_env": Wander, "frames_per_batch": 8 * n, "num_envs": n} | options
    return GymCollector(arguments.pop("make_env"), policy, **arguments)


def is_lean(collector: GymCollector) -> bool:
    collector.rollout()
    return "called on tensors" in repr(collector)


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_the_lean_path_gives_what_the_policy_gives(kind: str, n: int):
    policy, options = make(kind)
    assert is_lean(collector_of(policy, n=n, **options))
    make_env = options.pop("make_env")
    lean = collect(make_env, policy, n, **options)
    policy.register_forward_hook(lambda *_: None)
    assert not is_lean(collector_of(policy, n=n, make_env=make_env, **options))
    expected = collect(make_env, policy, n, **options)
    rounded = ("action_log_prob",) if kind.startswith("tanh") else ()
    assert_same(lean, expected, rounded=rounded)


def test_saturated_actions_are_scored_as_they_were_drawn():
    policy = make_policy(3, 4, TanhNormal)
    with torch.no_grad():
        policy.module[0].module[2].bias[:2] = 30.0
    options = {"make_env": lambda: Wander(actions="box"), "n": 2}
    (lean,) = collect(policy=policy, batches=1, **options)
    policy.register_forward_hook(lambda *_: None)
    (expected,) = collect(policy=policy, batches=1, **options)
    assert_same([lean], [expected], rounded=("action_log_prob",))


@pytest.mark.parametrize("return_log_prob", [False, True])
def test_entries_of_modules_in_a_row(return_log_prob: bool):
    """All that is written is stored, but for names that begin with an underscore."""
    policy = ProbabilisticActor(
        TensorDictSequential(
            TensorDictModule(nn.Linear(3, 8), ["observation"], ["hidden"]),
            TensorDictModule(nn.Linear(8, 2), ["hidden"], ["_private"]),
            TensorDictModule(AddStateIndependentNormalScale(2), ["_private"], ["loc", "scale"]),
        ),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=return_log_prob,
    )
    make_env = lambda: GymEnv("ppokit/Wander-v0", actions="box")  # noqa: E731
    batches = collect(make_env, policy, 3)
    assert ("action_log_prob" in batches[0].keys()) == return_log_prob
    assert_same(batches, reference(make_env, policy, 3), rounded=("action_log_prob",))


class Nests(nn.Linear):
    """Returns a dict."""

    def forward(self, input: torch.Tensor) -> Any:
        return {"a": super().forward(input)}


class ReadsPlace(nn.Linear):
    """Reads a part of what it is given."""

    def forward(self, input: Any) -> torch.Tensor:
        return super().forward(input["place"].float().flatten(-2))


def choice_by(*modules: TensorDictModule) -> ProbabilisticActor:
    return ProbabilisticActor(
        TensorDictSequential(*modules), in_keys=["logits"], distribution_class=OneHotCategorical
    )


NESTS = TensorDictModule(Nests(3, 4), ["observation"], ["made"])
READS_PART = TensorDictModule(nn.Linear(4, 3), [("made", "a")], ["logits"])
READS_NONE = TensorDictModule(nn.Linear(3, 3), ["observation"], ["logits"])
READS_WHOLE = TensorDictModule(ReadsPlace(4, 3), ["goal"], ["logits"])


@pytest.mark.parametrize(
    ("observations", "policy"),
    [
        ("array", choice_by(NESTS, READS_PART)),
        ("array", choice_by(NESTS, READS_NONE)),
        ("dict", choice_by(READS_WHOLE)),
    ],
    ids=["a part of what another wrote", "what no other reads", "a whole observation"],
)
def test_entries_within_entries(observations: str, policy: ProbabilisticActor):
    make_env = lambda: GymEnv("ppokit/Wander-v0", observations=observations)  # noqa: E731
    assert_same(collect(make_env, policy, 2), reference(make_env, policy, 2))


@pytest.mark.parametrize("head", [READS_PART, READS_NONE], ids=["read", "not read"])
def test_a_transform_that_writes_an_entry_within_another(head: TensorDictModule):
    flat = TensorDictModule(lambda x: NESTS.module(x)["a"], ["observation"], [("made", "a")])
    found, expected = (
        collect(Wander, choice_by(head), 2, observation_transform=transform)
        for transform in (NESTS, flat)
    )
    assert_same(found, expected)


@pytest.mark.parametrize("part", ["policy", "network", "layer", "head"])
def test_hooks_are_called(part: str):
    policy, options = make("one-hot")
    parts = {"policy": policy, "head": policy.module[1], "network": policy.module[0]}
    parts["layer"] = policy.module[0].module[0]
    collector = collector_of(policy, **options)
    assert is_lean(collector)
    calls = []
    handle = parts[part].register_forward_hook(lambda *_: calls.append(1))
    collector.rollout()
    assert len(calls) == 8
    handle.remove()
    collector.rollout()
    assert len(calls) == 8


def test_a_safe_actor_is_asked_itself():
    """It projects its actions into the spec with a hook."""
    env = GymEnv("ppokit/Wander-v0", actions="box")
    policy = make_policy(3, 4, d.Normal)
    safe = ProbabilisticActor(
        policy.module[0],
        in_keys=["loc", "scale"],
        spec=env.action_spec,
        safe=True,
        distribution_class=d.Normal,
    )
    (batch,) = collect(lambda: Wander(actions="box"), safe, 2, batches=1)
    assert batch["action"].abs().max() == 1


def test_changes_between_batches_are_seen():
    policy, options = make("tanh normal")
    collector = collector_of(policy, **options)
    collector.rollout()
    with torch.no_grad():
        policy.module[0].module[2].bias.fill_(50.0)  # loc and scale
    assert collector.rollout()["loc"].min() > 40
    policy.module[0].module[2] = nn.Linear(16, 4).requires_grad_(False)
    policy.module[0].module[2].weight.zero_()
    policy.module[0].module[2].bias.zero_()
    assert torch.equal(collector.rollout()["loc"], torch.zeros(2, 8, 2))
    policy.module[1].distribution_kwargs["high"] = 9.0
    assert collector.rollout()["action"].max() > 1
    policy.module[1].return_log_prob = False
    assert "action_log_prob" not in collector.rollout().keys()
    assert "called on tensors" in repr(collector)


def test_without_randomness():
    policy, options = make("tanh normal")
    collector = collector_of(policy, exploration_type=ExplorationType.DETERMINISTIC, **options)
    batch = collector.rollout()
    torch.testing.assert_close(batch["action"], batch["loc"].tanh())


def test_no_gradient_is_kept():
    policy, options = make("normal")
    for value in collector_of(policy, **options).rollout().values(True, True):
        assert not value.requires_grad


# -- bad policies -----------------------------------------------------------------


class Writes(TensorDictModuleBase):
    """Writes one thing, into a TensorDict of its own."""

    def __init__(self, **entries: torch.Tensor) -> None:
        super().__init__()
        self.entries, self.in_keys, self.out_keys = entries, [], list(entries)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return TensorDict(self.entries, tensordict.batch_size)


def test_a_policy_that_returns_another_tensordict():
    action = torch.nn.functional.one_hot(torch.tensor([0, 1]), 3)
    batch = collector_of(Writes(action=action, value=torch.ones(2, 1))).rollout()
    assert torch.equal(batch["action"][:, 3], action)
    assert batch["value"].shape == (2, 8, 1)


def test_a_network_that_takes_tensors():
    collector = GymCollector("Pendulum-v1", nn.Linear(3, 1), frames_per_batch=4)
    with pytest.raises(TypeError, match="Linear cannot be called on a TensorDict"):
        collector.rollout()
    assert collector.closed


def test_no_action():
    with pytest.raises(KeyError, match=r"wrote no 'action', but \['value'\]"):
        collector_of(Writes(value=torch.ones(2, 1))).rollout()


@pytest.mark.parametrize("hooked", [False, True])
def test_actions_of_another_encoding(hooked: bool):
    policy = make_policy(3, 4, OneHotCategorical)
    if hooked:
        policy.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"'action' has shape \[2, 4\].*must be \[2, 3\]"):
        collector_of(policy).rollout()
    policy = make_policy(3, 3, d.Categorical)
    with pytest.raises(ValueError, match=r"'action' has shape \[2\].*categorical_action_encoding"):
        collector_of(policy, categorical_action_encoding=False).rollout()


class OwnCategorical(d.Categorical):
    """A subclass."""


class OwnOneHot(OneHotCategorical):
    """A subclass, of torch's Categorical, too."""


INDICES = {"Categorical": d.Categorical, "subclass": OwnCategorical}
INDICES |= {"partial": partial(d.Categorical, validate_args=True)}
ONE_HOT = {"OneHotCategorical": OneHotCategorical, "torch's": d.OneHotCategorical}
ONE_HOT |= {"subclass": OwnOneHot, "partial": partial(OneHotCategorical)}
WRAPPERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "none": lambda actor: {"policy": actor},
    "TensorActor": lambda actor: {"policy": TensorActor(actor)},
    "policy_factory": lambda actor: {"policy": None, "policy_factory": lambda: actor},
    "sequence": lambda actor: {
        "policy": TensorDictSequential(
            actor, TensorDictModule(nn.Linear(3, 1), ["observation"], ["state_value"])
        )
    },
    "module": lambda actor: {"policy": TensorDictModuleWrapper(actor)},
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        *((kind, (2, 8)) for kind in INDICES.values()),
        *((kind, (2, 8, 3)) for kind in ONE_HOT.values()),
    ],
    ids=[*(f"{name}, index" for name in INDICES), *(f"{name}, one-hot" for name in ONE_HOT)],
)
def test_the_encoding_of_actions_follows_the_distribution(kind: Any, shape: Any, wrapper: str):
    arguments = WRAPPERS[wrapper](make_policy(3, 3, kind))
    with collector_of(**arguments) as collector:
        batch = collector.rollout()
    assert batch["action"].shape == shape


def test_without_a_distribution_actions_are_one_hot():
    policy = TensorDictModule(nn.Linear(3, 3), ["observation"], ["action"])
    assert collector_of(policy).rollout()["action"].shape == (2, 8, 3)


def test_a_latent_variable_does_not_choose_the_encoding_of_actions():
    skill = make_policy(3, 3, d.Categorical)
    skill = ProbabilisticActor(
        skill.module[0], in_keys=["logits"], out_keys=["skill"], distribution_class=d.Categorical
    )
    policy = TensorDictSequential(skill, make_policy(3, 3, OneHotCategorical))
    assert collector_of(policy).rollout()["action"].shape == (2, 8, 3)


def test_keys_that_are_not_there():
    policy = TensorDictModule(nn.Linear(3, 3), ["pixels"], ["action"])
    with pytest.raises(KeyError, match=r"policy reads \['pixels'\].*There is: .*observation"):
        collector_of(policy)
    with pytest.raises(KeyError, match=r"observation_transform reads \['pixels'\]"):
        collector_of(make("one-hot")[0], observation_transform=policy)


@pytest.mark.parametrize("kind", ["tanh normal", "one-hot"])
def test_parameters_that_are_not_numbers(kind: str):
    policy, options = make(kind)
    with torch.no_grad():
        policy.module[0].module[0].weight.fill_(torch.nan)
    collector = collector_of(policy, **options)
    with pytest.raises(ValueError, match="is nan or inf in"):
        collector.rollout()
    assert collector.closed


# -- which path it takes ------------------------------------------------------------


class Unhashable(type):
    """The type of classes that have no hash, which torchrl itself cannot call either."""

    __hash__ = None  # type: ignore[assignment]


class Odd(d.Categorical, metaclass=Unhashable):
    """A distribution that cannot be looked up."""


@dataclass
class Factory:
    """Makes a distribution; dataclasses that compare have no hash."""

    kind: Any = d.Categorical

    def __call__(self, **parameters: Any) -> d.Distribution:
        return self.kind(**parameters)


def test_a_distribution_class_need_not_have_a_hash():
    odd = make_policy(3, 3, d.Categorical)
    odd.module[-1].distribution_class = Odd  # which tensordict 0.15 builds no policy with
    collector = collector_of(odd, categorical_action_encoding=True)
    assert "as a TensorDictModule (the distribution Odd is not known)" in repr(collector)
    assert "as a TensorDictModule (the distribution Odd is not known)" in repr(TensorActor(odd))
    policy = make_policy(3, 3, Factory())
    collector = collector_of(policy, categorical_action_encoding=True)
    assert collector.rollout()["action"].shape == (2, 8)
    assert "as a TensorDictModule (the distribution Factory(" in repr(collector)
    given = TensorDict({"observation": torch.zeros(2, 3)}, [2])
    assert TensorActor(policy)(given)["action"].shape == (2,)


def hook_on(module: nn.Module) -> None:
    module.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda policy: None, None),
        (lambda policy: hook_on(policy.module[0].module[0]), None),  # torch calls it
        (lambda policy: hook_on(policy), "a hook on ProbabilisticActor"),
        (lambda policy: hook_on(policy.module[1]), "a hook on "),
        (lambda policy: hook_on(policy.module[0]), "a hook on"),
        (lambda policy: setattr(policy.module[1], "num_samples", 3), "num_samples"),
        (lambda policy: policy.module[1].distribution_kwargs.update(tanh_loc=True), "tanh_loc"),
        (lambda policy: policy.module[1].distribution_kwargs.update(odd=1), r"arguments ['odd']"),
    ],
)
def test_the_path_is_said_with_its_reason(change: Any, reason: str | None):
    policy, options = make("tanh normal")
    collector = collector_of(policy, **options)
    assert "policy called on tensors" in repr(collector)
    change(policy)
    expected = "called on tensors" if reason is None else "called as a TensorDictModule ("
    assert expected in repr(collector)
    assert reason is None or reason in repr(collector)


def test_other_reasons():
    policy, options = make("one-hot")
    collector = collector_of(policy, exploration_type=ExplorationType.MODE, **options)
    assert "exploration_type is mode" in repr(collector)
    collector = collector_of(TensorDictSequential(policy), **options)
    assert "TensorDictSequential is no ProbabilisticActor" in repr(collector)
