"""Calls on tensors, past the TensorDicts that the modules would read and write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor


class Step(NamedTuple):
    """A function of what the step before returned, and of weight and bias where it has them."""

    function: Callable[..., Any]
    parameters: Mapping[str, Any] | None


class Call(NamedTuple):
    """A network, or a module that wants a TensorDict, and the places of what goes in and out."""

    network: Callable[..., Any]
    steps: list[Step]  #: what the network does with one input; none: call it
    wants_tensordict: bool
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    in_keys: tuple[NestedKey, ...]
    out_keys: tuple[NestedKey, ...]


def make(calls: Iterable[Call], values: list[Any], tensordict: TensorDictBase) -> bool:
    """Make the calls on the values in their places; return False where one has odd results."""
    for network, steps, wants_tensordict, reads, writes, in_keys, out_keys in calls:
        inputs = [values[place] for place in reads]
        if steps and not torch.compiler.is_compiling():  # a graph depends on the modules it calls
            (outputs,) = inputs
            for function, parameters in steps:
                if parameters is None:
                    outputs = function(outputs)
                else:
                    outputs = function(outputs, parameters["weight"], parameters["bias"])
        elif wants_tensordict:
            made = network(with_entries(tensordict, in_keys, inputs))
            outputs = [made.get(key, None) for key in out_keys]
        else:
            outputs = network(*inputs)
        if isinstance(outputs, Tensor):
            outputs = (outputs,)
        elif not isinstance(outputs, (tuple, list)):
            outputs = [outputs[key] for key in out_keys]
        if len(outputs) != len(writes):
            return False
        for place, output in zip(writes, outputs, strict=True):
            values[place] = output
    return True


def with_entries(
    tensordict: TensorDictBase, keys: Iterable[NestedKey], values: Iterable[Any]
) -> TensorDictBase:
    """Return a copy of the TensorDict with other entries; None stands for none."""
    tensordict = tensordict.clone(False)
    for key, value in zip(keys, values, strict=True):
        if value is not None:
            tensordict.set(key, value)
    return tensordict


def detached(value: Any) -> tuple[Any]:
    """Return the value without its gradient."""
    return (value.detach() if isinstance(value, Tensor) else value,)
