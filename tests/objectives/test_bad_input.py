"""What a loss refuses: shapes that would broadcast, coefficients and states out of range."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import distributions as d
from torch import nn
from torchrl.modules import IndependentNormal, OneHotCategorical, ProbabilisticActor, TanhNormal

from ppokit import DualClipPPOLoss, InterpSchedule, ParameterScheduler
from tests.blocks import loss_on_path, make_actor, make_critic, make_minibatch

DISTRIBUTIONS = [TanhNormal, IndependentNormal, d.Categorical, OneHotCategorical]


def make_policy(distribution: Any) -> ProbabilisticActor:
    choice = distribution in (d.Categorical, OneHotCategorical)
    extract = [] if choice else [NormalParamExtractor()]
    keys = ["logits"] if choice else ["loc", "scale"]
    return ProbabilisticActor(
        TensorDictModule(nn.Sequential(nn.Linear(4, 4), *extract), ["observation"], keys),
        in_keys=keys,
        distribution_class=distribution,
        return_log_prob=True,
    )


@pytest.mark.parametrize("frames", [1, 5])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_log_probability_with_a_trailing_dimension(distribution: Any, fast: bool, frames: int):
    actor = make_policy(distribution)
    batch = make_minibatch(actor, frames)
    batch["action_log_prob"] = batch["action_log_prob"].unsqueeze(-1)
    loss = loss_on_path(actor, make_critic(), fast=fast)
    with pytest.raises(ValueError, match=r"'action_log_prob' has shape \[\d, 1\].*squeeze"):
        loss(batch)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("also_log_prob", [False, True])
def test_a_choice_with_a_trailing_dimension(fast: bool, also_log_prob: bool):
    actor = make_policy(d.Categorical)
    batch = make_minibatch(actor, 5)
    batch["action"] = batch["action"].unsqueeze(-1)
    if also_log_prob:
        batch["action_log_prob"] = batch["action_log_prob"].unsqueeze(-1)
    loss = loss_on_path(actor, make_critic(), fast=fast)
    with pytest.raises(ValueError, match=r"'action' \(shape \[5, 1\]\).*\[5, 5\].*squeeze"):
        loss(batch)


@pytest.mark.parametrize("fast", [False, True])
def test_bounds_the_wrong_way_round(fast: bool):
    actor = make_policy(TanhNormal)
    batch = make_minibatch(actor, 5)
    loss = loss_on_path(actor, make_critic(), fast=fast)
    loss.actor_network[-1].distribution_kwargs = {"low": 2.0, "high": -2.0}
    with pytest.raises(RuntimeError, match="high values must be strictly greater than low"):
        loss(batch)


@pytest.mark.parametrize("fast", [False, True])
def test_an_advantage_is_not_estimated_on_frames_that_may_be_shuffled(fast: bool):
    """Here GAE was forgotten; torchrl's default estimator would take the frames for a row."""
    actor = make_actor("categorical")
    loss = loss_on_path(actor, make_critic(), fast=fast)
    batch = make_minibatch(actor, 8).exclude("advantage", "value_target", "state_value")
    flags = torch.zeros(8, 1, dtype=torch.bool)
    batch["next"] = {"observation": batch["observation"], "reward": torch.ones(8, 1)}
    batch["next"].update({"done": flags, "terminated": flags})
    message = (
        r"^'advantage' is not in the batch\. Call GAE on .* before it is shuffled.* shape \[8\]"
    )
    with pytest.raises(ValueError, match=message):
        loss(batch)
    expected = loss(batch.unsqueeze(0))["loss_objective"]
    batch.names = ["time"]
    torch.testing.assert_close(loss(batch)["loss_objective"], expected)


@pytest.mark.parametrize("fast", [False, True])
def test_neither_an_advantage_nor_what_it_could_be_computed_from(fast: bool):
    actor = make_policy(d.Categorical)
    batch = make_minibatch(actor, 5).exclude("advantage", ("next", "reward"))
    with pytest.raises(KeyError, match=r"'advantage' is not in the batch.*Call GAE"):
        loss_on_path(actor, make_critic(), fast=fast)(batch)


OUT_OF_RANGE = [
    ("dual_clip", 0.0, "dual_clip must exceed 1"),
    ("kl_coeff", -0.1, "kl_coeff must lie in"),
    ("entropy_coeff", -0.1, "entropy_coeff must lie in"),
    ("critic_coeff", -1.0, "critic_coeff must lie in"),
    ("clip_epsilon", 1.5, "clip_epsilon"),
    ("clip_value", -0.1, "clip_value must lie in"),
    ("critic_loss_clip", 0.0, "critic_loss_clip must be positive"),
]
OPTIONS = {
    "dual_clip": 3.0,
    "kl_coeff": 0.1,
    "entropy_coeff": 0.1,
    "critic_coeff": 1.0,
    "clip_epsilon": 0.2,
    "clip_value": 0.2,
    "critic_loss_clip": 5.0,
}


@pytest.mark.parametrize(("name", "value", "message"), OUT_OF_RANGE)
def test_a_coefficient_out_of_range_is_refused_wherever_it_comes_from(
    name: str, value: float, message: str
):
    with pytest.raises(ValueError, match=message):
        DualClipPPOLoss(make_actor(), make_critic(), **(OPTIONS | {name: value}))
    loss = loss_on_path(make_actor(), make_critic(), **OPTIONS)
    before = copy.deepcopy(loss.state_dict())
    with pytest.raises(ValueError, match=message):
        setattr(loss, name, value)
    with pytest.raises(ValueError, match=name):
        ParameterScheduler({name: (loss, InterpSchedule([(0, OPTIONS[name]), (100, value)]))})
    for assign in (False, True):
        with pytest.raises(RuntimeError, match=message):
            loss.load_state_dict(before | {name: torch.tensor(value)}, assign=assign)
    with pytest.raises(RuntimeError, match=name):
        loss.load_state_dict(before | {name: torch.tensor(float("nan"))})
    after = loss.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_distribution_that_cannot_be_hashed():
    class Maker:
        __hash__ = None  # pyright: ignore[reportAssignmentType]

        def __call__(self, loc: torch.Tensor, scale: torch.Tensor) -> d.Distribution:
            return IndependentNormal(loc, scale)

    actor = make_actor()
    actor[-1].distribution_class = Maker()
    loss, slow = (loss_on_path(actor, make_critic(), fast=fast) for fast in (True, False))
    batch = make_minibatch(actor, 8)
    torch.testing.assert_close(loss(batch)["kl"], slow(batch)["kl"])
    assert "path=tensors" in repr(loss)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("kind", ["normal", "tanh_normal", "categorical"])
def test_a_minibatch_of_nothing_but_padding(kind: str, normalize: bool, fast: bool):
    actor, critic = make_actor(kind), make_critic()
    loss = loss_on_path(
        actor, critic, fast=fast, normalize_advantage=normalize, kl_coeff=0.1, clip_value=0.2
    )
    batch = make_minibatch(actor, 8)
    batch["collector", "mask"] = torch.zeros(8, dtype=torch.bool)
    for key in ("observation", "advantage", "value_target", "state_value", "action_log_prob"):
        batch[key] = torch.full_like(batch[key], float("nan"))
    out = loss(batch)
    losses = [value for name, value in out.items() if name.startswith("loss_")]
    assert all(value == 0 for value in losses)
    gradients = torch.autograd.grad(sum(losses), list(loss.parameters()), allow_unused=True)
    assert all(gradient is None or (gradient == 0).all() for gradient in gradients)
    assert out["kl"] == 0
    assert all(value.isfinite().all() for value in out.values())


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
def test_a_mask_that_is_not_bool(dtype: torch.dtype, fast: bool):
    actor = make_actor()
    batch = make_minibatch(actor, 8)
    batch["collector", "mask"] = torch.ones(8, dtype=dtype)
    loss = loss_on_path(actor, make_critic(), fast=fast)
    with pytest.raises(TypeError, match=r"'collector', 'mask'.* has dtype .*torch\.bool"):
        loss(batch)


@pytest.mark.parametrize("fast", [False, True])
def test_one_valid_frame_is_not_normalised(fast: bool):
    actor = make_actor()
    batch = make_minibatch(actor, 8)
    alone = TensorDict.cat([batch[2:3], batch[2:3]])
    alone["collector", "mask"] = torch.tensor([True, False])
    options = {"normalize_advantage": True, "fast": fast, "entropy_bonus": False}
    loss = loss_on_path(actor, make_critic(), **options)
    expected = DualClipPPOLoss(actor, make_critic(), entropy_bonus=False)(batch[2:3])
    torch.testing.assert_close(loss(alone)["loss_objective"], expected["loss_objective"])


@pytest.mark.parametrize(
    "options", [{"critic_coeff": 0.5}, {"critic_loss_clip": 5.0}, {"clip_value": True}]
)
def test_what_is_of_a_critic_without_one(options: dict[str, Any]):
    (name,) = options
    with pytest.raises(TypeError, match=f"{name}=.* pass one, or {name}=None"):
        loss_on_path(make_actor(), None, **options)
    DualClipPPOLoss(make_actor(), None, **{name: None})


def test_a_coefficient_out_of_range_without_a_critic():
    with pytest.raises(ValueError, match="critic_loss_clip must be positive"):
        DualClipPPOLoss(make_actor(), None, critic_loss_clip=-1.0)


@pytest.mark.parametrize("number", [0, -1, 1.5, True])
def test_a_number_of_entropy_samples_that_is_none_raises(number: Any):
    with pytest.raises(ValueError, match=f"samples_mc_entropy must be .* got {number}"):
        DualClipPPOLoss(make_actor("tanh_normal"), make_critic(), samples_mc_entropy=number)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("ent_coef", "Did you mean entropy_coeff"),
        ("vf_coef", "Did you mean critic_coeff"),
        ("clip_range", "Did you mean clip_epsilon"),
        ("target_kl", r"KLEarlyStopper\(target_kl\)"),
        ("dual_clipp", "Did you mean dual_clip"),
        ("critic_coef", "Did you mean critic_coeff"),
        ("xyz", "$"),
    ],
)
def test_an_unknown_argument_raises_and_names_the_nearest(name: str, advice: str):
    with pytest.raises(TypeError, match=f"has no argument '{name}'.*{advice}"):
        DualClipPPOLoss(make_actor(), make_critic(), **{name: 0.1})


def test_a_missing_entry_raises_and_leaves_the_batch_as_it_is():
    def module(network: nn.Module, reads: str, writes: list[str]) -> TensorDictModule:
        return TensorDictModule(network, [reads], writes)

    actor = ProbabilisticActor(
        TensorDictSequential(
            module(nn.Linear(4, 4), "observation", ["hidden"]),
            module(nn.Linear(3, 2), "goal", ["logits"]),
        ),
        in_keys=["logits"],
        distribution_class=d.Categorical,
    )
    batch = make_minibatch(make_actor("categorical"), 8)
    keys = set(batch.keys(True))
    with pytest.raises(KeyError, match="goal"):
        DualClipPPOLoss(actor, make_critic())(batch)
    assert set(batch.keys(True)) == keys
