"""Batches and options that GAE rejects, and flags that it ignores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ppokit import GAE
from tests.advantages.cases import make_batch, make_critic, ours


def call(batch: TensorDict, **kwargs) -> TensorDict:
    return ours(batch, make_critic(), **kwargs)


def changed(key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> TensorDict:
    batch = make_batch()
    batch["next", key] = change(batch["next", key])
    return batch


def without(key: str) -> TensorDict:
    return make_batch().exclude(("next", key))


def with_entry(name: str, value: torch.Tensor) -> TensorDict:
    return make_batch().set(("collector", name), value)


BAD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: call(make_batch(), gamma=1.1), ValueError, r"gamma must lie in \[0, 1\], got 1.1"),
    (lambda: call(make_batch(), lmbda=-0.1), ValueError, r"lmbda must lie in \[0, 1\], got -0.1"),
    (
        lambda: call(make_batch(), shifted="yes"),
        ValueError,
        "must be None, True or False, got 'yes'",
    ),
    (lambda: call(without("reward")), KeyError, r"\('next', 'reward'\).*is not in the batch"),
    (lambda: call(without("done")), KeyError, r"\('next', 'done'\).*is not in the batch"),
    (lambda: call(without("observation")), KeyError, "compact_obs=False"),
    (lambda: ours(make_batch(), None), KeyError, "state_value.*no value_network"),
    (
        lambda: call(changed("reward", lambda x: x.squeeze(-1))),
        ValueError,
        r"\[3, 7\].*\[3, 7, 1\].*unsqueeze",
    ),
    (lambda: call(changed("reward", lambda x: x.long())), TypeError, "reward.*int64.*float"),
    (lambda: call(changed("done", lambda x: x.float())), TypeError, "done.*must be torch.bool"),
    (lambda: call(changed("terminated", lambda x: x.float())), TypeError, "terminated.*float32"),
    (lambda: call(make_batch()[:0]), ValueError, r"empty batch of shape \[0, 7\]"),
    (lambda: call(make_batch().reshape(-1)), ValueError, "needs time order"),
    (
        lambda: call(with_entry("traj_ids", torch.arange(21).reshape(3, 7))),
        ValueError,
        "has lost its time order",
    ),
    (lambda: call(with_entry("mask", torch.ones(3, 7))), TypeError, r"mask must be torch\.bool"),
]


@pytest.mark.parametrize(("function", "error", "message"), BAD)
def test_bad_input_raises(function: Callable[[], Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        function()


def test_a_locked_batch():
    batch = make_batch().lock_()
    with pytest.raises(RuntimeError, match=r"batch is locked, and GAE writes 'advantage': unlock_"):
        GAE(gamma=0.9, lmbda=0.8, value_network=make_critic())(batch)


def test_discounts_are_assigned_as_they_are_given():
    gae = GAE(gamma=0.9, lmbda=0.8, value_network=make_critic())
    gae.gamma = 0.5
    expected = GAE(gamma=0.5, lmbda=0.8, value_network=gae.value_network)(make_batch())
    torch.testing.assert_close(gae(make_batch())["advantage"], expected["advantage"])
    for value in (None, 1.5, "a"):
        with pytest.raises(ValueError, match=r"gamma must lie in \[0, 1\]"):
            gae.gamma = value
    assert gae.gamma == 0.5
