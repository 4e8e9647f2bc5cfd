"""GAE equals torchrl's GAE, in one pass of the value network."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE as TorchRLGAE  # noqa: N811

from ppokit import GAE
from tests.advantages.cases import (
    DOUBLES,
    assert_same,
    keys,
    make_batch,
    make_critic,
    ours,
    pad,
    theirs,
)
from tests.blocks import make_actor, make_minibatch

# -- results ------------------------------------------------------------------


@settings(max_examples=80)
@given(
    b=st.integers(1, 4),
    t=st.one_of(st.integers(1, 12), st.integers(1, 60)),
    p=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 10_000),
    shifted=st.sampled_from([None, False]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_equals_torchrls_gae(b: int, t: int, p: float, seed: int, shifted: Any, dtype: Any):
    """In float64 to 1e-12, where torchrl is given its discounts as tensors."""
    batch, critic = make_batch(b, t, p=p, seed=seed, dtype=dtype), make_critic(dtype)
    result = ours(batch, critic, shifted=shifted)
    expected = theirs(batch, critic, vectorized=False, **DOUBLES)
    limit = 1e-12 if dtype is torch.float64 else 1e-5
    for x, y in zip(keys(result), keys(expected), strict=True):
        torch.testing.assert_close(x, y, atol=limit, rtol=limit)
    torch.testing.assert_close(result["state_value"], expected["state_value"])


def test_a_terminated_steps_next_observation_is_never_read():
    batch, critic = make_batch(2, 6, p=0.5), make_critic()
    terminated = batch["next", "terminated"]
    batch["next", "truncated"] = batch["next", "done"].clone()  # terminated wins
    batch["next", "observation"][terminated.squeeze(-1)] = torch.nan
    result = ours(batch, critic)
    assert result["advantage"].isfinite().all()
    expected = batch["next", "reward"] - result["state_value"]
    torch.testing.assert_close(result["advantage"][terminated], expected[terminated])
    assert not result["next", "state_value"][terminated].any()


@pytest.mark.parametrize("truncations", [0, 5])
def test_one_pass_over_the_steps_and_one_row_for_each_truncation(truncations: int):
    batch, critic = make_batch(1, 10, p=0.0), make_critic()
    batch["next", "done"][0, :truncations] = True
    ours(batch, critic)
    assert critic.module.rows == 10 + 1 + truncations
    critic = make_critic()
    batch["next", "done"][:] = batch["next", "terminated"][:] = True
    ours(batch, critic)
    assert critic.module.rows == 10


def test_a_cast_keeps_the_discounts():
    module = GAE(gamma=0.99, lmbda=0.95, value_network=None).half()
    assert (module.gamma.item(), module.lmbda.item()) == (0.99, 0.95)


@pytest.mark.parametrize("masked", [False, True])
def test_average_gae_of_one_frame_is_not_scaled(masked: bool):
    batch, critic = make_batch(1, 3 if masked else 1, p=0.0), make_critic()
    if masked:
        batch["collector", "mask"] = torch.tensor([[True, False, False]])
    averaged = ours(batch, critic, average_gae=True)["advantage"]
    assert torch.equal(averaged, ours(batch, critic)["advantage"])
    assert averaged[0, 0] != 0


def test_average_gae_equals_torchrl_and_skips_padding():
    batch, critic = make_batch(), make_critic()
    assert_same(ours(batch, critic, average_gae=True), theirs(batch, critic, average_gae=True))
    padded, mask = pad(batch, 4)
    result = ours(padded, critic, average_gae=True)["advantage"]
    expected = ours(batch, critic, average_gae=True)["advantage"]
    torch.testing.assert_close(result[mask], expected.flatten(0, 1))
    assert (result[~mask] == 0).all()


def test_groups_are_standardized_separately_and_skip_padding():
    batch, critic = make_batch(), make_critic()
    batch["task"] = torch.tensor([0, 1, 0]).unsqueeze(-1).expand(3, 7).clone()
    expected = theirs(batch, critic, average_gae=True, group_key="task")
    assert_same(ours(batch, critic, average_gae=True, group_key="task"), expected)
    padded, mask = pad(batch, 2)
    result = ours(padded, critic, average_gae=True, group_key="task")["advantage"][mask]
    torch.testing.assert_close(result, expected["advantage"].flatten(0, 1))


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

    @pytest.mark.parametrize(
        ("shifted", "average", "trailing"),
        [(None, True, False), (False, False, True), (True, False, False)],
    )
    def test_the_key_valid_is_torchrls(shifted: bool | None, average: bool, trailing: bool):
        batch, critic = with_valid(make_batch(), [3, 7, 1], trailing), make_critic()
        arguments: Any = {"gamma": 0.97, "lmbda": 0.9, "average_gae": average}
        found = with_keys(GAE(value_network=critic, shifted=shifted, **arguments), batch)
        expected = TorchRLGAE(value_network=critic, shifted=bool(shifted), **arguments)
        assert_same(found, with_keys(expected, batch))
        assert found["advantage"].abs().max() < 100
        assert not found["advantage"][~batch["valid"].view(3, 7)].any()

    def test_a_frame_is_valid_by_both_masks_and_a_bad_mask_raises():
        batch, critic = with_valid(make_batch(), [3, 7, 1], False), make_critic()
        mask = torch.ones(3, 7, dtype=torch.bool)
        mask[1, 5:] = False
        gae = GAE(gamma=0.97, lmbda=0.9, value_network=critic, average_gae=True)
        found = with_keys(gae, batch.clone().set(("collector", "mask"), mask))
        both = batch.clone().set(("collector", "mask"), mask & batch["valid"])
        assert_same(found, ours(both, critic, average_gae=True))
        with pytest.raises(KeyError, match=r"'valid' is not in the batch.*set_keys\(valid="):
            with_keys(gae, batch.exclude("valid"))
        with pytest.raises(TypeError, match=r"a mask must be torch\.bool"):
            with_keys(gae, batch.clone().set("valid", batch["valid"].float()))
        batch["valid"] = torch.ones(3, 7, 2, 1, dtype=torch.bool)
        with pytest.raises(ValueError, match=r"'valid' has shape \[3, 7, 2, 1\]"):
            with_keys(gae, batch)


def test_multi_step_rewards_use_two_passes():
    batch, critic = make_batch(p=0.0), make_critic()
    batch["steps_to_next_obs"] = torch.full((3, 7, 1), 2)
    assert_same(ours(batch, critic), theirs(batch, critic))


def test_auto_reset_bootstraps_from_the_last_own_observation():
    batch, critic = make_batch(1, 3, p=0.0), make_critic()
    batch["next", "done"][0, 1] = True
    result = ours(batch, critic, auto_reset_env=True)
    value = result["state_value"][0, 1]
    expected = batch["next", "reward"][0, 1] + 0.97 * value - value
    torch.testing.assert_close(result["advantage"][0, 1], expected)


def test_time_may_be_named_anywhere():
    batch, critic = make_batch(), make_critic()
    expected = ours(batch, critic)
    swapped = batch.transpose(0, 1).contiguous()
    assert swapped.names == ["time", None]
    result = ours(swapped, critic)
    torch.testing.assert_close(result["advantage"].transpose(0, 1), expected["advantage"])
    result = GAE(gamma=0.97, lmbda=0.9, value_network=critic, time_dim=0)(swapped.clone())
    torch.testing.assert_close(result["advantage"].transpose(0, 1), expected["advantage"])


def test_differentiable_passes_gradients_to_the_reward_not_to_the_critic():
    batch, critic = make_batch(2, 4, dtype=torch.float64), make_critic(torch.float64)
    module = GAE(gamma=0.97, lmbda=0.9, value_network=critic, differentiable=True)

    def advantage(reward: torch.Tensor) -> torch.Tensor:
        return module(batch.clone().set(("next", "reward"), reward))["advantage"]

    reward = batch["next", "reward"].requires_grad_()
    assert torch.autograd.gradcheck(advantage, reward)
    advantage(reward).sum().backward()
    assert all(p.grad is None for p in critic.parameters())
    assert not ours(make_batch(), make_critic())["advantage"].requires_grad


# -- in losses, buffers and collectors ------------------------------------------------------------


def test_value_estimate_is_the_value_target():
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


def test_in_a_replay_buffer():
    batch, critic = make_batch(), make_critic()
    buffer = ReplayBuffer(storage=LazyTensorStorage(100, ndim=2), batch_size=4)
    buffer.append_transform(GAE(gamma=0.97, lmbda=0.9, value_network=critic), invert=True)
    buffer.extend(batch)
    torch.testing.assert_close(buffer[:]["advantage"], ours(batch, critic)["advantage"])


# -- shifted=True: torchrl's budget ---------------------------------------------


@given(b=st.integers(1, 4), t=st.integers(1, 12), budget=st.integers(1, 3), seed=st.integers(0, 99))
def test_shifted_true_drops_the_frames_that_torchrl_drops(b: int, t: int, budget: int, seed: int):
    batch, critic = make_batch(b, t, seed=seed), make_critic()
    found = ours(batch, critic, shifted=True, shifted_budget=budget)
    kept = found["shifted_valid"]
    assert torch.equal(
        kept, theirs(batch, critic, shifted=True, shifted_budget=budget)["shifted_valid"]
    )
    # The others have the GAE of these frames alone.
    for row in range(b):
        steps = int(kept[row].sum())
        if steps:
            alone = ours(batch[row : row + 1, :steps], critic)
            for x, y in zip(keys(found), keys(alone), strict=True):
                torch.testing.assert_close(x[row, :steps], y[0], atol=1e-5, rtol=1e-5)
        assert not found["advantage"][row, steps:].any()


def test_accepts_a_torchrl_state():
    module = GAE(gamma=0.5, lmbda=0.5, value_network=None)
    module.load_state_dict(TorchRLGAE(gamma=0.75, lmbda=0.25, value_network=None).state_dict())
    assert (module.gamma.item(), module.lmbda.item()) == (0.75, 0.25)
