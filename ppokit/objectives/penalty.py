"""The exact KL divergence from the policy that collected the data, for the penalty on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from tensordict.nn import CompositeDistribution
from torch import Tensor
from torch import distributions as d
from torchrl.modules.distributions.utils import has_analytic_kl

from ppokit._keys import as_key, get_if_any, key_parts
from ppokit.functional.distributions import Categorical, Normal, sum_of_heads
from ppokit.objectives.policy import known_distribution


def stored_parameters(head: Any, tensordict: TensorDictBase) -> dict[Any, Tensor] | None:
    """Return the parameters that a ProbabilisticActor stored at collection, or None."""
    values: dict[Any, Any] = {}
    for key in head.in_keys:
        entry: Any = get_if_any(tensordict, key)
        nested = is_tensor_collection(entry)  # of a composite distribution
        parts = entry.items(True, True) if nested else [((), entry)]
        values |= {as_key((*key_parts(key), *key_parts(name))): x for name, x in parts}
    return values if values and all(isinstance(x, Tensor) for x in values.values()) else None


def exact_kl(
    head: Any,
    old: Mapping[Any, Tensor],
    new: Mapping[Any, Tensor],
    coefficient: Tensor,
    size: torch.Size,
) -> Tensor | None:
    """Return KL(old || new) in nats ``[*B, 1]``, or None if it has no closed form.

    Of several heads it is the sum. The new parameters get the gradient. With a coefficient of 0,
    the KL is 0.

    Args:
        head: the module that makes the distribution.
        old: parameters of the policy that collected the data.
        new: parameters of the policy.
        coefficient: of the penalty.
        size: B.

    Raises:
        ValueError: a stored parameter has another shape than the policy's.
    """
    for key, stored in old.items():
        if stored.shape != new[key].shape:
            raise ValueError(
                f"{key!r} of the batch has shape {list(stored.shape)}, and the policy's "
                f"{list(new[key].shape)}: the KL penalty compares the two. Store it as the policy "
                "writes it at collection, or leave it out: the KL is then estimated."
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
    if isinstance(old, d.Independent) and isinstance(new, d.Independent):
        inner = _divergence(old.base_dist, new.base_dist)
        dims = tuple(range(-old.reinterpreted_batch_ndims, 0))
        return inner.sum(dims) if inner is not None and dims else inner
    return d.kl_divergence(old, new) if has_analytic_kl(old, new) else None
