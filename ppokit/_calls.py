"""Calls of TensorDictModules on plain tensors.

A TensorDictModule reads entries, calls a network and writes what that returns; around a small
network this takes several times as long as the network itself. Where a module does no more than
that, its network is called on the tensors at once. It is called as a module: hooks,
parametrizations and replaced layers within it are torch's affair. How modules are wired is looked
at anew in each call, so nothing that is known here can be out of date.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    AddStateIndependentNormalScale,
    NormalParamExtractor,
    TensorDictModule,
    TensorDictSequential,
    skip_existing,
)
from tensordict.nn.utils import biased_softplus
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.modules import MLP, ConvNet, GRUModule, LSTMModule, ValueOperator, set_recurrent_mode

_any_global_hook = getattr(nn.modules.module, "_has_any_global_hook", lambda: False)

# Layers that give the same result on the same input, however often they are called, and leave the
# input as it is.
_REPEATABLE = {
    *(nn.Linear, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.Identity, nn.Flatten, nn.Unflatten, nn.LayerNorm, nn.GroupNorm),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool2d),
    *(nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.GELU),
    *(nn.Sequential, nn.ModuleList, MLP, ConvNet, biased_softplus),
    *(NormalParamExtractor, AddStateIndependentNormalScale),
}
_REPEATABLE_OUT_OF_PLACE = {
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.SiLU, nn.Mish),
    *(nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish),
}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_WRAPPERS = {TensorDictModule, TensorDictSequential, ValueOperator}


def parts(module: Any) -> list[Any]:
    """Return the modules that a module calls in turn: those of a sequence, or itself."""
    if not _is_sequence(module):
        return [module]
    inner = module.module
    children = inner.values() if isinstance(inner, nn.ModuleDict) else inner
    return [part for child in children for part in parts(child)]


def before_last(policy: Any) -> list[Any]:
    """Return the modules of a policy's ``ModuleList`` that compute the distribution's parameters.

    tensordict's ``det_part`` holds the same, as they were when the policy was made.
    """
    return list(policy.module)[:-1]


def _is_sequence(module: Any) -> bool:
    return (
        getattr(type(module), "forward", None) is TensorDictSequential.forward
        and module.inplace in (None, True)
        and not (module._select_before_return or module.partial_tolerant)
        and not is_hooked_or_patched(module)
    )


def obstacle(module: Any) -> str | None:
    """Say why a module does more than call a network on entries, or return None if it does not."""
    if getattr(type(module), "forward", None) is not TensorDictModule.forward:
        return f"{type(module).__name__} has a forward of its own"
    if is_hooked_or_patched(module):
        return f"a hook on {type(module).__name__}, or another forward than its class's"
    options = module.method or module._kwargs or module.method_kwargs or module._get_kwargs
    if module.inplace is not True or options:
        return f"{type(module).__name__} has inplace, method or keyword arguments"
    return None


def overridden(part: Any, base: type, names: tuple[str, ...]) -> str | None:
    """Say which of a base class's methods a part has in another form, or return None."""
    kind = type(part)
    for name in names:
        in_class = kind is not base and getattr(kind, name) is not getattr(base, name)
        if in_class or name in part.__dict__:
            return f"{kind.__name__} has a {name} of its own"
    return None


def is_hooked_or_patched(module: nn.Module) -> bool:
    """Return whether a call of the module is more than a call of its class's forward."""
    entries = module.__dict__
    for name in _HOOKS:  # torch's guards leave hooks out; on these lengths a graph depends
        if len(entries[name]):
            return True
    # On what is absent from a module's dictionary no graph depends, but on the list of its names.
    return "forward" in list(entries) or _any_global_hook()


class Workspace:
    """The entries of a batch and, above them, what modules have written in this forward pass.

    A network that two modules have in common is called once for both, if it reads the same tensors
    and if it is certain that the second call would give the same: no layer of any of the modules
    draws random numbers, moves a state, writes over its input, has hooks, or is unknown here.

    Args:
        batch: the entries; it stays as it is.
        modules: those that are going to be called, or None.
        functional: whether a network may have other parameters in another call.

    A module may return another TensorDict than it is given: those after it in a sequence read that
    one, and :meth:`leave` goes back to the one before.
    """

    def __init__(self, batch: TensorDictBase, *modules: Any, functional: bool = False) -> None:
        self._modules, self._functional = modules, functional
        self._calls: list[tuple[Any, list[Any], Any]] = []  # network, what it read and returned
        self._outer: TensorDictBase | None = None
        self.reset(batch)

    def reset(self, batch: TensorDictBase) -> None:
        """Put another batch in the place of all entries."""
        self.batch, self._entries = batch, {}
        # Of other kinds a look at all entries may be dear; a graph would depend on each of them.
        if type(batch) is TensorDict and not torch.compiler.is_compiling():
            self._entries = {key: x for key, x in batch.items() if isinstance(x, Tensor)}

    def get(self, key: NestedKey) -> Any:
        """Return what was written last under a name, or else the batch's entry, or None."""
        return self._entries[key] if key in self._entries else self.batch.get(key, None)

    def call(self, module: Any) -> None:
        """Call a module on what it reads."""
        for part in parts(module):
            inputs, keys, outputs = [self.get(key) for key in part.in_keys], part.out_keys, None
            on_tensors = obstacle(part) is None and not skip_existing()
            for x in inputs:
                on_tensors = on_tensors and x is not None
            network, read = part.module if on_tensors else part, inputs
            if self._functional and isinstance(network, nn.Module):
                read = [*inputs, *network.parameters()]
            if self._calls:
                outputs = self._earlier(network, read, len(keys))
            if outputs is None and on_tensors:
                outputs = as_tuple(network(*inputs), part)
            if outputs is None:
                outputs = self._call_with_tensordict(part)
            self._calls.append((network, read, outputs))
            nested = False
            for key, x in zip(keys, outputs, strict=True):
                if key != "_":
                    self._entries[key] = x
                    nested = nested or type(key) is tuple or not isinstance(x, Tensor)
            if nested:
                self.reset(self.as_tensordict())  # which knows what is nested in what

    def leave(self) -> None:
        """Go back to the entries that modules outside of a sequence read."""
        if self._outer is not None:
            self.reset(self._outer)
            self._outer = None

    def as_tensordict(self) -> TensorDictBase:
        """Return all entries in a TensorDict of its own."""
        tensordict = self.batch.clone(False)
        for key, value in self._entries.items():
            if value is not None:
                tensordict.set(key, value)
        return tensordict

    def _call_with_tensordict(self, module: Any) -> tuple[Any, ...]:
        tensordict = self.as_tensordict()
        result = module(tensordict)
        if result is not tensordict and self._outer is None:
            self._outer = tensordict
        self.reset(result)
        return tuple(result.get(key, None) for key in module.out_keys)

    def _earlier(self, network: Any, read: list[Any], size: int) -> Any:
        """Return what an earlier call of the network returned, if this one would do the same."""
        for called, before, outputs in self._calls:
            if called is not network or len(before) != len(read) or len(outputs) != size:
                continue
            if all(a is b for a, b in zip(before, read, strict=True)):
                modules = (network, *(m for m in self._modules if m is not None))
                return outputs if all(map(is_repeatable, modules)) else None
        return None


def is_repeatable(network: Any) -> bool:
    """Return whether it is certain that a network gives the same when it is called again."""
    return isinstance(network, nn.Module) and all(map(_is_repeatable, network.modules()))


def _is_repeatable(module: Any) -> bool:
    kind = type(module)
    if is_hooked_or_patched(module):
        return False
    if kind in _REPEATABLE_OUT_OF_PLACE:
        return not module.inplace
    if kind in (nn.LSTM, nn.GRU):
        return not (module.training and module.dropout)
    if kind in _WRAPPERS and not isinstance(module.module, nn.Module):
        return False  # a function
    torchrls = isinstance(module, LSTMModule | GRUModule) and kind.__module__.startswith(
        ("torchrl.", "ppokit.")
    )
    return kind in _REPEATABLE or kind in _WRAPPERS or torchrls


def as_tuple(outputs: Any, module: Any) -> tuple[Any, ...]:
    """Return a network's outputs in the order of its module's keys, as TensorDictModule takes them.

    Raises:
        RuntimeError: there are more outputs than keys, or fewer.
    """
    keys = module.out_keys
    if isinstance(outputs, Tensor):
        outputs = (outputs,)
    elif not isinstance(outputs, tuple):
        if isinstance(outputs, (dict, TensorDictBase)) and all(key in outputs for key in keys):
            outputs = tuple(outputs[key] for key in keys)
        else:
            outputs = () if outputs is None else (outputs,)
    if len(outputs) != len(keys):
        raise RuntimeError(
            f"{type(module.module).__name__} returned {len(outputs)} tensors, but its module has "
            f"the out_keys {keys}."
        )
    for x in outputs:
        if not isinstance(x, Tensor):
            return tuple(x if isinstance(x, Tensor) else TensorDict.from_any(x) for x in outputs)
    return outputs


def _call_in_recurrent_mode(function: Any, *arguments: Any) -> Any:
    # torchrl's modes are not seen outside of a graph while it is captured, so they are set again.
    with set_recurrent_mode(True):
        return function(*arguments)


# Calls a function on networks that would fall into a dozen small graphs for each new shape.
outside_of_graphs: Any = torch.compiler.disable(_call_in_recurrent_mode)
