"""GAE: torchrl's results where they are right, in one pass of the value network."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import gymnasium as gym
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import GymEnv, InitTracker, SerialEnv, StepCounter, TransformedEnv
from torchrl.modules import (
    MLP,
    ActorValueOperator,
    GRUModule,
    ProbabilisticActor,
    ValueOperator,
    set_recurrent_mode,
)
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE as TorchRLGAE  # noqa: N811

from ppokit import GAE, GymCollector, ObservationNormalizer
from tests import reference
from tests.blocks import make_actor, make_minibatch
from tests.collectors.test_collector import make_policy


def make_batch(
    b: int = 3, t: int = 7, *, dtype: torch.dtype = torch.float32, p: float = 0.3, seed: int = 0
) -> TensorDict:
    """A batch with terminated and truncated ends; next observations are consistent."""
    generator = torch.Generator().manual_seed(seed)
    observation = torch.randn(b, t + 1, 4, generator=generator, dtype=dtype)
    terminated = torch.rand(b, t, 1, generator=generator) < p / 2
    done = terminated | (torch.rand(b, t, 1, generator=generator) < p / 2)
    own = torch.randn(b, t, 4, generator=generator, dtype=dtype)
    following = torch.where(done, own, observation[:, 1:])
    reward = torch.randn(b, t, 1, generator=generator, dtype=dtype)
    return TensorDict(
        {
            "observation": observation[:, :-1],
            "next": {
                "observation": following,
                "reward": reward,
                "done": done,
                "terminated": terminated,
            },
        },
        [b, t],
        names=[None, "time"],
    )


class CountingCritic(nn.Module):
    """A linear critic that counts the rows it sees."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 1, dtype=dtype)
        self.rows = 0

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.rows += observation[..., 0].numel()
        return self.linear(observation)


def make_critic(dtype: torch.dtype = torch.float32) -> ValueOperator:
    return ValueOperator(CountingCritic(dtype), in_keys=["observation"])


def keys(batch: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
    return batch["advantage"], batch["value_target"]


def ours(batch: TensorDict, critic: ValueOperator | None, **kwargs) -> TensorDict:
    arguments = {"gamma": 0.97, "lmbda": 0.9} | kwargs
    return GAE(value_network=critic, **arguments)(batch.clone())


def theirs(batch: TensorDict, critic: ValueOperator | None, **kwargs) -> TensorDict:
    arguments = {"gamma": 0.97, "lmbda": 0.9} | kwargs
    return TorchRLGAE(value_network=critic, **arguments)(batch.clone())


def assert_same(a: TensorDict, b: TensorDict, atol: float = 1e-5) -> None:
    for x, y in zip(keys(a), keys(b), strict=True):
        torch.testing.assert_close(x, y, atol=atol, rtol=1e-5)


# -- results ------------------------------------------------------------------


@given(
    b=st.integers(1, 4),
    t=st.integers(1, 12),
    p=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 10_000),
    shifted=st.sampled_from([None, False]),
)
def test_equals_torchrl_loop(b: int, t: int, p: float, seed: int, shifted: bool | None):
    batch, critic = make_batch(b, t, p=p, seed=seed), make_critic()
    result = ours(batch, critic, shifted=shifted)
    expected = theirs(batch, critic, vectorized=False)
    assert_same(result, expected)
    torch.testing.assert_close(result["state_value"], expected["state_value"])


@given(t=st.integers(1, 60), p=st.sampled_from([0.0, 0.2]), seed=st.integers(0, 1000))
def test_float64_is_right_to_1e_12(t: int, p: float, seed: int):
    dtype = torch.float64
    batch, critic = make_batch(2, t, dtype=dtype, p=p, seed=seed), make_critic(dtype)
    result = ours(batch, critic, gamma=0.99, lmbda=0.95)
    network = critic.module
    with torch.no_grad():
        value = network(batch["observation"])
        next_value = network(batch["next", "observation"])
    expected = reference.gae(
        batch["next", "reward"],
        value,
        next_value,
        batch["next", "done"],
        batch["next", "terminated"],
        gamma=0.99,
        lmbda=0.95,
    )
    for x, y in zip(keys(result), expected, strict=True):
        torch.testing.assert_close(x, torch.as_tensor(y), atol=1e-12, rtol=1e-12)


def test_torchrls_float64_is_not():
    """Why the discounts are kept in float64."""
    dtype = torch.float64
    batch, critic = make_batch(2, 50, dtype=dtype, p=0.0), make_critic(dtype)
    exact = ours(batch, critic, gamma=0.99, lmbda=0.95)["advantage"]
    rounded = theirs(batch, critic, gamma=0.99, lmbda=0.95)["advantage"]
    assert (exact - rounded).abs().max() > 1e-9


def test_terminated_wins_over_truncated():
    batch, critic = make_batch(1, 3, p=0.0), make_critic()
    batch["next", "done"][0, 1] = True
    batch["next", "terminated"][0, 1] = True
    batch["next", "truncated"] = batch["next", "done"].clone()
    result = ours(batch, critic)
    expected = batch["next", "reward"][0, 1] - result["state_value"][0, 1]
    torch.testing.assert_close(result["advantage"][0, 1], expected)
    assert result["next", "state_value"][0, 1] == 0


def ends_in_nan(end: str) -> TensorDict:
    batch = make_batch(2, 6, p=0.0)
    batch["next", "done"][1, 3] = True
    batch["next", "terminated"][1, 3] = end == "terminated"
    step = 5 if end == "last" else 3
    batch["next", "observation"][1, step, 2] = torch.nan
    return batch


@pytest.mark.parametrize(("end", "step"), [("truncated", 3), ("last", 5)])
def test_a_final_observation_that_is_nan_raises(end: str, step: int):
    batch, critic = ends_in_nan(end), make_critic()
    keys = {*batch.keys(True, True)}
    message = rf"\('next', 'observation'\) is NaN or infinite after 1 .* first at \[1, {step}\]"
    with pytest.raises(ValueError, match=message):
        GAE(gamma=0.9, lmbda=0.9, value_network=critic)(batch)
    assert {*batch.keys(True, True)} == keys
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[1, step:] = False  # it is not valid, and the last valid step has another one
    batch["collector", "mask"] = mask
    found = GAE(gamma=0.9, lmbda=0.9, value_network=critic)(batch)
    assert found["advantage"].isfinite().all()


def test_two_passes_over_a_final_observation_that_is_nan_raise():
    batch, critic = ends_in_nan("truncated"), make_critic()
    with pytest.raises(ValueError, match="NaN or infinite after 1 steps"):
        GAE(gamma=0.9, lmbda=0.9, value_network=critic, shifted=False)(batch)


def test_a_value_network_that_reads_a_nested_tensordict():
    class Nested(nn.Module):
        def forward(self, seen: Any) -> torch.Tensor:
            return seen["a"].sum(-1, keepdim=True)

    batch = make_batch(2, 4)
    batch["seen"] = {"a": batch["observation"]}
    batch["next", "seen"] = {"a": batch["next", "observation"]}
    nested = TensorDictModule(Nested(), ["seen"], ["state_value"])
    flat = TensorDictModule(lambda x: x.sum(-1, keepdim=True), ["observation"], ["state_value"])
    found, expected = (ours(batch.clone(), x)["advantage"] for x in (nested, flat))
    assert torch.equal(found, expected)


def test_final_observations_of_a_real_environment_that_are_nan_raise():
    class EndsInNaN(gym.Wrapper):
        def step(self, action: Any) -> Any:
            observation, reward, terminated, truncated, info = super().step(action)
            return observation * (math.nan if truncated else 1), reward, terminated, truncated, info

    def make() -> gym.Env:
        return EndsInNaN(gym.make("CartPole-v1", max_episode_steps=7))

    actor = make_policy(4, 2, torch.distributions.Categorical)
    for transform in (None, ObservationNormalizer(4)):
        collector = GymCollector(
            make, actor, frames_per_batch=30, observation_transform=transform, num_envs=2
        )
        collector.set_seed(0)
        with pytest.raises(ValueError, match="true final observation from the environment"):
            GAE(gamma=0.9, lmbda=0.9, value_network=make_critic())(collector.rollout())


def test_a_terminated_steps_next_observation_is_never_read():
    batch, critic = make_batch(2, 6, p=0.5), make_critic()
    terminated = batch["next", "terminated"]
    batch["next", "observation"][terminated.squeeze(-1)] = torch.nan
    assert ours(batch, critic)["advantage"].isfinite().all()


@pytest.mark.parametrize("truncations", [0, 1, 5])
def test_one_pass_and_no_more(truncations: int):
    batch, critic = make_batch(1, 10, p=0.0), make_critic()
    batch["next", "done"][0, :truncations] = True
    ours(batch, critic)
    assert critic.module.rows == 10 + 1 + truncations


def test_nothing_is_evaluated_where_all_is_terminated():
    batch, critic = make_batch(2, 5, p=0.0), make_critic()
    batch["next", "done"][:] = True
    batch["next", "terminated"][:] = True
    ours(batch, critic)
    assert critic.module.rows == 10


def test_values_from_the_batch():
    batch, critic = make_batch(), make_critic()
    whole = ours(batch, critic, shifted=False)
    assert_same(ours(whole, None), theirs(whole, None))


def test_half_precision_keeps_its_dtype():
    batch, critic = make_batch(2, 30), make_critic()
    values = ours(batch, critic, shifted=False)
    half = values.apply(lambda x: x.bfloat16() if x.is_floating_point() else x)
    result = ours(half, None)
    assert result["advantage"].dtype is torch.bfloat16
    torch.testing.assert_close(result.float()["advantage"], values["advantage"], atol=0.1, rtol=0.1)


def test_casting_the_module_keeps_the_discounts():
    module = GAE(gamma=0.99, lmbda=0.95, value_network=None).half()
    assert module.gamma.item() == 0.99
    assert module.lmbda.item() == 0.95


@pytest.mark.parametrize("masked", [False, True])
def test_average_gae_of_one_frame_leaves_it(masked: bool):
    batch, critic = make_batch(1, 3 if masked else 1, p=0.0), make_critic()
    if masked:
        batch["collector", "mask"] = torch.tensor([[True, False, False]])
    averaged = ours(batch, critic, average_gae=True)["advantage"]
    assert torch.equal(averaged, ours(batch, critic)["advantage"])
    two = make_batch(2, 3)
    if masked:
        two["collector", "mask"] = torch.tensor([[True, True, False], [True, False, False]])
    gae = GAE(gamma=0.97, lmbda=0.9, value_network=critic, average_gae=True)
    compiled = torch.compile(gae, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(two.clone())["advantage"], gae(two.clone())["advantage"])
    assert averaged[0, 0] != 0


def test_average_gae_equals_torchrl_and_skips_padding():
    batch, critic = make_batch(), make_critic()
    assert_same(ours(batch, critic, average_gae=True), theirs(batch, critic, average_gae=True))
    padded, mask = pad(batch, 4)
    result = ours(padded, critic, average_gae=True)["advantage"]
    expected = ours(batch, critic, average_gae=True)["advantage"]
    torch.testing.assert_close(result[mask], expected.flatten(0, 1))
    assert (result[~mask] == 0).all()


def test_groups_are_standardised_apart_and_skip_padding():
    batch, critic = make_batch(), make_critic()
    batch["task"] = torch.tensor([0, 1, 0]).unsqueeze(-1).expand(3, 7).clone()
    expected = theirs(batch, critic, average_gae=True, group_key="task")
    assert_same(ours(batch, critic, average_gae=True, group_key="task"), expected)
    padded, mask = pad(batch, 2)
    result = ours(padded, critic, average_gae=True, group_key="task")["advantage"][mask]
    torch.testing.assert_close(result, expected["advantage"].flatten(0, 1))


def test_agents_that_end_alone():
    """One agent terminates, another goes on: only the first has no value after the step."""
    batch = make_batch(2, 5, p=0.0)
    shape = (2, 5, 3, 1)
    value = nn.Linear(4, 3)
    critic = TensorDictModule(
        lambda x: value(x).unsqueeze(-1), in_keys=["observation"], out_keys=["state_value"]
    )
    done = torch.zeros(shape, dtype=torch.bool)
    done[0, 1, 0] = done[1, 2, 1] = True
    terminated = done.clone()
    terminated[1, 2, 1] = False
    batch["next", "reward"] = torch.randn(shape)
    batch["next", "done"], batch["next", "terminated"] = done, terminated
    with torch.no_grad():
        values = [value(batch[k]).unsqueeze(-1) for k in ("observation", ("next", "observation"))]
    expected = reference.gae(
        batch["next", "reward"], *values, done, terminated, gamma=0.97, lmbda=0.9, dim=1
    )
    result = GAE(gamma=0.97, lmbda=0.9, value_network=critic)(batch)
    for x, y in zip(keys(result), expected, strict=True):
        torch.testing.assert_close(x, torch.as_tensor(y).float(), atol=1e-5, rtol=1e-5)


def pad(batch: TensorDict, by: int) -> tuple[TensorDict, torch.Tensor]:
    b, t = batch.batch_size
    padded = batch.new_zeros(b, t + by)
    assert padded is not None
    padded.names = batch.names
    padded[:, :t] = batch
    for key in (("next", "reward"), "observation", ("next", "observation")):
        padded[key][:, t:] = torch.nan
    mask = torch.zeros(b, t + by, dtype=torch.bool)
    mask[:, :t] = True
    padded["collector", "mask"] = mask
    return padded, mask


@given(by=st.integers(1, 4), seed=st.integers(0, 1000))
def test_padding_changes_nothing(by: int, seed: int):
    batch, critic = make_batch(seed=seed), make_critic()
    padded, mask = pad(batch, by)
    result = ours(padded, critic)
    for x, y in zip(keys(result), keys(ours(batch, critic)), strict=True):
        torch.testing.assert_close(x[mask], y.flatten(0, 1))
        assert (x[~mask] == 0).all()


if hasattr(TorchRLGAE.default_keys, "valid"):  # a key of torchrl 0.15

    def with_valid(batch: TensorDict, lengths: list[int], trailing: bool) -> TensorDict:
        """The batch with a second mask, and rewards of a million where it is False."""
        batch = batch.clone()
        valid = torch.arange(batch.shape[1]) < torch.tensor(lengths).unsqueeze(-1)
        batch["next", "reward"][~valid] = 1e6
        batch["valid"] = valid.unsqueeze(-1) if trailing else valid
        return batch

    def with_keys(gae: TorchRLGAE, batch: TensorDict) -> TensorDict:
        gae.set_keys(valid="valid")
        return gae(batch.clone())

    @pytest.mark.parametrize("trailing", [False, True])
    @pytest.mark.parametrize("average", [False, True])
    @pytest.mark.parametrize("shifted", [None, False, True])
    def test_the_key_valid_is_torchrls(shifted: bool | None, average: bool, trailing: bool):
        batch, critic = with_valid(make_batch(), [3, 7, 1], trailing), make_critic()
        arguments: Any = {"gamma": 0.97, "lmbda": 0.9, "average_gae": average}
        found = with_keys(GAE(value_network=critic, shifted=shifted, **arguments), batch)
        expected = TorchRLGAE(value_network=critic, shifted=bool(shifted), **arguments)
        assert_same(found, with_keys(expected, batch))
        assert found["advantage"].abs().max() < 100
        assert not found["advantage"][~batch["valid"].view(3, 7)].any()

    def test_a_frame_is_valid_by_both_masks():
        batch, critic = with_valid(make_batch(), [3, 7, 1], False), make_critic()
        mask = torch.ones(3, 7, dtype=torch.bool)
        mask[1, 5:] = False
        batch["collector", "mask"] = mask
        gae = GAE(gamma=0.97, lmbda=0.9, value_network=critic, average_gae=True)
        found = with_keys(gae, batch)
        batch["collector", "mask"] = mask & batch["valid"]
        assert_same(found, ours(batch, critic, average_gae=True))

    def test_a_key_valid_that_is_no_mask():
        batch, critic = with_valid(make_batch(), [3, 7, 1], False), make_critic()
        gae = GAE(gamma=0.97, lmbda=0.9, value_network=critic)
        with pytest.raises(KeyError, match=r"'valid' is not in the batch.*set_keys\(valid="):
            with_keys(gae, batch.exclude("valid"))
        with pytest.raises(TypeError, match=r"a mask must be torch\.bool"):
            with_keys(gae, batch.set("valid", batch["valid"].float()))
        batch["valid"] = torch.ones(3, 7, 2, 1, dtype=torch.bool)
        with pytest.raises(ValueError, match=r"'valid' has shape \[3, 7, 2, 1\]"):
            with_keys(gae, batch)


def test_multi_step_uses_two_passes():
    batch, critic = make_batch(p=0.0), make_critic()
    batch["steps_to_next_obs"] = torch.full((3, 7, 1), 2)
    assert_same(ours(batch, critic), theirs(batch, critic))
    assert critic.module.rows >= 2 * 21


def test_auto_reset_bootstraps_from_the_last_own_observation():
    batch, critic = make_batch(1, 3, p=0.0), make_critic()
    batch["next", "done"][0, 1] = True
    result = ours(batch, critic, auto_reset_env=True)
    value = result["state_value"][0, 1]
    expected = batch["next", "reward"][0, 1] + 0.97 * value - value
    torch.testing.assert_close(result["advantage"][0, 1], expected)


def test_nested_and_renamed_keys():
    batch, critic = make_batch(), make_critic()
    expected = ours(batch, critic)
    renamed = batch.clone()
    renamed["next", "agent", "r"] = renamed["next"].pop("reward")
    renamed["next", "agent", "d"] = renamed["next"].pop("done")
    module = GAE(gamma=0.97, lmbda=0.9, value_network=critic)
    module.set_keys(reward=("agent", "r"), done=("agent", "d"), advantage=("agent", "adv"))
    result = module(renamed)
    torch.testing.assert_close(result["agent", "adv"], expected["advantage"])


def test_time_may_be_named_anywhere():
    batch, critic = make_batch(), make_critic()
    expected = ours(batch, critic)
    swapped = batch.transpose(0, 1).contiguous()
    assert swapped.names == ["time", None]
    result = ours(swapped, critic)
    torch.testing.assert_close(result["advantage"].transpose(0, 1), expected["advantage"])
    result = GAE(gamma=0.97, lmbda=0.9, value_network=critic, time_dim=0)(swapped.clone())
    torch.testing.assert_close(result["advantage"].transpose(0, 1), expected["advantage"])


def test_one_dimension_named_time_is_one_row():
    batch, critic = make_batch(1, 9), make_critic()
    assert_same(ours(batch[0], critic), ours(batch, critic)[0])


@given(cut=st.integers(1, 6), seed=st.integers(0, 1000))
def test_rows_do_not_see_each_other(cut: int, seed: int):
    batch, critic = make_batch(seed=seed), make_critic()
    order = torch.tensor([2, 0, 1])
    assert_same(ours(batch[order], critic), ours(batch, critic)[order], atol=1e-6)


def test_differentiable_passes_gradients_to_the_reward_not_to_the_critic():
    batch, critic = make_batch(), make_critic()
    reward = batch["next", "reward"].requires_grad_()
    module = GAE(gamma=0.97, lmbda=0.9, value_network=critic, differentiable=True)
    module(batch)["advantage"].sum().backward()
    assert reward.grad is not None
    assert reward.grad.abs().min() > 0
    assert all(p.grad is None for p in critic.parameters())
    assert not ours(make_batch(), critic)["advantage"].requires_grad


def test_gradcheck():
    batch, critic = make_batch(2, 4, dtype=torch.float64), make_critic(torch.float64)
    module = GAE(gamma=0.97, lmbda=0.9, value_network=critic, differentiable=True)

    def advantage(reward: torch.Tensor) -> torch.Tensor:
        copy_ = batch.clone()
        copy_["next", "reward"] = reward
        return module(copy_)["advantage"]

    assert torch.autograd.gradcheck(advantage, batch["next", "reward"].requires_grad_())


# -- where it stands ------------------------------------------------------------


def test_value_estimate_is_the_target():
    batch, critic = make_batch(), make_critic()
    module = GAE(gamma=0.97, lmbda=0.9, value_network=critic)
    target = module.value_estimate(batch.clone())
    torch.testing.assert_close(target, ours(batch, critic)["value_target"])


def test_in_a_loss():
    """A functional loss hands its value estimator parameters and target parameters."""
    critic, actor = make_critic(), make_actor()
    batch = make_minibatch(actor, 3, 7).exclude("advantage", "value_target", "state_value")
    batch.update(make_batch())
    losses = []
    for estimator in (GAE, TorchRLGAE):
        loss = ClipPPOLoss(actor, critic)
        loss.make_value_estimator(estimator(gamma=0.97, lmbda=0.9, value_network=critic))
        losses.append(loss(batch.clone()))
    for name in ("loss_critic", "loss_objective"):
        torch.testing.assert_close(losses[0][name], losses[1][name])


def test_in_a_sequential_and_by_keyword():
    batch, critic = make_batch(), make_critic()
    module = GAE(gamma=0.97, lmbda=0.9, value_network=critic)
    result = TensorDictSequential(module)(batch.clone())
    assert_same(result, ours(batch, critic))
    named = {"_".join(("next", key)): batch["next", key] for key in batch["next"].keys()}
    advantage, _ = module(observation=batch["observation"], **named)
    torch.testing.assert_close(advantage, result["advantage"])


def test_in_a_replay_buffer():
    batch, critic = make_batch(), make_critic()
    buffer = ReplayBuffer(storage=LazyTensorStorage(100, ndim=2), batch_size=4)
    buffer.append_transform(GAE(gamma=0.97, lmbda=0.9, value_network=critic), invert=True)
    buffer.extend(batch)
    torch.testing.assert_close(buffer[:]["advantage"], ours(batch, critic)["advantage"])


def test_as_postproc_of_a_collector():
    torch.manual_seed(0)
    critic = ValueOperator(MLP(in_features=4, out_features=1, num_cells=[8]), ["observation"])
    env = SerialEnv(3, lambda: TransformedEnv(GymEnv("CartPole-v1"), StepCounter(max_steps=11)))
    module = GAE(gamma=0.97, lmbda=0.9, value_network=critic)
    collector = Collector(env, None, frames_per_batch=90, total_frames=180, postproc=module)
    ends = 0
    for batch in collector:
        truncated = batch["next", "done"] & ~batch["next", "terminated"]
        ends += int(truncated.sum())
        assert_same(batch, theirs(batch, critic))
    collector.shutdown()
    assert ends >= 5


class CountingGRU(GRUModule):
    """A GRU that counts the frames it sees."""

    frames = 0

    def forward(self, tensordict: TensorDict):  # pyright: ignore
        self.frames += tensordict.numel()
        return super().forward(tensordict)


def make_recurrent_batch(rows: int = 2) -> tuple[TensorDict, TensorDictSequential, CountingGRU]:
    """CartPole under random actions, cut at 13 steps, with the states of a recurrent critic."""
    torch.manual_seed(0)
    gru = CountingGRU(input_size=4, hidden_size=5, in_key="observation", out_key="features")
    head = TensorDictModule(nn.Linear(5, 1), in_keys=["features"], out_keys=["state_value"])

    def make_env() -> TransformedEnv:
        env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter(max_steps=13))
        env.append_transform(InitTracker())
        env.append_transform(gru.make_tensordict_primer())
        return env

    act = TensorDictModule(
        lambda x: torch.eye(2)[torch.randint(2, x.shape[:-1])], ["features"], ["action"]
    )
    env = SerialEnv(rows, make_env)
    env.set_seed(0)
    with torch.no_grad():
        batch = env.rollout(40, TensorDictSequential(gru, act), break_when_any_done=False)
    truncated = batch["next", "done"] & ~batch["next", "terminated"]
    assert truncated[:, :-1].any()
    assert batch["next", "terminated"].any()
    gru.frames = 0
    return batch, TensorDictSequential(gru, head), gru


def test_recurrent_critic_over_sequences_equals_torchrls_two_passes():
    batch, critic, gru = make_recurrent_batch()
    with set_recurrent_mode(True):
        result = ours(batch, critic)
        seen = gru.frames
        expected = theirs(batch, critic, deactivate_vmap=True)
        assert_same(result, expected)
        assert_same(ours(batch, critic, shifted=False), expected)
    terminated = batch["next", "terminated"]
    alone = batch["next", "done"] & ~terminated
    alone[:, -1] = ~terminated[:, -1]
    assert seen == batch.numel() + alone.sum()
    torch.testing.assert_close(
        result["next", "state_value"][~terminated], expected["next", "state_value"][~terminated]
    )


def test_recurrent_critic_step_by_step_goes_on_from_the_stored_states():
    batch, critic, _ = make_recurrent_batch()
    result = ours(batch, critic)
    # torchrl's two passes differ here: they zero the state after the first step of an episode.
    following = batch["next"].select("observation", "recurrent_state", "is_init")
    following["is_init"] = torch.zeros_like(following["is_init"])
    with torch.no_grad():
        batch["state_value"] = critic(batch.clone())["state_value"]
        batch["next", "state_value"] = critic(following)["state_value"]
    assert_same(result, theirs(batch, None))


def test_a_final_observation_of_a_recurrent_critic_that_is_nan_raises():
    batch, critic, _ = make_recurrent_batch()
    batch["next", "observation"][1, -1, 0] = torch.nan
    with pytest.raises(ValueError, match=r"NaN or infinite after 1 steps .* first at \[1, 39\]"):
        ours(batch, critic)


def test_for_recurrent_is_the_one_pass():
    batch, critic, gru = make_recurrent_batch()
    found = GAE.for_recurrent(gamma=0.97, lmbda=0.9, value_network=critic)
    assert isinstance(found, GAE)
    assert (found.shifted, found.average_gae, found.deactivate_vmap) == (None, True, True)
    result = found(batch.clone())
    assert gru.frames < 2 * batch.numel()
    assert_same(result, ours(batch, critic, average_gae=True))
    options: Any = {"gamma": 0.97, "lmbda": 0.9, "shifted": False, "average_gae": False}
    passed = GAE.for_recurrent(value_network=critic, **options)
    assert (passed.shifted, passed.average_gae) == (False, False)


@pytest.mark.parametrize("critic", [make_critic(), None])
def test_for_recurrent_refuses_other_networks(critic: Any):
    with pytest.raises(ValueError, match="reads 'is_init' and a state"):
        GAE.for_recurrent(gamma=0.97, lmbda=0.9, value_network=critic)


if hasattr(TorchRLGAE, "for_recurrent"):  # in torchrl 0.15

    def test_for_recurrent_is_torchrls():
        batch, critic, _ = make_recurrent_batch()
        batch["next", "is_init"] = torch.zeros_like(batch["is_init"])
        batch["valid"] = torch.arange(40).expand(2, 40) < 30
        batch["next", "reward"][:, 30:] = 1e6
        arguments: Any = {"gamma": 0.97, "lmbda": 0.9, "value_network": critic, "valid": "valid"}
        with set_recurrent_mode(True):
            found, expected = (x.for_recurrent(**arguments) for x in (GAE, TorchRLGAE))
            assert_same(found(batch.clone()), expected(batch.clone()))


@pytest.mark.parametrize("key", ["recurrent_state", ("next", "recurrent_state")])
def test_recurrent_critic_without_its_states_raises(key):
    batch, critic, gru = make_recurrent_batch()
    assert gru.in_keys[1] == "recurrent_state"
    del batch[key]
    with (
        set_recurrent_mode(True),
        pytest.raises(KeyError, match=r"recurrent_state.*make_tensordict_primer"),
    ):
        ours(batch, critic)


def test_recurrent_critic_refuses_time_in_front():
    batch, critic, _ = make_recurrent_batch()
    with pytest.raises(ValueError, match=r"time is dimension 0 of \[40, 2\]: transpose"):
        ours(batch.transpose(0, 1), critic)


# -- shifted=True: torchrl's budget ---------------------------------------------


@given(b=st.integers(1, 4), t=st.integers(1, 12), budget=st.integers(1, 3), seed=st.integers(0, 99))
def test_shifted_true_drops_what_torchrl_drops(b: int, t: int, budget: int, seed: int):
    batch, critic = make_batch(b, t, seed=seed), make_critic()
    found = ours(batch, critic, shifted=True, shifted_budget=budget)
    kept = found["shifted_valid"]
    assert torch.equal(
        kept, theirs(batch, critic, shifted=True, shifted_budget=budget)["shifted_valid"]
    )
    # What is left is GAE of the frames that are left.
    for row in range(b):
        steps = int(kept[row].sum())
        if steps:
            alone = ours(batch[row : row + 1, :steps], critic)
            for x, y in zip(keys(found), keys(alone), strict=True):
                torch.testing.assert_close(x[row, :steps], y[0], atol=1e-5, rtol=1e-5)
        assert not found["advantage"][row, steps:].any()


def test_shifted_true_with_room_for_all_drops_nothing():
    batch, critic = make_batch(), make_critic()
    found = ours(batch, critic, shifted=True, shifted_budget=7)
    assert found["shifted_valid"].all()
    assert_same(found, ours(batch, critic))


# -- other networks -------------------------------------------------------------


@pytest.mark.parametrize("chunks", [{"value_chunk_size": 2}, {"num_chunks": 3}])
@pytest.mark.parametrize("dim", [0, 1])
def test_chunks_change_nothing(chunks: dict[str, int], dim: int):
    batch, critic = make_batch(5, 6), make_critic()
    found = ours(batch, critic, value_chunk_dim=dim, **chunks)
    assert_same(found, ours(batch, critic))


def test_a_critic_that_works_in_place_leaves_the_batch_alone():
    class Halve(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(0.5)

    batch, linear = make_batch(), nn.Linear(4, 1)
    in_place = ValueOperator(nn.Sequential(Halve(), linear), in_keys=["observation"])
    found = ours(batch, in_place)
    assert_same(found, theirs(batch, in_place))
    for key in ("observation", ("next", "observation")):
        assert torch.equal(found[key], make_batch()[key])


def test_critic_of_several_inputs_some_of_which_no_step_changes():
    batch = make_batch()
    batch["task"] = torch.randn(3, 1, 2).expand(3, 7, 2).contiguous()
    network = MLP(in_features=6, out_features=1, num_cells=[8])
    critic = ValueOperator(network, in_keys=["observation", "task"])
    repeated = batch.clone()
    repeated["next", "task"] = batch["task"]
    assert_same(ours(batch, critic), theirs(repeated, critic))


def test_critic_that_shares_its_body_with_the_actor():
    batch = make_batch()
    common = TensorDictModule(nn.Linear(4, 8), ["observation"], ["hidden"])
    policy = ProbabilisticActor(
        TensorDictModule(nn.Linear(8, 2), ["hidden"], ["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
    )
    network = ActorValueOperator(common, policy, ValueOperator(nn.Linear(8, 1), ["hidden"]))
    critic = network.get_value_operator()
    assert_same(ours(batch, critic), theirs(batch, critic))
    with_features = ours(network(batch.clone()), critic)
    assert_same(with_features, theirs(batch, critic))


@pytest.mark.filterwarnings(
    "ignore:<class 'torch.autograd.function.Function'> should not be instantiated"
    ":DeprecationWarning"
)
@pytest.mark.parametrize(("network", "dynamic"), [(True, None), (False, None), (True, True)])
def test_compiles_without_a_graph_break(network: bool, dynamic: bool | None):
    torch._dynamo.reset()
    batch, critic = make_batch(2, 33), make_critic() if network else None
    if not network:
        batch = ours(batch, make_critic()).exclude("advantage", "value_target")
    module = GAE(gamma=0.97, lmbda=0.9, value_network=critic)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    found, expected = compiled(batch.clone()), module(batch.clone())
    assert_same(found, expected)
    torch.testing.assert_close(found["next"], expected["next"])


def test_state_copy_and_pickle():
    batch, critic = make_batch(), make_critic()
    module = GAE(gamma=0.97, lmbda=0.9, value_network=critic)
    expected = module(batch.clone())["advantage"]
    fresh = GAE(gamma=0.1, lmbda=0.1, value_network=critic)
    fresh.load_state_dict(module.state_dict())
    for other in (fresh, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(batch.clone())["advantage"], expected)


def test_accepts_a_torchrl_state():
    module = GAE(gamma=0.5, lmbda=0.5, value_network=None)
    module.load_state_dict(TorchRLGAE(gamma=0.75, lmbda=0.25, value_network=None).state_dict())
    assert (module.gamma.item(), module.lmbda.item()) == (0.75, 0.25)


# -- bad input --------------------------------------------------------------------


def call(batch: TensorDict, **kwargs) -> TensorDict:
    return ours(batch, make_critic(), **kwargs)


@pytest.mark.parametrize(("name", "value"), [("gamma", 1.1), ("gamma", -0.1), ("lmbda", 2.0)])
def test_discounts_outside_0_1_raise(name: str, value: float):
    with pytest.raises(ValueError, match=rf"{name} must lie in \[0, 1\], got {value}"):
        call(make_batch(), **{name: value})


@pytest.mark.parametrize("key", ["reward", "done"])
def test_missing_key_raises(key: str):
    batch = make_batch()
    del batch["next", key]
    with pytest.raises(KeyError, match=rf"\('next', '{key}'\).*is not in the batch"):
        call(batch)


def test_missing_values_raise():
    with pytest.raises(KeyError, match=r"state_value.*no value_network"):
        ours(make_batch(), None)


def test_flat_reward_raises():
    batch = make_batch()
    batch["next", "reward"] = batch["next", "reward"].squeeze(-1)
    with pytest.raises(ValueError, match=r"\[3, 7\].*\[3, 7, 1\].*unsqueeze"):
        call(batch)


def test_integer_reward_raises():
    batch = make_batch()
    batch["next", "reward"] = batch["next", "reward"].long()
    with pytest.raises(TypeError, match=r"reward.*int64.*float"):
        call(batch)


@pytest.mark.parametrize("key", ["done", "terminated"])
def test_non_bool_flag_raises(key: str):
    batch = make_batch()
    batch["next", key] = batch["next", key].float()
    with pytest.raises(TypeError, match=rf"{key}.*float32.*must be torch.bool"):
        call(batch)


def test_empty_batch_raises():
    with pytest.raises(ValueError, match=r"empty batch of shape \[0, 7\]"):
        call(make_batch()[:0])


def test_lost_time_order_raises():
    batch = make_batch()
    with pytest.raises(ValueError, match="needs time order"):
        call(batch.reshape(-1))
    batch["collector", "traj_ids"] = torch.arange(21).reshape(3, 7)
    with pytest.raises(ValueError, match="has lost its time order"):
        call(batch)


@pytest.mark.parametrize("dim", [2, 5, -3])
def test_wrong_time_dimension_raises(dim: int):
    with pytest.raises(ValueError, match=rf"time_dim={dim} is not a dimension.*\[3, 7\]"):
        call(make_batch(), time_dim=dim)
    module = GAE(gamma=0.9, lmbda=0.9, value_network=make_critic())
    with pytest.raises(ValueError, match=rf"time_dim={dim} is not a dimension.*\[3, 7\]"):
        module(make_batch(), time_dim=dim)


def test_unknown_shifted_raises():
    with pytest.raises(ValueError, match="shifted must be a boolean or None, got 'yes'"):
        call(make_batch(), shifted="yes")


@pytest.mark.parametrize("group", [None, "agents"])
def test_truncated_without_done_raises(group: str | None):
    batch = make_batch()
    batch["next", "truncated"] = batch["next", "done"] & ~batch["next", "terminated"]
    call(batch.clone())
    batch["next", "truncated"][1, 3] = True
    batch["next", "done"][1, 3] = False
    batch["next", "terminated"][1, 3] = False
    arguments = {}
    if group:
        signals = ("reward", "done", "terminated")
        for key in (*signals, "truncated"):
            batch.rename_key_(("next", key), ("next", group, key))
        arguments = {key: (group, key) for key in signals}
    module = GAE(gamma=0.9, lmbda=0.9, value_network=make_critic())
    module.set_keys(**arguments)
    with pytest.raises(ValueError, match=r"truncated'.*1 place.*\[1, 3, 0\].*run on into the next"):
        module(batch)


def test_missing_next_observations_raise():
    batch = make_batch()
    del batch["next", "observation"]
    with pytest.raises(KeyError, match=r"compact_obs=False"):
        call(batch)


def test_bad_mask_raises():
    batch = make_batch()
    batch["collector", "mask"] = torch.ones(3, 7)
    with pytest.raises(TypeError, match=r"mask must be torch\.bool"):
        call(batch)


def test_nothing_is_written_when_the_batch_is_refused():
    batch = make_batch()
    batch["next", "done"] = batch["next", "done"].float()
    before = set(batch.keys(True, True))
    with pytest.raises(TypeError):
        GAE(gamma=0.9, lmbda=0.9, value_network=make_critic())(batch)
    assert set(batch.keys(True, True)) == before


@pytest.mark.parametrize("masked", [False, True])
def test_truncated_of_the_last_step_of_a_row_does_not_count(masked: bool):
    batch = make_batch()
    batch["next", "done"][:, -3:] = batch["next", "terminated"][:, -3:] = False
    batch["next", "truncated"] = batch["next", "done"] & ~batch["next", "terminated"]
    if masked:
        batch["collector", "mask"] = torch.ones(3, 7, dtype=torch.bool)
        batch["collector", "mask"][:, -2:] = False
    expected = call(batch.clone())
    batch["next", "truncated"][:, -3 if masked else -1] = True
    assert torch.equal(call(batch)["advantage"], expected["advantage"])


def test_truncated_at_every_frame_says_nothing():
    """torchrl's ``ReplayBufferTrainer.extend`` writes it, before the second epoch."""
    batch = make_batch()
    batch["next", "truncated"] = batch["next", "done"] & ~batch["next", "terminated"]
    critic = make_critic()
    options: dict[str, Any] = {"gamma": 0.9, "lmbda": 0.9, "value_network": critic}
    expected = GAE(**options)(batch.clone())
    batch["next", "truncated"][..., -1] = True
    assert_same(TorchRLGAE(**options)(batch.clone()), expected)
    assert_same(GAE(**options)(batch), expected)
