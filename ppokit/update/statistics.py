"""Statistics of an update: means over minibatches, settings, and the episodes that ended."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit._keys import TRAJ_KEY, VERSION_KEY, get_if_any, key_parts, per_frame, valid_mask
from ppokit._state import check_names

Means = dict[str, tuple[float, float]]  # of each name, sum and weight; the mean is their quotient


def statistic_name(key: NestedKey) -> str:
    """Return the name of an entry of the losses among the statistics: ``"kl"``, ``"a/b"``."""
    return "/".join(key_parts(key))


class MinibatchStatistics:
    """Losses, diagnostics and gradient norms of the minibatches of one update, by name.

    Minibatches may differ in the entries that they have, in their order and in their shapes. Values
    stay on their device until :meth:`sums`.
    """

    def __init__(self) -> None:
        # Of each minibatch the names, and the values in one tensor: thousands of objects that live
        # for an update make Python's garbage collector look through all objects.
        self._rows: list[tuple[tuple[str, ...], Tensor]] = []
        self._frames: list[float] = []
        self._norms: list[Tensor] = []
        self._first_of_epoch = 0
        self.epochs = self.skipped = 0

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def steps(self) -> int:
        """Number of optimiser steps."""
        return len(self._norms)

    def begin_epoch(self) -> None:
        """Begin the epoch that :meth:`kl_of_epoch` is of."""
        self.epochs += 1
        self._first_of_epoch = len(self)

    @torch.no_grad()
    def add(self, losses: TensorDictBase, minibatch: TensorDictBase, frames: float) -> None:
        """Add what the loss returned for a minibatch of so many valid frames."""
        values = {
            statistic_name(key): _mean(value, minibatch)
            for key, value in losses.items(include_nested=True, leaves_only=True)
            if isinstance(value, Tensor)
        }
        row = torch.stack(_on_one_device(list(values.values()))) if values else torch.empty(0)
        self._rows.append((tuple(values), row))
        self._frames.append(frames)

    def add_step(self, norm: Tensor | None) -> None:
        """Add the norm of the gradients of an optimiser step, before clipping; None if skipped."""
        if norm is None:
            self.skipped += 1
        else:
            self._norms.append(norm)

    def kl_of_epoch(self, key: NestedKey, *, last: bool = False) -> tuple[Tensor, Tensor]:
        """Return KL and valid frames of this epoch's minibatches that have a KL, or of the last."""
        name, start = statistic_name(key), len(self) - 1 if last else self._first_of_epoch
        rows = zip(self._rows[start:], self._frames[start:], strict=True)
        found = [(row[names.index(name)], count) for (names, row), count in rows if name in names]
        if not found:
            written = list(dict.fromkeys(name for names, _ in self._rows for name in names))
            raise KeyError(f"The loss wrote no {key!r} in this epoch, but {written}.")
        kl = torch.stack([kl for kl, _ in found])
        return kl, torch.tensor([n for _, n in found], dtype=torch.float64, device=kl.device)

    def sums(self) -> Means:
        """Return the sum of each entry over the minibatches, weighed by frames, and the frames."""
        sums: defaultdict[str, Any] = defaultdict(float)
        counts: defaultdict[str, float] = defaultdict(float)
        for names in dict.fromkeys(names for names, _ in self._rows):
            at = [number for number, row in enumerate(self._rows) if row[0] == names]
            values = torch.stack([self._rows[number][1] for number in at]).double()
            frames = [self._frames[number] for number in at]
            for name, total in zip(names, values.new_tensor(frames) @ values, strict=True):
                sums[name] += total
                counts[name] += sum(frames)
        if self._norms:
            sums["grad_norm"] = torch.stack(self._norms).double().sum()
            counts["grad_norm"] = self.steps
        if not sums:
            return {}
        totals = torch.stack(_on_one_device(list(sums.values()))).tolist()
        return {name: (total, counts[name]) for name, total in zip(sums, totals, strict=True)}


def _first(batch: TensorDictBase, keys: Iterable[NestedKey]) -> Tensor | None:
    """Return the first of these entries that the batch has, or None."""
    found = (get_if_any(batch, key) for key in keys)
    return next((entry for entry in found if entry is not None), None)


def _mean(value: Tensor, minibatch: TensorDictBase) -> Tensor:
    """Return the mean of a value over valid frames; of whole numbers in float64."""
    if not value.is_floating_point():
        value = value.double()
    if value.numel() == 1:
        return value.reshape(()) if value.ndim else value
    mask = valid_mask(minibatch) if value.ndim >= minibatch.ndim else None
    if mask is not None and value.shape[: mask.ndim] == mask.shape:
        value = value[mask]
    return value.double().mean()


def _on_one_device(values: list[Tensor]) -> list[Tensor]:
    return [x if x.device == values[0].device else x.to(values[0].device) for x in values]


def settings_of(loss: Any, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return learning rates (``"lr"``, ``"lr/<group name>"``) and the loss's coefficients."""
    settings: dict[str, float] = {}
    for index, group in enumerate(optimizer.param_groups):
        name = group.get("name", index or None)
        settings["lr" if name is None else f"lr/{name}"] = float(group["lr"])
    for name in sorted(getattr(loss, "_all_schedulable_buffers", ())):
        coefficient = getattr(loss, name, None)
        if isinstance(coefficient, Tensor) and coefficient.numel() == 1:
            settings[name] = float(coefficient)
    return settings


def policy_lag(loss: Any, batch: TensorDictBase) -> Means:
    """Return by how many updates the frames of a batch are older than the policy, if they tell."""
    current, versions = _policy_version(loss), get_if_any(batch, VERSION_KEY)
    if current is None or versions is None:
        return {}
    mask = valid_mask(batch)
    versions = per_frame(versions, batch.ndim)
    versions = versions if mask is None else versions[mask]
    return {"policy_lag": (float((current - versions).sum()), float(versions.numel()))}


def count_update(loss: Any) -> None:
    """Add 1 to the version of the policy, if it has one."""
    version = _policy_version(loss)
    if version is not None:
        version.add_(1)


def _policy_version(loss: Any) -> Tensor | None:
    version = getattr(getattr(loss, "actor_network", None), VERSION_KEY, None)
    return version.detach() if isinstance(version, Tensor) else None


class EpisodeReturns:
    """Adds up rewards and steps over episodes that may go on from batch to batch.

    Row b of a batch continues row b of the batch before, as with collectors; where trajectory ids
    tell otherwise, or the number of rows changes, the earlier part of an episode is dropped.
    """

    def __init__(self, raw_key: NestedKey | None) -> None:
        self.raw_key = raw_key
        self._open: Tensor | None = None  # [rows, 2]: return and length so far
        self._ids: Tensor | None = None

    def __call__(self, batch: TensorDictBase, names: Any = None) -> Means:
        """Return sum and number of the returns and lengths of the episodes that end in the batch.

        Args:
            batch: ``[*B, T]``, or ``[T]`` for one row. Without reward or done, there are none.
            names: the ``tensor_keys`` of a module that reads rewards. The raw reward is used if
                there is one, and the environment's own end before that of a group of agents.
        """
        *group, name = key_parts(getattr(names, "reward", "reward"))
        rewards = [("next", *group, f"raw_{name}"), ("next", *group, name), ("next", "reward")]
        if self.raw_key is not None:
            rewards.insert(0, self.raw_key)
        ends = [("next", "done"), ("next", *key_parts(getattr(names, "done", "done")))]
        reward, done = (_first(batch, keys) for keys in (rewards, ends))
        if reward is None or done is None or batch.ndim == 0:
            return {}
        steps = batch.shape[-1]
        # Several agents or objectives count by their mean.
        reward = reward.double().reshape(*batch.batch_size, -1).mean(-1).reshape(-1, steps).cpu()
        done = per_frame(done, batch.ndim).reshape(-1, steps).cpu()
        mask = valid_mask(batch)
        valid = torch.ones_like(done) if mask is None else mask.reshape(-1, steps).cpu()
        ends = done & valid
        ended = ends.sum(1)  # episodes of each row that end in the batch
        # Which of its row's episodes a step belongs to. Padding may hold NaN.
        episode = (ends.cumsum(1) - ends.long()).unsqueeze(-1).expand(-1, -1, 2)
        each = torch.stack([reward, torch.ones_like(reward)], -1)
        each = each.masked_fill(~valid.unsqueeze(-1), 0.0)
        totals = each.new_zeros(len(each), int(ended.max()) + 1, 2).scatter_add(1, episode, each)
        totals[:, 0] += self._continued(batch, valid)
        self._open = totals[torch.arange(len(ended)), ended]
        totals = totals[torch.arange(totals.shape[1]) < ended.unsqueeze(1)]
        returns, lengths = totals.sum(0).tolist()
        episodes = float(len(totals))
        return {"episode_return": (returns, episodes), "episode_length": (lengths, episodes)}

    def _continued(self, batch: TensorDictBase, valid: Tensor) -> Tensor:
        """Return what each row's first episode has so far ``[rows, 2]``; note its last id."""
        rows, steps = valid.shape
        ids, last = get_if_any(batch, TRAJ_KEY), self._ids
        if ids is not None:
            ids = per_frame(ids, batch.ndim).reshape(rows, steps).cpu()
            last_valid = (valid * torch.arange(steps)).amax(1, keepdim=True)
            self._ids = ids.gather(1, last_valid).squeeze(1)
        if self._open is None or len(self._open) != rows:
            return torch.zeros(rows, 2, dtype=torch.float64)
        if ids is None or last is None or len(last) != rows:
            return self._open
        return torch.where((ids[:, 0] == last).unsqueeze(-1), self._open, 0.0)

    def state_dict(self) -> dict[str, Tensor | None]:
        """Return what was added up of the episodes that go on."""
        return {"open": self._open, "ids": self._ids}

    def load_state_dict(self, state: Mapping[str, Tensor | None]) -> None:
        """Load what :meth:`state_dict` returned."""
        check_names(state, ("open", "ids"), "the episodes of a PPOUpdate")
        for name, value in state.items():
            if not isinstance(value, Tensor | None):
                raise TypeError(f"{name!r} is of type {type(value).__name__}, and no tensor.")
        open_, ids = state["open"], state["ids"]
        rows = "any" if ids is None else len(ids)
        if open_ is not None and (open_.shape[1:] != (2,) or rows not in ("any", len(open_))):
            raise ValueError(
                f"'open' has shape {list(open_.shape)}; of {rows} rows, [rows, 2] is expected: "
                "return and length so far."
            )
        if open_ is not None and not open_[:, 1].isfinite().all():  # a return may be NaN
            raise ValueError(f"'open' holds lengths that are not finite: {open_[:, 1].tolist()}.")
        self._open, self._ids = open_, ids
