"""Rewards and their discounted returns: entries, moments, and trajectories that go on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey, expand_as_right
from torch import Tensor

from ppokit._batch import (
    as_key,
    check_shapes,
    check_trajectories,
    get_if_any,
    get_tensor,
    key_parts,
    missing_entry,
    per_frame,
    time_dim,
    valid_mask,
)
from ppokit.distributed import gather_over_ranks, raise_together
from ppokit.functional import masked_mean, reversed_discounted_returns
from ppokit.functional._checks import check_bool, check_float

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Moments = tuple[float, float, float]  # count, mean, sum of squared deviations
OpenReturns = tuple[Tensor, Tensor]  # ids of trajectories [N], CLOSED for none, and their R [N, F]
CLOSED = -1  # the id where no trajectory continues
MAX_OTHERS = 1 << 16  # open trajectories that are not in the batch; the oldest are dropped

_FIX = "Environments and collectors write it; other names are given at construction."
_ENDS = (
    "A done flag has the shape of its reward, [*B, T, 1], or of several agents [*B, T, agents, 1]; "
    "a flag [*B, T, 1] holds for all agents of a frame. Name it with done_key=."
)


@dataclass(frozen=True)
class RewardKeys:
    """The entries of one reward.

    ``ends`` are the flags that end its trajectories, the nearest first: a flag of all agents, above
    the reward, ends the trajectory of each of them. ``end`` is the one that must be there; if
    ``needs_end`` is False, any of them will do.
    """

    reward: NestedKey
    raw: NestedKey
    ends: tuple[NestedKey, ...]
    end: NestedKey
    needs_end: bool

    @classmethod
    def of(cls, reward: NestedKey, raw: NestedKey | None, done: NestedKey | None) -> RewardKeys:
        """Return the keys of a reward; None stands for the name in torchrl's environments."""
        if isinstance(reward, list):
            raise TypeError(f"reward_key is {reward}: use a RewardNormalizer for each reward.")
        *node, name = key_parts(reward)
        raw = (*node, f"raw_{name}") if raw is None else raw
        *node, name = (*node, "done") if done is None else key_parts(done)
        depths = range(len(node), int(node[:1] == ["next"]) - 1, -1)
        ends = tuple(as_key((*node[:depth], name)) for depth in depths)
        end = ends[-1] if done is None else ends[0]
        return cls(as_key(reward), as_key(raw), ends, end, done is not None)

    def in_environment(self) -> RewardKeys:
        """Return the keys without the ``"next"`` that a batch has."""
        keys = (self.reward, self.raw, self.end, *self.ends)
        reward, raw, end, *ends = (as_key(k[1:]) if k[0] == "next" else k for k in keys)
        return RewardKeys(reward, raw, tuple(ends), end, self.needs_end)

    def read(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return the reward, and where its trajectories end, of the same shape."""
        reward = get_tensor(tensordict, self.reward, fix=_FIX)
        check_float(self.reward, reward)
        ended = None
        flags = {key: x for key in self.ends if (x := tensordict.get(key, None)) is not None}
        if self.end not in flags and (self.needs_end or not flags):
            raise missing_entry(tensordict, self.end, _FIX)
        for key, flag in flags.items():
            check_bool(key, flag)
            if flag.ndim > tensordict.ndim and flag.shape == (*reward.shape[: flag.ndim - 1], 1):
                flag = expand_as_right(flag.squeeze(-1), reward)
            check_shapes({self.reward: reward, key: flag}, fix=_ENDS)
            ended = flag if ended is None else ended | flag
        if reward.shape == tensordict.batch_size or reward.shape[-1] != 1:
            raise ValueError(
                f"{self.reward!r} has shape {list(reward.shape)} in a batch of shape "
                f"{list(tensordict.batch_size)}; the convention is [*B, T, 1] or [*B, T, agents, "
                "1]. Add the trailing dimension with .unsqueeze(-1); store each of several "
                "objectives under its own key, with a RewardNormalizer for each."
            )
        return reward, ended


class Measurement(NamedTuple):
    """The reward, the moments of its returns, and the open returns after the batch."""

    reward: Tensor
    moments: Moments
    open_returns: OpenReturns | None


def measure(
    batch: TensorDictBase,
    keys: RewardKeys,
    open_returns: OpenReturns,
    *,
    gamma: float,
    mask_key: NestedKey,
    traj_key: NestedKey | None,
    nonfinite: str,
) -> Measurement:
    """Return reward and return moments of a batch ``[*B, T]``, which continues open returns.

    Everything is computed on the host, from copies of rewards, flags and ids.
    """
    ndim, dim = batch.ndim, time_dim(batch, who="RewardNormalizer")
    given, done = keys.read(batch)
    given_mask = valid_mask(batch, mask_key)
    ids = None if traj_key is None else get_if_any(batch, traj_key)
    reward, mask = given.cpu(), None if given_mask is None else given_mask.cpu()
    # [*B, T, agents]
    agents, ended = (x.flatten(ndim).movedim(dim, -2) for x in (reward, done.cpu()))
    features = agents.shape[-1]
    valid = last = None
    if mask is not None:
        valid = mask.movedim(dim, -1)
        ended, last = ended & valid.unsqueeze(-1), last_steps(valid)
    initial, others = None, None
    if ids is not None and traj_key is not None:
        check_trajectories(batch, per_frame(done, ndim), dim, mask=given_mask, key=traj_key)
        ids = ids.cpu().movedim(dim, -1).long()
        first = ids.select(-1, 0) if valid is None else first_ids(ids, valid)
        initial, others = initial_returns(open_returns, first, features, key=traj_key)
    counted = countable(reward, mask, keys.reward, nonfinite)
    if counted is not None:
        counted = counted.flatten(ndim).movedim(dim, -2)
        agents = torch.where(counted, agents, 0)
    returns, _ = reversed_discounted_returns(agents.double(), ended, gamma=gamma, initial=initial)
    after = None
    if ids is not None and others is not None:
        goes_on = ~at_step(ended, last).all(-1)  # for any agent
        if valid is not None:
            goes_on &= valid.any(-1)
        last_ids = torch.where(goes_on, at_step(ids.unsqueeze(-1), last).squeeze(-1), CLOSED)
        carry = torch.where(at_step(ended, last), 0, at_step(returns, last))
        after = open_after(last_ids, carry, others)
    return Measurement(given, moments_of(returns, counted), after)


def measure_together(
    measure: Callable[[], Measurement], so_far: Tensor, ranks: ProcessGroup
) -> Measurement:
    """Return the result of ``measure``, with the moments of the batches of all ranks.

    If one rank raises, all do. The statistics ``so_far`` must be the same on all of them: only the
    moments of this batch are merged, so that no return is counted twice.
    """
    measurement = raise_together(measure, ranks)
    table = gather_over_ranks([*so_far.tolist()[:3], *measurement.moments], ranks)
    before, added = table.split(3, 1)
    if not torch.equal(before, before[:1].expand_as(before)):
        raise RuntimeError(
            "The ranks' statistics differ before this batch (count, mean and m2 are "
            f"{before.tolist()}): each would scale by its own. Load one state on all ranks, "
            "and call the normalizer on all of them or, to evaluate on one, a frozen clone()."
        )
    # Merged in the order of the ranks: bitwise equal on each of them.
    return measurement._replace(moments=reduce(merged, added.tolist()))


def countable(reward: Tensor, mask: Tensor | None, key: NestedKey, nonfinite: str) -> Tensor | None:
    """Return which rewards count, valid and finite ones, or None if all do."""
    if mask is None and math.isfinite(reward.sum().item()):  # faster than isfinite()
        return None
    every = torch.ones_like(reward, dtype=torch.bool)
    valid = every if mask is None else expand_as_right(mask, reward)
    bad = valid & ~reward.isfinite()
    if nonfinite == "raise" and bad.any():
        raise ValueError(
            f"{int(bad.sum())} of {int(valid.sum())} rewards at {key!r} are not finite, the first "
            f"at {bad.nonzero()[0].tolist()}: the statistics would not be finite from then on. Fix "
            "the environment, or pass nonfinite='ignore' to leave these rewards out."
        )
    return valid & ~bad


def moments_of(returns: Tensor, counted: Tensor | None) -> Moments:
    """Return the moments of the returns, or of those where ``counted`` is True."""
    number = returns.numel() if counted is None else int(counted.sum())
    if not number:
        return 0.0, 0.0, 0.0
    average = masked_mean(returns, counted)
    deviation = returns - average
    if counted is not None:
        deviation = torch.where(counted, deviation, 0)
    return float(number), average.item(), torch.linalg.vector_norm(deviation).item() ** 2


def merged(a: Moments, b: Moments) -> Moments:
    """Merge moments as :func:`ppokit.functional.merge_moments` does; numbers are faster."""
    (count_a, mean_a, m2_a), (count_b, mean_b, m2_b) = a, b
    count, delta = count_a + count_b, mean_b - mean_a
    share_b = count_b / max(count, 1)
    return count, mean_a + delta * share_b, m2_a + m2_b + delta**2 * count_a * share_b


def first_ids(ids: Tensor, valid: Tensor) -> Tensor:
    """Return the ids of the first valid step of each row ``[*B]``, CLOSED where there is none."""
    first = valid.byte().argmax(-1, keepdim=True)
    return torch.where(valid.any(-1), ids.gather(-1, first).squeeze(-1), CLOSED)


def last_steps(valid: Tensor) -> Tensor:
    """Return the last valid step of each row ``[*B, 1]`` of a mask ``[*B, T]``."""
    steps = torch.arange(valid.shape[-1], device=valid.device)
    return torch.where(valid, steps, 0).amax(-1, keepdim=True)


def at_step(x: Tensor, step: Tensor | None) -> Tensor:
    """Return one step of each row of ``[*B, T, F]``, ``step`` being ``[*B, 1]``, or the last."""
    return x[..., -1, :] if step is None else x.take_along_dim(step.unsqueeze(-1), -2).squeeze(-2)


def initial_returns(
    open_returns: OpenReturns, first: Tensor, features: int, *, key: NestedKey
) -> tuple[Tensor, OpenReturns]:
    """Return R with which each row starts, 0 for a new trajectory, and the other open returns.

    ``first`` are the ids of each row's first valid step ``[*B]``, CLOSED for rows without one.
    """
    known, returns = open_returns
    if known.numel() and returns.shape[-1] != features:
        raise ValueError(
            f"The batch has {features} rewards a frame, but the trajectories that were left open "
            f"have {returns.shape[-1]}: these are other environments. Use a normalizer for each, "
            "or call reset_returns() in between."
        )
    shape, first = first.shape, first.flatten()
    if first.shape == known.shape and known.numel():  # rows in the order of the batch before
        goes_on = first == known
        begun, ended = first[~goes_on].sort().values, known[~goes_on] == CLOSED
        place = torch.searchsorted(begun, known).clamp_(max=max(len(begun) - 1, 0))
        repeats = (len(begun) and (begun[place] == known).any()) or (begun[1:] == begun[:-1]).any()
        if ended.all() and not repeats:
            initial = torch.where(goes_on.unsqueeze(-1), returns, 0)
            return initial.view(*shape, features), (known[:0], returns[:0])
    distinct, numbers = torch.cat([first, known]).unique(return_inverse=True)
    of_first, of_known = numbers.split([len(first), len(known)])
    starting = of_first.bincount(minlength=len(distinct))  # how many rows start with each id
    if starting[distinct != CLOSED].gt(1).any():
        raise ValueError(
            f"{key!r} has rows that start with the same trajectory, so the rows' order in time is "
            "unknown. Normalize before the batch is cut into sequences; for collectors whose "
            "workers repeat ids (RayCollector), pass traj_key=None."
        )
    # If an id occurs twice, as after a collector began again, that of the rows comes first.
    positions = torch.arange(len(known), device=known.device)
    place = torch.full_like(distinct, len(known)).scatter_reduce(0, of_known, positions, "amin")
    returns = torch.cat([returns.view(-1, features), returns.new_zeros(1, features)])
    initial = returns[place[of_first]].view(*shape, features)
    others = (starting[of_known] == 0) & (known != CLOSED)
    return initial, (known[others], returns[:-1][others])


def open_after(last_ids: Tensor, carry: Tensor, others: OpenReturns) -> OpenReturns:
    """Return the open returns after a batch: its rows' in order, then others."""
    other_ids, other_returns = others
    # Collectors that reset at each iteration leave trajectories behind that never come back.
    if other_ids.numel() > MAX_OTHERS:
        latest = other_ids.argsort()[-MAX_OTHERS:]
        other_ids, other_returns = other_ids[latest], other_returns[latest]
    returns = carry.reshape(-1, carry.shape[-1])
    return torch.cat([last_ids.flatten(), other_ids]), torch.cat([returns, other_returns])
