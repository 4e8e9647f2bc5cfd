"""GAE of several agents equals torchrl's MultiAgentGAE; bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.modules import MultiAgentMLP
from torchrl.objectives.value import MultiAgentGAE

from ppokit import GAE
from tests.advantages.cases import DOUBLES

OBSERVATION, VALUE = ("agents", "observation"), ("agents", "state_value")
SIGNALS = ("reward", "done", "terminated")
GAMMA, LMBDA = 0.97, 0.9


def make_batch(
    shape: tuple[int, ...],
    agents: int,
    grouped: tuple[str, ...] = (),
    *,
    seed: int = 0,
    p: float = 0.4,
    dtype: torch.dtype = torch.float32,
) -> TensorDict:
    """Signals lie in the group of agents where they are named, and at the root elsewhere."""
    generator = torch.Generator().manual_seed(seed)

    def flags(*size: int) -> torch.Tensor:
        return torch.rand(size, generator=generator) < p / 2

    def numbers(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=dtype)

    sizes = {key: ((agents, 1) if key in grouped else (1,)) for key in SIGNALS}
    terminated = flags(*shape, *sizes["terminated"])
    done = flags(*shape, *sizes["done"])
    ended = terminated.flatten(len(shape)) if done.ndim == len(shape) + 1 else terminated
    if done.ndim == terminated.ndim:
        done = done | terminated
    elif done.ndim < terminated.ndim:  # the environment is done as soon as an agent is
        done = done | ended.any(-1, keepdim=True)
    else:
        done = done | terminated.unsqueeze(-2)
    observation = numbers(*shape, agents, 4)
    # An observation follows only where no agent is done: the whole environment may be reset.
    goes_on = ~done.flatten(len(shape)).any(-1)
    following = numbers(*shape, agents, 4)
    following[..., :-1, :, :][goes_on[..., :-1]] = observation[..., 1:, :, :][goes_on[..., :-1]]
    found = {"reward": numbers(*shape, *sizes["reward"]), "done": done, "terminated": terminated}
    root = {key: x for key, x in found.items() if key not in grouped}
    group = {key: x for key, x in found.items() if key in grouped}
    return TensorDict(
        {
            "agents": TensorDict({"observation": observation}, [*shape, agents]),
            "next": {
                **root,
                "agents": TensorDict({"observation": following, **group}, [*shape, agents]),
            },
        },
        shape,
        names=[None] * (len(shape) - 1) + ["time"],
    )


def make_critic(agents: int, *, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(0)
    options = {"centralized": True, "share_params": True} | options
    network = MultiAgentMLP(4, 1, agents, depth=1, num_cells=8, **options).to(dtype)
    return TensorDictModule(network, [OBSERVATION], [VALUE])


def make(kind: Any, critic: Any, grouped: tuple[str, ...] = (), **options: Any) -> Any:
    options = {"gamma": GAMMA, "lmbda": LMBDA} | options
    module = kind(value_network=critic, **options)
    module.set_keys(value=VALUE, advantage=("agents", "advantage"))
    module.set_keys(value_target=("agents", "value_target"))
    module.set_keys(**{key: ("agents", key) for key in grouped})
    return module


def outputs(batch: TensorDict) -> list[torch.Tensor]:
    return [batch["agents", "advantage"], batch["agents", "value_target"]]


def assert_same(a: TensorDict, b: TensorDict, atol: float = 1e-6) -> None:
    for x, y in zip(outputs(a), outputs(b), strict=True):
        torch.testing.assert_close(x, y, atol=atol, rtol=min(atol, 1e-6))


GROUPED = st.sets(st.sampled_from(SIGNALS)).map(lambda keys: tuple(sorted(keys)))


@settings(max_examples=80)
@given(
    shape=st.sampled_from([(1, 1), (1, 9), (3, 7), (2, 2, 5), (6,)]),
    agents=st.integers(1, 4),
    grouped=GROUPED,
    p=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 10_000),
    centralized=st.booleans(),
    share_params=st.booleans(),
    shifted=st.sampled_from([None, False]),
    average=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_equals_torchrls(
    shape: tuple[int, ...],
    agents: int,
    grouped: tuple[str, ...],
    p: float,
    seed: int,
    centralized: bool,
    share_params: bool,
    shifted: bool | None,
    average: bool,
    dtype: torch.dtype,
):
    """In float64 to 1e-12."""
    batch = make_batch(shape, agents, grouped, seed=seed, p=p, dtype=dtype)
    networks = {"centralized": centralized, "share_params": share_params}
    critic = make_critic(agents, dtype=dtype, **networks)
    options = {"average_gae": average and batch.numel() > 1}
    result = make(GAE, critic, grouped, shifted=shifted, agent_dim=-2, **options)(batch.clone())
    options |= {"vectorized": False, "deactivate_vmap": True} | DOUBLES
    expected = make(MultiAgentGAE, critic, grouped, **options)(batch.clone())
    # a standard deviation divides what is rounded
    limit = 3e-6 if options["average_gae"] else 1e-6
    assert_same(result, expected, 1e-12 if dtype is torch.float64 else limit)
    torch.testing.assert_close(result[VALUE], expected[VALUE])
    assert result["agents"].batch_size == (*shape, agents)


@pytest.mark.parametrize("value_network", [True, False])
def test_padding_changes_nothing(value_network: bool):
    batch, critic = make_batch((2, 6), 3, ("reward",)), make_critic(3)
    module = make(GAE, critic, ("reward",), average_gae=True, agent_dim=-2)
    expected = module(batch)
    padded = torch.cat([batch, batch[:, :3]], 1)
    padded["next", "agents", "reward"][:, 6:] = torch.nan
    padded["collector", "mask"] = torch.arange(9).expand(2, 9) < 6
    if not value_network:
        module = make(GAE, None, ("reward",), average_gae=True, agent_dim=-2)
        padded[VALUE][:, 6:] = torch.nan
    result = module(padded)
    for x, y in zip(outputs(result), outputs(expected), strict=True):
        torch.testing.assert_close(x[:, :6], y)
        assert (x[:, 6:] == 0).all()


def test_an_agent_that_is_terminated_may_have_no_next_observation():
    """The others are truncated, and bootstrap."""
    batch, critic = make_batch((2, 5), 3, SIGNALS, p=0.0), make_critic(3, centralized=False)
    done, terminated = batch["next", "agents", "done"], batch["next", "agents", "terminated"]
    done[0, 2], terminated[0, 2] = True, torch.tensor([[True], [False], [False]])
    expected = make(GAE, critic, SIGNALS)(batch.clone())
    batch["next", "agents", "observation"][0, 2, 0] = torch.nan
    found = make(GAE, critic, SIGNALS)(batch.clone())
    assert_same(found, expected)
    batch["next", "agents", "observation"][0, 2, 1] = torch.nan
    with pytest.raises(ValueError, match=r"NaN or infinite after 1 .*first at \[0, 2\]"):
        make(GAE, critic, SIGNALS)(batch)


def test_advantages_are_standardized_over_all_agents_or_each():
    batch, critic = make_batch((3, 7), 3), make_critic(3)
    together = outputs(make(GAE, critic, average_gae=True)(batch.clone()))[0]
    root = outputs(make(GAE, critic)(batch.clone()))[0]
    torch.testing.assert_close(together, (root - root.mean()) / root.std())
    each = outputs(make(GAE, critic, average_gae=True, agent_dim=2)(batch.clone()))[0]
    for agent in range(3):
        x = root[:, :, agent]
        torch.testing.assert_close(each[:, :, agent], (x - x.mean()) / x.std())
    for agent_dim in (0, 1, 3, -1):
        with pytest.raises(ValueError, match=f"agent_dim={agent_dim} is no dimension of agents"):
            make(GAE, critic, average_gae=True, agent_dim=agent_dim)(batch.clone())
    groups = batch.clone()
    groups["task"] = torch.tensor([0, 1, 0]).view(3, 1, 1).expand(3, 7, 1).clone()
    options = {"average_gae": True, "group_key": "task"}
    result = make(GAE, critic, agent_dim=-2, **options)(groups.clone())
    assert_same(result, make(MultiAgentGAE, critic, deactivate_vmap=True, **options)(groups), 1e-5)


def test_steps_to_the_next_observation_of_the_team():
    batch, critic = make_batch((2, 5), 3, ("reward",), p=0.0), make_critic(3)
    batch["steps_to_next_obs"] = torch.full((2, 5, 1), 2)
    result = make(GAE, critic, ("reward",))(batch.clone())
    delta = batch["next", "agents", "reward"] + GAMMA**2 * result["next", VALUE] - result[VALUE]
    torch.testing.assert_close(result["agents", "advantage"][:, -1], delta[:, -1])
    batch["steps_to_next_obs"] = torch.ones(2, 5, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"'steps_to_next_obs' has shape \[2, 5, 2\]"):
        make(GAE, critic, ("reward",))(batch)


# -- bad input ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            (2, 5, 4, 1),
            r"\('next', 'rewards'\) has shape \[2, 5, 4, 1\], but \('agents', 'state_value'\) has "
            r"shape \[2, 5, 3, 1\].*of the team, \[\*B, T, 1",
        ),
        ((2, 5), r"'rewards'\) has shape .* expanded to the agents"),
        ((2, 5, 2), r"'rewards'\) has shape .* expanded to the agents"),
    ],
)
def test_rewards_of_another_shape_raise(shape: tuple[int, ...], message: str):
    batch, module = make_batch((2, 5), 3), make(GAE, make_critic(3))
    batch["next", "rewards"] = torch.randn(shape)
    module.set_keys(reward="rewards")
    with pytest.raises(ValueError, match=message):
        module(batch)


def test_rewards_of_agents_beside_one_value_name_the_fix():
    batch, module = make_batch((2, 5), 3, SIGNALS), make(GAE, None, SIGNALS)
    module.set_keys(value="state_value")
    batch["state_value"] = batch["next", "state_value"] = torch.zeros(2, 5, 1)
    with pytest.raises(ValueError, match=r"'reward'\) has shape \[2, 5, 3, 1\].*sum or the mean"):
        module(batch)


def test_forgotten_keys_are_named():
    batch, critic = make_batch((2, 5), 3, ("reward",)), make_critic(3)
    module = GAE(gamma=GAMMA, lmbda=LMBDA, value_network=critic)
    with pytest.raises(KeyError, match=r"\('next', 'reward'\) is not.*gae\.set_keys.*'reward'\)"):
        module(batch)
    module.set_keys(reward=("agents", "reward"))
    with pytest.raises(KeyError, match=r"'state_value' is not.*gae\.set_keys\(value=\.\.\.\)"):
        module(batch)
    module.set_keys(value=VALUE, done=("agents", "done"))
    with pytest.raises(KeyError, match=r"\('next', 'agents', 'done'\) is not in the batch"):
        module(batch)
