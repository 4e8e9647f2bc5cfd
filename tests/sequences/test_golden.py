"""rl8's recurrent batches: what it trains on, with memory resets inside an episode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ppokit import SequenceBatcher
from tests.golden import assert_golden, rl8
from tests.sequences.test_batcher import MASK, assert_same, kept

CASES: list[dict[str, Any]] = rl8("recurrent")["cases"]
TRAINED = [case for case in CASES if "train_batch_obs" in case.get("collects", [{}])[0]]
REFUSED = [case for case in CASES if "raises" in case]


def collected(collect: dict[str, Any]) -> TensorDict:
    """The horizon of every environment. rl8 has no dones; it resets memories every few steps."""
    states = torch.tensor(collect["states"])[:, :-1, None]
    done = torch.zeros_like(states, dtype=torch.bool)
    return TensorDict(
        {
            "obs": torch.tensor(collect["obs"])[:, :-1],
            "recurrent_state": states.unsqueeze(-1),
            "memory_reset": states == 0,
            "next": {"done": done, "recurrent_state": states.unsqueeze(-1) + 1},
        },
        states.shape[:2],
    )


@pytest.mark.parametrize("case", TRAINED)
def test_the_sequences_are_those_that_rl8_trains_on(case):
    batcher = SequenceBatcher(case["seq_len"], cut_keys=["memory_reset"])
    for collect in case["collects"]:
        batch = collected(collect)
        sequences = batcher(batch)
        assert_golden(sequences["obs"], collect["train_batch_obs"])
        assert_golden(
            sequences["recurrent_state"][:, 0, 0, 0], collect["train_batch_initial_state"]
        )
        assert sequences[MASK].all()
        assert_same(batcher.unbatch(sequences), batch)


def test_all_cases_are_there():
    assert len(TRAINED) >= 5
    assert REFUSED


def test_a_length_that_does_not_divide_the_horizon_is_no_error_here():
    (case,) = [case for case in REFUSED if case["horizon"] % case["seq_len"]]
    rows, steps = case["num_envs"], case["horizon"]
    frames = torch.arange(rows * steps).reshape(rows, steps)
    done = torch.zeros(rows, steps, 1, dtype=torch.bool)
    batch = TensorDict({"frame": frames, "next": {"done": done}}, [rows, steps])
    sequences = SequenceBatcher(case["seq_len"], cut_keys=())(batch)
    expected = [row[i : i + 3] for row in frames.tolist() for i in (0, 3, 6)]
    assert kept(sequences) == expected
