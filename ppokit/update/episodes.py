"""Returns and lengths of the episodes that end in a batch, wherever they began."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit._keys import get_if_any, per_frame, valid_mask


class EpisodeReturns:
    """Adds up rewards and steps over episodes that may go on from batch to batch.

    Row b of a batch is taken to go on where row b of the batch before left off, as collectors have
    it; where trajectory ids tell otherwise, or the number of rows changes, what began before is
    forgotten.
    """

    def __init__(
        self, reward_keys: Sequence[NestedKey], done_key: NestedKey, traj_key: NestedKey
    ) -> None:
        self.reward_keys = reward_keys  # the first that is there counts
        self.done_key, self.traj_key = done_key, traj_key
        self._open: Tensor | None = None  # [rows, 2]: return and length so far
        self._ids: Tensor | None = None

    def __call__(self, batch: TensorDictBase) -> dict[str, float]:
        """Return number, mean return and mean length of the episodes that end in the batch.

        Args:
            batch: ``[*B, T]``, or ``[T]`` for one row. Without reward or done, nothing is found.
        """
        rewards = [get_if_any(batch, key) for key in self.reward_keys]
        reward = next((reward for reward in rewards if reward is not None), None)
        done = get_if_any(batch, self.done_key)
        if reward is None or done is None or batch.ndim == 0:
            return {}
        steps = batch.shape[-1]
        # Several agents or objectives count by their mean.
        reward = reward.double().reshape(*batch.batch_size, -1).mean(-1).reshape(-1, steps).cpu()
        done = per_frame(done, batch.ndim).reshape(-1, steps).cpu()
        mask = valid_mask(batch)
        valid = torch.ones_like(done) if mask is None else mask.reshape(-1, steps).cpu()
        each = torch.stack([reward, torch.ones_like(reward)], -1) * valid.unsqueeze(-1)
        totals = each.cumsum(1)
        ends = done & valid
        at_start = _at_start(totals, ends, self._carry(batch, totals))
        found = (totals - at_start)[ends]
        self._open = torch.where(ends[:, -1:], 0.0, totals[:, -1] - at_start[:, -1])
        if not len(found):
            return {"episodes": 0.0}
        mean = found.mean(0)
        return {
            "episodes": float(len(found)),
            "episode_return": float(mean[0]),
            "episode_length": float(mean[1]),
        }

    def state_dict(self) -> dict[str, Tensor | None]:
        """Return what was added up of the episodes that go on."""
        return {"open": self._open, "ids": self._ids}

    def load_state_dict(self, state: Mapping[str, Tensor | None]) -> None:
        """Take over what :meth:`state_dict` returned.

        Raises:
            ValueError: it has another shape.
        """
        open_, ids = state["open"], state["ids"]
        rows = "any" if ids is None else len(ids)
        if open_ is not None and (open_.shape[1:] != (2,) or rows not in ("any", len(open_))):
            raise ValueError(
                f"'open' has shape {list(open_.shape)}; of {rows} rows, [rows, 2] is expected: "
                "return and length so far."
            )
        self._open, self._ids = open_, ids

    def _carry(self, batch: TensorDictBase, totals: Tensor) -> Tensor:
        ids = get_if_any(batch, self.traj_key)
        rows = totals.shape[0]
        last, first = self._ids, None
        if ids is not None:
            ids = per_frame(ids, batch.ndim).reshape(rows, -1).cpu()
            first, self._ids = ids[:, 0], ids[:, -1].clone()
        carried = self._open
        if carried is None or carried.shape[0] != rows:
            return totals.new_zeros(rows, 1, 2)
        if first is not None and last is not None and last.shape == first.shape:
            carried = torch.where((first == last).unsqueeze(-1), carried, 0.0)
        return carried.unsqueeze(1)


def _at_start(totals: Tensor, ends: Tensor, carried: Tensor) -> Tensor:
    """Return, of each step's episode, the totals ``[rows, T, 2]`` at the end of the one before.

    An episode that began in an earlier batch brings along what was carried.
    """
    steps = torch.arange(totals.shape[1]).expand_as(ends)
    last_end = torch.where(ends, steps, -1).cummax(1).values
    last_end = torch.cat([torch.full_like(last_end[:, :1], -1), last_end[:, :-1]], 1).unsqueeze(-1)
    at_end = totals.gather(1, last_end.clamp_min(0).expand_as(totals))
    return torch.where(last_end < 0, -carried, at_end)
