"""LSTMModule and GRUModule against torchrl's modules and against a slow loop."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, InitTracker, TransformedEnv
from torchrl.modules import GRUModule as TorchRLGRUModule
from torchrl.modules import LSTMModule as TorchRLLSTMModule
from torchrl.modules import ProbabilisticActor, set_recurrent_mode

from ppokit import GRUModule, LSTMModule

INPUTS, SIZE = 3, 5
MASK = ("collector", "mask")
both = pytest.mark.parametrize("kind", [LSTMModule, GRUModule])


def pair(kind: type, *, layers: int = 1, **options: Any) -> tuple[Any, Any]:
    """Return our module and torchrl's, with the same parameters, in float64."""
    torch.manual_seed(0)
    theirs = TorchRLLSTMModule if kind is LSTMModule else TorchRLGRUModule
    options |= {"in_key": "x", "out_key": "features", "default_recurrent_mode": True}
    ours, theirs = (x(INPUTS, SIZE, layers, **options).double() for x in (kind, theirs))
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def draw(module: Any, *shape: int, ends: float = 0.2, states: bool = True) -> TensorDict:
    """Return frames with episodes that start anywhere, and states at each of them."""
    torch.manual_seed(1)
    network = module.lstm if isinstance(module, TorchRLLSTMModule) else module.gru
    batch = TensorDict({"x": torch.randn(*shape, INPUTS, dtype=torch.float64)}, shape)
    batch["is_init"] = torch.rand(*shape, 1) < ends
    for key in module.in_keys[1:-1] if states else []:
        size = (*shape, network.num_layers, SIZE)
        batch.set(key, torch.randn(size, dtype=torch.float64))
    return batch


def gradients(module: nn.Module, output: torch.Tensor, *more: torch.Tensor) -> list[torch.Tensor]:
    weight = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return list(torch.autograd.grad((output * weight).sum(), [*module.parameters(), *more]))


SHAPES = [(1, (7,)), (2, (1, 1)), (1, (4, 9)), (3, (4, 9)), (2, (2, 3, 5))]


@both
@pytest.mark.parametrize(("layers", "shape"), SHAPES)
def test_outputs_and_gradients_equal_torchrls(kind: type, layers: int, shape: tuple[int, ...]):
    ours, theirs = pair(kind, layers=layers)
    batch = draw(ours, *shape)
    x = [batch["x"].clone().requires_grad_() for _ in range(2)]
    made = [m(batch.clone().set("x", own)) for m, own in zip((ours, theirs), x, strict=True)]
    torch.testing.assert_close(made[0]["features"], made[1]["features"])
    found = gradients(ours, made[0]["features"], x[0])
    expected = gradients(theirs, made[1]["features"], x[1])
    for pair_of in zip(found, expected, strict=True):
        torch.testing.assert_close(*pair_of)
    for key in ours.out_keys[1:]:
        assert made[0].get(key).shape == made[1].get(key).shape


@both
def test_functional_parameters_are_read_at_each_call(kind: type):
    ours, theirs = pair(kind)
    batch = draw(ours, 2, 4)
    other, _ = pair(kind)
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    with TensorDict.from_module(ours).to_module(other):
        made = other(batch.clone())["features"]
    torch.testing.assert_close(made, theirs(batch.clone())["features"])
    assert not torch.equal(other(batch.clone())["features"], made)


@both
@pytest.mark.parametrize("missing", ["is_init", "the primer"])
def test_in_torchrls_collector_a_missing_transform_is_named(kind: type, missing: str):
    module = kind(4, SIZE, in_key="observation", out_key="features")
    head = TensorDictModule(nn.Linear(SIZE, 2), ["features"], ["logits"])
    network = TensorDictSequential(module, head)
    actor = ProbabilisticActor(network, in_keys=["logits"], distribution_class=Categorical)
    env = TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True))
    added = module.make_tensordict_primer() if missing == "is_init" else InitTracker()
    env.append_transform(added)
    fix = r".*append InitTracker\(\) and the module's make_tensordict_primer"
    options: Any = {"frames_per_batch": 8, "auto_register_policy_transforms": False}
    expected = pytest.raises(KeyError, match=f"'is_init' is not in the batch. {fix}")
    if missing == "the primer":
        said = f"'{module.in_keys[1]}'.*not in the batch.*{fix}"
        expected = pytest.warns(RuntimeWarning, match=said)
    with expected:
        next(iter(Collector(env, actor, **options)))


@both
def test_the_first_step_of_an_episode_needs_no_state(kind: type):
    module, theirs = pair(kind)
    batch = draw(module, 4, ends=1.1, states=False)
    with set_recurrent_mode(False):
        torch.testing.assert_close(module(batch.clone())["features"], theirs(batch)["features"])
        batch = draw(module, 4, ends=0.5, states=False)
        with pytest.warns(RuntimeWarning, match="the state begins at zero in every step"):
            found = module(batch.clone())["features"]
        torch.testing.assert_close(found, theirs(batch)["features"])


@both
def test_a_step_at_inference_without_is_init_names_what_to_pass(kind: type):
    module = kind(3, SIZE, in_key="x", out_key="features")
    with pytest.raises(KeyError, match=r"'is_init' is not in .* pass True at the first step"):
        module(TensorDict({"x": torch.zeros(2, 3)}, [2]))


@pytest.mark.parametrize("width", [0, 2])
@both
def test_flags_of_another_shape_are_named(kind: type, width: int):
    module, _ = pair(kind)
    batch = draw(module, 2, 4)
    batch["is_init"] = torch.zeros(2, 4, width, dtype=torch.bool)
    with pytest.raises(ValueError, match=rf"'is_init' has shape \[2, 4, {width}\]; it is one flag"):
        module(batch)


@both
def test_a_batch_of_padding_only_gives_zeros(kind: type):
    ours, _ = pair(kind)
    batch = draw(ours, 2, 4).set(MASK, torch.zeros(2, 4, dtype=torch.bool))
    made = ours(batch)
    assert not any(made.get(key).any() for key in ours.out_keys)


BACKENDS = ["auto", "pad", "python_based", pytest.param("scan", marks=pytest.mark.slow)]


@pytest.mark.filterwarnings("ignore")  # of hoptorch
@both
@pytest.mark.parametrize("backend", BACKENDS)
def test_states_of_every_backend_are_those_after_each_run(kind: type, backend: str):
    """Zeros elsewhere; torchrl's modules write the same."""
    is_python = backend == "python_based"
    options = {"python_based": True} if is_python else {"recurrent_backend": backend}
    modules = pair(kind, layers=2, **options)
    batch = draw(modules[0], 3, 8)
    is_last = torch.ones(3, 8, dtype=torch.bool)
    is_last[:, :-1] = batch["is_init"][:, 1:, 0]
    states = [("next", key) for key in modules[0].in_keys[1:-1]]
    for module in modules:
        made = module(batch.clone())
        step = batch[:, :1].clone()
        with set_recurrent_mode(False):
            for time in range(8):
                step.update(batch[:, time : time + 1].select("x", "is_init"))
                start = step["is_init"] if time else torch.ones_like(step["is_init"])
                for key in module.in_keys[1:-1]:
                    fresh, goes_on = batch[:, time : time + 1].get(key), step.get(key)
                    step.set(key, torch.where(start[..., None], fresh, goes_on))
                step["is_init"] = torch.zeros_like(start)  # torchrl's would start from zeros
                step = module(step)
                for key in states:
                    found, expected = made.get(key)[:, time], step.get(key)[:, 0]
                    expected = torch.where(is_last[:, time, None, None], expected, 0)
                    torch.testing.assert_close(found, expected)
                    step.set(key[1], step.get(key))


@both
def test_padding_changes_no_gradient_whatever_its_own_would_be(kind: type):
    module, _ = pair(kind)
    batch = draw(module, 3, 6)
    batch[MASK] = mask = torch.ones(3, 6, dtype=torch.bool)
    mask[1, 3:], mask[2] = False, False
    batch["is_init"][:, 1:] = False
    unknown = batch.clone()
    for key in module.in_keys[1:-1]:
        unknown[key][2] = torch.nan  # of a row of padding alone
    unknown = module(unknown)
    assert not unknown["features"][~mask].any()
    assert all(unknown[key].isfinite().all() for key in module.out_keys)
    found = module(batch)
    roots = found["features"][:2].square().sum(-1).sqrt()  # its slope is infinite in padding
    torch.where(mask[:2], roots, 0).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


# -- a slow loop over single steps, on random batches ------------------------------------


def draw_network(seed: int) -> tuple[nn.RNNBase, TensorDict, list[str]]:
    """Return a network, a batch ``[B, T]`` and the names of its states."""
    draws = random.Random(seed)
    torch.manual_seed(seed)
    kind, dtype = draws.choice([nn.LSTM, nn.GRU]), draws.choice([torch.float64, torch.float32])
    inputs, size, layers = (draws.choice(x) for x in ([1, 3, 8], [1, 4, 17], [1, 1, 3]))
    network = kind(inputs, size, layers, batch_first=True, bias=draws.random() < 0.8, dtype=dtype)
    names = ["h", "c"] if kind is nn.LSTM else ["h"]
    rows, steps = draws.choice([1, 2, 5]), draws.choice([1, 2, 5, 13])
    x = torch.randn(rows, steps, inputs, dtype=dtype)
    batch = TensorDict({}, [rows, steps])
    if draws.random() < 0.6:
        lengths = torch.tensor([draws.randint(draws.choice([0, 1]), steps) for _ in range(rows)])
        mask = torch.arange(steps) < lengths.unsqueeze(1)
        if draws.random() < 0.3:  # frames in between that are not valid either
            mask &= torch.rand(rows, steps) < 0.7
        batch["collector", "mask"] = mask
        x = x.masked_fill(~until_the_last(mask).unsqueeze(-1), torch.nan)
    batch["x"] = x.requires_grad_()
    batch["is_init"] = torch.rand(rows, steps, 1) < draws.choice([0.0, 0.2, 0.6])
    for name in names if draws.random() < 0.8 else ():
        state = torch.randn(rows, steps, layers, size, dtype=draws.choice([dtype, torch.float32]))
        batch[name] = state.requires_grad_()
    return network, batch, names


def until_the_last(mask: Tensor) -> Tensor:
    """True up to the last True of each row."""
    return mask.flip(1).cummax(1).values.flip(1)


def step_by_step(network: nn.RNNBase, batch: TensorDict, names: list[str]) -> Any:
    """Return the output, and the states after each run; zeros elsewhere."""
    (rows, steps), x = batch.shape, batch["x"].nan_to_num()
    real = until_the_last(batch.get(("collector", "mask"), torch.ones(rows, steps).bool()))
    starts = batch["is_init"].squeeze(-1)
    zeros = x.new_zeros(network.num_layers, 1, network.hidden_size)
    output, after = [], []
    for row in range(rows):
        for t in range(steps):
            if t == 0 or starts[row, t]:
                stored = [batch[x][row, t].unsqueeze(1).to(zeros) for x in names if x in batch]
                states = stored or [zeros] * len(names)
            if not real[row, t]:
                output.append(zeros[-1, 0])
                after.append([zeros[:, 0] for _ in names])
                continue
            first: Any = tuple(states) if len(names) == 2 else states[0]  # pyright: ignore
            made, new = network(x[row : row + 1, t : t + 1], first)
            states = list(new) if len(names) == 2 else [new]
            ends = t == steps - 1 or starts[row, t + 1] or not real[row, t + 1]
            output.append(made[0, 0])
            after.append([state[:, 0] if ends else zeros[:, 0] for state in states])
    columns = [torch.stack(column) for column in (output, *zip(*after, strict=True))]
    found, *states = (column.unflatten(0, (rows, steps)) for column in columns)
    return found, states


@pytest.mark.parametrize("seed", range(30))
def test_outputs_states_and_gradients_equal_the_slow_loop(seed: int):
    network, batch, names = draw_network(seed)
    kind, of = (LSTMModule, "lstm") if isinstance(network, nn.LSTM) else (GRUModule, "gru")
    keys = {"in_keys": ["x", *names], "out_keys": ["y", *(("next", name) for name in names)]}
    module = kind(**{of: network}, default_recurrent_mode=True, **keys)
    made = module(batch.copy())
    output, after = step_by_step(network, batch, names)
    is_double = output.dtype is torch.float64
    close = dict(zip(("rtol", "atol"), (1e-9, 1e-9) if is_double else (2e-4, 2e-5), strict=True))
    torch.testing.assert_close(made["y"], output, **close)
    weight = torch.randn_like(output)
    total, expected = (made["y"] * weight).sum(), (output * weight).sum()
    with torch.no_grad():
        exact = module(batch.copy())
    for name, state in zip(names, after, strict=True):
        torch.testing.assert_close(exact["next", name], state, **close)
        # With gradients the state after a row that ends in padding may be unknown, and is 0.
        is_known = made["next", name].flatten(-2).any(-1)[..., None, None]
        torch.testing.assert_close(made["next", name], state * is_known, **close)
        weight = torch.randn_like(state) * is_known
        total = total + (made["next", name] * weight).sum()
        expected = expected + (state * weight).sum()
    if not expected.requires_grad:
        return
    inputs = [*network.parameters(), *(batch[key] for key in ("x", *names) if key in batch)]
    found, theirs = (
        torch.autograd.grad(x, inputs, allow_unused=True, materialize_grads=True)
        for x in (total, expected)
    )
    for gradient, of_theirs in zip(found, theirs, strict=True):
        scale = of_theirs.abs().max().clamp(min=1)
        torch.testing.assert_close(gradient / scale, of_theirs / scale, **close)
