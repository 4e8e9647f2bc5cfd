"""Tasks of the learning benchmark, with the settings that both arms have.

The settings are those of ``hyperparams/ppo.yml`` of DLR-RM/rl-baselines3-zoo at commit
22e3ff2450fd92033f7f032915e1f64894a09584, under the name in :attr:`Task.entry`: the task itself, or
the nearest older version that is tuned there. Where the zoo explores with gSDE (Pendulum-v1), both
arms draw from a plain normal distribution.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """An environment, how long it is trained on, and with which settings."""

    env: str
    entry: str  #: of the zoo
    frames: int
    seeds: int
    bar: float  #: the final return to reach
    num_envs: int
    steps: int  #: of each environment in a batch
    minibatch: int
    epochs: int
    gamma: float
    lmbda: float
    learning_rate: float
    clip: float = 0.2
    entropy: float = 0.0
    critic: float = 0.5
    max_grad_norm: float = 0.5
    is_linear: bool = False  #: learning rate and clip range fall to 0
    normalizes: bool = False  #: observations and rewards
    cells: tuple[int, int] = (64, 64)
    activation: str = "Tanh"
    log_std: float = 0.0
    is_orthogonal: bool = True  #: initial weights

    @property
    def batch(self) -> int:
        """Frames of a batch."""
        return self.num_envs * self.steps


CARTPOLE = Task(
    env="CartPole-v1",
    entry="CartPole-v1",
    frames=100_000,
    seeds=5,
    bar=490,
    num_envs=8,
    steps=32,
    minibatch=256,
    epochs=20,
    gamma=0.98,
    lmbda=0.8,
    learning_rate=1e-3,
    is_linear=True,
)
PENDULUM = Task(
    env="Pendulum-v1",
    entry="Pendulum-v1",
    frames=100_000,
    seeds=5,
    bar=-200,
    num_envs=4,
    steps=1_024,
    minibatch=64,
    epochs=10,
    gamma=0.9,
    lmbda=0.95,
    learning_rate=1e-3,
)
LUNAR_LANDER = Task(
    env="LunarLanderContinuous-v3",
    entry="LunarLanderContinuous-v3",
    frames=1_000_000,
    seeds=5,
    bar=200,
    num_envs=16,
    steps=1_024,
    minibatch=64,
    epochs=4,
    gamma=0.999,
    lmbda=0.98,
    learning_rate=3e-4,
    entropy=0.01,
)
DOUBLE_PENDULUM = Task(
    env="InvertedDoublePendulum-v5",
    entry="InvertedDoublePendulum-v2",
    frames=1_000_000,
    seeds=5,
    bar=9_000,
    num_envs=1,
    steps=128,
    minibatch=128,  # the zoo's 512 is larger than its batch, so that this is what it trains on
    epochs=10,
    gamma=0.98,
    lmbda=0.8,
    learning_rate=0.000155454,
    clip=0.4,
    entropy=1.05057e-06,
    critic=0.695929,
    normalizes=True,
)
HALF_CHEETAH = Task(
    env="HalfCheetah-v5",
    entry="HalfCheetah-v4",
    frames=1_000_000,
    seeds=3,
    bar=-float("inf"),
    num_envs=1,
    steps=512,
    minibatch=64,
    epochs=20,
    gamma=0.98,
    lmbda=0.92,
    learning_rate=2.0633e-05,
    clip=0.1,
    entropy=0.000401762,
    critic=0.58096,
    max_grad_norm=0.8,
    normalizes=True,
    cells=(256, 256),
    activation="ReLU",
    log_std=-2.0,
    is_orthogonal=False,
)
HOPPER = Task(
    env="Hopper-v5",
    entry="Hopper-v4",
    frames=1_000_000,
    seeds=3,
    bar=-float("inf"),
    num_envs=1,
    steps=512,
    minibatch=32,
    epochs=5,
    gamma=0.999,
    lmbda=0.99,
    learning_rate=9.80828e-05,
    entropy=0.00229519,
    critic=0.835671,
    max_grad_norm=0.7,
    normalizes=True,
    cells=(256, 256),
    activation="ReLU",
    log_std=-2.0,
    is_orthogonal=False,
)
TASKS = {
    task.env: task
    for task in (CARTPOLE, PENDULUM, LUNAR_LANDER, DOUBLE_PENDULUM, HALF_CHEETAH, HOPPER)
}
