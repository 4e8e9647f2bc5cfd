"""A training step as one CUDA graph: its kernels are launched together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor


class ReplayedStep:
    """The kernels of a captured step for minibatches of one shape, which has run before.

    They read the arguments of :meth:`__call__` from memory of their own, and write outputs to it:
    both are copied. Each replay draws other random numbers.
    """

    def __init__(self, minibatch: TensorDictBase, numbers: Tensor, halted: Tensor) -> None:
        self._inputs = minibatch.clone().contiguous(), numbers.clone(), halted.clone()
        self._entries = dict(self._inputs[0].items(True, True))
        self._stream = torch.cuda.Stream(halted.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: Any = None
        self.is_current = False  #: False: capture it before the next call

    def capture(self, form: Callable[..., Any], tensors: tuple[Tensor, ...]) -> None:
        """Record the kernels; ``tensors`` are parameters and state, changed where they are.

        A second capture takes about as long as a step, and uses the memory of the first.
        """
        minibatch, numbers, halted = self._inputs
        previous, graph, self._outputs = self._graph, torch.cuda.CUDAGraph(), None
        pool = () if previous is None else (previous.pool(),)
        current = torch.cuda.current_stream(halted.device)
        self._stream.wait_stream(current)
        # torch.cuda.graph() would wait for the device, and empty the cache of its memory.
        with torch.cuda.stream(self._stream):
            graph.capture_begin(*pool, capture_error_mode="thread_local")
            try:
                _, self._outputs = form(minibatch, *tensors, numbers, halted)
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        self._graph, self.is_current = graph, True

    def __call__(self, minibatch: TensorDictBase, numbers: Tensor, halted: Tensor) -> Any:
        """Make a step, and return a named tuple as the function that was captured does."""
        for key, x in minibatch.items(True, True):
            self._entries[key].copy_(x)
        self._inputs[1].copy_(numbers)
        self._inputs[2].copy_(halted)
        assert self._graph is not None
        self._graph.replay()
        signature, *outputs = self._outputs
        copies = [[y.clone() for y in x] if isinstance(x, list) else x.clone() for x in outputs]
        return type(self._outputs)(signature, *copies)
