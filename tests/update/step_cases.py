"""Training steps of several losses and optimizers; one of them with changes between its calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.modules import IndependentNormal, MaskedCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import A2CLoss, ClipPPOLoss

from ppokit import DualClipPPOLoss, KLEarlyStopper, TrainingStep

SIZES, DTYPE = (16, 16, 7, 16, 16, 7, 16, 16, 16, 16), torch.float64
DUAL = {"dual_clip": 3.0, "kl_coeff": 0.3, "clip_epsilon": (0.1, 0.3), "clip_value": 0.2}
DUAL |= {"critic_loss_clip": 1.0, "entropy_coeff": 0.5, "loss_critic_type": "l2"}
GROUPS = {"lr": 1e-2, "weight_decay": 0.1}


class Kind(NamedTuple):
    """The parts of a step."""

    loss: Any
    optimizer: Any
    of_loss: dict[str, Any] = {}  # noqa: RUF012
    of_optimizer: dict[str, Any] = {}  # noqa: RUF012
    masked_actions: bool = False
    shared: bool = False  #: one encoder for actor and critic
    masked_frames: bool = False
    stops: bool = False  #: with a KL stop
    nonfinite: str | None = "skip"


ADAM, SGD = torch.optim.Adam, torch.optim.SGD
KINDS: dict[str, Kind] = {
    "dual": Kind(DualClipPPOLoss, ADAM, DUAL, {"amsgrad": True}, masked_frames=True, stops=True),
    "masked": Kind(DualClipPPOLoss, ADAM, {}, {"fused": True}, masked_actions=True, nonfinite=None),
    "clip": Kind(ClipPPOLoss, SGD, {"normalize_advantage": True}, {"momentum": 0.9}, shared=True),
    "a2c": Kind(A2CLoss, torch.optim.AdamW, {"entropy_coeff": 0.01}, {"weight_decay": 0.1}),
}
#: the others take seconds each
KINDS_MARKED = [pytest.param(x, marks=() if x == "clip" else pytest.mark.slow) for x in KINDS]


def make_networks(
    kind: str, *, shared: bool, activation: Any = nn.Tanh, width: int = 8, head_alone: bool = False
) -> tuple[Any, Any]:
    """Return an actor and a critic; one that shares the encoder may be its head alone."""

    def mlp() -> nn.Sequential:
        return nn.Sequential(nn.Linear(5, width), activation(), nn.Linear(width, 4))

    head: Any = nn.Sequential(nn.Linear(4, 4), NormalParamExtractor())
    keys, distribution = ["loc", "scale"], IndependentNormal
    if kind != "normal":
        head, keys, distribution = nn.Linear(4, 3), ["logits"], torch.distributions.Categorical
    read: Any = keys
    if kind == "masked":
        distribution, read = MaskedCategorical, {"logits": "logits", "mask": "action_mask"}
    body = TensorDictModule(mlp(), ["observation"], ["hidden"])
    own = body if shared else TensorDictModule(mlp(), ["observation"], ["hidden_2"])
    actor = ProbabilisticActor(
        TensorDictSequential(body, TensorDictModule(head, ["hidden"], keys)),
        in_keys=read,
        distribution_class=distribution,
        return_log_prob=True,
    )
    value = ValueOperator(nn.Linear(4, 1), in_keys=["hidden" if shared else "hidden_2"])
    return actor.to(DTYPE), (value if head_alone else TensorDictSequential(own, value)).to(DTYPE)


def make_minibatch(actor: Any, critic: Any, size: int, *, noise: float = 0.1) -> TensorDict:
    """Return frames whose old log-probabilities have this noise."""
    minibatch = TensorDict({"observation": torch.randn(size, 5, dtype=DTYPE)}, [size])
    if "action_mask" in actor.in_keys:
        minibatch["action_mask"] = (torch.rand(size, 3) < 0.6) | torch.eye(3).bool()[0]
    with torch.no_grad():
        minibatch = critic(actor(minibatch))
    minibatch["action_log_prob"] += noise * torch.randn(size, dtype=DTYPE)
    minibatch["advantage"] = torch.randn(size, 1, dtype=DTYPE)
    minibatch["value_target"] = 3 * torch.randn(size, 1, dtype=DTYPE)
    return minibatch.exclude("hidden", "hidden_2")


class Case:
    """A step, its minibatches, and a change before some of them."""

    def __init__(self, name: str, *, compile: Any, device: str = "cpu") -> None:
        kind = KINDS[name]
        torch.manual_seed(0)
        networks = make_networks("masked" if kind.masked_actions else "normal", shared=kind.shared)
        self.changes = kind.stops
        sizes = SIZES if self.changes else SIZES[:4]
        self.minibatches = [make_minibatch(*networks, size).to(device) for size in sizes]
        loss = kind.loss(*networks, functional=False, **kind.of_loss).to(device)
        first, *others = loss.parameters()
        groups = [{"params": [first], **GROUPS}, {"params": others}]
        self.step = TrainingStep(
            loss,
            kind.optimizer(groups, lr=1e-3, **kind.of_optimizer),
            max_grad_norm=0.5,
            stopper=KLEarlyStopper(0.02, check_every=2) if kind.stops else None,
            nonfinite=kind.nonfinite,
            compile=compile,
        )
        for minibatch in self.minibatches if kind.masked_frames else ():
            minibatch["collector", "mask"] = torch.arange(len(minibatch)) % 3 < 2
        if kind.stops:
            self.minibatches[3]["action_log_prob"] -= 1.0
        if kind.nonfinite == "skip":
            self.minibatches[6 if self.changes else 1]["advantage"][0] = torch.nan

    def change(self, number: int) -> None:
        """Change loss, optimizer or step before a minibatch."""
        loss, first = self.step.loss, next(iter(self.step.loss.parameters()))
        if number == 2:
            for group in self.step.optimizer.param_groups:
                group["lr"] *= 0.5
        elif number == 3:
            state = {name: 0.9 * x for name, x in loss.state_dict().items() if "weight" in name}
            loss.load_state_dict(loss.state_dict() | state)
        elif number == 4:
            first.data = first.data * 1.1
            loss.critic_coeff.fill_(0.25)
        elif number in (5, 7):
            first.requires_grad_(number == 7)
        elif number == 8:
            next(m for m in loss.modules() if isinstance(m, nn.Sequential))[1] = nn.ELU()
            loss.eval()
        elif number == 9:
            self.step.max_grad_norm = 0.1

    def run(self, around: Callable[[Callable[[], Any]], Any] = lambda call: call()) -> Any:
        """Return the parameters after all steps, and the outputs of each step."""
        outputs = []
        for number, minibatch in enumerate(self.minibatches):
            if self.changes:
                self.change(number)
            if number == 5:
                self.step.reset()  # a new batch
            outputs.append(dict(around(partial(self.step, minibatch.clone())).items()))
        parameters = [p.detach().clone() for p in self.step.loss.parameters()]
        return {"parameters": parameters, "outputs": outputs}
