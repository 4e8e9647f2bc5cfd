"""The general path of the loss: the policy's distribution is asked, as in torchrl's loss."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from tensordict.nn import CompositeDistribution, ProbabilisticTensorDictSequential
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.objectives.ppo import _broadcast_advantage_to_log_weight, _check_advantage_broadcast
from torchrl.objectives.utils import _sum_td_features

from ppokit._keys import (
    TRAJ_KEY,
    check_trajectories,
    get_tensor,
    key_list,
    key_parts,
    per_frame,
    time_dim,
)
from ppokit.functional import clipped_critic_loss, kl_estimate
from ppokit.functional._checks import check_same_shape
from ppokit.functional.distributions import sum_of_heads
from ppokit.functional.surrogates import clip_log_ratio
from ppokit.objectives import diagnostics
from ppokit.objectives.coefficients import scaled
from ppokit.objectives.masking import fill_padding, mask_of
from ppokit.objectives.penalty import exact_kl, stored_parameters
from ppokit.objectives.terms import silenced

_PARAMETERS = [f"{a}{b}_network_params" for a in ("", "target_") for b in ("actor", "critic")]


def forward(loss: Any, tensordict: TensorDictBase) -> TensorDictBase:
    """Return the losses and the diagnostics of a minibatch."""
    if getattr(tensordict, "stack_dim", 0):  # of a lazy stack; torchrl would transpose its entries
        tensordict = tensordict.contiguous()
    tensordict, keys = tensordict.clone(False), loss.tensor_keys
    for key in loss.policy_keys:
        fix = "The policy writes it at collection (return_log_prob=True); see loss.set_keys()."
        get_tensor(tensordict, key, fix=fix)
    tensordict.set(keys.advantage, _advantage(loss, tensordict))
    _check_agents(loss, tensordict)
    mask = mask_of(loss, tensordict, tensordict.get(keys.advantage)[..., :1])
    if mask is not None:
        valid = per_frame(mask, tensordict.ndim)
        fill_padding(tensordict, valid, loss.entries(tensordict), loss)
    advantage = tensordict.get(keys.advantage)
    known = isinstance(loss.actor_network, ProbabilisticTensorDictSequential)
    exact = known and loss.kl_coeff is not None
    stored = stored_parameters(loss.actor_network[-1], tensordict) if exact else None
    log_weight, dist, _, *behaviour = loss._log_weight(tensordict, adv_shape=advantage.shape[:-1])
    log_ratios = _log_ratios_of_heads(loss, dist, tensordict, log_weight.ndim - 1)
    # Of a single frame, what is broadcast has the shape of what was stored.
    for shape in (log_weight.shape[:-1], getattr(dist, "batch_shape", log_weight.shape[:-1])):
        check_log_prob_shape(loss, shape, tensordict)
    advantage = _broadcast_advantage_to_log_weight(advantage, log_weight)
    _check_advantage_broadcast(advantage, log_weight)
    # pi_new / pi_collection; log_weight is pi_new / pi_proximal, on which the clipping acts.
    correction = behaviour[0] if behaviour and behaviour[0] is not None else None
    log_ratio = log_weight if correction is None else log_weight + correction
    mask = mask_of(loss, tensordict, log_weight)

    out = TensorDict({"loss_objective": -_gain(loss, log_weight, correction, advantage)})
    if loss.entropy_bonus:
        entropy = loss._get_entropy(dist, adv_shape=advantage.shape[:-1])
        total = entropy
        if is_tensor_collection(entropy):
            out.set("composite_entropy", entropy.detach())
            total = _sum_td_features(entropy)
        out.set("entropy", diagnostics.mean(total.detach(), mask))
        out.set("loss_entropy", loss._weighted_loss_entropy(entropy))
    if loss._has_critic:
        names = ("loss_critic", "value_clip_fraction", "explained_variance")
        for name, value in zip(names, loss.loss_critic(tensordict), strict=True):
            if value is not None:
                out.set(name, value)
    with torch.no_grad():
        bounds, dual_clip = loss._clip_bounds, loss.dual_clip
        out.update(diagnostics.of_policy(log_weight, advantage, bounds, dual_clip, mask, log_ratio))
        for key, of_head in log_ratios.items():
            *parents, name = key_parts(key)
            kl = diagnostics.mean(kl_estimate(of_head.view_as(log_weight)), mask)
            out.set(("composite_kl", *parents, name.removesuffix("_log_prob") + "_kl"), kl)
    if loss.kl_coeff is not None:
        out.set("loss_kl", loss.kl_coeff * _kl(loss, tensordict, stored, log_weight))
    for name in [str(key) for key in out.keys() if str(key).startswith("loss_")]:
        out.set(name, loss._reduce_loss(out.get(name), tensordict).squeeze(-1))
    loss._clear_weakrefs(tensordict, out, *_PARAMETERS)
    return out


def critic_loss(
    loss: Any, tensordict: TensorDictBase
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return each frame's critic loss (coefficient applied), clip fraction, explained variance."""
    keys = loss.tensor_keys
    if loss.separate_losses:
        tensordict = tensordict.detach()
    fix = "GAE and the other value estimators write it; see loss.set_keys()."
    target = get_tensor(tensordict, keys.value_target, fix=fix)
    old_value = None
    if loss.clip_value is not None:
        old_value = tensordict.get(keys.value, None)
        if old_value is None:
            raise KeyError(
                f"clip_value is set to {loss.clip_value}, but the key {keys.value} was not "
                "found in the input tensordict. Make sure that the value key passed to PPO "
                "exists in the input tensordict: it is the value at collection, and GAE "
                "stores it."
            )
    with parameters_of(loss, "critic_network"):
        predicted = loss.critic_network(tensordict)
    value = get_tensor(predicted, keys.value, fix="The critic does not write it; set_keys().")
    target, value, old_value = loss._critic_loss_inputs(target, value, old_value)
    check_same_shape(
        {f"the value {keys.value!r}": value, f"the value target {keys.value_target!r}": target}
    )
    losses = clipped_critic_loss(
        value,
        target,
        old_value=old_value,
        clip_value=loss.clip_value,
        loss_clip=loss.critic_loss_clip,
        kind=loss.loss_critic_type,
    )
    mask, explained = mask_of(loss, tensordict, value), loss.log_explained_variance
    with torch.no_grad():
        found = diagnostics.of_critic(value, target, old_value, loss.clip_value, mask, explained)
    loss._clear_weakrefs(tensordict, "critic_network_params", "target_critic_network_params")
    losses = scaled(loss.critic_coeff, losses) if loss._has_critic else losses
    return losses, found.get("value_clip_fraction"), found.get("explained_variance")


def parameters_of(loss: Any, name: str) -> AbstractContextManager[Any]:
    """Return a context in which a network of the loss has the parameters that it is called with.

    Those of a functional loss; and for a critic whose loss is separate, what it has in common with
    the actor as constants.
    """
    if loss.functional:
        parameters, network = getattr(loss, f"{name}_params"), getattr(loss, name)
        return parameters.to_module(network, preserve_module_state=False)
    if name == "critic_network" and loss.separate_losses:
        network = loss.critic_network
        of_actor = {id(parameter) for parameter in loss.actor_network.parameters()}
        if any(id(parameter) in of_actor for parameter in network.parameters()):
            parameters: Any = TensorDict.from_module(network)
            # Without buffers: what a module assigns to one would be lost.
            parameters = parameters.apply(lambda p: p.detach() if id(p) in of_actor else None)
            return parameters.to_module(network)
    return nullcontext()


def check_log_prob_shape(loss: Any, shape: torch.Size, tensordict: TensorDictBase) -> None:
    """Raise where the stored log-probability has another shape than that of the action.

    torchrl broadcasts the two, into an outer product over samples.
    """
    keys = loss.tensor_keys
    if isinstance(keys.action, list) or isinstance(keys.sample_log_prob, list):
        return
    stored, action = tensordict.get(keys.sample_log_prob), tensordict.get(keys.action)
    if isinstance(stored, Tensor) and stored.shape != shape:
        raise ValueError(
            f"{keys.sample_log_prob!r} has shape {list(stored.shape)}, but the policy's "
            f"log-probability of {keys.action!r} (shape {list(action.shape)}) has shape "
            f"{list(shape)}: the two would broadcast into an outer product over samples. A "
            "log-probability is one number a frame, without a trailing dimension, and so is the "
            "action of a Categorical: use .squeeze(-1)."
        )


@torch.no_grad()
def _log_ratios_of_heads(
    loss: Any, dist: Any, tensordict: TensorDictBase, ndim: int
) -> dict[NestedKey, Tensor]:
    """Return the log-ratio of each action head ``[*B]`` by the key of its log-probability.

    B has ``ndim`` dimensions. There is none where one number is stored for all heads, nor with a
    delayed actor, whose log-probabilities are not stored.

    Raises:
        ValueError: a stored log-probability has another shape than the head's.
    """
    keys, log_ratios = loss.tensor_keys, {}
    is_stored = isinstance(keys.sample_log_prob, list) and not loss.delay_actor
    if not is_stored or not isinstance(dist, CompositeDistribution):
        return {}
    log_probs: Any = dist.log_prob(tensordict.select(*key_list(keys.action)))
    for key in key_list(keys.sample_log_prob):
        old, new = tensordict.get(key), log_probs.get(key)
        if old.shape != new.shape:
            raise ValueError(
                f"{key!r} has shape {list(old.shape)}, but the policy's log-probability of that "
                f"action has shape {list(new.shape)}: the two would broadcast. Store it as the "
                "policy writes it (return_log_prob=True)."
            )
        log_ratios[key] = sum_of_heads([new - old], ndim)
    return log_ratios


def _advantage(loss: Any, tensordict: TensorDictBase) -> Tensor:
    key = loss.tensor_keys.advantage
    advantage: Any = tensordict.get(key, None, as_padded_tensor=True)  # pyright: ignore
    computed_here = advantage is None
    if computed_here:
        reward = tensordict.get(("next", loss.tensor_keys.reward), None)
        if loss.critic_network is None or reward is None:
            raise KeyError(
                f"{key!r} is not in the batch, and without a critic and a reward it cannot be "
                "computed. Call GAE on the batch first, or loss.set_keys(advantage=...)."
            )
        advice = "Call GAE on the collected batch, before it is shuffled."
        who = f"{key!r} is not in the batch. {advice} To estimate it, {type(loss).__name__}"
        dim, done = time_dim(tensordict, who=who), tensordict.get(("next", loss.tensor_keys.done))
        check_trajectories(tensordict, done, dim, mask=None, key=TRAJ_KEY)
        loss.value_estimator(
            tensordict,
            params=loss._cached_critic_network_params_detached,
            target_params=loss.target_critic_network_params,
        )
        advantage = tensordict.get(key)
    if advantage.shape == tensordict.batch_size:
        raise ValueError(
            f"The advantage {key!r} has shape {list(advantage.shape)}, the shape of the batch: "
            "it lacks the trailing dimension and would broadcast into an outer product over "
            "samples. Use advantage.unsqueeze(-1)."
        )
    if not advantage.numel():
        raise ValueError(f"The advantage {key!r} is empty: its shape is {list(advantage.shape)}.")
    return loss._maybe_normalize_advantage(advantage, tensordict, update_norm=computed_here)


def _check_agents(loss: Any, tensordict: TensorDictBase) -> None:
    """Raise where there is an advantage for other agents than there are log-probabilities."""
    key, of_advantage = loss.tensor_keys.sample_log_prob, loss.tensor_keys.advantage
    stored = None if key is None or isinstance(key, list) else tensordict.get(key)
    shape = tensordict.get(of_advantage).shape
    if isinstance(stored, Tensor) and stored.shape[: len(shape) - 1] != shape[:-1]:
        raise ValueError(
            f"{key!r} has shape {list(stored.shape)}, and {of_advantage!r} {list(shape)}: an "
            "advantage is one number for each log-probability, with a trailing 1, [*B, agents, 1], "
            "or for all of a frame, [*B, 1]."
        )


def _gain(loss: Any, log_weight: Tensor, correction: Tensor | None, advantage: Tensor) -> Tensor:
    shift: Any = 0.0 if correction is None else correction
    upper: Any = math.inf
    if loss.dual_clip is not None:
        upper = loss.dual_clip.to(log_weight.dtype).log() - shift
    low, high = loss._clip_bounds
    bounded = clip_log_ratio(log_weight, advantage, low, high, upper)
    return (bounded + shift).exp() * advantage


def _kl(
    loss: Any, tensordict: TensorDictBase, old: dict[Any, Tensor] | None, log_weight: Tensor
) -> Tensor:
    """Return KL(old || new): exact, or else the k3 estimate."""
    if old is not None:
        new = {key: tensordict.get(key) for key in old}
        kl = exact_kl(loss.actor_network[-1], old, new, loss.kl_coeff, log_weight.shape[:-1])
        if kl is not None and kl.shape == log_weight.shape:
            return kl
    # Silenced before the exponential, so that no 0 * inf is in the gradient either.
    return kl_estimate(silenced(log_weight, loss.kl_coeff))
