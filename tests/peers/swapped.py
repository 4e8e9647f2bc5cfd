"""A pytest plugin that puts ppokit's blocks in the place of torchrl's in torchrl's own tests.

In the folder ``test`` of a checkout of torchrl, so that the installed torchrl is tested::

    PYTHONPATH=ppokit's pytest -p tests.peers.swapped --ours ClipPPOLoss objectives/test_ppo.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import torchrl.collectors
import torchrl.modules
import torchrl.objectives
import torchrl.objectives.value
from torchrl.envs import (
    EnvBase,
    GymEnv,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)
from torchrl.modules import RandomPolicy
from torchrl.testing import mocking_classes

import ppokit
import ppokit.collectors  # before Collector, whose arguments it looks up, is replaced


class FunctionalClipPPOLoss(ppokit.DualClipPPOLoss):
    """The loss, functional unless told otherwise: torchrl's tests look at its parameters."""

    def __init__(self, *args: Any, functional: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, functional=functional, **kwargs)


def gym_collector(
    create_env_fn: Any,
    policy: Any = None,
    *,
    create_env_kwargs: dict[str, Any] | None = None,
    postproc: Callable[[Any], Any] | None = None,
    **options: Any,
) -> ppokit.GymCollector:
    """Make a GymCollector from what torchrl's Collector takes, where that comes down to an id.

    Of the transforms, StepCounter and RewardSum have arguments here. Environments are seeded once
    more; one without a batch dimension gives batches ``[T]``, where GymCollector has ``[1, T]``.
    """
    env = create_env_fn
    if not isinstance(env, EnvBase):
        env = env(**(create_env_kwargs or {}))
    num_envs, is_batch = env.batch_size.numel(), bool(env.batch_size)
    if policy is None:
        policy = RandomPolicy(env.full_action_spec)
    if isinstance(policy, RandomPolicy):
        policy.set_action_spec_from_env(env)
        if not is_batch:
            policy.action_spec = policy.action_spec.expand(1, *policy.action_spec.shape)
    member = env.create_env_fn[0]() if isinstance(env, (SerialEnv, ParallelEnv)) else env
    while isinstance(member, TransformedEnv):
        for transform in getattr(member.transform, "transforms", [member.transform]):
            options |= {"step_count": True} if isinstance(transform, StepCounter) else {}
            options |= {"episode_reward": True} if isinstance(transform, RewardSum) else {}
        member = member.base_env
    if not isinstance(member, GymEnv):
        raise TypeError(f"no gymnasium id serves {type(member).__name__}")
    make = partial(gymnasium.make, member.env_name)
    if member.frame_skip > 1:
        make = partial(_repeating, make, member.frame_skip)
    steps = [] if is_batch else [lambda batch: batch[0]]
    steps += [] if postproc is None else [postproc]
    collector = ppokit.GymCollector(
        make, policy, num_envs=num_envs, postproc=_Chain(steps) if steps else None, **options
    )
    collector.set_seed(0)
    return collector


def _repeating(make: Callable[[], Any], times: int) -> Any:
    return gymnasium.wrappers.RepeatAction(make(), times)


class _Chain:
    def __init__(self, steps: list[Callable[[Any], Any]]) -> None:
        self.steps = steps

    def __call__(self, batch: Any) -> Any:
        for step in self.steps:
            batch = step(batch)
        return batch


OURS: dict[str, tuple[Any, Any]] = {
    "ClipPPOLoss": (torchrl.objectives.ClipPPOLoss, FunctionalClipPPOLoss),
    "GAE": (torchrl.objectives.value.GAE, ppokit.GAE),
    "LSTMModule": (torchrl.modules.LSTMModule, ppokit.LSTMModule),
    "GRUModule": (torchrl.modules.GRUModule, ppokit.GRUModule),
    "Collector": (torchrl.collectors.Collector, gym_collector),
    # an environment of torchrl's tests, of random numbers: where any will do, so does Pendulum
    "ContinuousActionVecMockEnv": (
        mocking_classes.ContinuousActionVecMockEnv,
        partial(GymEnv, "Pendulum-v1"),
    ),
}


def put_in_place(name: str) -> None:
    """Replace a class wherever a module of torchrl holds it.

    Of the collector only the public name: those with workers run torchrl's own in them.
    """
    theirs, ours = OURS[name]
    for module_name, module in list(sys.modules.items()):
        is_torchrls = module_name.split(".")[0] == "torchrl"
        is_public = name != "Collector" or module_name == "torchrl.collectors"
        if is_torchrls and is_public and vars(module).get(name) is theirs:
            setattr(module, name, ours)


def pytest_addoption(parser):
    parser.addoption("--ours", action="append", default=[], choices=list(OURS))


def pytest_configure(config):
    for name in config.getoption("--ours"):
        put_in_place(name)


def pytest_collection_modifyitems(items):
    """Run the tests of the PPO losses where transformers is missing: one of them alone uses it."""
    for item in items:
        for node in item.listchain():
            node.own_markers = [
                mark
                for mark in node.own_markers
                if mark.kwargs.get("reason") != "requires transformers lib"
            ]
