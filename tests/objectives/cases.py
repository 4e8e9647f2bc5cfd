"""Random losses, batches and changes between calls, the same from the same seed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    NormalParamExtractor,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torchrl.modules import MLP, BatchRenorm1d, MaskedCategorical, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss

from ppokit import DualClipPPOLoss
from tests.blocks import actor_of
from tests.objectives.common import KINDS

OBSERVATIONS, HIDDEN, ACTIONS, CHOICES = 4, 6, 2, 5


class Drops(nn.Module):
    """Draws random numbers, and is no nn.Dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.3, self.training)


class Attends(nn.Module):
    """Attention with dropout, over one position."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(size, 2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 1, x.shape[-1])
        return self.attention(flat, flat, flat, need_weights=False)[0].reshape(x.shape)


class Norm(nn.Module):
    """Batch normalization of any batch shape, which moves a state."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(0, -2)).reshape(x.shape)


LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "tanh": lambda _: nn.Tanh(),
    "relu": lambda _: nn.ReLU(),
    "relu in place": lambda _: nn.ReLU(inplace=True),
    "elu in place": lambda _: nn.ELU(inplace=True),
    "gelu": lambda _: nn.GELU(),
    "layer norm": nn.LayerNorm,
    "dropout": lambda _: nn.Dropout(0.3),
    "functional dropout": lambda _: Drops(),
    "attention": Attends,
    "batch norm": lambda size: Norm(nn.BatchNorm1d(size)),
    "batch renorm": lambda size: Norm(BatchRenorm1d(size)),
    "spectral norm": lambda size: parametrizations.spectral_norm(nn.Linear(size, size)),
    "weight norm": lambda size: parametrizations.weight_norm(nn.Linear(size, size)),
    "identity": lambda _: nn.Identity(),
}


class ReadsAndWrites(TensorDictModuleBase):
    """A module of the user's own, with a forward on TensorDicts."""

    def __init__(self, network: nn.Module, in_key: Any, out_keys: list[Any]) -> None:
        super().__init__()
        self.network, self.in_keys, self.out_keys = network, [in_key], out_keys

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        out = self.network(tensordict.get(self.in_keys[0]))
        out = out if isinstance(out, tuple) else (out,)
        for key, value in zip(self.out_keys, out, strict=True):
            tensordict.set(key, value)
        return tensordict


@dataclass
class Case:
    """torchrl's loss and ppokit's over the same networks, and what is done with them."""

    losses: dict[str, Any]
    batch: TensorDict
    description: list[str]
    changes: list[tuple[str, Callable[[Case], None]]] = field(default_factory=list)

    @property
    def loss(self) -> DualClipPPOLoss:
        return self.losses["ppokit"]

    @property
    def actor(self) -> Any:
        return self.loss.actor_network

    def network(self) -> nn.Sequential:
        """The layers of the actor."""
        return next(m for m in self.actor.modules() if isinstance(m, nn.Sequential))


def draw_case(seed: int) -> Case:
    """Return the case of a seed."""
    random = Random(seed)
    torch.manual_seed(seed)
    dtype = random.choice([torch.float32, torch.float64])
    described: list[str] = []

    def pick(name: str, values: Any, weights: Any = None) -> Any:
        value = random.choices(list(values), weights)[0]
        described.append(f"{name}={value}")
        return value

    def layers(name: str, size: int, out: int, *last: nn.Module) -> nn.Module:
        kinds = [pick(name, LAYERS) for _ in range(random.randint(0, 2))]
        first = [nn.Linear(size, HIDDEN)] if random.random() < 0.9 or size != HIDDEN else []
        middle = [LAYERS[kind](HIDDEN) for kind in kinds]
        if not kinds and not last and random.random() < 0.2:
            return MLP(in_features=size, out_features=out, num_cells=[HIDDEN])
        return nn.Sequential(*first, *middle, nn.Linear(HIDDEN, out), *last)

    def module(network: Any, in_key: Any, out_keys: list[Any]) -> Any:
        how = pick("module", ["plain", "own forward", "keywords", "sequence"], [6, 1, 1, 1])
        if how == "own forward":
            return ReadsAndWrites(network, in_key, out_keys)
        if how == "keywords" and type(network) is nn.Sequential:
            return TensorDictModule(network, {"input": in_key}, out_keys)
        plain = TensorDictModule(network, [in_key], out_keys)
        return TensorDictSequential(plain) if how == "sequence" else plain

    kind = pick("kind", KINDS)
    distribution, kwargs, names = KINDS[kind]
    kwargs = {k: v.to(dtype) if isinstance(v, Tensor) and v.ndim else v for k, v in kwargs.items()}
    share = pick("share", ["nothing", "encoder", "encoder's network", "hidden"], [3, 2, 1, 1])
    observation = pick("key", ["observation", ("agent", "observation")], [3, 1])
    outputs = CHOICES if names == ["logits"] else 2 * ACTIONS
    last = [] if names == ["logits"] else [NormalParamExtractor()]
    entry, size, before = observation, OBSERVATIONS, []
    if share != "nothing":
        network = layers("encoder", OBSERVATIONS, HIDDEN)
        before = [module(network, observation, ["hidden"])]
        entry, size = "hidden", HIDDEN
    if last and random.random() < 0.3:
        head = [module(layers("actor", size, outputs), entry, ["raw"])]
        head.append(TensorDictModule(last[0], ["raw"], names))
    else:
        head = [module(layers("actor", size, outputs, *last), entry, names)]
    in_keys: Any = [*names, "mask"] if distribution is MaskedCategorical else names
    network = TensorDictSequential(*before, *head)
    actor = actor_of(network, distribution, in_keys, distribution_kwargs=kwargs)
    critic: Any = ValueOperator(layers("critic", size, 1), in_keys=[entry])
    if share == "encoder":
        critic = TensorDictSequential(*before, critic)
    elif share == "encoder's network":
        inner = getattr(before[0], "module", getattr(before[0], "network", None))
        inner = inner[0].module if isinstance(inner, nn.ModuleList) else inner
        critic = TensorDictSequential(TensorDictModule(inner, [observation], ["hidden"]), critic)
    options = {name: pick(name, x) for name, x in OPTIONS.items() if random.random() < 0.25}
    if options.get("clip_value") is True and isinstance(options.get("clip_epsilon"), tuple):
        options["clip_value"] = 0.2
    # Else torchrl's loss of the critic has a gradient for the shared encoder.
    separate = options.get("separate_losses") and share != "nothing"
    functional = pick("functional", [False, True], [0 if separate else 2, 1])
    for part in (actor, critic):
        part.to(dtype)
    batch = _draw_batch(random, actor, observation, dtype, described)
    # Of a batch with padding, torchrl's loss gets the valid frames, for which it draws others.
    if ("collector", "mask") in batch.keys(True):
        for network in (actor, critic):
            network.eval()  # dropout draws other numbers, and a batch norm sees the padding
        options["entropy_bonus"] = options.get("reduction") != "none" and "tanh" not in kind
        options["log_explained_variance"] = False
        options.pop("reduction", None)
    # Never reached, but computed.
    limits = {"dual_clip": 1e6, "critic_loss_clip": 1e6, "kl_coeff": 0.3}
    limits = {name: x for name, x in limits.items() if random.random() < 0.5}
    losses: dict[str, Any] = {
        name: kind(actor, critic, functional=functional, **options, **more).to(dtype)
        for name, kind, more in (("torchrl", ClipPPOLoss, {}), ("ppokit", DualClipPPOLoss, limits))
    }
    case = Case(losses, batch, described)
    changes = {change.__name__: change for change in (FUNCTIONAL if functional else CHANGES)}
    for _ in range(random.randint(1, 3)):
        name = pick("change", changes)
        case.changes.append((name, lambda case, of=changes[name]: of(case, random)))
    return case


OPTIONS: dict[str, list[Any]] = {
    "clip_epsilon": [0.05, (0.1, 0.3)],
    "clip_value": [True, 0.3],
    "normalize_advantage": [True],
    "separate_losses": [True],
    "reduction": ["sum", "mean", "none"],
    "loss_critic_type": ["l1", "l2"],
    "entropy_bonus": [False],
    "entropy_coeff": [0.1, 0.0],
    "samples_mc_entropy": [3],
    "critic_coeff": [0.5, 0],
    "max_importance_ratio": [1.3],
    "log_explained_variance": [False],
}


def _draw_batch(random: Random, actor: Any, observation: Any, dtype: Any, described: Any) -> Any:
    shape = random.choice([(1,), (2,), (9,), (16,), (3, 5), (1, 4), (6, 1)])
    batch = TensorDict({}, shape)
    batch[observation] = torch.randn(*shape, OBSERVATIONS, dtype=dtype)
    if "mask" in actor.in_keys:
        batch["mask"] = torch.rand(*shape, CHOICES) < 0.7
        batch["mask"][..., 0] = True
    training = actor.training
    with torch.no_grad():
        batch = actor.eval()(batch.clone()).detach().clone()
    actor.train(training)
    batch = batch.exclude("hidden", "raw")
    spread = random.choice([0.0, 0.3, 2.0])
    batch["action_log_prob"] = batch["action_log_prob"] + spread * torch.randn(*shape, dtype=dtype)
    for key in ("advantage", "value_target", "state_value"):
        batch[key] = torch.randn(*shape, 1, dtype=dtype)
    if random.random() < 0.25:
        mask = torch.rand(shape) < random.choice([0.5, 0.9])
        mask.view(-1)[-1] = True
        batch["collector", "mask"] = mask
        batch["advantage"][~mask] = float("nan")
        if random.random() < 0.5:
            batch[observation][~mask] = float("nan")
        described.append(f"masked {int((~mask).sum())} of {mask.numel()}")
    described.append(f"batch {list(shape)} {dtype} spread {spread}")
    return batch


# -- changes between calls -----------------------------------------------------------------


def _each(case: Case, change: Callable[[Any], Any]) -> None:
    for name, loss in case.losses.items():
        case.losses[name] = change(loss) or loss


def _swap_layer(case: Case, random: Random) -> None:
    network = case.network()
    places = [i for i, layer in enumerate(network) if not isinstance(layer, NormalParamExtractor)]
    place = random.choice(places)
    if isinstance(network[place], nn.Linear):
        old = network[place]
        network[place] = nn.Linear(old.in_features, old.out_features).to(old.weight.dtype)
    else:
        network[place] = nn.Tanh()


def _replace_network(case: Case, random: Random) -> None:
    for module in case.actor.modules():
        if type(module) is TensorDictModule and isinstance(module.module, nn.Sequential):
            module.module = copy.deepcopy(module.module)
            return


def _hook(case: Case, random: Random) -> None:
    layer = random.choice(list(case.network()))
    how = random.choice(["after", "before", "backward"])
    if how == "after":
        layer.register_forward_hook(lambda _, args, out: _scaled(out))
    elif how == "before":
        layer.register_forward_pre_hook(lambda _, args: tuple(x * 1.1 for x in args))
    else:
        layer.register_full_backward_hook(lambda _, before, after: tuple(map(_scaled, before)))


def _scaled(x: Any) -> Any:
    return tuple(map(_scaled, x)) if isinstance(x, tuple) else None if x is None else x * 0.9


def _hook_wrapper(case: Case, random: Random) -> None:
    modules = [m for m in case.actor.modules() if type(m) is TensorDictModule]
    modules += [case.loss.critic_network] if case.loss.critic_network is not None else []
    module = random.choice(modules)

    def scale(_: Any, args: Any, out: TensorDictBase) -> TensorDictBase:
        return out.set(module.out_keys[-1], out.get(module.out_keys[-1]) * 0.8)

    module.register_forward_hook(scale)


def _freeze(case: Case, random: Random) -> None:
    parameters = list(case.loss.parameters())
    for parameter in random.sample(parameters, len(parameters) // 2):
        if parameter.requires_grad and parameter.is_leaf:
            parameter.requires_grad_(False)


def _set_keys(case: Case, random: Random) -> None:
    if "gain" not in case.batch.keys():
        case.batch.rename_key_("advantage", "gain")
        _each(case, lambda loss: loss.set_keys(advantage="gain"))


def _load(case: Case, random: Random) -> None:
    assign = random.random() < 0.5
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    state = {
        key: value + 0.1 * torch.rand(value.shape, generator=generator, dtype=value.dtype)
        if value.is_floating_point() and "network" in key
        else value.clone()
        for key, value in case.loss.state_dict().items()
    }
    for name, loss in case.losses.items():
        own = loss.state_dict()  # without the limits, in torchrl's loss
        given = {key: state[key].clone() for key in own}
        loss.load_state_dict(given, assign=assign and name == "ppokit")


def _double(case: Case, random: Random) -> None:
    _each(case, lambda loss: loss.double())
    case.batch = case.batch.apply(lambda x: x.double() if x.is_floating_point() else x)


def _distribution_kwargs(case: Case, random: Random) -> None:
    head = case.actor[-1]
    if head.distribution_class is TanhNormal and not head.distribution_kwargs.get("tanh_loc"):
        high = head.distribution_kwargs.get("high")
        if isinstance(high, Tensor) and random.random() < 0.5:
            high.add_(1.5)  # in place
        else:
            head.distribution_kwargs = {"low": -2.5, "high": 4.0}


def _mode(case: Case, random: Random) -> None:
    if ("collector", "mask") in case.batch.keys(True):
        return
    _each(case, lambda loss: loss.train(not loss.training))


def _coefficients(case: Case, random: Random) -> None:
    for loss in case.losses.values():
        if "clip_epsilon" in dict(loss.named_buffers(recurse=False)):
            loss.clip_epsilon = 0.17


def _settings(case: Case, random: Random) -> None:
    settings = {"loss_critic_type": "l2", "normalize_advantage": True, "samples_mc_entropy": 2}
    name, value = random.choice(list(settings.items()))
    _each(case, lambda loss: setattr(loss, name, value))


def _copy(case: Case, random: Random) -> None:
    case.losses = copy.deepcopy(case.losses)


Change = Callable[[Case, Random], None]
IN_NETWORKS: list[Change] = [_swap_layer, _replace_network, _freeze, _double]
FUNCTIONAL: list[Change] = [_hook, _hook_wrapper, _set_keys, _load, _distribution_kwargs, _mode]
FUNCTIONAL += [_coefficients, _settings, _copy]
CHANGES = IN_NETWORKS + FUNCTIONAL
