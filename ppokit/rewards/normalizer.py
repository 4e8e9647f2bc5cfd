"""Reward scaling by the spread of the discounted return."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Bounded, Composite, TensorSpec, Unbounded
from torchrl.envs import EnvBase, Transform

from ppokit._keys import (
    MASK_KEY,
    TRAJ_KEY,
    as_key,
    check_shapes,
    get_tensor,
    time_dim,
    valid_mask,
)
from ppokit.functional._checks import check_bool, check_float, check_range
from ppokit.rewards.returns import as_stream, countable, masked_moments, scan_all, scan_valid
from ppokit.rewards.statistics import ReturnStatistics
from ppokit.rewards.trajectories import carry_in, carry_out, trajectory_ids


class RewardNormalizer(ReturnStatistics):
    r"""Divides the reward by the spread of the discounted return; never subtracts a mean.

    .. math::
        R_t &= r_t + \gamma (1 - done_{t-1}) R_{t-1} \\
        r'_t &= \mathrm{clip}(r_t / \sigma, -clip, clip)

    where :math:`\sigma` is, with ``statistics="running"``,
    :math:`\sqrt{\mathrm{Var}(R) + \epsilon}` over all returns seen so far (population variance in
    float64, merged batch by batch; the rule of Stable-Baselines3's VecNormalize), and with
    ``"batch"``, :math:`\mathrm{std}(R) + \epsilon` over the returns of this batch (unbiased; rl8's
    rule). R is the "reversed discounted return" of Engstrom et al., 2020, arXiv:2005.12729,
    Algorithm 1. Returns without any spread (constant, or a single one) leave the reward as it is,
    within ``clip``.

    One object serves

    - as a plain call on a collected batch ``[*B, T]``, and as a collector's ``postproc``;
    - in a :class:`torchrl.envs.TransformedEnv`, step by step;
    - in a replay buffer: statistics move when data is written, never when it is sampled.

    R belongs to a trajectory. It continues from one batch to the next where the trajectory ids say
    so (those of Collector, MultiSyncCollector and MultiAsyncCollector can be trusted; pass
    ``traj_key=None`` for others), and starts from zero elsewhere. It is zeroed after any ``done``,
    once the terminal reward is in it.

    Args:
        gamma: discount in [0, 1], usually GAE's.
        statistics: ``"running"`` or ``"batch"``.
        clip: bound on the scaled reward, or None.
        epsilon: added to the variance ("running") or to the standard deviation ("batch").
        reward_key: the reward, written in place of the raw one. Keys are given as in a batch; in an
            environment the leading ``"next"`` is dropped.
        raw_key: where the raw reward is kept. A batch that holds it is normalised already: it is
            returned untouched when sampled, and refused when offered for training.
        done_key: the end of a trajectory.
        mask_key: the mask of valid frames; others are left out of the statistics.
        traj_key: trajectory ids; None cuts R at the start of every batch.
        nonfinite: ``"raise"``, or ``"ignore"`` to leave non-finite rewards out of the statistics.

    ``freeze()`` stops the statistics, ``unfreeze()`` lets them move again. ``eval()`` does not stop
    them, because TorchRL puts every transform that it attaches in eval mode.

    Raises:
        KeyError: a key is missing.
        TypeError: the reward is not float, or done is not bool.
        ValueError: shapes differ, the batch is empty, rewards are not finite, the time order is
            unknown or lost, or the batch is normalised already. Nothing has been changed then.

    Example:
        >>> from tensordict import TensorDict
        >>> batch = TensorDict({"next": {
        ...     "reward": torch.tensor([[[1.0], [3.0], [5.0]]]),
        ...     "done": torch.zeros(1, 3, 1, dtype=torch.bool)}}, [1, 3])
        >>> normalizer = RewardNormalizer(gamma=0.0)  # the returns are the rewards: variance 8/3
        >>> normalizer(batch)["next", "reward"].flatten()
        tensor([0.6124, 1.8371, 3.0619])
    """

    open_ids: Tensor
    open_returns: Tensor
    env_returns: Tensor

    def __init__(
        self,
        gamma: float = 0.99,
        *,
        statistics: str = "running",
        clip: float | None = 10.0,
        epsilon: float = 1e-8,
        reward_key: NestedKey = ("next", "reward"),
        raw_key: NestedKey = ("next", "raw_reward"),
        done_key: NestedKey = ("next", "done"),
        mask_key: NestedKey = MASK_KEY,
        traj_key: NestedKey | None = TRAJ_KEY,
        nonfinite: str = "raise",
    ) -> None:
        check_range("gamma", gamma, 0, 1, consequence="returns would grow without bound.")
        if nonfinite not in ("raise", "ignore"):
            raise ValueError(f"nonfinite must be 'raise' or 'ignore', got {nonfinite!r}.")
        super().__init__(statistics, clip, epsilon)
        self.gamma = gamma
        self.nonfinite = nonfinite
        self._reward_key, self.raw_key = as_key(reward_key), as_key(raw_key)
        self._done_key, self.mask_key = as_key(done_key), as_key(mask_key)
        self.traj_key = None if traj_key is None else as_key(traj_key)
        # The last rewards written, by which a collector's reuse of its buffers is noticed.
        self._written: tuple[Tensor, int] | None = None
        # R of the trajectories that the last batches left open, and their ids.
        self.register_buffer("open_ids", torch.zeros(0, dtype=torch.int64))
        self.register_buffer("open_returns", torch.zeros(0, dtype=torch.float64))
        # R of the environments of a TransformedEnv; empty before its first reset.
        self.register_buffer("env_returns", torch.zeros(0, dtype=torch.float64))

    # -- on batches: plain call, postproc, replay buffer ----------------------

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Normalise a batch ``[*B, T]``, and move the statistics.

        A replay buffer calls this on what it samples, with this module in eval mode: what holds the
        raw reward is then returned untouched.
        """
        if not self.training and self._is_normalized(tensordict, self._reward_key, self.raw_key):
            return tensordict
        return self._normalize_batch(tensordict)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        # Transform.inv and Compose.inv come here with a shallow copy: on the way into a replay
        # buffer, or with an action on the way into an environment.
        return tensordict if self._in_environment else self._normalize_batch(tensordict)

    def _normalize_batch(self, tensordict: TensorDictBase) -> TensorDictBase:
        dim = time_dim(tensordict, who="RewardNormalizer")
        reward, done = self._signals(tensordict, self._reward_key, self._done_key, self.raw_key)
        if reward.ndim == tensordict.ndim:
            raise ValueError(
                f"{self._reward_key!r} has the shape of the batch, {list(reward.shape)}; the "
                "convention is [*B, T, 1]. Add the trailing dimension with .unsqueeze(-1)."
            )
        mask = valid_mask(tensordict, self.mask_key)
        ids = trajectory_ids(tensordict, self.traj_key, done, dim, mask)
        stream = partial(as_stream, batch_ndim=tensordict.ndim, dim=dim)
        rewards, ended = stream(reward), stream(done)
        initial, elsewhere = None, None
        if ids is not None and self.traj_key is not None:
            held = (self.open_ids, self.open_returns)
            first_valid = None if mask is None else mask.select(dim, 0)
            initial, elsewhere = carry_in(
                held, ids.select(-1, 0), first_valid, rewards.shape[-1], key=self.traj_key
            )
        moments, ends = None, None
        if mask is None:
            moments, ends = scan_all(rewards, ended, ids, initial, self.gamma)
        if moments is None or not all(map(math.isfinite, moments)):
            counted = stream(countable(reward, mask, self._reward_key, self.nonfinite))
            frames = torch.ones_like(ended) if mask is None else mask.movedim(dim, -1).unsqueeze(-1)
            moments, ends = scan_valid(
                *(rewards, ended, ids, initial, self.gamma), frames=frames, counted=counted
            )
        tensordict.set(self.raw_key, reward)  # raises if the batch is locked: before any change
        self._move_statistics(moments)
        if ends is not None and elsewhere is not None:
            open_ids, open_returns = carry_out(ends, elsewhere)
            self._buffers.update(open_ids=open_ids, open_returns=open_returns)
        scaled = self._scaled(reward)
        tensordict.set(self._reward_key, scaled)
        self._written = (scaled, _version(scaled))
        return tensordict

    # -- in an environment, step by step ---------------------------------------

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        if self.statistics == "batch":
            raise ValueError(
                "statistics='batch' needs a whole batch, and an environment gives one step at a "
                "time. Use statistics='running', or call the normalizer on the collected batch."
            )
        batch_keys = (self._reward_key, self._done_key, self.raw_key)
        reward_key, done_key, raw_key = map(self._env_key, batch_keys)
        reward, done = self._signals(next_tensordict, reward_key, done_key, raw_key)
        valid = countable(reward, None, reward_key, self.nonfinite)
        clean = torch.where(valid, reward, 0).double()
        held = self.env_returns
        held = held.to(clean.device) if held.shape == clean.shape else torch.zeros_like(clean)
        returns = clean + self.gamma * held
        self._move_statistics(masked_moments(returns, valid))
        self.env_returns = torch.where(done, 0, returns)
        next_tensordict.set(raw_key, reward)
        next_tensordict.set(reward_key, self._scaled(reward))
        return next_tensordict

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        done_key = self._env_key(self._done_key)
        own = (*done_key[:-1], "_reset") if isinstance(done_key, tuple) else "_reset"
        reset = tensordict.get(own, tensordict.get("_reset", None))
        if reset is None:
            self.env_returns = torch.zeros_like(self.env_returns)
        elif self.env_returns.numel():
            reset = reset.reshape(reset.shape + (1,) * (self.env_returns.ndim - reset.ndim))
            self.env_returns = torch.where(reset.to(self.env_returns.device), 0, self.env_returns)
        return tensordict_reset

    def transform_reward_spec(self, reward_spec: TensorSpec) -> TensorSpec:
        """Add the raw reward; the scaled one is bounded by ``clip``."""
        assert isinstance(reward_spec, Composite)
        reward_key, raw_key = self._env_key(self._reward_key), self._env_key(self.raw_key)
        raw = reward_spec[reward_key]
        reward_spec[raw_key] = raw.clone()
        reward_spec[reward_key] = (
            Unbounded(shape=raw.shape, dtype=raw.dtype, device=raw.device)
            if self.clip is None
            else Bounded(-self.clip, self.clip, shape=raw.shape, dtype=raw.dtype, device=raw.device)
        )
        return reward_spec

    def _signals(
        self, tensordict: TensorDictBase, reward_key: NestedKey, done_key: NestedKey, raw: NestedKey
    ) -> tuple[Tensor, Tensor]:
        if self._is_normalized(tensordict, reward_key, raw):
            raise ValueError(
                f"The batch holds {raw!r}: its reward is normalised already, by another "
                "RewardNormalizer or by an earlier call of this one. Keep one of them, in the "
                "environment or on the batch."
            )
        fix = "Environments and collectors write it; other names are given at construction."
        reward = get_tensor(tensordict, reward_key, fix=fix)
        done = get_tensor(tensordict, done_key, fix=fix)
        check_float(repr(reward_key), reward)
        check_bool(repr(done_key), done)
        check_shapes({reward_key: reward, done_key: done})
        return reward, done

    def _is_normalized(
        self, tensordict: TensorDictBase, reward_key: NestedKey, raw: NestedKey
    ) -> bool:
        if tensordict.get(raw, None) is None:
            return False
        # A collector hands its postproc the same TensorDict for every batch, and writes the new
        # rewards into the tensor that was put there: what the raw key holds then is a leftover.
        reward = tensordict.get(reward_key, None)
        return (
            self._written is None
            or reward is not self._written[0]
            or _version(reward) == self._written[1]
        )

    @property
    def in_keys(self) -> list[NestedKey]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Reward and done, as they are called where the normalizer stands."""
        return [self._env_key(key) for key in (self._reward_key, self._done_key)]

    @property
    def out_keys(self) -> list[NestedKey]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Scaled and raw reward, as they are called where the normalizer stands."""
        return [self._env_key(key) for key in (self._reward_key, self.raw_key)]

    @property
    def _in_environment(self) -> bool:
        # Transform.container raises where the outermost holder is a replay buffer.
        holder: Any = self
        while isinstance(holder, Transform):
            reference = holder.__dict__.get("_container")
            holder = None if reference is None else reference()
        return isinstance(holder, EnvBase)

    def _env_key(self, key: NestedKey) -> NestedKey:
        return as_key(key[1:]) if self._in_environment and key[0] == "next" else key

    def __getstate__(self) -> dict[str, Any]:
        # A copy stands in no collector yet, and need not carry a batch's rewards along.
        return {**super().__getstate__(), "_written": None}

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(gamma={self.gamma}, statistics={self.statistics!r}, "
            f"clip={self.clip}, scale={self.scale.item():.4g}, count={int(self.count)})"
        )


def _version(tensor: Tensor) -> int:
    """How often the tensor was written in place; not known of inference tensors."""
    return 0 if tensor.is_inference() else tensor._version
