"""Calls of TensorDictModules without their overhead.

A TensorDictModule reads entries, calls a network and writes the outputs; around a small network
this takes several times as long as the network itself. If a module does no more than that, its
network is called directly, as a module: with its hooks, parametrizations and replaced layers. The
wiring of modules is looked up in each call, so nothing can become stale. At the end are facts
about all modules of a network, which the guards of a graph do not see.
"""

from __future__ import annotations

import re
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import getfile
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    skip_existing,
)
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl import modules as rl
from torchrl.modules import set_recurrent_mode

from ppokit._batch import Policy, Shapes, as_key, in_keys_of, out_keys_of

any_global_hook = getattr(nn.modules.module, "_has_any_global_hook", lambda: False)

# torch has no public list of hooks. Each kind is an attribute whose name ends in this way.
_HOOKS = [x for x in vars(nn.Module()) if x.endswith("_hooks") and "state_dict" not in x]
_TRACES_LISTS = torch.__version__ >= "2.12"
hooks_in = itemgetter(*_HOOKS)  # of the dictionary of a module


def parts(module: nn.Module) -> list[Any]:
    """Return the modules that a module calls in turn: the parts of a sequence, or itself."""
    is_sequence = (
        type(module).forward is TensorDictSequential.forward
        and module.inplace in (None, True)
        and not (module._select_before_return or module.partial_tolerant)
        and not is_hooked_or_patched(module)
    )
    if not is_sequence:
        return [module]
    inner: Any = module.module
    children = inner.values() if isinstance(inner, nn.ModuleDict) else inner
    return [part for child in children for part in parts(child)]


def leaves(network: object) -> Iterator[Any]:
    """Yield the modules that a sequence of modules calls in turn."""
    own = network.__dict__ if isinstance(network, nn.Module) else {}
    network = own.get("_modules", {}).get("_orig_mod", network)  # of torch.compile
    if not isinstance(network, TensorDictSequential) or "update" in {*dir(type(network)), *own}:
        yield network
        return
    inner = network.module
    for module in inner.values() if isinstance(inner, nn.ModuleDict) else inner:
        yield from leaves(module)


def obstacle(module: nn.Module) -> str | None:
    """Return why a module does more than call a network on entries, or None if it does not."""
    if type(module).forward is not TensorDictModule.forward:
        return f"{type(module).__name__} has a forward of its own"
    if is_hooked_or_patched(module):
        return f"a hook on {type(module).__name__}, or another forward than its class's"
    options = module.method or module._kwargs or module.method_kwargs or module._get_kwargs
    if module.inplace is not True or options:
        return f"{type(module).__name__} has inplace, method or keyword arguments"
    return None


def overridden(part: nn.Module, base: type, names: tuple[str, ...]) -> str | None:
    """Return which of a base class's methods a part overrides, or None."""
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
    # Dynamo does not guard on missing keys of a module's dictionary, but on the list of its keys,
    # which torch 2.11 cannot trace: there a graph does not see a forward that is set after capture.
    return "forward" in (list(entries) if _TRACES_LISTS else entries) or any_global_hook()


def works_in_place(layer: nn.Module) -> bool:
    """Return whether a layer writes to its input; ``inplace`` of a TensorDictModule is of keys."""
    is_layer = not isinstance(layer, TensorDictModuleBase)
    return is_layer and hasattr(layer, "inplace") and layer.inplace is True


def call(modules: Iterable[nn.Module], tensordict: TensorDictBase) -> TensorDictBase:
    """Call modules in turn on a TensorDict, which they write to, and return the last result.

    The networks of modules that only call a network on entries are called on the tensors.
    """
    for part in chain.from_iterable(map(parts, modules)):
        if obstacle(part) is None and not skip_existing():
            inputs = [tensordict.get(key, None) for key in part.in_keys]
            if not any(x is None for x in inputs):
                outputs = as_tuple(part.module(*inputs), part)
                for key, x in zip(part.out_keys, outputs, strict=True):
                    if key != "_":
                        tensordict.set(key, x)
                continue
        tensordict = part(tensordict)
    return tensordict


# Files whose errors are of shapes and dtypes: layers, distributions (torchrl's too), formulas here.
_TORCH, _TORCHRL, _HERE = (str(Path(x).parent) for x in (torch.__file__, getfile(rl), __file__))
_OF_LAYERS = re.compile(
    rf"({_TORCH}/nn/(functional|modules/(?!module|dropout)\w+)"
    rf"|({_TORCH}|{_TORCHRL})/distributions/\w+).py"
)
_TENSORDICT = str(Path(getfile(TensorDictModule)).parents[1])


def explain(
    error: Exception,
    who: str,
    given: Shapes,
    *networks: Policy | None,
    also: Iterable[NestedKey] = (),
    of_dtypes: str = "Convert the entry, or build the network in that dtype.",
) -> None:
    """Raise an error that names the entries, if an operation of torch or tensordict raised it.

    ``given`` has shape and dtype of each entry. Errors of other code pass unchanged.
    """
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    modules = [m for x in networks if isinstance(x, nn.Module) for m in x.modules()]
    written = {as_key(key) for m in modules for key in out_keys_of(m)}
    reads = dict.fromkeys(as_key(key) for m in modules for key in in_keys_of(m))
    reads = [key for key in reads if key not in written]
    missing = [key for key in reads if key not in given]
    if isinstance(error, KeyError) and last.startswith(f"{_TENSORDICT}/") and missing:
        raise KeyError(f"{who} reads {missing}, and there is {sorted(map(str, given))}.") from error
    kind, is_own = type(error), last.startswith(f"{_HERE}/")  # ppokit's own ValueErrors say it all
    fits = kind in (RuntimeError, NotImplementedError) or (kind is ValueError and not is_own)
    if not fits or not (is_own or _OF_LAYERS.match(last)):
        return
    shown = {key: given[key] for key in (*reads, *also) if key in given} or given
    said = ", ".join(f"{key!r} {[*shape]} {dtype}" for key, (shape, dtype) in shown.items())
    facts = [f"{who} raised: {error}. It was given {said}."]
    if layer := next((m for m in modules if isinstance(m, nn.Linear) and m.in_features), None):
        facts.append(f"The first linear layer takes {layer.in_features} {layer.weight.dtype}.")
    if re.search("dtype|scalar type|input type|not implemented for", str(error), re.IGNORECASE):
        facts.append(of_dtypes)
    if "more than 1 value per channel" in str(error):
        facts.append(
            "Batch normalization in training mode cannot normalize a single frame: collect with "
            "eval() or several environments, train with another minibatch_size, or use LayerNorm."
        )
    raise ValueError(" ".join(facts)) from error


def shapes_of(tensordict: TensorDictBase) -> Shapes:
    """Return shape and dtype of each entry, for :func:`explain`."""
    items = tensordict.items(True, True)
    return {key: (x.shape, x.dtype) for key, x in items if isinstance(x, Tensor)}


def as_tuple(outputs: object, module: TensorDictModule) -> tuple[Tensor | TensorDictBase, ...]:
    """Return a network's outputs in the order of its module's keys."""
    keys = module.out_keys
    if isinstance(outputs, (dict, TensorDictBase)) and all(key in outputs for key in keys):
        outputs = tuple(outputs[key] for key in keys)
    elif not isinstance(outputs, tuple):
        outputs = () if outputs is None else (outputs,)
    if len(outputs) != len(keys):
        raise ValueError(
            f"{type(module.module).__name__} returned {len(outputs)} tensors, but its module has "
            f"the out_keys {keys}."
        )
    return tuple(x if isinstance(x, Tensor) else TensorDict.from_any(x) for x in outputs)


def _call_in_recurrent_mode(function: Callable[..., Any], *arguments: object) -> Any:
    # torchrl's modes are not seen outside of a graph while it is captured, so they are set again.
    with set_recurrent_mode(True):
        return function(*arguments)


# Calls a function on networks that would fall into a dozen small graphs for each new shape.
outside_of_graphs: Any = torch.compiler.disable(_call_in_recurrent_mode)


# -- all modules of a network ---------------------------------------------------------

#: methods that may be replaced on one module, which the guards of a graph do not see
METHODS = frozenset({"forward", "get_dist"})


def modules_of(roots: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return all modules by name; a module that is reachable under several names has one."""
    modules: dict[str, nn.Module] = {}
    seen: set[nn.Module] = set()

    def visit(name: str, module: nn.Module | None) -> None:  # named_modules takes twice as long
        if module is not None and module not in seen:
            seen.add(module)
            modules[name] = module
            for child, inner in module._modules.items():
                visit(f"{name}.{child}", inner)

    for name, root in roots.items():
        visit(name, root)
    return modules


def parameters_of(modules: Mapping[str, nn.Module]) -> list[tuple[tuple[str, ...], Tensor]]:
    """Return the trainable parameters, each with its name in every module that holds it.

    ``functional_call`` restores no other names.
    """
    found: dict[Tensor, list[str]] = {}
    for prefix, module in modules.items():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                found.setdefault(parameter, []).append(f"{prefix}.{name}")
    return [(tuple(names), parameter) for parameter, names in found.items()]


def have_hooks(modules: Mapping[str, nn.Module], *, ignored: nn.Module | None = None) -> bool:
    """Return whether modules or parameters have hooks, or methods other than their class's.

    Dynamo does not look at these again. One module may be ``ignored``.
    """
    if any_global_hook():
        return True
    for module in modules.values():
        own = vars(module)
        if module is not ignored and (any(hooks_in(own)) or not METHODS.isdisjoint(own)):
            return True
        for p in module._parameters.values():
            if p is not None and (p._backward_hooks or p._post_accumulate_grad_hooks):
                return True
    return False


_OF_ALL = {*vars(nn.Module())} - {"training"}  # tensors are looked up in each call of a graph


def attributes_of(modules: Mapping[str, nn.Module]) -> list[object]:
    """Return attributes of modules, what lists and dicts hold, children and facts of tensors."""
    found = []
    for module in modules.values():
        own = vars(module)
        found += [x.shape for x in module._buffers.values() if x is not None]
        found += [x.requires_grad for x in module._parameters.values() if x is not None]
        found += module._modules.values()
        for name in own.keys() - _OF_ALL:
            found += own[name], *_contents(own[name])
    return found


def _contents(x: Any) -> list[object]:
    """Return what a container holds; nothing for other objects."""
    if issubclass(type(x), dict):
        return [*x, *x.values()]
    return [*x] if issubclass(type(x), (list, tuple, set, deque)) else []


def are_same(x: Sequence[object], y: Sequence[object]) -> bool:
    """Return whether two lists hold the same objects, or equal shapes."""
    pairs = zip(x, y, strict=False)
    return len(x) == len(y) and all(a is b or (type(a) is torch.Size and a == b) for a, b in pairs)
