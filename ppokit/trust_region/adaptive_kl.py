"""AdaptiveKLCoeff: the coefficient of a KL penalty, moved once per batch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ppokit._batch import State
from ppokit._checks import Checked
from ppokit._state import WholeState
from ppokit.distributed import resolve_group
from ppokit.functional._checks import check_range, check_same_shape
from ppokit.trust_region.mean_kl import AnyKL, find_kl, mean_over_ranks, warn_not_finite

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class AdaptiveKLCoeff(WholeState, nn.Module):
    r"""Move the coefficient of a loss's KL penalty so that an update reaches a target KL.

    .. math::
        \beta \leftarrow \begin{cases}
            increase \cdot \beta & \overline{KL} > 2 \, target\_kl \\
            decrease \cdot \beta & \overline{KL} < 0.5 \, target\_kl \\
            \beta & \text{elsewhere}
        \end{cases}

    (RLlib's rule and factors. Schulman et al., 2017, arXiv:1707.06347, section 4, move the
    coefficient outside of target / 1.5 and target * 1.5, and halve or double it.)

    The coefficient is the loss's buffer ``kl_coeff``. Only :meth:`update` moves it, in place, so
    nothing recompiles. Call it once per batch, with the mean KL over the minibatches of the update.
    It stays between 1e-6 and 1e3, because one near 0 takes long to recover. RLlib's has no limits.

    Args:
        loss: a loss with a buffer ``kl_coeff``, such as :class:`~ppokit.DualClipPPOLoss` built with
            ``kl_coeff=0.2``.
        target_kl: KL divergence that an update should reach, in nats.
        increase: factor if the KL is more than twice the target.
        decrease: factor if the KL is less than half the target.
        group: process group over whose ranks the KL is averaged, so that all move alike. None is
            the default group if ``torch.distributed`` is initialized, else no communication.

    ``state_dict`` holds the coefficient; loading it writes it to the loss.

    To move the learning rate instead, use :class:`~ppokit.AdaptiveLearningRate`.

    Raises:
        AttributeError: the loss has no ``kl_coeff``, or was built without it.
        ValueError: ``target_kl`` is not positive, ``increase`` is not above 1, ``decrease`` is not
            between 0 and 1.
        TypeError: ``group`` is no group that this process belongs to.

    Example:
        >>> from ppokit import AdaptiveKLCoeff, DualClipPPOLoss
        >>> from ppokit.networks import actor_critic
        >>> loss = DualClipPPOLoss(*actor_critic("CartPole-v1"), kl_coeff=0.5)
        >>> adaptive = AdaptiveKLCoeff(loss, target_kl=0.01)
        >>> [adaptive.update(mean_kl) for mean_kl in (0.01, 0.03, 0.001)]
        [0.5, 0.75, 0.375]
        >>> loss.kl_coeff
        tensor(0.3750)
    """

    loss: nn.Module
    kl_key = "kl"
    target_kl = Checked(lambda x: 0 < x < math.inf, "be positive and finite")
    increase = Checked(lambda x: 1 < x < math.inf, "be above 1 and finite")
    decrease = Checked(lambda x: 0 < x < 1, "be between 0 and 1")

    def __init__(
        self,
        loss: nn.Module,
        *,
        target_kl: float = 0.01,
        increase: float = 1.5,
        decrease: float = 0.5,
        group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.target_kl, self.increase, self.decrease = target_kl, increase, decrease
        resolve_group(group)
        # Not a submodule: the loss's parameters would be in this state_dict, too.
        object.__setattr__(self, "loss", loss)
        self.group = group
        self._coefficient()

    def update(self, losses_or_kl: AnyKL, *, weight: Tensor | float | None = None) -> float:
        """Move the coefficient by the mean KL of a batch's update, and return it.

        Args:
            losses_or_kl: the result of the loss or of :class:`~ppokit.PPOUpdate`, or a KL in nats;
                the mean of several values (the minibatches of the update) is used.
            weight: valid frames behind each value, of the same shape; None weighs them equally.

        A KL that is not finite leaves the coefficient alone, with a warning.

        Raises:
            KeyError: the losses hold no ``"kl"``.
            ValueError: ``weight`` has another shape, or is 0 everywhere.
        """
        kl = mean_over_ranks(find_kl(losses_or_kl, self.kl_key), weight, self.group)
        buffer = self._coefficient()
        before = float(buffer)
        if not math.isfinite(kl):
            warn_not_finite(kl, f"kl_coeff stays at {before}")
            return before
        if 0.5 * self.target_kl <= kl <= 2.0 * self.target_kl:
            return before
        factor = self.increase if kl > self.target_kl else self.decrease
        after = torch.tensor(min(max(before * factor, 1e-6), 1e3), dtype=buffer.dtype)
        with torch.no_grad():
            buffer.fill_(after.item())
        return after.item()

    @property
    def target(self) -> tuple[nn.Module, str]:
        """The object whose value moves, and the name of the value."""
        return self.loss, "kl_coeff"

    def _coefficient(self) -> Tensor:
        coefficient = getattr(self.loss, "kl_coeff", None)
        if not isinstance(coefficient, Tensor):
            raise AttributeError(
                f"{type(self.loss).__name__} has no KL penalty (its kl_coeff is {coefficient}). "
                "Build a DualClipPPOLoss with kl_coeff=0.2."
            )
        return coefficient

    def check_state(self, state: State) -> None:
        """Raise a ValueError if the coefficient is out of range."""
        for name, given in state.items():
            if name.endswith("extra_state"):
                check_same_shape({"the state": given, "kl_coeff": self._coefficient()})
                check_range("kl_coeff", given, 0, math.inf, consequence="the KL would grow.")

    def get_extra_state(self) -> Tensor:
        """Return the coefficient, for ``state_dict``."""
        return self._coefficient().detach().clone()

    def set_extra_state(self, state: Tensor) -> None:
        """Write the result of :meth:`get_extra_state` to the loss."""
        with torch.no_grad():
            self._coefficient().copy_(state)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(kl_coeff={float(self._coefficient()):.3g}, "
            f"target_kl={self.target_kl}, increase={self.increase}, decrease={self.decrease})"
        )
