r"""
Memory: LSTM, GRU and transformer
=================================

This tutorial compares five policies on a task that needs a memory: one frame, a stack
of four frames, an LSTM, a GRU and a transformer. The first card of an episode must be
named in every later step. It is POPGym's ``RepeatFirst`` (Morad et al., 2023,
arXiv:2303.01859), written as a small environment. A policy without memory is right in
a quarter of the steps.

.. code-block:: bash

    python tutorials/memory_tasks.py           # some minutes
    python tutorials/memory_tasks.py --quick   # a few seconds

The transformer needs a nightly build of torchrl. Without it the other four are trained.
"""

# %%
# Settings
# --------
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import torchrl.modules
from tqdm import tqdm

import ppokit
from ppokit.networks import actor_critic
from ppokit.plotting import plot_run

QUICK = "--quick" in sys.argv
SEED = 0
TOTAL_FRAMES = 2_048 if QUICK else 131_072
FRAMES_PER_BATCH, MINIBATCH, EPOCHS = 1_024, 256, 4  # frames, frames
STEPS, SUITS = 32, 4  # of an episode, of the cards
SEQ_LEN = 32  # steps of a sequence
UNITS = 64
LEARNING_RATE, GAMMA = 1e-3, 0.9
OUT = Path("outputs") / "memory_tasks"

torch.set_num_threads(1)  # small networks gain nothing from more

# %%
# The task
# --------
# Each observation is a random card, as a one-hot vector, and a flag at the first one.
# The reward of a step is 1 if the action is the suit of the first card.


class RepeatFirst(gym.Env):
    """Name the first card of the episode in every step."""

    action_space = gym.spaces.Discrete(SUITS)
    observation_space = gym.spaces.Box(0.0, 1.0, (SUITS + 1,))

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """Show the card to remember."""
        super().reset(seed=seed)
        self.now, self.first = 0, int(self.np_random.integers(SUITS))
        return self.observe(self.first), {}

    def step(self, action: Any) -> Any:
        """Pay for the answer, and show another card."""
        self.now += 1
        reward, card = (
            float(int(action) == self.first),
            self.np_random.integers(SUITS),
        )
        return self.observe(int(card)), reward, self.now == STEPS, False, {}

    def observe(self, card: int) -> Any:
        """Return the card, and whether it is the first."""
        seen = np.zeros(SUITS + 1, dtype=np.float32)
        seen[card], seen[-1] = 1.0, self.now == 0
        return seen


class Stack(gym.wrappers.FrameStackObservation):
    """The task with the last four observations at once."""

    def __init__(self) -> None:
        super().__init__(RepeatFirst(), 4, padding_type="zero")


# %%
# Five policies
# -------------
# ``memory=`` puts a recurrent module or a transformer behind the encoder. The memory of
# a :class:`~ppokit.TransformerModule` is the observations of the episode so far, and
# ``context`` how many there may be. Everything else is the same for all: the update
# needs a :class:`~ppokit.SequenceBatcher`, and the loss gets the value head alone,
# because policy and critic share the memory.


def make_networks(memory: str | None) -> Any:
    """Return the networks that collect, act, estimate in the loss, and in GAE."""
    env = Stack() if memory == "stack" else RepeatFirst()
    if memory in (None, "stack"):
        actor, critic = actor_critic(env, (UNITS, UNITS))
        return actor, actor, critic, critic
    context = {"context": STEPS} if memory == "transformer" else {}
    return actor_critic(
        env,
        (UNITS,),
        memory=memory,
        memory_size=UNITS,
        shared=True,
        detach_critic=False,
        **context,
    )


ARMS = {"one frame": None, "four frames": "stack", "LSTM": "lstm", "GRU": "gru"}
if hasattr(torchrl.modules, "CausalTransformer"):
    ARMS["transformer"] = "transformer"

# %%
# Training
# --------


def train(name: str) -> list[dict[str, float]]:
    """Train, print the share of right answers, and return the statistics."""
    torch.manual_seed(SEED)
    memory = ARMS[name]
    env = Stack if memory == "stack" else RepeatFirst
    policy, actor, value, critic = make_networks(memory)
    loss = ppokit.DualClipPPOLoss(actor, value, entropy_coeff=0.01)
    adam = torch.optim.Adam(loss.parameters(), lr=LEARNING_RATE, fused=True)
    remembers = memory not in (None, "stack")
    update = ppokit.PPOUpdate(
        ppokit.TrainingStep(loss, adam, max_grad_norm=0.5),
        advantage=ppokit.GAE(
            gamma=GAMMA, lmbda=0.95, value_network=critic, average_gae=True
        ),
        batcher=ppokit.SequenceBatcher(SEQ_LEN) if remembers else None,
        epochs=EPOCHS,
        minibatch_size=MINIBATCH,
        seed=SEED,
    )
    collector = ppokit.GymCollector(
        env,
        policy,
        num_envs=16,
        frames_per_batch=FRAMES_PER_BATCH,
        total_frames=TOTAL_FRAMES,
    )
    collector.set_seed(SEED)
    total = TOTAL_FRAMES // FRAMES_PER_BATCH
    bar = tqdm(collector, total=total, unit="batch", desc=name)
    history = [update(batch) for batch in bar]
    collector.shutdown()
    episodes = 16 if QUICK else 128
    returns, _ = ppokit.evaluate(
        env, policy, episodes=episodes, num_envs=16, seed=1
    )
    print(f"{name}: {returns.mean() / STEPS:.0%} right")
    return history


history = {name: train(name) for name in ARMS}

# %%
# Results
# -------
# A stack of four frames knows the first card in four steps of the episode. A policy
# with a memory is right in nearly all steps.
OUT.mkdir(parents=True, exist_ok=True)
(OUT / "history.json").write_text(json.dumps(history))
figure = plot_run(history, title="name the first card")
figure.savefig(OUT / "figure.png", dpi=120)

# %%
# Before the first optimizer step, the loss computes the log-probabilities of the
# collection again: the KL is 0 to rounding, whatever the memory is.
print({name: f"{x[-1]['first_kl']:.0e}" for name, x in history.items()})

# %%
# Next: :doc:`../howto/recurrent`, :doc:`recurrent_ppo`, :doc:`../blocks/networks`.
