"""The loss's graph, called past what torch._dynamo asks before each call, where that is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor
from torch._dynamo import eval_frame, lookup_backend
from torch.autograd import forward_ad

from ppokit._keys import key_parts
from ppokit.objectives.graphs import graph_options, keep
from ppokit.objectives.padding import BURN_IN_KEY
from ppokit.objectives.plan import Plan
from ppokit.objectives.questions import asked_roots, held, is_understood, places

# torch's own; where a version of torch has them not, torch._dynamo is asked.
_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_CAN_LEARN = (
    hasattr(_guards, "GlobalStateGuard")
    and hasattr(_guards, "TensorGuards")
    and hasattr(eval_frame, "_stance")
)


class _Known(NamedTuple):
    """A graph, what it takes, and what must be as it was when it was captured."""

    plan: Plan
    run: Callable[..., Sequence[Tensor]]
    shape: torch.Size  #: of the batch
    sources: list[tuple[Mapping[str, Any] | None, str]]  #: None: the batch
    names: list[str]  #: of the results
    entries: tuple[str, ...]  #: names of all in the batch
    nested: dict[str, tuple[Any, ...]]  #: names in those of its TensorDicts that count
    tensors: Any
    state: Any

    def arguments(self, tensordict: TensorDictBase, plan: Plan | None) -> list[Any] | None:
        """Return what the graph takes, or None where torch._dynamo has to be asked."""
        if (
            plan is not self.plan
            or tensordict.batch_size != self.shape
            or type(tensordict) is not TensorDict
            or eval_frame._stance.stance != "default"
            or torch._C._len_torch_dispatch_stack()
            or torch._C._are_functorch_transforms_active()
            or forward_ad._current_level >= 0
            or not self.state.check()
        ):
            return None
        entries = dict(tensordict.items())
        if tuple(entries) != self.entries:
            return None
        for name, names in self.nested.items():
            if _names(entries[name]) != names:
                return None
        found = [(entries if of is None else of).get(name) for of, name in self.sources]
        return found if self.tensors.check(*found) else None


@dataclass
class _Fresh:
    """What is seen of a graph while it is captured and run for the first time."""

    run: Callable[..., Sequence[Tensor]] | None = None
    graphs: int = 0
    arguments: Sequence[Any] = ()
    results: Sequence[Any] = ()
    asked: Sequence[Any] = ()
    is_understood: bool = False


class Captured:
    """What a loss returns, compiled by ``torch.compile``.

    Before it calls a graph, torch._dynamo asks whether all is as it was when it was captured, in
    many small steps that a fast loss feels. Where a graph depends on nothing but the metadata of
    tensors that are found again, on torch's global state, on the batch's names and on what the
    loss's plan watches, it is called at once. Anything else is left to torch._dynamo.

    Args:
        loss: whose ``_outputs`` are compiled.
        arguments: of ``torch.compile``.
    """

    def __init__(self, loss: Any, arguments: dict[str, Any]) -> None:
        self._loss = loss
        self._known: list[_Known] = []
        self._fresh = _Fresh()
        cpu = all(parameter.is_cpu for parameter in loss.parameters())
        own = graph_options(arguments, cpu=cpu)
        options = dict(own.get("options") or {})
        if options.pop("guard_filter_fn", None) is keep and cpu and _CAN_LEARN:
            self._compiler = _compiler(own.get("backend", "inductor"), options)
            own = own | {"backend": self._backend, "options": {"guard_filter_fn": self._keep}}
        self._compiled = torch.compile(loss._outputs, **own)

    def __call__(self, tensordict: TensorDictBase) -> dict[str, Tensor] | None:
        """Return what the loss's ``_outputs`` would."""
        plan = self._loss._plan
        for known in self._known:
            arguments = known.arguments(tensordict, plan)
            if arguments is not None:
                return dict(zip(known.names, known.run(*arguments), strict=True))
        fresh = self._fresh
        outputs = self._compiled(tensordict)
        if outputs is not None and fresh.graphs == 1 and fresh.is_understood:
            self._learn(fresh, tensordict, outputs)
        fresh.arguments = fresh.results = fresh.asked = ()  # the batch, among others
        self._fresh = _Fresh()
        return outputs

    def _backend(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        compiled, fresh = self._compiler(graph, inputs), self._fresh
        fresh.run, fresh.graphs = compiled, fresh.graphs + 1

        def run(*arguments: Any) -> Any:
            results = compiled(*arguments)
            if fresh is self._fresh:
                fresh.arguments, fresh.results = arguments, results
            return results

        return run

    def _keep(self, entries: Iterable[Any]) -> list[bool]:
        entries = list(entries)
        kept = keep(entries)
        self._fresh.asked = [entry for entry, asks in zip(entries, kept, strict=True) if asks]
        self._fresh.is_understood = all(map(is_understood, self._fresh.asked))
        return kept

    def _learn(
        self, fresh: _Fresh, tensordict: TensorDictBase, outputs: Mapping[str, Tensor]
    ) -> None:
        """Remember the graph, if all that it depends on is understood."""
        loss, plan, run = self._loss, self._loss._plan, fresh.run
        entries, given = dict(tensordict.items()), {id(x) for x in fresh.arguments}
        if plan is None or plan.functional or run is None:
            return
        roots = asked_roots(fresh.asked) | {
            key for key, *_ in map(key_parts, (*loss._loss_mask_keys(), BURN_IN_KEY))
        }
        found = places(plan, loss._buffers, entries)
        sources = [found.get(id(x), []) for x in fresh.arguments]
        names = {id(x): name for name, x in outputs.items()}
        constants = [constant for entry in fresh.asked if (constant := held(plan, entry))]
        if (
            type(tensordict) is not TensorDict
            or any(len(source) != 1 for source in sources)
            or sorted(names) != sorted(map(id, fresh.results))
            or any(x.guard_type == "TENSOR_MATCH" and id(x.value) not in given for x in fresh.asked)
            or any(name not in values or values[name] != value for values, name, value in constants)
        ):
            return
        for values, name, _ in constants:
            plan.networks.watch.entry(values, name)
        sizes = [list(x.size()) for x in fresh.arguments]
        strides = [list(x.stride()) for x in fresh.arguments]
        known = _Known(
            plan,
            run,
            tensordict.batch_size,
            [place for (place,) in sources],
            [names[id(x)] for x in fresh.results],
            tuple(entries),
            {name: _names(entries[name]) for name in roots if name in entries},
            _guards.TensorGuards(
                *fresh.arguments, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
            ),
            _guards.GlobalStateGuard(),
        )
        self._known = [*(other for other in self._known if other.plan is plan), known]


def _names(entry: Any) -> tuple[Any, ...]:
    return tuple(entry.keys(include_nested=True)) if is_tensor_collection(entry) else ()


def _compiler(backend: Any, options: dict[str, Any]) -> Callable[..., Any]:
    """Return what ``torch.compile`` would compile a graph with."""
    compiler: Any = lookup_backend(backend) if isinstance(backend, str) else backend
    if not options:
        return compiler
    arguments = {"config_patches" if backend == "inductor" else "options": options}
    return partial(compiler, **arguments)
