"""Actor and critic as calls on tensors, past the TensorDicts that their modules read and write."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    AddStateIndependentNormalScale,
    NormalParamExtractor,
    TensorDictModule,
    TensorDictSequential,
)
from tensordict.nn.utils import biased_softplus
from tensordict.utils import NestedKey
from torch import nn
from torchrl.modules import MLP, GRUModule, LSTMModule

from ppokit._old_calls import Call, Step, detached
from ppokit._watch import Watch

# What may give another result on the same input, or counts how often it is called.
_UNREPEATABLE = (
    nn.modules.dropout._DropoutNd,
    nn.modules.batchnorm._NormBase,
    nn.RNNBase,
    nn.RReLU,
)
_RECURRENT = (LSTMModule, GRUModule)  # which read entries and write others, and do nothing else
_KEYS = ("_in_keys", "_out_keys", "_out_keys_apparent", "inplace")
_MODELESS = (MLP, NormalParamExtractor, AddStateIndependentNormalScale, biased_softplus)
_ACTIVATIONS = {nn.Tanh: torch.tanh, nn.ReLU: torch.relu, nn.Sigmoid: torch.sigmoid}


class Networks:
    """The calls that modules make in turn on one batch, each of them once.

    A network that two modules share, and call on the same tensors, is called once, unless it has
    dropout or the like. The calls are found once, and are good for as long as nobody changes the
    modules (``watch``).

    Args:
        whole: look into no network, because parameters come and go, or because it is compiled.
        in_graphs: watch all modules of the networks, on behalf of graphs that do not.
    """

    def __init__(self, *, whole: bool = False, in_graphs: bool = False) -> None:
        self._whole = whole
        self._in_graphs = in_graphs
        self._places = 0
        self._detached = False
        self.entries: list[tuple[int, NestedKey]] = []  # what is read from the batch, and whereto
        self._needed: set[int] = set()
        self._place_of: dict[NestedKey, int] = {}
        self._calls: list[Call] = []
        self.watch = Watch()

    def add(self, module: Any, *, share: bool = True) -> tuple[Call, ...]:
        """Return the calls that a module makes and that were not made before."""
        before = len(self._calls)
        self._add(module, share)
        return tuple(self._calls[before:])

    def detach(self) -> tuple[Call, ...]:
        """Return calls that detach what was made so far; what is read from now on is, too."""
        before = len(self._calls)
        self._detached, made, self._place_of = True, self._place_of, {}
        for key, place in made.items():
            self._detach(place, key)
        return tuple(self._calls[before:])

    def place_of(self, key: NestedKey) -> int:
        """Return the place of what was made of that name, or else of the entry of the batch."""
        if key not in self._place_of:
            self._place_of[key] = place = self._new_place()
            self.entries.append((place, key))
            if self._detached:
                self._detach(place, key)
        return self._place_of[key]

    def made(self, key: NestedKey) -> int | None:
        """Return the place of what was made of that name, if anything was."""
        place = self._place_of.get(key)
        return None if place in {entry for entry, _ in self.entries} else place

    def read(self, tensordict: TensorDictBase) -> list[Any] | None:
        """Return the values in their places, so far the entries; None where one is missing."""
        values = [None] * self._places
        for place, key in self.entries:
            value = tensordict.get(key, None)
            if value is None and place in self._needed:
                return None
            values[place] = value
        return values

    def know_no_modes(self) -> bool:
        """Return whether no module can ask torchrl for its exploration type or recurrent mode."""
        return not any(call.wants_tensordict for call in self._calls) and all(
            isinstance(call.network, nn.Module)
            and all(map(_knows_no_modes, call.network.modules()))
            for call in self._calls
            if call.network is not detached
        )

    def _add(self, module: Any, share: bool) -> None:
        keys = [name for name in _KEYS if name in module.__dict__]
        self.watch.attributes(module, *keys)
        self.watch.parts(module._modules)
        hooked = self.watch.is_hooked(module)
        if _is_sequence(module) and not hooked:
            self.watch.parts(module.module._modules)
            for part in module.module:
                self._add(part, share)
            return
        plain = _is_plain(module) and not hooked
        reads = tuple(self.place_of(key) for key in module.in_keys)
        network = module.module if plain else module
        shared = share and not hooked and (plain or isinstance(module, _RECURRENT))
        call = self._earlier(network, reads) if shared else None
        if call is None or len(call.writes) != len(module.out_keys):
            call = self._new_call(network, not plain, reads, module)
        self._place_of.update(zip(module.out_keys, call.writes, strict=True))

    def _steps(self, network: Any) -> list[Step]:
        """Return what a network does, past the calls of modules that do one thing."""
        if not isinstance(network, nn.Module) or self._whole:
            return [Step(network, None)]
        kind = type(network)
        self.watch.module(network)
        if self.watch.is_hooked(network) or "forward" in network.__dict__:
            return [Step(network, None)]
        if kind is nn.Linear and "weight" in network._parameters:
            self.watch.size(network._parameters)
            return [Step(nn.functional.linear, network._parameters)]
        if kind in _ACTIVATIONS and not getattr(network, "inplace", False):
            return [Step(_ACTIVATIONS[kind], None)]
        if kind is nn.Sequential or (kind is MLP and not network._reshape_out):
            self.watch.parts(network._modules)
            return [step for part in network._modules.values() for step in self._steps(part)]
        return [Step(network, None)]

    def _new_call(
        self, network: Any, wants_tensordict: bool, reads: tuple[int, ...], keys: Any
    ) -> Call:
        if self._in_graphs and isinstance(network, nn.Module):
            self.watch.network(network)
        writes = tuple(self._new_place() for _ in keys.out_keys)
        named = tuple(keys.in_keys), tuple(keys.out_keys)
        steps = self._steps(network) if len(reads) == 1 and not wants_tensordict else []
        self._calls.append(Call(network, steps, wants_tensordict, reads, writes, *named))
        if not wants_tensordict:
            self._needed.update(reads)
        return self._calls[-1]

    def _detach(self, place: int, key: NestedKey) -> None:
        self._place_of[key] = self._new_place()
        writes = (self._place_of[key],)
        self._calls.append(Call(detached, [], False, (place,), writes, (key,), (key,)))

    def _earlier(self, network: Any, reads: tuple[int, ...]) -> Call | None:
        for call in self._calls:
            if call.network is network and call.reads == reads and isinstance(network, nn.Module):
                changing = [m for m in network.modules() if isinstance(m, _UNREPEATABLE)]
                for module in changing:
                    also = ("dropout",) if isinstance(module, nn.RNNBase) else ()
                    self.watch.attributes(module, "training", *also)
                drops = (m.training and getattr(m, "dropout", True) for m in changing)
                return None if any(drops) else call
        return None

    def _new_place(self) -> int:
        self._places += 1
        return self._places - 1


def _knows_no_modes(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") or type(module) in _MODELESS


def _is_plain(module: Any) -> bool:
    """Return whether the module does no more than read, call and write."""
    return (
        type(module).forward is TensorDictModule.forward
        and module.inplace is True
        and module.method is None
        and not (module._kwargs or module.method_kwargs or module._get_kwargs)
    )


def _is_sequence(module: Any) -> bool:
    return (
        type(module).forward is TensorDictSequential.forward
        and module.inplace in (None, True)
        and not (module._select_before_return or module.partial_tolerant)
    )
