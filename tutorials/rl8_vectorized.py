r"""
rl8: environments as tensors
============================

`rl8 <https://github.com/theOGognf/rl8>`_ trains on thousands of environments that
are one tensor, on the CPU or a GPU. This tutorial puts its PPO together from
ppokit's blocks, on its first example: a cart with a pole whose episodes never end.

.. code-block:: bash

    python tutorials/rl8_vectorized.py           # half a minute
    python tutorials/rl8_vectorized.py --quick   # a few seconds
"""

# %%
# Settings
# --------
from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.collectors import Collector
from torchrl.data import Binary, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase
from tqdm import tqdm

import ppokit
from ppokit.networks import actor_critic
from ppokit.plotting import PANELS, plot_run

QUICK = "--quick" in sys.argv
DEVICE = torch.device("cpu")  # or "cuda"
SEED = 0
NUM_ENVS, HORIZON = (64, 32) if QUICK else (256, 64)
BATCHES = 2 if QUICK else 20
EPOCHS, MINIBATCH = 1, 256  # frames
LEARNING_RATE, GAMMA, LMBDA = 2e-3, 0.95, 0.95
OUT = Path("outputs") / "rl8_vectorized"

torch.set_num_threads(1)  # small networks gain nothing from more
torch.manual_seed(SEED)

# %%
# Environments as a tensor
# ------------------------
# A torchrl environment of batch size ``[NUM_ENVS]``. A step is some thirty tensor
# operations for any number of environments. Nothing terminates: after
# ``HORIZON`` steps all environments are truncated.
#
# It has the equations of gymnasium's ``CartPole-v1``. As in rl8 there are three
# forces, and the reward is minus the distance from rest.


def move(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Return states ``[N, 4]`` after 0.02 s, and rewards ``[N, 1]``."""
    x, speed, angle, spin = state.unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    push = (5.0 * (action - 1) + 0.05 * spin**2 * sin) / 1.1
    turn = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    pull = push - 0.05 * turn * cos / 1.1
    change = torch.stack([speed, pull, spin, turn], -1)
    state = state + 0.02 * change
    x, speed, angle, spin = state.unbind(-1)
    upright = (angle.cos() - 1).abs() + angle.sin().abs()
    cost = upright + x.abs() + speed.abs() + spin.abs()
    return state, -cost.unsqueeze(-1)


class CartPoles(EnvBase):
    """Carts with poles in one tensor."""

    def __init__(self, num_envs: int, device: torch.device) -> None:
        super().__init__(device=device, batch_size=[num_envs])
        seen = Unbounded((num_envs, 5))
        self.observation_spec = Composite(observation=seen, shape=(num_envs,))
        self.action_spec = Categorical(3, (num_envs,))
        self.reward_spec = Unbounded((num_envs, 1))
        flag = Binary(1, (num_envs, 1), dtype=torch.bool)
        names = ("done", "terminated", "truncated")
        self.done_spec = Composite(
            dict.fromkeys(names, flag), shape=(num_envs,)
        )
        self.generator = torch.Generator(device)

    def _set_seed(self, seed: int | None) -> None:
        self.generator.manual_seed(seed or 0)

    def _reset(self, tensordict: Any = None, **_: Any) -> TensorDictBase:
        options: Any = {"generator": self.generator, "device": self.device}
        self.state = 0.01 * torch.randn(*self.batch_size, 4, **options)
        self.now = 0
        return self.observe()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.state, reward = move(self.state, tensordict["action"])
        self.now += 1
        ended = torch.full_like(reward, self.now >= HORIZON, dtype=torch.bool)
        flags = {"done": ended, "truncated": ended.clone()}
        flags["terminated"] = torch.zeros_like(ended)
        return self.observe().update({"reward": reward} | flags)

    def observe(self) -> TensorDict:
        """Return position, speed, cosine, sine and spin."""
        x, speed, angle, spin = self.state.unbind(-1)
        seen = torch.stack([x, speed, angle.cos(), angle.sin(), spin], -1)
        out = {"observation": seen}
        return TensorDict(out, self.batch_size, device=self.device)


# %%
# rl8's algorithm
# ---------------
# - Rewards are divided by the standard deviation of the batch's discounted returns
#   (``statistics="batch"``).
# - GAE bootstraps at the end of a horizon, because it is a truncation. The advantage
#   is standardized over the batch.
# - ``critic_loss_clip`` bounds the loss of the critic. rl8's value is 5.
#
# rl8 takes four steps a batch, each on the whole batch. Minibatches of 256 frames in
# one epoch learn faster here.
spaces = gym.spaces.Box(-9, 9, (5,)), gym.spaces.Discrete(3)
actor, critic = actor_critic(spaces, hidden=(256, 256), device=DEVICE)
loss = ppokit.DualClipPPOLoss(
    actor, critic, critic_loss_clip=5.0, entropy_bonus=False
)
adam = torch.optim.Adam(loss.parameters(), lr=LEARNING_RATE, fused=True)
update = ppokit.PPOUpdate(
    ppokit.TrainingStep(loss, adam, max_grad_norm=5.0),
    reward_normalizer=ppokit.RewardNormalizer(GAMMA, statistics="batch"),
    advantage=ppokit.GAE(
        gamma=GAMMA, lmbda=LMBDA, value_network=critic, average_gae=True
    ),
    epochs=EPOCHS,
    minibatch_size=MINIBATCH,
    seed=SEED,
)

# %%
# Training
# --------
# torchrl's ``Collector`` steps the environments. ``TensorActor`` calls the policy
# without TensorDict operations between its modules.
env = CartPoles(NUM_ENVS, DEVICE)
env.set_seed(SEED)
collector = Collector(
    env,
    ppokit.TensorActor(actor),
    frames_per_batch=NUM_ENVS * HORIZON,
    total_frames=NUM_ENVS * HORIZON * BATCHES,
    device=DEVICE,
    auto_register_policy_transforms=False,
)
history: list[dict[str, float]] = []
started = time.perf_counter()
for batch in tqdm(collector, total=BATCHES, unit="batch"):
    mean_return = batch["next", "reward"].sum(1).mean().item()
    history.append(update(batch) | {"return": mean_return})
speed = BATCHES * NUM_ENVS * HORIZON / (time.perf_counter() - started)
collector.shutdown()
first, last = history[0]["return"], history[-1]["return"]
print(f"return of a horizon: {first:.0f} -> {last:.0f}")
print(f"{speed:,.0f} frames a second, updates included")

# %%
# Result
# ------
panels = {"mean return of a horizon": ["return"]} | dict([*PANELS.items()][1:])
figure = plot_run(history, panels=panels, title=f"{NUM_ENVS} carts with poles")
OUT.mkdir(parents=True, exist_ok=True)
figure.savefig(OUT / "figure.png", dpi=120)
(OUT / "history.json").write_text(json.dumps(history))
ppokit.save_checkpoint(OUT / "checkpoint.pt", {"update": update})

# %%
# Next: :doc:`../howto/coming_from`, :doc:`../howto/isaac_lab`, and the comparison
# with rl8 itself in :doc:`../benchmarks/rl8`.
