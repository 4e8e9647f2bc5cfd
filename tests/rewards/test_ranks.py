"""The statistics of two ranks equal those of one process that has the batches of both."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict, TensorDictBase
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import GymEnv, TransformedEnv

from ppokit import RewardNormalizer
from tests.ranks import run_on_two_ranks
from tests.rewards.streams import MASK, RAW, REWARD, make_rollout, moments, saved, time_pieces

pytestmark = pytest.mark.slow
CASES = ["running", "batch", "masked", "large mean"]


def make(case: str, **arguments: Any) -> RewardNormalizer:
    if case == "batch":
        arguments["statistics"] = "batch"
    return RewardNormalizer(0.9, **arguments)


def batches(case: str) -> list[TensorDict]:
    """What both ranks hold together: four rows, in three batches."""
    whole = make_rollout(0, 4, 15, 0.2)
    if case == "large mean":
        whole[REWARD] = 1e6 + 1e-3 * whole[REWARD]
    pieces = list(time_pieces(whole, [4, 5, 6]))
    if case == "masked":
        # of the second batch, one rank has three frames, and of the third none
        for piece, valid in zip(pieces, (4, 3, 0), strict=True):
            piece[MASK] = torch.ones(piece.shape, dtype=torch.bool)
            piece[MASK][2:] = torch.arange(piece.shape[1]) < valid
    return pieces


def share(case: str, rank: int) -> list[Any]:
    """Three rows on one rank, one on the other; with a mask, two and two."""
    cut = 2 if case == "masked" else 3
    return [piece[cut:] if rank else piece[:cut] for piece in batches(case)]


def caught(call: Callable[[], object]) -> str | None:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def found_on(rank: int) -> dict[str, Any]:
    """Run every case on one rank."""
    results: dict[str, Any] = {case: alike(case, rank) for case in CASES}
    results["rewards"] = [x[REWARD] for x in map(make("running"), share("running", rank))]
    for case in (bad_batch, locked, frozen, different, buffers, in_environments, groups):
        results[case.__name__] = case(rank)
    return results


def alike(case: str, rank: int) -> dict[str, Any]:
    normalizer = make(case)
    for piece in share(case, rank):
        normalizer(piece)
    return {"moments": moments(normalizer), "scale": normalizer.scale}


def bad_batch(rank: int) -> dict[str, Any]:
    """One rank's batch is not finite: both raise, and can go on."""
    normalizer = RewardNormalizer()
    normalizer(make_rollout(rank, 2, 5, 0.2))
    before, batch = saved(normalizer), make_rollout(2 + rank, 2, 5, 0.2)
    if rank == 1:
        batch[REWARD][0, 3] = math.nan
    error = caught(lambda: normalizer(batch))
    same = all(torch.equal(x, before[name]) for name, x in normalizer.state_dict().items())
    untouched = RAW not in batch.keys(True)
    normalizer(make_rollout(4 + rank, 2, 5, 0.2))
    return {"error": error, "same": same and untouched, "moments": moments(normalizer)}


def locked(rank: int) -> str | None:
    batch = make_rollout(rank, 2, 5, 0.2)
    return caught(lambda: RewardNormalizer()(batch.lock_() if rank == 0 else batch))


def frozen(rank: int) -> dict[str, Any]:
    """A frozen normalizer does not communicate."""
    normalizer = RewardNormalizer()
    normalizer(make_rollout(rank, 2, 5, 0.2))
    before = moments(normalizer)
    if rank == 1:
        evaluation = normalizer.clone().freeze()
        evaluation(make_rollout(7, 2, 5, 0.2))
        assert torch.equal(moments(evaluation), before)
    normalizer(make_rollout(2 + rank, 2, 5, 0.2))
    return {"moments": moments(normalizer)}


def different(rank: int) -> str | None:
    """The ranks continue from different states."""
    normalizer = RewardNormalizer()
    if rank == 1:
        normalizer.freeze()
        other = RewardNormalizer(group=None)
        other.freeze()
        state = other.state_dict() | {"moments": torch.tensor([5.0, 0, 5, 1]).double()}
        normalizer.load_state_dict(state)
        normalizer.unfreeze()
    return caught(lambda: normalizer(make_rollout(rank, 2, 5, 0.2)))


def buffers(rank: int) -> dict[str, Any]:
    """Both ranks write equally often, and sample as often as they like."""
    normalizer = RewardNormalizer(0.9)
    buffer = ReplayBuffer(storage=LazyTensorStorage(60, ndim=2), batch_size=4)
    buffer.append_transform(normalizer)
    for piece in share("running", rank):
        buffer.empty()
        buffer.extend(piece)
        for _ in range(3 * rank):
            buffer.sample()
    return {"moments": moments(normalizer)}


def in_environments(rank: int) -> dict[str, Any]:
    """Each rank takes any number of steps; a group raises."""
    normalizer = RewardNormalizer()
    TransformedEnv(GymEnv("Pendulum-v1"), normalizer).rollout(3 + 2 * rank)
    grouped = RewardNormalizer(group=dist.group.WORLD)
    env = TransformedEnv(GymEnv("Pendulum-v1"), grouped)
    error = caught(lambda: env.rollout(3))
    grouped.freeze()
    env.rollout(3 + rank)
    return {"count": normalizer.count, "error": error}


def groups(rank: int) -> dict[str, Any]:
    """A group that is given is used, and one of this process alone is no communication."""
    alone = [dist.new_group([one]) for one in range(2)]
    normalizer, outside = RewardNormalizer(group=alone[rank]), None
    normalizer(make_rollout(rank, 2 + rank, 5, 0.2))
    outside = caught(lambda: RewardNormalizer(group=alone[1 - rank]))  # pyright: ignore
    copied = normalizer.clone()(make_rollout(9, 2, 5, 0.2))
    return {"count": normalizer.count, "outside": outside, "copied": copied[REWARD].shape}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_two_ranks(found_on, tmp_path_factory.mktemp("ranks"))


def in_one_process(case: str) -> tuple[RewardNormalizer, list[TensorDictBase]]:
    normalizer = make(case)
    return normalizer, [normalizer(piece) for piece in batches(case)]


@pytest.mark.parametrize("case", CASES)
def test_statistics_merged_over_ranks_equal_those_of_one_process(results, case):
    expected, _ = in_one_process(case)
    for result in results:
        tolerance = 1e-8 if case == "large mean" else 1e-12  # 1e6 beside 1e-3 leaves 7 digits
        found = result[case]
        torch.testing.assert_close(found["moments"], moments(expected), rtol=tolerance, atol=1e-12)
        torch.testing.assert_close(found["scale"], expected.scale, rtol=tolerance, atol=0)


@pytest.mark.parametrize("case", [*CASES, "bad_batch", "frozen", "buffers"])
def test_all_ranks_hold_the_same_statistics_to_the_last_bit(results, case):
    assert torch.equal(results[0][case]["moments"], results[1][case]["moments"])


def test_rewards_are_scaled_as_in_one_process(results):
    _, expected = in_one_process("running")
    for i, batch in enumerate(expected):
        rewards = torch.cat([result["rewards"][i] for result in results])
        torch.testing.assert_close(rewards, batch[REWARD], rtol=1e-12, atol=0)


def test_a_bad_batch_on_one_rank_is_an_error_on_all_and_changes_nothing(results):
    assert results[0]["bad_batch"]["error"].startswith("RuntimeError: Rank 1 cannot use its batch")
    assert results[1]["bad_batch"]["error"].startswith("ValueError: 1 of 10 rewards at")
    assert all(result["bad_batch"]["same"] for result in results)
    assert results[0]["bad_batch"]["moments"][0] == 40  # 2 rows of 5 on each rank, twice
    assert results[0]["locked"].startswith("RuntimeError: The batch is locked")
    assert results[1]["locked"].startswith("RuntimeError: Rank 0 cannot use its batch")


def test_ranks_that_do_not_fit_together_say_so(results):
    for result in results:
        assert result["different"].startswith("RuntimeError: The ranks' statistics differ")


def test_writing_to_buffers_equals_calling(results):
    torch.testing.assert_close(results[0]["buffers"]["moments"], results[0]["running"]["moments"])


def test_in_an_environment_each_rank_has_statistics_of_its_own(results):
    assert [int(result["in_environments"]["count"]) for result in results] == [3, 5]
    for result in results:
        assert "group= needs whole batches" in result["in_environments"]["error"]


def test_the_given_group_is_used(results):
    assert [int(result["groups"]["count"]) for result in results] == [10, 15]
    for result in results:
        assert "this process belongs to" in result["groups"]["outside"]
        assert result["groups"]["copied"] == (2, 5, 1)
