"""Modules that are to stay as they are, and whether they have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from operator import is_
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ppokit import kernels

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS: list[Any] = [getattr(nn.modules.module, "_global" + name) for name in _HOOKS]
_END = object()


def has_hooks(module: nn.Module) -> bool:
    """Return whether there are hooks on the module itself."""
    return any(getattr(module, name) for name in _HOOKS)


class Watch:
    """What was found out about modules, and is good for as long as nobody changes them."""

    def __init__(self) -> None:
        self._none: list[Mapping[int, Any]] = []  # places for hooks, all empty
        self._handles = -1  # how many hooks were ever registered when that was looked at
        self._modules: list[nn.Module] = []
        self._types: list[type] = []
        self._sized: list[Mapping[Any, Any]] = []
        self._sizes: list[int] = []
        self._parts: list[Mapping[str, Any]] = []
        self._found_parts: list[Any] = []  # the values of all of them in a row
        self._chosen: list[Mapping[str, Any]] = []
        self._names: list[str] = []
        self._found_chosen: list[Any] = []
        self._all_are_hooked = self._are_there(_GLOBAL_HOOKS)

    def parts(self, parts: Mapping[str, Any]) -> None:
        """Watch whether these are the same objects."""
        self._parts.append(parts)
        self._found_parts += parts.values()

    def attributes(self, module: nn.Module, *names: str) -> None:
        """Watch whether these attributes are what they are now."""
        for name in names:
            self.entry(module.__dict__, name)

    def entry(self, entries: Mapping[str, Any], name: str) -> None:
        """Watch whether this one is what it is now."""
        self._chosen.append(entries)
        self._names.append(name)
        self._found_chosen.append(deepcopy(entries[name]))

    def size(self, entries: Mapping[Any, Any]) -> None:
        """Watch how many there are."""
        self._sized.append(entries)
        self._sizes.append(len(entries))

    def module(self, module: nn.Module) -> None:
        """Watch for another type, as a parametrized module has, and for a forward of its own."""
        self._modules.append(module)
        self._types.append(type(module))
        self.size(module.__dict__)

    def network(self, network: nn.Module) -> None:
        """Watch all modules of a network, their parts and their hooks."""
        for module in network.modules():
            self.module(module)
            if module._modules:
                self.parts(module._modules)
            self.is_hooked(module)

    def is_hooked(self, module: nn.Module) -> bool:
        """Return whether the module has hooks or all have, and watch whether that changes."""
        return self._are_there(getattr(module, name) for name in _HOOKS) or self._all_are_hooked

    def _are_there(self, hooks: Iterable[Mapping[int, Any]]) -> bool:
        there = False
        for handles in hooks:
            if handles:
                self.size(handles)
                there = True
            else:
                self._none.append(handles)
        return there

    def are_as_found(self) -> bool:
        """Return whether the modules have been left alone."""
        if self._handles != RemovableHandle.next_id:  # a hook was registered somewhere
            if any(self._none):
                return False
            self._handles = RemovableHandle.next_id
        if (native := kernels.native_kernel()) is not None:
            as_found = native.are_as_found(
                *(self._modules, self._types, self._sized, self._sizes),
                *(self._parts, self._found_parts, self._chosen, self._names, self._found_chosen),
            )
            if as_found is not NotImplemented:
                return as_found
        parts = [value for values in self._parts for value in values.values()]
        chosen = zip(self._chosen, self._names, strict=True)
        return (
            list(map(type, self._modules)) == self._types
            and list(map(len, self._sized)) == self._sizes
            and len(parts) == len(self._found_parts)
            and all(map(is_, parts, self._found_parts))
            and [values.get(name, _END) for values, name in chosen] == self._found_chosen
        )
