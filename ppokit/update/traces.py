"""Autograd's gradients of the losses, and those that a graph would have, found by traces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from ppokit._compiling import Budget, CompiledFunction, NoGraphError
from ppokit._state import unchanged
from ppokit.distributed import alone
from ppokit.update.graph import (
    Holder,
    Settings,
    Signature,
    Structure,
    differentiated,
    total_loss,
)

MARK = (1,) * 16  # leading dimensions of the result among all that a graph returns


def _trace(
    function: Callable[..., Tensor],
    arguments: Sequence[Any],
    use: Callable[[list[Any], list[Any], Tensor], None],
    device_type: str,
) -> str | None:
    """Trace a function, and use tensors of its graph, their copies and the results of these.

    No graph is kept, and the call is not made: Python code of the user has no effect.

    Args:
        function: returns a tensor ``[N]``.
        arguments: of the function.
        use: takes the tensors, their copies, and the function's result of these.
        device_type: of the parameters.

    Returns:
        Why the function cannot be traced, or None.
    """
    is_traced, reason = False, None

    def marked(*arguments: Any) -> Tensor:
        return function(*arguments).view(*MARK, -1)

    def backend(graph: Any, inputs: list[Any]) -> Any:
        nonlocal is_traced, reason
        reason = _foreign_call(graph)
        if reason is None:
            copies = [
                x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
                for x in inputs
            ]
            with torch.enable_grad():  # modules may keep other results
                (result,) = (x for x in graph(*copies) if isinstance(x, Tensor) and x.ndim > 15)
                use(inputs, copies, result.view(-1))
        is_traced = True
        raise NoGraphError

    options: Any = {"what": "the losses", "on_cpu": True, "static": True, "budget": Budget()}
    traced = CompiledFunction(marked, {"backend": backend}, **options)
    try:
        with alone(), unchanged(device=torch.device(device_type)):
            traced(*arguments, may_capture=True)
    except NoGraphError as error:
        return reason if is_traced else str(error)
    return None


OPERATORS = type(torch.ops.aten.relu), type(torch.ops.aten.relu.default)


def _foreign_call(graph: nn.Module) -> str | None:
    """Return why a graph must not run on copies: a call that may have effects, or None."""
    known = "aten", "prims", "torch", "math", "_operator", "builtins", "None"
    graphs = [x.graph for x in graph.modules() if isinstance(x, torch.fx.GraphModule)]
    for node in (x for graph in graphs for x in graph.nodes if x.op == "call_function"):
        call: Any = node.target
        origin = str(call) if isinstance(call, OPERATORS) else str(call.__module__)
        if origin.split(".")[0] not in known:
            return f"the losses call {call}, which is not torch's and may have effects"
    return None


def autograd_gradients(
    loss: nn.Module,
    settings: Settings,
    minibatch: TensorDictBase,
    parameters: Sequence[tuple[tuple[str, ...], Tensor]],
    held: Iterable[Tensor],
) -> tuple[dict[str, Tensor], str | None]:
    """Return autograd's gradients by the first names of parameters, and why no graph can be made.

    Args:
        loss: the loss module.
        settings: the options of the step.
        minibatch: what the losses are of.
        parameters: the trainable parameters of the loss, each with its names.
        held: the parameters of the optimizer.
    """
    names, found = {p: names[0] for names, p in parameters}, dict[Tensor, Tensor]()
    holder = Holder(loss)

    def sum_of_losses(minibatch: TensorDictBase) -> Tensor:
        run = lambda: holder(minibatch.copy())  # noqa: E731
        return total_loss(run, settings, Signature([], [], []))[0].view(1)

    def differentiate(inputs: list[Any], copies: list[Any], total: Tensor) -> None:
        places = [n for n, x in enumerate(inputs) if isinstance(x, Tensor) and x.requires_grad]
        given = [copies[n] for n in places] if total.requires_grad else []
        gradients = torch.autograd.grad(total, given, allow_unused=True) if given else ()
        pairs = zip(places, gradients, strict=False)
        found.update((inputs[n], gradient) for n, gradient in pairs if gradient is not None)

    reason = _trace(sum_of_losses, [minibatch], differentiate, settings.device_type)
    if any(x in found and x not in names for x in held):
        reason = "the optimizer trains a tensor that is no parameter of a module of the loss"
    return {names[x]: gradient for x, gradient in found.items() if x in names}, reason


def difference(
    loss: nn.Module,
    structure: Structure,
    minibatch: TensorDictBase,
    values: list[Tensor],
    fixed: list[Tensor],
    gradients: Mapping[str, Tensor],
) -> str | None:
    """Return why the gradients of a graph would not be autograd's, or None.

    A graph has other tensors in place of the parameters: ``values`` for trained ones, and
    ``fixed``. :func:`autograd_gradients` returns ``gradients``.
    """
    holder, found = Holder(loss), list[Tensor]()
    are_reached = False  # parameters themselves, beside the tensors in their place
    expected = [gradients[names[0]].double().flatten() for names in structure.names]

    def graph_gradients(
        minibatch: TensorDictBase, values: list[Tensor], fixed: list[Tensor]
    ) -> Tensor:
        function = differentiated(holder, Signature([], [], []), structure, fixed, minibatch, 1.0)
        return torch.cat([x.double().flatten() for x in function(values)[0]])

    def keep(inputs: list[Any], copies: list[Any], result: Tensor) -> None:
        nonlocal are_reached
        are_reached = any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
        found.extend(result.split([len(x) for x in expected]))

    arguments, device = (minibatch, values, fixed), structure.settings.device_type
    if reason := _trace(graph_gradients, arguments, keep, device):
        return reason
    size = torch.stack([x.norm() for x in expected]).norm()
    largest = min(torch.finfo(x.dtype).eps for x in gradients.values()) ** 0.6
    if structure.settings.amp_dtype is not None:
        largest = 0.1
    are_far = [
        (x - y).norm() > largest * (x.norm() + size / 10)
        for x, y in zip(expected, found, strict=True)
    ]
    is_far = torch.stack(are_far).any() & size.isfinite()
    if are_reached or bool(is_far):
        return (
            "the loss reaches a parameter in other ways than by its name in a module, or asks for "
            "its class or requires_grad, and a graph has another tensor in its place"
        )
    return None
