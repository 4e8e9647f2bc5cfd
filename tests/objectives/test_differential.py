"""Every way to compute the loss gives the same, whatever the networks, the batch, and the changes.

``python -m tests.objectives.test_differential 2000`` runs as many cases, from the first seed on,
and prints those that fail.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from tqdm import tqdm

from tests.objectives.cases import Case, draw_case

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
            total = sum(v.sum() for name, v in out.items() if name.startswith("loss_"))
            found: Any = [None] * len(parameters)
            if isinstance(total, Tensor) and total.requires_grad:
                found = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
            self.gradients = {
                name: torch.zeros(()) if gradient is None else gradient
                for name, gradient in zip(parameters, found, strict=True)
            }
            self.outputs = out.detach().to_dict()
            self.buffers = {name: value.clone() for name, value in loss.named_buffers()}
        except Exception as error:  # torchrl's path tells whether it should have been raised
            self.error = error
        with torch.no_grad():
            for name, value in loss.named_buffers():
                value.copy_(buffers[name])


def check(case: Case, where: str) -> None:
    """Compare all ways to compute the losses of a case as it is now."""
    slow = Result(case.slow, case.batch)
    loss = case.losses["fast"]
    result, about = Result(loss, case.batch), f"fast, {where}"
    if slow.error is not None or result.error is not None:
        if slow.error is None or result.error is None:
            raise AssertionError(f"{about}: {slow.error!r}, {result.error!r}") from result.error
        return
    path = "path=tensors" if case.on_tensors else "path=torchrl's"
    assert path in repr(loss), f"{about}: {repr(loss)[-200:]}"
    tolerance = TOLERANCE[case.batch.get(case.slow.tensor_keys.advantage).dtype]
    close: Any = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    for what in ("outputs", "gradients", "buffers"):
        expected, found = getattr(slow, what), getattr(result, what)
        assert expected.keys() == found.keys(), f"{about}: {what}"
        for key, value in expected.items():
            if what == "gradients" and value.ndim == 0:
                value = torch.zeros_like(found[key])
            torch.testing.assert_close(
                found[key] if found[key].ndim else found[key].to(value).expand_as(value),
                value,
                **close,
                msg=lambda m, k=f"{about}: {what} {key}": f"{k}: {m}",
            )
    assert torch.equal(slow.random, result.random), f"{about}: random numbers"


def run_case(seed: int) -> None:
    """Draw a case, and compare before its changes and after each."""
    case = draw_case(seed)
    check(case, "at first")
    for name, change in case.changes:
        change(case)
        check(case, f"after {name}")


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


@pytest.mark.parametrize(
    "seed", [pytest.param(x, marks=[pytest.mark.slow] * (x % 4 > 0)) for x in range(24)]
)
def test_all_ways_agree(seed: int):
    with warnings.catch_warnings():
        for message in IGNORED:
            warnings.filterwarnings("ignore", message)
        try:
            run_case(seed)
        except Exception as error:
            error.add_note(", ".join(draw_case(seed).description)) if hasattr(
                error, "add_note"
            ) else None
            raise


def main(count: int, first: int = 0) -> None:
    """Run cases from a seed on, and print those that fail."""
    warnings.simplefilter("ignore")
    failed = []
    for seed in tqdm(range(first, first + count), unit="case", mininterval=30):
        try:
            run_case(seed)
        except Exception as error:
            failed.append(seed)
            print(f"\n--- seed {seed}: {draw_case(seed).description}", flush=True)
            lines = "".join(traceback.format_exception(error)).strip().splitlines()
            print("\n".join(lines[-12:]), flush=True)
    print(f"{count} cases, {len(failed)} failed: {failed}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
