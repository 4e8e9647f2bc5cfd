"""The critic's part of the loss."""

from __future__ import annotations

import contextlib

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from ppokit._keys import get_tensor
from ppokit.functional import clipped_critic_loss
from ppokit.functional._checks import check_same_shape
from ppokit.objectives import diagnostics
from ppokit.objectives.coefficients import scaled
from ppokit.objectives.normalization import NormalizedAdvantage


class CriticLoss(NormalizedAdvantage):
    """``ClipPPOLoss`` whose critic loss can be clamped, and whose diagnostics skip padding."""

    def loss_critic(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tensordict: TensorDictBase
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the critic loss (coefficient applied), clip fraction and explained variance."""
        if self.separate_losses:
            tensordict = tensordict.detach()
        keys = self.tensor_keys
        target = get_tensor(
            tensordict, keys.value_target, fix="GAE and the other value estimators write it."
        )
        old_value = None
        if self.clip_value is not None:
            old_value = tensordict.get(keys.value, None)
            if old_value is None:
                raise KeyError(
                    f"clip_value is set to {self.clip_value}, but the key {keys.value} was not "
                    "found in the input tensordict. Make sure that the value key passed to PPO "
                    "exists in the input tensordict: it is the value at collection, and GAE "
                    "stores it."
                )
        with (
            self.critic_network_params.to_module(self.critic_network, preserve_module_state=False)
            if self.functional
            else contextlib.nullcontext()
        ):
            predicted = self.critic_network(tensordict)
        value = get_tensor(predicted, keys.value, fix="The critic does not write it; set_keys().")
        target, value, old_value = self._critic_loss_inputs(target, value, old_value)
        check_same_shape(
            {f"the value {keys.value!r}": value, f"the value target {keys.value_target!r}": target}
        )
        loss = clipped_critic_loss(
            value,
            target,
            old_value=old_value,
            clip_value=self.clip_value,
            loss_clip=self.critic_loss_clip,
            kind=self.loss_critic_type,
        )
        mask = self._mask(tensordict, value)
        with torch.no_grad():
            clip_fraction = None
            if old_value is not None and self.clip_value is not None:
                clip_fraction = diagnostics.value_clip_fraction(
                    value, old_value, self.clip_value, mask
                )
            explained = diagnostics.explained_variance(target, value, mask)
        self._clear_weakrefs(tensordict, "critic_network_params", "target_critic_network_params")
        return (
            scaled(self.critic_coeff, loss) if self._has_critic else loss,
            clip_fraction,
            explained if self.log_explained_variance else None,
        )

    def _set_critic(self, out: TensorDict, tensordict: TensorDictBase) -> None:
        loss, clip_fraction, explained_variance = self.loss_critic(tensordict)
        out.set("loss_critic", loss)
        if clip_fraction is not None:
            out.set("value_clip_fraction", clip_fraction)
        if explained_variance is not None:
            out.set("explained_variance", explained_variance)
