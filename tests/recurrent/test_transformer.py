"""TransformerModule: collection, values, losses and sequences equal a loop over single steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl import modules as rl
from torchrl.collectors import Collector
from torchrl.data import Unbounded
from torchrl.envs import GymEnv, InitTracker, SerialEnv, TransformedEnv
from torchrl.envs.utils import ExplorationType
from torchrl.modules import set_recurrent_mode
from torchrl.modules.utils import get_primers_from_module

from ppokit import (
    GAE,
    DualClipPPOLoss,
    GymCollector,
    ObservationNormalizer,
    PPOUpdate,
    SequenceBatcher,
    TensorActor,
    TrainingStep,
    TransformerModule,
    evaluate,
    load_checkpoint,
    save_checkpoint,
)
from ppokit.networks import actor_critic
from tests import reference
from tests.marks import HAS_TRANSFORMER, nightly
from tests.recurrent.agents import DOORS, Doors

MASK, DONE, TERMINATED = ("collector", "mask"), ("next", "done"), ("next", "terminated")
MEMORY, STEPS = ("transformer_memory", "observation"), "transformer_steps"
DISCOUNTS = {"gamma": 0.9, "lmbda": 0.8}
CONTEXT = 9  # Doors ends within so many steps


def make(env: Any = DOORS, *, shared: bool = False, double: bool = True, **options: Any) -> Any:
    """Networks whose outputs depend on the memory."""
    torch.manual_seed(0)
    options = {"memory": "transformer", "memory_size": 8, "context": CONTEXT, "heads": 2} | options
    if options["memory"] != "transformer":
        options = {k: x for k, x in options.items() if k in ("memory", "memory_size", "encoder")}
    networks = actor_critic(env, (8,), shared=shared, **options)
    networks.policy.double() if double else None
    networks.critic.double() if double else None
    with torch.no_grad():
        last = networks.actor.module[0][-2 if env == DOORS else -1].module[-1]
        next(last.parameters()).mul_(100)
    return networks


def disturb(networks: Any) -> None:
    """What an update does to the weights."""
    with torch.no_grad():
        for module in {networks.policy, networks.critic}:
            for x in module.parameters():
                x += 0.05 * torch.randn_like(x)


def collect(networks: Any, env: Any = DOORS, *, batches: int = 3, **options: Any) -> list[Any]:
    """Batches of 20 steps of three environments; other weights collect each."""
    torch.manual_seed(1)
    options = {"num_envs": 3, "frames_per_batch": 60} | options
    with GymCollector(env, networks.policy, **options) as collector:
        collector.set_seed(0)
        found = []
        for _ in range(batches):
            disturb(networks)
            found.append(collector.rollout())
    return found


def body_of(network: Any) -> tuple[TransformerModule, list[Any]]:
    """The transformer of an actor or critic, and the plain modules behind it."""
    module, *others = network.module[0] if hasattr(network, "get_dist") else network
    return module, [x for x in others if "action_mask" not in x.in_keys]


def alone(network: Any, inputs: Tensor) -> Tensor:
    """The logits or the value after the inputs of an episode ``[n, ...]``, by the bare layers."""
    module, (head, *_) = body_of(network)
    encoder: Any = module.encoder
    features = encoder(inputs.unsqueeze(0)).to(next(network.parameters()).dtype)
    positions = torch.arange(len(inputs)).unsqueeze(0)
    output, _ = module.transformer(features, positions)  # plainly causal
    return head.module(output[0, -1])


def loop(network: Any, batches: list[Any]) -> tuple[Tensor, ...]:
    """Outputs ``[B, T, ...]`` for the last batch, before each step and after it, frame by frame."""
    whole: Any = torch.cat([x.select("observation", "next", "is_init") for x in batches], 1)
    rows = []
    for row in whole:
        before, after, start = [], [], 0
        for t, frame in enumerate(row):
            start = t if frame["is_init"] else start
            seen = row["observation"][start : t + 1]
            before.append(alone(network, seen))
            last = frame["next", "observation"]
            is_last = len(seen) > body_of(network)[0].context  # a step that resets, which is masked
            seen = seen if is_last else torch.cat([seen, last.unsqueeze(0)])
            after.append(alone(network, seen))
        rows.append(torch.stack([torch.stack(before), torch.stack(after)]))
    return torch.stack(rows, 1)[:, :, -batches[-1].shape[1] :].unbind(0)


def log_prob(logits: Tensor, batch: Any) -> Tensor:
    masked = logits.masked_fill(~batch["action_mask"], -torch.inf)
    return masked.log_softmax(-1).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)


def checked(batch: Any) -> Any:
    """A batch with all that is hard: rows that go on, starts within rows, ends of both kinds."""
    assert not batch["is_init"][:, 0].all()
    assert batch[STEPS][:, 0, 0].max() > 2
    assert batch["is_init"][:, 1:].any(1).all()
    assert batch[TERMINATED].any()
    assert (batch[DONE] & ~batch[TERMINATED])[:, :-1].any()
    assert not batch["action_mask"].all()
    assert len({*map(str, batch["is_init"][:, :, 0].tolist())}) == 3  # environments differ
    return batch


def close(found: Any, expected: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def make_update(networks: Any, batcher: Any = None, **options: Any) -> PPOUpdate:
    loss = DualClipPPOLoss(networks.actor, networks.value)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    gae = GAE(**DISCOUNTS, value_network=networks.critic)
    step = TrainingStep(loss, optimizer, compile=options.pop("compile", False))
    options = {"minibatch_size": 20, "seed": 0, "epochs": 2} | options
    return PPOUpdate(step, advantage=gae, batcher=batcher or SequenceBatcher(5), **options)


every_sharing = pytest.mark.parametrize("shared", [True, False])
every_length = pytest.mark.parametrize("seq_len", [1, 5, 40, None])


@nightly
@every_sharing
@pytest.mark.parametrize("layers", [1, 2])
@torch.no_grad()
def test_collection_and_values_equal_a_loop_over_single_steps(shared: bool, layers: int):
    networks = make(shared=shared, layers=layers)
    batches = collect(networks)
    batch = checked(batches[-1])
    logits, _ = loop(networks.actor, batches)
    assert (logits.std(1) > 0.1).all()
    close(batch["logits"], logits)
    close(batch["action_log_prob"], log_prob(logits, batch), 1e-6)
    value, following = loop(networks.critic, batches)
    following = following.masked_fill(batch[TERMINATED], 0)
    reward = batch["next", "reward"] = batch["next", "reward"].double()
    GAE(**DISCOUNTS, value_network=networks.critic)(batch)
    close(batch["state_value"], value)
    close(batch["next", "state_value"], following)
    flags = batch[DONE], batch[TERMINATED]
    found = reference.gae(reward, value, following, *flags, **DISCOUNTS)
    close((batch["advantage"], batch["value_target"]), found)


@nightly
@every_sharing
@every_length
def test_sequences_replay_the_batch_with_one_memory_each(shared: bool, seq_len: int | None):
    networks = make(shared=shared)
    batches = collect(networks)
    batch = GAE(**DISCOUNTS, value_network=networks.critic)(checked(batches[-1]))
    batcher, seen = SequenceBatcher(seq_len), 0
    sequences = batcher(batch)
    ways = {"copied": (sequences, None), "gathered": (batcher.places(batch), batch)}
    for given, source in ways.values():
        for minibatch in batcher.minibatches(given, 3, batch=source):
            one = minibatch[MEMORY][:, :1].numel() * 4
            assert minibatch[MEMORY].untyped_storage().nbytes() == one
            mask = minibatch[MASK]
            seen += int(mask.sum())
            minibatch["observation"][~mask] = torch.nan  # is not read
            with set_recurrent_mode(True), torch.no_grad():
                found = networks.critic(networks.actor.get_dist_params(minibatch.copy()))
            for key in ("logits", "state_value"):
                close(found[key][mask], minibatch[key][mask])
    assert seen == 2 * batch.numel()
    one = 3 * CONTEXT * 4 * 4  # bytes of rows, context, features, float32
    assert batch[MEMORY].shape == (3, 20, CONTEXT, 4)
    assert batch[MEMORY].untyped_storage().nbytes() == one
    restored = batcher.unbatch(sequences)
    assert torch.equal(restored["logits"], batch["logits"])
    assert STEPS not in restored.keys()


@nightly
@every_sharing
@every_length
def test_gradients_go_through_the_whole_context(shared: bool, seq_len: int | None):
    networks = make(shared=shared)
    batches = collect(networks)
    batch = checked(batches[-1])
    parameters = [*networks.actor.parameters()]

    def gradients(logits: Tensor) -> Any:
        weights = torch.arange(1.0, 1 + len(logits), dtype=torch.float64).cos()
        return torch.autograd.grad((log_prob(logits, at) * weights).sum(), parameters)

    at = batch.reshape(-1)
    expected = gradients(loop(networks.actor, batches)[0].flatten(0, 1))
    sequences = SequenceBatcher(seq_len)(batch)
    mask = sequences[MASK]
    with set_recurrent_mode(True):
        logits = networks.actor.get_dist_params(sequences.copy())["logits"][mask]
    order = sequences["sequence", "index"][mask].argsort()
    close(gradients(logits[order]), expected, 1e-8)


@nightly
@every_sharing
@pytest.mark.parametrize("options", [{}, {"compile": True}, {"recompute_advantage": True}], ids=str)
@pytest.mark.filterwarnings("ignore:The training step runs eagerly:RuntimeWarning")
def test_updates_begin_where_collection_ended(shared: bool, options: dict[str, Any]):
    networks = make(shared=shared)
    update = make_update(networks, **options)
    eager = make_update(other := copy.deepcopy(networks))
    with GymCollector(DOORS, networks.policy, num_envs=3, frames_per_batch=60) as collector:
        for number in range(4):
            batch = collector.rollout()
            assert number == 0 or not batch["is_init"][:, 0].all()
            with set_recurrent_mode(True), torch.no_grad():
                logits = networks.actor.get_dist_params(batch.copy())["logits"]
            close(logits, batch["logits"])
            update.validate(batch.copy())
            found = update(batch.copy())
            assert abs(found["first_kl"]) < 1e-10
            assert batch[MEMORY].untyped_storage().nbytes() == 3 * CONTEXT * 16
            if "compile" in options:
                assert "is no nn.LSTM of one layer" in repr(update.step)
                expected = eager(batch)
                for key in ("kl", "loss_objective", "loss_critic"):
                    close(found[key], expected[key])
    if "compile" in options:
        close([*networks.policy.parameters()], [*other.policy.parameters()])


memories = [pytest.param("transformer", marks=nightly), "lstm", "gru"]


@pytest.mark.parametrize("memory", memories)
@pytest.mark.parametrize("env", [DOORS, "Pendulum-v1", "CartPole-v1"])
@every_sharing
def test_the_first_kl_of_all_memories(memory: str, env: str, shared: bool):
    networks = make(env, shared=shared, double=False, memory=memory, context=200)
    with GymCollector(env, networks.policy, num_envs=3, frames_per_batch=120) as collector:
        collector.set_seed(0)
        update = make_update(networks, SequenceBatcher(8))
        for _ in range(3):
            batch, changes = collector.rollout(), []
            for _ in range(2):
                with set_recurrent_mode(True), torch.no_grad():
                    found = networks.actor.get_dist(batch.copy()).log_prob(batch["action"])
                changes.append(float((found - batch["action_log_prob"]).abs().max()))
                first_kl = update(batch.copy())["first_kl"] if len(changes) == 1 else 0.0
                assert abs(first_kl) <= 1e-5
            assert changes[0] < 1e-4 < changes[1]  # before and after the update


@nightly
@pytest.mark.parametrize("exploration", [ExplorationType.DETERMINISTIC, ExplorationType.RANDOM])
@torch.no_grad()
def test_the_module_itself_collects_as_its_step_on_tensors(exploration: Any):
    networks = make()
    hook = body_of(networks.actor)[0].register_forward_hook(lambda *_: None)
    batches = collect(networks, exploration_type=exploration)
    close(batches[-1]["logits"], loop(networks.actor, batches)[0])
    assert batches[-1][MEMORY].untyped_storage().nbytes() == 3 * CONTEXT * 16
    hook.remove()
    evaluate(DOORS, networks.policy, episodes=4)


@nightly
@torch.no_grad()
def test_torchrls_collector_with_the_primer():
    networks = make("CartPole-v1", shared=True, context=12, double=False)
    for policy in (networks.policy, TensorActor(networks.policy)):
        of_env = {"max_episode_steps": 12, "categorical_action_encoding": True}
        env = TransformedEnv(SerialEnv(2, lambda x=of_env: GymEnv("CartPole-v1", **x)))
        env.append_transform(InitTracker())
        env.append_transform(get_primers_from_module(networks.policy))
        env.set_seed(0)
        options = {"frames_per_batch": 40, "total_frames": 80}
        batches = list(Collector(env, policy, **options, auto_register_policy_transforms=False))
        batch = batches[-1].copy()
        assert not batch["is_init"][:, 0].all()
        logits = loop(networks.actor, batches)[0]
        close(batch["logits"], logits, 1e-4)
        GAE(**DISCOUNTS, value_network=networks.critic)(batch)
        value, following = loop(networks.critic, batches)
        close(batch["state_value"], value, 1e-4)
        close(batch["next", "state_value"], following.masked_fill(batch[TERMINATED], 0), 1e-4)
        sequences = SequenceBatcher(4)(batch)
        with set_recurrent_mode(True):
            found = networks.actor.get_dist_params(sequences.copy())["logits"]
        mask = sequences[MASK]
        close(found[mask], sequences["logits"][mask], 1e-4)


@nightly
@torch.no_grad()
def test_a_worker_of_torchrls_collectors_writes_batches_into_one():
    networks = make()
    options = {"worker_idx": 0, "return_same_td": True, "num_envs": 3, "frames_per_batch": 60}
    collector = GymCollector(DOORS, networks.policy, **options)
    first = collector.rollout()
    disturb(networks)
    batch = collector.rollout()
    assert batch is first
    assert not batch["is_init"][:, 0].all()
    with set_recurrent_mode(True):
        close(networks.actor.get_dist_params(batch.copy())["logits"], batch["logits"])
    collector.shutdown()


@nightly
@torch.no_grad()
def test_values_of_whole_episodes_that_are_padded():
    networks = make()
    options = {"num_envs": 3, "frames_per_batch": 60, "trajs_per_batch": 5}
    with GymCollector(DOORS, networks.policy, **options) as collector:
        batch = GAE(**DISCOUNTS, value_network=networks.critic)(next(iter(collector)))
    mask, seen = batch[MASK], batch["observation"]
    assert not mask.all()
    for row, t in mask.nonzero().tolist():
        episode = seen[row, : t + 1]
        close(batch["state_value"][row, t], alone(networks.critic, episode))
        last = batch["next", "observation"][row, t : t + 1]
        value = alone(networks.critic, torch.cat([episode, last]))
        value = value.masked_fill(batch[TERMINATED][row, t], 0)
        close(batch["next", "state_value"][row, t], value)


def random_rows(seed: int) -> tuple[TransformerModule, Any, Tensor]:
    """Rows of streams of episodes, each with the memory before it, and the output of each frame."""
    torch.manual_seed(seed)
    context, steps = 1 + seed % 9, 1 + seed % 13
    shape = [(3,), (1,), (2, 2)][seed % 3]
    rows, length = int(np.prod(shape)), steps + context + 3
    network = rl.CausalTransformer(3, 8, 1 + seed % 2, num_heads=2, max_seq_len=context + 1)
    x = torch.randn(rows, length, 3, dtype=torch.float64)
    starts = torch.rand(rows, length) < [0.05, 0.2, 0.5][seed % 3]
    number = torch.zeros(rows, length, dtype=torch.int64)
    for t in range(1, length):
        starts[:, t] |= number[:, t - 1] == context
        number[:, t] = (number[:, t - 1] + 1).masked_fill(starts[:, t], 0)
    starts[:, 0], first = True, length - steps
    output = torch.zeros(rows, length, 8, dtype=torch.float64)
    memory = torch.full((rows, 1, context, 3), torch.nan, dtype=torch.float64)
    for row in range(rows):
        for t in range(length):
            seen = x[row : row + 1, t - int(number[row, t]) : t + 1]
            output[row, t] = network.double()(seen, torch.arange(seen.shape[1])[None])[0][0, -1]
        count = int(number[row, first])
        memory[row, 0, :count] = x[row, first - count : first]
    done = starts.roll(-1, 1)[:, first:]
    done[:, -1] = False
    since = torch.arange(steps).expand(rows, steps)
    batch = TensorDict({"x": x[:, first:], "is_init": starts[:, first:, None]}, [rows, steps])
    batch["transformer_memory"] = {"x": memory.expand(rows, steps, context, 3)}
    batch[STEPS] = torch.stack([number[:, first:], since], -1)
    batch[DONE], batch["expected"] = done[..., None], output[:, first:]
    return TransformerModule(network, {"x": Unbounded(3)}, "y"), batch.view(*shape, steps), memory


@nightly
@pytest.mark.parametrize("seed", range(40))
@torch.no_grad()
def test_random_rows_sequences_and_steps(seed: int):
    """A row that is cut along time gives the same outputs, or raises."""
    module, batch, memory = random_rows(seed)
    cuts = [batch[..., t:] for t in range(batch.shape[-1])]
    replayed = 0
    for number, cut in enumerate(cuts):
        for batcher in (None, SequenceBatcher(None), SequenceBatcher(1), SequenceBatcher(3)):
            try:
                given = cut.copy() if batcher is None else batcher(cut)
                mask = torch.ones(given.shape, dtype=torch.bool) if batcher is None else given[MASK]
                given["x"] = given["x"].masked_fill(~mask.unsqueeze(-1), torch.nan)
                with set_recurrent_mode(True):
                    found = module(given)["y"]
            except ValueError as error:
                if number == 0 or "memory before" not in str(error):
                    raise
            else:
                close(found[mask], given["expected"][mask], 1e-12)
                replayed += 1
    assert replayed >= 4
    flat = batch.reshape(-1, batch.shape[-1])
    step, held = module.stepper(), memory[:, 0]
    steps = flat[STEPS][:, 0] * torch.tensor([1, 0])
    entries = {"x": flat["x"][:, 0], "transformer_memory": {"x": held}, STEPS: steps}
    frame = TensorDict(entries, [len(flat)])
    for t in range(batch.shape[-1]):
        x, is_init = flat["x"][:, t], flat["is_init"][:, t]
        frame["x"], frame["is_init"] = x, is_init
        output, held, steps = step(x, held, steps, is_init)
        close((module(frame)["y"], output), (flat["expected"][:, t],) * 2, 1e-12)
        frame.update(frame["next"])


@nightly
@torch.no_grad()
def test_one_step_from_another_memory_than_the_last():
    networks = make()
    module, _ = body_of(networks.actor)
    torch.manual_seed(0)
    step, rows = module.stepper(), 4

    def given(count: int, starts: bool = False) -> list[Any]:
        memory = torch.randn(rows, CONTEXT, 4)
        steps = torch.tensor([count, 0]).expand(rows, 2)
        return [torch.randn(rows, 4), memory, steps, torch.full((rows, 1), starts)]

    def expected(x: Tensor, memory: Tensor, steps: Tensor, is_init: Tensor) -> Tensor:
        entries = dict(zip(module.in_keys, (x, memory, steps, is_init), strict=True))
        return module(TensorDict(entries, [rows]))[module.out_keys[0]]

    for count in (3, 5, 0, 9):
        now = given(count, starts=count == 9)
        for _ in range(4):  # on from its own memory, and now and then from another
            want, (output, memory, steps) = expected(*now), step(*now)
            close(output, want)
            now = [torch.randn(rows, 4), memory, steps, torch.rand(rows, 1) < 0.3]
    shaped = [x.unflatten(0, (2, 2)) for x in given(2)]
    flat = step(*[x.flatten(0, 1) for x in shaped])
    for found, want in zip(module.stepper()(*shaped), flat, strict=True):
        close(found.flatten(0, 1), want)


class Mixed(gym.Env):
    """Observations of several kinds."""

    def __init__(self) -> None:
        image, box = spaces.Box(0, 255, (12, 12, 3), np.uint8), spaces.Box(-1, 1, (2,), np.float32)
        parts = {"image": image, "box": box, "choice": spaces.Discrete(3)}
        self.observation_space, self.action_space = spaces.Dict(parts), spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        ended = bool(self.np_random.random() < 0.2)
        return self.observation_space.sample(), float(action), ended, False, {}


@nightly
def test_observations_of_several_kinds_are_remembered_as_they_are():
    options = {"encoder": {"image": "small"}, "shared": True, "context": 60, "double": False}
    networks = make(Mixed(), **options)
    batches = collect(networks, Mixed)
    batch = batches[-1]
    memory = batch["transformer_memory"]
    kinds = {key: (x.dtype, x.shape[2:]) for key, x in memory.items()}
    assert kinds == {
        "image": (torch.uint8, (60, 12, 12, 3)),
        "box": (torch.float32, (60, 2)),
        "choice": (torch.int64, (60,)),
    }
    rows, (count, _) = batch[STEPS][:, 0].max(0).indices[0], batch[STEPS][:, 0].max(0).values
    last = batches[-2][rows]["image"][-int(count) :]
    assert torch.equal(memory["image"][rows, 0, : int(count)], last)
    assert abs(make_update(networks)(batch)["first_kl"]) < 1e-6
    with set_recurrent_mode(True), torch.no_grad():
        one = networks.actor.get_dist_params(batch.copy())["logits"]
    assert one.isfinite().all()


@nightly
@torch.no_grad()
def test_an_episode_as_long_as_the_context_in_environments_that_reset_in_a_step_of_their_own():
    def make_env() -> gym.Env:
        return TimeLimit(Doors(), CONTEXT)

    networks = make()
    envs = SyncVectorEnv([make_env] * 3, autoreset_mode=AutoresetMode.NEXT_STEP)
    batches = collect(networks, envs, batches=4)
    batch = batches[-1]
    assert not batch[MASK].all()
    assert (batch[STEPS][..., 0] == CONTEXT).any()
    close(batch["logits"][batch[MASK]], loop(networks.actor, batches)[0][batch[MASK]])
    value, _ = loop(networks.critic, batches)
    GAE(**DISCOUNTS, value_network=networks.critic)(batch)
    close(batch["state_value"][batch[MASK]], value[batch[MASK]])


@nightly
def test_a_longer_episode_raises():
    networks = make("Pendulum-v1", context=12, double=False)
    said = r"context=12 remembers 12 frames.*episode has 13 .*actor_critic\(context="
    for options in ({}, {"exploration_type": ExplorationType.DETERMINISTIC}):
        with pytest.raises(ValueError, match=said):
            collect(networks, "Pendulum-v1", **options)
    networks = make("CartPole-v1", context=12, double=False)
    limit = lambda steps: lambda: TimeLimit(gym.make("CartPole-v1"), steps)  # noqa: E731
    batch = collect(networks, limit(13), frames_per_batch=39, batches=1)[0]
    with pytest.raises(ValueError, match=said):  # the value after the last step
        GAE(**DISCOUNTS, value_network=networks.critic)(batch)
    batch = collect(networks, limit(12), batches=1)[0]
    assert (batch[DONE] & ~batch[TERMINATED]).any()
    make_update(networks)(batch)
    batch["is_init"] = torch.zeros_like(batch["is_init"])
    with set_recurrent_mode(True), pytest.raises(ValueError, match=r"row lacks frames between"):
        networks.critic(batch.copy())
    batch["critic_" + STEPS] = torch.arange(20).view(20, 1).expand(3, 20, 2)
    with set_recurrent_mode(True), pytest.raises(ValueError, match=r"context=12.*episode has 19"):
        networks.critic(batch)


@nightly
def test_batches_that_lack_what_the_memory_needs_raise():
    networks = make()
    gae = GAE(**DISCOUNTS, value_network=networks.critic)
    batch = gae(checked(collect(networks)[-1]))
    update = make_update(networks, minibatch_size=4)
    row = int(batch[STEPS][:, 0, 0].argmax())
    cut = int((~batch["is_init"][row, 1:, 0]).nonzero()[0]) + 1
    late: Any = batch[row : row + 1, cut:]
    for block in (SequenceBatcher(5), gae, update):
        with pytest.raises(ValueError, match=r"lacks the frames between: it was cut along|earlier"):
            block(late.copy())
    start = int(batch["is_init"][row].squeeze(-1).nonzero()[0])
    gae(batch[row : row + 1, start:])  # nothing is missing from an episode's start on
    with pytest.raises(ValueError, match=r"earlier frame than the first.*set_recurrent_mode"):
        networks.critic(batch.copy())
    loss = DualClipPPOLoss(networks.actor, networks.critic)
    for key in ("transformer_memory", STEPS, "critic_" + STEPS, "is_init"):
        for block in [gae, update, loss][0 if key.startswith("critic") else 2 :]:
            with pytest.raises(KeyError, match=r"is not in the batch.*GymCollector"):
                block(batch.exclude(key))
    gap: Any = torch.cat([batch[:, :4], batch[:, 5:]], 1)
    other = SequenceBatcher(40, mask_key="mine")(batch)
    for given in (gap, other, torch.cat([batch, batch], 1)):
        with set_recurrent_mode(True), pytest.raises(ValueError, match="row lacks frames between"):
            networks.actor.get_dist(given)
    with pytest.raises(ValueError, match=r"holds inputs, which are never stale.*burn_in out"):
        SequenceBatcher(5, burn_in=2)(batch)
    with pytest.raises(ValueError, match=r"Pass batcher=SequenceBatcher"):
        PPOUpdate(update.step)
    with pytest.raises(ValueError, match="A batch of shape"):
        networks.critic(TensorDict(batch_size=[0]))


@nightly
def test_masked_rows_and_padding_do_not_change_losses():
    networks = make()
    loss = DualClipPPOLoss(networks.actor, networks.critic)
    batch = GAE(**DISCOUNTS, value_network=networks.critic)(checked(collect(networks)[-1]))
    sequences = SequenceBatcher(8)(batch)
    half: Any = sequences[: len(sequences) // 2]
    wide: Any = sequences.clone()
    wide[MASK][len(half) :] = False
    padded: Any = torch.cat([wide, wide], 1)
    padded[MASK][:, 8:] = False
    padded["observation"][~padded[MASK]] = torch.nan
    results = []
    for minibatch in (half, wide, padded):
        losses = loss(minibatch.copy())
        total = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
        results.append([total.detach(), *torch.autograd.grad(total, [*loss.parameters()])])
    close(results[1], results[0])
    close(results[2], results[0])


@nightly
@every_sharing
def test_functional_losses_and_float64_of_one_memory(shared: bool):
    networks = make(shared=shared)
    batch = GAE(**DISCOUNTS, value_network=networks.critic)(collect(networks)[-1])
    sequences = SequenceBatcher(5)(batch)
    found = [
        DualClipPPOLoss(networks.actor, networks.value, functional=x)(sequences.copy())
        for x in (True, False)
    ]
    for key in ("loss_objective", "loss_critic", "kl"):
        close(found[0][key], found[1][key])


@nightly
def test_training_goes_on_from_a_checkpoint_in_the_middle_of_an_episode(tmp_path: Path):
    def parts(seed: int) -> tuple[Any, dict[str, Any]]:
        networks = make()
        torch.manual_seed(seed)
        disturb(networks)
        update = make_update(networks)
        collector = GymCollector(DOORS, networks.policy, num_envs=3, frames_per_batch=60)
        return networks, {"collector": collector, "update": update}

    file = tmp_path / "run.pt"
    networks, run = parts(0)
    for _ in range(2):
        run["update"](run["collector"].rollout())
    save_checkpoint(file, run)
    found = []
    for seed in (1, 2):
        networks, run = parts(seed)
        load_checkpoint(file, run)
        run["collector"].set_seed(5)
        torch.manual_seed(3)
        for number in range(3):
            batch = run["collector"].rollout()
            assert bool(batch["is_init"][:, 0].all()) == (number == 0)  # episodes begin again
            statistics = run["update"](batch)
            assert abs(statistics["first_kl"]) < 1e-10
        found.append([*networks.policy.parameters()])
        run["collector"].shutdown()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@nightly
@torch.no_grad()
def test_a_copy_and_other_rows_of_a_batch_train_alike():
    networks = make()
    batch = checked(collect(networks)[-1])
    gae = GAE(**DISCOUNTS, value_network=networks.critic)
    expected = gae(batch.copy())["advantage"]
    for other in (batch.clone(), batch.contiguous(), batch.to("cpu"), batch[[2, 0]]):
        found = gae(other)["advantage"]
        close(found, expected if len(other) == 3 else expected[[2, 0]], 1e-6)


@nightly
def test_a_module_of_plain_inputs_and_its_options():
    transformer: Any = rl.CausalTransformer(3, 8, num_heads=2, max_seq_len=6)
    module = TransformerModule(transformer, {("a", "x"): Unbounded(3)}, "y", name="my_")
    assert module.in_keys == [
        ("a", "x"),
        ("my_transformer_memory", "a", "x"),
        "my_" + STEPS,
        "is_init",
    ]
    assert module.context == 5
    batch = TensorDict({"a": {"x": torch.randn(2, 4, 3)}}, [2, 4])
    batch["is_init"] = torch.zeros(2, 4, 1, dtype=torch.bool)
    batch["my_transformer_memory"] = {"a": {"x": torch.randn(2, 1, 5, 3).expand(2, 4, 5, 3)}}
    batch["my_transformer_steps"] = torch.tensor([[2, 0], [3, 1], [4, 2], [5, 3]]).expand(2, 4, 2)
    with set_recurrent_mode(True):
        output = module(batch.copy())["y"]
    inputs = torch.cat([batch["my_transformer_memory", "a", "x"][:, 0, :2], batch["a", "x"]], 1)
    expected, _ = transformer(inputs, torch.arange(6).expand(2, 6))
    close(output, expected[:, 2:], 1e-6)
    assert copy.deepcopy(module).in_keys == module.in_keys
    with pytest.raises(ValueError, match="one input, or several and an encoder"):
        TransformerModule(transformer, {"x": Unbounded(3), "z": Unbounded(1)}, "y")
    batch["is_init"] = torch.zeros(2, 4, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="it is one flag for each frame"):
        module(batch)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"heads": 3}, "memory_size=64 must be a multiple of heads=3"),
    "context": ({"context": 0}, "context must be"),
    "layers": ({"layers": 1.5}, "layers must be"),
    "lstm": ({"memory": "lstm", "context": 8}, "context, layers and heads are for a transformer"),
}


@nightly
@pytest.mark.parametrize("name", WRONG)
def test_options_that_do_not_fit_raise(name: str):
    options, said = WRONG[name]
    with pytest.raises(ValueError, match=said):
        actor_critic("CartPole-v1", **{"memory": "transformer", **options})


MAKERS: dict[str, Callable[[], object]] = {
    "actor_critic": lambda: actor_critic("CartPole-v1", memory="transformer"),
    "module": lambda: TransformerModule(nn.Linear(1, 1), {"x": Unbounded(1)}, "y"),
}


@pytest.mark.skipif(HAS_TRANSFORMER, reason="torchrl has a transformer")
@pytest.mark.parametrize("name", MAKERS)
def test_without_torchrls_transformer_an_error_names_the_nightly(name: str):
    with pytest.raises(ImportError, match=r"CausalTransformer.*pip install torchrl-nightly"):
        MAKERS[name]()


class Numbers(gym.Env):
    """Observations of a dtype, in episodes of 20 steps."""

    action_space = spaces.Discrete(2)

    def __init__(self, dtype: Any) -> None:
        is_byte = dtype is np.uint8
        self.observation_space = spaces.Box(0, 255 if is_byte else 1, (4,), dtype, seed=0)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self.observation_space.sample(), 1.0, self.t == 20, False, {}


@nightly
@pytest.mark.parametrize("dtype", [np.uint8, np.float64])
def test_every_batch_holds_the_memory_in_the_dtype_of_the_inputs(dtype: Any):
    """Also the first one, to whose tensors a worker writes the others."""
    torch.manual_seed(0)
    networks = actor_critic(Numbers(dtype), memory="transformer", context=20, shared=True)
    for p in networks.policy.parameters():
        p.data += 0.2 * torch.randn_like(p)
    normalizer = ObservationNormalizer(4)
    options: dict[str, Any] = {"num_envs": 2, "observation_transform": normalizer}
    make_env = lambda: Numbers(dtype)  # noqa: E731
    with GymCollector(make_env, networks.policy, frames_per_batch=40, **options) as collector:
        collector.rollout()
    normalizer.freeze()
    options |= {"worker_idx": 0, "return_same_td": True}  # as in torchrl's workers
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=networks.critic)
    loss = DualClipPPOLoss(networks.actor, networks.value)
    with GymCollector(make_env, networks.policy, frames_per_batch=30, **options) as collector:
        for _ in range(3):
            batch = collector.rollout().clone()
            assert batch[MEMORY].dtype == batch["observation"].dtype == torch.float32
            assert abs(float(loss(SequenceBatcher(None)(gae(batch)))["kl"])) < 1e-5


@nightly
def test_a_module_in_front_writes_the_inputs():
    """They are no entries that the loss reads, but the memory of a sequence is made of them."""
    torch.manual_seed(0)
    normalizer = ObservationNormalizer(4, out_key="normalized")
    transformer: Any = rl.CausalTransformer(4, 8, num_heads=2, max_seq_len=501)
    memory = TransformerModule(transformer, {"normalized": Unbounded(4)}, "memory")
    parts = normalizer, memory, TensorDictModule(nn.Linear(8, 2), ["memory"], ["logits"])
    actor = rl.ProbabilisticActor(
        TensorDictSequential(*parts),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    value = rl.ValueOperator(nn.Linear(8, 1), ["memory"])
    networks = SimpleNamespace(
        actor=actor, value=value, critic=TensorDictSequential(normalizer, memory, value)
    )
    update = make_update(networks, SequenceBatcher(16))
    with GymCollector("CartPole-v1", actor, num_envs=2, frames_per_batch=64) as collector:
        for _ in range(2):
            assert abs(update(collector.rollout())["first_kl"]) < 1e-5


def test_an_observation_may_have_the_name_of_a_memory():
    space = spaces.Dict(transformer_memory=spaces.Box(-1, 1, (2,), np.float32))

    class Named(Numbers):
        def __init__(self) -> None:
            self.observation_space = space

    actor, critic = actor_critic(Named())
    gae = GAE(gamma=0.9, lmbda=0.9, value_network=critic)
    with GymCollector(Named, actor, frames_per_batch=10) as collector:
        assert gae(collector.rollout())["advantage"].isfinite().all()
