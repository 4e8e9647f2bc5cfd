"""Whether an optimizer steps: decided by tensors, so that the host need not wait for a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

# The outcome of a step keeps its minibatch until it is read, for the error if that is not finite.
MOST_DECISIONS, MOST_BYTES = 1_000, 2**28  # in an update
MOST_CALLS = 32  # of a step in a loop of the user's


Number = Any  # a tensor [] in a graph and on a device, otherwise a number
Flag = Any  # likewise, a bool


def not_(flag: Flag) -> Flag:
    """Negate a bool, or a tensor of one: ``not`` would read the tensor."""
    return flag ^ True


class Limits(NamedTuple):
    """The limits of a minibatch."""

    kl: Number
    is_due: Flag  #: whether the stopper looks at the KL of this minibatch
    nonfinite: str | None  #: as of the training step


class Decision(NamedTuple):
    """The decision about a minibatch: bools and a number, or tensors ``[]``."""

    stepped: Flag
    finite: Flag  #: losses, gradients and KL; True if that is not checked
    exceeded: Flag  #: the KL stopped the update before this step
    kl: Number  #: of the stopper
    counts: Flag  #: whether statistics include the minibatch: not skipped, nor after a stop
    halts: Flag  #: whether no later minibatch steps until the decisions are read

    @classmethod
    def of(cls, flags: Sequence[float]) -> Decision:
        """Return the decision that :meth:`flags` has written."""
        stepped, finite, exceeded, kl, counts, halts = flags
        return cls(bool(stepped), bool(finite), bool(exceeded), kl, bool(counts), bool(halts))

    def flags(self) -> Tensor:
        """Return the decision as one tensor, float64 ``[6]``."""
        return torch.stack([x.double() for x in self])


def decide(
    total: Number,
    square: Number,
    kls: Sequence[Number],
    limits: Limits,
    halted: Flag,
    isfinite: Callable[..., Any] = torch.isfinite,
) -> Decision:
    """Decide by the sum of the losses, the squared norm of the gradients and two KLs.

    The KLs are the stopper's, and the loss's ``"kl"``: a clipped loss is finite where the ratio is
    not. All are tensors ``[]``, or numbers with ``math.isfinite``. A KL that is not finite stops
    the update. If the losses are not finite either, and that is checked, the step is skipped
    instead.
    """
    kl, kl_of_loss = kls
    exceeded = not_((kl <= limits.kl) & isfinite(kl)) & limits.is_due
    finite = exceeded | not_(exceeded)
    if limits.nonfinite is not None:
        finite_total = isfinite(total)
        exceeded = exceeded & (isfinite(kl) | finite_total)
        # Adam would keep an infinite square forever.
        finite = finite_total & isfinite(kl_of_loss) & isfinite(square)
    stepped = finite & not_(exceeded) & not_(halted)
    halts = halted | exceeded
    if limits.nonfinite == "raise":
        halts = halts | not_(finite)
    counts = (stepped | exceeded) & not_(halted)
    return Decision(stepped, finite, exceeded, kl, counts, halts)


@dataclass(slots=True, eq=False)
class Outcome:
    """The result of a step."""

    losses: TensorDictBase | None  #: what the loss returned, or None: it is all in ``row``
    row: tuple[list[NestedKey], list[Any], Tensor] | None  #: keys; dimensions and dtypes; values
    norm: Tensor  #: of the gradients before clipping, NaN without a step
    decision: Decision | None = None  #: None: not read yet, or after a stop
    flags: Tensor | None = None  #: the decision on a device, until it is read

    def forget_losses(self) -> None:
        """Free the memory of the losses."""
        self.losses = self.row = None

    def as_tensordict(self, **more: Tensor) -> TensorDictBase:
        """Return what the loss returned, without gradient, and more entries."""
        if self.losses is not None:
            return TensorDict(dict(self.losses.detach().items()) | more, [])
        assert self.row is not None
        keys, kinds, row = self.row
        pairs = zip(row.unbind(), kinds, strict=True)
        values = [x if k is None else x.view([1] * k[0]).to(k[1]) for x, k in pairs]
        return TensorDict(dict(zip(keys, values, strict=True)) | more, [])


class Unread:
    """Outcomes with unread flags, and their minibatches, in order."""

    def __init__(self) -> None:
        self._kept: list[tuple[TensorDictBase, Outcome]] = []
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, minibatch: TensorDictBase, outcome: Outcome) -> None:
        """Add the outcome of a step."""
        self._kept.append((minibatch, outcome))
        self._bytes += sum(x.numel() * x.element_size() for x in minibatch.values(True, True))

    @property
    def is_full(self) -> bool:
        """Whether the minibatches need so much memory that the decisions must be read."""
        return len(self._kept) >= MOST_DECISIONS or self._bytes >= MOST_BYTES

    def read(self) -> Iterator[tuple[TensorDictBase, Outcome]]:
        """Remove the outcomes, and return them, up to a stop, with decisions: in one transfer."""
        kept = self._kept
        self.__init__()
        flags = [outcome.flags for _, outcome in kept]
        rows = torch.stack([x for x in flags if x is not None]).tolist() if kept else []
        for _, outcome in kept:
            outcome.flags = None
        for (minibatch, outcome), row in zip(kept, rows, strict=True):
            outcome.decision = Decision.of(row)
            yield minibatch, outcome
            if outcome.decision.exceeded:
                return
