"""Functions compiled into one graph each, and calls of them without a look at their guards."""

from __future__ import annotations

import itertools
import platform
import sys
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch

_numbers = itertools.count()


def compile_whole(
    function: Any, options: Mapping[str, Any], *, what: str, on_cpu: bool
) -> Callable[..., Any]:
    """Return a function compiled into one graph, and print a line that says so.

    Without a backend, mode or options, kernels are called from C++ where that can be had (on Linux,
    on the CPU).

    Args:
        function: to compile.
        options: arguments of ``torch.compile``.
        what: what the function does, for the line.
        on_cpu: whether all tensors are there.
    """
    # Dynamo limits the graphs of one code object, and remembers dynamic shapes by its name.
    name = f"{function.__name__}_{next(_numbers)}"
    code = function.__code__.replace(co_name=name)
    own = FunctionType(code, function.__globals__, name, None, function.__closure__)
    has_wrapper = on_cpu and platform.system() == "Linux"
    if has_wrapper and not {"backend", "mode", "options"} & options.keys():
        options = {**options, "options": {"cpp_wrapper": True}}
    if "mode" not in options:  # which excludes options
        of_backend = {"guard_filter_fn": _without_registries, **(options.get("options") or {})}
        options = {**options, "options": of_backend}
    print(
        f"ppokit: compiling {what} (some seconds; later processes find it in the cache)",
        file=sys.stderr,
        flush=True,
    )
    return torch.compile(own, **{"fullgraph": True, **options})


_REGISTRIES = ("_TENSORCLASS_MEMO", "_CONSTRUCTORS", "SUPPORTED_NODES")


def _without_registries(guards: Any) -> list[bool]:
    """Keep all guards but those on tables of classes, which grow as other code runs."""
    return [not any(name in guard.name for name in _REGISTRIES) for guard in guards]


def unguarded() -> Any:
    """Return a context in which graphs run without their guards.

    For calls between which no user code may change what the graph depends on.
    """
    return torch.compiler.set_stance("default", skip_guard_eval_unsafe=True)


def without_capture() -> Any:
    """Return a context in which a graph raises RuntimeError where it would be captured again."""
    return torch.compiler.set_stance("fail_on_recompile")


def would_capture(error: Exception) -> bool:
    """Return whether the error is that of :func:`without_capture`."""
    return "fail_on_recompile" in str(error)


CHANGES = "Python code within the networks changes in each call, and a graph would not"


def first_line(error: Exception) -> str:
    """Return why no graph can be captured."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    count = 2 if lines and lines[0].endswith((":", "fake tensor call")) else 1
    said = " ".join(lines[:count]).rpartition(": got ")[2]
    return f"no graph can be captured ({type(error).__name__}: {said[:240]})"
