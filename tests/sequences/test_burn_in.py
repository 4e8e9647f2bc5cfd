"""Burn-in: preceding frames, and the states that the networks compute from them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import set_recurrent_mode

from ppokit import SequenceBatcher
from tests.recurrent.agents import CRITIC, C, H, disturb, make_networks, play, some_done
from tests.sequences.cases import (
    INDEX,
    MASK,
    assert_same,
    batches,
    kept,
    make_batch,
    runs,
    seq_lens,
)

BURN_IN = ("sequence", "burn_in")


def pieces(
    batch: TensorDictBase, seq_len: int | None, burn_in: int
) -> list[tuple[list[int], list[int]]]:
    """The frames of burn-in and the frames that count of each sequence, by a plain loop."""
    return [
        (run[max(0, start - burn_in) : start], run[start : start + (seq_len or len(run))])
        for run in runs(batch, None)
        for start in range(0, len(run), seq_len or len(run))
    ]


# -- frames


def test_burn_in_by_hand():
    batch = make_batch(torch.tensor([[0, 0, 0, 0, 1, 0, 0]]).bool())
    out = SequenceBatcher(2, burn_in=3)(batch)
    assert out["frame"].tolist() == [
        [0, 1, 1, 1, 1],
        [0, 1, 2, 3, 3],
        [1, 2, 3, 4, 4],
        [5, 6, 6, 6, 6],
    ]
    assert kept(out) == [[0, 1], [2, 3], [4], [5, 6]]
    assert out[BURN_IN].sum(1).tolist() == [0, 2, 3, 0]
    assert out["is_init"].squeeze(-1).nonzero().tolist() == [[0, 0], [1, 0], [3, 0]]
    assert torch.equal(out["recurrent_state"][:, 0], batch["recurrent_state"][0, [0, 0, 1, 5]])


burn_ins = st.sampled_from([0, 1, 2, 5, 30])


@given(batch=batches(masked=True), seq_len=seq_lens, burn_in=burn_ins)
def test_burn_in_precedes_the_sequence_in_the_same_episode(batch, seq_len, burn_in):
    batcher = SequenceBatcher(seq_len, burn_in=burn_in)
    out = batcher(batch)
    expected = pieces(batch, seq_len, burn_in)
    mask = out[MASK]
    burnt = out[BURN_IN] if burn_in else torch.zeros_like(mask)
    assert (BURN_IN in out.keys(True)) == (BURN_IN in batcher.out_keys) == bool(burn_in)
    assert kept(out) == [counted for _, counted in expected]
    frames = out["frame"]
    assert [f[b].tolist() for f, b in zip(frames, burnt, strict=True)] == [b for b, _ in expected]
    # first burn-in, then what counts, then copies of the last frame
    real = mask | burnt
    assert not (burnt & mask).any()
    assert not (real[:, 1:] & ~real[:, :-1]).any()
    assert not (burnt[:, 1:] & ~burnt[:, :-1]).any()
    last = real.sum(-1, keepdim=True) - 1
    assert torch.equal(frames[~real], frames.gather(1, last).expand_as(frames)[~real])
    assert not out["is_init"][~real].any()
    if seq_len is not None:
        assert out.shape[1] == burn_in + seq_len
    first = batch["recurrent_state"].flatten(0, -3)[out[INDEX][:, 0]]
    assert torch.equal(out["recurrent_state"][:, 0], first)


@given(batch=batches(), seq_len=seq_lens, burn_in=burn_ins, data=st.data())
def test_unbatch_leaves_burn_in_out(batch, seq_len, burn_in, data):
    batcher = SequenceBatcher(seq_len, burn_in=burn_in)
    out = batcher(batch)
    out = out[torch.tensor(data.draw(st.permutations(range(len(out)))))]
    out["advantage"] = 2.0 * out["frame"].unsqueeze(-1)
    back = batcher.unbatch(out)
    assert torch.equal(back.pop("advantage"), 2.0 * batch["frame"].unsqueeze(-1))
    assert_same(back, batch)


def test_a_memory_reset_is_not_crossed():
    batch = make_batch(torch.zeros(1, 6).bool())
    batch["memory_reset"] = torch.tensor([[0, 0, 0, 1, 0, 0]]).bool()
    out = SequenceBatcher(2, burn_in=2, cut_keys=["is_init", "memory_reset"])(batch)
    assert kept(out) == [[0, 1], [2], [3, 4], [5]]
    assert out[BURN_IN].sum(1).tolist() == [0, 2, 0, 2]
    # what was stored at the reset is what the policy was given there
    assert torch.equal(out["recurrent_state"][2, 0], batch["recurrent_state"][0, 3])


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


@pytest.mark.parametrize(("seq_len", "burn_in"), [(4, 3), (2, 7)])
def test_refreshed_states_and_gradients_equal_a_plain_loop(seq_len, burn_in):
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
        embed, critic_embed = lstm(encoder(x), hidden)[0], gru(x, critic_hidden)[0]
        expected = expected + embed.square().sum() + critic_embed.square().sum()
    parameters = [p for m in (lstm, gru, encoder) for p in m.parameters()]
    gradients = torch.autograd.grad(expected, parameters)

    total = torch.zeros((), dtype=torch.float64)
    for minibatch in batcher.minibatches(batcher(batch), 3):
        ready = batcher.refresh(minibatch, networks["actor"], networks["critic"])
        assert not any(ready[key].requires_grad for key in (H, C, CRITIC))
        with set_recurrent_mode(True):
            networks["gru"](networks["lstm"](networks["encoder"](ready)))
        for key in ("embed", "critic_embed"):
            total = total + ready[key][ready[MASK]].square().sum()
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(torch.autograd.grad(total, parameters), gradients)


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
