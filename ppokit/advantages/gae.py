"""Generalised advantage estimation as a drop-in for torchrl's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, dispatch, set_skip_existing
from tensordict.nn import skip_existing as skip_existing_outputs
from tensordict.utils import NestedKey, expand_as_right, unravel_key
from torch import Tensor
from torchrl.modules import set_recurrent_mode
from torchrl.objectives.utils import hold_out_net
from torchrl.objectives.value import GAE as TorchRLGAE  # noqa: N811

from ppokit._batch import (
    MASK_KEY,
    TRAJ_KEY,
    State,
    as_key,
    check_critic,
    check_flags,
    check_not_cut,
    check_shapes,
    check_stored,
    check_trajectories,
    check_writable,
    copy_frames,
    get_if_any,
    get_tensor,
    in_keys_of,
    in_parts,
    is_init,
    is_of_transformer,
    is_recurrent,
    last_valid_steps,
    memories_in,
    memory_at,
    per_frame,
    state_keys,
    steps_key,
    stored_keys,
    takes_tensordict,
    valid_mask,
)
from ppokit._batch import time_dim as find_time_dim
from ppokit._calls import explain, shapes_of
from ppokit._checks import choice
from ppokit._state import WholeState, apply_without_cast
from ppokit.functional import _checks, gae
from ppokit.functional._checks import check_float, check_range

_DISCOUNT = "advantages would grow without bound, or change sign at every step."
_OF_AGENTS = (
    "With several agents the value and the entries of their group are [*B, T, agents, 1]; "
    "rewards and flags of the team, [*B, T, 1], are expanded to the agents. For one value of the "
    "team, let the reward be the team's, too: the sum or the mean over the agents."
)


class GAE(WholeState, TorchRLGAE):
    r"""Generalised advantage estimation with one pass of the value network.

    .. math::
        \delta_t &= r_t + \gamma (1 - terminated_t) V(s'_t) - V(s_t) \\
        A_t &= \delta_t + \gamma \lambda (1 - done_t) A_{t+1}

    (Schulman et al., 2016, arXiv:1506.02438.) Arguments, keys and results are those of
    :class:`torchrl.objectives.value.GAE`, with these differences:

    - ``shifted=None``, the default, evaluates the value network on the T observations, and once
      more on the few that no later step observes: the last step's and each truncation's next
      observation. No frame is ever dropped. ``False`` is torchrl's two passes over all
      observations; they are also used with ``steps_to_next_obs`` and with target parameters, where
      the value after t is not the network's at t+1. ``True`` is torchrl's one pass with a budget:
      it drops what truncations displace, and says which frames are left in ``"shifted_valid"``.
      In a graph of :func:`torch.compile`, where their number is not known, the steps that no later
      step observes are not picked out: the network then sees all next observations too.
    - Recurrent value networks (those that read ``"is_init"``) go on from the states stored in the
      batch; a batch without them raises KeyError. ``shifted`` has no effect on them: torchrl's
      passes over next observations would carry states across the ends of episodes.
    - A step that is terminated does not bootstrap, also if it is truncated as well; the value at
      ``("next", value)`` is 0 there.
    - Discounts are kept in float64, so float64 data gives float64 results.
    - Frames that ``("collector", "mask")`` excludes are never read; advantage and target are 0
      there, and a row's last valid step is treated like the last step.
    - ``vectorized`` has no effect: nothing loops over time.
    - Beside values of several agents ``[*B, T, A, 1]`` rewards and flags may be those of the team
      ``[*B, T, 1]``: they are expanded, as in :class:`torchrl.objectives.value.MultiAgentGAE`. An
      agent that ends alone ends its own trajectory.
    - ``use_critic=False`` is for a policy without a critic: all values are 0, and with ``lmbda=1``
      the advantage is the discounted reward-to-go. A trajectory that is truncated, or that goes
      on after the batch, raises: it has no value to bootstrap from.

    Args:
        gamma: discount in [0, 1].
        lmbda: trace decay in [0, 1].
        value_network: module that writes the value of an observation; None if the batch holds
            ``"state_value"`` and ``("next", "state_value")``, or with ``use_critic=False``.
        average_gae: standardize the advantage over the valid frames, and over all agents unless
            ``agent_dim`` is given.
        agent_dim: the dimension of the agents in the value, -2 in ``[*B, T, A, 1]``; the advantage
            is then standardized for each agent alone, as in ``MultiAgentGAE``.
        use_critic: False, as above; ``value_network`` must be None and ``lmbda`` 1.
        shifted: None, False or True, as above.
        mask_key: the mask of valid frames. ``set_keys(valid=key)``, from torchrl 0.15 on, names a
            second one, which must be in the batch: a frame is valid where both are True.
        traj_key: trajectory ids; one that changes without a done raises ValueError.
        **kwargs: torchrl's further arguments. ``value_chunk_size`` evaluates so many frames at a
            time, which bounds the memory of activations; of a recurrent network, and with
            ``shifted`` given, so many rows, as in torchrl. Without it a batch is evaluated in parts
            of 8 MiB of observations on the CPU, which stay in its cache, and of 512 MiB on other
            devices; by recurrent networks at once.

    Raises:
        KeyError: a key is missing; the message names it and what the batch holds.
        TypeError: the reward is not float, or a flag is not bool.
        ValueError: shapes differ, the batch is empty, a discount lies outside [0, 1], the time
            order is unknown or lost, or there is no critic and a trajectory does not terminate.

    Example:
        >>> from ppokit import GAE, GymCollector
        >>> from ppokit.networks import actor_critic
        >>> actor, critic = actor_critic("CartPole-v1")
        >>> gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
        >>> with GymCollector("CartPole-v1", actor, frames_per_batch=10, num_envs=2) as collector:
        ...     gae(collector.rollout())["advantage"].shape
        torch.Size([2, 5, 1])
    """

    gamma: Tensor
    lmbda: Tensor
    shifted = choice(None, True, False)
    use_critic = True

    def __init__(
        self,
        *,
        gamma: float | Tensor,
        lmbda: float | Tensor,
        value_network: TensorDictModule | None,
        average_gae: bool = False,
        agent_dim: int | None = None,
        use_critic: bool = True,
        shifted: bool | None = None,
        mask_key: NestedKey = MASK_KEY,
        traj_key: NestedKey = TRAJ_KEY,
        **kwargs: Any,
    ) -> None:
        self.check_state({"gamma": gamma, "lmbda": lmbda})
        check_critic(value_network)
        if not use_critic and (value_network is not None or lmbda != 1):
            raise ValueError(
                "use_critic=False is the discounted reward-to-go: pass value_network=None and "
                f"lmbda=1.0 with it, got lmbda={float(lmbda)} and "
                f"{'no' if value_network is None else 'a'} value_network."
            )
        super().__init__(
            gamma=torch.as_tensor(gamma, dtype=torch.float64),
            lmbda=torch.as_tensor(lmbda, dtype=torch.float64),
            value_network=value_network,
            average_gae=average_gae,
            shifted=shifted,  # pyright: ignore[reportArgumentType]
            **kwargs,
        )
        self.agent_dim, self.use_critic = agent_dim, use_critic
        self.mask_key = as_key(mask_key)
        self.traj_key = as_key(traj_key)
        if value_network is not None and is_recurrent(value_network) and not shifted:
            self.deactivate_vmap = True  # control flow over episode starts does not vmap

    def check_state(self, state: State) -> None:
        """Raise a ValueError if gamma or lambda is not in [0, 1], or lambda is to be 1."""
        for name in state.keys() & {"gamma", "lmbda"}:
            check_range(name, state[name], 0, 1, consequence=_DISCOUNT)
        if not self.use_critic and state.get("lmbda", 1) != 1:
            raise ValueError(f"With use_critic=False lmbda must be 1, got {state['lmbda']}.")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("gamma", "lmbda") and not isinstance(value, Tensor):
            self.check_state({name: value})
            value = torch.as_tensor(value, dtype=torch.float64)
        super().__setattr__(name, value)

    @takes_tensordict
    @dispatch  # pyright: ignore[reportArgumentType]
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        tensordict: TensorDictBase,
        *,
        params: TensorDictBase | None = None,
        target_params: TensorDictBase | None = None,
        time_dim: int | None = None,
    ) -> TensorDictBase:
        """Write the advantage, the value target, and the values they were made of.

        Args:
            tensordict: a batch ``[*B, T]``.
            params: parameters for a functional value network.
            target_params: parameters for the value of the next observation.
            time_dim: the time dimension; trusted if given.
        """
        if not torch.compiler.is_compiling():
            keys = self.tensor_keys
            written = [keys.advantage, keys.value_target, keys.value, ("next", keys.value)]
            check_writable(tensordict, written, who="GAE")
        advantage, target, mask = self._estimate(tensordict, params, target_params, time_dim)
        if self.average_gae:
            key, dim, fix = self.group_key, self.agent_dim, "GAE(group_key=...) names it."
            groups = None if key is None else get_tensor(tensordict, key, fix=fix)
            each = [advantage] if dim is None else advantage.unbind(dim)
            each = [self._standardize(one, mask, groups) for one in each]
            advantage = each[0] if dim is None else torch.stack(each, dim)
        if mask is not None:
            padding = ~expand_as_right(mask, advantage)
            advantage, target = (x.masked_fill(padding, 0) for x in (advantage, target))
        tensordict.set(self.tensor_keys.advantage, advantage)
        tensordict.set(self.tensor_keys.value_target, target)
        return tensordict

    def value_estimate(
        self,
        tensordict: TensorDictBase,
        params: TensorDictBase | None = None,
        target_params: TensorDictBase | None = None,
        time_dim: int | None = None,
        **kwargs: object,
    ) -> Tensor:
        """Return the value target alone."""
        return self._estimate(tensordict, params, target_params, time_dim)[1]

    def _estimate(
        self,
        tensordict: TensorDictBase,
        params: TensorDictBase | None,
        target_params: TensorDictBase | None,
        time_dim: int | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if time_dim is None and self.time_dim is None:
            dim = find_time_dim(tensordict, who="GAE")
        else:
            dim = self._get_time_dim(time_dim, tensordict)
        keys = self.tensor_keys
        mask = self._mask(tensordict)
        reward, done, terminated = self._signals(tensordict)
        gamma, lmbda = (x.to(reward.device, non_blocking=True) for x in (self.gamma, self.lmbda))
        steps = get_if_any(tensordict, keys.steps_to_next_obs)
        if steps is not None and steps.numel() == reward.numel():
            steps = steps.view_as(reward)

        with torch.set_grad_enabled(self.differentiable):
            check_trajectories(tensordict, done, dim, mask=mask, key=self.traj_key)
            try:
                value, next_value, kept = self._values(tensordict, params, target_params, dim, mask)
            except (KeyError, RuntimeError, ValueError) as error:
                explain(error, "The value network", shapes_of(tensordict), self.value_network)
                raise
            signals = [x for x in (reward, done, terminated, steps) if x is not None]
            signals = self._of_agents(value, next_value, signals, tensordict.ndim)
            reward, done, terminated, *_ = signals
            if steps is not None:
                gamma = gamma ** signals[-1]
            if self.value_network is not None:
                tensordict.set(keys.value, value)
                tensordict.set(("next", keys.value), next_value)
            if kept is not None:
                tensordict.set("shifted_valid", kept)
                mask = kept if mask is None else mask & kept
            if self.auto_reset_env:
                # The observation after an episode is the next episode's: V(s_t) stands in for it.
                next_value = torch.where(done, value, next_value)
            if mask is not None:
                # Padding becomes zeros that end their own trajectory: nothing leaks out of it.
                padding = expand_as_right(~mask, reward)
                last = expand_as_right(last_valid_steps(mask, dim), done)
                found = (reward, value, next_value)
                reward, value, next_value = (x.masked_fill(padding, 0) for x in found)
                done = done | padding | last
            data = (reward, value, next_value, done, terminated)
            advantage, target = gae(*data, gamma=gamma, lmbda=lmbda, dim=dim - reward.ndim)
        return advantage, target, mask

    def _of_agents(
        self, value: Tensor, next_value: Tensor, signals: Sequence[Tensor], ndim: int
    ) -> Sequence[Tensor]:
        """Return the signals of a batch of ``ndim`` dimensions in the shape of its values."""
        keys = self.tensor_keys
        agents = range(ndim, value.ndim - 1)  # dimensions of agents
        if self.agent_dim is not None and self.agent_dim % value.ndim not in agents:
            raise ValueError(
                f"agent_dim={self.agent_dim} is no dimension of agents: {keys.value!r} has "
                f"shape {list(value.shape)}, and [*B, T, agents, 1] has -2. Leave it out for "
                "one agent."
            )
        if value.ndim >= 2 and any(x.ndim != value.ndim for x in signals):  # of the team
            dim = -2 if self.agent_dim is None else self.agent_dim
            team = value.select(dim, 0).shape
            signals = [x.unsqueeze(dim).expand_as(value) if x.shape == team else x for x in signals]
        names = [keys.value, ("next", keys.value), ("next", keys.reward), ("next", keys.done)]
        names += [("next", keys.terminated), keys.steps_to_next_obs]
        several = max(value.ndim, signals[0].ndim) > ndim + 1
        tensors = dict(zip(names, (value, next_value, *signals), strict=False))
        check_shapes(tensors, fix=_OF_AGENTS if several else None)
        return signals

    def _signals(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        """Return reward, done and terminated of a batch."""
        fix = "Collectors write it; other names are given with gae.set_keys(...)."
        keys = self.tensor_keys
        reward = get_tensor(tensordict, ("next", keys.reward), fix=fix)
        done = get_tensor(tensordict, ("next", keys.done), fix=fix)
        terminated = tensordict.get(("next", keys.terminated), done)
        check_float(("next", keys.reward), reward)
        check_flags(("next", keys.done), done)
        check_flags(("next", keys.terminated), terminated)
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
        if not self.use_critic:
            return *self._no_values(tensordict, dim, mask), None
        if self.value_network is None:
            fix = "There is no value_network to compute it: pass one, or store the values."
            value = get_tensor(tensordict, key, fix=fix)
            return value, get_tensor(tensordict, ("next", key), fix=fix), None
        if is_recurrent(self.value_network):  # without a state it would start from zero, silently
            keys = [x for x in state_keys(self.value_network) if not is_of_transformer(x)]
            following = [unravel_key(("next", key)) for key in keys]
            check_stored(tensordict, [*stored_keys(self.value_network), *following])
            if keys:
                check_not_cut(tensordict, who="GAE")
            if dim != tensordict.ndim - 1:
                raise ValueError(
                    "A recurrent value network needs time in the last dimension of a batch, and it "
                    f"is dimension {dim} of {list(tensordict.batch_size)}: transpose the batch."
                )
        # A differentiable estimate passes gradients to its inputs, not to the value network.
        is_held_out = self.differentiable and params is None and target_params is None
        is_multi_step = get_if_any(tensordict, self.tensor_keys.steps_to_next_obs) is not None
        with (
            nullcontext() if self.skip_existing is None else set_skip_existing(self.skip_existing),
            hold_out_net(self.value_network) if is_held_out else nullcontext(),
        ):
            if is_recurrent(self.value_network) and is_multi_step:
                raise ValueError(
                    "A recurrent value network has the state after one step in the batch, and "
                    f"{self.tensor_keys.steps_to_next_obs!r} skips several. Leave out multi-step "
                    "returns, or use a value network without a state."
                )
            needs_two = self.shifted is not None or target_params is not None or is_multi_step
            needs_two = needs_two or skip_existing_outputs()
            if is_recurrent(self.value_network) or not needs_two:
                value, following = self._one_pass(tensordict, params, target_params, dim, mask)
                terminated = self._ends_of_frames(tensordict)[1]
                return value, following.masked_fill(expand_as_right(terminated, value), 0), None
            has_next_value = get_if_any(tensordict, unravel_key(("next", key))) is not None
            if not (skip_existing_outputs() and has_next_value):
                self._check_following(tensordict, dim, mask, strict=not self.shifted)
            params = None if params is None else params.detach()
            if params is not None and target_params is None and not self.shifted:
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

    def _no_values(
        self, tensordict: TensorDictBase, dim: int, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return zeros for V(s_t) and V(s_{t+1}), unless a step needs a value after it."""
        keys = self.tensor_keys
        reward, done = (tensordict.get(("next", key)) for key in (keys.reward, keys.done))
        terminated = tensordict.get(("next", keys.terminated), done)
        mask = None if mask is None else expand_as_right(mask, done)
        alone = _unobserved_steps(done, terminated, mask, dim)
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

    def _one_pass(
        self,
        tensordict: TensorDictBase,
        params: TensorDictBase | None,
        target_params: TensorDictBase | None,
        dim: int,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return V(s_t) and V(s_{t+1})."""
        network: Any = self.value_network

        def holding(parameters: TensorDictBase | None) -> AbstractContextManager[Any]:
            if parameters is None:
                return nullcontext()
            return parameters.detach().to_module(network, preserve_module_state=False)

        with holding(params):
            inputs = tensordict.select(*network.in_keys, strict=False)
            if mask is not None and memories_in(inputs):
                inputs.set(MASK_KEY, mask)
            size = self.value_chunk_size
            has_rows = is_recurrent(network) or self.num_chunks is not None
            if has_rows or (size is None and torch.compiler.is_compiling()):
                chunks = self._split_value_net_input(inputs)
                value = self._evaluate(chunks, self.value_chunk_dim % inputs.ndim)
            else:
                chunks = in_parts(inputs, size)
                value = self._evaluate(chunks, 0)
                value = value if len(chunks) == 1 else value.unflatten(0, inputs.batch_size)
        following = value.detach().roll(-1, dim)
        alone = _unobserved_steps(*self._ends_of_frames(tensordict), mask, dim)
        if target_params is not None:  # other parameters: no later step has the value
            alone = torch.ones_like(alone) if mask is None else mask
        with holding(params if target_params is None else target_params):
            # A graph does not know the number of these steps: it evaluates all next observations.
            has_no_numbers = torch.compiler.is_compiling() or value.is_meta
            steps = None if has_no_numbers else alone.nonzero(as_tuple=True)
            if steps is None or len(steps[0]):
                self._check_following(tensordict, dim, mask)
                inputs = _bootstrap_inputs(tensordict, steps, network)
                own = self._evaluate(inputs.split(chunks[0].batch_size.numel()), 0)
                own = own.detach().to(value.dtype)
                if steps is None:
                    alone = expand_as_right(alone, value)
                    following = torch.where(alone, own.reshape(value.shape), following)
                else:
                    own = own.reshape(-1, *value.shape[tensordict.ndim :])
                    ends = tensordict.get(("next", self.tensor_keys.terminated), None)
                    _check_finite(own, steps, ends)
                    following[steps] = own
        return value, following

    def _check_following(
        self, tensordict: TensorDictBase, dim: int, mask: Tensor | None, *, strict: bool = False
    ) -> None:
        """Raise a KeyError where an input of the value network is missing under ``"next"``.

        Unless ``strict``, those that no step changes (a task id, say) may be missing, but not all.
        In a graph changes are not seen.
        """
        network = self.value_network
        inputs = {*map(as_key, in_keys_of(network))} - {*stored_keys(network)}
        inputs = {key: x for key in inputs if (x := get_if_any(tensordict, key)) is not None}
        missing = [key for key in inputs if get_if_any(tensordict.get("next"), key) is None]
        if missing and len(missing) < len(inputs) and not strict:
            ends = self._ends_of_frames(tensordict)[0]
            goes_on = ~ends if mask is None else mask & ~ends & ~last_valid_steps(mask, dim)
            is_known = not (ends.is_meta or torch.compiler.is_compiling())
            missing = [key for key in missing if is_known and _changes(inputs[key], goes_on, dim)]
        if missing:
            raise KeyError(
                f"The value network reads {missing}, which are not under 'next': there is no "
                "observation after a step. Collect with compact_obs=False, or store the values "
                "with GymCollector(value_network=...), and pass value_network=None here."
            )

    def _evaluate(self, chunks: Sequence[TensorDictBase], dim: int) -> Tensor:
        fix = "It is what the value network writes: name it with gae.set_keys(value=...)."
        key, network = self.tensor_keys.value, self.value_network
        assert network is not None
        in_rows = any(map(is_of_transformer, in_keys_of(network)))  # others go on from each state
        with set_recurrent_mode(True) if in_rows else nullcontext():
            # a network may work in place, and the batch is the user's
            found = [network(copy_frames(chunk)) for chunk in chunks]
        values = [get_tensor(x, key, fix=fix) for x in found]
        return values[0] if len(values) == 1 else torch.cat(values, dim)

    def _ends_of_frames(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return which frames are done, and which terminate, ``[*B, T]``."""
        keys = self.tensor_keys
        done = tensordict.get(("next", keys.done))
        terminated = tensordict.get(("next", keys.terminated), done)
        # With several agents, each that is not terminated needs the value after the step.
        return per_frame(done, tensordict.ndim), ~per_frame(~terminated, tensordict.ndim)

    @staticmethod
    def _normalize_shifted(shifted: bool | None) -> bool | None:  # pyright: ignore
        return shifted

    def _mask(self, tensordict: TensorDictBase) -> Tensor | None:
        """Return which frames are valid by both masks; None means all."""
        mask = valid_mask(tensordict, self.mask_key)
        key = getattr(self.tensor_keys, "valid", None)  # torchrl 0.14 has no such key
        if key is None:
            return mask
        get_tensor(tensordict, key, fix="It was named by gae.set_keys(valid=...).")
        valid = valid_mask(tensordict, as_key(key))
        return valid if mask is None or valid is None else mask & valid

    def _standardize(self, advantage: Tensor, mask: Tensor | None, groups: Tensor | None) -> Tensor:
        # With a mask torchrl 0.14 divides by n instead of n - 1: padding would change a result.
        valid = advantage
        if mask is not None and not mask.is_meta:  # tensors without numbers have no masked frames
            valid, groups = advantage[mask], None if groups is None else groups[mask]
        if not (mask is not None and torch.compiler.is_compiling()) and valid.numel() == 1:
            return advantage  # one frame has no standard deviation
        valid = self._normalize_advantage(valid, groups=groups)
        if mask is None:
            return valid
        is_valid = expand_as_right(mask, advantage)
        standardized = torch.zeros_like(advantage).masked_scatter(is_valid, valid)
        return torch.where(is_valid.sum() == 1, advantage, standardized)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GAE:
        return apply_without_cast(self, super()._apply, fn, recurse)


def _check_finite(own: Tensor, steps: tuple[Tensor, ...], ends: Tensor | None) -> None:
    """Raise, on the CPU, where a value that a step bootstraps from is not finite.

    ``ends`` are the frames that terminate, of all frames.
    """
    if not _checks.reads_are_free(own.device) or own.isfinite().all():
        return
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


def _unobserved_steps(done: Tensor, terminated: Tensor, mask: Tensor | None, dim: int) -> Tensor:
    """Return True where the observation after t is not that at t+1, and its value counts."""
    if mask is not None:
        return mask & ~terminated & (done | last_valid_steps(mask, dim))
    ends = done.clone()
    ends.select(dim, -1).fill_(True)
    return ends & ~terminated


def _changes(entry: Tensor | TensorDictBase, goes_on: Tensor, dim: int) -> bool:
    """Return whether an entry ``[*B, T, ...]`` differs between a frame and the one that follows."""
    if isinstance(entry, TensorDictBase):
        return any(_changes(x, goes_on, dim) for x in entry.values(True, True))
    x, follows = entry.movedim(dim, 0), goes_on.movedim(dim, 0)[:-1]
    return bool((per_frame(x[1:] != x[:-1], goes_on.ndim) & follows).any())


def _bootstrap_inputs(
    tensordict: TensorDictBase, steps: tuple[Tensor, ...] | None, network: TensorDictModule
) -> TensorDictBase:
    """Return the value network's inputs after the steps of an index, flat, or (None) after all."""
    batch_size = tensordict.batch_size if steps is None else steps[0].shape
    following, inputs = tensordict.get("next"), TensorDict({}, batch_size)
    for key in network.in_keys:
        after = following.get(key, None)
        # an entry that is missing after the steps is constant
        found = tensordict.get(key, None) if after is None else after
        if found is not None:
            inputs.set(key, found if steps is None else found[steps])
    for key in memories_in(tensordict.select(*network.in_keys, strict=False)):
        places = torch.arange(tensordict.numel(), device=tensordict.device).view(tensordict.shape)
        places = (places if steps is None else places[steps]).flatten()
        memory, count = memory_at(tensordict, key, places, after=1)
        inputs.set(key, memory.view(*batch_size, *memory.shape[1:]))
        inputs.set(steps_key(key), torch.stack([count, 0 * count], 1).view(*batch_size, 2))
    if is_recurrent(network):  # sequences of one step, which go on from the state before it
        inputs = inputs.unsqueeze(-1)
        for key in filter(is_init, network.in_keys):
            inputs.set(key, torch.zeros_like(inputs.get(key)))
    return inputs
