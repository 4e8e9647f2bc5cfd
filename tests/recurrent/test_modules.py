"""Our recurrent modules against torchrl's, and when they are torchrl's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
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
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("shape", [(7,), (1, 1), (1, 6), (4, 9), (2, 3, 5)])
def test_outputs_and_gradients_are_those_of_torchrl(
    kind: type, layers: int, shape: tuple[int, ...]
):
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


def by_single_steps(module: Any, row: TensorDictBase) -> dict[Any, list[torch.Tensor]]:
    """Return the states after each step of a row, from the one stored at each episode's start."""
    keys = module.in_keys[1:-1]
    state: dict[Any, torch.Tensor] = {}
    after: dict[Any, list[torch.Tensor]] = {key: [] for key in keys}
    with set_recurrent_mode(False):
        for t in range(len(row)):
            step: Any = row[t].clone()
            if t and not step["is_init"]:
                step.update(state)
            step["is_init"] = torch.zeros(1, dtype=torch.bool)  # the stored state is the start
            step = module(step)
            state = {key: step.get(("next", key)) for key in keys}
            for key in keys:
                after[key].append(state[key])
    return after


@both
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("ends", [0, 0.3])
def test_the_state_after_each_run_is_that_of_single_steps(kind: type, layers: int, ends: float):
    ours, theirs = pair(kind, layers=layers)
    batch = draw(ours, 3, 8, ends=ends)
    made, of_theirs = ours(batch.clone()), theirs(batch.clone())
    is_last = torch.cat([batch["is_init"][:, 1:], torch.ones(3, 1, 1, dtype=torch.bool)], 1)
    for row in range(3):
        for key, states in by_single_steps(theirs, batch[row]).items():
            written = made.get(("next", key))[row]
            for t in range(8):
                expected = states[t] if is_last[row, t] else torch.zeros_like(states[t])
                torch.testing.assert_close(written[t], expected)
    torch.testing.assert_close(made, of_theirs)


@both
def test_a_state_before_padding_is_right_or_0(kind: type):
    ours, theirs = pair(kind)
    for ends in (0, 0.3):
        batch = draw(ours, 3, 8, ends=ends)
        valid = torch.arange(8) < torch.tensor([[8], [3], [5]])
        made = ours(batch.clone().set(MASK, valid))
        for key in ours.in_keys[1:-1]:
            written = made.get(("next", key))
            assert not written[~valid].any()
            assert written[0, -1].all()
            for row, steps in ((1, 3), (2, 5)):
                expected = by_single_steps(theirs, batch[row, :steps])[key][-1]
                found = written[row, steps - 1]
                assert not found.any() or torch.allclose(found, expected)


@both
def test_padding_is_not_looked_at(kind: type):
    ours, theirs = pair(kind)
    batch = draw(ours, 4, 9)
    valid = torch.arange(9) < torch.tensor([[9], [1], [4], [6]])
    valid[0, :2] = False  # burn-in: what comes before the last valid frame is run over
    dirty = batch.clone().set(MASK, valid)
    behind = torch.arange(9) >= torch.tensor([[9], [1], [4], [6]])
    dirty["x"][behind] = torch.nan
    dirty["is_init"][behind] = True
    made = ours(dirty)
    expected = theirs(batch.clone())
    torch.testing.assert_close(made["features"][~behind], expected["features"][~behind])
    assert not made["features"][behind].any()
    assert all(
        gradient.isfinite().all() for gradient in gradients(ours, made["features"])
    )  # the NaNs have a weight here


@both
def test_where_there_is_no_state_it_is_0(kind: type):
    ours, theirs = pair(kind, layers=2)
    batch = draw(ours, 3, 6, states=False)
    expected = theirs(batch.clone())["features"]
    torch.testing.assert_close(ours(batch)["features"], expected)


@both
def test_outside_the_recurrent_mode_it_is_torchrls(kind: type):
    ours, theirs = pair(kind)
    batch = draw(ours, 4)
    with set_recurrent_mode(False):
        torch.testing.assert_close(ours(batch.clone()), theirs(batch.clone()), rtol=0, atol=0)


@both
@pytest.mark.parametrize("option", ["bidirectional", "python_based"])
def test_what_is_not_served_is_the_parents(kind: type, option: str):
    ours, theirs = pair(kind, **{option: True})
    batch = draw(ours, 2, 4, ends=0, states=False)
    torch.testing.assert_close(ours(batch.clone()), theirs(batch.clone()), rtol=0, atol=0)


@both
def test_half_precision(kind: type):
    ours, theirs = (module.bfloat16() for module in pair(kind))
    batch = draw(ours, 2, 4).bfloat16()
    batch["is_init"] = batch["is_init"].bool()
    found, expected = ours(batch.clone())["features"], theirs(batch.clone())["features"]
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@both
def test_dropout_between_layers_in_training_alone(kind: type):
    ours, theirs = pair(kind, layers=2, dropout=0.5)
    batch = draw(ours, 2, 6)
    first, second = (ours(batch.clone())["features"] for _ in range(2))
    assert not torch.allclose(first, second)
    found, expected = ours.eval()(batch.clone()), theirs.eval()(batch.clone())
    torch.testing.assert_close(found["features"], expected["features"])


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")  # by flags()
@both
@pytest.mark.parametrize("ends", [0, 0.3])
def test_hooks_are_called_and_autocast_is_heeded(kind: type, ends: float):
    ours, theirs = (module.float() for module in pair(kind))
    batch = draw(ours, 2, 6, ends=ends).float()
    batch["is_init"] = batch["is_init"].bool()
    expected = theirs(batch.clone())
    calls: list[int] = []
    network = ours.lstm if kind is LSTMModule else ours.gru
    hook = network.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(ours(batch.clone()), expected)
    assert calls
    hook.remove()
    # Without AVX-512, oneDNN has no LSTM in bfloat16, and torch does not ask before it calls it.
    with torch.backends.mkldnn.flags(enabled=False), torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = ours(batch.clone()), theirs(batch.clone())
    assert found["features"].dtype is expected["features"].dtype
    torch.testing.assert_close(found["features"], expected["features"], rtol=0.02, atol=0.02)


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
def test_a_missing_episode_start_is_named(kind: type):
    ours, _ = pair(kind)
    with pytest.raises(KeyError, match="is_init"):
        ours(draw(ours, 2, 4).exclude("is_init"))


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
    fix = r"Append torchrl's InitTracker\(\) and .*append_transform\(module.make_tensordict_primer"
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
        with pytest.warns(RuntimeWarning, match="the memory begins at zero in every step"):
            found = module(batch.clone())["features"]
        torch.testing.assert_close(found, theirs(batch)["features"])


@both
def test_copies_share_nothing(kind: type):
    ours, _ = pair(kind)
    batch = draw(ours, 2, 4)
    before = ours(batch.clone())["features"].clone()
    twin = copy.deepcopy(ours)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    torch.testing.assert_close(ours(batch.clone())["features"], before, rtol=0, atol=0)
    assert not torch.equal(twin(batch.clone())["features"], before)


@both
def test_nothing_but_padding(kind: type):
    ours, _ = pair(kind)
    batch = draw(ours, 2, 4).set(MASK, torch.zeros(2, 4, dtype=torch.bool))
    made = ours(batch)
    assert not any(made.get(key).any() for key in ours.out_keys)


@both
def test_frames_between_the_last_valid_one_and_the_next_start_are_run_over(kind: type):
    """Of a row, all frames up to the last valid one are computed, and those after it are 0."""
    ours, theirs = pair(kind)
    batch = draw(ours, 2, 4)
    batch["is_init"] = torch.tensor([[0, 0, 1, 0], [1, 0, 0, 1]]).bool().unsqueeze(-1)
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 0, 0]]).bool()
    made = ours(batch.clone().set(MASK, mask))["features"]
    computed = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]).bool()
    torch.testing.assert_close(made[computed], theirs(batch)["features"][computed])
    assert not made[~computed].any()


BACKENDS = {"auto": {}, "pad": {}, "scan": {}, "python_based": {"python_based": True}}


@pytest.mark.filterwarnings("ignore")  # of hoptorch's, which takes itself for broken otherwise
@both
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_states_mean_the_same_whichever_backend_runs(kind: type, backend: str, layers: int):
    """Those after the last step of each run, and zeros elsewhere; torchrl's as well."""
    options = BACKENDS[backend] or {"recurrent_backend": backend}
    modules = pair(kind, layers=layers, **options)
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
                step["is_init"] = torch.zeros_like(start)  # else torchrl's would start from zeros
                step = module(step)
                for key in states:
                    found, expected = made.get(key)[:, time], step.get(key)[:, 0]
                    expected = torch.where(is_last[:, time, None, None], expected, 0)
                    torch.testing.assert_close(found, expected)
                    step.set(key[1], step.get(key))
