"""Keeping the new policy near the one that collected the data."""

from __future__ import annotations

import math
import warnings

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers import SamplerWithoutReplacement

from ppokit._keys import as_key, get_tensor


class KLEarlyStopper(TensorDictModuleBase):
    r"""Ends the update of a batch when the policy has moved too far.

    .. math:: \text{stop when} \quad \overline{KL} > tolerance \cdot target\_kl

    With ``when="minibatch"`` it is asked before the optimiser step of each minibatch, and the
    minibatch that triggers it is not applied (Stable-Baselines3, rl8). With ``when="epoch"`` it is
    asked at the end of each epoch, with that epoch's last losses or with the KL of all of its
    minibatches (CleanRL and AgileRL, with ``tolerance=1``). Once it has stopped it stays stopped,
    until :meth:`reset` opens the next batch.

    Args:
        target_kl: KL divergence that an update may reach, in nats.
        tolerance: factor on ``target_kl``.
        when: ``"minibatch"`` or ``"epoch"``.
        kl_key: where the loss writes its KL. The k3 estimate of
            :class:`~ppokit.DualClipPPOLoss` is the right one: torchrl's ``"kl_approx"`` is negative
            four times out of ten near zero.
        replay_buffer: the buffer that is iterated over. Leaving its loop early leaves the rest of a
            permutation behind, and the next batch would be seen in part; with the buffer at hand,
            what is left is dropped when it stops.

    A KL that is not finite stops too, with a warning. ``stopper(losses)`` is ``update`` as a
    TensorDictModule: it writes the decision, a bool, to ``"kl_stop"``.

    Raises:
        ValueError: ``target_kl`` or ``tolerance`` is not positive, ``when`` is unknown.

    Example:
        >>> stopper = KLEarlyStopper(target_kl=0.01)
        >>> [stopper.update(kl) for kl in (0.005, 0.02, 0.001)]
        [False, True, True]
        >>> stopper.reset()
        >>> stopper.update(0.001)
        False
    """

    _stopped: Tensor

    def __init__(
        self,
        target_kl: float,
        *,
        tolerance: float = 1.5,
        when: str = "minibatch",
        kl_key: NestedKey = "kl",
        replay_buffer: ReplayBuffer | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("target_kl", target_kl), ("tolerance", tolerance)):
            if not value > 0:
                raise ValueError(
                    f"{name} must be positive, got {value}: at 0 or less the first minibatch of "
                    "every batch would end the update."
                )
        if when not in ("minibatch", "epoch"):
            raise ValueError(f"when must be 'minibatch' or 'epoch', got {when!r}.")
        self.target_kl = target_kl
        self.tolerance = tolerance
        self.when = when
        self.kl_key = as_key(kl_key)
        self.in_keys: list[NestedKey] = [self.kl_key]
        self.out_keys: list[NestedKey] = ["kl_stop"]
        self.replay_buffer = replay_buffer
        self.register_buffer("_stopped", torch.zeros((), dtype=torch.bool))

    @property
    def stopped(self) -> bool:
        """Whether the update of this batch is over."""
        return bool(self._stopped)

    def reset(self) -> None:
        """Open the next batch."""
        self._stopped.fill_(False)

    def update(
        self,
        losses_or_kl: TensorDictBase | Tensor | float,
        *,
        weight: Tensor | float | None = None,
    ) -> bool:
        """Return whether to stop, given the losses of a minibatch or their KL.

        Args:
            losses_or_kl: what the loss returned, or a KL in nats. Of several values (the
                minibatches of an epoch) the mean counts.
            weight: valid frames behind each value, of the same shape; None weighs them equally.

        Raises:
            KeyError: the losses hold no ``kl_key``.
            ValueError: ``weight`` has another shape or is negative, or ``when="epoch"`` and the
                replay buffer is in the middle of an epoch.
        """
        if self.stopped:
            return True
        self._check_epoch_is_over()
        kl = self._mean_kl(losses_or_kl, weight)
        if not math.isfinite(kl):
            warnings.warn(
                f"The KL divergence is {kl}: the update of this batch stops. A log-probability is "
                "not finite; look for actions at the edge of a bounded distribution, or a learning "
                "rate that is too high.",
                RuntimeWarning,
                stacklevel=2,
            )
        if not math.isfinite(kl) or kl > self.tolerance * self.target_kl:
            self._stopped.fill_(True)
            self._drop_rest_of_epoch()
        return self.stopped

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the decision to ``"kl_stop"``."""
        stop = self.update(tensordict)
        return tensordict.set(
            "kl_stop", torch.full(tensordict.batch_size, stop, device=tensordict.device)
        )

    def _mean_kl(
        self, losses_or_kl: TensorDictBase | Tensor | float, weight: Tensor | float | None
    ) -> float:
        if isinstance(losses_or_kl, TensorDictBase):
            losses_or_kl = get_tensor(
                losses_or_kl,
                self.kl_key,
                fix="DualClipPPOLoss writes 'kl'; for torchrl's ClipPPOLoss pass "
                "kl_key='kl_approx', or pass the KL itself.",
            )
        kl = torch.as_tensor(losses_or_kl, dtype=torch.float64).detach()
        if kl.numel() == 0:
            raise ValueError("The KL is an empty tensor: pass the KL of at least one minibatch.")
        if weight is None:
            return float(kl.mean())
        frames = torch.as_tensor(weight, dtype=kl.dtype, device=kl.device)
        if frames.shape != kl.shape or not bool((frames >= 0).all() & (frames.sum() > 0)):
            raise ValueError(
                "weight must be the number of valid frames behind each KL: "
                f"shape {list(kl.shape)}, not negative, not all 0. Got {weight}."
            )
        return float((kl * frames).sum() / frames.sum())

    def _check_epoch_is_over(self) -> None:
        if self.when == "epoch" and self.replay_buffer is not None:
            sampler = self.replay_buffer.sampler
            shuffled = isinstance(sampler, SamplerWithoutReplacement)
            if shuffled and sampler._sample_list is not None and not sampler.ran_out:
                raise ValueError(
                    "when='epoch', but the replay buffer is in the middle of an epoch: ask after "
                    "the loop over its minibatches, or use when='minibatch'."
                )

    def _drop_rest_of_epoch(self) -> None:
        # ReplayBuffer.empty() would do this too, but drops the data, which may still be wanted.
        if (buffer := self.replay_buffer) is not None:
            with buffer._futures_lock:
                buffer._clear_prefetch_queue_locked()
            buffer.sampler._empty()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(target_kl={self.target_kl}, tolerance={self.tolerance}, "
            f"when={self.when!r}, stopped={self.stopped})"
        )
