"""One normaliser, one meaning: the same rewards by every route give the same statistics."""

from __future__ import annotations

import pytest
import torch

from ppokit import RewardNormalizer
from tests.rewards.routes import (
    BATCH,
    ENVS,
    ROUTES,
    STEPS,
    accumulators,
    assert_as_in,
    call,
    rows_of,
    slow,
)
from tests.rewards.streams import (
    DONE,
    RAW,
    REWARD,
    as_batch,
    recorded,
)


@pytest.mark.parametrize("envs", [1, 3, 8])
@pytest.mark.parametrize("env_id", ENVS)
def test_the_record_has_what_it_takes(env_id, envs):
    ends = as_batch(rows_of(env_id, envs))[DONE].squeeze(-1)
    assert ends.any()
    assert not ends[:, BATCH - 1 :: BATCH].all()  # something goes on from batch to batch


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES.keys())
@pytest.mark.parametrize("envs", [1, 3, 8])
@pytest.mark.parametrize("env_id", ENVS)
def test_every_route_leads_to_the_same_statistics(env_id, envs, route):
    rows, normalizer = rows_of(env_id, envs), RewardNormalizer(0.99)
    batches = route(rows, normalizer)
    assert_as_in(rows, normalizer)
    raw = torch.cat([batch[RAW].reshape(envs, BATCH, 1) for batch in batches], 1)
    assert torch.equal(raw, as_batch(rows)[REWARD])


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES.keys())
@pytest.mark.parametrize("env_id", ENVS)
def test_frozen_every_route_gives_the_same_rewards(env_id, route):
    rows, trained = rows_of(env_id, 3), RewardNormalizer(0.99)
    call(recorded(env_id, 8, STEPS)[3:], trained)
    trained.reset_returns().freeze()
    expected = torch.cat([batch[REWARD] for batch in call(rows, trained.clone())], 1)
    normalizer = trained.clone()
    rewards = torch.cat([batch[REWARD] for batch in route(rows, normalizer)], 1)
    assert torch.equal(rewards, expected)
    assert torch.equal(normalizer.moments, trained.moments)
    assert accumulators(normalizer) == pytest.approx(sorted(filter(None, slow(rows)[1])), abs=1e-6)
