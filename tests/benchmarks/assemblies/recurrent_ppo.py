"""Recurrent PPO with options: three tasks, and an LSTM, a GRU, a stack of frames or no memory."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.modules import ValueOperator

import ppokit
from tests.benchmarks.assemblies.harness import Run, count, options_of
from tests.benchmarks.networks import CELLS, body_of, policy_of
from tests.benchmarks.tables import settings_of


class CueEnv(gym.Env):
    """A cue, a gap of random length, and a decision.

    Observations are ``[left, right, light]``, and the number of the step in the episode. The number
    of steps between cue and decision is from ``shortest`` to ``longest``.
    """

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Dict(
        {
            "observation": gym.spaces.Box(0.0, 1.0, (3,), np.float32),
            "step": gym.spaces.Box(0, 2**31 - 1, (1,), np.int64),
        }
    )

    def __init__(self, shortest: int, longest: int) -> None:
        self.shortest, self.longest = shortest, longest

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Show a new cue."""
        super().reset(seed=seed, options=options)
        self.cue = int(self.np_random.integers(2))
        self.end = int(self.np_random.integers(self.shortest, self.longest + 1)) + 1
        self.now = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        """Move to the next step, and pay for the decision."""
        ended = self.now == self.end
        reward = (1.0 if int(action) == self.cue else -1.0) if ended else 0.0
        self.now += 1
        return self._observe(), reward, ended, False, {}

    def _observe(self) -> dict[str, np.ndarray]:
        shown = np.zeros(3, np.float32)
        if self.now == 0:
            shown[self.cue] = 1.0
        shown[2] = self.now == self.end
        return {"observation": shown, "step": np.array([self.now])}


# ``seen``: an environment, and the observations that are seen.
TASKS = settings_of(
    ["pendulum", "cartpole", "cue"],
    """
seq_len           32                     32                     16
total_frames      98_304                 198_656                196_608
num_envs          8                      8                      16
frames_per_batch  2_048                  2_048                  4_096
gamma             0.9                    0.98                   0.99
learning_rate     5e-4                   1e-3                   1e-3
epochs            20                     10                     5
minibatch_size    128                    512                    512
clip_epsilon      0.1                    0.2                    0.2
entropy           0.0                    0.0                    0.01
seen              ("Pendulum-v1",[0,1])  ("CartPole-v1",[0,2])  None
""",
)
STACKED = 4  # frames

parser = options_of("recurrent_ppo", "PPO with memory, on ppokit's blocks.")
parser.add_argument("--task", choices=[*TASKS], default="pendulum")
parser.add_argument("--memory", choices=["lstm", "gru", "stack", "none"], default="lstm")
parser.add_argument("--seq-len", type=count, help="steps that a gradient reaches back")
parser.add_argument("--forget", action="store_true", help="zero the state every seq-len steps")
run = Run(parser)
args = run.args
task, recurrent = TASKS[args.task], args.memory in ("lstm", "gru")
seq_len = task.seq_len if args.seq_len is None else args.seq_len
if args.total_frames is None:
    args.total_frames = 2 * task.frames_per_batch if args.quick else task.total_frames


def make_env(evaluated: bool = False) -> gym.Env:
    """Return the environment; to be evaluated, all gaps of the cue are above 2 * seq_len."""
    if task.seen is None:
        env: gym.Env = CueEnv(2 * seq_len + 1 if evaluated else 2, 3 * seq_len)
        if args.memory == "stack":
            space = CueEnv.observation_space["observation"]
            env = gym.wrappers.TransformObservation(env, lambda seen: seen["observation"], space)
    else:
        name, kept = task.seen
        env = gym.make(name)
        whole: Any = env.observation_space
        left = gym.spaces.Box(whole.low[kept], whole.high[kept])
        env = gym.wrappers.TransformObservation(env, lambda seen: seen[kept], left)
    if args.memory == "stack":
        env = gym.wrappers.FlattenObservation(gym.wrappers.FrameStackObservation(env, STACKED))
    return env


def make_head(outputs: int) -> nn.Sequential:
    """Return the layers of one network after the state."""
    return nn.Sequential(nn.Linear(CELLS, CELLS), nn.Tanh(), nn.Linear(CELLS, outputs))


def make_networks() -> tuple[Any, Any, Any]:
    """Return actor, value head and critic; actor and critic share all but their heads."""
    env = make_env()
    seen, action_space = env.observation_space, env.action_space
    if isinstance(seen, gym.spaces.Dict):
        seen = seen["observation"]
    memory = {"lstm": ppokit.LSTMModule, "gru": ppokit.GRUModule}.get(args.memory)
    shared = body_of(seen, memory)
    if isinstance(shared[1], ppokit.LSTMModule):  # initially the cell keeps its content
        shared[1].lstm.bias_ih_l0.data[CELLS : 2 * CELLS] = 1.0
    if args.forget:
        begins = lambda is_init, step: is_init | (step % seq_len == 0)  # noqa: E731
        shared.insert(1, TensorDictModule(begins, ["is_init", "step"], ["is_init"]))
    actor = policy_of(make_head, action_space, key="hidden", before=shared)
    value_head = ValueOperator(make_head(1), in_keys=["hidden"])
    return actor, value_head, TensorDictSequential(*shared, value_head)


actor, value_head, critic = make_networks()
loss = ppokit.DualClipPPOLoss(
    actor,
    value_head,
    clip_epsilon=task.clip_epsilon,
    entropy_coeff=task.entropy,
    entropy_bonus=task.entropy > 0,
    critic_coeff=0.5,
    loss_critic_type="l2",
)
optimizer = torch.optim.Adam(loss.parameters(), lr=task.learning_rate, fused=True)
falling = ppokit.InterpSchedule([(0, task.learning_rate), (args.total_frames, 0.0)])
stopper = ppokit.KLEarlyStopper(0.2)
update = ppokit.PPOUpdate(
    ppokit.TrainingStep(loss, optimizer, stopper=stopper, max_grad_norm=0.5),
    reward_normalizer=ppokit.RewardNormalizer(task.gamma),
    advantage=ppokit.GAE(gamma=task.gamma, lmbda=0.95, value_network=critic, average_gae=True),
    batcher=ppokit.SequenceBatcher(seq_len) if recurrent else None,
    scheduler=ppokit.ParameterScheduler({"lr": (optimizer, falling)}),
    epochs=task.epochs,
    minibatch_size=task.minibatch_size,
    seed=args.seed,
)
sizes = {"num_envs": task.num_envs, "frames_per_batch": task.frames_per_batch}
collector = ppokit.GymCollector(make_env, actor, total_frames=args.total_frames, **sizes)


def evaluate() -> dict[str, float]:
    """Return the mean return of an episode; of cues, the share of right decisions."""
    episodes = 10 if args.quick else 400 if args.task == "cue" else 100
    options: Any = {"episodes": episodes, "num_envs": episodes, "seed": 10_000}
    returns, _ = ppokit.evaluate(lambda: make_env(evaluated=True), actor, **options)
    mean = returns.mean().item()
    return {"eval_return": (mean + 1) / 2 if args.task == "cue" else mean}


title = f"{args.task}, memory: {args.memory}, seed {args.seed}"
options = {"eval_every": 1 if args.quick else 5, "panels": {"padded share": ["padded"]}}
run.train(collector, update, title, evaluate=evaluate, **options)
