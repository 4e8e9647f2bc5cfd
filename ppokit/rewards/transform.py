"""The transform that replaces rewards, in a batch, an environment and a replay buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Bounded, Composite, TensorSpec, Unbounded

from ppokit.rewards.environment import in_environment
from ppokit.rewards.keys import RewardKeys
from ppokit.rewards.return_statistics import ReturnStatistics


class ScaledRewards(ReturnStatistics):
    """A transform that replaces raw rewards by scaled ones, once, and keeps the raw ones.

    Keys are given as in a batch; in an environment the leading ``"next"`` is dropped.
    """

    #: A buffer that several processes write to would give each of them statistics of its own.
    requires_shared_write_state = True

    def __init__(
        self, keys: Sequence[RewardKeys], statistics: str, clip: float | None, epsilon: float
    ) -> None:
        super().__init__(statistics, clip, epsilon, count=len(keys))
        self._keys, self._env_keys = keys, [one.in_environment() for one in keys]
        # The last rewards written, to notice that a collector uses its buffers again.
        self._written: list[tuple[Tensor, int]] = []

    @property
    def in_keys(self) -> list[NestedKey]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Rewards and done flags, under their names in the batch or the environment."""
        keys = [key for one in self._keys_here for key in (one.reward, one.end)]
        return list(dict.fromkeys(keys))

    @property
    def out_keys(self) -> list[NestedKey]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Scaled and raw rewards, under their names in the batch or the environment."""
        return [key for one in self._keys_here for key in (one.reward, one.raw)]

    @property
    def raw_key(self) -> NestedKey:
        """The key of the raw reward in a batch; of several, the first."""
        return self._keys[0].raw

    @property
    def _keys_here(self) -> Sequence[RewardKeys]:
        return self._env_keys if in_environment(self) else self._keys

    def transform_reward_spec(self, reward_spec: TensorSpec) -> TensorSpec:
        """Add the raw rewards; the scaled ones are bounded by ``clip``."""
        assert isinstance(reward_spec, Composite)
        for one in self._env_keys:
            raw = reward_spec.get(one.reward, None)
            if raw is None:
                present = sorted(map(str, reward_spec.keys(True, True)))
                raise KeyError(
                    f"{one.reward!r} is no reward of this environment, which has "
                    f"{', '.join(present)}. Pass it as reward_key, with a leading 'next'."
                )
            if one.raw in reward_spec.keys(True, True):
                raise _normalized_already(one.raw)
            like: dict[str, Any] = {"shape": raw.shape, "dtype": raw.dtype, "device": raw.device}
            reward_spec[one.raw] = raw.clone()
            reward_spec[one.reward] = (
                Unbounded(**like) if self.clip is None else Bounded(-self.clip, self.clip, **like)
            )
        return reward_spec

    def _refuse_normalized(
        self,
        tensordict: TensorDictBase,
        keys: Sequence[RewardKeys],
        before: TensorDictBase | None = None,
    ) -> None:
        """Raise where there is a raw reward that was not there ``before`` the step."""
        for i, one in enumerate(keys):
            if not self._is_normalized(tensordict, i, one):
                continue
            if before is None or before.get(one.raw, None) is not tensordict.get(one.raw):
                raise _normalized_already(one.raw)

    def _is_normalized(self, tensordict: TensorDictBase, i: int, keys: RewardKeys) -> bool:
        if tensordict.get(keys.raw, None) is None:
            return False
        # A collector hands its postproc the same TensorDict for every batch, and writes the new
        # rewards into the same tensor: the raw reward is then that of the batch before.
        if not self._written:
            return True
        reward, before = self._written[i]
        return tensordict.get(keys.reward, None) is not reward or _version_of(reward) == before

    def _sampled(self, tensordict: TensorDictBase) -> TensorDictBase:
        for one in self._keys:
            there = tensordict.get(one.reward, None) is not None
            if there and tensordict.get(one.raw, None) is None:
                raise ValueError(
                    f"The replay buffer holds {one.reward!r} without {one.raw!r}: it was written "
                    "before the normalizer was appended, or the raw reward was dropped since. "
                    "Rewards are normalised when they are written: append it first, and keep both."
                )
        return tensordict

    def _write(
        self, tensordict: TensorDictBase, keys: Sequence[RewardKeys], rewards: Sequence[Tensor]
    ) -> list[tuple[Tensor, int]]:
        """Write raw and scaled rewards; return the scaled ones with their versions."""
        written, first = [], 0
        for one, reward in zip(keys, rewards, strict=True):
            scaled = self._scaled(reward, first)
            first += reward.shape[-1]
            tensordict.set(one.raw, reward)
            tensordict.set(one.reward, scaled)
            written.append((scaled, _version_of(scaled)))
        return written

    def __getstate__(self) -> dict[str, Any]:
        # A copy is in no collector yet, and does not need a batch's rewards.
        return {**super().__getstate__(), "_written": []}


def _normalized_already(raw: NestedKey) -> ValueError:
    return ValueError(
        f"The batch holds {raw!r}: its reward is normalised already, by another RewardNormalizer "
        "or by an earlier call of this one. Keep one of them, in the environment or on the batch."
    )


def _version_of(tensor: Tensor) -> int:
    """Return how often the tensor was written in place; 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version
