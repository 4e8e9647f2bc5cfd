"""Masked mean and standard deviation, and merging the moments of two samples."""

from __future__ import annotations

import torch
from torch import Tensor

from ppokit.functional._checks import at_least_float32, check_bool, check_float, check_same_shape


def masked_mean(
    x: Tensor, mask: Tensor | None = None, dim: int | tuple[int, ...] | None = None
) -> Tensor:
    r"""Mean over the elements that the mask keeps.

    .. math:: \bar x = \frac{\sum_i m_i x_i}{\sum_i m_i}

    Elements are selected, not multiplied: a masked element may be NaN, and changes neither the mean
    nor its gradient.

    Args:
        x: float tensor.
        mask: bool tensor of the shape of ``x``; None keeps everything.
        dim: dimension or dimensions to reduce; None reduces all.

    Returns:
        The mean, in the dtype of ``x`` (half types accumulate in float32). NaN where nothing is
        kept, as :func:`torch.mean` of nothing is.

    Raises:
        TypeError: ``x`` is not float, or ``mask`` is not bool.
        ValueError: the shapes differ.

    Example:
        >>> import torch
        >>> from ppokit.functional import masked_mean
        >>> x = torch.tensor([1.0, 3.0, float("nan")])
        >>> masked_mean(x, torch.tensor([True, True, False]))
        tensor(2.)
    """
    work, count, dims = _selected(x, mask, dim)
    return (work.sum(dims) / count.sum(dims)).to(x.dtype)


def masked_std(
    x: Tensor,
    mask: Tensor | None = None,
    dim: int | tuple[int, ...] | None = None,
    *,
    correction: int = 1,
) -> Tensor:
    r"""Standard deviation over the elements that the mask keeps.

    .. math:: s = \sqrt{\frac{\sum_i m_i (x_i - \bar x)^2}{\sum_i m_i - correction}}

    Two passes, so it is accurate even if the mean is large beside the standard deviation.

    Args:
        x: float tensor.
        mask: bool tensor of the shape of ``x``; None keeps everything.
        dim: dimension or dimensions to reduce; None reduces all.
        correction: 1 for the unbiased variance, 0 for the population's.

    Returns:
        The standard deviation, in the dtype of ``x``; NaN where fewer than ``1 + correction``
        elements are kept, as :func:`torch.std` gives.

    Raises:
        TypeError: ``x`` is not float, or ``mask`` is not bool.
        ValueError: the shapes differ.

    Example:
        >>> import torch
        >>> from ppokit.functional import masked_std
        >>> x = torch.tensor([1.0, 3.0, 99.0])
        >>> masked_std(x, torch.tensor([True, True, False]))
        tensor(1.4142)
    """
    work, count, dims = _selected(x, mask, dim)
    total = count.sum(dims, keepdim=True)
    deviation = work - work.sum(dims, keepdim=True) / total
    if mask is not None:
        deviation = torch.where(mask, deviation, 0)
    # 0 / 0 is NaN by itself; a negative number of degrees of freedom must be too.
    freedom = (count.sum(dims) - correction).clamp_min(0)
    variance = deviation.square().sum(dims) / freedom
    # The slope of the root at 0 is infinite, and times 0 it is NaN; torch.std takes 0, too.
    positive = variance > 0
    return torch.where(positive, torch.where(positive, variance, 1).sqrt(), variance).to(x.dtype)


def _selected(
    x: Tensor, mask: Tensor | None, dim: int | tuple[int, ...] | None
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    check_float("x", x)
    work = at_least_float32(x)
    dims = tuple(range(x.ndim)) if dim is None else (dim,) if isinstance(dim, int) else dim
    if mask is None:
        return work, work.new_ones(()).expand_as(work), dims
    check_bool("mask", mask)
    check_same_shape({"x": x, "mask": mask})
    return torch.where(mask, work, 0), mask.to(work.dtype), dims


def merge_moments(
    count_a: Tensor, mean_a: Tensor, m2_a: Tensor, count_b: Tensor, mean_b: Tensor, m2_b: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Moments of two samples together, from the moments of each.

    .. math::
        n &= n_a + n_b, \qquad \delta = \bar x_b - \bar x_a \\
        \bar x &= \bar x_a + \delta \, n_b / n, \qquad
        M_2 = M_{2,a} + M_{2,b} + \delta^2 \, n_a n_b / n

    where :math:`M_2 = \sum_i (x_i - \bar x)^2` (Chan, Golub and LeVeque, 1979, "Updating Formulae
    and a Pairwise Algorithm for Computing Sample Variances", equation 2.1). Splitting a sample in
    any way and merging gives the moments of the whole, up to rounding.

    Args:
        count_a: number of elements of the first sample, float64; all six have one shape.
        mean_a: its mean, float64.
        m2_a: its sum of squared deviations, float64.
        count_b: the same of the second sample.
        mean_b: the same of the second sample.
        m2_b: the same of the second sample.

    Returns:
        ``(count, mean, m2)``, float64. An empty sample (count 0) changes nothing, also where its
        mean is NaN, as :func:`masked_mean` of nothing is.

    Raises:
        TypeError: an argument is not float64.
        ValueError: the shapes differ.

    Example:
        >>> import torch
        >>> from ppokit.functional import merge_moments
        >>> f64 = lambda *v: [torch.tensor(x, dtype=torch.float64) for x in v]
        >>> count, mean, m2 = merge_moments(*f64(2, 2, 2), *f64(1, 5, 0))  # {1, 3} and {5}
        >>> count.item(), mean.item(), m2.item()
        (3.0, 3.0, 8.0)
    """
    named = {"count_a": count_a, "mean_a": mean_a, "m2_a": m2_a}
    named |= {"count_b": count_b, "mean_b": mean_b, "m2_b": m2_b}
    for name, tensor in named.items():
        if tensor.dtype is not torch.float64:
            raise TypeError(
                f"{name} has dtype {tensor.dtype}; moments are merged in float64, because in "
                "float32 a count stops growing at 2**24. Convert it with .double()."
            )
    check_same_shape({**named})
    mean_a, m2_a = (torch.where(count_a > 0, moment, 0) for moment in (mean_a, m2_a))
    mean_b, m2_b = (torch.where(count_b > 0, moment, 0) for moment in (mean_b, m2_b))
    count = count_a + count_b
    delta = mean_b - mean_a
    share_b = torch.where(count > 0, count_b / count.clamp_min(1), 0)
    return count, mean_a + delta * share_b, m2_a + m2_b + delta.square() * count_a * share_b
