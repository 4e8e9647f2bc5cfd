"""The KL stop and the adaptive learning rate in torchrl's trainers and replay buffers.

``Trainer.optim_steps`` ends an epoch when a ``process_optim_batch`` hook raises StopIteration, and
passes the losses to hooks only at stages that are deprecated. So a forward hook on the loss reads
the KL, a hook on the optimizer skips the step, and each remaining epoch ends at its first
minibatch. Without a reset, a replay buffer whose loop ended early continues there with the next
batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers import SamplerEnsemble, SamplerWithoutReplacement

from ppokit._batch import mask_key_of, valid_mask
from ppokit.trust_region.mean_kl import find_kl

if TYPE_CHECKING:
    from torchrl.trainers import Trainer


class TakesKL(Protocol):
    """A block that is updated by the KLs of minibatches."""

    kl_key: NestedKey

    def update(self, losses_or_kl: Tensor, *, weight: Tensor) -> object:
        """Take the KLs, and the valid frames behind each."""


class KLHooks:
    """Updates a block after each minibatch, or after each epoch, of a trainer's update."""

    def __init__(self, block: TakesKL) -> None:
        self.block = block
        self._expects_losses = False
        self._kls: list[tuple[Tensor, Tensor]] = []

    def register_hooks(self, trainer: Trainer, listeners: list[KLHooks] | None = None) -> None:
        """Register the hooks, or for the losses this object among the listeners of a stepper."""
        trainer.register_op("process_optim_batch", self.before_minibatch)  # pyright: ignore[reportArgumentType]
        trainer.register_op("post_epoch", self.update)
        for stage in ("post_steps", "setup"):  # also of a run that was interrupted in a batch
            trainer.register_op(stage, self._kls.clear)
        if listeners is None:
            loss = cast("nn.Module", trainer.loss_module)
            loss.register_forward_hook(self.after_loss)
        else:
            listeners.append(self)

    def before_minibatch(self, batch: TensorDictBase) -> None:
        """Expect losses: outside of the update they are evaluated too, and no step follows."""
        self._expects_losses = True

    def after_loss(
        self, module: nn.Module, args: tuple[TensorDictBase, ...], losses: TensorDictBase
    ) -> None:
        """Add the KL of a minibatch."""
        # Another hook may have ended the epoch after this object's: then an evaluation may follow.
        if self._expects_losses and torch.is_grad_enabled():
            self._expects_losses = False
            self.add(losses, valid_mask(args[0], mask_key_of(module)), args[0])

    def add(
        self,
        losses: TensorDictBase,
        mask: Tensor | None,
        minibatch: TensorDictBase,
        counts: Tensor | bool = True,
    ) -> None:
        """Add the KL of a minibatch, weighted by its valid frames; by 0 unless it counts."""
        kl = torch.as_tensor(find_kl(losses, self.block.kl_key)).detach()
        if mask is None:
            frames = torch.full_like(kl, minibatch.batch_size.numel(), dtype=torch.float64)
        else:
            frames = mask.sum().to(kl.device, torch.float64).expand(kl.shape)
        self._kls.append((kl, frames * counts))
        self.after_minibatch()

    def after_minibatch(self) -> None:
        """Keep the KL for :meth:`update`; to be overridden."""

    def update(self) -> None:
        """Update the block with the KLs so far."""
        self._expects_losses = False
        if self._kls:
            kls, frames = zip(*self._kls, strict=True)
            self._kls.clear()
            self.block.update(torch.stack(kls), weight=torch.stack(frames))


def optimizers_of(trainer: Trainer) -> set[torch.optim.Optimizer]:
    """Return the optimizer of a trainer and of its stepper, where they have one."""
    stepper = trainer.optimization_stepper
    return {trainer.optimizer, getattr(stepper, "optimizer", None)} - {None}


def accumulates_gradients(trainer: Trainer) -> bool:
    """Return whether the trainer's optimizer steps once for several minibatches."""
    return getattr(trainer.optimization_stepper, "gradient_accumulation_steps", 1) > 1


def drop_rest_of_epoch(buffer: ReplayBuffer | None) -> None:
    """Let the next minibatch be the first of an epoch."""
    # ReplayBuffer.empty() would do this too, but drops the data, which may still be wanted.
    if buffer is None:
        return
    with buffer._futures_lock:
        buffer._clear_prefetch_queue_locked()
    sampler = buffer.sampler
    for part in [*sampler] if isinstance(sampler, SamplerEnsemble) else [sampler]:
        # Other samplers have no permutation, and would lose their state, such as priorities.
        if isinstance(part, SamplerWithoutReplacement):
            part.len_storage, part.ran_out = 0, False  # the next sample draws a new order
