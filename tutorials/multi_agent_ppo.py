r"""
Multi-agent PPO
===============

Three agents must cover three landmarks and must not collide (cooperative
navigation: Lowe et al., 2017, arXiv:1706.02275). The blocks for one agent also
train a team: you tell them the keys of the agents' group with ``set_keys``.

.. code-block:: bash

    python tutorials/multi_agent_ppo.py           # about a minute
    python tutorials/multi_agent_ppo.py --quick   # a few seconds
"""

# %%
# Settings
# --------
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import Binary, Bounded, Composite, Unbounded
from torchrl.envs import EnvBase, ExplorationType, set_exploration_type
from torchrl.modules import MultiAgentMLP, ProbabilisticActor, TanhNormal
from tqdm import tqdm

import ppokit

QUICK = "--quick" in sys.argv
SEED = 0
TEAMS, AGENTS, STEPS = 128, 3, 25  # the physics are for three agents
TOTAL_FRAMES = TEAMS * STEPS * (2 if QUICK else 72)
EPOCHS, MINIBATCH, LEARNING_RATE = 10, 800, 4e-3
GAMMA, LMBDA = 0.9, 0.9
CENTRAL_CRITIC, SHARED_PARAMETERS = True, True
OUT = Path("outputs") / "multi_agent_ppo"

torch.set_num_threads(1)  # small networks gain nothing from more
torch.manual_seed(SEED)

# %%
# The environment
# ---------------
# It steps many teams at once, with the physics of ``simple_spread_v3`` of the package
# ``mpe2``. The keys follow TorchRL's convention:
#
# - ``("agents", "observation")`` and ``("agents", "action")``: ``[*B, T, agents, F]``;
# - reward and done flags of the team, at the root: ``[*B, T, 1]``.
OTHERS = torch.tensor([[1, 2], [0, 2], [0, 1]])


def of_agents(name: str, spec: Any) -> Composite:
    """Return the spec of an entry of the group."""
    group = Composite({name: spec}, shape=spec.shape[:2])
    return Composite(agents=group, shape=spec.shape[:1])


class CooperativeNavigation(EnvBase):
    """Agents that must cover all landmarks."""

    def __init__(self, teams: int) -> None:
        super().__init__(batch_size=torch.Size([teams]))
        seen = Unbounded((teams, AGENTS, 14))
        self.observation_spec = of_agents("observation", seen)
        push = Bounded(-1.0, 1.0, (teams, AGENTS, 2))
        self.action_spec = of_agents("action", push)
        self.reward_spec = Unbounded((teams, 1))
        flag = Binary(1, (teams, 1), dtype=torch.bool)
        flags = dict.fromkeys(("done", "terminated", "truncated"), flag)
        self.done_spec = Composite(flags, shape=(teams,))
        self.generator = torch.Generator()

    def _set_seed(self, seed: int | None) -> None:
        self.generator.manual_seed(seed or 0)

    def _reset(self, tensordict: TensorDictBase | None, **_: Any) -> Any:
        # Episodes of all teams end together.
        shape = (2, *self.batch_size, AGENTS, 2)
        numbers = torch.rand(shape, generator=self.generator)
        self.position, self.landmarks = 2 * numbers - 1
        self.velocity, self.now = torch.zeros_like(self.position), 0
        return self.observe()

    def _step(self, tensordict: TensorDictBase) -> Any:
        push = tensordict["agents", "action"]
        self.velocity = 0.75 * self.velocity + 0.5 * push.clamp(-1, 1)
        self.position = self.position + 0.1 * self.velocity
        self.now += 1
        distances = torch.cdist(self.landmarks, self.position)
        touching = torch.cdist(self.position, self.position) < 0.3
        collisions = (touching.sum((1, 2)) - AGENTS) / 2
        reward = -distances.amin(-1).sum(-1) - collisions
        end = torch.full((*self.batch_size, 1), self.now >= STEPS)
        flags = {
            "done": end,
            "truncated": end.clone(),
            "terminated": end & False,
        }
        return self.observe().update({"reward": reward.unsqueeze(-1)} | flags)

    def observe(self) -> TensorDict:
        """Return velocity, position, and relative places of the others."""
        places = self.landmarks.unsqueeze(1).expand(-1, AGENTS, -1, -1)
        places = torch.cat([places, self.position[:, OTHERS]], 2)
        relative = (places - self.position.unsqueeze(2)).flatten(2)
        seen = torch.cat([self.velocity, self.position, relative], -1)
        group = TensorDict({"observation": seen}, seen.shape[:2])
        return TensorDict({"agents": group}, self.batch_size)


# %%
# The networks
# ------------
# torchrl's ``MultiAgentMLP`` has an output for each agent. The critic sees the
# observations of all agents if ``CENTRAL_CRITIC``; the policy sees its own.
env = CooperativeNavigation(TEAMS)
options: Any = {"n_agents": AGENTS, "share_params": SHARED_PARAMETERS}
options |= {"depth": 2, "num_cells": 64, "activation_class": nn.Tanh}
network = MultiAgentMLP(14, 4, centralized=False, **options)
network = nn.Sequential(network, NormalParamExtractor())
parameters: Any = [("agents", "loc"), ("agents", "scale")]
actor = ProbabilisticActor(
    TensorDictModule(network, [("agents", "observation")], parameters),
    in_keys=parameters,
    out_keys=[("agents", "action")],
    distribution_class=TanhNormal,
    return_log_prob=True,
)
critic = TensorDictModule(
    MultiAgentMLP(14, 1, centralized=CENTRAL_CRITIC, **options),
    [("agents", "observation")],
    [("agents", "state_value")],
)

# %%
# Keys of the group
# -----------------
# GAE expands the reward and the done flags of the team to the agents. If each agent
# has its own reward, add ``reward=("agents", "reward")``.
entries = ("value", "state_value"), ("advantage",) * 2, ("value_target",) * 2
keys: Any = {name: ("agents", key) for name, key in entries}
options = {"gamma": GAMMA, "lmbda": LMBDA, "average_gae": True}
gae = ppokit.GAE(value_network=critic, **options)
gae.set_keys(**keys)
episode = gae(env.rollout(STEPS, actor))
print(f"advantage: {tuple(episode['agents', 'advantage'].shape)}")
loss = ppokit.DualClipPPOLoss(actor, critic, entropy_coeff=1e-3, dual_clip=5.0)
keys |= {"sample_log_prob": ("agents", "action_log_prob")}
loss.set_keys(**keys, action=("agents", "action"))

# %%
# Training
# --------
adam = torch.optim.Adam(loss.parameters(), lr=LEARNING_RATE, fused=True)
update = ppokit.PPOUpdate(
    ppokit.TrainingStep(loss, adam, max_grad_norm=1.0),
    advantage=gae,
    reward_normalizer=ppokit.RewardNormalizer(GAMMA),
    epochs=EPOCHS,
    minibatch_size=MINIBATCH,
    seed=SEED,
)
options = {"frames_per_batch": TEAMS * STEPS, "total_frames": TOTAL_FRAMES}
options |= {"auto_register_policy_transforms": False}
collector = Collector(env, actor, **options)
collector.set_seed(SEED)
history: list[dict[str, float]] = []
for batch in tqdm(collector, unit="batch"):
    history.append(update(batch))

# %%
# Result
# ------
# Episodes with the most probable actions, and the paths of one team.
(evaluation := CooperativeNavigation(1_024)).set_seed(1)
with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
    episodes = evaluation.rollout(STEPS, actor)
mean = episodes["next", "reward"].sum(1).mean().item()
print(
    f"return after {TOTAL_FRAMES:,} frames: {mean:.1f} (untrained: about -57)"
)
figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
axes[0].plot([row["episode_return"] for row in history])
axes[0].set(xlabel="batch", ylabel="return in training")
for path in episodes[0]["agents", "observation"][..., 2:4].unbind(1):
    axes[1].plot(*path.T, marker="o", markevery=[0])
axes[1].plot(*evaluation.landmarks[0].T, "kx", ms=9)
axes[1].set(title="an episode", xlabel="x", ylabel="y", aspect="equal")
OUT.mkdir(parents=True, exist_ok=True)
figure.savefig(OUT / "figure.png", dpi=120)
# %%
# Next: :doc:`../blocks/gae`.
