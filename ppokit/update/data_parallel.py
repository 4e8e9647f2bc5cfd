"""One update on several ranks: equal numbers of minibatches, and averaged gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ppokit.distributed import gather_over_ranks, raise_together, resolve_group, sum_over_ranks
from ppokit.update.optimizers import set_gradients

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Outline(NamedTuple):
    """The frames and minibatches of a rank in an epoch."""

    frames: int  #: that are valid
    elements: int  #: frames, or sequences of them
    minibatches: int


class DataParallel:
    """The ranks that train the same parameters, each on data of its own; or one process alone."""

    def __init__(self, group: ProcessGroup | None) -> None:
        resolve_group(group)
        self.group = group
        self._compared = 0  # how many parameters were the same on all ranks

    @property
    def count(self) -> int:
        """The number of ranks."""
        ranks = resolve_group(self.group)
        return 1 if ranks is None else ranks.size()

    def agree(
        self, parameters: Sequence[Tensor], outline: Callable[[], Outline]
    ) -> tuple[Outline, int, int]:
        """Return this rank's outline, the frames of all, and how many minibatches each makes.

        If one rank raises, all do, and none waits for another.
        """
        if self.count == 1:
            own = outline()
            return own, own.frames, own.minibatches
        own = raise_together(outline, self.group)
        is_new = self._compared != len(parameters)
        values = [*own, is_new, len(parameters), *_fingerprint(parameters)]
        table = gather_over_ranks(values, self.group)
        (frames, elements, minibatches, new), same = table[:, :4].T, table[:, 4:]
        if new.any() and not torch.allclose(same, same[:1], rtol=1e-12, equal_nan=True):
            raise RuntimeError(
                "The ranks start from different parameters. Seed all ranks alike before the "
                "networks are made, or load one state."
            )
        self._compared = len(parameters)
        fewest, most = int(elements.min()), int(minibatches.max())
        if fewest < most and torch.equal(elements, frames):
            raise ValueError(
                f"One rank has {most} minibatches, and another only {fewest} frames. Collect "
                "about as many frames on each rank."
            )
        return own, int(frames.sum()), min(fewest, most)  # a rank may have few sequences

    def average_gradients(
        self, parameters: Sequence[Tensor], weight: float, numbers: Tensor
    ) -> Tensor:
        """Average the gradients over ranks by frames, and return the means of numbers ``[3]``.

        The numbers are the sum of the losses, of which one may be not finite, and two KLs.
        """
        there = [p.grad is not None for p in parameters]
        # Half precision cannot tell 256 frames from 257.
        parts = [
            (torch.zeros_like(p) if p.grad is None else p.grad)
            .flatten()
            .to(torch.promote_types(p.dtype, torch.float32))
            * weight
            for p in parameters
        ]
        numbers = numbers * weight
        if not weight:  # the KL of no frames is often NaN
            numbers[1:] = 0
        counts = parts[0].new_tensor([weight, *map(float, there)])
        total = sum_over_ranks(torch.cat([*parts, numbers.to(counts), counts]), self.group)
        sizes = [len(part) for part in parts]
        frames = total[-len(counts)]
        total = total / torch.where(frames == 0, 1, frames)  # no rank has a valid frame
        *means, numbers, counts = total.split([*sizes, 3, len(counts)])
        if not all(there):  # another rank may have a gradient there
            there = (counts[1:] > 0).tolist()
        found = [(p, mean) for p, mean, here in zip(parameters, means, there, strict=True) if here]
        set_gradients([p for p, _ in found], [mean.to(p.dtype) for p, mean in found])
        return numbers


@torch.no_grad()
def _fingerprint(parameters: Sequence[Tensor]) -> list[float]:
    """Return a few numbers that differ where parameters do, also by their order alone."""
    sums = torch.zeros(3, dtype=torch.float64)
    for number, p in enumerate(parameters, 1):
        flat = p.double().flatten()
        places = torch.linspace(1, 2, len(flat), dtype=flat.dtype, device=flat.device)
        sums += torch.stack([flat.sum(), flat.norm(), number * (flat @ places)]).cpu()
    return sums.tolist()


def sizes_of_minibatches(elements: int, count: int, size: int) -> list[int]:
    """Return the sizes of so many minibatches: all of this size, but for a smaller last one.

    Where that is another number of minibatches, as if other ranks have more, the sizes are nearly
    the same: 10 elements and a size of 4 give [4, 4, 2] for 3 minibatches, and [3, 3, 2, 2] for 4.
    """
    if count == -(-elements // size):
        return [size] * (count - 1) + [elements - size * (count - 1)]
    least, more = divmod(elements, count)
    return [least + 1] * more + [least] * (count - more)
