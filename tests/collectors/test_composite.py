"""Actions of several parts: GymCollector yields what torchrl's Collector yields."""

from __future__ import annotations

from typing import Any

import pytest
from tensordict.nn import ProbabilisticTensorDictSequential, set_composite_lp_aggregate
from torchrl.envs import Compose, InitTracker
from torchrl.modules import MaskedOneHotCategorical
from torchrl.modules.utils import get_primers_from_module

from ppokit import GymCollector
from tests.collectors.test_collector import (
    assert_many_ends,
    assert_same,
    collect,
    in_one,
    reference,
)
from tests.mixed import ACTIONS, Mixed, make_mixed_actor, make_recurrent_actor, torchrl_env

# Of a Dict with one part, torchrl passes the part to the environment without its name.
OF_TORCHRL = [actions for actions in ACTIONS if actions != "one"]


@pytest.mark.parametrize("actions", OF_TORCHRL)
def test_batches_are_torchrls(actions: str):
    """In both encodings, with log-probabilities of each part or their sum."""
    for categorical, summed in ((False, False), (True, True)):
        with set_composite_lp_aggregate(summed):
            actor = make_mixed_actor(actions, categorical=categorical)
            encoding = {"categorical_action_encoding": categorical}
            batches = collect(lambda: Mixed(actions), actor, 3, batches=2, **encoding)
            make_env = torchrl_env(actions, categorical=categorical)
            expected = reference(make_env, actor, 3, batches=2)
        assert_many_ends(batches, "truncated", "terminated")
        assert_same(batches, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("actions", "summed"), [("deep", False), ("one", True), ("masked", False)])
def test_a_graph_gives_the_same(actions: str, summed: bool):
    options: dict[str, Any] = {"batches": 1, "categorical_action_encoding": True}
    graph = {"compile_policy": {"backend": "eager"}}
    with set_composite_lp_aggregate(summed):
        actor = make_mixed_actor(actions, categorical=True)
        found = collect(lambda: Mixed(actions), actor, 2, **options, **graph)
        expected = collect(lambda: Mixed(actions), actor, 2, **options)
    assert_same(found, expected)


def collector_of(actions: str, actor: Any, **options: Any) -> GymCollector:
    make_env = options.pop("make_env", lambda: Mixed(actions))
    return GymCollector(make_env, actor, num_envs=2, frames_per_batch=8, **options)


@pytest.mark.parametrize("actions", ["deep", "nested", "alike"])
def test_vector_environments(actions: str):
    actor = make_mixed_actor(actions, categorical=True)
    options: dict[str, Any] = {"batches": 1, "categorical_action_encoding": True}
    expected = collect(lambda: Mixed(actions), actor, 2, **options)
    found = collect(in_one(lambda: Mixed(actions), 2), actor, 2, **options)
    assert_same(found, expected)


def test_a_recurrent_policy_with_several_heads():
    actor = make_recurrent_actor()
    transform = Compose(InitTracker(), get_primers_from_module(actor))
    make_env = torchrl_env("nested", categorical=True)
    batches = collect(lambda: Mixed("nested"), actor, 3, categorical_action_encoding=True)
    assert_same(batches, reference(make_env, actor, 3, transform=transform))


@pytest.mark.parametrize("categorical", [False, True])
@pytest.mark.parametrize("actions", ["dict", "nested", "deep", "masked", "grid"])
def test_the_encoding_follows_the_heads(actions: str, categorical: bool):
    actor = make_mixed_actor(actions, categorical=categorical)
    options: dict[str, Any] = {"categorical_action_encoding": categorical}
    batches = collect(lambda: Mixed(actions), actor, 2, batches=1)
    assert_same(batches, collect(lambda: Mixed(actions), actor, 2, batches=1, **options))


# -- bad input -----------------------------------------------------------------------------


def mixed_encodings() -> Any:
    actor = make_mixed_actor("masked", categorical=True)
    actor.module[-1].distribution_kwargs["distribution_map"]["gear"] = MaskedOneHotCategorical
    return actor


def unwritten() -> Any:
    actor = make_mixed_actor("dict")
    actor.module[-1].in_keys = ["other"]
    return ProbabilisticTensorDictSequential(*actor.module[:-1], actor.module[-1])


ONE_HOT: Any = {"categorical_action_encoding": False}
SHAPE = r"\('action', 'gear'\) has shape \[2\]; .* Discrete\(3\) it must be \[2, 3\]"
BAD: list[Any] = [
    (
        "masked",
        mixed_encodings,
        {},
        ValueError,
        r"\['dials'\] as indices and \['gear'\] as one-hot",
    ),
    ("nested", lambda: make_mixed_actor("nested", categorical=True), ONE_HOT, ValueError, SHAPE),
    (
        *("dict", lambda: make_mixed_actor("one"), {}, KeyError),
        r"steer.*gear.* nor these within .*'action.*brake",
    ),
    ("dict", unwritten, {}, KeyError, r"reads \['other'\], which neither"),
]


@pytest.mark.parametrize(("actions", "make_actor", "options", "error", "message"), BAD)
def test_bad_actors(
    actions: str, make_actor: Any, options: Any, error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        collector_of(actions, make_actor(), **options).rollout()


# -- TensorActor -------------------------------------------------------------------------------
