"""What is refused, with nothing changed; and that a trial run changes nothing."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import ProbabilisticActor, ValueOperator

from ppokit import (
    GAE,
    AdaptiveKLCoeff,
    DualClipPPOLoss,
    InterpSchedule,
    KLEarlyStopper,
    ParameterScheduler,
    PPOUpdate,
    RewardNormalizer,
    TrainingStep,
)
from tests import test_contract
from tests.blocks import make_actor, make_critic, make_minibatch, ppo_update


class Counts(nn.Module):
    """Draws random numbers, and counts its calls in a buffer that it replaces and in a number."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls, self.count = self.calls + 1, self.count + 1
        return x + 0.01 * torch.rand_like(x)


def make_update(device: str = "cpu", **options: Any) -> PPOUpdate:
    torch.manual_seed(0)
    body = nn.Sequential(nn.BatchNorm1d(3), Counts(), nn.Linear(3, 2)).to(device)
    actor = ProbabilisticActor(
        TensorDictModule(body, ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    encoder = nn.utils.spectral_norm(nn.Linear(3, 8))
    critic = ValueOperator(nn.Sequential(encoder, nn.Linear(8, 1)).to(device), ["observation"])
    loss = DualClipPPOLoss(actor, critic, functional=False, kl_coeff=0.2)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    schedule = ParameterScheduler({"lr": (optimizer, InterpSchedule.linear(1e-3, 0.0, frames=90))})
    blocks: dict[str, Any] = {
        "advantage": GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=True),
        "reward_normalizer": RewardNormalizer(0.99),
        "stopper": KLEarlyStopper(10.0),
        "adaptive_kl": AdaptiveKLCoeff(loss),
        "scheduler": schedule,
    }
    return ppo_update(loss, optimizer, minibatch_size=8, seed=0, **(blocks | options))


def rollout(device: str = "cpu") -> TensorDict:
    torch.manual_seed(1)
    shape = (2, 12)
    batch = TensorDict(
        {
            "observation": torch.randn(*shape, 3),
            "action": torch.randint(2, shape),
            "action_log_prob": torch.full(shape, -0.7),
            "next": {
                "observation": torch.randn(*shape, 3),
                "reward": torch.randn(*shape, 1),
                "done": torch.zeros(*shape, 1, dtype=torch.bool),
                "terminated": torch.zeros(*shape, 1, dtype=torch.bool),
            },
        },
        shape,
    )
    return batch.to(device)


def tensors_of(update: PPOUpdate) -> list[torch.Tensor]:
    blocks = [update.step.loss, update.advantage, update.reward_normalizer]
    return [x for block in blocks for x in [*block.parameters(), *block.buffers()]]


def flat(state: Any) -> list[Any]:
    if isinstance(state, dict):
        return [x for name, value in sorted(state.items(), key=str) for x in [name, *flat(value)]]
    return [state.tolist()] if isinstance(state, torch.Tensor) else [repr(state)]


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_validate_changes_nothing(device: str):
    update, batch = make_update(device), rollout(device)
    before, state = batch.clone(), flat(update.state_dict())
    tensors, values = tensors_of(update), [x.detach().clone() for x in tensors_of(update)]
    random = torch.random.get_rng_state(), torch.rand((), device=device)
    torch.random.set_rng_state(random[0])
    expected = torch.rand(3, device=device) if device == "cpu" else None
    torch.random.set_rng_state(random[0])
    on_device = None if device == "cpu" else torch.cuda.get_rng_state()
    update.validate(batch)
    if on_device is not None:
        assert torch.equal(torch.cuda.get_rng_state(), on_device)
    else:
        assert torch.equal(torch.rand(3), expected)
    assert flat(update.state_dict()) == state
    for tensor, same, value in zip(tensors_of(update), tensors, values, strict=True):
        assert tensor is same
        assert torch.equal(tensor, value)
    counts = next(part for part in update.step.loss.modules() if isinstance(part, Counts))
    assert counts.count == 0
    assert set(batch.keys(True, True)) == set(before.keys(True, True))
    assert (batch == before).all()


def test_validate_changes_nothing_where_it_refuses():
    update, batch = make_update(), rollout()
    state = flat(update.state_dict())
    batch["action_log_prob"][:] = torch.nan
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(ValueError, match="'loss_objective' is nan"):
                update.validate(batch)
    assert flat(update.state_dict()) == state


def masked(batch: TensorDictBase, mask: torch.Tensor) -> TensorDictBase:
    batch["collector", "mask"] = mask
    return batch


REFUSED = {
    "no rows": (lambda batch: batch[:0], ValueError, r"empty: it has shape \[0, 12\]"),
    "no steps": (lambda batch: batch[:, :0], ValueError, r"empty: it has shape \[2, 0\]"),
    "no valid frame": (
        lambda batch: masked(batch, torch.zeros(2, 12, dtype=torch.bool)),
        ValueError,
        r"'mask'\) is False everywhere in a batch of shape \[2, 12\]",
    ),
    "a mask of floats": (
        lambda batch: masked(batch, torch.ones(2, 12)),
        TypeError,
        "dtype torch.float32; a mask must be torch.bool",
    ),
    "a mask of another shape": (
        lambda batch: masked(batch, torch.ones(2, 12, 3, dtype=torch.bool)),
        ValueError,
        r"shape \[2, 12, 3\], but the batch has shape \[2, 12\]",
    ),
}


@pytest.mark.parametrize(("change", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_batch_to_train_nothing_with(change: Any, error: type[Exception], message: str):
    update = make_update()
    state = copy.deepcopy(flat(update.state_dict()))
    for run in (update, update.validate):
        with pytest.raises(error, match=message):
            run(change(rollout()))
    assert flat(update.state_dict()) == state


def test_a_trial_of_rows_that_begin_with_padding():
    make_update().validate(masked(rollout(), (torch.arange(12) > 9).expand(2, 12).clone()))


# -- repr --------------------------------------------------------------------------------


def test_it_names_its_parts_in_a_line_each():
    first, *lines, last = repr(make_update(max_grad_norm=0.5)).split("\n")
    assert first == "PPOUpdate(epochs=4, minibatch_size=8"
    assert last == ")"
    names = ["step", "loss", "optimizer", "stopper", "advantage", "reward_normalizer"]
    names += ["adaptive_kl", "scheduler"]
    assert [line.split("=")[0].strip() for line in lines] == names
    kinds = ["TrainingStep", "DualClipPPOLoss", "Adam", "KLEarlyStopper", "GAE"]
    for line, kind in zip(lines, kinds, strict=False):
        assert line.split("=", 1)[1].startswith(kind + "(")


def test_it_shows_what_the_loss_says_of_itself():
    update = make_update()
    loss: Any = update.step.loss
    loss.extra_repr = lambda: "path=one\nof two"
    assert "loss=DualClipPPOLoss(path=one of two)" in repr(update)
    update.step.loss = torch.compile(loss, backend="eager")
    assert "loss=DualClipPPOLoss(path=one of two) in OptimizedModule" in repr(update)


def test_what_is_refused_first_is_not_counted():
    """So that the batch, once it is mended, is no batch that was normalised already."""
    batch = test_contract.rollout(0)
    whole = make_minibatch(make_actor(), *batch.shape)
    batch.update(whole.select("observation", "action", "action_log_prob"))
    loss = DualClipPPOLoss(make_actor(), make_critic())
    normalizer = RewardNormalizer()
    update = PPOUpdate(
        TrainingStep(loss, torch.optim.Adam(loss.parameters())),
        advantage=GAE(gamma=0.9, lmbda=0.9, value_network=loss.critic_network),
        reward_normalizer=normalizer,
    )
    lacking = batch.exclude("observation")
    with pytest.raises(KeyError, match="observation"):
        update(lacking)
    assert normalizer.count == 0
    assert ("next", "raw_reward") not in lacking.keys(True)
    lacking["observation"] = batch["observation"]
    assert update(lacking)["frames"] == batch.numel()
