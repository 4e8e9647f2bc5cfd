"""Which frames are valid, and making the others harmless before they meet a network."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit._keys import get_if_any
from ppokit.objectives.coefficients import CoefficientBuffers

BURN_IN_KEY = ("sequence", "burn_in")  # see SequenceBatcher


class PaddedLoss(CoefficientBuffers):
    """``ClipPPOLoss`` that knows its mask, and fills padding."""

    def _mask(self, tensordict: TensorDictBase, like: Tensor) -> Tensor | None:
        if get_if_any(tensordict, BURN_IN_KEY) is not None:
            raise ValueError(
                f"The minibatch holds {BURN_IN_KEY!r}: frames of burn-in, which the loss would "
                "take for padding. Give it batcher.refresh(minibatch, actor, critic), whose states "
                "have gone through them; PPOUpdate does so."
            )
        masks = [get_if_any(tensordict, key) for key in self._loss_mask_keys()]
        found = [self._expand_loss_mask(mask, like) for mask in masks if mask is not None]
        if not found:
            return None
        return torch.stack(found).all(0) if len(found) > 1 else found[0]

    @property
    def _policy_keys(self) -> list[NestedKey]:
        named = (self.tensor_keys.action, self.tensor_keys.sample_log_prob)
        flat = [key for keys in named for key in (keys if isinstance(keys, list) else [keys])]
        return [key for key in flat if key is not None]

    def entries(self, tensordict: TensorDictBase) -> list[NestedKey]:
        """Return the names of what a forward reads of a batch, of those that are there."""
        keys = [*self.actor_network.in_keys, *self._policy_keys, self.tensor_keys.advantage]
        keys += [] if self.critic_network is None else self.critic_network.in_keys
        keys += [self.tensor_keys.value_target, self.tensor_keys.value]
        if self.kl_coeff is not None:
            keys += getattr(self.actor_network, "dist_params_keys", [])
        keys += self._loss_mask_keys()
        return [key for key in dict.fromkeys(keys) if get_if_any(tensordict, key) is not None]

    def _fill_padding(self, tensordict: TensorDictBase) -> None:
        mask = self._mask(tensordict, tensordict.get(self.tensor_keys.advantage)[..., :1])
        if mask is None or mask.numel() != tensordict.numel():
            return
        keys = [key for key in self.entries(tensordict) if key not in self._loss_mask_keys()]
        fill_padding(tensordict, mask.reshape(tensordict.batch_size), keys)


def fill_padding(tensordict: TensorDictBase, mask: Tensor, keys: list[NestedKey]) -> None:
    """Replace what lies under a False of the mask by a copy of the first valid frame.

    The gradient that padding gets is 0, but 0 * NaN is NaN, and a matrix product spreads it to
    every parameter. A copy of a valid frame is as good as that frame, whatever the type of the
    entry. Episode starts stay as they are: within the padding of a sequence they would slow a
    recurrent network down.
    """
    valid_frame = mask.flatten().int().argmax().reshape(1)

    def fill(x: Tensor) -> Tensor:
        frame = x.flatten(0, mask.ndim - 1).index_select(0, valid_frame)
        keep = mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
        return torch.where(keep, x, frame.reshape((1,) * mask.ndim + frame.shape[1:]))

    present = tensordict.select(*[key for key in keys if key != "is_init"], strict=False)
    tensordict.update(present.apply(fill))
