"""Traces of the losses: which parameters have a gradient, and whether a graph is what they compute.

A trace computes nothing, keeps no graph and has no effect of Python code.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor, fx, nn

from ppokit._compiling import Budget, Compiled, CompiledFunction, NoGraphError
from ppokit.update.graph import (
    Holder,
    Memories,
    Settings,
    Signature,
    Structure,
    differentiated,
    total_loss,
)

Look = Callable[[fx.GraphModule, Sequence[object]], None]  # at a graph and its inputs
MARK = (1,) * 16  # dimensions by which the total is found among all results of a graph
OTHER_CODE = (
    "the loss reaches a parameter in other ways than by its name in a module, asks for its class "
    "or requires_grad, or computes with torch.func or NumPy's numbers (use float()): a graph would "
    "not do the same"
)
OTHER_GRADIENTS = "the losses have gradients of tensors that are not the optimizer's and the loss's"
WRITES = "the loss changes entries of its minibatch, and a graph would not"


class TracedLosses(NamedTuple):
    """The losses of a minibatch as autograd differentiates them."""

    trained: frozenset[str]  #: first names of the parameters that have a gradient
    lines: list[object]  #: operations, in order
    total: Hashable  #: the sum of the losses: the number of a line, or an input
    results: set[Hashable]  #: others, likewise
    keys: list[Hashable]  #: of the losses


class _MarkedHolder(Holder):
    """Calls a loss after an operation by which the first of the loss is found."""

    def forward(self, minibatch: TensorDictBase) -> TensorDictBase:
        torch.empty(MARK)
        return super().forward(minibatch)


def trace_losses(
    loss: nn.Module,
    settings: Settings,
    minibatch: TensorDictBase,
    parameters: Sequence[tuple[tuple[str, ...], Tensor]],
    memories: Memories,
    held: Iterable[Tensor],
) -> TracedLosses | str:
    """Return the losses of a minibatch as autograd differentiates them, or why no graph can be.

    Args:
        loss: the loss module.
        settings: the options of the step.
        minibatch: what the losses are of.
        parameters: the trainable parameters of the loss, each with its names.
        memories: recurrent modules, and the places of their weights among the parameters.
        held: the parameters of the optimizer.
    """
    names, notes = {p: names[0] for names, p in parameters}, _Notes()
    holder, trained, found = _MarkedHolder(loss, memories), set[Tensor](), list[Any]()

    def losses(minibatch: TensorDictBase, tensors: list[Tensor]) -> object:
        batch, signature = minibatch.copy(), Signature([], [], [], [])
        holder.give(tensors)
        total, results = total_loss(lambda: holder(batch), settings, signature)
        holder.give(())
        keys, others = list(minibatch.keys(True, True)), list(batch.keys(True, True))
        is_same = keys == others and all(batch.get(x) is minibatch.get(x) for x in keys)
        return notes.add(is_same, *map(tuple, signature)), total.view(*MARK), results

    def look(graph: fx.GraphModule, inputs: Sequence[object]) -> None:
        trained.update(_have_gradient(graph, inputs))
        before, operations, refs = _operations(graph, [_label(x, names) for x in inputs])
        refs |= {node: _through(node, refs) for node in before}
        mark, lines = _mark(graph), []
        for node in operations:
            if node is not mark:
                lines.append(_line(node, refs))
                refs[node] = len(lines) - 1
        results = {refs[x] for x in _results(graph) if isinstance(x, fx.Node) and x is not mark}
        found.extend((lines, refs[mark.all_input_nodes[0]], results))

    given = [p for _, p in parameters] if memories else []
    if reason := _trace(losses, [minibatch, given], look):
        return reason
    is_same, *keys = notes.last
    if not is_same:
        return WRITES
    if no_tensors := keys[-1]:
        return f"the loss returns entries that are no tensors, {[*no_tensors]}"
    if not trained <= names.keys() & {*held}:
        return OTHER_GRADIENTS
    return TracedLosses(frozenset(names[x] for x in trained), *found, keys=keys)


def difference(
    traced: TracedLosses,
    loss: nn.Module,
    structure: Structure,
    minibatch: TensorDictBase,
    values: list[Tensor],
    fixed: list[Tensor],
) -> str | None:
    """Return why a graph would compute other losses, or None: its operations are the same.

    A graph has other tensors in place of the parameters: ``values`` for trained ones, and
    ``fixed``.
    """
    holder, notes, is_same = _MarkedHolder(loss, structure.memories), _Notes(), False
    pairs = zip([*values, *fixed], [*structure.names, *structure.fixed], strict=True)
    places = {x: names[0] for x, names in pairs}

    def differentiate(
        minibatch: TensorDictBase, values: list[Tensor], fixed: list[Tensor]
    ) -> object:
        signature = Signature([], [], [], [])
        function = differentiated(holder, signature, structure, fixed, minibatch, 1.0)
        gradients, (total, results) = function(values)
        return notes.add(*map(tuple, signature)), total.view(*MARK), results, gradients

    def compare(graph: fx.GraphModule, inputs: Sequence[object]) -> None:
        nonlocal is_same
        before, operations, refs = _operations(graph, [_label(x, places) for x in inputs])
        for node in before:  # of torch.func, as are those after the losses
            refs[node] = _through(node, refs)
        size = len(traced.lines)
        for n, (line, node) in enumerate(zip(traced.lines, operations, strict=False)):
            if _line(node, refs) != line:
                return
            refs[node] = n
        for node in operations[size:]:
            refs[node] = _through(node, refs)
        results = {refs[x] for x in _results(graph) if isinstance(x, fx.Node)}
        is_same = refs[_mark(graph)] == traced.total and traced.results <= results

    reason = _trace(differentiate, (minibatch, values, fixed), compare)
    is_same = is_same and list(notes.last) == traced.keys
    return reason if reason or is_same else OTHER_CODE


class _Notes:
    """Constants that code writes down while it is traced."""

    def __init__(self) -> None:
        self.last: tuple[Any, ...] = ()

        @torch.compiler.assume_constant_result
        def add(*constants: object) -> int:
            self.last = constants
            return 0

        self.add = add


def _trace(function: Compiled, arguments: Sequence[object], look: Look) -> str | None:
    """Look at the graph of a function and its inputs; return why there is none, or None."""
    looks, is_traced = [look], False

    def backend(graph: fx.GraphModule, inputs: Sequence[object]) -> object:
        nonlocal is_traced
        looks.pop()(graph, inputs)  # torch keeps each backend
        is_traced = True
        raise NoGraphError

    options = {"what": "the losses", "on_cpu": True, "static": True, "budget": Budget()}
    traced = CompiledFunction(function, {"backend": backend}, **options)
    try:
        traced(*arguments, may_capture=True)
    except NoGraphError as error:
        return None if is_traced else str(error)
    finally:
        looks.clear()
    return "the losses compute nothing"


def _have_gradient(graph: fx.GraphModule, inputs: Sequence[object]) -> set[Tensor]:
    """Return the inputs that the total has a gradient of, found with tensors without values."""
    fakes = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
    first: Any = next(x for x in fakes if isinstance(x, Tensor))
    with first.fake_mode, torch.enable_grad():
        copies = [
            x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
            for x in fakes
        ]
        results = graph(*copies)
        total = results[_results(graph).index(_mark(graph))]
        places = [n for n, x in enumerate(copies) if isinstance(x, Tensor) and x.requires_grad]
        given = [copies[n] for n in places] if total.requires_grad else []
        gradients = torch.autograd.grad(total, given, allow_unused=True) if given else ()
    found = [inputs[n] for n, x in zip(places, gradients, strict=False) if x is not None]
    return {x for x in found if isinstance(x, Tensor)}


# -- operations ----------------------------------------------------------------------


def _operations(
    graph: fx.GraphModule, labels: Sequence[Hashable]
) -> tuple[list[fx.Node], list[fx.Node], dict[fx.Node, Hashable]]:
    """Return the operations before the loss, the others, and the inputs with labels."""
    nodes = [node for node in graph.graph.nodes if node.op != "output"]
    inputs = [node for node in nodes if node.op == "placeholder"]
    (start,) = (n for n, x in enumerate(nodes) if x.target is torch.empty and x.args == (MARK,))
    before = [node for node in nodes[:start] if node.op != "placeholder"]
    others = [node for node in nodes[start + 1 :] if node.op != "placeholder"]
    return before, others, dict(zip(inputs, labels, strict=True))


def _results(graph: fx.GraphModule) -> list[Any]:
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    results = output.args[0]
    return list(results)


def _mark(graph: fx.GraphModule) -> fx.Node:
    """Return the total among the results."""
    return next(x for x in _results(graph) if x.target == "view" and x.args[1:] == MARK)


def _label(x: object, names: Mapping[Tensor, str]) -> str:
    """Return the name of a parameter, or what another input is known by."""
    return repr(names.get(x, id(x))) if isinstance(x, Tensor) else repr(x)


def _through(node: fx.Node, refs: Mapping[fx.Node, Hashable]) -> Hashable:
    """Return what an operation with one tensor is known by: that tensor; or the operation."""
    inputs = node.all_input_nodes
    return refs[inputs[0]] if len(inputs) == 1 else repr(_line(node, refs))


def _line(node: fx.Node, refs: Mapping[fx.Node, Hashable]) -> object:
    """Return an operation in a form that equals that of the same one in another graph."""

    def plain(x: object) -> object:
        if isinstance(x, fx.Node):
            return "node", refs[x]
        if isinstance(x, Mapping):
            return [(key, plain(x[key])) for key in sorted(x)]
        if isinstance(x, list | tuple):
            return [plain(y) for y in x]
        if isinstance(x, slice):
            return [plain(y) for y in (x.start, x.stop, x.step)]
        return repr(x) if isinstance(x, float) else x  # also NaN

    if node.op == "get_attr":
        return node.op, list(_content(node))
    return node.op, node.target, plain(node.args), plain(node.kwargs)


def _content(node: fx.Node) -> Iterator[object]:
    """Yield what a constant is made of: the operations of a graph, or numbers of a tensor."""
    holder = node.graph.owning_module
    held = getattr(holder, str(node.target))
    if isinstance(held, fx.GraphModule):
        refs: dict[fx.Node, Hashable] = {}
        for n, inner in enumerate(held.graph.nodes):
            refs[inner] = n
            yield _line(inner, refs) if inner.op != "placeholder" else inner.op
    else:
        yield held.dtype, held.shape, held.tolist()
