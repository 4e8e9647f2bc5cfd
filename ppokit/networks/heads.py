"""Heads: from features to the parameters of the distribution of an action."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from tensordict.nn import AddStateIndependentNormalScale
from torch import Tensor, nn
from torch import distributions as d
from torchrl.data import Binary, Categorical, MultiCategorical, OneHot, TensorSpec
from torchrl.modules import (
    IndependentNormal,
    MaskedCategorical,
    MaskedOneHotCategorical,
    OneHotCategorical,
    TanhNormal,
)

from ppokit.networks.encoders import orthogonal

Device = torch.device | str | None
_SINGLE = {  # without and with a mask
    Categorical: (d.Categorical, MaskedCategorical),
    OneHot: (OneHotCategorical, MaskedOneHotCategorical),
}
_GAIN = 0.01  # of a policy's last layer (Andrychowicz et al., 2021, arXiv:2006.05990, section 3.2)


class Head(NamedTuple):
    """The last layer of a policy, and the distribution of the parameters that it returns."""

    layer: nn.Module
    parameters: tuple[str, ...]
    distribution: Callable[..., d.Distribution]
    options: Mapping[str, object]


class _Scored(d.Independent):
    """Choices that are drawn one by one and scored together, from logits ``[*B, D, ...]``."""

    base_distribution: Any

    def __init__(self, logits: Tensor) -> None:
        super().__init__(self.base_distribution(logits=logits), 1)

    @property
    def deterministic_sample(self) -> Tensor:
        """The most probable choices."""
        return self.base_dist.mode.nan_to_num(0.0)  # torch: NaN for a Bernoulli of 0.5


class MultiChoice(_Scored):
    """D choices as indices ``[*B, D]``, from logits ``[*B, D, N]``."""

    base_distribution = d.Categorical


class MultiOneHotChoice(_Scored):
    """D choices as one-hot vectors ``[*B, D, N]``, from logits ``[*B, D, N]``."""

    base_distribution = OneHotCategorical


class MultiBernoulli(_Scored):
    """Bits ``[*B, D]``, from logits ``[*B, D]``."""

    base_distribution = d.Bernoulli


class _Choices(nn.Module):
    """Logits ``[*B, D, N]`` of D choices, minus infinity beyond the number of each."""

    def __init__(self, numbers: list[int]) -> None:
        super().__init__()
        self.numbers = numbers

    def forward(self, x: Tensor) -> Tensor:
        most, parts = max(self.numbers), x.split(self.numbers, -1)
        return torch.stack([F.pad(x, (0, most - x.shape[-1]), value=-math.inf) for x in parts], -2)


def make_head(
    spec: Any, inputs: int, squash: bool, log_scale: float, mask: TensorSpec | None, device: Device
) -> Head:
    """Return the head for torchrl's spec of an action.

    Raises:
        ValueError: an interval has no bounds to squash to, or a mask belongs to another space.
        TypeError: there is no head for the spec.
    """
    kind, shape = type(spec), tuple(spec.shape)
    is_choice, dims = kind in (Categorical, OneHot), len(shape) - (kind is OneHot)
    is_single = is_choice and dims == 0
    if mask is not None and not (is_single and tuple(mask.shape) == (spec.space.n,)):
        raise ValueError(
            f"A mask is supported for one Discrete action, with a flag for each choice; this mask "
            f"has shape {list(mask.shape)}, and the action is a {kind.__name__} of shape "
            f"{list(shape)}. Pass mask_key=None and let the environment ignore choices that are "
            "impossible, or wrap it so that the action is a Discrete of all combinations."
        )
    if is_single:
        plain, masked = _SINGLE[kind]
        layer = _linear(inputs, spec.space.n)
        return Head(layer, ("logits",), plain if mask is None else masked, {})
    if dims == 1 and (is_choice or kind is MultiCategorical):
        numbers = [spec.space.n] * shape[0] if is_choice else spec.nvec.tolist()
        layer = nn.Sequential(_linear(inputs, sum(numbers)), _Choices(numbers))
        return Head(layer, ("logits",), MultiOneHotChoice if kind is OneHot else MultiChoice, {})
    if kind is Binary and len(shape) == 1:
        return Head(_linear(inputs, shape[0]), ("logits",), MultiBernoulli, {})
    if spec.domain != "continuous":
        raise TypeError(
            f"There is no head for {spec}. A Box has floating-point numbers; Discrete, "
            "MultiDiscrete and MultiBinary actions have at most one dimension, and the unequal "
            "numbers of a MultiDiscrete are indices: GymEnv(..., categorical_action_encoding=True)."
            " Wrap the environment."
        )
    return _normal(spec, inputs, squash, log_scale, device)


def _normal(spec: Any, inputs: int, squash: bool, log_scale: float, device: Device) -> Head:
    shape, options = tuple(spec.shape), {}
    layers = [_linear(inputs, math.prod(shape))]
    if len(shape) > 1:
        layers.append(nn.Unflatten(-1, shape))
        options = {"event_dims" if squash else "event_dim": len(shape)}
    layers.append(AddStateIndependentNormalScale(shape, init_value=log_scale))
    if not squash:
        return Head(nn.Sequential(*layers), ("loc", "scale"), IndependentNormal, options)
    low, high = spec.space.low, spec.space.high  # the largest numbers where there are no bounds
    if not ((high - low).isfinite() & (low < high)).all():
        raise ValueError(
            f"squash=True maps actions to the interval between the bounds, and those of {spec} are "
            "not finite, or equal. Leave squash out, or bound the space (ClipAction unbounds it)."
        )
    options |= {"low": low.to(device), "high": high.to(device)}
    return Head(nn.Sequential(*layers), ("loc", "scale"), TanhNormal, options)


def _linear(inputs: int, outputs: int) -> nn.Module:
    return orthogonal(nn.Linear(inputs, outputs), _GAIN)
