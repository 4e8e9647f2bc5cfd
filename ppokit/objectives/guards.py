"""What a captured graph of the loss need not look at again in each call."""

from __future__ import annotations

import re
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
_CAN_FILTER = hasattr(torch.compiler, "skip_guard_on_globals_unsafe")


def without_needless_guards(options: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of ``torch.compile`` by which the graph trusts libraries' functions.

    Nobody puts others in their place, and there are some two hundred of them to look at. Globals of
    the networks' modules are looked at as ever, and so are hooks on all modules, before the call.
    Nor does the graph look at what the loss's plan is made of, but for the networks: that is done
    before the call, and the graph looks at the plan's version.

    Args:
        options: the arguments. With a ``mode`` they stay as they are: torch takes but one of them.
    """
    if not _CAN_FILTER or options.get("mode") is not None:
        return options
    return options | {"options": {"guard_filter_fn": _keep} | (options.get("options") or {})}


def _keep(entries: Iterable[Any]) -> list[bool]:
    return [not (_is_of_library(entry) or _PLAN.search(entry.name)) for entry in entries]


def _is_of_library(entry: Any) -> bool:
    return entry.is_global and _OURS.search(entry.name) is not None
