r"""
A population of PPOs
====================

Population-based training tunes settings during the training (Jaderberg et al.,
2017, arXiv:1711.09846). Several members train side by side. After each
generation the worst one copies the weights of the best one and changes its
settings a little. ppokit's part is the copy: checkpoint of one member, loaded by
another.

.. code-block:: bash

    python tutorials/population.py           # one to two minutes
    python tutorials/population.py --quick   # a few seconds
"""

# %%
# Settings
# --------
from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from tqdm import tqdm

import ppokit
from ppokit.networks import actor_critic

QUICK = "--quick" in sys.argv
ENV = "CartPole-v1"
SEED = 0
MEMBERS, GENERATIONS = 4, 2 if QUICK else 5
BATCHES = 1 if QUICK else 4  # of a member in a generation
FRAMES_PER_BATCH, GAMMA = 1_024, 0.99
LEARNING_RATES = (1e-5, 1e-2)  # drawn from this range, on a logarithmic scale
OUT = Path("outputs") / "population"

torch.set_num_threads(1)  # small networks gain nothing from more
OUT.mkdir(parents=True, exist_ok=True)
rng = random.Random(SEED)

# %%
# A member
# --------
# A member is an update, a collector, and its settings: the learning rate, and the
# coefficient of the entropy bonus.


class Member:
    """A run of PPO whose settings change."""

    def __init__(self, number: int) -> None:
        torch.manual_seed(SEED + number)
        low, high = map(torch.tensor, LEARNING_RATES)
        exponent = rng.uniform(low.log10().item(), high.log10().item())
        self.settings = {"lr": 10**exponent, "entropy": rng.uniform(0, 0.02)}
        self.number, self.scores = number, [0.0]
        self.actor, critic = actor_critic(ENV)
        self.loss = ppokit.DualClipPPOLoss(self.actor, critic)
        self.adam = torch.optim.Adam(self.loss.parameters(), fused=True)
        self.update = ppokit.PPOUpdate(
            ppokit.TrainingStep(self.loss, self.adam, max_grad_norm=0.5),
            advantage=ppokit.GAE(
                gamma=GAMMA, lmbda=0.95, value_network=critic, average_gae=True
            ),
            epochs=10,
            minibatch_size=256,
            seed=SEED + number,
        )
        self.collector = ppokit.GymCollector(
            ENV, self.actor, num_envs=8, frames_per_batch=FRAMES_PER_BATCH
        )
        self.collector.set_seed(SEED + number)
        self.apply()

    def apply(self) -> None:
        """Write the settings to optimizer and loss."""
        self.adam.param_groups[0]["lr"] = self.settings["lr"]
        self.loss.entropy_coeff.fill_(self.settings["entropy"])

    def train(self) -> None:
        """Train for a generation, and evaluate."""
        for _ in range(BATCHES):
            self.update(self.collector.rollout())
        returns, _ = ppokit.evaluate(
            ENV, self.actor, episodes=10, num_envs=5, seed=1
        )
        self.scores.append(returns.mean().item())

    @property
    def path(self) -> Path:
        """The checkpoint."""
        return OUT / f"member_{self.number}.pt"

    def save(self) -> None:
        """Write the state of the update: networks, optimizer, random numbers."""
        ppokit.save_checkpoint(self.path, {"update": self.update})

    def take_over(self, other: Member) -> None:
        """Continue from the state of another member, with changed settings."""
        ppokit.load_checkpoint(other.path, {"update": self.update})
        for name, value in other.settings.items():
            self.settings[name] = value * rng.choice([0.5, 0.8, 1.25, 2.0])
        self.apply()


# %%
# Training
# --------
# The members run one after the other here. Ray Tune's ``PopulationBasedTraining`` runs
# them on a cluster: its checkpoint functions are ``save_checkpoint`` and
# ``load_checkpoint`` as well.
members = [Member(number) for number in range(MEMBERS)]
for generation in tqdm(range(GENERATIONS), unit="generation"):
    for member in members:
        member.train()
        member.save()
    members.sort(key=lambda member: member.scores[-1])
    worst, best = members[0], members[-1]
    tqdm.write(
        f"generation {generation}: best {best.scores[-1]:.0f} (member "
        f"{best.number}, {best.settings['lr']:.1e}), "
        f"worst {worst.scores[-1]:.0f} ({worst.settings['lr']:.1e})"
    )
    if worst.scores[-1] < best.scores[-1] and generation + 1 < GENERATIONS:
        worst.take_over(best)

# %%
# Result
# ------
# A line of the figure is the score of a member. The last generation does not copy,
# so that the best member keeps its settings.
best = members[-1]
print(f"best: return {best.scores[-1]:.0f} of 500, with {best.settings}")
figure, axis = plt.subplots(figsize=(7, 3.5), layout="constrained")
for member in sorted(members, key=lambda member: member.number):
    axis.plot(member.scores, marker="o", label=f"member {member.number}")
axis.set(xlabel="generation", ylabel="return of 10 episodes")
axis.legend()
figure.savefig(OUT / "figure.png", dpi=120)
found = {"scores": best.scores, "settings": best.settings}
(OUT / "best.json").write_text(json.dumps(found))

# %%
# Next: :doc:`checkpoints_and_resume`, :doc:`../howto/checkpoints`.
