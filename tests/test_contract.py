"""One contract that every block passes, whatever it does."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictSequential
from tensordict.utils import NestedKey
from torch import nn

import ppokit
from ppokit import (
    GAE,
    DualClipPPOLoss,
    GRUModule,
    InterpSchedule,
    KLEarlyStopper,
    LeanActor,
    LSTMModule,
    ParameterScheduler,
    RewardNormalizer,
    RunningObservationNorm,
    SequenceBatcher,
)
from tests.blocks import make_actor, make_critic, make_minibatch


def rollout(seed: int) -> TensorDict:
    """Two environments, six steps, one truncation and one termination."""
    generator = torch.Generator().manual_seed(seed)
    observation = torch.randn(2, 7, 4, generator=generator)
    terminated = torch.zeros(2, 6, 1, dtype=torch.bool)
    terminated[0, 2] = True
    done = terminated.clone()
    done[1, 3] = True
    is_init = torch.zeros(2, 6, 1, dtype=torch.bool)
    is_init[:, 1:] = done[:, :-1]
    ids = (done.cumsum(1) - done.long()).squeeze(-1) + torch.tensor([[10], [20]])
    return TensorDict(
        {
            "observation": observation[:, :-1],
            "is_init": is_init,
            "recurrent_state": torch.randn(2, 6, 1, 3, generator=generator),
            "collector": {"traj_ids": ids},
            "next": {
                "observation": observation[:, 1:],
                "reward": torch.randn(2, 6, 1, generator=generator),
                "done": done,
                "terminated": terminated,
            },
        },
        [2, 6],
        names=[None, "time"],
    )


def minibatch(seed: int) -> TensorDict:
    return make_minibatch(make_actor(), 8, seed=seed)


def losses(seed: int) -> TensorDict:
    return TensorDict({"kl": torch.tensor(0.01 * seed)})


def scheduler() -> ParameterScheduler:
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))])
    return ParameterScheduler({"lr": (optimizer, InterpSchedule([(0, 1.0), (100, 0.0)]))})


def recurrent(kind: type[LSTMModule] | type[GRUModule]) -> LSTMModule | GRUModule:
    torch.manual_seed(0)
    keys = {"in_key": "observation", "out_key": "features"}
    return kind(4, 3, **keys, default_recurrent_mode=True)


@dataclass
class Case:
    make: Callable[[], nn.Module]
    batch: Callable[[int], TensorDict]
    required: list[NestedKey]
    differentiable: Sequence[NestedKey] = ()


CASES = {
    "RewardNormalizer": Case(RewardNormalizer, rollout, [("next", "reward"), ("next", "done")]),
    "RewardNormalizer, batch": Case(
        lambda: RewardNormalizer(statistics="batch"), rollout, [("next", "reward")]
    ),
    "GAE": Case(
        lambda: GAE(gamma=0.99, lmbda=0.95, value_network=make_critic()),
        rollout,
        ["observation", ("next", "observation"), ("next", "reward"), ("next", "done")],
    ),
    "RunningObservationNorm": Case(lambda: RunningObservationNorm(4), rollout, ["observation"]),
    "LeanActor": Case(lambda: LeanActor(make_actor()), minibatch, ["observation"]),
    "DualClipPPOLoss": Case(
        lambda: DualClipPPOLoss(make_actor(), make_critic(), dual_clip=2.0, kl_coeff=0.1),
        minibatch,
        ["observation", "action", "action_log_prob", "value_target"],
        ["loss_objective", "loss_critic", "loss_entropy", "loss_kl"],
    ),
    "LSTMModule": Case(
        lambda: recurrent(LSTMModule),
        rollout,
        ["observation", "is_init"],
        ["features", ("next", "recurrent_state_h"), ("next", "recurrent_state_c")],
    ),
    "GRUModule": Case(
        lambda: recurrent(GRUModule),
        rollout,
        ["observation", "is_init"],
        ["features", ("next", "recurrent_state")],
    ),
    "KLEarlyStopper": Case(lambda: KLEarlyStopper(0.02), losses, ["kl"]),
    "ParameterScheduler": Case(scheduler, rollout, []),
    "SequenceBatcher": Case(
        lambda: SequenceBatcher(4, state_keys=["recurrent_state"]),
        rollout,
        ["is_init", "recurrent_state", ("next", "done")],
    ),
    "SequenceBatcher, burn-in": Case(
        lambda: SequenceBatcher(2, burn_in=2, state_keys=["recurrent_state"]),
        rollout,
        ["is_init", "recurrent_state", ("next", "done")],
    ),
}

every_block = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def call(block: nn.Module, batch: TensorDictBase) -> TensorDictBase:
    torch.manual_seed(0)
    return block(batch)


def assert_equal(a: TensorDictBase, b: TensorDictBase) -> None:
    """Bit for bit, key for key."""
    assert set(a.keys(True, True)) == set(b.keys(True, True))
    for key in a.keys(True, True):
        assert torch.equal(a.get(key), b.get(key)), key


def test_every_public_block_is_here():
    blocks = {name for name in ppokit.__all__ if inspect.isclass(getattr(ppokit, name))}
    called_with_numbers = {
        "StepSchedule",
        "InterpSchedule",
        "AdaptiveKLCoeff",
        "GymCollector",
        "PPOUpdate",
        "Finding",
    }
    assert blocks - called_with_numbers == {name.split(",")[0] for name in CASES}


def test_every_public_name_has_an_example_that_runs():
    public = [
        getattr(ppokit, name) for name in ppokit.__all__ if name not in ("functional", "plotting")
    ]
    public += [getattr(ppokit.functional, name) for name in ppokit.functional.__all__]
    for thing in public:
        assert ">>>" in (thing.__doc__ or ""), thing


@every_block
def test_state_goes_on_bit_for_bit(case: Case, tmp_path: Path):
    block = case.make()
    call(block, case.batch(1))
    torch.save(block.state_dict(), tmp_path / "state.pt")
    expected = call(block, case.batch(2))
    fresh = case.make()
    fresh.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert_equal(call(fresh, case.batch(2)), expected)


@every_block
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_go_on_alone(case: Case, copier: Callable[[Any], Any]):
    block = case.make()
    call(block, case.batch(1))
    twin = copier(block)
    expected = call(block, case.batch(2))
    assert_equal(call(twin, case.batch(2)), expected)
    # the twin has its own state
    assert_equal(call(copier(block), case.batch(3)), call(block, case.batch(3)))


@every_block
def test_tensors_of_the_batch_are_not_written_to(case: Case):
    batch = case.batch(1)
    leaves = dict(batch.items(True, True))
    before = {key: leaf.clone() for key, leaf in leaves.items()}
    call(case.make(), batch)
    for key, leaf in leaves.items():
        assert torch.equal(leaf, before[key]), key


@every_block
def test_what_out_keys_promise_is_there(case: Case):
    block = case.make()
    result = call(block, case.batch(1))
    assert set(block.out_keys) <= set(result.keys(True))


@every_block
def test_composes(case: Case):
    chained = TensorDictSequential(case.make())
    assert_equal(call(chained, case.batch(1)), call(case.make(), case.batch(1)))


@every_block
def test_a_missing_key_is_named_and_nothing_is_half_written(case: Case):
    for key in case.required:
        batch = case.batch(1).exclude(key)
        before = batch.clone()
        block = case.make()
        state = copy.deepcopy(block.state_dict())
        with pytest.raises(KeyError, match=str(key if isinstance(key, str) else key[-1])):
            block(batch)
        assert set(batch.keys(True, True)) == set(before.keys(True, True))
        for name, value in block.state_dict().items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(state[name])), name


@every_block
def test_gradients_do_not_flow_where_none_are_wanted(case: Case):
    result = call(case.make(), case.batch(1))
    for key, leaf in result.items(True, True):
        assert leaf.requires_grad == (key in case.differentiable), key


@every_block
def test_compiled_equals_eager(case: Case):
    expected = call(case.make(), case.batch(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo's remarks on torchrl's own code
        result = call(torch.compile(case.make(), backend="aot_eager"), case.batch(1))
    for key in expected.keys(True, True):
        torch.testing.assert_close(result.get(key), expected.get(key), msg=str(key))


@every_block
def test_it_says_what_it_is(case: Case):
    block = case.make()
    assert type(block).__name__ in repr(block)
    documentation = inspect.getdoc(type(block)) or ""
    for part in ("Args:", "Raises:", "Example"):
        assert part in documentation
