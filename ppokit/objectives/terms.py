"""The terms of the loss for each frame, their reductions, and diagnostics, over the valid frames.

First the policy: its distribution, the log-ratios of the actions, and the exact KL. Without a valid
frame the diagnostics are as for a policy that has not moved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
)
from tensordict.utils import NestedKey, expand_as_right
from torch import Tensor, nn
from torch import distributions as d
from torchrl.modules import MaskedCategorical
from torchrl.modules.distributions.utils import has_analytic_kl

from ppokit._batch import Entries, as_key, get_if_any, key_parts
from ppokit._calls import overridden
from ppokit.functional import _checks, kl_estimate, masked_std
from ppokit.functional.surrogates import clip_log_ratio
from ppokit.policies.distributions import (
    Categorical,
    KnownDistribution,
    Normal,
    bernoulli_kl,
    find_family,
    sum_of_heads,
)

LogProbs = Tensor | TensorDictBase  #: of the whole action, or of each head
Keys = NestedKey | list[NestedKey]
_OF_ACTOR = ("get_dist", "get_dist_params", "build_dist_from_params")
_DTYPES = (torch.float32, torch.float64)


def last_module(actor: nn.Module) -> ProbabilisticTensorDictModule | None:
    """Return the module that makes the distribution, or None if the actor does so itself."""
    if not isinstance(actor, ProbabilisticTensorDictSequential):
        return None
    is_plain = isinstance(actor.module, nn.ModuleList) and not actor.return_composite
    if not is_plain or overridden(actor, ProbabilisticTensorDictSequential, _OF_ACTOR):
        return None
    return cast("ProbabilisticTensorDictModule", actor.module[-1])


def known_distribution(
    head: nn.Module | None, entries: Entries | TensorDictBase
) -> KnownDistribution | None:
    """Return the known distribution that a module makes of these entries, or None."""
    if not isinstance(head, ProbabilisticTensorDictModule):
        return None
    names = [key if isinstance(key, str) else str(key[-1]) for key in head.dist_keys]
    family = find_family(head.distribution_class, head.distribution_kwargs, names)
    if isinstance(family, str) or overridden(head, ProbabilisticTensorDictModule, ("get_dist",)):
        return None
    by_name = dict(zip(names, head.in_keys, strict=True))
    first, *others = [cast("Any", entries.get(by_name[name], None)) for name in family.names]
    if not isinstance(first, Tensor) or not first.ndim or first.dtype not in _DTYPES:
        return None
    for name, x in zip(family.names[1:], others, strict=True):
        dtype = torch.bool if name == "mask" else first.dtype
        if not isinstance(x, Tensor) or x.dtype is not dtype or x.shape != first.shape:
            return None
    return family(first, *others)


def check_action(key: NestedKey, action: Tensor, head: d.Distribution) -> None:
    """Raise a ValueError for an action that would broadcast, or is no index of a choice."""
    size, inner = head.batch_shape + head.event_shape, head
    while isinstance(inner, d.Independent):
        inner = inner.base_dist
    # torchrl's one-hot choices have another shape than their events
    is_index = type(inner) in (d.Categorical, MaskedCategorical)
    pairs = zip(action.shape, size, strict=False)
    is_less = action.ndim < len(size)
    broadcasts = is_less or (action.ndim == len(size) and any(x == 1 < y for x, y in pairs))
    if broadcasts or (is_index and action.shape != size):
        raise ValueError(
            f"{as_key(key)!r} has shape {list(action.shape)}, and the policy's actions have "
            f"{list(size)}: it would broadcast, or be another action. Store each as the policy "
            "returns it, without a further dimension (use .squeeze(-1)); for choices, "
            "categorical_action_encoding of the collector says whether they are indices."
        )


def log_ratios(
    new: LogProbs,
    old: LogProbs,
    ndim: int,
    *,
    log_prob_key: Keys,
    action_key: Keys,
) -> dict[NestedKey | None, Tensor]:
    """Return the log-ratio ``[*B]`` of each head, or that of all heads together under None."""
    if isinstance(new, Tensor) or isinstance(old, Tensor):
        new, old = (
            x if isinstance(x, Tensor) else sum_of_heads(x.values(True, True), ndim)
            for x in (new, old)
        )
        pairs = {None: (new, old)}
    else:
        pairs = {key: (new.get(key), x) for key, x in old.items(True, True)}
    for key, (x, stored) in pairs.items():
        if x.shape != stored.shape:
            key = log_prob_key if key is None else key
            raise ValueError(
                f"{key!r} has shape {list(stored.shape)}, but the policy's log-probability of the "
                f"action {action_key!r} has shape {list(x.shape)}: the two would "
                "broadcast into an outer product over samples. They are one number a frame, "
                "without a trailing dimension: use .squeeze(-1), or return_log_prob=True."
            )
    if None in pairs:
        return {None: new - old}
    return {key: sum_of_heads([x - stored], ndim) for key, (x, stored) in pairs.items()}


def expanded_advantage(
    advantage: Tensor, log_ratio: Tensor, *, key: NestedKey, of_ratio: Keys | None
) -> Tensor:
    """Return the advantage in the shape of the log-ratio ``[*B, 1]``; a team's is its agents'.

    ``key`` and ``of_ratio`` are the keys of advantage and log-probability.
    """
    if advantage.shape[:-1] == log_ratio.shape[:-1]:  # of several objectives [*B, K]
        return advantage
    size = advantage.shape[:-1]
    if log_ratio.shape[: len(size)] != size:
        raise ValueError(
            f"{of_ratio!r} has shape {list(log_ratio.shape[:-1])}, and "
            f"{key!r} {list(advantage.shape)}: it must be [*B, agents, 1] or [*B, 1]."
        )
    return expand_as_right(advantage.squeeze(-1), log_ratio)


def stored_parameters(
    head: ProbabilisticTensorDictModule, tensordict: TensorDictBase
) -> Entries | None:
    """Return the parameters that a ProbabilisticActor stored at collection, or None."""
    values: dict[NestedKey, Any] = {}
    for key in head.in_keys:
        entry: Any = get_if_any(tensordict, key)
        nested = is_tensor_collection(entry)  # of a composite distribution
        parts = entry.items(True, True) if nested else [((), entry)]
        values |= {as_key((*key_parts(key), *key_parts(name))): x for name, x in parts}
    return values if values and all(isinstance(x, Tensor) for x in values.values()) else None


def exact_kl(
    head: ProbabilisticTensorDictModule,
    old: Entries,
    new: Entries,
    coefficient: Tensor,
    size: torch.Size,
) -> Tensor | None:
    """Return KL(old || new) in nats ``[*B, 1]``, of all heads, or None if it has no closed form.

    The new parameters get the gradient. With a coefficient of 0 the KL is 0. ``size`` is B.
    """
    for key, x in old.items():
        if x.shape != new[key].shape:
            raise ValueError(
                f"{key!r} has shape {list(x.shape)} in the batch and {list(new[key].shape)} in the "
                "policy: the KL divergence would broadcast. Store the policy's own parameters."
            )
    # With a coefficient of 0, a policy is compared with itself: no 0 * inf in the gradient.
    off = coefficient == 0
    old = {key: torch.where(off, new[key].detach(), x) for key, x in old.items()}
    new = {key: torch.where(off, x.detach(), x) for key, x in new.items()}
    before, after = known_distribution(head, old), known_distribution(head, new)
    if before is None or after is None:
        before, after = (head.get_dist(TensorDict(dict(x), size)) for x in (old, new))
    kl = _divergence(before, after)
    return None if kl is None else kl.unsqueeze(-1)


_CHOICES = d.Categorical, d.OneHotCategorical


def _divergence(old: Any, new: Any) -> Tensor | None:
    if isinstance(old, (Normal, Categorical)):
        return old.kl(new)
    if isinstance(old, CompositeDistribution):
        of_heads = [_divergence(x, new.dists[key]) for key, x in old.dists.items()]
        known = [x for x in of_heads if x is not None]
        return sum_of_heads(known, len(old.batch_shape)) if len(known) == len(of_heads) else None
    # torch.distributions.kl_divergence, without its look-up by type, which no graph can hold.
    if isinstance(old, d.Normal) and isinstance(new, d.Normal):
        return Normal(old.loc, old.scale, event_dims=0).kl(new)
    if isinstance(old, _CHOICES) and isinstance(new, _CHOICES):
        return Categorical(old.logits).kl(Categorical(new.logits))
    if isinstance(old, d.Bernoulli) and isinstance(new, d.Bernoulli):
        return bernoulli_kl(old.logits, new.logits)
    if isinstance(old, d.Independent) and isinstance(new, d.Independent):
        inner = _divergence(old.base_dist, new.base_dist)
        dims = tuple(range(-old.reinterpreted_batch_ndims, 0))
        return inner.sum(dims) if inner is not None and dims else inner
    return d.kl_divergence(old, new) if has_analytic_kl(old, new) else None


def clipped_loss(
    log_ratio: Tensor,
    correction: Tensor | None,
    advantage: Tensor,
    low: Tensor,
    high: Tensor,
    log_dual_clip: Tensor | None,
) -> Tensor:
    """Return the negative clipped objective ``[*B, 1]``; all bounds are of log-ratios.

    Clipping is relative to the policy of ``log_ratio``; ``correction`` is the log-ratio of that
    policy to the one that collected the data, which the dual clip includes.
    """
    bound = log_dual_clip
    if bound is not None and correction is not None:
        bound = bound - correction
    bound = math.inf if bound is None else bound
    clipped = clip_log_ratio(log_ratio, advantage, low, high, bound)
    return (clipped if correction is None else clipped + correction).exp() * -advantage


def scaled(coefficient: Tensor, term: Tensor) -> Tensor:
    """Return ``coefficient * term``, and 0 if the coefficient is 0 and the term infinite."""
    # A number does not promote float16, in which gradients that a GradScaler scales overflow.
    term = term.to(torch.promote_types(term.dtype, coefficient.dtype))
    if not _is_read_as_nonzero(coefficient):  # else where() would take longer than the product
        term = torch.where(coefficient == 0, 0, term)
    return coefficient * term


def _is_read_as_nonzero(number: Tensor) -> bool:
    if not _checks.reads_are_free(number.device):
        return False
    try:
        return number.item() != 0
    except RuntimeError:  # several numbers, as under torch.vmap
        return False


def entropy_loss(
    entropy: LogProbs, coefficient: Tensor, coefficients: Mapping[NestedKey, Tensor] | None
) -> Tensor:
    """Return the negative entropy ``[*B, 1]``, times the coefficient of each head if it has one.

    ``entropy`` is ``[*B, 1]``, or a TensorDict with that of each head.
    """
    if coefficients is None:
        return scaled(-coefficient, total_entropy(entropy))
    of_heads = {} if isinstance(entropy, Tensor) else dict(entropy.items(True, True))
    terms = []
    for key, value in of_heads.items():
        # torchrl calls the entropy of ("action", "go") ("action", "go_entropy")
        *parents, name = key_parts(key)
        head = key if key in coefficients else as_key((*parents, name.removesuffix("_entropy")))
        if head in coefficients:
            terms.append(scaled(-coefficients[head], value))
    if len(terms) < max(len(of_heads), 1):
        raise KeyError(
            f"entropy_coeff has coefficients for {list(coefficients)}, the policy entropies "
            f"of {list(of_heads) or 'the whole action'}. Give each head a coefficient, and call "
            "tensordict.nn.set_composite_lp_aggregate(False).set() before the actor is made."
        )
    return torch.stack(terms).sum(0)


def total_entropy(entropy: LogProbs) -> Tensor:
    """Return the sum ``[*B, 1]`` of the entropies of all heads."""
    if isinstance(entropy, Tensor):
        return entropy
    return sum_of_heads(entropy.values(True, True), entropy.ndim)


def kl_penalty(
    head: ProbabilisticTensorDictModule | None,
    old: Entries | None,
    minibatch: TensorDictBase,
    coefficient: Tensor,
    log_ratio: Tensor,
) -> Tensor:
    """Return KL(old || new) ``[*B, 1]``: exact if the old parameters are known, or k3."""
    if head is not None and old is not None:
        new = {key: minibatch.get(key) for key in old}
        kl = exact_kl(head, old, new, coefficient, log_ratio.shape[:-1])
        if kl is not None and kl.shape == log_ratio.shape:
            return kl
    # Masked before the exponential, so that no 0 * inf is in the gradient either.
    return kl_estimate(torch.where(coefficient == 0, torch.zeros_like(log_ratio), log_ratio))


def explained_variance(value: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
    r"""Return the share of the variance that the value explains.

    .. math:: 1 - \frac{\mathrm{Var}(target - V)}{\mathrm{Var}(target)}
    """
    if mask is None:
        residual = torch.var(target - value, correction=0, dim=0)
        total = torch.var(target, correction=0, dim=0)
    else:
        valid = mask | ~mask.any()
        errors = (torch.where(mask, x, 0) for x in (target - value, target))
        residual, total = (masked_std(x, valid, correction=0).square() for x in errors)
    return 1.0 - residual / (total + torch.finfo(target.dtype).eps)


def mean(x: Tensor, mask: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """Return the mean over the valid frames; of a bool in a dtype."""
    if mask is None:
        return x.mean(dtype=dtype)
    mask = mask.expand_as(x)
    return torch.where(mask, x, 0).sum(dtype=dtype) / mask.sum().clamp_min(1)


def reduce(term: Tensor, mask: Tensor | None, reduction: str) -> Tensor:
    """Return the mean or the sum over the valid frames; with "none" the terms, 0 elsewhere."""
    if reduction == "mean":
        return mean(term, mask)
    term = term if mask is None else torch.where(mask, term, 0)
    return term.sum() if reduction == "sum" else term.squeeze(-1)


def policy_diagnostics(
    log_ratio: Tensor,
    advantage: Tensor,
    log_bounds: tuple[Tensor, Tensor],
    log_dual_clip: Tensor | None,
    mask: Tensor | None,
    to_collector: Tensor,
) -> dict[str, Tensor]:
    r"""Return diagnostics of how far the policy has moved from the one that collected the data.

    .. math:: ESS = \frac{(\sum_i \rho_i)^2}{N \sum_i \rho_i^2}

    is 1 if all ratios are equal, and 1/N if one outweighs the others. All tensors are ``[*B, 1]``.
    Clipping acts on ``log_ratio``. ``to_collector`` is the log-ratio to the policy that collected
    the data, which differs from it with a delayed actor.
    """
    if mask is not None:
        empty = ~mask.any()
        mask = mask | empty
        both = log_ratio, to_collector
        log_ratio, to_collector = (torch.where(empty, 0, x) for x in both)
    clipped = log_ratio.clamp(*log_bounds) != log_ratio
    if log_dual_clip is None:
        bounded = log_ratio.new_zeros(())
    else:
        bounded = mean((advantage < 0) & (to_collector > log_dual_clip), mask, log_ratio.dtype)
    if mask is None:
        log, size = to_collector.squeeze(-1), to_collector.shape[0]
    else:
        log, size = torch.where(mask, to_collector, -math.inf).flatten(), mask.sum()
    relative = (log - log.amax(0)).exp()  # which does not overflow
    total, ratios = relative.sum(0), log.exp()
    return {
        "kl_approx": -mean(log_ratio, mask),
        "clip_fraction": mean(clipped, mask, log_ratio.dtype),
        "ESS": total * total / (relative * relative).sum(0) / size,
        "max_ratio": ratios.max(),
        "mean_ratio": ratios.mean() if mask is None else ratios.sum() / size,
        "kl": mean(kl_estimate(log_ratio), mask),
        "dual_clip_fraction": bounded,
    }
