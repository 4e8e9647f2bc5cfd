"""Statistics of an update: means over minibatches, its settings, and the policy lag."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn

from ppokit._batch import VERSION_KEY, get_if_any, key_parts, per_frame, valid_mask
from ppokit.update.decision import Outcome

Means = dict[str, tuple[float, float]]  # of each name, sum and weight; the mean is their quotient


_OF_UPDATE = {"epochs", "minibatches", "steps", "skipped", "stopped", "frames", "episodes"}
_OF_UPDATE |= {"seconds_collecting", "seconds_updating", "frames_per_second", "policy_lag"}
_OF_UPDATE |= {"episode_return", "episode_length", "grad_norm", "first_kl", "padded"}
_OF_UPDATE |= {"kl_limit", "reward_scale"}


def statistic_name(key: NestedKey) -> str:
    """Return the name of an entry of the losses among the statistics: ``"kl"``, ``"a/b"``.

    An entry with a name that the update gives to another number, such as ``"steps"``, is
    ``"loss/steps"``.
    """
    name = key if type(key) is str else "/".join(key_parts(key))
    return f"loss/{name}" if name in _OF_UPDATE else name


@dataclass(slots=True, eq=False)
class _Minibatch:
    """The losses of a minibatch, by name, in one tensor, and the step that they are of."""

    names: tuple[str, ...]
    row: Tensor
    valid: float  #: frames
    outcome: Outcome | None = None  #: None: the step was not made yet

    @property
    def frames(self) -> float:
        """Valid frames, 0 if the step was skipped."""
        decision = None if self.outcome is None else self.outcome.decision
        return self.valid if decision is None or decision.counts else 0.0


class MinibatchStatistics:
    """Losses, diagnostics and gradient norms of the minibatches of one update, by name.

    Minibatches may differ in the entries that they have, in their order and in their shapes. Values
    stay on their device until :meth:`sums`.
    """

    def __init__(self, mask_key: NestedKey | None) -> None:
        self._mask_key = mask_key
        self._minibatches: list[_Minibatch] = []
        self._outcomes: list[Outcome] = []
        self._keys: object = None
        self._names: tuple[str, ...] = ()
        self._first_of_epoch = 0
        self.epochs = 0

    def __len__(self) -> int:
        return len(self._minibatches)

    @property
    def steps(self) -> int:
        """Number of optimizer steps that are known on the host."""
        return sum(x.decision is not None and x.decision.stepped for x in self._outcomes)

    @property
    def skipped(self) -> int:
        """Number of steps that were skipped."""
        return sum(x.decision is not None and not x.decision.counts for x in self._outcomes)

    @property
    def has_stepped(self) -> bool:
        """Whether a step was made; waits for a device whose decisions are not read."""
        unread = (x.flags for x in self._outcomes if x.flags is not None)
        return self.steps > 0 or any(bool(flags[0]) for flags in unread)

    def begin_epoch(self) -> None:
        """Begin the epoch that :meth:`kl_of_epoch` is of."""
        self.epochs += 1
        self._first_of_epoch = len(self)

    def add(self, outcome: Outcome, minibatch: TensorDictBase, frames: float) -> None:
        """Add the outcome of a step on a minibatch of so many valid frames."""
        if outcome.losses is not None:
            self.add_losses(outcome.losses, minibatch, frames)
        elif outcome.row is not None:
            keys, _, row = outcome.row
            if keys != self._keys:
                self._keys, self._names = keys, tuple(map(statistic_name, keys))
            self._minibatches.append(_Minibatch(self._names, row, frames))
        self.add_outcome(outcome)

    @torch.no_grad()
    def add_losses(self, losses: TensorDictBase, minibatch: TensorDictBase, frames: float) -> None:
        """Add the losses of a minibatch; :meth:`add_outcome` of its step follows."""
        values = {
            statistic_name(key): _mean(value, minibatch, self._mask_key)
            for key, value in losses.items(include_nested=True, leaves_only=True)
            if isinstance(value, Tensor)
        }
        row = torch.stack(_on_one_device(list(values.values()))) if values else torch.empty(0)
        self._minibatches.append(_Minibatch(tuple(values), row, frames))

    def add_outcome(self, outcome: Outcome) -> None:
        """Add the outcome of the step of all minibatches since the last step.

        No mean includes the losses of minibatches whose step was skipped.
        """
        for minibatch in reversed(self._minibatches):
            if minibatch.outcome is not None:
                break
            minibatch.outcome = outcome
        self._outcomes.append(outcome)
        if outcome.decision is not None:  # else the minibatch may not be finite
            outcome.forget_losses()

    def drop_after_stop(self) -> None:
        """Drop the minibatches that a device did not train on, once all decisions are read."""
        read = {id(x) for x in self._outcomes if x.decision is not None}
        self._outcomes = [x for x in self._outcomes if id(x) in read]
        self._minibatches = [x for x in self._minibatches if id(x.outcome) in read]

    @property
    def all_of_epoch_skipped(self) -> bool:
        """Whether every step of this epoch was skipped, so that its KL is unknown."""
        return not any(x.frames for x in self._minibatches[self._first_of_epoch :])

    def kl_of_epoch(self, key: NestedKey, *, last: bool = False) -> tuple[Tensor, Tensor]:
        """Return KL and valid frames of this epoch's minibatches, or the last, that have a KL.

        The KL of steps that were skipped has no weight; where there is no other, it is 0.
        """
        name, start = statistic_name(key), len(self) - 1 if last else self._first_of_epoch
        found = [x for x in self._minibatches[start:] if name in x.names]
        if not found:
            written = list(dict.fromkeys(name for x in self._minibatches for name in x.names))
            raise KeyError(f"The loss wrote no {key!r} in this epoch, but {written}.")
        kls = [(x, x.row[x.names.index(name)]) for x in found]
        kl = torch.stack([kl if x.frames else torch.zeros_like(kl) for x, kl in kls])
        frames = [x.frames for x in found]
        weight = frames if any(frames) else [1.0] * len(frames)
        # torch.tensor(device=...) would wait for the device
        return kl, torch.tensor(weight, dtype=torch.float64).to(kl.device, non_blocking=True)

    def sums(self) -> Means:
        """Return the sum of each entry over the minibatches, weighed by frames, and the frames."""
        of_names: defaultdict[tuple[str, ...], list[_Minibatch]] = defaultdict(list)
        for minibatch in self._minibatches:
            of_names[minibatch.names].append(minibatch)
        sums: defaultdict[str, float] = defaultdict(float)
        counts: defaultdict[str, float] = defaultdict(float)
        first: dict[str, tuple[float, float]] = {}
        counted = [x for x in self._minibatches if x.frames] or self._minibatches
        for names, found in of_names.items():
            frames = torch.tensor([x.frames for x in found], dtype=torch.float64)
            table = torch.stack([x.row for x in found]).cpu().double()
            table[frames == 0] = 0  # NaN
            for x, row in zip(found, table, strict=True):
                if x is counted[0] and "kl" in names:
                    first["first_kl"] = float(row[names.index("kl")] * x.frames), x.frames
            for name, total in zip(names, (frames @ table).tolist(), strict=True):
                sums[name] += total
                counts[name] += float(frames.sum())
        stepped = [x for x in self._outcomes if x.decision is not None and x.decision.stepped]
        norms = _on_one_device([x.norm for x in stepped])
        sums["grad_norm"] = float(torch.stack(norms).double().sum()) if norms else 0.0
        counts["grad_norm"] = len(norms)
        return {name: (total, counts[name]) for name, total in sums.items()} | first


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


def rates(optimizer: torch.optim.Optimizer) -> dict[str, float | Tensor]:
    """Return the learning rate of each group by its name: ``"lr"``, ``"lr/1"``, ``"lr/critic"``."""
    found: dict[str, float | Tensor] = {}
    for index, group in enumerate(optimizer.param_groups):
        name = group.get("name", index or None)
        if (rate := group.get("lr")) is not None:  # an optimizer may have none
            found["lr" if name is None else f"lr/{name}"] = rate
    return found


def coefficients(loss: nn.Module) -> dict[str, Tensor]:
    """Return the coefficients of a :class:`~ppokit.DualClipPPOLoss`, and its clip range."""
    names = sorted(getattr(loss, "_all_schedulable_buffers", ()))
    found = {name: getattr(loss, name, None) for name in names}
    return {name: x for name, x in found.items() if isinstance(x, Tensor) and x.numel() == 1}


def policy_lag(version: Tensor, batch: TensorDictBase, mask_key: NestedKey | None) -> Means:
    """Return by how many updates the frames of a batch are older than a version of the policy."""
    versions = get_if_any(batch, VERSION_KEY)
    if versions is None:
        return {"policy_lag": (0.0, 0.0)}
    mask, versions = valid_mask(batch, mask_key), per_frame(versions, batch.ndim)
    versions = versions if mask is None else versions[mask]
    lags = version.to(versions.device) - versions
    return {"policy_lag": (float(lags.sum()), float(lags.numel()))}
