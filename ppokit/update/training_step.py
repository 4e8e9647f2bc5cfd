"""TrainingStep: one optimization step on one minibatch, for any TorchRL loss, eager or compiled."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor, nn

from ppokit._checks import choice, positive
from ppokit._compiling import capturing
from ppokit._keys import as_key, check_tensordict, mask_key_of, valid_mask
from ppokit._state import WholeState, check_names, is_of_torch, load_all, state_dict_of
from ppokit.functional import _checks
from ppokit.trust_region import KLEarlyStopper
from ppokit.update.adam import steps_otherwise
from ppokit.update.compiled import CompiledStep, Request, Settings, WithGradients
from ppokit.update.data_parallel import DataParallel
from ppokit.update.decisions import Decision, Outcome, conclude, limits_of
from ppokit.update.eager_step import run_eagerly
from ppokit.update.in_trainer import TrainingStepper
from ppokit.update.pending import MOST_CALLS, Pending
from ppokit.update.step_checks import (
    check_losses,
    check_settings,
    check_step,
    loss_names,
    nonfinite_error,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torchrl.trainers import Trainer


class TrainingStep(WholeState, TensorDictModuleBase):
    r"""One optimization step on one minibatch, for any TorchRL loss.

    ``losses = step(minibatch)`` computes the losses, asks the stopper, sums the ``"loss_*"``, and
    calls ``backward()``, ``clip_grad_norm_``, ``optimizer.step()`` and ``zero_grad()``.

    With ``compile=True``, loss, gradients, their norm and the clipping are one graph of
    ``torch.compile``; Adam and AdamW are a part of it on one process. Losses with
    ``functional=True``, which is torchrl's default, and recurrent networks run eagerly.

    Args:
        loss: a module that returns losses as ``"loss_*"``, each a scalar; they are summed.
            :class:`~ppokit.DualClipPPOLoss`, or torchrl's ``ClipPPOLoss``, ``KLPENPPOLoss``,
            ``PPOLoss``, ``A2CLoss``, ``ReinforceLoss``, ``IPPOLoss``, ``MAPPOLoss``.
        optimizer: any ``torch.optim`` optimizer whose step takes no closure. It must hold every
            parameter that the losses train; freeze others with ``requires_grad_(False)``.
        max_grad_norm: largest norm of all gradients together; None does not clip.
        stopper: a :class:`~ppokit.KLEarlyStopper`. With ``when="minibatch"`` the step asks it
            before each optimizer step. After a stop nothing steps until :meth:`reset`.
        compile: False runs eagerly. True, or a mapping of ``torch.compile``'s arguments, compiles.
            If no graph can be captured, the step warns once with the reason and runs eagerly;
            ``repr`` shows which. The first call runs eagerly in any case: it creates the
            optimizer's state. On several ranks, with float16 and where :class:`~ppokit.PPOUpdate`
            accumulates gradients, the graph ends with the gradients. ``"cudagraphs"``, on CUDA,
            also launches all kernels of a step at once, from the second minibatch of a shape on.
            The networks and options of the first are used until the next batch: call
            :meth:`reset` before you change them (:class:`~ppokit.PPOUpdate` does).
        amp_dtype: ``torch.bfloat16`` or ``torch.float16`` for a forward pass in mixed precision.
            With float16 the loss is scaled; a step whose gradients overflow is skipped.
        nonfinite: what happens if a loss, the KL or a gradient is not finite: ``"raise"`` raises
            FloatingPointError and ``"skip"`` skips the step; the parameters do not change, and the
            minibatch is kept in :attr:`nonfinite_minibatch`. None does not check.
        group: process group whose gradients are averaged, weighted by valid frames. None is the
            default group if ``torch.distributed`` is initialized.

    On a device other than the CPU, whether to step is decided on the device, and the host reads the
    decisions once, in :meth:`settle` or :meth:`reset`. Errors come then, and minibatches after the
    first bad one have not stepped.

    Shape:
        - minibatch: any batch shape that the loss accepts.
        - output: the loss's outputs without gradient, ``"grad_norm"`` (float ``[]``, before
          clipping; NaN without a step) and ``"stepped"`` (bool ``[]``).

    Raises:
        TypeError: ``loss`` or ``optimizer`` is of another kind; the loss returns no ``"loss_*"``.
        ValueError: an argument is out of range; the optimizer lacks a trainable parameter of the
            loss's ``actor_network`` or ``critic_network`` (the message names each), or has none of
            the loss; a loss is not a scalar.
        FloatingPointError: a loss, the KL or a gradient is not finite.

    Example:
        >>> import torch
        >>> from ppokit import GAE, DualClipPPOLoss, GymCollector, TrainingStep
        >>> from ppokit.networks import actor_critic
        >>> actor, critic = actor_critic("CartPole-v1")
        >>> loss = DualClipPPOLoss(actor, critic)
        >>> optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
        >>> step = TrainingStep(loss, optimizer, max_grad_norm=0.5)
        >>> with GymCollector("CartPole-v1", actor, frames_per_batch=64) as collector:
        ...     batch = GAE(gamma=0.99, lmbda=0.95, value_network=critic)(collector.rollout())
        >>> step(batch.reshape(-1)[:32])["stepped"]
        tensor(True)

    References:
        Schulman et al., 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347.
    """

    max_grad_norm = positive(optional=True)
    amp_dtype = choice(None, torch.bfloat16, torch.float16)
    nonfinite = choice("raise", "skip", None)

    def __init__(
        self,
        loss: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        max_grad_norm: float | None = None,
        stopper: KLEarlyStopper | None = None,
        compile: bool | str | Mapping[str, Any] = False,
        amp_dtype: torch.dtype | None = None,
        nonfinite: str | None = "raise",
        group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.loss: Any = loss
        self.optimizer, self.stopper = optimizer, stopper
        self.max_grad_norm, self.amp_dtype, self.nonfinite = max_grad_norm, amp_dtype, nonfinite
        self.group = group
        check_step(self, compile)
        own = getattr(loss, "tensor_keys", None)
        names = [getattr(own, name) for name in ("advantage", "value_target") if hasattr(own, name)]
        self.in_keys = [*dict.fromkeys([*self.loss.in_keys, *names])]
        self.out_keys = [*getattr(loss, "out_keys", ()), "grad_norm", "stepped"]
        replays = compile == "cudagraphs"
        options = compile if isinstance(compile, Mapping) else {}
        self.graphs = None if compile is False else CompiledStep(options, replays=replays)
        #: the last minibatch whose losses or gradients were not finite, if any
        self.nonfinite_minibatch: TensorDictBase | None = None
        self.ranks = DataParallel(group)
        is_scaled = amp_dtype is torch.float16
        self.scaler = torch.amp.GradScaler(self.device.type) if is_scaled else None
        #: sum of the losses and sums of two KLs since the last step, each ``[]``
        self.numbers: list[Tensor] | None = None
        self._is_checked = self._accumulates = False  # whether the losses are, since begin()
        self._adaptive_key: NestedKey | None = None
        self.counts: Tensor | bool = False  #: the last minibatch: not skipped, nor after a stop
        self.pending = Pending()
        self._replays_for_user = False  # CUDA graphs, until the next reset
        self._resets = self._calls_after_stop = self._zeros = self._steps = 0  # see train_on
        self._resume()

    # -- public --------------------------------------------------------------------

    @property
    def stopped(self) -> bool:
        """Whether the KL has stopped the update of this batch; on a device, as of ``settle``."""
        return self.stopper is not None and self.stopper.stopped

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Make one step, and return the loss's outputs, ``"grad_norm"`` and ``"stepped"``."""
        check_tensordict(tensordict, who="TrainingStep")
        check_settings(self)
        self._is_checked, self.numbers = False, None
        if self.pending.is_full or len(self.pending) >= MOST_CALLS:
            self._settle_and_check()
        replays = self.graphs is not None and self.graphs.replays
        if not self._replays_for_user:
            self.note_user_code(within=replays)
        self._replays_for_user = replays
        mask = valid_mask(tensordict, self.mask_key)
        frames = tensordict.batch_size.numel() if mask is None else mask.sum()
        outcome = self.train_on(tensordict, frames)
        decision = outcome.decision
        flag = self.pending.last_flags[0] if decision is None else torch.tensor(decision.stepped)
        return outcome.as_tensordict(grad_norm=outcome.norm, stepped=flag.bool())

    def reset(self) -> None:
        """Close the batch: read the decisions of a device, and open the stopper again.

        Call it after the last minibatch of each batch, on every rank.
        """
        self._settle_and_check()
        self.note_user_code(within=False)
        self._replays_for_user = False
        if self.stopper is not None:
            self.stopper.reset()

    def _settle_and_check(self) -> None:
        self.settle()
        if not _checks.reads_are_free(self.device):
            check_settings(self, waits=True)

    def register(self, trainer: Trainer, name: str = "training_step") -> None:
        """Make the steps of a torchrl ``Trainer``, such as ``PPOTrainer``, and save with it.

        The trainer's loss and optimizer are the step's; its ``clip_norm`` is not used. A stopper
        of the step ends the update of a batch, as with :meth:`KLEarlyStopper.register`, which is
        not needed then. As with every optimization stepper of torchrl, hooks at the stages
        ``"post_loss"``, ``"process_loss"`` and ``"optimizer"`` are not called.

        Args:
            trainer: a trainer with the loss and the optimizer of this step.
            name: name of the step among the trainer's modules.

        Raises:
            ValueError: the trainer has another loss or optimizer, or an optimization stepper; or
                the step's stopper is registered with it.
        """
        TrainingStepper(self).register(trainer, name)

    def extra_repr(self) -> str:
        """Return options, and the execution path."""
        path = "eager" if self.graphs is None else "compiled"
        if self.graphs is not None and self.graphs.reason is not None:
            path = f"eager: {self.graphs.reason}"
        options = f"max_grad_norm={self.max_grad_norm}, nonfinite={self.nonfinite!r}"
        amp = "" if self.amp_dtype is None else f", amp_dtype={self.amp_dtype}"
        return f"{options}{amp}, {path}"

    def __repr__(self) -> str:
        kinds = f"{type(self.loss).__name__}, {type(self.optimizer).__name__}"
        return f"{type(self).__name__}({kinds}, {self.extra_repr()})"

    def get_extra_state(self) -> dict[str, Any]:
        """Return the state of the optimizer, and of the float16 scaler."""
        return {name: state_dict_of(part) for name, part in self.parts.items()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Load what :meth:`get_extra_state` returned, completely or not at all."""
        check_names(state, self.parts, "this training step")
        load_all(self.parts, state)
        self.note_user_code()

    # -- for PPOUpdate ----------------------------------------------------------------

    @property
    def parts(self) -> dict[str, Any]:
        """The parts with a state that are no modules: optimizer, and scaler with float16."""
        scaler = {} if self.scaler is None else {"scaler": self.scaler}
        return {"optimizer": self.optimizer, **scaler}

    @property
    def mask_key(self) -> NestedKey | None:
        """The key of the mask of valid frames: that of the loss."""
        return mask_key_of(self.loss)

    @property
    def parameters_to_train(self) -> list[Tensor]:
        """The parameters of all groups; groups may be added at any time."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return next(p.device for group in self.optimizer.param_groups for p in group["params"])

    @property
    def needs_gradients(self) -> bool:
        """Whether gradients are needed before clipping: a graph cannot make the whole step."""
        return self._accumulates or self.scaler is not None or self.ranks.count > 1

    def begin(self, *, adaptive_key: NestedKey | None = None, accumulates: bool = False) -> None:
        """Begin a batch: drop gradients that others left, and look at the networks once."""
        self._is_checked, self._adaptive_key, self._accumulates = False, adaptive_key, accumulates
        self.optimizer.zero_grad()
        self.numbers = None
        self.pending.begin()
        self._resume()
        self.note_user_code(within=True)
        self._replays_for_user = False
        if self.scaler is not None:  # one that was interrupted would raise
            state = self.scaler.state_dict()
            self.scaler = torch.amp.GradScaler(self.device.type)
            self.scaler.load_state_dict(state)

    def train_on(self, minibatch: TensorDictBase, frames: float | Tensor) -> Outcome:
        """Make one step on a minibatch of so many valid frames."""
        if self.stopper is not None and self.stopper.resets != self._resets:
            if self.pending:  # the user has reset the stopper, and not this
                self.settle()
                self.stopper.reset(wait=False)
            self._resets = self.stopper.resets
            self._calls_after_stop = self._zeros = self._steps = 0
        outcome = self._step_in_graph(minibatch)
        if outcome is None:
            with nullcontext() if self.graphs is None else capturing:
                outcome = run_eagerly(self, minibatch, frames)
        self._steps += outcome.decision is not None and bool(outcome.decision.stepped)
        return outcome

    def _resume(self) -> None:
        #: float64 ``[1]`` on the device: above 0, no step until its decisions are read. A graph
        #: would read the value of a ``[]`` in each call, for a guard.
        self.halted = torch.zeros(1, dtype=torch.float64, device=self.device)

    def settle(self, table: Tensor | None = None) -> list[Decision]:
        """Read the decisions that a device made since the last call, all at once.

        ``table`` is a copy of their table on the host.

        Raises:
            FloatingPointError: with ``nonfinite="raise"``, a minibatch was not finite.
        """
        table = self.pending.table() if table is None else table
        if table is None:
            return []
        self._resume()
        decisions = []
        for minibatch, flags, outcome in self.pending.take(table):
            decision = Decision(*map(bool, flags[:3]))
            self._steps += decision.stepped
            decisions.append(decision)
            if decision.exceeded and self.stopper is not None:
                self.stopper.stop(flags[3])
                break
            if not decision.finite:
                self.keep_nonfinite(minibatch, outcome.as_tensordict())
        return decisions

    # -- compiled ----------------------------------------------------------------------

    def note_user_code(self, *, within: bool | None = None) -> None:
        """Note that code may have run that a graph does not know: guards are checked again.

        With ``within``, none will run before the next call of this method; None keeps the last
        answer.
        """
        if self.graphs is not None:
            self.graphs.begin(within=within)

    def note_optimizer_step(self) -> None:
        """Note a step of the optimizer outside of a graph, which may run code of the user."""
        optimizer = self.optimizer
        if self.graphs is not None and (not is_of_torch(optimizer) or steps_otherwise(optimizer)):
            self.note_user_code()

    def _request(self, minibatch: TensorDictBase, numbers: Tensor) -> Request:
        parts = self.loss, self.eager_losses, self.optimizer
        return Request(*parts, self._settings, minibatch, numbers, self.halted)

    def _settings(self) -> Settings:
        stopper = self.stopper
        return Settings(
            amp_dtype=self.amp_dtype,
            kl_key="kl" if stopper is None else as_key(stopper.kl_key),
            needs_kl=stopper is not None and stopper.when == "minibatch",
            clips=self.max_grad_norm is not None,
            nonfinite=self.nonfinite,
            returns_gradients=self.needs_gradients,
        )

    def _step_in_graph(self, minibatch: TensorDictBase) -> Outcome | None:
        """Make a step in a graph, or return None: it is made eagerly."""
        if self.graphs is None or self.needs_gradients or self.stopped:
            return None
        if any(p.grad is not None for p in self.parameters_to_train):
            return None  # gradients of the user's are added to
        found = self.graphs(self._request(minibatch, self._numbers_of_graph()))
        if found is None:
            return None
        (signature, row, others, norm, flags, gradients), parameters = found
        losses = found[0].losses() if others else None
        for parameter, gradient in zip(parameters if gradients else (), gradients, strict=True):
            parameter.grad = gradient.view_as(parameter)
        outcome = Outcome(losses, (signature.keys, signature.kinds, row), norm, None)
        return conclude(self, minibatch, outcome, flags, steps=bool(gradients))

    def _losses_in_graph(self, minibatch: TensorDictBase) -> TensorDictBase | None:
        """Return the losses, with their gradients, from a graph, or None."""
        if self.graphs is None:
            return None
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        number = torch.tensor([scale], dtype=torch.float64, device=self.device)
        if (found := self.graphs(self._request(minibatch, number))) is None:
            return None
        outputs, parameters = found
        losses = outputs.losses()
        name = loss_names(self.loss, losses)[0]
        return losses.set(name, WithGradients.apply(losses[name], outputs.gradients, *parameters))

    def _numbers_of_graph(self) -> Tensor:
        """Return largest norm, KL limit, whether it is due, and the learning rates, float64."""
        limits = limits_of(self)
        largest = math.inf if self.max_grad_norm is None else self.max_grad_norm
        numbers = [largest, limits.kl, float(limits.is_due)]
        on_device = {}
        for group in self.optimizer.param_groups:
            rate = group["lr"]
            if isinstance(rate, Tensor) and not rate.is_cpu:
                on_device[len(numbers)], rate = rate, 0.0
            numbers.append(float(rate))
        # torch.tensor(device=...) would wait for the device
        found = torch.tensor(numbers, dtype=torch.float64).to(self.device, non_blocking=True)
        for position, rate in on_device.items():
            found[position] = rate
        return found

    # -- eager -------------------------------------------------------------------------

    def eager_losses(self, minibatch: TensorDictBase) -> TensorDictBase:
        """Return what the loss returns for a minibatch, in mixed precision if that is set."""
        if self.amp_dtype is None:
            return self.loss(minibatch)
        with torch.autocast(self.device.type, self.amp_dtype):
            return self.loss(minibatch)

    def checked_losses(self, minibatch: TensorDictBase) -> TensorDictBase:
        """Return the losses, from a graph where there is one; the first of a batch are checked."""
        losses = self._losses_in_graph(minibatch) if self.needs_gradients else None
        if losses is None:
            self.note_user_code()
            losses = self.eager_losses(minibatch)
        if not self._is_checked:
            check_losses(self.loss, losses, self.stopper, kl_key=self._adaptive_key)
            self._is_checked = True
        return losses

    def attempt(self, work: Callable[..., Any], *arguments: Any) -> tuple[Any, Exception | None]:
        """Return the result of some work, or with several ranks the error to raise on all."""
        try:
            return work(*arguments), None
        except Exception as error:
            if self.ranks.count == 1:
                raise
            return None, error

    def note_call_after_stop(self, losses: TensorDictBase) -> None:
        """Warn, once after a stop, where the KL stays 0, as it does on a new batch."""
        kl = None if self.stopper is None else losses.get(self.stopper.kl_key, None)
        self._calls_after_stop += 1
        is_read = kl is not None and _checks.reads_are_free(kl.device)
        if kl is None or not (is_read or self._calls_after_stop % MOST_CALLS == 0):
            return
        is_zero = abs(float(kl.mean())) <= (1e-6 if self.amp_dtype is None else 1e-4)
        self._zeros = self._zeros + 1 if is_zero else min(self._zeros, 0)
        rates = [float(group.get("lr") or 0) for group in self.optimizer.param_groups]
        # An estimate may cross 0 by chance, but not three times in a row. After small steps it may.
        if self._zeros == (3 if self._steps * max(rates) >= 1e-3 else 1_000):
            self._zeros = float("-inf")
            warnings.warn(
                "The KL stop ended the update of an earlier batch, and the KL is 0 now, as on a "
                "new batch, which is not trained on. Call step.reset() after the last minibatch "
                "of each batch.",
                RuntimeWarning,
                stacklevel=7,
            )

    def keep_nonfinite(self, minibatch: TensorDictBase, losses: Any) -> None:
        """Keep a minibatch that was not finite, and raise if that is asked for."""
        self.nonfinite_minibatch = minibatch.clone()
        if self.nonfinite == "raise":
            raise nonfinite_error(minibatch, losses, self.mask_key)
