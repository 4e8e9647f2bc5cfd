"""SequenceBatcher: where sequences start and end, states, unbatch, minibatches, bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import GymEnv, InitTracker, SerialEnv, TransformedEnv

from ppokit import SequenceBatcher
from tests.golden import assert_golden, rl8
from tests.sequences.cases import (
    DONE,
    IDS,
    INDEX,
    MASK,
    STATE,
    assert_same,
    batches,
    kept,
    make_batch,
    runs,
    seq_lens,
)

# -- cuts


def test_sequences_by_hand():
    done = torch.tensor([[0, 0, 1, 0, 0], [0, 0, 0, 0, 1]]).bool()
    batch = make_batch(done)
    batcher = SequenceBatcher(2)
    out = batcher(batch)
    assert kept(out) == [[0, 1], [2], [3, 4], [5, 6], [7, 8], [9]]
    assert out["frame"].tolist() == [[0, 1], [2, 2], [3, 4], [5, 6], [7, 8], [9, 9]]
    assert torch.equal(out[INDEX], out["frame"])
    assert out["is_init"].squeeze(-1).tolist() == [
        [True, False],
        [False, False],
        [True, False],
        [True, False],
        [False, False],
        [False, False],
    ]
    assert out.batch_size == (6, 2)
    assert out.names == [None, "time"]
    whole = SequenceBatcher(None)(batch)
    assert kept(whole) == [[0, 1, 2], [3, 4], [5, 6, 7, 8, 9]]
    assert whole.batch_size == (3, 5)


@given(batch=batches(), seq_len=seq_lens)
def test_each_frame_is_in_one_sequence_and_every_done_cuts(batch, seq_len):
    out = SequenceBatcher(seq_len)(batch)
    expected = runs(batch, seq_len)
    assert kept(out) == expected
    assert sorted(out[INDEX][out[MASK]].tolist()) == list(range(batch.numel()))
    assert out.shape[1] == (max(map(len, expected)) if seq_len is None else seq_len)
    # Inside a sequence: no end before the last frame, no start after the first, one row.
    mask = out[MASK]
    assert not (out[DONE].squeeze(-1)[:, :-1] & mask[:, 1:]).any()
    assert not out["is_init"].squeeze(-1)[:, 1:].any()
    row = out[INDEX] // batch.shape[-1]
    assert (row == row[:, :1]).all()


@given(batch=batches(masked=True), seq_len=seq_lens)
def test_masked_frames_are_in_no_sequence(batch, seq_len):
    batcher = SequenceBatcher(seq_len)
    out = batcher(batch)
    assert kept(out) == runs(batch, seq_len)
    back = batcher.unbatch(out)
    valid = batch[MASK]
    assert_same(
        back[valid], (batch if not valid.all() else batch.exclude(MASK, "collector"))[valid]
    )
    assert (back[~valid]["observation"] == 0).all()


@given(batch=batches(), seq_len=seq_lens)
def test_padding_is_last_and_repeats_the_last_frame(batch, seq_len):
    out = SequenceBatcher(seq_len)(batch)
    mask = out[MASK]
    assert mask[:, 0].all()
    assert not (mask[:, 1:] & ~mask[:, :-1]).any()
    last = mask.sum(-1, keepdim=True) - 1
    for key in ("frame", INDEX):
        repeated = out[key].gather(1, last).expand_as(out[key])
        assert torch.equal(out[key][~mask], repeated[~mask])
    assert not out["is_init"][~mask].any()
    assert torch.equal(out["observation"], batch["observation"].flatten(0, -2)[out[INDEX]])


@pytest.mark.parametrize("seq_len", [1, 3, 50, None])
def test_batches_of_one_step_and_of_ends_only(seq_len):
    for done in (torch.zeros(1, 1), torch.ones(1, 1), torch.ones(3, 4), torch.zeros(2, 1)):
        batch = make_batch(done.bool())
        batcher, before = SequenceBatcher(seq_len), batch.clone()
        out = batcher(batch)
        assert_same(batch, before)  # the input does not change
        assert len(out) == batch.shape[0] * (batch.shape[1] if done.all() else 1)
        assert_same(batcher.unbatch(out), batch)


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
    agents = TensorDict(
        {"observation": torch.randn(2, 5, 3, 4), "done": torch.zeros(2, 5, 3, 1).bool()}, [2, 5, 3]
    )
    agents["done"][0, 2, 1] = True
    batch = TensorDict({"frame": torch.arange(10).reshape(2, 5), "agents": agents}, [2, 5])
    batcher = SequenceBatcher(4, cut_keys=(), done_key=("agents", "done"))
    out = batcher(batch)
    assert kept(out) == [[0, 1, 2], [3, 4], [5, 6, 7, 8], [9]]
    assert out["agents"].batch_size == (4, 4, 3)
    back = batcher.unbatch(out)
    assert_same(back, batch)
    assert back["agents"].batch_size == (2, 5, 3)


# -- states


@given(batch=batches(), seq_len=seq_lens)
def test_the_state_is_the_stored_state_of_the_first_step(batch, seq_len):
    out = SequenceBatcher(seq_len)(batch)
    first = batch[STATE].flatten(0, -3)[out[INDEX][:, 0]]
    assert torch.equal(out[STATE], first.unsqueeze(1).expand_as(out[STATE]))
    if out.shape[1] > 1:
        assert out[STATE].stride(1) == 0


# -- unbatch


@given(batch=batches(), seq_len=seq_lens, data=st.data())
def test_unbatch_is_the_inverse(batch, seq_len, data):
    batcher = SequenceBatcher(seq_len)
    # Inside an episode, next state at t is the state at t + 1; make_batch sees to it.
    out = batcher(batch)
    assert_same(batcher.unbatch(out), batch)
    order = data.draw(st.permutations(range(len(out))))
    permuted = out[torch.tensor(order)]
    permuted["twice"] = 2 * permuted["frame"]
    back = batcher.unbatch(permuted)
    assert torch.equal(back.pop("twice"), 2 * batch["frame"])
    assert_same(back, batch)
    assert back.names == [None] * (batch.ndim - 1) + ["time"]


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
    collector = Collector(
        env, None, frames_per_batch=60, total_frames=180, postproc=SequenceBatcher(8)
    )
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


def test_bad_lengths():
    with pytest.raises(ValueError, match=r"seq_len must be at least 1 step.*got 0"):
        SequenceBatcher(0)
    with pytest.raises(ValueError, match=r"burn_in must be a number of steps.*got -1"):
        SequenceBatcher(4, burn_in=-1)


def _good() -> TensorDict:
    return make_batch(torch.tensor([[0, 0, 1, 0]]).bool())


def _named(*names: str | None) -> TensorDict:
    batch = _good()
    batch.names = list(names)
    return batch


@pytest.mark.parametrize(
    ("batch", "error", "match"),
    [
        (lambda: _good()[:0], ValueError, r"empty batch of shape \[0, 4\]"),
        (lambda: _good()[0], ValueError, 'dimension named "time"'),
        (
            lambda: _named("time", None),
            ValueError,
            r"is 0; SequenceBatcher needs it to be the last.*transpose\(0, -1\)",
        ),
        (lambda: _good().exclude(DONE), KeyError, r"'done'\) is not in the batch.*done_key="),
        (
            lambda: _good().exclude("is_init"),
            KeyError,
            "'is_init' is not in the batch.*InitTracker",
        ),
        (lambda: _good().exclude(STATE), KeyError, "'recurrent_state' is not .*tensordict_primer"),
        (lambda: _good().set(DONE, torch.zeros(1, 4, 1).int()), TypeError, r"'done'\).*torch.bool"),
        (lambda: _good().set("is_init", torch.zeros(1, 4, 1)), TypeError, "'is_init'.*torch.bool"),
        (
            lambda: _good().set(MASK, torch.ones(1, 4, 2).bool()),
            ValueError,
            r"'mask'\) has shape \[1, 4, 2\]",
        ),
        (lambda: _good().set(MASK, torch.ones(1, 4)), TypeError, "mask must be torch.bool"),
        (
            lambda: _good().set(MASK, torch.zeros(1, 4).bool()),
            ValueError,
            "masks every frame: there is nothing to cut",
        ),
        (
            lambda: _good().set(IDS, torch.tensor([[0, 1, 1, 2]])),
            ValueError,
            r"'traj_ids'\) changes after \[0, 0\].*lost its time order",
        ),
    ],
)
def test_bad_batches_raise(batch, error, match):
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
