"""The scans in C, on addresses: :mod:`ppokit.kernels.cpu` checks the tensors."""

def gae(is_double: bool, outer: int, steps: int, inner: int, /, *rest: float) -> None:
    """Write the last two of ``(reward, value, next_value, done, terminated, advantage, target)``.

    After these addresses come gamma and lambda.
    """

def returns(
    is_double: bool, outer: int, steps: int, inner: int, /, *rest: float
) -> tuple[float, float]:
    """Return mean and sum of squared deviations of the discounted returns.

    After the addresses ``(reward, done, initial, carry, returns)`` comes gamma. Initial and carry
    are float64; initial and returns may be 0.
    """

def scan(is_double: bool, outer: int, steps: int, inner: int, /, *rest: float) -> None:
    """Write the last of ``(x, decay, initial, y)``; initial may be 0.

    After these addresses comes 1.0 for a scan from the last step to the first.
    """
