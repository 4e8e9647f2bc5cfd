"""What the fast path of a loss can know before it sees a batch."""

from __future__ import annotations

from typing import Any, NamedTuple

from tensordict.nn import ProbabilisticTensorDictSequential

from ppokit._calls import Call
from ppokit._networks import Networks
from ppokit.objectives.policies import Form, known_form
from ppokit.objectives.terms import Settings


class Plan(NamedTuple):
    """The calls of the networks, the places of their results, and how the loss is set up."""

    networks: Networks
    keys: Any  #: names of entries
    functional: bool
    is_bare: bool  #: nothing of torch's or torchrl's has to be done around a call
    actor: tuple[Call, ...]
    critic: tuple[Call, ...]
    head: Any  #: the actor's ProbabilisticTensorDictModule
    form: Form | None  #: None: ask the distribution itself
    parameters: tuple[int, ...]  #: the distribution's: of the form, or those that the head reads
    read_by_head: tuple[int, ...]
    value: int | None
    shares: bool  #: the value is computed from what the actor's networks returned
    samples: int  #: to estimate an entropy from
    mask_roots: tuple[str, ...]  #: what a mask's name begins with
    normalizes: bool  #: the advantage
    coefficients: tuple[str, ...]  #: names of buffers
    settings: Settings


def make_plan(loss: Any) -> Plan | None:
    """Return the plan of a loss, or None where it has to take torchrl's path."""
    actor, buffers, keys = loss.actor_network, loss._buffers, loss.tensor_keys
    if (
        loss.delay_actor
        or buffers.get("max_importance_ratio") is not None
        or buffers.get("head_entropy_coeff") is not None
        or loss.reduction not in ("mean", "sum")
        or not isinstance(actor, ProbabilisticTensorDictSequential)
        or actor.return_composite
        or isinstance(keys.action, list)
        or isinstance(keys.sample_log_prob, list)
    ):
        return None
    whole = loss.functional or loss.is_compiled
    networks, share = Networks(whole=whole, in_graphs=loss.is_compiled), True
    parts: Any = actor.module
    *modules, head = parts
    networks.watch.parts(parts._modules)
    networks.watch.parts(head.distribution_kwargs)
    networks.watch.attributes(head, "_in_keys", "dist_keys")
    networks.watch.attributes(head, "distribution_class")
    of_actor = tuple(call for module in modules for call in networks.add(module, share=share))
    read = {key: networks.place_of(key) for key in head.in_keys}
    names = [key if isinstance(key, str) else key[-1] for key in head.dist_keys]
    form = known_form(head.distribution_class, head.distribution_kwargs, names)
    by_name = dict(zip(names, read.values(), strict=True))
    of_critic, value = (), None
    if loss._has_critic:
        if loss.separate_losses:
            of_critic, share = networks.detach(), False
        of_critic += networks.add(loss.critic_network, share=share)
        value = networks.made(keys.value)
        if value is None:
            return None
    return Plan(
        networks,
        keys,
        loss.functional,
        form is not None and networks.know_no_modes() and not networks.watch.is_hooked(loss),
        of_actor,
        of_critic,
        head,
        form,
        tuple(by_name.values() if form is None else map(by_name.__getitem__, form.names)),
        tuple(read.values()),
        value,
        not loss.separate_losses and _have_steps_in_common(of_actor, of_critic, value),
        loss.samples_mc_entropy if loss.entropy_bonus else 0,
        tuple(key if isinstance(key, str) else key[0] for key in loss._loss_mask_keys()),
        loss.normalize_advantage or loss.advantage_norm is not None,
        _names_of_coefficients(loss),
        Settings(loss.loss_critic_type, loss.reduction, loss.log_explained_variance),
    )


def _have_steps_in_common(
    actor: tuple[Call, ...], critic: tuple[Call, ...], value: int | None
) -> bool:
    made = {place for call in actor for place in call.writes}
    return not made.isdisjoint({value}.union(*(call.reads for call in critic)))


def _names_of_coefficients(loss: Any) -> tuple[str, ...]:
    """Return the names in the order of Coefficients; no buffer has the empty one."""
    bounds = ("clip_epsilon_low", "clip_epsilon_high")
    return (
        *(bounds if loss._asymmetric_clip else ("clip_epsilon",) * 2),
        *("dual_clip", "clip_value", "critic_loss_clip"),
        "entropy_coeff" if loss.entropy_bonus else "",
        "critic_coeff" if loss._has_critic else "",
        "kl_coeff",
    )
