"""Environments that are closed at the end, whichever end it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

Self = TypeVar("Self", bound="Closing")


class Closing:
    """Owns environments, and closes them once."""

    closed: bool = True
    _envs: Any  # has a method close

    def shutdown(self) -> None:
        """Close the environments; a second time there is nothing to do."""
        if not self.closed:
            self.closed = True
            self._envs.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def __del__(self) -> None:
        with suppress(Exception):
            self.shutdown()

    @contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.shutdown()
            raise
