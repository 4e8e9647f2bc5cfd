"""The compiled form of a training step: its graphs, and when one of them makes the step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor, nn

from ppokit._batch import Options, State, StateDict, is_functional
from ppokit._calls import are_same, attributes_of, have_hooks, hooks_in, modules_of, parameters_of
from ppokit._compiling import REST, Budget, Compiled, CompiledFunction, NoGraphError, layout_of
from ppokit.recurrent import has_memory, lstm_weights, no_graph_of
from ppokit.update.cuda_graph import ReplayedStep
from ppokit.update.graph import Memories, Outputs, Settings, Structure, graph_of
from ppokit.update.optimizers import STATE, groups_of
from ppokit.update.traces import TracedLosses, difference, trace_losses

MOST_STRUCTURES = 8  # that keep their graphs
MOST_STATIC = 4  # graphs of a structure for one layout each; further layouts share one
MOST_REPLAYS = 8  # layouts of minibatches with a CUDA graph
MOST_IN_A_ROW = 4  # captures for one kind of minibatch, none of which fitted the next call
TRIES = 16  # while no graph may be captured and none fits, one of so many steps looks for one
WORTH = 100  # calls of a graph within updates, after which it is captured without guards

Step = tuple[Outputs, list[Tensor]]  # made by a graph, and the parameters that are trained
CHANGES = "Python code within the networks changes in each call, and a graph would not"
NO_STATE = "an eager step does not train all parameters that a graph would"
_backward = Tensor.backward


class Inputs(NamedTuple):
    """Structure and tensors of a graph, as they are in this call."""

    structure: Structure
    parameters: list[Tensor]  #: that are trained
    tensors: tuple[list[Tensor], list[Tensor], list[list[Tensor]]]  #: trained, fixed, state


class Request(NamedTuple):
    """The parts of a training step, and its minibatch."""

    loss: nn.Module
    optimizer: torch.optim.Optimizer
    settings: Callable[[], Settings]
    minibatch: TensorDictBase
    numbers: Tensor  #: largest norm, KL limit, whether it is due, learning rates; or a scale
    halted: Tensor  #: above 0, the step is not made


class CompiledStep:
    """Makes training steps in graphs, where one fits.

    A call looks for a graph whose guards hold. If there is none, it traces the losses, to find out
    which parameters have a gradient, and captures a graph, which makes the step; if that fails, the
    step is made eagerly. So the user's code runs once a step. None may run between :meth:`begin`
    and the next: guards are checked twice for each layout of the minibatches.
    """

    def __init__(self, options: Options, *, replays: bool) -> None:
        self.options = options
        self.replays = replays  #: as CUDA graphs
        self.reason: str | None = None  #: why the last step was made eagerly
        self._budget, self._is_within = Budget(), False
        self._warned: set[str] = set()
        self._forget()

    def __getstate__(self) -> StateDict:
        """Leave out the graphs: a copy captures its own."""
        return {"options": self.options, "replays": self.replays}

    def __setstate__(self, state: State) -> None:
        self.__init__(**state)

    def _forget(self, loss: nn.Module | None = None, hooks: Sequence[object] = ()) -> None:
        self._loss, self._hooks = loss, hooks  # which Dynamo does not look at again
        # sets of names of parameters that have a gradient, the last one first
        self._trained: list[frozenset[str]] = [frozenset()]
        # by structure, and whether a graph serves one layout only
        self._graphs: dict[tuple[Structure, bool], CompiledFunction] = {}
        self._own: set[tuple[Structure, Hashable]] = set()  # layouts with a graph of their own
        self._rests: dict[Structure | None, tuple[int, str]] = {}  # until which step, and why
        self._replayed: dict[Hashable, ReplayedStep] = {}
        self._in_a_row: tuple[Hashable, int] = (None, 0)  # captures for one kind of minibatch
        self._has_missed = False
        self._without_state = 0  # calls in a row: the optimizer had none of what a graph trains
        self._doubt: str | None = None  # why the losses could not be traced; they may raise eagerly
        self.begin()

    def begin(self, *, within: bool | None = None) -> None:
        """Forget parameters, options and graphs of the last calls: user code may have run.

        With ``within``, none will run before the next call of this method; None keeps the last
        answer.
        """
        self._is_within = self._is_within if within is None else within
        self._last: dict[Hashable, int] = {}  # number of the graph of the last call of each layout
        # inputs and number of the graph that has fitted a layout twice in a row
        self._fits: dict[Hashable, tuple[Inputs, int]] = {}
        self._seen: set[int] = set()  # numbers of the graphs that have run
        self._is_pure = True  # no graph has changed what graphs depend on
        for replayed in self._replayed.values():
            replayed.is_current = False

    def __call__(self, request: Request) -> Step | None:
        """Make a step, and return outputs and trained parameters; None: it is made eagerly.

        An error of a graph that has run before is raised.
        """
        self._budget.calls, self._doubt = self._budget.calls + 1, None
        if not torch.is_grad_enabled():
            return None  # an eager step raises
        if isinstance(request.minibatch, LazyStackedTensorDict):
            try:
                request = request._replace(minibatch=request.minibatch.contiguous())
            except RuntimeError:
                return self._run_eagerly("entries of a stack of minibatches have unlike shapes")
        layout = layout_of(request.minibatch) if self._is_within else ()
        if layout in self._fits and self._are_in_place(self._fits[layout][0]):
            return self._without_guards(request, layout)
        hooks = [hook for table in hooks_in(vars(request.loss)) for hook in table.items()]
        if request.loss is not self._loss or hooks != self._hooks:
            self._forget(request.loss, hooks)
        return self._with_guards(request, layout)

    def _are_in_place(self, inputs: Inputs) -> bool:
        """Return whether the parameters lie where a CUDA graph would write to them."""
        pairs = zip(inputs.parameters, inputs.tensors[0], strict=True)
        return not (self.replays and any(p.data_ptr() != x.data_ptr() for p, x in pairs))

    def _with_guards(self, request: Request, layout: Hashable) -> Step | None:
        modules = modules_of({"loss": request.loss})
        parameters = parameters_of(modules)
        if reason := _obstacle(request, modules, parameters):
            return self._run_eagerly(reason)
        reasons = []
        for trained in [*self._trained]:
            inputs = _inputs_of(request, modules, parameters, trained)
            reasons.append(self._reason_to_rest(None if inputs is None else inputs.structure))
            # A look for a graph takes as long as some steps where it finds none.
            is_due = not self._has_missed or self._budget.calls % TRIES == 0
            if inputs is None or not (reasons[-1] is None or is_due):
                continue
            if (key := self._key(inputs, layout)) not in self._graphs:
                continue
            found = self._try(request, inputs, key, modules, layout)
            if found is None and key[1] and self._graphs[key].graphs >= MOST_STATIC:
                self._own.discard((inputs.structure, layout))
                key = self._key(inputs, layout)
                if key in self._graphs:
                    found = self._try(request, inputs, key, modules, layout)
            if found is not None:
                self._note_trained(trained)
                return found
        reason = reasons[0]
        if reason is None and _creates_state(request):
            return None
        if reason is None:
            traced = trace_losses(
                request.loss,
                request.settings(),
                request.minibatch,
                parameters,
                _memories_of(modules, parameters),
                [p for group in request.optimizer.param_groups for p in group["params"]],
            )
            if isinstance(traced, str):
                self._doubt = traced
                return None
            self._note_trained(traced.trained)
            inputs = _inputs_of(request, modules, parameters, traced.trained)
            self._without_state = self._without_state + 1 if inputs is None else 0
            if inputs is None:  # an eager step raises, creates the state, or is skipped
                if self._without_state > MOST_IN_A_ROW:
                    self._doubt = NO_STATE
                return None
            reason = self._reason_to_rest(inputs.structure)
            if reason is None:
                return self._capture(request, inputs, modules, layout, traced)
        return self._run_eagerly(reason)

    def _note_trained(self, trained: frozenset[str]) -> None:
        """Let the graphs of these parameters be tried first."""
        if trained != self._trained[0]:
            others = [x for x in self._trained if x != trained]
            self._trained = [trained, *others][:MOST_STRUCTURES]

    def _key(self, inputs: Inputs, layout: Hashable) -> tuple[Structure, bool]:
        """Return the key of the graphs for a minibatch."""
        structure = inputs.structure
        graph = self._graphs.get((structure, True))
        is_full = graph is not None and graph.graphs >= MOST_STATIC
        is_varied = structure.memories or (is_full and (structure, layout) not in self._own)
        return structure, self._is_within and not is_varied

    def _given(self, request: Request, inputs: Inputs) -> tuple[Any, ...]:
        """Return the arguments of a graph."""
        minibatch = request.minibatch.contiguous() if self.replays else request.minibatch
        numbers = request.numbers, request.halted
        if inputs.structure.memories:
            numbers = _of_static_shape(numbers)
        return minibatch, *inputs.tensors, *numbers

    def _try(
        self,
        request: Request,
        inputs: Inputs,
        key: tuple[Structure, bool],
        modules: Mapping[str, nn.Module],
        layout: Hashable,
        *,
        captures: bool = False,
    ) -> Step | None:
        """Make the step by a graph whose guards hold, or return None; it may be captured first."""
        before = attributes_of(modules) if self._is_within else []
        graph, given = self._graphs[key], self._given(request, inputs)
        try:
            with torch.no_grad():
                number, outputs = graph(*given, may_capture=captures)
        except NoGraphError:
            if captures:
                raise
            self._has_missed = True
            return None
        self.reason, self._has_missed = None, False
        if not captures:
            self._in_a_row = None, 0
        if self._is_within:
            if key[1]:
                self._own.add((inputs.structure, layout))
            graph.confirm(number, layout)
            if number not in self._seen:  # it may change what the other graphs depend on
                self._seen.add(number)
                self._fits.clear()
            last, self._last[layout] = self._last.get(layout), number
            if last not in (None, number) or not are_same(before, attributes_of(modules)):
                self._is_pure = False  # all are called with guards
                self._fits.clear()
            elif last == number and self._is_pure and graph.is_static:
                self._fits[layout] = inputs, number
        return outputs, inputs.parameters

    def _capture(
        self,
        request: Request,
        inputs: Inputs,
        modules: Mapping[str, nn.Module],
        layout: Hashable,
        traced: TracedLosses,
    ) -> Step | None:
        """Make the step by a graph that is captured for it, or return None."""
        structure, is_static = key = self._key(inputs, layout)
        (last, count), kind = self._in_a_row, (key, layout_of(request.minibatch))
        self._in_a_row = kind, count + 1 if last == kind else 1
        rests, reason = None, CHANGES
        given = structure, request.minibatch, *inputs.tensors[:2]
        if differs := difference(traced, request.loss, *given):
            rests, reason = structure, differs
        elif self._in_a_row[1] <= MOST_IN_A_ROW:
            if key not in self._graphs:
                if len(self._graphs) == MOST_STRUCTURES:
                    del self._graphs[next(iter(self._graphs))]
                    self._fits.clear()  # some may be of the graphs that were dropped
                self._graphs[key] = CompiledFunction(
                    graph_of(request.loss, structure),
                    # Sequences are of all sizes: one graph, from the first on.
                    {**self.options, **({"dynamic": True} if structure.memories else {})},
                    what=f"the training step of {type(request.loss).__name__}",
                    on_cpu=request.halted.is_cpu,
                    static=is_static,
                    budget=self._budget,
                    modules=[request.loss],
                )
            try:
                return self._try(request, inputs, key, modules, layout, captures=True)
            except NoGraphError as error:
                rests, reason = None if error.is_refused else structure, str(error)
            except BaseException:  # Ctrl-C
                self._in_a_row = last, count
                raise
        self._rests[rests] = self._budget.calls + REST, reason
        return self._run_eagerly(reason)

    def note_skipped_step(self) -> None:
        """Count no eager step that was skipped, and so could not create the optimizer's state."""
        self._without_state = 0

    def note_eager_losses(self) -> None:
        """Capture nothing for a while if losses that run eagerly could not be traced."""
        if self._doubt is not None:
            self._rests[None] = self._budget.calls + REST, self._doubt
            self._run_eagerly(self._doubt)
            self._doubt = None

    def _reason_to_rest(self, structure: Structure | None) -> str | None:
        """Return why no graph may be captured now, or none of a structure; None if one may be."""
        for key in (None, structure):
            until, reason = self._rests.get(key, (0, ""))
            if self._budget.calls < until:
                return reason
        return None

    def _run_eagerly(self, reason: str) -> None:
        """Warn once of each reason."""
        self.reason = reason
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(
                f"The training step runs eagerly: {reason}.", RuntimeWarning, stacklevel=7
            )

    # -- without guards ----------------------------------------------------------------

    def _without_guards(self, request: Request, layout: Hashable) -> Step | None:
        """Make the step by the graph that has fitted the layout since :meth:`begin`."""
        inputs, number = self._fits[layout]
        graph, given = self._graphs[inputs.structure, True], self._given(request, inputs)
        calls = 1 if self.replays else WORTH
        with torch.no_grad(), suppress(NoGraphError):
            form, outputs = graph.form(number, layout, given, after=calls)
            if form is not None:
                key = number, layout
                outputs = self._replay(form, key, given) if self.replays else form(*given)[1]
            if outputs is not None:
                return outputs, inputs.parameters
        found = self._try(request, inputs, (inputs.structure, True), {}, layout)
        return self._with_guards(request, layout) if found is None else found

    def _replay(self, form: Compiled, key: Hashable, given: Sequence[Any]) -> Outputs:
        """Make the step by a CUDA graph, unless there are too many."""
        minibatch, *tensors, numbers, halted = given
        replayed = self._replayed.get(key)
        if replayed is None:
            if len(self._replayed) == MOST_REPLAYS:
                return form(*given)[1]
            replayed = self._replayed[key] = ReplayedStep(minibatch, numbers, halted)
        if not replayed.is_current:
            replayed.capture(form, tuple(tensors))
        return replayed(minibatch, numbers, halted)


def _obstacle(
    request: Request,
    modules: Mapping[str, nn.Module],
    parameters: Sequence[tuple[tuple[str, ...], Tensor]],
) -> str | None:
    """Return why a loss runs eagerly, or None."""
    loss = request.loss
    entries = request.minibatch.values(True, True, is_leaf=is_leaf_nontensor)
    if not all(isinstance(x, Tensor) for x in entries):
        return "an entry of the minibatch is no tensor, and a graph would keep its value"
    if is_functional(loss):
        return "functional=True keeps parameters apart from networks; pass functional=False"
    if have_hooks(modules, ignored=loss):
        return "a module or parameter of the networks has a hook, or a forward of its own"
    if any(p.is_complex() for _, p in parameters):
        return "a parameter is complex"
    if torch.is_anomaly_enabled():
        return "torch looks for anomalies"
    for name, module in modules.items():
        if has_memory(module) and (reason := no_graph_of(module, request.settings().amp_dtype)):
            return f"{name} {reason}"
    return "Tensor.backward is replaced" if Tensor.backward is not _backward else None


def _memories_of(
    modules: Mapping[str, nn.Module], parameters: Sequence[tuple[tuple[str, ...], Tensor]]
) -> Memories:
    """Return the recurrent modules, and the places of their weights among the parameters."""
    memories = {name: module for name, module in modules.items() if has_memory(module)}
    if not memories:
        return ()
    places = {p: n for n, (_, p) in enumerate(parameters)}
    return tuple((x, tuple(places[p] for p in lstm_weights(m))) for x, m in memories.items())


def _creates_state(request: Request) -> bool:
    """Return whether an eager step must create the state of the optimizer."""
    optimizer, settings = request.optimizer, request.settings()
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return (
        not settings.returns_gradients
        and groups_of(optimizer, held) is not None
        and not any(optimizer.state.get(p) for p in held)
    )


def _inputs_of(
    request: Request,
    modules: Mapping[str, nn.Module],
    trainable: Sequence[tuple[tuple[str, ...], Tensor]],
    trained: frozenset[str],
) -> Inputs | None:
    """Look up structure and tensors; None: no parameter is trained, or the optimizer is new."""
    optimizer, settings = request.optimizer, request.settings()
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    chosen, others = [], []
    for names, p in trainable:
        (chosen if names[0] in trained and id(p) in held else others).append((names, p))
    parameters = [p for _, p in chosen]
    groups = None if settings.returns_gradients else groups_of(optimizer, parameters)
    states: list[Any] = [] if groups is None else [optimizer.state.get(p) for p in parameters]
    if not (parameters and all(states)):
        return None  # an eager step raises, or creates the state
    for p, state in zip(parameters, states, strict=False):
        if state["step"].device != p.device:  # without fused or capturable each step would wait
            state["step"] = state["step"].to(p.device, non_blocking=True)
    places = [p.data_ptr() or -n for n, (_, p) in enumerate([*chosen, *others])]  # 0: no numbers
    is_shared = len({*places}) < len(places)
    structure = Structure(
        tuple(names for names, _ in chosen),
        tuple(names for names, _ in others),
        tuple(n for n, p in enumerate(parameters) if p.ndim == 0),
        tuple(map(places.index, places)) if is_shared else (),
        _memories_of(modules, [*chosen, *others]),
        groups,
        settings,
    )
    # A graph writes to these. torch 2.13 drops what it writes to a float64 without dimensions.
    values = [p.detach() if p.ndim else p.detach().view(1) for p in parameters]
    state = [[x[kind] if x[kind].ndim else x[kind].view(1) for x in states] for kind in STATE]
    given = _of_static_shape if structure.memories else list[Tensor]
    state = [given(x) for x in state] if states else []
    return Inputs(
        structure, parameters, (given(values), given(p.detach() for _, p in others), state)
    )


def _of_static_shape(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors whose sizes a graph does not take for those of a minibatch that are equal."""
    return [nn.Parameter(x, requires_grad=False) for x in tensors]
