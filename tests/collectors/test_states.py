"""Policies with a memory, and policies that may not do everything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict.nn import (
    TensorDictModule,
    TensorDictSequential,
)
from torch import distributions as d
from torch import nn
from torchrl.data import Unbounded
from torchrl.envs import Compose, GymEnv, InitTracker, default_info_dict_reader
from torchrl.modules import (
    GRUModule,
    LSTMModule,
    MaskedCategorical,
    OneHotCategorical,
    ProbabilisticActor,
)
from torchrl.modules.utils import get_primers_from_module

from tests.collectors.test_collector import (
    Wander,
    assert_many_ends,
    assert_same,
    collect,
    make_policy,
    reference,
)

# -- recurrent policies ---------------------------------------------------------


def make_recurrent(kind: type) -> ProbabilisticActor:
    torch.manual_seed(0)
    states = ["h", "c"] if kind is LSTMModule else ["h"]
    options = {"in_keys": ["observation", *states, "is_init"], "input_size": 3, "hidden_size": 4}
    out_keys = ["features", *(("next", state) for state in states)]
    return ProbabilisticActor(
        TensorDictSequential(
            kind(**options, out_keys=out_keys),
            TensorDictModule(nn.Linear(4, 3), ["features"], ["logits"]),
        ),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("kind", [LSTMModule, GRUModule])
def test_recurrent_states(kind: type, n: int):
    policy = make_recurrent(kind)
    primer = get_primers_from_module(policy)
    batches = collect(Wander, policy, n)
    expected = reference(
        lambda: GymEnv("ppokit/Wander-v0"), policy, n, transform=Compose(InitTracker(), primer)
    )
    assert_many_ends(batches, "truncated", "terminated")
    assert_same(batches, expected)


# -- action masks -----------------------------------------------------------------


class Masked(MaskedCategorical):
    """Names its parameters as they are in the batch."""

    def __init__(self, logits: torch.Tensor, action_mask: torch.Tensor) -> None:
        super().__init__(logits=logits, mask=action_mask)


@pytest.mark.parametrize("vectorization", ["serial", "sync"])
def test_action_masks_of_info(vectorization: str):
    policy = make_policy(3, 3, d.Categorical)
    policy = ProbabilisticActor(
        policy.module[0],
        in_keys=["logits", "action_mask"],
        distribution_class=Masked,
        return_log_prob=True,
    )

    def make_env() -> Any:
        env = GymEnv("ppokit/Wander-v0", mask=True, categorical_action_encoding=True)
        reader = default_info_dict_reader(["action_mask"], [Unbounded((3,), dtype=torch.bool)])
        return env.set_info_dict_reader(reader)

    options = {"categorical_action_encoding": True, "vectorization": vectorization}
    batches = collect(lambda: Wander(mask=True), policy, 3, **options)
    assert_same(batches, reference(make_env, policy, 3))
    for batch in batches:
        assert batch["action_mask"].gather(-1, batch["action"].unsqueeze(-1)).all()
