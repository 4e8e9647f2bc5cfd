"""The same terms in one pass over the minibatch, in C."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from ppokit.kernels import direct_kernel
from ppokit.objectives import terms
from ppokit.objectives.policies import Evaluated, Normal, Policy
from ppokit.objectives.slopes import Group
from ppokit.objectives.terms import (
    CRITIC,
    LOSSES,
    Coefficients,
    Minibatch,
    Settings,
    Summary,
    Terms,
)

LARGEST = 2**16  # elements; beyond it torch's vectors and threads are as fast
# In the kernel's order.
_RESULTS = (
    *LOSSES,
    *("entropy", "value_clip_fraction", "explained_variance", "kl_approx", "clip_fraction"),
    *("ESS", "max_ratio", "mean_ratio", "kl", "dual_clip_fraction"),
)


def loss_terms(
    policy: Policy, batch: Minibatch, coefficients: Coefficients, settings: Settings
) -> Terms | None:
    """Return the terms of the loss, or None where it takes torch."""
    kernel, advantage = direct_kernel(), batch.advantage
    if kernel is None or batch.mask is not None or advantage.ndim != 2 or not advantage.is_cpu:
        return None
    numbers = kernel.numbers(*coefficients)
    if numbers is NotImplemented or advantage.numel() > LARGEST:
        return None
    weight = 1 / advantage.numel() if settings.reduction == "mean" else 1.0
    dtypes = coefficients.clip_epsilon_low.dtype, advantage.dtype
    prepared = _prepared(numbers, *dtypes, weight)
    value = batch.value
    layout = _layout(
        numbers[5] is not None,
        value is not None,
        numbers[7] is not None,
        batch.old_value is not None,
        settings.log_explained_variance,
    )
    arguments = *batch[:-1], prepared, settings.loss_critic_type, layout.results
    if isinstance(policy, Evaluated):
        found = kernel.loss_terms(*policy[:2], *arguments)
    elif policy.parameters[0].numel() > LARGEST:
        return None
    elif isinstance(policy, Normal):
        found = kernel.normal_loss_terms(*policy, *arguments)
    else:
        found = kernel.categorical_loss_terms(*policy, *arguments)
    if found is NotImplemented:
        return None
    losses, diagnostics, slopes, value_slopes, summary = found
    if isinstance(policy, Evaluated):
        groups = terms.through(policy, {kind: slopes[kind] for kind in layout.kinds}, value)
    else:
        groups = [Group(policy.parameters, layout.of_policy, layout.rows, slopes)]
        if value is not None:
            groups.append(Group((value,), layout.of_critic, (0,), value_slopes))
    names = layout.losses
    return Terms(dict(zip(names, losses, strict=True)), diagnostics, groups, Summary(*summary))


class _Layout(NamedTuple):
    """Which results there are."""

    kinds: tuple[int, ...]  #: of losses
    losses: tuple[str, ...]
    results: tuple[str | None, ...]  #: None: left out
    of_policy: tuple[int, ...]  #: numbers, among the losses, of policy loss, entropy and KL
    rows: tuple[int, ...]  #: of their slopes
    of_critic: tuple[int, ...]


@lru_cache
def _layout(entropy: bool, critic: bool, kl: bool, clip: bool, explained: bool) -> _Layout:
    present = (True, entropy, critic, kl, entropy, clip, critic and explained)
    present += (True,) * (len(_RESULTS) - len(present))
    results = tuple(name if there else None for name, there in zip(_RESULTS, present, strict=True))
    kinds = tuple(kind for kind in range(len(LOSSES)) if present[kind])
    of_policy = tuple(number for number, kind in enumerate(kinds) if kind != CRITIC)
    return _Layout(
        kinds,
        tuple(LOSSES[kind] for kind in kinds),
        results,
        of_policy,
        tuple(row for row, kind in enumerate((0, 1, 3)) if present[kind]),
        (kinds.index(CRITIC),) if critic else (),
    )


@lru_cache
def _prepared(
    numbers: tuple[float | None, ...], dtype: torch.dtype, result_dtype: torch.dtype, weight: float
) -> tuple[float, ...]:
    """Return the coefficients as the kernel takes them.

    Logarithms are taken by torch, in the dtype of the coefficient, so that both paths clip at the
    same ratio.
    """
    low, high, dual_clip, clip_value, loss_clip, entropy, critic, kl = numbers
    bounds = torch.tensor([-(low or 0.0), high or 0.0], dtype=dtype).log1p().tolist()
    if dual_clip is not None:
        log_dual = torch.tensor(dual_clip, dtype=result_dtype).log().item()
    else:
        log_dual = math.inf
    largest = math.inf if loss_clip is None else loss_clip
    rest = (x or 0.0 for x in (entropy, critic, kl))
    return (*bounds, log_dual, clip_value or 0.0, largest, *rest, weight)
