"""Statistics of an update: names, means over minibatches, episodes."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from ppokit import AdaptiveKLCoeff, KLEarlyStopper, PPOUpdate, RewardNormalizer
from tests.blocks import Given, ppo_update

Make = Callable[[torch.Tensor, int], dict[str, Any]]


def frames(*shape: int) -> TensorDict:
    return TensorDict({"x": torch.zeros(shape)}, shape)


def update_of(make: Make, **options: Any) -> PPOUpdate:
    """Return an update with minibatches of 4, 4 and 2 frames, whose numbers the loss is given."""
    calls = itertools.count(1)
    loss = Given(lambda weight, _: TensorDict(make(weight, next(calls))), "x")
    loss.register_buffer("kl_coeff", torch.tensor(1.0))
    if "adaptive_kl" in options:
        options["adaptive_kl"] = AdaptiveKLCoeff(loss)
    options = {"epochs": 1, "minibatch_size": 4} | options
    return ppo_update(loss, torch.optim.SGD(loss.parameters(), lr=0.0), **options)


def swapped(weight: torch.Tensor, call: int) -> dict[str, torch.Tensor]:
    """Return entries in another order in every other minibatch."""
    entries = {"kl": torch.tensor(0.01), "loss_any": weight * 1.0, "clip": torch.tensor(5.0)}
    return dict(reversed(entries.items())) if call % 2 else entries


def test_entries_are_found_by_their_names():
    stopper = KLEarlyStopper(0.02, when="epoch")
    update = update_of(swapped, stopper=stopper, epochs=2, adaptive_kl=True)
    statistics = update(frames(10))
    assert statistics["loss_any"] == pytest.approx(1.0)
    assert statistics["kl"] == statistics["first_kl"] == pytest.approx(0.01)
    assert statistics["clip"] == pytest.approx(5.0)
    assert statistics["kl_limit"] == pytest.approx(0.03)
    assert (statistics["stopped"], statistics["epochs"]) == (0.0, 2.0)
    assert update.step.loss.kl_coeff == 1.0  # within half and twice the target of 0.01
    update = update_of(swapped, stopper=KLEarlyStopper(0.005, when="epoch"), epochs=2)
    assert update(frames(10))["stopped"] == 1.0


def test_entries_that_some_minibatches_lack():
    def make(weight: torch.Tensor, call: int) -> dict[str, torch.Tensor]:
        more = {} if call == 2 else {"kl": torch.tensor(0.01 * call)}
        return {"loss_any": weight * call} | more

    stopper = KLEarlyStopper(0.01, when="epoch", tolerance=1.6)
    statistics = update_of(make, stopper=stopper)(frames(10))
    assert statistics["loss_any"] == pytest.approx((4 * 1 + 4 * 2 + 2 * 3) / 10)
    assert statistics["kl"] == pytest.approx((4 * 0.01 + 2 * 0.03) / 6)
    assert statistics["stopped"] == 1.0  # 0.0167


def test_entries_of_any_shape():
    def make(weight: torch.Tensor, call: int) -> dict[str, Any]:
        shape = [(), (3,), (2, 1)][call - 1]
        nested = {"go": torch.full((call,), 2.0), "name": "no number"}
        count = torch.tensor(1_700_000_001)
        each = torch.full(shape, float(call))
        return {"loss_any": weight.half(), "x": each, "heads": nested, "count": count}

    statistics = update_of(make)(frames(10))
    assert statistics["x"] == pytest.approx((4 * 1 + 4 * 2 + 2 * 3) / 10)
    assert statistics["heads/go"] == 2.0
    assert "heads/name" not in statistics
    assert statistics["count"] == 1_700_000_001  # not rounded to the dtype of the losses


@pytest.mark.parametrize("when", ["minibatch", "epoch"])
@pytest.mark.parametrize("shape", [(), (1,), (4, 1)])
def test_a_kl_of_any_shape_stops(when: Any, shape: tuple[int, ...]):
    def diverged(weight: torch.Tensor, call: int) -> dict[str, torch.Tensor]:
        return {"loss_any": weight * 1.0, "kl": torch.full(shape, 0.1 * (call > 1))}

    stopper = KLEarlyStopper(0.01, when=when)
    statistics = update_of(diverged, stopper=stopper, epochs=2)(frames(8))
    assert statistics["stopped"] == 1
    assert (statistics["minibatches"], statistics["epochs"]) == (2, 1)
    assert statistics["steps"] == (2 if when == "epoch" else 1)


def test_keys_of_the_kl():
    """Nested, and one for each head."""

    def make(weight: torch.Tensor, call: int) -> dict[str, Any]:
        heads = {"a": torch.tensor(0.5), "b": torch.tensor(0.2)}
        return {"loss_any": weight * 1.0, "kl": heads}

    stopper = KLEarlyStopper(0.1, when="epoch", kl_key=("kl", "a"))
    statistics = update_of(make, stopper=stopper, epochs=3)(frames(10))
    assert (statistics["kl/a"], statistics["epochs"]) == (0.5, 1.0)

    def odd(weight: torch.Tensor, call: int) -> dict[str, Any]:
        return {"loss_any": weight * 1.0, "kl": torch.tensor([0.1, math.nan])}

    with pytest.raises(FloatingPointError, match="kl is nan"):
        update_of(odd)(frames(10))


def test_parameter_groups_without_names():
    loss = update_of(swapped).step.loss
    groups = [{"params": loss.parameters(), "lr": 0.1}]
    groups.append({"params": [nn.Parameter(torch.zeros(1))], "lr": 0.2})
    statistics = ppo_update(loss, torch.optim.SGD(groups), epochs=1)(frames(10))
    assert (statistics["lr"], statistics["lr/1"]) == (0.1, 0.2)


# -- losses that cannot be trained with ------------------------------------------------


LACKS: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    ({"cost": 1.0}, {}, TypeError, "no entry that begins with 'loss_', but cost"),
    ({"loss_a": [1.0, 2.0]}, {}, ValueError, r"'loss_a' is a Tensor of shape \[2\]"),
    ({"loss_a": 1.0}, {"adaptive_kl": True}, KeyError, "'kl' is not in the .*: loss_a"),
    (
        {"loss_a": 1.0},
        {"stopper": KLEarlyStopper(0.1, when="epoch", kl_key="kl_approx")},
        *(KeyError, "'kl_approx' is not in the batch.*holds: loss_a"),
    ),
]


@pytest.mark.parametrize(("entries", "options", "error", "message"), LACKS)
def test_losses_that_lack_something(
    entries: dict[str, Any], options: Any, error: type[Exception], message: str
):
    def make(weight: torch.Tensor, call: int) -> dict[str, torch.Tensor]:
        return {name: weight * torch.tensor(value) for name, value in entries.items()}

    for run in (PPOUpdate.__call__, PPOUpdate.validate):
        update = update_of(make, **options)
        with pytest.raises(error, match=message):
            run(update, frames(10))
        assert update.step.loss.weight == 1.0


def test_a_loss_without_a_gradient():
    update = update_of(lambda weight, call: {"loss_any": torch.ones(())})
    with pytest.raises(ValueError, match="None of loss_any has a gradient"):
        update(frames(10))


def test_every_update_has_the_same_names_and_a_mean_of_nothing_is_nan():
    def make(weight: torch.Tensor, call: int) -> dict[str, torch.Tensor]:
        bad, far = (math.nan if call == 3 else 1.0), (9.0 if call == 4 else 0.01)
        more = {"rare": torch.ones(())} if call == 1 else {}
        return {"loss_any": weight * bad, "kl": torch.tensor(far)} | more

    options: Any = {"nonfinite": "skip", "stopper": KLEarlyStopper(0.1), "minibatch_size": 2}
    update = update_of(make, **options)
    ended, going_on = rollout([1.0, 2.0], [0, 1]), rollout([1.0, 2.0], [0, 0])
    rows = [update(batch.clone()) for batch in (ended, going_on, ended, ended)]
    assert len({tuple(row) for row in rows}) == 1
    unknown = [{name for name, value in row.items() if math.isnan(value)} for row in rows]
    assert unknown == [
        set(),
        {"rare", "episode_return", "episode_length"},  # no episode ended
        {"rare", "loss_any", "kl", "first_kl", "grad_norm"},  # the step was skipped
        {"rare", "grad_norm"},  # the KL stop came before any step
    ]
    assert [row["episodes"] for row in rows] == [1.0, 0.0, 1.0, 1.0]
    assert plain_update()(frames(10))["episodes"] == 0.0  # no rewards at all
    assert json.loads(json.dumps(rows))[2].keys() == rows[2].keys()


# -- episodes ----------------------------------------------------------------------------


def rollout(reward: list[float], done: list[int], mask: list[int] | None = None) -> TensorDict:
    """One row."""
    batch = frames(1, len(reward))
    batch["next"] = {
        "reward": torch.tensor(reward).view(1, -1, 1),
        "done": torch.tensor(done).bool().view(1, -1, 1),
    }
    if mask is not None:
        batch["collector", "mask"] = torch.tensor(mask).bool().view(1, -1)
    return batch


def plain_update(**options: Any) -> PPOUpdate:
    options = {"minibatch_size": None} | options
    return update_of(lambda weight, call: {"loss_any": weight * 1.0}, **options)


def test_a_reward_that_is_not_finite_counts_in_its_own_episode_alone():
    update, other = (
        plain_update(reward_normalizer=RewardNormalizer(nonfinite="ignore")) for _ in range(2)
    )
    first = update(rollout([math.nan, 1.0, 2.0, 3.0], [1, 0, 1, 0]))
    assert (first["episodes"], math.isnan(first["episode_return"])) == (2.0, True)
    second = update(rollout([4.0, 5.0, math.inf], [1, 1, 0]))
    assert second["episode_return"] == pytest.approx((7.0 + 5.0) / 2)
    other.load_state_dict(update.state_dict())  # with an open return that is not finite
    statistics = other(rollout([1.0, 2.0], [1, 0]))
    assert not math.isfinite(statistics["episode_return"])
    assert statistics["episode_length"] == 2.0


def with_ids(batch: TensorDict, *ids: list[int]) -> TensorDict:
    """Return a batch of rows that are alike, with these trajectory ids."""
    rows: Any = torch.cat([batch] * len(ids))
    return rows.set(("collector", "traj_ids"), torch.tensor(ids))


TWO_BATCHES: dict[str, tuple[TensorDict, TensorDict, tuple[float, float]]] = {
    "masked frames belong to no episode": (
        rollout([1.0, 2.0, math.nan], [0, 0, 1], [1, 1, 0]),
        rollout([4.0, 8.0], [1, 0]),
        (7.0, 3.0),
    ),
    "a trajectory has the id of its last valid step": (
        with_ids(rollout([1.0, 2.0, 0.0], [0, 0, 0], [1, 1, 0]), [7, 7, 0]),  # padding is 0
        with_ids(rollout([4.0], [1]), [7]),
        (7.0, 3.0),
    ),
    "a row whose first frame is masked goes on": (
        with_ids(rollout([1.0, 2.0], [0, 0]), [7, 7]),
        with_ids(rollout([math.nan, 4.0], [0, 1], [0, 1]), [7, 7]),
        (7.0, 3.0),
    ),
    "and not into another trajectory": (
        with_ids(rollout([1.0, 2.0], [0, 0]), [7, 7]),
        with_ids(rollout([9.0, 4.0], [1, 1], [0, 1]), [7, 8]),
        (4.0, 1.0),
    ),
    "rows that share ids go on row by row": (
        with_ids(rollout([1.0] * 4, [0] * 4), [0] * 4, [0] * 4),
        with_ids(rollout([1.0] * 4, [0, 0, 0, 1]), [0] * 4, [0] * 4),
        (8.0, 8.0),
    ),
}


@pytest.mark.parametrize("name", TWO_BATCHES)
def test_an_episode_in_two_batches(name: str):
    first, second, expected = TWO_BATCHES[name]
    update = plain_update()
    assert update(first.clone())["episodes"] == 0
    statistics = update(second.clone())
    assert (statistics["episode_return"], statistics["episode_length"]) == expected


def alternating(order: str, steps: int = 8, length: int = 20) -> list[float]:
    """Return the lengths of the episodes of two workers whose batches come in this order."""
    update, begun, lengths = plain_update(), {"A": 0, "B": 0}, []
    for worker in order:
        numbers = begun[worker] + torch.arange(steps)
        begun[worker] += steps
        ids = numbers // length * 2 + torch.arange(2).unsqueeze(1)
        batch = rollout([1.0] * steps, ((numbers + 1) % length == 0).tolist())
        batch = torch.cat([batch, batch])
        batch["collector", "traj_ids"] = ids + (worker == "B") * 2**51
        statistics = update(batch)
        if statistics["episodes"]:
            lengths += [statistics["episode_length"]] * int(statistics["episodes"])
            assert statistics["episode_return"] == statistics["episode_length"]
    return lengths


@pytest.mark.parametrize("order", ["A" * 12, "AB" * 12, "AABABB" * 4])
def test_episodes_stay_with_their_trajectory_in_whatever_order_batches_come(order: str):
    lengths = alternating(order)
    assert lengths == [20.0] * len(lengths)
    assert len(lengths) == 2 * sum(order.count(worker) * 8 // 20 for worker in "AB")


def test_a_normalizer_that_is_set_later_has_its_own_raw_reward():
    update = plain_update()
    update.reward_normalizer = RewardNormalizer(0.9, raw_key=("next", "mine"))
    statistics = update(rollout([1.0] * 4, [0, 0, 0, 1]))
    assert statistics["episode_return"] == statistics["episode_length"] == 4


def test_episode_returns_of_several_agents_are_their_mean():
    reward = torch.tensor([[1.0, 3.0], [5.0, 7.0], [2.0, 4.0]]).view(1, 3, 2, 1)
    batch = rollout([0.0] * 3, [0, 1, 0])
    expected = {"episodes": 1.0, "episode_return": 8.0, "episode_length": 2.0}
    for value in (reward, reward.mean(2).squeeze(-1)):
        batch["next", "reward"] = value
        assert expected.items() <= plain_update()(batch.clone()).items()


# -- KL, scale, resets ---------------------------------------------------------------------


@pytest.mark.parametrize("skipped", [1, 9])
def test_the_first_kl_is_that_of_the_first_step_that_is_not_skipped(skipped: int):
    def diverged(weight: torch.Tensor, call: int) -> dict[str, torch.Tensor]:
        bad = math.nan if call <= skipped else 1.0
        return {"loss_any": weight * bad, "kl": torch.tensor(call / 8)}

    statistics = update_of(diverged, nonfinite="skip")(frames(10))
    assert str(statistics["first_kl"]) == ("0.25" if skipped == 1 else "nan")
    assert statistics["steps"] == statistics["minibatches"] - min(skipped, 3)


@pytest.mark.parametrize("normalizer", [RewardNormalizer, lambda: None])
def test_reset_returns_drops_the_open_episodes(normalizer: Any):
    """As after a new torchrl collector, which numbers its trajectories from 0 again."""
    update = plain_update(reward_normalizer=normalizer())
    update(rollout([1.0, 2.0], [0, 0]))
    state = copy.deepcopy(update.state_dict())
    update.reset_returns()
    assert update(rollout([4.0], [1]))["episode_return"] == 4.0
    update.load_state_dict(state)
    assert update(rollout([4.0], [1]))["episode_return"] == 7.0
