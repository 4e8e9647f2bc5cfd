"""How a loss is compiled in place, and what its graph need not look at again in each call."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any

import torch

# A global of the module where the graph begins, of another one of ours, torch's or torchrl's; or of
# the namespace that each named tuple's constructor has to itself.
_LIBRARIES = "ppokit|tensordict|torch|torchrl"
_NAMES = rf"(?!__)\w+|__import_({_LIBRARIES})(_dot_\w+)?|__builtins_\w+|___unnamed_scope_\w+"
_OURS = re.compile(rf"G\['({_NAMES})'\]")
# What a plan is made of, down to the networks: another plan has another version.
_PLAN = re.compile(r"self\._plan(?!\w)(?!.*\.(function|network)\b)")
# A module of the networks, and with the dictionary of its parts, parameters or buffers.
MODULE = r"self\._plan\.\w+\[\d+\]\.(network|steps\[0\]\.function)(\._modules\['[^']*'\])*"
_MODULE = re.compile(rf"{MODULE}(\._modules|\._parameters|\._buffers)?$")
# What the plan watches of it, by which it becomes another plan.
_WATCHED = {
    "TYPE_MATCH",
    "NOT_PRESENT_IN_GENERIC_DICT",  # a method that is the class's
    "DICT_KEYS_MATCH",
    "DUPLICATE_INPUT",
    "CLOSURE_MATCH",  # what is called is no module, but a function
}
_METHODS = re.compile(r"dict\(type\((self|tensordict)\)")
# Whether hooks for saved tensors are graphs themselves, which goes into the graph: asked in Python,
# it is the dearest question of all. Hooks that are functions are called in any case.
_RARE = "AUTOGRAD_SAVED_TENSORS_HOOKS"
_CAN_FILTER = hasattr(torch.compiler, "skip_guard_on_globals_unsafe")


def graph_options(arguments: dict[str, Any], *, cpu: bool) -> dict[str, Any]:
    """Return arguments of ``torch.compile`` by which little is done around the computation.

    The graph trusts libraries' functions: nobody puts others in their place, and there are some two
    hundred of them to look at; nor other methods in the place of a batch's. Globals of the
    networks' modules are looked at as ever, and so are tensors and all other attributes of the
    modules. Nor does the graph look at what the loss's plan is made of and watches: that is done
    before the call, and the graph looks at the plan's version. On the CPU its kernels are called
    from C++, and not from Python.

    Args:
        arguments: those given, which count. With a ``mode`` they stay as they are: torch takes
            that or options.
        cpu: whether the networks are there.
    """
    if not _CAN_FILTER or arguments.get("mode") is not None:
        return arguments
    options: dict[str, Any] = {"guard_filter_fn": keep}
    if cpu and arguments.get("backend", "inductor") == "inductor" and sys.platform == "linux":
        options["cpp_wrapper"] = True
    return arguments | {"options": options | (arguments.get("options") or {})}


def keep(entries: Iterable[Any]) -> list[bool]:
    """Return which of the things that a graph depends on are to be looked at before each call."""
    return [
        not (entry.guard_type == _RARE or _is_of_library(entry) or _is_of_plan(entry))
        for entry in entries
    ]


def _is_of_library(entry: Any) -> bool:
    if entry.name == "tensordict":
        return entry.guard_type == "NOT_PRESENT_IN_GENERIC_DICT"
    known = _OURS.search(entry.name) if entry.is_global else _METHODS.match(entry.name)
    return known is not None


def _is_of_plan(entry: Any) -> bool:
    if _PLAN.search(entry.name):
        return True
    return entry.guard_type in _WATCHED and _MODULE.match(entry.name) is not None
