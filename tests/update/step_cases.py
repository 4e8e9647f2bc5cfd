"""Training steps of several losses and optimizers; one of them with changes between its calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.modules import IndependentNormal, MaskedCategorical, ValueOperator
from torchrl.objectives import A2CLoss, ClipPPOLoss

from ppokit import DualClipPPOLoss, KLEarlyStopper, TrainingStep
from tests.blocks import actor_of

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
    network = TensorDictSequential(body, TensorDictModule(head, ["hidden"], keys))
    actor = actor_of(network, distribution, read)
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


# -- changes between the calls of a step


def halve_rates(step: TrainingStep) -> None:
    for group in step.optimizer.param_groups:
        group["lr"] *= 0.5


def load_weights(step: TrainingStep) -> None:
    state = step.loss.state_dict()
    step.loss.load_state_dict({k: 0.9 * x if "weight" in k else x for k, x in state.items()})


def move_data(step: TrainingStep) -> None:
    first = next(iter(step.loss.parameters()))
    first.data = first.data * 1.1


def freeze_or_thaw(step: TrainingStep) -> None:
    first = next(iter(step.loss.parameters()))
    first.requires_grad_(not first.requires_grad)


def fill_coefficients(step: TrainingStep) -> None:
    for name, value in (("critic_coeff", 0.25), ("clip_epsilon", 0.05), ("entropy_coeff", 0.02)):
        x = getattr(step.loss, name, None)
        if isinstance(x, Tensor) and x.ndim == 0 and x != 0:
            x.fill_(value)


def exchange_activation(step: TrainingStep) -> None:
    next(m for m in step.loss.modules() if isinstance(m, nn.Sequential))[1] = nn.ELU()


def switch_mode(step: TrainingStep) -> None:
    step.loss.train(not step.loss.training)


def clip_harder(step: TrainingStep) -> None:
    step.max_grad_norm = 0.1


Change = Callable[[TrainingStep], None]
CHANGES: list[Change] = [halve_rates, load_weights, move_data, freeze_or_thaw, fill_coefficients]
CHANGES += [exchange_activation, switch_mode]
OF_KIND: dict[int, tuple[Change, ...]] = {
    2: (halve_rates,),
    3: (load_weights,),
    4: (move_data, fill_coefficients),
    5: (freeze_or_thaw,),
    7: (freeze_or_thaw,),
    8: (exchange_activation, switch_mode),
    9: (clip_harder,),
}


class Case(NamedTuple):
    """A step, its minibatches, and the changes before some of them."""

    step: TrainingStep
    minibatches: list[TensorDict]
    changes: Mapping[int, Sequence[Change]]

    def run(self, around: Callable[[Callable[[], Any]], Any] = lambda call: call()) -> Any:
        """Return the outputs of each step, and parameters and optimizer's state after all."""
        outputs = []
        for number, minibatch in enumerate(self.minibatches):
            for change in self.changes.get(number, ()):
                change(self.step)
            if number == 5:
                self.step.reset()  # a new batch
            outputs.append(dict(around(partial(self.step, minibatch.clone())).items()))
        parameters = [p.detach().clone() for p in self.step.loss.parameters()]
        states = self.step.optimizer.state_dict()["state"].values()
        tensors = [{k: x for k, x in state.items() if isinstance(x, Tensor)} for state in states]
        return {"parameters": parameters, "outputs": outputs, "optimizer": tensors}


def make_case(name: str, *, compile: Any, device: str = "cpu") -> Case:
    """Return the case of one of the kinds."""
    kind = KINDS[name]
    torch.manual_seed(0)
    networks = make_networks("masked" if kind.masked_actions else "normal", shared=kind.shared)
    sizes = SIZES if kind.stops else SIZES[:4]
    minibatches = [make_minibatch(*networks, size).to(device) for size in sizes]
    loss = kind.loss(*networks, functional=False, **kind.of_loss).to(device)
    first, *others = loss.parameters()
    groups = [{"params": [first], **GROUPS}, {"params": others}]
    step = TrainingStep(
        loss,
        kind.optimizer(groups, lr=1e-3, **kind.of_optimizer),
        max_grad_norm=0.5,
        stopper=KLEarlyStopper(0.02, check_every=2) if kind.stops else None,
        nonfinite=kind.nonfinite,
        compile=compile,
    )
    for minibatch in minibatches if kind.masked_frames else ():
        minibatch["collector", "mask"] = torch.arange(len(minibatch)) % 3 < 2
    if kind.stops:
        minibatches[3]["action_log_prob"] -= 1.0
    if kind.nonfinite == "skip":
        minibatches[6 if kind.stops else 1]["advantage"][0] = torch.nan
    return Case(step, minibatches, OF_KIND if kind.stops else {})
