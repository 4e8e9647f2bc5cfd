"""The values of GAE: from the batch, from one pass of the value network, or from torchrl's two.

The steps that no later step observes are the last one and the truncated. Terminated steps have no
value after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, set_skip_existing
from tensordict.nn import skip_existing as skip_existing_outputs
from tensordict.utils import expand_as_right, unravel_key
from torch import Tensor
from torchrl.objectives.utils import hold_out_net

from ppokit._keys import (
    check_flags,
    check_stored,
    get_if_any,
    get_tensor,
    is_init,
    is_recurrent,
    last_valid_steps,
    per_frame,
    state_keys,
    stored_keys,
)
from ppokit.functional import _checks
from ppokit.functional._checks import check_float


def read_signals(gae: Any, tensordict: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
    """Return reward, done and terminated of a batch."""
    fix = "Collectors write it; other names are given with gae.set_keys(...)."
    keys = gae.tensor_keys
    reward = get_tensor(tensordict, ("next", keys.reward), fix=fix)
    done = get_tensor(tensordict, ("next", keys.done), fix=fix)
    terminated = tensordict.get(("next", keys.terminated), done)
    check_float(("next", keys.reward), reward)
    check_flags(("next", keys.done), done)
    check_flags(("next", keys.terminated), terminated)
    return reward, done, terminated


def of_agents(gae: Any, value: Tensor, *signals: Tensor) -> tuple[Tensor, ...]:
    """Return signals of the team ``[*B, T, 1]`` for each agent of a value ``[*B, T, A, 1]``."""
    if value.ndim < 2 or all(x.ndim == value.ndim for x in signals):
        return signals
    dim = -2 if gae.agent_dim is None else gae.agent_dim
    of_one = value.select(dim, 0).shape
    return tuple(x.unsqueeze(dim).expand_as(value) if x.shape == of_one else x for x in signals)


def values_of(
    gae: Any,
    tensordict: TensorDictBase,
    params: TensorDictBase | None,
    target_params: TensorDictBase | None,
    dim: int,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return V(s_t), V(s_{t+1}), and which frames torchrl's budget keeps; None means all."""
    key = gae.tensor_keys.value
    if not gae.use_critic:
        return *_no_values(gae, tensordict, dim, mask), None
    if gae.value_network is None:
        fix = "There is no value_network to compute it: pass one, or store the values."
        value = get_tensor(tensordict, key, fix=fix)
        return value, get_tensor(tensordict, ("next", key), fix=fix), None
    if is_recurrent(gae.value_network):  # without a state it would start from zero, silently
        following = [unravel_key(("next", key)) for key in state_keys(gae.value_network)]
        check_stored(tensordict, [*stored_keys(gae.value_network), *following])
        if dim != tensordict.ndim - 1:
            raise ValueError(
                "Recurrent value networks run over the last dimension of a batch, and time is "
                f"dimension {dim} of {list(tensordict.batch_size)}: transpose the batch."
            )
    # A differentiable estimate passes gradients to its inputs, not to the value network.
    is_held_out = gae.differentiable and params is None and target_params is None
    is_multi_step = get_if_any(tensordict, gae.tensor_keys.steps_to_next_obs) is not None
    with (
        nullcontext() if gae.skip_existing is None else set_skip_existing(gae.skip_existing),
        hold_out_net(gae.value_network) if is_held_out else nullcontext(),
    ):
        needs_two = gae.shifted is not None or target_params is not None or is_multi_step
        if not (needs_two or skip_existing_outputs()):
            value, following = _one_pass(gae, tensordict, params, dim, mask)
            terminated = _ends_of_frames(gae, tensordict)[1]
            return value, following.masked_fill(expand_as_right(terminated, value), 0), None
        params = None if params is None else params.detach()
        if params is not None and target_params is None and not gae.shifted:
            target_params = params.clone(False)
        return gae._call_value_nets(
            data=tensordict.copy(),
            params=params,  # pyright: ignore[reportArgumentType]
            next_params=target_params,  # pyright: ignore[reportArgumentType]
            single_call=bool(gae.shifted),
            value_key=key,
            detach_next=True,
            vmap_randomness=str(gae.vmap_randomness),
        )


def _no_values(
    gae: Any, tensordict: TensorDictBase, dim: int, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return zeros for V(s_t) and V(s_{t+1}), unless a step needs a value after it."""
    keys = gae.tensor_keys
    reward, done = (tensordict.get(("next", key)) for key in (keys.reward, keys.done))
    terminated = tensordict.get(("next", keys.terminated), done)
    mask = None if mask is None else expand_as_right(mask, done)
    alone = unobserved_steps(done, terminated, mask, dim)
    if alone.any():
        first = alone.nonzero()[0, : tensordict.ndim].tolist()
        raise ValueError(
            f"{int(alone.sum())} trajectories are truncated or go on after the batch, the "
            f"first at step {first} of {list(tensordict.batch_size)}, and with "
            "use_critic=False there is no value to bootstrap from. Collect whole episodes "
            f"(trajs_per_batch=...) of an environment that sets {('next', keys.terminated)!r} "
            "at its time limit, if it has one, or pass a value_network."
        )
    return torch.zeros_like(reward), torch.zeros_like(reward)


def _ends_of_frames(gae: Any, tensordict: TensorDictBase) -> tuple[Tensor, Tensor]:
    """Return which frames are done, and which terminate, ``[*B, T]``."""
    keys = gae.tensor_keys
    done = tensordict.get(("next", keys.done))
    terminated = tensordict.get(("next", keys.terminated), done)
    # With several agents, each that is not terminated needs the value after the step.
    return per_frame(done, tensordict.ndim), ~per_frame(~terminated, tensordict.ndim)


def _one_pass(
    gae: Any,
    tensordict: TensorDictBase,
    params: TensorDictBase | None,
    dim: int,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return V(s_t) and V(s_{t+1})."""
    network: Any = gae.value_network
    parameters = nullcontext()
    if params is not None:
        parameters = params.detach().to_module(network, preserve_module_state=False)
    with parameters:
        inputs = tensordict.select(*network.in_keys, strict=False)
        chunks = gae._split_value_net_input(inputs)
        value = _evaluate(gae, chunks, gae.value_chunk_dim % inputs.ndim)
        following = value.detach().roll(-1, dim)
        alone = unobserved_steps(*_ends_of_frames(gae, tensordict), mask, dim)
        # A graph does not know the number of these steps: it evaluates all next observations.
        has_no_numbers = torch.compiler.is_compiling() or value.is_meta
        steps = None if has_no_numbers else alone.nonzero(as_tuple=True)
        if steps is None or len(steps[0]):
            inputs = bootstrap_inputs(tensordict, steps, network)
            own = _evaluate(gae, inputs.split(chunks[0].batch_size.numel()), 0)
            own = own.detach().to(value.dtype)
            if steps is None:
                alone = expand_as_right(alone, value)
                following = torch.where(alone, own.reshape(value.shape), following)
            else:
                own = own.reshape(-1, *value.shape[tensordict.ndim :])
                _check_finite(gae, tensordict, own, steps)
                following[steps] = own
    return value, following


def _check_finite(
    gae: Any, tensordict: TensorDictBase, own: Tensor, steps: tuple[Tensor, ...]
) -> None:
    """Raise, on the CPU, where a value that a step bootstraps from is not finite."""
    if not _checks.reads_are_free(own.device) or own.isfinite().all():
        return
    ends = tensordict.get(("next", gae.tensor_keys.terminated), None)
    ends, bad = None if ends is None else ends[steps], ~own.isfinite()
    if ends is not None and ends.shape == bad.shape:
        bad &= ~ends  # an agent that is terminated does not bootstrap
    bad = bad.flatten(1).any(1)
    if bad.any():
        raise ValueError(
            f"The value of the next observation is NaN or infinite after {int(bad.sum())} steps "
            "that bootstrap from it (the last of a row, or truncated), the first at "
            f"{[int(index[bad][0]) for index in steps]}. Return the true final observation from "
            "the environment; with torchrl's NextStateReconstructor, collect with "
            "compact_obs=False."
        )


def _evaluate(gae: Any, chunks: Sequence[TensorDictBase], dim: int) -> Tensor:
    fix = "It is what the value network writes: name it with gae.set_keys(value=...)."
    key = gae.tensor_keys.value
    # a network may work in place, and the batch is the user's
    values = [get_tensor(gae.value_network(chunk.clone()), key, fix=fix) for chunk in chunks]
    return values[0] if len(values) == 1 else torch.cat(values, dim)


def unobserved_steps(done: Tensor, terminated: Tensor, mask: Tensor | None, dim: int) -> Tensor:
    """Return True where the observation after t is not that at t+1, and its value counts."""
    if mask is not None:
        return mask & ~terminated & (done | last_valid_steps(mask, dim))
    ends = done.clone()
    ends.select(dim, -1).fill_(True)
    return ends & ~terminated


def bootstrap_inputs(
    tensordict: TensorDictBase, steps: tuple[Tensor, ...] | None, network: TensorDictModule
) -> TensorDictBase:
    """Return the value network's inputs after the steps of an index, flat, or (None) after all."""
    batch_size = tensordict.batch_size if steps is None else steps[0].shape
    following, inputs = tensordict.get("next"), TensorDict({}, batch_size)
    states = state_keys(network) if is_recurrent(network) else []
    observed = False
    for key in network.in_keys:
        before, after = tensordict.get(key, None), following.get(key, None)
        # Inputs that no step changes (a task id, say) need not be repeated under "next".
        found = before if after is None else after
        if found is None:
            continue
        observed |= after is not None and key not in states
        found = found if steps is None else found[steps]
        inputs.set(key, found)
    if not observed and not inputs.is_empty():
        raise KeyError(
            f"None of the value network's inputs {network.in_keys} is under 'next', and "
            f"{inputs.numel()} steps bootstrap from their own next observation. Collect with "
            "compact_obs=False."
        )
    if is_recurrent(network):  # sequences of one step, which go on from the state before it
        inputs = inputs.unsqueeze(-1)
        for key in filter(is_init, network.in_keys):
            inputs.set(key, torch.zeros_like(inputs.get(key)))
    return inputs
