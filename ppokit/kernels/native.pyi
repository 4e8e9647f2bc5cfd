"""The functions in C; each returns NotImplemented for arguments that it does not take."""

from typing import Any

from torch import Tensor

def gae(*arguments: Any) -> Any:
    """``(reward, value, next_value, done, terminated, gamma, lmbda, dim)``: advantage, target."""

def reversed_discounted_returns(*arguments: Any) -> Any:
    """``(reward, done, gamma, initial, dim)``: returns, and what is carried over."""

def return_moments(*arguments: Any) -> Any:
    """``(reward, done, gamma, initial, dim)``: mean, sum of squares, what is carried over."""

def linear_scan(*arguments: Any) -> Any:
    """``(x, decay, initial, reverse, dim)``: the scan."""

def sum_of_squares(*tensors: Tensor) -> Any:
    """Return the sum of the squares of all numbers in float32 tensors."""

def weighted_slopes(slopes: Tensor, gradients: tuple[Tensor | None, ...], /) -> Any:
    """Return the P sums over K of numbers times slopes ``[K, P, ...]``; None of nothing."""

def normal_loss_terms(*arguments: Any) -> Any:
    """Return PPO's losses and diagnostics of a normal policy by name, and the losses' slopes.

    Arguments: loc, scale, action; noise, middle, half_width, log_half_width; old_log_prob,
    advantage, value, target, old_value; numbers, kind of critic loss, names.

    With noise ``[S, *B, F]`` the policy is a tanh-normal. ``numbers``: bounds of the log-ratio, and
    from above where the advantage is negative; clip value, loss clip; coefficients of entropy,
    critic and KL; weight of a frame. ``names``, None of what is not wanted, of: losses of policy,
    entropy, KL and critic; entropy, value clip fraction, explained variance, kl_approx, clip
    fraction, ESS, largest and mean ratio, kl, dual clip fraction. The slopes are
    ``[3, 2, *B, F]``, of the losses of policy, entropy and KL, in loc and scale; and
    ``[1, 1, *B, 1]``, of the critic's in the value, or None.
    """

def categorical_loss_terms(*arguments: Any) -> Any:
    """The same of a choice by logits ``[*B, F]``; the slopes are ``[3, 1, *B, F]``.

    Arguments: logits, action; from old_log_prob on as above.
    """

def instruction_sets() -> tuple[str, ...]:
    """Return the instruction sets of this machine that the kernel is built for, fastest first."""

def use_instruction_set(name: str, /) -> str:
    """Choose one of ``instruction_sets()`` for all that follows; return the one before."""
