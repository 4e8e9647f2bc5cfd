"""Batches to cut, and a plain loop that finds their sequences."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

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
