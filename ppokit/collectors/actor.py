"""A policy for torchrl's collectors, called past its TensorDicts."""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.envs.utils import ExplorationType, exploration_type

from ppokit._keys import as_key
from ppokit._old_calls import make
from ppokit.collectors.heads import Head
from ppokit.collectors.lean import Found, check_finite, take_apart


class LeanActor(TensorDictModuleBase):
    """A ``ProbabilisticActor`` for torchrl's collectors, at little over the cost of its network.

    It reads and writes what the actor does, with the same actions from the same random numbers, and
    the same log-probabilities to rounding; but the network, the draw and its score are computed on
    tensors, where the actor makes a distribution and several TensorDicts in each step. What
    :class:`GymCollector` does by itself, this does for ``Collector`` and its relatives. The
    parameters are the actor's own: train the actor, and collect with this.

    Where it cannot (another distribution than those that :class:`GymCollector` names, hooks,
    another exploration type than ``RANDOM``), the actor is called as it is.

    Args:
        actor: a ``ProbabilisticActor``.

    Raises:
        TypeError: the actor is no TensorDictModule.
        ValueError: in a call on the CPU, the distribution's parameters are not finite.

    Example:
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl.modules import ProbabilisticActor
        >>> actor = ProbabilisticActor(
        ...     TensorDictModule(torch.nn.Linear(4, 2), ["observation"], ["logits"]),
        ...     in_keys=["logits"],
        ...     distribution_class=torch.distributions.Categorical,
        ...     return_log_prob=True,
        ... )
        >>> sorted(LeanActor(actor)(TensorDict({"observation": torch.ones(4)})).keys())
        ['action', 'action_log_prob', 'logits', 'observation']
    """

    _found: Found | None = None
    _head: Head | None = None  # None: the actor has not been looked at, or it is called as it is

    def __init__(self, actor: Any) -> None:
        super().__init__()
        if not isinstance(actor, TensorDictModuleBase):
            raise TypeError(f"actor must be a TensorDictModule, got {type(actor).__name__}.")
        self.actor = actor
        self.in_keys: Any = actor.in_keys
        self.out_keys: Any = actor.out_keys
        self._is_known = False

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the action, its log-probability if the actor does, and the network's outputs.

        Without gradient, whoever calls.
        """
        head, found = self._current_head(), self._found
        if head is None or found is None or exploration_type() is not ExplorationType.RANDOM:
            return self.actor(tensordict)
        values: Any = found.networks.read(tensordict)
        if values is None or not make(found.calls, values, tensordict):
            return self.actor(tensordict)
        action, log_prob = head.sample(*[values[place] for place in found.parameters])
        if log_prob.is_cpu and not math.isfinite(log_prob.sum().item()):
            for name, place in zip(head.names, found.parameters, strict=True):
                check_finite(name, values[place])
        for key, place in found.written.items():
            tensordict.set(key, values[place])
        tensordict.set("action", action)
        if found.module.return_log_prob:
            tensordict.set(as_key(found.module.log_prob_key), log_prob)
        return tensordict

    def _current_head(self) -> Head | None:
        """Return how actions are drawn, found anew if somebody has changed the actor."""
        if not self._is_known or (self._found and not self._found.networks.watch.are_as_found()):
            self._found = take_apart(self.actor)
            self._head = None if self._found is None else self._found.head()
            self._is_known = True
        return self._head

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what was found, which is good for these very modules."""
        return self.__dict__ | {"_found": None, "_head": None, "_is_known": False}
