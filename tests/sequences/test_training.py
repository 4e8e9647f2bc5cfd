"""Gradients of minibatches of sequences equal those of whole episodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.modules import set_recurrent_mode

from ppokit import SequenceBatcher
from tests.recurrent.agents import CRITIC, C, H, make_networks, play, some_done
from tests.sequences.cases import MASK, runs


def loss_of(embed: Tensor, batch: TensorDictBase) -> Tensor:
    return (embed.square() * batch["advantage"]).sum()


def parameters_of(networks: dict[str, Any], name: str) -> list[Tensor]:
    return list(networks[name].parameters()) + list(networks["encoder"].parameters())


def gradients_of_sequences(
    networks: dict[str, Any], name: str, batch: TensorDictBase, seq_len: int | None, n: int
) -> tuple[Tensor, ...]:
    """Of the loss over all minibatches together."""
    batcher, total = SequenceBatcher(seq_len), torch.zeros((), dtype=torch.float64)
    for minibatch in batcher.minibatches(batcher(batch), n):
        with set_recurrent_mode(True):
            networks[name](networks["encoder"](minibatch))
        key, mask = networks[name].out_keys[0], minibatch[MASK]
        total = total + loss_of(minibatch[key][mask], minibatch[mask])
    return torch.autograd.grad(total, parameters_of(networks, name), allow_unused=True)


def gradients_of_episodes(
    networks: dict[str, Any], name: str, batch: TensorDictBase
) -> tuple[Tensor, ...]:
    """The same with torch's own network, episode by episode."""
    flat, total = batch.reshape(-1), torch.zeros((), dtype=torch.float64)
    for run in runs(batch, None):
        episode = flat[run].unsqueeze(0)
        x, start = episode["observation"], episode[:, 0]
        if name == "lstm":
            state = tuple(start[key].transpose(0, 1).contiguous() for key in (H, C))
            embed, _ = networks["lstm"].lstm(networks["encoder"].module(x), state)
        else:
            embed, _ = networks["gru"].gru(x, start[CRITIC].transpose(0, 1).contiguous())
        total = total + loss_of(embed, episode)
    return torch.autograd.grad(total, parameters_of(networks, name), allow_unused=True)


@pytest.mark.parametrize("name", ["lstm", "gru"])
@pytest.mark.parametrize(("seq_len", "n"), [(23, 1), (23, 3), (None, 3)])
def test_gradients_equal_those_of_whole_episodes(name, seq_len, n):
    networks = make_networks()
    batch = play(networks, some_done())
    expected = gradients_of_episodes(networks, name, batch)
    found = gradients_of_sequences(networks, name, batch, seq_len, n)
    torch.testing.assert_close(found, expected)
    # and torchrl's, which cuts the rows itself, where memories begin
    with set_recurrent_mode(True):
        whole = networks[name](networks["encoder"](batch.clone()))
    total = loss_of(whole[networks[name].out_keys[0]], batch)
    parameters = parameters_of(networks, name)
    torch.testing.assert_close(torch.autograd.grad(total, parameters, allow_unused=True), expected)
    # cut shorter, they are others
    cut = gradients_of_sequences(networks, name, batch, 4, n)
    assert (cut[0] - expected[0]).abs().max() > 1e-3 * expected[0].abs().max()
