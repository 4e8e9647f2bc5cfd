import copy
import io
import itertools
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    TensorDictModule,
    TensorDictSequential,
    set_composite_lp_aggregate,
)
from torch import nn
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss

from ppokit import GAE, DualClipPPOLoss, InterpSchedule, ParameterScheduler, StepSchedule
from tests.golden import rl8

SCHEDULES = rl8("schedulers")
KINDS = {"step": StepSchedule, "interp": InterpSchedule}
LINEAR = InterpSchedule([(0, 1.0), (100, 0.0)])


class Holder:
    """Any object with an attribute."""

    def __init__(self, clip: float | None = 0.5):
        self.clip = clip


class Block(nn.Module):
    """A module with a coefficient in its state_dict."""

    coefficient: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("coefficient", torch.tensor(7.0))


def parameters(n=1):
    return [nn.Parameter(torch.ones(2)) for _ in range(n)]


def two_groups(**options):
    first, second = parameters(2)
    groups = [{"params": [first], "name": "actor"}, {"params": [second], "name": "critic"}]
    return torch.optim.Adam([{**group, **options} for group in groups], lr=0.3)


def rates(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


def save_and_load(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# -- schedules -----------------------------------------------------------------


def is_sorted(case):
    frames = [point[0] for point in case["schedule"]]
    return all(a < b for a, b in itertools.pairwise(frames))


def test_golden_schedules():
    cases = [case for case in SCHEDULES["cases"] if is_sorted(case)]
    assert [case["name"] for case in cases] == ["two-point", "four-point", "single"]
    seen = 0
    for case in cases:
        schedule = KINDS[case["kind"]](case["schedule"])
        for count, value in zip(case["counts"], case["values"], strict=True):
            if count >= 0:
                assert schedule(count) == value, (case["name"], count)
                seen += 1
    assert seen == 3 * 17


def test_golden_schedules_in_any_other_order_are_refused():
    cases = [case for case in SCHEDULES["cases"] if not is_sorted(case)]
    assert [case["name"] for case in cases] == ["unsorted", "duplicate-x"]
    for case in cases:
        with pytest.raises(ValueError, match=r"Point 2, .* does not come after point 1, "):
            KINDS[case["kind"]](case["schedule"])


@pytest.mark.parametrize("case", SCHEDULES["errors"], ids=lambda c: f"{c['kind']}{c['schedule']}")
def test_golden_errors(case):
    assert len(SCHEDULES["errors"]) == 6
    message = (
        r"The first point is .*; it must be at frame 0" if case["schedule"] else "at least one"
    )
    with pytest.raises(ValueError, match=message):
        KINDS[case["kind"]](case["schedule"])


def test_golden_value_at_construction():
    case = SCHEDULES["lr_with_schedule_at_construction"]
    optimizer = torch.optim.Adam(parameters(), lr=3.0)
    ParameterScheduler({"lr": (optimizer, StepSchedule(case["schedule"]))})
    assert rates(optimizer) == [case["optimizer_lr_after"]]


def test_golden_schedule_overrides_the_coefficient():
    case = SCHEDULES["entropy_schedule_overrides_coeff"]
    holder = Holder(case["coeff"])
    ParameterScheduler({"clip": (holder, StepSchedule(case["schedule"]))})
    assert holder.clip == case["value"]


@pytest.mark.parametrize(
    ("frames", "value"), [(0, 1), (0.5, 0.95), (5, 0.5), (10, 0), (15, 2), (20, 4), (1e9, 4)]
)
def test_interpolation_by_hand(frames, value):
    assert InterpSchedule([(0, 1), (10, 0), (20, 4)])(frames) == value


def test_interpolation_meets_its_points_and_stays_between_them():
    points = [(0, 0.3), (7, 0.1), (1_000_003, 0.7)]
    schedule = InterpSchedule(points)
    assert [schedule(x) for x, _ in points] == [y for _, y in points]
    assert all(0.1 <= schedule(x) <= 0.7 for x in range(0, 2_000_000, 9973))


@pytest.mark.parametrize("kind", KINDS.values())
def test_values_are_floats(kind):
    schedule = kind([(0, 1), (10, 0)])
    assert [type(schedule(frames)) for frames in (0, 5, 10, 11)] == [float] * 4


@pytest.mark.parametrize("kind", KINDS.values())
@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], r"at least one point, \(0, value\)"),
        ([(1, 2.0)], r"The first point is \(1, 2.0\); it must be at frame 0"),
        ([(0, 1.0), (5, 2.0), (5, 3.0)], r"Point 2, \(5, 3.0\), .* point 1, \(5, 2.0\)"),
        ([(0, 1.0), (5, 2.0), (4, 3.0)], r"Point 2, \(4, 3.0\), .* point 1, \(5, 2.0\)"),
        ([(0, 1.0), (5, math.nan)], r"Point 1, \(5, nan\), is not finite"),
        ([(0, 1.0), (math.inf, 2.0)], r"Point 1, \(inf, 2.0\), is not finite"),
    ],
)
def test_bad_points_raise(kind, points, message):
    with pytest.raises(ValueError, match=message):
        kind(points)


@pytest.mark.parametrize("kind", KINDS.values())
@pytest.mark.parametrize("frames", [-1, -0.5, math.nan])
def test_a_negative_number_of_frames_raises(kind, frames):
    with pytest.raises(ValueError, match=f"frames must be 0 or more, got {frames}"):
        kind([(0, 1.0)])(frames)


@pytest.mark.parametrize("kind", KINDS.values())
def test_schedules_are_values(kind):
    schedule = kind([(0, 1.0), (10, 0.5)])
    assert pickle.loads(pickle.dumps(schedule)) == copy.deepcopy(schedule) == schedule
    assert repr(schedule) == f"{kind.__name__}([(0, 1.0), (10, 0.5)])"
    assert schedule != kind([(0, 1.0)])
    assert StepSchedule([(0, 1.0)]) != InterpSchedule([(0, 1.0)])


# -- learning rates ------------------------------------------------------------


def test_learning_rate_of_all_groups():
    optimizer = two_groups()
    scheduler = ParameterScheduler({"lr": (optimizer, LINEAR)})
    assert rates(optimizer) == [1, 1]
    scheduler.step(25)
    assert rates(optimizer) == [0.75, 0.75]
    assert scheduler.values == {"lr": 0.75}


def test_learning_rates_of_named_groups():
    optimizer = two_groups()
    scheduler = ParameterScheduler({("lr", "critic"): (optimizer, LINEAR)})
    scheduler.step(25)
    assert rates(optimizer) == [0.3, 0.75]
    del scheduler
    scheduler = ParameterScheduler(
        {
            ("lr", "actor"): (optimizer, LINEAR),
            ("lr", "critic"): (optimizer, StepSchedule([(0, 0.2)])),
        }
    )
    scheduler.step(50)
    assert rates(optimizer) == [0.5, 0.2]
    assert scheduler.values == {("lr", "actor"): 0.5, ("lr", "critic"): 0.2}


@pytest.mark.parametrize(
    "build",
    [
        lambda ps, lr: torch.optim.Adam(ps, lr=lr, capturable=True),
        lambda ps, lr: torch.optim.SGD(ps, lr=lr),
    ],
    ids=["Adam", "SGD"],
)
def test_a_learning_rate_tensor_is_filled_in_place(build):
    rate = torch.tensor(0.3)
    optimizer = build(parameters(), rate)
    scheduler = ParameterScheduler({"lr": (optimizer, LINEAR)})
    scheduler.step(25)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.75


def test_the_learning_rate_is_the_one_that_steps():
    (parameter,) = parameters()
    optimizer = torch.optim.SGD([parameter], lr=9.0)
    scheduler = ParameterScheduler({"lr": (optimizer, LINEAR)})
    scheduler.step(75)
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert parameter.tolist() == [0.75, 0.75]


@pytest.mark.parametrize("lr", [0.3, torch.tensor(0.3)], ids=["float", "tensor"])
@pytest.mark.parametrize("name", ["lr", ("lr", "critic")])
def test_drives_an_optimizer_that_has_loaded_a_checkpoint(name, lr):
    # load_state_dict replaces the parameter groups
    optimizer = two_groups(lr=lr) if name == "lr" else two_groups()
    scheduler = ParameterScheduler({name: (optimizer, LINEAR)})
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    scheduler.step(25)
    assert rates(optimizer)[1] == 0.75


def test_drives_a_group_that_was_added_later():
    optimizer = two_groups()
    scheduler = ParameterScheduler({"lr": (optimizer, LINEAR)})
    optimizer.add_param_group({"params": parameters()})
    scheduler.step(25)
    assert rates(optimizer) == [0.75] * 3


def test_a_tensor_that_groups_share_raises():
    first, second = parameters(2)
    groups = [{"params": [first], "name": "actor"}, {"params": [second], "name": "critic"}]
    optimizer = torch.optim.SGD(groups, lr=torch.tensor(0.3))
    with pytest.raises(ValueError, match=r"'actor'\) and the groups \['critic'\] share one learn"):
        ParameterScheduler({("lr", "actor"): (optimizer, LINEAR)})
    ParameterScheduler({"lr": (optimizer, LINEAR)}).step(25)
    assert rates(optimizer) == [0.75, 0.75]


def test_an_unknown_group_raises():
    with pytest.raises(ValueError, match=r"named 'value'; the groups .* \['actor', 'critic'\]"):
        ParameterScheduler({("lr", "value"): (two_groups(), LINEAR)})


@pytest.mark.parametrize("name", ["lr", ("lr", "actor")])
def test_a_learning_rate_needs_an_optimizer(name):
    with pytest.raises(TypeError, match=r"lr.* needs an optimiser, got Holder"):
        ParameterScheduler({name: (Holder(), LINEAR)})


def test_beside_another_scheduler_raises():
    optimizer = torch.optim.SGD(parameters(), lr=0.3)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    with pytest.raises(ValueError, match=r"drives this SGD .*'initial_lr'.* Keep one"):
        ParameterScheduler({"lr": (optimizer, LINEAR)})


def test_another_scheduler_made_later_raises():
    optimizer = torch.optim.SGD(parameters(), lr=0.3)
    scheduler = ParameterScheduler({"lr": (optimizer, LINEAR)})
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    with pytest.raises(ValueError, match=r"drives this SGD .*'initial_lr'.* Keep one"):
        scheduler.step(1)


# -- attributes ----------------------------------------------------------------


def test_an_attribute_of_any_object():
    holder = Holder()
    scheduler = ParameterScheduler({"clip": (holder, LINEAR)})
    assert holder.clip == 1
    scheduler.step(25)
    assert holder.clip == 0.75
    assert type(holder.clip) is float


def test_a_buffer_is_filled_in_place():
    block = Block()
    buffer, address = block.coefficient, block.coefficient.data_ptr()
    scheduler = ParameterScheduler({"coefficient": (block, LINEAR)})
    scheduler.step(25)
    assert block.coefficient is buffer
    assert buffer.data_ptr() == address
    assert block.state_dict()["coefficient"].item() == 0.75


def test_a_parameter_is_filled_in_place():
    block = nn.Module()
    block.scale = nn.Parameter(torch.tensor(3.0))
    parameter = block.scale
    ParameterScheduler({"scale": (block, LINEAR)}).step(25)
    assert block.scale is parameter
    assert parameter.item() == 0.75
    assert parameter.requires_grad


def actor_and_critic():
    net = TensorDictModule(nn.Linear(3, 4), in_keys=["observation"], out_keys=["logits"])
    actor = ProbabilisticActor(
        net, in_keys=["logits"], distribution_class=torch.distributions.Categorical
    )
    return actor, ValueOperator(nn.Linear(3, 1), in_keys=["observation"])


@pytest.mark.parametrize("loss_class", [ClipPPOLoss, DualClipPPOLoss])
def test_a_coefficient_of_a_loss_is_filled_in_place(loss_class):
    loss = loss_class(*actor_and_critic(), entropy_coeff=0.3)
    address = loss.entropy_coeff.data_ptr()
    scheduler = ParameterScheduler({"entropy_coeff": (loss, LINEAR)})
    scheduler.step(25)
    assert loss.entropy_coeff.item() == 0.75
    assert loss.entropy_coeff.data_ptr() == address
    assert loss.state_dict()["entropy_coeff"].item() == 0.75


def two_heads(loss_class, suffix=""):
    def split(x):
        return x[..., :2], x[..., 2:]

    net = TensorDictSequential(
        TensorDictModule(nn.Linear(3, 5), in_keys=["observation"], out_keys=["x"]),
        TensorDictModule(
            split, in_keys=["x"], out_keys=[("params", h, "logits") for h in ("move", "turn")]
        ),
    )
    categorical = torch.distributions.Categorical
    actor = ProbabilisticActor(
        net,
        in_keys=["params"],
        out_keys=["move", "turn"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": {"move": categorical, "turn": categorical}},
        return_log_prob=True,
    )
    _, critic = actor_and_critic()
    loss = loss_class(actor, critic, entropy_coeff={f"move{suffix}": 0.1, f"turn{suffix}": 0.2})
    loss.set_keys(action=["move", "turn"], sample_log_prob=["move_log_prob", "turn_log_prob"])
    with torch.no_grad():
        batch = actor(TensorDict({"observation": torch.randn(5, 3)}, [5]))
    batch["advantage"], batch["value_target"] = torch.randn(5, 1), torch.randn(5, 1)
    return loss, batch


@pytest.mark.parametrize(
    ("loss_class", "suffix"),
    [(ClipPPOLoss, "_entropy"), (DualClipPPOLoss, "_entropy"), (DualClipPPOLoss, "")],
)
def test_the_coefficient_of_one_head(loss_class, suffix):
    # torchrl's own loss knows a head only by the name of its entropy
    with set_composite_lp_aggregate(False):
        loss, batch = two_heads(loss_class, suffix)
        entropy = loss(batch)["composite_entropy"]
        scheduler = ParameterScheduler({("entropy_coeff", f"turn{suffix}"): (loss, LINEAR)})
        scheduler.step(25)
        expected = -(0.1 * entropy["move_entropy"] + 0.75 * entropy["turn_entropy"]).mean()
        torch.testing.assert_close(loss(batch)["loss_entropy"].mean(), expected)


def test_a_head_with_a_nested_key():
    heads = {("action", "move"): 0.1, ("action", "turn"): 0.2}
    loss = DualClipPPOLoss(*actor_and_critic(), entropy_coeff=heads)
    scheduler = ParameterScheduler({("entropy_coeff", ("action", "turn")): (loss, LINEAR)})
    batch = scheduler(TensorDict({"x": torch.zeros(25)}, [25]))
    torch.testing.assert_close(loss.head_entropy_coeff, torch.tensor([0.1, 0.75]))
    out_key = ("schedule", "entropy_coeff", "action", "turn")
    assert scheduler.out_keys == [out_key]
    assert torch.equal(batch[out_key], torch.full((25,), 0.75))


def test_the_coefficient_of_one_head_is_in_the_state_of_the_loss():
    with set_composite_lp_aggregate(False):
        loss, _ = two_heads(DualClipPPOLoss)
    address = loss.head_entropy_coeff.data_ptr()
    ParameterScheduler({("entropy_coeff", "turn"): (loss, LINEAR)}).step(25)
    state = loss.state_dict()["head_entropy_coeff"]
    torch.testing.assert_close(state, torch.tensor([0.1, 0.75]))
    assert loss.head_entropy_coeff.data_ptr() == address


def test_an_unknown_head_raises():
    with set_composite_lp_aggregate(False):
        loss, _ = two_heads(DualClipPPOLoss)
    with pytest.raises(AttributeError, match=r"'jump'\): the heads .* \['move', 'turn'\]"):
        ParameterScheduler({("entropy_coeff", "jump"): (loss, LINEAR)})


def test_a_head_of_a_loss_without_heads_raises():
    loss = ClipPPOLoss(*actor_and_critic(), entropy_coeff=0.3)
    with pytest.raises(AttributeError, match=r"ClipPPOLoss has no coefficient .*'turn'"):
        ParameterScheduler({("entropy_coeff", "turn"): (loss, LINEAR)})


def test_one_coefficient_for_all_heads_raises():
    with set_composite_lp_aggregate(False):
        loss, _ = two_heads(ClipPPOLoss)
    with pytest.raises((ValueError, AttributeError), match=r"entropy_coeff"):
        ParameterScheduler({"entropy_coeff": (loss, LINEAR)})


def test_a_missing_attribute_raises():
    with pytest.raises(AttributeError, match=r"Holder.slip is missing, .* 'slip' would have no"):
        ParameterScheduler({"slip": (Holder(), LINEAR)})


def test_an_attribute_that_is_none_raises():
    with pytest.raises(AttributeError, match=r"Holder.clip is None: the loss was built without it"):
        ParameterScheduler({"clip": (Holder(None), LINEAR)})
    loss = DualClipPPOLoss(*actor_and_critic())
    with pytest.raises(AttributeError, match=r"DualClipPPOLoss.kl_coeff is None"):
        ParameterScheduler({"kl_coeff": (loss, LINEAR)})


# -- the scheduler -------------------------------------------------------------


def test_two_schedules_on_one_parameter_raise():
    optimizer = two_groups()
    with pytest.raises(ValueError, match=r"\('lr', 'actor'\) and 'lr' drive the same .* of Adam"):
        ParameterScheduler({"lr": (optimizer, LINEAR), ("lr", "actor"): (optimizer, LINEAR)})


def test_schedules_of_one_name_on_two_optimizers_are_fine():
    first, second = two_groups(), two_groups()
    scheduler = ParameterScheduler(
        {("lr", "actor"): (first, LINEAR), ("lr", "critic"): (second, LINEAR)}
    )
    scheduler.step(25)
    assert (rates(first), rates(second)) == ([0.75, 0.3], [0.3, 0.75])


def test_a_name_within_another_raises():
    # ("schedule", "lr") cannot be a value and hold one, too
    targets = {"lr": (two_groups(), LINEAR), ("lr", "actor"): (two_groups(), LINEAR)}
    with pytest.raises(ValueError, match=r"'lr' and \('lr', 'actor'\) cannot be in one scheduler"):
        ParameterScheduler(targets)


def test_what_is_no_schedule_raises():
    with pytest.raises(TypeError, match=r"schedule of 'clip' is 0.1; it must be callable"):
        ParameterScheduler({"clip": (Holder(), 0.1)})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("alone", [LINEAR, (LINEAR,)])
def test_a_schedule_without_its_target_raises(alone: Any):
    with pytest.raises(TypeError, match=r"'lr' has a .* no target. Write .* \(optimizer, schedule"):
        ParameterScheduler({"lr": alone})


def test_any_callable_is_a_schedule():
    holder = Holder()
    scheduler = ParameterScheduler({"clip": (holder, lambda frames: frames // 10)})
    scheduler.step(25)
    assert holder.clip == 2
    assert type(holder.clip) is float


def test_step_backwards_raises():
    scheduler = ParameterScheduler({"clip": (Holder(), LINEAR)})
    scheduler.step(25)
    scheduler.step(25)
    with pytest.raises(ValueError, match=r"step\(24\) goes backwards: the scheduler is at 25"):
        scheduler.step(24)
    assert scheduler.values == {"clip": 0.75}


def test_a_large_number_of_frames_is_exact():
    schedule = StepSchedule([(0, 1.0), (2**53 - 1, 2.0)])
    scheduler = ParameterScheduler({"clip": (Holder(), schedule)})
    scheduler.step(2**53 - 2)
    assert scheduler.values == {"clip": 1}
    scheduler.step(2**53 - 1)
    assert scheduler.values == {"clip": 2}


def test_a_batch_counts_its_frames():
    holder, optimizer = Holder(), two_groups()
    scheduler = ParameterScheduler({"clip": (holder, LINEAR), ("lr", "actor"): (optimizer, LINEAR)})
    batch = TensorDict({"reward": torch.zeros(5, 5, 1)}, [5, 5])
    assert scheduler(batch) is batch
    assert (holder.clip, rates(optimizer)) == (0.75, [0.75, 0.3])
    for key in (("schedule", "clip"), ("schedule", "lr", "actor")):
        assert key in scheduler.out_keys
        assert batch[key].dtype == torch.float32
        assert torch.equal(batch[key], torch.full((5, 5), 0.75))
    scheduler(batch)
    assert holder.clip == 0.5


@pytest.mark.parametrize("trailing", [(), (1,)], ids=["[B, T]", "[B, T, 1]"])
@pytest.mark.parametrize("key", [("collector", "mask"), "valid"], ids=["default", "own"])
def test_a_batch_counts_only_valid_frames(trailing, key):
    holder = Holder()
    scheduler = ParameterScheduler({"clip": (holder, LINEAR)}, mask_key=key)
    mask = torch.zeros(5, 8, *trailing, dtype=torch.bool)
    mask[:, :5] = True
    batch = scheduler(TensorDict({key: mask}, [5, 8]))
    assert int(scheduler.frames) == 25
    assert torch.equal(batch["schedule", "clip"], torch.full((5, 8), 0.75))


def test_a_mask_of_another_shape_or_dtype_raises():
    scheduler = ParameterScheduler({"clip": (Holder(), LINEAR)})
    batch = TensorDict({("collector", "mask"): torch.ones(5, 8, 2, dtype=torch.bool)}, [5, 8])
    with pytest.raises(ValueError, match=r"mask'\) has shape \[5, 8, 2\], .* batch .* \[5, 8\]"):
        scheduler(batch)
    batch = TensorDict({("collector", "mask"): torch.ones(5, 8)}, [5, 8])
    with pytest.raises(TypeError, match=r"mask'\) has dtype torch.float32"):
        scheduler(batch)
    assert int(scheduler.frames) == 0


def test_in_a_sequence_of_modules():
    holder = Holder()
    double = TensorDictModule(lambda x: 2 * x, in_keys=[("schedule", "clip")], out_keys=["doubled"])
    sequence = TensorDictSequential(ParameterScheduler({"clip": (holder, LINEAR)}), double)
    batch = sequence(TensorDict({"x": torch.zeros(25)}, [25]))
    assert torch.equal(batch["doubled"], torch.full((25,), 1.5))
    assert sequence.in_keys == []


def test_goes_on_from_a_checkpoint():
    def build():
        holder, block, optimizer = Holder(), Block(), two_groups()
        schedule = InterpSchedule([(0, 0.3), (1_000_003, 0.1)])
        scheduler = ParameterScheduler(
            {
                "clip": (holder, schedule),
                "coefficient": (block, schedule),
                "lr": (optimizer, schedule),
            }
        )
        return scheduler, lambda: (holder.clip, block.coefficient.item(), *rates(optimizer))

    scheduler, places = build()
    scheduler.step(123_457)
    resumed, resumed_places = build()
    assert resumed_places() != places()
    resumed.load_state_dict(save_and_load(scheduler.state_dict()))
    assert resumed.values == scheduler.values
    assert resumed_places() == places()
    for frames in (123_457, 200_000, 2_000_000):
        scheduler.step(frames)
        resumed.step(frames)
        assert resumed_places() == places()
    with pytest.raises(ValueError, match="goes backwards"):
        resumed.step(5)


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))], ids=["deepcopy", "pickle"]
)
def test_a_copy_drives_a_copy_of_its_targets(clone):
    holder, block, optimizer = Holder(), Block(), two_groups()
    targets = (holder, block, optimizer)
    scheduler = ParameterScheduler(
        {"clip": (holder, LINEAR), "coefficient": (block, LINEAR), "lr": (optimizer, LINEAR)}
    )
    scheduler.step(25)
    other, (holder2, block2, optimizer2) = clone((scheduler, targets))
    assert other.values == scheduler.values
    other.step(50)
    assert (holder2.clip, block2.coefficient.item(), *rates(optimizer2)) == (0.5,) * 4
    assert (holder.clip, block.coefficient.item(), *rates(optimizer)) == (0.75,) * 4
    scheduler.step(75)
    assert (holder.clip, block.coefficient.item(), *rates(optimizer)) == (0.25,) * 4


def test_repr_names_frames_and_schedules():
    scheduler = ParameterScheduler({"clip": (Holder(), StepSchedule([(0, 0.5)]))})
    scheduler.step(7)
    expected = "ParameterScheduler(frames=7, schedules={'clip': StepSchedule([(0, 0.5)])})"
    assert repr(scheduler) == expected


# -- invariants ----------------------------------------------------------------


@st.composite
def point_lists(draw):
    """Points as a user writes them: from frame 0 on, strictly increasing."""
    gaps = draw(st.lists(st.integers(1, 10**7), max_size=6))
    frames = list(itertools.accumulate([0, *gaps]))
    values = [draw(st.floats(-1e3, 1e3)) for _ in frames]
    return list(zip(frames, values, strict=True))


@given(point_lists(), st.floats(0, 1))
def test_invariants_of_both_kinds(points, share):
    step, interp = StepSchedule(points), InterpSchedule(points)
    for frames, value in points:
        assert step(frames) == interp(frames) == value
    end, last = points[-1]
    assert step(end + 1) == interp(end + 10**9) == last
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        between = x0 + share * (x1 - x0)
        low, high = min(y0, y1), max(y0, y1)
        assert step(between) == (y0 if between < x1 else y1)
        assert low - 1e-9 <= interp(between) <= high + 1e-9


@given(point_lists(), st.lists(st.integers(1, 5_000), min_size=1, max_size=8))
def test_frames_may_come_in_any_pieces(points, pieces):
    holders = [Holder(), Holder()]
    schedule = InterpSchedule(points)
    by_batch, at_once = (ParameterScheduler({"clip": (h, schedule)}) for h in holders)
    for piece in pieces:
        by_batch(TensorDict({}, [piece]))
        assert holders[0].clip == schedule(int(by_batch.frames))
    at_once.step(sum(pieces))
    assert holders[0].clip == holders[1].clip


# -- values out of range ---------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1])
def test_a_learning_rate_that_no_optimizer_can_have(value: float):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = {"lr": (optimizer, lambda frames: value if frames else 0.5)}
    scheduler = ParameterScheduler(schedule)
    with pytest.raises(ValueError, match=f"schedule of 'lr' gives {value}; SGD needs a finite"):
        scheduler.step(1)
    assert (optimizer.param_groups[0]["lr"], int(scheduler.frames)) == (0.5, 0)
    if math.isfinite(value):  # the points of a schedule are known before
        with pytest.raises(ValueError, match=r"schedule of .lr. gives -0\.1"):
            ParameterScheduler({"lr": (optimizer, InterpSchedule([(0, 1.0), (10, value)]))})


def test_a_block_refuses_the_values_that_its_constructor_refuses():
    gae = GAE(gamma=0.9, lmbda=0.95, value_network=None)
    with pytest.raises(ValueError, match=r"gamma must lie in \[0, 1\], got 1.5"):
        ParameterScheduler({"gamma": (gae, InterpSchedule([(0, 0.9), (10, 1.5)]))})
    assert gae.gamma == 0.9
    scheduler = ParameterScheduler({"gamma": (gae, lambda frames: 0.5 + frames)})
    with pytest.raises(ValueError, match=r"gamma must lie in \[0, 1\], got 1.5"):
        scheduler.step(1)
    assert gae.gamma == 0.5


def test_an_empty_batch_has_no_frames():
    scheduler = ParameterScheduler({})
    scheduler(TensorDict({}, [0, 5]))
    assert int(scheduler.frames) == 0
