"""The same terms in one pass over the minibatch, in C."""

from __future__ import annotations

import math
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from ppokit.kernels import direct_kernel
from ppokit.objectives import terms
from ppokit.objectives.policies import Categorical, Evaluated, Normal, Policy
from ppokit.objectives.terms import INPUTS, LOSSES, Minibatch, Options, Terms

LARGEST = 2**16  # elements; beyond it torch's vectors and threads are as fast
_DIAGNOSTICS: tuple[str, ...] = (
    "entropy",
    "value_clip_fraction",
    "explained_variance",
    "kl_approx",
)
_DIAGNOSTICS += ("clip_fraction", "ESS", "max_ratio", "mean_ratio", "kl", "dual_clip_fraction")
_Groups = tuple[list[list[Tensor]], terms.Slopes]


def loss_terms(policy: Policy, batch: Minibatch, options: Options) -> Terms | None:
    """Return the terms of the loss, or None where it takes torch; to be called without gradient."""
    kernel, advantage = direct_kernel(), batch.advantage
    if kernel is None or batch.mask is not None or advantage.ndim != 2:
        return None
    if not advantage.is_cpu or advantage.numel() > LARGEST:
        return None
    out = advantage.new_empty(len(LOSSES) + len(_DIAGNOSTICS))
    there = (
        *(True, options.entropy_coeff is not None),
        *(batch.value is not None, options.kl_coeff is not None),
    )
    kinds = [kind for kind in range(len(LOSSES)) if there[kind]]
    found = None
    if isinstance(policy, Evaluated):
        found = _of_log_prob(kernel, policy, batch, options, out, kinds)
    elif policy.parameters[0].numel() <= LARGEST:
        found = _of_parameters(kernel, policy, batch, options, out, kinds)
    if found is None:
        return None
    results = out.unbind()
    diagnostics: dict[str, Tensor] = dict(zip(_DIAGNOSTICS, results[len(LOSSES) :], strict=True))
    if options.entropy_coeff is None:
        del diagnostics["entropy"]
    if batch.old_value is None:
        del diagnostics["value_clip_fraction"]
    explained = diagnostics.pop("explained_variance")
    if batch.value is not None and options.log_explained_variance:
        diagnostics["explained_variance"] = explained.unsqueeze(0)  # of the shape of torchrl's
    # As no views of a common base: users may write to them in place.
    return Terms({LOSSES[kind]: results[kind].data for kind in kinds}, diagnostics, *found)


def _of_parameters(
    kernel: ModuleType,
    policy: Normal | Categorical,
    batch: Minibatch,
    options: Options,
    out: Tensor,
    kinds: list[int],
) -> _Groups | None:
    compute = (
        kernel.normal_loss_terms if isinstance(policy, Normal) else kernel.categorical_loss_terms
    )
    advantage, parameters = batch.advantage, policy.parameters
    slopes = parameters[0].new_empty((3, len(parameters), *parameters[0].shape))
    of_value = advantage.new_empty((1, *advantage.shape))
    numbers, name = _numbers(options, advantage), options.loss_critic_type
    if compute(*policy, *batch[:-1], numbers, name, slopes, of_value, out) is not True:
        return None
    objective, entropy, kl = slopes.unbind()
    every = ((0, objective), (0, entropy), (1, of_value), (0, kl))
    links = {(number, every[kind][0]): every[kind][1] for number, kind in enumerate(kinds)}
    return [parameters] if batch.value is None else [parameters, [batch.value]], links


def _of_log_prob(
    kernel: ModuleType,
    policy: Evaluated,
    batch: Minibatch,
    options: Options,
    out: Tensor,
    kinds: list[int],
) -> _Groups | None:
    slopes = batch.advantage.new_empty((4, *batch.advantage.shape))
    numbers, name = _numbers(options, batch.advantage), options.loss_critic_type
    if kernel.loss_terms(*policy[:2], *batch[:-1], numbers, name, slopes, out) is not True:
        return None
    links = {(number, INPUTS[kind]): slopes[kind] for number, kind in enumerate(kinds)}
    return terms.through(policy, links, batch.value)


def _numbers(options: Options, like: Tensor) -> tuple[float, ...]:
    low, high = options.clip_epsilon
    dual_clip = options.dual_clip
    return (
        _log1p(-low.item(), low.dtype),
        _log1p(high.item(), high.dtype),
        math.inf if dual_clip is None else _log(dual_clip.item(), like.dtype),
        0.0 if options.clip_value is None else options.clip_value.item(),
        math.inf if options.loss_clip is None else options.loss_clip.item(),
        0.0 if options.entropy_coeff is None else options.entropy_coeff.item(),
        0.0 if options.critic_coeff is None else options.critic_coeff.item(),
        0.0 if options.kl_coeff is None else options.kl_coeff.item(),
        1 / like.numel() if options.reduction == "mean" else 1.0,
    )


# As torch rounds them, in the dtype of the buffer, so that both paths clip at the same ratio.
@lru_cache
def _log1p(x: float, dtype: torch.dtype) -> float:
    return torch.tensor(x, dtype=dtype).log1p().item()


@lru_cache
def _log(x: float, dtype: torch.dtype) -> float:
    return torch.tensor(x, dtype=dtype).log().item()
