"""Targets of a scheduler: learning rates, coefficients of losses, attributes of blocks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch._dynamo.utils import counters
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE as TORCHRL_GAE

from ppokit import (
    GAE,
    AdaptiveKLCoeff,
    DualClipPPOLoss,
    InterpSchedule,
    KLEarlyStopper,
    ObservationNormalizer,
    ParameterScheduler,
    StepSchedule,
    TrainingStep,
)
from tests.blocks import make_actor, make_critic, make_minibatch, outcome
from tests.schedules.cases import LINE, Holder, make_loss, make_optimizer, rates

# -- learning rates ---------------------------------------------------------------------


def test_learning_rates_of_all_groups_and_of_named_groups():
    optimizer = make_optimizer()
    scheduler = ParameterScheduler({"lr": (optimizer, LINE)})
    assert rates(optimizer) == [1, 1]
    scheduler.step(25)
    assert rates(optimizer) == [0.75, 0.75]
    assert scheduler.values == {"lr": 0.75}
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    scheduler.step(50)
    assert rates(optimizer) == [0.5] * 3
    optimizer, other = make_optimizer(), make_optimizer()
    schedules = {("lr", "a"): (optimizer, LINE), ("lr", "b"): (other, LINE)}
    scheduler = ParameterScheduler(schedules)
    scheduler.step(25)
    assert (rates(optimizer), rates(other)) == ([0.75, 0.3], [0.3, 0.75])


@pytest.mark.parametrize("lr", [0.3, torch.tensor(0.3)], ids=["float", "tensor"])
def test_the_learning_rate_is_used_by_the_optimizer_after_it_loaded_a_state(lr: Any):
    optimizer = make_optimizer(lr, torch.optim.SGD)
    scheduler = ParameterScheduler({"lr": (optimizer, LINE)})
    if isinstance(lr, torch.Tensor):  # filled in place, so that a captured step sees it
        assert optimizer.param_groups[0]["lr"] is lr
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # replaces the groups
    scheduler.step(75)
    (parameter,) = optimizer.param_groups[1]["params"]
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert parameter.tolist() == [0.75, 0.75]


# -- coefficients and other attributes --------------------------------------------------


def test_attributes_buffers_and_parameters_are_written_in_place():
    holder, module = Holder(), nn.Module()
    module.register_buffer("coefficient", torch.tensor(7.0))
    module.log_std = nn.Parameter(torch.zeros(3))
    coefficient, log_std = module.coefficient, module.log_std
    schedules: Any = {"clip": (holder, lambda frames: frames // 10), "coefficient": (module, LINE)}
    schedules["log_std"] = module, InterpSchedule([(0, 0.0), (100, -2.0)])
    ParameterScheduler(schedules).step(25)
    assert (holder.clip, type(holder.clip)) == (2.0, float)
    assert module.coefficient is coefficient
    assert module.state_dict()["coefficient"] == 0.75
    assert module.log_std is log_std
    assert log_std.requires_grad
    assert log_std.tolist() == [-0.5] * 3


# name: (what the loss is built with, the first value, the last value)
COEFFICIENTS: dict[str, tuple[dict[str, Any], float, float]] = {
    "clip_epsilon": ({}, 0.4, 0.05),
    "clip_epsilon_low": ({"clip_epsilon": (0.1, 0.3)}, 0.4, 0.05),
    "clip_value": ({"clip_value": 0.9}, 1.0, 0.1),
    "critic_coeff": ({"critic_coeff": 1.0}, 0.5, 2.0),
    "entropy_coeff": ({"entropy_coeff": 1.0}, 0.5, 0.0),
    "max_importance_ratio": ({"max_importance_ratio": 3.0}, 4.0, 1.5),
    "dual_clip": ({"dual_clip": 9.0}, 4.0, 1.5),
    "critic_loss_clip": ({"critic_loss_clip": 9.0}, 4.0, 0.1),
    "kl_coeff": ({"kl_coeff": 1.0}, 0.5, 0.0),
}
OF_PPOKIT = ("dual_clip", "critic_loss_clip", "kl_coeff")
CASES = [(DualClipPPOLoss, name) for name in COEFFICIENTS]
CASES += [(ClipPPOLoss, name) for name in COEFFICIENTS if name not in OF_PPOKIT]


def assert_same_loss(one: Any, other: Any) -> None:
    """Values and gradients are equal bit for bit on a minibatch where every clip is active."""
    batch = make_minibatch(make_actor(), 32, spread=1.0)
    found = outcome(one, batch)
    assert all(x is None or x.isfinite().all() for x in found[1])
    torch.testing.assert_close(found, outcome(other, batch), rtol=0, atol=0)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_scheduled_loss_equals_a_loss_built_with_that_value(kind: Any, name: str):
    options, first, last = COEFFICIENTS[name]
    loss = make_loss(kind, **options)
    loss(make_minibatch(make_actor(), 8))
    buffer = getattr(loss, name)
    schedule = InterpSchedule([(0, first), (100, last)])
    scheduler = ParameterScheduler({name: (loss, schedule)})
    for frames in (0, 99):
        scheduler.step(frames)
        value = schedule(frames)
        assert getattr(loss, name) is buffer
        assert loss.state_dict()[name] == torch.tensor(value)
        built = options | {name: value}
        if name == "clip_epsilon_low":
            built = {"clip_epsilon": (value, 0.3)}
        assert_same_loss(loss, make_loss(kind, **built))


@pytest.mark.parametrize("kind", [DualClipPPOLoss, ClipPPOLoss])
def test_a_clip_value_that_was_true_takes_a_schedule_of_its_own(kind: Any):
    loss = make_loss(kind, clip_value=True)
    ParameterScheduler({name: (loss, lambda _: 0.25) for name in ("clip_epsilon", "clip_value")})
    assert_same_loss(loss, make_loss(kind, clip_epsilon=0.25, clip_value=0.25))


@pytest.mark.parametrize("head", ["turn", ("action", "turn")])
def test_the_entropy_coefficient_of_one_head(head: Any):
    first = "go" if head == "turn" else ("action", "go")
    actor, coefficients = make_actor("composite"), {first: 0.1, head: 0.2}
    loss = DualClipPPOLoss(actor, make_critic(), entropy_coeff=coefficients)
    address = loss.head_entropy_coeff.data_ptr()
    scheduler = ParameterScheduler({("entropy_coeff", head): (loss, LINE)})
    batch = scheduler(TensorDict({}, [25]))
    torch.testing.assert_close(loss.state_dict()["head_entropy_coeff"], torch.tensor([0.1, 0.75]))
    assert loss.head_entropy_coeff.data_ptr() == address
    (out_key,) = scheduler.out_keys
    assert out_key == ("schedule", "entropy_coeff", *([head] if head == "turn" else head))
    assert torch.equal(batch[out_key], torch.full((25,), 0.75))


@pytest.mark.parametrize("gae_class", [GAE, TORCHRL_GAE])
@pytest.mark.parametrize("name", ["gamma", "lmbda"])
def test_the_discounts_of_gae(gae_class: Any, name: str):
    torch.manual_seed(0)
    done = torch.rand(2, 6, 1) < 0.2
    following = {"done": done, "terminated": done, "reward": torch.randn(2, 6, 1)}
    entries = {"state_value": torch.randn(2, 6, 1), "next": following}
    batch = TensorDict(entries, [2, 6], names=[None, "time"])
    batch["next", "state_value"] = torch.randn(2, 6, 1)
    fixed: dict[str, Any] = {"gamma": 0.9, "lmbda": 0.8, "value_network": None}
    gae = gae_class(**fixed)
    scheduler = ParameterScheduler({name: (gae, InterpSchedule([(0, 0.5), (100, 0.99)]))})
    scheduler.step(30)
    expected = gae_class(**fixed | {name: scheduler.values[name]})(batch.clone())
    assert torch.equal(gae(batch.clone())["advantage"], expected["advantage"])


def test_the_targets_of_a_stopper_and_of_an_adaptive_coefficient():
    stopper, adaptive = KLEarlyStopper(1.0, tolerance=1.0), AdaptiveKLCoeff(make_loss(kl_coeff=1.0))
    schedule = StepSchedule([(0, 0.1), (10, 0.01)])
    of_stopper, of_adaptive = (
        ParameterScheduler({"target_kl": (block, schedule)}) for block in (stopper, adaptive)
    )
    assert not stopper.update(0.09)
    assert adaptive.update(0.1) == 1.0
    of_stopper.step(10)
    of_adaptive.step(10)
    assert stopper.update(0.09)
    assert adaptive.update(0.1) == 1.5


# -- compiled steps ---------------------------------------------------------------------


@pytest.mark.slow
def test_a_compiled_training_step_uses_scheduled_values_and_never_recompiles():
    torch._dynamo.reset()
    counters.clear()
    options = {"clip_value": 0.2, "entropy_coeff": 0.01, "dual_clip": 5.0, "kl_coeff": 0.1}
    actor, critic = make_actor("categorical"), make_critic()
    loss = DualClipPPOLoss(actor, critic, critic_loss_clip=9.0, **options)
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.1)
    lines = {"clip_epsilon": (0.3, 0.1), "entropy_coeff": (0.1, 0.0), "critic_coeff": (1.0, 0.5)}
    lines |= {"dual_clip": (5.0, 2.0), "critic_loss_clip": (9.0, 0.5), "kl_coeff": (0.5, 0.0)}
    lines["clip_value"] = (0.5, 0.1)
    schedules: Any = {k: (loss, InterpSchedule([(0, v[0]), (20, v[1])])) for k, v in lines.items()}
    schedules["lr"] = optimizer, InterpSchedule([(0, 1e-2), (20, 0.0)])
    scheduler = ParameterScheduler(schedules)
    step = TrainingStep(loss, optimizer, compile={"fullgraph": True, "backend": "aot_eager"})
    batch = make_minibatch(make_actor("categorical"), 16)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for frames in range(21):
            scheduler.step(frames)
            expected = loss(batch).detach().to_dict()
            torch.testing.assert_close(step(batch).select(*expected.keys()).to_dict(), expected)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("out_keys", [["loss"], None])
def test_a_coefficient_of_a_loss_with_other_outputs(out_keys: Any):
    owner = Holder()
    owner.entropy_coeff, owner.out_keys = 0.1, out_keys
    ParameterScheduler({"entropy_coeff": (owner, LINE)})
    assert owner.entropy_coeff == LINE(0)


class Tempered(nn.Linear):
    temperature = 5.0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) / self.temperature


def test_an_attribute_that_a_module_passes_on_is_written_where_it_lives():
    network = Tempered(3, 2)
    module = TensorDictModule(network, ["x"], ["y"])
    schedule = InterpSchedule([(0, 5.0), (100, 1.0)])
    ParameterScheduler({"temperature": (module, schedule)}).step(100)
    assert network.temperature == 1.0
    assert "temperature" not in vars(module)


@pytest.mark.parametrize("name", ["clip", "epsilon"])
def test_an_attribute_of_the_observation_normalizer_is_checked_at_construction(name: str):
    optimizer, schedule = make_optimizer(), InterpSchedule([(0, 5.0), (100, 0.0)])
    before = rates(optimizer)
    with pytest.raises(ValueError, match=f"{name} must be positive"):
        ParameterScheduler({"lr": (optimizer, LINE), name: (ObservationNormalizer(2), schedule)})
    assert rates(optimizer) == before


class Refuses:
    """Has an attribute whose setter takes no value above 2."""

    def __init__(self) -> None:
        self._level = 0.0

    @property
    def level(self) -> float:
        return self._level

    @level.setter
    def level(self, value: float) -> None:
        if value > 2:
            raise ValueError("too high")
        self._level = value


def test_a_setter_that_raises_takes_back_what_was_written():
    optimizer, holder = make_optimizer(), Refuses()
    schedule = InterpSchedule([(0, 1.0), (100, 3.0)])
    scheduler = ParameterScheduler({"lr": (optimizer, LINE), "level": (holder, schedule)})
    scheduler.step(10)
    before = rates(optimizer), holder.level, int(scheduler.frames)
    with pytest.raises(ValueError, match="too high"):
        scheduler.step(90)
    assert (rates(optimizer), holder.level, int(scheduler.frames)) == before
