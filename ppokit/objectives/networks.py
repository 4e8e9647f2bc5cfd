"""Networks called on tensors, past the TensorDicts that their modules would read and write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from tensordict.utils import NestedKey
from torch import Tensor, nn

# What may give another result on the same input, or counts how often it is called.
_UNREPEATABLE = (
    nn.modules.dropout._DropoutNd,
    nn.modules.batchnorm._NormBase,
    nn.RNNBase,
    nn.RReLU,
)


class Values:
    """The entries of a TensorDict and what networks make of them; it is not written to.

    A network that actor and critic share, and call on the same tensors, is called once.
    """

    def __init__(self, tensordict: TensorDictBase) -> None:
        self._tensordict = tensordict
        self._made: dict[NestedKey, Any] = {}
        self._calls: list[tuple[nn.Module, Sequence[Any], Sequence[Any]]] = []

    def get(self, key: NestedKey) -> Any:
        """Return what was made of that name, else the entry, else None."""
        value = self._made.get(key)
        return self._tensordict.get(key, None) if value is None else value

    def made(self, key: NestedKey) -> Any:
        """Return what was made of that name, else None."""
        return self._made.get(key)

    def detached(self) -> Values:
        """Return the same values without their gradient, and without a memory of calls."""
        values = Values(self._tensordict.detach())
        values._made = {key: value.detach() for key, value in self._made.items()}
        return values

    def run(self, module: Any) -> None:
        """Make what the module writes."""
        if _is_plain(module):
            inputs = [self.get(key) for key in module.in_keys]
            if not any(value is None for value in inputs):
                outputs = self._called(module.module, inputs, module.out_keys)
                self._made.update(zip(module.out_keys, outputs, strict=True))
                return
        elif _is_plain_sequence(module):
            for part in module.module:
                self.run(part)
            return
        # The module knows what is wrong, or what to do.
        out = module(self.tensordict())
        self._made.update((key, out.get(key)) for key in module.out_keys)

    def tensordict(self) -> TensorDictBase:
        """Return a TensorDict of all values."""
        tensordict = self._tensordict.clone(False)
        for key, value in self._made.items():
            tensordict.set(key, value)
        return tensordict

    def _called(
        self, network: nn.Module, inputs: list[Any], out_keys: list[NestedKey]
    ) -> Sequence[Any]:
        for earlier, given, outputs in self._calls:
            if earlier is network and all(a is b for a, b in zip(given, inputs, strict=True)):
                if _is_repeatable(network):
                    return outputs
                break
        outputs = network(*inputs)
        if isinstance(outputs, Tensor):
            outputs = (outputs,)
        elif not isinstance(outputs, tuple):
            outputs = tuple(outputs[key] for key in out_keys)
        self._calls.append((network, inputs, outputs))
        return outputs


def _is_plain(module: Any) -> bool:
    """Return whether the module does no more than read, call and write."""
    return (
        type(module).forward is TensorDictModule.forward
        and module.inplace is True
        and module.method is None
        and not (module._kwargs or module.method_kwargs or module._get_kwargs)
        and not _has_hooks(module)
    )


def _is_plain_sequence(module: Any) -> bool:
    return (
        type(module).forward is TensorDictSequential.forward
        and module.inplace in (None, True)
        and not (module._select_before_return or module.partial_tolerant)
        and not _has_hooks(module)
    )


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def _is_repeatable(network: nn.Module) -> bool:
    return not any(m.training and isinstance(m, _UNREPEATABLE) for m in network.modules())
