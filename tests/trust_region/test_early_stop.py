"""The KL stop: rl8's rule exactly, and a replay buffer that is whole afterwards."""

from __future__ import annotations

import copy
import json
import math
import pickle
import warnings
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import (
    LazyTensorStorage,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    StalenessAwareSampler,
)
from torchrl.envs import GymEnv
from torchrl.modules import ProbabilisticActor
from torchrl.trainers import (
    DefaultOptimizationStepper,
    MixedPrecisionOptimizationStepper,
    ReplayBufferTrainer,
    Trainer,
)
from torchrl.trainers.algorithms import PPOTrainer

from ppokit import GAE, DualClipPPOLoss, KLEarlyStopper
from ppokit.functional import kl_estimate
from tests.blocks import make_actor, make_critic, make_minibatch

CASES = json.loads((Path(__file__).parents[1] / "data" / "rl8.json").read_text())["kl_early_stop"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_rl8s_recorded_runs(case: dict):
    target = case["target_kl_div"]
    stopper = None if target is None else KLEarlyStopper(target)
    log_ratios = iter(case["minibatch_log_ratio"])
    kls, applied = [], 0
    for _ in range(case["num_sgd_iters"]):
        for _ in range(case["num_minibatches"]):
            kl = kl_estimate(torch.full((8, 1), next(log_ratios))).mean()
            kls.append(kl)
            if stopper is not None and stopper.update(TensorDict({"kl": kl})):
                break
            applied += 1
        if stopper is not None and stopper.stopped:
            break
    assert len(kls) == case["minibatches_evaluated"]
    assert applied == case["optimizer_steps"]
    # the minibatch that stops the update is not applied, and is counted
    torch.testing.assert_close(
        torch.stack(kls).mean().item(), case["monitors/kl_div"], rtol=2e-5, atol=1e-6
    )


def test_every_recorded_run_was_seen():
    assert len(CASES) == 4


# -- the rule -------------------------------------------------------------------


@given(
    kl=st.floats(0, 10),
    target=st.floats(1e-4, 1),
    tolerance=st.floats(0.1, 10),
)
def test_stops_exactly_above_the_threshold(kl: float, target: float, tolerance: float):
    stopper = KLEarlyStopper(target, tolerance=tolerance)
    assert stopper.update(kl) == (kl > tolerance * target)


def test_stays_stopped_until_reset():
    stopper = KLEarlyStopper(0.01)
    assert [stopper.update(kl) for kl in (0.015, 0.016, 0.0)] == [False, True, True]
    stopper.reset()
    assert not stopper.stopped
    assert not stopper.update(0.0)


@pytest.mark.parametrize("kl", [math.nan, math.inf, -math.inf])
def test_a_kl_that_is_not_finite_stops_with_a_warning(kl: float):
    stopper = KLEarlyStopper(0.01)
    with pytest.warns(RuntimeWarning, match=r"The KL divergence is (nan|inf|-inf)"):
        assert stopper.update(torch.tensor(kl))


def test_several_values_are_averaged_by_weight():
    kl = torch.tensor([0.0, 0.02])
    assert not KLEarlyStopper(0.01, when="epoch").update(kl)
    assert KLEarlyStopper(0.01, when="epoch").update(kl, weight=torch.tensor([1, 9]))


@pytest.mark.parametrize(
    "value",
    [
        0.02,
        torch.tensor(0.02),
        TensorDict({"kl": 0.02}),
        {"kl": 0.02},
        MappingProxyType({"kl": torch.tensor(0.02), "note": "no number"}),
    ],
)
def test_takes_a_float_a_tensor_or_losses(value):
    assert KLEarlyStopper(0.01).update(value)


def test_half_precision_and_gradients_are_welcome():
    kl = torch.tensor(0.02, dtype=torch.bfloat16, requires_grad=True)
    assert KLEarlyStopper(0.01).update(kl)


def test_works_on_the_losses_of_a_real_loss():
    actor = make_actor()
    loss = DualClipPPOLoss(actor, make_critic())
    near = loss(make_minibatch(actor, 64, spread=0.01))
    far = loss(make_minibatch(actor, 64, spread=1.0))
    stopper = KLEarlyStopper(0.01)
    assert not stopper.update(near)
    assert stopper.update(far)


# -- as a TensorDictModule ----------------------------------------------------------


def test_in_a_sequential_and_with_nested_keys():
    stopper = KLEarlyStopper(0.01, kl_key=("loss", "kl"))
    double = TensorDictModule(lambda x: x * 2, ["half"], [("loss", "kl")])
    module = TensorDictSequential(double, stopper)
    assert module.out_keys[-1] == "kl_stop"
    assert not module(TensorDict({"half": torch.tensor(0.005)}))["kl_stop"]
    result = module(TensorDict({"half": torch.full((3,), 0.01)}, [3]))
    assert result["kl_stop"].tolist() == [True] * 3


def test_state_goes_on(tmp_path: Path):
    stopper = KLEarlyStopper(0.01)
    stopper.update(1.0)
    torch.save(stopper.state_dict(), tmp_path / "state.pt")
    fresh = KLEarlyStopper(0.01)
    fresh.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for other in (fresh, copy.deepcopy(stopper), pickle.loads(pickle.dumps(stopper))):
        assert other.stopped
        other.reset()
        assert stopper.stopped


def test_repr_says_what_it_does():
    assert repr(KLEarlyStopper(0.01)) == (
        "KLEarlyStopper(target_kl=0.01, tolerance=1.5, when='minibatch', stopped=False)"
    )


# -- the replay buffer ----------------------------------------------------------------


def make_buffer(**kwargs) -> ReplayBuffer:
    arguments = {"sampler": SamplerWithoutReplacement(), "batch_size": 10} | kwargs
    return ReplayBuffer(**{"storage": LazyTensorStorage(100)} | arguments)


def frames(start: int) -> TensorDict:
    return TensorDict({"x": torch.arange(start, start + 100)}, [100])


def epoch(buffer: ReplayBuffer) -> list[int]:
    return sorted(x for minibatch in buffer for x in minibatch["x"].tolist())


def stop_after(buffer: ReplayBuffer, stopper: KLEarlyStopper, minibatches: int) -> None:
    for done, _ in enumerate(buffer, start=1):
        if stopper.update(1.0 if done == minibatches else 0.0):
            break
    assert stopper.stopped


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("minibatches", [1, 3, 9, 10])
def test_the_next_batch_is_seen_whole(minibatches: int, prefetch: int):
    buffer = make_buffer(prefetch=prefetch)
    stopper = KLEarlyStopper(0.01, replay_buffer=buffer)
    for update in range(3):
        buffer.extend(frames(100 * update))
        stopper.reset()
        stop_after(buffer, stopper, minibatches)
        assert len(buffer) == 100  # the data is still there
    buffer.extend(frames(1000))
    assert epoch(buffer) == list(range(1000, 1100))


def test_a_sampler_without_a_permutation_keeps_its_state():
    """Its ``empty`` would drop what it keeps, such as priorities."""
    sampler = StalenessAwareSampler()
    buffer = make_buffer(sampler=sampler)
    buffer.extend(frames(0).set("policy_version", torch.zeros(100)))
    sampler.increment_consumer_version()
    stopper = KLEarlyStopper(0.01, replay_buffer=buffer)
    assert stopper.update(1.0)
    assert sampler.consumer_version == 1


def test_buffers_of_an_ensemble_are_left_whole():
    members = [make_buffer(batch_size=None) for _ in range(2)]
    for number, member in enumerate(members):
        member.extend(frames(1000 * number))
    buffer = ReplayBufferEnsemble(*members, batch_size=20, sample_from_all=True)
    stopper = KLEarlyStopper(0.01, replay_buffer=buffer)
    for _ in range(3):
        buffer.sample()
    assert stopper.update(1.0)
    seen = torch.cat([buffer.sample()["x"].flatten() for _ in range(10)])
    assert len(seen.unique()) == 200


def test_frames_that_were_fetched_ahead_are_dropped():
    buffer = make_buffer(sampler=RandomSampler(), prefetch=3)
    buffer.extend(frames(0))
    stopper = KLEarlyStopper(0.01, replay_buffer=buffer)
    buffer.sample()
    assert stopper.update(1.0)
    buffer.extend(frames(1000))
    assert all((buffer.sample()["x"] >= 1000).all() for _ in range(5))


def test_without_the_buffer_the_next_batch_is_seen_in_part():
    """What ``replay_buffer=`` is for."""
    buffer = make_buffer()
    buffer.extend(frames(0))
    stop_after(buffer, KLEarlyStopper(0.01), 3)
    buffer.extend(frames(0))
    assert len(epoch(buffer)) == 70


@pytest.mark.parametrize("drop_last", [False, True])
def test_ragged_last_minibatch(drop_last: bool):
    sampler = SamplerWithoutReplacement(drop_last=drop_last)
    buffer = make_buffer(sampler=sampler, batch_size=30)
    stopper = KLEarlyStopper(0.01, replay_buffer=buffer)
    buffer.extend(frames(0))
    stop_after(buffer, stopper, 2)
    assert len(epoch(buffer)) == (90 if drop_last else 100)


def test_random_sampling_is_left_alone():
    buffer = make_buffer(sampler=RandomSampler())
    buffer.extend(frames(0))
    stopper = KLEarlyStopper(0.01, when="epoch", replay_buffer=buffer)
    buffer.sample()
    assert stopper.update(1.0)
    assert buffer.sample()["x"].shape == (10,)


def test_per_epoch_is_asked_between_epochs():
    buffer = make_buffer()
    buffer.extend(frames(0))
    stopper = KLEarlyStopper(0.01, when="epoch", replay_buffer=buffer)
    for _ in buffer:
        pass
    assert not stopper.update(0.0)
    for _ in buffer:
        with pytest.raises(ValueError, match="in the middle of an epoch"):
            stopper.update(0.0)
        break


# -- bad input ------------------------------------------------------------------------


@pytest.mark.parametrize("target", [0.0, -0.1, math.nan])
def test_target_must_be_positive(target: float):
    with pytest.raises(ValueError, match=f"target_kl must be positive, got {target}"):
        KLEarlyStopper(target)


def test_tolerance_must_be_positive():
    with pytest.raises(ValueError, match="tolerance must be positive"):
        KLEarlyStopper(0.01, tolerance=0.0)


def test_unknown_when():
    with pytest.raises(ValueError, match="when must be 'minibatch' or 'epoch', got 'batch'"):
        KLEarlyStopper(0.01, when="batch")


def test_missing_key_names_what_is_there():
    with pytest.raises(KeyError, match=r"'kl' is not in the batch.*kl_approx.*loss_objective"):
        KLEarlyStopper(0.01).update(TensorDict({"kl_approx": 0.0, "loss_objective": 0.0}))
    with pytest.raises(KeyError, match=r"no KL at 'kl' among .*'note'.*kl_key='kl_approx'"):
        KLEarlyStopper(0.01).update({"kl_approx": 0.02, "note": "no number"})
    assert KLEarlyStopper(0.01, kl_key="kl_approx").update({"kl_approx": 0.02})
    assert KLEarlyStopper(0.01, kl_key=("a", "kl")).update({"a/kl": 0.02})  # of PPOUpdate
    with pytest.raises(KeyError, match="no KL at 'kl'"):
        KLEarlyStopper(0.01).update({"kl": None})
    assert KLEarlyStopper(0.01, kl_key=("a", "kl")).update({"a": {"kl": torch.tensor(0.02)}})


def test_empty_kl():
    with pytest.raises(ValueError, match="empty"):
        KLEarlyStopper(0.01).update(torch.zeros(0))


@pytest.mark.parametrize("weight", [1.0, [1.0], [1.0, -1.0], [0.0, 0.0]])
def test_bad_weight(weight: float | list[float]):
    given = torch.tensor(weight) if isinstance(weight, list) else weight
    with pytest.raises(ValueError, match=r"weight must be the number of valid frames.*\[2\]"):
        KLEarlyStopper(0.01).update(torch.zeros(2), weight=given)


# -- looking at every n-th minibatch --------------------------------------------------


def test_check_every_looks_at_that_minibatch_only():
    stopper = KLEarlyStopper(0.01, check_every=3)
    decisions = [stopper.update(kl) for kl in (9.0, math.nan, 0.0, 9.0, 9.0, 9.0, 0.0)]
    assert decisions == [False] * 5 + [True] * 2
    stopper.reset()
    assert [stopper.update(9.0) for _ in range(3)] == [False, False, True]


def test_check_every_counts_from_the_reset():
    stopper = KLEarlyStopper(0.01, check_every=2)
    stopper.update(9.0)
    stopper.reset()
    assert [stopper.update(9.0) for _ in range(2)] == [False, True]


def test_check_every_goes_on_from_its_state():
    stopper, fresh = (KLEarlyStopper(0.01, check_every=2) for _ in range(2))
    stopper.update(9.0)
    fresh.load_state_dict(stopper.state_dict())
    assert fresh.update(9.0)
    assert not stopper.stopped


def test_between_checks_nothing_is_read():
    stopper = KLEarlyStopper(0.01, check_every=2)
    unreadable = torch.zeros((), device="meta")
    assert not stopper.update(unreadable)
    assert not stopper.to("meta").stopped


@pytest.mark.gpu
@pytest.mark.parametrize("weight", [None, 64, torch.tensor(64)])
def test_one_transfer_per_check(weight: torch.Tensor | float | None):
    kl = torch.tensor(0.001, device="cuda")
    frames = weight.to("cuda") if isinstance(weight, torch.Tensor) else weight
    stopper = KLEarlyStopper(0.01)
    stopper.update(kl, weight=frames)
    with torch.profiler.profile() as profile:
        stopper.update(kl, weight=frames)
    names = [event.name for event in profile.events() or ()]
    assert sum("Memcpy DtoH" in name for name in names) == 1
    assert not any("Memcpy HtoD" in name for name in names)


@pytest.mark.parametrize("check_every", [0, -1, 1.5])
def test_check_every_must_be_positive(check_every: float):
    with pytest.raises(ValueError, match=f"check_every must be a whole .* got {check_every}"):
        KLEarlyStopper(0.01, check_every=check_every)


def test_what_is_no_group():
    with pytest.raises(TypeError, match=r"group must be a ProcessGroup .* got -100"):
        KLEarlyStopper(0.01, group=-100)


@pytest.mark.parametrize("weight", [[1.0, math.nan], [1.0, math.inf]])
def test_a_weight_that_is_not_finite(weight: list[float]):
    with pytest.raises(ValueError, match="weight must be the number of valid frames"):
        KLEarlyStopper(0.01).update(torch.zeros(2), weight=torch.tensor(weight))


def test_a_kl_of_no_frames_counts_for_nothing():
    kl = torch.tensor([math.nan, 0.01])
    assert not KLEarlyStopper(0.01).update(kl, weight=torch.tensor([0, 8]))


def test_a_warning_that_is_an_error_leaves_it_stopped():
    stopper = KLEarlyStopper(0.01)
    with pytest.raises(RuntimeWarning):  # as pytest runs here
        stopper.update(math.nan)
    assert stopper.stopped


def test_compiling_it_does_not_recompile_for_each_minibatch():
    stopper = torch.compile(KLEarlyStopper(0.01), backend="aot_eager")
    for kl in (0.0, 0.1, 0.0):  # both decisions, and what follows a stop
        stopper(TensorDict({"kl": torch.tensor(kl)}))
    with torch.compiler.set_stance("fail_on_recompile"):
        for kl in [0.0] * 10 + [0.1]:
            stopper.reset()
            stopper(TensorDict({"kl": torch.tensor(kl)}))


# -- inside torchrl's trainers --------------------------------------------------------

FRAMES, MINIBATCH, EPOCHS, BATCHES = 40, 8, 3, 3


class Run:
    """A trainer on CartPole, and a record of what it did."""

    def __init__(self, stopper: KLEarlyStopper | None = None, *, kind: str = "PPOTrainer") -> None:
        torch.manual_seed(0)
        self.actor = ProbabilisticActor(
            TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"]),
            in_keys=["logits"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        )
        self.loss = DualClipPPOLoss(self.actor, make_critic())
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=0.1, weight_decay=0.1)
        self.buffer = make_buffer(storage=LazyTensorStorage(FRAMES), batch_size=MINIBATCH)
        with warnings.catch_warnings():
            # "experimental", and torchrl's own use of its deprecated stages
            warnings.simplefilter("ignore")
            self.trainer = self.make_trainer(kind)
        if stopper is not None:
            stopper.register(self.trainer)
        self.log_prob_shift = 0.0
        #: for each batch, for each minibatch: its KL, and its observations
        self.kls: list[list[float]] = []
        self.seen: list[list[torch.Tensor]] = []
        self.start = parameters(self.loss)
        self.moved: list[bool] = []
        self.trainer.register_op("pre_optim_steps", self.before_batch)
        self.trainer.register_op("post_steps", self.after_batch)
        self.loss.register_forward_hook(self.after_loss)

    def make_collector(self) -> Collector:
        env = GymEnv("CartPole-v1", categorical_action_encoding=True)
        env.set_seed(0)
        return Collector(
            env,
            self.actor,
            frames_per_batch=FRAMES,
            total_frames=FRAMES * BATCHES,
            postproc=self.move_log_prob,
            auto_register_policy_transforms=False,
        )

    def make_trainer(self, kind: str) -> Trainer:
        options = {
            "collector": self.make_collector(),
            "total_frames": FRAMES * BATCHES,
            "frame_skip": 1,
            "optim_steps_per_batch": None,
            "loss_module": self.loss,
            "progress_bar": False,
            "num_epochs": EPOCHS,
        }
        if kind == "PPOTrainer":
            return PPOTrainer(
                **options,
                optimizer=self.optimizer,
                replay_buffer=self.buffer,
                enable_logging=False,
            )
        stepper = DefaultOptimizationStepper()
        if kind == "mixed precision":
            stepper = MixedPrecisionOptimizationStepper(self.optimizer)
        trainer = Trainer(**options, optimizer=self.optimizer, optimization_stepper=stepper)
        gae = GAE(gamma=0.99, lmbda=0.95, value_network=self.loss.critic_network)
        trainer.register_op("batch_process", gae)
        ReplayBufferTrainer(self.buffer, flatten_tensordicts=True, iterate=True).register(trainer)
        return trainer

    def move_log_prob(self, batch: TensorDict) -> TensorDict:
        return batch.set("action_log_prob", batch["action_log_prob"] - self.log_prob_shift)

    def before_batch(self) -> None:
        self.kls.append([])
        self.seen.append([])

    def after_loss(self, module: nn.Module, args: tuple, losses: TensorDict) -> None:
        self.kls[-1].append(losses["kl"].item())
        self.seen[-1].append(args[0]["observation"])

    def after_batch(self) -> None:
        self.moved.append(not torch.equal(parameters(self.loss), self.start))

    def train(self) -> Run:
        self.trainer.train()
        return self

    @property
    def steps(self) -> int:
        return max((int(state["step"]) for state in self.optimizer.state.values()), default=0)


def parameters(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in module.parameters()])


KINDS = ["PPOTrainer", "Trainer", "mixed precision"]
ALL = EPOCHS * FRAMES // MINIBATCH


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_by_the_first_minibatch_no_batch_moves_anything(kind: str):
    run = Run(KLEarlyStopper(1e-12, tolerance=1e-6), kind=kind)
    run.log_prob_shift = 0.1  # otherwise the KL of the first minibatch is 0
    run.train()
    assert [len(kls) for kls in run.kls] == [1] * BATCHES
    assert not any(run.moved)
    assert run.steps == 0


@pytest.mark.parametrize("kind", KINDS)
def test_never_stopped_it_is_as_if_there_were_no_stopper(kind: str):
    run, without = Run(KLEarlyStopper(1e9), kind=kind).train(), Run(kind=kind).train()
    assert torch.equal(parameters(run.loss), parameters(without.loss))
    assert run.kls == without.kls
    assert run.steps == without.steps == BATCHES * ALL


@pytest.mark.parametrize("kind", KINDS)
def test_in_between_it_ends_each_batch_where_its_kl_says(kind: str):
    stopper = KLEarlyStopper(0.01)
    run = Run(stopper, kind=kind).train()
    steps = 0
    for kls in run.kls:
        over = [kl > 0.015 for kl in kls]
        assert not any(over[:-1])
        assert over[-1] or len(kls) == ALL
        steps += len(kls) - over[-1]
    assert run.steps == steps
    assert BATCHES < steps < BATCHES * ALL
    assert not stopper.stopped


def test_after_each_epoch():
    run = Run(KLEarlyStopper(0.001, when="epoch")).train()
    for kls in run.kls:
        means = torch.tensor(kls).reshape(-1, FRAMES // MINIBATCH).mean(1)  # whole epochs
        assert (means[:-1] <= 0.0015).all()
        assert means[-1] > 0.0015 or len(means) == EPOCHS
    assert run.steps == sum(len(kls) for kls in run.kls) < BATCHES * ALL


@pytest.mark.parametrize("buffer", [None, make_buffer()], ids=["its buffer", "another buffer"])
@pytest.mark.parametrize("kind", ["PPOTrainer", "Trainer"])
def test_the_batch_after_a_stop_is_seen_whole(kind: str, buffer: ReplayBuffer | None):
    """That is, if the stopper knows the trainer's buffer, and it finds it by itself."""
    stopper = KLEarlyStopper(1e-9, replay_buffer=buffer)
    run = Run(stopper, kind=kind)

    def never_again() -> None:
        stopper.target_kl = 1e9

    run.trainer.register_op("post_steps", never_again)
    run.train()
    assert len(run.kls[0]) < ALL
    if buffer is not None:
        assert len(run.kls[1]) < ALL
        return
    for minibatches in run.seen[1:]:
        for frames in torch.cat(minibatches).reshape(EPOCHS, FRAMES, 4):
            assert len(frames.unique(dim=0)) == FRAMES


def test_losses_that_no_step_follows_are_not_counted():
    run = Run(KLEarlyStopper(0.5))
    far = make_minibatch(run.actor, 8, spread=9.0)

    def evaluate(batch: TensorDict) -> None:
        with torch.no_grad():
            assert run.loss(far.clone())["kl"] > 1

    for stage in ("pre_epoch_log", "post_optim_log"):
        run.trainer.register_op(stage, evaluate)
    run.train()
    assert run.steps == BATCHES * ALL


class Losses(nn.Module):
    """A loss whose KL is set from outside."""

    kl = 0.0

    def forward(self, minibatch: TensorDictBase) -> TensorDict:
        return TensorDict({"kl": torch.tensor(self.kl)})


class Hooks:
    """What a stopper asks of a trainer, and its hooks by their stages."""

    optimization_stepper = None

    def __init__(self) -> None:
        self.loss_module = Losses()
        self.optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
        self.at: dict[str, Any] = {}
        self._modules: dict[str, Any] = {}

    def register_op(self, stage: str, hook: Any) -> None:
        self.at[stage] = hook

    def register_module(self, name: str, module: Any) -> None:
        self._modules[name] = module


@pytest.mark.parametrize("key", ["auto", "valid"])
def test_frames_weigh_in(key: str):
    """Minibatches of an epoch count by their valid frames, under the loss's mask key."""
    trainer, stopper = Hooks(), KLEarlyStopper(1.0, when="epoch")
    trainer.loss_module.loss_mask_key = key
    stopper.register(trainer)

    def minibatch(kl: float, frames: int) -> None:
        mask = torch.arange(8) < frames
        batch = TensorDict({}, [8]).set(("collector", "mask") if key == "auto" else key, mask)
        trainer.at["process_optim_batch"](batch)
        trainer.loss_module.kl = kl
        trainer.loss_module(batch)

    minibatch(0.0, 2)
    minibatch(2.0, 6)
    trainer.at["post_epoch"]()
    assert not stopper.stopped  # 12 / 8, against 1.5
    stopper.tolerance = 1.49
    minibatch(1.4951, 6)
    trainer.at["post_epoch"]()
    assert stopper.stopped


@pytest.mark.parametrize("when", ["minibatch", "epoch"])
def test_a_run_that_was_broken_off_goes_on_with_a_new_batch(when: str):
    run = Run(KLEarlyStopper(1.0, when=when))
    run.log_prob_shift = 9.0

    def break_off() -> None:
        if run.log_prob_shift:
            raise KeyboardInterrupt

    run.trainer.register_op("post_optim", break_off)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert run.kls[0][0] > 100
    run.log_prob_shift = 0.0
    run.trainer.collector = run.make_collector()  # torchrl 0.15 has shut down the other
    run.train()
    # Without a stop the buffer is left as torchrl leaves it: the broken epoch's rest comes first.
    assert [len(kls) for kls in run.kls] == [1, ALL - (when == "epoch"), ALL]


def test_the_trainer_saves_it(tmp_path: Path):
    stopper, fresh = KLEarlyStopper(0.01), KLEarlyStopper(0.01)
    run, other = Run(stopper), Run(fresh)
    stopper.update(1.0)
    torch.save(run.trainer.state_dict(), tmp_path / "trainer.pt")
    other.trainer.load_state_dict(torch.load(tmp_path / "trainer.pt", weights_only=False))
    assert fresh.stopped


def test_a_stepper_that_accumulates_is_refused():
    run = Run()
    stepper = MixedPrecisionOptimizationStepper(run.optimizer, gradient_accumulation_steps=2)
    run.trainer.optimization_stepper = stepper
    with pytest.raises(ValueError, match="accumulation exclude each other"):
        KLEarlyStopper(0.01).register(run.trainer)


def test_a_loss_whose_output_cannot_be_read_is_refused():
    run = Run()
    run.trainer.loss_module = lambda batch: run.loss(batch)
    with pytest.raises(TypeError, match=r"no nn\.Module"):
        KLEarlyStopper(0.01).register(run.trainer)


def test_without_an_optimizer_to_hold_back_it_is_refused():
    run = Run()
    run.trainer.optimizer = None
    with pytest.raises(ValueError, match="no optimiser"):
        KLEarlyStopper(0.01).register(run.trainer)


def test_a_second_one_of_the_same_name_is_refused():
    run = Run(KLEarlyStopper(0.01))
    with pytest.raises(RuntimeError, match="kl_early_stopper is already registered"):
        KLEarlyStopper(0.01).register(run.trainer)
