"""A training step in torchrl's ``Trainer``, as its optimization stepper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase
from torchrl.trainers import OptimizationStepper, Trainer

from ppokit._keys import valid_mask
from ppokit._state import check_names, load_all, state_dict_of
from ppokit.trust_region import AdaptiveLearningRate
from ppokit.trust_region.early_stop import TrainerHooks
from ppokit.trust_region.trainer import KLHooks

if TYPE_CHECKING:
    from ppokit.update.training_step import TrainingStep


class TrainingStepper(OptimizationStepper):
    """Calls a training step where a trainer would compute losses and step its optimizer."""

    def __init__(self, training_step: TrainingStep) -> None:
        self._training_step, self.stopper = training_step, training_step.stopper
        self._hooks = None if self.stopper is None else TrainerHooks(self.stopper)
        self.kl_hooks: list[KLHooks] = []  #: of adaptive learning rates

    def step(self, trainer: Trainer, sub_batch: TensorDictBase) -> TensorDictBase:
        """Make one step, and return what the trainer logs."""
        training_step, hooks = self._training_step, self._hooks
        losses = training_step(sub_batch)
        mask = valid_mask(sub_batch, training_step.mask_key)
        if hooks is not None and hooks.block.when == "epoch":
            hooks.add(losses, mask, sub_batch)
        for kl_hooks in self.kl_hooks:
            kl_hooks.add(losses, mask, sub_batch, training_step.counts)
        # NaN after a stop, and the trainer averages over minibatches.
        return losses.exclude("grad_norm") if training_step.stopped else losses

    def register(self, trainer: Trainer, name: str = "training_step") -> None:
        """Take the place of the trainer's losses and optimizer; save with it."""
        own, step = trainer.optimization_stepper, self._training_step
        if trainer.learner_backend != "local" or not (own is None or own is self):
            raise ValueError(
                "step.register(trainer) takes the place of the trainer's optimization_stepper, and "
                f"this trainer has {type(own).__name__} with learner_backend="
                f"{trainer.learner_backend!r}. Build it with optimizer= alone, in this process."
            )
        loss, optimizer = trainer.loss_module, trainer.optimizer
        if loss is not step.loss or optimizer not in (None, step.optimizer):
            raise ValueError(
                "The trainer and the step have different losses or optimizers "
                f"({type(loss).__name__} and {type(step.loss).__name__}, "
                f"{type(optimizer).__name__} and {type(step.optimizer).__name__}): share them."
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
            trainer.register_op(stage, self._training_step.reset)

    def _after_epoch(self) -> None:
        self._training_step.settle()
        if self._hooks is not None:
            self._hooks.update()

    def _parts(self) -> dict[str, Any]:
        stopper = {} if self.stopper is None else {"stopper": self.stopper}
        return self._training_step.parts | stopper

    def state_dict(self) -> dict[str, Any]:
        """Return the state of optimizer, scaler and stopper; the trainer saves the loss."""
        return {name: state_dict_of(part) for name, part in self._parts().items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, completely or not at all."""
        check_names(state_dict, parts := self._parts(), "this training step")
        load_all(parts, state_dict)
