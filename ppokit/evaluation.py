"""Evaluation of a policy in whole episodes."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType

from ppokit._checks import whole
from ppokit.collectors import GymCollector

_STEPS = 100  # of each environment, between looks at the ends of episodes


def evaluate(
    make_env: Any,
    policy: Any,
    *,
    episodes: int = 20,
    observation_transform: Any = None,
    exploration_type: ExplorationType = ExplorationType.DETERMINISTIC,  # pyright: ignore[reportArgumentType]
    seed: int | None = None,
    num_envs: int = 1,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the returns and lengths of whole episodes.

    Evaluation does not change training: the statistics of the transform are frozen meanwhile,
    the policy is in evaluation mode, and torch's random numbers are restored. Each
    environment plays the same number of episodes, so that short episodes do not count more often.

    Args:
        make_env: as in :class:`~ppokit.GymCollector`: an id, a function that makes a gymnasium
            environment, a list of these, or a function that makes a ``VectorEnv``. Without any
            wrapper that changes the reward, returns are in the environment's own reward.
        policy: any policy that a :class:`~ppokit.GymCollector` takes.
        episodes: number of episodes.
        observation_transform: that of training, such as an
            :class:`~ppokit.ObservationNormalizer`.
        exploration_type: how the policy draws; by default, the most probable action.
        seed: of the environments and of the policy's draws; None for random ones.
        num_envs: environments that are stepped in turn, with one call of the policy for all.
        device: of the policy; None for the CPU.

    Returns:
        Returns ``[episodes]`` (float64; of an environment with several rewards
        ``[episodes, *reward]``), not discounted, and lengths ``[episodes]`` in steps (int64).

    Raises:
        ValueError: ``episodes`` is less than 1, and what :class:`~ppokit.GymCollector` raises.

    Example:
        >>> from ppokit.networks import actor_critic
        >>> from ppokit import evaluate
        >>> actor, critic = actor_critic("CartPole-v1")
        >>> returns, lengths = evaluate("CartPole-v1", actor, episodes=5, seed=0)
        >>> returns.shape, bool((returns == lengths).all())
        (torch.Size([5]), True)
    """
    episodes = whole().check(episodes, "episodes")
    modules = [x for x in (policy, observation_transform) if isinstance(x, nn.Module)]
    with ExitStack() as stack:  # undone in reverse order
        stack.enter_context(torch.random.fork_rng(range(torch.cuda.device_count())))
        for module in modules:
            for part in module.modules():
                stack.callback(setattr, part, "training", part.training)
            stack.callback(module.train, module.training)  # the actor of a TensorActor, too
            module.eval()
        if seed is not None:
            torch.manual_seed(seed)
        # The number of a list or a vector environment need not divide these frames.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "frames_per_batch=", UserWarning)
        collector = GymCollector(
            make_env,
            policy,
            frames_per_batch=num_envs * _STEPS,
            num_envs=num_envs,
            observation_transform=observation_transform,
            exploration_type=exploration_type,
            device=device,
            step_count=True,
            episode_reward=True,
        )
        stack.callback(collector.shutdown)
        collector.updates_transform = False
        if seed is not None:
            collector.set_seed(seed)
        rows: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(collector.num_envs)]
        each = -(-episodes // len(rows))
        while any(len(row) < each for row in rows):
            batch: Any = collector.next()
            ends = batch["next", "done"].flatten(2).any(-1)
            totals, lengths = (batch["next", x].cpu() for x in ("episode_reward", "step_count"))
            for env, time in ends.nonzero().tolist():
                rows[env].append((totals[env, time].double(), lengths[env, time]))
    found = [row[number] for number in range(each) for row in rows][:episodes]
    returns, lengths = (torch.stack(column) for column in zip(*found, strict=True))
    return returns.squeeze(-1) if returns.shape[1:] == (1,) else returns, lengths.flatten()
