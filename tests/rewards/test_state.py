"""The normaliser's state: saved, copied, moved."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torchrl.envs import (
    TransformedEnv,
)
from torchrl.envs.utils import RandomPolicy

from ppokit import RewardNormalizer
from tests.rewards.streams import (
    REWARD,
    assert_state_equal,
    assert_unchanged,
    make_envs,
    make_rollout,
    saved,
    time_pieces,
)

# -- state


@pytest.mark.parametrize("statistics", ["running", "batch"])
@pytest.mark.parametrize("envs_before", [0, 1, 5])
def test_save_load_and_go_on_bit_for_bit(statistics, envs_before):
    first, second = time_pieces(make_rollout(0, 3, 10, 0.1), [6, 4])
    normalizer = RewardNormalizer(statistics=statistics)
    normalizer(first)
    normalizer.freeze()
    file = io.BytesIO()
    torch.save(normalizer.state_dict(), file)
    file.seek(0)
    fresh = RewardNormalizer(statistics=statistics)
    if envs_before:
        fresh(make_rollout(1, envs_before, 3, 0.0))
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert_state_equal(fresh, normalizer)
    normalizer.unfreeze()
    fresh.unfreeze()
    assert torch.equal(fresh(second.clone())[REWARD], normalizer(second.clone())[REWARD])
    assert_state_equal(fresh, normalizer)


def test_the_env_accumulator_is_saved():
    env = make_envs("CartPole-v1", 2, RewardNormalizer)
    env.rollout(3, RandomPolicy(env.full_action_spec))
    assert isinstance(env, TransformedEnv)
    fresh = make_envs("CartPole-v1", 2, RewardNormalizer)
    fresh.load_state_dict(env.state_dict())
    assert isinstance(fresh, TransformedEnv)
    assert fresh.transform.env_returns.shape == (2, 1)
    assert torch.equal(fresh.transform.env_returns, env.transform.env_returns)


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda n: pickle.loads(pickle.dumps(n)), RewardNormalizer.clone],
    ids=["deepcopy", "pickle", "clone"],
)
def test_copies_go_on_bit_for_bit_and_by_themselves(duplicate):
    first, second = time_pieces(make_rollout(0, 3, 10, 0.1), [6, 4])
    normalizer = RewardNormalizer()
    normalizer(first)
    twin = duplicate(normalizer)
    before = saved(normalizer)
    out = twin(second.clone())
    assert_unchanged(normalizer, before)
    assert torch.equal(normalizer(second.clone())[REWARD], out[REWARD])
    assert_state_equal(twin, normalizer)
    twin.load_state_dict(RewardNormalizer().state_dict())
    assert normalizer.count == 30


@pytest.mark.parametrize("cast", [lambda n: n.half(), lambda n: n.to(torch.bfloat16)])
def test_a_cast_does_not_round_the_statistics(cast):
    normalizer = RewardNormalizer()
    normalizer(make_rollout(0, 3, 10, 0.1))
    before = saved(normalizer)
    cast(normalizer)
    assert_unchanged(normalizer, before)


def test_a_pickle_does_not_carry_the_last_batch():
    normalizer = RewardNormalizer()
    empty = len(pickle.dumps(normalizer))
    normalizer(make_rollout(0, 3, 10_000, 0.0))
    assert len(pickle.dumps(normalizer)) < empty + 10_000


def test_repr_tells_the_scale():
    assert "scale=1, count=0" in repr(RewardNormalizer())
