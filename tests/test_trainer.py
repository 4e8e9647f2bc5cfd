"""All blocks in torchrl's trainers: PPOTrainer, and a Trainer of hooks."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import GymEnv, SerialEnv
from torchrl.modules import ValueOperator
from torchrl.objectives.value import GAE as TorchRLGAE  # noqa: N811
from torchrl.record import CSVLogger
from torchrl.trainers import LogScalar, ReplayBufferTrainer, Trainer
from torchrl.trainers.algorithms import OnPolicyTrainer, PPOTrainer

from ppokit import (
    GAE,
    DualClipPPOLoss,
    GymCollector,
    InterpSchedule,
    KLEarlyStopper,
    ParameterScheduler,
    RewardNormalizer,
    TensorActor,
    TrainingStep,
)
from ppokit.plotting import read_run
from tests.blocks import categorical_actor
from tests.marks import slow

FRAMES, BATCHES, EPOCHS = 64, 3, 4

# torchrl's trainers are experimental, and use stages of their own that are deprecated.
pytestmark = pytest.mark.filterwarnings("ignore")


class ComparedGAE(GAE):
    """Compares each estimate with torchrl's."""

    differences: list[float]
    useless: int = 0  # batches whose truncated is True everywhere

    def forward(self, tensordict: TensorDictBase, **kwargs: Any) -> TensorDictBase:  # pyright: ignore
        theirs = TorchRLGAE(gamma=0.99, lmbda=0.95, value_network=self.value_network)
        expected = theirs(tensordict.clone())
        self.useless += bool(tensordict["next", "truncated"].all())
        found: Any = super().forward(tensordict, **kwargs)
        keys = ("advantage", "value_target")
        self.differences.append(max(float((found[k] - expected[k]).abs().max()) for k in keys))
        return found


class Run:
    """Everything that a trainer is made of, and the trainer."""

    def __init__(self, kind: str, total_frames: int = FRAMES * BATCHES, **options: Any) -> None:
        torch.manual_seed(0)
        self.actor = categorical_actor(nn.Linear(4, 2))
        critic = ValueOperator(nn.Linear(4, 1), ["observation"])
        self.normalizer = RewardNormalizer(0.99)
        frames: Any = {"frames_per_batch": FRAMES, "total_frames": total_frames}
        if kind == "GymCollector":
            self.collector: Any = GymCollector(
                "CartPole-v1",
                self.actor,
                **frames,
                num_envs=2,
                categorical_action_encoding=True,
                step_count=True,
                episode_reward=True,
                postproc=self.normalizer,
            )
        else:
            make_env = lambda: GymEnv("CartPole-v1", categorical_action_encoding=True)  # noqa: E731
            self.collector = Collector(
                SerialEnv(2, make_env),
                TensorActor(self.actor),
                **frames,
                postproc=self.normalizer,
                auto_register_policy_transforms=False,
            )
        self.loss = DualClipPPOLoss(self.actor, critic, dual_clip=5.0)
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=1e-2)
        self.gae = ComparedGAE(gamma=0.99, lmbda=0.95, value_network=critic)
        self.gae.differences = []
        self.buffer = ReplayBuffer(
            storage=LazyTensorStorage(FRAMES), sampler=SamplerWithoutReplacement(), batch_size=16
        )
        step = options.pop("step", None)
        self.stopper = KLEarlyStopper(
            options.pop("target_kl", 10.0), when=options.pop("when", "minibatch")
        )
        self.trainer = self.make_trainer(total_frames, options)
        if step is None:
            self.stopper.register(self.trainer)
        else:
            own = {"max_grad_norm": 0.5, "stopper": self.stopper}
            self.step = TrainingStep(self.loss, self.optimizer, **own, **step)
            self.step.register(self.trainer)
        schedule = InterpSchedule([(0, 1e-2), (1000, 0.0)])
        self.scheduler = ParameterScheduler({"lr": (self.optimizer, schedule)})
        self.scheduler.register(self.trainer)
        self.trainer.register_module("reward_normalizer", self.normalizer)
        self.frames: list[int] = []
        self.trainer.register_op("batch_process", self.count)

    def count(self, batch: TensorDictBase) -> TensorDictBase:
        self.frames.append(batch.numel())
        return batch

    def make_trainer(self, total_frames: int, options: dict[str, Any]) -> Trainer:
        shared: Any = {
            "collector": self.collector,
            "total_frames": total_frames,
            "frame_skip": 1,
            "loss_module": self.loss,
            "optimizer": self.optimizer,
            "num_epochs": EPOCHS,
            "progress_bar": False,
            "clip_norm": 0.5,
            "seed": 0,
        }
        if options.pop("plain", False):
            trainer = Trainer(**shared, optim_steps_per_batch=FRAMES // 16)
            trainer.register_op("batch_process", self.gae)
            buffer = ReplayBufferTrainer(self.buffer, flatten_tensordicts=True, iterate=True)
            buffer.register(trainer)
            return trainer
        return PPOTrainer(
            **shared, optim_steps_per_batch=None, replay_buffer=self.buffer, gae=self.gae, **options
        )


kinds = pytest.mark.parametrize("kind", ["GymCollector", "Collector"])


@kinds
def test_ppo_trainer_with_every_block(kind: str):
    run = Run(kind)
    alone, scaled = RewardNormalizer(0.99), []

    def check_rewards(batch: TensorDictBase) -> TensorDictBase:
        raw = batch["next", "raw_reward"]
        again = alone(batch.exclude(("next", "raw_reward")).set(("next", "reward"), raw.clone()))
        scaled.append(torch.equal(again["next", "reward"], batch["next", "reward"]))
        return batch

    run.trainer.register_op("batch_process", check_rewards)
    before = [p.clone() for p in run.loss.parameters()]
    run.trainer.train()
    assert run.frames == [FRAMES] * BATCHES
    assert len(run.gae.differences) == BATCHES * EPOCHS
    assert run.gae.useless == BATCHES * (EPOCHS - 1)
    assert max(run.gae.differences) < 1e-5
    assert all(not torch.equal(a, b) for a, b in zip(before, run.loss.parameters(), strict=True))
    assert run.normalizer.count == run.scheduler.frames == FRAMES * BATCHES
    assert scaled == [True] * BATCHES


@kinds
def test_a_trainer_resumes_with_the_state_of_every_block(kind: str, tmp_path: Path):
    run, fresh = Run(kind), Run(kind)

    def save() -> None:  # torchrl's collector has no state once it is shut down
        if len(run.frames) == 2:
            torch.save(run.trainer.state_dict(), tmp_path / "state.pt")

    run.trainer.register_op("post_steps", save)
    run.trainer.train()
    with torch.no_grad():
        for parameter in fresh.loss.parameters():
            parameter.fill_(0.5)
    fresh.trainer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert fresh.trainer.collected_frames == fresh.normalizer.count == 2 * FRAMES
    assert fresh.normalizer.scale != 1
    assert fresh.scheduler.frames == 2 * FRAMES
    fresh.trainer.train()
    assert fresh.frames == [FRAMES] * (BATCHES - 2)


COMPILE = {"backend": "aot_eager"}


@pytest.mark.parametrize(
    ("compile", "plain", "target_kl", "when"),
    [
        (False, False, 10.0, "minibatch"),
        slow(COMPILE, False, 2e-4, "minibatch"),
        (False, True, 2e-4, "epoch"),
        slow(COMPILE, True, 2e-4, "epoch"),
    ],
)
def test_a_training_step_equals_the_lines_of_the_trainer(
    compile: Any, plain: bool, target_kl: float, when: str
):
    options = {"plain": plain, "target_kl": target_kl, "when": when}
    runs = []
    for step in ({"compile": compile}, None):
        runs.append(Run("GymCollector", step=step, **options))
        runs[-1].trainer.train()
    run, expected = runs
    for a, b in zip(run.loss.parameters(), expected.loss.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert run.trainer._optim_count == expected.trainer._optim_count
    if target_kl < 1:
        assert run.trainer._optim_count < BATCHES * EPOCHS * FRAMES // 16
    path = run.step.extra_repr()
    assert path.endswith("eager" if compile is False else "compiled")


def test_a_training_step_resumes_with_its_trainer(tmp_path: Path):
    run, fresh = (Run("GymCollector", step={}) for _ in range(2))
    run.trainer.train()
    torch.save(run.trainer.state_dict(), tmp_path / "state.pt")
    fresh.trainer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for a, b in zip(run.loss.parameters(), fresh.loss.parameters(), strict=True):
        assert torch.equal(a, b)
        states = run.optimizer.state[a], fresh.optimizer.state[b]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_trainer_of_another_loss_raises():
    run, other = (Run("GymCollector", step={}) for _ in range(2))
    with pytest.raises(ValueError, match="different losses or optimizers"):
        TrainingStep(other.loss, other.optimizer).register(Run("GymCollector").trainer)
    with pytest.raises(ValueError, match="register the step only"):
        run.stopper.register(run.trainer)
    with pytest.raises(ValueError, match="optimization_stepper"):
        TrainingStep(run.loss, run.optimizer).register(run.trainer)


# torchrl 0.15 has two levels, the first as 0.14 logs.
LEVELS: list[dict[str, Any]] = [{}]
if "telemetry" in inspect.signature(OnPolicyTrainer.__init__).parameters:
    LEVELS = [{"telemetry": "minimal"}, {"telemetry": "standard"}]


@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_loggers_read_what_the_collector_writes(level: dict[str, str], tmp_path: Path):
    logger = CSVLogger("run", log_dir=str(tmp_path))
    options = {"logger": logger, "log_interval": 1, "episode_reward_key": "episode_reward"} | level
    run = Run("GymCollector", **options)
    steps = LogScalar(("next", "step_count"), "length", reduction="max")
    run.trainer.register_op("pre_steps_log", steps)
    run.trainer.train()
    rows = read_run(tmp_path)
    assert [row["total_frames"] for row in rows] == [FRAMES, 2 * FRAMES, 3 * FRAMES]
    assert all(5 <= row["length"] <= 96 for row in rows)
    if level != {"telemetry": "standard"}:
        assert all("r_total" in row for row in rows)
        return
    for row in rows:
        frames = row["training/frames/collected"]
        assert row["training/collector/frames"] == frames == row["total_frames"]
        assert row["training/collector/stepped_frames"] == frames
        assert 0 < row["training/optimizer/learning_rate"] <= 1e-2
        assert row["training/rewards/mean"] > 0
    assert sum(row["training/episodes/completed"] for row in rows) > 2
