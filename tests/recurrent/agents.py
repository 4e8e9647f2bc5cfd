"""Recurrent networks, and what they leave behind in a batch."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, InitTracker, SerialEnv, TransformedEnv
from torchrl.modules import (
    GRUModule,
    LSTMModule,
    MaskedCategorical,
    ProbabilisticActor,
    TanhNormal,
    ValueOperator,
)
from torchrl.modules.utils import get_primers_from_module

from ppokit import GAE, DualClipPPOLoss, GymCollector, PPOUpdate, SequenceBatcher
from tests.blocks import actor_of, categorical_actor, ppo_update

DONE = ("next", "done")
DOORS, ACTIONS = "ppokit/Doors-v0", 4
H, C, CRITIC = "recurrent_state_h", "recurrent_state_c", ("critic", "recurrent_state")


def make_networks() -> dict[str, Any]:
    """An actor with an LSTM of two layers behind an encoder, and a critic with a GRU of its own."""
    torch.manual_seed(0)
    encoder = TensorDictModule(nn.Linear(4, 3), in_keys=["observation"], out_keys=["code"])
    lstm = LSTMModule(3, 5, num_layers=2, in_key="code", out_key="embed")
    head = TensorDictModule(nn.Linear(5, 2), in_keys=["embed"], out_keys=["logits"])
    actor = categorical_actor(encoder, TensorDictSequential(lstm, head))
    keys = {"in_keys": ["observation", CRITIC, "is_init"]}
    keys["out_keys"] = ["critic_embed", ("next", *CRITIC)]
    gru = GRUModule(4, 6, **keys)
    value = ValueOperator(nn.Linear(6, 1), in_keys=["critic_embed"])
    critic = TensorDictSequential(gru, value)
    for network in (actor, critic):
        network.double()
    return {"actor": actor, "critic": critic, "lstm": lstm, "gru": gru, "encoder": encoder}


def play(networks: dict[str, Any], done: Tensor) -> TensorDictBase:
    """A batch as collectors store it. Rows begin in mid-episode, with a state."""
    rows, steps = done.shape
    random = lambda *shape: torch.randn(rows, *shape, dtype=torch.float64)  # noqa: E731
    state = {H: random(2, 5), C: random(2, 5), CRITIC: random(1, 6)}
    was_done, frames = torch.zeros(rows, 1, dtype=torch.bool), []
    for t in range(steps):
        zeroed = {k: torch.where(was_done.unsqueeze(-1), 0.0, s) for k, s in state.items()}
        frame = TensorDict({"observation": random(4), "is_init": was_done, **zeroed}, [rows])
        with torch.no_grad():
            networks["critic"](networks["actor"](frame))
        state = {key: frame["next"][key] for key in state}
        was_done = done[:, t : t + 1]
        frame[DONE] = was_done
        frame["frame"] = torch.arange(rows) * steps + t
        frame["advantage"], frame["value_target"] = random(1), random(1)
        frames.append(frame)
    batch: Any = torch.stack(frames, 1)
    batch.names = [None, "time"]
    return batch


def some_done(rows: int = 3, steps: int = 23) -> Tensor:
    return torch.rand(rows, steps, generator=torch.Generator().manual_seed(3)) < 0.08


def disturb(networks: dict[str, Any]) -> None:
    """What an optimizer step does."""
    with torch.no_grad():
        for name in ("actor", "critic"):
            for parameter in networks[name].parameters():
                parameter += 0.2 * torch.randn_like(parameter)


# -- agents on real environments, and what collects their batches


class Doors(gym.Env):
    """Doors, some of which are closed in each step; the reward is for the first door shown."""

    def __init__(self, mask: str = "box") -> None:
        of_mask = {"box": spaces.Box(0, 1, (ACTIONS,), np.bool_)}
        of_mask["binary"] = spaces.MultiBinary(ACTIONS)
        seen = spaces.Box(-1, 1, (ACTIONS,), np.float32)
        self.observation_space = spaces.Dict(observation=seen, action_mask=of_mask[mask])
        self.action_space = spaces.Discrete(ACTIONS)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.time, self.shown = 0, int(self.np_random.integers(ACTIONS))
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        assert self.open[int(action)], "this door is closed"
        self.time += 1
        terminated = bool(self.np_random.random() < 0.1)
        reward = float(int(action) == self.shown)
        return self.observe(), reward, terminated, self.time >= 9, {}

    def observe(self) -> dict[str, np.ndarray]:
        self.open = self.np_random.random(ACTIONS) < 0.5
        self.open[self.np_random.integers(ACTIONS)] = True  # at times it is the only one
        shown = np.zeros(ACTIONS, np.float32)
        if self.time == 0:
            shown[self.shown] = 1.0
        return {"observation": shown, "action_mask": self.open}


gym.register(DOORS, Doors)


class Agent(NamedTuple):
    """Networks with a memory."""

    actor: ProbabilisticActor
    critic: TensorDictSequential
    policy: Any  #: what is collected with: all that has states
    cores: dict[str, Any]  #: the recurrent modules, by name


def make_core(kind: type, inputs: int, name: str, cells: int = 8, **options: Any) -> Any:
    """A recurrent module with states of its own names."""
    states = [f"{name}_state_h", f"{name}_state_c"] if kind is LSTMModule else [f"{name}_state"]
    keys = {"in_keys": ["observation", *states, "is_init"]}
    keys["out_keys"] = [f"{name}_embed", *(("next", state) for state in states)]
    return kind(inputs, cells, **keys, **options)


def make_head(env: str, embed: str, cells: int = 8) -> tuple[TensorDictModule, dict[str, Any]]:
    """The last layer of an actor, and the arguments of its distribution."""
    if env == "CartPole-v1":
        return TensorDictModule(nn.Linear(cells, 2), [embed], ["logits"]), {}
    if env == DOORS:
        head = TensorDictModule(nn.Linear(cells, ACTIONS), [embed], ["logits"])
        keys = {"logits": "logits", "mask": "action_mask"}
        return head, {"in_keys": keys, "distribution": MaskedCategorical}
    # Narrow: close to the bounds the inverse of the tanh is not exact to 1e-5.
    split = NormalParamExtractor("biased_softplus_0.3")
    head = TensorDictModule(nn.Sequential(nn.Linear(cells, 2), split), [embed], ["loc", "scale"])
    return head, {"distribution": TanhNormal, "distribution_kwargs": {"low": -2.0, "high": 2.0}}


def make_agent(env: str, kind: type, *, shared: bool = False, **options: Any) -> Agent:
    """An actor and a critic, with a memory each or one for both."""
    torch.manual_seed(0)
    inputs = 3 if env == "Pendulum-v1" else 4
    names = ["shared"] if shared else ["actor", "critic"]
    cores = {name: make_core(kind, inputs, name, **options) for name in names}
    of_actor, of_critic = names[0], names[-1]
    head, distribution = make_head(env, f"{of_actor}_embed")
    actor = actor_of(TensorDictSequential(cores[of_actor], head), **distribution)
    value = ValueOperator(nn.Linear(8, 1), in_keys=[f"{of_critic}_embed"])
    critic = TensorDictSequential(cores[of_critic], value)
    policy = actor if shared else TensorDictSequential(cores["critic"], actor)
    return Agent(actor, critic, policy, cores)


# of an episode at most: many are truncated in a batch
OPTIONS: dict[str, Any] = {"max_episode_steps": 14, "categorical_action_encoding": True}


def collect_ours(env: str, policy: Any, batches: int = 2, frames: int = 66) -> list[Any]:
    """Batches of two environments, by GymCollector."""
    collector = GymCollector(
        lambda: GymEnv(env, **OPTIONS),
        policy,
        num_envs=2,
        frames_per_batch=frames,
        total_frames=frames * batches,
        categorical_action_encoding=True,
    )
    collector.set_seed(0)
    return list(collector)


def collect_theirs(env: str, policy: Any, batches: int = 2, transforms: Any = None) -> list[Any]:
    """The same by torchrl's Collector, with all transforms that it needs unless told otherwise."""
    if transforms is None:
        transforms = [InitTracker(), get_primers_from_module(policy)]
    envs = TransformedEnv(SerialEnv(2, lambda: GymEnv(env, **OPTIONS)))
    for transform in transforms:
        envs.append_transform(transform)
    envs.set_seed(0)
    frames = {"frames_per_batch": 66, "total_frames": 66 * batches}
    return list(Collector(envs, policy, **frames, auto_register_policy_transforms=False))


COLLECTORS = {"ours": collect_ours, "torchrl's": collect_theirs}


@cache
def collected(collector: str, env: str, kind: type, shared: bool) -> tuple[Agent, list[Any]]:
    """Two batches in a row; not to be changed."""
    torch.manual_seed(0)
    agent = make_agent(env, kind, shared=shared)
    return agent, COLLECTORS[collector](env, agent.policy)


def make_loss(agent: Agent, **options: Any) -> DualClipPPOLoss:
    """A loss that takes the value head alone where actor and critic share their memory."""
    options = {"functional": False, "entropy_coeff": 0.01, "dual_clip": 5.0} | options
    critic = agent.critic[-1] if agent.policy is agent.actor else agent.critic
    return DualClipPPOLoss(agent.actor, critic, **options)


def make_update(loss: Any, critic: Any, *, lr: float = 1e-2, **options: Any) -> PPOUpdate:
    """An update on sequences."""
    blocks = {"batcher": SequenceBatcher(5), "minibatch_size": 30, "seed": 0} | options
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    optimizer = torch.optim.SGD(loss.parameters(), lr=lr)
    return ppo_update(loss, optimizer, advantage=gae, **blocks)
