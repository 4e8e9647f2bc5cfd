"""KLEarlyStopper: rule, state, replay buffers that stay whole, bad input, torchrl's trainers."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.data import RandomSampler, ReplayBuffer, ReplayBufferEnsemble, StalenessAwareSampler
from torchrl.trainers import MixedPrecisionOptimizationStepper

from ppokit import KLEarlyStopper
from ppokit.functional import kl_estimate
from tests.golden import rl8
from tests.trust_region.training import (
    ALL,
    BATCHES,
    EPOCHS,
    FRAMES,
    MINIBATCH,
    Run,
    evaluate_at,
    make_buffer,
    parameters,
)

# -- the rule ---------------------------------------------------------------------------


@pytest.mark.parametrize("case", rl8("kl_early_stop"), ids=lambda case: case["name"])
def test_golden_runs_of_rl8(case: dict[str, Any]):
    target = case["target_kl_div"]
    stopper = None if target is None else KLEarlyStopper(target)
    log_ratios = iter(case["minibatch_log_ratio"])
    kls, applied = [], 0
    for _ in range(case["num_sgd_iters"]):
        for _ in range(case["num_minibatches"]):
            kls.append(kl_estimate(torch.full((8, 1), next(log_ratios))).mean())
            if stopper is not None and stopper.update(TensorDict({"kl": kls[-1]})):
                break
            applied += 1
        if stopper is not None and stopper.stopped:
            break
    assert len(kls) == case["minibatches_evaluated"]
    assert applied == case["optimizer_steps"]
    # The minibatch that stops the update is not applied, and counts in the mean KL.
    assert torch.stack(kls).mean().item() == pytest.approx(case["monitors/kl_div"], rel=2e-5)


@given(kl=st.floats(0, 10), target=st.floats(1e-4, 1), tolerance=st.floats(0.1, 10))
def test_stops_exactly_above_the_threshold(kl: float, target: float, tolerance: float):
    stopper = KLEarlyStopper(target, tolerance=tolerance)
    assert stopper.update(kl) == (kl > tolerance * target)


def test_stays_stopped_until_reset():
    stopper = KLEarlyStopper(0.01)
    assert [stopper.update(kl) for kl in (0.015, 0.016, 0.0)] == [False, True, True]
    stopper.reset()
    assert not stopper.stopped
    assert not stopper.update(0.0)
    options = "target_kl=0.01, tolerance=1.5, when='minibatch', stopped=False"
    assert repr(stopper) == f"KLEarlyStopper({options})"


@pytest.mark.parametrize("kl", [math.nan, math.inf, -math.inf])
def test_a_kl_that_is_not_finite_stops_with_a_warning(kl: float):
    stopper = KLEarlyStopper(0.01)
    with pytest.warns(RuntimeWarning, match=r"The KL divergence is (nan|inf|-inf)"):
        assert stopper.update(torch.tensor(kl))
    stopper.reset()
    with pytest.raises(RuntimeWarning):  # a warning that is an error leaves it stopped, too
        stopper.update(kl)
    assert stopper.stopped


def test_writes_kl_stop_in_a_sequence_of_modules():
    stopper = KLEarlyStopper(0.01, kl_key=("loss", "kl"))
    double = TensorDictModule(lambda x: x * 2, ["half"], [("loss", "kl")])
    module = TensorDictSequential(double, stopper)
    assert module.out_keys[-1] == "kl_stop"
    assert not module(TensorDict({"half": torch.tensor(0.005)}))["kl_stop"]
    result = module(TensorDict({"half": torch.full((3,), 0.01)}, [3]))
    assert result["kl_stop"].tolist() == [True] * 3


def test_check_every_looks_at_every_nth_minibatch_only():
    stopper = KLEarlyStopper(0.01, check_every=3)
    decisions = [stopper.update(kl) for kl in (9.0, math.nan, 0.0, 9.0, 9.0, 9.0, 0.0)]
    assert decisions == [False] * 5 + [True] * 2
    stopper.reset()  # counts from the reset
    assert not stopper.update(torch.zeros((), device="meta"))  # its values are not read
    assert [stopper.update(9.0) for _ in range(2)] == [False, True]


def test_state_and_copies_resume(tmp_path: Path):
    stopper = KLEarlyStopper(0.01, check_every=2)
    for updates in (1, 3):
        stopper.reset()
        for _ in range(updates):
            stopper.update(1.0)
        torch.save(stopper.state_dict(), tmp_path / "state.pt")
        fresh = KLEarlyStopper(0.01, check_every=2)
        fresh.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        for other in (fresh, copy.deepcopy(stopper), pickle.loads(pickle.dumps(stopper))):
            assert other.stopped == (updates == 3)
            assert other.update(1.0)
            other.reset()
        assert stopper.stopped == (updates == 3)


def test_compiled_it_does_not_recompile_for_each_minibatch():
    stopper: Any = torch.compile(KLEarlyStopper(0.01), backend="aot_eager")
    for kl in (0.0, 0.1, 0.0):  # both decisions, and an update after a stop
        stopper(TensorDict({"kl": torch.tensor(kl)}))
    with torch.compiler.set_stance("fail_on_recompile"):
        for kl in [0.0] * 10 + [0.1]:
            stopper.reset()
            stopper(TensorDict({"kl": torch.tensor(kl)}))


@pytest.mark.gpu
@pytest.mark.parametrize("weight", [None, 64, torch.tensor(64)])
def test_one_transfer_for_each_check(weight: torch.Tensor | float | None):
    kl = torch.tensor(0.001, device="cuda")
    frames = weight.to("cuda") if isinstance(weight, torch.Tensor) else weight
    stopper = KLEarlyStopper(0.01)
    stopper.update(kl, weight=frames)
    with torch.profiler.profile() as profile:
        stopper.update(kl, weight=frames)
    names = [event.name for event in profile.events() or ()]
    assert sum("Memcpy DtoH" in name for name in names) == 1
    assert not any("Memcpy HtoD" in name for name in names)


# -- replay buffers ---------------------------------------------------------------------


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
@pytest.mark.parametrize("minibatches", [1, 9, 10])
def test_after_a_stop_the_next_batch_is_seen_whole(minibatches: int, prefetch: int):
    buffer = make_buffer(prefetch=prefetch)
    stopper = KLEarlyStopper(0.01, replay_buffer=buffer)
    for update in range(3):
        buffer.extend(frames(100 * update))
        stopper.reset()
        stop_after(buffer, stopper, minibatches)
        assert len(buffer) == 100  # the data stay
    buffer.extend(frames(1000))
    assert epoch(buffer) == list(range(1000, 1100))


def test_samplers_without_a_permutation_keep_their_state():
    sampler = StalenessAwareSampler()
    buffer = make_buffer(sampler=sampler)
    buffer.extend(frames(0).set("policy_version", torch.zeros(100)))
    sampler.increment_consumer_version()
    assert KLEarlyStopper(0.01, replay_buffer=buffer).update(1.0)
    assert sampler.consumer_version == 1
    buffer = make_buffer(sampler=RandomSampler(), prefetch=3)
    buffer.extend(frames(0))
    buffer.sample()
    assert KLEarlyStopper(0.01, when="epoch", replay_buffer=buffer).update(1.0)
    buffer.extend(frames(1000))  # minibatches that were fetched ahead are dropped
    assert all((buffer.sample()["x"] >= 1000).all() for _ in range(5))


def test_buffers_of_an_ensemble_are_left_whole():
    members = [make_buffer(batch_size=None) for _ in range(2)]
    for number, member in enumerate(members):
        member.extend(frames(1000 * number))
    buffer = ReplayBufferEnsemble(*members, batch_size=20, sample_from_all=True)
    for _ in range(3):
        buffer.sample()
    assert KLEarlyStopper(0.01, replay_buffer=buffer).update(1.0)
    seen = torch.cat([buffer.sample()["x"].flatten() for _ in range(10)])
    assert len(seen.unique()) == 200


# -- bad input --------------------------------------------------------------------------

WEIGHT = r"weight must be the number of valid frames.*\[2\]"


def update(value: Any, **options: Any) -> Callable[[], Any]:
    return lambda: KLEarlyStopper(0.01).update(value, **options)


BAD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: KLEarlyStopper(math.nan), ValueError, "target_kl must be positive, got nan"),
    (lambda: KLEarlyStopper(0.01, tolerance=0.0), ValueError, "tolerance must be positive"),
    (lambda: KLEarlyStopper(0.01, when="batch"), ValueError, "when must be 'minibatch' or 'epoch'"),
    (lambda: KLEarlyStopper(0.01, check_every=0), ValueError, "check_every must be .* 0"),
    (lambda: KLEarlyStopper(0.01, check_every=1.5), ValueError, "check_every .* got 1.5"),  # pyright: ignore
    (lambda: KLEarlyStopper(0.01, group=-100), TypeError, "group must be a ProcessGroup .* -100"),
    (update({"kl": None}), KeyError, "no KL at 'kl'"),
    (update(torch.zeros(0)), ValueError, "weight must be .*\\[0\\]"),
    *(
        (update(torch.zeros(2), weight=weight), ValueError, WEIGHT)
        for weight in map(torch.tensor, ([0.0, 0.0], [1.0, math.nan]))
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_bad_input_raises(call: Callable[[], Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        call()


# -- in torchrl's trainers ---------------------------------------------------------------


def test_a_stopper_that_never_stops_changes_nothing():
    run, without = Run(KLEarlyStopper(1e9)).train(), Run().train()
    assert torch.equal(parameters(run.loss), parameters(without.loss))
    assert run.kls == without.kls
    assert run.steps == without.steps == BATCHES * ALL


@pytest.mark.parametrize("kind", ["PPOTrainer", "Trainer", "mixed precision"])
def test_each_batch_ends_at_the_minibatch_whose_kl_is_too_large(kind: str):
    stopper = KLEarlyStopper(0.01)
    run = Run(stopper, kind=kind).train()
    steps = 0
    for kls in run.kls:
        over = [kl > 0.015 for kl in kls]
        assert not any(over[:-1])
        assert over[-1] or len(kls) == ALL
        steps += len(kls) - over[-1]
    assert run.steps == steps
    assert BATCHES < steps < BATCHES * ALL
    assert not stopper.stopped


def test_per_epoch_the_mean_of_the_epoch_decides():
    run = Run(KLEarlyStopper(0.001, when="epoch")).train()
    for kls in run.kls:
        means = torch.tensor(kls).reshape(-1, FRAMES // MINIBATCH).mean(1)  # whole epochs
        assert (means[:-1] <= 0.0015).all()
        assert means[-1] > 0.0015 or len(means) == EPOCHS
    assert run.steps == sum(len(kls) for kls in run.kls) < BATCHES * ALL


def test_minibatches_of_an_epoch_are_weighted_by_their_valid_frames():
    free = Run(KLEarlyStopper(1e9, when="epoch"), masked=True).train()
    kl, frames = (torch.tensor(x[0][: FRAMES // MINIBATCH]) for x in (free.kls, free.valid))
    weighted, plain = float((kl * frames).sum() / frames.sum()), float(kl.mean())
    assert abs(weighted - plain) > 0.01 * plain
    between = (weighted + plain) / 2
    run = Run(KLEarlyStopper(between, tolerance=1.0, when="epoch"), masked=True).train()
    assert (len(run.kls[0]) == FRAMES // MINIBATCH) == (weighted > between)


@pytest.mark.parametrize("kind", ["PPOTrainer", "Trainer"])
def test_the_batch_after_a_stop_is_seen_whole(kind: str):
    """The stopper finds the trainer's buffer by itself; with another buffer a part is missing."""
    for buffer in (None, make_buffer()):
        stopper = KLEarlyStopper(1e-9, replay_buffer=buffer)
        run = Run(stopper, kind=kind)
        run.trainer.register_op("post_steps", lambda s=stopper: setattr(s, "target_kl", 1e9))
        run.train()
        assert len(run.kls[0]) < ALL
        assert (len(run.kls[1]) < ALL) == (buffer is not None)
        if buffer is None:
            for minibatches in run.seen[1:]:
                for frames in torch.cat(minibatches).reshape(EPOCHS, FRAMES, 4):
                    assert len(frames.unique(dim=0)) == FRAMES


def test_losses_that_no_optimizer_step_follows_are_ignored():
    run = Run(KLEarlyStopper(0.5))
    evaluate_at(run, "pre_epoch_log", "post_optim_log")
    run.train()
    assert run.steps == BATCHES * ALL


@pytest.mark.parametrize("when", ["minibatch", "epoch"])
def test_an_interrupted_run_continues_with_a_new_batch(when: str):
    run = Run(KLEarlyStopper(1.0, when=when))
    run.log_prob_shift = 9.0

    def interrupt() -> None:
        if run.log_prob_shift:
            raise KeyboardInterrupt

    run.trainer.register_op("post_optim", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert run.kls[0][0] > 100
    run.log_prob_shift = 0.0
    run.trainer.collector = run.make_collector()  # torchrl 0.15 has shut down the other
    run.train()
    # Without a stop torchrl's buffer continues with the rest of the interrupted epoch.
    assert [len(kls) for kls in run.kls] == [1, ALL - (when == "epoch"), ALL]


def test_the_trainer_saves_the_stopper(tmp_path: Path):
    stopper, fresh = KLEarlyStopper(0.01), KLEarlyStopper(0.01)
    run, other = Run(stopper), Run(fresh)
    stopper.update(1.0)
    torch.save(run.trainer.state_dict(), tmp_path / "trainer.pt")
    other.trainer.load_state_dict(torch.load(tmp_path / "trainer.pt", weights_only=False))
    assert fresh.stopped


def test_trainers_that_a_stopper_cannot_stop_raise():
    run = Run(KLEarlyStopper(0.01))
    with pytest.raises(RuntimeError, match="kl_early_stopper is already registered"):
        KLEarlyStopper(0.01).register(run.trainer)
    run = Run()
    accumulating = MixedPrecisionOptimizationStepper(run.optimizer, gradient_accumulation_steps=2)
    for name, value, error, message in (
        ("optimization_stepper", accumulating, ValueError, "accumulation exclude each other"),
        ("optimizer", None, ValueError, "no optimizer"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run.trainer, name, value)
            with pytest.raises(error, match=message):
                KLEarlyStopper(0.01).register(run.trainer)
