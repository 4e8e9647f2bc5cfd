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

def instruction_sets() -> tuple[str, ...]:
    """Return the instruction sets of this machine that the kernel is built for, fastest first."""

def use_instruction_set(name: str, /) -> str:
    """Choose one of ``instruction_sets()`` for all that follows; return the one before."""
