"""Batched environments with the interface of Isaac Lab's wrapper for TorchRL, in plain torch.

Observation groups ``"policy"`` and ``"critic"``; finished environments are reset within a step, and
the next observation of a finished step is the true last one; time limits are truncations.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase


class IsaacLike(EnvBase):
    """An environment of physics in torch; a subclass has state, dynamics and reward."""

    state_size: int
    policy_size: int
    limit: int  #: steps of an episode
    bound: float | None  #: of the actions

    def __init__(self, num_envs: int, *, device: str = "cpu", limit: int | None = None) -> None:
        super().__init__(device=device, batch_size=[num_envs])
        self.limit = self.limit if limit is None else limit
        shape = (num_envs, 1)
        groups = {"policy": self.policy_size, "critic": self.policy_size + 1}
        self.observation_spec = Composite(
            {
                name: Unbounded(shape=(num_envs, size), device=device)
                for name, size in groups.items()
            },
            shape=(num_envs,),
        )
        self.action_spec = (
            Unbounded(shape=shape, device=device)
            if self.bound is None
            else Bounded(low=-self.bound, high=self.bound, shape=shape, device=device)
        )
        self.reward_spec = Unbounded(shape=shape, device=device)
        flag = Categorical(2, dtype=torch.bool, shape=shape, device=device)
        flags = dict.fromkeys(("done", "terminated", "truncated"), flag)
        self.done_spec = Composite(flags, shape=(num_envs,))
        self._generator = torch.Generator(device)
        self._state = torch.zeros(num_envs, self.state_size, device=device)
        self._steps = torch.zeros(num_envs, 1, device=device)
        self._return = torch.zeros(num_envs, 1, device=device)
        self._returns: list[Tensor] = []

    def pop_returns(self) -> list[float]:
        """Return the returns of the episodes that ended since the last call."""
        found, self._returns = self._returns, []
        returns = torch.cat(found) if found else torch.zeros(0)
        return returns[~returns.isnan()].tolist()

    @abstractmethod
    def draw(self, uniform: Tensor) -> Tensor:
        """Return first states from numbers in [-1, 1)."""

    @abstractmethod
    def move(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the state after an action, reward and whether the episode terminates."""

    @abstractmethod
    def observe(self, state: Tensor) -> Tensor:
        """Return the observation of the policy."""

    def _groups(self, state: Tensor, steps: Tensor) -> dict[str, Tensor]:
        observation = self.observe(state)
        time = steps / self.limit  # which the policy does not see
        return {"policy": observation, "critic": torch.cat([observation, time], -1)}

    def _draw_states(self) -> Tensor:
        uniform = torch.rand(
            self._state.shape, generator=self._generator, device=self._state.device
        )
        return self.draw(2 * uniform - 1)

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        state, reward, terminated = self.move(self._state, tensordict["action"])
        steps = self._steps + 1
        truncated = (steps >= self.limit) & ~terminated
        done = terminated | truncated
        self._return = self._return + reward
        self._returns.append(torch.where(done, self._return, math.nan))
        self._return = torch.where(done, torch.zeros_like(reward), self._return)
        out = TensorDict(self._groups(state, steps), self.batch_size, device=self.device)
        self._state = torch.where(done, self._draw_states(), state)
        self._steps = torch.where(done, torch.zeros_like(steps), steps)
        signals = {"reward": reward, "terminated": terminated, "truncated": truncated}
        return out.update(signals | {"done": done})

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDict:
        if tensordict is None or tensordict.get("_reset", None) is None:
            self._state, self._steps = self._draw_states(), torch.zeros_like(self._steps)
        groups = self._groups(self._state, self._steps)
        return TensorDict(groups, self.batch_size, device=self.device)

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self._generator.manual_seed(seed)


class CartPole(IsaacLike):
    """Gymnasium's CartPole whose action has no bounds; an action of 1 is a force of 10 N."""

    state_size = policy_size = 4
    limit, bound = 500, None

    def draw(self, uniform: Tensor) -> Tensor:
        return 0.05 * uniform

    def observe(self, state: Tensor) -> Tensor:
        return state

    def move(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, speed, angle, turn = state.unbind(-1)
        force = 10 * action.squeeze(-1).clamp(-1, 1)
        sine, cosine = angle.sin(), angle.cos()
        push = (force + 0.05 * turn.square() * sine) / 1.1
        turning = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine.square() / 1.1))
        moving = push - 0.05 * turning * cosine / 1.1
        moved = [speed, moving, turn, turning]
        state = state + 0.02 * torch.stack(moved, -1)
        is_out = (state[:, 0].abs() > 2.4) | (state[:, 2].abs() > 12 * 2 * math.pi / 360)
        terminated = is_out.unsqueeze(-1)
        return state, torch.ones_like(action), terminated


class Pendulum(IsaacLike):
    """Gymnasium's Pendulum with a tenth of its reward; an action of 1 is a torque of 2."""

    state_size, policy_size = 2, 3
    limit, bound = 200, 1.0

    def draw(self, uniform: Tensor) -> Tensor:
        return uniform * uniform.new_tensor([math.pi, 1.0])

    def observe(self, state: Tensor) -> Tensor:
        angle, speed = state.unbind(-1)
        return torch.stack([angle.cos(), angle.sin(), speed], -1)

    def move(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        angle, speed = state.unbind(-1)
        torque = 2 * action.squeeze(-1).clamp(-1, 1)
        from_top = (angle + math.pi) % (2 * math.pi) - math.pi
        cost = from_top.square() + 0.1 * speed.square() + 0.001 * torque.square()
        speed = (speed + (15 * angle.sin() + 3 * torque) * 0.05).clamp(-8, 8)
        state = torch.stack([angle + speed * 0.05, speed], -1)
        return state, -0.1 * cost.unsqueeze(-1), torch.zeros_like(action, dtype=torch.bool)
