"""PPOUpdate does the steps of a loop written out, with every block."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, SerialEnv
from torchrl.objectives import A2CLoss, ClipPPOLoss

import ppokit
from ppokit import (
    DualClipPPOLoss,
    InterpSchedule,
    KLEarlyStopper,
    ParameterScheduler,
    PPOUpdate,
    RewardNormalizer,
    TrainingStep,
)
from tests.blocks import ppo_update
from tests.update.parts import make_networks, make_parts, parameters_of

LOSSES = ("loss_objective", "loss_entropy", "loss_critic")


def make_env() -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


@pytest.fixture(scope="module")
def batches() -> list[TensorDictBase]:
    """Three batches of three environments, 50 steps each, with episode ends."""
    options: Any = {"frames_per_batch": 150, "total_frames": 450}
    options["auto_register_policy_transforms"] = False
    collector = Collector(SerialEnv(3, make_env), make_networks()[0], **options)
    collector.set_seed(0)
    found = [batch.clone() for batch in collector]
    assert all(batch["next", "done"].any() for batch in found)
    return found


def make_update(parts: Any = None, *, sgd: float | None = None, **options: Any) -> PPOUpdate:
    """Return an update for CartPole; ``sgd`` is the rate of SGD instead of Adam."""
    loss, gae, optimizer = make_parts() if parts is None else parts
    if sgd is not None:
        optimizer = torch.optim.SGD(loss.parameters(), lr=sgd)
    return ppo_update(loss, optimizer, **{"advantage": gae, "minibatch_size": 64} | options)


@pytest.mark.parametrize(("optimizer", "largest"), [("adam", 0.5), ("sgd", 0.05)])
def test_it_is_the_loop_written_out(batches: list[TensorDictBase], optimizer: str, largest: float):
    """Normalizer, GAE, minibatches of a seed, losses, clipping in a fused step."""
    make: Any = torch.optim.Adam if optimizer == "adam" else torch.optim.SGD
    loss, gae, _ = make_parts()
    opt = make(loss.parameters(), lr=1e-2)
    normalizer, generator = RewardNormalizer(0.99), torch.Generator().manual_seed(3)
    for batch in batches:
        frames = gae(normalizer(batch.clone())).reshape(-1)
        for _ in range(3):
            order = torch.randperm(len(frames), generator=generator)
            for part in order.split(64):
                losses = loss(frames[part])
                sum(losses[name] for name in LOSSES).backward()
                nn.utils.clip_grad_norm_(loss.parameters(), largest)
                opt.step()
                opt.zero_grad()
    expected = parameters_of(loss)
    loss, gae, _ = make_parts()
    opt = make(loss.parameters(), lr=1e-2, fused=True)
    options = {"reward_normalizer": RewardNormalizer(0.99), "epochs": 3, "seed": 3}
    update = make_update((loss, gae, opt), max_grad_norm=largest, **options)
    found = [update(batch.clone()) for batch in batches]
    torch.testing.assert_close(parameters_of(loss), expected, rtol=1e-5, atol=1e-6)
    assert [(each["epochs"], each["minibatches"]) for each in found] == [(3, 9)] * 3
    assert not hasattr(opt, "grad_scale")


def test_statistics_are_means_over_valid_frames(batches: list[TensorDictBase]):
    update: Any = make_update(sgd=0.0, epochs=1)
    batch = batches[0].clone()
    batch["collector", "mask"] = torch.ones(3, 50, dtype=torch.bool)
    batch["collector", "mask"][1, 30:] = False
    statistics = update(batch)
    valid = update.advantage(batch)[batch["collector", "mask"]].exclude(("collector", "mask"))
    whole = update.step.loss(valid)
    for name in ("loss_objective", "loss_critic", "kl", "clip_fraction", "entropy"):
        assert statistics[name] == pytest.approx(whole[name].item(), rel=1e-4, abs=1e-6), name
    assert (statistics["frames"], statistics["minibatches"], statistics["lr"]) == (130, 3, 0)
    assert statistics["clip_epsilon"] == pytest.approx(0.2)
    assert statistics["frames_per_second"] > 0
    assert all(type(value) is float for value in statistics.values())


# -- KL stop, KL coefficient, schedules ------------------------------------------------


def test_the_minibatch_that_stops_is_not_applied(batches: list[TensorDictBase]):
    stopper, batch = KLEarlyStopper(1e-12), batches[0].clone()
    update = make_update(stopper=stopper, epochs=5, seed=0)
    batch["action_log_prob"] += 0.5
    before = parameters_of(update.step.loss)
    stopper.update(100.0)  # an exception has left it stopped
    statistics = update(batch)
    names = ("stopped", "epochs", "steps", "minibatches")
    assert [statistics[name] for name in names] == [1, 1, 0, 1]
    assert statistics["kl"] > 0
    assert torch.equal(parameters_of(update.step.loss), before)
    assert not stopper.stopped


def test_the_kl_coefficient_and_the_schedules_move_once(batches: list[TensorDictBase]):
    loss, gae, optimizer = make_parts(kl_coeff=0.5)
    schedule = ParameterScheduler({"lr": (optimizer, InterpSchedule([(0, 1e-2), (300, 0.0)]))})
    adaptive = ppokit.AdaptiveKLCoeff(loss, target_kl=1e-9)
    blocks = {"adaptive_kl": adaptive, "scheduler": schedule, "epochs": 2}
    update = make_update((loss, gae, optimizer), **blocks)
    found = [update(batch.clone()) for batch in batches[:2]]
    assert [statistics["kl_coeff"] for statistics in found] == [0.5, 0.75]
    assert [statistics["lr"] for statistics in found] == pytest.approx([1e-2, 5e-3])
    assert optimizer.param_groups[0]["lr"] == 0
    assert found[0]["loss_kl"] != 0


# -- other losses, precision, compilation ----------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_mixed_precision(batches: list[TensorDictBase], dtype: torch.dtype):
    found = []
    for amp_dtype in (None, dtype):
        update = make_update(sgd=0.1, amp_dtype=amp_dtype, epochs=1, seed=0)
        before = parameters_of(update.step.loss)
        assert update(batches[0].clone())["loss_critic"] > 0
        found.append(parameters_of(update.step.loss) - before)
    assert torch.nn.functional.cosine_similarity(*found, dim=0) > 0.99


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
def test_a_compiled_loss_is_used_as_it_is(batches: list[TensorDictBase]):
    found = []
    for compiled in (False, True):
        loss, gae, optimizer = make_parts()
        module: Any = torch.compile(loss, backend="eager") if compiled else loss
        make_update((module, gae, optimizer), epochs=2, seed=0)(batches[0].clone())
        found.append(parameters_of(loss))
    torch.testing.assert_close(*found)


def test_the_advantage_can_be_computed_in_each_epoch(batches: list[TensorDictBase]):
    found = []
    for recompute in (False, True):
        update = make_update(epochs=2, recompute_advantage=recompute, seed=0)
        update(batches[0].clone())
        found.append(parameters_of(update.step.loss))
    assert not torch.equal(*found)


# -- state -----------------------------------------------------------------------------


def make_full_update(**options: Any) -> PPOUpdate:
    loss, gae, optimizer = make_parts(kl_coeff=0.5)
    schedule = {"lr": (optimizer, InterpSchedule([(0, 1e-2), (450, 0)]))}
    blocks = {"adaptive_kl": ppokit.AdaptiveKLCoeff(loss), "reward_normalizer": RewardNormalizer()}
    blocks |= {"scheduler": ParameterScheduler(schedule), "stopper": KLEarlyStopper(0.5)}
    return make_update((loss, gae, optimizer), max_grad_norm=0.5, epochs=2, **blocks, **options)


@pytest.mark.slow
def test_a_resumed_compiled_update_continues_bit_for_bit(
    batches: list[TensorDictBase], tmp_path: Any
):
    compile: Any = {"backend": "eager"}
    first = make_full_update(compile=compile)
    first(batches[0].clone())
    torch.save(first.state_dict(), tmp_path / "state")
    expected = first(batches[1].clone())
    second = make_full_update(compile=compile)
    second.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    found = second(batches[1].clone())
    assert "compiled" in repr(second)
    for name, value in expected.items():
        if "second" not in name:
            assert found[name] == value, name
    assert torch.equal(parameters_of(first.step.loss), parameters_of(second.step.loss))
    state = first.state_dict()
    del state["stopper"]
    with pytest.raises(KeyError, match=r"has no \['stopper'\]"):
        second.load_state_dict(state)


def test_a_state_that_was_loaded_does_not_change(batches: list[TensorDictBase]):
    """torch's optimizers would train the tensors of the state."""
    update = make_update(seed=0)
    update(batches[0].clone())
    best, found = copy.deepcopy(update.state_dict()), []
    for _ in range(2):
        update.load_state_dict(best)
        update(batches[1].clone())
        found.append(parameters_of(update.step.loss))
    assert torch.equal(*found)


# -- bad input ----------------------------------------------------------------------------


def test_the_order_may_be_set_later(batches: list[TensorDictBase]):
    found = []
    for shuffle in (True, False):
        update = make_update(seed=0, shuffle=True)
        update.shuffle = shuffle
        update(batches[0].clone())
        found.append(parameters_of(update.step.loss))
    assert not torch.equal(*found)
    assert torch.equal(found[1], trained_in_order(batches[0]))


def trained_in_order(batch: TensorDictBase) -> torch.Tensor:
    update = make_update(shuffle=False)
    update(batch.clone())
    return parameters_of(update.step.loss)


class Names(A2CLoss):
    """A loss with outputs that have names of the update's statistics."""

    def forward(self, tensordict: Any) -> Any:
        losses = super().forward(tensordict)
        return losses.update({name: torch.tensor(7.5) for name in ("steps", "episode_return")})


def test_outputs_with_names_of_other_statistics(batches: list[TensorDictBase]):
    actor, critic = make_networks()
    loss: Any = Names(actor, critic, functional=False)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    _, gae, _ = make_parts()
    expected = make_update()(batches[0].clone())
    found = make_update((loss, gae, optimizer))(batches[0].clone())
    assert found["loss/steps"] == found["loss/episode_return"] == 7.5
    for name in ("steps", "episode_return", "episodes"):
        assert found[name] == expected[name]


STOPPER = KLEarlyStopper(0.1)
SUM = make_parts(reduction="sum")
BAD_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"epochs": 0}, ValueError, "epochs must be a whole number"),
    ({"minibatch_size": 0}, ValueError, "minibatch_size must be"),
    ({"minibatch_size": 6.5}, ValueError, "minibatch_size must be"),
    ({"max_grad_norm": 0.0}, ValueError, "max_grad_norm must be positive"),
    ({"amp_dtype": torch.float64}, ValueError, "amp_dtype must be"),
    ({"stopper": 0.1}, TypeError, "stopper must be a KLEarlyStopper, got float"),
    ({"nonfinite": "ignore"}, ValueError, "nonfinite must be 'raise', 'skip' or None"),
    ({"advantage": None, "recompute_advantage": True}, ValueError, "recompute_advantage needs"),
    ({"stopper": STOPPER, "accumulate_grads": True}, ValueError, "accumulation exclude each other"),
    (
        {"parts": SUM, "accumulate_grads": True},
        ValueError,
        r"a sum over frames \(reduction='sum'\)",
    ),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD_OPTIONS)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        make_update(**options)


def test_bad_losses_and_optimizers():
    loss, _, adam = make_parts()
    bare: Any = nn.Module()
    bare.loss = loss
    with pytest.raises(TypeError, match="Module has no in_keys, the entries of a minibatch"):
        PPOUpdate(TrainingStep(bare, adam))
    with pytest.raises(TypeError, match="step of LBFGS needs a closure"):
        TrainingStep(loss, torch.optim.LBFGS(loss.parameters()))


@pytest.mark.parametrize("functional", [False, True])
def test_an_optimizer_that_lacks_parameters_of_the_loss_raises(functional: bool):
    actor, critic = make_networks()
    loss = DualClipPPOLoss(actor, critic, functional=functional)
    of_critic = r"reach 4 parameters .* critic_network\S+, critic_network.*loss.parameters\(\)"
    for parameters, message in (
        ([nn.Parameter(torch.zeros(1))], "None of the optimizer's"),
        (actor.parameters(), of_critic),
    ):
        with pytest.raises(ValueError, match=message):
            PPOUpdate(TrainingStep(loss, torch.optim.Adam(parameters)))
    loss.predictor = nn.Linear(4, 1)  # of neither network: it may be trained elsewhere
    PPOUpdate(TrainingStep(loss, torch.optim.Adam([*actor.parameters(), *critic.parameters()])))
    for make in (DualClipPPOLoss, ClipPPOLoss, A2CLoss):  # a critic without a loss
        without = make(actor, critic, critic_coeff=0.0, functional=False)
        PPOUpdate(TrainingStep(without, torch.optim.Adam(actor.parameters())))
    critic.requires_grad_(False)
    PPOUpdate(TrainingStep(DualClipPPOLoss(actor, critic), torch.optim.Adam(actor.parameters())))
    actor.requires_grad_(False)
    with pytest.raises(ValueError, match="None of the optimizer's parameters is a trainable"):
        TrainingStep(DualClipPPOLoss(actor, critic), torch.optim.Adam(actor.parameters()))
