"""Whether an optimizer steps: decided by tensors, so that the host need not wait for a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Limits(NamedTuple):
    """The limits of a minibatch."""

    kl: Any  #: a number
    is_due: Any  #: bool, whether the stopper looks at the KL of this minibatch
    nonfinite: str | None  #: as of the training step


class Decision(NamedTuple):
    """The decision about a minibatch: bools and a number, or tensors ``[]``."""

    stepped: Any
    finite: Any  #: losses, gradients and KL; True if that is not checked
    exceeded: Any  #: the KL stopped the update before this step
    kl: Any  #: of the stopper
    counts: Any  #: whether statistics include the minibatch: not skipped, nor after a stop
    halts: Any  #: whether no later minibatch steps until the decisions are read

    @classmethod
    def of(cls, flags: Sequence[float]) -> Decision:
        """Return the decision that :meth:`flags` has written."""
        stepped, finite, exceeded, kl, counts, halts = flags
        return cls(bool(stepped), bool(finite), bool(exceeded), kl, bool(counts), bool(halts))

    def flags(self) -> Tensor:
        """Return the decision as one tensor, float64 ``[6]``."""
        return torch.stack([x.double() for x in self])


def decide(
    total: Any,
    square: Any,
    kls: Sequence[Any],
    limits: Limits,
    halted: Any,
    isfinite: Any = torch.isfinite,
) -> Decision:
    """Decide by the sum of the losses, the squared norm of the gradients and two KLs.

    The KLs are the stopper's, and the loss's ``"kl"``: a clipped loss is finite where the ratio is
    not. All are tensors ``[]``, or numbers with ``math.isfinite``; ``^ True`` negates both kinds of
    bools. A KL that is not finite stops the update. If the losses are not finite either, and that
    is checked, the step is skipped instead.
    """
    kl, kl_of_loss = kls
    exceeded = ((kl <= limits.kl) & isfinite(kl) ^ True) & limits.is_due
    finite = exceeded | (exceeded ^ True)
    if limits.nonfinite is not None:
        finite_total = isfinite(total)
        exceeded = exceeded & (isfinite(kl) | finite_total)
        # Adam would keep an infinite square forever.
        finite = finite_total & isfinite(kl_of_loss) & isfinite(square)
    stepped = finite & (exceeded ^ True) & (halted ^ True)
    halts = halted | exceeded
    if limits.nonfinite == "raise":
        halts = halts | (finite ^ True)
    return Decision(stepped, finite, exceeded, kl, (stepped | exceeded) > halted, halts)
