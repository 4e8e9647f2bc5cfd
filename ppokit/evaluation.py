"""Evaluation of a policy in whole episodes."""

from __future__ import annotations

import warnings
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from typing import Any

import gymnasium as gym
import torch
from gymnasium.vector import VectorEnv
from gymnasium.wrappers import TimeLimit
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.envs.utils import ExplorationType

from ppokit._batch import Policy
from ppokit._checks import SEED, whole
from ppokit._state import evaluation_mode
from ppokit.collectors import GymCollector

_STEPS = 100  # of each environment, between looks at the ends of episodes


def evaluate(
    make_env: Any,
    policy: Policy,
    *,
    episodes: int = 20,
    observation_transform: TensorDictModuleBase | None = None,
    exploration_type: ExplorationType = ExplorationType.DETERMINISTIC,  # pyright: ignore[reportArgumentType]
    seed: int | None = None,
    num_envs: int = 1,
    device: torch.device | str | None = None,
    max_steps: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the returns and lengths of whole episodes.

    Evaluation does not change training: the statistics of the transform are frozen meanwhile,
    the policy is in evaluation mode, and torch's random numbers are restored. Each
    environment plays the same number of episodes, so that short episodes do not count more often.
    An evaluation of more than five seconds shows a progress bar in a terminal, if ``tqdm`` is
    installed.

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
        max_steps: steps after which an episode ends, with the return so far; None waits for its
            end, which a policy that always chooses the most probable action may never reach. Not
            for vector environments: ``gymnasium.make_vec(id, n, max_episode_steps=...)``.

    Returns:
        Returns ``[episodes]`` (float64; of an environment with several rewards
        ``[episodes, *reward]``), not discounted, and lengths ``[episodes]`` in steps (int64).

    Raises:
        ValueError: ``episodes`` or ``max_steps`` is less than 1, and what
            :class:`~ppokit.GymCollector` raises.
        TypeError: ``max_steps`` is given for a vector environment.

    Example:
        >>> from ppokit.networks import actor_critic
        >>> from ppokit import evaluate
        >>> actor, critic = actor_critic("CartPole-v1")
        >>> returns, lengths = evaluate("CartPole-v1", actor, episodes=5, seed=0)
        >>> returns.shape, bool((returns == lengths).all())
        (torch.Size([5]), True)
    """
    episodes = whole().check(episodes, "episodes")
    if max_steps is not None:
        steps = whole().check(max_steps, "max_steps")
        is_list = isinstance(make_env, list | tuple)
        makers = [partial(_limited, x, steps) for x in (make_env if is_list else [make_env])]
        make_env = makers if is_list else makers[0]
    with ExitStack() as stack:  # undone in reverse order
        stack.enter_context(evaluation_mode(policy, observation_transform))
        if seed is not None:
            torch.manual_seed(SEED.check(seed, "seed"))
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
        bar = stack.enter_context(_progress_bar(each * len(rows)))
        while any(len(row) < each for row in rows):
            batch: Any = collector.next()
            ends = batch["next", "done"].flatten(2).any(-1)
            totals, lengths = (batch["next", x].cpu() for x in ("episode_reward", "step_count"))
            for env, time in ends.nonzero().tolist():
                rows[env].append((totals[env, time].double(), lengths[env, time]))
            if bar is not None:
                bar.update(sum(min(len(row), each) for row in rows) - bar.n)
    found = [row[number] for number in range(each) for row in rows][:episodes]
    returns, lengths = (torch.stack(column) for column in zip(*found, strict=True))
    return returns.squeeze(-1) if returns.shape[1:] == (1,) else returns, lengths.flatten()


def _limited(make_env: object, steps: int) -> gym.Env:
    """Return an environment whose episodes end after so many steps."""
    env = gym.make(make_env) if isinstance(make_env, str) else make_env
    env, is_made = (env(), True) if callable(env) else (env, isinstance(make_env, str))
    if isinstance(env, gym.Env) and is_made:
        return TimeLimit(env, steps)
    if is_made and hasattr(env, "close"):
        env.close()  # pyright: ignore
    fix = "gymnasium.make_vec(id, n, max_episode_steps=...)" if isinstance(env, VectorEnv) else ""
    raise TypeError(
        f"max_steps limits gymnasium environments that an id or a function makes, and make_env is "
        f"or makes a {type(env).__name__}. Pass a function, or limit its episodes "
        f"where you make it{fix and ': '}{fix}."
    )


def _progress_bar(total: int) -> Any:
    """Return a bar that shows after five seconds, in a terminal, if tqdm is installed."""
    with suppress(ImportError):
        from tqdm.auto import tqdm

        return tqdm(total=total, desc="evaluate", unit="episode", delay=5, disable=None)
    return nullcontext()
