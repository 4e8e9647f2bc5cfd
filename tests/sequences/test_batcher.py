"""SequenceBatcher: where sequences start and end, states, unbatch, minibatches, bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import GymEnv, InitTracker, SerialEnv, TransformedEnv

from ppokit import SequenceBatcher
from tests.golden import assert_golden, rl8
from tests.sequences.cases import DONE, IDS, INDEX, MASK, STATE, assert_same, kept, make_batch

# -- cuts


def test_a_single_row_named_time():
    batch = make_batch(torch.tensor([[0, 0, 1, 0, 0]]).bool())
    row = batch[0].clone()
    row.names = ["time"]
    batcher = SequenceBatcher(2)
    out = batcher(row)
    assert out.names == [None, "time"]
    expected = batcher(batch)
    shape_key = ("sequence", "batch_size")
    assert_same(out.exclude(shape_key), expected.exclude(shape_key))
    back = batcher.unbatch(out)
    assert_same(back, row)
    assert back.names == ["time"]


def test_done_of_any_agent_cuts_and_entries_of_agents_come_back():
    entries = {"observation": torch.randn(2, 5, 3, 4), "done": torch.zeros(2, 5, 3, 1).bool()}
    agents = TensorDict(entries, [2, 5, 3])
    agents["done"][0, 2, 1] = True
    batch = TensorDict({"frame": torch.arange(10).reshape(2, 5), "agents": agents}, [2, 5])
    batcher = SequenceBatcher(4, cut_keys=(), done_key=("agents", "done"))
    out = batcher(batch)
    assert kept(out) == [[0, 1, 2], [3, 4], [5, 6, 7, 8], [9]]
    assert out["agents"].batch_size == (4, 4, 3)
    back = batcher.unbatch(out)
    assert_same(back, batch)
    assert back["agents"].batch_size == (2, 5, 3)


# -- unbatch


def test_unbatch_without_next_states_gives_the_first_state():
    batch = make_batch(torch.zeros(1, 4).bool()).exclude(("next", STATE))
    batcher = SequenceBatcher(2)
    back = batcher.unbatch(batcher(batch))
    assert torch.equal(back[STATE], batch[STATE][:, [0, 0, 2, 2]])


# -- replay buffers and collectors


def test_a_replay_buffer_of_sequences_sees_each_frame_once_an_epoch():
    batch = make_batch(torch.rand(4, 12) < 0.2)
    batcher = SequenceBatcher(4)
    sequences = batcher(batch)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(len(sequences)), sampler=SamplerWithoutReplacement(), batch_size=3
    )
    buffer.extend(sequences)
    for _ in range(2):
        parts = list(buffer)
        assert all(part.shape[1] == 4 for part in parts)
        seen = torch.cat([part["frame"][part[MASK]] for part in parts])
        assert sorted(seen.tolist()) == list(range(48))
        assert_same(batcher.unbatch(torch.cat(parts)), batch)


def test_as_postproc_of_a_collector():
    env = TransformedEnv(SerialEnv(3, lambda: GymEnv("CartPole-v1")), InitTracker())
    frames = {"frames_per_batch": 60, "total_frames": 180}
    collector = Collector(env, None, **frames, postproc=SequenceBatcher(8))
    for sequences in collector:
        mask = sequences["collector", "mask"]
        assert sequences.shape[1] == 8
        assert mask.sum() == 60
        index = sequences["sequence", "index"][mask]
        assert index.sort().values.tolist() == list(range(60))
    collector.shutdown()


# -- rl8's recurrent batches

CASES: list[dict[str, Any]] = rl8("recurrent")["cases"]
TRAINED = [case for case in CASES if "train_batch_obs" in case.get("collects", [{}])[0]]


@pytest.mark.parametrize("case", TRAINED)
def test_golden_sequences_of_rl8(case):
    """rl8 has no dones; it resets the memory every few steps."""
    batcher = SequenceBatcher(case["seq_len"], cut_keys=["memory_reset"])
    for collect in case["collects"]:
        states = torch.tensor(collect["states"])[:, :-1, None]
        entries = {
            "obs": torch.tensor(collect["obs"])[:, :-1],
            "recurrent_state": states.unsqueeze(-1),
            "memory_reset": states == 0,
            "next": {
                "done": torch.zeros_like(states, dtype=torch.bool),
                "recurrent_state": states.unsqueeze(-1) + 1,
            },
        }
        batch = TensorDict(entries, states.shape[:2])
        sequences = batcher(batch)
        assert_golden(sequences["obs"], collect["train_batch_obs"])
        initial = sequences["recurrent_state"][:, 0, 0, 0]
        assert_golden(initial, collect["train_batch_initial_state"])
        assert sequences[MASK].all()
        assert_same(batcher.unbatch(sequences), batch)


# -- bad input


def _good() -> TensorDict:
    return make_batch(torch.tensor([[0, 0, 1, 0]]).bool())


def with_flags(key: Any, flags: torch.Tensor) -> Any:
    return lambda: _good().set(key, flags)


NO_MASK, NO_TIME_ORDER = torch.zeros(1, 4).bool(), torch.tensor([[0, 1, 1, 2]])


@pytest.mark.parametrize(
    ("batch", "error", "match"),
    [
        (lambda: _good()[:0], ValueError, r"empty batch of shape \[0, 4\]"),
        (lambda: _good()[0], ValueError, 'dimension named "time"'),
        (
            lambda: _good().refine_names("time", None),
            ValueError,
            r"is 0; .* needs .* last.*transpose\(0, -1\)",
        ),
        (lambda: _good().exclude(DONE), KeyError, r"'done'\) is not in the batch.*done_key="),
        (lambda: _good().exclude("is_init"), KeyError, "'is_init' is not in the .*InitTracker"),
        (lambda: _good().exclude(STATE), KeyError, "'recurrent_state' is not .*tensordict_primer"),
        (with_flags(DONE, torch.zeros(1, 4, 1).int()), TypeError, r"'done'\).*torch.bool"),
        (with_flags("is_init", torch.zeros(1, 4, 1)), TypeError, "'is_init'.*torch.bool"),
        (with_flags(MASK, torch.ones(1, 4, 2).bool()), ValueError, r"'mask'\) has .* \[1, 4, 2\]"),
        (with_flags(MASK, torch.ones(1, 4)), TypeError, "mask must be torch.bool"),
        (with_flags(MASK, NO_MASK), ValueError, "masks every frame: there is nothing to cut"),
        (with_flags(IDS, NO_TIME_ORDER), ValueError, r"'traj_ids'\) changes .*lost its time or"),
        (
            lambda: SequenceBatcher(0),
            ValueError,
            "seq_len must be a whole number of at least 1, got 0",
        ),
        (
            lambda: SequenceBatcher(4, burn_in=-1),
            ValueError,
            "burn_in must be a whole number of at least 0, got -1",
        ),
    ],
)
def test_bad_batches_and_lengths_raise(batch, error, match):
    with pytest.raises(error, match=match):
        SequenceBatcher(2, state_keys=[STATE])(batch())


@pytest.mark.parametrize("key", [MASK, INDEX, ("sequence", "batch_size")])
def test_unbatch_names_a_missing_entry(key):
    batcher = SequenceBatcher(2)
    with pytest.raises(KeyError, match=f"{key[1]}.*Pass the result of the batcher"):
        batcher.unbatch(batcher(_good()).exclude(key))


def test_states_that_are_written_and_never_stored_raise():
    batch = make_batch(torch.zeros(1, 4, dtype=torch.bool))
    batch["next", "recurrent_state_h"] = torch.zeros(1, 4, 1, 3)
    with pytest.raises(KeyError, match=r"'recurrent_state_h'.*make_tensordict_primer\(\)"):
        SequenceBatcher(2)(batch)


def test_minibatches_leave_the_names_of_the_sequences():
    batcher = SequenceBatcher(4)
    sequences = batcher(make_batch(torch.zeros(3, 8, dtype=torch.bool)))
    list(batcher.minibatches(sequences, 2))
    assert sequences.names == sequences["next"].names == [None, "time"]


def test_a_key_may_be_given_alone():
    batcher = SequenceBatcher(4, cut_keys="is_init", state_keys="h")
    assert batcher.cut_keys == ["is_init"]
    assert batcher.state_keys == ["h"]
