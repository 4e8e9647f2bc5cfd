"""Slow, obvious loops in float64: what the functions must compute, one number at a time."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def _rows(x: Tensor, dim: int) -> np.ndarray:
    """Return the values in float64, time last."""
    return np.moveaxis(x.detach().double().numpy(), dim, -1)


def _tensor(rows: np.ndarray, dim: int) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(rows, -1, dim)))


def linear_scan(
    x: Tensor,
    decay: Tensor | float,
    *,
    initial: Tensor | None = None,
    reverse: bool = False,
    dim: int = -2,
) -> Tensor:
    """y_t = x_t + decay_t * y_before, where a decay of 0 cuts even NaN."""
    xs = _rows(x, dim)
    decays = _rows(decay, dim) if isinstance(decay, Tensor) else np.full(xs.shape, decay)
    starts = np.zeros(xs.shape[:-1]) if initial is None else initial.detach().double().numpy()
    ys = np.empty_like(xs)
    steps = range(xs.shape[-1])
    for row in np.ndindex(xs.shape[:-1]):
        y = starts[row]
        for t in reversed(steps) if reverse else steps:
            y = xs[row][t] + (0 if decays[row][t] == 0 else decays[row][t] * y)
            ys[row][t] = y
    return _tensor(ys, dim)


def reversed_discounted_returns(
    reward: Tensor, done: Tensor, *, gamma: float, initial: Tensor | None = None, dim: int = -2
) -> tuple[Tensor, Tensor]:
    """R_t = r_t + gamma * carry, and the carry is R_t unless the episode ended with t."""
    rewards, dones = _rows(reward, dim), _rows(done, dim)
    carries = np.zeros(rewards.shape[:-1])
    if initial is not None:
        carries = initial.detach().double().numpy().copy()
    returns = np.empty_like(rewards)
    for row in np.ndindex(rewards.shape[:-1]):
        for t in range(rewards.shape[-1]):
            returns[row][t] = rewards[row][t] + gamma * carries[row]
            carries[row] = 0 if dones[row][t] else returns[row][t]
    return _tensor(returns, dim), torch.from_numpy(carries)


def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    done: Tensor,
    terminated: Tensor,
    *,
    gamma: float,
    lmbda: float,
    dim: int = -2,
) -> tuple[Tensor, Tensor]:
    """Backward in time: terminated means that no value follows, done that no advantage does."""
    rewards, values, next_values = (_rows(x, dim) for x in (reward, value, next_value))
    dones, terminateds = _rows(done, dim), _rows(terminated, dim)
    advantages = np.empty_like(rewards)
    for row in np.ndindex(rewards.shape[:-1]):
        advantage = 0.0
        for t in reversed(range(rewards.shape[-1])):
            delta = rewards[row][t] - values[row][t]
            if not terminateds[row][t]:
                delta += gamma * next_values[row][t]
            if dones[row][t] or terminateds[row][t]:
                advantage = delta
            else:
                advantage = delta + gamma * lmbda * advantage
            advantages[row][t] = advantage
    return _tensor(advantages, dim), _tensor(advantages + values, dim)


def _distance(prediction: float, target: float, kind: str) -> float:
    error = abs(prediction - target)
    if kind == "l1":
        return error
    if kind == "l2":
        return error * error
    return error * error / 2 if error < 1 else error - 0.5


def clipped_critic_loss(
    value: Tensor,
    target: Tensor,
    *,
    old_value: Tensor | None = None,
    clip_value: float | None = None,
    loss_clip: float | None = None,
    kind: str = "smooth_l1",
) -> Tensor:
    """The larger of the losses of the value and of the clipped value, but at most loss_clip."""
    olds = [0.0] * value.numel() if old_value is None else old_value.flatten().tolist()
    out = []
    for v, t, old in zip(value.flatten().tolist(), target.flatten().tolist(), olds, strict=True):
        loss = _distance(v, t, kind)
        if clip_value is not None:
            near = old + min(max(v - old, -clip_value), clip_value)
            loss = max(loss, _distance(near, t, kind))
        if loss_clip is not None:
            loss = min(loss, loss_clip)
        out.append(loss)
    return torch.tensor(out, dtype=torch.float64).reshape(value.shape)


def kl_estimate(log_ratio: Tensor, *, estimator: str) -> Tensor:
    """k1, k2 or k3 of each sample."""
    out = []
    for d in log_ratio.flatten().tolist():
        if estimator == "k1":
            out.append(-d)
        elif estimator == "k2":
            out.append(d * d / 2)
        else:
            out.append(math.exp(d) - 1 - d)
    return torch.tensor(out, dtype=torch.float64).reshape(log_ratio.shape)


def moments(x: Tensor, mask: Tensor | None = None) -> tuple[float, float, float]:
    """Count, mean and sum of squared deviations of the elements that the mask keeps."""
    keep = [True] * x.numel() if mask is None else mask.flatten().tolist()
    kept = [v for v, k in zip(x.flatten().tolist(), keep, strict=True) if k]
    if not kept:
        return 0.0, math.nan, 0.0
    mean = math.fsum(kept) / len(kept)
    return float(len(kept)), mean, math.fsum((v - mean) ** 2 for v in kept)


def mean(x: Tensor, mask: Tensor | None = None) -> float:
    """Mean of the elements that the mask keeps."""
    return moments(x, mask)[1]


def std(x: Tensor, mask: Tensor | None = None, *, correction: int = 1) -> float:
    """Standard deviation of the elements that the mask keeps; NaN without a degree of freedom."""
    count, _, m2 = moments(x, mask)
    return math.sqrt(m2 / (count - correction)) if count > correction else math.nan
