"""Environments in a process each, which may die or hang."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import gymnasium as gym
from gymnasium.vector import AsyncVectorEnv

_SIGNALS = "minus the number of the signal that ended it; -9 is sent where memory is short."
_HINTS = {
    "start": "it prints why. A script that starts processes needs `if __name__ == '__main__':` "
    "around what it does, since each process imports it."
}


class ProcessVectorEnv(AsyncVectorEnv):
    """Gymnasium's ``AsyncVectorEnv``, which says what became of a process that does not answer.

    Args:
        env_fns: make the environments.
        timeout: seconds that a step or a reset of all may take; None for no limit.
        **kwargs: of ``AsyncVectorEnv``.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gym.Env]],
        timeout: float | None = None,
        **kwargs: Any,
    ) -> None:
        self.timeout = timeout
        self._in_step = True  # what the processes send can be told apart
        with self._explained("start"):
            super().__init__([partial(_SendsExceptions.around, x) for x in env_fns], **kwargs)

    def reset(self, **kwargs: Any) -> Any:
        """Reset all environments."""
        with self._explained("reset"):
            return super().reset(**kwargs)

    def step(self, actions: Any) -> Any:
        """Step all environments."""
        with self._explained("step"):
            return super().step(actions)

    def reset_wait(self, timeout: float | None = None) -> Any:
        """Wait for all resets."""
        return super().reset_wait(self.timeout if timeout is None else timeout)

    def step_wait(self, timeout: float | None = None) -> Any:
        """Wait for all steps."""
        return super().step_wait(self.timeout if timeout is None else timeout)

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """End the processes: by asking them, or, where they cannot be asked, at once."""
        if self._in_step and not terminate:
            with suppress(EOFError, ConnectionError):  # of one that has died since the last step
                super().close_extras(timeout)
                return
        for process in self.processes:
            process.kill()  # a signal that Python handles would wait for a step that hangs
        for process in self.processes:
            process.join()
        for pipe in self.parent_pipes:
            if pipe is not None:
                pipe.close()

    @contextmanager
    def _explained(self, call: str) -> Iterator[None]:
        try:
            yield
        except multiprocessing.TimeoutError as error:
            self._in_step = False
            late = [i for i, pipe in enumerate(self.parent_pipes) if not pipe.poll()]
            raise TimeoutError(
                f"Environment(s) {late} did not return from {call}() within step_timeout="
                f"{self.timeout} seconds. Their processes are ended: look for what they wait for, "
                "or allow for more."
            ) from error
        except (EOFError, ConnectionError) as error:
            if None in self.parent_pipes:
                raise  # an environment's own: gymnasium has ended its process, and taken the pipe
            self._in_step = False
            sentinels = wait([process.sentinel for process in self.processes], timeout=5)
            ended = [i for i, x in enumerate(self.processes) if x.sentinel in sentinels]
            for i in ended:
                self.processes[i].join(timeout=5)
            codes = ", ".join(str(self.processes[i].exitcode) for i in ended)
            raise RuntimeError(
                f"The process of environment(s) {ended} ended during {call}() with exit code "
                f"{codes}: {_HINTS.get(call, _SIGNALS)}"
            ) from error
        except BaseException as error:
            # an exception of an environment was received from all; Ctrl-C comes at any time
            self._in_step = self._in_step and isinstance(error, Exception)
            raise


class _SendsExceptions(gym.Wrapper):
    """An environment whose exceptions reach the process that steps it, whatever their kind.

    Gymnasium sends an exception's class and the exception, and calls the one on the other: a class
    that takes more arguments, or that pickle does not know, would leave the other side waiting.
    """

    @classmethod
    def around(cls, make_env: Callable[[], gym.Env]) -> gym.Env:
        """Return an environment that was made."""
        return cls(make_env())

    def reset(self, **kwargs: Any) -> Any:
        """Reset the environment."""
        with self._sendable():
            return self.env.reset(**kwargs)

    def step(self, action: Any) -> Any:
        """Step the environment."""
        with self._sendable():
            return self.env.step(action)

    @contextmanager
    def _sendable(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            try:
                kind, received = pickle.loads(pickle.dumps((type(error), error)))
                kind(received)
            except Exception:
                raise RuntimeError(f"{type(error).__name__}: {error}") from error
            raise
