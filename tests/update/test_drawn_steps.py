"""Drawn training steps, compiled and eager, with changes between their calls.

``python -m tests.update.test_drawn_steps COUNT [FIRST]`` runs more of them.
"""

from __future__ import annotations

import random
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torchrl.modules import (
    ValueOperator,
)
from torchrl.objectives import A2CLoss, ClipPPOLoss, PPOLoss, ReinforceLoss
from tqdm import tqdm

from ppokit import DualClipPPOLoss, KLEarlyStopper, TrainingStep
from tests.update.step_cases import make_minibatch, make_networks

STEPS = 10


class Case(NamedTuple):
    """A step, its minibatches, and a change before each of them."""

    step: TrainingStep
    minibatches: list[TensorDict]
    changes: list[Callable[[], Any] | None]


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


def make_changes(step: TrainingStep) -> list[Callable[[], Any]]:
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
        for name, value in {
            "critic_coeff": 0.25,
            "clip_epsilon": 0.05,
            "entropy_coeff": 0.02,
        }.items():
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
    return changes if step.max_grad_norm is None else [*changes, norm]


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
    possible = make_changes(step)
    changes = [draws.choice(possible) if draws.random() < 0.3 else None for _ in range(STEPS)]
    return Case(step, minibatches, changes)


def run(case: Case) -> list[Any]:
    """Return the outputs of each step, and parameters and optimizer's state after all of them."""
    outputs = []
    for number, (minibatch, change) in enumerate(zip(case.minibatches, case.changes, strict=True)):
        if change is not None:
            change()
        if number == STEPS // 2:
            case.step.reset()  # a new batch
        outputs.append(dict(case.step(minibatch.clone()).items()))
    states = case.step.optimizer.state_dict()["state"].values()
    tensors = [{k: x for k, x in state.items() if isinstance(x, Tensor)} for state in states]
    return [outputs, [p.detach() for p in case.step.loss.parameters()], tensors]


def compare(seed: int) -> None:
    """Raise an AssertionError if a compiled step differs from the eager one."""
    torch.compiler.reset()
    found = run(make_case(seed, compile={"backend": "aot_eager"}))
    expected = run(make_case(seed, compile=False))
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize(
    "seed", [1006, *(pytest.param(x, marks=pytest.mark.slow) for x in (1060, 1091, *range(20)))]
)
def test_a_compiled_step_equals_an_eager_one(seed: int):
    with warnings.catch_warnings():
        if seed < 20:  # the others must be compiled
            warnings.filterwarnings("ignore", "The training step runs eagerly")
        warnings.filterwarnings("ignore", "The KL divergence is")
        compare(seed)


def main(count: int, first: int = 0) -> None:
    warnings.simplefilter("ignore")
    failed = []
    for seed in tqdm(range(first, first + count), unit="case", mininterval=30):
        try:
            compare(seed)
        except Exception as error:
            failed.append(seed)
            print(f"\n--- seed {seed}\n{''.join(traceback.format_exception(error))[-1500:]}")
    print(f"{count} cases, {len(failed)} failed: {failed}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
