"""What a captured graph depends on, as torch._dynamo asks it, and where that is to be found."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from ppokit.objectives.graphs import MODULE
from ppokit.objectives.plan import Plan

# What torch._dynamo asks of the whole process; of the batch and its entries; and of the loss, whose
# other attributes make another plan when they are set.
_OF_ALL = {
    *("GLOBAL_STATE", "GRAD_MODE", "DETERMINISTIC_ALGORITHMS", "TORCH_FUNCTION_STATE"),
    *("DEFAULT_DEVICE", "SHAPE_ENV"),
}
_OF_BATCH = re.compile(
    r"type\(tensordict|tensordict(\._tensordict\['[^']*'\])*(\._tensordict|\._batch_size(\[\d+\])?)?$"
)
_NESTED = re.compile(r"tensordict\._tensordict\['([^']*)'\]\.")
_OF_LOSS = re.compile(
    r"type\(self\)|self(\.(?!training$)[a-z]\w*|\.__dict__\['_\w+'\]"
    r"|\._(buffers(\['\w+'\])?|number|plan_version|stored_keys|breaks_graphs))?$"
)
# What a module of the networks holds, a constant among its attributes or None for a parameter.
_HELD = re.compile(rf"{MODULE}(\.(?P<attribute>\w+)|\._parameters\['(?P<parameter>\w+)'\])$")
_CALL = re.compile(r"self\._plan\.(actor|critic)\[(\d+)\]")
_PART = re.compile(r"\._modules\['([^']*)'\]")
_CONSTANT = {"CONSTANT_MATCH", "EQUALS_MATCH", "ID_MATCH"}


def is_understood(entry: Any) -> bool:
    """Return whether what a graph depends on is among what is looked at here."""
    name, kind = entry.name, entry.guard_type
    if not name:
        return kind in _OF_ALL
    if _OF_LOSS.match(name) or kind in ("TENSOR_MATCH", "EMPTY_NN_MODULE_HOOKS_DICT"):
        return True
    if _OF_BATCH.match(name):
        return kind not in _CONSTANT or "_batch_size[" in name
    constant = entry.value is None or isinstance(entry.value, int | float | str)
    return kind in _CONSTANT and constant and _HELD.match(name) is not None


def held(plan: Plan, entry: Any) -> tuple[Mapping[str, Any], str, Any] | None:
    """Return where a module holds what a graph depends on, and what it was."""
    of_module = _HELD.match(entry.name) if entry.guard_type in _CONSTANT else None
    call = _CALL.match(entry.name)
    if of_module is None or call is None:
        return None
    module: Any = getattr(plan, call[1])[int(call[2])].network
    for part in _PART.findall(entry.name):
        module = module._modules[part]
    if of_module["attribute"]:
        return module.__dict__, of_module["attribute"], entry.value
    return module._parameters, of_module["parameter"], entry.value


def places(
    plan: Plan, coefficients: Mapping[str, Any], entries: Mapping[str, Any]
) -> dict[int, list[tuple[Mapping[str, Any] | None, str]]]:
    """Return where each tensor is to be found."""
    calls = (*plan.actor, *plan.critic)
    networks = {call.network: None for call in calls if isinstance(call.network, nn.Module)}
    modules = {module: None for network in networks for module in network.modules()}
    found: dict[int, list[tuple[Mapping[str, Any] | None, str]]] = {}
    for values in (coefficients, *(of for m in modules for of in (m._parameters, m._buffers))):
        for name, value in values.items():
            found.setdefault(id(value), []).append((values, name))
    for name, value in entries.items():
        found.setdefault(id(value), []).append((None, name))
    return found


def asked_roots(asked: Iterable[Any]) -> set[str]:
    """Return the names of a batch's TensorDicts that something in them was asked of."""
    return {match[1] for entry in asked if (match := _NESTED.match(entry.name))}
