"""A policy as a collector calls it, with recurrent states if it has any."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule
from tensordict.utils import NestedKey
from torch import Tensor
from torch import distributions as d
from torchrl.modules import MaskedOneHotCategorical, OneHotCategorical, TanhNormal

from ppokit._keys import key_parts, recurrent_states
from ppokit.collectors.batch import FLAGS, IS_INIT, Column, Entries
from ppokit.collectors.compiled_policy import PolicyGraph, check_written
from ppokit.collectors.spaces import Actions
from ppokit.collectors.tensor_policy import PolicyParts

_ONE_HOT = OneHotCategorical, MaskedOneHotCategorical, d.OneHotCategorical


class CalledPolicy:
    """A policy called in a graph, on tensors, or on a TensorDict, with recurrent states if any.

    A state is zero where an episode starts, and otherwise the entry ``("next", state)`` that the
    policy wrote a step before, in this batch or the last. A ``graph`` calls policy and transform in
    one batch, ``parts`` call their networks; without both they are called on a TensorDict.
    """

    def __init__(
        self,
        policy: Any,
        transform: Any,
        actions: Actions,
        num_envs: int,
        device: Any,
        graph: PolicyGraph | None = None,
        parts: PolicyParts | None = None,
    ) -> None:
        self.policy, self.transform, self._actions = policy, transform, actions
        self._batch_size, self._device = [num_envs], device
        self._graph, self._number = graph, 0  # calls of the graph in this batch
        self._parts = parts
        self._flags = {name: self._zeros(1, dtype=torch.bool) for name in FLAGS}
        self._states = {
            key: self._zeros(*shape, dtype=dtype)
            for key, (shape, dtype) in recurrent_states(policy).items()
        }
        self._tracks_init = bool(self._states) or IS_INIT in getattr(policy, "in_keys", ())
        self._seen = 0  # starts in this batch that states were set to zero for
        self._transformed: dict[NestedKey, Column] = defaultdict(Column)
        self._written: dict[NestedKey, Column] = defaultdict(Column)
        self._is_init = ~self._flags["done"]

    def _zeros(self, *shape: int, dtype: torch.dtype | None) -> Tensor:
        return torch.zeros((*self._batch_size, *shape), dtype=dtype, device=self._device)

    def act(self, observed: Entries, starts: Sequence[int]) -> Sequence[Any]:
        """Return the action of each environment."""
        found = None
        if self._graph is not None:
            found = self._graph(observed, 1, number=self._number)
            self._number += 1
            self._graph = self._graph if found is not None else None  # it could not be captured
        elif self._parts is not None:
            found = self._parts.write(observed)
        transformed, written = self._call(observed, starts) if found is None else found[:2]
        action = {key: written[key] for key in self._actions.keys(written)}
        if not self._written:
            self._actions.check(action, *self._batch_size)
        if found is None:
            self._carry(written)
        for columns, entries in ((self._transformed, transformed), (self._written, written)):
            for key, value in entries.items():
                columns[key].append(value)
        return self._actions.decode(list(action.values()))

    def _call(self, observed: Entries, starts: Sequence[int]) -> tuple[Entries, Entries]:
        """Return the entries that transform and policy write."""
        self._begin_episodes(starts)
        entries: Any = observed
        tensordict: TensorDictBase = TensorDict(entries, self._batch_size, device=self._device)
        transformed: Entries = {}
        if self.transform is not None:
            tensordict = _called(self.transform, tensordict)
            transformed = {key: tensordict.get(key) for key in self.transform.out_keys}
        tensordict.update(self._flags | self._states)
        if self._tracks_init:
            tensordict.set(IS_INIT, self._is_init)
        before = dict(tensordict.items(True, True))
        found = _called(self.policy, tensordict).items(True, True)
        return transformed, {key: value for key, value in found if value is not before.get(key)}

    def finish(self, starts: Sequence[int]) -> tuple[Entries, Entries]:
        """Return the entries of the transform and of the policy ``[n, T, ...]`` in this batch."""
        self._begin_episodes(starts)
        self._seen = 0
        transformed, written = _take(self._transformed), _take(self._written)
        if self._parts is not None:
            return transformed, self._parts.score(written, checks=True)
        if self._graph is not None:
            check_written(self.policy, written)
        written = _scores(self.policy, written)
        action = self._actions.keys(written)
        public = [x for x in written if x in action or not key_parts(x)[-1].startswith("_")]
        return transformed, {key: written[key] for key in public}

    def _carry(self, written: Entries) -> None:
        """Keep the states for the next step, and store those of this one."""
        states, was_init = self._states, self._is_init
        self._states = {key: written.get(("next", *key_parts(key)), states[key]) for key in states}
        self._is_init = self._flags["done"]
        written.update({key: value for key, value in states.items() if key not in written})
        if self._tracks_init:
            written |= {IS_INIT: was_init, ("next", IS_INIT): self._flags["done"]}

    def _begin_episodes(self, starts: Sequence[int]) -> None:
        """Set the states to zero where episodes have begun since the last call."""
        started = starts[self._seen :]
        self._seen = len(starts)
        if not started or not self._tracks_init:
            return
        self._is_init = self._is_init.clone()
        self._is_init[started] = True
        for key, state in self._states.items():
            self._states[key] = state.clone()
            self._states[key][started] = 0


def heads_of(policy: Any) -> list[Any]:
    """Return the modules of a policy that draw from a distribution."""
    modules: Any = policy.modules() if isinstance(policy, torch.nn.Module) else ()
    return [x for x in modules if isinstance(x, ProbabilisticTensorDictModule)]


def draws_indices(policy: Any) -> bool:
    """Return whether a policy draws choices as indices; raise if only some of its heads do."""
    heads = heads_of(policy)
    # Others may draw a latent variable.
    of_action = [x for x in heads if any("action" in key_parts(key) for key in x.dist_sample_keys)]
    found: dict[bool, list[NestedKey]] = {True: [], False: []}
    for head in of_action or heads:
        for key, kind in _kinds(head).items():
            kind = getattr(kind, "base_distribution", kind)  # several choices of one kind
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
    options = {**getattr(kind, "keywords", {}), **head.distribution_kwargs}  # of a partial
    kinds = options.get("distribution_map", {head.dist_sample_keys[0]: kind})
    return {key: getattr(kind, "func", kind) for key, kind in kinds.items()}


def _scores(policy: Any, written: Entries) -> Entries:
    """Return the entries, a tanh-normal's log-probabilities for the actions as they are stored."""
    batch = TensorDict(cast("Any", written), next(iter(written.values())).shape[:2])
    for head in heads_of(policy):
        is_rounded = any(TanhNormal in getattr(x, "__mro__", ()) for x in _kinds(head).values())
        if is_rounded and head.return_log_prob and all(key in batch for key in head.in_keys):
            found: Any = head.log_prob(batch)
            batch.update({head.log_prob_keys[0]: found} if isinstance(found, Tensor) else found)
    return {key: batch[key] for key in written}


def _called(module: Any, tensordict: TensorDictBase) -> TensorDictBase:
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


def _take(columns: dict[NestedKey, Column]) -> Entries:
    """Return the entries of all steps, and drop the columns."""
    taken = {key: column.take() for key, column in columns.items()}
    columns.clear()
    return taken
