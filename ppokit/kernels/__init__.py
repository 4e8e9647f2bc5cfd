"""The kernels of the scans, and the choice between them.

``native`` is a C extension for float32 and float64 on the CPU; ``torch`` serves every device and
dtype. An eager call on plain CPU tensors without a gradient goes straight to the C function; all
other scans go through the operator ``torch.ops.ppokit.linear_scan``, which defines its gradient.

The choice is automatic. ``PPOKIT_KERNEL=torch``, read when this is imported, forces the torch
kernel, and ``PPOKIT_KERNEL=native`` raises ValueError if there is no C kernel; :func:`use` does the
same for a block of code.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from torch import _C
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.jit import is_tracing  # pyright: ignore[reportPrivateImportUsage]  # documented

try:
    _native: Any = import_module("ppokit.kernels.native")
except ImportError:  # no compiler when ppokit was installed
    _native = None

# No public name says whether a dispatch mode (make_fx, FakeTensorMode, a flop counter), a transform
# of torch.func or forward-mode differentiation is active. Under a torch that lacks one of these,
# ppokit goes by the dispatcher, which is slower and right in any case.
_dispatch_modes = getattr(_C, "_len_torch_dispatch_stack", lambda: 1)
_function_transforms = getattr(_C, "_are_functorch_transforms_active", lambda: True)
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
    """Force a kernel within the block, in all threads; None makes the choice automatic.

    Raises:
        ValueError: this installation does not have the kernel.

    Example:
        >>> with use("torch"):
        ...     native_kernel()
    """
    before = _force(name)
    try:
        yield
    finally:
        _force(before)


def native_kernel() -> Any:
    """Return the native kernel where a call may go straight to it, past torch's dispatcher.

    It may not while a graph is captured, while a dispatch mode records every operator, within a
    transform of ``torch.func``, or while forward-mode derivatives are computed.
    """
    if is_dynamo_compiling() or _forced == "torch":
        return None
    if _dispatch_modes() or is_tracing() or in_forward_mode() or in_function_transform():
        return None
    return _native


def in_forward_mode() -> bool:
    """Return whether tensors may have tangents: within ``forward_ad.dual_level()``."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def in_function_transform() -> bool:
    """Return whether a transform of ``torch.func``, such as ``vmap`` or ``grad``, is active."""
    return _function_transforms()


def _force(name: str | None) -> str | None:
    global _forced
    if name is not None and name not in available():
        raise ValueError(
            f"The kernel {name!r} (PPOKIT_KERNEL, or kernels.use) is not in this installation, "
            f"which has {', '.join(available())}. The native kernel needs a C compiler when ppokit "
            "is installed."
        )
    before, _forced = _forced, name
    return before


_force(os.environ.get("PPOKIT_KERNEL") or None)
