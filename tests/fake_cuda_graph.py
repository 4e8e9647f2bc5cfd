"""A stand-in for CUDA graphs on tensors of the CPU: it records operators and runs them again.

As on CUDA, nothing is computed while operators are recorded, and each replay reads and writes the
memory of the recording.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ppokit.functional import _checks


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self.calls.append((func, args, kwargs, []))
            return args[0]  # of in-place operators, which are not run yet
        result = func(*args, **kwargs)
        inputs, outputs = (
            [x for x in tree_leaves(found) if isinstance(x, Tensor)]
            for found in ((args, kwargs), result)
        )
        memory = [x.untyped_storage().data_ptr() for x in inputs]
        if all(x.untyped_storage().data_ptr() in memory for x in outputs):
            return result  # views
        for x in outputs:
            x.fill_(float("nan") if x.is_floating_point() else 0)
        self.calls.append((func, args, kwargs, outputs))
        return result


class RecordedGraph:
    """The methods of ``torch.cuda.CUDAGraph`` that ppokit calls."""

    captures = replays = 0

    def capture_begin(self, *_: Any, **__: Any) -> None:
        type(self).captures += 1
        self.recorder = Recorder()
        self.recorder.__enter__()

    def capture_end(self) -> None:
        self.recorder.__exit__(None, None, None)

    def pool(self) -> tuple[int, int]:
        return 0, 0

    def replay(self) -> None:
        type(self).replays += 1
        for func, args, kwargs, outputs in self.recorder.calls:
            result = tree_leaves(func(*args, **kwargs))
            for x, y in zip(outputs, result, strict=bool(outputs)):
                x.copy_(y)


class Stream:
    def __init__(self, *_: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...


def pretend_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the path of a device, and replace what ppokit calls of ``torch.cuda``."""
    monkeypatch.setattr(_checks, "reads_are_free", lambda _: False)
    monkeypatch.setattr(RecordedGraph, "captures", 0)
    monkeypatch.setattr(RecordedGraph, "replays", 0)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
