"""Ranks stop at the same minibatch and move the same coefficient, whatever each of them holds.

Each case is one run of two or three ranks; one start of three processes runs all of them.
"""

from __future__ import annotations

import math
import random
import warnings
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

from ppokit import AdaptiveKLCoeff, KLEarlyStopper
from tests.ranks import run_on_ranks
from tests.trust_region.test_adaptive_kl import Penalised

pytestmark = pytest.mark.slow
NAN = math.nan
LOW, HIGH = 0.01, 0.05  # below and above the threshold of 0.015; so is their mean, 0.03
calls = 0  # of all_reduce in this process


@dataclass
class Case:
    """For each rank, for each of its batches: the KL of each update, or a list of several."""

    kls: list[list[list[Any]]]
    applied: list[list[int]]  # expected updates of each batch
    weights: list[list[list[Any]]] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, rank: int, group: dist.ProcessGroup | None) -> dict[str, Any]:
        stopper = KLEarlyStopper(0.01, group=group, **self.options)
        found: dict[str, Any] = {"applied": [], "asked": [], "rounds": [], "warnings": 0}
        for batch, kls in enumerate(self.kls[rank]):
            index, applied, before = -1, 0, calls
            for index, kl in enumerate(kls):
                weight = self.weights and torch.tensor(self.weights[rank][batch][index])
                value = TensorDict({"kl": torch.tensor(kl)}) if rank or isinstance(kl, list) else kl
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    stop = stopper.update(value, weight=weight)
                found["warnings"] += len(caught)
                if stop:
                    asked = calls
                    assert stopper.update(0.0)  # stays stopped without communication
                    assert calls == asked
                    break
                applied += 1
            for name, number in (("asked", index + 1), ("applied", applied)):
                found[name].append(number)
            found["rounds"].append(calls - before)
            stopper.reset()
            assert not stopper.stopped
        return found


def low(*minibatches: int) -> list[list[float]]:
    return [[LOW] * number for number in minibatches]


CASES = {
    "average below": Case([[[0.0, 0.025, 0.0]], [[0.0, 0.0, 0.0]]], [[3], [3]]),
    "average above": Case([[[0.0, HIGH, 0.0]], [[0.0, LOW, 0.0]]], [[1], [1]]),
    "a rank without valid frames": Case(
        [[[NAN, HIGH, NAN]], [[LOW, LOW, HIGH]]], [[2], [2]], [[[0.0] * 3], [[8.0] * 3]]
    ),
    "a stop while both continue": Case([[[HIGH] * 4, *low(3)], low(1, 2)], [[0, 3], [0, 2]]),
    "a stop of the two that continue": Case(
        [[[LOW, HIGH, LOW]], [[LOW]], [[LOW, LOW, LOW]]], [[1]] * 3, options={"when": "epoch"}
    ),
    "nan": Case([[[LOW, LOW], [LOW]], [[LOW, NAN], [LOW]]], [[1, 1], [1, 1]]),
    "check_every": Case(
        [[[HIGH, LOW, NAN, HIGH, LOW], [HIGH] * 3], [[HIGH, LOW, LOW], [HIGH]]],
        [[3, 1], [3, 1]],
        options={"check_every": 2},
    ),
    "per epoch": Case(
        [[[[0.0, 0.03], [HIGH] * 2]], [[[0.0], [LOW]]]],
        [[1], [1]],  # 0.01, and (0.05 + 0.05 + 0.01) / 3
        [[[[8.0, 8.0], [8.0, 8.0]]], [[[8.0], [8.0]]]],
        options={"when": "epoch"},
    ),
}


def random_case(seed: int) -> Case:
    """Ranks with random numbers of minibatches; one process that sees all decides alike."""
    chance = random.Random(seed)
    ranks, every = range(chance.choice([2, 3])), chance.choice([1, 1, 2, 3])
    sizes = [[chance.randrange(6) for _ in range(3)] for _ in ranks]
    kls = [[[chance.uniform(0, 0.025) for _ in range(n)] for n in row] for row in sizes]
    weights = [[[float(chance.randrange(1, 9)) for _ in range(n)] for n in row] for row in sizes]
    applied: list[list[int]] = [[] for _ in ranks]
    for batch in range(3):
        longest = stop = max(sizes[rank][batch] for rank in ranks)
        for index in range(every - 1, longest, every):
            here = [rank for rank in ranks if index < sizes[rank][batch]]
            total = sum(weights[rank][batch][index] for rank in here)
            pairs = [kls[rank][batch][index] * weights[rank][batch][index] for rank in here]
            if sum(pairs) / total > 0.015:
                stop = index
                break
        for rank in ranks:
            applied[rank].append(min(stop, sizes[rank][batch]))
    return Case(kls, applied, weights, {"check_every": every})


CASES |= {f"random {seed}": random_case(seed) for seed in range(20)}


def coefficient() -> list[float]:
    """Means over the ranks: 0.0217, 0.03 and 0.012 by weight, and NaN."""
    rank, adaptive = dist.get_rank(), AdaptiveKLCoeff(Penalised(1.0))
    moves = [adaptive.update((0.0051, 0.02, 0.04)[rank])]
    moves.append(adaptive.update((0.0, 0.0, 0.06)[rank], weight=(1.0, 1.0, 2.0)[rank]))
    moves.append(adaptive.update((0.0, 0.0, 0.06)[rank], weight=(8.0, 8.0, 4.0)[rank]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        moves.append(adaptive.update((NAN, 0.0, 0.0)[rank]))
    assert len(caught) == 1
    return moves


def run_all(early: KLEarlyStopper, rank: int) -> dict[str, Any]:
    """Run every case in one process of each rank."""
    pair: Any = dist.new_group([0, 1])
    all_reduce = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        global calls
        calls += 1
        return all_reduce(*args, **kwargs)

    dist.all_reduce = counted
    found: dict[str, Any] = {
        name: case.run(rank, pair if len(case.kls) == 2 else None)
        for name, case in CASES.items()
        if rank < len(case.kls)
    }
    found["coefficient"] = coefficient()
    try:
        KLEarlyStopper(0.01, group=pair)
    except TypeError as error:
        found["outside"] = str(error)
    found["early"] = early.update((0.0, 0.0, 0.06)[rank])  # it is older than the process group
    early.reset()
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_on_ranks(3, partial(run_all, KLEarlyStopper(0.01)), folder)


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_stop_at_the_same_minibatch(results: Any, name: str):
    found = [result[name] for result in results if name in result]
    assert [each["applied"] for each in found] == CASES[name].applied
    assert [each["warnings"] for each in found] == [int(name == "nan")] * len(found)


def test_each_check_is_one_round_of_communication(results: Any):
    for name in ("average below", "average above", "a stop while both continue"):
        for result in results[:2]:
            assert result[name]["rounds"] == result[name]["asked"]
    assert [result["check_every"]["rounds"] for result in results[:2]] == [[2, 1], [1, 0]]


def test_a_stopper_that_is_older_than_the_group_uses_it(results: Any):
    assert [result["early"] for result in results] == [True] * 3


def test_a_rank_outside_of_the_group_raises(results: Any):
    assert ["outside" in result for result in results] == [False, False, True]
    assert "this process belongs to, got -100" in results[2]["outside"]


def test_all_ranks_have_one_kl_coefficient(results: Any):
    assert [result["coefficient"] for result in results] == [[1.5, 2.25, 2.25, 2.25]] * 3


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
