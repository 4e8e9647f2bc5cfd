"""Functions compiled into one graph each, and checks that a graph is still valid."""

from __future__ import annotations

import itertools
import platform
import re
import sys
from collections.abc import Callable, Mapping
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ppokit._calls import any_global_hook, hooks_in

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
        of_backend = {"guard_filter_fn": _guards_to_keep, **(options.get("options") or {})}
        options = {**options, "options": of_backend}
    print(
        f"ppokit: compiling {what} (some seconds; later processes find it in the cache)",
        file=sys.stderr,
        flush=True,
    )
    return torch.compile(own, **{"fullgraph": True, **options})


_LIBRARY = (
    r"(__import__\('torch'\)"
    r"|G\['__(import_(torch|tensordict|torchrl|ppokit)(_dot_|')|builtins_dict))"
)
_OF_LIBRARIES = re.compile(_LIBRARY)
# Tables of classes, which grow as other code runs; and what is constant: our own globals, and the
# structure that a training step is captured for.
_TABLES = ("_TENSORCLASS_MEMO", "_CONSTRUCTORS", "SUPPORTED_NODES")
_IRRELEVANT = re.compile(rf"{_LIBRARY}.*({'|'.join(_TABLES)})|structure\b|G\['(?!__)")
_CODE = ("CLOSURE_MATCH", "CLASS_MATCH", "BUILTIN_MATCH", "MODULE_MATCH", "DUPLICATE_INPUT")


def _guards_to_keep(guards: Any) -> list[bool]:
    """Drop guards that never fail where a graph is valid; each takes time in each call."""
    return [
        not _IRRELEVANT.match(guard.name)
        and not (guard.guard_type in _CODE and _OF_LIBRARIES.match(guard.name))
        for guard in guards
    ]


class Modules:
    """Modules that a graph is captured of, as they are now. Dynamo does not look at their hooks.

    A module that is reachable under several names has one name here, and a parameter that several
    modules hold has one name for each of them: ``functional_call`` restores no others.

    Args:
        roots: the outermost modules by name.
        ignored: a module whose own hooks are looked at elsewhere.
    """

    def __init__(self, roots: Mapping[str, nn.Module], *, ignored: nn.Module | None = None) -> None:
        places: dict[int, tuple[Tensor, list[str]]] = {}
        modules: dict[str, nn.Module] = {}
        for name, root in roots.items():
            modules |= nn.Module.named_modules(root, prefix=name)
        for prefix, module in modules.items():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.requires_grad:
                    _, names = places.setdefault(id(parameter), (parameter, []))
                    names.append(f"{prefix}.{name}")
        self.parameters = [(tuple(names), parameter) for parameter, names in places.values()]
        self._variables = [vars(module) for module in modules.values() if module is not ignored]
        dicts = [(module._modules, module._parameters) for module in modules.values()]
        self._dicts = [*chain.from_iterable(dicts)]
        self._contents = self._present_contents()

    @property
    def have_hooks(self) -> bool:
        """Whether modules or parameters have hooks, or forwards that are not their class's."""
        return (
            any_global_hook()
            or any("forward" in x or any(hooks_in(x)) for x in self._variables)
            or any(p._backward_hooks or p._post_accumulate_grad_hooks for _, p in self.parameters)
        )

    def are_unchanged(self) -> bool:
        """Return whether children, parameters, what is frozen and hooks are as they were."""
        return not self.have_hooks and self._present_contents() == self._contents

    def _present_contents(self) -> list[int]:
        held: list[Any] = [*chain.from_iterable(map(dict.values, self._dicts))]
        return [*map(id, held), *(x.requires_grad for x in held if isinstance(x, Tensor))]


def unguarded() -> Any:
    """Return a context in which graphs run without their guards.

    For calls between which no user code may change what the graph depends on.
    """
    return torch.compiler.set_stance("default", skip_guard_eval_unsafe=True)


def without_capture() -> Any:
    """Return a context in which a graph raises RuntimeError where it would be captured again."""
    return torch.compiler.set_stance("fail_on_recompile")


def would_capture(error: Exception) -> bool:
    """Return whether a graph would have to be captured again, and its context forbids it."""
    return "fail_on_recompile" in str(error) or "skip_guard_eval_unsafe" in str(error)


CHANGES = "Python code within the networks changes in each call, and a graph would not"


def first_line(error: Exception) -> str:
    """Return why no graph can be captured."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    count = 2 if lines and lines[0].endswith((":", "fake tensor call")) else 1
    said = " ".join(lines[:count]).rpartition(": got ")[2]
    return f"no graph can be captured ({type(error).__name__}: {said[:240]})"
