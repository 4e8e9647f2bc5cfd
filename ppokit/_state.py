"""States that are taken over whole, or refused with nothing changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    _Module = nn.Module
else:
    _Module = object


class WholeState(_Module):
    """For an ``nn.Module``: a state of another version is refused, and a refused one is not loaded.

    ``nn.Module.load_state_dict`` alone loads what fits before it raises for what does not. The
    version is the class attribute ``_version``, which torch writes into every state.
    """

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Take over a state that :meth:`state_dict` returned, as ``nn.Module`` does.

        Raises:
            RuntimeError: it has another version, other entries or shapes; nothing has changed then.
            KeyError: it has other entries, where torch does not look (in functional losses).
        """
        before = deepcopy(self.state_dict())
        try:
            found = super().load_state_dict(state_dict, strict=strict, assign=assign)
            if strict:
                check_names(state_dict, before, f"this {type(self).__name__}")
            return found
        except Exception:
            super().load_state_dict(before)
            raise

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        version = local_metadata.get("version", self._version)
        if version != self._version:
            error_msgs.append(
                f"the state of {type(self).__name__} has version {version}, and this ppokit writes "
                f"and reads version {self._version}. Load it with the ppokit that wrote it."
            )
            return
        found = missing_keys, unexpected_keys, error_msgs
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *found)


def check_names(found: Iterable[str], expected: Iterable[str], what: str) -> None:
    """Raise where a state is not that of these parts.

    Raises:
        KeyError: parts are missing, or unknown.
    """
    found, expected = set(found), set(expected)
    unknown, missing = sorted(found - expected), sorted(expected - found)
    if unknown or missing:
        said = [f"has no {missing}"] * bool(missing) + [f"has {unknown} as well"] * bool(unknown)
        raise KeyError(
            f"The state {' and '.join(said)}: {what} has {sorted(expected)}. Build it with the "
            "parts that it was saved with."
        )


def load_all(parts: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Load the state of every part, or of none.

    Args:
        parts: what has ``state_dict`` and ``load_state_dict``.
        states: of the same names.

    Raises:
        ValueError: a part refuses its state; all are as they were then.
    """
    before = {name: deepcopy(part.state_dict()) for name, part in parts.items()}
    loaded: list[str] = []
    try:
        for name, part in parts.items():
            loaded.append(name)
            part.load_state_dict(states[name])
    except Exception as error:
        for name in loaded:
            parts[name].load_state_dict(before[name])
        raise ValueError(
            f"{loaded[-1]!r} refuses its state, and nothing was loaded: {error}"
        ) from error
