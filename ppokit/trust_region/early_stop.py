"""Ending the update of a batch when the policy has moved too far."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import ReplayBuffer

from ppokit._batch import State, as_key, check_writable
from ppokit._checks import choice, positive, whole
from ppokit._state import WholeState
from ppokit.distributed import resolve_group
from ppokit.functional._checks import check_same_shape
from ppokit.trust_region.mean_kl import (
    AnyKL,
    answer_until_all_are_done,
    find_kl,
    mean_over_ranks,
    warn_not_finite,
)
from ppokit.trust_region.trainer import (
    KLHooks,
    accumulates_gradients,
    drop_rest_of_epoch,
    optimizers_of,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torchrl.trainers import Trainer


class KLEarlyStopper(WholeState, TensorDictModuleBase):
    r"""End the update of a batch when the policy has moved too far.

    .. math:: \text{stop when} \quad \overline{KL} > tolerance \cdot target\_kl

    With ``when="minibatch"`` it decides before the optimizer step of each minibatch, and the
    minibatch that triggers it is not applied (Stable-Baselines3, rl8). With ``when="epoch"`` it is
    updated at the end of each epoch, with that epoch's last losses or with the KL of all of its
    minibatches (CleanRL and AgileRL, with ``tolerance=1``). It stays stopped until :meth:`reset`
    opens the next batch. A KL that is not finite stops too, with a warning.

    Args:
        target_kl: KL divergence that an update may reach, in nats.
        tolerance: factor on ``target_kl``.
        when: ``"minibatch"`` or ``"epoch"``.
        kl_key: where the loss writes its KL. Use the k3 estimate of
            :class:`~ppokit.DualClipPPOLoss`: torchrl's ``"kl_approx"`` is often negative near 0.
        replay_buffer: the buffer that is iterated over. After a loop that ended early, it would
            continue with the rest of the permutation in the next batch; with the buffer given, a
            stop drops that rest.
        check_every: read the KL of every n-th update after a reset only. The other updates return
            the last decision, without a transfer from the device or between ranks.
        group: process group whose ranks stop together, on the mean of their KLs (Spinning Up). None
            is the default group if ``torch.distributed`` is initialized, else no communication.

    ``stopper(losses)`` is ``update`` as a TensorDictModule: it writes the decision, a bool, to
    ``"kl_stop"``. In torchrl's trainers, use :meth:`register`.

    With several ranks every rank calls it in the same way, batch after batch, and :meth:`reset`
    must follow the last minibatch of every batch on every rank, stopped or not. Ranks may hold
    different numbers of minibatches: a rank in ``reset`` takes part in the all-reduces of the
    others, and the mean is over the ranks that still train. Averaging gradients must allow for
    that. A KL that is not finite on one rank stops all.

    Gradients must not be accumulated over minibatches: a stop would drop those of minibatches that
    had passed.

    Raises:
        ValueError: ``target_kl`` or ``tolerance`` is not positive, ``when`` is unknown,
            ``check_every`` is less than 1.
        TypeError: ``group`` is no group that this process belongs to.

    Example:
        >>> from ppokit import KLEarlyStopper
        >>> stopper = KLEarlyStopper(target_kl=0.01)
        >>> [stopper.update(kl) for kl in (0.005, 0.02, 0.001)]
        [False, True, True]
        >>> stopper.reset()
        >>> stopper.update(0.001)
        False
    """

    target_kl = positive()
    tolerance = positive()
    when = choice("minibatch", "epoch")
    check_every = whole()

    def __init__(
        self,
        target_kl: float,
        *,
        tolerance: float = 1.5,
        when: str = "minibatch",
        kl_key: NestedKey = "kl",
        replay_buffer: ReplayBuffer | None = None,
        check_every: int = 1,
        group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        resolve_group(group)
        self.target_kl, self.tolerance, self.when = target_kl, tolerance, when
        self.kl_key = as_key(kl_key)
        self.in_keys: list[NestedKey] = [self.kl_key]
        self.out_keys: list[NestedKey] = ["kl_stop"]
        self.replay_buffer, self.check_every, self.group = replay_buffer, check_every, group
        # Not buffers: on a GPU, asking whether it has stopped would wait for the device.
        self._stopped = False
        # Counts round from 0 to check_every, because dynamo compiles for each number it sees.
        self._since_check = 0
        self.resets = 0  #: how often it was reset

    @property
    def stopped(self) -> bool:
        """Whether the update of this batch is over."""
        return self._stopped

    def reset(self, *, wait: bool = True) -> None:
        """Close the batch and open the next one.

        Args:
            wait: return once all ranks are here. False resets this rank alone, after an exception.
        """
        if wait:
            answer_until_all_are_done(self.group)
        self._stopped = False
        self._since_check = 0
        self.resets += 1

    def update(self, losses_or_kl: AnyKL, *, weight: Tensor | float | None = None) -> bool:
        """Return whether to stop, given the losses of a minibatch or their KL.

        Args:
            losses_or_kl: the result of the loss, a dictionary with the KL, or a KL in nats; of
                several values (the minibatches of an epoch) the mean.
            weight: valid frames behind each value, of the same shape; None weighs them equally.

        Raises:
            KeyError: the losses hold no ``kl_key``.
            ValueError: ``weight`` has another shape, or is 0 everywhere.
        """
        if self._stopped:
            return True
        kl = find_kl(losses_or_kl, self.kl_key)
        # Not by count(), of which Dynamo would compile a graph for each number.
        self._since_check = (self._since_check + 1) % self.check_every
        return not self._since_check and self.decide(mean_over_ranks(kl, weight, self.group))

    @property
    def is_due(self) -> bool:
        """Whether the KL of the next update is looked at (``check_every``)."""
        return (self._since_check + 1) % self.check_every == 0

    def count(self) -> None:
        """Count one update."""
        self._since_check = (self._since_check + 1) % self.check_every

    def decide(self, mean: float) -> bool:
        """Return whether to stop, given the mean KL of all ranks; it stays so until a reset."""
        if not mean <= self.tolerance * self.target_kl or not math.isfinite(mean):
            self.stop(mean)
        return self._stopped

    def stop(self, mean: float) -> None:
        """Stop because of a mean KL."""
        self._stopped = True
        drop_rest_of_epoch(self.replay_buffer)
        if not math.isfinite(mean):
            warn_not_finite(mean, "the update of this batch stops")

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the decision to ``"kl_stop"``."""
        check_writable(tensordict, ["kl_stop"], who="KLEarlyStopper")
        size, device = tensordict.batch_size, tensordict.device
        return tensordict.set("kl_stop", torch.full(size, self.update(tensordict), device=device))

    def register(self, trainer: Trainer, name: str = "kl_early_stopper") -> None:
        """Stop the updates of a torchrl ``Trainer``, such as ``PPOTrainer``, and save with it.

        The KL is read from the output of the trainer's loss, and weighed by the valid frames of the
        minibatch. The minibatch that triggers the stop is not applied; the rest of its epoch and
        the remaining epochs are skipped; the trainer's replay buffer is left whole. With
        ``when="epoch"`` the mean over the epoch's minibatches counts. Hooks that follow an
        optimizer step run after the triggering minibatch, too, and torchrl counts it as a step.

        Raises:
            ValueError: the trainer accumulates gradients, has no optimizer, or has a training step
                that asks this stopper.
            RuntimeError: the trainer updates in another process, or ``name`` is taken.
        """
        refuse_accumulated_gradients(accumulates_gradients(trainer))
        if getattr(trainer.optimization_stepper, "stopper", None) is self:
            raise ValueError(
                "The trainer's training step asks this stopper; register the step only."
            )
        TrainerHooks(self).register(trainer)
        trainer.register_module(name, self)

    def get_extra_state(self) -> Tensor:
        """Return the decision, and the number of updates since the last check."""
        return torch.tensor([int(self._stopped), self._since_check])

    def set_extra_state(self, state: Tensor) -> None:
        """Load the result of :meth:`get_extra_state`."""
        stopped, self._since_check = state.tolist()
        self._stopped = bool(stopped)

    def check_state(self, state: State) -> None:
        """Raise a ValueError where a shape differs."""
        for name, given in state.items():
            if name.endswith("extra_state"):
                check_same_shape({"the state": given, "this stopper's": self.get_extra_state()})
                stopped, since_check = given.tolist()
                if stopped not in (0, 1) or not 0 <= since_check < self.check_every:
                    raise ValueError(
                        f"{name!r} is {given.tolist()}: it must be 0 or 1, and a count below "
                        f"check_every={self.check_every}."
                    )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(target_kl={self.target_kl}, tolerance={self.tolerance}, "
            f"when={self.when!r}, stopped={self.stopped})"
        )


class TrainerHooks(KLHooks):
    """Calls a stopper at each minibatch, or after each epoch, of a trainer's update."""

    block: KLEarlyStopper

    def register(self, trainer: Trainer) -> None:
        """Register the hooks; :meth:`KLEarlyStopper.register` names the errors."""
        if not (optimizers := optimizers_of(trainer)):
            raise ValueError(
                "The trainer has no optimizer (optimizer=, or optimization_stepper.optimizer), so "
                "the minibatch that triggers the stop would be applied."
            )
        self.register_hooks(trainer)
        for stage in ("post_steps", "setup"):
            trainer.register_op(stage, self.block.reset)
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self.before_step)
        self.find_buffer(trainer)

    def find_buffer(self, trainer: Trainer) -> None:
        """Have the stopper reset the trainer's replay buffer, unless it has one."""
        # PPOTrainer keeps its buffer; for a plain Trainer one of its modules does.
        for owner in (trainer, *trainer._modules.values()):
            buffer = getattr(owner, "replay_buffer", None)
            if self.block.replay_buffer is None and isinstance(buffer, ReplayBuffer):
                self.block.replay_buffer = buffer

    def before_minibatch(self, batch: TensorDictBase) -> None:
        """End the epoch if the update is over."""
        if self.block.stopped:
            raise StopIteration
        super().before_minibatch(batch)

    def after_minibatch(self) -> None:
        """Update the stopper, or keep the KL for the end of the epoch."""
        if self.block.when == "minibatch":
            super().update()

    def before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Drop the gradients after a stop: optimizers skip parameters without one."""
        if self.block.stopped:
            optimizer.zero_grad(set_to_none=True)

    def update(self) -> None:
        """Update the stopper with ``when="epoch"``, and reset the replay buffer's epoch."""
        super().update()
        if self.block.stopped:
            # The trainer's own hook sampled a minibatch before this one ended the epoch.
            drop_rest_of_epoch(self.block.replay_buffer)


def refuse_accumulated_gradients(accumulates: bool) -> None:
    """Raise where a KL stop meets an update that accumulates gradients over minibatches."""
    if accumulates:
        raise ValueError(
            "A KL stop and gradient accumulation exclude each other: a stop would drop the "
            "gradients of minibatches that had passed. Use larger minibatches without "
            "accumulation, or no KL stop."
        )
