"""Where the values come from: the batch, one pass of the value network, or torchrl's two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, set_skip_existing
from tensordict.nn import skip_existing as skip_existing_outputs
from torch import Tensor
from torchrl.objectives.utils import hold_out_net
from torchrl.objectives.value import GAE as TorchRLGAE  # noqa: N811

from ppokit._keys import check_truncated, get_if_any, get_tensor, per_frame
from ppokit._recurrent import is_recurrent
from ppokit.advantages.recurrent import check_states
from ppokit.advantages.steps import bootstrap_inputs, steps_on_their_own
from ppokit.functional._checks import check_bool, check_float


class OnePassValues(TorchRLGAE):
    """torchrl's GAE, which evaluates the value network once wherever that is exact."""

    @staticmethod
    def _normalize_shifted(shifted: bool | None) -> bool | None:  # pyright: ignore
        if shifted not in (None, True, False):
            raise ValueError(f"shifted must be a boolean or None, got {shifted!r}.")
        return shifted

    def _signals(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        keys, batch = self.tensor_keys, tensordict.get("next", None)
        batch = TensorDict() if batch is None else batch
        reward, done = batch.get(keys.reward, None), batch.get(keys.done, None)
        if reward is None or done is None:
            fix = "Collectors write it; other names are given with gae.set_keys(...)."
            reward = get_tensor(tensordict, ("next", keys.reward), fix=fix)
            done = get_tensor(tensordict, ("next", keys.done), fix=fix)
        terminated = batch.get(keys.terminated, done)
        check_float(("next", keys.reward), reward)
        check_bool(("next", keys.done), done)
        check_bool(("next", keys.terminated), terminated)
        check_truncated(batch, done, keys.done)
        return reward, done, terminated

    def _values(
        self,
        tensordict: TensorDictBase,
        params: TensorDictBase | None,
        target_params: TensorDictBase | None,
        dim: int,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return V(s_t), V(s_{t+1}), and which frames torchrl's budget keeps; None means all."""
        key = self.tensor_keys.value
        if self.value_network is None:
            fix = "There is no value_network to compute it: pass one, or store the values."
            value = get_tensor(tensordict, key, fix=fix)
            return value, get_tensor(tensordict, ("next", key), fix=fix), None
        if is_recurrent(self.value_network):
            check_states(self.value_network, tensordict, dim)
        with self._value_network_context(params, target_params):
            if self._one_pass_is_exact(tensordict, target_params):
                return *self._one_pass(self.value_network, tensordict, params, dim, mask), None
            if params is not None:
                params = params.detach()
                assert params is not None
                if target_params is None and not self.shifted:
                    target_params = params.clone(False)
            return self._call_value_nets(
                data=tensordict.copy(),
                params=params,  # pyright: ignore[reportArgumentType]
                next_params=target_params,  # pyright: ignore[reportArgumentType]
                single_call=bool(self.shifted),
                value_key=key,
                detach_next=True,
                vmap_randomness=str(self.vmap_randomness),
            )

    def _one_pass_is_exact(
        self, tensordict: TensorDictBase, target_params: TensorDictBase | None
    ) -> bool:
        multi_step = get_if_any(tensordict, self.tensor_keys.steps_to_next_obs) is not None
        return not (
            self.shifted is not None
            or target_params is not None
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
        keys = self.tensor_keys
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
            inputs = tensordict.select(*network.in_keys, strict=False)
            chunks = self._split_value_net_input(inputs)
            value = self._evaluate(network, chunks, self._resolve_value_chunk_dim(inputs.ndim))
            following = value.detach().roll(-1, dim)
            # How many steps stand on their own, a graph cannot know: it evaluates them all.
            steps = None if torch.compiler.is_compiling() else alone.nonzero(as_tuple=True)
            if steps is None or len(steps[0]):
                inputs = bootstrap_inputs(tensordict, steps, network)
                own = self._evaluate(network, inputs.split(chunks[0].batch_size.numel()), 0)
                own = own.detach().to(value.dtype)
                if steps is None:
                    alone = self._expand_to_match(alone, value)
                    following = torch.where(alone, own.reshape(value.shape), following)
                else:
                    following[steps] = own.reshape(-1, *value.shape[tensordict.ndim :])
        return value, following.masked_fill(self._expand_to_match(terminated, value), 0)

    def _evaluate(
        self, network: TensorDictModule, chunks: Sequence[TensorDictBase], dim: int
    ) -> Tensor:
        values = [network(chunk).get(self.tensor_keys.value) for chunk in chunks]
        return values[0] if len(values) == 1 else torch.cat(values, dim)

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
