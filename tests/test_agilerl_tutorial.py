"""``tutorials/agilerl_ppo.py``, and AgileRL's rules in the blocks that it is made of."""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import signal
import subprocess
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

from ppokit import GymCollector
from tests.test_tutorials import TUTORIALS, assert_finite, command, history, run

SCRIPT = TUTORIALS / "agilerl_ppo.py"
Play = Callable[..., dict[str, Any]]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Play]:
    """Run the tutorial in this process, with ``--quick``; return its names."""
    handler = signal.getsignal(signal.SIGINT)

    def script(*options: str) -> dict[str, Any]:
        arguments = [str(SCRIPT), "--quick", "--out", str(tmp_path / "run"), *options]
        monkeypatch.setattr(sys, "argv", arguments)
        return runpy.run_path(str(SCRIPT))

    yield script
    signal.signal(signal.SIGINT, handler)


def ids_of(module: Any) -> set[int]:
    return {id(parameter) for parameter in module.parameters()}


def collect(names: dict[str, Any], frames: int = 256, agent: str = "agent") -> Any:
    policy = names[agent].policy
    options: Any = {"num_envs": 4, "frames_per_batch": frames, "categorical_action_encoding": True}
    with GymCollector(names["make_env"], policy, **options) as collector:
        collector.set_seed(3)
        torch.manual_seed(3)
        return collector.rollout()


# -- AgileRL's rules ----------------------------------------------------------------


def test_the_loss_is_agilerls(play: Play):
    """Term by term as in AgileRL's ``PPO._learn_from_rollout_buffer_flat``."""
    names = play("--settings", "agilerl", "--env", "CartPole-v1", "--total-frames", "512")
    agent = names["agent"]
    batch = collect(names).reshape(-1)
    with torch.no_grad():
        agent.critic(batch)
        for parameter in agent.loss.parameters():  # as if some updates had been made
            parameter += 0.05 * torch.randn(parameter.shape)
    batch["advantage"] = torch.randn(256, 1)
    batch["value_target"] = batch["state_value"] + 0.3 * torch.randn(256, 1)

    now = agent.policy.get_dist(batch.select("observation"))
    log_prob, entropy = now.log_prob(batch["action"]), now.entropy()
    ratio = (log_prob - batch["action_log_prob"]).exp()
    advantage, target = batch["advantage"].squeeze(-1), batch["value_target"].squeeze(-1)
    policy = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
    old = batch["state_value"].squeeze(-1)
    value = agent.critic(batch.select("observation"))["state_value"].squeeze(-1)
    clipped = old + (value - old).clamp(-0.2, 0.2)
    critic = 0.5 * torch.max((value - target) ** 2, (clipped - target) ** 2).mean()
    expected = policy + 0.5 * critic - 0.01 * entropy.mean()
    assert 0 < ((ratio - 1).abs() > 0.2).float().mean() < 1
    assert 0 < ((value - old).abs() > 0.2).float().mean() < 1

    losses = agent.loss(batch)
    total = sum(losses[name] for name in losses.keys() if name.startswith("loss_"))
    torch.testing.assert_close(total, expected)
    parameters = list(agent.loss.parameters())
    found, wanted = (torch.autograd.grad(x, parameters) for x in (total, expected))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("target", "epochs"), [("1e-9", 1), pytest.param("1e9", 2, marks=pytest.mark.slow)]
)
def test_the_kl_target_ends_the_epochs(play: Play, target: str, epochs: int):
    names = play("--env", "CartPole-v1", "--total-frames", "512", "--target-kl", target)
    (row,) = names["history"]
    assert row["steps"] == epochs * 512 / 64
    assert row["kl"] > 1e-9


def test_a_learning_rate_for_the_whole_run(play: Play):
    names = play("--env", "CartPole-v1", "--total-frames", "1024", "--lr", "0.002")
    assert [row["lr"] for row in names["history"]] == [0.002, 0.002]
    assert play("--env", "CartPole-v1")["history"][-1]["lr"] < 0.001


def test_the_first_spread_of_actions(play: Play):
    names = play("--env", "Pendulum-v1", "--action-std-init", "0.4", "--total-frames", "512")
    new, trained = names["Agent"](), names["agent"]
    inputs = TensorDict({"observation": torch.randn(5, 3)}, [5])
    before, after = (agent.policy.get_dist(inputs.clone()).stddev for agent in (new, trained))
    torch.testing.assert_close(before, torch.full((5, 1), math.exp(0.4)))
    assert not torch.equal(after, before)  # it is learned
    assert torch.equal(after, after[:1].expand(5, 1))  # and the same everywhere


# -- encoders and masks ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--env", "CartPole-v1"], {"observation": "Sequential"}),
        pytest.param(
            ["--env", "CartPole-v1", "--observe", "pixels"],
            {"pixels": "Sequential"},
            marks=pytest.mark.slow,
        ),
        (
            ["--env", "CartPole-v1", "--observe", "both"],
            {"pixels": "Sequential", "observation": "Sequential"},
        ),
        (["--env", "CliffWalking-v1"], {"observation": "Embedding"}),
    ],
    ids=["vector", "picture", "both", "index"],
)
@pytest.mark.parametrize("encoders", ["shared", pytest.param("own", marks=pytest.mark.slow)])
def test_encoders(play: Play, options: list[str], parts: dict[str, str], encoders: str):
    names = play(*options, "--total-frames", "512", "--encoders", encoders)
    assert set(names["parts"]) == set(parts)
    agent, is_shared = names["agent"], encoders == "shared"
    module = names["make_encoder"]().module
    found = module.encoders if len(parts) > 1 else [module]
    assert [type(encoder).__name__ for encoder in found] == list(parts.values())
    assert ("pixels" in parts) == any(isinstance(m, torch.nn.Conv2d) for m in module.modules())

    batch = collect(names, 16)
    latent = module(*(batch[name] for name in names["parts"]))
    assert latent.shape == (4, 4, 64)
    row = module(*(batch[name][1, 2] for name in names["parts"]))
    torch.testing.assert_close(row, latent[1, 2])  # a step alone is encoded as in a batch

    both = ids_of(agent.policy) & ids_of(agent.critic)
    assert len(both) == (len(list(module.parameters())) if is_shared else 0)
    optimized = [id(p) for group in agent.optimizer.param_groups for p in group["params"]]
    assert sorted(optimized) == sorted(ids_of(agent.policy) | ids_of(agent.critic))
    new = names["Agent"]()  # all of it learns
    agent.update.advantage(batch)
    losses = new.loss(batch.reshape(-1))
    sum(losses[name] for name in losses.keys() if name.startswith("loss_")).backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in new.loss.parameters())


def test_masked_actions_are_never_drawn(play: Play):
    names = play("--env", "Taxi-v4", "--total-frames", "512")
    assert names["is_masked"]
    batch = collect(names, 1024)
    mask = batch["action_mask"]
    allowed = mask.gather(-1, batch["action"].unsqueeze(-1))
    assert 0.2 < mask.float().mean() < 0.8
    assert allowed.all()
    loss = names["agent"].loss
    dist = names["agent"].policy.get_dist(batch.select("observation", "action_mask"))
    assert dist.probs[~mask].max() < 1e-6
    names["agent"].update.advantage(batch)
    assert all(x.isfinite().all() for x in loss(batch.reshape(-1)).values())


def test_a_mask_says_nothing_of_a_vector(play: Play):
    class Masked(PendulumEnv):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return super().reset(seed=seed)[0], {"action_mask": np.ones(3, bool)}

        def step(self, u: Any) -> Any:
            *rest, _ = super().step(u)
            return *rest, {"action_mask": np.ones(3, bool)}

    gym.register("MaskedPendulum-v0", Masked, max_episode_steps=200)
    names = play("--env", "MaskedPendulum-v0", "--total-frames", "512")
    assert not names["is_masked"]
    assert collect(names)["action"].shape == (4, 64, 1)


# -- evaluation, clones, checkpoints --------------------------------------------------


def test_evaluation_ends_without_a_time_limit(play: Play):
    names = play("--env", "CliffWalking-v1", "--total-frames", "512")
    score = names["history"][-1]["score"]
    # 64 steps of -1 or -100 in each environment: a policy that knows nothing does not arrive
    assert -6400 <= score <= -64
    assert names["evaluate"](names["agent"].policy, seed=1) == names["evaluate"](
        names["clone"].policy, seed=1
    )
    assert names["evaluate"](names["agent"].policy, seed=2) != names["evaluate"](
        names["agent"].policy, seed=1
    )


def test_clones_and_loaded_agents_act_alike_and_learn_apart(play: Play):
    names = play("--encoders", "shared", "--env", "CartPole-v1", "--total-frames", "512")
    agent, clone, loaded = (names[name] for name in ("agent", "clone", "loaded"))
    batches = [collect(names, agent=name) for name in ("agent", "clone", "loaded")]
    assert all(torch.equal(batches[0]["action"], batch["action"]) for batch in batches)
    assert ids_of(clone.policy) & ids_of(clone.critic)  # what was shared is shared
    assert not ids_of(clone.loss) & ids_of(agent.loss)
    states = [{k: v.clone() for k, v in x.loss.state_dict().items()} for x in (agent, clone)]
    moments = json.dumps(agent.update.state_dict(), default=str)
    clone.update(batches[1])
    now = agent.loss.state_dict()
    assert all(torch.equal(states[0][name], now[name]) for name in now)
    assert json.dumps(agent.update.state_dict(), default=str) == moments
    assert not all(torch.equal(states[1][k], v) for k, v in clone.loss.state_dict().items())
    # a copy learns as the original does: optimiser, statistics and order of minibatches included
    agent.update(batches[0])
    loaded.update(batches[2])
    for other in (clone, loaded):
        now, then = agent.loss.state_dict(), other.loss.state_dict()
        assert all(torch.equal(now[name], then[name]) for name in now)


def test_the_target_score_ends_training(play: Play):
    names = play("--env", "CartPole-v1", "--total-frames", "20000", "--target-score", "1")
    scores = [row["score"] for row in names["history"] if "score" in row]
    assert len(scores) == len(names["history"]) == 10  # of ten evaluations, and not before
    assert names["frames_done"] == 5120


def test_resume(play: Play, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options = ["--env", "CartPole-v1", "--total-frames"]
    play(*options, "1024")
    before = history(tmp_path / "run")
    names = play(*options, "2048", "--resume")
    rows = history(tmp_path / "run")
    assert rows[:2] == before
    assert [row["total_frames"] for row in rows] == [512.0, 1024.0, 1536.0, 2048.0]
    assert rows[2]["seconds"] > before[-1]["seconds"]
    assert rows[2]["lr"] < before[-1]["lr"]  # the schedule goes on
    assert names["agent"].optimizer.param_groups[0]["lr"] < rows[3]["lr"]
    play(*options, "512")  # an earlier run is kept
    assert history(tmp_path / "run.1") == rows
    for more, message in (
        (["--encoders", "shared"], "of another run"),
        (["--settings", "agilerl"], "of another run"),
        (["--target-kl", "0.5"], "of another run, with target_kl 0.03"),
        (["--num-envs", "8"], "of another run"),
    ):
        with pytest.raises(SystemExit, match="2"):
            play(*options, "4096", "--resume", *more)
        assert message in " ".join(capsys.readouterr().err.split())
    checkpoint = tmp_path / "run" / "checkpoint.pt"
    for size in (1000, 20, 0):
        checkpoint.write_bytes(checkpoint.read_bytes()[:size])
        with pytest.raises(SystemExit, match="2"):
            play(*options, "4096", "--resume")
        assert "checkpoint.pt is damaged" in " ".join(capsys.readouterr().err.split())


# -- the script -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--env", "Blackjack-v1"], r"no encoder for 'observation' of Tuple\(Discrete"),
        (["--env", "NoSuchThing-v0"], "`NoSuchThing` doesn't exist"),
        (["--env", "CartPole-v1", "--resume"], "run without --resume first"),
        (["--target-kl", "0"], "--target-kl must be positive"),
        (["--lr", "0"], "--lr must be from above 0 to 1"),
        (["--lr", "nan"], "--lr must be from above 0 to 1"),
        (["--target-kl", "nan"], "--target-kl must be positive"),
        (["--num-envs", "0"], "argument --num-envs: 0 is not 1 or more"),
        (["--total-frames", "-5"], "argument --total-frames: -5 is not 1 or more"),
        (["--seed", "-1"], "argument --seed: -1 is not from 0"),
        (["--action-std-init", "nan"], "--action-std-init must be from -10 to 10"),
        (["--env", "CartPole-v1", "--action-std-init", "0"], "--action-std-init: .* no spread"),
        (["--encoders", "none"], "--encoders: invalid choice"),
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
        play(*options)
    assert re.search(message, " ".join(capsys.readouterr().err.split()))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("env", "space"), [(CartPoleEnv, Discrete(2, start=1)), (PendulumEnv, Box(-1, 1, (2, 2)))]
)
def test_actions_that_it_cannot_learn_are_refused(
    play: Play, tmp_path: Path, capsys: pytest.CaptureFixture[str], env: Any, space: Any
):
    still = env().action_space.sample()
    entry = lambda: TransformAction(env(), lambda _: still, space)  # noqa: E731
    gym.register("Own-v0", entry_point=entry)
    try:
        with pytest.raises(SystemExit, match="2"):
            play("--env", "Own-v0")
    finally:
        del gym.registry["Own-v0"]
    assert "wrap the environment" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_quick(tmp_path: Path):
    out = tmp_path / "run"
    result = run(out, "--quick", script=SCRIPT)
    assert result.returncode == 0, result.stderr
    scores = re.search(r"actions: (\S+); of a clone (\S+); loaded .* (\S+)", result.stdout)
    assert scores is not None
    assert len(set(scores.groups())) == 1
    figure = matplotlib.image.imread(out / "figure.png")
    assert figure.shape[0] > 500
    assert figure.std() > 0.01
    rows = history(out)
    assert [row["total_frames"] for row in rows] == [512.0, 1024.0]
    assert_finite(rows)


@pytest.mark.slow
def test_interrupt(tmp_path: Path):
    out = tmp_path / "run"
    process = subprocess.Popen(
        command(out, "--quick", "--total-frames", "900000", script=SCRIPT),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    seen = ""
    while "score=" not in seen:  # the progress bar of the first batch
        seen += (character := process.stderr.read(1))
        assert character, seen
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "Interrupted" in printed
    assert (out / "figure.png").exists()
    assert "score" in history(out)[-1]
    assert history(out)[-1]["total_frames"] < 900_000


@pytest.mark.slow
def test_an_environment_of_pictures(tmp_path: Path):
    out = tmp_path / "run"
    result = run(out, "--quick", "--env", "CarRacing-v3", script=SCRIPT)
    assert result.returncode == 0, result.stderr
    assert len({row["loss_critic"] for row in history(out)}) == 2


@pytest.mark.slow
def test_the_lander_learns(tmp_path: Path):
    out = tmp_path / "run"
    options = ["--env", "LunarLander-v3", "--total-frames", "100000"]
    result = run(out, *options, script=SCRIPT)
    assert result.returncode == 0, result.stderr
    scores = [row["score"] for row in history(out) if "score" in row]
    assert scores[0] < 0
    assert sum(scores[-3:]) / 3 > 50
