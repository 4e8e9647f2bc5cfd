"""The KL stop: rl8's rule exactly, and a replay buffer that is whole afterwards."""

from __future__ import annotations

import copy
import json
import math
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.data import (
    LazyTensorStorage,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
)

from ppokit import DualClipPPOLoss, KLEarlyStopper
from ppokit.functional import kl_estimate
from tests.blocks import make_actor, make_critic, make_minibatch

CASES = json.loads((Path(__file__).parent / "data" / "rl8.json").read_text())["kl_early_stop"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_rl8s_recorded_runs(case: dict):
    target = case["target_kl_div"]
    stopper = None if target is None else KLEarlyStopper(target)
    log_ratios = iter(case["minibatch_log_ratio"])
    kls, applied = [], 0
    for _ in range(case["num_sgd_iters"]):
        for _ in range(case["num_minibatches"]):
            kl = kl_estimate(torch.full((8, 1), next(log_ratios))).mean()
            kls.append(kl)
            if stopper is not None and stopper.update(TensorDict({"kl": kl})):
                break
            applied += 1
        if stopper is not None and stopper.stopped:
            break
    assert len(kls) == case["minibatches_evaluated"]
    assert applied == case["optimizer_steps"]
    # the minibatch that stops the update is not applied, and is counted
    torch.testing.assert_close(
        torch.stack(kls).mean().item(), case["monitors/kl_div"], rtol=2e-5, atol=1e-6
    )


def test_every_recorded_run_was_seen():
    assert len(CASES) == 4


# -- the rule -------------------------------------------------------------------


@given(
    kl=st.floats(0, 10),
    target=st.floats(1e-4, 1),
    tolerance=st.floats(0.1, 10),
)
def test_stops_exactly_above_the_threshold(kl: float, target: float, tolerance: float):
    stopper = KLEarlyStopper(target, tolerance=tolerance)
    assert stopper.update(kl) == (kl > tolerance * target)


def test_stays_stopped_until_reset():
    stopper = KLEarlyStopper(0.01)
    assert [stopper.update(kl) for kl in (0.015, 0.016, 0.0)] == [False, True, True]
    stopper.reset()
    assert not stopper.stopped
    assert not stopper.update(0.0)


@pytest.mark.parametrize("kl", [math.nan, math.inf, -math.inf])
def test_a_kl_that_is_not_finite_stops_with_a_warning(kl: float):
    stopper = KLEarlyStopper(0.01)
    with pytest.warns(RuntimeWarning, match=r"The KL divergence is (nan|inf|-inf)"):
        assert stopper.update(torch.tensor(kl))


def test_several_values_are_averaged_by_weight():
    kl = torch.tensor([0.0, 0.02])
    assert not KLEarlyStopper(0.01, when="epoch").update(kl)
    assert KLEarlyStopper(0.01, when="epoch").update(kl, weight=torch.tensor([1, 9]))


@pytest.mark.parametrize("value", [0.02, torch.tensor(0.02), TensorDict({"kl": 0.02})])
def test_takes_a_float_a_tensor_or_losses(value):
    assert KLEarlyStopper(0.01).update(value)


def test_half_precision_and_gradients_are_welcome():
    kl = torch.tensor(0.02, dtype=torch.bfloat16, requires_grad=True)
    assert KLEarlyStopper(0.01).update(kl)


def test_works_on_the_losses_of_a_real_loss():
    actor = make_actor()
    loss = DualClipPPOLoss(actor, make_critic())
    near = loss(make_minibatch(actor, 64, spread=0.01))
    far = loss(make_minibatch(actor, 64, spread=1.0))
    stopper = KLEarlyStopper(0.01)
    assert not stopper.update(near)
    assert stopper.update(far)


# -- as a TensorDictModule ----------------------------------------------------------


def test_in_a_sequential_and_with_nested_keys():
    stopper = KLEarlyStopper(0.01, kl_key=("loss", "kl"))
    double = TensorDictModule(lambda x: x * 2, ["half"], [("loss", "kl")])
    module = TensorDictSequential(double, stopper)
    assert module.out_keys[-1] == "kl_stop"
    assert not module(TensorDict({"half": torch.tensor(0.005)}))["kl_stop"]
    result = module(TensorDict({"half": torch.full((3,), 0.01)}, [3]))
    assert result["kl_stop"].tolist() == [True] * 3


def test_state_goes_on(tmp_path: Path):
    stopper = KLEarlyStopper(0.01)
    stopper.update(1.0)
    torch.save(stopper.state_dict(), tmp_path / "state.pt")
    fresh = KLEarlyStopper(0.01)
    fresh.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for other in (fresh, copy.deepcopy(stopper), pickle.loads(pickle.dumps(stopper))):
        assert other.stopped
        other.reset()
        assert stopper.stopped


def test_repr_says_what_it_does():
    assert repr(KLEarlyStopper(0.01)) == (
        "KLEarlyStopper(target_kl=0.01, tolerance=1.5, when='minibatch', stopped=False)"
    )


# -- the replay buffer ----------------------------------------------------------------


def make_buffer(**kwargs) -> ReplayBuffer:
    arguments = {"sampler": SamplerWithoutReplacement(), "batch_size": 10} | kwargs
    return ReplayBuffer(storage=LazyTensorStorage(100), **arguments)


def frames(start: int) -> TensorDict:
    return TensorDict({"x": torch.arange(start, start + 100)}, [100])


def epoch(buffer: ReplayBuffer) -> list[int]:
    return sorted(x for minibatch in buffer for x in minibatch["x"].tolist())


def stop_after(buffer: ReplayBuffer, stopper: KLEarlyStopper, minibatches: int) -> None:
    for done, _ in enumerate(buffer, start=1):
        if stopper.update(1.0 if done == minibatches else 0.0):
            break
    assert stopper.stopped


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("minibatches", [1, 3, 9, 10])
def test_the_next_batch_is_seen_whole(minibatches: int, prefetch: int):
    buffer = make_buffer(prefetch=prefetch)
    stopper = KLEarlyStopper(0.01, replay_buffer=buffer)
    for update in range(3):
        buffer.extend(frames(100 * update))
        stopper.reset()
        stop_after(buffer, stopper, minibatches)
        assert len(buffer) == 100  # the data is still there
    buffer.extend(frames(1000))
    assert epoch(buffer) == list(range(1000, 1100))


def test_without_the_buffer_the_next_batch_is_seen_in_part():
    """What ``replay_buffer=`` is for."""
    buffer = make_buffer()
    buffer.extend(frames(0))
    stop_after(buffer, KLEarlyStopper(0.01), 3)
    buffer.extend(frames(0))
    assert len(epoch(buffer)) == 70


@pytest.mark.parametrize("drop_last", [False, True])
def test_ragged_last_minibatch(drop_last: bool):
    sampler = SamplerWithoutReplacement(drop_last=drop_last)
    buffer = make_buffer(sampler=sampler, batch_size=30)
    stopper = KLEarlyStopper(0.01, replay_buffer=buffer)
    buffer.extend(frames(0))
    stop_after(buffer, stopper, 2)
    assert len(epoch(buffer)) == (90 if drop_last else 100)


def test_random_sampling_is_left_alone():
    buffer = make_buffer(sampler=RandomSampler())
    buffer.extend(frames(0))
    stopper = KLEarlyStopper(0.01, when="epoch", replay_buffer=buffer)
    buffer.sample()
    assert stopper.update(1.0)
    assert buffer.sample()["x"].shape == (10,)


def test_per_epoch_is_asked_between_epochs():
    buffer = make_buffer()
    buffer.extend(frames(0))
    stopper = KLEarlyStopper(0.01, when="epoch", replay_buffer=buffer)
    for _ in buffer:
        pass
    assert not stopper.update(0.0)
    for _ in buffer:
        with pytest.raises(ValueError, match="in the middle of an epoch"):
            stopper.update(0.0)
        break


# -- bad input ------------------------------------------------------------------------


@pytest.mark.parametrize("target", [0.0, -0.1, math.nan])
def test_target_must_be_positive(target: float):
    with pytest.raises(ValueError, match=f"target_kl must be positive, got {target}"):
        KLEarlyStopper(target)


def test_tolerance_must_be_positive():
    with pytest.raises(ValueError, match="tolerance must be positive"):
        KLEarlyStopper(0.01, tolerance=0.0)


def test_unknown_when():
    with pytest.raises(ValueError, match="when must be 'minibatch' or 'epoch', got 'batch'"):
        KLEarlyStopper(0.01, when="batch")


def test_missing_key_names_what_is_there():
    with pytest.raises(KeyError, match=r"'kl' is not in the batch.*kl_approx.*loss_objective"):
        KLEarlyStopper(0.01).update(TensorDict({"kl_approx": 0.0, "loss_objective": 0.0}))


def test_empty_kl():
    with pytest.raises(ValueError, match="empty"):
        KLEarlyStopper(0.01).update(torch.zeros(0))


@pytest.mark.parametrize("weight", [[1.0], [1.0, -1.0], [0.0, 0.0]])
def test_bad_weight(weight: list[float]):
    with pytest.raises(ValueError, match=r"weight must be the number of valid frames.*\[2\]"):
        KLEarlyStopper(0.01).update(torch.zeros(2), weight=torch.tensor(weight))
