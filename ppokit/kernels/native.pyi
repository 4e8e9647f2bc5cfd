"""The scans in C; every function returns NotImplemented for what it does not take."""

from types import NotImplementedType

from torch import Tensor

def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    done: Tensor,
    terminated: Tensor,
    gamma: float | Tensor,
    lmbda: float | Tensor,
    dim: int,
    /,
) -> tuple[Tensor, Tensor] | NotImplementedType: ...
def discounted_returns(
    reward: Tensor,
    done: Tensor,
    gamma: float | Tensor,
    initial: Tensor | None,
    dim: int,
    /,
) -> tuple[Tensor, Tensor] | NotImplementedType: ...
def return_moments(
    reward: Tensor,
    done: Tensor,
    gamma: float | Tensor,
    initial: Tensor | None,
    dim: int,
    /,
) -> tuple[float, float, Tensor] | NotImplementedType: ...
def linear_scan(
    x: Tensor, decay: Tensor, initial: Tensor | None, reverse: bool, dim: int, /
) -> Tensor | NotImplementedType: ...
def scaled(x: Tensor, divisor: float, bound: float, /) -> Tensor | NotImplementedType:
    """Return x over a divisor, between -bound and bound."""

def count_changes(ids: Tensor, done: Tensor, dim: int, /) -> int | NotImplementedType:
    """Return in how many places an int64 id changes along ``dim`` after a step that is not done."""

def rows_go_on(first: Tensor, known: Tensor, /) -> bool | NotImplementedType:
    """Return whether each id is the one known in its place or, where that is < 0, above all."""

def loss_terms(
    log_prob: Tensor,
    entropy: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    value: Tensor | None,
    target: Tensor | None,
    old_value: Tensor | None,
    numbers: tuple[float, float, float, float, float, float, float, float, float],
    kind: str,
    slopes: Tensor,
    out: Tensor,
    /,
) -> bool | NotImplementedType:
    """Write PPO's losses and diagnostics, and the slopes of the losses, from ``[N, 1]`` each.

    ``numbers``: bounds of the log-ratio, and from above where the advantage is negative; clip
    value, loss clip; coefficients of entropy, critic and KL; weight of a frame. ``slopes``
    ``[4, N, 1]``: of the losses of policy (in the log-probability), entropy (in the entropy),
    critic (in the value) and KL (in the log-probability). ``out``: those four losses, entropy,
    value clip fraction, explained variance, kl_approx, clip fraction, ESS, largest and mean ratio,
    kl, dual clip fraction.
    """

def normal_loss_terms(
    loc: Tensor,
    scale: Tensor,
    action: Tensor,
    noise: Tensor | None,
    middle: float,
    half_width: float,
    log_half_width: float,
    old_log_prob: Tensor,
    advantage: Tensor,
    value: Tensor | None,
    target: Tensor | None,
    old_value: Tensor | None,
    numbers: tuple[float, float, float, float, float, float, float, float, float],
    kind: str,
    slopes: Tensor,
    value_slopes: Tensor,
    out: Tensor,
    /,
) -> bool | NotImplementedType:
    """The same of a normal policy, or of a tanh-normal one where there is noise ``[S, *B, F]``.

    ``slopes`` ``[3, 2, *B, F]``: of the losses of policy, entropy and KL, in loc and scale.
    """

def categorical_loss_terms(
    logits: Tensor,
    action: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    value: Tensor | None,
    target: Tensor | None,
    old_value: Tensor | None,
    numbers: tuple[float, float, float, float, float, float, float, float, float],
    kind: str,
    slopes: Tensor,
    value_slopes: Tensor,
    out: Tensor,
    /,
) -> bool | NotImplementedType:
    """The same of a choice by logits ``[*B, F]``; ``slopes`` ``[3, 1, *B, F]``."""

def instruction_sets() -> tuple[str, ...]:
    """Return the instruction sets of this machine that the kernel is built for, fastest first."""

def use_instruction_set(name: str, /) -> str:
    """Choose one of ``instruction_sets()`` for all that follows; return the one before."""
