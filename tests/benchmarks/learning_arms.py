"""Training runs on the same settings, by ppokit's blocks and by Stable-Baselines3.

The settings are those of ``hyperparams/ppo.yml`` of DLR-RM/rl-baselines3-zoo at commit
22e3ff2450fd92033f7f032915e1f64894a09584, for the task or its nearest older version. Both arms draw
from a normal distribution instead of gSDE. The last column is the setting of ``mujoco``, and of
``tutorials/mujoco_ppo.py``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace as Task
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.wrappers import ClipAction
from tensordict import TensorDict
from torch import nn
from torchrl.envs import ExplorationType, set_exploration_type

import ppokit
from ppokit.networks import actor_critic
from tests.benchmarks.networks import spaces_of
from tests.benchmarks.report import commit
from tests.benchmarks.sb3 import make_ppo
from tests.benchmarks.tables import settings_of

NAMES = ("CartPole-v1", "Pendulum-v1", "LunarLanderContinuous-v3", "InvertedDoublePendulum-v5")
NAMES += ("HalfCheetah-v5", "Hopper-v5", "MuJoCo")
# ``steps`` are of each environment in a batch; ``bar`` is the final return to reach; ``lr_falls``
# and ``clip_falls``: linearly to 0; ``normalizes`` observations and rewards; ``is_orthogonal`` is
# about initial weights; ``eps`` is Adam's. The zoo's minibatch of the double pendulum, 512, is
# larger than its batch of 128.
TASKS = settings_of(
    NAMES,
    """
frames         100_000  100_000  1_000_000  1_000_000    1_000_000    1_000_000    1_000_000
seeds          5        5        5          5            3            3            5
bar            490      -200     200        9_000        -            -            -
num_envs       8        4        16         1            1            1            1
steps          32       1_024    1_024      128          512          512          2_048
minibatch      256      64       64         128          64           32           64
epochs         20       10       4          10           20           5            10
gamma          0.98     0.9      0.999      0.98         0.98         0.999        0.99
lmbda          0.8      0.95     0.98       0.8          0.92         0.99         0.95
learning_rate  1e-3     1e-3     3e-4       0.000155454  2.0633e-05   9.80828e-05  3e-4
clip           0.2      0.2      0.2        0.4          0.1          0.2          0.2
entropy        0.0      0.0      0.01       1.05057e-06  0.000401762  0.00229519   0.0
critic         0.5      0.5      0.5        0.695929     0.58096      0.835671     0.25
max_grad_norm  0.5      0.5      0.5        0.5          0.8          0.7          0.5
lr_falls       True     False    False      False        False        False        True
clip_falls     True     False    False      False        False        False        False
eps            1e-5     1e-5     1e-5       1e-5         1e-5         1e-5         1e-8
normalizes     False    False    False      True         True         True         True
cells          (64,64)  (64,64)  (64,64)    (64,64)      (256,256)    (256,256)    (64,64)
activation     "Tanh"   "Tanh"   "Tanh"     "Tanh"       "ReLU"       "ReLU"       "Tanh"
log_std        0.0      0.0      0.0        0.0          -2.0         -2.0         -0.5
is_orthogonal  True     True     True       True         False        False        True
""",
)
MUJOCO = TASKS.pop("MuJoCo")
FINAL_EPISODES, POINTS = 20, 50  # POINTS: of a learning curve
Batches = Iterator[tuple[int, list[float]]]
"""Frames so far, and returns of the last 100 episodes, after each batch."""


def make_networks(
    task: Task, *, layer_norm: bool = False, critic_hidden: tuple[int, ...] | None = None
) -> tuple[Any, Any]:
    """Return actor and critic, with the initial weights of Stable-Baselines3."""
    activation, env = getattr(nn, task.activation), make_env(task.env)
    options = {"critic_hidden": critic_hidden, "log_scale": task.log_std}
    networks = actor_critic(env, task.cells, activation, **options)
    env.close()
    for layer in (layer for network in networks for layer in list(network.modules())):
        if isinstance(layer, nn.Linear) and not task.is_orthogonal:
            layer.reset_parameters()
        if isinstance(layer, nn.Sequential) and layer_norm:
            for index in reversed(range(len(layer) - 1)):
                if isinstance(layer[index + 1], activation):
                    layer.insert(index + 1, nn.LayerNorm(layer[index].out_features))
    return networks


class Ppokit:
    """The assembly of ppokit's blocks; ``adaptive`` and later ones are options of the search."""

    def __init__(
        self,
        task: Task,
        seed: int,
        *,
        compiled: bool = False,
        adaptive: bool = False,
        target_kl: tuple[float, float] = (0.01, 0.01),  # at the start, at the end
        highest: float = 1e-2,  # learning rate
        recompute: bool = False,
        **networks: Any,
    ) -> None:
        torch.manual_seed(seed)
        self.policy, critic = make_networks(task, **networks)
        self.standardize = None
        if task.normalizes:
            self.standardize = ppokit.ObservationNormalizer(spaces_of(task.env)[0].shape)
        self.collector = ppokit.GymCollector(
            partial(make_env, task.env),
            self.policy,
            frames_per_batch=task.num_envs * task.steps,
            total_frames=task.frames,
            num_envs=task.num_envs,
            observation_transform=self.standardize,
            compile_policy=compiled,
            episode_reward=True,
        )
        self.collector.set_seed(seed)
        loss = make_loss(task, self.policy, critic)
        adam = {"lr": task.learning_rate, "eps": task.eps, "fused": True}
        optimizer = torch.optim.Adam(loss.parameters(), **adam)
        values = {"lr": (optimizer, task.learning_rate)} if task.lr_falls and not adaptive else {}
        values |= {"clip_epsilon": (loss, task.clip)} if task.clip_falls else {}
        falling = {
            name: (target, ppokit.InterpSchedule([(0, value), (task.frames, 0.0)]))
            for name, (target, value) in values.items()
        }
        limits = {"target_kl": target_kl[0], "bounds": (1e-5, highest)}
        rate = ppokit.AdaptiveLearningRate(optimizer, **limits) if adaptive else None
        if adaptive:
            ends = [(0, target_kl[0]), (task.frames, target_kl[1])]
            falling["target_kl"] = (rate, ppokit.InterpSchedule(ends))
        options = {"max_grad_norm": task.max_grad_norm, "compile": compiled}
        self.update = ppokit.PPOUpdate(
            ppokit.TrainingStep(loss, optimizer, **options),
            advantage=ppokit.GAE(gamma=task.gamma, lmbda=task.lmbda, value_network=critic),
            reward_normalizer=ppokit.RewardNormalizer(task.gamma) if task.normalizes else None,
            scheduler=ppokit.ParameterScheduler(falling) if falling else None,
            adaptive_kl=rate,
            epochs=task.epochs,
            minibatch_size=task.minibatch,
            recompute_advantage=recompute,
            seed=seed,
        )

    def batches(self) -> Batches:
        """Train, a batch at a time."""
        returns: deque[float] = deque(maxlen=100)
        frames = 0
        for batch in self.collector:
            returns += batch["next", "episode_reward"][batch["next", "done"]].tolist()
            self.update(batch)
            frames += batch.numel()
            yield frames, list(returns)

    @torch.no_grad()
    def act(self, observation: np.ndarray) -> np.ndarray:
        """Return the most probable actions."""
        batch = TensorDict({"observation": torch.as_tensor(observation)}, [len(observation)])
        if self.standardize is not None:
            batch = self.standardize(batch)
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            return self.policy(batch.float())["action"].numpy()


def make_loss(task: Task, policy: Any, critic: Any) -> Any:
    return ppokit.DualClipPPOLoss(
        policy,
        critic,
        clip_epsilon=task.clip,
        entropy_bonus=task.entropy > 0,
        entropy_coeff=task.entropy,
        critic_coeff=task.critic,
        loss_critic_type="l2",
        normalize_advantage=True,
    )


class StableBaselines3:
    """Its ``PPO``, with ``VecNormalize`` if the task normalizes."""

    def __init__(self, task: Task, seed: int) -> None:

        def scheduled(value: float, falls: bool) -> Any:
            return (lambda remaining: remaining * value) if falls else value

        self.frames = task.frames
        self.model = make_ppo(
            task.env,
            task.num_envs,
            seed=seed,
            hidden=task.cells,
            normalize=task.normalizes,
            policy={
                "activation_fn": getattr(nn, task.activation),
                "ortho_init": task.is_orthogonal,
                "log_std_init": task.log_std,
                "optimizer_kwargs": {"eps": task.eps},
            },
            n_steps=task.steps,
            batch_size=task.minibatch,
            n_epochs=task.epochs,
            gamma=task.gamma,
            gae_lambda=task.lmbda,
            learning_rate=scheduled(task.learning_rate, task.lr_falls),
            clip_range=scheduled(task.clip, task.clip_falls),
            ent_coef=task.entropy,
            vf_coef=task.critic,
            max_grad_norm=task.max_grad_norm,
        )

    def batches(self) -> Batches:
        """Train, a batch at a time, as its ``learn`` does."""
        model = self.model
        total, callback = model._setup_learn(self.frames)
        while model.num_timesteps < total:
            model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
            model._update_current_progress_remaining(model.num_timesteps, total)
            model.train()
            yield model.num_timesteps, [float(x["r"]) for x in model.ep_info_buffer]

    def act(self, observation: np.ndarray) -> np.ndarray:
        if (env := self.model.get_vec_normalize_env()) is not None:
            observation = env.normalize_obs(observation)
        return self.model.predict(observation, deterministic=True)[0]


ARMS: dict[str, Any] = {
    "ppokit": Ppokit,
    "ppokit, compiled": partial(Ppokit, compiled=True),
    "Stable-Baselines3": StableBaselines3,
}


def make_env(env_id: str) -> gym.Env:
    """Return an environment that clips actions to their range, as Stable-Baselines3 does."""
    env = gym.make(env_id)
    return ClipAction(env) if isinstance(env.action_space, gym.spaces.Box) else env


def evaluate(env_id: str, act: Callable[..., np.ndarray], episodes: int, seed: int) -> list[float]:
    """Return the raw returns of episodes under the deterministic policy.

    Both arms have the same initial states. Each seed has its own, so that an interval over seeds
    includes their difficulty.
    """
    envs = gym.vector.SyncVectorEnv([partial(make_env, env_id)] * episodes)
    observation, _ = envs.reset(seed=10_000 + 1_000 * seed)
    running, returns = np.ones(episodes, dtype=bool), np.zeros(episodes)
    while running.any():
        observation, reward, terminated, truncated, _ = envs.step(act(observation))
        returns += reward * running
        running &= ~(terminated | truncated)
    envs.close()
    return returns.tolist()


def train(
    contender: Any, task: Task, seed: int, *, every: int, episodes: int = 0
) -> dict[str, Any]:
    """Train to the end; return curves of evaluations and training, and the final returns.

    A point of the curves is every so many batches; an evaluation has so many episodes.
    """
    evaluations, training = [], []
    for number, (frames, returns) in enumerate(contender.batches(), 1):
        if number % every and frames < task.frames:
            continue
        if episodes:
            found = evaluate(task.env, contender.act, episodes, 100 + seed)
            evaluations.append((frames, float(np.mean(found))))
        if returns:
            training.append((frames, float(np.mean(returns))))
    final = evaluate(task.env, contender.act, FINAL_EPISODES, seed)
    return {"evaluations": evaluations, "training": training, "final": final}


def training_curve(contender: Any, frames: int, every: int) -> dict[str, Any]:
    """Train for so many frames; return the curve of every so many batches, and its end."""
    training = [
        (so_far, float(np.mean(returns)))
        for number, (so_far, returns) in enumerate(contender.batches(), 1)
        if (number % every == 0 or so_far >= frames) and returns
    ]
    return {"training": training, "final": [training[-1][1]]}


def frames_per_second(contender: Any, seconds: float, warm_up: int = 3) -> dict[str, Any]:
    """Return frames per second after a warm-up, of so many batches at the least."""
    warm, started = -1, time.perf_counter()
    for number, (frames, _) in enumerate(contender.batches(), 1):
        now = time.perf_counter()
        if warm < 0 and number >= warm_up and now - started > min(2.0, seconds / 4):
            warm, started = frames, now
        elif warm >= 0 and now - started > seconds:
            return {"frames_per_second": (frames - warm) / (now - started)}
    raise RuntimeError(f"The run ended before {seconds:.0f} s were over.")


def run(
    task: str, arm: str, seed: int, frames: int | None, seconds: float | None
) -> dict[str, Any]:
    """Train to the end, or time some seconds of the steady state."""
    settings, started = Task(**vars(TASKS[task]), env=task), {"commit": commit()}
    if frames is not None:
        settings.frames = frames
    contender = ARMS[arm](settings, seed)
    if seconds is not None:
        return started | frames_per_second(contender, seconds)
    batches = settings.frames // (settings.num_envs * settings.steps)
    return started | train(contender, settings, seed, every=max(1, batches // POINTS))
