"""``tutorials/rllib_ppo.py``, and RLlib's rules in the blocks that it is made of."""

from __future__ import annotations

import itertools
import math
import re
import runpy
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import matplotlib.image
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.envs.classic_control.pendulum import PendulumEnv
from gymnasium.spaces import Box, Discrete
from gymnasium.wrappers import TransformAction
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.modules import ProbabilisticActor, ValueOperator

from ppokit import GAE, AdaptiveKLCoeff, DualClipPPOLoss, GymCollector, PPOUpdate, SequenceBatcher
from tests.blocks import ppo_update
from tests.test_tutorials import TUTORIALS, assert_finite, history, run

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
    update = ppo_update(
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
    update.adaptive_kl = AdaptiveKLCoeff(update.step.loss, target_kl=0.01)
    expected, moves = 0.2, set()
    for lr in (1e-1, 1e-4, 1e-4, 1e-2, 1e-1):
        update.step.optimizer.param_groups[0]["lr"] = lr
        statistics = update(collector.rollout())
        assert statistics["kl_coeff"] == pytest.approx(expected)  # as it was meanwhile
        factor = 1.0
        if statistics["kl"] > 2.0 * 0.01:
            factor = 1.5
        elif statistics["kl"] < 0.5 * 0.01:
            factor = 0.5
        moves.add(factor)
        expected *= factor
        assert update.step.loss.kl_coeff.item() == pytest.approx(expected)
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

    update.step.loss.register_forward_pre_hook(note)
    update(batch)
    frames = {tuple(x.tolist()): i for i, x in enumerate(batch["observation"].reshape(-1, 4))}
    orders = [[frames[tuple(x.tolist())] for x in sequence] for sequence in seen]
    assert all(b - a == 1 for order in orders for a, b in itertools.pairwise(order))
    first, second = orders[: len(orders) // 2], orders[len(orders) // 2 :]
    for epoch in (first, second):
        assert sorted(i for order in epoch for i in order) == list(range(512))
    assert (first == second) != shuffle


# -- the tutorial -------------------------------------------------------------------

Play = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def play() -> Iterator[Play]:
    """Run the tutorial in this process, with ``--quick``; return its names."""
    handler, threads = signal.getsignal(signal.SIGINT), torch.get_num_threads()

    def script(out: Path, *options: str) -> dict[str, Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [str(SCRIPT), "--quick", "--out", str(out), *options])
            return runpy.run_path(str(SCRIPT))

    yield script
    signal.signal(signal.SIGINT, handler)
    torch.set_num_threads(threads)


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
    assert [row["total_frames"] for row in rows] == [1000.0 * n for n in range(1, 7)]
    begun = [row["total_frames"] - 1000 for row in rows]  # a schedule is where the batch began
    lr = np.interp(begun, [0, 4000], [0.003, 0.0003])
    np.testing.assert_allclose([row["lr"] for row in rows], lr, rtol=1e-5)
    entropy = np.interp(begun, [0, 3000], [0.02, 0.0])
    np.testing.assert_allclose([row["entropy_coeff"] for row in rows], entropy, atol=1e-8)
    assert_finite(rows)
    assert "eval_return" in rows[-1]
    assert all(row["padded"] < 0.5 for row in rows)
    assert len({row["kl"] for row in rows}) == 6


def test_resume(play: Play, quick_run: Any):
    out, _ = quick_run
    before = history(out)
    play(out, *OPTIONS, "--resume", "--total-frames", "8000")
    rows = history(out)
    assert rows[:6] == before
    assert [row["total_frames"] for row in rows[6:]] == [7000.0, 8000.0]
    assert rows[6]["lr"] == pytest.approx(0.0003)  # where the schedule was
    # the coefficient is that after the last update: one move from that of the update before
    ratio = rows[6]["kl_coeff"] / before[-1]["kl_coeff"]
    assert min(abs(ratio - factor) for factor in (0.5, 1.0, 1.5)) < 1e-5
    assert rows[6]["seconds"] > before[-1]["seconds"]


SMALL = ["--total-frames", "200", "--train-batch-size", "200", "--num-envs", "4"]
SMALL += ["--eval-every", "0", "--vf-share-layers"]


@pytest.fixture(scope="module")
def small_run(play: Play, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("rllib") / "small"
    play(out, *SMALL)
    return out


@pytest.mark.parametrize(
    ("options", "had"),
    [
        ([], "has 200 frames already; raise --total-frames"),
        (["--activation", "relu"], "of another run, with --activation linear"),
        (["--gamma", "0.9"], "of another run, with --gamma 0.99"),
        (["--time-limit-is-end"], "of another run, with --time-limit-is-end False"),
        (["--minibatch-size", "64"], "of another run, with --minibatch-size 128"),
        (["--lambda", "0.9"], "of another run, with --lambda 1.0"),
        (["--hidden", "8"], "--resume: .* of another run: .*8"),
    ],
)
def test_resuming_another_run_is_refused(
    play: Play, small_run: Path, capsys: pytest.CaptureFixture[str], options: list[str], had: str
):
    before = (small_run / "checkpoint.pt").read_bytes()
    with pytest.raises(SystemExit, match="2"):
        play(small_run, *SMALL, "--resume", *options)
    assert re.search(had, " ".join(capsys.readouterr().err.split()))
    assert (small_run / "checkpoint.pt").read_bytes() == before


@pytest.mark.parametrize("size", [0, 20, 1000])
def test_a_damaged_checkpoint_is_named(
    play: Play, small_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], size: int
):
    content = (small_run / "checkpoint.pt").read_bytes()
    (tmp_path / "checkpoint.pt").write_bytes(content[:size])
    with pytest.raises(SystemExit, match="2"):
        play(tmp_path, *SMALL, "--resume")
    assert re.search("--resume: .*checkpoint.pt is damaged", capsys.readouterr().err)


def test_a_resumed_run_may_have_another_learning_rate(play: Play, tmp_path: Path):
    play(tmp_path / "run", *SMALL)
    more = ["--resume", "--total-frames", "400", "--lr", "0.001"]
    names = play(tmp_path / "run", *SMALL, *more)
    (group,) = names["update"].step.optimizer.param_groups
    assert group["lr"] == 0.001
    assert [row["lr"] for row in names["history"]] == [3e-4, 1e-3]


def test_the_training_cell_can_be_run_again(play: Play, tmp_path: Path):
    left = play(tmp_path / "run", *SMALL, "--eval-every", "1")
    names = left["evaluate"].__globals__  # which runpy has emptied
    names.update(left)
    cell = SCRIPT.read_text().split("# Training\n# --------\n")[1].split("# %%")[0]
    exec(cell, names)
    rows = history(tmp_path / "run")
    assert [row["total_frames"] for row in rows] == [200.0, 400.0]
    assert all(math.isfinite(row["eval_return"]) for row in rows)


def test_without_a_critic(play: Play, tmp_path: Path):
    out = tmp_path / "run"
    options = ["--no-critic", "--time-limit-is-end", "--lr", "0.003", "--total-frames", "3000"]
    play(out, *options)
    rows = history(out)
    assert all("loss_critic" not in row and row["episodes"] == 16 for row in rows)
    lengths = [16 * row["episode_length"] for row in rows]
    np.testing.assert_allclose([row["total_frames"] for row in rows], np.cumsum(lengths))
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
        (["--lr", "[[5, 0.1]]"], r"argument --lr: .* it must be at frame 0"),
        (["--resume"], "run without --resume first"),
        (["--clip-param", "1.5"], "clip_epsilon .* 1.5"),
        (["--kl-target", "0"], "target_kl must be positive"),
        (["--lambda", "1.1"], "lmbda must .* 1.1"),
        (["--no-gae", "--lambda", "0.9"], "--no-gae: --lambda has no effect"),
        (["--no-gae", "--lambda=0.9"], "--no-gae: --lambda has no effect"),
        (["--no-kl-loss", "--kl-coeff", "0.1"], "--no-kl-loss: --kl-coeff has no effect"),
        *(
            (["--no-critic", "--time-limit-is-end", option], "--no-critic: --[a-z-]* has no effect")
            for option in ("--lambda=0.5", "--vf-clip-param=1", "--train-batch-size=100")
        ),
        (["--env", "FrozenLake-v1"], "Discrete.16., not a vector"),
        *(
            ([f"--{name}", value], f"argument --{name}: {value} is not 1 or more")
            for name in ("num-envs", "hidden", "minibatch-size", "total-frames", "seq-len")
            for value in ("0", "-3")
        ),
        (["--seed", "-1"], "argument --seed: -1 is not from 0"),
        (["--eval-every", "-1"], "argument --eval-every: -1 is not from 0"),
        (["--entropy-coeff", "[[0, 0], [100, 0.1]]"], "begins at 0"),
    ],
)
def test_wrong_options_fail_at_once(
    play: Play,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
):
    with pytest.raises(SystemExit, match="2"):
        play(tmp_path / "run", *options)
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(message, said), said
    assert not (tmp_path / "run").exists()


class Truncating(CartPoleEnv):
    """Ends episodes itself after five steps; its registration says nothing of it."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps = 0
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        self.steps += 1
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, terminated, self.steps == 5, info


def with_actions(env: gym.Env, space: Any) -> Callable[[], gym.Env]:
    """Return what makes the environment, with actions of another space that do not matter."""
    still = env.action_space.sample()
    return lambda: TransformAction(env, lambda _: still, space)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (with_actions(CartPoleEnv(), Discrete(2, start=1)), [], "start=1.*wrap the environment"),
        (with_actions(PendulumEnv(), Box(-np.inf, np.inf, (1,))), [], "a vector with bounds"),
        (with_actions(PendulumEnv(), Box(-1, 1, (2, 2))), [], "a vector with bounds"),
        (
            Truncating,
            ["--no-critic", "--total-frames", "300"],
            "--no-critic with --env Own-v0: .*truncated",
        ),
    ],
    ids=["start", "unbounded", "matrix", "truncates"],
)
def test_environments_that_it_cannot_learn_are_refused(
    play: Play,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    make: Callable[[], gym.Env],
    options: list[str],
    message: str,
):
    gym.register("Own-v0", entry_point=make)
    try:
        with pytest.raises(SystemExit, match="2"):
            play(tmp_path / "run", "--env", "Own-v0", *options)
    finally:
        del gym.registry["Own-v0"]
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(message, said), said
    assert options or not (tmp_path / "run").exists()
