"""The few collective operations that blocks need.

A block keeps ``group=`` as it was given and resolves it in each call, so it may be built before
``torch.distributed`` is initialized. A process group can be neither copied nor pickled, so neither
can a block that was given one; with ``group=None`` it can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


Result = TypeVar("Result")
_alone = ContextVar("_alone", default=False)


@contextmanager
def alone() -> Iterator[None]:
    """Disable collectives within this context, in this thread."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def resolve_group(group: ProcessGroup | None) -> ProcessGroup | None:
    """Return the group to communicate over, or None if there is no other rank.

    None means the default group if ``torch.distributed`` is initialized.

    Raises:
        TypeError: ``group`` is no group that this process belongs to.
    """
    if group is None:
        there = dist.is_available() and dist.is_initialized() and not _alone.get()
        return dist.group.WORLD if there else None
    if not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise TypeError(
            f"group must be a ProcessGroup that this process belongs to, got {group!r} (-100 is "
            "what torch.distributed.new_group() returns to processes outside the group): this "
            "process would decide alone, or the others would wait for it."
        )
    return None if _alone.get() else group


def sum_over_ranks(values: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return the sum over the ranks of ``values`` of one shape and dtype, bitwise equal on each."""
    ranks = resolve_group(group)
    if ranks is None:
        return values
    # NCCL does not serve CPU tensors.
    served = values.device.type in _served_devices(ranks)
    total = values.to(values.device if served else meeting_device(ranks), copy=True)
    dist.all_reduce(total, group=ranks)
    return total.to(values.device)


def raise_together(function: Callable[[], Result], group: ProcessGroup | None = None) -> Result:
    """Return the result of a function without collectives, or raise on all ranks if one does."""
    ranks, result, error = resolve_group(group), None, None
    if ranks is None:
        return function()
    try:
        result = function()
    except Exception as raised:
        error = raised
    raise_for_ranks(error, gather_over_ranks([error is not None], ranks)[:, 0])
    return cast("Result", result)


def raise_for_ranks(error: Exception | None, failed: Tensor) -> None:
    """Raise this rank's error, or a RuntimeError that names the ranks ``[ranks]`` with one."""
    if error is not None:
        raise error
    if failed.any():
        raise RuntimeError(
            f"Rank {', '.join(map(str, failed.nonzero().flatten().tolist()))} cannot use its batch "
            "(its own error says why), so all ranks stop here."
        )


def gather_over_ranks(values: Sequence[object], group: ProcessGroup | None = None) -> Tensor:
    """Return the numbers (or lists of them) of each rank, ``[ranks, ...]`` in float64, on all."""
    own, ranks = torch.tensor(values, dtype=torch.float64), resolve_group(group)
    if ranks is None:
        return own.unsqueeze(0)
    table = own.new_zeros(ranks.size(), *own.shape)
    table[ranks.rank()] = own
    return sum_over_ranks(table, ranks)


def add_over_ranks(
    sums: Mapping[str, Sequence[float]], group: ProcessGroup | None = None
) -> dict[str, list[float]]:
    """Return the sum over the ranks of a few numbers of each name; ranks may have other names."""
    ranks, each = resolve_group(group), [dict(sums)]
    if ranks is not None:
        each = each * ranks.size()
        dist.all_gather_object(each, dict(sums), group=ranks)
    names = dict.fromkeys(name for of_rank in each for name in of_rank)
    rows = {name: [of_rank[name] for of_rank in each if name in of_rank] for name in names}
    return {name: [sum(column) for column in zip(*row, strict=True)] for name, row in rows.items()}


def meeting_device(group: ProcessGroup) -> torch.device:
    """Return a device that the group serves, the same wherever a rank's tensors are.

    With ``"cpu:gloo,cuda:nccl"``, ranks that sum on different devices wait without end.
    """
    served = _served_devices(group)
    return torch.device("cpu" if "cpu" in served else served[0])


def _served_devices(group: ProcessGroup) -> list[str]:
    # such as "cpu:gloo,cuda:nccl"
    return [pair.split(":")[0] for pair in dist.get_backend_config(group).split(",")]


def standardized(
    advantage: Tensor, mask: Tensor | None, dims: tuple[int, ...], group: ProcessGroup | None
) -> Tensor:
    """Return the advantage less its mean, over its unbiased standard deviation, over ``dims``.

    Both are over the valid frames of all ranks (``group`` None: this rank alone), in two rounds, so
    that a large mean does not cancel the deviations. One frame stays as it is, as in torchrl.
    """

    def over_ranks(x: Tensor) -> Tensor:
        return x if group is None else sum_over_ranks(x, group)

    frames = advantage.double()
    valid = torch.ones_like(frames) if mask is None else mask.double()
    frames = frames if mask is None else torch.where(mask, frames, 0)
    sums = [x.sum(dims, keepdim=True) for x in (frames, valid)]
    total, count = over_ranks(torch.stack(sums))
    mean = total / count
    squares = over_ranks((valid * (frames - mean).square()).sum(dims, keepdim=True))
    # torchrl's floor, so that padding a batch changes nothing
    std = (squares / (count - 1)).sqrt().clamp_min(torch.finfo(torch.float).resolution)
    is_single = count <= 1
    mean, std = torch.where(is_single, 0, mean), torch.where(is_single, 1, std)
    return (advantage - mean.to(advantage.dtype)) / std.to(advantage.dtype)
