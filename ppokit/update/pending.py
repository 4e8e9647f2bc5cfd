"""Decisions that a device has made, and the host has not read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDictBase
from torch import Tensor

if TYPE_CHECKING:
    from ppokit.update.decisions import Outcome

# Each decision keeps its minibatch, for the error if that is not finite.
MOST_DECISIONS, MOST_BYTES = 1_000, 2**28  # in an update
MOST_CALLS = 32  # of a step in a loop of the user's


class Pending:
    """Minibatches with their flags (of ``flags_of``) and outcomes, in order."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget everything, at the start of a batch."""
        self._kept: list[tuple[TensorDictBase, Tensor, Outcome]] = []
        self._bytes, self._has_stepped = 0, False

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, minibatch: TensorDictBase, flags: Tensor, outcome: Outcome) -> None:
        """Add the decision of a step."""
        self._kept.append((minibatch, flags, outcome))
        self._bytes += sum(x.numel() * x.element_size() for x in minibatch.values(True, True))

    @property
    def is_full(self) -> bool:
        """Whether the minibatches need so much memory that the decisions must be read."""
        return len(self._kept) >= MOST_DECISIONS or self._bytes >= MOST_BYTES

    @property
    def has_stepped(self) -> bool:
        """Whether a step was made since :meth:`begin`; waits for the device."""
        table = self.table()
        return self._has_stepped or (table is not None and bool(table[:, 0].any()))

    @property
    def last_flags(self) -> Tensor:
        """The flags of the last step."""
        return self._kept[-1][1]

    def table(self) -> Tensor | None:
        """Return all flags ``[n, 6]`` on the device, or None."""
        return torch.stack([flags for _, flags, _ in self._kept]) if self._kept else None

    def take(self, table: Tensor) -> Iterator[tuple[TensorDictBase, list[float], Outcome]]:
        """Remove the decisions, and return them with the rows of a copy of :meth:`table`."""
        rows, kept = table.tolist(), self._kept
        self._kept, self._bytes = [], 0
        self._has_stepped |= any(row[0] for row in rows)
        triples = zip(kept, rows, strict=True)
        return ((minibatch, row, outcome) for (minibatch, _, outcome), row in triples)
