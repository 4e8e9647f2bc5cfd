"""A scheduler inside torchrl's trainers."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.checkpoint import Checkpoint
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import GymEnv
from torchrl.modules import ProbabilisticActor
from torchrl.trainers import ReplayBufferTrainer, Trainer
from torchrl.trainers.algorithms import PPOTrainer

from ppokit import (
    GAE,
    DualClipPPOLoss,
    InterpSchedule,
    KLEarlyStopper,
    ParameterScheduler,
    StepSchedule,
)
from tests.blocks import make_critic

FRAMES, MINIBATCH, EPOCHS, BATCHES = 40, 8, 2, 4
STEPS = EPOCHS * FRAMES // MINIBATCH  # of the optimiser, for a batch
RATE = InterpSchedule.linear(0.5, 0.1, frames=BATCHES * FRAMES)
CLIP = StepSchedule([(0, 0.3), (FRAMES + 1, 0.2), (3 * FRAMES, 0.1)])
ENTROPY = InterpSchedule.cosine(0.1, 0.0, frames=BATCHES * FRAMES)


class Run:
    """A trainer on CartPole, its scheduler, and a record of what each optimiser step used."""

    def __init__(
        self,
        kind: str = "PPOTrainer",
        *,
        frame_skip: int = 1,
        split_trajs: bool = False,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.actor = ProbabilisticActor(
            TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"]),
            in_keys=["logits"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        )
        self.loss = DualClipPPOLoss(self.actor, make_critic(), clip_value=True)
        self.optimizer = torch.optim.SGD(self.loss.parameters(), lr=9.0)
        self.scheduler = ParameterScheduler(
            {
                "lr": (self.optimizer, RATE),
                "clip_epsilon": (self.loss, CLIP),
                "entropy_coeff": (self.loss, ENTROPY),
            }
        )
        with warnings.catch_warnings():
            # "experimental", and torchrl's own use of its deprecated stages
            warnings.simplefilter("ignore")
            self.trainer = self.make_trainer(kind, frame_skip, split_trajs, options)
        #: for each optimiser step: frames when its batch was collected, and the values in use
        self.used: list[tuple[int, float, float, float, float]] = []
        self.trainer.register_op("post_optim", self.after_step)

    def make_trainer(
        self, kind: str, frame_skip: int, split_trajs: bool, options: dict[str, Any]
    ) -> Trainer:
        env = GymEnv("CartPole-v1", categorical_action_encoding=True, frame_skip=frame_skip)
        env.set_seed(0)
        options |= {
            "collector": Collector(
                env,
                self.actor,
                frames_per_batch=FRAMES,
                total_frames=FRAMES * BATCHES,
                split_trajs=split_trajs,
            ),
            "total_frames": FRAMES * BATCHES * frame_skip,
            "frame_skip": frame_skip,
            "optim_steps_per_batch": None,
            "loss_module": self.loss,
            "optimizer": self.optimizer,
            "num_epochs": EPOCHS,
            "progress_bar": False,
        }
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(FRAMES),
            sampler=SamplerWithoutReplacement(),
            batch_size=MINIBATCH,
        )
        if kind == "PPOTrainer":
            return PPOTrainer(**options, replay_buffer=buffer, enable_logging=False)
        trainer = Trainer(**options)
        gae = GAE(gamma=0.99, lmbda=0.95, value_network=self.loss.critic_network)
        trainer.register_op("batch_process", gae)
        ReplayBufferTrainer(buffer, flatten_tensordicts=True, iterate=True).register(trainer)
        return trainer

    def after_step(self) -> None:
        loss, rate = self.loss, self.optimizer.param_groups[0]["lr"]
        coefficients = (loss.clip_epsilon, loss.clip_value, loss.entropy_coeff)
        self.used.append((self.trainer.collected_frames, rate, *map(float, coefficients)))

    def stop_after(self, batches: int, path: Path) -> None:
        """End the run there, with its state in a file."""

        def stop(*_: Any) -> None:
            if self.trainer.collected_frames >= batches * FRAMES:
                torch.save(self.trainer.state_dict(), path)
                self.trainer.request_stop()

        self.trainer.register_op("post_steps_log", stop)

    def register(self) -> Run:
        self.scheduler.register(self.trainer)
        return self

    def train(self) -> Run:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", (FutureWarning, DeprecationWarning))  # as it saves
            self.trainer.train()
        return self


def used_at(frames: int) -> tuple[float, ...]:
    """The values of an update that begins with the scheduler at so many frames."""
    values = RATE(frames), CLIP(frames), CLIP(frames), ENTROPY(frames)
    return values[0], *(torch.tensor(value).item() for value in values[1:])


def expected(batches: range, frame_skip: int = 1) -> list[tuple[float, ...]]:
    size = FRAMES * frame_skip
    return [((batch + 1) * size, *used_at(batch * size)) for batch in batches for _ in range(STEPS)]


# -- values ----------------------------------------------------------------------


@pytest.mark.parametrize("frame_skip", [1, 4])
@pytest.mark.parametrize("kind", ["PPOTrainer", "Trainer"])
def test_each_update_uses_the_values_at_the_frames_before_its_batch(kind: str, frame_skip: int):
    run = Run(kind, frame_skip=frame_skip).register().train()
    assert run.used == expected(range(BATCHES), frame_skip)
    total = BATCHES * FRAMES * frame_skip
    assert int(run.scheduler.frames) == run.trainer.collected_frames == total
    assert len({used[1] for used in run.used}) == (BATCHES if frame_skip == 1 else 2)


def test_only_valid_frames_count():
    """Trajectories of different lengths, padded."""
    run = Run(split_trajs=True).register().train()
    assert run.used == expected(range(BATCHES))
    assert int(run.scheduler.frames) == BATCHES * FRAMES


def test_it_is_the_learning_rate_that_the_parameters_feel():
    run = Run()
    del run.scheduler
    rate = StepSchedule([(0, 0.1), (2 * FRAMES, 0.0)])
    ParameterScheduler({"lr": (run.optimizer, rate)}).register(run.trainer)
    weights = [parameters(run.loss)]
    run.trainer.register_op("post_steps", lambda: weights.append(parameters(run.loss)))
    run.train()
    moved = [not torch.equal(a, b) for a, b in itertools.pairwise(weights)]
    assert moved == [True, True, False, False]


def parameters(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in module.parameters()])


def test_beside_a_stopper_whose_target_it_drives():
    run = Run()
    del run.scheduler
    stopper = KLEarlyStopper(1e9)
    target = StepSchedule([(0, 1e9), (2 * FRAMES, 1e-12)])
    rate = StepSchedule.constant(0.5)
    scheduler = ParameterScheduler({"target_kl": (stopper, target), "lr": (run.optimizer, rate)})
    scheduler.register(run.trainer)
    stopper.register(run.trainer)
    run.train()
    frames = [used[0] for used in run.used]
    counts = [frames.count((batch + 1) * FRAMES) for batch in range(BATCHES)]
    assert counts[:2] == [STEPS, STEPS]
    assert all(1 < count < STEPS for count in counts[2:])


# -- stopping, and going on ---------------------------------------------------------


OPTIONS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "state_dict": lambda _: {},
    "save_trainer": lambda path: {"save_trainer_file": path},
    "checkpoint": lambda path: {"save_trainer_file": path, "checkpoint": Checkpoint()},
}


@pytest.mark.parametrize("how", OPTIONS)
def test_a_run_goes_on_where_it_was_saved(how: str, tmp_path: Path):
    state, file = tmp_path / "state.pt", tmp_path / "trainer"
    run = Run(**OPTIONS[how](file)).register()
    run.stop_after(2, state)
    run.train()
    other = Run(**OPTIONS[how](tmp_path / "of the other")).register()
    if how == "state_dict":
        other.trainer.load_state_dict(torch.load(state, weights_only=True))
    else:
        other.trainer.load_from_file(file)
    assert int(other.scheduler.frames) == other.trainer.collected_frames == 2 * FRAMES
    assert other.scheduler.values == run.scheduler.values
    other.train()
    assert run.used == expected(range(2))
    assert other.used == expected(range(2, BATCHES))


def test_registered_late_it_goes_to_where_the_trainer_is(tmp_path: Path):
    run = Run()
    run.stop_after(2, tmp_path / "state.pt")
    run.train()
    later = Run()
    later.trainer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    later.register().train()
    assert later.used == expected(range(2, BATCHES))


# -- what is refused ------------------------------------------------------------------


def test_a_trainer_that_updates_elsewhere():
    run = Run()
    run.trainer.learner_backend = "ray"
    with pytest.raises(RuntimeError, match=r"updates in another process \(learner_backend='ray'\)"):
        run.register()
    assert "parameter_scheduler" not in run.trainer.state_dict()


def test_a_name_that_is_taken():
    run = Run().register()
    with pytest.raises(RuntimeError, match="parameter_scheduler is already registered"):
        run.register()
    other = ParameterScheduler({"dual": (Holder(), StepSchedule.constant(1.0))})
    other.register(run.trainer, name="another")
    assert {"parameter_scheduler", "another"} <= run.trainer.state_dict().keys()


class Holder:
    dual = 0.0


def test_a_scheduler_of_torchs_in_the_trainer_is_a_second_writer():
    run = Run()
    theirs = torch.optim.lr_scheduler.StepLR(run.optimizer, 1)
    with pytest.raises(ValueError, match=r"Another learning-rate scheduler drives this SGD"):
        run.register().train()
    assert theirs.last_epoch == 0
