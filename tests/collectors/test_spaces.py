"""Observations, actions, dtypes, recurrent states and action masks, as torchrl yields them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
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
    TanhNormal,
)
from torchrl.modules.utils import get_primers_from_module

from ppokit import GymCollector
from tests.collectors.test_collector import (
    ACTIONS,
    OBSERVATIONS,
    Wander,
    assert_many_ends,
    assert_same,
    collect,
    in_one,
    make_policy,
    reference,
)


class ReadsAll(TensorDictModuleBase):
    """Draws an action of any kind after the sum of all observations."""

    def __init__(self, in_keys: list, spec: Any) -> None:
        super().__init__()
        self.in_keys, self.out_keys, self.choice = in_keys, ["action", "sum"], spec

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        seen = [tensordict[key].reshape(*tensordict.shape, -1).double() for key in self.in_keys]
        tensordict["sum"] = torch.cat(seen, -1).sum(-1, keepdim=True)
        tensordict["action"] = torch.stack([self.choice.rand() for _ in range(len(tensordict))])
        return tensordict


SPACES: list[Any] = [({"observations": name}, False) for name in OBSERVATIONS]
SPACES += [({"observations": name}, True) for name in ("dict", "discrete", "alike")]
SPACES += [({"actions": name}, False) for name in ACTIONS]
SPACES += [({"actions": name}, True) for name in ("discrete", "multi_discrete")]


@pytest.mark.filterwarnings("ignore:Creating a tensor from a list of numpy.ndarrays:UserWarning")
@pytest.mark.parametrize(("names", "categorical"), SPACES, ids=str)
def test_spaces(names: dict[str, str], categorical: bool):
    encoding: Any = {"categorical_action_encoding": categorical}
    make_env = partial(GymEnv, "ppokit/Wander-v0", **names, **encoding)
    env = make_env()
    policy = ReadsAll(list(env.observation_spec.keys(True, True)), env.action_spec)
    batches = collect(partial(Wander, **names), policy, 3, batches=2, **encoding)
    assert_many_ends(batches, "truncated", "terminated")
    assert_same(batches, reference(make_env, policy, 3, batches=2))
    if names.get("observations") == "pixels":
        assert batches[0]["pixels"].dtype is torch.uint8


# -- precision -----------------------------------------------------------------


def float_policy(dtype: torch.dtype = torch.float32) -> Any:
    return make_policy(9, 2, TanhNormal, dtype=dtype)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_policy_of_another_dtype_names_the_option(dtype: torch.dtype, hooked: bool):
    policy = TensorDictSequential(float_policy(dtype)) if hooked else float_policy(dtype)
    make = partial(GymCollector, "InvertedDoublePendulum-v5", policy, frames_per_batch=10)
    assert make(observation_dtype=dtype).rollout()["observation"].dtype is dtype
    collector = make(observation_dtype=torch.float32 if dtype is torch.float64 else None)
    with pytest.raises(RuntimeError, match=r"'observation' is torch\.float.*: pass observation_dt"):
        collector.rollout()
    assert collector.closed


def test_observations_are_single_precision_by_default():
    collector = GymCollector("InvertedDoublePendulum-v5", float_policy(), frames_per_batch=30)
    assert collector.env.observation_spec["observation"].dtype is torch.float64
    batch = collector.rollout()
    after, done = batch["next", "observation"], batch["next", "done"][:, :-1, 0]
    assert batch["observation"].dtype is after.dtype is torch.float32
    assert torch.equal(after[:, :-1][~done], batch["observation"][:, 1:][~done])


# -- memory and action masks ---------------------------------------------------


@pytest.mark.parametrize("kind", [LSTMModule, GRUModule])
def test_recurrent_states(kind: type):
    torch.manual_seed(0)
    states = ["h", "c"] if kind is LSTMModule else ["h"]
    options = {"in_keys": ["observation", *states, "is_init"], "input_size": 3, "hidden_size": 4}
    options["out_keys"] = ["features", *(("next", state) for state in states)]
    head = TensorDictModule(nn.Linear(4, 3), ["features"], ["logits"])
    policy = ProbabilisticActor(
        TensorDictSequential(kind(**options), head),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )
    transform = Compose(InitTracker(), get_primers_from_module(policy))
    batches = collect(Wander, policy, 3)
    assert_many_ends(batches, "truncated", "terminated")
    make_env = partial(GymEnv, "ppokit/Wander-v0")
    assert_same(batches, reference(make_env, policy, 3, transform=transform))


@pytest.mark.parametrize("is_vector", [False, True])
def test_action_masks_of_info(is_vector: bool):
    policy = ProbabilisticActor(
        make_policy(3, 3, d.Categorical).module[0],
        in_keys={"logits": "logits", "mask": "action_mask"},
        distribution_class=MaskedCategorical,
        return_log_prob=True,
    )

    def make_env() -> Any:
        env = GymEnv("ppokit/Wander-v0", mask=True, categorical_action_encoding=True)
        reader = default_info_dict_reader(["action_mask"], [Unbounded((3,), dtype=torch.bool)])
        return env.set_info_dict_reader(reader)

    masked: Any = partial(Wander, mask=True)
    envs = in_one(masked, 3) if is_vector else masked
    batches = collect(envs, policy, 3, categorical_action_encoding=True)
    assert_same(batches, reference(make_env, policy, 3))
    for batch in batches:
        assert batch["action_mask"].gather(-1, batch["action"].unsqueeze(-1)).all()
