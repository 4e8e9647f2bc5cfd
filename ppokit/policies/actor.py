"""TensorActor: a policy for torchrl's collectors, called on tensors."""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.envs.utils import ExplorationType, exploration_type

from ppokit._batch import (
    Entries,
    Options,
    as_key,
    check_tensordict,
    version_of,
    write_policy_version,
)
from ppokit.policies.compiled_policy import CompiledPolicy
from ppokit.policies.tensor_policy import check_written, find_tensor_policy


class TensorActor(TensorDictModuleBase):
    """A ``ProbabilisticActor`` for torchrl's collectors, at little over the cost of its network.

    It reads and writes what the actor does, with the same actions from the same random numbers, and
    the same log-probabilities to rounding (of a ``TanhNormal`` that of the stored action, as in
    :class:`GymCollector`); but the network, the draw and its score are computed on
    tensors, where the actor makes a distribution and several TensorDicts in each step. Use it with
    torchrl's ``Collector`` and its relatives; :class:`GymCollector` does the same by itself.
    Modules, parameters and their names are the actor's: train the actor, collect with this, and
    send the weights of either to a collector's workers.

    If that is not possible (a distribution that :class:`GymCollector` does not name, hooks, another
    exploration type than ``RANDOM``), the actor is called as it is.

    Args:
        actor: a ``ProbabilisticActor``.
        compile: True, or a mapping of ``torch.compile``'s arguments, calls the actor as one graph,
            as :class:`GymCollector` does with ``compile_policy``.

    Raises:
        TypeError: the actor is no TensorDictModule.
        ValueError: in a call on the CPU, the distribution's parameters are not finite.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from ppokit import TensorActor
        >>> from ppokit.networks import actor_critic
        >>> actor, _ = actor_critic("CartPole-v1")
        >>> sorted(TensorActor(actor)(TensorDict({"observation": torch.ones(4)})).keys())
        ['action', 'action_log_prob', 'logits', 'observation']
    """

    def __init__(self, actor: TensorDictModuleBase, *, compile: bool | Options = False) -> None:
        super().__init__()
        if not isinstance(actor, TensorDictModuleBase):
            raise TypeError(f"actor must be a TensorDictModule, got {type(actor).__name__}.")
        self.actor: Any
        # Not a child, whose parameters would have other names. Both hold the same dictionaries: a
        # tensor or a child that is replaced in one of them is replaced in both.
        self.__dict__["actor"] = actor
        for name, held in vars(nn.Module()).items():  # modules, parameters, buffers
            if isinstance(held, dict | set) and "hooks" not in name:
                self.__dict__[name] = actor.__dict__[name]
        self._compiled = CompiledPolicy(compile) if compile is not False else None
        self.in_keys: Any = actor.in_keys
        self.out_keys: Any = actor.out_keys

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the action, its log-probability if the actor does, and the network's outputs.

        Also ``"policy_version"``, if the actor has a buffer of that name (see
        :class:`~ppokit.PPOUpdate`). No gradient is computed.
        """
        check_tensordict(tensordict, who="TensorActor")
        version = version_of(self.actor)
        is_random = exploration_type() is ExplorationType.RANDOM
        written = self._call(tensordict) if is_random else None
        if written is None:
            tensordict = self.actor(tensordict)
        for key, value in (written or {}).items():
            tensordict.set(key, value)
        return write_policy_version(version, tensordict)

    def _call(self, tensordict: TensorDictBase) -> Entries | None:
        """Return what the actor writes, or None: it is called as it is."""
        observed = {as_key(key): tensordict.get(key, None) for key in self.in_keys}
        observed = {key: value for key, value in observed.items() if value is not None}
        compiled, is_complete = self._compiled, len(observed) == len(self.in_keys)
        if compiled is not None and compiled.begin(self.actor, None) and is_complete:
            found = compiled.call_with_guards(observed, tensordict.ndim)
            if found is not None:
                written, total = found
                if total.is_cpu and not math.isfinite(total.item()):
                    check_written(self.actor, written)
                return written
        function = find_tensor_policy(self.actor, None, observed)
        if isinstance(function, str):
            return None
        written = function(observed)[1]
        return function.with_log_prob(written, checks=written[function.action].is_cpu)

    def train(self, mode: bool = True) -> TensorActor:
        """Set the mode of the actor and of its modules."""
        self.actor.train(mode)
        self.training = mode
        return self

    def __repr__(self) -> str:
        found = find_tensor_policy(self.actor, None, [*map(as_key, self.in_keys)])
        path = f"as a TensorDictModule ({found})" if isinstance(found, str) else "on tensors"
        if self._compiled is not None and self._compiled.reason is None:
            path = "in a graph"
        return f"{type(self).__name__}({self.actor}, called {path})"
