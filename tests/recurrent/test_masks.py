"""Action masks of recurrent policies, from collection to the update."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.modules import (
    GRUModule,
    LSTMModule,
    MaskedCategorical,
    ProbabilisticActor,
    ValueOperator,
)

from ppokit import GAE, DualClipPPOLoss, GymCollector, KLEarlyStopper, SequenceBatcher
from tests.recurrent.agents import (
    Agent,
    collect_ours,
    collect_theirs,
    make_core,
    make_loss,
    make_update,
)

ACTIONS = 4


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


gym.register("ppokit/Doors-v0", Doors)

LEGAL, ACTION, MASK = "action_mask", "action", ("collector", "mask")
COLLECTORS = {"ours": collect_ours, "torchrl's": collect_theirs}
OPTIONS = {"clip_value": 0.2, "kl_coeff": 0.3, "entropy_coeff": 0.02}


def make_agent(kind: type) -> Agent:
    torch.manual_seed(0)
    cores = {name: make_core(kind, ACTIONS, name) for name in ("actor", "critic")}
    head = TensorDictModule(nn.Linear(8, ACTIONS), ["actor_embed"], ["logits"])
    actor = ProbabilisticActor(
        TensorDictSequential(cores["actor"], head),
        in_keys={"logits": "logits", "mask": LEGAL},
        distribution_class=MaskedCategorical,
        return_log_prob=True,
    )
    value = ValueOperator(nn.Linear(8, 1), in_keys=["critic_embed"])
    critic = TensorDictSequential(cores["critic"], value)
    return Agent(actor, critic, TensorDictSequential(critic, actor), cores)


@cache
def collected(collector: str, kind: type) -> tuple[Agent, list[TensorDictBase]]:
    """Not to be changed."""
    torch.manual_seed(0)
    agent = make_agent(kind)
    return agent, COLLECTORS[collector]("ppokit/Doors-v0", agent.policy)


def given(collector: str, kind: type, *, moved: float = 0.0) -> tuple[Agent, TensorDictBase]:
    """Networks some steps after they collected a batch, and the batch with advantages."""
    agent, batches = collected(collector, kind)
    agent, batch = copy.deepcopy(agent), batches[-1].clone()
    batch = GAE(gamma=0.99, lmbda=0.95, value_network=agent.critic)(batch)
    with torch.no_grad():
        for parameter in agent.policy.parameters():
            parameter += moved * torch.randn_like(parameter)
    return agent, batch


def taken(x: Tensor, action: Tensor) -> Tensor:
    return x.gather(-1, action.unsqueeze(-1)).squeeze(-1)


every_setup = pytest.mark.parametrize(
    ("collector", "kind"), [("ours", LSTMModule), ("torchrl's", GRUModule)]
)


@every_setup
def test_masked_actions_are_never_drawn(collector, kind):
    _, batches = collected(collector, kind)
    for batch in batches:
        legal = batch[LEGAL]
        assert legal.dtype is torch.bool
        assert taken(legal, batch[ACTION]).all()  # and the environment itself looks at it
        count = legal.sum(-1)
        assert {1, 2, 3} <= set(count.flatten().tolist())
        assert (batch["action_log_prob"][count == 1] == 0).all()
        assert (batch["action_log_prob"][count > 1] < 0).all()


@every_setup
def test_updates_keep_the_masks(collector, kind):
    agent, batch = given(collector, kind)
    burn_in = 3 if kind is LSTMModule else 0
    batcher, loss = SequenceBatcher(4, burn_in=burn_in), make_loss(agent, **OPTIONS)
    statistics = make_update(loss, agent.critic, lr=0.0, batcher=batcher)(batch.clone())
    assert 0 <= statistics["kl"] < 1e-10
    assert abs(statistics["max_ratio"] - 1) < 1e-5
    assert abs(statistics["loss_kl"]) < 1e-6
    logits = batch["logits"].masked_fill(~batch[LEGAL], -torch.inf).log_softmax(-1)
    entropy = -torch.where(batch[LEGAL], logits.exp() * logits, 0).sum(-1).mean()
    assert statistics["entropy"] == pytest.approx(entropy.item(), abs=1e-5)

    before = [parameter.detach().clone() for parameter in loss.parameters()]
    stopper = KLEarlyStopper(10.0)
    update = make_update(loss, agent.critic, lr=0.05, batcher=batcher, stopper=stopper)
    update.validate(batch)
    statistics = update(batch.clone())
    assert not statistics["stopped"]
    assert 1e-6 < statistics["kl"] < 0.5
    for parameter, old in zip(loss.parameters(), before, strict=True):
        assert parameter.isfinite().all()
        assert not torch.equal(parameter, old)
    again = COLLECTORS[collector]("ppokit/Doors-v0", agent.policy, batches=1)[0]
    assert taken(again[LEGAL], again[ACTION]).all()


# -- padding


def spoil(sequences: TensorDictBase) -> TensorDictBase:
    """Fill the padding with NaN, infinite numbers, no open door and the last action."""
    padding, spoilt = ~sequences[MASK], sequences.clone()
    assert padding.any()
    spoilt[LEGAL][padding] = False
    spoilt["observation"][padding] = torch.nan
    spoilt["action_log_prob"][padding] = -torch.inf
    spoilt["advantage"][padding] = torch.nan
    spoilt["logits"][padding] = torch.inf
    spoilt[ACTION][padding] = ACTIONS - 1
    return spoilt


def outcome(loss: DualClipPPOLoss, batch: TensorDictBase) -> tuple[dict, list[Tensor]]:
    """Losses and diagnostics, and the gradients of their sum."""
    found = loss(batch.clone())
    total = sum(value for name, value in found.items() if name.startswith("loss_"))
    gradients = torch.autograd.grad(total, list(loss.parameters()))
    return {name: value.detach() for name, value in found.items()}, list(gradients)


@pytest.mark.parametrize("options", [OPTIONS, {"normalize_advantage": True}], ids=str)
def test_padding_changes_no_loss_and_no_gradient(options):
    agent, batch = given("ours", LSTMModule, moved=0.3)
    loss = make_loss(agent, **options)
    # Whole episodes: the same frames as in the rows, which torchrl's modules cut themselves.
    sequences = SequenceBatcher(None)(batch)
    batch[MASK] = torch.ones(batch.shape, dtype=torch.bool)
    expected, gradients = outcome(loss, batch)
    assert expected["kl"] > 1e-3
    for padded in (sequences, spoil(sequences)):
        found, own = outcome(loss, padded)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert value.isfinite(), name
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=name)
        for one, other in zip(own, gradients, strict=True):
            assert other.isfinite().all()
            assert other.any()
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_mask_that_is_not_bool_raises_with_the_fix():
    agent = make_agent(GRUModule)
    make_env = lambda: gym.make("ppokit/Doors-v0", mask="binary")  # noqa: E731
    collector = GymCollector(
        make_env, agent.policy, frames_per_batch=8, categorical_action_encoding=True
    )
    with pytest.raises(RuntimeError, match=r"'action_mask' is torch.int8.*must be bool.*np.bool_"):
        collector.rollout()
