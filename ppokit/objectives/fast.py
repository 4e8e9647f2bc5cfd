"""The loss with networks called on tensors, and known distributions by formula."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
)
from tensordict.utils import NestedKey
from torch import Tensor, nn

from ppokit._calls import (
    before_last,
    call,
    get,
    outside_of_graphs,
    overridden,
)
from ppokit._keys import per_frame
from ppokit._recurrent import breaks_graphs, check_stored, stored_keys
from ppokit.functional._checks import check_same_shape
from ppokit.objectives import terms, torchrl_path
from ppokit.objectives.coefficients import Coefficients
from ppokit.objectives.masking import fill_padding, mask_of
from ppokit.objectives.penalty import exact_kl, stored_parameters
from ppokit.objectives.policy_terms import Policy, Terms, known_policy
from ppokit.objectives.terms import Minibatch, Outputs
from ppokit.objectives.torchrl_path import check_log_prob_shape, parameters_of

# The actor, its last module, which makes the distribution, and the critic.
Networks = tuple[Any, Any, Any]

# What is computed here in another way than torchrl's, and a subclass may have overridden.
_OF_LOSS = (
    *("_critic_loss_inputs", "_get_cur_log_prob", "_get_entropy", "_log_weight"),
    *("_reduce_loss", "_weighted_loss_entropy", "loss_critic"),
)
_OF_ACTOR = ("get_dist", "get_dist_params", "build_dist_from_params")


def networks_of(loss: Any) -> Networks:
    """Return the networks as they are now; without a critic loss, no critic."""
    actor, head = loss.actor_network, None
    if ProbabilisticTensorDictSequential in type(actor).__mro__:  # isinstance asks abc
        modules = actor.module
        head = list(modules)[-1] if isinstance(modules, nn.ModuleList) else None
    return actor, head, loss.critic_network if loss._has_critic else None


def obstacle(loss: Any, networks: Networks, base: type) -> str | None:
    """Say why a loss, an instance of ``base``, takes torchrl's path; None: it need not."""
    keys, (actor, head, critic) = loss.tensor_keys, networks
    if loss.delay_actor:
        return "of delay_actor"
    if loss.reduction not in ("mean", "sum"):
        return f"of reduction={loss.reduction!r}"
    for name in ("max_importance_ratio", "head_entropy_coeff"):
        if loss._buffers.get(name) is not None:
            return f"of {name}"
    if isinstance(keys.action, list) or isinstance(keys.sample_log_prob, list):
        return "there are several action heads"
    if not isinstance(head, ProbabilisticTensorDictModule) or actor.return_composite:
        return f"the actor is a {type(actor).__name__} whose last module alone does not draw"
    distribution = getattr(head.distribution_class, "func", head.distribution_class)  # of a partial
    if CompositeDistribution in getattr(distribution, "__mro__", ()):  # issubclass asks abc
        return "the action has several parts"
    if critic is not None and keys.value not in critic.out_keys:
        return f"the critic writes no {keys.value!r}"
    of_actor = overridden(actor, ProbabilisticTensorDictSequential, _OF_ACTOR)
    return of_actor or overridden(loss, base, _OF_LOSS)


def _outputs(loss: Any, networks: Networks, tensordict: TensorDictBase) -> Outputs | str:
    (actor, head, critic), coefficients = networks, loss.coefficients
    found = _read(loss, tensordict, coefficients)
    if isinstance(found, str):
        return found
    batch, tensordict = found
    kl_coeff, penalty = coefficients.kl_coeff, None
    old = None if kl_coeff is None else stored_parameters(head, tensordict)
    written: dict[NestedKey, Any] = {}
    with parameters_of(loss, "actor_network"):
        result, tensordict = call(before_last(actor), tensordict, written)
    parameters = [get(key, result, written) for key in head.in_keys]
    policy = _policy(loss, head, parameters, tensordict)
    if isinstance(policy, str):
        return policy
    if critic is not None:
        if loss.separate_losses:
            tensordict = tensordict.detach()
            written = {key: x.detach() for key, x in written.items()}
        with parameters_of(loss, "critic_network"):
            result, _ = call([critic], tensordict, written)
        value = get(loss.tensor_keys.value, result, written)
        keys = loss.tensor_keys
        if value.shape != batch.advantage.shape:
            of_value, of_target = f"the value {keys.value!r}", f"the target {keys.value_target!r}"
            check_same_shape({of_value: value, of_target: batch.advantage})
        batch = batch._replace(value=value)
    if kl_coeff is not None and old is not None:
        new = dict(zip(head.in_keys, parameters, strict=True))
        kl = exact_kl(head, old, new, kl_coeff, batch.advantage.shape[:-1])
        if kl is not None and kl.shape == batch.advantage.shape:
            penalty = kl_coeff * terms.reduce(kl, batch.mask, loss.reduction)
            coefficients = coefficients._replace(kl_coeff=None)
    outputs = terms.loss_terms(policy, batch, coefficients, loss)
    return outputs if penalty is None else outputs | {"loss_kl": penalty}


def losses_of(loss: Any, tensordict: TensorDictBase, base: type) -> tuple[Any, Any]:
    """Return the reason for torchrl's path, or None, and the losses."""
    if 0 in tensordict.batch_size:
        raise ValueError(f"The minibatch is empty: {list(tensordict.batch_size)}.")
    networks = actor, _, critic = networks_of(loss)
    check_stored(tensordict, states := stored_keys(actor, critic))
    outputs = obstacle(loss, networks, base)
    if outputs is None:
        arguments = loss, networks, tensordict
        breaks = states and torch.compiler.is_compiling() and breaks_graphs(actor, critic)
        outputs = outside_of_graphs(_outputs, *arguments) if breaks else _outputs(*arguments)
    if isinstance(outputs, str):
        return outputs, torchrl_path.forward(loss, tensordict)
    return None, TensorDict(outputs, [])


def _read(
    loss: Any, tensordict: TensorDictBase, coefficients: Coefficients
) -> tuple[Minibatch, TensorDictBase] | str:
    """Return the minibatch, its padding made harmless, or why torchrl's path has to read it."""
    keys, mask = loss.tensor_keys, None
    size, names = tensordict.batch_size, tensordict.keys()
    advantage = tensordict.get(keys.advantage, None)
    # [*B, 1], or of several agents [*B, A, 1]
    if not isinstance(advantage, Tensor) or advantage.shape[len(size) :][-1:] != (1,):
        return "the batch has no advantage with one number a frame"
    for key in loss._loss_mask_keys():
        if (key if isinstance(key, str) else key[0]) in names:
            mask = mask_of(loss, tensordict, advantage)
    if loss.normalize_advantage or loss.advantage_norm is not None:
        advantage = loss._maybe_normalize_advantage(advantage, tensordict, update_norm=False)
    if mask is not None:
        tensordict = tensordict.clone(False).set(keys.advantage, advantage)
        fill_padding(tensordict, per_frame(mask, len(size)), loss.entries(tensordict), loss)
        advantage = tensordict.get(keys.advantage)
    read = [(keys.action, None), (keys.sample_log_prob, advantage.shape[:-1])]
    if coefficients.critic_coeff is not None:
        read.append((keys.value_target, advantage.shape))
        if coefficients.clip_value is not None:
            read.append((keys.value, advantage.shape))
    entries = [advantage]
    for key, shape in read:
        entry = tensordict.get(key, None)
        if not isinstance(entry, Tensor) or (shape is not None and entry.shape != shape):
            return f"the batch has no {key!r} with one number a frame"
        entries.append(entry)
    for entry in entries:
        if entry.requires_grad:
            return "the batch holds an entry with a gradient"
    advantage, _, old_log_prob, target, old_value, *_ = (*entries, None, None)
    return Minibatch(old_log_prob, advantage, None, target, old_value, mask), tensordict


def _policy(
    loss: Any, head: Any, parameters: list[Any], tensordict: TensorDictBase
) -> Policy | str:
    """Return the policy on tensors, or what its distribution says of the action."""
    names = [key if isinstance(key, str) else key[-1] for key in head.dist_keys]
    by_name = dict(zip(names, parameters, strict=True))
    samples = loss.samples_mc_entropy if loss.entropy_bonus else 0
    action = tensordict.get(loss.tensor_keys.action)
    policy = known_policy(head, by_name, action, samples)
    if policy is not None:
        shape = policy[0].shape[:-1]
    else:
        given = tensordict.clone(False)
        for key, parameter in zip(head.in_keys, parameters, strict=True):
            given.set(key, parameter)
        dist = head.get_dist(given)
        if isinstance(dist, CompositeDistribution):
            return "the action has several parts"
        log_prob = dist.log_prob(action)
        shape, entropy = log_prob.shape, torch.zeros_like(log_prob).unsqueeze(-1)
        if loss.entropy_bonus:
            entropy = loss._get_entropy(dist, adv_shape=shape)
        policy = Terms(log_prob.unsqueeze(-1), entropy)
    if shape != tensordict.get(loss.tensor_keys.sample_log_prob).shape:
        check_log_prob_shape(loss, shape, tensordict)
    return policy
