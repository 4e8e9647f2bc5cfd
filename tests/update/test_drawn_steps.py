"""Drawn training steps, compiled and eager, with changes between their calls.

``python -m tests.update.test_drawn_steps COUNT [FIRST]`` runs more of them.
"""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torchrl.modules import ValueOperator
from torchrl.objectives import A2CLoss, ClipPPOLoss, PPOLoss, ReinforceLoss

from ppokit import DualClipPPOLoss, KLEarlyStopper, TrainingStep
from tests.marks import slow
from tests.seeds import main
from tests.update.step_cases import CHANGES, Case, clip_harder, make_minibatch, make_networks

STEPS = 10


def draw_networks(draws: random.Random) -> tuple[Any, Any]:
    kind, shared = draws.choice(["normal", "categorical", "masked"]), draws.random() < 0.25
    activation, width = draws.choice([nn.Tanh, nn.ReLU]), draws.choice([3, 8])
    options: Any = {"activation": activation, "width": width}
    return make_networks(kind, shared=shared, head_alone=shared and draws.random() < 0.5, **options)


def make_loss(draws: random.Random, actor: Any, critic: Any) -> nn.Module:
    kind = draws.choice([DualClipPPOLoss] * 4 + [ClipPPOLoss, PPOLoss, A2CLoss, ReinforceLoss])
    if kind is A2CLoss and isinstance(critic, ValueOperator):
        kind = PPOLoss  # the critic's head reads an entry that A2CLoss does not pass on
    if kind is ReinforceLoss:
        return ReinforceLoss(actor, critic, functional=False)
    choices = {"entropy_coeff": [0.0, 0.01, 0.5], "critic_coeff": [0.5, 1.0]}
    choices["loss_critic_type"] = ["l2", "smooth_l1"]
    if kind is not A2CLoss:
        choices["normalize_advantage"] = [False, True]
    if kind is DualClipPPOLoss:
        choices |= {"dual_clip": [None, 3.0], "kl_coeff": [None, 0.3], "clip_value": [None, 0.2]}
        choices |= {"clip_epsilon": [0.2, (0.1, 0.3)], "critic_loss_clip": [None, 1.0]}
        choices["separate_losses"] = [False, False, False, True]
    options = {name: draws.choice(values) for name, values in choices.items()}
    return kind(actor, critic, functional=False, **options)


def make_optimizer(draws: random.Random, loss: nn.Module) -> torch.optim.Optimizer:
    parameters = list(loss.parameters())
    groups: Any = parameters
    if draws.random() < 0.3:
        groups = [{"params": parameters[:3], "lr": 1e-2, "weight_decay": 0.1}]
        groups.append({"params": parameters[3:]})
    kinds: list[Any] = [torch.optim.Adam] * 3 + [torch.optim.AdamW, torch.optim.SGD]
    kind = draws.choice([*kinds, torch.optim.RMSprop])
    options: dict[str, Any] = {"lr": draws.choice([1e-3, 1e-2])}
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        options |= draws.choice([{}, {"amsgrad": True}, {"fused": True}, {"betas": (0.8, 0.99)}])
        options |= draws.choice([{}, {"weight_decay": 0.01}, {"maximize": True}])
    elif kind is torch.optim.SGD:
        options |= draws.choice([{}, {"momentum": 0.9}])
    return kind(groups, **options)


def make_case(seed: int, *, compile: Any) -> Case:
    """Return a case; all cases of one seed are alike except for ``compile``."""
    draws = random.Random(seed)
    torch.manual_seed(seed)
    actor, critic = draw_networks(draws)
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
    minibatches = [
        make_minibatch(actor, critic, size, noise=draws.choice([0.0, 0.1, 1.0])) for size in sizes
    ]
    if isinstance(loss, DualClipPPOLoss) and draws.random() < 0.4:
        for minibatch in minibatches:
            mask = torch.rand(minibatch.batch_size) < 0.7
            mask[0] = True
            minibatch["collector", "mask"] = mask
    if step.nonfinite == "skip" and draws.random() < 0.5:
        minibatches[draws.randrange(STEPS)]["advantage"][0] = torch.nan
    possible = CHANGES if step.max_grad_norm is None else [*CHANGES, clip_harder]
    changes = {n: [draws.choice(possible)] for n in range(STEPS) if draws.random() < 0.3}
    return Case(step, minibatches, changes)


def compare(seed: int) -> None:
    """Raise an AssertionError if a compiled step differs from the eager one."""
    torch.compiler.reset()
    found = make_case(seed, compile={"backend": "aot_eager"}).run()
    expected = make_case(seed, compile=False).run()
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("seed", [1006, *map(slow, (1060, 1091, *range(20)))])
def test_a_compiled_step_equals_an_eager_one(seed: int):
    with warnings.catch_warnings():
        if seed < 20:  # the others must be compiled
            warnings.filterwarnings("ignore", "The training step runs eagerly")
        warnings.filterwarnings("ignore", "The KL divergence is")
        compare(seed)


if __name__ == "__main__":
    main(compare)
