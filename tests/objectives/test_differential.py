"""The loss equals torchrl's, whatever the networks, the batch, and the changes between calls.

``python -m tests.objectives.test_differential 2000`` runs as many cases, from the first seed on,
and prints those that fail.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from tests.objectives.cases import Case, draw_case
from tests.seeds import main

LOSSES = ("loss_objective", "loss_critic", "loss_entropy")
MASK = [("collector", "mask")]
TOLERANCE = {torch.float32: 2e-4, torch.float64: 1e-9}


class Result:
    """What a loss returns and leaves behind, and the gradient of each of its losses."""

    def __init__(self, loss: nn.Module, batch: TensorDict) -> None:
        buffers = {name: value.clone() for name, value in loss.named_buffers()}
        parameters = {name: p for name, p in loss.named_parameters() if p.requires_grad}
        torch.manual_seed(0)
        self.error = None
        try:
            out = loss(batch.clone())
            self.random = torch.rand(3)
            total = sum(out[name].sum() for name in LOSSES if name in out.keys())
            found: Any = [None] * len(parameters)
            if isinstance(total, Tensor) and total.requires_grad:
                found = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
            self.gradients = {
                name: torch.zeros(()) if gradient is None else gradient
                for name, gradient in zip(parameters, found, strict=True)
            }
            self.outputs = out.detach().to_dict()
            self.buffers = {name: value.clone() for name, value in loss.named_buffers()}
        except Exception as error:  # both or neither raise
            self.error = error
        with torch.no_grad():
            for name, value in loss.named_buffers():
                value.copy_(buffers[name])


def check(case: Case, where: str) -> None:
    """Compare the two losses of a case as it is now."""
    batch, mask = case.batch, case.batch.get(("collector", "mask"), None)
    theirs = Result(case.losses["torchrl"], batch if mask is None else batch[mask].exclude(*MASK))
    ours = Result(case.loss, batch)
    if theirs.error is not None or ours.error is not None:
        if theirs.error is None or ours.error is None:
            raise AssertionError(f"{where}: {theirs.error!r}, {ours.error!r}") from ours.error
        return
    tolerance = TOLERANCE[batch.get(case.loss.tensor_keys.advantage).dtype]
    close: Any = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    for what in ("outputs", "gradients", "buffers"):
        expected, found = getattr(theirs, what), getattr(ours, what)
        for key, value in expected.items():
            value, mine = torch.broadcast_tensors(value, found[key])
            message = f"{where}: {what} {key}"
            torch.testing.assert_close(mine, value, **close, msg=lambda m, k=message: f"{k}: {m}")
    if mask is None:
        assert torch.equal(theirs.random, ours.random), f"{where}: random numbers"


def run_case(seed: int) -> None:
    """Draw a case, and compare before its changes and after each."""
    case = draw_case(seed)
    try:
        check(case, "at first")
        for name, change in case.changes:
            change(case)
            check(case, f"after {name}")
    except Exception as error:
        if hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(", ".join(case.description))
        raise


IGNORED = (
    "The KL divergence is",
    "The effective sample size is",
    "critic_loss_clip=",
    "The critic loss is",
    "std\\(\\): degrees of freedom",
    "You requested advantage norm",
    "dropout option adds dropout",
    "Can't initialize NVML",
)


@pytest.mark.parametrize("seed", range(100))
def test_it_equals_torchrls_loss(seed: int):
    with warnings.catch_warnings():
        for message in IGNORED:
            warnings.filterwarnings("ignore", message)
        run_case(seed)


if __name__ == "__main__":
    main(run_case)
