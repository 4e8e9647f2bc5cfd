"""Reward scaling by the standard deviation of the discounted return."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey, expand_as_right
from torch import Tensor
from torchrl.data import Bounded, TensorSpec, Unbounded
from torchrl.envs import EnvBase, Transform

from ppokit._batch import (
    MASK_KEY,
    TRAJ_KEY,
    State,
    StateDict,
    as_key,
    check_tensordict,
    check_writable,
    key_parts,
)
from ppokit._checks import Checked, choice, positive
from ppokit._state import WholeState, apply_without_cast
from ppokit.distributed import resolve_group
from ppokit.rewards.returns import (
    Measurement,
    Moments,
    RewardKeys,
    countable,
    measure,
    measure_together,
    merged,
    moments_of,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Self

MOST_WRITTEN = 64  # batches that are remembered
#: buffers of R with one entry for each trajectory or environment
_RESIZED = ("open_ids", "open_returns", "env_returns")


class RewardNormalizer(WholeState, Transform):
    r"""Divide the reward by the standard deviation of the discounted return.

    .. math::
        R_t &= r_t + \gamma (1 - done_{t-1}) R_{t-1} \\
        r'_t &= \mathrm{clip}(r_t / \sigma, -clip, clip)

    where :math:`\sigma` is, with ``statistics="running"``,
    :math:`\sqrt{\mathrm{Var}(R) + \epsilon}` over all returns seen so far (population variance in
    float64, merged batch by batch; the rule of Stable-Baselines3's VecNormalize), and with
    ``"batch"``, :math:`\mathrm{std}(R) + \epsilon` over the returns of this batch (unbiased; rl8's
    rule). R is the "reversed discounted return" of Engstrom et al., 2020, arXiv:2005.12729,
    Algorithm 1. No mean is subtracted. If all returns are equal, or there is one, the reward is
    only clipped.

    Use it

    - as a plain call on a collected batch ``[*B, T]``, as a collector's ``postproc``, and in
      :class:`~ppokit.PPOUpdate`;
    - in a :class:`torchrl.envs.TransformedEnv`, step by step;
    - in a replay buffer (``append_transform``, with ``invert=True`` or without): statistics move
      when data is written, never when it is sampled.

    R belongs to a trajectory. It continues in the next batch if the trajectory id does, and starts
    from zero otherwise. It is zeroed after any ``done``, after the terminal reward was added. The
    ids of Collector, MultiSyncCollector (without ``split_trajs``), MultiAsyncCollector and
    GymCollector can be trusted; pass ``traj_key=None`` for others. If ids repeat, call
    :meth:`reset_returns`.

    Args:
        gamma: discount in [0, 1], usually GAE's.
        statistics: ``"running"`` or ``"batch"``.
        clip: bound on the scaled reward, or None.
        epsilon: added to the variance ("running") or to the standard deviation ("batch").
        reward_key: the reward, written in place of the raw one. Keys are given as in a batch; in
            an environment the leading ``"next"`` is dropped. Its shape is ``[*B, T, 1]``, or
            ``[*B, T, agents, 1]``: agents share the statistics. For several rewards, use a
            normalizer for each.
        raw_key: where the raw reward is kept. A batch that holds it is normalized already: it is
            returned unchanged when sampled, and raises when written or trained on. None is the key
            beside the reward, as ``("next", "raw_reward")``.
        done_key: the end of a trajectory. None is the key beside the reward, or above it, as
            ``("next", "done")`` is for all agents. An end above is always read.
        mask_key: the mask of valid frames; others are left out of the statistics.
        traj_key: trajectory ids; None cuts R at the start of every batch.
        nonfinite: ``"raise"``, or ``"ignore"`` to leave non-finite rewards out of the statistics.
        group: ranks that share the statistics: each normalizes as many batches, and all freeze
            alike. None is the default group if ``torch.distributed`` is initialized.
            In an environment and while frozen nothing is exchanged.

    ``freeze()`` stops the statistics, ``unfreeze()`` lets them move again. ``eval()`` does not stop
    them, because TorchRL puts every transform that it attaches in eval mode. ``scale`` and
    ``count`` are float64 tensors ``[]``; ``moments`` also holds the mean and the sum of squared
    deviations. They stay on the CPU: rewards, flags and ids of a batch are copied there.

    Raises:
        KeyError: a key is missing.
        TypeError: the reward is not float, done is not bool, or ``group`` is none of this process.
        ValueError: shapes differ, the batch is empty, rewards are not finite, the time order is
            unknown or lost, or the batch is normalized already. Nothing has been changed then.
        RuntimeError: another rank raises, or the ranks' statistics differ.

    Example:
        >>> import torch, ppokit
        >>> from tensordict import TensorDict
        >>> done, reward = torch.zeros(1, 3, 1).bool(), torch.tensor([[[1.0], [3.0], [5.0]]])
        >>> batch = TensorDict({"next": {"reward": reward, "done": done}}, [1, 3])
        >>> normalizer = ppokit.RewardNormalizer(gamma=0.0)  # the returns are the rewards
        >>> normalizer(batch)["next", "reward"].flatten()
        tensor([0.6124, 1.8371, 3.0619])
    """

    requires_shared_write_state = True  # else each process would have statistics of its own
    gamma = Checked(lambda x: 0 <= x <= 1, "lie in [0, 1], or returns would not be bounded")
    statistics = choice("running", "batch")
    clip = positive(optional=True)
    epsilon = Checked(lambda x: 0 <= x < math.inf, "be a number of at least 0")
    nonfinite = choice("raise", "ignore")
    moments: Tensor  #: ``[4]``: count, mean, sum of squared deviations, scale
    frozen: Tensor
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
        raw_key: NestedKey | None = None,
        done_key: NestedKey | None = None,
        mask_key: NestedKey = MASK_KEY,
        traj_key: NestedKey | None = TRAJ_KEY,
        nonfinite: str = "raise",
        group: ProcessGroup | None = None,
    ) -> None:
        resolve_group(group)
        super().__init__()
        self.statistics, self.clip, self.epsilon = statistics, clip, epsilon
        self._keys = RewardKeys.of(reward_key, raw_key, done_key)
        self._env_keys = self._keys.in_environment()
        # Rewards and ends of the last batches, to notice that a collector uses its buffers again.
        self._written: deque[list[Any]] = deque(maxlen=MOST_WRITTEN)
        # Every change assigns a new tensor: clones and saved states never change with it.
        self.register_buffer("moments", torch.tensor([0.0, 0, 0, 1], dtype=torch.float64))
        self.register_buffer("frozen", torch.zeros((), dtype=torch.bool))
        self.gamma, self.nonfinite, self.group = gamma, nonfinite, group
        self.mask_key = as_key(mask_key)
        self.traj_key = None if traj_key is None else as_key(traj_key)
        # R of the trajectories that the last batches left open, and their ids.
        self.register_buffer("open_ids", torch.zeros(0, dtype=torch.int64))
        self.register_buffer("open_returns", torch.zeros(0, dtype=torch.float64))
        # R of the environments of a TransformedEnv; empty before its first step.
        self.register_buffer("env_returns", torch.zeros(0, dtype=torch.float64))

    @property
    def in_keys(self) -> list[NestedKey]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Reward and done flag, under their names in the batch or the environment."""
        return [self._keys_here.reward, self._keys_here.end]

    @property
    def out_keys(self) -> list[NestedKey]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Scaled and raw reward, under their names in the batch or the environment."""
        return [self._keys_here.reward, self._keys_here.raw]

    @property
    def raw_key(self) -> NestedKey:
        """The key of the raw reward in a batch."""
        return self._keys.raw

    @property
    def _keys_here(self) -> RewardKeys:
        return self._env_keys if isinstance(_outermost(self), EnvBase) else self._keys

    def transform_reward_spec(self, reward_spec: Any) -> TensorSpec:
        """Add the raw reward; the scaled one is bounded by ``clip``."""
        clip, keys = self.clip, self._env_keys
        raw = reward_spec.get(keys.reward, None)
        present = sorted(map(str, reward_spec.keys(True, True)))
        if raw is None:
            raise KeyError(
                f"{keys.reward!r} is no reward of this environment, which has "
                f"{', '.join(present)}. Pass it as reward_key, with a leading 'next'."
            )
        if keys.raw in reward_spec.keys(True, True):
            raise _normalized_already(keys.raw)
        like = {"shape": raw.shape, "dtype": raw.dtype, "device": raw.device}
        reward_spec[keys.raw] = raw.clone()
        scaled = Unbounded(**like) if clip is None else Bounded(-clip, clip, **like)
        reward_spec[keys.reward] = scaled
        return reward_spec

    @property
    def count(self) -> Tensor:
        """The number of returns that the statistics are of."""
        return self.moments[0]

    @property
    def scale(self) -> Tensor:
        """The number that the last reward was divided by."""
        return self.moments[3]

    def freeze(self) -> Self:
        """Stop the statistics; rewards are still scaled, by the statistics as they are."""
        self.frozen = torch.ones_like(self.frozen)
        return self

    def unfreeze(self) -> Self:
        """Let the statistics move again."""
        self.frozen = torch.zeros_like(self.frozen)
        return self

    def reset_returns(self) -> Self:
        """Let every trajectory start from R = 0. With a PPOUpdate call its method of this name.

        It is needed where trajectory ids repeat: with a new torchrl ``Collector``, and in a new
        process with a ``GymCollector`` whose state is not loaded.
        """
        for name in _RESIZED:
            setattr(self, name, getattr(self, name).new_zeros(0))
        return self

    # -- on batches: plain call, postproc, replay buffer ----------------------

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Normalize a batch ``[*B, T]``, and move the statistics.

        A replay buffer calls this on its samples, which are returned unchanged.
        """
        check_tensordict(tensordict, who="RewardNormalizer")
        holder = _outermost(self)
        # A buffer puts its transforms into a Compose, and that in eval mode.
        is_in_compose = isinstance(holder, Transform) and holder is not self
        if self.training or not is_in_compose or holder.training:
            return self._normalize_batch(tensordict)
        return self._sampled(tensordict)

    def _sampled(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return a sample of a replay buffer, or raise if it was not normalized."""
        keys = self._keys
        is_there = tensordict.get(keys.reward, None) is not None
        if is_there and tensordict.get(keys.raw, None) is None:
            raise ValueError(
                f"The replay buffer holds {keys.reward!r} without {keys.raw!r}: it was written "
                "before the normalizer was appended, or the raw reward was dropped since. "
                "Rewards are normalized when they are written: append the normalizer before the "
                "first batch is written, and keep both entries."
            )
        return tensordict

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        # append_transform(invert=True) comes here with a shallow copy of the batch.
        return self._normalize_written(next_tensordict)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        # Transform.inv and Compose.inv come here with a shallow copy: on the way into a replay
        # buffer (with invert=True on the way out), or with an action on the way to an environment.
        holder = _outermost(self)
        is_sampled = not self.training and holder is self  # append_transform(invert=True)
        if is_sampled:
            return self._sampled(tensordict)
        if isinstance(holder, EnvBase):
            return tensordict
        return self._normalize_written(tensordict)

    def _normalize_written(self, tensordict: TensorDictBase) -> TensorDictBase:
        if tensordict.get("advantage", None) is not None:
            raise ValueError(
                "The advantage was computed before the rewards are normalized: on the way into a "
                "replay buffer its transforms run in reverse order, so append GAE first and the "
                "RewardNormalizer after it."
            )
        return self._normalize_batch(tensordict)

    def _normalize_batch(self, tensordict: TensorDictBase) -> TensorDictBase:
        ranks = resolve_group(self.group)
        if ranks is None or self.frozen:
            measurement = self._measure(tensordict)
        else:
            measurement = measure_together(lambda: self._measure(tensordict), self.moments, ranks)
        self._move_statistics(measurement.moments)
        if measurement.open_returns is not None:
            open_ids, open_returns = measurement.open_returns
            self._buffers.update(open_ids=open_ids, open_returns=open_returns)
        self._write(tensordict, self._keys, measurement.reward)
        tensors = self._tensors_of(tensordict, self._keys)
        self._written.append([(ref(x), _write_count(x)) for x in tensors])
        return tensordict

    def _measure(self, tensordict: TensorDictBase) -> Measurement:
        """Measure a batch, or raise; nothing is changed."""
        keys = self._keys
        if self._is_normalized(tensordict, keys):
            raise _normalized_already(keys.raw)
        options = {x: getattr(self, x) for x in ("gamma", "mask_key", "traj_key", "nonfinite")}
        measurement = measure(tensordict, keys, (self.open_ids, self.open_returns), **options)
        check_writable(tensordict, [keys.reward, keys.raw], who="RewardNormalizer")
        return measurement

    def _is_normalized(self, tensordict: TensorDictBase, keys: RewardKeys) -> bool:
        """Return whether the reward is normalized already."""
        if tensordict.get(keys.raw, None) is None:
            return False
        # A collector hands its postproc the same TensorDict for every batch, and writes the new
        # rewards and ends into the same tensors: the raw reward is then that of the batch before.
        now = self._tensors_of(tensordict, keys)
        return not any(
            all(x is held() and _write_count(x) != count for x, (held, count) in pairs)
            for pairs in (list(zip(now, before, strict=False)) for before in self._written)
            if len(pairs) == 2
        )

    @staticmethod
    def _tensors_of(tensordict: TensorDictBase, keys: RewardKeys) -> list[Tensor]:
        """Return the reward and the end of its trajectories, where they are there."""
        ends = (tensordict.get(key, None) for key in keys.ends)
        found = tensordict.get(keys.reward, None), next((x for x in ends if x is not None), None)
        return [x for x in found if x is not None]

    def _write(self, tensordict: TensorDictBase, keys: RewardKeys, reward: Tensor) -> None:
        """Write raw and scaled reward."""
        scaled = (reward / self.scale).to(reward.dtype)  # a number of the host divides anywhere
        if self.clip is not None:
            scaled.clamp_(-self.clip, self.clip)
        tensordict.set(keys.raw, reward)
        tensordict.set(keys.reward, scaled)

    def _move_statistics(self, added: Moments) -> None:
        """Add the moments of a batch, unless the statistics are frozen."""
        if self.frozen:
            return
        running = self.statistics == "running"
        if running:
            count, mean, m2, _ = self.moments.tolist()
            added = merged((count, mean, m2), added)
        count, mean, m2 = added
        scale = 1.0
        # Equal returns give no scale: 1e-12 of the mean is rounding.
        if count and math.sqrt(m2 / count) > 1e-12 * abs(mean):
            if running:
                scale = math.sqrt(m2 / count + self.epsilon)
            else:
                scale = math.sqrt(m2 / (count - 1)) + self.epsilon
        # nn.Module's own assignment takes longer than a small batch's scan.
        self._buffers["moments"] = self.moments.new_tensor((count, mean, m2, scale))

    # -- in an environment, step by step ---------------------------------------

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        if self.statistics == "batch":
            raise ValueError(
                "statistics='batch' needs a whole batch, and an environment gives one step at a "
                "time. Use statistics='running', or call the normalizer on the collected batch."
            )
        if self.group is not None and not self.frozen:
            raise ValueError(
                "group= needs whole batches: ranks step their environments at different times, "
                "and would wait for each other. Call the normalizer on the collected batch, or "
                "freeze it; without group= each rank's environments have statistics of their own."
            )
        keys, before = self._env_keys, tensordict.get("next", None)
        # torchrl copies entries of the step before to the same TensorDict.
        is_copied = before is not None and before.get(keys.raw, None) is next_tensordict.get(
            keys.raw, None
        )
        if not is_copied and self._is_normalized(next_tensordict, keys):
            raise _normalized_already(keys.raw)
        given, done = keys.read(next_tensordict)
        stepped = tensordict.get("_step", None)  # of a part of the rows, as after some have ended
        if stepped is not None:
            stepped = stepped.reshape(tensordict.batch_size).cpu()
        reward, done = given.cpu(), done.cpu()
        counted = countable(reward, stepped, keys.reward, self.nonfinite)
        clean = (reward if counted is None else torch.where(counted, reward, 0)).double()
        carried = self.env_returns
        if carried.shape != clean.shape:  # before the first step, and after another environment
            carried = torch.zeros_like(clean)
        returns = clean + self.gamma * carried
        after = torch.where(done, 0, returns)
        if stepped is not None:
            after = torch.where(expand_as_right(stepped, after), after, carried)
        self._move_statistics(moments_of(returns, counted))
        self.env_returns = after
        self._write(next_tensordict, keys, given)
        return next_tensordict

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        # A "_reset" flag beside an end names the environments; without one all are reset.
        keys = [as_key((*key_parts(end)[:-1], "_reset")) for end in self._env_keys.ends]
        resets = [reset for key in keys if (reset := tensordict.get(key, None)) is not None]
        carried = self.env_returns if resets else torch.zeros_like(self.env_returns)
        for reset in resets if carried.numel() else ():
            reset = reset.cpu().reshape(reset.shape + (1,) * (carried.ndim - reset.ndim))
            carried = torch.where(reset, 0, carried)
        self.env_returns = carried
        return tensordict_reset

    # -- state -----------------------------------------------------------------

    def prepare_load(self, state: State) -> None:
        """Give the buffers the shapes of the state; the number of trajectories may differ."""
        # New tensors: a copy into the old ones would change clones and states that share them.
        for name, buffer in dict(self.named_buffers(recurse=False)).items():
            like = state.get(name, buffer) if name in _RESIZED else buffer
            setattr(self, name, buffer.new_empty(like.shape))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        return apply_without_cast(self, super()._apply, fn, recurse, moves=False)

    def __getstate__(self) -> StateDict:
        # A copy is in no collector yet, and does not need a batch's rewards.
        return {**super().__getstate__(), "_written": deque(maxlen=MOST_WRITTEN)}

    def check_state(self, state: State) -> None:
        """Raise a ValueError where a number is out of range, or an open return has no id."""
        for name in ("moments", "open_returns", "env_returns"):
            x = state.get(name, self.moments)
            # count and squared deviations are at least 0, and the scale is above
            of_moments = name == "moments" and x.shape == self.moments.shape
            is_wrong = of_moments and not (x[0] >= 0 and x[2] >= 0 and x[3] > 0)
            if is_wrong or not x.isfinite().all():
                raise ValueError(f"{name!r} is {x.tolist()}: it must be finite and in range.")
        ids, returns = state.get("open_ids"), state.get("open_returns")
        if ids is not None and returns is not None and ids.shape != returns.shape[:1]:
            raise ValueError(
                f"'open_returns' has shape {list(returns.shape)} in the state; it must be as many "
                f"as open_ids, which has shape {list(ids.shape)}."
            )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(gamma={self.gamma}, statistics={self.statistics!r}, "
            f"clip={self.clip}, scale={self.scale:.4g}, count={int(self.count)})"
        )


def _outermost(transform: object) -> Any:
    """Return the environment or transform that holds a transform in the end, or itself."""
    # Transform.container raises where the outermost holder is no environment.
    reference = transform.__dict__.get("_container") if isinstance(transform, Transform) else None
    holder = None if reference is None else reference()
    return transform if holder is None else _outermost(holder)


def _normalized_already(raw: NestedKey) -> ValueError:
    return ValueError(
        f"The batch holds {raw!r}: its reward is normalized already, by another RewardNormalizer "
        "or by an earlier call of this one. Keep one of them, in the environment or on the batch. "
        "If another block wrote the entry, pass raw_key=."
    )


def _write_count(x: Tensor) -> int:
    """Return how often a tensor was written in place; 0 for inference tensors."""
    return 0 if x.is_inference() else x._version
