"""``tutorials/rllib_ppo.py``, and RLlib's rules in the blocks that it is made of."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.modules import ProbabilisticActor, ValueOperator

from ppokit import GAE, AdaptiveKLCoeff, DualClipPPOLoss, GymCollector, PPOUpdate, SequenceBatcher
from tests.test_tutorials import TUTORIALS, history, run

SCRIPT = TUTORIALS / "rllib_ppo.py"


def make_networks(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The example's: a linear layer of 32 that policy and value share."""
    torch.manual_seed(0)
    encoder = TensorDictModule(nn.Linear(4, 32, dtype=dtype), ["observation"], ["features"])
    head = TensorDictModule(nn.Linear(32, 2, dtype=dtype), ["features"], ["logits"])
    actor = ProbabilisticActor(
        TensorDictSequential(encoder, head),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    value = ValueOperator(nn.Linear(32, 1, dtype=dtype), in_keys=["features"])
    return actor, TensorDictSequential(encoder, value)


def make_loss(actor: Any, critic: Any, **options: Any) -> DualClipPPOLoss:
    arguments: dict[str, Any] = {
        "clip_epsilon": 0.3,
        "kl_coeff": 0.2,
        "entropy_coeff": 0.01,
        "critic_coeff": 0.01,
        "critic_loss_clip": 10.0,
        "loss_critic_type": "l2",
    }
    return DualClipPPOLoss(actor, critic, **arguments | options)


def make_update(lr: float = 1e-2, **options: Any) -> tuple[PPOUpdate, GymCollector]:
    actor, critic = make_networks()
    loss = make_loss(actor, critic)
    update = PPOUpdate(
        loss,
        torch.optim.Adam(loss.parameters(), lr=lr),
        advantage=GAE(gamma=0.99, lmbda=1.0, value_network=critic, average_gae=True),
        minibatch_size=128,
        seed=0,
        **options,
    )
    collector = GymCollector(
        "CartPole-v1", actor, num_envs=4, frames_per_batch=512, categorical_action_encoding=True
    )
    collector.set_seed(0)
    return update, collector


# -- RLlib's rules ------------------------------------------------------------------


def test_the_loss_is_rllibs():
    """Term by term as in RLlib's ``PPOTorchLearner.compute_loss_for_module``."""
    actor, critic = make_networks(torch.float64)
    loss = make_loss(actor, critic)
    generator = torch.Generator().manual_seed(1)
    normal: Any = {"generator": generator, "dtype": torch.float64}
    batch = TensorDict({"observation": torch.randn(200, 4, **normal)}, [200])
    with torch.no_grad():
        actor(batch)
        for parameter in loss.parameters():  # as if some updates had been made
            parameter += 0.3 * torch.randn(parameter.shape, **normal)
    batch["advantage"] = torch.randn(200, 1, **normal)
    batch["value_target"] = 4 * torch.randn(200, 1, **normal)

    inputs = batch.select("observation")
    before = torch.distributions.Categorical(logits=batch["logits"])
    now = actor.get_dist(inputs.clone())
    ratio = (now.log_prob(batch["action"]) - batch["action_log_prob"]).exp()
    advantage, target = batch["advantage"].squeeze(-1), batch["value_target"].squeeze(-1)
    surrogate = torch.min(advantage * ratio, advantage * ratio.clamp(0.7, 1.3))
    error = (critic(inputs.clone())["state_value"].squeeze(-1) - target) ** 2
    kl = torch.distributions.kl_divergence(before, now)
    expected = (-surrogate + 0.01 * error.clamp(0, 10.0) - 0.01 * now.entropy()).mean()
    expected = expected + 0.2 * kl.mean()
    assert 0.1 < (error > 10).double().mean() < 0.9
    assert 0.05 < ((ratio - 1).abs() > 0.3).double().mean() < 0.95

    losses = loss(batch)
    total = sum(losses[name] for name in losses.keys() if name.startswith("loss_"))
    torch.testing.assert_close(total, expected)
    parameters = list(loss.parameters())
    found, wanted = (torch.autograd.grad(x, parameters) for x in (total, expected))
    torch.testing.assert_close(found, wanted)


def test_the_kl_coefficient_moves_by_rllibs_rule():
    update, collector = make_update(epochs=1)
    update.adaptive_kl = AdaptiveKLCoeff(update.loss, target_kl=0.01)
    expected, moves = 0.2, set()
    for lr in (1e-1, 1e-4, 1e-4, 1e-2, 1e-1):
        update.optimizer.param_groups[0]["lr"] = lr
        statistics = update(collector.rollout())
        assert statistics["kl_coeff"] == pytest.approx(expected)  # as it was meanwhile
        factor = 1.0
        if statistics["kl"] > 2.0 * 0.01:
            factor = 1.5
        elif statistics["kl"] < 0.5 * 0.01:
            factor = 0.5
        moves.add(factor)
        expected *= factor
        assert update.loss.kl_coeff.item() == pytest.approx(expected)
    assert moves >= {0.5, 1.5}


@pytest.mark.parametrize("shuffle", [True, False])
def test_sequences_are_shuffled_and_their_steps_are_not(shuffle: bool):
    update, collector = make_update(
        epochs=2, shuffle=shuffle, batcher=SequenceBatcher(16, cut_keys=())
    )
    batch = collector.rollout()
    seen: list[torch.Tensor] = []

    def note(_: Any, inputs: Any) -> None:
        minibatch = inputs[0]
        assert minibatch.shape[1] <= 16
        for row in minibatch:
            seen.append(row["observation"][row["collector", "mask"]])

    update.loss.register_forward_pre_hook(note)
    update(batch)
    frames = {tuple(x.tolist()): i for i, x in enumerate(batch["observation"].reshape(-1, 4))}
    orders = [[frames[tuple(x.tolist())] for x in sequence] for sequence in seen]
    assert all(b - a == 1 for order in orders for a, b in itertools.pairwise(order))
    first, second = orders[: len(orders) // 2], orders[len(orders) // 2 :]
    for epoch in (first, second):
        assert sorted(i for order in epoch for i in order) == list(range(512))
    assert (first == second) != shuffle


# -- the tutorial -------------------------------------------------------------------

OPTIONS = ["--lr", "[[0, 0.003], [4000, 0.0003]]", "--entropy-coeff", "[[0, 0.02], [3000, 0]]"]
OPTIONS += ["--quick", "--grad-clip", "0.5", "--seq-len", "20", "--num-envs", "10"]


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("rllib") / "run"
    return out, run(out, *OPTIONS, script=SCRIPT)


def test_quick_and_its_schedules(quick_run: Any):
    out, result = quick_run
    assert result.returncode == 0, result.stderr
    assert "CartPole-v1: mean return" in result.stdout
    figure = matplotlib.image.imread(out / "figure.png")
    assert figure.shape[0] > 500
    assert figure.std() > 0.01
    rows = history(out)
    assert [row["frames"] for row in rows] == [1000.0 * n for n in range(1, 7)]
    begun = [row["frames"] - 1000 for row in rows]  # a schedule is where the batch began
    lr = np.interp(begun, [0, 4000], [0.003, 0.0003])
    np.testing.assert_allclose([row["lr"] for row in rows], lr, rtol=1e-5)
    entropy = np.interp(begun, [0, 3000], [0.02, 0.0])
    np.testing.assert_allclose([row["entropy_coeff"] for row in rows], entropy, atol=1e-8)
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert "eval_return" in rows[-1]
    assert all(row["padded"] < 0.5 for row in rows)
    assert len({row["kl"] for row in rows}) == 6


def test_resume(quick_run: Any):
    out, _ = quick_run
    before = history(out)
    more = run(out, *OPTIONS, "--resume", "--total-frames", "8000", script=SCRIPT)
    assert more.returncode == 0, more.stderr
    rows = history(out)
    assert rows[:6] == before
    assert [row["frames"] for row in rows[6:]] == [7000.0, 8000.0]
    assert rows[6]["lr"] == pytest.approx(0.0003)  # where the schedule was
    # the coefficient is that after the last update: one move from that of the update before
    ratio = rows[6]["kl_coeff"] / before[-1]["kl_coeff"]
    assert min(abs(ratio - factor) for factor in (0.5, 1.0, 1.5)) < 1e-5
    assert rows[6]["seconds"] > before[-1]["seconds"]


@pytest.mark.slow
def test_resuming_another_run_is_refused(quick_run: Any):
    out, _ = quick_run
    other = run(
        out, "--quick", "--resume", "--total-frames", "9000", "--hidden", "8", script=SCRIPT
    )
    assert other.returncode == 2
    assert "is of another run" in other.stderr


def test_without_a_critic(tmp_path: Path):
    out = tmp_path / "run"
    options = ["--no-critic", "--time-limit-is-end", "--lr", "0.003", "--total-frames", "3000"]
    result = run(out, "--quick", *options, script=SCRIPT)
    assert result.returncode == 0, result.stderr
    rows = history(out)
    assert all("loss_critic" not in row and row["episodes"] == 16 for row in rows)
    lengths = [16 * row["episode_length"] for row in rows]
    np.testing.assert_allclose([row["frames"] for row in rows], np.cumsum(lengths))
    assert rows[-1]["return_100"] > rows[0]["return_100"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--no-gae", "--no-shuffle", "--no-kl-loss"],
        ["--settings", "ppokit", "--env", "Pendulum-v1"],
        ["--no-critic", "--env", "MountainCar-v0", "--time-limit-is-end", "--seq-len", "50"],
    ],
)
def test_other_kinds(tmp_path: Path, options: list[str]):
    out = tmp_path / "run"
    result = run(out, "--quick", *options, script=SCRIPT)
    assert result.returncode == 0, result.stderr
    rows = history(out)
    assert ("kl_coeff" in rows[-1]) == ("--no-kl-loss" not in options)
    assert ("loss_critic" in rows[-1]) == ("--no-critic" not in options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--no-critic"], "truncates episodes after 500 steps.*no value to bootstrap from"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (["--lr", "[[5, 0.1]]"], r"argument --lr: .* it must be at frame 0"),
                (["--resume"], "run without --resume first"),
                (["--clip-param", "1.5"], "clip_epsilon .* 1.5"),
                (["--kl-target", "0"], "target_kl must be positive"),
                (["--lambda", "1.1"], "lmbda must .* 1.1"),
                (["--no-gae", "--lambda", "0.9"], "--no-gae: lambda is 1 without GAE"),
                (["--env", "FrozenLake-v1"], "Discrete.16., not a vector"),
                (["--minibatch-size", "0"], "minibatch_size"),
                (["--entropy-coeff", "[[0, 0], [100, 0.1]]"], "begins at 0"),
            )
        ),
    ],
)
def test_wrong_options_fail_at_once(tmp_path: Path, options: list[str], message: str):
    result = run(tmp_path / "run", "--quick", *options, script=SCRIPT)
    assert result.returncode == 2, result.stderr
    said = " ".join(result.stderr.split())
    assert re.search(message, said), said
    assert not (tmp_path / "run").exists()
