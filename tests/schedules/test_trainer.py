"""A scheduler in torchrl's trainers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrl.checkpoint import Checkpoint

from ppokit import InterpSchedule, KLEarlyStopper, ParameterScheduler, StepSchedule
from tests.trust_region.training import ALL, BATCHES, FRAMES, Run

RATE = InterpSchedule([(0, 0.5), (BATCHES * FRAMES, 0.1)])
CLIP = StepSchedule([(0, 0.3), (FRAMES + 1, 0.2), (2 * FRAMES, 0.1)])


class Scheduled(Run):
    """A trainer with a scheduler, and a record of the values that each optimizer step used."""

    def __init__(self, kind: str = "PPOTrainer", **options: Any) -> None:
        super().__init__(kind=kind, **options)
        self.stopper = KLEarlyStopper(1e9)
        schedules: Any = {"lr": (self.optimizer, RATE), "clip_epsilon": (self.loss, CLIP)}
        self.scheduler = ParameterScheduler(schedules)
        #: frames when the batch was collected, learning rate and clip_epsilon
        self.used: list[tuple[int, float, float]] = []
        self.trainer.register_op("post_optim", self.after_step)

    def after_step(self) -> None:
        rate, clip = self.optimizer.param_groups[0]["lr"], float(self.loss.clip_epsilon)
        self.used.append((self.trainer.collected_frames, rate, clip))

    def stop_after(self, batches: int, path: Path) -> None:
        """End the run there, with its state in a file."""

        def stop(*_: Any) -> None:
            if self.trainer.collected_frames >= batches * FRAMES:
                torch.save(self.trainer.state_dict(), path)
                self.trainer.request_stop()

        self.trainer.register_op("post_steps_log", stop)

    def register(self) -> Scheduled:
        self.scheduler.register(self.trainer)
        return self

    def train(self) -> Scheduled:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", (FutureWarning, DeprecationWarning))  # as it saves
            self.trainer.train()
        return self


def expected(batches: range, frame_skip: int = 1) -> list[tuple[float, ...]]:
    size, found = FRAMES * frame_skip, []
    for batch in batches:
        rate, clip = RATE(batch * size), torch.tensor(CLIP(batch * size)).item()
        found += [((batch + 1) * size, rate, clip)] * ALL
    return found


# Of padded rows, valid frames count.
RUNS: list[Any] = [("PPOTrainer", x) for x in ({}, {"frame_skip": 4}, {"split_trajs": True})]


@pytest.mark.parametrize(("kind", "options"), [*RUNS, ("Trainer", {})], ids=str)
def test_each_update_uses_the_values_at_the_frames_before_its_batch(kind: str, options: Any):
    run = Scheduled(kind, **options).register().train()
    frame_skip = options.get("frame_skip", 1)
    assert run.used == expected(range(BATCHES), frame_skip)
    frames = BATCHES * FRAMES * frame_skip
    assert int(run.scheduler.frames) == run.trainer.collected_frames == frames


def test_a_scheduled_target_of_a_stopper_stops_later_batches():
    run = Scheduled()
    rate, target = StepSchedule([(0, 0.5)]), StepSchedule([(0, 1e9), (2 * FRAMES, 1e-12)])
    schedules: Any = {"target_kl": (run.stopper, target), "lr": (run.optimizer, rate)}
    del run.scheduler  # which drives the learning rate
    run.scheduler = ParameterScheduler(schedules)
    run.register()
    run.stopper.register(run.trainer)
    run.train()
    frames = [used[0] for used in run.used]
    counts = [frames.count((batch + 1) * FRAMES) for batch in range(BATCHES)]
    assert counts[:2] == [ALL, ALL]
    assert all(1 < count < ALL for count in counts[2:])


OPTIONS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "state_dict": lambda _: {},
    "save_trainer": lambda path: {"save_trainer_file": path},
    "checkpoint": lambda path: {"save_trainer_file": path, "checkpoint": Checkpoint()},
}


@pytest.mark.parametrize("how", OPTIONS)
def test_a_run_resumes_where_it_was_saved(how: str, tmp_path: Path):
    state, file = tmp_path / "state.pt", tmp_path / "trainer"
    run = Scheduled(**OPTIONS[how](file)).register()
    run.stop_after(2, state)
    run.train()
    other = Scheduled(**OPTIONS[how](tmp_path / "of the other")).register()
    if how == "state_dict":
        other.trainer.load_state_dict(torch.load(state, weights_only=True))
    else:
        other.trainer.load_from_file(file)
    assert int(other.scheduler.frames) == other.trainer.collected_frames == 2 * FRAMES
    other.train()
    assert run.used == expected(range(2))
    assert other.used == expected(range(2, BATCHES))


def test_a_scheduler_registered_late_starts_at_the_frames_of_the_trainer(tmp_path: Path):
    run = Scheduled()
    run.stop_after(2, tmp_path / "state.pt")
    run.train()
    later = Scheduled()
    later.trainer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert later.register().train().used == expected(range(2, BATCHES))


def test_register_raises_for_a_remote_learner_and_for_a_name_that_is_taken():
    run = Scheduled()
    run.trainer.learner_backend = "ray"
    with pytest.raises(RuntimeError, match=r"updates in another process \(learner_backend='ray'\)"):
        run.register()
    run = Scheduled().register()
    with pytest.raises(RuntimeError, match="parameter_scheduler is already registered"):
        run.register()
