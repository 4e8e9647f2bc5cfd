"""The functions in C; each returns NotImplemented for arguments that it does not take."""

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

def sum_of_squares(*tensors: Tensor) -> float | NotImplementedType:
    """Return the sum of the squares of all numbers in float32 tensors."""

def weighted_slopes(
    slopes: Tensor, gradients: tuple[Tensor | None, ...], /
) -> tuple[Tensor | None, ...] | NotImplementedType:
    """Return the P sums over K of numbers times slopes ``[K, P, ...]``; None of nothing."""

_Numbers = tuple[float, float, float, float, float, float, float, float, float]
_Results = tuple[dict[str, Tensor], Tensor, Tensor | None]

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
    numbers: _Numbers,
    kind: str,
    names: tuple[str | None, ...],
    /,
) -> _Results | NotImplementedType:
    """Return PPO's losses and diagnostics of a normal policy by name, and the losses' slopes.

    With noise ``[S, *B, F]`` the policy is a tanh-normal. ``numbers``: bounds of the log-ratio, and
    from above where the advantage is negative; clip value, loss clip; coefficients of entropy,
    critic and KL; weight of a frame. ``names``, None of what is not wanted, of: losses of policy,
    entropy, KL and critic; entropy, value clip fraction, explained variance, kl_approx, clip
    fraction, ESS, largest and mean ratio, kl, dual clip fraction. The slopes are
    ``[3, 2, *B, F]``, of the losses of policy, entropy and KL, in loc and scale; and
    ``[1, 1, *B, 1]``, of the critic's in the value, or None.
    """

def categorical_loss_terms(
    logits: Tensor,
    action: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    value: Tensor | None,
    target: Tensor | None,
    old_value: Tensor | None,
    numbers: _Numbers,
    kind: str,
    names: tuple[str | None, ...],
    /,
) -> _Results | NotImplementedType:
    """The same of a choice by logits ``[*B, F]``; the slopes are ``[3, 1, *B, F]``."""

def lstm_forward(
    x: Tensor,
    hidden: Tensor,
    cell: Tensor,
    weight_x: Tensor,
    weight_h: Tensor,
    bias: Tensor | None,
    gates: Tensor,
    hiddens: Tensor,
    cells: Tensor,
    sizes: list[int],
    /,
) -> NotImplementedType | None:
    """Write gates ``[F, 4 H]`` and states ``[F, H]`` of a layer; the weights are ``[I or H, 4 H]``.

    Frames are packed: ``sizes[t]`` rows have a step t, the longest row first. The bias is
    ``[1, 4 H]``.
    """

def lstm_backward(
    weight_x: Tensor,
    weight_h: Tensor,
    cell: Tensor,
    gates: Tensor,
    cells: Tensor,
    by_hiddens: Tensor | None,
    by_cells: Tensor | None,
    by_gates: Tensor,
    by_hidden: Tensor,
    by_cell: Tensor,
    by_x: Tensor | None,
    sizes: list[int],
    /,
) -> NotImplementedType | None:
    """Write the gradients of what went into the gates, of x, and of the first states.

    The weights are ``[4 H, I or H]``. Those of the first states come as 0.
    """

def gru_forward(
    x: Tensor,
    hidden: Tensor,
    weight_x: Tensor,
    weight_h: Tensor,
    bias_x: Tensor | None,
    bias_h: Tensor | None,
    gates: Tensor,
    of_hidden: Tensor,
    hiddens: Tensor,
    sizes: list[int],
    /,
) -> NotImplementedType | None:
    """The same of gated recurrent units; ``of_hidden`` is what the state adds to the gates."""

def gru_backward(
    weight_x: Tensor,
    weight_h: Tensor,
    hidden: Tensor,
    gates: Tensor,
    of_hidden: Tensor,
    hiddens: Tensor,
    by_hiddens: Tensor | None,
    by_gates: Tensor,
    by_of_hidden: Tensor,
    by_hidden: Tensor,
    by_x: Tensor | None,
    sizes: list[int],
    /,
) -> NotImplementedType | None:
    """The gradients of what x and the state add to the gates, of x, and of the first state."""

def transposed_product(a: Tensor, b: Tensor, c: Tensor, /) -> NotImplementedType | None:
    """Write the product of a transposed ``[F, G]`` and b ``[F, I]`` to c ``[G, I]``."""

def instruction_sets() -> tuple[str, ...]:
    """Return the instruction sets of this machine that the kernel is built for, fastest first."""

def use_instruction_set(name: str, /) -> str:
    """Choose one of ``instruction_sets()`` for all that follows; return the one before."""
