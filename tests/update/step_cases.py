"""Drawn training steps: networks, losses, optimizers, minibatches, and changes between calls."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torch import distributions as d
from torchrl.modules import (
    IndependentNormal,
    MaskedCategorical,
    ProbabilisticActor,
    ValueOperator,
)
from torchrl.objectives import A2CLoss, ClipPPOLoss, PPOLoss, ReinforceLoss

from ppokit import DualClipPPOLoss, KLEarlyStopper, TrainingStep

STEPS = 10
DTYPE = torch.float64


class Case(NamedTuple):
    """A step, its minibatches, and what happens before each of them."""

    step: TrainingStep
    minibatches: list[TensorDict]
    changes: list[Callable[[], Any] | None]
    description: str


def make_networks(draws: random.Random) -> tuple[Any, Any]:
    kind, shared = draws.choice(["normal", "categorical", "masked"]), draws.random() < 0.25
    activation = draws.choice([nn.Tanh, nn.ReLU])
    width = draws.choice([3, 8])

    def mlp(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(inputs, width), activation(), nn.Linear(width, outputs))

    head: Any = nn.Sequential(nn.Linear(4, 4), NormalParamExtractor())
    keys, distribution = ["loc", "scale"], IndependentNormal
    if kind != "normal":
        head, keys, distribution = nn.Linear(4, 3), ["logits"], d.Categorical
    read: Any = keys
    if kind == "masked":
        distribution, read = MaskedCategorical, {"logits": "logits", "mask": "action_mask"}
    body = TensorDictModule(mlp(5, 4), ["observation"], ["hidden"])
    own = body if shared else TensorDictModule(mlp(5, 4), ["observation"], ["hidden_2"])
    actor = ProbabilisticActor(
        TensorDictSequential(body, TensorDictModule(head, ["hidden"], keys)),
        in_keys=read,
        distribution_class=distribution,
        return_log_prob=True,
    )
    head = ValueOperator(nn.Linear(4, 1), in_keys=["hidden" if shared else "hidden_2"])
    critic = head if shared and draws.random() < 0.5 else TensorDictSequential(own, head)
    return actor.to(DTYPE), critic.to(DTYPE)


def make_loss(draws: random.Random, actor: Any, critic: Any) -> nn.Module:
    kind = draws.choice([DualClipPPOLoss] * 4 + [ClipPPOLoss, PPOLoss, A2CLoss, ReinforceLoss])
    if kind is A2CLoss and isinstance(critic, ValueOperator):
        kind = PPOLoss  # A2CLoss does not hand on what the actor writes
    if kind is ReinforceLoss:
        return ReinforceLoss(actor, critic, functional=False)
    options: dict[str, Any] = {
        "entropy_coeff": draws.choice([0.0, 0.01, 0.5]),
        "critic_coeff": draws.choice([0.5, 1.0]),
        "loss_critic_type": draws.choice(["l2", "smooth_l1"]),
    }
    if kind is not A2CLoss:
        options["normalize_advantage"] = draws.random() < 0.5
    if kind is not DualClipPPOLoss:
        return kind(actor, critic, functional=False, **options)
    options |= {
        "dual_clip": draws.choice([None, 3.0]),
        "kl_coeff": draws.choice([None, 0.3]),
        "clip_epsilon": draws.choice([0.2, (0.1, 0.3)]),
        "clip_value": draws.choice([None, 0.2]),
        "critic_loss_clip": draws.choice([None, 1.0]),
        "separate_losses": draws.random() < 0.2,
    }
    return kind(actor, critic, **options)


def make_optimizer(draws: random.Random, loss: nn.Module) -> torch.optim.Optimizer:
    parameters = list(loss.parameters())
    groups: Any = parameters
    if draws.random() < 0.3:
        groups = [
            {"params": parameters[:3], "lr": 1e-2, "weight_decay": 0.1},
            {"params": parameters[3:]},
        ]
    kind = draws.choice(
        [torch.optim.Adam] * 3 + [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop]
    )
    options: dict[str, Any] = {"lr": draws.choice([1e-3, 1e-2])}
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        options |= draws.choice([{}, {"amsgrad": True}, {"fused": True}, {"betas": (0.8, 0.99)}])
        options |= draws.choice([{}, {"weight_decay": 0.01}, {"maximize": True}])
    elif kind is torch.optim.SGD:
        options |= draws.choice([{}, {"momentum": 0.9}])
    return kind(groups, **options)


def make_minibatch(draws: random.Random, actor: Any, critic: Any, size: int) -> TensorDict:
    minibatch = TensorDict({"observation": torch.randn(size, 5, dtype=DTYPE)}, [size])
    if "action_mask" in actor.in_keys:
        mask = torch.rand(size, 3) < 0.6
        mask[:, 0] = True
        minibatch["action_mask"] = mask
    with torch.no_grad():
        minibatch = critic(actor(minibatch))
    noise = draws.choice([0.0, 0.1, 1.0])
    minibatch["action_log_prob"] += noise * torch.randn(size, dtype=DTYPE)
    minibatch["advantage"] = torch.randn(size, 1, dtype=DTYPE)
    minibatch["value_target"] = 3 * torch.randn(size, 1, dtype=DTYPE)
    return minibatch.exclude("hidden", "hidden_2")


def make_changes(draws: random.Random, step: TrainingStep) -> list[tuple[str, Callable[[], Any]]]:
    loss, optimizer = step.loss, step.optimizer
    first = next(iter(loss.parameters()))

    def rate() -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5

    def weights() -> None:
        state = loss.state_dict()
        loss.load_state_dict(
            {name: x * 0.9 if "weight" in name else x for name, x in state.items()}
        )

    def data() -> None:
        first.data = first.data * 1.1

    def freeze() -> None:
        first.requires_grad_(not first.requires_grad)

    def coefficient() -> None:
        for name, value in (
            ("critic_coeff", 0.25),
            ("clip_epsilon", 0.05),
            ("entropy_coeff", 0.02),
        ):
            x = getattr(loss, name, None)
            if isinstance(x, Tensor) and x.ndim == 0 and x != 0:
                x.fill_(value)

    def activation() -> None:
        layers = next(m for m in loss.modules() if isinstance(m, nn.Sequential))
        layers[1] = nn.ELU()

    def mode() -> None:
        loss.train(not loss.training)

    def norm() -> None:
        step.max_grad_norm = 0.1

    changes = [rate, weights, data, freeze, coefficient, activation, mode]
    if step.max_grad_norm is not None:
        changes.append(norm)
    return [(change.__name__, change) for change in changes]


def make_case(seed: int, *, compile: Any) -> Case:
    """Return a case; of one seed all are alike but for ``compile``."""
    draws = random.Random(seed)
    torch.manual_seed(seed)
    actor, critic = make_networks(draws)
    loss = make_loss(draws, actor, critic)
    optimizer = make_optimizer(draws, loss)
    stops = isinstance(loss, DualClipPPOLoss) and draws.random() < 0.3
    step = TrainingStep(
        loss,
        optimizer,
        max_grad_norm=draws.choice([None, 0.5]),
        stopper=KLEarlyStopper(0.02, check_every=draws.choice([1, 2])) if stops else None,
        nonfinite=draws.choice(["skip", "skip", None]),
        compile=compile,
    )
    sizes = [draws.choice([16, 16, 16, 7]) for _ in range(STEPS)]
    minibatches = [make_minibatch(draws, actor, critic, size) for size in sizes]
    if isinstance(loss, DualClipPPOLoss) and draws.random() < 0.4:
        for minibatch in minibatches:
            mask = torch.rand(minibatch.batch_size) < 0.7
            mask[0] = True
            minibatch["collector", "mask"] = mask
    if step.nonfinite == "skip" and draws.random() < 0.5:
        minibatches[draws.randrange(STEPS)]["advantage"][0] = torch.nan
    possible = make_changes(draws, step)
    names, changes = [], []
    for _ in range(STEPS):
        name, change = draws.choice(possible) if draws.random() < 0.3 else ("", None)
        names.append(name)
        changes.append(change)
    description = (
        f"{type(loss).__name__}, {optimizer}, stops={stops}, changes={names}, sizes={sizes}"
    )
    return Case(step, minibatches, changes, description)


def run(case: Case) -> dict[str, Any]:
    """Return the parameters after all steps, and what each step returned."""
    outputs = []
    for number, (minibatch, change) in enumerate(zip(case.minibatches, case.changes, strict=True)):
        if change is not None:
            change()
        if number == STEPS // 2:
            case.step.reset()  # a new batch
        outputs.append(case.step(minibatch.clone()))
    return {
        "parameters": [p.detach().clone() for p in case.step.loss.parameters()],
        "outputs": outputs,
        "optimizer": case.step.optimizer.state_dict()["state"],
    }
