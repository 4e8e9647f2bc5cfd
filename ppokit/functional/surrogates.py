"""The clipped objectives of PPO, for the policy and for the critic, and the KL estimate."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ppokit.functional import _checks
from ppokit.functional._checks import at_least_float32, check_float, check_range, check_same_shape

_CRITIC_LOSSES = {"l1": F.l1_loss, "l2": F.mse_loss, "smooth_l1": F.smooth_l1_loss}


def clipped_surrogate(
    log_ratio: Tensor,
    advantage: Tensor,
    *,
    clip_epsilon: float | Tensor | tuple[float | Tensor, float | Tensor] = 0.2,
    dual_clip: float | Tensor | None = None,
) -> Tensor:
    r"""Clipped surrogate objective per sample, to be maximized.

    .. math::
        s &= \min(\rho A, \; \mathrm{clip}(\rho, 1 - \epsilon_{low}, 1 + \epsilon_{high}) A),
        \qquad \rho = e^{log\_ratio} \\
        s &= \max(s, \; c A) \quad \text{where } A < 0, \text{ with } dual\_clip = c

    (Schulman et al., 2017, arXiv:1707.06347, equation 7; asymmetric clipping: Yu et al., 2025,
    arXiv:2503.14476, equation 10; dual clip: Ye et al., 2020, arXiv:1912.09729, equation 5.)
    Without dual clip the objective of a sample with A < 0 is unbounded below as its ratio grows.

    Both lines together are the same as ``A * exp(log_ratio)`` with the log-ratio clamped from above
    where A >= 0 and from below (and at log c) where A < 0. That is how it is computed: no infinite
    intermediate can turn a gradient into NaN.

    Args:
        log_ratio: log-probability under the new policy minus the one under the old, ``[*B, 1]``.
        advantage: same shape.
        clip_epsilon: one number in [0, 1] for both sides, or ``(low, high)``; tensors must
            broadcast to ``log_ratio`` without enlarging it.
        dual_clip: the bound c > 1 on the ratio where A < 0, likewise; 3 in the paper, 5 is common.

    Returns:
        The objective per sample, of the shape and dtype of ``log_ratio``.

    Raises:
        TypeError: an argument is not a float tensor.
        ValueError: the shapes differ, ``clip_epsilon`` is out of range, or ``dual_clip <= 1``.

    Example:
        >>> import torch
        >>> from ppokit.functional import clipped_surrogate
        >>> log_ratio, advantage = torch.tensor([2.0, 0.5, 20.0]).log(), torch.tensor([1.0, 1, -1])
        >>> clipped_surrogate(log_ratio, advantage, dual_clip=5.0)
        tensor([ 1.2000,  0.5000, -5.0000])
    """
    check_float("log_ratio", log_ratio)
    check_float("advantage", advantage)
    check_same_shape({"log_ratio": log_ratio, "advantage": advantage})
    low, high = clip_epsilon if isinstance(clip_epsilon, tuple) else (clip_epsilon, clip_epsilon)
    check_clip_epsilon(low, high)
    if dual_clip is not None:
        check_dual_clip(dual_clip)
    work, gain = at_least_float32(log_ratio), at_least_float32(advantage)
    upper = math.inf if dual_clip is None else _as_tensor(dual_clip, work).log()
    bounds = _as_tensor(low, work).neg().log1p(), _as_tensor(high, work).log1p(), upper
    objective = (clip_log_ratio(work, gain, *bounds).exp() * gain).to(log_ratio.dtype)
    check_same_shape({"log_ratio": log_ratio, "objective within these bounds": objective})
    return objective


def clip_log_ratio(
    log_ratio: Tensor,
    advantage: Tensor,
    low: float | Tensor,
    high: float | Tensor,
    upper: float | Tensor,
) -> Tensor:
    """Return the log-ratio at which the unclipped objective equals the clipped one.

    ``upper`` is the bound of the dual clip. Clipped before the exponential, a ratio that overflows
    leaves no 0 * inf in the gradient.
    """
    is_lost = advantage < 0
    smallest = torch.where(is_lost, low, -math.inf).to(log_ratio.dtype)
    largest = torch.where(is_lost, upper, high).to(log_ratio.dtype)
    return log_ratio.clamp(smallest, largest)


def _as_tensor(bound: float | Tensor, like: Tensor) -> Tensor:
    # A tensor keeps its own dtype, as torchrl clips.
    return bound if isinstance(bound, Tensor) else like.new_tensor(bound)


def check_clip_epsilon(low: float | Tensor, high: float | Tensor) -> None:
    """Raise unless the ratio is clipped to an interval around 1 that does not go below 0."""
    consequence = "the ratio would be clipped to an empty interval, or to one that is negative."
    check_range("clip_epsilon (low)", low, 0, 1, consequence=consequence)
    check_range("clip_epsilon (high)", high, 0, math.inf, consequence=consequence)


def check_dual_clip(dual_clip: float | Tensor) -> None:
    """Raise unless ``dual_clip`` exceeds 1."""
    is_tensor = isinstance(dual_clip, Tensor)
    if is_tensor and not _checks.reads_are_free(dual_clip.device):
        return
    values = dual_clip.flatten().tolist() if is_tensor else [dual_clip]
    if not all(1 < x < math.inf for x in values):
        raise ValueError(
            f"dual_clip must exceed 1, got {min(values)}: it would cut the gradient of "
            "every sample whose advantage is negative. 3 or 5 is usual; None turns it off."
        )


def clipped_critic_loss(
    value: Tensor,
    target: Tensor,
    *,
    old_value: Tensor | None = None,
    clip_value: float | Tensor | None = None,
    loss_clip: float | Tensor | None = None,
    kind: str = "smooth_l1",
) -> Tensor:
    r"""Critic loss per sample, with the value clipped, the loss clamped, or both.

    .. math::
        \ell &= d(V, target) \\
        \ell &= \max(\ell, \; d(V_{old} + \mathrm{clip}(V - V_{old}, -v, v), target))
        \quad \text{with } clip\_value = v \\
        \ell &= \min(\ell, c) \quad \text{with } loss\_clip = c

    The second line is PPO2's (and Andrychowicz et al., 2021, arXiv:2006.05990, appendix B.1). The
    third is ``vf_clip_param`` of RLlib and rl8: the gradient of a clamped loss is zero, so a c
    below the scale of the returns keeps the critic from learning.

    Args:
        value: predicted value ``[*B, 1]``.
        target: value target, same shape.
        old_value: value predicted at collection, same shape; needed with ``clip_value``.
        clip_value: half-width of the interval around ``old_value``, in units of the return; a
            tensor must broadcast to ``value`` without enlarging it.
        loss_clip: largest loss of a sample, in units of the loss, likewise.
        kind: ``"l1"``, ``"l2"`` (no factor 1/2) or ``"smooth_l1"`` (Huber with delta 1).

    Returns:
        The loss per sample, of the shape of ``value``, in the dtype that ``value`` and ``target``
        promote to.

    Raises:
        TypeError: an argument is not a float tensor.
        ValueError: the shapes differ, a bound is negative, ``kind`` is unknown, or ``clip_value``
            comes without ``old_value``.

    Example:
        >>> import torch
        >>> from ppokit.functional import clipped_critic_loss
        >>> value, target = torch.tensor([0.0, 0.0]), torch.tensor([0.5, 9.0])
        >>> clipped_critic_loss(value, target, loss_clip=5.0)
        tensor([0.1250, 5.0000])
    """
    check_float("value", value)
    check_float("target", target)
    check_same_shape({"value": value, "target": target})
    if kind not in _CRITIC_LOSSES:
        raise ValueError(f"kind must be one of {sorted(_CRITIC_LOSSES)}, got {kind!r}.")
    distance = _CRITIC_LOSSES[kind]
    loss = distance(target, value, reduction="none")
    if clip_value is not None:
        if old_value is None:
            raise ValueError("clip_value needs old_value, the value predicted at collection.")
        check_float("old_value", old_value)
        check_same_shape({"value": value, "old_value": old_value})
        check_range("clip_value", clip_value, 0, math.inf, consequence="the interval is empty.")
        width = torch.as_tensor(clip_value, dtype=value.dtype, device=value.device)
        near = old_value + (value - old_value).clamp(-width, width)
        check_same_shape({"value": value, "value within clip_value": near})
        loss = torch.maximum(loss, distance(target, near, reduction="none"))
    if loss_clip is not None:
        check_range("loss_clip", loss_clip, 0, math.inf, consequence="every loss is larger.")
        loss = loss.clamp(max=loss_clip)
        check_same_shape({"value": value, "loss within loss_clip": loss})
    return loss


def kl_estimate(log_ratio: Tensor, *, estimator: str = "k3") -> Tensor:
    r"""Estimate of KL(old || new) per sample, in nats, from actions drawn by the old policy.

    .. math::
        k_1 = -d, \qquad k_2 = \tfrac12 d^2, \qquad k_3 = e^d - 1 - d,
        \qquad d = \log \pi_{new}(a|s) - \log \pi_{old}(a|s)

    (Schulman, 2020, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html.) k1 is
    unbiased, but often negative near zero; k2 is biased; k3 is unbiased, never negative
    up to rounding, and has the smallest variance of the three when the policies are close.

    Args:
        log_ratio: d, of any shape.
        estimator: ``"k1"``, ``"k2"`` or ``"k3"``.

    Returns:
        The estimate per sample, of the shape and dtype of ``log_ratio``.

    Raises:
        TypeError: ``log_ratio`` is not a float tensor.
        ValueError: ``estimator`` is unknown.

    Example:
        >>> import torch
        >>> from ppokit.functional import kl_estimate
        >>> kl_estimate(torch.tensor([0.0, 0.1, -0.1]))
        tensor([0.0000, 0.0052, 0.0048])
    """
    check_float("log_ratio", log_ratio)
    d = at_least_float32(log_ratio)
    if estimator == "k1":
        kl = -d
    elif estimator == "k2":
        kl = d.square() / 2
    elif estimator == "k3":
        kl = torch.expm1(d) - d
    else:
        raise ValueError(f"estimator must be 'k1', 'k2' or 'k3', got {estimator!r}.")
    return kl.to(log_ratio.dtype)
