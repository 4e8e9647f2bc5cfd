"""States that are loaded completely or not at all."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from copy import copy, deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from ppokit._batch import Parts, State, StateDict, as_key
from ppokit._checks import Checked
from ppokit.functional import _checks

if TYPE_CHECKING:
    _Module = nn.Module
else:
    _Module = object

Part = TypeVar("Part", bound=nn.Module)


class WholeState(_Module):
    """Mix-in for an ``nn.Module`` that rejects a state of another version, names, shapes or values.

    ``nn.Module.load_state_dict`` alone loads what fits before it raises for what does not. The
    version is the class attribute ``_version``, which torch writes into every state.
    """

    def __setattr__(self, name: str, value: Tensor | nn.Module) -> None:
        """Check what ``nn.Module`` would register before it asks the class."""
        if isinstance(value, nn.Module | nn.Parameter):
            declared = getattr(type(self), name, None)
            if isinstance(declared, Checked):
                declared.check(value)
        super().__setattr__(name, value)

    def load_state_dict(self, state_dict: State, strict: bool = True, assign: bool = False) -> Any:
        """Load a state that :meth:`state_dict` returned, as ``nn.Module`` does.

        Raises:
            RuntimeError: it has another version, other entries, shapes, or values that the
                constructor rejects; nothing has changed then.
            KeyError: it has other entries, where torch does not look (in functional losses).
        """
        restore = keep_state(self)
        try:
            result = super().load_state_dict(state_dict, strict=strict, assign=assign)
            if strict:
                names = map(self.loaded_name, state_dict)
                check_names(names, self.state_dict(), f"this {type(self).__name__}")
        except BaseException:  # Ctrl-C, too
            restore()
            raise
        return result

    def loaded_name(self, name: str) -> str:
        """Return the name by which an entry of a state is loaded; to be overridden."""
        return name

    def check_state(self, state: State) -> None:
        """Raise a ValueError if an entry has a value that the constructor would reject.

        Called before this block is loaded. To be overridden; names come from this block's own
        ``state_dict()``, and some may be missing.
        """

    def prepare_load(self, state: State) -> None:
        """Prepare for a state that was accepted; to be overridden."""

    def _load_from_state_dict(
        self,
        state_dict: StateDict,
        prefix: str,
        local_metadata: State,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        version = local_metadata.get("version", self._version)
        if version != self._version:
            error_msgs.append(
                f"the state of {type(self).__name__} has version {version}, and this ppokit writes "
                f"and reads version {self._version}. Load it with the ppokit that wrote it."
            )
            return
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[prefix + self.loaded_name(key.removeprefix(prefix))] = state_dict.pop(key)
        state = {k.removeprefix(prefix): x for k, x in state_dict.items() if k.startswith(prefix)}
        try:
            if not local_metadata.get("is_restored"):
                self.check_state(state)
            self.prepare_load(state)
        except Exception as error:  # also where an entry is not a tensor
            error_msgs.append(f"{type(error).__name__}: {error}")
            state_dict.update(self.state_dict(prefix=prefix))  # which the modules within load
            return
        problems = missing_keys, unexpected_keys, error_msgs
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *problems)


def check_buffers(block: nn.Module) -> None:
    """Raise a ValueError where a buffer of a block was filled with a number out of range."""
    if isinstance(block, WholeState):
        buffers = dict(block.named_buffers(recurse=False))
        single = {k: x for k, x in buffers.items() if x.numel() == 1 and not x.is_meta}
        if all(x.is_cpu for x in single.values()):
            values = [x.item() for x in single.values()]
        else:  # in one transfer
            values = torch.stack([x.double().reshape(()) for x in single.values()]).tolist()
        block.check_state(buffers | dict(zip(single, values, strict=True)))


def apply_without_cast(
    module: Part,
    apply: Callable[..., Any],
    fn: Callable[[Tensor], Tensor],
    recurse: bool,
    *,
    moves: bool = True,
) -> Part:
    """Move a module's own buffers (unless not ``moves``) as ``_apply`` does, but keep dtypes.

    A cast of a model must not round statistics or discounts: 0.99 in half precision is 0.9902.
    """
    before = dict(module.named_buffers(recurse=False))
    apply(fn, recurse)
    for name, buffer in before.items():
        setattr(module, name, buffer.to(getattr(module, name).device) if moves else buffer)
    return module


def check_names(names: Iterable[str], expected: Iterable[str], what: str) -> None:
    """Raise a KeyError where a state lacks parts, or has unknown ones."""
    names, expected = set(names), set(expected)
    unknown, missing = sorted(names - expected), sorted(expected - names)
    if unknown or missing:
        said = [f"has no {missing}"] * bool(missing) + [f"has {unknown} as well"] * bool(unknown)
        raise KeyError(
            f"The state {' and '.join(said)}: {what} has {sorted(expected)}. Build it with the "
            "parts that it was saved with."
        )


def keep_state(part: Any) -> Callable[[], None]:
    """Return a function that restores the present state of a part; a module keeps its tensors."""
    state = _marked(deepcopy(part.state_dict()))
    modules = part.modules() if isinstance(part, nn.Module) else ()
    held = [(module, {**module._parameters, **module._buffers}) for module in modules]
    # of a collector, whose load_state_dict begins new episodes
    restore_episodes = getattr(part, "keep_episodes", lambda: lambda: None)()

    def restore() -> None:
        for module, tensors in held:
            for name, tensor in tensors.items():
                if getattr(module, name) is not tensor:
                    setattr(module, name, tensor)  # nn.LSTM keeps a list of them beside
        part.load_state_dict(state)
        restore_episodes()

    return restore


def _marked(state: object) -> Any:
    """Mark the states of modules as ones to restore: the present numbers need not be in range."""
    for metadata in getattr(state, "_metadata", {}).values():
        metadata["is_restored"] = True
    for part in state.values() if isinstance(state, Mapping) else ():
        _marked(part)
    return state


@contextmanager
def unchanged(*parts: object, device: torch.device) -> Iterator[None]:
    """Restore states and random numbers at the end of a trial forward pass."""
    restore = [keep_state(part) for part in parts if part is not None]
    restore += [partial(random.setstate, random.getstate())]
    restore += [partial(np.random.set_state, np.random.get_state())]
    devices, kind = ([], "cuda") if device.type == "cpu" else ([device], device.type)
    with torch.random.fork_rng(devices, device_type=kind):
        try:
            yield
        finally:
            for restore_part in restore:
                restore_part()


@contextmanager
def evaluation_mode(*modules: object) -> Iterator[None]:
    """Put modules into evaluation mode, and restore their modes and torch's random numbers."""
    with ExitStack() as stack:  # undone in reverse order
        stack.enter_context(torch.random.fork_rng(range(torch.cuda.device_count())))
        for module in (x for x in modules if isinstance(x, nn.Module)):
            for part in module.modules():
                stack.callback(setattr, part, "training", part.training)
            stack.callback(module.train, module.training)  # the actor of a TensorActor, too
            module.eval()
        yield


def load_all(parts: Parts, states: State) -> None:
    """Load the state of every part, or none, and raise a ValueError if one rejects its state."""
    restore, name = [keep_state(part) for part in parts.values()], ""
    try:
        for name, part in parts.items():
            state = states[name]
            if isinstance(part, torch.optim.Optimizer):
                if "state" in state:
                    check_optimizer_state(part, state)
                state = deepcopy(state)  # torch would train the tensors of the caller
            if isinstance(part, torch.amp.GradScaler):
                Checked(lambda x: 0 < x < math.inf, "be positive").check(state["scale"], "scale")
            part.load_state_dict(state)
    except BaseException as error:
        for restore_part in restore:
            with suppress(ValueError):  # of an optimizer whose options were out of range
                restore_part()
        if not isinstance(error, Exception):  # Ctrl-C
            raise
        said = f"and nothing was loaded: {type(error).__name__}: {error}"
        raise ValueError(f"{name!r} rejects its state, {said}") from error


#: numbers in the groups of torch's optimizers
_OPTIONS: dict[str, Checked] = dict.fromkeys(
    ("lr", "eps", "weight_decay", "momentum", "alpha", "momentum_decay", "lr_decay"),
    Checked(lambda x: 0 <= x < math.inf, "lie in [0, inf)"),
)
_OPTIONS["betas"] = Checked(lambda x: 0 <= x < 1, "lie in [0, 1)")
_OPTIONS["rho"] = Checked(lambda x: 0 <= x <= 1, "lie in [0, 1]")
_OPTIONS["dampening"] = Checked(math.isfinite, "be finite")
_OPTIONS["d"] = Checked(lambda x: 1 <= x < math.inf, "lie in [1, inf)")
_OPTIONS["beta2_decay"] = Checked(lambda x: -math.inf < x <= 0, "lie in (-inf, 0]")
_OPTIONS["etas"] = _OPTIONS["step_sizes"] = Checked(lambda x: 0 < x < math.inf, "be positive")


def check_groups(
    groups: Iterable[Mapping[str, object]], optimizer: torch.optim.Optimizer, *, waits: bool = False
) -> None:
    """Raise a ValueError where a parameter group holds a number that its optimizer rejects.

    Only the learning rate is looked at if the optimizer is not torch's. Tensors on a device are
    read only with ``waits``.
    """
    names, defaults = _OPTIONS.keys() if is_of_torch(optimizer) else {"lr"}, optimizer.defaults
    for group in groups:
        held: Any = group.get("params", ())
        if len({*map(id, held)}) < len(held):  # which torch would step twice
            raise ValueError(
                "A parameter is twice in a group of the optimizer, as that of a network that actor "
                "and critic share: build it with loss.parameters(), which has each once."
            )
        for name in group.keys() & names:
            value = group[name]
            for x in value if isinstance(value, tuple | list) else (value,):
                is_absent = x is None and (x is defaults.get(name) or x is not value)
                on_device = isinstance(x, Tensor) and not _checks.reads_are_free(x.device)
                if not is_absent and (waits or not on_device):
                    x = x.cpu().squeeze() if isinstance(x, Tensor) else x
                    _OPTIONS[name].check(x, f"{name!r}, in a parameter group of the optimizer,")


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is exactly one of torch's classes."""
    return getattr(torch.optim, type(optimizer).__name__, None) is type(optimizer)


_SIGNED = {"exp_avg", "momentum_buffer", "grad_avg", "prev", "ax"}  # others are at least 0
_OF_GROUPS = {"params", "name", "param_names", "initial_lr"}  # no options of an optimizer
_KIND, _WITH_STATE = "kind", "parameters_with_state"  # beside torch's entries


def state_dict_of(part: Any) -> Any:
    """Return the state of a part; an optimizer's has its class and which parameters have a state.

    Torch loads the state of any optimizer, and of some parameters only, without a word.
    """
    state = part.state_dict()
    if isinstance(part, torch.optim.Optimizer) and "state" in state:  # no form of its own
        state |= {_KIND: type(part).__name__, _WITH_STATE: sorted(state["state"], key=str)}
    return state


def check_optimizer_state(optimizer: torch.optim.Optimizer, state: State) -> None:
    """Raise a ValueError unless a state is one that this optimizer could have; torch loads any."""
    groups, held, kind = state["param_groups"], state["state"], type(optimizer).__name__
    bases = [type(optimizer)] if is_of_torch(optimizer) else type(optimizer).__mro__
    if state.get(_KIND, kind) not in {x.__name__ for x in bases}:  # torch's AdamW is an Adam
        raise ValueError(f"The state is of a {state[_KIND]}, and this optimizer is a {kind}.")
    check_groups(groups, optimizer)
    if not is_of_torch(optimizer):
        return
    trial = copy(optimizer)  # makes a first step of one parameter after the other
    given = [dict(group) for group in groups]
    trial.__setstate__({"param_groups": given, "state": defaultdict(dict)})
    parameters: list[tuple[Any, Any, Any]] = []
    for group, own in zip(given, optimizer.param_groups, strict=False):  # torch compares the counts
        if lost := own.keys() - group.keys() - _OF_GROUPS:
            raise ValueError(f"The state is not of a {kind}: its groups lack {sorted(lost)}.")
        parameters += [(group, *x) for x in zip(group["params"], own["params"], strict=False)]
    for group, number, p in parameters:
        of_parameter = held.get(number, {})
        is_used = of_parameter or number in state.get(_WITH_STATE, ())
        p = torch.zeros_like(p)
        p.grad = torch.zeros_like(p)
        trial.param_groups, trial.state = [{**group, "params": [p]}], defaultdict(dict)
        with suppress(RuntimeError):  # SparseAdam takes no dense gradients
            trial.step()
        for name, own in trial.state[p].items() if is_used else ():
            x = of_parameter.get(name)
            found = x.shape if isinstance(x, Tensor) else () if isinstance(x, int | float) else x
            if isinstance(own, Tensor) and found != own.shape:
                said = f"{type(x).__name__} {[*x.shape] if isinstance(x, Tensor) else x}"
                raise ValueError(
                    f"{name!r} of parameter {number} is {said}, not a Tensor {[*own.shape]}."
                )
        unsigned = trial.state[p].keys() - _SIGNED
        for name, x in of_parameter.items():
            x = torch.as_tensor(x if isinstance(x, Tensor | int | float) else 0)
            if not x.isfinite().all() or (name in unsigned and (x < 0).any()):
                raise ValueError(f"{name!r} of parameter {number} is not finite, or below 0.")


def refuse_torch_schedulers(optimizer: torch.optim.Optimizer) -> None:
    """Raise a ValueError if a scheduler of torch drives the learning rates of an optimizer."""
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise ValueError(
            f"Another learning-rate scheduler drives this {type(optimizer).__name__} (its "
            "parameter groups hold 'initial_lr'); the two would overwrite each other. Keep one."
        )


def state_of(module: object) -> StateDict:
    """Return the state of a module, empty for any other object."""
    return module.state_dict() if isinstance(module, nn.Module) else {}


def write_weights(policy: Any, source: Any) -> None:
    """Write weights into a policy, all of them or none.

    Args:
        policy: the collector's.
        source: a module, what ``TensorDict.from_module`` returns of it, or a ``state_dict``.
    """
    if not isinstance(policy, nn.Module):
        kind = type(policy).__name__
        raise TypeError(f"The policy is a {kind}, no module: it has no weights to write.")
    own: Any = TensorDict.from_module(policy)
    if isinstance(source, nn.Module):
        source = TensorDict.from_module(source)
    elif isinstance(source, Mapping):
        source = TensorDict(dict(source)).unflatten_keys(".")
    elif not isinstance(source, TensorDictBase):
        kind = type(source).__name__
        raise TypeError(f"Weights are a module, a TensorDict or a state_dict, not of type {kind}.")
    shapes, expected = (
        {key: tuple(value.shape) for key, value in x.items(True, True)} for x in (source, own)
    )
    states = {as_key(tuple(name.split("."))) for name in policy.state_dict()}
    wrong = [key for key in expected | shapes if shapes.get(key) != expected.get(key)]
    if wrong := [key for key in wrong if key in states | shapes.keys()]:  # others are no state
        said = [f"{key!r}: {shapes.get(key)} for {expected.get(key)}" for key in wrong[:5]]
        raise ValueError(
            f"The weights are not those of the collector's policy (shape given for shape there): "
            f"{'; '.join(said)}. Pass the policy, TensorDict.from_module(policy) or its state_dict."
        )
    own.data.update_(source.data)
