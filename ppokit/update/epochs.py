"""The epochs of an update: every minibatch once, until the KL stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensordict import TensorDictBase

from ppokit.distributed import raise_together
from ppokit.trust_region import AdaptiveLearningRate
from ppokit.update.data_parallel import Outline, sizes_of_minibatches
from ppokit.update.eager_step import apply_gradients, backward
from ppokit.update.statistics import MinibatchStatistics

if TYPE_CHECKING:
    from ppokit.update.ppo_update import PPOUpdate


def train(
    update: PPOUpdate,
    batch: TensorDictBase,
    elements: TensorDictBase,
    outline: Outline,
    fewest: int,
    statistics: MinibatchStatistics,
) -> bool:
    """Run the epochs, and return whether the KL stop ended them."""
    step, stopper = update.step, update.step.stopper
    sizes = sizes_of_minibatches(len(elements), outline.size, fewest)
    key = getattr(update.adaptive_kl, "kl_key", None)
    step.begin(adaptive_key=key, accumulates=update.accumulate_grads)
    if stopper is not None:
        stopper.reset(wait=False)
    for epoch in range(update.epochs):
        if epoch and update.recompute_advantage:
            elements = raise_together(lambda: update.elements(batch), update.step.group)
            step.note_user_code()
        statistics.begin_epoch()
        if update.accumulate_grads:
            _accumulate_epoch(update, elements, sizes, outline.frames, statistics)
        else:
            _run_epoch(update, elements, sizes, statistics)
        _move_rate(update, statistics, after="epoch")
        if stopper is not None and stopper.when == "epoch" and not stopper.stopped:
            kl, weight = statistics.kl_of_epoch(stopper.kl_key)
            stopper.update(kl, weight=weight)
        if stopper is not None and stopper.stopped:
            break
    step.note_user_code(within=False)
    stopped = stopper is not None and stopper.stopped
    if stopper is not None:
        stopper.reset()
    return stopped


def _run_epoch(
    update: PPOUpdate, elements: TensorDictBase, sizes: list[int], statistics: MinibatchStatistics
) -> None:
    step = update.step
    for minibatch, frames in update.minibatches.epoch(elements, sizes):
        if update.batcher is not None:  # which may have run the networks
            step.note_user_code()
        outcome = step.train_on(minibatch, frames)
        statistics.add(outcome, minibatch, frames)
        _move_rate(update, statistics, after="minibatch")
        if outcome.decision is not None and outcome.decision.exceeded:
            return
        if step.pending.is_full:
            statistics.settle(step.settle())
            if step.stopped:
                return
    if step.stopper is not None or update.adaptive_kl is not None:
        statistics.settle(step.settle())  # which is otherwise done after the last epoch


def _move_rate(update: PPOUpdate, statistics: MinibatchStatistics, *, after: str) -> None:
    """Move the learning rate by the KL of the last minibatch, or of the epoch."""
    rate, is_last = update.adaptive_kl, after == "minibatch"
    if isinstance(rate, AdaptiveLearningRate) and (rate.when == after or update.accumulate_grads):
        counts = update.step.counts if is_last else not statistics.all_of_epoch_skipped
        kl, weight = statistics.kl_of_epoch(rate.kl_key, last=is_last)
        rate.update(kl, weight=weight * counts)


def _accumulate_epoch(
    update: PPOUpdate,
    elements: TensorDictBase,
    sizes: list[int],
    total: int,
    statistics: MinibatchStatistics,
) -> None:
    """Make one step with the gradients of all minibatches."""
    step, losses, error = update.step, None, None
    for minibatch, frames in update.minibatches.epoch(elements, sizes):
        losses, error = step.attempt(step.checked_losses, minibatch)
        if losses is None:
            break
        statistics.add_losses(losses, minibatch, frames)
        _, error = step.attempt(backward, step, losses, frames / total)
        if error is not None:
            break
    norm, decision = apply_gradients(step, elements, losses, total, error)[2:]
    assert decision is not None
    statistics.add_step(norm if decision.stepped else None)
