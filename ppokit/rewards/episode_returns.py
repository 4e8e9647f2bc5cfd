"""Returns and lengths of the episodes that end in a batch, and of those that go on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit._batch import MASK_KEY, TRAJ_KEY, get_if_any, key_parts, per_frame, valid_mask
from ppokit._state import check_names
from ppokit.functional import reversed_discounted_returns
from ppokit.functional._checks import check_bool
from ppokit.rewards.returns import (
    CLOSED,
    OpenReturns,
    first_ids,
    initial_returns,
    last_steps,
    open_after,
)


class EpisodeReturns:
    """Adds up rewards and steps over episodes that may go on from batch to batch.

    Rows continue by their trajectory ids, in any order and number. If ids are missing, or rows
    share them, row b of a batch continues row b of the batch before; if the number of rows changes,
    or ids differ, the earlier part of an episode is dropped.
    """

    def __init__(self) -> None:
        self._open: Tensor | None = None  # [N, 2]: return and length so far
        self._ids: Tensor | None = None

    def clear(self) -> None:
        """Drop the returns and lengths so far of episodes that go on."""
        self._open = self._ids = None

    def __call__(
        self,
        batch: TensorDictBase,
        reward_key: NestedKey = "reward",
        done_key: NestedKey = "done",
        mask_key: NestedKey | None = MASK_KEY,
        raw_key: NestedKey | None = None,
    ) -> dict[str, tuple[float, float]]:
        """Return sum and number of the returns and lengths of the episodes that end in the batch.

        The keys are below ``"next"``. The raw reward is used if there is one, and the environment's
        own end before a group's.
        """
        *group, name = key_parts(reward_key)
        rewards = [("next", *group, f"raw_{name}"), ("next", *group, name), ("next", "reward")]
        if raw_key is not None:
            rewards.insert(0, raw_key)
        ends = [("next", "done"), ("next", *key_parts(done_key))]
        reward, done = (
            next((x for key in keys if (x := get_if_any(batch, key)) is not None), None)
            for keys in (rewards, ends)
        )
        if reward is None or done is None or batch.ndim == 0:
            return dict.fromkeys(("episode_return", "episode_length"), (0.0, 0.0))
        check_bool(("next", "done"), done)
        steps = batch.shape[-1]
        ids, mask = get_if_any(batch, TRAJ_KEY), valid_mask(batch, mask_key)
        reward, done = reward.cpu(), done.cpu()
        ids, mask = (None if x is None else x.cpu() for x in (ids, mask))
        done = per_frame(done, batch.ndim).reshape(-1, steps)
        valid = torch.ones_like(done) if mask is None else mask.reshape(-1, steps)
        ends, reward = done & valid, reward.reshape(*done.shape, -1).mean(-1, dtype=torch.float64)
        reward = torch.where(valid, reward, 0)  # padding may hold NaN
        each = torch.stack([reward, valid.double()], -1)
        ids = None if ids is None else per_frame(ids, batch.ndim).reshape(-1, steps).long()
        initial, others = self._initial(ids, valid)
        flags = ends.unsqueeze(-1).expand_as(each)
        totals, carry = reversed_discounted_returns(each, flags, gamma=1.0, initial=initial, dim=1)
        returns, lengths = totals[ends].sum(0).tolist()
        self._open, self._ids = carry, None
        if ids is not None:
            last = last_steps(valid)
            goes_on = valid.any(1) & ~done.gather(1, last).squeeze(1)
            last_ids = torch.where(goes_on, ids.gather(1, last).squeeze(1), CLOSED)
            self._ids, self._open = open_after(last_ids, carry, others)
        episodes = float(ends.sum())
        return {"episode_return": (returns, episodes), "episode_length": (lengths, episodes)}

    def _initial(self, ids: Tensor | None, valid: Tensor) -> tuple[Tensor, OpenReturns]:
        """Return what each row's first episode has so far ``[N, 2]``, and the other open ones."""
        rows = len(valid)
        known = torch.zeros(0, 2, dtype=torch.float64) if self._open is None else self._open
        known_ids = torch.full((0,), CLOSED) if self._ids is None else self._ids
        nothing, none = known.new_zeros(rows, 2), (known_ids[:0], known[:0])
        if ids is None:
            goes_on = self._ids is None and len(known) == rows
            return known if goes_on else nothing, none
        first = first_ids(ids, valid)
        ordered = first[first != CLOSED].sort().values
        if not (ordered[1:] == ordered[:-1]).any():
            return initial_returns((known_ids, known[: len(known_ids)]), first, 2, key=TRAJ_KEY)
        if len(known_ids) < rows:
            return nothing, none
        is_same = (first == known_ids[:rows]).unsqueeze(-1)
        return torch.where(is_same, known[:rows], 0.0), none

    def state_dict(self) -> dict[str, Tensor | None]:
        """Return the sums so far of open episodes."""
        return {"open": self._open, "ids": self._ids}

    def load_state_dict(self, state: Mapping[str, Tensor | None]) -> None:
        """Load what :meth:`state_dict` returned."""
        check_names(state, ("open", "ids"), "the episodes of a PPOUpdate")
        sums, ids = state["open"], state["ids"]
        of_sums, of_ids = ([] if x is None else [*x.shape] for x in (sums, ids))
        if (sums is not None and of_sums[1:] != [2]) or (ids is not None and of_ids != of_sums[:1]):
            raise ValueError(f"'open' is [N, 2], and 'ids' [N], got {of_sums} and {of_ids}.")
        if sums is not None and not ((sums[:, 1] >= 0) & (sums[:, 1] % 1 == 0)).all():
            raise ValueError(f"'open' is {sums.tolist()}: returns, and whole lengths, at least 0.")
        if ids is not None and ids.dtype is not torch.int64:
            raise ValueError(f"'ids' are int64, got {ids.dtype}.")
        self._open, self._ids = sums, ids
