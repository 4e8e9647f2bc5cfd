r"""
Multi-agent PPO
===============

Three agents and three landmarks in a square: the team is paid for every landmark that has an agent
on it, and pays when two agents collide. No landmark is assigned to an agent. This is the task of
TorchRL's multi-agent tutorials (cooperative navigation: Lowe et al., 2017, arXiv:1706.02275), and
the same blocks as with one agent learn it: :class:`~ppokit.RewardNormalizer`, :class:`~ppokit.GAE`,
:class:`~ppokit.DualClipPPOLoss` and :class:`~ppokit.PPOUpdate`, with the keys of the agents' group.

.. code-block:: bash

    python tutorials/multi_agent_ppo.py           # beside TorchRL's own pieces; 3 minutes
    python tutorials/multi_agent_ppo.py --arms    # parameters shared or not, critics central or not
    python tutorials/multi_agent_ppo.py --parameters own --critic own
    python tutorials/multi_agent_ppo.py --quick   # a few seconds, to see that it runs

History and figures are written to ``--out``. In a notebook there is one seed of each by default,
not three, which takes a minute.
"""

# %%
# Imports and options
# -------------------
from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "RL_LOGGING_LEVEL", "WARNING"
)  # keep torchrl out of the progress bar

import matplotlib.pyplot as plt
import torch
from matplotlib.ticker import EngFormatter
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.data import (
    Binary,
    Bounded,
    Composite,
    LazyTensorStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    Unbounded,
)
from torchrl.envs import EnvBase, ExplorationType, set_exploration_type
from torchrl.modules import MultiAgentMLP, ProbabilisticActor, TanhNormal
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import MultiAgentGAE
from tqdm import tqdm

from ppokit import (
    GAE,
    DualClipPPOLoss,
    KLEarlyStopper,
    PPOUpdate,
    RewardNormalizer,
    TrainingStep,
    diagnose,
)
from ppokit.scripts import (
    Interrupt,
    begin_run,
    catch_interrupt,
    count,
    from_zero,
)

parser = argparse.ArgumentParser(
    description="PPO for several agents, on ppokit's blocks."
)
parser.add_argument(
    "--pieces", choices=["both", "ppokit", "torchrl"], default="both"
)
parser.add_argument(
    "--parameters",
    choices=["shared", "own"],
    default="shared",
    help="of agents",
)
parser.add_argument(
    "--critic",
    choices=["central", "own"],
    default="central",
    help="what it sees",
)
parser.add_argument(
    "--arms", action="store_true", help="all four of these, on ppokit's blocks"
)
parser.add_argument(
    "--total-frames", type=count, help="steps of the environment in each run"
)
parser.add_argument("--seed", type=from_zero, default=0, help="the first")
parser.add_argument(
    "--seeds", type=count, help="of each kind; 3 unless --quick"
)
parser.add_argument("--out", type=Path, default=Path("outputs/multi_agent_ppo"))
parser.add_argument(
    "--quick", action="store_true", help="a few seconds, to see that it runs"
)
# A notebook has no command line. There options are written here, as ["--parameters", "own"].
argv = [] if "get_ipython" in globals() else None
args = parser.parse_args(argv)

num_envs, steps_per_batch = 128, 25
frames_per_batch = num_envs * steps_per_batch
minibatch_size, epochs, learning_rate = 800, 10, 4e-3
gamma, lmbda = 0.9, 0.9
total_frames, num_seeds = args.total_frames, args.seeds
if total_frames is None:
    total_frames = frames_per_batch * (2 if args.quick else 72)
if num_seeds is None:
    num_seeds = 1 if args.quick or argv is not None else 3
seeds = range(args.seed, args.seed + num_seeds)
eval_episodes = 64 if args.quick else 1024
torch.set_num_threads(1)  # networks this small gain nothing from more

# %%
# The environment
# ---------------
# Of our own, so that it is one file and steps many teams at once; the physics are those of
# ``simple_spread_v3`` of the package ``mpe2``, which TorchRL's ``PettingZooWrapper`` takes in its
# place. What matters to the blocks is where the entries lie, and that is TorchRL's convention:
#
# - what an agent sees and does in a group, ``("agents", "observation")``, ``[*B, T, agents, F]``;
# - what is the team's at the root: ``"reward"``, ``"done"``, ``"terminated"`` and ``"truncated"``,
#   ``[*B, T, 1]``. An episode is cut off after 25 steps, so its last step bootstraps.


class CooperativeNavigation(EnvBase):
    """Agents that must cover all landmarks, in ``num_envs`` teams at once."""

    agents, steps = 3, 25
    radius, step_seconds, damping, force = 0.15, 0.1, 0.25, 5.0

    def __init__(self, num_envs: int) -> None:
        super().__init__(batch_size=torch.Size([num_envs]))
        agents = (num_envs, self.agents)
        seen = 4 + 2 * self.agents + 2 * (self.agents - 1)
        observation = Composite(
            observation=Unbounded((*agents, seen)), shape=agents
        )
        action = Composite(
            action=Bounded(-1.0, 1.0, (*agents, 2)), shape=agents
        )
        self.observation_spec = Composite(agents=observation, shape=(num_envs,))
        self.action_spec = Composite(agents=action, shape=(num_envs,))
        self.reward_spec = Unbounded((num_envs, 1))
        flags = {
            name: Binary(1, (num_envs, 1), dtype=torch.bool)
            for name in ("done", "terminated", "truncated")
        }
        self.done_spec = Composite(**flags, shape=(num_envs,))
        self.generator = torch.Generator()
        self.position = self.velocity = self.landmarks = torch.zeros(*agents, 2)
        self.now = torch.zeros(num_envs, 1, dtype=torch.int64)

    def _set_seed(self, seed: int | None) -> None:
        self.generator.manual_seed(seed or 0)

    def _reset(
        self, tensordict: TensorDictBase | None, **_: Any
    ) -> TensorDictBase:
        reset = None if tensordict is None else tensordict.get("_reset", None)
        reset = (
            torch.ones_like(self.now, dtype=torch.bool)
            if reset is None
            else reset
        )
        drawn = (
            2 * torch.rand(2, *self.position.shape, generator=self.generator)
            - 1
        )
        self.position = torch.where(
            reset.unsqueeze(-1), drawn[0], self.position
        )
        self.landmarks = torch.where(
            reset.unsqueeze(-1), drawn[1], self.landmarks
        )
        self.velocity = torch.where(reset.unsqueeze(-1), 0.0, self.velocity)
        self.now = torch.where(reset, 0, self.now)
        return self._observe()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        push = (
            self.force
            * self.step_seconds
            * tensordict["agents", "action"].clamp(-1, 1)
        )
        self.velocity = (1 - self.damping) * self.velocity + push
        self.position = self.position + self.step_seconds * self.velocity
        self.now = self.now + 1
        alone = (
            torch.cdist(self.landmarks, self.position)
            .amin(-1)
            .sum(-1, keepdim=True)
        )
        touching = torch.cdist(self.position, self.position) < 2 * self.radius
        collisions = (touching.sum((1, 2)) - self.agents).unsqueeze(-1) / 2
        truncated = self.now >= self.steps
        after = self._observe()
        after["reward"] = -alone - collisions
        after["truncated"], after["done"] = truncated, truncated.clone()
        after["terminated"] = torch.zeros_like(truncated)
        return after

    def _observe(self) -> TensorDictBase:
        """Velocity and position of each agent, and where landmarks and others are from there."""
        places = [self.landmarks.unsqueeze(1).expand(-1, self.agents, -1, -1)]
        others = [
            [j for j in range(self.agents) if j != i]
            for i in range(self.agents)
        ]
        places.append(self.position[:, torch.tensor(others)])
        relative = (torch.cat(places, 2) - self.position.unsqueeze(2)).flatten(
            2
        )
        observation = torch.cat([self.velocity, self.position, relative], -1)
        group = TensorDict({"observation": observation}, observation.shape[:2])
        return TensorDict({"agents": group}, self.batch_size)


# %%
# The networks
# ------------
# torchrl's ``MultiAgentMLP`` gives each agent an output. Its agents share their parameters or have
# their own; a critic sees what its agent sees, or (``central``) what all see. At execution only the
# actor is needed, and that sees its own observation in any case.
observation, action = ("agents", "observation"), ("agents", "action")


def make_networks(
    parameters: str, critic: str
) -> tuple[ProbabilisticActor, TensorDictModule]:
    """Return actor and critic of the team."""
    seen = (
        4
        + 2 * CooperativeNavigation.agents
        + 2 * (CooperativeNavigation.agents - 1)
    )
    options: dict[str, Any] = {
        "share_params": parameters == "shared",
        "depth": 2,
        "num_cells": 64,
    }
    options |= {
        "n_agents": CooperativeNavigation.agents,
        "activation_class": nn.Tanh,
    }
    of_actor = MultiAgentMLP(seen, 4, centralized=False, **options)
    of_critic = MultiAgentMLP(
        seen, 1, centralized=critic == "central", **options
    )
    names: Any = [("agents", "loc"), ("agents", "scale")]
    actor = ProbabilisticActor(
        TensorDictModule(
            nn.Sequential(of_actor, NormalParamExtractor()),
            [observation],
            names,
        ),
        in_keys=names,
        out_keys=[action],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )
    return actor, TensorDictModule(
        of_critic, [observation], [("agents", "state_value")]
    )


# %%
# Where the agents' entries are
# -----------------------------
# Each block is told once, with ``set_keys``. Reward and ends stay where they are, at the root:
# :class:`~ppokit.GAE` expands them to the agents of the value, as ``MultiAgentGAE`` does. In
# an environment that pays each agent by itself, one more key is the group's:
# ``reward=("agents", "reward")``.
of_values = {
    "value": ("agents", "state_value"),
    "advantage": ("agents", "advantage"),
    "value_target": ("agents", "value_target"),
}
of_loss = of_values | {
    "action": action,
    "sample_log_prob": ("agents", "action_log_prob"),
}
loss_options: dict[str, Any] = {
    "clip_epsilon": 0.2,
    "entropy_coeff": 1e-3,
    "critic_coeff": 0.5,
    "normalize_advantage": True,
    "normalize_advantage_exclude_dims": (-2,),  # each agent's by itself
}

Update = Callable[[TensorDictBase], Any]

# %%
# The update, on ppokit's blocks
# ------------------------------
# The reward is the team's, and so are the statistics that scale it. The loss is computed on tensors
# with an advantage for each agent, too (``print(loss)`` says so).


def ppokit_update(actor: Any, critic: Any, seed: int) -> Update:
    """Return the update as one object."""
    gae = GAE(gamma=gamma, lmbda=lmbda, value_network=critic)
    gae.set_keys(**of_values)
    loss = DualClipPPOLoss(actor, critic, dual_clip=5.0, **loss_options)
    loss.set_keys(**of_loss)
    return PPOUpdate(
        TrainingStep(
            loss,
            torch.optim.Adam(loss.parameters(), lr=learning_rate, fused=True),
            stopper=KLEarlyStopper(0.1),
            max_grad_norm=1.0,
        ),
        advantage=gae,
        reward_normalizer=RewardNormalizer(gamma),
        epochs=epochs,
        minibatch_size=minibatch_size,
        seed=seed,
    )


# %%
# The update, on TorchRL's own pieces
# -----------------------------------
# The loop of TorchRL's multi-agent tutorial, with the same networks and settings.


def torchrl_update(actor: Any, critic: Any, seed: int) -> Update:
    """Return the update as it is written out there."""
    gae = MultiAgentGAE(gamma=gamma, lmbda=lmbda, value_network=critic)
    gae.set_keys(**of_values)
    loss = ClipPPOLoss(actor, critic, **loss_options)
    loss.set_keys(**of_loss)
    optimizer = torch.optim.Adam(loss.parameters(), lr=learning_rate)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(frames_per_batch),
        sampler=SamplerWithoutReplacement(),
        batch_size=minibatch_size,
    )

    def update(batch: TensorDictBase) -> None:
        with torch.no_grad():
            gae(batch)
        buffer.extend(batch.reshape(-1))
        for _ in range(epochs):
            for minibatch in buffer:
                losses = loss(minibatch)
                total = (
                    losses["loss_objective"]
                    + losses["loss_critic"]
                    + losses["loss_entropy"]
                )
                total.backward()
                nn.utils.clip_grad_norm_(loss.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    return update


# %%
# A run
# -----
# TorchRL's collector steps the teams for both. Time is that of collection and update, without
# evaluation. Ctrl-C (in a notebook: interrupt the kernel) ends all after the current batch, with
# the history and the figures of what there is; a second one at once.
evaluation = CooperativeNavigation(eval_episodes)


@torch.no_grad()
def evaluate(actor: Any) -> TensorDictBase:
    """Return an episode of each of many teams, who take the most probable action."""
    evaluation.set_seed(10_000)
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        return evaluation.rollout(CooperativeNavigation.steps, actor)


def run(
    make_update: Any,
    parameters: str,
    critic: str,
    seed: int,
    progress: tqdm,
    interrupt: Interrupt,
) -> Any:
    """Return what was measured after each batch, and the actor."""
    torch.manual_seed(seed)
    actor, value = make_networks(parameters, critic)
    update = make_update(actor, value, seed)
    collector = Collector(
        CooperativeNavigation(num_envs),
        actor,
        frames_per_batch=frames_per_batch,
        total_frames=total_frames,
        auto_register_policy_transforms=False,
    )
    collector.set_seed(seed)
    rows, seconds, started = [], 0.0, time.perf_counter()
    for batch in collector:
        mean_return = (
            CooperativeNavigation.steps * batch["next", "reward"].mean().item()
        )
        if not rows and isinstance(update, PPOUpdate):
            update.validate(batch)
        statistics = update(batch) or {}  # TorchRL's pieces return none
        seconds += time.perf_counter() - started
        frames = (len(rows) + 1) * frames_per_batch
        row = statistics | {
            "total_frames": frames,
            "seconds": seconds,
            "return": mean_return,
        }
        is_last = interrupt.pressed or frames >= total_frames
        if len(rows) % 5 == 4 or is_last:
            row["eval_return"] = (
                evaluate(actor)["next", "reward"].sum(1).mean().item()
            )
        rows.append(row)
        progress.update(frames_per_batch)
        progress.set_postfix(reward=f"{mean_return:.1f}", seed=seed)
        if is_last:
            break
        started = time.perf_counter()
    collector.shutdown()
    return rows, actor


# %%
# All runs
# --------
if args.arms:
    arms = itertools.product(["shared", "own"], ["central", "own"])
    kinds = {
        f"{x} parameters, {y} critic": (ppokit_update, x, y) for x, y in arms
    }
else:
    pieces = {"ppokit": ppokit_update, "torchrl": torchrl_update}
    chosen = pieces if args.pieces == "both" else [args.pieces]
    kinds = {
        name: (pieces[name], args.parameters, args.critic) for name in chosen
    }

try:
    begin_run(args.out, "multi_agent_ppo")
except OSError as error:
    parser.error(f"--out: {error}")
history: dict[str, list[list[dict[str, float]]]] = {}
actors: dict[str, Any] = {}
with (
    catch_interrupt() as interrupt,
    tqdm(
        total=total_frames * len(kinds) * len(seeds), unit="frame"
    ) as progress,
):
    for seed, (name, kind) in itertools.product(seeds, kinds.items()):
        progress.set_description(name)
        rows, actors[name] = run(*kind, seed, progress, interrupt)
        history.setdefault(name, []).append(rows)
        (args.out / "history.json").write_text(json.dumps(history))
        if interrupt.pressed:
            break

# %%
# The figure
# ----------
# Returns of what was collected and of the most probable actions (lines: the mean of the seeds;
# bands: from the lowest to the highest), and the paths of one team, each agent's from its dot.


def curve(axis: Any, name: str, key: str) -> None:
    """Draw mean and range of the seeds over frames."""
    runs = [
        {row["total_frames"]: row[key] for row in one if key in row}
        for one in history[name]
    ]
    frames = sorted(
        set.intersection(*map(set, runs))
    )  # one that was interrupted has fewer
    values = torch.tensor([[one[x] for x in frames] for one in runs])
    (line,) = axis.plot(frames, values.mean(0), label=name)
    axis.fill_between(
        frames,
        values.amin(0),
        values.amax(0),
        alpha=0.2,
        color=line.get_color(),
    )


figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
titles = {
    "return": "return of the team",
    "eval_return": "return of the most probable actions",
}
for axis, (key, title) in zip(axes, titles.items(), strict=False):
    for name in history:
        curve(axis, name, key)
    axis.set(
        title=title,
        xlabel="frames (steps of the environment)",
        ylabel="return of an episode",
    )
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.grid(alpha=0.3)
    axis.legend()
shown = next(iter(actors))
episode = evaluate(actors[shown])[0]
positions: Tensor = episode[observation][..., 2:4]
landmarks = episode[observation][0, 0, 4:10].view(3, 2) + positions[0, 0]
for agent, path in enumerate(positions.unbind(1)):
    axes[2].plot(*path.T, marker="o", markevery=[0], label=f"agent {agent + 1}")
axes[2].plot(*landmarks.T, "kx", label="landmarks")
axes[2].set(title=f"an episode\n{shown}", xlabel="x", ylabel="y")
axes[2].set_aspect("equal", adjustable="datalim")
axes[2].legend()
figure.savefig(args.out / "figure.png", dpi=120)

# %%
# The same episode in pictures, from left to right.
strip, axes = plt.subplots(
    1, 6, figsize=(12, 2.4), sharex=True, sharey=True, layout="constrained"
)
for axis, step in zip(
    axes, range(0, CooperativeNavigation.steps, 4), strict=False
):
    axis.plot(*landmarks.T, "kx", ms=8)
    for agent in range(CooperativeNavigation.agents):
        axis.plot(*positions[step, agent], "o", color=f"C{agent}", ms=9)
    axis.set(title=f"step {step}", aspect="equal", xticks=[], yticks=[])
strip.savefig(args.out / "frames.png", dpi=120)

# %%
# The result
# ----------
# Of the most probable actions after training, in the same episodes for all.
width = max(map(len, history))
reached = max(
    one[-1]["total_frames"] for runs in history.values() for one in runs
)
print(f"Mean return of {eval_episodes} episodes after {reached} frames:")
print(f"{'':{width}}    mean (each seed)                      frames a second")
for name, runs in history.items():
    returns = [one[-1]["eval_return"] for one in runs]
    speed = sum(one[-1]["total_frames"] for one in runs) / sum(
        one[-1]["seconds"] for one in runs
    )
    each = ", ".join(f"{x:.1f}" for x in returns)
    print(
        f"{name:{width}}  {sum(returns) / len(returns):6.1f} ({each:26}) {speed:10,.0f}"
    )
print(f"Figures: {args.out}/*.png")
for name, runs in history.items():
    for finding in diagnose(runs[0]):
        print(f"{name}: {finding}")

# %%
# What you learned
# ----------------
# - The blocks work on a group of agents once they are told its keys: ``set_keys``.
# - What is the team's, reward and ends, stays at the root of the batch; GAE expands it to agents.
# - Agents share parameters, or have their own; a critic sees one agent's observation, or all. That
#   is a matter of the networks, and nothing in the update knows of it.
# - The KL stop and the statistics are those of all agents together.
#
# Further reading
# ---------------
# - :doc:`../blocks/gae`, :doc:`../blocks/dual_clip_ppo_loss` and :doc:`../howto/in_torchrl`.
# - Lowe et al., 2017, "Multi-Agent Actor-Critic for Mixed Cooperative-Competitive Environments",
#   arXiv:1706.02275 (the task, and critics that see all).
# - Yu et al., 2022, "The Surprising Effectiveness of PPO in Cooperative Multi-Agent Games",
#   arXiv:2103.01955.
# - de Witt et al., 2020, "Is Independent Learning All You Need in the StarCraft Multi-Agent
#   Challenge?", arXiv:2011.09533.
