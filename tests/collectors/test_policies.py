"""GymCollector calls any policy as torchrl does, and stores the entries that it writes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    AddStateIndependentNormalScale,
    NormalParamExtractor,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictModuleWrapper,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch import distributions as d
from torchrl.envs import ExplorationType, GymEnv
from torchrl.modules import IndependentNormal, OneHotCategorical, ProbabilisticActor, TanhNormal
from torchrl.modules.distributions.discrete import ReparamGradientStrategy

from ppokit import GymCollector, TensorActor
from tests.blocks import actor_of
from tests.collectors.test_collector import (
    POLICY,
    Wander,
    assert_same,
    collect,
    collector_of,
    make_policy,
    reference,
    rescored,
)

HIGH = torch.tensor([1.0, 3.0])
KINDS = {
    "normal": (d.Normal, {}),
    "independent normal": (IndependentNormal, {}),
    "independent normal, options": (IndependentNormal, {"upscale": 2.0, "event_dim": 1}),
    "tanh normal": (TanhNormal, {}),
    "tanh normal, bounds": (TanhNormal, {"low": -0.5, "high": 2.0}),
    "tanh normal, bounds of tensors": (TanhNormal, {"low": -torch.ones(2), "high": HIGH}),
    "tanh normal, not safe": (TanhNormal, {"safe_tanh": False, "event_dims": 1}),
    "categorical": (d.Categorical, {}),
    "one-hot": (OneHotCategorical, {"grad_method": ReparamGradientStrategy.PassThrough}),
}


def make(kind: str) -> tuple[ProbabilisticActor, dict[str, Any]]:
    """A policy, and the options of a collector for it."""
    distribution, options = KINDS[kind]
    discrete = distribution in (d.Categorical, OneHotCategorical)
    policy = make_policy(3, 3 if discrete else 4, distribution, **options)
    make_env = partial(Wander, actions="discrete" if discrete else "box")
    encoding = {"categorical_action_encoding": distribution is d.Categorical}
    return policy, {"make_env": make_env} | encoding


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_on_tensors_gives_the_entries_of_the_policy(kind: str):
    policy, options = make(kind)
    if kind == "tanh normal":  # saturated actions are scored as they are stored
        policy.module[0].module[2].bias.data[:1] = 30.0
    make_env = options.pop("make_env")
    lean = collect(make_env, policy, 5, batches=2, **options)
    collector = collector_of(make_env, policy, **options)
    assert "called on tensors" in repr(collector)
    policy.register_forward_hook(lambda *_: None)
    assert "called as a TensorDictModule" in repr(collector)
    expected = collect(make_env, policy, 5, batches=2, **options)
    assert_same(lean, rescored(policy, expected) if "tanh" in kind else expected)


@pytest.mark.parametrize("return_log_prob", [False, True])
def test_entries_of_modules_in_a_row(return_log_prob: bool):
    """All entries are stored, except those that begin with an underscore."""
    modules = TensorDictSequential(
        TensorDictModule(nn.Linear(3, 8), ["observation"], ["hidden"]),
        TensorDictModule(nn.Linear(8, 2), ["hidden"], ["_private"]),
        TensorDictModule(AddStateIndependentNormalScale(2), ["_private"], ["loc", "scale"]),
    )
    policy = actor_of(modules, TanhNormal, return_log_prob=return_log_prob)
    make_env = partial(GymEnv, "ppokit/Wander-v0", actions="box")
    batches = collect(make_env, policy, 3)
    assert ("action_log_prob" in batches[0].keys()) == return_log_prob
    expected = reference(make_env, policy, 3)
    assert_same(batches, rescored(policy, expected) if return_log_prob else expected)


class Nests(nn.Linear):
    """Returns a dict."""

    def forward(self, input: torch.Tensor) -> Any:
        return {"a": super().forward(input)}


class ReadsPlace(nn.Linear):
    """Reads a part of a nested observation."""

    def forward(self, input: Any) -> torch.Tensor:
        return super().forward(input["place"].float().flatten(-2))


def choice_by(*modules: TensorDictModule) -> ProbabilisticActor:
    return actor_of(TensorDictSequential(*modules), OneHotCategorical)


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
    ids=["a part of a nested entry", "an entry that is not read", "a whole observation"],
)
def test_nested_entries(observations: str, policy: ProbabilisticActor):
    make_env = partial(GymEnv, "ppokit/Wander-v0", observations=observations)
    assert_same(collect(make_env, policy, 2), reference(make_env, policy, 2))


def test_changes_between_batches_are_seen():
    policy, options = make("tanh normal")
    collector = collector_of(policy=policy, **options)
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


def test_without_randomness_and_gradients():
    policy, options = make("tanh normal")
    kind = ExplorationType.DETERMINISTIC
    batch = collector_of(policy=policy, exploration_type=kind, **options).rollout()
    torch.testing.assert_close(batch["action"], batch["loc"].tanh())
    assert not any(value.requires_grad for value in batch.values(True, True))


# -- the encoding of actions --------------------------------------------------------


class OwnCategorical(d.Categorical):
    """A subclass."""


class OwnOneHot(OneHotCategorical):
    """A subclass, also of torch's Categorical."""


ENCODINGS = {
    "Categorical": (d.Categorical, (2, 8)),
    "subclass": (OwnCategorical, (2, 8)),
    "partial": (partial(d.Categorical, validate_args=True), (2, 8)),
    "OneHotCategorical": (OneHotCategorical, (2, 8, 3)),
    "torch's one-hot": (d.OneHotCategorical, (2, 8, 3)),
    "one-hot subclass": (OwnOneHot, (2, 8, 3)),
}
VALUE = TensorDictModule(nn.Linear(3, 1), ["observation"], ["state_value"])
WRAPPERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "none": lambda actor: {"policy": actor},
    "TensorActor": lambda actor: {"policy": TensorActor(actor)},
    "policy_factory": lambda actor: {"policy": None, "policy_factory": lambda: actor},
    "sequence": lambda actor: {"policy": TensorDictSequential(actor, VALUE)},
    "module": lambda actor: {"policy": TensorDictModuleWrapper(actor)},
}


CASES = [(kind, "none") for kind in ENCODINGS]
CASES += [(kind, x) for kind in ("Categorical", "OneHotCategorical") for x in WRAPPERS]


@pytest.mark.parametrize(("kind", "wrapper"), CASES)
def test_the_encoding_of_actions_follows_the_distribution(kind: str, wrapper: str):
    distribution, shape = ENCODINGS[kind]
    batch = collector_of(**WRAPPERS[wrapper](make_policy(3, 3, distribution))).rollout()
    assert batch["action"].shape == shape


def test_only_the_distribution_of_the_action_chooses_its_encoding():
    policy = TensorDictModule(
        lambda x: nn.functional.one_hot(x.argmax(-1), 3), ["observation"], ["action"]
    )
    assert collector_of(policy=policy).rollout()["action"].shape == (2, 8, 3)
    network = make_policy(3, 3, d.Categorical).module[0]
    skill = actor_of(network, out_keys=["skill"])
    policy = TensorDictSequential(skill, make_policy(3, 3, OneHotCategorical))
    assert collector_of(policy=policy).rollout()["action"].shape == (2, 8, 3)


# -- bad policies -----------------------------------------------------------------


class Writes(TensorDictModuleBase):
    """Returns its entries in a TensorDict of its own."""

    def __init__(self, **entries: torch.Tensor) -> None:
        super().__init__()
        self.entries, self.in_keys, self.out_keys = entries, [], list(entries)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return TensorDict(self.entries, tensordict.batch_size)


def test_a_policy_that_returns_another_tensordict():
    action = torch.nn.functional.one_hot(torch.tensor([0, 1]), 3)
    batch = collector_of(policy=Writes(action=action, value=torch.ones(2, 1))).rollout()
    assert torch.equal(batch["action"][:, 3], action)
    assert batch["value"].shape == (2, 8, 1)


def hooked(module: Any) -> Any:
    module.register_forward_hook(lambda *_: None)
    return module


def nan_policy(*sizes: Any) -> Any:
    policy = make_policy(*sizes)
    policy.module[0].module[0].weight.data.fill_(torch.nan)
    return policy


def secretive(network: nn.Module, **options: Any) -> ProbabilisticActor:
    """A policy whose logits are not stored."""
    module = TensorDictModule(network, ["observation"], ["_logits"])
    options["distribution_class"] = OneHotCategorical
    return ProbabilisticActor(module, in_keys={"logits": "_logits"}, **options)


NAN, NOTHING = nn.Threshold(torch.inf, torch.nan), nn.Threshold(torch.inf, -torch.inf)
READS_PIXELS = TensorDictModule(nn.Linear(3, 3), ["pixels"], ["action"])
TANH: Any = {"make_env": partial(Wander, actions="box")}
NO_PIXELS = TensorDictModule(nn.Linear(3, 3), ["pixels"], ["features"])
TRANSFORMED: Any = {"observation_transform": NO_PIXELS}
INDEX: Any = {"categorical_action_encoding": False}
SHAPE = r"'action' has shape \[2, 4\].*must be \[2, 3\]"
BAD: list[Any] = [
    (lambda: nn.Linear(3, 3), {}, TypeError, "Linear cannot be called on a TensorDict"),
    (lambda: None, {}, TypeError, "policy must be a TensorDictModule, got NoneType"),
    (lambda: Writes(value=torch.ones(2, 1)), {}, KeyError, r"wrote no 'action', but \['value'\]"),
    (lambda: make_policy(3, 4, OneHotCategorical), {}, ValueError, SHAPE),
    (lambda: hooked(make_policy(3, 4, OneHotCategorical)), {}, ValueError, SHAPE),
    (lambda: make_policy(3, 3, d.Categorical), INDEX, ValueError, r"\[2\].*categorical_action_enc"),
    (lambda: READS_PIXELS, {}, KeyError, r"policy reads \['pixels'\].*There is: .*observation"),
    (lambda: POLICY, TRANSFORMED, KeyError, r"observation_transform reads \['pixels'\]"),
    (lambda: nan_policy(3, 4, TanhNormal), TANH, ValueError, "is nan or inf in"),
    (lambda: nan_policy(3, 3, OneHotCategorical), {}, ValueError, "is nan or inf in"),
    (lambda: secretive(NAN), {}, ValueError, "'_logits' is nan or inf in"),
    (lambda: secretive(NOTHING), {}, ValueError, "'_logits' is nan or inf in"),
    (lambda: hooked(nan_policy(3, 4, TanhNormal)), TANH, ValueError, "'loc' is nan"),
]


@pytest.mark.parametrize(("make_policy", "options", "error", "message"), BAD)
def test_bad_policies(make_policy: Any, options: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        collector_of(policy=make_policy(), **options).rollout()


class Wild(Wander):
    """Writes to the actions that it is given."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        result = super().step(action)
        action.fill(0.0)
        return result


class OwnScale(nn.Module):
    """A network with a scale that is not expanded over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.loc, self.scale = nn.Linear(3, 1), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.loc(x), self.scale


def test_a_scale_without_a_batch_dimension_raises():
    module = TensorDictModule(OwnScale(), ["observation"], ["loc", "scale"])
    options: Any = {"distribution_class": IndependentNormal, "return_log_prob": True}
    policy = ProbabilisticActor(module, in_keys=["loc", "scale"], **options)
    with pytest.raises(ValueError, match=r"'scale' has shape \[1\], and 'loc' has \[1, 1\]"):
        collector_of(lambda: GymEnv("Pendulum-v1"), policy, num_envs=1).rollout()


def test_an_environment_may_write_to_its_action():
    policy = make("tanh normal")[0]
    found, expected = (collect(partial(x, actions="box"), policy, 5) for x in (Wild, Wander))
    assert_same(found, expected)


def test_a_private_name_of_the_log_probability():
    policy = secretive(nn.Linear(3, 3), return_log_prob=True, log_prob_key="_score")
    assert "_score" in collector_of(policy=policy).rollout().keys()


# -- which path it takes ------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda policy: None, None),
        (lambda policy: hooked(policy.module[0].module[0]), None),  # torch calls it
        (hooked, "a hook on ProbabilisticActor"),
        (lambda policy: hooked(policy.module[1]), "a hook on "),
        (lambda policy: hooked(policy.module[0]), "a hook on"),
        (lambda policy: setattr(policy.module[1], "num_samples", 3), "num_samples"),
        (lambda policy: policy.module[1].distribution_kwargs.update(tanh_loc=True), "tanh_loc"),
        (lambda policy: policy.module[1].distribution_kwargs.update(odd=1), "'odd'"),
    ],
)
def test_repr_shows_the_path_and_its_reason(change: Any, reason: str | None):
    policy, options = make("tanh normal")
    collector = collector_of(policy=policy, **options)
    assert "policy called on tensors" in repr(collector)
    change(policy)
    expected = "called on tensors" if reason is None else "called as a TensorDictModule ("
    assert expected in repr(collector)
    assert reason is None or reason in repr(collector)


class Reuses(nn.Module):
    """Writes its outputs into the same memory at each call, or returns an expanded parameter."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.scale = kind, nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_buffer("out", torch.zeros(2, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        loc = x.sum(-1, keepdim=True)
        if self.kind == "one memory":
            loc = torch.add(loc, 0, out=self.out)
            return loc, torch.ones_like(loc)
        self.scale += 0.1  # as weights arrive while a worker collects
        return loc, self.scale.expand_as(loc)


@pytest.mark.parametrize("kind", ["one memory", "a parameter"])
def test_networks_that_return_the_same_memory_in_each_step(kind: str):
    network = TensorDictModule(Reuses(kind), ["observation"], ["loc", "scale"])
    policy = actor_of(network, IndependentNormal)
    with GymCollector("Pendulum-v1", policy, frames_per_batch=16, num_envs=2) as collector:
        for _ in range(2):
            batch = collector.rollout()
            torch.testing.assert_close(batch["loc"], batch["observation"].sum(-1, keepdim=True))
            expected = d.Independent(d.Normal(batch["loc"], batch["scale"]), 1)
            score = expected.log_prob(batch["action"])
            torch.testing.assert_close(batch["action_log_prob"], score)
            steps = batch["scale"].diff(dim=1)
            torch.testing.assert_close(steps, torch.full_like(steps, 0.1 * (kind != "one memory")))


def test_a_transform_that_returns_the_same_memory_in_each_step():
    memory = torch.zeros(2, 3)
    double = TensorDictModule(
        lambda x: torch.mul(x, 2, out=memory if x.shape == (2, 3) else None),  # pyright: ignore
        ["observation"],
        ["double"],
    )
    network = TensorDictModule(nn.Linear(3, 2), ["double"], ["params"])
    policy = actor_of(
        TensorDictSequential(network, TensorDictModule(NormalParamExtractor(), ["params"], PAIR)),
        IndependentNormal,
    )
    options: Any = {"frames_per_batch": 8, "num_envs": 2, "observation_transform": double}
    with GymCollector("Pendulum-v1", policy, **options) as collector:
        batch = collector.rollout()
    torch.testing.assert_close(batch["double"], 2 * batch["observation"])
    torch.testing.assert_close(batch["next", "double"], 2 * batch["next", "observation"])


PAIR: list[Any] = ["loc", "scale"]
