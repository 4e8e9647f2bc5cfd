"""Learning and speed on MinAtar, beside Stable-Baselines3 with the same network and settings.

All runs take some two hours of one core: first every game, arm and seed, as many at a time as
there are cores, then the rounds that measure frames a second, one at a time.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn

import ppokit
from ppokit.networks import actor_critic
from tests.benchmarks import learning_arms
from tests.benchmarks.curves import interval, iqm, iqm_and_interval, iqm_text
from tests.benchmarks.figures import draw_bands
from tests.benchmarks.learning import speed_table
from tests.benchmarks.learning_arms import frames_per_second, training_curve
from tests.benchmarks.mujoco_record import Groups, Job, Record, curves, final, rounds
from tests.benchmarks.report import Benchmark, commit
from tests.benchmarks.runs import CORES
from tests.benchmarks.tables import markdown

GAMES = ("Breakout", "Asterix", "Freeway", "Seaquest", "SpaceInvaders")
FRAMES, ENVS, STEPS, SIZE, EPOCHS, POINTS = 1_000_000, 8, 128, 256, 4, 50
WARM_UP = 12  # batches, in which all graphs are captured
RATE, CLIP, ENTROPY = 1e-3, 0.2, 0.01
COMPILED, EAGER, SB3 = "ppokit, compiled", "ppokit", "Stable-Baselines3"


def make_env(game: str) -> gym.Env[Any, Any]:
    """Return a game with the fewest actions; its observation is ``[10, 10, C]`` of bool."""
    name = f"MinAtar/{game}-v1"
    if name not in gym.registry:
        import_module("minatar.gym").register_envs()
    return gym.make(name)


class Ppokit(learning_arms.Ppokit):
    """The assembly of ppokit's blocks."""

    def __init__(self, game: str, seed: int, frames: int, *, compiled: bool) -> None:
        torch.manual_seed(seed)
        env = make_env(game)
        actor, value_head, critic = actor_critic(env, (), encoder="small", shared=True)
        loss = ppokit.DualClipPPOLoss(
            actor,
            value_head,
            clip_epsilon=CLIP,
            entropy_coeff=ENTROPY,
            critic_coeff=0.5,
            loss_critic_type="l2",
            normalize_advantage=True,
        )
        optimizer = torch.optim.Adam(loss.parameters(), RATE, eps=1e-5, fused=True)
        falling = ppokit.InterpSchedule([(0, RATE), (frames, 0.0)])
        self.update = ppokit.PPOUpdate(
            ppokit.TrainingStep(loss, optimizer, max_grad_norm=0.5, compile=compiled),
            advantage=ppokit.GAE(gamma=0.99, lmbda=0.95, value_network=None),
            scheduler=ppokit.ParameterScheduler({"lr": (optimizer, falling)}),
            epochs=EPOCHS,
            minibatch_size=SIZE,
            seed=seed,
        )
        self.collector = ppokit.GymCollector(
            partial(make_env, game),
            actor,
            frames_per_batch=ENVS * STEPS,
            total_frames=frames,
            num_envs=ENVS,
            compile_policy=compiled,
            value_network=critic,
            compact_obs=True,
            episode_reward=True,
        )
        self.collector.set_seed(seed)


class Encoder(nn.Module):
    """ppokit's encoder, as Stable-Baselines3 takes one."""

    def __init__(self, observation_space: gym.Space[Any]) -> None:
        super().__init__()
        choice = gym.spaces.Discrete(2)
        _, critic = actor_critic((observation_space, choice), (), encoder="small")
        self.encoder, self.features_dim = critic.module[0], 128

    def forward(self, observation: Tensor) -> Tensor:
        """Return features ``[B, 128]``."""
        return self.encoder(observation)


class StableBaselines3(learning_arms.StableBaselines3):
    """Its ``PPO`` over environments in one process, with fused Adam."""

    def __init__(self, game: str, seed: int, frames: int) -> None:
        make = import_module("stable_baselines3.common.env_util").make_vec_env
        options = {"eps": 1e-5, "fused": True}
        policy = {"features_extractor_class": Encoder, "net_arch": [], "optimizer_kwargs": options}
        self.frames = frames
        self.model = import_module("stable_baselines3").PPO(
            "MlpPolicy",
            make(partial(make_env, game), ENVS, seed=seed),
            learning_rate=lambda remaining: remaining * RATE,
            n_steps=STEPS,
            batch_size=SIZE,
            n_epochs=EPOCHS,
            clip_range=CLIP,
            ent_coef=ENTROPY,
            policy_kwargs=policy,
            seed=seed,
            device="cpu",
        )


ARMS: dict[str, Any] = {
    COMPILED: partial(Ppokit, compiled=True),
    EAGER: partial(Ppokit, compiled=False),
    SB3: StableBaselines3,
}


def run(
    task: str, arm: str, seed: int, frames: int | None, seconds: float | None
) -> dict[str, Any]:
    """Train to the end, or time some seconds of the steady state."""
    total, started = frames or FRAMES, {"commit": commit()}
    contender = ARMS[arm](task, seed, total)
    if seconds is not None:
        return started | frames_per_second(contender, seconds, WARM_UP)
    every = max(1, total // (ENVS * STEPS * POINTS))
    return started | training_curve(contender, total, every)


def score_table(groups: Groups) -> str:
    lines = []
    for game, arms in groups.items():
        found = {arm: final(arms.get(arm, [])) for arm in (COMPILED, SB3)}
        verdict = ""
        if len(found[SB3]):
            reaches = iqm(found[COMPILED]) >= interval(found[SB3])[0]
            verdict = "yes" if reaches else "**no**"
        shown = "{:.1f}".format
        texts = [f"{iqm_text(x, shown)}; {len(x)}" if len(x) else "" for x in found.values()]
        lines.append([game, *texts, verdict])
    return markdown(["game", "ppokit", SB3, "not below"], lines)


def speed_section(speeds: Groups) -> str:
    if not speeds:
        return ""
    arms = [arm for arm in ARMS if all(arm in runs for runs in speeds.values())]
    commits = {run.commit for found in speeds.values() for runs in found.values() for run in runs}
    return f"""Frames a second of the same assemblies at commit {", ".join(sorted(commits))},
collecting and training, on one thread with nothing else running, the arms in turn: median (lowest
to highest) of the rounds; the ratio of the medians:

{speed_table(speeds, arms)}"""


def main() -> None:
    packages = ("minatar", "stable-baselines3")
    bench = Benchmark("minatar", keeps_results=True, packages=packages, has_record=True)
    record = Record(bench.file("csv"), bench.results, "minatar.run")
    others = [SB3] if find_spec("stable_baselines3") else []
    games = GAMES[:1] if bench.quick else GAMES
    frames, seeds = (2 * ENVS * STEPS, 1) if bench.quick else (FRAMES, 5)
    jobs: list[Job] = [
        (game, arm, seed) for seed in range(seeds) for game in games for arm in (COMPILED, *others)
    ]
    if not bench.options.pages:
        record.run(jobs, CORES, frames)
        turns = rounds(games, [COMPILED, EAGER, *others], 1 if bench.quick else 3)
        record.run(turns, 1, 10**9, 0.5 if bench.quick else 10.0)
    groups, speeds = record.by_task(games), record.by_task(games, speed=True)
    title = "Interquartile mean of the seeds, and its 95% interval"
    label = ["return of the last 100 episodes"]
    draw_bands(bench.file("png"), curves(groups, "training"), iqm_and_interval, title, label)
    bench.write_page(f"""# MinAtar, beside Stable-Baselines3

{record.missing(jobs)}{frames:,} frames of each game with sticky actions and rising difficulty, and
the fewest actions; {ENVS} environments for {STEPS} steps, {EPOCHS} epochs of minibatches of {SIZE}
frames, a learning rate that falls from {RATE} to 0, clip range {CLIP}, entropy coefficient
{ENTROPY}. Both arms have `actor_critic`'s `encoder="small"`, shared by policy and critic, and fused
Adam.

![Returns over frames](minatar.png)

Final returns: the last 100 training episodes; the interquartile mean over the seeds, its 95%
bootstrap interval (for fewer than four seeds the range), and the number of seeds. "not below":
ppokit's mean is at or above the lower end of Stable-Baselines3's interval.

{score_table(groups)}

{speed_section(speeds)}
""")


if __name__ == "__main__":
    main()
