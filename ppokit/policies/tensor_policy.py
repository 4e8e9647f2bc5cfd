"""A policy called on tensors, if it has plain or recurrent networks and a known distribution."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModuleBase,
    TensorDictSequential,
)
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl import modules as rl
from torchrl.modules import (
    ProbabilisticActor,
    SafeProbabilisticModule,
    SafeProbabilisticTensorDictSequential,
)

from ppokit._batch import Entries, Policy, as_key, in_keys_of, is_private, key_parts
from ppokit._calls import as_tuple, is_hooked_or_patched, obstacle, parts
from ppokit.policies.distributions import Family, find_family
from ppokit.recurrent import GRUModule, LSTMModule, TransformerModule

_SEQUENCES = (
    ProbabilisticActor,
    ProbabilisticTensorDictSequential,
    SafeProbabilisticTensorDictSequential,
)
_HEADS = (ProbabilisticTensorDictModule, SafeProbabilisticModule)
_OF_RECURRENT = [x.forward for x in (LSTMModule, GRUModule, rl.LSTMModule, rl.GRUModule)]


class TensorPolicy(NamedTuple):
    """The networks, the distribution and the keys of a policy, and of a module before it."""

    calls: Sequence[tuple[Any, Any]]  #: networks or steps, and the modules that call them
    action: NestedKey
    family: Family
    parameters: Sequence[NestedKey]  #: of the distribution, in the family's order
    log_prob: NestedKey | None  #: where the log-probability is written, if it is
    reads: Sequence[NestedKey]  #: of an observation
    transformed: Sequence[NestedKey]  #: entries of the module before the policy
    written: Sequence[NestedKey]  #: entries of the policy's networks

    def __call__(self, observed: Entries) -> tuple[Entries, Entries]:
        """Return the entries of the module before the policy, and others for :meth:`score`."""
        values: dict[NestedKey, Any] = {key: observed[key] for key in self.reads}
        for network, module in self.calls:
            outputs = as_tuple(network(*[values[key] for key in module.in_keys]), module)
            values.update(zip(module.out_keys, outputs, strict=True))
        distribution = self.family(*[values[key] for key in self.parameters])
        written = {key: values[key] for key in (*self.written, *self.parameters)}
        action = distribution.to_action(distribution.sample())
        written[self.action] = distribution.encode(action)
        return {key: values[key] for key in self.transformed}, written

    def check_shapes(self, written: Entries) -> None:
        """Raise a ValueError where a parameter lacks the batch dimensions of the first."""
        first, *others = [(key, written[key].shape) for key in self.parameters]
        for key, shape in others:
            if len(shape) != len(first[1]):
                raise ValueError(
                    f"The policy's {key!r} has shape {[*shape]}, and {first[0]!r} has "
                    f"{[*first[1]]}: expand it over the batch, as scale.expand_as(loc) does."
                )

    def with_log_prob(self, written: Entries, *, checks: bool) -> Entries:
        """Return what the policy writes, in a step or a batch; raise if parameters are not finite.

        The stored action gives the log-probability, as in the loss: near the bounds of a
        tanh-normal, rounding and clamping change it by many nats. The check reads a number from the
        device.
        """
        distribution = self.family(*[written[key] for key in self.parameters])
        log_prob = distribution.log_prob(written[self.action])
        if checks and not math.isfinite(log_prob.sum().item()):
            numbers = dict(zip(self.parameters, distribution.parameters(), strict=False))
            numbers[self.log_prob or "log-probability of the action"] = log_prob
            check_numbers(numbers, self.parameters)
        # A collector drops what it does not store.
        stored = {key: written[key] for key in (*self.written, self.action) if key in written}
        return stored if self.log_prob is None else stored | {self.log_prob: log_prob}


def find_tensor_policy(
    policy: Policy,
    transform: TensorDictModuleBase | None,
    observed: Collection[NestedKey],
    kept: Collection[NestedKey] = (),
) -> TensorPolicy | str:
    """Return policy and transform as a function of tensors, or why they cannot be called so.

    Entries whose names begin with an underscore are not returned, but those that are ``kept``, and
    states after a step.
    """
    modules = modules_of_policy(policy)
    if isinstance(modules, str):
        return modules
    *networks, head = modules
    before = [] if transform is None else parts(transform)
    of_policy = [part for module in networks for part in parts(module)]
    reads: dict[NestedKey, None] = {}
    written: set[NestedKey] = set()
    calls = []
    for module in (*before, *of_policy):
        step = _one_step(module)
        if step is None and (reason := obstacle(module)):
            return reason
        calls.append((step or module.module, module))
        for key in module.in_keys:
            if key in written:
                continue
            if any(key_parts(key)[0] == key_parts(other)[0] for other in written):
                return f"it reads {key!r}, of which another module may write a part or the whole"
            reads[key] = None
        written.update(module.out_keys)
    if len(head.dist_sample_keys) != 1:
        return f"{type(head).__name__} writes {head.dist_sample_keys}, not one action"
    by_name: Mapping[str, NestedKey] = {
        key_parts(name)[-1]: as_key(key)
        for name, key in zip(head.dist_keys, head.in_keys, strict=True)
    }
    family = find_family(head.distribution_class, head.distribution_kwargs, by_name)
    if isinstance(family, str):
        return family
    parameters = [by_name[name] for name in family.names]
    reads.update((key, None) for key in parameters if key not in written)
    if missing := reads.keys() - {*observed}:
        return f"it reads {sorted(map(str, missing))}"
    made = dict.fromkeys(key for module in of_policy for key in module.out_keys)
    return TensorPolicy(
        calls,
        as_key(head.dist_sample_keys[0]),
        family,
        parameters,
        as_key(head.log_prob_key) if head.return_log_prob else None,
        list(reads),
        [] if transform is None else [as_key(key) for key in transform.out_keys],
        [key for key in made if key in kept or key_parts(key)[0] == "next" or not is_private(key)],
    )


def _one_step(module: nn.Module) -> Callable[..., tuple[Tensor, ...]] | None:
    """Return one step of a recurrent module as a function of tensors; None if it does more.

    The function takes the entries of ``in_keys``, and returns those of ``out_keys``. It computes
    with ``torch.lstm_cell`` or ``gru_cell``, and not with the sequences of ``nn.LSTM``. That of a
    transformer keeps keys and values between calls.
    """
    if type(module) is TransformerModule and not (
        is_hooked_or_patched(module) or module.recurrent_mode
    ):
        return module.stepper()
    if not isinstance(module, (rl.LSTMModule, rl.GRUModule)):
        return None
    if type(module).forward not in _OF_RECURRENT or is_hooked_or_patched(module):
        return None
    is_lstm = isinstance(module, rl.LSTMModule)
    network = cast("nn.RNNBase", module.lstm if is_lstm else module.gru)
    is_plain = type(network) in (nn.LSTM, nn.GRU) and not is_hooked_or_patched(network)
    if not is_plain or network.bidirectional or network.proj_size or module.recurrent_mode:
        return None
    if network.training and network.dropout and network.num_layers > 1:
        return None

    def step(x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        shape, (*states, is_init) = x.shape[:-1], given
        x, start = x.reshape(-1, x.shape[-1]), is_init.reshape(-1, 1, 1)
        rows = [state.reshape(-1, *state.shape[-2:]) for state in states]
        before = [state.masked_fill(start, 0).unbind(1) for state in rows]
        after = []
        for weights, *state in zip(network.all_weights, *before, strict=True):
            if is_lstm:
                found = torch.lstm_cell(x, state, *weights)
            else:
                found = (torch.gru_cell(x, *state, *weights),)
            after.append(found)
            x = found[0]
        found = x, *(torch.stack(layers, 1) for layers in zip(*after, strict=True))
        return tuple(y.reshape(*shape, *y.shape[1:]) for y in found)

    return step


def modules_of_policy(policy: Policy) -> list[Any] | str:
    """Return the modules that a policy calls in turn to draw one action, or why it does more."""
    if isinstance(policy, TensorDictSequential) and len(modules := parts(policy)) > 1:
        *before, last = modules  # such as a critic with a memory of its own
        found = modules_of_policy(last)
        return found if isinstance(found, str) else [*before, *found]
    name, actor = type(policy).__name__, cast("ProbabilisticActor", policy)
    if type(policy) not in _SEQUENCES or not isinstance(actor.module, nn.ModuleList):
        return f"{name} is no ProbabilisticActor of a list of modules"
    head = actor.module[-1]
    head_name = type(head).__name__
    if type(head) not in _HEADS:
        return f"{head_name} is no ProbabilisticTensorDictModule"
    for module in (actor, head):
        if is_hooked_or_patched(module) or "get_dist" in vars(module):
            return f"a hook on {type(module).__name__}"
    # _select_before_return, _generator and _generator_key have no public names
    if actor.return_composite or actor._select_before_return or actor.inplace is False:
        return f"{name} selects its entries, or has inplace=False"
    if (head.num_samples, head._generator, head._generator_key) != (None, None, None):
        return f"{head_name} has num_samples or a generator"
    return [*actor.module]


def check_written(policy: Policy, written: Entries) -> None:
    """Raise a ValueError where the policy's parameters are not finite, or other entries NaN."""
    head = policy[-1] if isinstance(policy, ProbabilisticTensorDictSequential) else None
    check_numbers(written, [as_key(key) for key in in_keys_of(head)])


def check_numbers(written: Entries, parameters: Sequence[NestedKey]) -> None:
    """Raise a ValueError where a parameter is not finite, or another entry is NaN.

    Some of the logits of a distribution may be minus infinity, but not all of them.
    """
    for key in dict.fromkeys((*parameters, *written)):
        value = written.get(key)
        if value is None or not value.is_floating_point():
            continue
        bad = value.isnan()
        if key in parameters:
            bad = ~(value < math.inf) | (value == -math.inf).all(-1, keepdim=True)
        if bad.any():
            raise ValueError(
                f"The policy's {key!r} is nan or inf in {int(bad.sum())} of {bad.numel()} places "
                f"of this batch, first at {bad.nonzero()[0].tolist()}. Look for a high learning "
                "rate, an observation that is not finite, or an action mask that allows nothing."
            )


def call_on_tensordict(
    policy: Policy, transform: TensorDictModuleBase | None, step: TensorDictBase, others: Entries
) -> tuple[Entries, Entries]:
    """Return what transform and policy write; ``others`` are entries that only the policy reads."""
    transformed: Entries = {}
    if transform is not None:
        step = _called(transform, step)
        transformed = {key: step.get(key) for key in map(as_key, transform.out_keys)}
    step.update(others)
    before = dict(step.items(True, True))
    found = _called(policy, step).items(True, True)
    return transformed, {key: value for key, value in found if value is not before.get(key)}


def _called(module: Policy, tensordict: TensorDictBase) -> TensorDictBase:
    """Return the TensorDict with the entries of the module, which may return another one."""
    try:
        out = module(tensordict)
    except TypeError as error:
        if hasattr(module, "in_keys"):
            raise
        raise TypeError(
            f"{type(module).__name__} cannot be called on a TensorDict. Wrap it, if it takes "
            "tensors: TensorDictModule(network, in_keys=['observation'], out_keys=['action'])."
        ) from error
    return out if out is tensordict else tensordict.update(out)
