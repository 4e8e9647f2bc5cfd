"""GAE with recurrent, shared, chunked and compiled value networks, and NaN final observations."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.envs import GymEnv, InitTracker, SerialEnv, StepCounter, TransformedEnv
from torchrl.modules import MLP, ActorValueOperator, GRUModule, ValueOperator, set_recurrent_mode

from ppokit import GAE
from tests.advantages.cases import assert_same, make_batch, make_critic, ours, theirs
from tests.blocks import categorical_actor

# -- final observations that are NaN


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
    message = rf"next observation is NaN or infinite after 1 .* first at \[1, {step}\]"
    with pytest.raises(ValueError, match=message):
        GAE(gamma=0.9, lmbda=0.9, value_network=critic)(batch)
    assert {*batch.keys(True, True)} == keys
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[1, step:] = False  # it is not valid, and the last valid step has another one
    batch["collector", "mask"] = mask
    found = GAE(gamma=0.9, lmbda=0.9, value_network=critic)(batch)
    assert found["advantage"].isfinite().all()


# -- recurrent critics


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


def test_a_recurrent_critic_over_sequences_equals_torchrls_two_passes():
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


def test_a_recurrent_critic_of_single_steps_continues_from_the_stored_states():
    batch, critic, _ = make_recurrent_batch()
    result = ours(batch, critic)
    # torchrl's two passes differ here: they zero the state after the first step of an episode.
    following = batch["next"].select("observation", "recurrent_state", "is_init")
    following["is_init"] = torch.zeros_like(following["is_init"])
    with torch.no_grad():
        batch["state_value"] = critic(batch.clone())["state_value"]
        batch["next", "state_value"] = critic(following)["state_value"]
    assert_same(result, theirs(batch, None))


@pytest.mark.parametrize("key", ["recurrent_state", ("next", "recurrent_state")])
def test_a_recurrent_critic_without_its_states_raises(key):
    batch, critic, gru = make_recurrent_batch()
    assert gru.in_keys[1] == "recurrent_state"
    del batch[key]
    with (
        set_recurrent_mode(True),
        pytest.raises(KeyError, match=r"recurrent_state.*make_tensordict_primer"),
    ):
        ours(batch, critic)


# -- other networks -------------------------------------------------------------


@pytest.mark.parametrize("chunks", [{"value_chunk_size": 2}, {"num_chunks": 3}])
@pytest.mark.parametrize("dim", [0, 1])
def test_chunks_change_nothing(chunks: dict[str, int], dim: int):
    batch, critic = make_batch(5, 6), make_critic()
    found = ours(batch, critic, value_chunk_dim=dim, **chunks)
    assert_same(found, ours(batch, critic))


def test_large_observations_are_evaluated_in_parts():
    """Of 8 MiB as float32; a batch below that at once."""
    batch, sizes = make_batch(4, 20), list[int]()

    def mean(x: torch.Tensor) -> torch.Tensor:
        sizes.append(x.shape[:-1].numel())
        return x.mean(-1, keepdim=True)

    critic = TensorDictModule(mean, ["x"], ["state_value"])
    for features, parts in ((10, [80]), (50_000, [41, 39])):
        x = torch.randint(-9, 9, (4, 21, features), generator=torch.Generator().manual_seed(0))
        batch["x"], batch["next", "x"] = x[:, :-1].double(), x[:, 1:].double()
        sizes.clear()
        found = ours(batch, critic)
        assert sizes[: len(parts)] == parts
        torch.testing.assert_close(found["state_value"], batch["x"].mean(-1, keepdim=True))


def test_no_next_observation_where_each_step_terminates():
    batch, critic = make_batch(3, 4), make_critic()
    batch["next", "done"] = batch["next", "terminated"] = torch.ones_like(batch["next", "done"])
    expected = ours(batch, critic)
    assert_same(ours(batch.exclude(("next", "observation")), critic), expected)


def test_what_no_step_changes_may_be_missing_under_next():
    """A task, as a tensor or a TensorDict; also in torchrl's single pass."""
    batch, task = make_batch(3, 4), torch.arange(3.0).view(3, 1, 1).expand(3, 4, 1)
    weights = torch.randn(4, 1, dtype=batch["observation"].dtype)
    nested = TensorDict({"x": task}, [3, 4])
    critic = TensorDictModule(
        lambda x, a, b: x @ weights + a + b["x"], ["observation", "task", "nested"], ["state_value"]
    )
    whole = batch.clone().update({"task": task, "nested": nested})
    whole["next"].update({"task": task, "nested": nested})
    expected = ours(whole, critic)
    batch.update({"task": task, "nested": nested})
    assert_same(ours(batch, critic), expected)
    of_task = TensorDictModule(
        lambda x, a: x @ weights + a, ["observation", "task"], ["state_value"]
    )
    single_pass = ours(batch.exclude("nested"), of_task, shifted=True)
    assert_same(single_pass, ours(whole, of_task, shifted=True))
    for key in ("task", ("nested", "x")):
        changed = batch.clone()
        changed[key] = torch.rand(3, 4, 1)
        with pytest.raises(KeyError, match="which are not under 'next'"):
            ours(changed, critic)


@pytest.mark.parametrize("shifted", [None, False])
def test_values_that_exist_are_read(shifted: bool | None):
    """With skip_existing, although the critic has other values."""
    batch, critic = make_batch(3, 5), make_critic()
    expected = ours(batch, critic)
    for key in ("state_value", ("next", "state_value")):
        batch[key] = expected[key] * 2 + 1
    batch["next", "state_value"][batch["next", "terminated"]] = 0
    by_hand = ours(batch, None)
    found = ours(batch, critic, shifted=shifted, skip_existing=True)
    torch.testing.assert_close(found["advantage"], by_hand["advantage"])


def test_values_that_do_not_exist_need_the_next_observation():
    batch, critic = make_batch(3, 5, p=0.0), make_critic()
    with pytest.raises(KeyError, match="which are not under 'next'"):
        ours(batch.exclude(("next", "observation")), critic, shifted=True, skip_existing=True)


def test_one_large_frame():
    batch, critic = make_batch(1, 1), TensorDictModule(lambda x: x[..., :1], ["x"], ["state_value"])
    batch["x"], batch["next", "x"] = torch.rand(2, 1, 1, 2**22)
    found = ours(batch, critic)
    assert found["state_value"].shape == found["advantage"].shape == (1, 1, 1)


def test_value_chunk_size_counts_frames():
    """For any batch dimensions; rows with a recurrent critic, as in torchrl."""
    batch, sizes = make_batch(5, 6), list[int]()

    def first(x: torch.Tensor) -> torch.Tensor:
        sizes.append(x.shape[:-1].numel())
        return x[..., :1].double()

    critic = TensorDictModule(first, ["observation"], ["state_value"])
    expected = ours(batch, critic)
    sizes.clear()
    assert_same(ours(batch, critic, value_chunk_size=7), expected)
    assert sizes[:5] == [7, 7, 7, 7, 2]
    assert max(sizes) == 7
    recurrent, gru_critic, gru = make_recurrent_batch()
    rows = list[int]()
    gru.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    with set_recurrent_mode(True):
        ours(recurrent, gru_critic, value_chunk_size=2)
    assert rows[: len(recurrent) // 2] == [2] * (len(recurrent) // 2)


def test_a_critic_that_works_in_place_changes_no_input():
    class Halve(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(0.5)

    batch, linear = make_batch(), nn.Linear(4, 1)
    in_place = ValueOperator(nn.Sequential(Halve(), linear), in_keys=["observation"])
    found = ours(batch, in_place)
    assert_same(found, theirs(batch, in_place))
    for key in ("observation", ("next", "observation")):
        assert torch.equal(found[key], make_batch()[key])


def test_an_input_without_a_next_entry_is_constant():
    batch = make_batch()
    batch["task"] = torch.randn(3, 1, 2).expand(3, 7, 2).contiguous()
    network = MLP(in_features=6, out_features=1, num_cells=[8])
    critic = ValueOperator(network, in_keys=["observation", "task"])
    repeated = batch.clone()
    repeated["next", "task"] = batch["task"]
    assert_same(ours(batch, critic), theirs(repeated, critic))


def test_a_critic_that_shares_its_body_with_the_actor():
    batch = make_batch()
    common = TensorDictModule(nn.Linear(4, 8), ["observation"], ["hidden"])
    policy = categorical_actor(nn.Linear(8, 2), in_key="hidden")
    network = ActorValueOperator(common, policy, ValueOperator(nn.Linear(8, 1), ["hidden"]))
    critic = network.get_value_operator()
    assert_same(ours(batch, critic), theirs(batch, critic))
    with_features = ours(network(batch.clone()), critic)
    assert_same(with_features, theirs(batch, critic))


# -- torch.compile


@pytest.mark.filterwarnings(
    "ignore:<class 'torch.autograd.function.Function'> should not be instantiated"
    ":DeprecationWarning"
)
@pytest.mark.parametrize(
    ("network", "dynamic"),
    [(True, None), (False, None), pytest.param(True, True, marks=pytest.mark.slow)],
)
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
