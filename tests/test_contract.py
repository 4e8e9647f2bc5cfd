"""One contract that every block passes, whatever it does."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchrl.modules
from tensordict import TensorDict
from tensordict.utils import NestedKey
from torch import nn
from torchrl.data import Unbounded
from torchrl.modules import ValueOperator

import ppokit
from ppokit import (
    GAE,
    DualClipPPOLoss,
    GRUModule,
    InterpSchedule,
    KLEarlyStopper,
    LSTMModule,
    ObservationNormalizer,
    ParameterScheduler,
    RewardNormalizer,
    SequenceBatcher,
    TensorActor,
    TransformerModule,
)
from ppokit.testing import CHECKS, BlockCase
from tests.blocks import make_actor, make_critic, make_minibatch
from tests.marks import HAS_TRANSFORMER


def rollout(seed: int) -> TensorDict:
    """Two environments, six steps, one truncation and one termination."""
    generator = torch.Generator().manual_seed(seed)
    observation = torch.randn(2, 7, 4, generator=generator)
    terminated = torch.zeros(2, 6, 1, dtype=torch.bool)
    terminated[0, 2] = True
    done = terminated.clone()
    done[1, 3] = True
    is_init = torch.zeros(2, 6, 1, dtype=torch.bool)
    is_init[:, 1:] = done[:, :-1]
    ids = (done.cumsum(1) - done.long()).squeeze(-1) + torch.tensor([[10], [20]])
    return TensorDict(
        {
            "observation": observation[:, :-1],
            "is_init": is_init,
            "recurrent_state": torch.randn(2, 6, 1, 3, generator=generator),
            "collector": {"traj_ids": ids},
            "next": {
                "observation": observation[:, 1:],
                "reward": torch.randn(2, 6, 1, generator=generator),
                "done": done,
                "terminated": terminated,
            },
        },
        [2, 6],
        names=[None, "time"],
    )


def minibatch(seed: int) -> TensorDict:
    return make_minibatch(make_actor(), 8, seed=seed)


def losses(seed: int) -> TensorDict:
    return TensorDict({"kl": torch.tensor(0.01 * seed)})


def scheduler() -> ParameterScheduler:
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))])
    return ParameterScheduler({"lr": (optimizer, InterpSchedule([(0, 1.0), (100, 0.0)]))})


def recurrent(kind: type[LSTMModule] | type[GRUModule], **keys: Any) -> LSTMModule | GRUModule:
    torch.manual_seed(0)
    keys = keys or {"in_key": "observation", "out_key": "features"}
    return kind(4, 3, **keys, default_recurrent_mode=True)


STATE, DONE, REWARD = "recurrent_state", ("next", "done"), ("next", "reward")
SEEN = ("agent", "seen")


def gae(critic: ValueOperator) -> GAE:
    return GAE(gamma=0.99, lmbda=0.95, value_network=critic)


def nested_gae() -> GAE:
    block = gae(make_critic())
    block.set_keys(
        reward=("agent", "pay"), advantage=("agent", "gain"), value_target=("agent", "to")
    )
    return block


def loss() -> DualClipPPOLoss:
    return DualClipPPOLoss(make_actor(), make_critic(), dual_clip=2.0, kl_coeff=0.1)


def nested_loss() -> DualClipPPOLoss:
    block = loss()
    block.set_keys(advantage=("agent", "gain"), value_target=("agent", "to"))
    return block


def nested_actor() -> TensorActor:
    actor = make_actor()
    actor.module[0].in_keys = [SEEN]
    return TensorActor(actor)


def nested_recurrent(kind: type[LSTMModule] | type[GRUModule]) -> LSTMModule | GRUModule:
    keys = [("agent", state) for state in ("h", "c")[: 2 if kind is LSTMModule else 1]]
    out_keys = [("agent", "features"), *(("next", *key) for key in keys)]
    return recurrent(kind, in_keys=[SEEN, *keys, "is_init"], out_keys=out_keys)


MEMORY = ("transformer_memory", "observation")


def transformer(key: NestedKey = "observation") -> TransformerModule:
    torch.manual_seed(0)
    network = torchrl.modules.CausalTransformer(4, 4, num_heads=2, max_seq_len=16)
    specs: Any = {key: Unbounded(4)}
    return TransformerModule(network, specs, "features")  # single steps: all out_keys


def remembered(seed: int) -> TensorDict:
    batch = rollout(seed)
    rows, steps = batch.shape
    generator = torch.Generator().manual_seed(seed)
    batch[MEMORY] = torch.randn(rows, 1, 15, 4, generator=generator).expand(-1, steps, -1, -1)
    batch["transformer_steps"] = torch.tensor([3, 0]).expand(rows, steps, 2)
    return batch


def sequences(seq_len: int, burn_in: int = 0, *, nested: bool = False) -> SequenceBatcher:
    keys: Any = {"state_keys": [STATE]}
    if nested:
        keys = {"state_keys": [("agent", "h")], "cut_keys": [("agent", "start")]}
        keys["done_key"] = ("next", "agent", "over")
    return SequenceBatcher(seq_len, burn_in=burn_in, **keys)


OF_SEQUENCES: dict = {
    "batch": rollout,
    "required": ["is_init", STATE, DONE],
    "nested": {
        STATE: ("agent", "h"),
        "is_init": ("agent", "start"),
        DONE: ("next", "agent", "over"),
    },
}
CASES = {
    "RewardNormalizer": BlockCase(
        RewardNormalizer,
        rollout,
        required=[REWARD, DONE],
        make_nested=lambda: RewardNormalizer(reward_key=("next", "agent", "pay"), done_key=DONE),
        nested={REWARD: ("next", "agent", "pay")},
    ),
    "RewardNormalizer, batch": BlockCase(
        lambda: RewardNormalizer(statistics="batch"), rollout, required=[REWARD]
    ),
    "GAE": BlockCase(
        lambda: gae(make_critic()),
        rollout,
        required=["observation", ("next", "observation"), REWARD, DONE],
        make_nested=nested_gae,
        nested={REWARD: ("next", "agent", "pay")},
    ),
    "ObservationNormalizer": BlockCase(
        lambda: ObservationNormalizer(4),
        rollout,
        required=["observation"],
        make_nested=lambda: ObservationNormalizer(4, in_key=SEEN),
        nested={"observation": SEEN},
    ),
    "TensorActor": BlockCase(
        lambda: TensorActor(make_actor()),
        minibatch,
        required=["observation"],
        make_nested=nested_actor,
        nested={"observation": SEEN},
    ),
    "DualClipPPOLoss": BlockCase(
        loss,
        minibatch,
        required=["observation", "action", "action_log_prob", "value_target"],
        differentiable=["loss_objective", "loss_critic", "loss_entropy", "loss_kl"],
        make_nested=nested_loss,
        nested={"advantage": ("agent", "gain"), "value_target": ("agent", "to")},
    ),
    "LSTMModule": BlockCase(
        lambda: recurrent(LSTMModule),
        rollout,
        required=["observation", "is_init"],
        differentiable=["features", ("next", f"{STATE}_h"), ("next", f"{STATE}_c")],
        make_nested=lambda: nested_recurrent(LSTMModule),
        nested={"observation": SEEN},
    ),
    "GRUModule": BlockCase(
        lambda: recurrent(GRUModule),
        rollout,
        required=["observation", "is_init"],
        differentiable=["features", ("next", STATE)],
        make_nested=lambda: nested_recurrent(GRUModule),
        nested={"observation": SEEN, STATE: ("agent", "h")},
    ),
    "KLEarlyStopper": BlockCase(
        lambda: KLEarlyStopper(0.02),
        losses,
        required=["kl"],
        make_nested=lambda: KLEarlyStopper(0.02, kl_key=("agent", "kl")),
        nested={"kl": ("agent", "kl")},
    ),
    "ParameterScheduler": BlockCase(scheduler, rollout),
    "SequenceBatcher": BlockCase(
        lambda: sequences(4), make_nested=lambda: sequences(4, nested=True), **OF_SEQUENCES
    ),
    "SequenceBatcher, burn-in": BlockCase(
        lambda: sequences(2, 2), make_nested=lambda: sequences(2, 2, nested=True), **OF_SEQUENCES
    ),
}

if HAS_TRANSFORMER:
    CASES["TransformerModule"] = BlockCase(
        transformer,
        remembered,
        required=["observation", MEMORY, "transformer_steps", "is_init"],
        differentiable=["features"],
        make_nested=lambda: transformer(SEEN),
        nested={"observation": SEEN, MEMORY: ("transformer_memory", *SEEN)},
    )

MARKS = {"compiled_equals_eager": pytest.mark.slow}  # seconds for each block
every_block = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@pytest.mark.parametrize(
    ("name", "check"),
    [
        pytest.param(
            name, check, id=f"{check.__name__}-{name}", marks=MARKS.get(check.__name__, ())
        )
        for name in CASES
        for check in CHECKS
        # Random numbers differ between dtypes, and the critic is no part of torchrl's GAE.
        if name not in ("TensorActor", "GAE") or check.__name__ != "float64_gives_the_same"
    ],
)
def test_contract(name: str, check: Callable[[BlockCase], None]):
    check(CASES[name])


def test_every_public_block_is_here():
    blocks = {name for name in ppokit.__all__ if inspect.isclass(getattr(ppokit, name))}
    called_with_numbers = {
        "StepSchedule",
        "InterpSchedule",
        "AdaptiveKLCoeff",
        "AdaptiveLearningRate",
        "GymCollector",
        "PPOUpdate",
        "TrainingStep",
        "Finding",
    }
    if "TransformerModule" not in CASES:
        blocks.remove("TransformerModule")
    assert blocks - called_with_numbers == {name.split(",")[0] for name in CASES}


def test_every_public_name_has_an_example_that_runs():
    public = [
        getattr(ppokit, name)
        for name in ppokit.__all__
        if name not in ("functional", "networks", "plotting")
    ]
    public.append(ppokit.networks.actor_critic)
    public += [getattr(ppokit.functional, name) for name in ppokit.functional.__all__]
    for thing in public:
        assert ">>>" in (thing.__doc__ or ""), thing


@every_block
def test_its_documentation_has_all_parts(case: BlockCase):
    documentation = inspect.getdoc(type(case.make())) or ""
    for part in ("Args:", "Raises:", "Example"):
        assert part in documentation
