"""AdaptiveLearningRate: the learning rate, moved after each epoch or minibatch by the KL."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from tensordict.utils import NestedKey
from torch import Tensor, nn

from ppokit._batch import as_key
from ppokit._checks import Checked, choice
from ppokit._state import WholeState, refuse_torch_schedulers
from ppokit.distributed import resolve_group
from ppokit.functional import _checks
from ppokit.trust_region.mean_kl import AnyKL, find_kl, sums_over_ranks, warn_not_finite
from ppokit.trust_region.trainer import KLHooks, accumulates_gradients, optimizers_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torchrl.trainers import Trainer


class AdaptiveLearningRate(WholeState, nn.Module):
    r"""Move the learning rate of an optimizer so that updates reach a target KL.

    .. math::
        \alpha \leftarrow \begin{cases}
            \max(\alpha / factor, low) & \overline{KL} > 2 \, target\_kl \\
            \min(\alpha \cdot factor, high) & 0 < \overline{KL} < 0.5 \, target\_kl \\
            \alpha & \text{elsewhere}
        \end{cases}

    (rsl_rl's rule: Rudin et al., 2021, arXiv:2109.11978; also torchrl's ``KLAdaptiveLR``.)

    A KL of 0 does not move the rate: the first minibatch has it, before any step. A KL of at most
    1e-7 counts as 0, since a compiled loss rounds to about that. A KL that is not finite does not
    move the rate either; on the CPU it causes a warning.

    Args:
        optimizer: the rates of all of its parameter groups move.
        target_kl: KL divergence that an update should reach, in nats.
        factor: divides the rate above twice the target, and multiplies it below half the target.
        bounds: lowest and highest rate of every group.
        when: ``"epoch"`` (skrl) or ``"minibatch"`` (rsl_rl), for :class:`~ppokit.PPOUpdate` and
            :meth:`register`. They move the rate after the optimizer step; rsl_rl before it.
        kl_key: where the loss writes its KL.
        group: process group over whose ranks the KL is averaged; each rank calls :meth:`update`
            equally often. None is the default group if ``torch.distributed`` is initialized.

    The rates are in the optimizer's ``state_dict``; this block has no other state. A KL on a GPU is
    not read: the rates become float32 tensors there, written in place (use a fused optimizer).

    Raises:
        TypeError: ``optimizer`` or ``group`` is of another kind.
        ValueError: an argument is out of range, a rate is outside of ``bounds``, or a scheduler of
            torch drives a rate.

    Example:
        >>> import torch
        >>> from ppokit import AdaptiveLearningRate
        >>> optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
        >>> adaptive = AdaptiveLearningRate(optimizer, target_kl=0.01, factor=2.0)
        >>> adaptive.update(0.03)
        >>> optimizer.param_groups[0]["lr"]
        0.0005
    """

    target_kl = Checked(lambda x: 0 < x < math.inf, "be positive and finite")
    factor = Checked(lambda x: 1 < x < math.inf, "be above 1 and finite")
    bounds = Checked(
        lambda x: len(x) == 2 and 0 < x[0] <= x[1] < math.inf,
        "be two finite numbers, 0 < low <= high",
        tuple,
    )
    when = choice("minibatch", "epoch")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        target_kl: float = 0.01,
        factor: float = 1.5,
        bounds: tuple[float, float] = (1e-5, 1e-2),
        when: str = "epoch",
        kl_key: NestedKey = "kl",
        group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be an Optimizer, got {type(optimizer).__name__}.")
        self.target_kl, self.factor, self.bounds, self.when = target_kl, factor, bounds, when
        low, high = bounds
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        on_host = all(_checks.reads_are_free(p.device) for p in parameters)
        groups = optimizer.param_groups
        if not on_host and any(x.get("foreach") and not x.get("capturable", True) for x in groups):
            raise ValueError(
                "On a device the learning rate is a tensor, and torch takes one with foreach=True "
                "only if capturable=True: pass fused=True or capturable=True to the optimizer."
            )
        if not all(low * (1 - 1e-6) <= rate <= high * (1 + 1e-6) for rate in rates):  # float32
            raise ValueError(f"The learning rates {rates} must lie within bounds={bounds}.")
        resolve_group(group)
        self.optimizer, self.kl_key, self.group = optimizer, as_key(kl_key), group
        refuse_torch_schedulers(optimizer)

    @property
    def target(self) -> tuple[torch.optim.Optimizer, str]:
        """The object whose values move, and the name of the values."""
        return self.optimizer, "lr"

    @torch.no_grad()
    def update(self, losses_or_kl: AnyKL, *, weight: Tensor | float | None = None) -> None:
        """Move the rates by the mean KL of a minibatch, an epoch or an update.

        Arguments and errors are as in :meth:`KLEarlyStopper.update`, but with a ``weight`` of 0
        everywhere the rates stay. ValueError is raised if a scheduler of torch drives them by now.
        """
        refuse_torch_schedulers(self.optimizer)
        total, frames, _ = sums_over_ranks(find_kl(losses_or_kl, self.kl_key), weight, self.group)
        kl = total / frames  # NaN without frames
        if _checks.reads_are_free(kl.device) and frames and not kl.isfinite():
            warn_not_finite(kl.item(), "the learning rate stays")
        above = kl.isfinite() & (kl > 2.0 * self.target_kl)
        below = (kl > 1e-7) & (kl < 0.5 * self.target_kl)
        one = torch.ones_like(kl)
        scale = torch.where(above, one / self.factor, torch.where(below, one * self.factor, one))
        groups = self.optimizer.param_groups
        # All of them before one is written: groups may share a tensor.
        rates = [
            torch.where(scale == 1, group["lr"], (scale * group["lr"]).clamp(*self.bounds))
            for group in groups
        ]
        for group, rate in zip(groups, rates, strict=True):
            if isinstance(group["lr"], Tensor) and group["lr"].device == rate.device:
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate.item() if _checks.reads_are_free(rate.device) else rate.float()

    def register(self, trainer: Trainer, name: str = "adaptive_learning_rate") -> None:
        """Move the rates in the updates of a torchrl ``Trainer``, such as ``PPOTrainer``.

        Raises:
            ValueError: the trainer has another optimizer, or it accumulates gradients and ``when``
                is ``"minibatch"``.
            RuntimeError: the trainer updates in another process, or ``name`` is taken.
        """
        if optimizers_of(trainer) - {self.optimizer}:
            raise ValueError("The trainer has another optimizer than the AdaptiveLearningRate.")
        if self.when == "minibatch" and accumulates_gradients(trainer):
            raise ValueError("With gradients accumulated over minibatches, use when='epoch'.")
        trainer.register_module(name, self)
        hooks = KLHooks(self)
        # The graph of a TrainingStep runs no hook on the loss.
        hooks.register_hooks(trainer, getattr(trainer.optimization_stepper, "kl_hooks", None))
        if self.when == "minibatch":
            trainer.register_op("post_optim", hooks.update)

    def extra_repr(self) -> str:
        """Return the rates and the options."""
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        return f"lr={rates}, target_kl={self.target_kl}, factor={self.factor}, when={self.when!r}"
