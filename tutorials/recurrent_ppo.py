r"""
Recurrent PPO
=============

This tutorial trains a policy that must remember. A cue shows left or right.
Then there is nothing to see for some steps. At last a light is on, and the action
has to be the cue. An LSTM solves the task; without memory, half of the decisions
are right.

.. code-block:: bash

    python tutorials/recurrent_ppo.py           # about one minute
    python tutorials/recurrent_ppo.py --quick   # a few seconds
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
from tqdm import tqdm

import ppokit
from ppokit.networks import actor_critic
from ppokit.plotting import plot_run

QUICK = "--quick" in sys.argv
SEED = 0
TOTAL_FRAMES = 4_096 if QUICK else 65_536
FRAMES_PER_BATCH, MINIBATCH, EPOCHS = 2_048, 256, 5  # frames, frames
SEQ_LEN = 8  # steps of a sequence
GAP = (8, 24)  # steps between cue and decision
CELLS = 64
LEARNING_RATE, GAMMA = 1e-3, 0.99
OUT = Path("outputs") / "recurrent_ppo"

torch.set_num_threads(1)  # small networks gain nothing from more
torch.manual_seed(SEED)

# %%
# The task
# --------
# The observation is ``[left, right, light]``. The reward of the decision is 1 if it
# is right, and -1 otherwise. The longest gap is longer than two sequences.


class CueEnv(gym.Env):
    """A cue, a gap of random length, and a decision."""

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Box(0.0, 1.0, (3,))

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """Show a new cue."""
        super().reset(seed=seed)
        self.cue = int(self.np_random.integers(2))
        self.now, self.end = 0, int(self.np_random.integers(GAP[0], GAP[1] + 1))
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        """Move to the next step, and pay for the decision."""
        ended = self.now == self.end
        reward = float(ended) * (1.0 if int(action) == self.cue else -1.0)
        self.now += 1
        return self.observe(), reward, ended, False, {}

    def observe(self) -> Any:
        """Return the cue in the first step, and the light in the last."""
        seen = [self.now == 0 and self.cue == side for side in (0, 1)]
        return np.array([*seen, self.now == self.end], dtype=np.float32)


# %%
# A network with a state
# ----------------------
# ``memory="lstm"`` puts a :class:`~ppokit.LSTMModule` behind the encoder. At collection
# it reads the state of the step before, and writes the next one. In the loss and in GAE
# it runs over sequences, from the state that was stored at their first step.
# ``"is_init"`` tells it where an episode starts.
#
# Policy and critic share the LSTM, and the critic's loss trains it, too
# (``detach_critic=False``): what the value of a step depends on is what must be kept.
# ``policy`` collects, the loss takes ``actor`` and ``value``, and GAE takes ``critic``.


def make_networks() -> Any:
    """Return policy, actor, value head and critic with a memory."""
    return actor_critic(
        CueEnv(),
        hidden=(),
        memory="lstm",
        memory_size=CELLS,
        shared=True,
        detach_critic=False,
    )


networks = make_networks()
print([key for key in networks.policy.in_keys if "state" in key])

# %%
# Sequences
# ---------
# :class:`~ppokit.SequenceBatcher` cuts a batch where episodes start, and every
# ``SEQ_LEN`` steps from there. Each frame is in one sequence; shorter sequences are
# padded and masked. A gradient reaches back to the start of its sequence. Earlier
# steps are in the state with which the sequence begins.
with ppokit.GymCollector(
    CueEnv, networks.policy, frames_per_batch=64, num_envs=2
) as collector:
    collector.set_seed(SEED)
    batch = collector.rollout()
sequences = ppokit.SequenceBatcher(SEQ_LEN)(batch)
valid = int(sequences["collector", "mask"].sum())
print(f"{tuple(batch.shape)} -> {tuple(sequences.shape)}, {valid} valid frames")

# %%
# The update
# ----------
# ``batcher`` is the only difference from a policy without memory.


def train(remembers: bool) -> list[dict[str, float]]:
    """Train, print the share of right decisions, and return the statistics."""
    torch.manual_seed(SEED)
    if remembers:
        policy, actor, value, critic = make_networks()
    else:
        actor, critic = actor_critic(CueEnv(), (CELLS, CELLS))
        policy, value = actor, critic
    loss = ppokit.DualClipPPOLoss(actor, value, entropy_coeff=0.01)
    adam = torch.optim.Adam(loss.parameters(), lr=LEARNING_RATE, fused=True)
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
        CueEnv,
        policy,
        num_envs=16,
        frames_per_batch=FRAMES_PER_BATCH,
        total_frames=TOTAL_FRAMES,
    )
    collector.set_seed(SEED)
    total = TOTAL_FRAMES // FRAMES_PER_BATCH
    history = [update(x) for x in tqdm(collector, total=total, unit="batch")]
    collector.shutdown()
    returns, _ = ppokit.evaluate(
        CueEnv, policy, episodes=400, num_envs=16, seed=1
    )
    print(f"{(1 + returns.mean()) / 2:.0%} right, remembers={remembers}")
    return history


history = {"LSTM": train(True), "no memory": train(False)}
OUT.mkdir(parents=True, exist_ok=True)
(OUT / "history.json").write_text(json.dumps(history))
figure = plot_run(history, title="cue, gap, decision")
figure.savefig(OUT / "figure.png", dpi=120)

# %%
# Next: :doc:`../howto/recurrent`, :doc:`../blocks/sequence_batcher`,
# :doc:`../blocks/recurrent_modules`, :doc:`../blocks/networks`.
