"""Where the values come from: the batch, one pass of the value network, or torchrl's two."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, set_skip_existing
from tensordict.nn import skip_existing as skip_existing_outputs
from torch import Tensor
from torchrl.objectives.utils import hold_out_net
from torchrl.objectives.value import GAE as TorchRLGAE  # noqa: N811

from ppokit._keys import get_tensor, per_frame
from ppokit.advantages.steps import bootstrap_inputs, steps_on_their_own
from ppokit.functional._checks import check_bool, check_float


class OnePassValues(TorchRLGAE):
    """torchrl's GAE, which evaluates the value network once wherever that is exact."""

    @staticmethod
    def _normalize_shifted(shifted: bool | None) -> bool | None:  # pyright: ignore
        if shifted not in (None, True, False):
            raise ValueError(f"shifted must be None, True or False, got {shifted!r}.")
        return shifted

    def _signals(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        keys = self.tensor_keys
        fix = "Collectors write it; other names are given with gae.set_keys(...)."
        reward = get_tensor(tensordict, ("next", keys.reward), fix=fix)
        done = get_tensor(tensordict, ("next", keys.done), fix=fix)
        terminated = tensordict.get(("next", keys.terminated), done)
        check_float(repr(("next", keys.reward)), reward)
        check_bool(repr(("next", keys.done)), done)
        check_bool(repr(("next", keys.terminated)), terminated)
        return reward, done, terminated

    def _values(
        self,
        tensordict: TensorDictBase,
        params: TensorDictBase | None,
        target_params: TensorDictBase | None,
        dim: int,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        key = self.tensor_keys.value
        if self.value_network is None:
            fix = "There is no value_network to compute it: pass one, or store the values."
            return (
                get_tensor(tensordict, key, fix=fix),
                get_tensor(tensordict, ("next", key), fix=fix),
            )
        if self._one_pass_is_exact(self.value_network, tensordict, target_params):
            return self._one_pass(self.value_network, tensordict, params, dim, mask)
        if params is not None:
            params = params.detach()
            assert params is not None
            target_params = params.clone(False) if target_params is None else target_params
        value, next_value, _ = self._call_value_nets(
            data=tensordict.copy(),
            params=params,  # pyright: ignore[reportArgumentType]
            next_params=target_params,  # pyright: ignore[reportArgumentType]
            single_call=False,
            value_key=key,
            detach_next=True,
            vmap_randomness=str(self.vmap_randomness),
        )
        return value, next_value

    def _one_pass_is_exact(
        self,
        network: TensorDictModule,
        tensordict: TensorDictBase,
        target_params: TensorDictBase | None,
    ) -> bool:
        multi_step = tensordict.get(self.tensor_keys.steps_to_next_obs, None) is not None
        return not (
            self.shifted is False
            or target_params is not None
            or is_recurrent(network)
            or multi_step
            or skip_existing_outputs()
        )

    def _one_pass(
        self,
        network: TensorDictModule,
        tensordict: TensorDictBase,
        params: TensorDictBase | None,
        dim: int,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        keys, key = self.tensor_keys, self.tensor_keys.value
        done = tensordict.get(("next", keys.done))
        terminated = tensordict.get(("next", keys.terminated), done)
        # Of several agents, one that goes on needs the value after the step.
        done = per_frame(done, tensordict.ndim)
        terminated = ~per_frame(~terminated, tensordict.ndim)
        alone = steps_on_their_own(done, terminated, mask, dim)
        parameters = nullcontext()
        if params is not None:
            parameters = params.detach().to_module(network, preserve_module_state=False)
        with parameters:
            value = network(tensordict.select(*network.in_keys, strict=False)).get(key)
            next_value = value.detach().roll(-1, dim)
            next_value.masked_fill_(self._expand_to_match(terminated, value), 0)
            if alone.any():
                rows = bootstrap_inputs(tensordict, alone, network.in_keys)
                next_value[alone] = network(rows).get(key).detach().to(value.dtype)
        return value, next_value

    @contextmanager
    def _value_network_context(self, *params: TensorDictBase | None) -> Iterator[None]:
        own_parameters = all(p is None for p in params)
        with (
            nullcontext() if self.skip_existing is None else set_skip_existing(self.skip_existing),
            # A differentiable estimate passes gradients to its inputs, not to the value network.
            hold_out_net(self.value_network)
            if self.value_network is not None and own_parameters and self.differentiable
            else nullcontext(),
        ):
            yield


def is_recurrent(network: TensorDictModule) -> bool:
    """Return whether the network reads episode starts, so that it has a state to reset."""
    in_keys = getattr(network, "in_keys", [])
    return any(key == "is_init" or key[-1] == "is_init" for key in in_keys)
