"""Real processes that decide together, however many minibatches each of them holds.

All plays run in one set of three processes, because starting one takes seconds. Two of them also
form a group of their own.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn

from ppokit import AdaptiveKLCoeff, KLEarlyStopper
from tests.ranks import run_on_ranks

NAN = math.nan
LOW, HIGH = 0.01, 0.05  # below and above the threshold of 0.015, and so is their mean: 0.03
Update = float | list[float]


# -- plays -----------------------------------------------------------------------------


@dataclass
class Play:
    """For each rank, for each of its batches: the KL of each update, or a list of several."""

    kls: list[list[list[Update]]]
    weights: list[list[list[Update]]] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, rank: int, group: dist.ProcessGroup | None) -> dict[str, Any]:
        """Train as a user would, and return what happened."""
        stopper = KLEarlyStopper(0.01, group=group, **self.options)
        applied, asked, rounds, texts = [], [], [], []
        for batch, kls in enumerate(self.kls[rank]):
            weights = None if self.weights is None else self.weights[rank][batch]
            index, updates = -1, 0
            before = Calls.count
            for index, kl in enumerate(kls):
                weight = None if weights is None else torch.tensor(weights[index])
                # the same on a rank that asks with a number, and on one that asks with losses
                value = TensorDict({"kl": torch.tensor(kl)}) if rank or isinstance(kl, list) else kl
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    stop = stopper.update(value, weight=weight)
                texts += [str(warning.message)[:30] for warning in caught]
                if stop:
                    # it stays so, and asks nobody
                    calls = Calls.count
                    assert stopper.update(0.0)
                    assert Calls.count == calls
                    break
                updates += 1
            asked.append(index + 1)
            applied.append(updates)
            rounds.append(Calls.count - before)
            stopper.reset()
            assert not stopper.stopped
        return {"applied": applied, "asked": asked, "rounds": rounds, "warnings": texts}


class Calls:
    """How often this process has taken part in an all-reduce."""

    count = 0

    @classmethod
    def watch(cls) -> None:
        all_reduce = dist.all_reduce

        def counted(*args: Any, **kwargs: Any) -> Any:
            cls.count += 1
            return all_reduce(*args, **kwargs)

        dist.all_reduce = counted


PLAYS = {
    # only rank 0 is over the threshold, and the decision is on the average
    "average below": Play([[[0.0, 0.025, 0.0]], [[0.0, 0.0, 0.0]]]),
    "average above": Play([[[0.0, HIGH, 0.0]], [[0.0, LOW, 0.0]]]),
    "average above, of three": Play([[[0.0, 0.1, 0.0]], [[0.0, 0.0, 0.0]], [[0.0, 0.0, 0.0]]]),
    "weights": Play(
        [[[LOW, HIGH, HIGH]], [[0.0, 0.0, 0.0]]], [[[90.0, 10.0, 90.0]], [[10.0, 90.0, 10.0]]]
    ),
    "a rank without valid frames": Play(
        [[[NAN, HIGH, NAN]], [[LOW, LOW, HIGH]]], [[[0.0, 0.0, 0.0]], [[8.0, 8.0, 8.0]]]
    ),
    # different numbers of minibatches, in both orders, with and without a stop
    "uneven, no stop": Play([[[LOW] * 5, [LOW], [LOW] * 2], [[LOW] * 2, [LOW] * 4, []]]),
    "uneven, of three": Play([[[LOW] * 3, [LOW]], [[LOW], [LOW] * 4], [[], [LOW] * 2]]),
    "a stop after the other is done": Play(
        [[[LOW, LOW, HIGH, LOW], [LOW]], [[LOW], [LOW, LOW, HIGH]]]
    ),
    "a stop while both go on": Play([[[HIGH] * 4, [LOW] * 3], [[LOW], [LOW] * 2]]),
    "a stop at the last of the shorter": Play([[[LOW, HIGH, LOW]], [[LOW, HIGH]]]),
    "a stop of the two that go on": Play(
        [[[LOW, HIGH, LOW]], [[LOW]], [[LOW, LOW, LOW]]], options={"when": "epoch"}
    ),
    "nan": Play([[[LOW, LOW], [LOW]], [[LOW, NAN], [LOW]]]),
    "nan on one of three": Play([[[NAN], [LOW]], [[LOW], [LOW]], [[LOW], [LOW]]]),
    "check_every": Play(
        [[[HIGH, LOW, NAN, HIGH, LOW], [HIGH] * 3], [[HIGH, LOW, LOW], [HIGH]]],
        options={"check_every": 2},
    ),
    "per epoch": Play(
        [[[[0.0, 0.03], [HIGH] * 2]], [[[0.0], [LOW]]]],
        [[[[8.0, 8.0], [8.0, 8.0]]], [[[8.0], [8.0]]]],
        options={"when": "epoch"},
    ),
}


def random_play(seed: int) -> Play:
    """Ranks with any numbers of minibatches, about half of whose batches are stopped."""
    chance = random.Random(seed)
    ranks = chance.choice([2, 3])
    sizes = [[chance.randrange(6) for _ in range(3)] for _ in range(ranks)]

    def draw(value: Callable[[], float]) -> list[list[list[float]]]:
        return [[[value() for _ in range(size)] for size in batches] for batches in sizes]

    return Play(
        draw(lambda: NAN if chance.random() < 0.02 else chance.uniform(0, 0.025)),  # pyright: ignore
        draw(lambda: float(chance.randrange(1, 9))),  # pyright: ignore
        {"check_every": chance.choice([1, 1, 2, 3])},
    )


RANDOM_PLAYS = {f"random {seed}": random_play(seed) for seed in range(40)}


def reference(play: Play) -> list[list[int]]:
    """How many updates each rank applies in each batch, by looking at all ranks at once."""
    ranks = range(len(play.kls))
    every = play.options.get("check_every", 1)
    assert play.weights is not None
    applied: list[list[int]] = [[] for _ in ranks]
    for batch in range(len(play.kls[0])):
        sizes = [len(play.kls[rank][batch]) for rank in ranks]
        stop = max(sizes)
        for index in range(every - 1, max(sizes), every):
            here = [rank for rank in ranks if index < sizes[rank]]
            kls = [play.kls[rank][batch][index] for rank in here]
            weights = [play.weights[rank][batch][index] for rank in here]
            pairs = zip(kls, weights, strict=True)
            mean = sum(kl * weight for kl, weight in pairs) / sum(weights)  # pyright: ignore
            if not mean <= 0.015:
                stop = index
                break
        for rank in ranks:
            applied[rank].append(min(stop, sizes[rank]))
    return applied


# -- what else each process does ---------------------------------------------------------


def outside(rank: int, pair: Any) -> dict[str, Any]:
    """A rank that is given a group that it is not in."""
    try:
        KLEarlyStopper(0.01, group=pair)
    except TypeError as error:
        return {"error": str(error)}
    return {"error": None}


class Penalised(nn.Module):
    """What AdaptiveKLCoeff asks of a loss."""

    kl_coeff: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kl_coeff", torch.tensor(1.0))


def coefficient(rank: int, pair: Any) -> dict[str, Any]:
    """One coefficient for all: 0.005, 0.02 and 0.04 are in the band, above, and their mean is."""
    adaptive = AdaptiveKLCoeff(Penalised())
    moves = [adaptive.update((0.0051, 0.02, 0.04)[rank])]  # mean 0.0217
    moves.append(adaptive.update((0.0, 0.0, 0.06)[rank], weight=(1.0, 1.0, 2.0)[rank]))  # 0.03
    moves.append(adaptive.update((0.0, 0.0, 0.06)[rank], weight=(8.0, 8.0, 4.0)[rank]))  # 0.012
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        moves.append(adaptive.update((NAN, 0.0, 0.0)[rank]))
    return {"moves": moves, "warnings": len(caught)}


def bad_weight(rank: int, pair: Any) -> dict[str, Any]:
    """One rank's weight is negative: all raise, none waits, and the next batch is open to all."""
    stopper = KLEarlyStopper(0.01)
    try:
        stopper.update(LOW, weight=-1.0 if rank == 1 else 8.0)
    except ValueError as error:
        text = str(error)
    else:
        text = ""
    stopper.reset()
    return {"error": text[:44], "next": stopper.update(HIGH)}


def trainers(rank: int, pair: Any) -> dict[str, Any]:
    """A PPOTrainer on each rank, whose batches differ in their numbers of minibatches."""
    from tests.trust_region import test_early_stop as single

    single.FRAMES = single.MINIBATCH * (rank + 1)
    stopper = KLEarlyStopper(0.01)
    run = single.Run(stopper)
    run.optimizer.param_groups[0]["lr"] = (0.01, 0.02, 0.1)[rank]
    run.train()
    return {"kls": run.kls, "steps": run.steps}


EXTRAS = {f.__name__: f for f in (outside, coefficient, bad_weight, trainers)}


# -- the processes -------------------------------------------------------------------------


def play_all(early: KLEarlyStopper, rank: int) -> dict[str, Any]:
    """Run every play, and return what happened in each."""
    pair = dist.new_group([0, 1])
    Calls.watch()
    results: dict[str, Any] = {}
    for name, play in (PLAYS | RANDOM_PLAYS).items():
        print(rank, name, flush=True)  # which shows where it hung
        if rank < len(play.kls):
            results[name] = play.run(rank, pair if len(play.kls) == 2 else None)
    for name, extra in EXTRAS.items():
        print(rank, name, flush=True)
        members = isinstance(pair, dist.ProcessGroup)
        results[name] = extra(rank, pair if members or extra is outside else None)
    # a stopper that was made, and pickled, before there was a group
    results["early"] = early.update((0.0, 0.0, 0.06)[rank])
    early.reset()
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_on_ranks(3, partial(play_all, KLEarlyStopper(0.01)), folder)


def outcome(results: list[dict[str, Any]], name: str, what: str = "applied") -> list[Any]:
    return [result[name][what] for result in results if name in result]


# -- one decision ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "applied"),
    [
        ("average below", [[3], [3]]),
        ("average above", [[1], [1]]),
        ("average above, of three", [[1], [1], [1]]),
        ("weights", [[2], [2]]),  # 0.009, 0.005, 0.045
        ("a rank without valid frames", [[2], [2]]),
        ("uneven, no stop", [[5, 1, 2], [2, 4, 0]]),
        ("uneven, of three", [[3, 1], [1, 4], [0, 2]]),
        ("a stop after the other is done", [[2, 1], [1, 2]]),
        ("a stop while both go on", [[0, 3], [0, 2]]),
        ("a stop at the last of the shorter", [[1], [1]]),
        ("a stop of the two that go on", [[1], [1], [1]]),
        ("nan", [[1, 1], [1, 1]]),
        ("nan on one of three", [[0, 1], [0, 1], [0, 1]]),
        ("check_every", [[3, 1], [3, 1]]),
        ("per epoch", [[1], [1]]),  # 0.01, and (0.05 + 0.05 + 0.01) / 3
    ],
)
def test_all_ranks_stop_at_the_same_minibatch(results, name: str, applied: list[list[int]]):
    assert outcome(results, name) == applied


def test_every_play_was_seen(results):
    assert len(PLAYS) == 15
    for name, play in (PLAYS | RANDOM_PLAYS).items():
        assert len(outcome(results, name)) == len(play.kls)


@pytest.mark.parametrize("name", RANDOM_PLAYS)
def test_whatever_the_minibatches_it_is_what_one_process_would_decide(results, name: str):
    assert outcome(results, name) == reference(RANDOM_PLAYS[name])


def test_the_random_plays_are_of_all_kinds():
    stopped = uneven = 0
    for play in RANDOM_PLAYS.values():
        applied = reference(play)
        sizes = [[len(kls) for kls in batches] for batches in play.kls]
        stopped += applied != sizes
        uneven += any(len(set(batch)) > 1 for batch in zip(*sizes, strict=True))
    assert 15 < stopped < 40
    assert uneven > 30


def test_a_kl_that_is_not_finite_warns_on_all_ranks(results):
    for name in ("nan", "nan on one of three"):
        for texts in outcome(results, name, "warnings"):
            assert texts == ["The KL divergence is nan: the "]
    assert outcome(results, "average above", "warnings") == [[], []]


def test_communication_is_one_round_a_check(results):
    # rounds before reset(): one for each update that was asked, the one that stops included
    for name in ("average below", "average above", "a stop while both go on"):
        asked = outcome(results, name, "asked")
        assert outcome(results, name, "rounds") == asked
    assert outcome(results, "check_every", "asked") == [[4, 2], [3, 1]]
    assert outcome(results, "check_every", "rounds") == [[2, 1], [1, 0]]


def test_a_bad_weight_on_one_rank_is_an_error_on_all(results):
    for result in results:
        assert result["bad_weight"]["error"] == "weight must be the number of valid frames be"
        assert result["bad_weight"]["next"]


def test_a_stopper_that_is_older_than_the_group_uses_it(results):
    assert [result["early"] for result in results] == [True] * 3


# -- the rest -------------------------------------------------------------------------------


def test_a_rank_outside_the_group_is_refused(results):
    first, second, third = [result["outside"]["error"] for result in results]
    assert first is second is None
    assert "this process belongs to, got -100" in third


def test_one_coefficient_for_all_ranks(results):
    for result in results:
        assert result["coefficient"]["moves"] == [1.5, 2.25, 2.25, 2.25]
        assert result["coefficient"]["warnings"] == 1


def test_trainers_of_different_sizes_stop_together(results):
    """Each rank knows its own KLs; put side by side, they say where all had to stop."""
    from tests.trust_region.test_early_stop import BATCHES, EPOCHS

    everyone = [result["trainers"]["kls"] for result in results]
    assert [len(kls) for kls in everyone] == [BATCHES] * 3
    steps = [0, 0, 0]
    stops = 0
    for batch in range(BATCHES):
        kls = [everyone[rank][batch] for rank in range(3)]
        longest = max(len(one) for one in kls)
        stop = False
        for index in range(longest):
            here = [rank for rank in range(3) if index < len(kls[rank])]
            mean = sum(kls[rank][index] for rank in here) / len(here)  # 8 frames each
            stop = mean > 0.015
            assert not stop or index == longest - 1
            stops += stop
            for rank in here:
                steps[rank] += not stop
        for rank in range(3):
            full = EPOCHS * (rank + 1)
            assert len(kls[rank]) == full or (stop and len(kls[rank]) == longest)
    assert [result["trainers"]["steps"] for result in results] == steps
    assert stops > 0


# -- in one process -------------------------------------------------------------------------


def test_without_a_group_nobody_is_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(dist, "all_reduce")
    stopper = KLEarlyStopper(0.01)
    assert stopper.update(HIGH)
    stopper.reset()


@pytest.mark.gpu
def test_a_number_on_the_host_travels_by_nccl(tmp_path: Path):
    dist.init_process_group("nccl", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        stopper = KLEarlyStopper(0.01)
        assert not stopper.update(LOW)
        assert stopper.update(torch.tensor(HIGH, device="cuda"))
        stopper.reset()
    finally:
        dist.destroy_process_group()
