"""The graphs of a training step: when one is used, and when the step runs eagerly instead."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from ppokit._calls import hooks_in
from ppokit._compiling import CHANGES, Modules, first_line, would_capture
from ppokit._keys import as_key
from ppokit.update.captured_step import CapturedStep, Outputs, WithGradients
from ppokit.update.decisions import Outcome, conclude, limits_of
from ppokit.update.graph_inputs import GraphInputs, Structure
from ppokit.update.step_checks import loss_names

if TYPE_CHECKING:
    from ppokit.update.training_step import TrainingStep

MOST = 8  # structures, each of which takes seconds to capture


class Graphs:
    """The captured forms of one training step."""

    def __init__(self, options: Mapping[str, Any], *, replays: bool) -> None:
        self.options = options
        self.replays = replays  #: as CUDA graphs
        #: calls of each shape since begin(); None: guards are checked in each
        self._calls: dict[torch.Size, int] | None = None
        self._is_of_user = False  # whether the step is called, not an update
        self._is_looked_at = False  # whether the inputs are current
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the graphs: a copy captures its own."""
        return {"options": self.options, "replays": self.replays}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def _forget(self, loss: Any = None, hooks: Any = None) -> None:
        self._loss, self._hooks = loss, hooks  # Dynamo does not look at hooks again
        self.reason: str | None = None  # why no graph is used
        self._captured: dict[Structure, CapturedStep] = {}
        self._failed: dict[Structure, str] = {}
        self._suspect: tuple[Structure, str] | None = None
        self._inputs: GraphInputs | None = None
        self._current: CapturedStep | None = None  # of these inputs
        self._present: tuple[int, ...] | None = None  # parameters at the last look
        self._trained: set[int] = set()  # those that the last eager step had a gradient of

    def begin(self, *, each_call: bool) -> None:
        """Look at the networks again, and until the next ``begin`` only if ``each_call``.

        With CUDA graphs it is until :meth:`close` in any case.
        """
        if each_call and self._is_of_user and self.replays:
            return
        self._calls = None if each_call and not self.replays else {}
        self._is_of_user, self._is_looked_at = each_call, False
        if self._inputs is not None:
            for replayed in self._inputs.replays.values():
                replayed.is_current = False

    def close(self) -> None:
        """Look at the networks again in the next call."""
        self._is_of_user = False

    def note_trained(self, parameters: list[Tensor]) -> None:
        """Note which parameters an eager step has gradients of, before it drops them."""
        self._trained = {id(p) for p in parameters if p.grad is not None}

    def note_eager_success(self) -> None:
        """Give up a graph that could not be captured for a minibatch which runs eagerly."""
        if self._suspect is not None:
            structure, reason = self._suspect
            self._failed[structure], self._suspect = reason, None
            self._run_eagerly(reason)

    def step(self, step: TrainingStep, minibatch: TensorDictBase) -> Outcome | None:
        """Make a step in a graph, or return None: this minibatch is run eagerly."""
        if step.needs_gradients or step.stopped:
            return None
        if self._is_of_user and any(p.grad is not None for p in step.parameters_to_train):
            return None  # gradients of the user's are added to
        found = self._run(step, minibatch, lambda: _numbers_of(step))
        if found is None:
            return None
        (signature, row, others, norm, flags, gradients), parameters = found
        losses = found[0].losses() if others else None
        for parameter, gradient in zip(parameters if gradients else (), gradients, strict=True):
            parameter.grad = gradient.view_as(parameter)
        outcome = Outcome(losses, (signature.keys, signature.kinds, row), norm, None)
        return conclude(step, minibatch, outcome, flags, steps=bool(gradients))

    def losses(self, step: TrainingStep, minibatch: TensorDictBase) -> TensorDictBase | None:
        """Return the losses, with their gradients, from a graph, or None."""
        if not step.needs_gradients:
            return None
        scale = 1.0 if step.scaler is None else step.scaler.get_scale()
        number = torch.tensor([scale], dtype=torch.float64, device=step.device)
        found = self._run(step, minibatch, lambda: number, returns_gradients=True)
        if found is None:
            return None
        outputs, parameters = found
        losses = outputs.losses()
        name = loss_names(step.loss, losses)[0]
        return losses.set(name, WithGradients.apply(losses[name], outputs.gradients, *parameters))

    def _run(
        self,
        step: TrainingStep,
        minibatch: TensorDictBase,
        numbers: Callable[[], Tensor],
        *,
        returns_gradients: bool = False,
    ) -> tuple[Outputs, list[Any]] | None:
        self._suspect = None
        found = self._find(step, returns_gradients) if torch.is_grad_enabled() else None
        if found is None:
            return None  # an eager step raises without gradients
        inputs, captured = found
        shape = minibatch.batch_size
        calls = 0 if self._calls is None else self._calls.get(shape, 0)
        # Between the minibatches of an update no user code runs but forwards.
        is_known = shape in captured.shapes
        checks = calls < 2 or not captured.skips_guards if is_known else None
        outputs = None
        try:
            if self.replays and checks is False:
                outputs = inputs.replay(captured, minibatch, numbers(), step.halted)
                if outputs is None:
                    calls, checks = 0, None
            if outputs is None:
                given = minibatch.contiguous() if self.replays else minibatch
                outputs = captured(given, *inputs.tensors, numbers(), step.halted, checks=checks)
        except Exception as error:
            # After minibatches of other keys Dynamo needs all guards to tell its graphs apart. A
            # graph of dynamic shapes fits views of the start of a tensor, or all others.
            is_view = "storage_offset()" in str(error)
            if would_capture(error) and (checks is False or (is_view and calls)):
                captured.skips_guards = False
                if checks:
                    captured.shapes.discard(shape)
                return self._run(step, minibatch, numbers, returns_gradients=returns_gradients)
            self._note_failure(error, inputs, captured, calls)
            return None
        self.reason = None
        captured.shapes.add(shape)
        if self._calls is not None:
            self._calls[shape] = calls + 1
        return outputs, inputs.parameters

    def _find(
        self, step: TrainingStep, returns_gradients: bool
    ) -> tuple[GraphInputs, CapturedStep] | None:
        """Return the inputs and the captured step for them, or None: no graph can be used."""
        reason = None if self._is_looked_at else self._look(step, returns_gradients)
        inputs, captured = self._inputs, self._current
        if reason is None and inputs is not None and captured is None:
            reason = self._failed.get(inputs.structure)
            captured = self._captured.get(inputs.structure)
            if captured is None and len(self._captured) == MOST:
                reason = f"{MOST} graphs were captured, and the networks or options changed again"
        if reason is not None:
            self._run_eagerly(reason)
        if reason is not None or inputs is None:
            return None
        if captured is None:
            captured = CapturedStep(step.loss, inputs.structure, self.options)
            self._captured[inputs.structure] = captured
        self._current = captured
        return inputs, captured

    def _note_failure(
        self, error: Exception, inputs: GraphInputs, captured: CapturedStep, calls: int
    ) -> None:
        """Note that a graph could not be captured, or that the networks have changed."""
        self._inputs, self._current, self._is_looked_at = None, None, False
        if would_capture(error) and not calls:
            # Other code runs, which may train other parameters: an eager step finds out.
            captured.shapes.clear()
            self._trained = set()
        else:
            reason = CHANGES if would_capture(error) else first_line(error)
            del self._captured[inputs.structure]
            self._suspect = inputs.structure, reason

    def _look(self, step: TrainingStep, returns_gradients: bool) -> str | None:
        """Update the inputs, and return why no graph can be used, or None."""
        loss = step.loss
        if getattr(loss, "functional", False):
            return "functional=True keeps parameters apart from networks; pass functional=False"
        stopper, clips = step.stopper, step.max_grad_norm is not None
        key = "kl" if stopper is None else as_key(stopper.kl_key)
        needs_kl = stopper is not None and stopper.when == "minibatch"
        settings = step.amp_dtype, key, needs_kl, clips, step.nonfinite, returns_gradients
        hooks = [hook for table in hooks_in(vars(loss)) for hook in table.values()]
        if loss is not self._loss or hooks != self._hooks:
            self._forget(loss, hooks)
        if self._inputs is None or not self._inputs.are_current(step.optimizer, settings):
            self._inputs, self._current = None, None
            modules = Modules({"loss": loss}, ignored=loss)
            if modules.have_hooks:
                return "a module or parameter of the networks has a hook, or a forward of its own"
            held = {id(p) for p in step.parameters_to_train}
            present = tuple(id(p) for _, p in modules.parameters if id(p) in held)
            state = step.optimizer.state
            if self._present is None:  # a state that was loaded tells which are trained
                self._trained = {id(p) for p in state if state[p]}
            elif present != self._present:  # until the next eager step
                self._trained = set()
            self._present = present
            if trained := self._trained & held:
                self._inputs = GraphInputs(modules, trained, step.optimizer, settings)
        self._is_looked_at = self._calls is not None and self._inputs is not None
        return None

    def _run_eagerly(self, reason: str) -> None:
        """Warn once of each reason."""
        if reason != self.reason:
            self.reason = reason
            warnings.warn(
                f"The training step runs eagerly: {reason}.", RuntimeWarning, stacklevel=5
            )


def _numbers_of(step: TrainingStep) -> Tensor:
    """Return largest norm, KL limit, whether it is due, and the learning rates, float64."""
    limits = limits_of(step)
    largest = math.inf if step.max_grad_norm is None else step.max_grad_norm
    numbers = [largest, limits.kl, float(limits.is_due)]
    on_device = {}
    for group in step.optimizer.param_groups:
        rate = group["lr"]
        if isinstance(rate, Tensor) and not rate.is_cpu:
            on_device[len(numbers)], rate = rate, 0.0
        numbers.append(float(rate))
    # torch.tensor(device=...) would wait for the device
    found = torch.tensor(numbers, dtype=torch.float64).to(step.device, non_blocking=True)
    for position, rate in on_device.items():
        found[position] = rate
    return found
