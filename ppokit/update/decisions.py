"""Whether an optimizer steps: decided by tensors, so that the host need not wait for a device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit.functional import _checks

if TYPE_CHECKING:
    from ppokit.update.training_step import TrainingStep


class Limits(NamedTuple):
    """The limits of a minibatch."""

    kl: Any  #: a number
    is_due: Any  #: bool, whether the KL is looked at
    checks_finite: bool


class Kls(NamedTuple):
    """The KLs of a minibatch ``[]``; 0 where the loss returns none."""

    of_stopper: Tensor  #: under the stopper's key
    of_loss: Tensor  #: ``"kl"``; a clipped loss is finite where the ratio is not


class Decision(NamedTuple):
    """The decision about a minibatch: three bools, or bool tensors ``[]``."""

    stepped: Any
    finite: Any  #: losses, gradients and KL; True if that is not checked
    exceeded: Any  #: the KL stopped the update before this step


class Outcome(NamedTuple):
    """The result of a step, for :class:`~ppokit.PPOUpdate`."""

    losses: TensorDictBase | None  #: what the loss returned, or None: it is all in ``row``
    row: tuple[list[NestedKey], list[Any], Tensor] | None  #: keys; dimensions and dtypes; values
    norm: Tensor  #: of the gradients before clipping, NaN without a step
    decision: Decision | None  #: None: known after :meth:`TrainingStep.settle`

    def as_tensordict(self, **more: Tensor) -> TensorDictBase:
        """Return what the loss returned, without gradient, and more entries."""
        if self.losses is not None:
            return TensorDict(dict(self.losses.detach().items()) | more, [])
        assert self.row is not None
        keys, kinds, row = self.row
        pairs = zip(row.unbind(), kinds, strict=True)
        values = [x if k is None else x.view([1] * k[0]).to(k[1]) for x, k in pairs]
        return TensorDict(dict(zip(keys, values, strict=True)) | more, [])


def limits_of(step: TrainingStep) -> Limits:
    """Return the limits of the next minibatch."""
    stopper, checks_finite = step.stopper, step.nonfinite is not None
    if stopper is None or stopper.when != "minibatch":
        return Limits(math.inf, False, checks_finite)
    return Limits(stopper.tolerance * stopper.target_kl, stopper.is_due, checks_finite)


def decide(
    total: Any, square: Any, kls: Kls, limits: Limits, halted: Any, isfinite: Any = torch.isfinite
) -> Decision:
    """Decide by the sum of the losses, the squared norm of the gradients and the KLs.

    They are tensors ``[]``, or numbers with ``math.isfinite``; ``^ True`` negates both kinds of
    bools. A KL that is not finite stops the update. If the losses are not finite either, and that
    is checked, the step is skipped instead.
    """
    kl = kls.of_stopper
    exceeded = ((kl <= limits.kl) & isfinite(kl) ^ True) & limits.is_due
    finite = exceeded | (exceeded ^ True)
    if limits.checks_finite:
        finite_total = isfinite(total)
        exceeded = exceeded & (isfinite(kl) | finite_total)
        # Adam would keep an infinite square forever.
        finite = finite_total & isfinite(kls.of_loss) & isfinite(square)
    return Decision(finite & (exceeded ^ True) & (halted ^ True), finite, exceeded)


def decides_on_host(step: TrainingStep) -> bool:
    """Return whether the decision is read at once: on the CPU, and with several ranks."""
    return _checks.reads_are_free(step.device) or step.needs_gradients


def flags_of(decision: Decision, kl: Tensor, halted: Tensor, nonfinite: str | None) -> Tensor:
    """Return what follows from a decision on a device, float64 ``[6]``.

    These are the decision; the stopper's KL; whether the minibatch counts: it was not skipped, nor
    came after a stop; and whether nothing steps from here on.
    """
    stepped, finite, exceeded = decision
    counts, halts = (stepped | exceeded) > halted, halted | exceeded
    if nonfinite == "raise":
        halts = halts | ~finite
    return torch.stack([x.double() for x in (*decision, kl, counts, halts)])


def conclude(
    step: TrainingStep, minibatch: TensorDictBase, outcome: Outcome, flags: Any, *, steps: bool
) -> Outcome:
    """Act on a decision: step the optimizer, drop the gradients, stop the update, or raise.

    ``flags`` come from :func:`flags_of`, or are decision and KL as numbers, and whether the losses
    are finite. ``steps`` is False if a graph has made the optimizer's step. On a device the norm is
    NaN already without a step.
    """
    optimizer, stopper, scaler = step.optimizer, step.stopper, step.scaler
    if stopper is not None and stopper.when == "minibatch":
        stopper.count()
    if not decides_on_host(step):
        if steps:
            step_where(flags[0].bool(), optimizer)
            optimizer.zero_grad()
            step.note_optimizer_step()
        step.counts, step.halted = flags[4], flags[5:]
        if outcome.losses is not None:
            outcome = outcome._replace(losses=outcome.losses.detach())
        step.pending.add(minibatch, flags, outcome)
        return outcome
    flags = flags.tolist() if isinstance(flags, Tensor) else flags
    decision, kl = Decision(*map(bool, flags[:3])), flags[3]
    # Only the gradients, by the scale: with a scale of 1 the gradients themselves are not finite.
    overflows = scaler is not None and flags[4] and scaler.get_scale() > 1
    step.counts = decision.stepped or decision.exceeded
    if steps:
        if decision.stepped:
            optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update(None if overflows else scaler.get_scale())
        optimizer.zero_grad()
        step.note_optimizer_step()
    if decision.exceeded and stopper is not None:
        stopper.stop(kl)
        decision = decision._replace(finite=True)
    if not (decision.finite or overflows):
        step.keep_nonfinite(minibatch, outcome.as_tensordict())
    norm = outcome.norm if decision.stepped else torch.full_like(outcome.norm, math.nan)
    return outcome._replace(norm=norm, decision=decision)


@torch.no_grad()
def step_where(stepped: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Step an optimizer where a tensor is True; else parameters and state stay as they are.

    A fused optimizer skips the step by itself. For others, parameters and state are copied first;
    if they count steps on the host (Adam without ``fused`` or ``capturable``), it waits once. The
    first step of a parameter waits, too: only the optimizer knows how its state begins.
    """
    parts: Any = optimizer
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [
        {name: x for name, x in optimizer.state.get(p, {}).items() if isinstance(x, Tensor)}
        for p in parameters
    ]
    has_state = [bool(x) for p, x in zip(parameters, states, strict=True) if p.grad is not None]
    if all(has_state) and all(group.get("fused") for group in optimizer.param_groups):
        parts.grad_scale, parts.found_inf = None, (~stepped).to(torch.float32)
        try:
            optimizer.step()
        finally:
            del parts.grad_scale, parts.found_inf
        return
    before = [p.detach().clone() for p in parameters]
    states = [{name: x.clone() for name, x in state.items()} for state in states]
    optimizer.step()
    flags = {stepped.device: stepped}
    is_skipped: bool | None = None  # read if a state is new
    for parameter, old, state in zip(parameters, before, states, strict=True):
        parameter.copy_(torch.where(stepped, parameter, old))
        for name, x in [*optimizer.state.get(parameter, {}).items()]:
            if not isinstance(x, Tensor) or (stepped.is_meta and not x.is_meta):
                continue
            if name not in state and is_skipped is None and not stepped.is_meta:
                is_skipped = not stepped.item()
            if name not in state and is_skipped:
                if state:
                    del optimizer.state[parameter][name]
                else:
                    optimizer.state.pop(parameter, None)
                continue
            if x.device not in flags:
                flags[x.device] = stepped.to(x.device)
            x.copy_(torch.where(flags[x.device], x, state.get(name, x)))
