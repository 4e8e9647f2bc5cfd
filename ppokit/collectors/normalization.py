"""Observations of mean 0 and spread 1."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from tensordict.utils import NestedKey
from torch import Tensor, nn

from ppokit._keys import as_key, get_tensor, valid_mask
from ppokit._state import WholeState
from ppokit.functional import merge_moments

_LARGEST = 1e150  # whose square, and the sum of many, is a float64


class ObservationNormalizer(WholeState, TensorDictModule):
    r"""Brings observations to mean 0 and spread 1, by the statistics of all that were collected.

    .. math:: o' = clip\left(\frac{o - \mu}{\sqrt{\sigma^2 + \epsilon}}, -c, c\right)

    with the population variance, in float64. As ``observation_transform`` of a
    :class:`GymCollector` the statistics move after each batch, so that all frames of a batch,
    the observations after its last steps included, are normalised alike. Before the first batch
    they are 0 and 1.

    Args:
        shape: of one observation.
        in_key: the observation, float or integer ``[*B, *shape]``.
        out_key: where the normalised one goes, of torch's default dtype; None for ``in_key``.
        clip: bound of what comes out; None for none.
        epsilon: added to the variance.

    Raises:
        ValueError: ``clip`` or ``epsilon`` is not positive; or, in :meth:`update`, an observation
            has another shape.
        KeyError: there is no ``in_key``.

    Example:
        >>> from tensordict import TensorDict
        >>> norm = ObservationNormalizer(2)
        >>> norm.update(TensorDict({"observation": [[1.0, 5.0], [3.0, 5.0]]}, [2]))
        >>> norm(TensorDict({"observation": [3.0, 5.0]}))["observation"]
        tensor([1., 0.])
        >>> norm.freeze().update(TensorDict({"observation": [[99.0, 99.0]]}, [1]))
        >>> norm.mean
        tensor([2., 5.], dtype=torch.float64)
    """

    module: Standardize

    def __init__(
        self,
        shape: int | Sequence[int],
        *,
        in_key: NestedKey = "observation",
        out_key: NestedKey | None = None,
        clip: float | None = 10.0,
        epsilon: float = 1e-8,
    ) -> None:
        for name, value in (("clip", clip), ("epsilon", epsilon)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}.")
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        out_key = in_key if out_key is None else out_key
        super().__init__(Standardize(shape, clip, epsilon), [as_key(in_key)], [as_key(out_key)])

    @property
    def mean(self) -> Tensor:
        """The mean of all observations, float64."""
        return self.module.mean

    @property
    def variance(self) -> Tensor:
        """Their population variance, float64; 1 before there are any."""
        return self.module.variance()

    @property
    def frozen(self) -> bool:
        """Whether the statistics stand still."""
        return bool(self.module.frozen)

    def freeze(self) -> ObservationNormalizer:
        """Stop the statistics, for evaluation; return self."""
        self.module.frozen.fill_(True)
        return self

    def unfreeze(self) -> ObservationNormalizer:
        """Let the statistics move again; return self."""
        self.module.frozen.fill_(False)
        return self

    def update(self, observations: TensorDictBase) -> None:
        """Count in observations that were not normalised, unless frozen or masked.

        Raises:
            ValueError: they have another shape, or are not finite; the statistics stay as they are.
        """
        key = self.in_keys[0]
        x = get_tensor(observations, key, fix="Set in_key to the name of the observation.")
        self.module.check_shape(x, repr(key))
        shape = self.mean.shape
        if self.frozen:
            return
        mask = valid_mask(observations)
        valid = x.reshape(-1, *shape) if mask is None else x[mask]
        valid = valid.detach().to(self.mean.device).double()
        if not (valid.abs() <= _LARGEST).all():
            bad = ~(x.double().abs() <= _LARGEST)
            if mask is not None:
                bad[~mask] = False
            raise ValueError(
                f"{key!r} is nan, inf or beyond {_LARGEST:g} in {int(bad.sum())} of {bad.numel()} "
                f"places, first at {bad.nonzero()[0].tolist()}. The statistics stay as they were: "
                "look at the environment that returned it."
            )
        self.module.count_in(valid)


class Standardize(nn.Module):
    """Subtracts a running mean and divides by a running spread."""

    count: Tensor
    mean: Tensor
    m2: Tensor
    rate: Tensor
    frozen: Tensor

    def __init__(self, shape: tuple[int, ...], clip: float | None, epsilon: float) -> None:
        super().__init__()
        self.clip, self.epsilon = clip, epsilon
        for name in ("count", "mean", "m2"):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("rate", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("frozen", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` at mean 0 and spread 1."""
        self.check_shape(x, "The observation")
        x = (x - self.mean) * self.rate
        return (x if self.clip is None else x.clamp_(-self.clip, self.clip)).to(
            torch.get_default_dtype()
        )

    def check_shape(self, x: Tensor, what: str) -> None:
        """Raise where statistics and observations would be broadcast over each other."""
        shape = self.mean.shape
        if x.shape[x.ndim - len(shape) :] != shape:
            raise ValueError(
                f"{what} has shape {list(x.shape)}, which does not end in {list(shape)}, the "
                "shape of one observation that ObservationNormalizer was made for."
            )

    def variance(self) -> Tensor:
        """Return the population variance, 1 where nothing has been seen."""
        return torch.where(self.count > 0, self.m2 / self.count.clamp_min(1), 1)

    @torch.no_grad()
    def count_in(self, x: Tensor) -> None:
        """Merge observations ``[N, *shape]`` (float64) into the statistics."""
        mean = x.mean(0)
        count = torch.full_like(self.count, len(x))
        moments = merge_moments(
            self.count, self.mean, self.m2, count, mean, (x - mean).square().sum(0)
        )
        for buffer, value in zip((self.count, self.mean, self.m2), moments, strict=True):
            buffer.copy_(value)
        self.rate.copy_((self.variance() + self.epsilon).rsqrt())
