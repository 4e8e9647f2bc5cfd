"""The compiled form of a training step: its graphs, and when one of them makes the step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

from ppokit._calls import hooks_in
from ppokit._compiling import (
    REST,
    Budget,
    CompiledFunction,
    NoGraphError,
    are_same,
    attributes_of,
    have_hooks,
    layout_of,
    modules_of,
    parameters_of,
)
from ppokit._state import unchanged
from ppokit.distributed import alone
from ppokit.update.checks import total_and_kls
from ppokit.update.cuda_graph import ReplayedStep
from ppokit.update.decision import Limits, Outcome, decide
from ppokit.update.optimizers import STATE, Group, adam_step, groups_of

MOST_STRUCTURES = 8  # that keep their graphs
MOST_STATIC = 4  # graphs of a structure for one layout each; further layouts share one
MOST_REPLAYS = 8  # layouts of minibatches with a CUDA graph
MOST_IN_A_ROW = 4  # captures for one layout, none of which fitted the next call
TRIES = 16  # while no graph may be captured and none fits, one of so many steps looks for one
WORTH = 100  # calls of a graph within updates, after which it is captured without guards

CHANGES = "Python code within the networks changes in each call, and a graph would not"


class Settings(NamedTuple):
    """The options of a step that are constants of a graph."""

    device_type: str
    amp_dtype: torch.dtype | None
    kl_key: NestedKey
    needs_kl: bool  #: a stopper reads it
    clips: bool
    nonfinite: str | None
    returns_gradients: bool  #: and neither clips nor steps


class Structure(NamedTuple):
    """The constants of a graph; another structure needs another graph."""

    names: tuple[tuple[str, ...], ...]  #: places of each trained parameter in the loss
    fixed: tuple[tuple[str, ...], ...]  #: places of parameters that have no gradient
    scalars: tuple[int, ...]  #: positions of trained parameters without dimensions
    groups: tuple[Group, ...] | None  #: of an Adam in the graph; None if the optimizer is outside
    settings: Settings


class Inputs(NamedTuple):
    """Structure and tensors of a graph, as they are in this call."""

    structure: Structure
    parameters: list[Tensor]  #: that are trained
    tensors: tuple[list[Tensor], list[Tensor], list[list[Tensor]]]  #: trained, fixed, state


class Signature(NamedTuple):
    """The keys of a graph's outputs, constants of it."""

    keys: list[NestedKey]  #: of the row
    kinds: list[tuple[int, torch.dtype] | None]  #: dimensions and dtype; None: as in the row
    other_keys: list[NestedKey]


class Outputs(NamedTuple):
    """The outputs of a graph."""

    signature: Signature
    row: Tensor  #: the loss's outputs with one number each ``[K]``
    others: list[Tensor]  #: and those with more
    norm: Tensor  #: of all gradients together, before clipping; NaN without a step
    flags: Tensor  #: of the decision; unused with ``returns_gradients``
    gradients: list[Tensor]  #: clipped; empty if the optimizer is in the graph

    def outcome(self) -> Outcome:
        """Return the outcome of the step, without its decision."""
        keys, kinds, other_keys = self.signature
        outcome = Outcome(None, (keys, kinds, self.row), self.norm)
        if other_keys:
            others = dict(zip(other_keys, self.others, strict=True))
            outcome.losses = outcome.as_tensordict().update(others)
        return outcome

    def losses(self) -> TensorDictBase:
        """Return what the loss returned, without gradient."""
        return self.outcome().as_tensordict()


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

    def __init__(self, options: Mapping[str, Any], *, replays: bool) -> None:
        self.options = options
        self.replays = replays  #: as CUDA graphs
        self.reason: str | None = None  #: why the last step was made eagerly
        self._budget, self._is_within = Budget(), False
        self._warned: set[str] = set()
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the graphs: a copy captures its own."""
        return {"options": self.options, "replays": self.replays}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def _forget(self, loss: nn.Module | None = None, hooks: Any = None) -> None:
        self._loss, self._hooks = loss, hooks  # which Dynamo does not look at again
        self._trained: frozenset[str] = frozenset()  # names of parameters that have a gradient
        # by structure, and whether a graph serves one layout only
        self._graphs: dict[tuple[Structure, bool], CompiledFunction] = {}
        self._own: set[tuple[Structure, Any]] = set()  # layouts with a graph of their own
        self._rests: dict[Structure | None, tuple[int, str]] = {}  # until which step, and why
        self._replayed: dict[Any, ReplayedStep] = {}
        self._in_a_row, self._has_missed = (None, 0), False  # captures of a key and layout
        self._doubt: str | None = None  # why the losses could not be traced; they may raise eagerly
        self.begin()

    def begin(self, *, within: bool | None = None) -> None:
        """Forget parameters, options and graphs of the last calls: user code may have run.

        With ``within``, none will run before the next call of this method; None keeps the last
        answer.
        """
        self._is_within = self._is_within if within is None else within
        self._inputs: Inputs | None = None
        self._last: dict[Any, int] = {}  # number of the graph of the last call of each layout
        self._numbers: dict[Any, int] = {}  # of the graph that has fitted twice in a row
        self._seen: set[int] = set()  # numbers of the graphs that have run
        self._is_pure = True  # no graph has changed what graphs depend on
        for replayed in self._replayed.values():
            replayed.is_current = False

    def __call__(self, request: Request) -> tuple[Outputs, list[Tensor]] | None:
        """Make a step, and return outputs and trained parameters; None: it is made eagerly.

        An error of a graph that has run before is raised.
        """
        self._budget.calls, self._doubt = self._budget.calls + 1, None
        if not torch.is_grad_enabled():
            return None  # an eager step raises
        layout = layout_of(request.minibatch) if self._is_within else ()
        if layout in self._numbers and self._are_in_place():
            return self._without_guards(request, layout)
        hooks = [hook for table in hooks_in(vars(request.loss)) for hook in table.values()]
        if request.loss is not self._loss or hooks != self._hooks:
            self._forget(request.loss, hooks)
        return self._with_guards(request, layout)

    def _are_in_place(self) -> bool:
        """Return whether the parameters lie where a CUDA graph would write to them."""
        inputs = self._inputs
        return inputs is not None and not (
            self.replays
            and any(
                p.data_ptr() != x.data_ptr()
                for p, x in zip(inputs.parameters, inputs.tensors[0], strict=True)
            )
        )

    def _with_guards(self, request: Request, layout: Any) -> tuple[Outputs, list[Tensor]] | None:
        modules = modules_of({"loss": request.loss})
        if reason := _obstacle(request.loss, modules):
            return self._run_eagerly(reason)
        inputs = _inputs_of(request, modules, self._trained)
        reason = self._reason_to_rest(None if inputs is None else inputs.structure)
        # A look for a graph takes as long as some steps where it finds none.
        is_tried = reason is None or not self._has_missed or self._budget.calls % TRIES == 0
        if is_tried and inputs is not None and (key := self._key(inputs, layout)) in self._graphs:
            found = self._try(request, inputs, key, modules, layout)
            if found is None and key[1] and self._graphs[key].graphs >= MOST_STATIC:
                self._own.discard((inputs.structure, layout))
                key = self._key(inputs, layout)
                if key in self._graphs:
                    found = self._try(request, inputs, key, modules, layout)
            if found is not None:
                return found
        if reason is None:
            gradients, self._doubt = _gradients_of(request, modules)
            self._trained = frozenset(gradients)
            inputs = _inputs_of(request, modules, self._trained)
            if self._doubt is not None or inputs is None:
                return None
            reason = self._reason_to_rest(inputs.structure)
            if reason is None:
                return self._capture(request, inputs, modules, layout, gradients)
        return self._run_eagerly(reason)

    def _key(self, inputs: Inputs, layout: Any) -> tuple[Structure, bool]:
        """Return the key of the graphs for a minibatch."""
        structure = inputs.structure
        graph = self._graphs.get((structure, True))
        is_full = graph is not None and graph.graphs >= MOST_STATIC
        return structure, self._is_within and not (is_full and (structure, layout) not in self._own)

    def _given(self, request: Request, inputs: Inputs) -> tuple[Any, ...]:
        """Return the arguments of a graph."""
        minibatch = request.minibatch.contiguous() if self.replays else request.minibatch
        return minibatch, *inputs.tensors, request.numbers, request.halted

    def _try(
        self,
        request: Request,
        inputs: Inputs,
        key: tuple[Structure, bool],
        modules: Mapping[str, nn.Module],
        layout: Any,
        *,
        captures: bool = False,
    ) -> tuple[Outputs, list[Tensor]] | None:
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
                self._numbers.clear()
            last, self._last[layout] = self._last.get(layout), number
            if last not in (None, number) or not are_same(before, attributes_of(modules)):
                self._is_pure = False  # all are called with guards
                self._numbers.clear()
            elif last == number and self._is_pure and graph.is_static:
                self._inputs, self._numbers[layout] = inputs, number
        return outputs, inputs.parameters

    def _capture(
        self,
        request: Request,
        inputs: Inputs,
        modules: Mapping[str, nn.Module],
        layout: Any,
        gradients: Mapping[str, Tensor],
    ) -> tuple[Outputs, list[Tensor]] | None:
        """Make the step by a graph that is captured for it, or return None."""
        structure, is_static = key = self._key(inputs, layout)
        last, count = self._in_a_row
        self._in_a_row = (key, layout), count + 1 if last == (key, layout) else 1
        rests, reason = None, CHANGES
        if difference := _difference(request, inputs, gradients):
            rests, reason = structure, difference
        elif self._in_a_row[1] <= MOST_IN_A_ROW:
            if key not in self._graphs:
                if len(self._graphs) == MOST_STRUCTURES:
                    del self._graphs[next(iter(self._graphs))]
                    self._numbers.clear()  # some may be of the graphs that were dropped
                self._graphs[key] = CompiledFunction(
                    graph_of(request.loss, structure),
                    self.options,
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
        self._rests[rests] = self._budget.calls + REST, reason
        return self._run_eagerly(reason)

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

    def _without_guards(self, request: Request, layout: Any) -> tuple[Outputs, list[Tensor]] | None:
        """Make the step by the graph that has fitted the layout since :meth:`begin`."""
        inputs, number = self._inputs, self._numbers[layout]
        assert inputs is not None
        graph, given = self._graphs[inputs.structure, True], self._given(request, inputs)
        calls = 1 if self.replays else WORTH
        with torch.no_grad():
            form, outputs = graph.form(number, layout, given, after=calls)
            if form is not None:
                key = number, layout
                outputs = self._replay(form, key, given) if self.replays else form(*given)[1]
            if outputs is not None:
                return outputs, inputs.parameters
        found = self._try(request, inputs, (inputs.structure, True), {}, layout)
        return self._with_guards(request, layout) if found is None else found

    def _replay(self, form: Any, key: Any, given: Any) -> Outputs:
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


def _obstacle(loss: nn.Module, modules: Mapping[str, nn.Module]) -> str | None:
    """Return why a loss runs eagerly, or None."""
    if getattr(loss, "functional", False):
        return "functional=True keeps parameters apart from networks; pass functional=False"
    if have_hooks(modules, ignored=loss):
        return "a module or parameter of the networks has a hook, or a forward of its own"
    return None


def _trace(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    use: Callable[[list[Any], list[Any], Sequence[Tensor]], None],
    device: torch.device,
) -> str | None:
    """Trace a function, and use tensors of its graph, their copies and the results of these.

    No graph is kept, and the call is not made: Python code of the user has no effect.

    Returns:
        Why the function cannot be traced, or None.
    """
    is_traced = False

    def backend(graph: Callable[..., Sequence[Tensor]], inputs: list[Any]) -> Any:
        nonlocal is_traced
        copies = [
            x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
            for x in inputs
        ]
        with torch.enable_grad():
            use(inputs, copies, graph(*copies))
        is_traced = True
        raise NoGraphError

    options: Any = {"what": "the losses", "on_cpu": True, "static": True, "budget": Budget()}
    traced = CompiledFunction(function, {"backend": backend}, **options)
    try:
        with alone(), unchanged(device=device):
            traced(*arguments, may_capture=True)
    except NoGraphError as error:
        return None if is_traced else str(error)
    return None


def _gradients_of(
    request: Request, modules: Mapping[str, nn.Module]
) -> tuple[dict[str, Tensor], str | None]:
    """Return autograd's gradients by the names of parameters, or why no graph can be captured."""
    names, found = {p: names[0] for names, p in parameters_of(modules)}, dict[Tensor, Tensor]()
    holder, settings = _Holder(request.loss), request.settings()

    def total_loss(minibatch: TensorDictBase) -> Tensor:
        return _total_loss(lambda: holder(minibatch.copy()), settings, Signature([], [], []))[0]

    def differentiate(inputs: list[Any], copies: list[Any], outputs: Sequence[Tensor]) -> None:
        places = [n for n, x in enumerate(inputs) if isinstance(x, Tensor) and x.requires_grad]
        given = [copies[n] for n in places] if outputs[0].requires_grad else []
        gradients = torch.autograd.grad(outputs[0], given, allow_unused=True) if given else ()
        pairs = zip(places, gradients, strict=False)
        found.update((inputs[n], gradient) for n, gradient in pairs if gradient is not None)

    reason = _trace(total_loss, [request.minibatch], differentiate, request.halted.device)
    held = {p for group in request.optimizer.param_groups for p in group["params"]}
    if any(x in held and x not in names for x in found):
        reason = "the optimizer trains a tensor that is no parameter of a module of the loss"
    return {names[x]: gradient for x, gradient in found.items() if x in names}, reason


def _difference(request: Request, inputs: Inputs, gradients: Mapping[str, Tensor]) -> str | None:
    """Return why the gradients of a graph would not be autograd's, or None.

    A graph has other tensors in place of the parameters, under the names of these.
    """
    holder, structure, found = _Holder(request.loss), inputs.structure, list[Tensor]()
    are_reached = False  # parameters themselves, beside the tensors in their place

    def graph_gradients(
        minibatch: TensorDictBase, values: list[Tensor], fixed: list[Tensor]
    ) -> list[Tensor]:
        function = _differentiated(holder, Signature([], [], []), structure, fixed, minibatch, 1.0)
        return function(values)[0]

    def keep(inputs: list[Any], copies: list[Any], outputs: Sequence[Tensor]) -> None:
        nonlocal are_reached
        are_reached = any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
        found.extend(outputs)

    arguments = request.minibatch, *inputs.tensors[:2]
    if reason := _trace(graph_gradients, arguments, keep, request.halted.device):
        return reason
    expected = [gradients[names[0]].double() for names in structure.names]
    size = torch.stack([x.norm() for x in expected]).norm()
    largest = min(torch.finfo(x.dtype).eps for x in gradients.values()) ** 0.6
    if structure.settings.amp_dtype is not None:
        largest = 0.1
    are_far = [
        (x - y.double().view_as(x)).norm() > largest * (x.norm() + size / 10)
        for x, y in zip(expected, found, strict=True)
    ]
    is_far = torch.stack(are_far).any() & size.isfinite()
    if are_reached or bool(is_far):
        return (
            "the loss reaches a parameter in other ways than by its name in a module, or asks for "
            "its class or requires_grad, and a graph has another tensor in its place"
        )
    return None


def _inputs_of(
    request: Request, modules: Mapping[str, nn.Module], trained: frozenset[str]
) -> Inputs | None:
    """Look up structure and tensors; None: no parameter is trained, or the optimizer is new."""
    optimizer, settings = request.optimizer, request.settings()
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    chosen, others = [], []
    for names, p in parameters_of(modules):
        (chosen if names[0] in trained and id(p) in held else others).append((names, p))
    parameters = [p for _, p in chosen]
    groups = None if settings.returns_gradients else groups_of(optimizer, parameters)
    states: list[Any] = [] if groups is None else [optimizer.state.get(p) for p in parameters]
    if not (parameters and all(states)):
        return None  # an eager step raises, or creates the state
    for p, state in zip(parameters, states, strict=False):
        if state["step"].device != p.device:  # without fused or capturable each step would wait
            state["step"] = state["step"].to(p.device, non_blocking=True)
    structure = Structure(
        tuple(names for names, _ in chosen),
        tuple(names for names, _ in others),
        tuple(n for n, p in enumerate(parameters) if p.ndim == 0),
        groups,
        settings,
    )
    # A graph writes to these. torch 2.13 drops what it writes to a float64 without dimensions.
    values = [p.detach() if p.ndim else p.detach().view(1) for p in parameters]
    state = [[x[kind] if x[kind].ndim else x[kind].view(1) for x in states] for kind in STATE]
    tensors = values, [p.detach() for _, p in others], state if states else []
    return Inputs(structure, parameters, tensors)


# -- the graph -----------------------------------------------------------------------


class _Holder(nn.Module):
    # functional_call of torchrl's own loss modules fails under Dynamo.
    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, minibatch: TensorDictBase) -> TensorDictBase:
        return self.loss(minibatch)


def graph_of(loss: nn.Module, structure: Structure) -> Callable[..., Outputs]:
    """Return the function to capture."""
    holder = _Holder(loss)

    @torch.compiler.assume_constant_result
    def constants() -> Structure:  # without guards, which each call would check
        return structure

    def training_step(
        minibatch: TensorDictBase,
        values: list[Tensor],
        fixed: list[Tensor],
        state: list[list[Tensor]],
        numbers: Tensor,
        halted: Tensor,
    ) -> Outputs:
        structure, signature = constants(), Signature([], [], [])
        settings = structure.settings
        scale = numbers[0].float() if settings.returns_gradients else 1.0
        function = _differentiated(holder, signature, structure, fixed, minibatch, scale)
        gradients, (total, (row, kls, others)) = function(values)
        if settings.returns_gradients:
            return Outputs(signature, row, others, total, total, [g / scale for g in gradients])
        largest, limit, is_due, *rates = numbers.unbind()
        norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
        limits = Limits(limit, is_due > 0, settings.nonfinite)
        decision = decide(total, norm.square(), kls, limits, halted[0] > 0)
        if settings.clips:
            factor = torch.where(norm <= largest, 1.0, (largest / (norm + 1e-6)).clamp(max=1.0))
            gradients = [g * factor.to(g.dtype) for g in gradients]
        if structure.groups is not None:
            adam_step(structure.groups, values, gradients, state, rates, decision.stepped)
            gradients = []
        norm = torch.where(decision.stepped, norm, math.nan)
        return Outputs(signature, row, others, norm, decision.flags(), gradients)

    return training_step


def _differentiated(
    holder: _Holder,
    signature: Signature,
    structure: Structure,
    fixed: list[Tensor],
    minibatch: TensorDictBase,
    scale: Any,
) -> Callable[..., Any]:
    """Return the function of the parameters that returns gradients, and :func:`_total_loss`."""
    # As an argument of torch.func the minibatch would go through tensordict's pytree functions.
    # They change a global that the graph depends on: the next call would capture it again.
    batch = minibatch.copy()

    def total_loss(values: list[Tensor]) -> Any:
        values = [x.view(()) if n in structure.scalars else x for n, x in enumerate(values)]
        given = zip([*values, *fixed], [*structure.names, *structure.fixed], strict=True)
        swapped = {name: x for x, names in given for name in names}
        run = lambda: functional_call(holder, swapped, (batch,), tie_weights=False)  # noqa: E731
        total, aux = _total_loss(run, structure.settings, signature)
        return total * scale, aux

    return grad_and_value(total_loss, has_aux=True)


def _total_loss(
    run_loss: Callable[[], TensorDictBase], settings: Settings, signature: Signature
) -> tuple[Tensor, tuple[Tensor, list[Tensor], list[Tensor]]]:
    """Return the sum of the losses, and the row, the KLs and the other outputs of a loss."""
    context: Any = nullcontext()
    if settings.amp_dtype is not None:
        context = torch.autocast(settings.device_type, settings.amp_dtype)
    with context:
        outputs = run_loss()
    keys, kinds, other_keys = signature
    total, kls = total_and_kls(outputs, settings.kl_key, needs_kl=settings.needs_kl)
    row, others = [], []
    for key, value in outputs.items(True, True):
        value = value.detach()
        if value.numel() == 1 and not value.is_complex():  # they go through float64
            keys.append(key)
            kinds.append((value.ndim, value.dtype))
            number = value.reshape(())
            row.append(number if number.is_floating_point() else number.double())
        else:
            other_keys.append(key)
            others.append(value)
    stacked = torch.stack(row)
    kinds[:] = [None if kind == (0, stacked.dtype) else kind for kind in kinds]
    return total, (stacked, kls, others)


class WithGradients(torch.autograd.Function):
    """A number whose gradients are known."""

    @staticmethod
    def forward(ctx: Any, number: Tensor, gradients: list[Tensor], *_: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the number; its gradients are those given, one for each parameter."""
        ctx.gradients = gradients
        return number.clone()

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients times a weight."""
        return None, None, *(weight * gradient for gradient in ctx.gradients)
