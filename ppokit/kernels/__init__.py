"""The same scans again, one file for each place where they run, and the choice between them.

``native`` is a C extension for float32 and float64 on the CPU; ``torch`` serves every device and
dtype. An eager call on plain CPU tensors without a gradient goes straight to the C function; all
else goes through the operator ``torch.ops.ppokit.linear_scan``, which knows its own gradient.

The choice is automatic. ``PPOKIT_KERNEL=native`` or ``PPOKIT_KERNEL=torch``, read when ppokit is
imported, forces it; :func:`use` does so for a block of code.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from torch import _C  # not torch itself: that name is the kernel's here
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

try:
    from ppokit.kernels import native as _native
except ImportError:  # no compiler when ppokit was installed, or a torch before 2.10
    _native = None

_dispatch_modes = _C._len_torch_dispatch_stack
_is_tracing = _C._is_tracing
_forced: str | None = None


def available() -> tuple[str, ...]:
    """Return the names of the kernels that this installation has, the fastest first.

    Example:
        >>> "torch" in available()
        True
    """
    return ("torch",) if _native is None else ("native", "torch")


@contextmanager
def use(name: str | None) -> Iterator[None]:
    """Force a kernel within the block, in all threads; None leaves the choice automatic.

    Raises:
        ValueError: there is no such kernel in this installation.

    Example:
        >>> with use("torch"):
        ...     native_kernel()
    """
    before = _force(name)
    try:
        yield
    finally:
        _force(before)


def forced() -> str | None:
    """Return the name of the kernel that is forced, or None."""
    return _forced


def native_kernel() -> ModuleType | None:
    """Return the native kernel, or None if there is none or another one is forced."""
    return None if _forced == "torch" else _native


def direct_kernel() -> ModuleType | None:
    """Return the native kernel where a call may go straight to it, past torch's dispatcher.

    That is not so while a graph is captured, while a mode wants to see every operator, or while
    tangents (forward-mode derivatives) come with the numbers.
    """
    if is_dynamo_compiling() or _forced == "torch":
        return None
    if _dispatch_modes() or _is_tracing() or forward_ad._current_level >= 0:
        return None
    return _native


def has_wide_vectors() -> bool:
    """Return whether the native kernel has AVX2 or AVX-512 to work with on this machine.

    Without them a library that knows the machine is the faster one for large products.
    """
    return _native is not None and _native.instruction_sets()[0] != "generic"


def _force(name: str | None) -> str | None:
    global _forced
    if name is not None and name not in available():
        raise ValueError(
            f"The kernel {name!r} (PPOKIT_KERNEL, or kernels.use) is not in this installation, "
            f"which has {', '.join(available())}. The native kernel needs a C compiler when ppokit "
            "is installed, and torch 2.10 or later."
        )
    before, _forced = _forced, name
    return before


_force(os.environ.get("PPOKIT_KERNEL") or None)
