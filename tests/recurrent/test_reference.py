"""LSTMModule and GRUModule against a slow loop over single steps, on random batches."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from ppokit import GRUModule, LSTMModule


def draw(seed: int) -> tuple[nn.RNNBase, TensorDict, list[str]]:
    """Return a network, a batch ``[B, T]`` and the names of its states."""
    draws = random.Random(seed)
    torch.manual_seed(seed)
    kind, dtype = draws.choice([nn.LSTM, nn.GRU]), draws.choice([torch.float64, torch.float32])
    inputs, size, layers = (
        draws.choice([1, 3, 8]),
        draws.choice([1, 4, 17]),
        draws.choice([1, 1, 3]),
    )
    network = kind(inputs, size, layers, batch_first=True, bias=draws.random() < 0.8, dtype=dtype)
    names = ["h", "c"] if kind is nn.LSTM else ["h"]
    rows, steps = draws.choice([1, 2, 5]), draws.choice([1, 2, 5, 13])
    x = torch.randn(rows, steps, inputs, dtype=dtype)
    batch = TensorDict({}, [rows, steps])
    if draws.random() < 0.6:
        lengths = torch.tensor([draws.randint(draws.choice([0, 1]), steps) for _ in range(rows)])
        mask = torch.arange(steps) < lengths.unsqueeze(1)
        if draws.random() < 0.3:  # frames in between that are not valid either
            mask &= torch.rand(rows, steps) < 0.7
        batch["collector", "mask"] = mask
        x = x.masked_fill(~until_the_last(mask).unsqueeze(-1), torch.nan)
    batch["x"] = x.requires_grad_()
    batch["is_init"] = torch.rand(rows, steps, 1) < draws.choice([0.0, 0.2, 0.6])
    for name in names if draws.random() < 0.8 else ():
        state = torch.randn(rows, steps, layers, size, dtype=draws.choice([dtype, torch.float32]))
        batch[name] = state.requires_grad_()
    return network, batch, names


def until_the_last(mask: Tensor) -> Tensor:
    """True up to the last True of each row."""
    return mask.flip(1).cummax(1).values.flip(1)


def step_by_step(
    network: nn.RNNBase, batch: TensorDict, names: list[str]
) -> tuple[Tensor, list[Tensor]]:
    """Return the output, and the states after each run; zeros elsewhere."""
    (rows, steps), x = batch.shape, batch["x"].nan_to_num()
    real = until_the_last(batch.get(("collector", "mask"), torch.ones(rows, steps).bool()))
    starts = batch["is_init"].squeeze(-1)
    zeros = x.new_zeros(network.num_layers, 1, network.hidden_size)
    output, after = [], []
    for row in range(rows):
        for t in range(steps):
            if t == 0 or starts[row, t]:
                states = [batch.get(name, None) for name in names]
                states = [
                    zeros if given is None else given[row, t].unsqueeze(1).to(x.dtype)
                    for given in states
                ]
            if not real[row, t]:
                output.append(zeros[-1, 0])
                after.append([zeros[:, 0] for _ in names])
                continue
            first: Any = tuple(states) if len(names) == 2 else states[0]  # pyright: ignore
            made, new = network(x[row : row + 1, t : t + 1], first)
            states = list(new) if len(names) == 2 else [new]
            ends = t == steps - 1 or starts[row, t + 1] or not real[row, t + 1]
            output.append(made[0, 0])
            after.append([state[:, 0] if ends else zeros[:, 0] for state in states])
    columns = [
        torch.stack(column).unflatten(0, (rows, steps)) for column in zip(*after, strict=True)
    ]
    return torch.stack(output).unflatten(0, (rows, steps)), columns


@pytest.mark.parametrize("seed", range(30))
def test_outputs_states_and_gradients_equal_the_slow_loop(seed: int):
    network, batch, names = draw(seed)
    kind, of = (LSTMModule, "lstm") if isinstance(network, nn.LSTM) else (GRUModule, "gru")
    keys = {"in_keys": ["x", *names], "out_keys": ["y", *(("next", name) for name in names)]}
    module = kind(**{of: network}, default_recurrent_mode=True, **keys)
    made = module(batch.copy())
    output, after = step_by_step(network, batch, names)
    close = (
        {"rtol": 1e-9, "atol": 1e-9}
        if output.dtype is torch.float64
        else {"rtol": 2e-4, "atol": 2e-5}
    )
    torch.testing.assert_close(made["y"], output, **close)
    weight = torch.randn_like(output)
    total, expected = (made["y"] * weight).sum(), (output * weight).sum()
    with torch.no_grad():
        exact = module(batch.copy())
    for name, state in zip(names, after, strict=True):
        torch.testing.assert_close(exact["next", name], state, **close)
        # With gradients the state after a row that ends in padding may be unknown, and is 0.
        is_known = made["next", name].flatten(-2).any(-1)[..., None, None]
        torch.testing.assert_close(made["next", name], state * is_known, **close)
        weight = torch.randn_like(state) * is_known
        total = total + (made["next", name] * weight).sum()
        expected = expected + (state * weight).sum()
    if not expected.requires_grad:
        return
    inputs = [*network.parameters(), *(batch[key] for key in ("x", *names) if key in batch)]
    found, theirs = (
        torch.autograd.grad(x, inputs, allow_unused=True, materialize_grads=True)
        for x in (total, expected)
    )
    for gradient, of_theirs in zip(found, theirs, strict=True):
        scale = of_theirs.abs().max().clamp(min=1)
        torch.testing.assert_close(gradient / scale, of_theirs / scale, **close)
