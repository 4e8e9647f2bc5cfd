"""The eager form of a training step: losses, KL stop, gradients, clipping and optimizer."""

from __future__ import annotations

import math
from functools import reduce
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ppokit.trust_region.mean_kl import find_kl
from ppokit.update.decisions import (
    Decision,
    Kls,
    Outcome,
    decide,
    host_reads_are_free,
    limits_of,
    postpone,
    step_where,
)
from ppokit.update.step_checks import loss_names

if TYPE_CHECKING:
    from ppokit.update.training_step import TrainingStep


def run_eagerly(step: TrainingStep, minibatch: TensorDictBase, frames: float | Tensor) -> Outcome:
    """Make one step on a minibatch of so many valid frames, without a graph."""
    losses, error = step.attempt(step.checked_losses, minibatch)
    is_free = host_reads_are_free(step.device) or step.ranks.count > 1 or step.scaler
    if not (is_free or step.stopped):
        assert losses is not None
        return _step_on_device(step, minibatch, losses)
    if _exceeds(step, losses, frames):
        return Outcome(losses, None, _no_norm(step), Decision(False, True, True))
    frames = float(frames)
    if losses is not None:
        _, error = step.attempt(backward, step, losses)
    norm = apply_gradients(step, frames, error)
    if norm is None:
        return Outcome(losses, None, _no_norm(step), Decision(False, False, False))
    return Outcome(losses, None, norm, Decision(True, True, False))


def _no_norm(step: TrainingStep) -> Tensor:
    return step.parameters_to_train[0].detach().new_full((), math.nan)


def _exceeds(step: TrainingStep, losses: TensorDictBase | None, frames: float | Tensor) -> bool:
    """Return whether the stopper stops before this step, on any rank."""
    stopper = step.stopper
    if stopper is None or stopper.when != "minibatch":
        return stopper is not None and stopper.stopped
    kl, weight = torch.tensor(-1e30), 1.0  # all ranks skip this step, or raise: none stops
    if losses is not None:
        found = find_kl(losses, stopper.kl_key).detach().double().mean()
        finite = math.isfinite(found.item())
        if finite or not step.checks_finite or math.isfinite(_sum(step, losses).item()):
            kl, weight = found, frames
    return stopper.update(kl, weight=weight if step.ranks.count > 1 else None)


def _sum(step: TrainingStep, losses: TensorDictBase) -> Tensor:
    return reduce(torch.add, (losses[name] for name in loss_names(step.loss, losses)))


def backward(step: TrainingStep, losses: TensorDictBase, weight: float = 1.0) -> None:
    """Add the gradients of the weighted sum of the losses to the gradients so far."""
    total = _sum(step, losses)
    value = total.detach()
    if step.checks_finite and isinstance(kl := losses.get("kl", None), Tensor):
        # A clipped loss is finite where the ratio is not.
        value = torch.add(value, kl.detach() if kl.ndim == 0 else kl.detach().sum(), alpha=0)
    step.total = value if step.total is None else step.total + value
    if weight != 1.0:
        total = total * weight
    if step.scaler is not None:
        total = step.scaler.scale(total)
    total.backward()


def apply_gradients(
    step: TrainingStep, frames: float, error: Exception | None = None
) -> Tensor | None:
    """Step with the gradients of so many frames, drop them, and return their norm.

    Where losses or gradients are not finite, and that is checked, there is no step and no norm.
    An error of this rank is raised on all of them.
    """
    parameters, total = step.parameters_to_train, step.total
    if error is not None:
        total = torch.tensor(math.nan, device=step.device)
    assert total is not None, "backward() comes before apply_gradients()"
    step.total = None
    total = step.ranks.average_gradients(parameters, frames, total)
    if step.scaler is not None:
        step.scaler.unscale_(step.optimizer)
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=None)
    largest = step.max_grad_norm
    # On a device, a number on the host waits for it.
    length = norm.item() if norm.is_cpu or step.checks_finite else math.nan
    if length * length > torch.finfo(norm.dtype).max:
        length = math.inf  # Adam would keep an infinite square for ever
    loss = total.item() if total.is_cpu or step.checks_finite else 0.0
    if step.checks_finite:
        length += 0 * loss
    if not math.isfinite(loss) and step.ranks.count > 1:
        step.ranks.raise_together(error)
    elif error is not None:
        raise error
    if step.checks_finite and not math.isfinite(length):
        if step.scaler is not None:
            step.scaler.update()
        step.optimizer.zero_grad()
        return None
    if largest is not None and not length <= largest:
        clip_grads_with_norm_(parameters, largest, norm)
    if step.graphs is not None:
        step.graphs.note_trained(parameters)
    if step.scaler is None:
        step.optimizer.step()
    else:
        step.scaler.step(step.optimizer)
        step.scaler.update()
    step.optimizer.zero_grad()
    return norm


def _step_on_device(
    step: TrainingStep, minibatch: TensorDictBase, losses: TensorDictBase
) -> Outcome:
    """Step, or not, without a number on the host."""
    parameters, total = step.parameters_to_train, _sum(step, losses)
    total.backward()
    if step.graphs is not None:
        step.graphs.note_trained(parameters)
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=None)
    if step.max_grad_norm is not None:
        clip_grads_with_norm_(parameters, step.max_grad_norm, norm)
    stopper, total = step.stopper, total.detach()
    limits = limits_of(stopper, checks_finite=step.checks_finite)
    found = [losses.get(key, None) for key in (stopper.kl_key if stopper else "kl", "kl")]
    kls = Kls(*(torch.zeros_like(total) if x is None else x.detach().mean() for x in found))
    decision = decide(total, norm, kls, limits, step.halted)
    step_where(decision.stepped, step.optimizer)
    step.optimizer.zero_grad()
    if stopper is not None and stopper.when == "minibatch":
        stopper.count()
    return postpone(step, minibatch, Outcome(losses, None, norm, None), decision, kls.of_stopper)
