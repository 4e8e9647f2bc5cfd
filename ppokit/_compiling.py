"""Functions compiled by ``torch.compile``, and a look at the modules that they call."""

from __future__ import annotations

import itertools
import logging
import platform
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ppokit._calls import any_global_hook, hooks_in
from ppokit._state import unchanged

#: held by captures, and by eager steps beside them: torch's optimizers ask whether any thread is
#: compiling, and random numbers are restored after a trial
capturing = threading.RLock()
_log = logging.getLogger("ppokit.compile")
_names, _numbers = itertools.count(), itertools.count()
MOST_GRAPHS = 7  # of one code object: Dynamo raises at eight
FREE_TRACES = 8  # captures, of some seconds each; later ones only after so many calls:
REST = 20_000
MOST_HELD = 10_000  # objects that modules hold, which a trial restores
MOST_BYTES = 2**24  # of a tensor that it restores, if that is no buffer
MOST_LAYOUTS = 256  # whose calls are counted
RARE = 100  # times as many calls as the first form, before a further one is captured
OFTEN = f"code, options or shapes changed again after {FREE_TRACES} captures, which are slow"


class NoGraphError(Exception):
    """No graph fits the arguments, and none was captured. No graph has run on them."""

    is_refused = False  #: whether one could have been captured, but may not be


def check_options(options: Mapping[str, Any], name: str) -> None:
    """Raise a ValueError for arguments of ``torch.compile`` that exclude the choice of guards."""
    if "mode" in options:
        raise ValueError(
            f"{name}={{'mode': {options['mode']!r}}} excludes options of the compiler, which "
            f"ppokit sets. Pass options instead of a mode, such as {name}={{'options': "
            "{'max_autotune': True}}; a TrainingStep on CUDA has compile='cudagraphs'."
        )


class Budget:
    """Limits how often functions are captured, so that changes in each call do not take hours."""

    def __init__(self) -> None:
        self.calls = self.traces = self._last = 0

    @property
    def is_left(self) -> bool:
        """Whether a capture is allowed now."""
        return self.traces < FREE_TRACES or self.calls - self._last >= REST

    def spend(self) -> None:
        """Count a capture."""
        self.traces, self._last = self.traces + 1, self.calls


class CompiledFunction:
    """A function compiled into graphs, with all guards of the compiler or with none.

    A call with guards (:meth:`__call__`) equals the function by construction: a graph runs only if
    its guards hold. A call without guards (:meth:`form`) is faster, and right as long as only
    graphs have run since a call with guards returned the graph's number.

    Args:
        function: what to compile; its arguments are tensors, TensorDicts and lists.
        options: arguments of ``torch.compile``. Without a backend and options, kernels are called
            from C++ on the CPU of Linux.
        what: the function's name in the log, where a capture longer than a second is reported.
        on_cpu: whether all tensors are on the CPU.
        static: whether a graph serves sizes and whole numbers of one value only, which forms need.
            Otherwise the compiler may capture one for all sizes.
        budget: counts the captures of all functions that share it.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        options: Mapping[str, Any],
        *,
        what: str,
        on_cpu: bool,
        static: bool,
        budget: Budget,
    ) -> None:
        has_wrapper = on_cpu and platform.system() == "Linux"
        if has_wrapper and not {"backend", "options"} & options.keys():
            options = {**options, "options": {"cpp_wrapper": True}}
        self._function, self._what, self._budget = function, what, budget
        self.is_static = static and not options.get("dynamic")
        self._options = {"fullgraph": True, **options}
        self._may_capture = self._is_tracing = self._is_refused = False
        self._progress: _Progress | None = None
        self._renew()

    def _renew(self) -> None:
        static = {"dynamic": False} if self.is_static else {}
        self._guarded = self._compile(**static)
        self.graphs = 0  #: captured with guards, and kept
        self._forms: dict[Any, Any] = {}  # without guards, by number and layout
        self._requests: dict[Any, int] = {}  # for each of them

    def _compile(self, **options: Any) -> Any:
        @torch.compiler.assume_constant_result
        def begin_trace() -> int:  # runs while a graph is captured, and never in a graph
            if not self._may_capture:
                self._is_refused = self._is_tracing = True
                raise NoGraphError(OFTEN)
            if not self._is_tracing:
                self._is_tracing, self._progress = True, _Progress(self._what)
                if "options" not in options:  # forms are few: each is asked for often before
                    self.graphs += 1
                    self._budget.spend()
            return next(_numbers)

        function = self._function

        def numbered(*arguments: Any) -> tuple[int, Any]:
            return begin_trace(), function(*arguments)

        # Dynamo limits the graphs of one code object, and remembers dynamic shapes by its name.
        name = f"{function.__name__}_{next(_names)}"
        code = numbered.__code__.replace(co_name=name)
        numbered = FunctionType(code, numbered.__globals__, name, None, numbered.__closure__)
        return torch.compile(numbered, **{**self._options, **options})

    def __call__(self, *arguments: Any, may_capture: bool) -> tuple[int, Any]:
        """Return the number of the graph whose guards hold, and its result.

        Raises:
            NoGraphError: no graph fits, and it may not or could not be captured. An error of a
                graph that has run before passes unchanged.
        """
        if may_capture and self.graphs >= MOST_GRAPHS:
            self._renew()
        is_allowed = may_capture and self._budget.is_left
        return self._call(self._guarded, arguments, may_capture=is_allowed)

    def form(
        self, number: int, layout: Any, arguments: Sequence[Any], *roots: nn.Module, after: int
    ) -> Any:
        """Return the form without guards of a graph, for arguments of a layout, or None.

        It is captured on copies of the arguments when it was asked for so often, and a further one
        after :data:`RARE` times as many calls, since other layouts are rare: a capture takes
        seconds. With 1 each is captured at once. Attributes and buffers of ``roots`` are as before.
        """
        key = number, layout
        if (form := self._forms.get(key)) is not None:
            return form
        if len(self._requests) == MOST_LAYOUTS:
            self._requests.clear()
            self._forms.clear()
        self._requests[key] = self._requests.get(key, 0) + 1
        if self._requests[key] == (RARE * after if self._forms and after > 1 else after):
            no_guards = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
            own = self._options.get("options") or {}
            # Static, too, since it is captured once: dynamic=False would make each call slower. So
            # would fullgraph=True, and the guarded graph has shown that it is one graph.
            form = self._compile(dynamic=None, fullgraph=False, options={**own, **no_guards})
            modules = modules_of({str(n): root for n, root in enumerate(roots)})
            copies = copies_of(*arguments)
            with suppress(NoGraphError), trial(modules, _device_of(copies)):
                # Code of the user may have run since the call that returned the number.
                present, _ = self._call(self._guarded, copies, may_capture=False)
                self._call(form, copies, may_capture=True)
                self._forms[present, layout] = form
        return self._forms.get(key)

    def _call(self, compiled: Any, arguments: Any, *, may_capture: bool) -> tuple[int, Any]:
        self._may_capture, self._is_tracing, self._is_refused = may_capture, False, False
        try:
            with capturing if may_capture else nullcontext():
                return compiled(*arguments)
        except Exception as error:
            if not self._is_tracing:
                raise
            no_graph = NoGraphError(OFTEN if self._is_refused else _first_line(error))
            no_graph.is_refused = self._is_refused
            raise no_graph from error
        finally:
            if self._progress is not None:
                self._progress.stop()
                self._progress = None


class _Progress:
    """Logs a capture that takes longer than a second, again every 15 seconds."""

    def __init__(self, what: str) -> None:
        self._what, self._started, self._is_done = what, time.monotonic(), threading.Event()
        threading.Thread(target=self._report, daemon=True).start()

    def _report(self) -> None:
        pause = 1.0
        while not self._is_done.wait(pause):
            seconds = round(time.monotonic() - self._started)
            said = "later processes find it in the compiler's cache"
            _log.info("compiling %s: %d s so far (%s)", self._what, seconds, said)
            pause = 15.0

    def stop(self) -> None:
        self._is_done.set()


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    count = 2 if lines and lines[0].endswith((":", "fake tensor call")) else 1
    said = " ".join(lines[:count]).rpartition(": got ")[2]
    return f"no graph can be captured ({type(error).__name__}: {said[:240]})"


def copies_of(*arguments: Any) -> list[Any]:
    """Return copies of tensors, in lists and TensorDicts too, with their strides and offsets.

    A tensor that occurs twice does so among the copies: a graph depends on it.
    """
    made: dict[Tensor, Tensor] = {}

    def copy(x: Any) -> Any:
        if isinstance(x, Tensor):
            if x not in made.keys():
                storage, empty = x.untyped_storage().clone(), x.detach().new_empty(0)
                made[x] = empty.set_(storage, x.storage_offset(), x.shape, x.stride())
            return made[x]
        return x.apply(copy) if isinstance(x, TensorDictBase) else [*map(copy, x)]

    return [*map(copy, arguments)]


def _device_of(arguments: Sequence[Any]) -> torch.device:
    tensors = (x for x in arguments if isinstance(x, Tensor))
    return next((x.device for x in tensors), torch.device("cpu"))


def layout_of(tensordict: TensorDictBase) -> tuple[Any, ...]:
    """Return keys, shapes, strides and dtypes of a TensorDict: constants of a form."""
    found: list[Any] = [tensordict.batch_size]
    for key, x in tensordict.items(True, True):
        if isinstance(x, Tensor):
            found += key, x.shape, x.stride(), x.dtype
    return tuple(found)


# -- modules -------------------------------------------------------------------------

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


_LIBRARIES = {"gymnasium", "numpy", "ppokit", "tensordict", "torch", "torchrl"}
_LIBRARIES |= sys.stdlib_module_names - {"argparse", "types"}  # which have namespaces
_OF_ALL = {*vars(nn.Module())} - {"training"}  # tensors are looked up in each call of a graph


def attributes_of(modules: Mapping[str, nn.Module]) -> list[Any]:
    """Return attributes of modules, what lists and dicts hold, and the shapes of buffers."""
    found = []
    for module in modules.values():
        own = vars(module)
        found += [x.shape for x in module._buffers.values() if x is not None]
        for name in own.keys() - _OF_ALL:
            found += own[name], *_contents(own[name])
    return found


def _contents(x: Any) -> list[Any]:
    """Return what a container holds; nothing for other objects."""
    if issubclass(type(x), dict):
        return [*x, *x.values()]
    return [*x] if issubclass(type(x), (list, tuple, set, deque)) else []


def _held_by(modules: Mapping[str, nn.Module]) -> list[Any]:
    """Return what modules and their functions can reach, in containers and user objects, too.

    An object is its dictionary of attributes.
    """
    seen: dict[int, Any] = {}
    todo = [x for module in modules.values() for x in (vars(module), type(module))]
    while todo and len(seen) < MOST_HELD:
        x = todo.pop()
        if id(x) not in seen:
            seen[id(x)] = x
            todo += [*_contents(x), *(value for *_, value in _variables_of(x))]
            if _is_of_user(type(x)) and not isinstance(x, nn.Module):
                todo += [type(x), *([vars(x)] if hasattr(x, "__dict__") else [])]
    return [*seen.values()]


def _is_of_user(x: type | FunctionType) -> bool:
    return str(x.__module__).partition(".")[0] not in _LIBRARIES


def _variables_of(x: Any) -> list[tuple[Any, str, Any]]:
    """Return where a user's function or class keeps variables, with their names and values.

    These are the global variables that a function names, its closure, and attributes of a class.
    """
    if not isinstance(x, (type, FunctionType)) or not _is_of_user(x):
        return []
    if isinstance(x, type):
        own = [(kind, name, value) for kind in x.__mro__ for name, value in vars(kind).items()]
        return [found for found in own if _is_of_user(found[0]) and not found[1].startswith("__")]
    space, cells = x.__globals__, [cell for cell in x.__closure__ or () if cell != CellType()]
    named = [(space, name, space[name]) for name in _names_in(x.__code__) & space.keys()]
    return named + [(cell, "cell_contents", cell.cell_contents) for cell in cells]


def _names_in(code: CodeType) -> set[str]:
    inner = [x for x in code.co_consts if isinstance(x, CodeType)]
    return {*code.co_names}.union(*map(_names_in, inner))


def _value_of(place: Any, name: str) -> Any:
    names = vars(place) if isinstance(place, type) else place
    return names.get(name) if isinstance(names, Mapping) else getattr(place, name)


def _is_dense(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout is torch.strided and not (x.is_meta or is_lazy(x))


def _is_small(x: Any) -> bool:
    return _is_dense(x) and x.numel() * x.element_size() <= MOST_BYTES


def are_same(x: Sequence[Any], y: Sequence[Any]) -> bool:
    """Return whether two lists hold the same objects, or equal shapes."""
    pairs = zip(x, y, strict=False)
    return len(x) == len(y) and all(a is b or (type(a) is torch.Size and a == b) for a, b in pairs)


@contextmanager
def trial(modules: Mapping[str, nn.Module], device: torch.device) -> Iterator[None]:
    """Restore what modules hold, and random numbers, after trial calls."""
    found = _held_by(modules)
    containers = [(x, x.copy()) for x in found if isinstance(x, (dict, list, set, deque))]
    variables = [variable for x in found for variable in _variables_of(x)]
    generators = [(x, x.get_state()) for x in found if isinstance(x, torch.Generator)]
    own = [x for module in modules.values() for x in module._buffers.values()]
    tensors = {id(x): x for x in [*own, *filter(_is_small, found)] if _is_dense(x)}
    copies = [(x, x.detach().clone()) for x in tensors.values()]
    with capturing, unchanged(device=device):
        try:
            yield
        finally:
            for x, before in containers:
                if not are_same(_contents(x), _contents(before)):
                    _restore(x, before)
            for place, name, value in variables:
                if _value_of(place, name) is not value:
                    is_dict = isinstance(place, dict)
                    place.update({name: value}) if is_dict else setattr(place, name, value)
            for generator, state in generators:
                generator.set_state(state)
            with torch.no_grad():
                for x, copy in copies:  # by value: batch_norm does not raise the version
                    if not torch.equal(x, copy):
                        x.copy_(copy)


def _restore(x: Any, before: Any) -> None:
    """Restore what a container held. Other threads may read the attributes of a module."""
    if isinstance(x, dict):
        for key in x.keys() - before.keys():
            del x[key]
        x.update(before)
        if [*x] == [*before]:
            return
    x.clear()
    x.update(before) if isinstance(x, (dict, set)) else x.extend(before)
