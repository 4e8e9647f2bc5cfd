"""From the observations of an environment to features: encoders, a memory, hidden layers."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import torch
from tensordict.nn import (
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.data import Categorical, MultiCategorical, Stacked, TensorSpec
from torchrl.modules import ProbabilisticActor, ValueOperator

from ppokit import recurrent
from ppokit._batch import as_key
from ppokit._calls import works_in_place
from ppokit.recurrent import GRUModule, LSTMModule, TransformerModule

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)
_CHOICES = Categorical, MultiCategorical  # a Binary is a subclass
Encoder: TypeAlias = str | nn.Module  #: of one observation
RECURRENT = {
    "lstm": (LSTMModule, ("recurrent_state_h", "recurrent_state_c")),
    "gru": (GRUModule, ("recurrent_state",)),
}
MEMORIES = *RECURRENT, "transformer"


def encoders_of(
    encoder: Encoder | Mapping[NestedKey, Encoder] | None, specs: Mapping[NestedKey, TensorSpec]
) -> dict[NestedKey, Encoder]:
    """Return the encoders that are given for these observations.

    A name alone is for each image, and a module alone for the only observation.

    Raises:
        TypeError: one is neither a name nor a module.
        ValueError: a name is unknown, it is not clear for which observation an encoder is, or an
            image is too small.
    """
    shapes = {key: [*spec.shape] for key, spec in specs.items()}
    sides = {key: _sides(spec)[0] for key, spec in specs.items()}
    if encoder is None or isinstance(encoder, Mapping):
        found = {as_key(key): one for key, one in (encoder or {}).items()}
    else:
        is_name = isinstance(encoder, str)
        found = {key: encoder for key, side in sides.items() if side or not is_name}
        if not found or (len(found) > 1 and not is_name):
            raise ValueError(
                f"encoder={encoder!r} is for {'one observation' if found else 'images'}, and there "
                f"are {shapes}. Give a mapping of observations to their encoders."
            )
    for key, one in found.items():
        if not (isinstance(one, nn.Module) or (isinstance(one, str) and one in CONVOLUTIONS)):
            raise (ValueError if isinstance(one, str) else TypeError)(
                f"An encoder is one of {[*CONVOLUTIONS]}, or a module such as nn.Sequential(...); "
                f"got {one!r}."
            )
        least = 0 if isinstance(one, nn.Module) else CONVOLUTIONS[one].least
        if key not in specs:
            raise ValueError(f"There is no observation {key!r} for an encoder, but {shapes}.")
        if sides[key] < least:
            raise ValueError(
                f"The encoder {one!r} needs an image of at least {least} x {least}, and {key!r} "
                f"has shape {shapes[key]}."
            )
    return found


def make_encoder(
    specs: Mapping[NestedKey, TensorSpec],
    encoders: Mapping[NestedKey, Encoder],
    hidden: Sequence[int],
    activation: Callable[..., nn.Module],
) -> tuple[nn.Sequential, int]:
    """Return the encoder of one or more observations, each ``[*B, *shape]``, and its features F.

    Their features are joined, and pass the hidden layers with the activation after each.
    """
    inputs, encoded = [], []
    for key, spec in specs.items():
        inputs.append(module := _input(spec, encoders.get(key)))
        modes = [(part, part.training) for part in module.modules()]
        module.eval()  # one row has no variance
        try:
            with torch.no_grad():
                encoded.append(module(spec.zero().unsqueeze(0)))
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            if key not in encoders:
                raise
            raise ValueError(
                f"The encoder of {key!r} raised on floats of shape {[1, *spec.shape]}: {error}"
            ) from error
        for part, mode in modes:
            part.training = mode
    size = sum(x.shape[-1] for x in encoded)
    layers: list[nn.Module] = [Joined(inputs)] if len(inputs) > 1 else inputs
    layers += hidden_layers(size, hidden, activation)
    return (nn.Sequential if len(specs) == 1 else Several)(*layers), [size, *hidden][-1]


def hidden_layers(
    features: int, hidden: Sequence[int], activation: Callable[..., nn.Module]
) -> list[nn.Module]:
    """Return linear layers behind so many features, with the activation after each."""
    pairs = itertools.pairwise([features, *hidden])
    return [
        y for before, after in pairs for y in (orthogonal(nn.Linear(before, after)), activation())
    ]


class Body(NamedTuple):
    """Modules that are called first, and a network behind them, which has no last layer yet."""

    modules: list[TensorDictModuleBase]
    reads: list[NestedKey]  #: of the network
    network: nn.Sequential
    features: int  #: of the network


class Inputs(NamedTuple):
    """Makes bodies for some observations."""

    specs: Mapping[NestedKey, TensorSpec]
    encoders: Mapping[NestedKey, Encoder]
    activation: Callable[..., nn.Module]
    memory: str | None
    units: int  #: of the memory
    transformer: Mapping[str, int]  #: further arguments of its memory

    def body(self, owner: str, hidden: Sequence[int], *, is_shared: bool = False) -> Body:
        """Return a body, whose modules serve another body if it is shared or has a memory.

        The names of the states of a memory begin with those of the owner.
        """
        first, rest = (hidden, ()) if self.memory is None else ((), hidden)
        encode, size = make_encoder(self.specs, self.encoders, first, self.activation)
        keys, features, after = [*self.specs], f"_{owner}features", f"_{owner}memory"
        if self.memory is None and not is_shared:
            return Body([], keys, encode, size)
        if self.memory == "transformer":
            transformer = recurrent.CausalTransformer(size, self.units, **self.transformer)
            module = TransformerModule(transformer, self.specs, after, encoder=encode, name=owner)
            return self.behind(Body([module], [after], nn.Sequential(), self.units), rest)
        modules: list[TensorDictModuleBase] = [TensorDictModule(encode, keys, [features])]
        if self.memory is None:
            return Body(modules, [features], nn.Sequential(), size)
        kind, states = RECURRENT[self.memory]
        of_states = [f"{owner}{state}" for state in states]
        modules.append(
            kind(
                input_size=size,
                hidden_size=self.units,
                in_keys=[features, *of_states, "is_init"],
                out_keys=[after, *(("next", state) for state in of_states)],
            )
        )
        return self.behind(Body(modules, [after], nn.Sequential(), self.units), rest)

    def behind(self, body: Body, hidden: Sequence[int]) -> Body:
        """Return a body with other hidden layers behind the same modules."""
        size = body.features if self.memory is None else self.units
        layers = nn.Sequential(*hidden_layers(size, hidden, self.activation))
        return body._replace(network=layers, features=[size, *hidden][-1])


class RecurrentNetworks(NamedTuple):
    """The networks of ``actor_critic`` with a memory."""

    #: that collects; it runs the critic, too, if that has a memory of its own
    policy: ProbabilisticTensorDictSequential
    actor: ProbabilisticActor  #: for the loss
    value: TensorDictModuleBase  #: for the loss: the critic, or its head on the actor's memory
    critic: TensorDictSequential  #: for GAE

    @classmethod
    def of(
        cls,
        actor: ProbabilisticActor,
        value: ValueOperator,
        critic: TensorDictSequential,
        *,
        is_shared: bool,
    ) -> RecurrentNetworks:
        """Return the networks of an actor, a head and the critic with that head."""
        if is_shared:
            return cls(actor, actor, value, critic)
        modules: Any = [*critic.module, *actor.module]
        policy = ProbabilisticTensorDictSequential(*modules)
        return cls(policy, actor, critic, critic)


class Detached(nn.Module):
    """Features without gradient."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the features."""
        return x.detach()


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

    scale: Tensor | float | None

    def __init__(self, largest: Tensor | None) -> None:
        super().__init__()
        scale = None if largest is None else 1 / largest.clamp_min(1).to(torch.get_default_dtype())
        if scale is not None and len(values := scale.unique()) == 1:
            self.scale = values.item()
        else:
            self.register_buffer("scale", scale)

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


class Own(nn.Module):
    """A module of the user's, which is called with one batch dimension.

    Args:
        dims: dimensions of an observation.
        numbers: makes numbers of it.
        module: returns features ``[N, ...]``.
    """

    def __init__(self, dims: int, numbers: nn.Module, module: nn.Module) -> None:
        super().__init__()
        self.dims, self.numbers, self.module = dims, numbers, module
        #: the observation, because a layer would write to it
        self.copies = any(map(works_in_place, module.modules()))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[*B, F]`` for ``[*B, *shape]``."""
        batch = x.shape[: x.ndim - self.dims]
        numbers = self.numbers(x.reshape(-1, *x.shape[len(batch) :]))
        features = self.module(numbers.clone() if self.copies else numbers)
        return features.reshape(*batch, math.prod(features.shape[1:]))


class ImageEncoder(nn.Module):
    """Convolutions over an image or a stack of images, and a linear layer.

    Args:
        name: of the convolutions.
        shape: H and W, and channels before or behind them.
        height_dim: the dimension H in it, before W.
        numbers: makes numbers of its pixels.
    """

    def __init__(self, name: str, shape: torch.Size, height_dim: int, numbers: Numbers) -> None:
        super().__init__()
        self.dims, self.height_dim, self.numbers = len(shape), height_dim, numbers
        channels = math.prod(shape) // math.prod(shape[height_dim : height_dim + 2])
        kind = CONVOLUTIONS[name]
        self.convolutions = nn.Sequential(*kind.layers(channels), nn.Flatten())
        with torch.no_grad():
            size = self.convolutions(self._channels_first(torch.zeros(1, *shape))).shape[-1]
        self.linear = nn.Sequential(orthogonal(nn.Linear(size, kind.units)), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """Return features ``[*B, F]`` of images."""
        batch = x.shape[: x.ndim - self.dims]
        images = self.numbers(x.reshape(-1, *x.shape[len(batch) :]))
        images = self._channels_first(images)
        if images.is_cpu:  # a training step on 256 images takes 0.6 to 0.7 of the time
            # in torch.channels_last, which torch.func.vmap cannot ask for
            images = images.movedim(1, -1).contiguous().movedim(-1, 1)
        features = self.linear(self.convolutions(images))
        return features.reshape(*batch, features.shape[-1])

    def _channels_first(self, x: Tensor) -> Tensor:
        """Return images ``[N, C, H, W]``."""
        height = self.height_dim + 1
        if x.ndim == 3:
            return x.unsqueeze(1)
        return x.movedim((height, height + 1), (-2, -1)).flatten(1, -3)


class Residual(nn.Sequential):
    """Layers whose outputs are added to their inputs."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the sum."""
        return input + super().forward(input)


def _nature(channels: int) -> list[nn.Module]:
    """Mnih et al., 2015, Nature 518, Methods."""
    layers: list[nn.Module] = []
    for outputs, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
        layers += [orthogonal(nn.Conv2d(channels, outputs, size, stride)), nn.ReLU()]
        channels = outputs
    return layers


def _impala(channels: int) -> list[nn.Module]:
    """Espeholt et al., 2018, arXiv:1802.01561, Figure 3, the large network without its LSTM."""
    layers: list[nn.Module] = []
    for outputs in (16, 32, 32):
        layers += [orthogonal(nn.Conv2d(channels, outputs, 3, padding=1)), nn.MaxPool2d(3, 2, 1)]
        for _ in range(2):
            inner: list[nn.Module] = []
            for _ in range(2):
                inner += [nn.ReLU(), orthogonal(nn.Conv2d(outputs, outputs, 3, padding=1))]
            layers.append(Residual(*inner))
        channels = outputs
    return [*layers, nn.ReLU()]


def _small(channels: int) -> list[nn.Module]:
    """Young and Tian, 2019, arXiv:1903.03176, Section 4."""
    return [orthogonal(nn.Conv2d(channels, 16, 3)), nn.ReLU()]


class Convolutions(NamedTuple):
    """Convolutions that are known by name."""

    layers: Callable[[int], list[nn.Module]]  #: of a number of channels
    units: int  #: of the linear layer behind them
    least: int  #: pixels a side


CONVOLUTIONS = {
    "nature": Convolutions(_nature, 512, 36),
    "impala": Convolutions(_impala, 256, 3),
    "small": Convolutions(_small, 128, 3),
}


def _sides(spec: TensorSpec) -> tuple[int, int]:
    """Return the smaller side of an image, 0 of others, and the dimension of its height.

    Height and width are two neighbours: the first square whose side is at least half of the largest
    pair's smaller side, or else the largest pair. A pair whose ratio is above 4 counts only if all
    are so. If the sizes do not tell, channels come last.
    """
    is_image = spec.ndim in (3, 4) or (spec.ndim == 2 and spec.dtype is torch.uint8)
    if not is_image or type(spec) in _CHOICES or 0 in spec.shape:
        return 0, 0
    pairs = [(min(x), -max(x) / min(x), -n) for n, x in enumerate(itertools.pairwise(spec.shape))]
    pairs = [pair for pair in pairs if pair[1] >= -4] or pairs
    squares = [pair for pair in pairs if pair[1] == -1 and 2 * pair[0] >= max(pairs)[0]]
    smaller, _, place = squares[0] if squares else max(pairs)
    return smaller, -place


def _input(spec: TensorSpec, encoder: Encoder | None) -> nn.Module:
    """Return the module of one observation; without an encoder it follows the space."""
    if isinstance(spec, Stacked):
        raise TypeError(
            f"Observation {spec} is no array. Flatten it with gymnasium's FlattenObservation, or "
            "leave it out of in_keys."
        )
    shape, is_bytes, known = spec.shape, spec.dtype is torch.uint8, cast("Any", spec)
    numbers = Numbers(known.space.high.expand(shape) if is_bytes else None)
    vector = numbers if len(shape) == 1 else Flatten(len(shape), numbers)
    if type(spec) in _CHOICES:
        several = isinstance(spec, MultiCategorical)
        choices = int(known.nvec.max()) if several else known.space.n
        vector = Flatten(len(shape), numbers, choices)
    if isinstance(encoder, nn.Module):
        floats = vector if type(spec) in _CHOICES else numbers
        return Own(len(shape), floats, copy.deepcopy(encoder))
    smaller, height_dim = _sides(spec)
    if encoder is None and smaller >= CONVOLUTIONS["nature"].least:
        encoder = "nature"
    return vector if encoder is None else ImageEncoder(encoder, shape, height_dim, numbers)


def orthogonal(layer: Layer, gain: float = math.sqrt(2)) -> Layer:
    """Return the layer with orthogonal weights (Saxe et al., 2014) and biases of 0."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(cast("Tensor", layer.bias))
    return layer
