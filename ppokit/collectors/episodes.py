"""Steps and rewards of episodes so far, as torchrl's StepCounter and RewardSum write them."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor

from ppokit._keys import MASK_KEY, get_if_any
from ppokit.functional import discounted_returns


class EpisodeCounts:
    """Adds up steps or rewards over episodes that may go on from batch to batch."""

    def __init__(self, *, step_count: bool, episode_reward: bool) -> None:
        names = {"step_count": step_count, "episode_reward": episode_reward}
        self.wanted = [name for name, is_wanted in names.items() if is_wanted]
        self._open: dict[str, Tensor] = {}

    def clear(self) -> None:
        """Begin new episodes."""
        self._open.clear()

    def write(self, batch: TensorDictBase) -> None:
        """Write ``("next", name)`` of each count into a batch ``[n, T]``."""
        for name in self.wanted:
            each, done = batch.get(("next", "reward")), batch.get(("next", "done"))
            if name == "step_count":
                each = torch.ones_like(each[..., :1], dtype=torch.float64)
            mask = get_if_any(batch, MASK_KEY)
            each = each if mask is None else each * mask.unsqueeze(-1)
            start, done = self._open.get(name), done.expand_as(each)
            total, self._open[name] = discounted_returns(each, done, gamma=1.0, initial=start)
            batch.set(("next", name), total.long() if name == "step_count" else total)
