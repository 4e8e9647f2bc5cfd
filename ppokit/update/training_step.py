"""TrainingStep: one optimization step on one minibatch, for any TorchRL loss, eager or compiled."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from ppokit._batch import (
    Options,
    Parts,
    State,
    StateDict,
    as_key,
    check_tensordict,
    key_named,
    mask_key_of,
    out_keys_of,
    valid_mask,
)
from ppokit._checks import choice, positive
from ppokit._compiling import capturing
from ppokit._state import (
    WholeState,
    check_buffers,
    check_groups,
    check_names,
    is_of_torch,
    load_all,
    state_dict_of,
)
from ppokit.distributed import gather_over_ranks, raise_for_ranks
from ppokit.functional import _checks
from ppokit.trust_region import KLEarlyStopper
from ppokit.update.checks import (
    check_arguments,
    check_losses,
    check_trained,
    loss_names,
    nonfinite_error,
    numbers_in,
    total_and_kls,
    warn_of_slow_bfloat16,
)
from ppokit.update.compiled import CompiledStep, Request
from ppokit.update.data_parallel import DataParallel
from ppokit.update.decision import MOST_CALLS, Decision, Limits, Outcome, Unread, decide
from ppokit.update.graph import Settings, WithGradients, pack_numbers
from ppokit.update.optimizers import set_gradients, step_where, steps_otherwise
from ppokit.update.trainer import TrainingStepper

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torchrl.trainers import Trainer


class TrainingStep(WholeState, TensorDictModuleBase):
    r"""One optimization step on one minibatch, for any TorchRL loss.

    ``losses = step(minibatch)`` computes the losses, asks the stopper, sums the ``"loss_*"``, and
    calls ``backward()``, ``clip_grad_norm_``, ``optimizer.step()`` and ``zero_grad()``.

    With ``compile=True``, loss, gradients, their norm and the clipping are one graph of
    ``torch.compile``; Adam and AdamW are a part of it on one process. Losses with
    ``functional=True``, which is torchrl's default, run eagerly, and so do recurrent networks other
    than :class:`~ppokit.LSTMModule` of one layer in float32 on the CPU.

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
            also launches all kernels of a step at once, from the third minibatch of a shape on.
            Changes of networks and options take effect in the next batch: call :meth:`reset`
            before you make them (:class:`~ppokit.PPOUpdate` does).
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
        compile: bool | str | Options = False,
        amp_dtype: torch.dtype | None = None,
        nonfinite: str | None = "raise",
        group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.loss: Any = loss
        self.optimizer, self.stopper = optimizer, stopper
        self.max_grad_norm, self.amp_dtype, self.nonfinite = max_grad_norm, amp_dtype, nonfinite
        self.group = group
        check_arguments(loss, optimizer, stopper, group, compile)
        names = [x for n in ("advantage", "value_target") if (x := key_named(loss, n)) is not None]
        self.in_keys: list[NestedKey] = [*dict.fromkeys([*self.loss.in_keys, *names])]
        self.out_keys: list[NestedKey] = [*out_keys_of(loss), "grad_norm", "stepped"]
        replays = compile == "cudagraphs"
        options = compile if isinstance(compile, Mapping) else {}
        self.graphs = None if compile is False else CompiledStep(options, replays=replays)
        #: the last minibatch whose losses or gradients were not finite, if any
        self.nonfinite_minibatch: TensorDictBase | None = None
        self.ranks = DataParallel(group)
        is_scaled = amp_dtype is torch.float16
        if amp_dtype is torch.bfloat16 and self.device.type == "cpu":
            warn_of_slow_bfloat16()
        self.scaler = torch.amp.GradScaler(self.device.type) if is_scaled else None
        self.counts: Tensor | bool = False  #: whether statistics include the last minibatch
        self._replays_for_user = False  # CUDA graphs, until the next reset
        self._resets = self._calls_after_stop = self._zeros = self._steps = 0  # see train_on
        self._open_batch(None, accumulates=False)

    # -- public --------------------------------------------------------------------

    @property
    def stopped(self) -> bool:
        """Whether the KL has stopped the update of this batch; on a device, as of ``settle``."""
        return self.stopper is not None and self.stopper.stopped

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Make one step, and return the loss's outputs, ``"grad_norm"`` and ``"stepped"``."""
        check_tensordict(tensordict, who="TrainingStep")
        self.check_settings()
        self._is_checked, self._numbers = False, None
        self._aliases: list[NestedKey] = []  # of the losses: parameters
        if self._unread.is_full or len(self._unread) >= MOST_CALLS:
            self._settle_and_check()
        replays = self.graphs is not None and self.graphs.replays
        if not self._replays_for_user:
            self.note_user_code(within=replays)
        self._replays_for_user = replays
        mask = valid_mask(tensordict, self.mask_key)
        frames = tensordict.batch_size.numel() if mask is None else mask.sum()
        outcome = self.train_on(tensordict, frames)
        stepped = None if outcome.decision is None else torch.tensor(outcome.decision.stepped)
        if outcome.flags is not None:
            stepped = outcome.flags[0].bool()
        assert stepped is not None
        return outcome.as_tensordict(grad_norm=outcome.norm, stepped=stepped)

    def settle(self) -> None:
        """Read the decisions that a device made since the last call, all at once.

        Raises:
            FloatingPointError: with ``nonfinite="raise"``, a minibatch was not finite.
        """
        if not self._unread:
            return
        self._resume()
        for minibatch, outcome in self._unread.read():
            decision = outcome.decision
            assert decision is not None
            self._steps += decision.stepped
            if decision.exceeded and self.stopper is not None:
                self.stopper.stop(decision.kl)
            elif not decision.finite:
                self._keep_nonfinite(minibatch, outcome)
            outcome.forget_losses()

    def reset(self) -> None:
        """Close the batch: read the decisions of a device, and open the stopper again.

        Call it after the last minibatch of each batch, on every rank.
        """
        self._settle_and_check()
        self.note_user_code(within=False)
        self._replays_for_user = False
        if self.stopper is not None:
            self.stopper.reset()

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
        stepper = TrainingStepper(
            self.loss,
            self.optimizer,
            self.stopper,
            make_step=lambda minibatch: (self(minibatch), self.counts),
            settle=self.settle,
            reset=self.reset,
            parts=self._parts_of_trainer,
        )
        stepper.register(trainer, name)

    def _parts_of_trainer(self) -> Parts:
        return self.parts if self.stopper is None else {**self.parts, "stopper": self.stopper}

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

    def get_extra_state(self) -> StateDict:
        """Return the state of the optimizer, and of the float16 scaler."""
        return {name: state_dict_of(part) for name, part in self.parts.items()}

    def set_extra_state(self, state: State) -> None:
        """Load what :meth:`get_extra_state` returned, completely or not at all."""
        check_names(state, self.parts, "this training step")
        load_all(self.parts, state)
        self.note_user_code()

    # -- a batch of PPOUpdate ----------------------------------------------------------

    @property
    def parts(self) -> Parts:
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

    @property
    def must_settle(self) -> bool:
        """Whether so many decisions of a device wait that :meth:`settle` must be called."""
        return self._unread.is_full

    def begin(self, *, adaptive_key: NestedKey | None = None, accumulates: bool = False) -> None:
        """Begin a batch: drop gradients that others left, and look at the networks once."""
        self.optimizer.zero_grad()
        self._open_batch(adaptive_key, accumulates=accumulates)
        self.note_user_code(within=True)
        self._replays_for_user = False
        if self.scaler is not None:  # one that was interrupted would raise
            state = self.scaler.state_dict()
            self.scaler = torch.amp.GradScaler(self.device.type)
            self.scaler.load_state_dict(state)

    def _open_batch(self, adaptive_key: NestedKey | None, *, accumulates: bool) -> None:
        self._adaptive_key, self._accumulates = adaptive_key, accumulates
        self._is_checked = False  # whether the losses of this batch are
        # The sum of the losses, and sums of the KLs of stopper and loss, since the last step.
        self._numbers: list[Tensor] | None = None
        self._error: Exception | None = None  # of this rank, to be raised on all
        self._unread = Unread()
        self._resume()

    def _resume(self) -> None:
        # Float64 [1] on the device: above 0, no step until its decisions are read. A graph would
        # read the value of a [] in each call, for a guard.
        self._halted = torch.zeros(1, dtype=torch.float64, device=self.device)

    def check_settings(self, *, waits: bool = False) -> None:
        """Raise a ValueError where a number that can be set unchecked is out of range.

        These are the options of the optimizer's groups, and coefficients of the loss that were
        filled in place. Tensors on a device are read only with ``waits``. Parameters may have been
        replaced.
        """
        check_groups(self.optimizer.param_groups, self.optimizer, waits=waits)
        if waits or _checks.reads_are_free(self.device):
            check_trained(self.loss, self.optimizer)
            check_buffers(self.loss)
        if (self.amp_dtype is torch.float16) != (self.scaler is not None):
            raise ValueError(
                "amp_dtype=torch.float16 scales the losses: build another TrainingStep."
            )

    def _settle_and_check(self) -> None:
        self.settle()
        if not _checks.reads_are_free(self.device):
            self.check_settings(waits=True)

    # -- one step ----------------------------------------------------------------------

    def train_on(self, minibatch: TensorDictBase, frames: float | Tensor) -> Outcome:
        """Make one step on a minibatch of so many valid frames."""
        if self.stopper is not None and self.stopper.resets != self._resets:
            if self._unread:  # the user has reset the stopper, and not this
                self.settle()
                self.stopper.reset(wait=False)
            self._resets = self.stopper.resets
            self._calls_after_stop = self._zeros = self._steps = 0
        outcome = self._step_in_graph(minibatch)
        if outcome is None:
            with nullcontext() if self.graphs is None else capturing:
                losses = self.add_gradients(minibatch)
                if self.stopped:
                    return self._outcome_after_stop(losses)
                outcome = self.apply_gradients(minibatch, losses, frames)
            decision = outcome.decision
            if self.graphs is not None and decision is not None and not decision.stepped:
                self.graphs.note_skipped_step()
        self._steps += outcome.decision is not None and bool(outcome.decision.stepped)
        return outcome

    def add_gradients(
        self, minibatch: TensorDictBase, weight: float = 1.0
    ) -> TensorDictBase | None:
        """Compute the losses, and add the gradients of their weighted sum to those so far.

        With several ranks, None after an error, which :meth:`apply_gradients` raises on all.
        """
        try:
            losses = self._losses_in_graph(minibatch, weight) if self.needs_gradients else None
            if losses is None:
                self.note_user_code()
                losses = self.eager_losses(minibatch)
                if self.graphs is not None:
                    self.graphs.note_eager_losses()
            if not self._is_checked:
                self.check_losses(losses, self._adaptive_key)
                self._aliases = numbers_in(losses, self.parameters_to_train)
                self._is_checked = True
            if self._aliases:  # their values are those before the step
                found = {key: losses.get(key, None) for key in self._aliases}
                copies = {key: x.clone() for key, x in found.items() if x is not None}
                losses = losses.copy().update(copies)
            if not self.stopped:
                self._backward(losses, weight)
        except Exception as error:
            if self.ranks.count == 1 or self.stopped:
                raise
            self._error = error
            return None
        return losses

    def eager_losses(self, minibatch: TensorDictBase) -> TensorDictBase:
        """Return what the loss returns for a minibatch, in mixed precision if that is set."""
        if self.amp_dtype is None:
            return self.loss(minibatch)
        with torch.autocast(self.device.type, self.amp_dtype):
            return self.loss(minibatch)

    def check_losses(self, losses: TensorDictBase, adaptive_key: NestedKey | None = None) -> None:
        """Raise where no values of these losses can be trained with, or a KL is missing."""
        stopper_key = None if self.stopper is None else self.stopper.kl_key
        check_losses(losses, type(self.loss).__name__, (stopper_key, adaptive_key))

    def _backward(self, losses: TensorDictBase, weight: float) -> None:
        total, kls = total_and_kls(losses, self._kl_key, needs_kl=self._needs_kl)
        numbers = [total.detach(), *kls]
        if self._numbers is not None:
            numbers = [x + y for x, y in zip(self._numbers, numbers, strict=True)]
        self._numbers = numbers
        if weight != 1.0:
            total = total * weight
        if self.scaler is not None:
            total = self.scaler.scale(total)
        total.backward()

    @property
    def _kl_key(self) -> NestedKey:
        return "kl" if self.stopper is None else as_key(self.stopper.kl_key)

    @property
    def _needs_kl(self) -> bool:
        """Whether the stopper reads the KL of each minibatch."""
        return self.stopper is not None and self.stopper.when == "minibatch"

    def apply_gradients(
        self, minibatch: TensorDictBase, losses: TensorDictBase | None, frames: float | Tensor
    ) -> Outcome:
        """Average, clip and apply the gradients of so many frames, unless that is decided against.

        An error of one rank is raised on all of them.
        """
        parameters, largest = self.parameters_to_train, self.max_grad_norm
        numbers, error, self._numbers, self._error = self._numbers, self._error, None, None
        if self.ranks.count > 1:
            if error is not None or numbers is None:
                numbers = [torch.tensor(math.nan, device=self.device)] * 3
            means = self.ranks.average_gradients(parameters, float(frames), torch.stack(numbers))
            numbers = [*means]
            if not math.isfinite(numbers[0].item()):
                failed = gather_over_ranks([error is not None], self.group)[:, 0]
                if failed.any():
                    self.optimizer.zero_grad()
                raise_for_ranks(error, failed)
        assert numbers is not None, "add_gradients() comes before apply_gradients()"
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        device = self.device
        gradients = [p.grad.flatten().to(device) for p in parameters if p.grad is not None]
        # Faster than torch.nn.utils.get_total_norm for the many small parameters of PPO's networks.
        flat = torch.cat(gradients or [torch.zeros(0, device=device)])
        norm = torch.linalg.vector_norm(flat)
        values = [*numbers, norm.square()]
        if self._reads_at_once:
            values, halted, isfinite = torch.stack(values).tolist(), False, math.isfinite
        else:
            halted, isfinite = self._halted[0] > 0, torch.isfinite
        total, *kls, square = values
        decision = decide(total, square, kls, self._limits, halted, isfinite)
        if largest is not None and not (isinstance(square, float) and square <= largest**2):
            clip_grads_with_norm_(parameters, largest, norm)
        outcome = Outcome(losses, None, norm)
        if not self._reads_at_once:
            outcome.norm = torch.where(decision.stepped, norm, math.nan)
            return self._act_on_device(minibatch, outcome, decision.flags(), steps=True)
        is_finite = math.isfinite(total + kls[1])
        return self._act(minibatch, outcome, decision, steps=True, losses_are_finite=is_finite)

    @property
    def _limits(self) -> Limits:
        """The limits of the next minibatch."""
        stopper = self.stopper
        if stopper is None or not self._needs_kl:
            return Limits(math.inf, False, self.nonfinite)
        return Limits(stopper.tolerance * stopper.target_kl, stopper.is_due, self.nonfinite)

    @property
    def _reads_at_once(self) -> bool:
        """Whether the host reads a decision at once: on the CPU, and with several ranks."""
        return _checks.reads_are_free(self.device) or self.needs_gradients

    def _act(
        self,
        minibatch: TensorDictBase,
        outcome: Outcome,
        decision: Decision,
        *,
        steps: bool,
        losses_are_finite: bool = False,
    ) -> Outcome:
        """Act on a decision: step the optimizer, drop the gradients, stop the update, or raise.

        ``steps`` is False if a graph has made the optimizer's step.
        """
        optimizer, stopper, scaler = self.optimizer, self.stopper, self.scaler
        if stopper is not None and self._needs_kl:
            stopper.count()
        # Only the gradients, by the scale: with a scale of 1 the gradients themselves are infinite.
        overflows = scaler is not None and losses_are_finite and scaler.get_scale() > 1
        self.counts = decision.counts
        if steps:
            if decision.stepped:
                optimizer.step() if scaler is None else scaler.step(optimizer)
            if scaler is not None:
                scaler.update(None if overflows else scaler.get_scale())
            optimizer.zero_grad()
            self._note_optimizer_step()
        torch.clear_autocast_cache()  # of an autocast around the call, which keeps its casts
        if decision.exceeded and stopper is not None:
            stopper.stop(decision.kl)
            decision = decision._replace(finite=True)
        outcome.decision = decision
        if not (decision.finite or overflows):
            self._keep_nonfinite(minibatch, outcome)
        if not decision.stepped:
            outcome.norm = torch.full_like(outcome.norm, math.nan)
        return outcome

    def _act_on_device(
        self, minibatch: TensorDictBase, outcome: Outcome, flags: Tensor, *, steps: bool
    ) -> Outcome:
        """Act on a decision of a device, which the host reads later; see :meth:`_act`."""
        if self.stopper is not None and self._needs_kl:
            self.stopper.count()
        if steps:
            step_where(flags[0].bool(), self.optimizer)
            self.optimizer.zero_grad()
            self._note_optimizer_step()
        torch.clear_autocast_cache()
        self.counts, self._halted = flags[4], flags[5:]
        if outcome.losses is not None:
            outcome.losses = outcome.losses.detach()
        outcome.flags = flags
        self._unread.add(minibatch, outcome)
        return outcome

    def _outcome_after_stop(self, losses: TensorDictBase | None) -> Outcome:
        """Return the outcome of a minibatch after a stop, which is not trained on.

        Warns, once after a stop, where the KL stays 0, as it does on a new batch.
        """
        assert losses is not None
        norm = torch.full((), math.nan, device=self.device)
        outcome = Outcome(losses, None, norm, Decision(False, True, True, math.nan, False, True))
        kl = None if self.stopper is None else losses.get(self.stopper.kl_key, None)
        self._calls_after_stop += 1
        is_read = kl is not None and _checks.reads_are_free(kl.device)
        if kl is None or not (is_read or self._calls_after_stop % MOST_CALLS == 0):
            return outcome
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
                stacklevel=6,
            )
        return outcome

    def _keep_nonfinite(self, minibatch: TensorDictBase, outcome: Outcome) -> None:
        """Keep a minibatch that was not finite, and raise if that is asked for."""
        self.nonfinite_minibatch = minibatch.clone()
        if self.nonfinite == "raise":
            raise nonfinite_error(minibatch, outcome.as_tensordict(), self.mask_key)

    # -- in a graph --------------------------------------------------------------------

    def note_user_code(self, *, within: bool | None = None) -> None:
        """Note that code may have run that a graph does not know: guards are checked again.

        With ``within``, none will run before the next call of this method; None keeps the last
        answer.
        """
        if self.graphs is not None:
            self.graphs.begin(within=within)

    def _note_optimizer_step(self) -> None:
        """Note a step of the optimizer outside of a graph, which may run code of the user."""
        optimizer = self.optimizer
        if self.graphs is not None and (not is_of_torch(optimizer) or steps_otherwise(optimizer)):
            self.note_user_code()

    def _request(self, minibatch: TensorDictBase, numbers: Tensor) -> Request:
        parts = self.loss, self.optimizer, self._settings
        return Request(*parts, minibatch, numbers, self._halted)

    def _settings(self) -> Settings:
        return Settings(
            device_type=self.device.type,
            amp_dtype=self.amp_dtype,
            kl_key=self._kl_key,
            needs_kl=self._needs_kl,
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
        largest = math.inf if self.max_grad_norm is None else self.max_grad_norm
        numbers = pack_numbers(largest, self._limits, self.optimizer, self.device)
        found = self.graphs(self._request(minibatch, numbers))
        if found is None:
            return None
        outputs, parameters = found
        steps = bool(outputs.gradients)
        set_gradients(parameters if steps else (), outputs.gradients)
        outcome = outputs.outcome()
        if self._reads_at_once:
            decision = Decision.of(outputs.flags.tolist())
            return self._act(minibatch, outcome, decision, steps=steps)
        return self._act_on_device(minibatch, outcome, outputs.flags, steps=steps)

    def _losses_in_graph(self, minibatch: TensorDictBase, weight: float) -> TensorDictBase | None:
        """Return the losses, with their gradients, from a graph, or None."""
        if self.graphs is None:
            return None
        # Half precision overflows where it does eagerly: with the weight.
        scale = 1.0 if self.scaler is None else self.scaler.get_scale() * (weight or 1.0)
        number = torch.tensor([scale], dtype=torch.float64, device=self.device)
        if (found := self.graphs(self._request(minibatch, number))) is None:
            return None
        outputs, parameters = found
        losses = outputs.losses()
        names = loss_names(losses, type(self.loss).__name__)
        name = max(names, key=lambda key: torch.finfo(losses[key].dtype).bits)  # no rounding
        with_gradients = WithGradients.apply(losses[name], outputs.gradients, scale, *parameters)
        return losses.set(name, with_gradients)
