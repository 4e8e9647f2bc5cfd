"""Sequences: each frame once, no sequence across an episode's end, and replay equals collection."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import GymEnv, InitTracker, SerialEnv, StepCounter, TransformedEnv
from torchrl.modules import (
    GRUModule,
    LSTMModule,
    OneHotCategorical,
    ProbabilisticActor,
    set_recurrent_mode,
)

from ppokit import SequenceBatcher

DONE, MASK = ("next", "done"), ("collector", "mask")
INDEX, IDS = ("sequence", "index"), ("collector", "traj_ids")
STATE = "recurrent_state"


def make_batch(done: Tensor, is_init: Tensor | None = None, mask: Tensor | None = None) -> Any:
    """A batch ``[*B, T]`` with distinct frames, and states as a collector stores them."""
    shape = done.shape
    starts = torch.cat([torch.ones_like(done[..., :1]), done[..., :-1]], -1)
    if is_init is not None:
        starts = is_init
    frames = torch.arange(done.numel()).reshape(shape)
    following = torch.randn(*shape, 2, 3)
    state = torch.cat([torch.randn(*shape[:-1], 1, 2, 3), following[..., :-1, :, :]], -3)
    state = torch.where(starts[..., None, None], torch.randn(2, 3), state)
    batch = TensorDict(
        {
            "frame": frames,
            "observation": torch.randn(*shape, 4),
            "is_init": starts.unsqueeze(-1),
            STATE: state,
            "next": {"done": done.unsqueeze(-1), STATE: following},
        },
        shape,
    )
    if mask is not None:
        batch[MASK] = mask
    return batch


@st.composite
def batches(draw: st.DrawFn, *, masked: bool = False) -> TensorDictBase:
    """Rows that end and start anywhere; an episode may also start without a done before it."""
    shape = (*draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)), draw(st.integers(1, 14)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    flags = lambda p: torch.rand(shape, generator=generator) < p  # noqa: E731
    done = flags(draw(st.sampled_from([0.0, 0.2, 1.0])))
    starts = torch.cat([torch.ones_like(done[..., :1]), done[..., :-1]], -1)
    # A row may begin in mid-episode, and so without is_init.
    starts[..., 0] = flags(0.5)[..., 0]
    starts |= flags(draw(st.sampled_from([0.0, 0.2])))
    mask = None
    if masked:
        mask = flags(draw(st.sampled_from([0.3, 0.8])))
        mask.view(-1)[0] = True
    return make_batch(done, starts, mask)


seq_lens = st.one_of(st.none(), st.integers(1, 6), st.just(20))


def runs(batch: TensorDictBase, seq_len: int | None) -> list[list[int]]:
    """The frames of each sequence, by a plain loop."""
    mask = batch.get(MASK, torch.ones(batch.batch_size, dtype=torch.bool))
    rows = [batch["frame"], mask, batch[DONE].squeeze(-1), batch["is_init"].squeeze(-1)]
    found: list[list[int]] = []
    for row in zip(*(x.reshape(-1, batch.shape[-1]).tolist() for x in rows), strict=True):
        open_run = False
        for frame, valid, done, is_init in zip(*row, strict=True):
            if not valid:
                open_run = False
                continue
            full = open_run and seq_len is not None and len(found[-1]) == seq_len
            if not open_run or is_init or full:
                found.append([])
            found[-1].append(frame)
            open_run = not done
    return found


def kept(sequences: TensorDictBase) -> list[list[int]]:
    pairs = zip(sequences["frame"], sequences[MASK], strict=True)
    return [frames[mask].tolist() for frames, mask in pairs]


def assert_same(actual: TensorDictBase, expected: TensorDictBase) -> None:
    assert actual.batch_size == expected.batch_size
    assert set(actual.keys(True, True)) == set(expected.keys(True, True))
    for key in expected.keys(True, True):
        a, b = actual[key], expected[key]
        assert a.dtype == b.dtype
        assert torch.equal(a, b), key


# -- where sequences begin and end


def test_hand_case():
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
def test_each_frame_once_and_cut_at_every_end(batch, seq_len):
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
def test_extremes(seq_len):
    for done in (torch.zeros(1, 1), torch.ones(1, 1), torch.ones(3, 4), torch.zeros(2, 1)):
        batch = make_batch(done.bool())
        batcher = SequenceBatcher(seq_len)
        out = batcher(batch)
        assert len(out) == batch.shape[0] * (batch.shape[1] if done.all() else 1)
        assert_same(batcher.unbatch(out), batch)


def test_the_width_is_the_same_from_batch_to_batch():
    # The storage of a replay buffer takes one width only.
    ended, open_ = make_batch(torch.ones(2, 4).bool()), make_batch(torch.zeros(2, 4).bool())
    batcher = SequenceBatcher(3)
    buffer = ReplayBuffer(storage=LazyTensorStorage(20))
    buffer.extend(batcher(ended))
    buffer.extend(batcher(open_))
    assert len(buffer) == 8 + 4


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


def test_without_is_init():
    batch = make_batch(torch.tensor([[0, 1, 0, 0]]).bool()).exclude("is_init")
    assert kept(SequenceBatcher(3, cut_keys=())(batch)) == [[0, 1], [2, 3]]


def test_nested_keys():
    batch = make_batch(torch.tensor([[0, 0, 1, 0, 0]]).bool())
    nested = TensorDict(
        {
            "frame": batch["frame"],
            "memory": {"h": batch[STATE]},
            "flags": {"start": batch["is_init"]},
            "next": {"agents": {"done": batch[DONE]}, "memory": {"h": batch["next", STATE]}},
        },
        batch.batch_size,
    )
    batcher = SequenceBatcher(
        2,
        state_keys=[("memory", "h")],
        cut_keys=[("flags", "start")],
        done_key=("next", "agents", "done"),
        mask_key=("valid", "mask"),
    )
    out, expected = batcher(nested), SequenceBatcher(2)(batch)
    assert torch.equal(out["frame"], expected["frame"])
    assert torch.equal(out["memory", "h"], expected[STATE])
    assert torch.equal(out["flags", "start"], expected["is_init"])
    assert torch.equal(out["valid", "mask"], expected[MASK])
    assert_same(batcher.unbatch(out), nested)
    assert batcher.in_keys == [("next", "agents", "done"), ("flags", "start"), ("memory", "h")]


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
def test_the_state_is_that_of_the_first_step(batch, seq_len):
    out = SequenceBatcher(seq_len)(batch)
    first = batch[STATE].flatten(0, -3)[out[INDEX][:, 0]]
    assert torch.equal(out[STATE], first.unsqueeze(1).expand_as(out[STATE]))
    if out.shape[1] > 1:
        assert out[STATE].stride(1) == 0


def test_the_states_of_torchrls_modules_are_found():
    done = torch.zeros(1, 4).bool()
    batch = make_batch(done)
    batch["recurrent_state_h"] = torch.randn(1, 4, 1, 3)
    batch["actor", "recurrent_state_c"] = torch.randn(1, 4, 1, 3)
    out = SequenceBatcher(2)(batch)
    for key in (STATE, "recurrent_state_h", ("actor", "recurrent_state_c")):
        assert torch.equal(out[key][:, 1], batch[key][0, ::2])
    # What follows a step is stored step by step.
    assert torch.equal(out["next", STATE].flatten(0, 1), batch["next", STATE][0])


# -- and back


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


def test_unbatch_of_some_sequences_masks_the_others():
    batch = make_batch(torch.tensor([[0, 1, 0, 0]]).bool())
    batcher = SequenceBatcher(None)
    back = batcher.unbatch(batcher(batch)[1:])
    assert back[MASK].tolist() == [[False, False, True, True]]
    assert back["frame"].tolist() == [[0, 0, 2, 3]]


@given(batch=batches(masked=True), seq_len=seq_lens)
def test_the_input_is_left_as_it_was(batch, seq_len):
    before = batch.clone()
    batcher = SequenceBatcher(seq_len)
    out = batcher(batch)
    assert_same(batch, before)
    sequences = out.clone()
    batcher.unbatch(out)
    assert_same(out, sequences)


# -- in company


def test_composes_in_tensordict_sequential():
    double = TensorDictModule(lambda x: 2 * x, in_keys=["frame"], out_keys=["double"])
    batch = make_batch(torch.tensor([[0, 0, 1, 0, 0]]).bool())
    out = TensorDictSequential(SequenceBatcher(2), double)(batch)
    assert out["double"].tolist() == [[0, 2], [4, 4], [6, 8]]


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b))],
    ids=["deepcopy", "pickle"],
)
def test_copies_do_the_same(duplicate):
    batch = make_batch(torch.tensor([[0, 0, 1, 0, 0]]).bool())
    batcher = SequenceBatcher(2, state_keys=[STATE])
    assert_same(duplicate(batcher)(batch), batcher(batch))


def test_a_replay_buffer_of_sequences_sees_each_frame_once_an_epoch():
    batch = make_batch(torch.rand(4, 12) < 0.2)
    batcher = SequenceBatcher(4)
    sequences = batcher(batch)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(len(sequences)),
        sampler=SamplerWithoutReplacement(),
        batch_size=3,
    )
    buffer.extend(sequences)
    for _ in range(2):
        parts = list(buffer)
        assert all(part.shape[1] == 4 for part in parts)
        seen = torch.cat([part["frame"][part[MASK]] for part in parts])
        assert sorted(seen.tolist()) == list(range(48))
        assert_same(batcher.unbatch(torch.cat(parts)), batch)


def collect(core: Any, batches: int) -> tuple[ProbabilisticActor, list[TensorDictBase]]:
    """Two CartPoles, cut at 14 steps, under a recurrent policy that stores its states."""
    make = lambda: GymEnv("CartPole-v1", categorical_action_encoding=False)  # noqa: E731
    env = TransformedEnv(SerialEnv(2, make), InitTracker())
    env.append_transform(StepCounter(max_steps=14))
    env.append_transform(core.make_tensordict_primer())
    env.set_seed(0)
    head = TensorDictModule(nn.Linear(8, 2), in_keys=["embed"], out_keys=["logits"])
    policy = ProbabilisticActor(
        TensorDictSequential(core, head),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )
    collector = Collector(env, policy, frames_per_batch=66, total_frames=66 * batches)
    try:
        return policy, list(collector)
    finally:
        collector.shutdown()


@pytest.mark.parametrize("core_class", [LSTMModule, GRUModule])
@pytest.mark.parametrize("seq_len", [1, 5, None])
def test_replay_from_the_stored_states_is_what_was_collected(core_class, seq_len):
    torch.manual_seed(0)
    core = core_class(4, 8, in_key="observation", out_key="embed")
    policy, collected = collect(core, 2)
    batcher = SequenceBatcher(seq_len)
    # The test would be empty if the second batch began with episodes, or none ended inside.
    assert not collected[1]["is_init"][:, 0].all()
    for batch in collected:
        assert batch[DONE][:, :-1].any()
        sequences = batcher(batch)
        mask = sequences[MASK]
        assert mask.sum() == batch.numel() == 66
        with set_recurrent_mode(True), torch.no_grad():
            replayed = policy.get_dist(sequences.clone()).log_prob(sequences["action"])
            embedded = core(sequences.clone())["embed"]
        stored = sequences["action_log_prob"]
        torch.testing.assert_close(replayed[mask], stored[mask], rtol=0, atol=1e-5)
        torch.testing.assert_close(embedded[mask], sequences["embed"][mask], rtol=0, atol=1e-5)
        assert_same(batcher.unbatch(sequences), batch)
        # From other states it would not be.
        forgetful = sequences.apply(lambda name, x: 0 * x if "state" in name else x, named=True)
        with set_recurrent_mode(True), torch.no_grad():
            from_zero = core(forgetful)["embed"]
        goes_on = mask & ~sequences["is_init"].squeeze(-1)[:, :1]
        error = (from_zero - sequences["embed"])[goes_on].abs()
        assert not goes_on.any() or error.max() > 1e-2


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


# -- minibatches


@given(batch=batches(), n=st.integers(1, 9), shuffle=st.booleans())
def test_minibatches_hold_each_sequence_once(batch, n, shuffle):
    batcher = SequenceBatcher(2)
    sequences = batcher(batch)
    n = min(n, len(sequences))
    parts = list(batcher.minibatches(sequences, n, shuffle=shuffle))
    frames = [int(part[MASK].sum()) for part in parts]
    assert len(parts) == n
    assert all(abs(count - batch.numel() / n) <= 2 for count in frames)
    assert all(part.names == [None, "time"] for part in parts)
    if not shuffle:
        assert [frames for part in parts for frames in kept(part)] == kept(sequences)
    assert_same(batcher.unbatch(parts), batch)


def test_the_generator_decides_the_order():
    batcher = SequenceBatcher(1)
    sequences = batcher(make_batch(torch.zeros(1, 30).bool()))

    def order(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        parts = list(batcher.minibatches(sequences, 3, generator=generator))
        return torch.cat(parts)["frame"].flatten().tolist()

    assert order(0) == order(0) != order(1)
    generator = torch.Generator().manual_seed(0)
    epochs = [torch.cat(list(batcher.minibatches(sequences, 1, generator=generator))) for _ in "ab"]
    assert epochs[0]["frame"].tolist() != epochs[1]["frame"].tolist()


@pytest.mark.parametrize("n", [0, -1, 4])
def test_minibatches_must_not_be_empty(n):
    batcher = SequenceBatcher(1)
    sequences = batcher(make_batch(torch.zeros(1, 3).bool()))
    with pytest.raises(ValueError, match=rf"n must lie between 1 and the 3 sequences .* got {n}"):
        batcher.minibatches(sequences, n)


# -- bad input


@pytest.mark.parametrize("seq_len", [0, -1, 1.5, True, "8"])
def test_bad_seq_len(seq_len):
    with pytest.raises(ValueError, match=f"seq_len must be a whole number.*got {seq_len!r}"):
        SequenceBatcher(seq_len)


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
def test_bad_batches_are_refused(batch, error, match):
    with pytest.raises(error, match=match):
        SequenceBatcher(2, state_keys=[STATE])(batch())


@pytest.mark.parametrize("key", [MASK, INDEX, ("sequence", "batch_size")])
def test_unbatch_says_what_it_lacks(key):
    batcher = SequenceBatcher(2)
    with pytest.raises(KeyError, match=f"{key[1]}.*unbatch takes what the batcher returned"):
        batcher.unbatch(batcher(_good()).exclude(key))


def test_states_that_were_written_and_never_read_are_missed():
    batch = make_batch(torch.zeros(1, 4, dtype=torch.bool))
    batch["next", "recurrent_state_h"] = torch.zeros(1, 4, 1, 3)
    with pytest.raises(KeyError, match=r"'recurrent_state_h'.*make_tensordict_primer\(\)"):
        SequenceBatcher(2)(batch)
