"""The linear recurrence, and the returns and advantages that are made of it."""

from __future__ import annotations

import torch
from torch import Tensor

from ppokit.functional._checks import (
    at_least_float32,
    check_bool,
    check_float,
    check_range,
    check_same_shape,
)
from ppokit.kernels import fused_gae, fused_scan, operator

_DISCOUNT = "returns would grow without bound, or change sign at every step."


def linear_scan(
    x: Tensor,
    decay: Tensor | float,
    *,
    initial: Tensor | None = None,
    reverse: bool = False,
    dim: int = -2,
) -> Tensor:
    r"""First-order linear recurrence along one dimension.

    .. math:: y_t = x_t + d_t \, y_{t-1}

    and with ``reverse=True``, :math:`y_t = x_t + d_t \, y_{t+1}`. There is no loop over time: the
    scan takes a number of passes logarithmic in T (Blelloch, 1990, "Prefix Sums and Their
    Applications", section 1.4). It is differentiable in ``x``, ``decay`` and ``initial``, to any
    order.

    Args:
        x: float tensor ``[*B, T, F]`` (with the default ``dim``).
        decay: the shape of ``x``, or one number for all steps. A decay of exactly 0 is a cut:
            nothing crosses it, not even a NaN.
        initial: the shape of ``x`` without ``dim``: ``y`` before the first step (after the last
            one, if reversed). None means zeros.
        reverse: run from the last step to the first.
        dim: the time dimension.

    Returns:
        A tensor of the shape and dtype of ``x``. Half types accumulate in float32.

    Raises:
        TypeError: ``x`` is not a float tensor.
        ValueError: the shapes do not match, or ``dim`` is not a dimension of ``x``.

    Example:
        >>> import torch
        >>> from ppokit.functional import linear_scan
        >>> x = torch.tensor([[1.0], [1.0], [1.0]])
        >>> linear_scan(x, 0.5).squeeze(-1)
        tensor([1.0000, 1.5000, 1.7500])
        >>> linear_scan(x, 0.5, reverse=True, initial=torch.tensor([8.0])).squeeze(-1)
        tensor([2.7500, 3.5000, 5.0000])
    """
    if isinstance(decay, Tensor):
        y = fused_scan(x, decay, initial, reverse, dim)
        if y is not None:
            return y
    check_float("x", x)
    _check_dim("x", x, dim)
    work = at_least_float32(x)
    if isinstance(decay, Tensor):
        check_same_shape({"x": x, "decay": decay})
        decay = decay.to(work.dtype)
    else:
        # Float32 coefficients are exact enough for half inputs; float64 ones must not be rounded.
        decay = torch.full_like(work, decay)
    start = work.new_zeros(x.movedim(dim, 0).shape[1:])
    if initial is not None:
        check_same_shape({"x without its time dimension": start, "initial": initial})
        start = initial.to(work.dtype)
    if x.numel() == 0:
        return x.clone()
    return operator.linear_scan(work, decay, start, reverse, dim).to(x.dtype)


def reversed_discounted_returns(
    reward: Tensor,
    done: Tensor,
    *,
    gamma: float | Tensor,
    initial: Tensor | None = None,
    dim: int = -2,
) -> tuple[Tensor, Tensor]:
    r"""Discounted sum of the *past* rewards of each trajectory, forward in time.

    .. math:: R_0 = r_0 + \gamma R_{init}, \qquad R_t = r_t + \gamma (1 - done_{t-1}) R_{t-1}

    This is the "reversed discounted return" whose standard deviation scales the rewards (Engstrom
    et al., 2020, arXiv:2005.12729, Algorithm 1). The sum at ``t`` includes the reward at ``t``.
    After a step that ends an episode, the sum starts from zero.

    Args:
        reward: float tensor ``[*B, T, 1]``.
        done: bool tensor of the same shape; True where a trajectory ends with this step.
        gamma: discount in [0, 1]; a tensor must broadcast to ``reward`` without enlarging it.
        initial: ``[*B, 1]``, the carry of the batch before; None means zeros.
        dim: the time dimension.

    Returns:
        ``(returns, carry)``: returns ``[*B, T, 1]`` and the carry ``[*B, 1]`` to hand to the next
        batch of the same trajectories, :math:`(1 - done_{T-1}) R_{T-1}`. Both in reward's dtype.

    Raises:
        TypeError: ``reward`` is not float, or ``done`` is not bool.
        ValueError: the shapes differ, the batch is empty, or ``gamma`` lies outside [0, 1].

    Example:
        >>> import torch
        >>> from ppokit.functional import reversed_discounted_returns
        >>> reward = torch.ones(1, 4, 1)
        >>> done = torch.tensor([False, True, False, False]).reshape(1, 4, 1)
        >>> returns, carry = reversed_discounted_returns(reward, done, gamma=0.5)
        >>> returns.flatten(), carry.flatten()
        (tensor([1.0000, 1.5000, 1.0000, 1.5000]), tensor([1.5000]))
    """
    check_float("reward", reward)
    check_bool("done", done)
    check_same_shape({"reward": reward, "done": done})
    check_range("gamma", gamma, 0, 1, consequence=_DISCOUNT)
    _check_steps(reward, dim)
    steps = reward.shape[dim]
    work = at_least_float32(reward)
    first = torch.ones_like(done.narrow(dim, 0, 1))
    goes_on = torch.cat([first, ~done.narrow(dim, 0, steps - 1)], dim)
    decay = _discount(goes_on, _in_dtype_of(work, gamma), work)
    returns = linear_scan(work, decay, initial=initial, dim=dim)
    carry = torch.where(done.select(dim, -1), 0, returns.select(dim, -1))
    return returns.to(reward.dtype), carry.to(reward.dtype)


def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    done: Tensor,
    terminated: Tensor,
    *,
    gamma: float | Tensor,
    lmbda: float | Tensor,
    dim: int = -2,
) -> tuple[Tensor, Tensor]:
    r"""Generalised advantage estimation, truncated at the ends of trajectories.

    .. math::
        \delta_t &= r_t + \gamma (1 - terminated_t) V(s'_t) - V(s_t) \\
        A_t &= \delta_t + \gamma \lambda (1 - done_t) A_{t+1}, \qquad A_T = 0 \\
        target_t &= A_t + V(s_t)

    (Schulman et al., 2016, arXiv:1506.02438, equations 11 to 16; the paper has no episode ends.)
    :math:`s'_t` is the observation that followed step t, also if the episode was then truncated:
    a truncated step bootstraps from the value of its own next observation. If a step is
    terminated, ``next_value`` is not read and may be NaN; terminated wins over truncated.

    Args:
        reward: float tensor ``[*B, T, 1]``.
        value: value of the observation at t, same shape.
        next_value: value of the observation after t, same shape.
        done: bool, same shape: the trajectory ends with this step, terminated or not.
        terminated: bool, same shape: it ends and no value follows; such a step is done, too.
        gamma: discount in [0, 1]; a tensor must broadcast to ``reward`` without enlarging it.
        lmbda: trace decay in [0, 1], likewise.
        dim: the time dimension.

    Returns:
        ``(advantage, value_target)``, of the shape and dtype of ``reward``. Half types accumulate
        in float32.

    Raises:
        TypeError: a value is not float, or a flag is not bool.
        ValueError: the shapes differ, the batch is empty, or a discount lies outside [0, 1].

    Example:
        >>> import torch
        >>> from ppokit.functional import gae
        >>> reward, value = torch.ones(3, 1), torch.zeros(3, 1)
        >>> done = torch.tensor([[False], [False], [True]])
        >>> advantage, target = gae(reward, value, value, done, done, gamma=0.5, lmbda=1.0)
        >>> advantage.squeeze(-1)
        tensor([1.7500, 1.5000, 1.0000])
    """
    result = fused_gae(reward, value, next_value, done, terminated, gamma, lmbda, dim)
    if result is not None:
        return result
    floats = {"reward": reward, "value": value, "next_value": next_value}
    flags = {"done": done, "terminated": terminated}
    for name, tensor in floats.items():
        check_float(name, tensor)
    for name, tensor in flags.items():
        check_bool(name, tensor)
    check_same_shape({**floats, **flags})
    check_range("gamma", gamma, 0, 1, consequence=_DISCOUNT)
    check_range("lmbda", lmbda, 0, 1, consequence=_DISCOUNT)
    _check_steps(reward, dim)
    work, value_, next_value_ = (at_least_float32(tensor) for tensor in floats.values())
    gamma, lmbda = _in_dtype_of(work, gamma), _in_dtype_of(work, lmbda)
    delta = work + gamma * torch.where(terminated, 0, next_value_) - value_
    decay = _discount(~(done | terminated), gamma * lmbda, work)
    advantage = linear_scan(delta, decay, reverse=True, dim=dim)
    return advantage.to(reward.dtype), (advantage + value_).to(reward.dtype)


def _in_dtype_of(data: Tensor, factor: float | Tensor) -> float | Tensor:
    # The factor meets the data in the data's dtype: through float32, 0.99 is off by 1e-8.
    if not isinstance(factor, Tensor):
        return factor
    if torch.broadcast_shapes(factor.shape, data.shape) != data.shape:
        check_same_shape({"reward": data, "gamma or lmbda, broadcast to reward": factor + data})
    return factor.to(data.dtype)


def _discount(keep: Tensor, factor: float | Tensor, like: Tensor) -> Tensor:
    factor = factor if isinstance(factor, Tensor) else like.new_full((), factor)
    return torch.where(keep, factor, 0)


def _check_dim(name: str, x: Tensor, dim: int) -> None:
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(
            f"{name} has shape {list(x.shape)}, which has no dimension {dim}. "
            "The convention is [*B, T, 1] with time at dim=-2; pass dim= for another layout."
        )


def _check_steps(reward: Tensor, dim: int) -> None:
    _check_dim("reward", reward, dim)
    if reward.numel() == 0:
        raise ValueError(f"reward is empty (shape {list(reward.shape)}): there is no step to use.")
