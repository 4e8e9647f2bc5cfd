"""The scans in Triton: a tile of rows and steps per program, or rows step by step.

A row is one trajectory of a contiguous tensor ``[outer, T, inner]``. Discounts are float64 tensors
of one number, so that no call reads a number from the device.
"""

from __future__ import annotations

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
# Pyright takes "triton" for this file.
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

ROWS = 32  # of a program: one warp
TILE = 256  # frames of a program at a time
MOST_STEPS = 512  # of a tile, where the steps of a row are adjacent in memory
MOST_STEPS_APART = 8  # where rows are adjacent


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
def _both(decay, x, next_decay, next_x):
    """Return decay and sum of two neighbouring pieces of a row, given in their order.

    A product of decays that underflows would be a cut: it stays a small number.
    """
    tiny = 1e-37 if next_x.dtype == tl.float32 else 1e-307
    product = tl.maximum(decay * next_decay, tiny)
    is_cut = (decay == 0) | (next_decay == 0)
    return tl.where(is_cut, 0.0, product), _step(next_x, next_decay, x)


@triton.jit
def _tile(x, decay, carry, STEPS: tl.constexpr):
    """Return the reversed recurrence along the first dimension of a tile, and its first step."""
    decay, x = tl.associative_scan((decay, x), 0, _both, reverse=True)
    y = _step(x, decay, carry[None, :])
    is_first = tl.arange(0, STEPS)[:, None] == 0
    return y, tl.sum(tl.where(is_first, y, 0.0), 0)


@triton.jit
def _scan(
    x_at, decay_at, initial_at, y_at, rows, steps, inner, REVERSE: tl.constexpr, BLOCK: tl.constexpr
):
    first, row, is_row = _place(rows, steps, inner, BLOCK)
    y = tl.load(initial_at + row, is_row, 0.0)
    at = first + tl.cast(steps - 1, tl.int64) * inner if REVERSE else first
    for _ in range(steps):
        y = _step(tl.load(x_at + at, is_row, 0.0), tl.load(decay_at + at, is_row, 0.0), y)
        tl.store(y_at + at, y, is_row)
        at += -inner if REVERSE else inner


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
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first, _, is_row = _place(rows, steps, inner, BLOCK)
    gamma, lmbda = tl.load(gamma_at), tl.load(lmbda_at)
    carry = tl.zeros((BLOCK,), reward_at.dtype.element_ty)
    both, gamma = (gamma * lmbda).to(carry.dtype), gamma.to(carry.dtype)
    for start in range(0, steps, STEPS):
        n = (steps - 1) // STEPS * STEPS - start + tl.arange(0, STEPS)[:, None].to(tl.int64)
        at, there = first[None, :] + n * inner, (n < steps) & is_row[None, :]
        value = tl.load(value_at + at, there, 0.0)
        is_terminated = tl.load(terminated_at + at, there, 0) != 0
        is_end = is_terminated | (tl.load(done_at + at, there, 0) != 0)
        next_value = tl.where(is_terminated, 0.0, tl.load(next_value_at + at, there, 0.0))
        delta = tl.load(reward_at + at, there, 0.0) + gamma * next_value - value
        advantage, carry = _tile(delta, tl.where(is_end, 0.0, both), carry, STEPS)
        tl.store(advantage_at + at, advantage, there)
        tl.store(target_at + at, advantage + value, there)


def _launch(
    kernel: Any, sizes: tuple[int, int, int], most: int, *arguments: Any, **options: Any
) -> None:
    """Call a kernel for blocks of at most ``most`` rows."""
    outer, steps, inner = sizes
    rows = outer * inner
    block = min(triton.next_power_of_2(rows), most)
    grid = (triton.cdiv(rows, block),)
    kernel[grid](*arguments, rows, steps, inner, BLOCK=block, **options)


def scan(
    outer: int,
    steps: int,
    inner: int,
    x: Tensor,
    decay: Tensor,
    initial: Tensor | None,
    y: Tensor,
    reverse: bool,
) -> None:
    """Write the linear recurrence ``y_t = x_t + decay_t * y_{t-1}``; reversed ``y_{t+1}``."""
    start = x.new_zeros(outer * inner) if initial is None else initial
    options = {"REVERSE": reverse, "num_warps": 1}
    _launch(_scan, (outer, steps, inner), ROWS, x, decay, start, y, **options)


def gae(outer: int, steps: int, inner: int, *tensors: Tensor) -> None:
    """Write advantages and value targets, by tiles that are long where neighbours are adjacent."""
    longest = MOST_STEPS if inner == 1 else MOST_STEPS_APART
    tile = max(2, min(triton.next_power_of_2(steps), longest))
    options = {"STEPS": tile, "num_warps": 2}
    _launch(_gae, (outer, steps, inner), max(TILE // tile, 1), *tensors, **options)
