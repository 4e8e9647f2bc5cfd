"""Action masks of recurrent policies, from collection to the update."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn
from torchrl.modules import GRUModule, LSTMModule, ValueOperator

from ppokit import GAE, DualClipPPOLoss, GymCollector, KLEarlyStopper, SequenceBatcher
from ppokit import GRUModule as OwnGRU
from ppokit import LSTMModule as OwnLSTM
from tests.blocks import actor_of, outcome
from tests.recurrent.agents import (
    ACTIONS,
    COLLECTORS,
    DOORS,
    Agent,
    collected,
    make_agent,
    make_loss,
    make_update,
)

LEGAL, ACTION, MASK = "action_mask", "action", ("collector", "mask")
OPTIONS = {"clip_value": 0.2, "kl_coeff": 0.3, "entropy_coeff": 0.02}


def given(collector: str, kind: type, *, moved: float = 0.0) -> tuple[Agent, TensorDictBase]:
    """Networks some steps after they collected a batch, and the batch with advantages."""
    agent, batches = collected(collector, DOORS, kind, False)
    agent, batch = copy.deepcopy(agent), batches[-1].clone()
    batch = GAE(gamma=0.99, lmbda=0.95, value_network=agent.critic)(batch)
    with torch.no_grad():
        for parameter in agent.policy.parameters():
            parameter += moved * torch.randn_like(parameter)
    return agent, batch


def taken(x: Tensor, action: Tensor) -> Tensor:
    return x.gather(-1, action.unsqueeze(-1)).squeeze(-1)


SETUPS = [("ours", LSTMModule), ("torchrl's", GRUModule)]
every_setup = pytest.mark.parametrize(("collector", "kind"), SETUPS)


@every_setup
def test_masked_actions_are_never_drawn(collector, kind):
    _, batches = collected(collector, DOORS, kind, False)
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
    """Updates of these networks are also in test_training.py."""
    agent, batch = given(collector, kind)
    burn_in = 3 if kind is LSTMModule else 0
    batcher, loss = SequenceBatcher(4, burn_in=burn_in), make_loss(agent, **OPTIONS)
    statistics = make_update(loss, agent.critic, lr=0.0, batcher=batcher)(batch.clone())
    assert abs(statistics["loss_kl"]) < 1e-6
    logits = batch["logits"].masked_fill(~batch[LEGAL], -torch.inf).log_softmax(-1)
    entropy = -torch.where(batch[LEGAL], logits.exp() * logits, 0).sum(-1).mean()
    assert statistics["entropy"] == pytest.approx(entropy.item(), abs=1e-5)
    stopper = KLEarlyStopper(10.0)
    update = make_update(loss, agent.critic, lr=0.05, batcher=batcher, stopper=stopper)
    update.validate(batch)
    statistics = update(batch.clone())
    assert not statistics["stopped"]
    assert 1e-6 < statistics["kl"] < 0.5
    again = COLLECTORS[collector](DOORS, agent.policy, batches=1)[0]
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


class Memory(TensorDictModuleBase):
    """A memory that no episode start resets."""

    def __init__(self, input_size: int, hidden_size: int, in_key: str, out_key: str) -> None:
        super().__init__()
        self.in_keys, self.out_keys = [in_key, "own_state"], [out_key, ("next", "own_state")]
        self.gru = nn.GRU(input_size, hidden_size, batch_first=True)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        state = tensordict["own_state"][:, 0].transpose(0, 1).contiguous()
        memory, _ = self.gru(tensordict[self.in_keys[0]], state)
        return tensordict.set(self.out_keys[0], memory).set(self.out_keys[1], memory)


@pytest.mark.parametrize("kind", [LSTMModule, GRUModule, OwnLSTM, OwnGRU, Memory])
@pytest.mark.parametrize("masked", [slice(0, 4), slice(5, 6), slice(9, None)], ids=str)
def test_a_masked_frame_before_a_valid_one_is_a_step_of_the_network(kind: type, masked: slice):
    """A burn-in by hand, or a frame that does not count; those after the valid ones may be NaN."""
    torch.manual_seed(0)
    module = kind(input_size=3, hidden_size=6, in_key="observation", out_key="memory")
    heads = nn.Linear(6, 3), nn.Linear(6, 1)
    actor = actor_of(
        TensorDictSequential(module, TensorDictModule(heads[0], ["memory"], ["logits"]))
    )
    loss = DualClipPPOLoss(actor, ValueOperator(heads[1], ["memory"]), entropy_bonus=False)
    actor, loss = actor.double(), loss.double()
    rows, steps = 4, 12
    batch: Any = TensorDict({"observation": torch.randn(rows, steps, 3).double()}, [rows, steps])
    for key in (k for k in module.in_keys if "state" in str(k)):
        batch[key] = torch.zeros(rows, steps, 1, 6, dtype=torch.float64)
    batch["is_init"] = (torch.arange(steps) == 0).expand(rows, steps).unsqueeze(-1)
    batch["action"] = torch.randint(3, (rows, steps))
    batch["action_log_prob"] = torch.full((rows, steps), -1.1).double()
    for key in ("advantage", "value_target"):
        batch[key] = torch.randn(rows, steps, 1).double()
    mask = torch.ones(rows, steps, dtype=torch.bool)
    mask[:, masked] = False
    memory, _ = next(x for x in module.modules() if isinstance(x, nn.RNNBase))(batch["observation"])
    log_prob = taken(heads[0](memory).log_softmax(-1), batch["action"])
    ratio = (log_prob - batch["action_log_prob"]).exp()[mask]
    advantage = batch["advantage"].squeeze(-1)[mask]
    objective = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    error = nn.functional.smooth_l1_loss(heads[1](memory)[mask], batch["value_target"][mask])
    expected = torch.autograd.grad(objective + error, [*module.parameters()])
    batch[MASK] = mask
    if masked.stop is None:
        batch["observation"][:, masked] = torch.nan
    losses = loss(batch)
    torch.testing.assert_close(losses["loss_objective"], objective)
    torch.testing.assert_close(losses["loss_critic"], error)
    found = torch.autograd.grad(
        losses["loss_objective"] + losses["loss_critic"], [*module.parameters()]
    )
    torch.testing.assert_close(found, expected)


def test_a_mask_that_is_not_bool_raises_with_the_fix():
    policy = make_agent(DOORS, GRUModule).policy
    make_env = lambda: gym.make(DOORS, mask="binary")  # noqa: E731
    options: Any = {"frames_per_batch": 8, "categorical_action_encoding": True}
    collector = GymCollector(make_env, policy, **options)
    with pytest.raises(ValueError, match=r"'action_mask' .*torch.int8.*must be bool.*np.bool_"):
        collector.rollout()
