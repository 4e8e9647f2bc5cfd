"""Environments in processes of their own that die, hang or raise, for real."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from torchrl.modules import OneHotCategorical

from ppokit import GymCollector
from tests.collectors.test_collector import make_policy

# gymnasium reports the exception of a process as warnings, too
reported = pytest.mark.filterwarnings("ignore::UserWarning")


def hang() -> None:
    time.sleep(1000)


def hang_for_good() -> None:
    """As a loop in C does, from which no signal that Python handles gets out."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hang()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    sys.exit(3)


def fail() -> None:
    raise OSError("the robot is gone")


def end_of_file() -> None:
    raise EOFError("of the environment's own")


class OfTwo(Exception):  # noqa: N818
    """Takes more arguments than it passes on, as many libraries' do."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


def fail_in_two_words() -> None:
    raise OfTwo("the robot", "it is gone")


def fail_unheard_of() -> None:
    class Local(Exception):  # noqa: N818
        """Pickle does not find it."""

    raise Local("the robot is gone")


class Breaks(gym.Wrapper):
    """CartPole, of which the second does something else in its tenth step or its first reset."""

    def __init__(self, act: Callable[[], None], when: str, number: int) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.act = act if number == 1 else None
        self.when, self.steps = when, 0

    def reset(self, **options: Any) -> Any:
        if self.act and self.when == "reset" and options.get("seed") is None:
            self.act()
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.act and self.when == "step" and self.steps == 10:
            self.act()
        return super().step(action)


def collector_of(act: Callable[[], None], when: str = "step", **options: Any) -> GymCollector:
    return GymCollector(
        [partial(Breaks, act, when, number) for number in range(2)],
        make_policy(4, 2, OneHotCategorical),
        frames_per_batch=60,
        **{"vectorization": "async"} | options,
    )


def children() -> list[Any]:
    """Return the processes of environments, in their order."""
    processes = multiprocessing.active_children()
    return sorted((p for p in processes if "VectorEnv" in p.name), key=lambda p: p.name)


slow = pytest.mark.slow


@reported
@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (die, RuntimeError, r"environment\(s\) \[1\] ended during step\(\) with exit code -9"),
        pytest.param(leave, RuntimeError, r"with exit code 3", marks=slow),
        pytest.param(fail, OSError, "^the robot is gone$", marks=slow),
        pytest.param(end_of_file, EOFError, "^of the environment's own$", marks=slow),
        (fail_in_two_words, RuntimeError, "^OfTwo: the robot: it is gone$"),
        pytest.param(fail_unheard_of, RuntimeError, "^Local: the robot is gone$", marks=slow),
    ],
)
def test_what_becomes_of_a_process_is_said(
    act: Callable[[], None], error: type[Exception], message: str
):
    collector = collector_of(act)
    with pytest.raises(error, match=message):
        collector.rollout()
    assert collector.closed
    assert not children()


@pytest.mark.parametrize("act", [pytest.param(hang, marks=slow), hang_for_good])
def test_an_environment_that_hangs_is_named_and_ended(act: Callable[[], None]):
    collector = collector_of(act, step_timeout=2.0)
    with pytest.raises(TimeoutError, match=r"\[1\] did not return from step\(\) within .*2.0 sec"):
        collector.rollout()
    assert collector.closed
    assert not children()


@slow
def test_a_reset_that_hangs():
    with pytest.raises(TimeoutError, match=r"\[1\] did not return from reset\(\)"):
        collector_of(hang, "reset", step_timeout=2.0)


@slow
def test_a_process_that_dies_between_batches():
    collector = collector_of(hang_for_good, "never")
    collector.rollout()
    children()[1].kill()
    with pytest.raises(RuntimeError, match="with exit code -9"):
        collector.rollout()
    assert not children()


def test_a_process_that_died_does_not_keep_the_others_from_being_closed():
    collector = collector_of(hang_for_good, "never")
    collector.rollout()
    children()[1].kill()
    collector.shutdown()
    assert not children()


@slow
def test_with_time_enough_nothing_changes():
    batches = []
    for limit in (None, 600.0):
        with collector_of(hang, "never", step_timeout=limit) as collector:
            collector.set_seed(0)
            torch.manual_seed(0)
            batches.append(collector.rollout())
    assert torch.equal(batches[0]["next", "observation"], batches[1]["next", "observation"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vectorization": "serial"}, "step_timeout=2.0 needs vectorization='async'"),
        ({"vectorization": "sync"}, "needs vectorization='async'"),
        ({"step_timeout": 0.0}, "step_timeout must be positive seconds, or None, got 0.0"),
        ({"step_timeout": math.nan}, "must be positive seconds"),
    ],
)
def test_options(options: dict[str, Any], message: str):
    options = {"vectorization": "async", "step_timeout": 2.0} | options
    with pytest.raises(ValueError, match=message):
        GymCollector(
            "CartPole-v1", make_policy(4, 2, OneHotCategorical), frames_per_batch=4, **options
        )


SCRIPT = """
from ppokit import GymCollector
from tests.collectors.test_collector import make_policy
from torchrl.modules import OneHotCategorical
import multiprocessing
multiprocessing.set_start_method("spawn", force=True)
policy = make_policy(4, 2, OneHotCategorical)
GymCollector("CartPole-v1", policy, frames_per_batch=4, num_envs=2, vectorization="async")
"""


@pytest.mark.slow
def test_a_script_without_its_guard_is_told_of_it(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 1
    assert "needs `if __name__ == '__main__':`" in run.stderr.splitlines()[-1]
