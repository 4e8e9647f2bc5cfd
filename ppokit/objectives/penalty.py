"""The exact KL divergence from the policy that collected the data, for the penalty on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch import distributions as d
from torchrl.modules import IndependentNormal, OneHotCategorical, TanhNormal
from torchrl.modules.distributions.utils import has_analytic_kl

from ppokit._keys import get_if_any

Parameters = Mapping[str, Tensor]


def stored_parameters(head: Any, tensordict: TensorDictBase) -> dict[Any, Tensor] | None:
    """Return the distribution's parameters as the batch holds them, or None if it does not.

    A ProbabilisticActor stores them at collection, beside the action.

    Args:
        head: the actor's ProbabilisticTensorDictModule.
        tensordict: the batch, before the actor has run on it.
    """
    values = ((key, get_if_any(tensordict, key)) for key in head.in_keys)
    found = {key: value for key, value in values if isinstance(value, Tensor)}
    return found if found and len(found) == len(head.in_keys) else None


def exact_kl(
    head: Any, old: dict[Any, Tensor], new: dict[Any, Tensor], coefficient: Tensor
) -> Tensor | None:
    """Return KL(old || new) in nats ``[*B, 1]``, or None where no closed form of it is known.

    Args:
        head: the actor's ProbabilisticTensorDictModule.
        old: parameters by key at collection.
        new: parameters by key now; they get the gradient.
        coefficient: of the penalty; at 0 nothing infinite comes out, nor of the gradient.
    """
    if any(old[key].shape != new[key].shape for key in old):
        return None
    # Of a policy from itself, which is 0, so that no 0 * inf is in the gradient either.
    off = coefficient == 0
    old = {key: torch.where(off, new[key].detach(), x) for key, x in old.items()}
    new = {key: torch.where(off, x.detach(), x) for key, x in new.items()}
    names = [key if isinstance(key, str) else key[-1] for key in head.dist_keys]
    form = _FORMS.get(head.distribution_class)
    if form is not None and not head.distribution_kwargs.get("tanh_loc", False):
        by_name = [
            dict(zip(names, (x[key] for key in head.in_keys), strict=True)) for x in (old, new)
        ]
        divergence = form(*by_name)
        if divergence is not None:
            return divergence
    divergence = _divergence(*(head.get_dist(TensorDict(dict(x))) for x in (old, new)))
    return None if divergence is None else divergence.unsqueeze(-1)


def _divergence(old: d.Distribution, new: d.Distribution) -> Tensor | None:
    # torch.distributions.kl_divergence, less its look-up by type, which no graph can hold.
    if isinstance(old, d.Normal) and isinstance(new, d.Normal):
        return _of_normals(old.loc, old.scale, new.loc, new.scale)
    if isinstance(old, d.Independent) and isinstance(new, d.Independent):
        inner = _divergence(old.base_dist, new.base_dist)
        dims = tuple(range(-old.reinterpreted_batch_ndims, 0))
        return inner.sum(dims) if inner is not None and dims else inner
    return d.kl_divergence(old, new) if has_analytic_kl(old, new) else None


def _of_normals(loc: Tensor, scale: Tensor, new_loc: Tensor, new_scale: Tensor) -> Tensor:
    variances = (scale / new_scale).square()
    return 0.5 * (variances + ((loc - new_loc) / new_scale).square() - 1 - variances.log())


def _normal(old: Parameters, new: Parameters) -> Tensor | None:
    # Through a tanh, or any other bijection, the divergence stays what it is.
    if new.keys() != {"loc", "scale"}:
        return None
    divergence = _of_normals(old["loc"], old["scale"], new["loc"], new["scale"])
    return divergence.sum(-1, keepdim=True)


def _categorical(old: Parameters, new: Parameters) -> Tensor | None:
    if new.keys() != {"logits"}:
        return None
    before, now = (x["logits"].log_softmax(-1) for x in (old, new))
    gap = torch.where(before == -torch.inf, 0, before - now)  # what was impossible adds 0
    return (before.exp() * gap).sum(-1, keepdim=True)


_FORMS = {
    IndependentNormal: _normal,
    TanhNormal: _normal,
    d.Categorical: _categorical,
    OneHotCategorical: _categorical,
}
