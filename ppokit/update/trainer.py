"""A training step in torchrl's ``Trainer``, as its optimization stepper."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.trainers import OptimizationStepper, Trainer

from ppokit._batch import Parts, State, StateDict, mask_key_of, valid_mask
from ppokit._state import check_names, load_all, state_dict_of
from ppokit.trust_region import AdaptiveLearningRate, KLEarlyStopper
from ppokit.trust_region.early_stop import TrainerHooks
from ppokit.trust_region.trainer import KLHooks


class TrainingStepper(OptimizationStepper):
    """Calls a training step where a trainer would compute losses and step its optimizer.

    Args:
        loss: the step's.
        optimizer: likewise.
        stopper: likewise, or None.
        make_step: returns the step's output, and whether the minibatch was trained on.
        settle: reads the decisions of a device.
        reset: closes a batch.
        parts: returns the parts to save, by name.
    """

    def __init__(
        self,
        loss: nn.Module,
        optimizer: torch.optim.Optimizer,
        stopper: KLEarlyStopper | None,
        *,
        make_step: Callable[[TensorDictBase], tuple[TensorDictBase, Tensor | bool]],
        settle: Callable[[], None],
        reset: Callable[[], None],
        parts: Callable[[], Parts],
    ) -> None:
        self._loss, self._optimizer, self.stopper = loss, optimizer, stopper
        self._make_step, self._settle, self._reset = make_step, settle, reset
        self._parts = parts
        self._hooks = None if self.stopper is None else TrainerHooks(self.stopper)
        self.kl_hooks: list[KLHooks] = []  #: of adaptive learning rates

    def step(self, trainer: Trainer, sub_batch: TensorDictBase) -> TensorDictBase:
        """Make one step, and return what the trainer logs."""
        losses, counts = self._make_step(sub_batch)
        mask = valid_mask(sub_batch, mask_key_of(self._loss))
        if self._hooks is not None and self._hooks.block.when == "epoch":
            self._hooks.add(losses, mask, sub_batch)
        for kl_hooks in self.kl_hooks:
            kl_hooks.add(losses, mask, sub_batch, counts)
        # NaN after a stop, and the trainer averages over minibatches.
        is_stopped = self.stopper is not None and self.stopper.stopped
        return losses.exclude("grad_norm") if is_stopped else losses

    def register(self, trainer: Trainer, name: str = "training_step") -> None:
        """Take the place of the trainer's losses and optimizer; save with it."""
        own = trainer.optimization_stepper
        if trainer.learner_backend != "local" or not (own is None or own is self):
            raise ValueError(
                "step.register(trainer) takes the place of the trainer's optimization_stepper, and "
                f"this trainer has {type(own).__name__} with learner_backend="
                f"{trainer.learner_backend!r}. Build it with optimizer= alone, in this process."
            )
        loss, optimizer = trainer.loss_module, trainer.optimizer
        if loss is not self._loss or optimizer not in (None, self._optimizer):
            raise ValueError(
                "The trainer and the step have different losses or optimizers "
                f"({type(loss).__name__} and {type(self._loss).__name__}, "
                f"{type(optimizer).__name__} and {type(self._optimizer).__name__}): share them."
            )
        if self.stopper is not None and self.stopper in trainer._modules.values():
            raise ValueError(
                "The step's stopper is registered with this trainer: step.register() does both."
            )
        if any(isinstance(module, AdaptiveLearningRate) for module in trainer._modules.values()):
            raise ValueError("Register the training step before the AdaptiveLearningRate.")
        super().register(trainer, name)
        trainer.optimization_stepper = self
        if self._hooks is not None:
            trainer.register_op("process_optim_batch", self._hooks.before_minibatch)
            self._hooks.find_buffer(trainer)
        trainer.register_op("post_epoch", self._after_epoch)
        for stage in ("post_steps", "setup"):  # also of a run that was interrupted in a batch
            trainer.register_op(stage, self._reset)

    def _after_epoch(self) -> None:
        self._settle()
        if self._hooks is not None:
            self._hooks.update()

    def state_dict(self) -> StateDict:
        """Return the state of optimizer, scaler and stopper; the trainer saves the loss."""
        return {name: state_dict_of(part) for name, part in self._parts().items()}

    def load_state_dict(self, state_dict: State) -> None:
        """Load what :meth:`state_dict` returned, completely or not at all."""
        check_names(state_dict, parts := self._parts(), "this training step")
        load_all(parts, state_dict)
