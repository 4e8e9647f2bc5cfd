"""LSTMModule and GRUModule against torchrl's modules, and options that torchrl's code serves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
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
    keys = {"in_key": "x", "out_key": "features", "default_recurrent_mode": True}
    modules = [
        make(INPUTS, SIZE, num_layers=layers, **keys, **options).double() for make in (kind, theirs)
    ]
    modules[0].load_state_dict(modules[1].state_dict())
    return modules[0], modules[1]


def draw(module: Any, *shape: int, ends: float = 0.2, states: bool = True) -> TensorDict:
    """Return frames with episodes that start anywhere, and states at each of them."""
    torch.manual_seed(1)
    network = module.lstm if isinstance(module, TorchRLLSTMModule) else module.gru
    batch = TensorDict(
        {
            "x": torch.randn(*shape, INPUTS, dtype=torch.float64),
            "is_init": torch.rand(*shape, 1) < ends,
        },
        shape,
    )
    for key in module.in_keys[1:-1] if states else []:
        size = (*shape, network.num_layers, SIZE)
        batch.set(key, torch.randn(size, dtype=torch.float64))
    return batch


def gradients(module: nn.Module, output: torch.Tensor, *more: torch.Tensor) -> list[torch.Tensor]:
    weight = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return list(torch.autograd.grad((output * weight).sum(), [*module.parameters(), *more]))


@both
@pytest.mark.parametrize(
    ("layers", "shape"), [(1, (7,)), (2, (1, 1)), (1, (4, 9)), (3, (4, 9)), (2, (2, 3, 5))]
)
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
    actor = ProbabilisticActor(
        TensorDictSequential(module, head), in_keys=["logits"], distribution_class=Categorical
    )
    env = TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True))
    added = module.make_tensordict_primer() if missing == "is_init" else InitTracker()
    env.append_transform(added)
    fix = r".*append InitTracker\(\) and the module's make_tensordict_primer"
    options: Any = {"frames_per_batch": 8, "auto_register_policy_transforms": False}
    if missing == "is_init":
        with pytest.raises(KeyError, match=f"'is_init' is not in the batch. {fix}"):
            next(iter(Collector(env, actor, **options)))
    else:
        with pytest.warns(RuntimeWarning, match=f"'{module.in_keys[1]}'.*not in the batch.*{fix}"):
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
def test_a_batch_of_padding_only_gives_zeros(kind: type):
    ours, _ = pair(kind)
    batch = draw(ours, 2, 4).set(MASK, torch.zeros(2, 4, dtype=torch.bool))
    made = ours(batch)
    assert not any(made.get(key).any() for key in ours.out_keys)


@pytest.mark.filterwarnings("ignore")  # of hoptorch
@both
@pytest.mark.parametrize(
    "backend", ["auto", "pad", "python_based", pytest.param("scan", marks=pytest.mark.slow)]
)
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
