"""Encoders: from the observations of an environment to one vector of features."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torchrl.data import Categorical, MultiCategorical, Stacked, TensorSpec

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)
_SMALLEST_IMAGE = 36  # pixels a side that the three convolutions need


def make_encoder(
    specs: Sequence[TensorSpec], hidden: Sequence[int], activation: Callable[..., nn.Module]
) -> tuple[nn.Sequential, int]:
    """Return the encoder of one or more observations, each ``[*B, *shape]``, and its features F.

    Their features are joined, and pass the hidden layers with the activation after each.
    """
    inputs = [_input(spec) for spec in specs]
    with torch.no_grad():
        encoded = [x(spec.zero().unsqueeze(0)) for x, spec in zip(inputs, specs, strict=True)]
    sizes = [sum(x.shape[-1] for x in encoded), *hidden]
    layers: list[nn.Module] = [Joined(inputs)] if len(inputs) > 1 else inputs
    for before, after in itertools.pairwise(sizes):
        layers += [orthogonal(nn.Linear(before, after)), activation()]
    return (nn.Sequential if len(specs) == 1 else Several)(*layers), sizes[-1]


class Several(nn.Sequential):
    """Modules in a row, of which the first takes several tensors."""

    def forward(self, *inputs: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the output of the last module."""
        first, *others = self
        return reduce(lambda x, module: module(x), others, first(*inputs))


class Joined(nn.ModuleList):
    """The features ``[*B, F]`` of several observations, each by its own module."""

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the features side by side."""
        return torch.cat([module(x) for module, x in zip(self, inputs, strict=True)], -1)


class Numbers(nn.Module):
    """An observation in torch's default dtype; bytes are divided by the largest of their space.

    Floats that a transform has made of bytes are not.

    Args:
        largest: of each byte ``[*shape]``, of which 0 divides by 1; None for other numbers.
    """

    scale: Tensor | None

    def __init__(self, largest: Tensor | None) -> None:
        super().__init__()
        scale = None if largest is None else 1 / largest.clamp_min(1).to(torch.get_default_dtype())
        if scale is not None and (scale == scale.flatten()[0]).all():
            scale = scale.flatten()[0].clone()
        self.register_buffer("scale", scale, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the numbers, in the same shape."""
        number = x.to(torch.get_default_dtype())
        return number * self.scale if x.dtype is torch.uint8 and self.scale is not None else number


class Flatten(nn.Module):
    """An observation as one vector.

    Args:
        dims: dimensions of an observation.
        numbers: makes numbers of it.
        choices: of indices, which become one-hot vectors; 0 for other observations.
    """

    def __init__(self, dims: int, numbers: Numbers, choices: int = 0) -> None:
        super().__init__()
        self.dims, self.numbers, self.choices = dims, numbers, choices

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[*B, F]`` for ``[*B, *shape]``."""
        dims = self.dims
        if not self.choices:
            x = self.numbers(x)
            return x.flatten(-dims) if dims else x.unsqueeze(-1)
        one_hot = x.unsqueeze(-1) == torch.arange(self.choices, device=x.device)
        return self.numbers(one_hot.flatten(-dims - 1))


class NatureCNN(nn.Module):
    """The convolutions of Mnih et al., 2015 (Nature 518, Methods), and 512 units.

    Args:
        shape: of an image or a stack of images: H and W, and channels before or behind them.
        height_dim: the dimension H in it, before W.
        numbers: makes numbers of its pixels.
    """

    def __init__(self, shape: torch.Size, height_dim: int, numbers: Numbers) -> None:
        super().__init__()
        self.dims, self.height_dim, self.numbers = len(shape), height_dim, numbers
        channels = math.prod(shape) // math.prod(shape[height_dim : height_dim + 2])
        layers: list[nn.Module] = []
        for outputs, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            layers += [orthogonal(nn.Conv2d(channels, outputs, size, stride)), nn.ReLU()]
            channels = outputs
        self.convolutions = nn.Sequential(*layers, nn.Flatten())
        with torch.no_grad():
            size = self.convolutions(self._channels_first(torch.zeros(1, *shape))).shape[-1]
        self.linear = nn.Sequential(orthogonal(nn.Linear(size, 512)), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """Return features ``[*B, 512]`` of images."""
        batch = x.shape[: x.ndim - self.dims]
        images = self.numbers(x.reshape(-1, *x.shape[x.ndim - self.dims :]))
        features = self.linear(self.convolutions(self._channels_first(images)))
        return features.reshape(*batch, 512)

    def _channels_first(self, x: Tensor) -> Tensor:
        height = self.height_dim + 1
        return (
            x.movedim((height, height + 1), (-2, -1)).flatten(1, -3) if x.ndim > 3 else x[:, None]
        )


def _input(spec: TensorSpec) -> nn.Module:
    if type(spec) in (Categorical, MultiCategorical):  # a Binary is a subclass
        several, known = isinstance(spec, MultiCategorical), cast("Any", spec)
        choices = int(known.nvec.max()) if several else known.space.n
        return Flatten(spec.ndim, Numbers(None), choices)
    if isinstance(spec, Stacked):
        raise TypeError(
            f"Observation {spec} is no array. Flatten it with gymnasium's FlattenObservation, or "
            "leave it out of in_keys."
        )
    shape, is_bytes = spec.shape, spec.dtype is torch.uint8
    numbers = Numbers(cast("Any", spec.space).high.expand(shape) if is_bytes else None)
    if len(shape) in (3, 4) or (len(shape) == 2 and is_bytes):
        # Height and width are the largest neighbours; other dimensions are channels.
        smaller, height_dim = max((min(x), n) for n, x in enumerate(itertools.pairwise(shape)))
        if smaller >= _SMALLEST_IMAGE:
            return NatureCNN(shape, height_dim, numbers)
    return numbers if len(shape) == 1 else Flatten(len(shape), numbers)


def orthogonal(layer: Layer, gain: float = math.sqrt(2)) -> Layer:
    """Return the layer with orthogonal weights (Saxe et al., 2014) and biases of 0."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(cast("Tensor", layer.bias))
    return layer
