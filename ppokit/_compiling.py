"""Functions compiled by ``torch.compile``, with the compiler's guards and without."""

from __future__ import annotations

import itertools
import logging
import platform
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from types import FunctionType
from typing import Any

import torch
from tensordict import TensorDictBase, is_leaf_nontensor
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ppokit._batch import Options

#: held by captures, and by eager steps beside them: torch's optimizers ask whether any thread is
#: compiling, and random numbers are restored after a trace
capturing = threading.RLock()
_log = logging.getLogger("ppokit.compile")
Compiled = Callable[..., Any]  #: a function, or a graph of it
_names, _numbers = itertools.count(), itertools.count()
_hooks: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
MOST_GRAPHS = 7  # of one code object: Dynamo raises at eight
MOST_REFUSED = 200  # calls of one code object that no graph fitted: Dynamo raises at 256
FREE_TRACES = 8  # captures, of some seconds each; later ones only after so many calls:
REST = 20_000
MOST_LAYOUTS = 256  # whose calls are counted
RARE = 100  # times as many calls as the first form, before a further one is captured
OFTEN = f"code, options or shapes changed again after {FREE_TRACES} captures, which are slow"


class NoGraphError(Exception):
    """No graph fits the arguments, and none was captured. No graph has run on them."""

    is_refused = False  #: whether one could have been captured, but may not be


def check_options(options: Options, name: str) -> None:
    """Raise for what is no mapping of arguments, or has some that exclude the choice of guards."""
    if not isinstance(options, Mapping):
        raise TypeError(
            f"{name} must be a bool or a mapping of torch.compile's arguments, got {options!r}."
        )
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

    def take_back(self) -> None:
        """Do not count a capture that was interrupted."""
        self.traces -= 1


class CompiledFunction:
    """A function compiled into graphs, with all guards of the compiler or with none.

    A call with guards (:meth:`__call__`) equals the function by construction: a graph runs only if
    its guards hold. A call without guards (:meth:`form`) is faster, and right as long as only
    graphs have run since a call with guards returned the graph's number. The call that captures a
    graph is made by it, so the user's code runs as often as without a compiler. If the capture
    fails, or the graph in its first run, tensors that it may have written are restored.

    Args:
        function: what to compile; its arguments are tensors, TensorDicts and lists.
        options: arguments of ``torch.compile``. Without a backend and options, kernels are called
            from C++ on the CPU of Linux.
        what: the function's name in the log, where a capture longer than a second is reported.
        on_cpu: whether all tensors are on the CPU.
        static: whether a graph serves sizes and whole numbers of one value only, which forms need.
            Otherwise the compiler may capture one for all sizes.
        budget: counts the captures of all functions that share it.
        modules: what the function calls; it may write to their buffers.
    """

    def __init__(
        self,
        function: Compiled,
        options: Options,
        *,
        what: str,
        on_cpu: bool,
        static: bool,
        budget: Budget,
        modules: Collection[nn.Module] = (),
    ) -> None:
        has_wrapper = on_cpu and platform.system() == "Linux"
        if has_wrapper and not {"backend", "options"} & options.keys():
            options = {**options, "options": {"cpp_wrapper": True}}
        self._function, self._what, self._budget = function, what, budget
        self._modules, self._call = modules, _Call()
        self.is_static = static and not options.get("dynamic")
        self._options = {"fullgraph": True, **options}
        self._renew()

    def _renew(self) -> None:
        static = {"dynamic": False} if self.is_static else {}
        self._guarded = self._compile(**static)
        self.graphs = 0  #: captured with guards, and kept
        self._refused = 0  # calls that no graph fitted
        self._forms: dict[Hashable, Compiled] = {}  # without guards, by number and layout
        self._candidate: tuple[Hashable, Compiled] | None = (
            None  # a form, captured in the last call
        )
        self._requests: dict[Hashable, int] = {}  # for each of them

    def _compile(self, **options: object) -> Compiled:
        call = self._call

        @torch.compiler.assume_constant_result
        def begin_trace() -> int:  # runs while a graph is captured, and never in a graph
            if not call.arguments:  # of a form, which torch.compiler.reset() has dropped
                return next(_numbers)
            if not call.may_capture:
                call.is_refused = call.is_tracing = True
                self._refused += 1
                raise NoGraphError(OFTEN)
            if not call.is_tracing:
                call.is_tracing, call.progress = True, _Progress(self._what)
                written = [*_tensors_in(call.arguments), *_buffers_of(self._modules)]
                call.before = [(x, x.detach().clone()) for x in written]
                if "options" not in options:  # forms are few: each is asked for often before
                    self.graphs, call.is_counted = self.graphs + 1, True
                    self._budget.spend()
            return next(_numbers)

        @torch.compiler.assume_constant_result
        def end_trace() -> None:
            call.is_traced = True

        function = self._function

        def numbered(*arguments: object) -> tuple[int, Any]:
            if not torch.compiler.is_dynamo_compiling():
                raise NoGraphError("a stance, a dispatch mode or a setting disables torch.compile")
            number, result = begin_trace(), function(*arguments)
            end_trace()
            return number, result

        # Dynamo limits the graphs of one code object, and remembers dynamic shapes by its name.
        name = f"{function.__name__}_{next(_names)}"
        code = numbered.__code__.replace(co_name=name)
        numbered = FunctionType(code, numbered.__globals__, name, None, numbered.__closure__)
        return torch.compile(numbered, **{**self._options, **options})

    def __call__(self, *arguments: object, may_capture: bool) -> tuple[int, Any]:
        """Return the number of the graph whose guards hold, and its result.

        Raises:
            NoGraphError: no graph fits, and it may not or could not be captured. An error of a
                graph that has run before passes unchanged.
        """
        is_allowed = may_capture and self._budget.is_left
        if self._refused >= MOST_REFUSED and not is_allowed:
            raise NoGraphError(OFTEN)
        if is_allowed and (self.graphs >= MOST_GRAPHS or self._refused >= MOST_REFUSED):
            self._renew()
        return self._run(self._guarded, arguments, may_capture=is_allowed)

    def form(
        self, number: int, layout: Hashable, arguments: Sequence[object], *, after: int
    ) -> tuple[Compiled | None, Any]:
        """Return the form without guards of a graph for arguments of a layout, or None.

        It is captured when it was asked for so often, and a further one after :data:`RARE` times as
        many calls, since other layouts are rare: a capture takes seconds. With 1 each is captured
        at once. The call that captures it is made by it, and the second result is what it returned.
        The form is returned once :meth:`confirm` has shown that the graph still fits.
        """
        key, result = (number, layout), None
        if (form := self._forms.get(key)) is not None:
            return form, None
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
            with suppress(NoGraphError):
                _, result = self._run(form, arguments, may_capture=True)
                self._candidate = key, form
        return None, result

    def confirm(self, number: int, layout: Hashable) -> None:
        """Keep the form that was captured in the last call if its graph fits this one, too.

        Code of the user may have run between the call that returned the number and the capture.
        """
        if self._candidate is not None:
            key, form = self._candidate
            self._candidate = None
            if key == (number, layout):
                self._forms[key] = form
            else:
                self._requests[key] = 0  # it is captured again later

    def _run(
        self, compiled: Compiled, arguments: Sequence[object], *, may_capture: bool
    ) -> tuple[int, Any]:
        call = self._call
        call.may_capture, call.arguments = may_capture, arguments
        call.is_tracing = call.is_traced = call.is_refused = call.is_counted = False
        message = _hooks._saved_tensors_hooks_get_disabled_error_message
        are_enabled = may_capture and not message()
        try:
            with capturing if may_capture else nullcontext():
                return compiled(*arguments)
        except BaseException as error:  # Ctrl-C, too
            if not call.is_tracing:
                raise
            if are_enabled:  # a trace of torch.func that fails leaves them disabled
                _hooks._saved_tensors_hooks_enable()
            with torch.no_grad():
                for x, before in call.before:  # by value: kernels may not raise the version
                    if not torch.equal(x, before):
                        x.copy_(before)
            if call.is_traced:
                self._renew()  # a graph that failed would run again
            if not isinstance(error, Exception):
                if call.is_counted:
                    self._budget.take_back()
                raise
            no_graph = NoGraphError(OFTEN if call.is_refused else _first_line(error))
            no_graph.is_refused = call.is_refused
            raise no_graph from error
        finally:
            call.arguments, call.before = (), []
            if call.progress is not None:
                call.progress.stop()
                call.progress = None


def _tensors_in(arguments: Iterable[object]) -> Iterator[Tensor]:
    """Yield tensors, in lists too. TensorDicts are copied by networks that write to them."""
    for x in arguments:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list):
            yield from _tensors_in(x)


def _buffers_of(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    for module in modules:
        yield from (x for x in module.buffers() if not is_lazy(x))


class _Call(threading.local):
    """The call that a thread makes: threads may share a function, and capture in turn."""

    may_capture = is_tracing = is_traced = is_refused = is_counted = False
    arguments: Sequence[object] = ()
    before: Sequence[tuple[Tensor, Tensor]] = ()
    progress: _Progress | None = None


class _Progress:
    """Logs a capture that takes longer than a second, again every 15 seconds."""

    def __init__(self, what: str) -> None:
        self._what, self._started, self._is_done = what, time.monotonic(), threading.Event()
        threading.Thread(target=self._report, daemon=True).start()

    def _report(self) -> None:
        pause = 1.0
        while not self._is_done.wait(pause):
            seconds = round(time.monotonic() - self._started)
            said = "later processes find generated code in the compiler's cache"
            _log.info("compiling %s: %d s so far (%s)", self._what, seconds, said)
            pause = 15.0

    def stop(self) -> None:
        self._is_done.set()


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    count = 2 if lines and lines[0].endswith((":", "fake tensor call")) else 1
    said = " ".join(lines[:count]).rpartition(": got ")[2]
    return f"no graph can be captured ({type(error).__name__}: {said[:240]})"


def layout_of(tensordict: TensorDictBase) -> Hashable:
    """Return keys, shapes, strides and dtypes of a TensorDict: constants of a form."""
    found: list[Hashable] = [tensordict.batch_size]
    for key, x in tensordict.items(True, True, is_leaf=is_leaf_nontensor):
        found += (key, x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else (key,)
    return tuple(found)
