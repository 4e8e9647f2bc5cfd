"""The tensors that a captured step reads and writes, and whether they are still those in use."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torch.optim import lr_scheduler

from ppokit._compiling import Modules
from ppokit.update.cuda_graph import ReplayedStep

if TYPE_CHECKING:
    from ppokit.update.captured_step import CapturedStep, Outputs

MOST_SHAPES = 8  # of minibatches with a CUDA graph
ADAM_STATE = ("exp_avg", "exp_avg_sq", "step")

Groups = tuple[tuple[tuple[int, ...], tuple[tuple[str, Any], ...]], ...]


class Structure(NamedTuple):
    """The constants of a graph; another structure needs another graph."""

    names: tuple[tuple[str, ...], ...]  #: places of each trained parameter in the loss
    shapes: tuple[torch.Size, ...]  #: of the trained parameters
    tensors: tuple[tuple[Any, ...], ...]  #: dtypes, devices and strides of all that go in
    fixed: tuple[tuple[str, ...], ...]  #: places of parameters with a gradient, not trained
    groups: Groups  #: parameter groups of an Adam in the graph; empty if the optimizer is outside
    amp_dtype: torch.dtype | None
    kl_key: NestedKey
    needs_kl: bool  #: a stopper reads it
    clips: bool
    nonfinite: str | None
    returns_gradients: bool  #: and neither clips nor steps


class GraphInputs:
    """Structure and tensors of a graph; ``settings`` are the last entries of the structure."""

    def __init__(
        self,
        modules: Modules,
        trained: set[int],
        optimizer: torch.optim.Optimizer,
        settings: tuple[Any, ...],
    ) -> None:
        chosen = [(names, p) for names, p in modules.parameters if id(p) in trained]
        others = [(names, p) for names, p in modules.parameters if id(p) not in trained]
        self.parameters = [p for _, p in chosen]
        self._modules, self._optimizer, self._settings = modules, optimizer, settings
        self._options = _options(optimizer)
        self._pointers = [(p, p.data_ptr()) for _, p in (*chosen, *others)]
        groups = () if settings[-1] else adam_groups(optimizer, self.parameters)
        kinds = ADAM_STATE if groups else ()
        self._states = [optimizer.state[p] for p in self.parameters] if groups else []
        for p, state in zip(self.parameters, self._states, strict=False):
            # Without fused or capturable, Adam counts steps on the CPU: each step would wait.
            state["step"] = state["step"].to(p.device, non_blocking=True)
        self._ids = self._present_ids()
        self.values = [*map(in_graph, self.parameters)]
        self.fixed = [p.detach() for _, p in others]
        self.state = [[in_graph(state[kind]) for state in self._states] for kind in kinds]
        #: the arguments of a captured step between the minibatch and the numbers
        self.tensors = self.values, self.fixed, self.state
        #: by the shape of the minibatch; each has a copy of it
        self.replays: dict[torch.Size, ReplayedStep] = {}
        self.structure = Structure(
            tuple(names for names, _ in chosen),
            tuple(p.shape for p in self.parameters),
            tuple(
                (x.dtype, x.device, x.shape, x.stride())
                for x in (*self.values, *self.fixed, *chain.from_iterable(self.state))
            ),
            tuple(names for names, _ in others),
            groups,
            *settings,
        )

    def are_current(self, optimizer: torch.optim.Optimizer, settings: tuple[Any, ...]) -> bool:
        """Return whether modules, parameters, optimizer and settings are as they were."""
        return (
            settings == self._settings
            and optimizer is self._optimizer
            and self._modules.are_unchanged()
            and all(p.data_ptr() == pointer for p, pointer in self._pointers)
            and _options(optimizer) == self._options
            and self._present_ids() == self._ids
        )

    def replay(
        self, captured: CapturedStep, minibatch: TensorDictBase, numbers: Tensor, halted: Tensor
    ) -> Outputs | None:
        """Make a step by a CUDA graph; None if there are too many shapes, or other entries."""
        shape = minibatch.batch_size
        replayed = self.replays.get(shape)
        if replayed is None:
            if len(self.replays) == MOST_SHAPES:
                return None
            replayed = self.replays[shape] = ReplayedStep(minibatch, numbers, halted)
        elif not replayed.fits(minibatch):
            del self.replays[shape]
            return None
        if not replayed.is_current:
            replayed.capture(captured, self.tensors)
        return replayed(minibatch, numbers, halted)

    def _present_ids(self) -> list[Any]:
        """Return which objects the optimizer's state is and holds, and the memory of tensors."""
        states = map(self._optimizer.state.get, self.parameters if self._states else ())
        held = chain.from_iterable(map(dict.values, self._states))
        places = [id(x) if not isinstance(x, Tensor) else (id(x), x.data_ptr()) for x in held]
        return [*map(id, states), *places]


def _options(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return everything that determines the groups of an Adam, except its state."""
    found: list[Any] = [_has_step_of_its_own(optimizer)]
    for group in optimizer.param_groups:
        found += map(id, group["params"])
        others = [x for name, x in group.items() if name not in ("params", "lr")]
        found += [id(x) if isinstance(x, Tensor) else x for x in others]
    return found


def _has_step_of_its_own(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a hook or a wrapper does more in a step; a scheduler's wrapper does not."""
    step: Any = vars(optimizer).get("step")
    is_of_scheduler = getattr(step, "__globals__", {}) is vars(lr_scheduler)
    is_plain = is_of_scheduler and inspect.unwrap(step) is inspect.unwrap(type(optimizer).step)
    hooks = (x for k, x in vars(optimizer).items() if "step_" in k and k.endswith("hooks"))
    return any(hooks) or not (step is None or is_plain)


def in_graph(x: Tensor) -> Tensor:
    """Return a tensor as a graph may change it, in the same memory.

    torch 2.13 drops what a graph writes into a float64 tensor without dimensions.
    """
    return x.detach().view(1) if x.ndim == 0 else x.detach()


def adam_groups(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> Groups:
    """Return positions and hyperparameters of the groups of an Adam or AdamW, else nothing."""
    is_adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    has_state = all(optimizer.state.get(p) for p in parameters)
    if not (is_adam and has_state) or _has_step_of_its_own(optimizer):
        return ()
    position, groups = {id(p): n for n, p in enumerate(parameters)}, []
    for group in optimizer.param_groups:
        at = tuple(position[id(p)] for p in group["params"] if id(p) in position)
        numbers = {"beta1": group["betas"][0], "beta2": group["betas"][1]}
        numbers |= {"eps": group["eps"], "weight_decay": group["weight_decay"]}
        rare = any(group.get(name) for name in ("amsgrad", "maximize", "differentiable"))
        if rare or any(isinstance(x, Tensor) for x in numbers.values()):
            return ()
        decoupled = group.get("decoupled_weight_decay", type(optimizer) is torch.optim.AdamW)
        numbers["decoupled_weight_decay"] = bool(decoupled)
        groups.append((at, tuple(numbers.items())))
    return tuple(groups)
