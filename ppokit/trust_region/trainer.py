"""The KL stop in torchrl's trainers and replay buffers.

``Trainer.optim_steps`` ends an epoch when a ``process_optim_batch`` hook raises StopIteration, and
passes the losses to hooks only at stages that are deprecated. So a forward hook on the loss reads
the KL, a hook on the optimizer skips the step, and each remaining epoch ends at its first
minibatch. Without a reset, a replay buffer whose loop ended early continues there with the next
batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers import SamplerEnsemble, SamplerWithoutReplacement

from ppokit._keys import mask_key_of, valid_mask
from ppokit.trust_region.mean_kl import find_kl

if TYPE_CHECKING:
    from torchrl.trainers import Trainer

    from ppokit.trust_region.early_stop import KLEarlyStopper


class TrainerHooks:
    """Calls a stopper at each minibatch, or after each epoch, of a trainer's update."""

    def __init__(self, stopper: KLEarlyStopper) -> None:
        self.stopper = stopper
        self._expects_losses = False
        self._epoch: list[tuple[Tensor, Tensor]] = []

    def register(self, trainer: Trainer) -> None:
        """Register the hooks; :meth:`KLEarlyStopper.register` names the errors."""
        stepper: Any = trainer.optimization_stepper
        optimizers = {getattr(stepper, "optimizer", None), trainer.optimizer} - {None}
        if not optimizers:
            raise ValueError(
                "The trainer has no optimizer (optimizer=, or optimization_stepper.optimizer), so "
                "the minibatch that triggers the stop would be applied."
            )
        trainer.register_op("process_optim_batch", self.before_minibatch)  # pyright: ignore[reportArgumentType]
        trainer.register_op("post_epoch", self.after_epoch)
        for stage in ("post_steps", "setup"):  # also of a run that was interrupted in a batch
            trainer.register_op(stage, self.after_batch)
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self.before_step)
        loss: Any = trainer.loss_module
        loss.register_forward_hook(self.after_loss)
        self.find_buffer(trainer)

    def find_buffer(self, trainer: Trainer) -> None:
        """Have the stopper reset the trainer's replay buffer, unless it has one."""
        # PPOTrainer keeps its buffer; for a plain Trainer one of its modules does.
        owners = [trainer, *trainer._modules.values()]
        buffers = [getattr(owner, "replay_buffer", None) for owner in owners]
        for buffer in buffers:
            if self.stopper.replay_buffer is None and isinstance(buffer, ReplayBuffer):
                self.stopper.replay_buffer = buffer

    def before_minibatch(self, batch: TensorDictBase) -> None:
        """End the epoch if the update is over."""
        if self.stopper.stopped:
            raise StopIteration
        # The loss may also be evaluated outside of the update, where no step follows.
        self._expects_losses = True

    def after_loss(self, module: nn.Module, args: tuple[Any, ...], losses: TensorDictBase) -> None:
        """Update the stopper, or keep the KL for the end of the epoch."""
        if self._expects_losses:
            self._expects_losses = False
            self.add(losses, valid_mask(args[0], mask_key_of(module)), args[0])

    def add(self, losses: TensorDictBase, mask: Tensor | None, minibatch: TensorDictBase) -> None:
        """Add the KL of a minibatch, weighted by its valid frames."""
        kl = torch.as_tensor(find_kl(losses, self.stopper.kl_key)).detach()
        if mask is None:
            frames = torch.full_like(kl, minibatch.batch_size.numel(), dtype=torch.float64)
        else:
            frames = mask.sum().to(kl.device, torch.float64).expand(kl.shape)
        if self.stopper.when == "minibatch":
            self.stopper.update(kl, weight=frames)
        else:
            self._epoch.append((kl, frames))

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Drop the gradients after a stop: optimizers skip parameters without one."""
        if self.stopper.stopped:
            optimizer.zero_grad(set_to_none=True)

    def after_epoch(self) -> None:
        """Update the stopper with ``when="epoch"``, and reset the replay buffer's epoch."""
        self._expects_losses = False
        if self._epoch:
            kls, frames = zip(*self._epoch, strict=True)
            self._epoch.clear()
            self.stopper.update(torch.stack(kls), weight=torch.stack(frames))
        if self.stopper.stopped:
            # The trainer's own hook sampled a minibatch before this one ended the epoch.
            drop_rest_of_epoch(self.stopper.replay_buffer)

    def after_batch(self) -> None:
        """Open the next batch."""
        self._epoch.clear()
        self.stopper.reset()


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
