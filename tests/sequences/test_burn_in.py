"""Sequences, with burn-in or without, equal plain loops: frames, states and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import set_recurrent_mode

from ppokit import GRUModule, SequenceBatcher
from tests import fake_device
from tests.recurrent.agents import CRITIC, C, H, disturb, make_networks, play, some_done
from tests.sequences.cases import (
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

BURN_IN = ("sequence", "burn_in")


def pieces(batch: TensorDictBase, seq_len: int | None, burn_in: int) -> list[Any]:
    """The frames of burn-in and the frames that count of each sequence, by a plain loop."""
    return [
        (run[max(0, start - burn_in) : start], run[start : start + (seq_len or len(run))])
        for run in runs(batch, None)
        for start in range(0, len(run), seq_len or len(run))
    ]


# -- frames


burn_ins = st.sampled_from([0, 1, 2, 5, 30])
any_batch = st.one_of(batches(), batches(masked=True))


@settings(max_examples=100)
@given(batch=any_batch, seq_len=seq_lens, burn_in=burn_ins)
def test_sequences_are_those_of_a_plain_loop(batch, seq_len, burn_in):
    """Each valid frame once, cut at every done, after burn-in from the same episode."""
    batcher, before = SequenceBatcher(seq_len, burn_in=burn_in), batch.clone()
    out = batcher(batch)
    assert_same(batch, before)  # the input does not change
    assert out.names == [None, "time"]
    expected = pieces(batch, seq_len, burn_in)
    mask = out[MASK]
    burnt = out[BURN_IN] if burn_in else torch.zeros_like(mask)
    assert (BURN_IN in out.keys(True)) == (BURN_IN in batcher.out_keys) == bool(burn_in)
    assert kept(out) == [counted for _, counted in expected]
    frames, index = out["frame"], out[INDEX]
    assert [f[b].tolist() for f, b in zip(frames, burnt, strict=True)] == [b for b, _ in expected]
    # first burn-in, then what counts, then copies of the last frame
    real = mask | burnt
    assert not (burnt & mask).any()
    assert real[:, 0].all()
    assert not (real[:, 1:] & ~real[:, :-1]).any()
    assert not (burnt[:, 1:] & ~burnt[:, :-1]).any()
    last = real.sum(-1, keepdim=True) - 1
    assert torch.equal(index[~real], index.gather(1, last).expand_as(index)[~real])
    for key in ("frame", "observation"):
        assert torch.equal(out[key], batch[key].flatten(0, batch.ndim - 1)[index])
    first = batch["is_init"].flatten(0, -2)[index[:, 0]]
    assert torch.equal(out["is_init"][:, 0], first)
    assert not out["is_init"][:, 1:].any()
    assert out.shape[1] == (real.sum(1).max() if seq_len is None else burn_in + seq_len)
    first = batch[STATE].flatten(0, -3)[index[:, 0]]
    assert torch.equal(out[STATE], first.unsqueeze(1).expand_as(out[STATE]))
    if out.shape[1] > 1:
        assert out[STATE].stride(1) == 0


@settings(max_examples=100)
@given(batch=any_batch, seq_len=seq_lens, burn_in=burn_ins, data=st.data())
def test_unbatch_is_the_inverse_in_any_order(batch, seq_len, burn_in, data):
    """Inside an episode, the next state at t is the state at t + 1; make_batch sees to it."""
    batcher = SequenceBatcher(seq_len, burn_in=burn_in)
    out = batcher(batch)
    out = out[torch.tensor(data.draw(st.permutations(range(len(out)))))]
    out["advantage"] = 2.0 * out["frame"].unsqueeze(-1)
    back = batcher.unbatch(out)
    assert back.names == [None] * (batch.ndim - 1) + ["time"]
    valid = batch.get(MASK, torch.ones(batch.shape, dtype=torch.bool))
    assert (back[~valid]["observation"] == 0).all()
    advantage = back.pop("advantage")[valid]
    assert torch.equal(advantage, 2.0 * batch["frame"][valid].unsqueeze(-1))
    assert back.batch_size == batch.batch_size
    if valid.all():  # and such a mask is left out
        batch = batch.exclude(MASK, "collector")
    assert_same(back[valid], batch[valid])


def test_a_memory_reset_is_not_crossed():
    batch = make_batch(torch.zeros(1, 6).bool())
    batch["memory_reset"] = torch.tensor([[0, 0, 0, 1, 0, 0]]).bool()
    out = SequenceBatcher(2, burn_in=2, cut_keys=["is_init", "memory_reset"])(batch)
    assert kept(out) == [[0, 1], [2], [3, 4], [5]]
    assert out[BURN_IN].sum(1).tolist() == [0, 2, 0, 2]
    # what was stored at the reset is what the policy was given there
    assert torch.equal(out[STATE][2, 0], batch[STATE][0, 3])


# -- states


@pytest.mark.parametrize(("seq_len", "burn_in"), [(5, 3), (5, 5), (2, 7), (30, 4), (None, 2)])
def test_refreshed_states_of_unchanged_networks_are_the_stored_states(seq_len, burn_in):
    networks = make_networks()
    batch = play(networks, some_done())
    batcher = SequenceBatcher(seq_len, burn_in=burn_in)
    out = batcher.refresh(batcher(batch), networks["actor"], networks["critic"])
    expected = SequenceBatcher(seq_len)(batch)
    width = out.shape[1]
    assert width == expected[MASK].sum(1).max()
    assert set(out.keys(True, True)) == set(expected.keys(True, True))
    assert out.names == [None, "time"]
    for key, value in expected[:, :width].items(True, True):
        torch.testing.assert_close(out[key], value, rtol=0, atol=1e-12, msg=str(key))
    torch.testing.assert_close(batcher.unbatch(out)["frame"], batch["frame"])


@pytest.mark.parametrize(
    ("seq_len", "burn_in", "n"), [(4, 3, 3), (2, 7, 3), (23, 0, 1), (23, 0, 3), (None, 0, 3)]
)
def test_losses_and_gradients_of_minibatches_equal_a_plain_loop(seq_len, burn_in, n):
    """Over torch's own networks; without cuts also those of torchrl's modules on whole rows."""
    networks = make_networks()
    batch = play(networks, some_done())
    disturb(networks)
    batcher = SequenceBatcher(seq_len, burn_in=burn_in)
    lstm, gru, encoder = networks["lstm"].lstm, networks["gru"].gru, networks["encoder"].module
    flat, expected = batch.reshape(-1), torch.zeros((), dtype=torch.float64)
    for before, counted in pieces(batch, seq_len, burn_in):
        start = flat[(before + counted)[0]]
        hidden = (start[H].unsqueeze(1), start[C].unsqueeze(1))
        critic_hidden = start[CRITIC].unsqueeze(1)
        if before:
            with torch.no_grad():
                x = flat["observation"][before].unsqueeze(0)
                _, hidden = lstm(encoder(x), hidden)
                _, critic_hidden = gru(x, critic_hidden)
        x = flat["observation"][counted].unsqueeze(0)
        frames = flat[counted].unsqueeze(0)
        frames["embed"] = lstm(encoder(x), hidden)[0]
        frames["critic_embed"] = gru(x, critic_hidden)[0]
        expected = expected + loss_of(frames)
    parameters = [p for m in (lstm, gru, encoder) for p in m.parameters()]
    gradients = torch.autograd.grad(expected, parameters)

    def run(frames: TensorDictBase) -> torch.Tensor:
        with set_recurrent_mode(True):
            networks["gru"](networks["lstm"](networks["encoder"](frames)))
        return loss_of(frames[frames.get(MASK, torch.ones(frames.shape, dtype=torch.bool))])

    total = torch.zeros((), dtype=torch.float64)
    for minibatch in batcher.minibatches(batcher(batch), n):
        ready = batcher.refresh(minibatch, networks["actor"], networks["critic"])
        assert not any(ready[key].requires_grad for key in (H, C, CRITIC))
        total = total + run(ready)
    totals = [total] if burn_in else [total, run(batch.clone())]
    for found in totals:
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found, parameters), gradients)


def loss_of(frames: TensorDictBase) -> torch.Tensor:
    squares = frames["embed"].square().sum(-1) + frames["critic_embed"].square().sum(-1)
    return (squares * frames["advantage"].squeeze(-1)).sum()


def test_refresh_runs_only_the_modules_of_the_states():
    networks = make_networks()
    batcher = SequenceBatcher(4, burn_in=3)
    sequences = batcher(play(networks, some_done()))
    calls: list[str] = []
    for name, module in networks.items():
        for child in module.modules():
            if isinstance(child, nn.Linear):
                child.register_forward_hook(lambda *_, name=name: calls.append(name))
    random, before = torch.random.get_rng_state(), sequences.clone()
    batcher.refresh(sequences, networks["actor"], networks["critic"])
    assert calls == ["actor", "encoder"]  # the encoder's layer, hooked for both, once
    assert torch.equal(torch.random.get_rng_state(), random)
    assert_same(sequences, before)
    assert batcher.refresh(sequences, networks["lstm"], networks["gru"]).shape[1] == 4


# -- bad input


def test_refresh_names_what_is_missing():
    networks = make_networks()
    batcher = SequenceBatcher(4, burn_in=3)
    sequences = batcher(play(networks, some_done()))
    actor, critic = networks["actor"], networks["critic"]
    with pytest.raises(ValueError, match=r"'critic', 'recurrent_state'\) .* none of the networks"):
        batcher.refresh(sequences, actor)
    plain = TensorDictModule(nn.Linear(4, 1), in_keys=["observation"], out_keys=["y"])
    with pytest.raises(ValueError, match="TensorDictModule has no recurrent state"):
        batcher.refresh(sequences, plain)
    for key, fix in ((C, "primer"), (BURN_IN, "Pass the result"), (MASK, "Pass the result")):
        name = key if isinstance(key, str) else key[-1]
        with pytest.raises(KeyError, match=f"{name}.*{fix}"):
            batcher.refresh(sequences.exclude(key), actor, critic)


@given(batch=any_batch, seq_len=st.integers(1, 6), n=st.integers(1, 5), direct=st.booleans())
def test_lengths_of_minibatches(batch, seq_len, n, direct):
    batcher = SequenceBatcher(seq_len, burn_in=2)
    sequences = batcher.places(batch) if direct else batcher(batch)
    options = {"n": min(n, len(sequences)), "batch": batch if direct else None, "shuffle": False}
    plain = batcher.minibatches(sequences, **options)
    for part, (same, lengths) in zip(
        plain, batcher.minibatches_with_lengths(sequences, **options), strict=True
    ):
        assert_same(part, same)
        assert torch.equal(lengths.burn_in, part[BURN_IN].sum(1))
        assert torch.equal(lengths.frames, part[MASK].sum(1))
        assert torch.equal(lengths.end, lengths.burn_in + lengths.frames)
        assert torch.equal(lengths.width, lengths.end)


def test_refresh_with_lengths_does_not_wait_for_a_device():
    torch.manual_seed(0)
    batch = make_batch(torch.rand(4, 20) < 0.2)
    gru = GRUModule(4, 3, num_layers=2, in_key="observation", out_key="features")
    batcher = SequenceBatcher(4, burn_in=2)
    expected = [
        batcher.refresh(part, gru) for part in batcher.minibatches(batcher(batch), 5, shuffle=False)
    ]
    sequences, gru = map(fake_device.to_device, (batcher(batch), gru))
    with fake_device.counted() as transfers:
        minibatches = batcher.minibatches_with_lengths(sequences, 5, shuffle=False)
        found = [batcher.refresh(part, gru, lengths=x) for part, x in minibatches]
    assert len([x for x in transfers if "recurrent.py" not in x]) == 1  # the recurrent networks
    for part, same in zip(expected, found, strict=True):
        same = same.apply(lambda x: x.as_subclass(torch.Tensor))
        torch.testing.assert_close(same.pop(STATE), part.pop(STATE))
        assert_same(part, same)
