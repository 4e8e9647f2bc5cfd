"""Observations standardized by running statistics."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor, nn

from ppokit._batch import (
    MASK_KEY,
    State,
    as_key,
    check_tensordict,
    get_tensor,
    in_keys_of,
    out_keys_of,
    valid_mask,
)
from ppokit._calls import leaves
from ppokit._checks import Checked, positive
from ppokit._state import WholeState, apply_without_cast
from ppokit.distributed import gather_over_ranks, raise_together, resolve_group
from ppokit.functional import merge_moments

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_LARGEST = 1e150  # its square, and the sum of many squares, fit into float64


def _of_module(name: str) -> Any:
    """Return an attribute that is one of the inner module."""
    return property(
        lambda x: getattr(x.module, name), lambda x, value: setattr(x.module, name, value)
    )


class ObservationNormalizer(WholeState, TensorDictModule):
    r"""Standardizes observations by the mean and variance of all observations collected so far.

    .. math:: o' = clip\left(\frac{o - \mu}{\sqrt{\sigma^2 + \epsilon}}, -c, c\right)

    with the population variance, in float64, merged batch by batch (Chan et al., 1983). Before the
    first batch mean and variance are 0 and 1. There are two ways to use it:

    - As ``observation_transform`` of a :class:`GymCollector`. The collector calls :meth:`update`
      after every ``frames_per_batch`` frames, so all frames of a batch are normalized alike, but
      for ``trajs_per_batch``. In a worker of torchrl's collectors it must be frozen: workers do
      not share statistics.
    - As the first module of actor and critic, with ``out_key``, while the batch holds the raw
      observation. Call :meth:`update` on each batch after training on it. The statistics are then
      buffers of the policy and reach workers with its weights, on other machines, too.

    Args:
        shape: shape of one observation.
        in_key: the observation, float or integer ``[*B, *shape]``.
        out_key: where the normalized observation is written, in torch's default dtype; None for
            ``in_key``.
        clip: bound of the normalized observation; None for none.
        epsilon: added to the variance.
        mask_key: the mask of valid frames; :meth:`update` counts no others.
        group: ranks that share statistics. Each calls :meth:`update` once per batch, and one
            all-reduce merges the batches of all. None is the default group if
            ``torch.distributed`` is initialized. All ranks freeze alike; a frozen normalizer
            exchanges nothing.

    Raises:
        ValueError: ``clip`` or ``epsilon`` is not positive; or, in :meth:`update`, an observation
            has another shape or is not finite.
        KeyError: there is no ``in_key``.
        RuntimeError: another rank raises in :meth:`update`.

    Example:
        >>> from tensordict import TensorDict
        >>> from ppokit import ObservationNormalizer
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
        mask_key: NestedKey = MASK_KEY,
        group: ProcessGroup | None = None,
    ) -> None:
        resolve_group(group)
        sizes = tuple(shape) if isinstance(shape, Iterable) else (shape,)
        if not all(isinstance(x, Integral) and x >= 0 for x in sizes):
            raise ValueError(f"shape must be that of one observation, such as (4,); got {shape!r}.")
        out_key = in_key if out_key is None else out_key
        super().__init__(Standardize(sizes, clip, epsilon), [as_key(in_key)], [as_key(out_key)])
        self.mask_key, self.group = as_key(mask_key), group

    clip, epsilon = _of_module("clip"), _of_module("epsilon")

    @property
    def mean(self) -> Tensor:
        """The mean of all observations, float64."""
        return self.module.mean

    @property
    def variance(self) -> Tensor:
        """Their population variance, float64; 1 before there are any."""
        return self.module.variance()

    @property
    def count(self) -> int:
        """The number of observations."""
        return int(self.module.count.flatten()[0]) if self.module.count.numel() else 0

    @property
    def frozen(self) -> bool:
        """Whether :meth:`update` changes nothing."""
        return bool(self.module.frozen)

    def freeze(self) -> ObservationNormalizer:
        """Stop the statistics, for evaluation; return self."""
        self.module.frozen.fill_(True)
        return self

    def unfreeze(self) -> ObservationNormalizer:
        """Let the statistics move again; return self."""
        self.module.frozen.fill_(False)
        return self

    def check_state(self, state: State) -> None:
        """Raise a ValueError where statistics are not finite, or below 0."""
        for name, x in state.items():
            if not x.isfinite().all() or (not name.endswith("mean") and (x < 0).any()):
                raise ValueError(f"{name!r} is {x.tolist()}: it must be finite and in range.")

    def update(self, observations: TensorDictBase) -> None:
        """Count observations that were not normalized, unless frozen or masked.

        Raises:
            ValueError: they have another shape, or are not finite; the statistics stay as they are.
            RuntimeError: another rank raises; no rank has counted its batch.
        """
        if self.frozen:
            return
        moments = raise_together(lambda: self._moments(observations), self.group)
        if (ranks := resolve_group(self.group)) is not None:
            before = torch.stack([self.module.count, self.mean])
            rows = gather_over_ranks(torch.cat([before, moments]).tolist(), ranks)
            if not torch.equal(rows[:, :2], rows[:1, :2].expand_as(rows[:, :2])):
                raise RuntimeError(
                    "The ranks' observation statistics differ before this batch. Load one state on "
                    "all ranks, and call update() once per batch on each."
                )
            self.module.merge(rows[:, 2:].to(self.mean.device).unbind(0))
        else:
            self.module.merge([moments])

    def _moments(self, observations: TensorDictBase) -> Tensor:
        """Return count, mean and sum of squared deviations ``[3, *shape]``, float64."""
        key = self.in_keys[0]
        check_tensordict(observations, who="ObservationNormalizer")
        x = get_tensor(observations, key, fix="Set in_key to the name of the observation.")
        self.module.check_shape(x, repr(key))
        mask = valid_mask(observations, self.mask_key)
        valid = (x if mask is None else x[mask]).detach().to(self.mean.device).double()
        frames = valid.shape[: valid.ndim - self.mean.ndim].numel()  # -1 fails without numbers
        valid = valid.reshape(frames, *self.mean.shape)
        if not (valid.abs() <= _LARGEST).all():
            bad = ~(x.double().abs() <= _LARGEST)
            if mask is not None:
                bad[~mask] = False
            raise ValueError(
                f"{key!r} is nan, inf or beyond {_LARGEST:g} in {int(bad.sum())} of {bad.numel()} "
                f"places, first at {bad.nonzero()[0].tolist()}. The statistics stay as they were."
            )
        count = torch.full_like(self.mean, len(valid))
        mean = valid.sum(0) / count.clamp_min(1)
        return torch.stack([count, mean, (valid - mean).square().sum(0)])


def is_frozen(part: object) -> bool:
    """Return whether a part of a transform counts no more observations."""
    return getattr(part, "frozen", False)


def updated_parts(transform: TensorDictModuleBase | None) -> list[Any]:
    """Return the parts of a transform whose ``update`` takes the raw observations of a batch.

    That is the transform itself, or the modules of a (nested) sequence that have an ``update``.

    Raises:
        ValueError: one of them reads an entry that a module before it writes.
    """
    found, written = [], set()
    for part in leaves(transform):
        held = part.modules() if isinstance(part, nn.Module) else ()
        update = getattr(part, "update", None)  # also of a TensorDictModule's network
        is_module = update is None or isinstance(update, nn.Module)  # of that name
        of_containers = nn.ModuleDict.update, nn.ParameterDict.update
        is_own = not (isinstance(update, MethodType) and update.__func__ in of_containers)
        if not is_module and is_own:
            behind = written & {*map(as_key, in_keys_of(part))}
            if behind and not is_frozen(part):
                raise ValueError(
                    f"A {type(part).__name__} reads {sorted(map(str, behind))}, which a module "
                    "before it writes, and would count raw observations. Put it first."
                )
            found.append(part)
        elif any(isinstance(x, ObservationNormalizer) and not x.frozen for x in held):
            fix = "update() that would move its statistics: write one, or use TensorDictSequential."
            said = f"The {type(part).__name__} holds an ObservationNormalizer, and has no {fix}"
            warnings.warn(said, stacklevel=2)
        written |= {*map(as_key, out_keys_of(part))}
    return found


class Standardize(nn.Module):
    """Subtracts a running mean and divides by a running standard deviation."""

    clip = positive(optional=True)
    epsilon = Checked(lambda x: 0 < x < math.inf, "be positive and finite")
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
        self.register_load_state_dict_post_hook(Standardize._update_rate)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` at mean 0 and standard deviation 1."""
        self.check_shape(x, "The observation")
        x = (x.double() - self.mean) * self.rate
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
    def merge(self, moments: Sequence[Tensor]) -> None:
        """Merge moments ``[3, *shape]`` (float64) of observations into the statistics."""
        merged = self.count, self.mean, self.m2
        for own in moments:
            merged = merge_moments(*merged, *own)
        for buffer, value in zip((self.count, self.mean, self.m2), merged, strict=True):
            buffer.copy_(value)
        self._update_rate()

    @torch.no_grad()
    def _update_rate(self, *_: object) -> None:
        rate = (self.variance() + self.epsilon).rsqrt()
        self.rate.copy_(torch.where(self.count > 0, rate, 1))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "epsilon" and "frozen" in self._buffers:
            self._update_rate()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Standardize:
        return apply_without_cast(self, super()._apply, fn, recurse)
