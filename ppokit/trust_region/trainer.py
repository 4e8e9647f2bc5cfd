"""The KL stop inside torchrl's trainers, whose inner loop knows no stop of its own.

``Trainer.optim_steps`` ends an epoch when a ``process_optim_batch`` hook raises StopIteration, and
hands the losses to hooks only at stages that are deprecated. So the KL is read by a forward hook on
the loss, the optimiser is kept from stepping by a hook of its own, and what is left of the batch is
ended minibatch loop by minibatch loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.data import ReplayBuffer

from ppokit._keys import valid_mask
from ppokit.trust_region.buffers import drop_rest_of_epoch
from ppokit.trust_region.rounds import find_kl

if TYPE_CHECKING:
    from torchrl.trainers import Trainer

    from ppokit.trust_region.early_stop import KLEarlyStopper


class TrainerHooks:
    """Asks a stopper at each minibatch, or after each epoch, of a trainer's update."""

    def __init__(self, stopper: KLEarlyStopper) -> None:
        self.stopper = stopper
        self._expects_losses = False
        self._epoch: list[tuple[Tensor, Tensor]] = []

    def register(self, trainer: Trainer) -> None:
        """Hook into a trainer.

        Raises:
            TypeError: its loss is no module, so that its output cannot be read.
            ValueError: it has no optimiser that can be held back.
            RuntimeError: its update runs in another process (``learner_backend="ray"``).
        """
        if not isinstance(trainer.loss_module, nn.Module):
            raise TypeError(
                "The trainer's loss is no nn.Module, so nothing can read the KL from its output. "
                "Pass the loss module itself as loss_module."
            )
        stepper = trainer.optimization_stepper
        optimizers = {getattr(stepper, "optimizer", None), trainer.optimizer} - {None}
        if not optimizers:
            raise ValueError(
                "The trainer has no optimiser (optimizer=, or optimization_stepper.optimizer), so "
                "the minibatch that triggers the stop could not be kept from being applied."
            )
        hooks: dict[str, Callable[..., Any]] = {
            "process_optim_batch": self.before_minibatch,
            "post_epoch": self.after_epoch,
            "post_steps": self.after_batch,
            # a run that was broken off in the middle of a batch, and is taken up again
            "setup": self.after_batch,
        }
        for stage, hook in hooks.items():
            trainer.register_op(stage, hook)  # pyright: ignore[reportArgumentType]
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self.before_step)
        trainer.loss_module.register_forward_hook(self.after_loss)
        if self.stopper.replay_buffer is None:
            self.stopper.replay_buffer = _replay_buffer(trainer)

    def before_minibatch(self, batch: TensorDictBase) -> None:
        """End the epoch if the update is over."""
        if self.stopper.stopped:
            raise StopIteration
        # The loss may be evaluated elsewhere, too, and no step follows from that.
        self._expects_losses = True

    def after_loss(self, module: nn.Module, args: tuple[Any, ...], losses: TensorDictBase) -> None:
        """Ask the stopper, or note what it will be asked after the epoch."""
        if not self._expects_losses:
            return
        self._expects_losses = False
        kl = torch.as_tensor(find_kl(losses, self.stopper.kl_key)).detach()
        mask = valid_mask(args[0])
        if mask is None:
            frames = torch.full_like(kl, args[0].numel(), dtype=torch.float64)
        else:
            frames = mask.sum().to(kl.device, torch.float64).expand(kl.shape)
        if self.stopper.when == "minibatch":
            self.stopper.update(kl, weight=frames)
        else:
            self._epoch.append((kl, frames))

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Leave the optimiser nothing to apply: it passes over parameters without a gradient."""
        if self.stopper.stopped:
            optimizer.zero_grad(set_to_none=True)

    def after_epoch(self) -> None:
        """Ask the stopper with ``when="epoch"``, and leave the replay buffer whole."""
        self._expects_losses = False
        if self._epoch:
            kls, frames = zip(*self._epoch, strict=True)
            self._epoch.clear()
            self.stopper.update(torch.stack(kls), weight=torch.stack(frames))
        if self.stopper.stopped:
            # The trainer's own hook has sampled a minibatch before ours ended the epoch.
            drop_rest_of_epoch(self.stopper.replay_buffer)

    def after_batch(self) -> None:
        """Open the next batch."""
        self._epoch.clear()
        self.stopper.reset()


def _replay_buffer(trainer: Trainer) -> ReplayBuffer | None:
    # PPOTrainer keeps its buffer; for a plain Trainer a ReplayBufferTrainer among its modules does.
    owners = [trainer, *trainer._modules.values()]
    buffers = [getattr(owner, "replay_buffer", None) for owner in owners]
    return next((buffer for buffer in buffers if isinstance(buffer, ReplayBuffer)), None)
