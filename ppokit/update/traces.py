"""Traces of the losses: which parameters have a gradient, and whether a graph is what they compute.

A trace computes nothing, keeps no graph and has no effect of Python code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor, fx, nn

from ppokit._compiling import Budget, CompiledFunction, NoGraphError
from ppokit.update.graph import (
    Holder,
    Settings,
    Signature,
    Structure,
    differentiated,
    total_loss,
)

MARK = (1,) * 16  # dimensions by which the total is found among all results of a graph
OTHER_CODE = (
    "the loss reaches a parameter in other ways than by its name in a module, or asks for its "
    "class or requires_grad, and a graph has another tensor in its place"
)
WRITES = "the loss changes entries of its minibatch, and a graph would not"


class TracedLosses(NamedTuple):
    """The losses of a minibatch as autograd differentiates them."""

    trained: frozenset[str]  #: first names of the parameters that have a gradient
    lines: list[Any]  #: operations, in order
    total: Any  #: the sum of the losses: the number of a line, or an input
    results: set[Any]  #: others, likewise


def trace_losses(
    loss: nn.Module,
    settings: Settings,
    minibatch: TensorDictBase,
    parameters: Sequence[tuple[tuple[str, ...], Tensor]],
    held: Iterable[Tensor],
) -> TracedLosses | str:
    """Return the losses of a minibatch as autograd differentiates them, or why no graph can be.

    Args:
        loss: the loss module.
        settings: the options of the step.
        minibatch: what the losses are of.
        parameters: the trainable parameters of the loss, each with its names.
        held: the parameters of the optimizer.
    """
    names, found = {p: names[0] for names, p in parameters}, list[Any]()
    holder, is_changed = Holder(loss), False

    @torch.compiler.assume_constant_result
    def note_changes(changed: bool) -> int:  # runs in the trace
        nonlocal is_changed
        is_changed = changed
        return 0

    def losses(minibatch: TensorDictBase) -> Any:
        batch = minibatch.copy()
        total, results = total_loss(lambda: holder(batch), settings, Signature([], [], []))
        keys, others = list(minibatch.keys(True, True)), list(batch.keys(True, True))
        is_same = keys == others and all(batch.get(x) is minibatch.get(x) for x in keys)
        return note_changes(not is_same), total.view(*MARK), results

    def look(graph: fx.GraphModule, inputs: Sequence[Any]) -> None:
        trained = _have_gradient(graph, inputs)
        labels = [_label(x, names) for x in inputs]
        operations, refs = _operations(graph, labels)
        mark = _mark(graph)
        lines = []
        for node in operations:
            if node is not mark:
                lines.append(_line(node, refs))
                refs[node] = len(lines) - 1
        results = {refs[x] for x in _results(graph) if x is not mark}
        found.append((trained, TracedLosses(frozenset(), lines, refs[mark.args[0]], results)))

    if reason := _trace(losses, [minibatch], look):
        return reason
    trained, traced = found[0]
    if any(x in trained and x not in names for x in held):
        return "the optimizer trains a tensor that is no parameter of a module of the loss"
    if is_changed:
        return WRITES
    return traced._replace(trained=frozenset(names[x] for x in trained if x in names))


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
    holder, is_same = Holder(loss), False
    pairs = zip([*values, *fixed], [*structure.names, *structure.fixed], strict=True)
    places = {x: names[0] for x, names in pairs}

    def differentiate(minibatch: TensorDictBase, values: list[Tensor], fixed: list[Tensor]) -> Any:
        function = differentiated(holder, Signature([], [], []), structure, fixed, minibatch, 1.0)
        gradients, (total, results) = function(values)
        return total.view(*MARK), results, gradients

    def compare(graph: fx.GraphModule, inputs: Sequence[Any]) -> None:
        nonlocal is_same
        operations, labels = _operations(graph, [_label(x, places) for x in inputs])
        for start in range(len(operations) - len(traced.lines) + 1):
            refs = dict(labels)
            for node in operations[:start]:  # of torch.func, as are those at the end
                refs[node] = _through(node, refs)
            for n, (line, node) in enumerate(zip(traced.lines, operations[start:], strict=False)):
                if _line(node, refs) != line:
                    break
                refs[node] = n
            else:
                for node in operations[start + len(traced.lines) :]:
                    refs[node] = _through(node, refs)
                results = {refs[x] for x in _results(graph)}
                is_same = refs[_mark(graph)] == traced.total and traced.results <= results
                return

    reason = _trace(differentiate, (minibatch, values, fixed), compare)
    return reason if reason or is_same else OTHER_CODE


def _trace(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    look: Callable[[fx.GraphModule, Sequence[Any]], None],
) -> str | None:
    """Look at the graph of a function and its inputs; return why there is none, or None."""
    is_traced = False

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        nonlocal is_traced
        look(graph, inputs)
        is_traced = True
        raise NoGraphError

    options: Any = {"what": "the losses", "on_cpu": True, "static": True, "budget": Budget()}
    traced = CompiledFunction(function, {"backend": backend}, **options)
    try:
        traced(*arguments, may_capture=True)
    except NoGraphError as error:
        return None if is_traced else str(error)
    return "the losses compute nothing"


def _have_gradient(graph: fx.GraphModule, inputs: Sequence[Any]) -> set[Tensor]:
    """Return the inputs that the total has a gradient of, found with tensors without values."""
    fakes = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
    first: Any = next(x for x in fakes if isinstance(x, Tensor))
    with first.fake_mode, torch.enable_grad():
        copies = [
            x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
            for x in fakes
        ]
        results = graph(*copies)
        (total,) = (x for x in results if isinstance(x, Tensor) and x.ndim == len(MARK))
        places = [n for n, x in enumerate(copies) if isinstance(x, Tensor) and x.requires_grad]
        given = [copies[n] for n in places] if total.requires_grad else []
        gradients = torch.autograd.grad(total, given, allow_unused=True) if given else ()
    return {inputs[n] for n, x in zip(places, gradients, strict=False) if x is not None}


# -- operations ----------------------------------------------------------------------


def _operations(
    graph: fx.GraphModule, labels: Sequence[Any]
) -> tuple[list[fx.Node], dict[Any, Any]]:
    """Return the operations of a graph in order, and its inputs with labels."""
    nodes = list(graph.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    operations = [node for node in nodes if node.op not in ("placeholder", "output")]
    return operations, dict(zip(inputs, labels, strict=True))


def _results(graph: fx.GraphModule) -> list[fx.Node]:
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    return [x for x in output.args[0] if isinstance(x, fx.Node)]


def _mark(graph: fx.GraphModule) -> fx.Node:
    """Return the total among the results."""
    return next(x for x in _results(graph) if x.target == "view" and x.args[1:] == MARK)


def _label(x: Any, names: Mapping[Tensor, str]) -> Any:
    """Return the name of a parameter, or what another input is known by."""
    if not isinstance(x, Tensor) or x in names:
        return repr(names[x] if isinstance(x, Tensor) else x)
    place = x.tolist() if x.numel() == 1 else x.data_ptr()  # of a number of numpy a new tensor
    return "tensor", repr(place), x.shape, x.dtype


def _through(node: fx.Node, refs: Mapping[fx.Node, Any]) -> Any:
    """Return what an operation with one tensor is known by: that tensor; or the operation."""
    inputs = node.all_input_nodes
    return refs[inputs[0]] if len(inputs) == 1 else node


def _line(node: fx.Node, refs: Mapping[fx.Node, Any]) -> Any:
    """Return an operation in a form that equals that of the same one in another graph."""

    def plain(x: Any) -> Any:
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


def _content(node: fx.Node) -> Iterator[Any]:
    """Yield what a constant is made of: the operations of a graph, or numbers of a tensor."""
    holder: Any = node.graph.owning_module
    held = getattr(holder, str(node.target))
    if isinstance(held, fx.GraphModule):
        refs: dict[fx.Node, Any] = {}
        for n, inner in enumerate(held.graph.nodes):
            refs[inner] = n
            yield _line(inner, refs) if inner.op != "placeholder" else inner.op
    else:
        yield held.dtype, held.shape, held.tolist()
