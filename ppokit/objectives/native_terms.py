"""The same terms in one pass over the minibatch, in C."""

from __future__ import annotations

import math
from types import ModuleType

from torch import Tensor

from ppokit.kernels import direct_kernel
from ppokit.objectives import terms
from ppokit.objectives.policies import Normal, Policy
from ppokit.objectives.terms import INPUTS, LOSSES, Minibatch, Options, Terms

LARGEST = 2**16  # elements; beyond it torch's vectors and threads are as fast
_DIAGNOSTICS = ("entropy", "value_clip_fraction", "explained_variance", "kl_approx")
_DIAGNOSTICS += ("clip_fraction", "ESS", "max_ratio", "mean_ratio", "kl", "dual_clip_fraction")
_Groups = tuple[list[list[Tensor]], terms.Slopes]


def loss_terms(policy: Policy, batch: Minibatch, options: Options) -> Terms | None:
    """Return the terms of the loss, or None where it takes torch; to be called without gradient."""
    kernel, advantage = direct_kernel(), batch.advantage
    if kernel is None or batch.mask is not None or advantage.ndim != 2 or not advantage.is_cpu:
        return None
    if advantage.numel() > LARGEST:
        return None
    out = advantage.new_empty(len(LOSSES) + len(_DIAGNOSTICS))
    there = (
        *(True, options.entropy_coeff is not None),
        *(batch.value is not None, options.kl_coeff is not None),
    )
    kinds = [kind for kind in range(len(LOSSES)) if there[kind]]
    compute = _of_normal if isinstance(policy, Normal) else _of_any
    found = compute(kernel, policy, batch, options, out, kinds)
    if found is None:
        return None
    results = out.unbind()
    diagnostics = dict(zip(_DIAGNOSTICS, results[len(LOSSES) :], strict=True))
    if options.entropy_coeff is None:
        del diagnostics["entropy"]
    if batch.old_value is None:
        del diagnostics["value_clip_fraction"]
    explained = diagnostics.pop("explained_variance")
    if batch.value is not None and options.log_explained_variance:
        diagnostics["explained_variance"] = explained.unsqueeze(0)  # of the shape of torchrl's
    return Terms({LOSSES[kind]: results[kind] for kind in kinds}, diagnostics, *found)


def _of_normal(
    kernel: ModuleType,
    policy: Normal,
    batch: Minibatch,
    options: Options,
    out: Tensor,
    kinds: list[int],
) -> _Groups | None:
    loc, scale, *_ = policy
    slopes = loc.new_empty((3, 2, *loc.shape))
    of_value = batch.advantage.new_empty((1, *batch.advantage.shape))
    numbers, name = _numbers(options, batch.advantage.numel()), options.loss_critic_type
    arguments = (*policy, *batch[:-1], numbers, name, slopes, of_value, out)
    if kernel.normal_loss_terms(*arguments) is not True:
        return None
    objective, entropy, kl = slopes.unbind()
    every = ((0, objective), (0, entropy), (1, of_value), (0, kl))
    links = {(number, every[kind][0]): every[kind][1] for number, kind in enumerate(kinds)}
    return [[loc, scale]] if batch.value is None else [[loc, scale], [batch.value]], links


def _of_any(
    kernel: ModuleType,
    policy: Policy,
    batch: Minibatch,
    options: Options,
    out: Tensor,
    kinds: list[int],
) -> _Groups | None:
    evaluated = policy.evaluate()
    slopes = batch.advantage.new_empty((4, *batch.advantage.shape))
    numbers, name = _numbers(options, batch.advantage.numel()), options.loss_critic_type
    arguments = (*evaluated[:2], *batch[:-1], numbers, name, slopes, out)
    if kernel.loss_terms(*arguments) is not True:
        return None
    links = {(number, INPUTS[kind]): slopes[kind] for number, kind in enumerate(kinds)}
    return terms.through(evaluated, links, batch.value)


def _numbers(options: Options, frames: int) -> tuple[float, ...]:
    low, high = options.clip_epsilon
    return (
        low.item(),
        high.item(),
        math.inf if options.dual_clip is None else options.dual_clip.item(),
        0.0 if options.clip_value is None else options.clip_value.item(),
        math.inf if options.loss_clip is None else options.loss_clip.item(),
        0.0 if options.entropy_coeff is None else options.entropy_coeff.item(),
        0.0 if options.critic_coeff is None else options.critic_coeff.item(),
        0.0 if options.kl_coeff is None else options.kl_coeff.item(),
        1 / frames if options.reduction == "mean" else 1.0,
    )
