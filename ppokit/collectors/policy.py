"""A policy as a collector calls it, with recurrent states if it has any."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, cast

import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor
from torch import distributions as d
from torchrl.envs.utils import ExplorationType
from torchrl.modules import MaskedOneHotCategorical, OneHotCategorical, TanhNormal

from ppokit._batch import (
    IS_INIT,
    Entries,
    Policy,
    in_keys_of,
    is_memory,
    is_of_transformer,
    is_private,
    key_parts,
    recurrent_states,
    steps_key,
)
from ppokit.collectors.batch import FLAGS, Columns
from ppokit.policies.compiled_policy import CompiledPolicy
from ppokit.policies.tensor_policy import (
    TensorPolicy,
    call_on_tensordict,
    check_written,
    find_tensor_policy,
)
from ppokit.spaces import Actions

_ONE_HOT = OneHotCategorical, MaskedOneHotCategorical, d.OneHotCategorical


class CollectorPolicy:
    """A policy as a collector calls it: in a graph, on tensors or on a TensorDict.

    A recurrent state is zero where an episode starts, and otherwise the entry ``("next", state)``
    that the policy wrote a step before, in this batch or the last. The memory of a transformer is
    written once for a batch, as it is before the first step.
    """

    def __init__(
        self,
        actions: Actions,
        observed: Collection[NestedKey],
        num_envs: int,
        device: torch.device | None,
        compiled: CompiledPolicy | None,
    ) -> None:
        self._actions, self._observed = actions, observed
        self._batch_size, self._device = [num_envs], device
        self._compiled = compiled
        self._policy: Any = None  # of the last batch
        self._transform: TensorDictModuleBase | None = None
        self._function: CompiledPolicy | TensorPolicy | None = compiled  # None: on a TensorDict
        self._tensor_policy: TensorPolicy | None = None  # which scores what a graph has drawn, too
        self._flags = {name: self._zeros(1, dtype=torch.bool) for name in FLAGS}
        self._transformed, self._written = Columns(), Columns()
        self._action: list[NestedKey] = []  # keys of its parts in this batch
        self._kept: Collection[NestedKey] = ()

    def _zeros(self, *shape: int, dtype: torch.dtype | None) -> Tensor:
        return torch.zeros((*self._batch_size, *shape), dtype=dtype, device=self._device)

    def begin(
        self,
        policy: Policy,
        transform: TensorDictModuleBase | None,
        exploration_type: ExplorationType,
        kept: Collection[NestedKey] = (),
    ) -> None:
        """Begin a batch; the policy's modules may have changed since the last.

        ``kept`` are entries of the policy's modules that are returned although they are private.
        """
        is_same = policy is self._policy and transform is self._transform
        if not is_same:  # else the states go on
            shapes = recurrent_states(policy).items()
            self._states = {key: self._zeros(*x, dtype=dtype) for key, (x, dtype) in shapes}
            self._tracks_init = bool(shapes) or IS_INIT in in_keys_of(policy)
            self._is_init = ~self._flags["done"]
        self._policy, self._transform = policy, transform
        self._action, self._seen = [], 0  # starts that states were set to zero for
        self._is_first = True
        self._kept = kept
        found = self._on_tensors(policy, transform, exploration_type)
        self._tensor_policy = None if isinstance(found, str) else found
        self._function, compiled = self._tensor_policy, self._compiled
        is_random = exploration_type is ExplorationType.RANDOM
        if compiled is not None and is_random and compiled.begin(policy, transform, self._kept):
            self._function = compiled

    def _on_tensors(
        self,
        policy: Policy,
        transform: TensorDictModuleBase | None,
        exploration_type: ExplorationType,
    ) -> TensorPolicy | str:
        """Return the policy called on tensors, or why it has to be called as a TensorDictModule."""
        if exploration_type is not ExplorationType.RANDOM:
            return f"exploration_type is {exploration_type}"
        observed = [*self._observed, *recurrent_states(policy), IS_INIT]
        found = find_tensor_policy(policy, transform, observed, self._kept)
        try:
            if not isinstance(found, str):
                self._actions.keys([found.action])
        except KeyError as error:
            return str(error)
        return found

    def path(
        self,
        policy: Policy,
        transform: TensorDictModuleBase | None,
        exploration_type: ExplorationType,
    ) -> str:
        """Return how a policy would be called, for ``repr``."""
        found = self._on_tensors(policy, transform, exploration_type)
        path = f"as a TensorDictModule ({found})" if isinstance(found, str) else "on tensors"
        if self._compiled is not None:
            reason = self._compiled.reason
            path = "in a graph" if reason is None else f"{path} ({reason})"
        return path

    def act(self, observed: Entries, starts: Sequence[int]) -> Sequence[object]:
        """Return the action of each environment."""
        self._begin_episodes(starts)
        memory = self._memory
        try:
            found = None if self._function is None else self._function(observed | memory)
        except RuntimeError:
            if self._function is self._compiled:  # an error of the policy itself is explained
                self._call_on_tensordict(observed, memory)
            raise
        if found is None:
            self._function = None  # also if no graph could be captured
            found = self._call_on_tensordict(observed, memory)
        transformed, written = found[:2]
        if memory:
            self._carry(memory, written)
        if not self._action:
            self._action = self._actions.keys(written)
            self._actions.check({key: written[key] for key in self._action}, *self._batch_size)
            if self._function is not None and self._tensor_policy is not None:
                self._tensor_policy.check_shapes(written)
        self._transformed.append(transformed)
        self._written.append(written)
        return self._actions.decode([written[key] for key in self._action])

    @property
    def _memory(self) -> Entries:
        """The entries of a recurrent policy before a step: its states, and episode starts."""
        return {**self._states, IS_INIT: self._is_init} if self._tracks_init else {}

    def _call_on_tensordict(self, observed: Entries, memory: Entries) -> tuple[Entries, Entries]:
        """Return what transform and policy write."""
        step = TensorDict(cast("Any", observed), self._batch_size, device=self._device)
        others = self._flags | memory
        return call_on_tensordict(self._policy, self._transform, step, others)

    def _carry(self, memory: Entries, written: Entries) -> None:
        """Keep the states after a step, and write those before it."""
        for key in self._states:
            after = ("next", *key_parts(key))
            self._states[key] = written.get(after, memory[key])
            if is_of_transformer(key):
                written.pop(after, None)
        for key, value in memory.items():
            if not is_memory(key):
                written.setdefault(key, value)
            elif self._is_first:  # the first one of all has the dtype of the space
                written.setdefault(key, value.to(self._states[key].dtype))
        self._is_first = False
        written["next", IS_INIT] = self._flags["done"]
        self._is_init = self._flags["done"]

    def _begin_episodes(self, starts: Sequence[int]) -> None:
        """Set the states to zero where episodes have begun since the last call."""
        started = starts[self._seen :]
        self._seen = len(starts)
        if not started or not self._tracks_init:
            return
        self._is_init = self._is_init.clone()
        self._is_init[started] = True
        for key, state in self._states.items():
            if not is_memory(key):  # which begins where "is_init" is True
                self._states[key] = state.clone()
                self._states[key][started] = 0

    def finish(self, starts: Sequence[int]) -> tuple[Entries, Entries]:
        """Return the entries of the transform and of the policy ``[n, T, ...]`` in this batch."""
        self._begin_episodes(starts)
        transformed, written = self._transformed.take(), self._written.take()
        for key in filter(is_memory, self._memory):
            of_steps = written[steps_key(key)]
            of_steps[..., 1] = torch.arange(of_steps.shape[1], device=of_steps.device)
            written[key] = written[key].expand(-1, of_steps.shape[1], *written[key].shape[2:])
        if self._function is not None and self._tensor_policy is not None:
            of_memory = [*self._memory, ("next", IS_INIT)] if self._tracks_init else []
            scored = self._tensor_policy.with_log_prob(written, checks=True)
            written = scored | {key: written[key] for key in of_memory}
        else:
            check_written(self._policy, written)
            written = _with_stored_log_prob(self._policy, written)
        named = {*self._action, *(key for x in heads_of(self._policy) for key in x.log_prob_keys)}
        named |= {*self._kept}
        public = (key for key in written if key in named or not is_private(key))
        return transformed, {key: written[key] for key in public}


def heads_of(policy: Policy) -> list[Any]:
    """Return the modules of a policy that draw from a distribution."""
    modules = policy.modules() if isinstance(policy, torch.nn.Module) else ()
    return [x for x in modules if isinstance(x, ProbabilisticTensorDictModule)]


def draws_indices(policy: Policy) -> bool:
    """Return whether a policy draws choices as indices; raise if only some of its heads do."""
    heads = heads_of(policy)
    # Others may draw a latent variable.
    of_action = [x for x in heads if any("action" in key_parts(key) for key in x.dist_sample_keys)]
    found: dict[bool, list[NestedKey]] = {True: [], False: []}
    for head in of_action or heads:
        for key, kind in _kinds(head).items():
            if hasattr(kind, "base_distribution"):  # several choices of one kind
                kind = kind.base_distribution
            if isinstance(kind, type) and issubclass(kind, (d.Categorical, *_ONE_HOT)):
                found[not issubclass(kind, _ONE_HOT)].append(key)
    if all(found.values()):
        raise ValueError(
            f"The policy draws {found[True]} as indices and {found[False]} as one-hot vectors. "
            "Give all heads a Categorical, or all a OneHotCategorical."
        )
    return bool(found[True])


def _kinds(head: Any) -> dict[NestedKey, Any]:
    """Return the class of the distribution of each sample of a head."""
    kind = head.distribution_class
    keywords = kind.keywords if isinstance(kind, partial) else {}
    options = {**keywords, **head.distribution_kwargs}
    kinds = options.get("distribution_map", {head.dist_sample_keys[0]: kind})
    return {key: x.func if isinstance(x, partial) else x for key, x in kinds.items()}


def _with_stored_log_prob(policy: Policy, written: Entries) -> Entries:
    """Return the entries, a tanh-normal's log-probabilities for the actions as they are stored."""
    batch = TensorDict(cast("Any", written), next(iter(written.values())).shape[:2])
    for head in heads_of(policy):
        kinds = _kinds(head).values()
        is_rounded = any(isinstance(x, type) and issubclass(x, TanhNormal) for x in kinds)
        if is_rounded and head.return_log_prob and all(key in batch for key in head.in_keys):
            found = head.log_prob(batch)
            batch.update({head.log_prob_keys[0]: found} if isinstance(found, Tensor) else found)
    return {key: batch[key] for key in written}
