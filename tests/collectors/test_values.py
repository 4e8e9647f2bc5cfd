"""GymCollector(value_network=, compact_obs=): GAE of stored values is GAE of the critic."""

from __future__ import annotations

import copy
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.modules import MLP, ValueOperator

from ppokit import GAE, DualClipPPOLoss, GymCollector, LSTMModule, ObservationNormalizer
from ppokit.networks import actor_critic
from tests.blocks import ppo_update
from tests.collectors.test_collector import Wander, collector_of
from tests.networks.environments import IMAGE, Spaces

VALUE = "state_value"
KEYS = ["advantage", "value_target", VALUE, ("next", VALUE)]
gae = partial(GAE, gamma=0.9, lmbda=0.8)


def make_networks(shared: bool) -> tuple[Any, Any]:
    torch.manual_seed(0)
    actor, *_, critic = actor_critic(Wander(), shared=shared)
    return actor, critic


def batches(make_env: Any, actor: Any, **options: Any) -> list[TensorDictBase]:
    frames = {"frames_per_batch": 48, "total_frames": 144}
    with GymCollector(make_env, actor, num_envs=3, **frames, **options) as collector:
        collector.set_seed(3)
        torch.manual_seed(1)
        return [batch.clone() for batch in collector]


MODES: dict[str, Any] = {
    "serial": Wander,
    **{
        mode.name: partial(SyncVectorEnv, [Wander] * 3, autoreset_mode=mode)
        for mode in (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP)
    },
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_advantages_are_those_of_the_critic(mode: str, shared: bool, compact: bool, compiled: bool):
    actor, critic = make_networks(shared)
    options: dict[str, Any] = {"compile_policy": {"backend": "eager"}} if compiled else {}
    options["observation_transform"] = ObservationNormalizer(3)
    expected = batches(MODES[mode], actor, **copy.deepcopy(options))
    values = {"value_network": critic, "compact_obs": compact}
    found = batches(MODES[mode], actor, **options, **values)
    ends = torch.cat([x["next", "truncated"] & ~x["next", "terminated"] for x in expected])
    assert ends.any()
    for own, other in zip(found, expected, strict=True):
        new = {*own.keys(True, True)} ^ {*other.keys(True, True)}
        assert new == {VALUE, ("next", VALUE), *([("next", "observation")] if compact else ())}
        left_out = VALUE, ("next", VALUE), ("next", "observation"), ("collector", "traj_ids")
        for key in {*other.keys(True, True)} - {*left_out}:
            torch.testing.assert_close(own[key], other[key], rtol=0, atol=1e-6)
        gae(value_network=critic)(other)
        gae(value_network=None)(own)
        mask = other.get(("collector", "mask"), None)
        for key in KEYS:  # to the bit, but where a shared encoder sees another number of rows
            exact = 0 if not shared and mode != "NEXT_STEP" else 1e-6
            a, b = (x[key] if mask is None else x[key][mask] for x in (own, other))
            torch.testing.assert_close(a, b, rtol=0, atol=exact)


@pytest.mark.parametrize("hooked", [False, True])
def test_a_shared_encoder_sees_each_observation_once(hooked: bool):
    """The unseen observations come last. A policy that does more shares nothing."""
    actor, critic = make_networks(True)
    rows: list[int] = []
    first = critic[0].module[0]
    first.register_forward_hook(lambda _, given, __: rows.append(len(given[0])))
    if hooked:
        actor.register_forward_hook(lambda *_: None)
    with collector_of(Wander, actor, value_network=critic) as collector:
        collector.set_seed(0)
        batch = collector.rollout()
    done, terminated = batch["next", "done"], batch["next", "terminated"]
    alone = 2 + int((done & ~terminated)[:, :-1].sum()) - int(terminated[:, -1].sum())
    assert rows == [2] * 8 + [16] * hooked + [alone] * (alone > 0)
    assert not [key for key in batch.keys(True) if str(key).startswith("_")]


def test_a_policy_that_writes_the_value_itself():
    actor, head, critic = actor_critic(Wander(), shared=True)
    policy = TensorDictSequential(actor, head)
    with collector_of(Wander, policy, value_network=critic) as collector:
        batch = collector.rollout()
    expected = critic(batch.clone())[VALUE]
    torch.testing.assert_close(batch[VALUE], expected)
    torch.testing.assert_close(gae(value_network=None)(batch)["advantage"].shape, expected.shape)


class Scaled(TensorDictSequential):
    """Changes the value in its own forward."""

    def forward(self, tensordict: Any, **options: Any) -> Any:  # pyright: ignore
        out = super().forward(tensordict, **options)
        return out.set(VALUE, out[VALUE] * 3)


def triple(_: Any, __: Any, out: Any) -> Any:
    return out.set(VALUE, out[VALUE] * 3)


def forget(actor: Any, critic: Any) -> Any:
    actor.select_out_keys("action", "action_log_prob", "logits")
    return critic


def hooked(actor: Any, critic: Any) -> Any:
    critic.register_forward_hook(triple)
    return critic


def nested(actor: Any, critic: Any) -> Any:
    critic.register_forward_hook(triple)
    return TensorDictSequential(critic)


def other_features(actor: Any, critic: Any) -> Any:
    actor.module[0].register_forward_hook(
        lambda _, __, td: td.set("_features", td["_features"] * 2)
    )
    return critic


def in_place(actor: Any, critic: Any) -> Any:
    """A layer of the policy that changes the features after the critic's encoder."""
    (head,) = [x for x in actor.modules() if getattr(x, "in_keys", 0) == ["_features"]]
    head.module = nn.Sequential(nn.SiLU(inplace=True), head.module)
    return critic


def twice(actor: Any, critic: Any) -> Any:
    return TensorDictSequential(critic[0], critic)


VARIANTS: list[Any] = [
    in_place,
    twice,
    hooked,
    nested,
    forget,
    other_features,
    lambda _, critic: Scaled(*critic),
]


@pytest.mark.parametrize("change", VARIANTS)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore:The policy is not compiled:RuntimeWarning")
def test_what_does_more_than_call_modules_in_turn_is_not_shared(change: Any, compiled: bool):
    actor, critic = make_networks(True)
    critic = change(actor, critic)
    options: Any = {"compile_policy": {"backend": "eager"}} if compiled else {}
    with collector_of(Wander, actor, value_network=critic, **options) as collector:
        batch = collector.rollout()
    expected = gae(value_network=critic)(batch.clone())
    gae(value_network=None)(batch)
    for key in KEYS:
        torch.testing.assert_close(batch[key], expected[key], rtol=0, atol=1e-5)


def test_an_update_of_compact_images_is_one_of_whole_batches():
    def train(**options: Any) -> Any:
        torch.manual_seed(0)
        actor, head, critic = actor_critic(Spaces(IMAGE), hidden=(), shared=True)
        loss = DualClipPPOLoss(actor, head)
        network = None if options else critic
        if options:
            options["value_network"] = critic
        update = ppo_update(
            loss,
            torch.optim.SGD(loss.parameters(), 0.01),
            advantage=gae(value_network=network),
            minibatch_size=8,
            epochs=2,
            seed=0,
        )
        options |= {"frames_per_batch": 32, "num_envs": 2}
        with GymCollector(lambda: Spaces(IMAGE), actor, **options) as collector:
            collector.set_seed(0)
            torch.manual_seed(0)
            update(collector.rollout())
        return actor

    for x, y in zip(train().parameters(), train(compact_obs=True).parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_whole_episodes_have_their_values():
    actor, critic = make_networks(False)
    options = {"trajs_per_batch": 3, "value_network": critic, "total_frames": 96}
    with collector_of(Wander, actor, **options) as collector:
        for batch in collector:
            mask = batch["collector", "mask"]
            expected = critic(batch.clone())[VALUE][mask]
            torch.testing.assert_close(batch[VALUE][mask], expected)


def test_values_of_an_own_loop_are_not_kept():
    """A batch is freed before the next is collected, if the loop lets it go."""
    actor, critic = make_networks(False)
    kept: list[Any] = []
    with collector_of(Wander, actor, value_network=critic, total_frames=48) as collector:
        for batch in collector:
            assert not [x for x in kept if x() is not None]
            kept.append(weakref.ref(batch["observation"]))
            del batch
    assert len(kept) == 3


def memory() -> Any:
    lstm = LSTMModule(input_size=3, hidden_size=4, in_key="observation", out_key="h")
    return TensorDictSequential(lstm, TensorDictModule(nn.Linear(4, 1), ["h"], [VALUE]))


BAD: list[Any] = [
    ({"compact_obs": True}, "pass value_network"),
    ({"value_network": "memory"}, "recurrent"),
    ({"value_network": TensorDictModule(nn.Linear(3, 1), ["observation"], ["v"])}, "writes .*'v'"),
    ({"value_network": nn.Linear(3, 1)}, "writes 'state_value'"),
    ({"value_network": "critic", "worker_idx": 1}, "own copy of value_network"),
]


@pytest.mark.parametrize(("options", "words"), BAD)
def test_bad_arguments(options: Any, words: str):
    actor, critic = make_networks(False)
    named = {"memory": memory(), "critic": critic}
    network = options.get("value_network")
    given = {"value_network": named[network]} if isinstance(network, str) else {}
    with pytest.raises(ValueError, match=words):
        collector_of(Wander, actor, **{**options, **given})


def test_bad_networks():
    actor, head, _ = actor_critic(Wander(), shared=True)
    with pytest.raises(KeyError, match=r"value_network reads.*_features"):
        collector_of(Wander, actor, value_network=head)
    _, critic = make_networks(False)
    nn.init.constant_(critic.module[-1].bias, float("nan"))
    collector = collector_of(Wander, actor, value_network=critic)
    with pytest.raises(ValueError, match=r"'state_value'.*nan"):
        collector.rollout()


def test_a_critic_for_other_observations_is_explained():
    actor, _ = make_networks(False)
    _, critic = actor_critic("CartPole-v1")
    collector = collector_of(Wander, actor, value_network=critic)
    with pytest.raises(ValueError, match=r"value network.*'observation'.*\[.*3\]"):
        collector.rollout()


def test_recomputed_advantages_need_the_critic():
    actor, critic = make_networks(False)
    loss = DualClipPPOLoss(actor, critic)
    optimizer = torch.optim.SGD(loss.parameters(), 0.01)
    with pytest.raises(ValueError, match=r"recompute_advantage.*no value_network"):
        ppo_update(loss, optimizer, advantage=gae(value_network=None), recompute_advantage=True)


def test_gae_without_next_observations_names_the_fix():
    actor, critic = make_networks(False)
    with collector_of(Wander, actor, value_network=critic, compact_obs=True) as collector:
        batch = collector.rollout()
    for options in ({}, {"shifted": False}, {"shifted": True}):
        with pytest.raises(KeyError, match=r"\['observation'\].*compact_obs=False"):
            gae(value_network=critic, **options)(batch)
    with pytest.raises(KeyError, match=r"\['observation'\].*compact_obs=False"):
        gae(value_network=critic)(batch, target_params=TensorDict.from_module(critic))
    loss = DualClipPPOLoss(actor, critic)
    with pytest.raises(KeyError, match=r"'advantage'.*\['observation'\].*under 'next'"):
        loss(batch.exclude("advantage"))


def test_gae_without_some_of_the_next_observations():
    """What no step changes may be missing there; "speed", of info, is there."""
    actor, critic = make_networks(False)
    options: Any = {"value_network": critic, "compact_obs": True}
    with collector_of(Wander, actor, **options) as collector:
        batch = collector.rollout()
    speed, time = torch.rand(2, *batch.batch_size, 1)
    batch["speed"], batch["next", "speed"] = speed, speed + 1
    privileged = ValueOperator(MLP(4, 1, num_cells=[8]), ["observation", "speed"])
    with pytest.raises(KeyError, match=r"reads \['observation'\]"):
        gae(value_network=privileged)(batch.clone())
    whole = batch.clone()
    task = torch.arange(len(batch)).view(-1, 1, 1).expand(*batch.batch_size, 1).float()
    critic = ValueOperator(MLP(2, 1, num_cells=[8]), ["task", "speed"])
    batch["task"], whole["task"], whole["next", "task"] = task, task, task
    expected = gae(value_network=critic)(whole)["advantage"]
    torch.testing.assert_close(gae(value_network=critic)(batch)["advantage"], expected)
    batch["task"] = time
    with pytest.raises(KeyError, match=r"reads \['task'\]"):
        gae(value_network=critic)(batch)
    ends = batch["next", "done"].clone()
    batch["next", "done"] = torch.ones_like(ends)  # each step is an episode
    assert gae(value_network=critic)(batch)["advantage"].isfinite().all()


def test_gae_of_a_recurrent_critic_without_next_observations():
    def memory_of(key: str) -> Any:
        return LSTMModule(
            3, 8, in_keys=["observation", f"h{key}", f"c{key}"],
            out_keys=["features", ("next", f"h{key}"), ("next", f"c{key}")],
        )  # fmt: skip

    memory = memory_of("0")
    value = ValueOperator(nn.Linear(8, 1), ["features"])
    _, plain = make_networks(False)
    head, _ = make_networks(False)
    policy = TensorDictSequential(memory, head)
    recurrent = TensorDictSequential(memory, value)
    with collector_of(Wander, policy, value_network=plain, compact_obs=True) as collector:
        collector.set_seed(0)  # rows that end in a termination need no next observation
        batch = collector.rollout()
    with pytest.raises(KeyError, match=r"reads \['observation'\].*compact_obs=False"):
        gae(value_network=recurrent)(batch)
