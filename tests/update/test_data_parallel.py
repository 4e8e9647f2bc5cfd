"""PPOUpdate on two real ranks: the same parameters, the same decisions, the same errors.

The two processes start once for all tests; ``on_rank`` does everything.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ppokit import (
    GAE,
    DualClipPPOLoss,
    KLEarlyStopper,
    PPOUpdate,
    RewardNormalizer,
    SequenceBatcher,
    TrainingStep,
)
from tests.blocks import make_actor, make_critic, make_minibatch, ppo_update
from tests.ranks import run_on_two_ranks
from tests.test_state import assert_same_state, flat
from tests.update.parts import make_batch, parameters_of
from tests.update.test_nonfinite import Odd
from tests.update.test_nonfinite import batch as odd_batch

pytestmark = pytest.mark.slow
FRAMES, SHARE = 48, 30  # frames of both ranks, and of the first
CAPTURED: list[int] = []  # graphs of this process
ERRORS = (RuntimeError, ValueError, KeyError, TypeError, IndexError)


def backend(graph: Any, _: Any) -> Any:
    """Run the captured graph as it is."""
    CAPTURED.append(1)
    return graph


ACCUMULATED = {"minibatch_size": 7, "accumulate_grads": True}
CASES: dict[str, dict[str, Any]] = {
    "compiled": {"compile": {"backend": backend}},
    "accumulated, compiled": {**ACCUMULATED, "compile": {"backend": backend}},
}


def make_update(kind: str = "categorical", **options: Any) -> PPOUpdate:
    names = ("reduction", "normalize_advantage")
    of_loss = {name: options.pop(name) for name in names if name in options}
    loss = DualClipPPOLoss(make_actor(kind), make_critic(), functional=False, **of_loss)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2)
    return ppo_update(loss, optimizer, **{"epochs": 3, "seed": 0} | options)


def train(update: PPOUpdate, batch: TensorDict) -> dict[str, Any]:
    statistics = [update(batch.clone()) for _ in range(2)]
    return {"parameters": parameters_of(update.step.loss), "statistics": statistics}


def data() -> TensorDict:
    """Return the frames of both ranks together."""
    return make_minibatch(make_actor("categorical"), FRAMES)


def error_of(update: Callable[[Any], Any], batch: TensorDict) -> str:
    with pytest.raises(ERRORS) as error:
        update(batch)
    return str(error.value)


def on_rank(rank: int) -> dict[str, Any]:
    share = data()[SHARE:] if rank else data()[:SHARE]
    found: dict[str, Any] = {
        name: train(make_update(**options), share) for name, options in CASES.items()
    }
    found["captured"] = len(CAPTURED)
    loss = DistributedDataParallel(DualClipPPOLoss(make_actor("categorical"), make_critic()))
    with pytest.raises(TypeError, match="averages gradients over the ranks itself"):
        TrainingStep(loss, torch.optim.SGD(loss.parameters(), lr=0.1))
    found["errors"] = errors_on(rank, share)
    found["of sequences"] = minibatches_of_sequences(rank)
    # two ranks that have compared their parameters, of which one is recreated
    update = make_update()
    update(share)
    if rank:
        state, update = update.state_dict(), make_update()
        update.load_state_dict(state)
    found["recreated"] = train(update, share)
    # one rank validates, or tries the loss, while the other does not
    single = make_update(normalize_advantage=True)
    found["validated"] = rank == 1 or single.validate(share.clone())
    found["later"] = [error_in_a_later_minibatch(rank, options) for options in LATER]
    found["faults"] = train_with_faults(rank)
    found["nonfinite"] = nonfinite_on(rank)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_two_ranks(on_rank, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_reach_the_parameters_of_one_process(results: Any, name: str):
    expected = train(make_update(**CASES[name] | {"compile": False}), data())
    for found in results:
        assert found["captured"] >= 2
        torch.testing.assert_close(
            found[name]["parameters"], expected["parameters"], rtol=1e-5, atol=1e-5
        )
        for own, one in zip(found[name]["statistics"], expected["statistics"], strict=True):
            assert own["frames"] == one["frames"] == FRAMES
            assert own["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


def test_a_rank_that_is_recreated_goes_on_with_the_other(results: Any):
    one, other = (found["recreated"] for found in results)
    assert torch.equal(one["parameters"], other["parameters"])
    assert not torch.equal(one["parameters"], parameters_of(make_update().step.loss))


def test_a_rank_may_validate_alone(results: Any):
    assert results[0]["validated"].startswith("PPOUpdate(")


def minibatches_of_sequences(rank: int) -> float:
    """Train on 16 frames in 2 sequences, on the other rank in 4; a minibatch has 4 frames."""
    batch = make_minibatch(make_actor("categorical"), 2, 8)
    batch["next", "done"] = torch.zeros(2, 8, 1, dtype=torch.bool)
    batch["next", "done"][:, 3] = rank == 1
    update = make_update(batcher=SequenceBatcher(8, cut_keys=()), minibatch_size=4, epochs=1)
    return update(batch)["steps"]


def test_all_ranks_have_as_many_minibatches_as_one_has_sequences(results: Any):
    assert [found["of sequences"] for found in results] == [2, 2]


# -- errors --------------------------------------------------------------------------------


def errors_on(rank: int, share: TensorDict) -> dict[str, str]:
    """Return the errors of both ranks, where they must not train together."""
    seeds, order = make_update(), make_update()
    nn.init.normal_(next(seeds.step.loss.parameters()), std=1.0 + rank)
    weight = order.step.loss.critic_network.module.weight.data
    weight.copy_(weight.flip(1).clone() if rank else weight)
    few = share[: 2 if rank else 30]
    return {
        "One rank has 3 minibatches, and another only 2": error_of(
            make_update(minibatch_size=10), few
        ),
        "different parameters": error_of(seeds, share.clone()),
        "start from different parameters": error_of(order, share.clone()),
        "The loss is a sum over frames (reduction='sum')": error_of(
            lambda _: make_update(reduction="sum"), share
        ),
    }


def test_all_ranks_raise(results: Any):
    for found in results:
        for message, error in found["errors"].items():
            assert message in error


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


LATER: list[dict[str, Any]] = [
    {"nonfinite": "skip", "normalize_advantage": True},
    {"recompute": True},
    {"backward": True, "accumulate_grads": True},
]


def error_in_a_later_minibatch(rank: int, options: dict[str, Any]) -> str:
    options = dict(options)
    recompute, backward = (options.pop(name, False) for name in ("recompute", "backward"))
    update = make_update(minibatch_size=4, shuffle=False, **options)
    bad, later = data()[:24].clone(), RaisesLater(rank)
    if recompute:
        update.advantage, update.recompute_advantage = later, True
    elif backward:
        next(iter(update.step.loss.parameters())).register_hook(later)
    elif rank:
        bad["action"][-1] = 99
    before = parameters_of(update.step.loss)
    error = error_of(update, bad)
    if "accumulate_grads" in options:
        assert torch.equal(parameters_of(update.step.loss), before)
    make_update(minibatch_size=4)(data()[:24].clone())  # the ranks still meet
    return error


def test_an_error_in_a_later_minibatch_raises_on_all_ranks(results: Any):
    for one, other in zip(*(found["later"] for found in results), strict=True):
        assert one.startswith("Rank 1 cannot use its batch")
        assert "changed" not in one  # a step was made before
        assert "cannot use its batch" not in other


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
    "no valid frame": lambda batch: batch.set(
        ("collector", "mask"), torch.zeros(2, 6, dtype=torch.bool)
    ),
}
SEQUENCES = {"batcher": SequenceBatcher(3, cut_keys=()), "normalize_advantage": True}


def train_with_faults(rank: int) -> list[tuple[str, float]]:
    """Return the errors of bad batches of one rank; training then continues as without them."""
    states, errors = [], []
    for with_faults in (False, True):
        options: Any = {"reward_normalizer": RewardNormalizer(), "minibatch_size": 3}
        update = make_update("normal", **options, **SEQUENCES)
        critic = update.step.loss.critic_network
        update.advantage = GAE(gamma=0.9, lmbda=0.9, value_network=critic)
        for number, fault in enumerate(FAULTS.values()):
            if with_faults:
                bad = make_batch(10 * number + rank, number)
                if rank == number % 2:
                    fault(bad)
                before, state = bad.clone(), flat(update.state_dict())
                began = time.monotonic()
                error = error_of(update, bad)
                errors.append((error, time.monotonic() - began))
                torch.testing.assert_close(
                    bad.to_dict(), before.to_dict(), rtol=0, atol=0, equal_nan=True
                )
                assert_same_state(flat(update.state_dict()), state)
            update(make_batch(10 * number + rank, number))
        states.append(flat(update.state_dict()))
    assert_same_state(*states)
    return errors


def test_a_bad_batch_of_one_rank_raises_on_all_and_changes_nothing(results: Any):
    for number in range(len(FAULTS)):
        bad, good = (results[(number + x) % 2]["faults"][number] for x in (0, 1))
        assert good[0].startswith(f"Rank {number % 2} cannot use its batch")
        assert "cannot use its batch" not in bad[0]
        assert max(bad[1], good[1]) < 10  # the timeout of the group is 20 s


# -- losses that are not finite ----------------------------------------------------------------


def nonfinite_on(rank: int) -> dict[str, Any]:
    """Train with a loss or a gradient that is not finite on the second rank."""
    found: dict[str, Any] = {"KL stop": with_a_kl_stop(rank)}
    makes: dict[str, Any] = {
        "loss": Odd,
        "gradient": lambda: Odd(of_gradient=True),
        "bounded": lambda: Odd(bounded=True),
    }
    for name, make in makes.items():
        torch.manual_seed(rank)
        bad = odd_batch(1 if rank else None)
        for nonfinite in ("skip", "raise"):
            loss, skipped = make(), 0.0
            optimizer = torch.optim.Adam(loss.parameters(), lr=0.1)
            options: Any = {"minibatch_size": 4, "epochs": 2, "shuffle": False}
            update = ppo_update(loss, optimizer, nonfinite=nonfinite, **options)
            if nonfinite == "skip":
                skipped = update(bad)["skipped"]
            else:
                with pytest.raises(FloatingPointError, match="here or on another rank"):
                    update(bad)
            (weight,) = update.step.loss.parameters()
            found[name, nonfinite] = (skipped, weight.detach().clone())
        update(odd_batch())  # the ranks continue together
    return found


def with_a_kl_stop(rank: int | None) -> dict[str, float]:
    """The KL of the first half of the frames is above the limit, the second half has a NaN."""
    frames = make_minibatch(make_actor("categorical"), 16, spread=0.0)
    frames["action_log_prob"][:8] -= 0.5
    frames["action_log_prob"][8] = math.nan
    frames = frames if rank is None else frames[8 * rank :][:8]
    loss = DualClipPPOLoss(make_actor("categorical"), make_critic())
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.1)
    options: Any = {"epochs": 2, "nonfinite": "skip", "stopper": KLEarlyStopper(0.05)}
    return ppo_update(loss, optimizer, **options)(frames)


@pytest.mark.filterwarnings("ignore:The KL divergence is nan")
def test_all_ranks_skip_or_raise_together(results: Any):
    one, other = (dict(found["nonfinite"]) for found in results)
    alone = with_a_kl_stop(None)
    for found in (one.pop("KL stop"), other.pop("KL stop"), alone):
        assert [found[name] for name in ("skipped", "stopped", "steps")] == [2, 0, 0]
        assert found.keys() == alone.keys()
        assert all(math.isnan(found[name]) for name in ("kl", "loss_objective", "grad_norm"))
    for key, (skipped, weight) in one.items():
        assert skipped == other[key][0] == (2.0 if key[1] == "skip" else 0.0)
        assert weight.isfinite().all()
        assert torch.equal(weight, other[key][1])
        assert torch.equal(weight, torch.ones(3)) == (key[1] == "raise")
