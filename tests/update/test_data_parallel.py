"""PPOUpdate on two real ranks: the same parameters on both, those that one process would reach."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ppokit import (
    GAE,
    DualClipPPOLoss,
    InterpSchedule,
    KLEarlyStopper,
    ParameterScheduler,
    PPOUpdate,
    RewardNormalizer,
    SequenceBatcher,
    TrainingStep,
)
from tests.blocks import make_actor, make_critic, make_minibatch, ppo_update
from tests.ranks import run_on_two_ranks
from tests.test_contract import rollout
from tests.test_state import assert_same_state, flat

FRAMES, SHARE = 48, 30  # frames of both ranks, and of the first
CAPTURED: list[int] = []  # graphs of this process


def backend(graph: Any, _: Any) -> Any:
    """A backend of torch.compile that runs what was captured as it is."""
    CAPTURED.append(1)
    return graph


CASES: dict[str, dict[str, Any]] = {
    "whole": {},
    "accumulated": {"minibatch_size": 7, "accumulate_grads": True},
    "clipped": {"max_grad_norm": 1e-3},
    "compiled": {"compile": {"backend": backend}},
    "accumulated, compiled": {
        "minibatch_size": 7,
        "accumulate_grads": True,
        "compile": {"backend": backend},
    },
}


def data() -> TensorDict:
    """What both ranks hold together."""
    return make_minibatch(make_actor("categorical"), FRAMES)


LOSS = ("reduction", "normalize_advantage")


def make_update(
    *, seed: int = 0, parallel: bool = False, order: int = 0, **options: Any
) -> PPOUpdate:
    actor, critic = make_actor("categorical"), make_critic()
    if order:
        weight = critic.module.weight.data
        weight.copy_(weight.flip(1).clone())
    if parallel:
        actor.module[0].module = DistributedDataParallel(actor.module[0].module)
        critic.module = DistributedDataParallel(critic.module)
    of_loss = {name: options.pop(name) for name in LOSS if name in options}
    loss = DualClipPPOLoss(actor, critic, functional=False, **of_loss)
    if seed:
        nn.init.normal_(next(loss.parameters()))
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2)
    schedule = ParameterScheduler({"lr": (optimizer, InterpSchedule([(0, 1e-2), (480, 1e-3)]))})
    return ppo_update(loss, optimizer, scheduler=schedule, epochs=3, seed=0, **options)


def parameters_of(update: PPOUpdate) -> torch.Tensor:
    return nn.utils.parameters_to_vector(update.step.loss.parameters()).detach()


def train(update: PPOUpdate, batch: TensorDict) -> dict[str, Any]:
    statistics = [update(batch.clone()) for _ in range(2)]
    return {"parameters": parameters_of(update), "statistics": statistics}


def found_on(rank: int) -> dict[str, Any]:
    """Train on one share; return what came out."""
    share = data()[SHARE:] if rank else data()[:SHARE]
    found: dict[str, Any] = {
        name: train(make_update(**options), share) for name, options in CASES.items()
    }
    found["captured"] = len(CAPTURED)
    # 3 minibatches of 10 on the first rank; the second has 18 frames, and makes 3 of them, too
    found["different numbers"] = train(make_update(minibatch_size=10), share)
    found["data parallel"] = train(make_update(minibatch_size=10, parallel=True), share)
    # one rank alone is over the threshold; both stop
    far = share.clone()
    far["action_log_prob"] -= 2.0 * rank
    stopper = KLEarlyStopper(0.05)
    found["stopped"] = train(make_update(minibatch_size=10, stopper=stopper), far)
    for name, batch, seed in (("few", share[: 2 if rank else 30], 0), ("seeds", share, rank)):
        with pytest.raises((RuntimeError, ValueError)) as error:
            make_update(minibatch_size=10, seed=seed)(batch)
        found[name] = str(error.value)
    found["refused"] = [refused(rank, recurrent) for recurrent in (False, True)]
    found["unread"] = refused(rank, False, without="observation")
    found["sums"] = error_of(make_update(reduction="sum"), share)
    found["order"] = error_of(make_update(order=rank), share)
    # two ranks that have compared their parameters, of which one begins anew
    make_update()(share)
    update = make_update()
    update(share)
    state = update.state_dict()
    if rank:
        update = make_update()
        update.load_state_dict(state)
    found["anew"] = train(update, share)
    # one rank validates, or tries the loss, while the other does not
    alone = make_update(normalize_advantage=True)
    found["validated"] = rank == 1 or alone.validate(share.clone())
    return found


def error_of(update: PPOUpdate, batch: TensorDict) -> str:
    with pytest.raises((RuntimeError, ValueError)) as error:
        update(batch.clone())
    return str(error.value)


def refused(rank: int, recurrent: bool, without: str | None = None) -> tuple[str, bool]:
    """Return the error of an update whose second rank has nothing to train on, and if all stayed.

    It has no valid frame, or lacks an entry.
    """
    batch = rollout(rank)
    whole = make_minibatch(make_actor(), *batch.shape, seed=rank)
    batch.update(whole.select("observation", "action", "action_log_prob"))
    if without is None:
        batch["collector", "mask"] = torch.full(batch.shape, rank == 0)
    elif rank:
        batch = batch.exclude(without)
    loss = DualClipPPOLoss(make_actor(), make_critic())
    update = PPOUpdate(
        TrainingStep(loss, torch.optim.Adam(loss.parameters())),
        advantage=GAE(gamma=0.9, lmbda=0.9, value_network=loss.critic_network),
        reward_normalizer=RewardNormalizer(),
        batcher=SequenceBatcher(3) if recurrent else None,
        minibatch_size=3,
        seed=0,
    )
    before, keys = copy.deepcopy(flat(update.state_dict())), set(batch.keys(True, True))
    with pytest.raises((RuntimeError, ValueError, KeyError)) as error:
        update(batch)
    assert_same_state(flat(update.state_dict()), before)
    return str(error.value), set(batch.keys(True, True)) == keys


FAULTS: dict[str, Any] = {
    "a lost time order": lambda batch: batch["collector", "traj_ids"].add_(torch.arange(6)),
    "a missing entry": lambda batch: batch.del_("observation"),
    "a reward of integers": lambda batch: batch["next"].set(
        "reward", batch["next", "reward"].long()
    ),
    "a log-probability of another shape": lambda batch: batch.set(
        "action_log_prob", batch["action_log_prob"].unsqueeze(-1)
    ),
    "a final observation that is NaN": lambda batch: batch["next", "observation"][:, -1].fill_(
        torch.nan
    ),
}


def whole_batch(rank: int, number: int) -> TensorDict:
    seed = 10 * number + rank
    batch = rollout(seed)
    whole = make_minibatch(make_actor(), *batch.shape, seed=seed)
    batch.update(whole.select("observation", "action", "action_log_prob"))
    batch["next", "observation"] = torch.randn(*batch.shape, 4)
    batch["collector", "traj_ids"] += 100 * number
    return batch


def on_rank_whose_last_frame_is_bad(rank: int) -> list[str]:
    """Return the errors of updates in which one rank raises in a later minibatch."""
    errors = []
    for options in (
        {},
        {"stopper": KLEarlyStopper(10.0)},
        {"accumulate_grads": True},
        {"nonfinite": "skip"},
        {"nonfinite": None},
        {"normalize_advantage": True},
        {"recompute": True},
        {"backward": True},
        {"backward": True, "accumulate_grads": True},
    ):
        recompute, backward = (options.pop(name, False) for name in ("recompute", "backward"))
        update = make_update(minibatch_size=4, shuffle=False, **options)
        bad = data()[:24].clone()
        if recompute:
            update.advantage, update.recompute_advantage = RaisesLater(rank), True
        elif backward:
            later = RaisesLater(rank)
            next(iter(update.step.loss.parameters())).register_hook(later)
        elif rank:
            bad["action"][-1] = 99
        before = parameters_of(update)
        with pytest.raises((RuntimeError, IndexError)) as error:
            update(bad)
        errors.append(str(error.value))
        if "accumulate_grads" in options:
            assert torch.equal(parameters_of(update), before)
        update = make_update(minibatch_size=4, seed=0)  # the ranks still meet
        update(data()[:24].clone())
    return errors


class RaisesLater(nn.Module):
    """Raises on one rank at the second call."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.calls = rank, 0

    def forward(self, given: Any) -> Any:
        self.calls += 1
        if self.rank and self.calls == 2:
            raise IndexError("raises later")
        return given


def test_an_error_in_a_later_minibatch_raises_on_all_ranks(tmp_path: Any):
    one, other = run_on_two_ranks(on_rank_whose_last_frame_is_bad, tmp_path)
    assert all(error.startswith("Rank 1 cannot use its batch") for error in one)
    assert not any("cannot use its batch" in error for error in other)


def on_rank_with_faults(rank: int) -> dict[str, Any]:
    """Train, one rank's batch being bad from time to time; return what became of it."""
    found: dict[str, Any] = {}
    for name, options in {
        "plain": {},
        "kl stop": {"stopper": KLEarlyStopper(10.0)},
        "normalised": {"normalize_advantage": True},
        "recurrent": {"batcher": SequenceBatcher(3, cut_keys=())},
    }.items():
        updates, errors = [], []
        for with_faults in (False, True):
            of_loss = {x: options[x] for x in LOSS if x in options}
            loss = DualClipPPOLoss(make_actor(), make_critic(), **of_loss)
            update = ppo_update(
                loss,
                torch.optim.Adam(loss.parameters()),
                advantage=GAE(gamma=0.9, lmbda=0.9, value_network=loss.critic_network),
                reward_normalizer=RewardNormalizer(),
                minibatch_size=3,
                seed=0,
                **{x: y for x, y in options.items() if x not in LOSS},
            )
            for number, fault in enumerate(FAULTS.values()):
                if with_faults:
                    bad = whole_batch(rank, number)
                    if rank == number % 2:
                        fault(bad)
                    before = bad.clone()
                    began = time.monotonic()
                    with pytest.raises((ValueError, KeyError, TypeError, RuntimeError)) as error:
                        update(bad)
                    errors.append((str(error.value), time.monotonic() - began))
                    torch.testing.assert_close(
                        bad.to_dict(), before.to_dict(), rtol=0, atol=0, equal_nan=True
                    )
                update(whole_batch(rank, number))
            updates.append(flat(copy.deepcopy(update.state_dict())))
        assert_same_state(*updates)
        found[name] = errors
    return found


def test_in_every_update_all_ranks_raise_and_nothing_has_changed(tmp_path: Any):
    """The ranks then train on as ranks do that never saw the bad batches."""
    results = run_on_two_ranks(on_rank_with_faults, tmp_path)
    for name in results[0]:
        for number in range(len(FAULTS)):
            bad, good = (results[(number + x) % 2][name][number] for x in (0, 1))
            assert good[0].startswith(f"Rank {number % 2} cannot use its batch"), name
            assert "cannot use its batch" not in bad[0]
            assert max(bad[1], good[1]) < 10  # the timeout of the group is 20 s


def test_where_one_rank_refuses_its_batch_all_do_and_nothing_has_changed(
    results: list[dict[str, Any]],
):
    for one, other in zip(*(found["refused"] for found in results), strict=True):
        assert one == ("Rank 1 cannot use its batch (its own error says why): nothing was "
                       "changed on any rank.", True)  # fmt: skip
        assert other[0].startswith("No frame is valid")
        assert other[1]
    one, other = (found["unread"] for found in results)
    assert one[0].startswith("Rank 1 cannot use its batch")
    assert "observation" in other[0]
    assert one[1]
    assert other[1]


def test_losses_that_are_sums_are_refused(results: list[dict[str, Any]]):
    for found in results:
        assert found["sums"].startswith("The loss is a sum over frames (reduction='sum')")


def test_parameters_in_another_order_are_different(results: list[dict[str, Any]]):
    for found in results:
        assert "different parameters" in found["order"]


def test_a_rank_that_goes_on_with_a_new_update(results: list[dict[str, Any]]):
    one, other = (found["anew"]["parameters"] for found in results)
    assert torch.equal(one, other)


def test_a_rank_may_validate_alone(results: list[dict[str, Any]]):
    assert results[0]["validated"].startswith("PPOUpdate(")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_two_ranks(found_on, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_reach_what_one_process_does(results: list[dict[str, Any]], name: str):
    expected = train(make_update(**CASES[name] | {"compile": False}), data())
    for found in results:
        assert found["captured"] >= 2
        torch.testing.assert_close(
            found[name]["parameters"], expected["parameters"], rtol=1e-5, atol=1e-5
        )
        for own, one in zip(found[name]["statistics"], expected["statistics"], strict=True):
            assert own["frames"] == one["frames"] == FRAMES
            assert own["lr"] == one["lr"]
            assert own["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("name", ["different numbers", "data parallel", "stopped"])
def test_the_ranks_stay_together(results: list[dict[str, Any]], name: str):
    one, other = (found[name] for found in results)
    assert torch.equal(one["parameters"], other["parameters"])
    has_moved = not torch.equal(one["parameters"], parameters_of(make_update()))
    assert has_moved == (name != "stopped")
    minibatches = [found["statistics"][0]["minibatches"] for found in (one, other)]
    assert minibatches[0] == minibatches[1]
    assert minibatches[0] == (1 if name == "stopped" else 9)


@pytest.mark.parametrize(
    ("name", "message"),
    [("few", "One rank has 3 minibatches, and another only 2"), ("seeds", "different parameters")],
)
def test_all_ranks_refuse(results: list[dict[str, Any]], name: str, message: str):
    for found in results:
        assert message in found[name]
