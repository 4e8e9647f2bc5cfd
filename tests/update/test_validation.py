"""An update that raises before its first step changes nothing, and validate changes nothing."""

from __future__ import annotations

import copy
import math
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import ValueOperator
from torchrl.objectives import value as torchrl_value

from ppokit import (
    GAE,
    AdaptiveKLCoeff,
    AdaptiveLearningRate,
    DualClipPPOLoss,
    GymCollector,
    InterpSchedule,
    KLEarlyStopper,
    ParameterScheduler,
    PPOUpdate,
    RewardNormalizer,
    SequenceBatcher,
    TrainingStep,
)
from ppokit.networks import actor_critic
from tests.blocks import (
    Given,
    actor_of,
    categorical_actor,
    make_actor,
    make_critic,
    make_minibatch,
    ppo_update,
)
from tests.test_state import assert_same_state, flat
from tests.update.parts import make_batch, make_loss, parameters_of


class Draws(nn.Module):
    """Draws from every global generator, and counts its calls in every way."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.rows = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        self.rows.append(x.shape[:-1].numel())
        return x + 1e-6 * (np.random.random() + random.random() + torch.rand(()))


def make_update(device: str = "cpu", *, buffers: bool = False, **options: Any) -> PPOUpdate:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4) if buffers else nn.Identity()
    body = nn.Sequential(norm, Draws(), nn.Linear(4, 2)).to(device)
    actor = categorical_actor(body)
    encoder = nn.utils.spectral_norm(nn.Linear(4, 8)) if buffers else nn.Linear(4, 8)
    value = nn.Sequential(Draws(), encoder, nn.Linear(8, 1)).to(device)
    critic = ValueOperator(value, ["observation"])
    loss = DualClipPPOLoss(actor, critic, functional=False, kl_coeff=0.2)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    schedule = {"lr": (optimizer, InterpSchedule([(0, 1e-3), (90, 0.0)]))}
    blocks: dict[str, Any] = {
        "advantage": GAE(gamma=0.99, lmbda=0.95, value_network=critic),
        "reward_normalizer": RewardNormalizer(0.99),
        "stopper": KLEarlyStopper(10.0),
        "adaptive_kl": AdaptiveKLCoeff(loss),
        "scheduler": ParameterScheduler(schedule),
    }
    return ppo_update(loss, optimizer, minibatch_size=4, epochs=1, seed=0, **(blocks | options))


def make_data(seed: int = 0, device: str = "cpu") -> TensorDict:
    batch = make_batch(seed)
    batch["action"] = (batch["action"][..., 0] > 0).long()
    batch["action_log_prob"] = torch.full((2, 6), -0.7)
    batch["next", "done"] = torch.zeros(2, 6, 1, dtype=torch.bool)
    batch["next", "terminated"] = batch["next", "done"].clone()
    batch["collector", "traj_ids"] = torch.tensor([[0], [1]]).expand(2, 6).clone()
    return batch.to(device)


def draws_of(update: PPOUpdate) -> list[Draws]:
    return [module for module in update.step.loss.modules() if isinstance(module, Draws)]


def test_the_first_update_calls_every_network_once():
    update = make_update()
    update(make_data())
    actor, critic = draws_of(update)
    assert actor.rows == [4] * 3
    assert critic.rows == [12, 2] + [4] * 3  # GAE: all frames, and the last of each row


def generators() -> list[Any]:
    """Return the states of all global generators."""
    of_numpy: Any = np.random.get_state()
    states = [random.getstate(), of_numpy[1].tolist(), torch.random.get_rng_state().tolist()]
    return [*states, torch.cuda.get_rng_state().tolist() if torch.cuda.is_available() else None]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_validate_changes_nothing(device: str):
    update, batch = make_update(device, buffers=True), make_data(device=device)
    before, state, random_state = batch.clone(), flat(update.state_dict()), generators()
    blocks = [update.step.loss, update.advantage, update.reward_normalizer]
    tensors = [x for block in blocks for x in (*block.parameters(), *block.buffers())]
    values = [x.detach().clone() for x in tensors]
    update.validate(batch)
    assert generators() == random_state
    assert_same_state(flat(update.state_dict()), state)
    after = [x for block in blocks for x in (*block.parameters(), *block.buffers())]
    for tensor, same, value in zip(after, tensors, values, strict=True):
        assert tensor is same
        assert torch.equal(tensor, value)
    assert set(batch.keys(True, True)) == set(before.keys(True, True))
    assert (batch == before).all()


FAULTS: dict[str, tuple[Any, str]] = {
    "the normalizer": (lambda batch: batch["next", "reward"].fill_(torch.nan), "reward"),
    "GAE": (lambda batch: batch["next", "observation"][:, -1].fill_(torch.nan), "is NaN"),
    "the loss": (
        lambda batch: batch.set("action_log_prob", batch["action_log_prob"].unsqueeze(-1)),
        "action_log_prob",
    ),
    "a value": (lambda batch: batch["action_log_prob"].fill_(torch.nan), "nan"),
}


@pytest.mark.parametrize("updates", [0, 1])
@pytest.mark.parametrize("fault", FAULTS)
def test_an_update_that_raises_changes_neither_blocks_nor_batch(fault: str, updates: int):
    update, bad = make_update(), make_data(1)
    for _ in range(updates):
        update(make_data())
    change, message = FAULTS[fault]
    change(bad)
    before, state = bad.clone(), flat(update.state_dict())
    for run in (update.validate, update):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            with pytest.raises((ValueError, FloatingPointError), match=message):
                run(bad)
    assert_same_state(flat(update.state_dict()), state)
    torch.testing.assert_close(bad.to_dict(), before.to_dict(), rtol=0, atol=0, equal_nan=True)
    assert update(make_data(1))["steps"] == 3


class Counted(nn.Module):
    """An advantage module with a state of its own, which raises in a given call."""

    calls: torch.Tensor

    def __init__(self, fail_at: int) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))
        self.fail_at = fail_at

    def forward(self, batch: TensorDict) -> TensorDict:
        self.calls += 1
        if self.calls == self.fail_at:
            raise ValueError("no advantage")
        batch["advantage"] = torch.randn(*batch.shape, 1)
        return batch.set("value_target", torch.randn(*batch.shape, 1))


def test_the_state_of_the_advantage_module_is_restored():
    update = make_update(advantage=Counted(fail_at=2))
    update(make_data())
    with pytest.raises(ValueError, match="no advantage"):
        update(make_data(1))
    assert update.advantage.calls == 1


# -- two gammas ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of_gae", "of_rewards", "kind"),
    [
        *((0.99, 0.95, GAE), (0.99, 0.95, torchrl_value.GAE)),
        # torchrl keeps 0.99 as a float32, 0.99000001: no difference.
        *((0.99, 0.99, GAE), (0.99, 0.99, torchrl_value.GAE), (0.99, None, GAE)),
        (1.0, 1.0, torchrl_value.GAE),
    ],
)
def test_two_gammas_warn_once_when_the_update_is_built(of_gae: float, of_rewards: Any, kind: Any):
    loss = make_loss()
    step = TrainingStep(loss, torch.optim.Adam(loss.parameters()))
    gae = kind(gamma=of_gae, lmbda=0.95, value_network=loss.critic_network)
    normalizer = None if of_rewards is None else RewardNormalizer(of_rewards)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        update = PPOUpdate(step, minibatch_size=6, advantage=gae, reward_normalizer=normalizer)
    assert [warning.filename for warning in caught] == [__file__] * (of_rewards == 0.95)
    message = "gamma is 0.99 in the advantage module and 0.95 in the reward normalizer"
    assert all(message in str(warning.message) for warning in caught)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        update(make_batch())
        update.validate(make_batch())
        PPOUpdate(step, reward_normalizer=RewardNormalizer(0.9))  # GAE elsewhere


# -- bad input -----------------------------------------------------------------------------


def masked(mask: torch.Tensor) -> Any:
    return lambda batch: batch.set(("collector", "mask"), mask)


def lacking(key: Any) -> Any:
    return lambda batch: batch.exclude(key)


NONE, OTHER = torch.zeros(2, 6, dtype=torch.bool), torch.ones(2, 6, 3, dtype=torch.bool)
WIDE = torch.zeros(2, 6, 5)
BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "no rows": (lambda batch: batch[:0], ValueError, r"shape \[0, 6\] has no valid"),
    "no steps": (lambda batch: batch[:, :0], ValueError, r"shape \[2, 0\] has no valid"),
    "no valid frame": (masked(NONE), ValueError, r"shape \[2, 6\] has no valid frame"),
    "a mask of floats": (
        *(masked(torch.ones(2, 6)), TypeError, "dtype torch.float32; a mask must be torch.bool"),
    ),
    "a mask of another shape": (
        *(masked(OTHER), ValueError, r"shape \[2, 6, 3\], but the batch has shape \[2, 6\]"),
    ),
    "no log-probability": (
        *(lacking("action_log_prob"), KeyError, "'action_log_prob' is not in the batch"),
    ),
    "no done": (lacking(("next", "done")), KeyError, "done"),
    "a wide observation": (
        *(lambda batch: batch.set("observation", WIDE), ValueError, r"(?s)'observation'.*5\]"),
    ),
}


@pytest.mark.parametrize(("change", "error", "message"), BAD.values(), ids=BAD.keys())
def test_bad_batches(change: Any, error: type[Exception], message: str):
    update = make_update()
    state = flat(update.state_dict())
    for run in (update, update.validate):
        with pytest.raises(error, match=message):
            run(change(make_data()))
    assert_same_state(flat(update.state_dict()), state)


def test_rows_that_begin_with_padding():
    make_update().validate(masked((torch.arange(6) > 3).expand(2, 6).clone())(make_data()))


def test_validate_names_entries_that_the_loss_reads_and_no_block_writes():
    loss = make_loss()
    update = PPOUpdate(TrainingStep(loss, torch.optim.Adam(loss.parameters())))
    with pytest.raises(KeyError, match=r"(?s)reads 'advantage', which the batch lacks.*=GAE"):
        update.validate(make_batch())
    mean = lambda weight, batch: TensorDict({"loss_any": weight * batch["observation"].mean()})  # noqa: E731
    own = Given(mean, "observation", "action_log_prob")
    update = PPOUpdate(TrainingStep(own, torch.optim.SGD(own.parameters(), lr=0.1)))
    update.validate(make_batch())
    own.in_keys = ["observation", "cost"]
    with pytest.raises(KeyError, match="Given reads 'cost'"):
        update.validate(make_batch())
    own.in_keys, own.forward = ["observation", "action_log_prob"], torch.no_grad()(own.forward)
    with pytest.raises(ValueError, match="None of loss_any has a gradient"):
        update.validate(make_batch())


def test_a_batch_that_raised_can_be_completed():
    """It is not marked as normalized."""
    update, batch = make_update(), make_data()
    partial = batch.exclude("observation")
    with pytest.raises(KeyError, match="observation"):
        update(partial)
    assert update.reward_normalizer.count == 0
    assert ("next", "raw_reward") not in partial.keys(True)
    partial["observation"] = batch["observation"]
    assert update(partial)["frames"] == batch.numel()


# -- names that blocks write, sizes and dtypes -----------------------------------------------


def observing(key: Any, advantage: Any = None, **options: Any) -> Any:
    """Return an update whose loss read an entry of this name, and a batch with it."""
    loss_of = lambda k: ValueOperator(nn.Linear(4, 1), in_keys=[k])  # noqa: E731
    actor = actor_of(TensorDictModule(nn.Linear(4, 2), [key], ["logits"]))
    critic = loss_of(key if advantage is None else "observation")
    loss = DualClipPPOLoss(actor, critic)
    gae = GAE(gamma=0.9, lmbda=0.9, value_network=critic)
    step = TrainingStep(loss, torch.optim.Adam(loss.parameters()))
    batch = make_batch()
    batch[key] = batch["observation"].clone()
    following = ("next", key) if isinstance(key, str) else ("next", *key)
    batch[following] = batch["next", "observation"].clone()
    with torch.no_grad():
        batch = actor(batch.exclude("action", "action_log_prob"))
    return lambda **more: PPOUpdate(step, advantage=gae, **options, **more), batch


@pytest.mark.parametrize("key", ["advantage", "value_target", "state_value"])
@pytest.mark.parametrize("of_actor", [False, True])
def test_an_observation_that_gae_would_overwrite_raises(key: str, of_actor: bool):
    make, batch = observing(key, "of the actor alone" if of_actor else None)
    if key == "state_value" and not of_actor:
        return  # the critic itself writes it
    before = batch[key].clone()
    with pytest.raises(ValueError, match=rf"loss read '{key}', and the advantage .*Rename"):
        make()
    assert torch.equal(batch[key], before)


def test_an_observation_that_a_schedule_or_a_normalizer_would_overwrite_raises():
    make, _ = observing(("next", "raw_reward"))
    with pytest.raises(ValueError, match=r"'raw_reward'\), and the reward_normalizer"):
        make(reward_normalizer=RewardNormalizer())
    make, _ = observing("raw_reward")
    with pytest.raises(ValueError, match="loss read 'raw_reward', and the reward_normalizer"):
        make(reward_normalizer=RewardNormalizer())
    make, _ = observing("sequence")
    with pytest.raises(ValueError, match="loss read 'sequence', and the batcher"):
        make(batcher=SequenceBatcher(4))
    make, _ = observing(("schedule", "clip"))
    holder = type("Holder", (), {"clip": 0.1})()
    line = InterpSchedule([(0, 0.1), (10, 0.2)])
    with pytest.raises(ValueError, match=r"'clip'\), and the scheduler"):
        make(scheduler=ParameterScheduler({"clip": (holder, line)}))


@pytest.mark.parametrize("key", ["mask", "velocity", ("agents", "advantage"), ("a", "reward")])
def test_other_names_of_observations_train(key: Any):
    """Complete keys are compared, and the entry is as it was."""
    make, batch = observing(key)
    update, before = make(epochs=1), batch[key].clone()
    assert update(batch)["steps"] == 1
    assert torch.equal(batch[key], before)


def test_a_key_that_a_block_was_given_later_is_looked_up_again():
    make, batch = observing("velocity")
    update = make()
    update(batch.clone())
    update.advantage.set_keys(advantage="velocity")
    state = flat(update.state_dict())
    with pytest.raises(ValueError, match="loss read 'velocity', and the advantage"):
        update(batch)
    assert_same_state(flat(update.state_dict()), state)


def test_a_minibatch_larger_than_the_batch_warns_once():
    update = make_update()
    update.minibatch_size = 64
    with pytest.warns(UserWarning, match="minibatch_size=64 is larger than the batch of 12 frames"):
        statistics = update(make_data())
    assert statistics["minibatches"] == update.epochs
    update(make_data(1))  # without a warning, which would be an error here


@pytest.mark.parametrize("name", ["observation", "reward", "advantage"])
def test_validate_names_an_entry_of_another_dtype(name: str):
    update, batch = make_update(), make_data()
    if name == "observation":
        batch = batch.set("observation", batch["observation"].double())
        expected = (
            ValueError,
            r"'observation' \[2, 6, 4\] torch.float64.* torch.float32.*Convert the",
        )
    elif name == "reward":
        batch["next"] = batch["next"].set("reward", batch["next", "reward"].long())
        expected = TypeError, r"'reward'\) has dtype torch.int64"
    else:
        loss = make_loss()
        update = PPOUpdate(TrainingStep(loss, torch.optim.Adam(loss.parameters())))
        batch["advantage"] = torch.ones(2, 6, 1, dtype=torch.long)
        batch["value_target"] = torch.ones(2, 6, 1)
        expected = TypeError, "'advantage' has dtype torch.int64"
    for run in (update.validate, update):
        with pytest.raises(expected[0], match=expected[1]):
            run(batch.clone())


def test_a_critic_that_reads_a_missing_key_is_named():
    loss, critic = make_loss(), ValueOperator(nn.Linear(4, 1), in_keys=["privileged"])
    gae = GAE(gamma=0.9, lmbda=0.9, value_network=critic)
    update = PPOUpdate(TrainingStep(loss, torch.optim.Adam(loss.parameters())), advantage=gae)
    with pytest.raises(KeyError, match=r"value network reads \[.*privileged.*\], and there is"):
        update(make_data())
    loss = DualClipPPOLoss(loss.actor_network, critic)
    with pytest.raises(KeyError, match=r"DualClipPPOLoss reads \[.*privileged"):
        loss(make_minibatch(make_actor(), 8))


def test_a_compiled_critic_of_the_advantage_is_taken():
    actor, critic = actor_critic("CartPole-v1")
    loss = DualClipPPOLoss(actor, critic)
    step = TrainingStep(loss, torch.optim.Adam(loss.parameters()))
    gae = GAE(gamma=0.9, lmbda=0.9, value_network=torch.compile(critic, backend="eager"))
    update = PPOUpdate(step, advantage=gae, epochs=1)
    update.load_state_dict(update.state_dict())
    assert "value_network" not in update.state_dict()
    with GymCollector("CartPole-v1", actor, frames_per_batch=8) as collector:
        assert update(collector.rollout())["steps"] == 1


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * mask.unsqueeze(-1)


def test_a_network_may_read_the_mask_that_a_batcher_passes_on():
    torch.manual_seed(0)
    actor, _ = actor_critic("CartPole-v1")
    keys = ["observation", ("collector", "mask")]
    critic = TensorDictModule(Attends(), keys, ["state_value"])
    with GymCollector(
        "CartPole-v1", actor, num_envs=2, frames_per_batch=64, trajs_per_batch=4
    ) as collector:
        batch = next(iter(collector))
    loss = DualClipPPOLoss(actor, critic)
    step = TrainingStep(loss, torch.optim.Adam(loss.parameters()))
    gae = GAE(gamma=0.9, lmbda=0.9, value_network=critic)
    update = PPOUpdate(step, advantage=gae, batcher=SequenceBatcher(None, cut_keys=()))
    assert update(batch)["steps"] == 4


def test_a_loss_without_in_keys_is_named():
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

    bare = Bare()
    with pytest.raises(TypeError, match="Bare has no in_keys, the entries of a minibatch"):
        TrainingStep(bare, torch.optim.Adam(bare.parameters()))


# -- repr --------------------------------------------------------------------------------


def test_repr_has_a_line_for_each_part():
    update = make_update(max_grad_norm=0.5)
    first, *lines, last = repr(update).split("\n")
    assert first.startswith("PPOUpdate(epochs=1, minibatch_size=4, ")
    assert last == ")"
    names = ["step", "stopper", "advantage", "reward_normalizer", "adaptive_kl", "scheduler"]
    assert [line.split("=")[0].strip() for line in lines] == names
    assert lines[0].startswith("  step=TrainingStep(DualClipPPOLoss, Adam, max_grad_norm=0.5")


def assign(step: TrainingStep) -> None:
    state = step.loss.state_dict()
    step.loss.load_state_dict({key: x.clone() for key, x in state.items()}, assign=True)


def replace_head(step: TrainingStep) -> None:
    step.loss.critic_network.module = nn.Linear(4, 1)


def replace_optimizer(step: TrainingStep) -> None:
    step.optimizer = torch.optim.SGD(step.loss.actor_network.parameters(), lr=0.1)


def replace_loss(step: TrainingStep) -> None:
    step.loss = make_loss()


@pytest.mark.parametrize("change", [assign, replace_head, replace_optimizer, replace_loss])
def test_parameters_that_the_optimizer_does_not_hold_raise_later_too(change: Any):
    loss = make_loss()
    step = TrainingStep(loss, torch.optim.Adam(loss.parameters()))
    gae = GAE(gamma=0.9, lmbda=0.9, value_network=loss.critic_network)
    update, batch = PPOUpdate(step, advantage=gae), make_batch()
    update(batch.clone())
    change(step)
    calls = update.validate, update, lambda batch: step(gae(batch).reshape(-1))
    for call in calls:
        with pytest.raises(ValueError, match=r"optimizer.*loss\.parameters\(\)"):
            call(make_batch(number=1))
    step.optimizer = torch.optim.Adam(step.loss.parameters())
    assert update(make_batch(number=1))["grad_norm"] > 0


@pytest.mark.parametrize("key", ["observation", "action", "value_target"])
def test_an_entry_with_a_gradient_raises_before_the_first_step(key: str):
    """The second minibatch of an epoch would go through the same graph again."""
    loss = make_loss()
    update = ppo_update(loss, torch.optim.SGD(loss.parameters(), lr=0.1), minibatch_size=4)
    batch = make_minibatch(make_actor(), 12)
    batch[key] = batch[key] * torch.ones(1, requires_grad=True)
    before = parameters_of(loss)
    for call in (update.validate, update):
        with pytest.raises(ValueError, match=rf"have a gradient: .*{key}.*detach"):
            call(batch)
    assert torch.equal(parameters_of(loss), before)
    assert update(batch.detach())["steps"] > 0


def test_the_loss_of_a_step_that_was_replaced_burns_in():
    """The policy has not changed since the batch was collected: a KL of 0."""
    torch.manual_seed(0)
    networks, others = (
        actor_critic("CartPole-v1", (8,), memory="gru", memory_size=5) for _ in range(2)
    )
    steps = [make_recurrent_step(x) for x in (networks, others)]
    gae = GAE(gamma=0.9, lmbda=0.9, value_network=others.critic)
    batcher = SequenceBatcher(4, burn_in=3)
    update = PPOUpdate(steps[0], advantage=gae, batcher=batcher, epochs=1, seed=0)
    update.step = steps[1]
    with GymCollector("CartPole-v1", others.policy, frames_per_batch=64, num_envs=2) as collector:
        assert abs(update(collector.rollout())["first_kl"]) < 1e-6


def make_recurrent_step(networks: Any) -> TrainingStep:
    loss = DualClipPPOLoss(networks.actor, networks.value)
    return TrainingStep(loss, torch.optim.SGD(loss.parameters(), lr=1e-3))


@pytest.mark.parametrize("other", [None, SequenceBatcher(2)])
def test_a_batcher_that_was_replaced_raises(other: Any):
    loss = make_loss()
    step = TrainingStep(loss, torch.optim.SGD(loss.parameters(), lr=0.1))
    gae = GAE(gamma=0.9, lmbda=0.9, value_network=loss.critic_network)
    update = PPOUpdate(step, advantage=gae, batcher=SequenceBatcher(3, cut_keys=()))
    update(make_batch())
    update.batcher = other
    with pytest.raises(ValueError, match="build another PPOUpdate"):
        update(make_batch(number=1))


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("episodes", {"open": torch.zeros(3), "ids": None}),
        ("episodes", {"open": torch.zeros(3, 2), "ids": torch.zeros(2)}),
        ("episodes", {"open": None, "ids": torch.zeros(2)}),
        ("episodes", {"open": "x", "ids": None}),
        ("episodes", {"open": torch.tensor([[1.0, 2.5]]), "ids": None}),
        ("episodes", {"open": torch.tensor([[1.0, math.nan]]), "ids": None}),
        ("episodes", {"open": torch.zeros(2, 2), "ids": torch.zeros(2)}),
        ("scaler", {"scale": 0.0}),
        ("scaler", {"scale": math.nan}),
        ("scaler", {"scale": "x"}),
    ],
)
def test_a_state_of_another_shape_or_range_is_not_loaded(name: str, state: dict[str, Any]):
    loss = make_loss()
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    update = ppo_update(loss, optimizer, amp_dtype=torch.float16)
    update(make_batch().update(make_minibatch(make_actor(), 2, 6)))
    saved = copy.deepcopy(update.state_dict())
    with pytest.raises(ValueError, match=f"'{name}' rejects its state"):
        update.load_state_dict(saved | {name: saved[name] | state})
    update.load_state_dict(saved)
    update(make_batch(number=1).update(make_minibatch(make_actor(), 2, 6)))


@pytest.mark.parametrize("is_first", [True, False])
def test_a_parameter_group_may_be_empty(is_first: bool):
    loss = make_loss()
    groups: list[Any] = [{"params": []}, {"params": [*loss.parameters()]}]
    optimizer = torch.optim.Adam(groups if is_first else groups[::-1])
    rate = AdaptiveLearningRate(optimizer)
    update = ppo_update(loss, optimizer, adaptive_kl=rate)
    assert update(make_minibatch(make_actor(), 12))["steps"] > 0


class WithAverage(DualClipPPOLoss):
    """Holds an average of the critic, which is not trained."""

    def __init__(self, actor: Any, critic: Any) -> None:
        super().__init__(actor, critic)
        self.critic_network_average = copy.deepcopy(critic)


def test_a_network_whose_name_begins_like_the_critics_need_not_be_trained():
    actor, critic = make_actor(), make_critic()
    parameters = [*actor.parameters(), *critic.parameters()]
    update = ppo_update(WithAverage(actor, critic), torch.optim.Adam(parameters))
    assert update(make_minibatch(make_actor(), 12))["steps"] > 0


class Within(nn.Module):
    """Holds a loss, and calls it."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.ppo, self.in_keys = loss, loss.in_keys

    def forward(self, minibatch: Any) -> Any:
        return self.ppo(minibatch)


@pytest.mark.parametrize("wrap", [Within, torch.compile])
def test_a_wrapped_loss_names_the_parameters_that_the_optimizer_lacks(wrap: Any):
    loss = make_loss()
    optimizer = torch.optim.Adam(loss.actor_network.parameters())
    with pytest.raises(ValueError, match=r"does not hold: .*critic_network"):
        TrainingStep(wrap(loss), optimizer)


class OwnAdvantage(nn.Module):
    """An advantage module without ``tensor_keys``."""

    def __init__(self, value_network: Any) -> None:
        super().__init__()
        self.value_network = value_network

    def forward(self, batch: Any) -> Any:
        value = self.value_network(batch.copy())["state_value"]
        batch["value_target"] = value + batch["next", "reward"]
        return batch.set("advantage", batch["next", "reward"] - value)


def test_an_advantage_module_of_the_user_needs_no_tensor_keys():
    loss = make_loss()
    step = TrainingStep(loss, torch.optim.SGD(loss.parameters(), lr=0.1))
    update = PPOUpdate(step, advantage=OwnAdvantage(loss.critic_network))
    assert update(make_batch())["steps"] > 0


@pytest.mark.parametrize("name", ["advantage", "value_target", "throttle"])
def test_a_part_of_the_action_that_gae_would_overwrite_raises(name: str):
    space = spaces.Dict({name: spaces.Box(-1, 1, (1,))})
    actor, critic = actor_critic((spaces.Box(-1, 1, (3,)), space))
    loss = DualClipPPOLoss(actor, critic)
    step = TrainingStep(loss, torch.optim.SGD(loss.parameters(), lr=0.1))
    gae = GAE(gamma=0.9, lmbda=0.9, value_network=critic)
    if name == "throttle":
        PPOUpdate(step, advantage=gae)
        return
    with pytest.raises(ValueError, match=f"loss read '{name}', and the advantage"):
        PPOUpdate(step, advantage=gae)


def test_a_time_dimension_that_is_not_the_last_raises():
    loss = make_loss()
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=loss.critic_network, time_dim=0)
    step = TrainingStep(loss, torch.optim.Adam(loss.parameters()))
    with pytest.raises(ValueError, match=r"has time_dim=0, .* here of shape \[2, 6\]"):
        PPOUpdate(step, advantage=gae)(make_batch())


def test_a_discount_for_each_agent_is_no_number_to_compare():
    loss = make_loss()
    gae = GAE(gamma=torch.full((2, 1), 0.9), lmbda=0.95, value_network=loss.critic_network)
    step = TrainingStep(loss, torch.optim.Adam(loss.parameters()))
    PPOUpdate(step, advantage=gae, reward_normalizer=RewardNormalizer(0.99))
