"""The eager form of a training step: losses, gradients, their norm and the decision."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from ppokit.distributed import gather_over_ranks, raise_for_ranks
from ppokit.trust_region.mean_kl import find_kl
from ppokit.update.decisions import (
    Decision,
    Kls,
    Outcome,
    conclude,
    decide,
    decides_on_host,
    flags_of,
    limits_of,
)
from ppokit.update.step_checks import loss_names

if TYPE_CHECKING:
    from ppokit.update.training_step import TrainingStep


def run_eagerly(step: TrainingStep, minibatch: TensorDictBase, frames: float | Tensor) -> Outcome:
    """Make one step on a minibatch of so many valid frames, without a graph."""
    losses, error = step.attempt(step.checked_losses, minibatch)
    if step.stopped:
        if error is not None:
            raise error
        if losses is not None:
            step.note_call_after_stop(losses)
        norm = torch.full((), math.nan, device=step.device)
        return Outcome(losses, None, norm, Decision(False, True, True))
    if losses is not None:
        _, error = step.attempt(backward, step, losses)
    return apply_gradients(step, minibatch, losses, frames, error)


def backward(step: TrainingStep, losses: TensorDictBase, weight: float = 1.0) -> None:
    """Add the gradients of the weighted sum of the losses to the gradients so far."""
    names = loss_names(step.loss, losses)
    total = losses[names[0]]
    for name in names[1:]:
        total = total + losses[name]
    stopper = step.stopper
    found = [losses.get(key, None) for key in ("kl" if stopper is None else stopper.kl_key, "kl")]
    if found[0] is None and stopper is not None and stopper.when == "minibatch":
        find_kl(losses, stopper.kl_key)  # which raises
    kls = [x if isinstance(x, Tensor) else torch.zeros_like(total) for x in found]
    numbers = [x.detach().mean() if x.ndim else x.detach() for x in (total, *kls)]
    if step.numbers is not None:
        numbers = [x + y for x, y in zip(step.numbers, numbers, strict=True)]
    step.numbers = numbers
    if weight != 1.0:
        total = total * weight
    if step.scaler is not None:
        total = step.scaler.scale(total)
    total.backward()


def apply_gradients(
    step: TrainingStep,
    minibatch: TensorDictBase,
    losses: TensorDictBase | None,
    frames: float | Tensor,
    error: Exception | None = None,
) -> Outcome:
    """Average, clip and apply the gradients of so many frames, unless the step is decided against.

    An error of this rank is raised on all of them.
    """
    parameters, largest = step.parameters_to_train, step.max_grad_norm
    numbers, step.numbers = step.numbers, None
    if step.ranks.count > 1:
        if error is not None or numbers is None:
            numbers = [torch.tensor(math.nan, device=step.device)] * 3
        numbers = [*step.ranks.average_gradients(parameters, float(frames), torch.stack(numbers))]
        if not math.isfinite(numbers[0].item()):
            failed = gather_over_ranks([error is not None], step.group)[:, 0]
            if failed.any():
                step.optimizer.zero_grad()
            raise_for_ranks(error, failed)
    assert numbers is not None, "backward() comes before apply_gradients()"
    if step.scaler is not None:
        step.scaler.unscale_(step.optimizer)
    gradients = [p.grad.flatten().to(step.device) for p in parameters if p.grad is not None]
    # Faster than torch.nn.utils.get_total_norm for the many small parameters of PPO's networks.
    norm = torch.linalg.vector_norm(torch.cat(gradients or [torch.zeros(0, device=step.device)]))
    values: Any = [*numbers, norm.square()]
    if decides_on_host(step):
        total, *kls, square = torch.stack([x.double() for x in values]).tolist()
        decision = decide(total, square, Kls(*kls), limits_of(step), False, math.isfinite)
        flags: Any = (*decision, kls[0], math.isfinite(total + kls[1]))
    else:
        total, *kls, square = values
        halted = step.halted[0] > 0
        decision = decide(total, square, Kls(*kls), limits_of(step), halted)
        flags = flags_of(decision, kls[0], halted, step.nonfinite)
    if largest is not None and not (isinstance(square, float) and square <= largest**2):
        clip_grads_with_norm_(parameters, largest, norm)
    if isinstance(decision.stepped, Tensor):
        norm = torch.where(decision.stepped, norm, math.nan)
    return conclude(step, minibatch, Outcome(losses, None, norm, None), flags, steps=True)
