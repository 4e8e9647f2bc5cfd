"""Batches and options that GAE rejects, and flags that it ignores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.objectives.value import GAE as TorchRLGAE  # noqa: N811

from ppokit import GAE
from tests.advantages.cases import assert_same, make_batch, make_critic, ours


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
    (lambda: call(make_batch(), shifted="yes"), ValueError, "a boolean or None, got 'yes'"),
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


@pytest.mark.parametrize("group", [None, "agents"])
def test_truncated_without_done_raises(group: str | None):
    batch = make_batch()
    batch["next", "truncated"] = batch["next", "done"] & ~batch["next", "terminated"]
    call(batch.clone())
    batch["next", "truncated"][1, 3] = True
    batch["next", "done"][1, 3] = False
    batch["next", "terminated"][1, 3] = False
    arguments = {}
    if group:
        signals = ("reward", "done", "terminated")
        for key in (*signals, "truncated"):
            batch.rename_key_(("next", key), ("next", group, key))
        arguments = {key: (group, key) for key in signals}
    module = GAE(gamma=0.9, lmbda=0.9, value_network=make_critic())
    module.set_keys(**arguments)
    with pytest.raises(ValueError, match=r"truncated'.*1 place.*\[1, 3, 0\].*run on into the next"):
        module(batch)


@pytest.mark.parametrize("masked", [False, True])
def test_truncated_at_the_last_step_of_a_row_has_no_effect(masked: bool):
    batch = make_batch()
    batch["next", "done"][:, -3:] = batch["next", "terminated"][:, -3:] = False
    batch["next", "truncated"] = batch["next", "done"] & ~batch["next", "terminated"]
    if masked:
        batch["collector", "mask"] = torch.ones(3, 7, dtype=torch.bool)
        batch["collector", "mask"][:, -2:] = False
    expected = call(batch.clone())
    batch["next", "truncated"][:, -3 if masked else -1] = True
    assert torch.equal(call(batch)["advantage"], expected["advantage"])


def test_truncated_at_every_frame_is_ignored():
    """torchrl's ``ReplayBufferTrainer.extend`` writes it, before the second epoch."""
    batch = make_batch()
    batch["next", "truncated"] = batch["next", "done"] & ~batch["next", "terminated"]
    critic = make_critic()
    options: dict[str, Any] = {"gamma": 0.9, "lmbda": 0.9, "value_network": critic}
    expected = GAE(**options)(batch.clone())
    batch["next", "truncated"][..., -1] = True
    assert_same(TorchRLGAE(**options)(batch.clone()), expected)
    assert_same(GAE(**options)(batch), expected)
