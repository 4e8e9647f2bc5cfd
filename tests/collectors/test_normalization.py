"""ObservationNormalizer: statistics in one process, within networks, and over ranks."""

from __future__ import annotations

import copy
import math
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import distributions as d
from torch import nn
from torchrl.collectors import MultiSyncCollector
from torchrl.modules import OneHotCategorical, ValueOperator

import ppokit
from ppokit import GymCollector, ObservationNormalizer, TensorActor, evaluate
from ppokit.networks import actor_critic
from tests.collectors.test_collector import POLICY, Wander, collect, make_policy
from tests.collectors.test_faulty_environments import Odd
from tests.collectors.test_workers import make_env
from tests.ranks import run_on_two_ranks


def assert_normalized(batch: Any, raw: Any, *parts: str, clip: float = 10.0) -> None:
    """Raise unless the observations are normalized by the statistics of raw ones."""
    mean, std = torch.zeros(4).double(), torch.ones(4).double()
    if raw is not None:
        x = raw.double()
        mean, std = x.mean(0), (x.var(0, correction=0) + 1e-8).sqrt()
    for nested in (batch, *(batch[part] for part in parts)):
        expected = ((nested["observation"].double() - mean) / std).clamp(-clip, clip).float()
        torch.testing.assert_close(nested["normal"], expected, rtol=1e-5, atol=1e-5)


def test_a_batch_is_normalized_by_the_statistics_before_it():
    norm, policy = ObservationNormalizer(4, out_key="normal"), make_policy(4, 2, OneHotCategorical)
    policy.module[0].in_keys = ["normal"]
    seen: list[torch.Tensor] = []
    for batch in collect("CartPole-v1", policy, 3, observation_transform=norm):
        assert_normalized(batch, torch.cat(seen) if seen else None, "next")
        seen.append(batch["observation"].flatten(0, 1))
    x = torch.cat(seen).double()
    torch.testing.assert_close(norm.mean, x.mean(0))
    torch.testing.assert_close(norm.variance, x.var(0, correction=0))


def test_sizes_may_be_numbers_of_numpy():
    for shape in (np.int64(3), (np.int64(3),), np.array([3])):
        assert ObservationNormalizer(shape).mean.shape == (3,)


def test_a_loaded_state_is_scaled_by_the_epsilon_of_the_normalizer():
    x = TensorDict({"observation": torch.tensor([[-1e-3], [1e-3]])}, [2])
    old, new = ObservationNormalizer(1), ObservationNormalizer(1, epsilon=1e-2)
    assert new(x.clone())["observation"].abs().max() == pytest.approx(1e-3)  # no data: as it is
    new.update(x[:0])
    assert new(x.clone())["observation"].abs().max() == pytest.approx(1e-3)
    old.update(x)
    new.load_state_dict(old.state_dict())
    expected = 1e-3 / math.sqrt(1e-6 + 1e-2)
    assert new(x.clone())["observation"].abs().max() == pytest.approx(expected)


def test_an_epsilon_that_is_set_holds_at_once():
    norm = ObservationNormalizer(1, clip=None)
    norm.update(TensorDict({"observation": torch.tensor([[0.0], [2.0]])}, [2]))
    norm.freeze()
    norm.epsilon = 3.0  # the variance is 1
    found = norm(TensorDict({"observation": torch.tensor([[3.0]])}, [1]))["observation"]
    assert found.item() == pytest.approx((3.0 - 1.0) / 2.0)


def test_freeze_and_copies():
    norm = ObservationNormalizer(4)
    policy, options = make_policy(4, 2, OneHotCategorical), {"observation_transform": norm}
    collector = GymCollector("CartPole-v1", policy, frames_per_batch=16, **options)
    collector.rollout()
    mean = norm.freeze().mean.clone()
    collector.rollout()
    assert norm.frozen
    assert torch.equal(norm.mean, mean)
    GymCollector("CartPole-v1", policy, frames_per_batch=16, worker_idx=3, **options)
    norm.unfreeze()
    with pytest.raises(ValueError, match="Each worker would have its own copy of the Observ"):
        GymCollector("CartPole-v1", policy, frames_per_batch=16, worker_idx=3, **options)
    collector.rollout()
    assert norm.count == 32
    for twin in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        twin.update(TensorDict({"observation": torch.randn(5, 4)}, [5]))
        assert (norm.count, twin.count) == (32, 37)


def test_statistics_are_exact():
    """Of a large mean, after a cast, and under the mask of agents."""
    norm, x = ObservationNormalizer(()), 1e6 + torch.randn(1000, dtype=torch.float64)
    for part in x.split(100):
        norm.update(TensorDict({"observation": part}, [100]))
    torch.testing.assert_close(norm.variance, x.var(correction=0))
    assert norm(TensorDict({"observation": x}, [1000]))["observation"].std() < 1.01
    mean = norm.mean.clone()
    nn.Sequential(norm).to(torch.bfloat16)
    assert torch.equal(norm.mean, mean)
    norm, x = ObservationNormalizer((3,)), torch.randn(2, 6, 4, 3)
    mask = torch.rand(2, 6) < 0.5
    norm.update(TensorDict({"observation": x, ("collector", "mask"): mask}, [2, 6]))
    valid = x[mask].reshape(-1, 3).double()
    assert norm.count == len(valid)
    torch.testing.assert_close(norm.mean, valid.mean(0))


def test_bad_input():
    with pytest.raises(ValueError, match="clip must be positive or None, got 0"):
        ObservationNormalizer(3, clip=0)
    norm = ObservationNormalizer(3)
    with pytest.raises(ValueError, match=r"shape \[2, 4\], which does not end in \[3\]"):
        norm.update(TensorDict({"observation": torch.zeros(2, 4)}, [2]))
    with pytest.raises(KeyError, match="'observation' is not in the batch"):
        norm.update(TensorDict({"pixels": torch.zeros(2, 3)}, [2]))


class Counts(TensorDictModuleBase):
    """A transform of the user's, which counts frames."""

    def __init__(self) -> None:
        super().__init__()
        self.in_keys = self.out_keys = ["observation"]
        self.frames = 0

    def update(self, observations: Any) -> None:
        self.frames += observations.numel()

    def forward(self, tensordict: Any) -> Any:
        return tensordict


IDENTITY = TensorDictModule(nn.Identity(), ["observation"], ["observation"])


def test_normalizers_in_sequences_are_updated():
    """The statistics are those of numpy over the raw observations, wherever the normalizer is."""
    found = []
    for nest in (
        lambda norm: norm,
        lambda norm: TensorDictSequential(norm),
        lambda norm: TensorDictSequential(norm, IDENTITY),
        lambda norm: TensorDictSequential({"first": norm, "second": IDENTITY}),
        lambda norm: TensorDictSequential(TensorDictSequential(norm, IDENTITY), IDENTITY),
        lambda norm: TensorDictSequential(Counts(), TensorDictSequential(IDENTITY)),
    ):
        norm = ObservationNormalizer(3)
        transform = nest(norm)
        options: Any = {"frames_per_batch": 30, "observation_transform": transform}
        collector = GymCollector(Wander, POLICY, **options)
        collector.set_seed(0)
        raw = GymCollector(Wander, POLICY, frames_per_batch=30)
        raw.set_seed(0)
        torch.manual_seed(0)
        collector.rollout()
        torch.manual_seed(0)
        expected = raw.rollout()["observation"].reshape(-1, 3).double()  # its first batch is raw
        if norm.count:
            torch.testing.assert_close(norm.mean, expected.mean(0))
            torch.testing.assert_close(norm.variance, expected.var(0, correction=0))
            found.append(norm.count)
            evaluate(Wander, POLICY, observation_transform=transform, episodes=2)
            assert norm.count == 30
        else:
            assert transform[0].frames == 30
    assert found == [30] * 5


def collect_with(transform: Any) -> Any:
    options: Any = {"frames_per_batch": 8, "observation_transform": transform}
    return GymCollector(Wander, POLICY, **options).rollout()


@pytest.mark.parametrize("name", ["count", "mean", "m2", "rate"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_a_state_that_no_observations_give_is_not_loaded(name: str, value: float):
    normalizer = ObservationNormalizer(2)
    before = copy.deepcopy(normalizer.state_dict())
    state = before | {f"module.{name}": torch.full((2,), value, dtype=torch.float64)}
    if (name, value) == ("mean", -1.0):
        normalizer.load_state_dict(state)
        return
    with pytest.raises(RuntimeError, match=rf"'module.{name}' is .* must be finite"):
        normalizer.load_state_dict(state)
    assert str(normalizer.state_dict()) == str(before)


def test_a_network_that_holds_a_normalizer_keeps_its_statistics_where_a_state_raises():
    network = nn.Sequential(ObservationNormalizer(2), nn.Linear(2, 1))
    state = copy.deepcopy(network.state_dict())
    state["0.module.mean"].fill_(math.nan)
    with pytest.raises(RuntimeError, match=r"'module.mean' is .* must be finite"):
        network.load_state_dict(state)
    assert network[0].mean.tolist() == [0, 0]


class Preprocess(nn.Module):
    """Holds a normalizer, whose statistics nothing moves."""

    in_keys = out_keys = ("observation",)

    def __init__(self) -> None:
        super().__init__()
        self.norm = ObservationNormalizer(4)

    def forward(self, tensordict: Any) -> Any:
        return self.norm(tensordict)


class Moving(Preprocess):
    def update(self, observations: Any) -> None:
        self.norm.update(observations)


def test_a_normalizer_within_a_module_needs_its_update():
    def collect(transform: Any) -> None:
        actor, _ = actor_critic("CartPole-v1")
        GymCollector(
            "CartPole-v1", actor, frames_per_batch=16, observation_transform=transform
        ).rollout()

    with pytest.warns(UserWarning, match="Preprocess holds an ObservationNormalizer.*no update"):
        collect(Preprocess())
    frozen = Preprocess()
    frozen.norm.freeze()
    collect(frozen)
    collect(moving := Moving())
    assert moving.norm.count == 16


def test_observations_without_numbers_are_counted():
    normalizer = ObservationNormalizer((0,))
    normalizer.update(TensorDict({"observation": torch.zeros(2, 3, 0)}, [2, 3]))
    assert (
        normalizer(TensorDict({"observation": torch.zeros(2, 0)}, [2]))["observation"].numel() == 0
    )


class CountingNetwork(nn.Identity):
    """A network with an ``update``, which its TensorDictModule has, too."""

    frames = 0

    def update(self, observations: Any) -> None:
        self.frames += observations.numel()


def test_every_way_to_have_an_update_is_found():
    compiled, networks = ObservationNormalizer(3), [CountingNetwork(), CountingNetwork()]
    assert collect_with(torch.compile(compiled, backend="eager")).numel() == 8
    assert compiled.count == 8
    norm = ObservationNormalizer(3)
    collect_with(torch.compile(TensorDictSequential(norm, IDENTITY), backend="eager"))
    assert norm.count == 8
    module = TensorDictModule(networks[0], ["observation"], ["observation"])
    collect_with(module)
    of_instance: Any = TensorDictSequential(IDENTITY)
    of_instance.update = lambda observations: networks[1].update(observations)
    collect_with(of_instance)
    assert [network.frames for network in networks] == [8, 8]


def test_the_update_of_a_network_is_not_the_transforms():
    """A TensorDictModule has the attributes of its network, such as ``nn.ModuleDict.update``."""

    class Doubles(nn.ModuleDict):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    for transform in (
        TensorDictSequential({"a": IDENTITY}),
        TensorDictModule(Doubles(), ["observation"], ["observation"]),
    ):
        assert collect_with(transform).numel() == 8


@pytest.mark.parametrize("behind", [lambda x: x, TensorDictSequential])
def test_a_normalizer_behind_another_module_raises(behind: Any):
    other = TensorDictModule(nn.Identity(), ["observation"], ["doubled"])
    for first, key in ((IDENTITY, "observation"), (other, "doubled")):
        transform = TensorDictSequential(first, behind(ObservationNormalizer(3, in_key=key)))
        with pytest.raises(ValueError, match=rf"reads \['{key}'\], which a module before it"):
            collect_with(transform)
        transform[1] = behind(ObservationNormalizer(3, in_key=key).freeze())
        assert collect_with(transform).numel() == 8
        assert evaluate(Wander, POLICY, observation_transform=transform, episodes=2)[1].all()
    norms = [ObservationNormalizer(3), ObservationNormalizer(3, in_key="observation", out_key="b")]
    with pytest.raises(ValueError, match="a module before it writes"):
        collect_with(TensorDictSequential(*norms))


@pytest.mark.parametrize("odd", [float("nan"), -float("inf")])
def test_observations_that_are_not_finite_raise_and_do_not_count(odd: float):
    norm, x = ObservationNormalizer(4), torch.randn(2, 8, 4)
    norm.update(TensorDict({"observation": x}, [2, 8]))
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    x[1, 3, 2] = odd
    with pytest.raises(ValueError, match=r"beyond 1e\+150 in 1 of 64 places, first at \[1, 3, 2\]"):
        norm.update(TensorDict({"observation": x}, [2, 8]))
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, 3] = False
    norm.update(TensorDict({"observation": x, ("collector", "mask"): mask}, [2, 8]))
    assert norm.mean.isfinite().all()
    assert norm.count == 16 + 15


@pytest.mark.parametrize("wrap", [lambda policy: policy, TensorActor])
def test_the_environment_of_an_observation_that_is_nan_is_named(wrap: Any):
    norm = ObservationNormalizer(3)
    makers = [Wander, partial(Odd, lambda x: (np.nan * x[0], *x[1:]))]
    options: Any = {"observation_transform": norm, "frames_per_batch": 60}
    collector = GymCollector(makers, wrap(POLICY), **options)
    # TensorActor looks at each step, and the collector at the batch
    where = r"nan or inf in (3 of 6|60 of 180) places .*, first at \[1,"
    with pytest.raises(ValueError, match=where):
        collector.rollout()
    assert collector.closed
    assert norm.count == 0


# -- within networks --------------------------------------------------------------------------

ENVS, STEPS = 2, 50
FRAMES = 2 * ENVS * STEPS


def make_actor(norm: ObservationNormalizer) -> ProbabilisticTensorDictSequential:
    network, head = make_policy(4, 2, d.Categorical).module
    network.in_keys = ["normal"]
    return ProbabilisticTensorDictSequential(norm, network, head)


@pytest.mark.slow
def test_within_the_networks_the_statistics_come_with_the_weights():
    norm = ObservationNormalizer(4, out_key="normal", clip=None)
    actor, seen = make_actor(norm), []
    critic = TensorDictSequential(norm, ValueOperator(nn.Linear(4, 1), ["normal"]))
    loss = ppokit.DualClipPPOLoss(actor, critic)
    gae = ppokit.GAE(gamma=0.9, lmbda=0.9, value_network=critic)
    step = ppokit.TrainingStep(loss, torch.optim.Adam(loss.parameters()))
    update = ppokit.PPOUpdate(step, advantage=gae, epochs=1)
    options: Any = {"num_envs": ENVS, "categorical_action_encoding": True}
    collector = MultiSyncCollector(
        [make_env] * 2,
        actor,
        frames_per_batch=FRAMES,
        total_frames=3 * FRAMES,
        collector_class=partial(GymCollector, **options),
        cat_results="stack",
    )
    try:
        for batch in collector:
            assert_normalized(batch, torch.cat(seen) if seen else None, clip=torch.inf)
            seen.append(batch["observation"].reshape(-1, 4).clone())
            assert abs(update(batch.clone())["first_kl"]) < 1e-6
            norm.update(batch)
            collector.update_policy_weights_(actor)
    finally:
        collector.shutdown()
    assert norm.count == 3 * FRAMES
    collector = GymCollector(make_env, make_actor(copy.deepcopy(norm)), frames_per_batch=20)
    norm.update(TensorDict({"observation": torch.randn(9, 4)}, [9]))
    collector.update_policy_weights_(TensorDict.from_module(actor))
    assert collector.policy.module[0].count == norm.count == 3 * FRAMES + 9


# -- ranks ------------------------------------------------------------------------------


def on_rank(rank: int) -> dict[str, Any]:
    norm = ObservationNormalizer(3, mask_key="valid")
    torch.manual_seed(rank)
    seen = []
    for number in range(3):
        batch = TensorDict({"observation": 4 * rank + torch.randn(2, 5 + rank + number, 3)})
        batch.auto_batch_size_(2)
        batch["valid"] = torch.rand(batch.shape) < 0.8
        norm.update(batch)
        seen.append(batch["observation"][batch["valid"]])
    state = {name: value.clone() for name, value in norm.state_dict().items()}
    errors = []
    batch = TensorDict({"observation": torch.full((2, 3), torch.nan if rank else 0.0)}, [2])
    for bad in (batch, batch.exclude("observation") if rank else batch):
        with pytest.raises((ValueError, KeyError, RuntimeError)) as error:
            norm.update(bad)
        errors.append(str(error.value))
    same = all(torch.equal(value, state[name]) for name, value in norm.state_dict().items())
    norm.freeze()
    if rank:
        norm.update(batch)  # exchanges nothing
    norm.unfreeze()
    norm.load_state_dict({name: x + rank * (name == "module.mean") for name, x in state.items()})
    with pytest.raises(RuntimeError, match="statistics differ before this batch"):
        norm.update(TensorDict({"observation": torch.zeros(2, 3)}, [2]))
    return {"state": state, "seen": torch.cat(seen), "errors": errors, "same": same}


@pytest.mark.slow
def test_ranks_share_the_statistics(tmp_path: Path):
    one, other = run_on_two_ranks(on_rank, tmp_path)
    for name, value in one["state"].items():
        assert torch.equal(value, other["state"][name])
    x = torch.cat([one["seen"], other["seen"]]).double()
    torch.testing.assert_close(one["state"]["module.mean"], x.mean(0))
    torch.testing.assert_close(one["state"]["module.m2"] / len(x), x.var(0, correction=0))
    assert one["state"]["module.count"].unique().item() == len(x)
    assert all(error.startswith("Rank 1 cannot use its batch") for error in one["errors"])
    assert "beyond 1e+150" in other["errors"][0]
    assert "'observation' is not in the batch" in other["errors"][1]
    assert one["same"]
    assert other["same"]
