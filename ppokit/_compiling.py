"""Functions compiled into one graph each, and checks that a graph is still valid."""

from __future__ import annotations

import itertools
import platform
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ppokit._calls import any_global_hook, hooks_in

_numbers = itertools.count()


class CompiledFunction:
    """A function compiled into one graph for each kind of arguments.

    The first capture prints a line that names ``what`` the function does. ``options`` are arguments
    of ``torch.compile``. Without a backend, mode or options, kernels are called from C++ on the CPU
    of Linux. ``constant`` names variables of the function that are the same for each of its graphs.
    With ``direct`` a graph that stays the only one is captured a second time, to be called without
    Dynamo, which takes longer to find a graph than a small policy takes to run.
    """

    def __init__(
        self,
        function: Any,
        options: Mapping[str, Any],
        *,
        what: str,
        on_cpu: bool,
        constant: Sequence[str] = (),
        direct: bool = False,
    ) -> None:
        # Dynamo limits the graphs of one code object, and remembers dynamic shapes by its name.
        name = f"{function.__name__}_{next(_numbers)}"
        code = function.__code__.replace(co_name=name)
        self._function = FunctionType(code, function.__globals__, name, None, function.__closure__)
        has_wrapper = on_cpu and platform.system() == "Linux"
        if has_wrapper and not {"backend", "mode", "options"} & options.keys():
            options = {**options, "options": {"cpp_wrapper": True}}
        self._keep, self._captures = _guard_filter(constant), 0
        self._options = {"fullgraph": True, **options}
        self._checked = self._compile(self._count_and_filter)
        #: the only graph, called without Dynamo; None before its capture, False if it cannot be
        self._direct: Any = None if direct and on_cpu and "mode" not in options else False
        print(
            f"ppokit: compiling {what} (some seconds; later processes find it in the cache)",
            file=sys.stderr,
            flush=True,
        )

    def _compile(self, guard_filter: Callable[[Any], list[bool]]) -> Any:
        if "mode" in self._options:  # which excludes options
            return torch.compile(self._function, **self._options)
        own = {"guard_filter_fn": guard_filter, **(self._options.get("options") or {})}
        return torch.compile(self._function, **{**self._options, "options": own})

    def _count_and_filter(self, guards: Any) -> list[bool]:
        self._captures += 1  # this is called once for each graph
        return [*map(self._keep, guards)]

    def __call__(self, *arguments: Any, checks: bool | None = None) -> Any:
        """Call the graph, whose guards are checked unless ``checks`` is False.

        False is for calls between which no user code may change what the graph depends on. Without
        a fitting graph RuntimeError is raised, and with None a new graph is captured.
        """
        if checks is None:
            return self._checked(*arguments)
        if checks is False and self._direct is not False and self._captures == 1:
            return self._call_directly(arguments)
        name = "fail_on_recompile" if checks else "default"
        stance = torch.compiler.set_stance(name, skip_guard_eval_unsafe=not checks)
        try:  # a with statement would set the stance a second time
            return self._checked(*arguments)
        finally:
            stance.__exit__(None, None, None)

    def _call_directly(self, arguments: Sequence[Any]) -> Any:
        """Call the only graph without Dynamo, or with it where that is impossible."""
        states = None
        try:
            if self._direct is None:
                states = random.getstate(), torch.get_rng_state()
                compiled = self._compile(torch.compiler.skip_all_guards_unsafe)
                self._direct = compiled.aot_compile((arguments, {}))
                self._direct.disable_guard_check()
                _set_random_states(states)  # as torch.compile does
            return self._direct(*arguments)
        except Exception:  # of a backend without it, or in code that relies on Dynamo
            self._direct = False
            if states is not None:
                _set_random_states(states)
            return self(*arguments, checks=False)


def _set_random_states(states: tuple[Any, Tensor]) -> None:
    random.setstate(states[0])
    torch.set_rng_state(states[1])


_CODE = ("CLOSURE_MATCH", "CLASS_MATCH", "BUILTIN_MATCH", "MODULE_MATCH", "DUPLICATE_INPUT")
_LIBRARY = (
    r"(dict\(|list\(dict\.keys\()?(__import__\('torch'\)"
    r"|G\['__(import_(torch|tensordict|torchrl|ppokit)(_dot_|')|builtins_dict))"
)
_OF_OURS = r"(dict\()?G\['((?!__)|___unnamed_scope_\w+'\]\['_tuple_new|__import_ppokit(_dot_|'))"
# Tables of libraries, which grow as other code runs. Like constants they have names in capitals.
_TABLE = rf"{_LIBRARY}.*\._?[A-Z][A-Z_]+"


def _guard_filter(constant: Sequence[str]) -> Callable[[Any], bool]:
    """Return a function that tells which guards may fail where a graph is valid.

    Others take time in each call: those on the globals of ppokit, on libraries' code and tables,
    and on what is constant.
    """
    code = re.compile(_LIBRARY)
    table = re.compile(rf"{_TABLE}$")
    entries = rf"{_TABLE}[\[)]"
    irrelevant = re.compile("|".join((entries, _OF_OURS, *(rf"{x}\b" for x in constant))))

    def keep(guard: Any) -> bool:
        is_code = guard.guard_type in _CODE and code.match(guard.name)
        is_table = guard.guard_type.startswith("DICT") and table.match(guard.name)
        return not (is_code or is_table or irrelevant.match(guard.name))

    return keep


#: methods that may be replaced on one module, which the guards of a graph do not see
METHODS = frozenset({"forward", "get_dist"})


class Modules:
    """The modules of a graph, from the outermost ones by name. Dynamo does not guard their hooks.

    A module that is reachable under several names has one name here, and a parameter that several
    modules hold has one name for each of them: ``functional_call`` restores no others. The hooks of
    ``ignored`` are checked elsewhere.
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
        self._held = [x for x in self._contents() if isinstance(x, Tensor)]
        self._ids = [*map(id, self._contents())]
        self._trainable = [x.requires_grad for x in self._held]

    @property
    def have_hooks(self) -> bool:
        """Whether modules or parameters have hooks, or methods other than their class's."""
        return (
            any_global_hook()
            or any(not METHODS.isdisjoint(x) or any(hooks_in(x)) for x in self._variables)
            or any(p._backward_hooks or p._post_accumulate_grad_hooks for _, p in self.parameters)
        )

    def are_unchanged(self) -> bool:
        """Return whether children, parameters, ``requires_grad`` and hooks are the same."""
        return (
            not self.have_hooks
            and [*map(id, self._contents())] == self._ids
            and [x.requires_grad for x in self._held] == self._trainable
        )

    def _contents(self) -> Iterator[Any]:
        return chain.from_iterable(map(dict.values, self._dicts))


def would_capture(error: Exception) -> bool:
    """Return whether a graph would have to be captured again, and its context forbids it."""
    return "fail_on_recompile" in str(error) or "skip_guard_eval_unsafe" in str(error)


CHANGES = "Python code within the networks changes in each call, and a graph would not"


def first_line(error: Exception) -> str:
    """Return why no graph can be captured."""
    if type(error).__name__ == "FailOnRecompileLimitHit":
        return "a number or an option that the networks read changes too often"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    count = 2 if lines and lines[0].endswith((":", "fake tensor call")) else 1
    said = " ".join(lines[:count]).rpartition(": got ")[2]
    return f"no graph can be captured ({type(error).__name__}: {said[:240]})"
