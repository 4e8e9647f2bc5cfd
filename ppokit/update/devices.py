"""Steps that a device decides on by itself, without a number on the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def host_reads_are_free(device: torch.device) -> bool:
    """Return whether reading a tensor on the host does not wait for a device."""
    return device.type == "cpu"


@torch.no_grad()
def step_where(stepped: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Step an optimizer where a tensor is True; else parameters and state stay as they are.

    A fused optimizer skips the step by itself. For others, parameters and state are copied first.
    """
    optimizer_: Any = optimizer
    if all(group.get("fused") for group in optimizer.param_groups):
        optimizer_.grad_scale, optimizer_.found_inf = None, (~stepped).to(torch.float32)
        try:
            optimizer.step()
        finally:
            del optimizer_.grad_scale, optimizer_.found_inf
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in parameters]
    states = [
        {name: x.clone() for name, x in optimizer.state.get(p, {}).items() if isinstance(x, Tensor)}
        for p in parameters
    ]
    optimizer.step()
    for parameter, old, state in zip(parameters, before, states, strict=True):
        parameter.copy_(torch.where(stepped, parameter, old))
        for name, x in optimizer.state.get(parameter, {}).items():
            if isinstance(x, Tensor):  # a state that is new starts from zeros
                x.copy_(torch.where(stepped.to(x.device), x, state.get(name, torch.zeros_like(x))))
