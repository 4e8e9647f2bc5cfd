"""Recurrent PPO beside RecurrentPPO of sb3-contrib: returns, and frames a second of whole loops.

All runs take some four hours of one core: first the rounds that measure frames a second, one at a
time, then every task, arm and seed, as many at a time as there are cores.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace as Task
from typing import Any

import gymnasium as gym
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

import ppokit
from ppokit.networks import actor_critic
from tests.benchmarks import learning_arms
from tests.benchmarks.curves import interval, iqm, iqm_and_interval, iqm_text
from tests.benchmarks.figures import draw_bands
from tests.benchmarks.learning import speed_table
from tests.benchmarks.learning_arms import frames_per_second, training_curve
from tests.benchmarks.mujoco_record import Groups, Job, Record, curves, final, rounds
from tests.benchmarks.networks import mlp
from tests.benchmarks.report import Benchmark, commit
from tests.benchmarks.runs import CORES
from tests.benchmarks.tables import markdown, settings_of

# ``seen``: an environment, and the observations that are seen.
TASKS = settings_of(
    ("CartPole", "Pendulum", "CartPole, zoo"),
    """
seen        ("CartPole-v1",[0,2])  ("Pendulum-v1",[0,1])  ("CartPole-v1",[0,2])
frames      100_000                100_000                100_000
units       64                     64                     64
steps       128                    128                    32
seq_len     16                     16                     32
minibatch   128                    128                    256
epochs      10                     10                     20
gamma       0.99                   0.9                    0.98
lmbda       0.95                   0.95                   0.8
rate        3e-4                   1e-3                   1e-3
falls       False                  False                  True
normalizes  False                  False                  True
""",
)
WIDE = "CartPole, 256 units"  # for its speed
TASKS |= {WIDE: Task(**(vars(TASKS["CartPole"]) | {"units": 256}))}
ENVS, POINTS = 8, 50
OURS, SB3 = "ppokit", "Stable-Baselines3"
SHARED, SB3_SHARED = "ppokit, shared", "Stable-Baselines3, shared"
COMPILED, SHARED_COMPILED = "ppokit, compiled", "ppokit, shared, compiled"
CLEANRL = "CleanRL-style, shared"


def make_env(name: str, kept: list[int]) -> gym.Env[Any, Any]:
    """Return an environment without the velocities, whose actions lie between -1 and 1."""
    env = gym.make(name)
    whole: Any = env.observation_space
    left = gym.spaces.Box(whole.low[kept], whole.high[kept])
    env = gym.wrappers.TransformObservation(env, lambda seen: seen[kept], left)
    if isinstance(env.action_space, gym.spaces.Box):
        env = gym.wrappers.ClipAction(gym.wrappers.RescaleAction(env, -1.0, 1.0))
    return env


class Ppokit(learning_arms.Ppokit):
    """The assembly of ppokit's blocks."""

    def __init__(self, task: Task, seed: int, *, shared: bool, compiled: bool = False) -> None:
        torch.manual_seed(seed)
        make = partial(make_env, *task.seen)
        options: Any = {"memory": "lstm", "memory_size": task.units, "log_scale": 0.0}
        networks = actor_critic(make(), (64, 64), shared=shared, **options)
        loss = ppokit.DualClipPPOLoss(
            networks.actor,
            networks.value,
            entropy_bonus=False,
            critic_coeff=0.5,
            loss_critic_type="l2",
        )
        optimizer = torch.optim.Adam(loss.parameters(), task.rate, eps=1e-5, fused=True)
        ends = [(0, 1.0), (task.frames, 0.0 if task.falls else 1.0)]
        falling = {
            name: (target, ppokit.InterpSchedule([(x, value * y) for x, y in ends]))
            for name, target, value in (("lr", optimizer, task.rate), ("clip_epsilon", loss, 0.2))
        }
        normalizer = ppokit.ObservationNormalizer(len(task.seen[1])) if task.normalizes else None
        gae = {"gamma": task.gamma, "lmbda": task.lmbda, "average_gae": True}
        self.update = ppokit.PPOUpdate(
            ppokit.TrainingStep(loss, optimizer, max_grad_norm=0.5, compile=compiled),
            advantage=ppokit.GAE(value_network=networks.critic, **gae),
            reward_normalizer=ppokit.RewardNormalizer(task.gamma) if task.normalizes else None,
            batcher=ppokit.SequenceBatcher(task.seq_len),
            scheduler=ppokit.ParameterScheduler(falling) if task.falls else None,
            epochs=task.epochs,
            minibatch_size=task.minibatch,
            seed=seed,
        )
        self.collector = ppokit.GymCollector(
            make,
            networks.policy,
            frames_per_batch=ENVS * task.steps,
            total_frames=task.frames,
            num_envs=ENVS,
            observation_transform=normalizer,
            episode_reward=True,
        )
        self.collector.set_seed(seed)


class RecurrentPPO(learning_arms.StableBaselines3):
    """Its ``RecurrentPPO`` over environments in one process."""

    def __init__(self, task: Task, seed: int, *, shared: bool) -> None:
        vec = import_module("stable_baselines3.common.vec_env").VecNormalize
        make = import_module("stable_baselines3.common.env_util").make_vec_env
        envs = make(partial(make_env, *task.seen), ENVS, seed=seed)
        scheduled = [(lambda left, x=x: x * left) if task.falls else x for x in (task.rate, 0.2)]
        policy = {"lstm_hidden_size": task.units, "optimizer_kwargs": {"eps": 1e-5, "fused": True}}
        policy |= {"shared_lstm": True, "enable_critic_lstm": False} if shared else {}
        self.frames = task.frames
        self.model = import_module("sb3_contrib").RecurrentPPO(
            "MlpLstmPolicy",
            vec(envs, gamma=task.gamma) if task.normalizes else envs,
            learning_rate=scheduled[0],
            clip_range=scheduled[1],
            n_steps=task.steps,
            batch_size=task.minibatch,
            n_epochs=task.epochs,
            gamma=task.gamma,
            gae_lambda=task.lmbda,
            policy_kwargs=policy,
            seed=seed,
            device="cpu",
        )


class CleanRLStyle:
    """One file in the manner of CleanRL's ``ppo_atari_lstm.py``: a minibatch is whole rows."""

    def __init__(self, task: Task, seed: int) -> None:
        torch.manual_seed(seed)
        self.task = task
        makers = [lambda: RecordEpisodeStatistics(make_env(*task.seen))] * ENVS
        self.envs: Any = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
        self.agent = RecurrentAgent(self.envs, task.units)
        self.optimizer = torch.optim.Adam(self.agent.parameters(), lr=task.rate, eps=1e-5)
        self.observation = torch.Tensor(self.envs.reset(seed=seed)[0])
        self.done, self.state = torch.zeros(ENVS), torch.zeros(2, 1, ENVS, task.units)
        self.returns: deque[float] = deque(maxlen=100)

    def batches(self) -> learning_arms.Batches:
        """Train, a batch at a time."""
        task = self.task
        for frames in range(ENVS * task.steps, task.frames + 1, ENVS * task.steps):
            before, rows = self.state, self.collect()
            for _ in range(task.epochs):
                # As many minibatches as the others have, of an environment each at the least.
                order = torch.randperm(ENVS).chunk(min(ENVS, ENVS * task.steps // task.minibatch))
                for chosen in order:
                    loss = self.loss(before[:, :, chosen], [x[:, chosen] for x in rows])
                    self.optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(self.agent.parameters(), 0.5)
                    self.optimizer.step()
            yield frames, list(self.returns)

    @torch.no_grad()
    def collect(self) -> list[Tensor]:
        """Return observations, starts, actions, log-probabilities, advantages and targets."""
        task, rows = self.task, []
        for _ in range(task.steps):
            seen = self.observation, self.done
            dist, value, self.state = self.agent(
                self.observation[None], self.state, self.done[None]
            )
            action = dist.sample()
            observation, reward, terminated, truncated, info = self.envs.step(action[0].numpy())
            if "final_info" in info:
                ended = info["final_info"]["episode"]
                self.returns += ended["r"][ended["_r"]].tolist()
            self.observation = torch.Tensor(observation)
            self.done = torch.Tensor(terminated | truncated)
            rows.append(
                (*seen, action[0], log_prob_of(dist, action)[0], value[0], reward, self.done)
            )
        observations, starts, actions, log_probs, values, rewards, dones = (
            torch.stack([torch.as_tensor(x, dtype=torch.float32) for x in column])
            for column in zip(*rows, strict=True)
        )
        _, following, _ = self.agent(self.observation[None], self.state, self.done[None])
        last, advantages = torch.zeros(ENVS), torch.zeros_like(values)
        following = torch.cat([values[1:], following])
        for t in reversed(range(task.steps)):
            goes_on = 1 - dones[t]
            delta = rewards[t] + task.gamma * following[t] * goes_on - values[t]
            advantages[t] = last = delta + task.gamma * task.lmbda * goes_on * last
        return [observations, starts, actions, log_probs, advantages, advantages + values]

    def loss(self, state: Tensor, rows: list[Tensor]) -> Tensor:
        observations, starts, actions, log_probs, advantages, targets = rows
        dist, values, _ = self.agent(observations, state, starts)
        ratio = (log_prob_of(dist, actions) - log_probs).exp()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        of_policy = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).mean()
        return of_policy + 0.5 * ((values - targets) ** 2).mean()


def log_prob_of(dist: Any, action: Tensor) -> Tensor:
    found = dist.log_prob(action)
    return found.sum(-1) if isinstance(dist, Normal) else found


class RecurrentAgent(nn.Module):
    """An LSTM that actor and critic share, and called a step at a time."""

    def __init__(self, envs: Any, units: int) -> None:
        super().__init__()
        size, space = envs.single_observation_space.shape[0], envs.single_action_space
        self.is_box = isinstance(space, gym.spaces.Box)
        self.lstm = nn.LSTM(size, units)
        self.actor = mlp(units, space.shape[0] if self.is_box else int(space.n))
        self.critic = mlp(units, 1)
        self.log_std = nn.Parameter(torch.zeros(space.shape))

    def forward(self, x: Tensor, state: Tensor, starts: Tensor) -> tuple[Any, Tensor, Tensor]:
        """Return distribution, value ``[T, N]`` and states, for observations ``[T, N, size]``."""
        outputs, states = [], (state[0], state[1])
        for observation, start in zip(x, starts, strict=True):
            goes_on = (1 - start).view(1, -1, 1)
            output, states = self.lstm(observation[None], tuple(goes_on * s for s in states))
            outputs.append(output)
        features = torch.cat(outputs)
        found = self.actor(features)
        dist = Normal(found, self.log_std.exp()) if self.is_box else Categorical(logits=found)
        return dist, self.critic(features).squeeze(-1), torch.stack(states)


ARMS: dict[str, Any] = {
    OURS: partial(Ppokit, shared=False),
    COMPILED: partial(Ppokit, shared=False, compiled=True),
    SHARED: partial(Ppokit, shared=True),
    SHARED_COMPILED: partial(Ppokit, shared=True, compiled=True),
    CLEANRL: CleanRLStyle,
    SB3: partial(RecurrentPPO, shared=False),
    SB3_SHARED: partial(RecurrentPPO, shared=True),
}


LEARNING = OURS, SHARED, SB3, SB3_SHARED, CLEANRL  # the compiled ones learn what eager ones do


def run(
    task: str, arm: str, seed: int, frames: int | None, seconds: float | None
) -> dict[str, Any]:
    """Train to the end, or time some seconds of the steady state."""
    settings, started = Task(**vars(TASKS[task])), {"commit": commit()}
    settings.frames = frames or settings.frames
    contender = ARMS[arm](settings, seed)
    if seconds is not None:
        return started | frames_per_second(contender, seconds)
    every = max(1, settings.frames // (ENVS * settings.steps * POINTS))
    return started | training_curve(contender, settings.frames, every)


def score_table(groups: Groups) -> str:
    lines = []
    for task, arms in groups.items():
        found = {arm: final(arms.get(arm, [])) for arm in LEARNING}
        texts = [f"{iqm_text(x)}; {len(x)}" if len(x) else "" for x in found.values()]
        verdicts = [
            "yes" if iqm(found[ours]) >= interval(found[theirs])[0] else "**no**"
            for ours, theirs in ((OURS, SB3), (SHARED, SB3_SHARED))
            if len(found[ours]) and len(found[theirs])
        ]
        lines.append([task, *texts, ", ".join(verdicts)])
    return markdown(["task", *LEARNING, "not below"], lines)


def main() -> None:
    packages = ("stable-baselines3", "sb3-contrib")
    bench = Benchmark("recurrent_loops", keeps_results=True, packages=packages, has_record=True)
    record = Record(bench.file("csv"), bench.results, "recurrent_loops.run")
    arms = [x for x in ARMS if find_spec("sb3_contrib") or x not in (SB3, SB3_SHARED)]
    tasks = [name for name in TASKS if name != WIDE][: 1 if bench.quick else None]
    frames, seeds = (4 * ENVS * 128, 1) if bench.quick else (None, 5)
    learning = [arm for arm in arms if arm in LEARNING]
    jobs: list[Job] = [
        (task, arm, seed)
        for seed in range(seeds)
        for task in tasks
        for arm in learning
        if not (arm == CLEANRL and TASKS[task].normalizes)  # it does not
    ]
    timed = tasks[:1] if bench.quick else ["CartPole", WIDE, "Pendulum"]
    if not bench.options.pages:
        turns = rounds(timed, arms, 1 if bench.quick else 3)
        record.run(turns, 1, 10**9, 0.5 if bench.quick else 15.0)
        record.run(jobs, CORES, frames)
    groups, speeds = record.by_task([*TASKS]), record.by_task([*TASKS], speed=True)
    title = "Interquartile mean of the seeds, and its 95% interval"
    label = ["return of the last 100 episodes"]
    draw_bands(bench.file("png"), curves(groups, "training"), iqm_and_interval, title, label)
    speed = speed_table(speeds, arms) if speeds else ""
    bench.write_page(f"""# Recurrent PPO, beside RecurrentPPO

{record.missing(jobs)}CartPole and Pendulum without velocities, {ENVS} environments, 100,000 frames,
an LSTM of 64 units, two layers of 64 behind it; as many steps of the optimizer in all arms. "zoo"
is the setting of RecurrentPPO's published result on CartPole: 32 steps, 20 epochs, gamma 0.98,
lambda 0.8, falling learning rate and clip range, normalized observations and rewards. Actor and
critic have an LSTM each, or ("shared") one, which the critic's loss does not train in ppokit and
RecurrentPPO. ppokit cuts sequences of 16 steps (zoo: 32) and normalizes the advantage over the
batch. "CleanRL-style" is one file in the manner of CleanRL's `ppo_atari_lstm.py` without images:
it calls a shared LSTM, which the critic trains, a step at a time, and a minibatch is whole rows.

![Returns over frames](recurrent_loops.png)

Final returns: the last 100 training episodes; the interquartile mean over the seeds, its 95%
bootstrap interval, and the number of seeds. "not below": ppokit's mean is at or above the lower end
of RecurrentPPO's interval, separate and shared.

{score_table(groups)}

Frames a second of the same assemblies, collecting and training, on one thread with nothing else
running, the arms in turn: median (lowest to highest) of the rounds, after the capture of compiled
arms; the ratios of the medians in the order of the columns. The others run eagerly:

{speed}
""")


if __name__ == "__main__":
    main()
