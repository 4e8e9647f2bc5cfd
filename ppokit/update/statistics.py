"""Statistics of an update: means over minibatches, settings, and the episodes that ended."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit._keys import VERSION_KEY, get_if_any, key_parts, per_frame, valid_mask
from ppokit.functional import _checks

if TYPE_CHECKING:
    from ppokit.update.decisions import Decision, Outcome
    from ppokit.update.ppo_update import PPOUpdate
    from ppokit.update.training_step import TrainingStep

Means = dict[str, tuple[float, float]]  # of each name, sum and weight; the mean is their quotient


def statistic_name(key: NestedKey) -> str:
    """Return the name of an entry of the losses among the statistics: ``"kl"``, ``"a/b"``."""
    return key if type(key) is str else "/".join(key_parts(key))


class MinibatchStatistics:
    """Losses, diagnostics and gradient norms of the minibatches of one update, by name.

    Minibatches may differ in the entries that they have, in their order and in their shapes. Values
    stay on their device until :meth:`sums`.
    """

    def __init__(self, mask_key: NestedKey | None) -> None:
        self._mask_key = mask_key
        # Names and values of each minibatch, the values in one tensor: thousands of objects that
        # live for an update make Python's garbage collector look through all objects.
        self._rows: list[tuple[tuple[str, ...], Tensor]] = []
        self._frames: list[float] = []
        self._norms: list[Tensor] = []
        self._unsettled: list[Tensor] = []  # norms of steps that a device decides on
        self._keys: Any = None
        self._names: tuple[str, ...] = ()
        self._first_of_epoch = self._first_of_step = 0
        self.epochs = self.skipped = 0

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def steps(self) -> int:
        """Number of optimizer steps."""
        return len(self._norms)

    def begin_epoch(self) -> None:
        """Begin the epoch that :meth:`kl_of_epoch` is of."""
        self.epochs += 1
        self._first_of_epoch = len(self)

    def add(self, outcome: Outcome, minibatch: TensorDictBase, frames: float) -> None:
        """Add what a step returned for a minibatch of so many valid frames."""
        if outcome.losses is not None:
            self.add_losses(outcome.losses, minibatch, frames)
        elif outcome.row is not None:
            keys, _, row = outcome.row
            if keys != self._keys:
                self._keys, self._names = keys, tuple(map(statistic_name, keys))
            self._rows.append((self._names, row))
            self._frames.append(frames)
        decision = outcome.decision
        if decision is None:
            self._unsettled.append(outcome.norm)
        elif not decision.exceeded:
            self.add_step(outcome.norm if decision.stepped else None)

    @torch.no_grad()
    def add_losses(self, losses: TensorDictBase, minibatch: TensorDictBase, frames: float) -> None:
        """Add what the loss returned, as :meth:`add` does."""
        values = {
            statistic_name(key): _mean(value, minibatch, self._mask_key)
            for key, value in losses.items(include_nested=True, leaves_only=True)
            if isinstance(value, Tensor)
        }
        row = torch.stack(_on_one_device(list(values.values()))) if values else torch.empty(0)
        self._rows.append((tuple(values), row))
        self._frames.append(frames)

    def add_step(self, norm: Tensor | None) -> None:
        """Add the norm of the gradients of an optimizer step, before clipping; None if skipped.

        No mean includes the losses of minibatches whose step was skipped.
        """
        if norm is None:
            self._skip(self._first_of_step, len(self))
        else:
            self._norms.append(norm)
        self._first_of_step = len(self)

    def settle(self, decisions: Sequence[Decision]) -> None:
        """Take note of what a device decided about the minibatches since the last call."""
        norms, self._unsettled = self._unsettled, []
        for decision, norm in zip(decisions, norms, strict=False):
            number = self._first_of_step
            self._first_of_step += 1
            if decision.exceeded:  # the following ones were not trained on
                del self._rows[number + 1 :], self._frames[number + 1 :]
            elif decision.stepped:
                self._norms.append(norm)
            else:
                self._skip(number, number + 1)

    def _skip(self, first: int, end: int) -> None:
        self.skipped += 1
        for number in range(first, end):
            names, row = self._rows[number]
            self._rows[number], self._frames[number] = (names, torch.zeros_like(row)), 0.0

    @property
    def all_of_epoch_skipped(self) -> bool:
        """Whether every step of this epoch was skipped, so that its KL is unknown."""
        return not any(self._frames[self._first_of_epoch :])

    def kl_of_epoch(self, key: NestedKey, *, last: bool = False) -> tuple[Tensor, Tensor]:
        """Return KL and valid frames of this epoch's minibatches, or the last, that have a KL.

        The KL of steps that were skipped has no weight; where there is no other, it is 0.
        """
        name, start = statistic_name(key), len(self) - 1 if last else self._first_of_epoch
        rows = zip(self._rows[start:], self._frames[start:], strict=True)
        found = [(row[names.index(name)], count) for (names, row), count in rows if name in names]
        if not found:
            written = list(dict.fromkeys(name for names, _ in self._rows for name in names))
            raise KeyError(f"The loss wrote no {key!r} in this epoch, but {written}.")
        kl, frames = torch.stack([kl for kl, _ in found]), [n for _, n in found]
        weight = frames if any(frames) else [1.0] * len(frames)
        # torch.tensor(device=...) would wait for the device
        return kl, torch.tensor(weight, dtype=torch.float64).to(kl.device, non_blocking=True)

    def sums(self, step: TrainingStep) -> Means:
        """Return the sum of each entry over the minibatches, weighed by frames, and the frames.

        The decisions of ``step`` that were not read are read, too.
        """
        at: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
        for number, (names, _) in enumerate(self._rows):
            at[names].append(number)
        tables = [torch.stack([self._rows[n][1] for n in numbers]) for numbers in at.values()]
        norms = [*self._norms, *self._unsettled]
        norms = _on_one_device([*norms, norms[0].new_zeros(()) if norms else torch.zeros(())])
        norms, tables = torch.stack(norms).cpu(), [table.cpu() for table in tables]
        if not _checks.reads_are_free(step.device):
            for names, table in zip(at, tables, strict=True):
                for number, row in zip(at[names], table, strict=True):
                    self._rows[number] = names, row
        if len(step.pending):
            norms = [*norms[:-1]]
            self._norms, self._unsettled = norms[: self.steps], norms[self.steps :]
            self.settle(step.settle())
            return self.sums(step)
        sums: defaultdict[str, Any] = defaultdict(float)
        counts: defaultdict[str, float] = defaultdict(float)
        for names, table in zip(at, tables, strict=True):
            values, frames = table.double(), [self._frames[number] for number in at[names]]
            for name, total in zip(names, values.new_tensor(frames) @ values, strict=True):
                sums[name] += total
                counts[name] += sum(frames)
        sums["grad_norm"], counts["grad_norm"] = norms.double().sum(), self.steps
        if self._rows and "kl" in self._rows[0][0]:
            at_kl, frames = self._rows[0][0].index("kl"), self._frames[0]
            sums["first_kl"], counts["first_kl"] = tables[0][0, at_kl].double() * frames, frames
        totals = torch.stack(list(sums.values())).tolist()
        return {name: (total, counts[name]) for name, total in zip(sums, totals, strict=True)}


def _mean(value: Tensor, minibatch: TensorDictBase, mask_key: NestedKey | None) -> Tensor:
    """Return the mean of a value over valid frames; of whole numbers in float64."""
    if not value.is_floating_point():
        value = value.double()
    if value.numel() == 1:
        return value.reshape(()) if value.ndim else value
    mask = valid_mask(minibatch, mask_key) if value.ndim >= minibatch.ndim else None
    if mask is not None and value.shape[: mask.ndim] == mask.shape:
        value = value[mask]
    return value.double().mean()


def _on_one_device(values: list[Tensor]) -> list[Tensor]:
    return [x if x.device == values[0].device else x.to(values[0].device) for x in values]


def _rates(update: PPOUpdate) -> dict[str, float | Tensor]:
    rates: dict[str, float | Tensor] = {}
    for index, group in enumerate(update.step.optimizer.param_groups):
        name = group.get("name", index or None)
        rates["lr" if name is None else f"lr/{name}"] = group["lr"]
    return rates


def _coefficients(loss: Any) -> dict[str, Tensor]:
    names = sorted(getattr(loss, "_all_schedulable_buffers", ()))
    found = {name: getattr(loss, name, None) for name in names}
    return {name: x for name, x in found.items() if isinstance(x, Tensor) and x.numel() == 1}


def settings_of(update: PPOUpdate) -> dict[str, float]:
    """Return what an update is done with: learning rates, coefficients, limits, reward scale."""
    stopper, normalizer = update.step.stopper, update.reward_normalizer
    numbers = _rates(update) | _coefficients(update.step.loss)
    settings = {name: float(x) for name, x in numbers.items()}
    if stopper is not None:
        settings["kl_limit"] = stopper.tolerance * stopper.target_kl
    if normalizer is not None:
        settings["reward_scale"] = float(normalizer.scale)
    return settings


def policy_lag(loss: Any, batch: TensorDictBase, mask_key: NestedKey | None) -> Means:
    """Return by how many updates the frames of a batch are older than the policy, if it counts."""
    current = _version_of(loss)
    versions = get_if_any(batch, VERSION_KEY)
    if current is None:
        return {}
    if versions is None:
        return {"policy_lag": (0.0, 0.0)}
    mask, versions = valid_mask(batch, mask_key), per_frame(versions, batch.ndim)
    versions = versions if mask is None else versions[mask]
    return {"policy_lag": (float((current - versions).sum()), float(versions.numel()))}


def count_update(loss: Any) -> None:
    """Add 1 to the version of the policy, if it has one."""
    if (version := _version_of(loss)) is not None:
        version.detach().add_(1)


def _version_of(loss: Any) -> Tensor | None:
    """Return the buffer ``policy_version`` of the loss's actor, or None."""
    version = getattr(getattr(loss, "actor_network", None), VERSION_KEY, None)
    return version if isinstance(version, Tensor) else None
