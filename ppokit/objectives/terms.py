"""Terms of the loss for each frame: clipped objective, KL penalty and critic loss."""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from ppokit._calls import call
from ppokit._keys import get_tensor
from ppokit.functional import clipped_critic_loss, kl_estimate
from ppokit.functional._checks import check_same_shape
from ppokit.functional.surrogates import clip_log_ratio
from ppokit.objectives import diagnostics
from ppokit.objectives.coefficients import scaled
from ppokit.objectives.minibatch import valid_mask
from ppokit.objectives.policy import exact_kl, parameters_of


def clipped_gain(
    log_ratio: Tensor, correction: Any, advantage: Tensor, bounds: Any, dual_clip: Any
) -> Tensor:
    """Return the clipped objective ``[*B, 1]``.

    Clipping is relative to the policy of ``log_ratio``; ``correction`` is the log-ratio of that
    policy to the one that collected the data, which the dual clip includes.
    """
    upper: Any = math.inf
    if dual_clip is not None:
        upper = dual_clip.to(log_ratio.dtype).log()
        upper = upper if correction is None else upper - correction
    low, high = bounds
    clipped = clip_log_ratio(log_ratio, advantage, low, high, upper)
    return (clipped if correction is None else clipped + correction).exp() * advantage


def kl_penalty(
    loss: Any, head: Any, old: Any, minibatch: TensorDictBase, log_ratio: Tensor
) -> Tensor:
    """Return KL(old || new) ``[*B, 1]``: exact if the old parameters are known, or k3."""
    coefficient: Any = loss.kl_coeff
    if old is not None:
        new = {key: minibatch.get(key) for key in old}
        kl = exact_kl(head, old, new, coefficient, log_ratio.shape[:-1])
        if kl is not None and kl.shape == log_ratio.shape:
            return kl
    # Masked before the exponential, so that no 0 * inf is in the gradient either.
    return kl_estimate(torch.where(coefficient == 0, torch.zeros_like(log_ratio), log_ratio))


def critic_terms(
    loss: Any, minibatch: TensorDictBase
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return each frame's critic loss (coefficient applied), clip fraction, explained variance.

    The minibatch has the critic's inputs and the value target. The critic writes to it.
    """
    keys = loss.tensor_keys
    if loss.separate_losses:
        minibatch = minibatch.detach()
    fix = "GAE and the other value estimators write it; see loss.set_keys()."
    target, old_value = get_tensor(minibatch, keys.value_target, fix=fix), None
    if loss.clip_value is not None:
        fix = "clip_value needs the value at collection, which GAE stores; see loss.set_keys()."
        old_value = get_tensor(minibatch, keys.value, fix=fix)
    with parameters_of(loss, "critic_network"):
        predicted = call([loss.critic_network], minibatch)
    value = get_tensor(predicted, keys.value, fix="The critic does not write it; set_keys().")
    target, value, old_value = loss._critic_loss_inputs(target, value, old_value)
    if value.shape != target.shape:
        of_value, of_target = f"the value {keys.value!r}", f"the target {keys.value_target!r}"
        check_same_shape({of_value: value, of_target: target})
    losses = clipped_critic_loss(
        value,
        target,
        old_value=old_value,
        clip_value=loss.clip_value,
        loss_clip=loss.critic_loss_clip,
        kind=loss.loss_critic_type,
    )
    mask, explained = valid_mask(loss, minibatch, value), loss.log_explained_variance
    with torch.no_grad():
        found = diagnostics.of_critic(value, target, old_value, loss.clip_value, mask, explained)
    if loss.critic_coeff is not None:
        losses = scaled(loss.critic_coeff, losses)
    return losses, found.get("value_clip_fraction"), found.get("explained_variance")
