"""Minibatches of sequences: each frame once, little padding, also straight from the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDictBase

from ppokit import SequenceBatcher
from tests.sequences.cases import MASK, STATE, assert_same, batches, kept, make_batch

BURN_IN = ("sequence", "burn_in")


def random_batch(rows: int, steps: int, dones: float) -> TensorDictBase:
    return make_batch(torch.rand(rows, steps) < dones)


def real(part: TensorDictBase) -> torch.Tensor:
    return part[MASK] | part[BURN_IN] if BURN_IN in part.keys(True) else part[MASK]


def padded(parts: Any) -> float:
    """Return the fraction of padding in minibatches."""
    masks = [part[MASK].flatten() for part in parts]
    return 1.0 - float(torch.cat(masks).double().mean())


@given(
    batch=batches(),
    seq_len=st.one_of(st.none(), st.integers(1, 20)),
    burn_in=st.sampled_from([0, 1, 3, 30]),
    n=st.integers(1, 9),
    buckets=st.integers(1, 9),
    shuffle=st.booleans(),
    direct=st.booleans(),
)
def test_every_frame_once_an_epoch(batch, seq_len, burn_in, n, buckets, shuffle, direct):
    batcher = SequenceBatcher(seq_len, burn_in=burn_in)
    sequences = batcher.places(batch) if direct else batcher(batch)
    n, source = min(n, len(sequences)), batch if direct else None
    options = {"buckets": buckets, "shuffle": shuffle}
    for _ in range(2):
        parts = list(batcher.minibatches(sequences, n, batch=source, **options))
        assert len(parts) == n
        seen = torch.cat([part["frame"][part[MASK]] for part in parts])
        assert sorted(seen.tolist()) == list(range(batch.numel()))
        for part in parts:
            assert part.names == [None, "time"]
            assert part.shape[1] == real(part).sum(1).max()
            assert not part["is_init"][~real(part)].any()
        assert_same(batcher.unbatch(parts), batch)


@given(batch=batches(masked=True), n=st.integers(1, 5), seed=st.integers(0, 9))
def test_minibatches_from_the_batch_equal_those_of_the_sequences(batch, n, seed):
    batcher = SequenceBatcher(3, burn_in=2)
    sequences, places = batcher(batch), batcher.places(batch)
    assert_same(places, sequences.select(*places.keys(True, True)))
    n = min(n, len(sequences))
    seeded = lambda: torch.Generator().manual_seed(seed)  # noqa: E731
    taken = batcher.minibatches(sequences, n, generator=seeded())
    direct = batcher.minibatches(places, n, batch=batch, generator=seeded())
    for a, b in zip(taken, direct, strict=True):
        assert_same(a, b)
        assert a.shape[1] == 1 or a[STATE].stride(1) == b[STATE].stride(1) == 0


@given(batch=batches(), seq_len=st.integers(1, 20), n=st.integers(1, 9), data=st.data())
def test_minibatches_have_nearly_as_many_frames(batch, seq_len, n, data):
    batcher = SequenceBatcher(seq_len)
    sequences = batcher(batch)
    n = min(n, len(sequences))
    longest = int(sequences[MASK].sum(1).max())
    for part in batcher.minibatches(sequences, n, buckets=data.draw(st.integers(1, 4))):
        assert len(part) > 0
        assert abs(int(part[MASK].sum()) - batch.numel() / n) <= longest


@pytest.mark.parametrize(("dones", "without", "most"), [(0.01, 0.18, 0.16), (0.05, 0.5, 0.2)])
def test_buckets_leave_little_padding(dones, without, most):
    batch = random_batch(64, 128, dones)
    batcher = SequenceBatcher(32)
    sequences = batcher(batch)
    assert padded([sequences]) > without
    assert padded(batcher.minibatches(sequences, 8, buckets=1)) > without
    assert padded(batcher.minibatches(sequences, 8)) < most


def test_without_shuffling_the_order_stays():
    batcher = SequenceBatcher(8)
    sequences = batcher(random_batch(4, 30, 0.1))
    parts = batcher.minibatches(sequences, 3, shuffle=False)
    assert [frames for part in parts for frames in kept(part)] == kept(sequences)


def test_a_mask_that_drops_frames_in_between_trims_none_after_them():
    sequences = SequenceBatcher(6)(make_batch(torch.zeros(1, 6).bool()))
    sequences[MASK] = torch.tensor([[1, 0, 0, 0, 1, 0]]).bool()
    (part,) = SequenceBatcher(6).minibatches(sequences, 1)
    assert part["frame"].tolist() == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("strides", ["time first", "expanded", "every other"])
def test_a_batch_that_is_not_contiguous(strides):
    batch: Any = random_batch(4, 10, 0.2)
    plain = batch.clone()
    if strides == "time first":
        batch = batch.apply(lambda x: x.transpose(0, 1).contiguous().transpose(0, 1))
    elif strides == "every other":
        batch = torch.cat([batch, batch]).reshape(4, 2, 10)[:, 0]
        plain = batch.clone()
    else:
        plain["observation"] = plain["observation"][:1].expand(4, -1, -1).clone()
        batch["observation"] = batch["observation"][:1].expand(4, -1, -1)
    assert not batch["observation"].is_contiguous()
    batcher = SequenceBatcher(4, burn_in=1)
    assert_same(batcher(batch), batcher(plain))
    batch["note"] = "no tensor"
    assert batcher.unbatch(batcher(batch))["note"] == "no tensor"


def test_the_generator_decides_the_order():
    batcher = SequenceBatcher(1)
    sequences = batcher(make_batch(torch.zeros(1, 30).bool()))

    def order(generator: torch.Generator) -> list[int]:
        parts = list(batcher.minibatches(sequences, 3, generator=generator))
        return torch.cat(parts)["frame"].flatten().tolist()

    first, same, other = (torch.Generator().manual_seed(seed) for seed in (0, 0, 1))
    epoch = order(first)
    assert epoch == order(same) != order(other)
    assert order(first) != epoch


# -- bad input


def test_bad_minibatches_raise():
    batcher = SequenceBatcher(1)
    sequences = batcher(make_batch(torch.zeros(1, 3).bool()))
    for n in (0, 4):
        with pytest.raises(ValueError, match=rf"n must lie between 1 and the 3 seq.* got {n}"):
            batcher.minibatches(sequences, n)
    batcher = SequenceBatcher(2)
    places = batcher.places(make_batch(torch.zeros(2, 3).bool()))
    other = make_batch(torch.zeros(2, 4).bool())
    with pytest.raises(ValueError, match=r"shape \[2, 4\], but .* cut from one of shape \[2, 3\]"):
        batcher.minibatches(places, 1, batch=other)
    with pytest.raises(KeyError, match=r"'batch_size'.* Pass the result of the batcher"):
        batcher.minibatches(other, 1)
