"""A recurrent training step in a graph is the eager one; other recurrent modules run eagerly."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss

from ppokit import (
    GAE,
    DualClipPPOLoss,
    GymCollector,
    LSTMModule,
    PPOUpdate,
    SequenceBatcher,
    TrainingStep,
)
from ppokit.kernels.operator import run_lstm
from ppokit.networks import actor_critic

EAGER = {"backend": "eager"}  # captures a graph, and runs it with torch's kernels
SPACES = gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Discrete(2)


@pytest.mark.parametrize("probability", [0.0, 0.2, 0.6])
def test_the_operator_is_a_loop_over_cells(probability: float):
    """Output and all gradients, in float64, where rows start from stored states."""
    for seed in range(8):
        torch.manual_seed(seed)
        steps, rows, size, units = (int(x) for x in torch.randint(1, 9, (4,)))
        weights = [p.detach() for p in torch.nn.LSTM(size, units).parameters()]
        states = torch.randn(2, steps, rows, units)
        given = [torch.randn(steps, rows, size), *states, *weights]
        starts = torch.rand(steps, rows) < probability
        weight = torch.randn(steps, rows, units)

        exact = [x.double().requires_grad_() for x in given]
        x, h, c, *weights = exact
        outputs, state = [], (h[0], c[0])
        for t in range(steps):
            if t:
                is_start = starts[t].unsqueeze(-1)
                h_t, c_t = (
                    torch.where(is_start, z[t], y) for z, y in zip((h, c), state, strict=True)
                )
                state = h_t, c_t
            state = torch.lstm_cell(x[t], state, *weights)
            outputs.append(state[0])
        expected = torch.stack(outputs)
        gradients = torch.autograd.grad((expected * weight).sum(), exact)

        inputs = [x.clone().requires_grad_() for x in given]
        found, *_ = run_lstm(inputs[0], starts, *inputs[1:])
        others = torch.autograd.grad((found * weight).sum(), inputs)
        pairs = [(found, expected), *zip(others, gradients, strict=True)]
        for y, z in pairs:
            torch.testing.assert_close(y.double(), z, rtol=1e-4, atol=1e-5)


def make_step(networks: Any, compile: Any) -> TrainingStep:
    networks = copy.deepcopy(networks)
    loss = DualClipPPOLoss(networks.actor, networks.value)
    optimizer = torch.optim.Adam(loss.parameters(), lr=3e-3)
    return TrainingStep(loss, optimizer, max_grad_norm=0.5, compile=compile)


def minibatch(rows: int, steps: int, starts: float, *, masked: bool, seed: int) -> TensorDict:
    draw = torch.Generator().manual_seed(seed)
    size = rows, steps
    batch = TensorDict(
        {
            "observation": torch.randn(*size, 3, generator=draw),
            "is_init": torch.rand(*size, 1, generator=draw) < starts,
            "advantage": torch.randn(*size, 1, generator=draw),
            "value_target": torch.randn(*size, 1, generator=draw),
            "action": torch.randint(2, size, generator=draw),
            "action_log_prob": -torch.rand(size, generator=draw),
        },
        size,
    )
    for name in ("recurrent_state_h", "recurrent_state_c"):
        for key in (name, f"critic_{name}"):
            batch[key] = torch.randn(*size, 1, 8, generator=draw)
            batch["next", key] = torch.full((*size, 1, 8), torch.nan)  # is not read
    if masked:
        lengths = torch.randint(1, steps + 1, (rows, 1), generator=draw)
        batch["collector", "mask"] = torch.arange(steps) < lengths
        batch["observation"][~batch["collector", "mask"]] = torch.nan
    return batch


def numbers_of(step: TrainingStep) -> Tensor:
    return torch.cat([p.detach().flatten() for p in step.loss.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_steps_in_a_graph_are_eager_steps(*, shared: bool, masked: bool):
    """Of other sizes, with starts within rows, and NaN in the padding; two captures at most."""
    torch.manual_seed(0)
    networks = actor_critic(SPACES, (16,), shared=shared, memory="lstm", memory_size=8)
    steps = [make_step(networks, compile) for compile in (False, EAGER)]
    sizes = [(4, 6), (4, 6), (3, 5), (5, 7), (2, 9), (8, 8), (16, 3)]
    for seed, (rows, length) in enumerate(sizes):
        given = minibatch(rows, length, 0.2 * (seed % 2), masked=masked, seed=seed)
        expected, found = (step(given.clone()) for step in steps)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(*map(numbers_of, steps), rtol=1e-5, atol=1e-6)
    assert "compiled" in repr(steps[1])


@pytest.mark.slow
def test_a_loop_in_graphs_is_an_eager_loop():
    """Whole updates, whose minibatches have all numbers of sequences, by one graph."""

    def run(compile: Any) -> tuple[Tensor, str]:
        torch.manual_seed(0)
        networks = actor_critic("CartPole-v1", (16,), memory="lstm", memory_size=8)
        step = make_step(networks, compile)
        update = PPOUpdate(
            step,
            advantage=GAE(gamma=0.99, lmbda=0.95, value_network=step.loss.critic_network),
            batcher=SequenceBatcher(8),
            epochs=2,
            minibatch_size=32,
            seed=0,
        )
        policy = networks.policy
        with GymCollector("CartPole-v1", policy, frames_per_batch=128, num_envs=4) as collector:
            collector.set_seed(0)
            for _ in range(3):
                update(collector.rollout())
        return numbers_of(step), repr(step)

    networks = run(False), run(EAGER)
    torch.testing.assert_close(networks[1][0], networks[0][0], rtol=1e-5, atol=1e-6)
    assert "compiled" in networks[1][1]


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("gru", {}, "no nn.LSTM of one layer"),
        ("lstm", {"dtype": torch.float64}, "not in float32"),
        ("lstm", {"frozen": True}, "frozen weights"),
    ],
)
def test_other_recurrent_modules_run_eagerly(
    kind: Any, options: Any, reason: str, request: pytest.FixtureRequest
):
    torch.manual_seed(0)
    dtype = options.get("dtype", torch.float32)
    request.addfinalizer(partial(torch.set_default_dtype, torch.get_default_dtype()))
    torch.set_default_dtype(dtype)
    networks = actor_critic(SPACES, (16,), memory=kind, memory_size=8, shared=True)
    if "frozen" in options:
        name = next(name for name, _ in networks.actor.named_parameters() if "lstm" in name)
        networks.actor.get_parameter(name).requires_grad_(False)
    steps = [make_step(networks, compile) for compile in (False, EAGER)]
    for seed in range(2):
        given = minibatch(4, 6, 0.2, masked=False, seed=seed)
        given["recurrent_state"] = given["recurrent_state_h"]
        given = given.apply(lambda x: x.to(dtype) if x.is_floating_point() else x)
        expected = steps[0](given.clone())
        if seed == 0:
            with pytest.warns(RuntimeWarning, match=reason):
                found = steps[1](given.clone())
        else:
            found = steps[1](given.clone())
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(*map(numbers_of, steps), rtol=0, atol=0)


@pytest.mark.parametrize(
    "sizes",
    [
        {"x": (4, 2, 5)},  # more inputs than weights: oneDNN would read behind them
        {"x": (4, 2, 2)},
        {"h": (4, 2, 6), "c": (4, 2, 6)},
        {"starts": (2, 4)},
    ],
    ids=str,
)
def test_the_operator_refuses_other_sizes(sizes: dict[str, tuple[int, ...]]):
    whole = {"x": (4, 2, 3), "starts": (4, 2), "h": (4, 2, 8), "c": (4, 2, 8)} | sizes
    given = {name: torch.zeros(size) for name, size in whole.items()}
    given["starts"] = given["starts"].bool()
    weights = [p.detach() for p in torch.nn.LSTM(3, 8).parameters()]
    with pytest.raises(ValueError, match="An LSTM in a graph was given"):
        run_lstm(*given.values(), *weights)


def test_gradients_have_the_dtype_of_what_they_are_of(request: pytest.FixtureRequest):
    """And not the default one, which a graph does not expect."""
    lstm = torch.nn.LSTM(3, 8)
    request.addfinalizer(partial(torch.set_default_dtype, torch.get_default_dtype()))
    torch.set_default_dtype(torch.float64)
    x, states = torch.zeros(4, 2, 3, dtype=torch.float32), torch.zeros(4, 2, 8, dtype=torch.float32)
    made = torch.ops.ppokit.lstm(
        x, torch.zeros(4, 2, dtype=torch.bool), states, states, [*lstm.parameters()]
    )
    given = x, torch.zeros(4, 2, dtype=torch.bool), states, states, [*lstm.parameters()], *made
    found = torch.ops.ppokit.lstm_backward(states, states, *given)
    assert {y.dtype for y in found} == {torch.float32}


class Optional(torch.nn.Module):
    """A network that reads the state after a step where there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x: Tensor, state: Tensor | None = None) -> Tensor:
        return self.layer(x if state is None else x + state[..., 0, :])


def make_own(kind: Any, compile: Any) -> TrainingStep:
    """Return a step of networks that read the state that the LSTM writes."""
    torch.manual_seed(0)
    memory = LSTMModule(3, 8, in_key="observation", out_key="m")
    state = ("next", "recurrent_state_h")
    parts = [memory, TensorDictModule(Optional(), ["m", state], ["n"])]
    parts.append(TensorDictModule(torch.nn.Linear(8, 2), ["n"], ["logits"]))
    actor = ProbabilisticActor(
        TensorDictSequential(*parts),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    loss = kind(actor, ValueOperator(torch.nn.Linear(8, 1), ["n"]), functional=False)
    return TrainingStep(loss, torch.optim.Adam(loss.parameters(), lr=3e-3), compile=compile)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DualClipPPOLoss, ClipPPOLoss])
def test_networks_that_read_the_state_after_a_step(kind: Any):
    """Of batches of one, two and three dimensions; another number of inputs raises in both."""
    steps = [make_own(kind, compile) for compile in (False, EAGER)]
    for seed in range(4):
        given = minibatch(4, 6, 0.3, masked=False, seed=seed)
        given = (given, given, given.reshape(2, 2, 6), given[0])[seed]
        expected, found = (step(given.clone()) for step in steps)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(*map(numbers_of, steps), rtol=1e-5, atol=1e-6)
    assert "compiled" in repr(steps[1])
    wrong = minibatch(4, 6, 0.0, masked=False, seed=9)
    wrong["observation"] = torch.zeros(4, 6, 5)
    before = numbers_of(steps[1])
    for step in steps:
        with pytest.raises((ValueError, RuntimeError), match=r"input_size. Expected 3, got 5"):
            step(wrong.clone())
    assert torch.equal(numbers_of(steps[1]), before)
