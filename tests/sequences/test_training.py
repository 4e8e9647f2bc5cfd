"""Training on sequences: gradients of whole episodes, and replay of the collected batches."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, InitTracker, SerialEnv, StepCounter, TransformedEnv
from torchrl.modules import (
    GRUModule,
    LSTMModule,
    OneHotCategorical,
    ProbabilisticActor,
    set_recurrent_mode,
)

from ppokit import GymCollector, SequenceBatcher
from tests.recurrent.agents import CRITIC, C, H, make_networks, play, some_done
from tests.sequences.cases import DONE, MASK, assert_same, runs

# -- gradients


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


# -- replay


def collect(core: Any, kind: str) -> tuple[ProbabilisticActor, list[TensorDictBase]]:
    """Two batches of two CartPoles, truncated at 14 steps, under a policy that stores states."""
    head = TensorDictModule(nn.Linear(8, 2), in_keys=["embed"], out_keys=["logits"])
    policy = ProbabilisticActor(
        TensorDictSequential(core, head),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )
    frames = {"frames_per_batch": 66, "total_frames": 132}
    if kind == "GymCollector":
        make: Any = lambda: gym.make("CartPole-v1", max_episode_steps=14)  # noqa: E731
        collector: Any = GymCollector(
            make, policy, num_envs=2, categorical_action_encoding=False, **frames
        )
        collector.set_seed(0)
    else:
        make = lambda: GymEnv("CartPole-v1", categorical_action_encoding=False)  # noqa: E731
        env = TransformedEnv(SerialEnv(2, make), InitTracker())
        env.append_transform(StepCounter(max_steps=14))
        env.append_transform(core.make_tensordict_primer())
        env.set_seed(0)
        collector = Collector(env, policy, **frames)
    try:
        return policy, list(collector)
    finally:
        collector.shutdown()


@pytest.mark.parametrize(
    ("kind", "core_class", "seq_len", "burn_in"),
    [
        ("GymCollector", LSTMModule, 5, 3),
        ("GymCollector", GRUModule, None, 0),
        ("Collector", LSTMModule, 5, 0),
        ("Collector", GRUModule, 2, 5),
    ],
)
def test_replay_from_stored_states_equals_collection(kind, core_class, seq_len, burn_in):
    core = core_class(4, 8, in_key="observation", out_key="embed")
    policy, collected = collect(core, kind)
    batcher = SequenceBatcher(seq_len, burn_in=burn_in)
    # The test would be empty if the second batch began with episodes, or none ended inside.
    assert not collected[1]["is_init"][:, 0].all()
    for batch in collected:
        assert batch[DONE][:, :-1].any()
        parts = list(batcher.minibatches(batcher.places(batch), 3, batch=batch))
        assert sum(int(part[MASK].sum()) for part in parts) == 66
        assert_same(batcher.unbatch(parts), batch)
        for part in parts:
            ready = batcher.refresh(part, policy)
            mask = ready[MASK]
            assert mask.sum() == part[MASK].sum()
            with set_recurrent_mode(True), torch.no_grad():
                replayed = policy.get_dist(ready.clone()).log_prob(ready["action"])
            stored = ready["action_log_prob"]
            torch.testing.assert_close(replayed[mask], stored[mask], rtol=0, atol=1e-5)
