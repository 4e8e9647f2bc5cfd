"""Sample estimates of the divergence between two policies."""

from __future__ import annotations

import torch
from torch import Tensor

from ppokit.functional._checks import at_least_float32, check_float


def kl_estimate(log_ratio: Tensor, *, estimator: str = "k3") -> Tensor:
    r"""Estimate of KL(old || new) per sample, in nats, from actions drawn by the old policy.

    .. math::
        k_1 = -d, \qquad k_2 = \tfrac12 d^2, \qquad k_3 = e^d - 1 - d,
        \qquad d = \log \pi_{new}(a|s) - \log \pi_{old}(a|s)

    (Schulman, 2020, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html.) k1 is
    unbiased but negative half of the time near zero; k2 is biased; k3 is unbiased, never negative
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
