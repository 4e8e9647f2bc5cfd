"""The KL stop in torchrl's trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchrl.trainers import MixedPrecisionOptimizationStepper

from ppokit import KLEarlyStopper
from tests.blocks import make_minibatch
from tests.trust_region.training import (
    ALL,
    BATCHES,
    EPOCHS,
    FRAMES,
    MINIBATCH,
    Run,
    make_buffer,
    parameters,
)

KINDS = ["PPOTrainer", "Trainer", "mixed precision"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_stopped_by_its_first_minibatch_changes_no_parameter(kind: str):
    run = Run(KLEarlyStopper(1e-12, tolerance=1e-6), kind=kind)
    run.log_prob_shift = 0.1  # otherwise the KL of the first minibatch is 0
    run.train()
    assert [len(kls) for kls in run.kls] == [1] * BATCHES
    assert not any(run.moved)
    assert run.steps == 0


def test_a_stopper_that_never_stops_changes_nothing():
    run, without = Run(KLEarlyStopper(1e9)).train(), Run().train()
    assert torch.equal(parameters(run.loss), parameters(without.loss))
    assert run.kls == without.kls
    assert run.steps == without.steps == BATCHES * ALL


@pytest.mark.parametrize("kind", KINDS)
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
    far = make_minibatch(run.actor, 8, spread=9.0)

    def evaluate(batch: Any) -> None:
        with torch.no_grad():
            assert run.loss(far.clone())["kl"] > 1

    for stage in ("pre_epoch_log", "post_optim_log"):
        run.trainer.register_op(stage, evaluate)
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
