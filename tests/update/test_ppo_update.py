"""The update does what a loop written out by hand does, and says what it did."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, InitTracker, SerialEnv, TransformedEnv
from torchrl.modules import GRUModule, ProbabilisticActor, ValueOperator
from torchrl.objectives import A2CLoss, ClipPPOLoss

from ppokit import (
    GAE,
    AdaptiveKLCoeff,
    DualClipPPOLoss,
    InterpSchedule,
    KLEarlyStopper,
    ParameterScheduler,
    PPOUpdate,
    RewardNormalizer,
    SequenceBatcher,
    TrainingStep,
)
from tests.blocks import ppo_update

LOSSES = ("loss_objective", "loss_entropy", "loss_critic")


def make_env() -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def make_networks() -> tuple[ProbabilisticActor, ValueOperator]:
    torch.manual_seed(0)
    actor = ProbabilisticActor(
        TensorDictModule(
            nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)),
            ["observation"],
            ["logits"],
        ),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    critic = ValueOperator(
        nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)), in_keys=["observation"]
    )
    return actor, critic


@pytest.fixture(scope="module")
def batches() -> list[TensorDictBase]:
    """Three batches of three environments, 50 steps each, with episode ends."""
    actor, _ = make_networks()
    collector = Collector(
        SerialEnv(3, make_env),
        actor,
        frames_per_batch=150,
        total_frames=450,
        auto_register_policy_transforms=False,
    )
    collector.set_seed(0)
    found = [batch.clone() for batch in collector]
    collector.shutdown()
    assert all(batch["next", "done"].any() for batch in found)
    return found


def make_parts(**options: Any) -> tuple[DualClipPPOLoss, GAE, torch.optim.Optimizer]:
    actor, critic = make_networks()
    loss = DualClipPPOLoss(actor, critic, functional=False, **options)
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=True)
    return loss, gae, torch.optim.Adam(loss.parameters(), lr=1e-2, fused=True)


def parameters_of(loss: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(loss.parameters()).detach().clone()


def test_it_is_the_loop_written_out(batches: list[TensorDictBase]):
    loss, gae, optimizer = make_parts()
    normalizer = RewardNormalizer(0.99)
    generator = torch.Generator()
    generator.manual_seed(3)
    for batch in batches:
        frames = gae(normalizer(batch.clone())).reshape(-1)
        for _ in range(3):
            order = torch.randperm(len(frames), generator=generator)
            for part in order.split(64):
                losses = loss(frames[part])
                sum(losses[name] for name in LOSSES).backward()
                nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    expected = parameters_of(loss)
    loss, gae, optimizer = make_parts()
    update = PPOUpdate(
        TrainingStep(loss, optimizer, max_grad_norm=0.5),
        advantage=gae,
        reward_normalizer=RewardNormalizer(0.99),
        epochs=3,
        minibatch_size=64,
        seed=3,
    )
    found = [update(batch.clone()) for batch in batches]
    torch.testing.assert_close(parameters_of(loss), expected)
    assert [(each["epochs"], each["minibatches"]) for each in found] == [(3, 9)] * 3


@pytest.mark.parametrize("largest", [0.05, 1e3])
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD])
def test_clipping_within_a_fused_step(batches: list[TensorDictBase], make: Any, largest: float):
    found = []
    for fused in (False, True):
        loss, gae, _ = make_parts()
        optimizer = make(loss.parameters(), lr=1e-2, fused=fused)
        options = {"advantage": gae, "max_grad_norm": largest, "minibatch_size": 64, "seed": 0}
        ppo_update(loss, optimizer, **options)(batches[0].clone())
        found.append(parameters_of(loss))
        assert not hasattr(optimizer, "grad_scale")
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


class Plain(TensorDictModuleBase):
    """A loss with one parameter for each size, whose gradients are given."""

    def __init__(self, gradients: Sequence[torch.Tensor] = (torch.ones(()),)) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["x"], ["loss_any"]
        self.gradients = list(gradients)
        self.weights = nn.ParameterList(torch.ones_like(x.contiguous()) for x in gradients)
        self.seen: list[TensorDictBase] = []

    def forward(self, minibatch: TensorDictBase) -> TensorDict:
        self.seen.append(minibatch.clone())
        products = [(w * g).sum() for w, g in zip(self.weights, self.gradients, strict=True)]
        return TensorDict({"loss_any": torch.stack(products).sum()})


def update_plain(loss: nn.Module, batch: TensorDictBase | None = None, **options: Any) -> Any:
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.0)
    batch = TensorDict({"x": torch.arange(10)}, [10]) if batch is None else batch
    return ppo_update(loss, optimizer, **({"epochs": 1} | options))(batch)


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"minibatch_size": 5}])
def test_a_loss_that_works_in_place_leaves_the_batch_alone(options: dict[str, Any]):
    class InPlace(Plain):
        def forward(self, minibatch: TensorDictBase) -> TensorDict:
            losses = super().forward(minibatch)
            minibatch["x"].add_(100)
            return losses

    loss, batch = InPlace(), TensorDict({"x": torch.arange(10)}, [10])
    update_plain(loss, batch, epochs=2, **options)
    assert batch["x"].tolist() == list(range(10))
    for epoch in torch.cat([each["x"] for each in loss.seen]).split(10):
        assert sorted(epoch.tolist()) == list(range(10))


@pytest.mark.parametrize("sizes", [(), (0,), (1,), (31, 1), (32,), (2048,), (5000, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_of_all_gradients(sizes: tuple[int, ...], dtype: torch.dtype):
    torch.manual_seed(0)
    gradients = [torch.randn(size, dtype=dtype) for size in (*sizes, 1)]
    gradients.append(torch.randn(6, 4, dtype=dtype).T[1:])  # not in one piece
    expected = torch.cat([x.flatten() for x in gradients]).double().norm().item()
    assert update_plain(Plain(gradients))["grad_norm"] == pytest.approx(expected, rel=1e-6)
    for odd in (math.nan, math.inf):
        odd_one = Plain([*gradients, torch.tensor([1.0, odd])])
        norm = update_plain(odd_one, nonfinite=None)["grad_norm"]
        assert norm == pytest.approx(odd, nan_ok=True)


def test_accumulated_gradients_are_those_of_the_whole_batch(batches: list[TensorDictBase]):
    found = []
    for size, accumulate in ((None, False), (64, True)):
        loss, gae, optimizer = make_parts()
        update = PPOUpdate(
            TrainingStep(loss, optimizer, max_grad_norm=0.5),
            advantage=gae,
            epochs=2,
            minibatch_size=size,
            accumulate_grads=accumulate,
        )
        statistics = update(batches[0].clone())
        assert statistics["steps"] == 2
        found.append((parameters_of(loss), torch.tensor(statistics["grad_norm"])))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_statistics_are_means_over_valid_frames(batches: list[TensorDictBase]):
    loss, gae, _ = make_parts()
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.0)
    batch = batches[0].clone()
    update = PPOUpdate(TrainingStep(loss, optimizer), advantage=gae, epochs=1, minibatch_size=64)
    statistics = update(batch)
    torch.manual_seed(0)
    whole = loss(gae(batch).reshape(-1))
    for name in ("loss_objective", "loss_critic", "kl", "clip_fraction", "entropy"):
        assert statistics[name] == pytest.approx(whole[name].item(), rel=1e-4, abs=1e-6), name
    assert statistics["minibatches"] == 3
    assert statistics["lr"] == 0
    assert statistics["clip_epsilon"] == pytest.approx(0.2)
    assert statistics["frames"] == 150
    assert statistics["frames_per_second"] > 0
    assert all(type(value) is float for value in statistics.values())


def test_episodes_are_followed_over_batches(batches: list[TensorDictBase]):
    loss, gae, optimizer = make_parts()
    update = PPOUpdate(TrainingStep(loss, optimizer), advantage=gae, epochs=1)
    whole = torch.cat(batches, 1)
    returns: list[list[float]] = [[] for _ in batches]
    for row in range(3):
        total = 0.0
        for step in range(150):
            total += whole["next", "reward"][row, step].item()
            if whole["next", "done"][row, step]:
                returns[step // 50].append(total)
                total = 0.0
    for batch, expected in zip(batches, returns, strict=True):
        statistics = update(batch.clone())
        assert statistics["episodes"] == len(expected)
        mean = sum(expected) / len(expected)
        assert statistics["episode_return"] == pytest.approx(mean)
        assert statistics["episode_length"] == pytest.approx(mean)  # CartPole pays 1 a step


def test_episode_returns_are_raw(batches: list[TensorDictBase]):
    found = []
    for normalizer in (None, RewardNormalizer(0.99)):
        loss, gae, optimizer = make_parts()
        update = PPOUpdate(
            TrainingStep(loss, optimizer), advantage=gae, reward_normalizer=normalizer, epochs=1
        )
        found.append(update(batches[0].clone())["episode_return"])
    assert found[0] == found[1]


# -- the KL stop, the KL coefficient and the schedules ---------------------------------


def test_the_minibatch_that_stops_is_not_applied(batches: list[TensorDictBase]):
    loss, gae, optimizer = make_parts()
    stopper = KLEarlyStopper(1e-12)
    update = PPOUpdate(
        TrainingStep(loss, optimizer, stopper=stopper),
        advantage=gae,
        epochs=5,
        minibatch_size=50,
        seed=0,
    )
    batch = batches[0].clone()
    batch["action_log_prob"] += 0.5
    before = parameters_of(loss)
    statistics = update(batch)
    assert (statistics["stopped"], statistics["epochs"], statistics["steps"]) == (1, 1, 0)
    assert statistics["minibatches"] == 1
    assert statistics["kl"] > 0
    assert torch.equal(parameters_of(loss), before)
    assert not stopper.stopped


def test_a_stop_after_an_epoch(batches: list[TensorDictBase]):
    loss, gae, optimizer = make_parts()
    stopper = KLEarlyStopper(1e-9, when="epoch")
    update = PPOUpdate(
        TrainingStep(loss, optimizer, stopper=stopper), advantage=gae, epochs=5, minibatch_size=50
    )
    statistics = update(batches[0].clone())
    assert (statistics["stopped"], statistics["epochs"], statistics["steps"]) == (1, 1, 3)


def test_the_kl_coefficient_and_the_schedules_move_once(batches: list[TensorDictBase]):
    loss, gae, optimizer = make_parts(kl_coeff=0.5)
    adaptive = AdaptiveKLCoeff(loss, target_kl=1e-9)
    lr = InterpSchedule([(0, 1e-2), (300, 0.0)])
    scheduler = ParameterScheduler({"lr": (optimizer, lr)})
    update = PPOUpdate(
        TrainingStep(loss, optimizer),
        advantage=gae,
        adaptive_kl=adaptive,
        scheduler=scheduler,
        epochs=2,
        minibatch_size=64,
    )
    found = [update(batch.clone()) for batch in batches[:2]]
    assert [statistics["kl_coeff"] for statistics in found] == [0.5, 0.75]
    assert [statistics["lr"] for statistics in found] == pytest.approx([1e-2, 5e-3])
    assert optimizer.param_groups[0]["lr"] == 0
    assert found[0]["loss_kl"] != 0


# -- sequences -------------------------------------------------------------------------


def recurrent_parts() -> tuple[Any, Any, TensorDictBase]:
    torch.manual_seed(0)
    gru = GRUModule(input_size=4, hidden_size=8, in_key="observation", out_key="hidden")
    actor = ProbabilisticActor(
        TensorDictSequential(gru, TensorDictModule(nn.Linear(8, 2), ["hidden"], ["logits"])),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    critic = ValueOperator(nn.Linear(4, 1), in_keys=["observation"])
    env = TransformedEnv(make_env(), InitTracker())
    env.append_transform(gru.make_tensordict_primer())
    collector = Collector(
        env,
        actor,
        frames_per_batch=100,
        total_frames=100,
        auto_register_policy_transforms=False,
    )
    collector.set_seed(0)
    (batch,) = collector
    collector.shutdown()
    return actor, critic, batch.unsqueeze(0)


def test_sequences_for_recurrent_networks():
    actor, critic, batch = recurrent_parts()
    loss = DualClipPPOLoss(actor, critic, functional=False)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    update = PPOUpdate(
        TrainingStep(loss, optimizer, max_grad_norm=1.0),
        advantage=gae,
        batcher=SequenceBatcher(16),
        epochs=2,
        minibatch_size=48,
        seed=0,
    )
    update.validate(batch)
    before = parameters_of(loss)
    statistics = update(batch)
    assert statistics["frames"] == 100
    sequences = len(SequenceBatcher(16)(batch))
    assert statistics["minibatches"] == 2 * math.ceil(sequences / 3)
    assert not torch.equal(parameters_of(loss), before)
    assert statistics["kl"] < 0.05


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("burn_in", [0, 4])
def test_burn_in_finds_the_states_of_collection_again(functional: bool, burn_in: int):
    actor, critic, batch = recurrent_parts()
    loss = DualClipPPOLoss(actor, critic, functional=functional)
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.0)
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    batcher = SequenceBatcher(8, burn_in=burn_in)
    update = PPOUpdate(
        TrainingStep(loss, optimizer), advantage=gae, batcher=batcher, minibatch_size=32, seed=0
    )
    update.validate(batch)
    statistics = update(batch)
    assert 0 <= statistics["kl"] < 1e-10
    assert 0 < statistics["padded"] < 0.5
    if burn_in:
        with pytest.raises(ValueError, match=r"frames of burn-in.*batcher.refresh"):
            loss(batcher(gae(batch)))
        other = Writes()
        update = PPOUpdate(
            TrainingStep(other, torch.optim.SGD(other.parameters())), batcher=batcher
        )
        with pytest.raises(TypeError, match="burn_in needs networks with a recurrent state"):
            update(batch)


def test_an_advantage_normalised_per_minibatch_meets_sequences_of_any_length():
    padded = []
    for normalize_advantage in (False, True):
        actor, critic, batch = recurrent_parts()
        loss = DualClipPPOLoss(actor, critic, normalize_advantage=normalize_advantage)
        optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
        gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
        blocks = {"advantage": gae, "batcher": SequenceBatcher(8)}
        update = ppo_update(loss, optimizer, minibatch_size=16, seed=0, **blocks)
        padded.append(update(batch)["padded"])
    assert padded[0] < padded[1]


def test_a_batch_without_recurrent_states_is_refused():
    actor, critic, batch = recurrent_parts()
    loss = DualClipPPOLoss(actor, critic)
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    update = PPOUpdate(TrainingStep(loss, optimizer), advantage=gae, batcher=SequenceBatcher(8))
    with pytest.raises(KeyError, match=r"'recurrent_state'.*make_tensordict_primer\(\)"):
        update(batch.exclude("recurrent_state"))
    with pytest.raises(KeyError, match=r"'is_init'.*InitTracker\(\)"):
        update(batch.exclude("is_init"))


def test_frames_under_the_mask_are_left_out(batches: list[TensorDictBase]):
    batch = batches[0].clone()
    batch["collector", "mask"] = torch.ones(3, 50, dtype=torch.bool)
    batch["collector", "mask"][1, 30:] = False
    loss, gae, optimizer = make_parts()
    update = PPOUpdate(TrainingStep(loss, optimizer), advantage=gae, epochs=1, minibatch_size=64)
    statistics = update(batch)
    assert (statistics["frames"], statistics["minibatches"]) == (130, 3)


# -- other losses, precision, compilation ----------------------------------------------


def test_torchrls_own_loss_and_no_blocks(batches: list[TensorDictBase]):
    actor, critic = make_networks()
    loss = ClipPPOLoss(actor, critic)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    batch = gae(batches[0].clone())
    statistics = PPOUpdate(TrainingStep(loss, optimizer), epochs=1, minibatch_size=64)(batch)
    assert statistics["minibatches"] == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_mixed_precision(batches: list[TensorDictBase], dtype: torch.dtype):
    found = []
    for amp_dtype in (None, dtype):
        loss, gae, _ = make_parts()
        optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
        update = PPOUpdate(
            TrainingStep(loss, optimizer, amp_dtype=amp_dtype),
            advantage=gae,
            epochs=1,
            minibatch_size=64,
            seed=0,
        )
        before = parameters_of(loss)
        statistics = update(batches[0].clone())
        assert statistics["loss_critic"] > 0
        found.append(parameters_of(loss) - before)
    cosine = torch.nn.functional.cosine_similarity(*found, dim=0)
    assert cosine > 0.99


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
def test_a_compiled_loss_is_taken_as_it_is(batches: list[TensorDictBase]):
    torch._dynamo.reset()
    found = []
    for compiled in (False, True):
        loss, gae, optimizer = make_parts()
        module: Any = torch.compile(loss, backend="eager") if compiled else loss
        update = PPOUpdate(
            TrainingStep(module, optimizer), advantage=gae, epochs=2, minibatch_size=50, seed=0
        )
        update(batches[0].clone())
        found.append(parameters_of(loss))
    torch.testing.assert_close(*found)


def test_the_advantage_can_be_computed_in_each_epoch(batches: list[TensorDictBase]):
    found = []
    for recompute in (False, True):
        loss, gae, optimizer = make_parts()
        update = PPOUpdate(
            TrainingStep(loss, optimizer),
            advantage=gae,
            epochs=2,
            recompute_advantage=recompute,
            seed=0,
        )
        update(batches[0].clone())
        found.append(parameters_of(loss))
    assert not torch.equal(*found)


# -- minibatches -----------------------------------------------------------------------


def test_each_frame_is_in_one_minibatch_of_an_epoch():
    x = torch.arange(10)
    batch = TensorDict({"x": x, "y": {"z": torch.randn(10, 2)}}, [10])
    loss = Plain()
    loss.in_keys = ["x", ("y", "z")]
    update_plain(loss, batch, epochs=2, minibatch_size=4)
    assert [len(minibatch) for minibatch in loss.seen] == [4, 4, 2] * 2
    orders = [torch.cat(loss.seen[:3]), torch.cat(loss.seen[3:])]
    for order in orders:
        assert torch.equal(order["y", "z"], batch["y", "z"][order["x"]])
        assert sorted(order["x"].tolist()) == list(range(10))
    assert not torch.equal(orders[0]["x"], orders[1]["x"])
    loss = Plain()
    update_plain(loss, batch, minibatch_size=4, shuffle=False)
    assert torch.equal(torch.cat([minibatch["x"] for minibatch in loss.seen]), x)


class Writes(TensorDictModuleBase):
    """A loss that writes to its minibatch, and tells whether it found it as it was collected."""

    def __init__(self) -> None:
        super().__init__()
        self.in_keys = ["observation", "action_log_prob"]
        self.out_keys = ["loss_any"]
        self.weight = nn.Parameter(torch.ones(()))
        self.has_found: list[bool] = []

    def forward(self, minibatch: TensorDictBase) -> TensorDict:
        self.has_found.append(
            "extra" in minibatch.keys() or bool((minibatch["action_log_prob"] > 0).any())
        )
        minibatch["extra"] = minibatch["action_log_prob"]
        minibatch["action_log_prob"] = torch.ones(len(minibatch))
        return TensorDict({"loss_any": self.weight * minibatch["observation"].mean()})


def test_a_loss_may_write_to_its_minibatch(batches: list[TensorDictBase]):
    loss = Writes()
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    PPOUpdate(TrainingStep(loss, optimizer), epochs=3, minibatch_size=64)(batches[0].clone())
    assert loss.has_found == [False] * 9


# -- state -----------------------------------------------------------------------------


def make_full_update(**options: Any) -> PPOUpdate:
    loss, gae, optimizer = make_parts(kl_coeff=0.5)
    return PPOUpdate(
        TrainingStep(loss, optimizer, stopper=KLEarlyStopper(0.5), max_grad_norm=0.5, **options),
        advantage=gae,
        reward_normalizer=RewardNormalizer(0.99),
        adaptive_kl=AdaptiveKLCoeff(loss),
        scheduler=ParameterScheduler({"lr": (optimizer, InterpSchedule([(0, 1e-2), (450, 0)]))}),
        epochs=2,
        minibatch_size=64,
    )


def test_episode_returns_of_several_agents_are_their_mean():
    reward = torch.tensor([[1.0, 3.0], [5.0, 7.0], [2.0, 4.0]]).view(1, 3, 2, 1)
    done = torch.tensor([False, True, False]).view(1, 3, 1)
    batch = TensorDict({"x": torch.zeros(1, 3), "next": {"reward": reward, "done": done}}, [1, 3])
    expected = {"episodes": 1.0, "episode_return": 8.0, "episode_length": 2.0}
    for _ in range(2):
        assert expected.items() <= update_plain(Plain(), batch).items()
        batch["next", "reward"] = reward.mean(2).squeeze(-1)  # one number a frame, as it comes


@pytest.mark.parametrize("compile", [False, {"backend": "aot_eager"}], ids=["eager", "compiled"])
def test_a_resumed_update_goes_on_bit_for_bit(
    batches: list[TensorDictBase], tmp_path: Any, compile: Any
):
    first = make_full_update(compile=compile)
    first(batches[0].clone())
    torch.save(first.state_dict(), tmp_path / "state")
    expected = first(batches[1].clone())
    second = make_full_update(compile=compile)
    second.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    found = second(batches[1].clone())
    assert ("compiled" in repr(second)) == bool(compile)
    for name, value in expected.items():
        if "second" not in name:
            assert found[name] == value, name
    assert torch.equal(parameters_of(first.step.loss), parameters_of(second.step.loss))
    state = first.state_dict()
    del state["stopper"]
    with pytest.raises(KeyError, match=r"has no \['stopper'\]"):
        second.load_state_dict(state)


# -- what is refused -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"epochs": 0}, ValueError, "epochs must be a whole number"),
        ({"minibatch_size": 0}, ValueError, "minibatch_size must be"),
        ({"minibatch_size": 6.5}, ValueError, "minibatch_size must be"),
        ({"max_grad_norm": 0.0}, ValueError, "max_grad_norm must be positive"),
        ({"amp_dtype": torch.float64}, ValueError, "amp_dtype must be"),
        ({"stopper": 0.1}, TypeError, "stopper must be a KLEarlyStopper, got float"),
        ({"advantage": None, "recompute_advantage": True}, ValueError, "recompute_advantage needs"),
        (
            {"stopper": KLEarlyStopper(0.1), "accumulate_grads": True},
            ValueError,
            "gradient accumulation exclude each other",
        ),
    ],
)
def test_a_wrong_option_fails_at_construction(
    options: dict[str, Any], error: type[Exception], message: str
):
    loss, gae, optimizer = make_parts()
    with pytest.raises(error, match=message):
        ppo_update(loss, optimizer, **({"advantage": gae} | options))


def test_a_loss_that_says_not_what_it_reads_is_refused():
    loss, _, optimizer = make_parts()
    bare = nn.Module()
    bare.loss = loss
    with pytest.raises(TypeError, match="Module has no in_keys"):
        PPOUpdate(TrainingStep(bare, optimizer))


@pytest.mark.parametrize("functional", [False, True])
def test_an_optimizer_that_lacks_parameters_of_the_loss_raises(functional: bool):
    actor, critic = make_networks()
    loss = DualClipPPOLoss(actor, critic, functional=functional)
    of_critic = r"reach 4 parameters .* critic_network\S+, critic_network.*loss.parameters\(\)"
    for optimizer, names in (
        (torch.optim.Adam([nn.Parameter(torch.zeros(1))]), "None of the optimizer's"),
        (torch.optim.Adam(actor.parameters()), of_critic),
    ):
        with pytest.raises(ValueError, match=names):
            PPOUpdate(TrainingStep(loss, optimizer))
    critic.requires_grad_(False)
    PPOUpdate(TrainingStep(DualClipPPOLoss(actor, critic), torch.optim.Adam(actor.parameters())))
    for parameter in (*actor.parameters(), *critic.parameters()):
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="None of the optimizer's parameters is a trainable"):
        PPOUpdate(
            TrainingStep(DualClipPPOLoss(actor, critic), torch.optim.Adam(actor.parameters()))
        )


def test_a_critic_without_a_loss_needs_no_optimizer():
    actor, critic = make_networks()
    for make in (DualClipPPOLoss, ClipPPOLoss, A2CLoss):
        loss = make(actor, critic, critic_coeff=0.0, functional=False)
        PPOUpdate(TrainingStep(loss, torch.optim.Adam(actor.parameters())))


def test_parameters_of_a_loss_that_are_of_neither_network_may_be_trained_elsewhere():
    loss, _, optimizer = make_parts()
    loss.predictor = nn.Linear(4, 1)
    PPOUpdate(TrainingStep(loss, optimizer))


def test_validate_changes_nothing(batches: list[TensorDictBase]):
    update = make_full_update()
    batch = batches[0].clone()
    before, state = batch.clone(), torch.random.get_rng_state()
    saved = parameters_of(update.step.loss)
    update.validate(batch)
    assert (batch == before).all()
    assert set(batch.keys(True)) == set(before.keys(True))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(parameters_of(update.step.loss), saved)
    normalizer = update.reward_normalizer
    assert normalizer is not None
    assert int(normalizer.count) == 0


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        ("action_log_prob", None, KeyError, "'action_log_prob' is not in the batch"),
        (("next", "done"), None, KeyError, "done"),
        (("next", "reward"), torch.full((3, 50, 1), math.nan), ValueError, "reward"),
        ("observation", torch.zeros(3, 50, 5), RuntimeError, "shapes cannot be multiplied"),
    ],
)
def test_validate_names_what_does_not_fit(
    batches: list[TensorDictBase], key: Any, value: Any, error: type[Exception], message: str
):
    update, batch = make_full_update(), batches[0].clone()
    if value is None:
        del batch[key]
    else:
        batch[key] = value
    with pytest.raises(error, match=message):
        update.validate(batch)


def test_validate_names_what_a_loss_reads_and_nobody_wrote(batches: list[TensorDictBase]):
    loss, _, optimizer = make_parts()
    with pytest.raises(KeyError, match="reads 'advantage', which the batch lacks") as error:
        PPOUpdate(TrainingStep(loss, optimizer)).validate(batches[0])
    assert "advantage=GAE" in str(error.value)
    own = Writes()
    own.in_keys = ["observation", "cost"]
    update = PPOUpdate(TrainingStep(own, torch.optim.SGD(own.parameters(), lr=0.1)))
    with pytest.raises(KeyError, match="Writes reads 'cost'"):
        update.validate(batches[0])


def test_validate_refuses_a_loss_without_gradient(batches: list[TensorDictBase]):
    loss = Writes()
    update = PPOUpdate(TrainingStep(loss, torch.optim.SGD(loss.parameters(), lr=0.1)))
    update.validate(batches[0])
    loss.forward = torch.no_grad()(loss.forward)
    with pytest.raises(ValueError, match="None of loss_any has a gradient"):
        update.validate(batches[0])
