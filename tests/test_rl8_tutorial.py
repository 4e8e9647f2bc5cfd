"""The rl8 tutorial: its environments beside gymnasium's, and what each option does."""

from __future__ import annotations

import json
import math
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.envs.classic_control.pendulum import PendulumEnv
from torchrl.collectors import Collector

from tests.benchmarks import examples, learning
from tests.benchmarks.runs import run_tutorial
from tests.test_tutorials import TUTORIALS, assert_finite, history

SCRIPT = TUTORIALS / "rl8_vectorized.py"
SMALL = ["--quick", "--num-envs", "8", "--horizon", "8", "--total-frames", "64"]

Names = dict[str, Any]
Tutorial = Callable[..., Names]


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory) -> Tutorial:
    """Run the tutorial in this process, for one small batch, and return its names."""

    def run_in_process(*options: str, out: Path | None = None) -> Names:
        out = out or tmp_path_factory.mktemp("rl8") / "run"
        argv, handler = sys.argv, signal.getsignal(signal.SIGINT)
        sys.argv = [str(SCRIPT), *SMALL, *options, "--out", str(out)]
        threads = torch.get_num_threads()
        try:
            return runpy.run_path(str(SCRIPT))
        finally:
            sys.argv = argv
            signal.signal(signal.SIGINT, handler)
            torch.set_num_threads(threads)

    return run_in_process


@pytest.fixture(scope="module")
def plain(tutorial: Tutorial) -> Names:
    return tutorial()


def collect(names: Names, batches: int) -> list[Any]:
    """Return batches of the tutorial's environments and policy."""
    collector = Collector(
        names["env"],
        names["policy"],
        frames_per_batch=names["frames_per_batch"],
        total_frames=batches * names["frames_per_batch"],
        auto_register_policy_transforms=False,
    )
    found = [batch.clone() for batch in collector]
    collector.shutdown()
    return found


def parameters(names: Names) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in names["update"].step.loss.parameters()])


# -- environments -------------------------------------------------------------------


def test_the_cart_moves_as_gymnasiums(plain: Names):
    env: Any = CartPoleEnv()
    env.force_mag = 5.0
    rng = np.random.default_rng(0)
    states = rng.uniform(-0.2, 0.2, (50, 4))  # within its bounds
    actions = rng.integers(2, size=50)
    expected = []
    for state, action in zip(states, actions, strict=True):
        env.reset()
        env.state = state
        expected.append(env.step(int(action))[0])
    # of the three forces, those of gymnasium are the first and the last
    moved, reward = plain["move_cart"](torch.tensor(states), torch.tensor(2 * actions))
    torch.testing.assert_close(moved.float(), torch.tensor(np.array(expected)))
    x, speed, angle, spin = moved.abs().unbind(-1)
    cost = x + speed + spin + angle.sin() + (1 - angle.cos())
    torch.testing.assert_close(reward, -cost.unsqueeze(-1))
    still, _ = plain["move_cart"](torch.zeros(1, 4), torch.tensor([1]))
    assert (still == 0).all()


def test_the_pendulum_moves_as_gymnasiums(plain: Names):
    env: Any = PendulumEnv()
    rng = np.random.default_rng(0)
    states = rng.uniform([-9.0, -8.0], [9.0, 8.0], (50, 2))
    actions = rng.uniform(-3.0, 3.0, (50, 1))  # beyond the torque's bounds, too
    expected, rewards = [], []
    for state, action in zip(states, actions, strict=True):
        env.reset()
        env.state = state
        rewards.append(env.step(action)[1])
        expected.append(env.state)
    moved, reward = plain["move_pendulum"](torch.tensor(states), torch.tensor(actions))
    torch.testing.assert_close(moved, torch.tensor(np.array(expected)))
    torch.testing.assert_close(reward.squeeze(-1), torch.tensor(np.array(rewards)))


@pytest.mark.parametrize("task", ["cartpole", "pendulum"])
def test_environments_keep_torchrls_contract(plain: Names, task: str):
    env = plain["VectorizedEnv"](task, 6, 4)
    env.set_seed(0)
    rollout = env.rollout(9, break_when_any_done=False)
    assert rollout["next", "truncated"].flatten(1).nonzero()[:, 1].unique().tolist() == [3, 7]
    assert not rollout["next", "terminated"].any()
    assert rollout["observation"].dtype == torch.float32
    assert env.observation_spec.contains(rollout[:, 0].select("observation", "step"))
    state, now = env.state.clone(), env.now.clone()
    some = torch.tensor([True, False] * 3).unsqueeze(-1)
    env.reset(rollout[:, -1].select("done").set("_reset", some))
    assert torch.equal(env.state[1::2], state[1::2])
    assert torch.equal(env.now[1::2], now[1::2])
    assert not torch.isclose(env.state[::2], state[::2]).all(-1).any()
    assert (env.now[::2] == 0).all()


def test_states_are_carried_over_horizons_and_reset_after_so_many(plain: Names, tutorial: Tutorial):
    names = tutorial("--horizons-per-env-reset", "2")
    first, second, third = collect(names, 3)
    assert not first["next", "done"].any()
    assert torch.equal(second["observation"][:, 0], first["next", "observation"][:, -1])
    assert second["next", "truncated"].sum(1).flatten().tolist() == [1] * 8
    assert second["next", "truncated"][:, -1].all()
    assert (third["step"][:, 0] == 0).all()
    assert third["observation"][:, 0, 1].abs().max() < 0.06  # six times the spread of a reset
    assert all(x["next", "truncated"][:, -1].all() for x in collect(plain, 2))


def test_environments_are_never_reset_with_minus_one(tutorial: Tutorial):
    names = tutorial("--horizons-per-env-reset", "-1")
    last = collect(names, 4)[-1]
    assert not last["next", "done"].any()
    assert (last["next", "step"][:, -1] == 32).all()


@pytest.mark.parametrize("horizons", ["1", "2"])
def test_gae_bootstraps_at_the_end_of_a_horizon(tutorial: Tutorial, horizons: str):
    names = tutorial("--horizons-per-env-reset", horizons, "--no-normalize-advantages")
    (batch,) = collect(names, 1)
    with torch.no_grad():
        names["update"].advantage(batch)
        value, following = (
            names["critic"].module(x[:, -1])
            for x in (batch["observation"], batch["next", "observation"])
        )
    expected = batch["next", "reward"][:, -1] + 0.95 * following - value
    torch.testing.assert_close(batch["advantage"][:, -1], expected)


# -- options --------------------------------------------------------------------------


def test_options_reach_the_blocks(tutorial: Tutorial):
    names = tutorial(
        *("--amp", "--dual-clip", "4", "--target-kl", "0.02", "--vf-clip", "2"),
        *("--vf-coeff", "0.5", "--max-grad-norm", "0.7", "--gae-lambda", "0.9", "--gamma", "0.8"),
        *("--no-shuffle", "--clip", "0.1", "--no-normalize-advantages", "--no-normalize-rewards"),
        *("--epochs", "3", "--minibatch-size", "16", "--lr", "0.002", "--entropy-coeff", "0.01"),
    )
    update, row = names["update"], names["history"][0]
    said = repr(update)
    for part in ("epochs=3", "minibatch_size=16", "max_grad_norm=0.7", "bfloat16"):
        assert part in said
    assert row["lr"] == 0.002
    for name, value in {"dual_clip": 4, "critic_coeff": 0.5, "entropy_coeff": 0.01}.items():
        assert row[name] == pytest.approx(value)
    assert row["critic_loss_clip"] == 2
    assert float(update.step.loss.clip_epsilon) == pytest.approx(0.1)
    assert update.step.stopper.target_kl == 0.02
    assert update.step.stopper.tolerance == 1.5
    assert (float(update.advantage.gamma), float(update.advantage.lmbda)) == pytest.approx(
        (0.8, 0.9)
    )
    assert not update.advantage.average_gae
    assert update.reward_normalizer is None


def test_rl8s_normalisation_is_the_default(plain: Names):
    update = plain["update"]
    assert update.reward_normalizer.statistics == "batch"
    assert update.reward_normalizer.clip is None
    assert update.advantage.average_gae
    (batch,) = collect(plain, 1)
    update.reward_normalizer(batch)
    raw, scaled = batch["next", "raw_reward"], batch["next", "reward"]
    running, returns = torch.zeros(8, 1), []
    for step in range(8):
        running = 0.95 * running + raw[:, step]
        returns.append(running)
    torch.testing.assert_close(scaled, raw / (torch.stack(returns).std() + 1e-8))


def test_schedules_are_in_rl8s_counts(tutorial: Tutorial):
    # rl8 counts num_envs * collects: its count of 16 is reached after two batches of 64 frames.
    names = tutorial(
        *("--lr-schedule", "0:1e-3,16:1e-4", "--entropy-schedule", "0:0.0,16:0.01"),
        *("--entropy-schedule-kind", "interp", "--total-frames", "192"),
    )
    rows = names["history"]
    assert [row["lr"] for row in rows] == [1e-3, 1e-3, 1e-4]
    assert [row["entropy_coeff"] for row in rows] == pytest.approx([0.0, 0.005, 0.01])


def test_accumulated_gradients_are_those_of_the_whole_batch(tutorial: Tutorial):
    options = "--epochs", "2", "--no-shuffle"
    whole = tutorial(*options, "--minibatch-size", "64")
    in_parts = tutorial(*options, "--minibatch-size", "16", "--accumulate-grads")
    assert in_parts["history"][0]["steps"] == whole["history"][0]["steps"] == 2
    assert in_parts["history"][0]["minibatches"] == 8
    torch.testing.assert_close(parameters(in_parts), parameters(whole), rtol=0, atol=2e-5)


def test_original_settings(tutorial: Tutorial):
    names = tutorial("--original", "--minibatch-size", "64", "--task", "pendulum")
    assert names["args"].horizons_per_env_reset == 4
    assert names["args"].epochs == 4
    assert names["args"].lr == 1e-3
    (batch,) = collect(names, 1)
    assert batch["action"].shape == (8, 8, 1)
    assert batch["scale"].min() > math.exp(-1)


def test_states_are_reset_after_so_many_sequences(tutorial: Tutorial):
    options = "--recurrent", "--seq-len", "2", "--total-frames", "128"
    names = tutorial(*options, "--seqs-per-state-reset", "2", "--horizons-per-env-reset", "2")
    for batch in collect(names, 2):
        starts = batch["is_init"].squeeze(-1)
        assert starts.nonzero()[:, 1].unique().tolist() == [0, 4]
        # what the network was given at steps 3 and 4: the state of the step before; and zeros
        sequences = names["update"].batcher(batch)
        assert sequences.shape == (8 * 4, 2)
    assert names["history"][-1]["padded"] == 0
    kept = tutorial(*options, "--seqs-per-state-reset", "-1", "--horizons-per-env-reset", "2")
    first, second = collect(kept, 2)
    assert first["is_init"].sum() == 8
    assert not second["is_init"].any()
    assert second["recurrent_state_h"][:, 0].abs().sum() > 0


def test_a_state_that_is_reset_is_not_remembered(tutorial: Tutorial):
    """The policy's answer at a reset does not depend on what was before; a step later it does."""
    names = tutorial("--recurrent", "--seq-len", "2", "--seqs-per-state-reset", "2")
    actor, (batch,) = names["actor"], collect(names, 1)
    for step, is_remembered in ((4, False), (5, True)):
        frames = batch[:, step].select(*actor.in_keys, strict=False).clone()
        frames["is_init"] = torch.zeros(8, 1, dtype=torch.bool)
        with torch.no_grad():
            logits = actor(frames.clone())["logits"]
            for name in ("recurrent_state_h", "recurrent_state_c"):
                frames[name] = torch.ones_like(frames[name])
            others = actor(frames)["logits"]
        assert torch.equal(logits, others) is not is_remembered


@pytest.mark.parametrize(
    "options", [["--seqs-per-state-reset", "2"], ["--horizons-per-env-reset", "4"]]
)
def test_an_update_begins_with_the_policy_that_collected(tutorial: Tutorial, options: list[str]):
    """States are in the sequences as the LSTM saw them: nothing has moved before the first step."""
    names = tutorial("--recurrent", "--seq-len", "2", *options)
    with torch.no_grad():
        for last in names["actor"].parameters():
            last.uniform_(-1, 1)
    update = names["update"]
    for batch in collect(names, 3):
        sequences = update.batcher(update.advantage(batch))
        assert update.step.loss(sequences)["kl"] == pytest.approx(0, abs=1e-9)


# -- runs -----------------------------------------------------------------------------


def test_quick_and_resume(tutorial: Tutorial, tmp_path: Path):
    out = tmp_path / "run"
    names = tutorial("--total-frames", "128", out=out)
    rows = history(out)
    assert [row["total_frames"] for row in rows] == [64, 128]
    assert_finite(rows)
    assert matplotlib.image.imread(out / "figure.png").std() > 0.01
    resumed = tutorial("--total-frames", "256", "--resume", out=out)
    assert [row["total_frames"] for row in history(out)] == [64, 128, 192, 256]
    assert history(out)[:2] == rows
    assert not torch.equal(parameters(names), parameters(resumed))
    with pytest.raises(SystemExit):
        tutorial("--total-frames", "256", "--resume", out=out)
    fresh = tutorial(out=out)
    assert len(fresh["history"]) == 1
    assert len(json.loads((tmp_path / "run.1" / "history.json").read_text())) == 4


@pytest.fixture(scope="module")
def kept(tutorial: Tutorial, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("rl8") / "kept"
    tutorial(out=out)
    return out


@pytest.mark.parametrize(
    ("option", "value", "had"),
    [
        ("--horizon", "4", "--horizon 8"),
        ("--num-envs", "4", "--num-envs 8"),
        ("--gamma", "0.9", "--gamma 0.95"),
        ("--task", "pendulum", ""),
    ],
)
def test_resuming_another_run_is_refused(
    tutorial: Tutorial, kept: Path, capsys, option: str, value: str, had: str
):
    before = (kept / "checkpoint.pt").read_bytes()
    with pytest.raises(SystemExit, match="2"):
        tutorial("--resume", "--total-frames", "128", option, value, out=kept)
    said = " ".join(capsys.readouterr().err.split())
    assert "of another run" in said
    assert had in said
    assert (kept / "checkpoint.pt").read_bytes() == before


@pytest.mark.parametrize("size", [0, 20, 1000])
def test_a_damaged_checkpoint_is_named(
    tutorial: Tutorial, kept: Path, capsys, tmp_path: Path, size: int
):
    content = (kept / "checkpoint.pt").read_bytes()
    (tmp_path / "checkpoint.pt").write_bytes(content[:size])
    with pytest.raises(SystemExit, match="2"):
        tutorial("--resume", out=tmp_path)
    assert "checkpoint.pt is damaged" in " ".join(capsys.readouterr().err.split())


def test_a_resumed_run_may_have_another_learning_rate(tutorial: Tutorial, tmp_path: Path):
    tutorial(out=tmp_path / "run")
    more = "--resume", "--total-frames", "128", "--lr", "0.0005"
    names = tutorial(*more, out=tmp_path / "run")
    assert [row["lr"] for row in names["history"]] == [2e-3, 5e-4]


def test_a_target_ends_the_run(tutorial: Tutorial):
    names = tutorial("--total-frames", "640", "--target=-1e9")
    assert len(names["history"]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--resume"], "run without --resume first"),
        (["--horizons-per-env-reset", "0"], "or with -1 never"),
        (["--seqs-per-state-reset", "0"], "or with -1 never"),
        (["--recurrent", "--compile"], "is not compiled"),
        (["--recurrent", "--seq-len", "0"], "--seq-len: 0 is not 1 or more"),
        (["--accumulate-grads", "--target-kl", "0.1"], "drop --accumulate-grads"),
        (["--dual-clip", "0.5"], "dual_clip"),
        (["--clip", "-1"], "clip_epsilon"),
        (["--lr-schedule", "0:1e-3,0:1e-4"], "strictly increase"),
        (["--entropy-schedule", "5:0.1"], "must be at frame 0"),
        (["--lr-schedule", "nonsense"], "argument --lr-schedule"),
        *(
            ([f"--{name}", value], f"argument --{name}: {value} is not 1 or more")
            for name in ("horizon", "num-envs", "minibatch-size", "epochs", "total-frames")
            for value in ("0", "-5")
        ),
        (["--num-envs", "1", "--horizon", "1"], "--num-envs 1 --horizon 1: one frame has no"),
        (["--lr", "inf"], "learning rates must be from 0 to 1, got"),
        (["--lr-schedule", "0:1e-3,9:nan"], "learning rates must be from 0 to 1, got"),
        (["--seed", "-1"], "argument --seed: -1 is not from 0"),
        (["--device", "foo"], "--device foo: "),
        (["--device", "meta"], "--device meta: "),
        (["--device", "cuda:99"], "--device cuda:99: "),
        (["--gamma", "1.5"], "gamma"),
        (["--max-grad-norm", "0"], "max_grad_norm"),
        (["--vf-clip", "-1"], "critic_loss_clip"),
    ],
)
def test_wrong_options_fail_at_once(
    tutorial: Tutorial, capsys, tmp_path: Path, options: list[str], message: str
):
    out = tmp_path / "run"
    with pytest.raises(SystemExit) as error:
        tutorial(*options, out=out)
    assert error.value.code == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.slow
def test_it_learns(tutorial: Tutorial):
    options = "--num-envs", "256", "--horizon", "64", "--minibatch-size", "256"
    names = tutorial(*options, "--total-frames", "163840", "--target", "-50")
    assert names["history"][-1]["return"] >= -50


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is depr:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch._dynamo.config.inline_inbuilt_nn_mod:FutureWarning")
def test_compiled(tutorial: Tutorial):
    names = tutorial("--compile", "--total-frames", "128")
    assert "compiled" in names["update"].step.extra_repr()


# -- what the benchmark keeps of a run ------------------------------------------------


@pytest.mark.slow
def test_a_run_that_ended_early_is_no_result(tmp_path: Path):
    out = tmp_path / "run"
    options = [*SMALL, "--seed", "1"]
    with pytest.raises(RuntimeError, match="was interrupted"):
        run_tutorial("rl8_vectorized", options, out, lambda rows: rows[-1]["total_frames"] >= 128)
    assert not out.exists()
    ended = lambda rows: rows[-1]["total_frames"] >= 64  # noqa: E731
    rows = run_tutorial("rl8_vectorized", options, out, ended)
    assert [row["total_frames"] for row in rows] == [64]
    assert run_tutorial("rl8_vectorized", ["--no-such-option"], out, ended) == rows  # it is there
    assert not list(tmp_path.glob("*.part"))
    (out / "history.json").write_text('[{"total_frames": 6')
    with pytest.raises(ValueError, match=r"history.json is damaged; delete it"):
        run_tutorial("rl8_vectorized", options, out, ended)


@pytest.mark.parametrize("content", ["", '{"rows": [', '{"rows": []}'])
def test_a_damaged_result_is_named(tmp_path: Path, content: str):
    results = {
        tmp_path / "CartPole-v1-ppokit-0.json": lambda: learning.read(
            [learning.Job("CartPole-v1", "ppokit", 0, 1)], tmp_path
        ),
        tmp_path / "ours.json": lambda: examples.run_ours(
            "rllib_ppo", [], {}, tmp_path / "ours.json", bool
        ),
        tmp_path / "theirs.json": lambda: examples.run_peer("rllib", {}, tmp_path / "theirs.json"),
    }
    for file, read in results.items():
        file.write_text(content)
        if content.endswith("}"):
            assert read()
        else:
            with pytest.raises(ValueError, match=f"{file.name} is damaged; delete it"):
                read()
