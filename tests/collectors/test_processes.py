"""Environments in processes of their own that die, hang or raise."""

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
from torchrl.modules import OneHotCategorical

from ppokit import GymCollector
from tests.collectors.test_collector import make_policy

# gymnasium also reports the exception of a process as warnings
reported = pytest.mark.filterwarnings("ignore::UserWarning")
slow = pytest.mark.slow


def hang() -> None:
    time.sleep(1000)


def hang_for_good() -> None:
    """Ignore SIGTERM, as a loop in C does."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hang()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    sys.exit(3)


def fail() -> None:
    raise OSError("the robot is gone")


class OfTwo(Exception):  # noqa: N818
    """Takes more arguments than it passes on, so that pickle cannot rebuild it."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


def fail_in_two_words() -> None:
    raise OfTwo("the robot", "it is gone")


class Breaks(gym.Wrapper):
    """CartPole; the second one acts in its tenth step or its first reset."""

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


@reported
@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        pytest.param(die, RuntimeError, r"\[1\] ended during step\(\) with exit code -9"),
        pytest.param(leave, RuntimeError, r"with exit code 3", marks=slow),
        pytest.param(fail, OSError, "^the robot is gone$", marks=slow),
        pytest.param(fail_in_two_words, RuntimeError, "^OfTwo: the robot: it is gone$", marks=slow),
    ],
)
def test_the_end_of_a_process_is_reported(
    act: Callable[[], None], error: type[Exception], message: str
):
    collector = collector_of(act)
    with pytest.raises(error, match=message):
        collector.rollout()
    assert collector.closed
    assert not children()


@pytest.mark.parametrize(
    ("act", "when"),
    [(hang_for_good, "step"), *(pytest.param(hang, x, marks=slow) for x in ("step", "reset"))],
)
def test_an_environment_that_hangs_is_named_and_ended(act: Callable[[], None], when: str):
    message = rf"\[1\] did not return from {when}\(\) within .*2.0 sec"
    with pytest.raises(TimeoutError, match=message):
        collector_of(act, when, step_timeout=2.0).rollout()
    assert not children()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vectorization": "serial"}, "step_timeout=2.0 needs vectorization='async'"),
        ({"vectorization": "sync"}, "needs vectorization='async'"),
        ({"step_timeout": 0.0}, "step_timeout must be positive seconds, or None, got 0.0"),
        ({"step_timeout": math.nan}, "must be positive seconds"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        collector_of(hang, **{"step_timeout": 2.0} | options)


SCRIPT = """
from ppokit import GymCollector
from tests.collectors.test_collector import make_policy
from torchrl.modules import OneHotCategorical
import multiprocessing
multiprocessing.set_start_method("spawn", force=True)
policy = make_policy(4, 2, OneHotCategorical)
GymCollector("CartPole-v1", policy, frames_per_batch=4, num_envs=2, vectorization="async")
"""


@slow
def test_a_script_without_a_main_guard(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command, options = [sys.executable, str(script)], {"capture_output": True, "text": True}
    run = subprocess.run(command, env=environment, timeout=120, **options)
    assert run.returncode == 1
    assert "needs `if __name__ == '__main__':`" in run.stderr.splitlines()[-1]
