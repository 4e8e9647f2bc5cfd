"""The kernels of the scans, and the choice between them.

``native`` is a C extension for float32 and float64 on the CPU, ``triton`` serves them on CUDA, and
``torch`` serves every device and dtype. An eager call on plain tensors without a gradient goes
straight to C or Triton; all other scans go through the operator ``torch.ops.ppokit.linear_scan``,
which defines their gradient.

The choice is automatic. ``PPOKIT_KERNEL=torch``, read when this is imported, forces the torch
kernel, and ``PPOKIT_KERNEL=native`` raises ValueError if there is no C kernel; :func:`use` does the
same for a block of code. With ``TRITON_INTERPRET=1`` in the environment, ``triton`` also takes CPU
tensors, slowly: for tests.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from warnings import warn

import torch
from torch import _C, Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.jit import is_tracing  # pyright: ignore[reportPrivateImportUsage]  # documented

#: how the C kernel reads tensors: https://dmlc.github.io/dlpack/latest/python_spec.html
EXCHANGE: object = getattr(Tensor, "__dlpack_c_exchange_api__", None)
try:
    native: Any = EXCHANGE and import_module("ppokit.kernels.native")
except ImportError:  # no compiler when ppokit was installed
    native = None

# No public name says whether a dispatch mode (make_fx, FakeTensorMode, a flop counter), a transform
# of torch.func or forward-mode differentiation is active. Under a torch that lacks one of these,
# ppokit goes by the dispatcher, which is slower and right in any case.
_dispatch_modes = getattr(_C, "_len_torch_dispatch_stack", lambda: 1)
_function_transforms = getattr(_C, "_are_functorch_transforms_active", lambda: True)
_forced: str | None = None
_INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"

_DTYPES = (torch.float32, torch.float64)
_STRIDED = torch.strided
_TORCH = (Tensor, EXCHANGE, Tensor.is_neg, "requires_grad", Tensor.contiguous, torch.empty_like)


def available() -> tuple[str, ...]:
    """Return the names of the kernels that this installation has, the fastest first.

    Example:
        >>> from ppokit.kernels import available
        >>> "torch" in available()
        True
    """
    found = {"native": native, "triton": _triton(), "torch": True}
    return tuple(name for name, kernel in found.items() if kernel is not None)


@contextmanager
def use(name: str | None) -> Iterator[None]:
    """Force a kernel within the block, in all threads; None makes the choice automatic.

    Raises:
        ValueError: this installation does not have the kernel.

    Example:
        >>> import torch
        >>> from ppokit.kernels import fused_kernel, use
        >>> with use("torch"):
        ...     fused_kernel(torch.ones(3, 1))
    """
    before = _force(name)
    try:
        yield
    finally:
        _force(before)


def fused_kernel(x: Tensor) -> Any:
    """Return the kernel that a call may go straight to, past torch's dispatcher, or None.

    It may not while a graph is captured, while a dispatch mode records every operator, within a
    transform of ``torch.func``, or while forward-mode derivatives are computed.
    """
    if is_dynamo_compiling() or _forced == "torch":
        return None
    if _dispatch_modes() or is_tracing() or in_forward_mode() or in_function_transform():
        return None
    if not isinstance(x, Tensor):
        return None
    if _forced != "triton" and x.is_cpu:
        return native
    takes_x = x.is_cuda or (_INTERPRETS and x.is_cpu)
    return _triton() if takes_x and _forced != "native" else None


@cache
def _triton() -> Any:
    """Return the kernel in Triton, which builds of torch for CUDA bring along, or None."""
    if not (_INTERPRETS or torch.cuda.is_available()):
        return None
    try:
        return import_module("ppokit.kernels.triton")
    except ImportError:
        return None


def in_forward_mode() -> bool:
    """Return whether tensors may have tangents: within ``forward_ad.dual_level()``."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def in_function_transform() -> bool:
    """Return whether a transform of ``torch.func``, such as ``vmap`` or ``grad``, is active."""
    return _function_transforms()


def fused_gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    done: Tensor,
    terminated: Tensor,
    gamma: float | Tensor,
    lmbda: float | Tensor,
    dim: int,
) -> tuple[Tensor, Tensor] | None:
    """Return advantage and value target, or None for arguments that the torch kernel handles."""
    if (kernel := fused_kernel(reward)) is None:
        return None
    if kernel is native:
        first = gamma if type(gamma) is float else _number(gamma, reward)
        second = lmbda if type(lmbda) is float else _number(lmbda, reward)
        records, inputs = torch.is_grad_enabled(), (reward, value, next_value, done, terminated)
        return kernel.gae(_TORCH, records, dim, first, second, *inputs)
    if (sizes := _sizes(reward, dim)) is None:
        return None
    discounts = [_discount(x, reward) for x in (gamma, lmbda)]
    floats = _plain((reward, value, next_value), reward)
    flags = _plain((done, terminated), reward, torch.bool)
    if floats is None or flags is None or any(x is None for x in discounts):
        return None
    outputs = torch.empty_like(floats[0]), torch.empty_like(floats[0])
    kernel.gae(*sizes, *floats, *flags, *outputs, *discounts)
    return outputs


def fused_scan(
    x: Tensor, decay: Tensor, initial: Tensor | None, reverse: bool, dim: int
) -> Tensor | None:
    """Return the scan, or None for arguments that the torch kernel handles."""
    if (kernel := fused_kernel(x)) is None:
        return None
    start = None if initial is None else initial.to(x.dtype)
    if kernel is native:
        records = torch.is_grad_enabled()
        return kernel.scan(_TORCH, records, dim, float(reverse), 0.0, x, decay, start)
    if (sizes := _sizes(x, dim)) is None or (inputs := _plain((x, decay), x)) is None:
        return None
    if start is not None:
        if (starts := _plain((start,), x, x.dtype, x.select(dim, 0).shape)) is None:
            return None
        start = starts[0]
    y = torch.empty_like(inputs[0])
    kernel.scan(*sizes, *inputs, start, y, reverse)
    return y


def _sizes(x: Tensor, dim: int) -> tuple[int, int, int] | None:
    """Return the outer size, the steps and the inner size."""
    if type(x) is not Tensor or x.dtype not in _DTYPES or type(dim) is not int:
        return None
    shape, count = x.shape, x.numel()
    if not count or not -len(shape) <= dim < len(shape):
        return None
    steps, inner = shape[dim], math.prod(shape[dim % len(shape) + 1 :])
    return count // (steps * inner), steps, inner


def _plain(
    tensors: Sequence[Tensor],
    like: Tensor,
    dtype: torch.dtype | None = None,
    shape: torch.Size | None = None,
) -> list[Tensor] | None:
    """Return tensors of one kind as contiguous ones, or None where no kernel can read them."""
    dtype, shape = dtype or like.dtype, like.shape if shape is None else shape
    found, records = [], torch.is_grad_enabled()
    for x in tensors:
        if type(x) is not Tensor or x.dtype is not dtype or x.shape != shape:
            return None
        if x.device != like.device or x.layout is not _STRIDED or x.is_neg():
            return None
        if records and x.requires_grad:
            return None
        x = x.contiguous()
        if not x.data_ptr():  # fake tensors, and the zeros of a derivative, have no memory
            return None
        found.append(x)
    return found


def _number(discount: float | Tensor, like: Tensor) -> float | None:
    """Return a discount as a number, or None where it is not one, or has a gradient."""
    if not isinstance(discount, Tensor):
        return discount
    return discount.item() if _is_number(discount, like) else None


def _discount(discount: float | Tensor, like: Tensor) -> Tensor | None:
    """Return a discount as a float64 tensor, whose value is not read, or None."""
    if isinstance(discount, Tensor):
        return discount.detach().double() if _is_number(discount, like) else None
    return like.new_full((), discount, dtype=torch.float64) if 0 <= discount <= 1 else None


def _is_number(discount: Tensor, like: Tensor) -> bool:
    plain = _plain((discount,), like, discount.dtype, discount.shape)
    return plain is not None and discount.numel() == 1


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


if native is None and os.environ.get("PPOKIT_KERNEL") != "torch":
    # The sources of a checkout may hide an installed ppokit that has the C kernel.
    _files = [file for found in distributions(name="ppokit") for file in found.files or ()]
    _paths = [Path(f"{x.locate()}") for x in _files if x.match("ppokit/kernels/native*.so")]
    _folder = Path(__file__).resolve().parent
    if _hidden := [x for x in _paths if x.exists() and x.resolve().parent != _folder]:
        warn(
            f"The kernels run in torch, which is slower: Python imported {_folder}, which has no C "
            f"kernel, although the installed ppokit has {_hidden[0]}. Run the script in another "
            "folder, or install the checkout with pip install -e .",
            RuntimeWarning,
            stacklevel=1,
        )
_force(os.environ.get("PPOKIT_KERNEL") or None)
