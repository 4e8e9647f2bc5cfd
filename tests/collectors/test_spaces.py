"""Observations and actions of every kind, as torchrl names and encodes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    NormalParamExtractor,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import nn
from torchrl.envs import GymEnv
from torchrl.modules import ProbabilisticActor, TanhNormal

from ppokit import GymCollector
from tests.collectors.test_collector import (
    ACTIONS,
    OBSERVATIONS,
    Wander,
    assert_many_ends,
    assert_same,
    collect,
    reference,
)

DISCRETE = ("dict", "discrete", "multi_discrete", "alike")


@pytest.mark.filterwarnings("ignore:Creating a tensor from a list of numpy.ndarrays:UserWarning")
@pytest.mark.parametrize(
    ("observations", "categorical", "n"),
    [
        *((observations, False, 3) for observations in OBSERVATIONS),
        *((observations, True, 3) for observations in DISCRETE),
        *((observations, False, n) for observations in ("dict", "pixels") for n in (1, 8)),
    ],
)
def test_observation_spaces(observations: str, categorical: bool, n: int):
    options = {"observations": observations}
    encoding = {"categorical_action_encoding": categorical}
    env = GymEnv("ppokit/Wander-v0", **options, **encoding)
    policy = ReadsAll(list(env.observation_spec.keys(True, True)), env.action_spec)
    batches = collect(lambda: Wander(**options), policy, n, **encoding)
    expected = reference(lambda: GymEnv("ppokit/Wander-v0", **options, **encoding), policy, n)
    assert_many_ends(batches, "truncated", "terminated")
    assert_same(batches, expected)
    if observations == "pixels":
        assert batches[0]["pixels"].dtype is torch.uint8


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


@pytest.mark.parametrize(
    ("actions", "categorical", "n"),
    [
        *((actions, False, n) for actions in ACTIONS for n in (1, 3)),
        *((f"{multi}discrete", True, 3) for multi in ("", "multi_")),
        ("multi_discrete", False, 8),
    ],
)
def test_action_spaces(actions: str, categorical: bool, n: int):
    encoding = {"actions": actions, "categorical_action_encoding": categorical}
    make_env = lambda: GymEnv("ppokit/Wander-v0", **encoding)  # noqa: E731
    policy = ReadsAll(["observation"], make_env().action_spec)
    assert_same(collect(make_env, policy, n), reference(make_env, policy, n))


@pytest.mark.parametrize("plain", [True, False], ids=["lean", "on a TensorDict"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_policy_of_another_dtype_is_told_what_to_do(dtype: torch.dtype, plain: bool):
    network: Any = nn.Linear(9, 2, dtype=dtype)
    policy: Any = ProbabilisticActor(
        TensorDictModule(
            nn.Sequential(network, NormalParamExtractor()), ["observation"], ["loc", "scale"]
        ),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
    )
    if not plain:
        policy = TensorDictSequential(policy)
    other = torch.float32 if dtype is torch.float64 else None
    options: dict[str, Any] = {"frames_per_batch": 10}
    with GymCollector(
        "InvertedDoublePendulum-v5", policy, observation_dtype=dtype, **options
    ) as fitting:
        assert fitting.rollout()["observation"].dtype is dtype
    collector = GymCollector(
        "InvertedDoublePendulum-v5", policy, observation_dtype=other, **options
    )
    with pytest.raises(RuntimeError, match=r"'observation' is torch\.float.*: pass observation_dt"):
        collector.rollout()
    assert collector.closed


def test_a_plain_network_reads_observations_of_double_precision():
    policy: Any = ProbabilisticActor(
        TensorDictModule(
            nn.Sequential(nn.Linear(9, 2), NormalParamExtractor()),
            ["observation"],
            ["loc", "scale"],
        ),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
    )
    with GymCollector("InvertedDoublePendulum-v5", policy, frames_per_batch=30) as collector:
        assert collector.env.observation_spec["observation"].dtype is torch.float64
        batch = collector.rollout()
    for key in ("observation", ("next", "observation")):
        assert batch[key].dtype is torch.float32
    assert batch["next", "done"].any()
    after = batch["next", "observation"][:, :-1][~batch["next", "done"][:, :-1, 0]]
    assert torch.equal(after, batch["observation"][:, 1:][~batch["next", "done"][:, :-1, 0]])
