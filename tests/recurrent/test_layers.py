"""Runs of several lengths, by the modules, against torch's over packed sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ppokit import GRUModule, LSTMModule

both = pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])


def draw(
    kind: type[nn.RNNBase], inputs: int, size: int, sizes: list[int], **options: Any
) -> tuple[nn.RNNBase, list[Tensor]]:
    """Return a layer, packed frames, and the states before their first step."""
    torch.manual_seed(sum(sizes) + size)
    dtype = options.setdefault("dtype", torch.float64)
    network = kind(inputs, size, batch_first=True, **options)
    states = [torch.randn(sizes[0], size, dtype=dtype) for _ in range(1 + (kind is nn.LSTM))]
    return network, [torch.randn(sum(sizes), inputs, dtype=dtype), *states]


def run(network: nn.RNNBase, given: list[Tensor], sizes: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Return the output at each packed frame, of a batch whose rows have those lengths.

    And the states after the last frame of each row.
    """
    x, *states = given
    lengths = torch.tensor([sum(size > row for size in sizes) for row in range(sizes[0])])
    step = torch.cat([torch.full((size,), t) for t, size in enumerate(sizes)])
    row = torch.cat([torch.arange(size) for size in sizes])
    shape = (sizes[0], len(sizes))
    batch = TensorDict(
        {
            "x": x.new_zeros(*shape, x.shape[1]).index_put((row, step), x),
            "is_init": torch.zeros(*shape, 1, dtype=torch.bool),
            "collector": {"mask": torch.arange(len(sizes)) < lengths.unsqueeze(1)},
        },
        shape,
    )
    names = ["h", "c"][: len(states)]
    for name, state in zip(names, states, strict=True):
        batch[name] = state[:, None, None].expand(-1, len(sizes), -1, -1)
    keys: Any = {"in_keys": ["x", *names], "out_keys": ["y", *(("next", name) for name in names)]}
    kind, of = (LSTMModule, "lstm") if isinstance(network, nn.LSTM) else (GRUModule, "gru")
    kind(**{of: network}, default_recurrent_mode=True, **keys)(batch)
    after = [batch["next", name][torch.arange(sizes[0]), lengths - 1, 0] for name in names]
    return batch["y"][row, step], after


def ours(network: nn.RNNBase, given: list[Tensor], sizes: list[int]) -> Tensor:
    return run(network, given, sizes)[0]


def of_torch(network: nn.RNNBase, given: list[Tensor], sizes: list[int]) -> Tensor:
    x, *states = given
    packed = PackedSequence(x, torch.tensor(sizes))
    first: Any = tuple(state.unsqueeze(0) for state in states)
    return network(packed, first if isinstance(network, nn.LSTM) else first[0])[0].data


def gradients(made: Tensor, network: nn.RNNBase, given: list[Tensor]) -> list[Tensor]:
    by = torch.linspace(-1, 1, made.numel(), dtype=made.dtype).view_as(made)
    return list(torch.autograd.grad(made, [*network.parameters(), *given], by))


@both
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("inputs", "size", "sizes"),
    [
        (1, 1, [1]),
        (3, 5, [1, 1, 1]),
        (7, 17, [6, 6]),
        (19, 33, [7, 5, 5, 3, 1]),
        (4, 64, [13, 12, 2, 2]),
        (64, 70, [29, 11, 10]),
        (2, 150, [3, 2]),
        (3, 4, [600]),
    ],
)
def test_states_and_gradients_are_those_of_torch(
    kind: type[nn.RNNBase],
    dtype: torch.dtype,
    inputs: int,
    size: int,
    sizes: list[int],
):
    network, given = draw(kind, inputs, size, sizes, dtype=dtype)
    given = [x.requires_grad_() for x in given]
    found, expected = ours(network, given, sizes), of_torch(network, given, sizes)
    close = (
        {"rtol": 1e-10, "atol": 1e-12} if dtype is torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    )
    torch.testing.assert_close(found, expected, **close)
    pairs = zip(gradients(found, network, given), gradients(expected, network, given), strict=True)
    for gradient, of_theirs in pairs:
        scale = float(of_theirs.abs().max().clamp(min=1))
        torch.testing.assert_close(gradient / scale, of_theirs / scale, **close)


@both
def test_states_after_the_last_frame_of_each_row(kind: type[nn.RNNBase]):
    sizes = [6, 4, 4, 1]
    network, (x, *states) = draw(kind, 3, 20, sizes)
    first: Any = tuple(state.unsqueeze(0) for state in states)
    packed = PackedSequence(x, torch.tensor(sizes))
    expected = network(packed, first if kind is nn.LSTM else first[0])[1]
    with torch.no_grad():
        found = run(network, [x, *states], sizes)[1]
    for after, of_theirs in zip(found, expected if kind is nn.LSTM else [expected], strict=True):
        torch.testing.assert_close(after, of_theirs[0])


@both
def test_without_biases(kind: type[nn.RNNBase]):
    network, given = draw(kind, 3, 20, [5, 4], bias=False)
    found, expected = ours(network, given, [5, 4]), of_torch(network, given, [5, 4])
    torch.testing.assert_close(found, expected)
    for pair in zip(gradients(found, network, []), gradients(expected, network, []), strict=True):
        torch.testing.assert_close(*pair)


@both
@pytest.mark.parametrize("frozen", ["bias_ih_l0", "bias_hh_l0", "weight_ih_l0", "weight_hh_l0"])
def test_a_frozen_parameter_alone_has_no_gradient(kind: type[nn.RNNBase], frozen: str):
    network, given = draw(kind, 3, 20, [5, 4])
    getattr(network, frozen).requires_grad_(False)
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    found, expected = (made(network, given, [5, 4]).square().sum() for made in (ours, of_torch))
    pairs = (torch.autograd.grad(total, trained) for total in (found, expected))
    for gradient, of_theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(gradient, of_theirs)


@both
def test_derivatives(kind: type[nn.RNNBase]):
    network, given = draw(kind, 2, 3, [3, 2, 2])
    inputs = [*(x.requires_grad_() for x in given), *network.parameters()]
    assert torch.autograd.gradcheck(
        lambda *x: ours(network, list(x[: len(given)]), [3, 2, 2]), inputs
    )


@both
def test_saturated_gates_and_what_is_not_finite(kind: type[nn.RNNBase]):
    network, given = draw(kind, 2, 40, [4, 4, 3], dtype=torch.float32)
    given[0][1], given[0][2] = 1e4, -3e38
    found, expected = ours(network, given, [4, 4, 3]), of_torch(network, given, [4, 4, 3])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    given[0][3, 0] = torch.nan
    found = ours(network, given, [4, 4, 3])
    of_row = [3, 7]  # the steps of the fourth row
    assert found[of_row].isnan().all()
    assert found[[0, 1, 2, 4, 5, 6, 8, 9, 10]].isfinite().all()


@both
def test_what_is_not_in_one_piece(kind: type[nn.RNNBase]):
    network, given = draw(kind, 6, 8, [5, 3])
    expected = ours(network, given, [5, 3])
    views = [torch.stack([x, x], -1)[..., 0] for x in given]
    assert not any(view.is_contiguous() for view in views)
    made = ours(network, views, [5, 3])
    torch.testing.assert_close(made, expected)
    (made.sum(1, keepdim=True).expand(-1, 2)).sum().backward()  # a gradient that is expanded
    assert network.weight_hh_l0.grad is not None


@both
def test_second_derivatives(kind: type[nn.RNNBase]):
    network, given = draw(kind, 2, 3, [3, 1])
    found, expected = (made(network, given, [3, 1]).square().sum() for made in (ours, of_torch))
    results = []
    for total in (found, expected):
        (slope,) = torch.autograd.grad(total, network.weight_hh_l0, create_graph=True)
        results.append(torch.autograd.grad(slope.square().sum(), network.weight_hh_l0)[0])
    torch.testing.assert_close(*results)


def test_gradients_of_states_alone():
    network, given = draw(nn.LSTM, 2, 3, [3, 2, 2])
    inputs = [*(x.requires_grad_() for x in given), *network.parameters()]
    for state in (0, 1):
        assert torch.autograd.gradcheck(
            lambda *x, state=state: run(network, list(x[: len(given)]), [3, 2, 2])[1][state], inputs
        )
