"""The scans in Triton: a block of rows per program, sequential over time.

A row is one trajectory of a contiguous tensor ``[outer, T, inner]``. Discounts are float64 tensors
of one number, so that no call reads a number from the device.
"""

from __future__ import annotations

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# Pyright takes "triton" for this file.
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

ROWS = 32  # of a program: one warp


@triton.jit
def _place(rows, steps, inner, BLOCK: tl.constexpr):
    """Return the places of the first steps of a block of rows, and which rows there are."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return row // inner * steps * inner + row % inner, row, row < rows


@triton.jit
def _step(x, decay, y):
    """Return x + decay * y; a decay of 0 is a cut, which not even a NaN crosses."""
    return tl.where(decay == 0, x, x + decay * y)


@triton.jit
def _scan(
    x_at, decay_at, initial_at, y_at, rows, steps, inner, REVERSE: tl.constexpr, BLOCK: tl.constexpr
):
    first, row, is_row = _place(rows, steps, inner, BLOCK)
    y = tl.load(initial_at + row, is_row, 0.0)
    for n in range(steps):
        at = first + (steps - 1 - n if REVERSE else n) * inner
        y = _step(tl.load(x_at + at, is_row, 0.0), tl.load(decay_at + at, is_row, 0.0), y)
        tl.store(y_at + at, y, is_row)


@triton.jit
def _returns(
    reward_at,
    done_at,
    initial_at,
    carry_at,
    y_at,
    gamma_at,
    rows,
    steps,
    inner,
    BLOCK: tl.constexpr,
):
    first, row, is_row = _place(rows, steps, inner, BLOCK)
    carry = tl.load(initial_at + row, is_row, 0.0)
    gamma = tl.load(gamma_at).to(carry.dtype)
    for n in range(steps):
        at = first + n * inner
        y = _step(tl.load(reward_at + at, is_row, 0.0), gamma, carry)
        tl.store(y_at + at, y, is_row)
        carry = tl.where(tl.load(done_at + at, is_row, 0) != 0, 0.0, y)
    tl.store(carry_at + row, carry, is_row)


@triton.jit
def _gae(
    reward_at,
    value_at,
    next_value_at,
    done_at,
    terminated_at,
    advantage_at,
    target_at,
    gamma_at,
    lmbda_at,
    rows,
    steps,
    inner,
    BLOCK: tl.constexpr,
):
    first, _, is_row = _place(rows, steps, inner, BLOCK)
    gamma, lmbda = tl.load(gamma_at), tl.load(lmbda_at)
    advantage = tl.zeros((BLOCK,), reward_at.dtype.element_ty)
    both, gamma = (gamma * lmbda).to(advantage.dtype), gamma.to(advantage.dtype)
    for n in range(steps):
        at = first + (steps - 1 - n) * inner
        value = tl.load(value_at + at, is_row, 0.0)
        is_terminated = tl.load(terminated_at + at, is_row, 0) != 0
        is_end = is_terminated | (tl.load(done_at + at, is_row, 0) != 0)
        next_value = tl.where(is_terminated, 0.0, tl.load(next_value_at + at, is_row, 0.0))
        delta = tl.load(reward_at + at, is_row, 0.0) + gamma * next_value - value
        advantage = _step(delta, tl.where(is_end, 0.0, both), advantage)
        tl.store(advantage_at + at, advantage, is_row)
        tl.store(target_at + at, advantage + value, is_row)


def _launch(kernel: Any, sizes: tuple[int, int, int], *arguments: Any, **options: Any) -> None:
    outer, steps, inner = sizes
    rows = outer * inner
    grid = (triton.cdiv(rows, ROWS),)
    kernel[grid](*arguments, rows, steps, inner, BLOCK=ROWS, num_warps=1, **options)


def scan(
    _: bool,
    outer: int,
    steps: int,
    inner: int,
    x: Tensor,
    decay: Tensor,
    initial: Tensor | None,
    y: Tensor,
    reverse: float,
) -> None:
    """Write the linear recurrence ``y_t = x_t + decay_t * y_{t-1}``; reversed ``y_{t+1}``."""
    start = x.new_zeros(outer * inner) if initial is None else initial
    _launch(_scan, (outer, steps, inner), x, decay, start, y, REVERSE=bool(reverse))


def returns(
    _: bool,
    outer: int,
    steps: int,
    inner: int,
    reward: Tensor,
    done: Tensor,
    initial: Tensor | None,
    carry: Tensor,
    result: Tensor,
    gamma: Tensor,
) -> None:
    """Write the reversed discounted returns and their carry."""
    start = reward.new_zeros(outer * inner) if initial is None else initial
    _launch(_returns, (outer, steps, inner), reward, done, start, carry, result, gamma)


def gae(_: bool, outer: int, steps: int, inner: int, *tensors: Tensor) -> None:
    """Write advantages and value targets; arguments as in C."""
    _launch(_gae, (outer, steps, inner), *tensors)
