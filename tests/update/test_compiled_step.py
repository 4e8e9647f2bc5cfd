"""A compiled training step is an eager one, whatever changes between calls."""

from __future__ import annotations

import copy
import types
import warnings
from collections import OrderedDict
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tensordict import NonTensorStack, TensorDict, TensorDictBase, lazy_stack
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.modules import MaskedCategorical, ValueOperator

from ppokit import DualClipPPOLoss, KLEarlyStopper, PPOUpdate, TrainingStep, _compiling
from ppokit.update import compiled
from tests.blocks import Given, actor_of, make_actor, make_critic, make_minibatch, ppo_update
from tests.marks import slow
from tests.update.parts import make_loss, parameters_of
from tests.update.step_cases import KINDS_MARKED, make_case

EAGER = {"backend": "eager"}  # captures a graph, and runs it with torch's kernels


def minibatch(size: int = 8) -> Any:
    return make_minibatch(make_actor(), size)


def make_step(loss: Any = None, kind: Any = torch.optim.Adam, **options: Any) -> TrainingStep:
    loss = make_loss() if loss is None else loss
    return TrainingStep(loss, kind(loss.parameters(), lr=0.01), **{"compile": EAGER} | options)


@pytest.mark.filterwarnings("ignore:The KL divergence is:RuntimeWarning")
@pytest.mark.parametrize("name", KINDS_MARKED)
def test_compiled_steps_are_eager_steps(name: str):
    """Of several losses and optimizers, with stops, skips and changes between calls."""
    expected = make_case(name, compile=False).run()
    assert {bool(x["stepped"]) for x in expected["outputs"]} == (
        {True} if name == "masked" else {True, False}
    )
    case = make_case(name, compile=EAGER)
    found = case.run()
    assert "compiled" in case.step.extra_repr()
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"accumulate_grads": True}, 1e-6),
        slow({"amp_dtype": torch.bfloat16}, 1e-3),
        slow({"amp_dtype": torch.float16}, 5e-4),
        ({"amp_dtype": torch.float16, "accumulate_grads": True}, 5e-4),
    ],
    ids=["accumulated", "bfloat16", "float16", "float16, accumulated"],
)
def test_a_compiled_update_is_an_eager_one(options: dict[str, Any], tolerance: float):
    captured, results = [], []
    batches = [minibatch(24) for _ in range(3)]
    for compile in ({"backend": lambda graph, _: captured.append(1) or graph}, False):
        loss = make_loss()
        optimizer = torch.optim.SGD(loss.parameters(), lr=0.1, momentum=0.9)
        common = {"max_grad_norm": 0.5, "minibatch_size": 8, "seed": 0, "compile": compile}
        update = ppo_update(loss, optimizer, **common, **options)
        statistics = [update(batch.clone()) for batch in batches][-1]
        results.append((parameters_of(loss), statistics["loss_objective"]))
        if update.step.scaler is not None:
            assert update.step.scaler.get_scale() == 2.0**16
    assert len(captured) == 1
    (found, own), (expected, of_eager) = results
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert own == pytest.approx(of_eager, abs=10 * tolerance)


@pytest.mark.slow
def test_an_update_is_compiled_after_minibatches_of_other_keys():
    loss = make_loss()
    step = make_step(loss, max_grad_norm=0.5)
    batch = minibatch(20)
    for _ in range(3):
        for part in batch.clone().split(8):
            step(part.set("more", torch.zeros(len(part), 1)))
    step.reset()
    update = PPOUpdate(step, epochs=3, minibatch_size=8, seed=0)
    for _ in range(2):
        update(batch.clone())
        assert step.extra_repr().endswith("compiled")


@pytest.mark.slow
def test_an_update_goes_on_compiled_after_a_change_at_its_begin():
    runs = []

    def backend(graph: Any, _: Any) -> Any:
        return lambda *arguments: runs.append(1) or graph(*arguments)

    loss = make_loss()
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.01)
    update = ppo_update(loss, optimizer, minibatch_size=8, seed=0, compile={"backend": backend})
    update(minibatch(64))
    update(minibatch(64))
    loss.critic_coeff = loss.critic_coeff.double()  # another graph
    runs.clear()
    update(minibatch(64))
    assert len(runs) == 4 * 8  # the call that captured it was made by it


# -- changes between calls -----------------------------------------------------------


class Pair:
    """A compiled step and an eager one, in float64, on the same minibatches."""

    def __init__(self) -> None:
        self.steps = [
            make_step(make_loss().double(), max_grad_norm=0.5, compile=compile)
            for compile in (EAGER, False)
        ]
        self.number = 0

    def __call__(self, steps: int = 3) -> None:
        for _ in range(steps):
            self.number += 1
            torch.manual_seed(self.number)
            frames = minibatch().double()
            for step in self.steps:
                step(frames.clone())
        own, expected = (parameters_of(step.loss) for step in self.steps)
        torch.testing.assert_close(own, expected, rtol=1e-7, atol=1e-9)


def load_optimizer(step: TrainingStep) -> None:
    state = step.optimizer.state_dict()
    for entries in state["state"].values():
        entries["exp_avg"] = entries["exp_avg"] * 3
    step.optimizer.load_state_dict(state)


def move_optimizer(step: TrainingStep) -> None:
    """As after a stay in the memory of the host."""
    for entries in step.optimizer.state.values():
        for x in entries.values():
            x.data = x.data.clone() * 0.5


def clear_optimizer(step: TrainingStep) -> None:
    step.optimizer.state.clear()


def exchange_optimizer(step: TrainingStep) -> None:
    step.optimizer = torch.optim.SGD(step.loss.parameters(), lr=0.1)


def exchange_loss(step: TrainingStep) -> None:
    torch.manual_seed(7)
    step.loss = make_loss(clip_epsilon=0.01).double()
    step.optimizer = torch.optim.Adam(step.loss.parameters(), lr=0.01)


def hook_a_parameter(step: TrainingStep) -> None:
    next(iter(step.loss.parameters())).register_hook(lambda gradient: 2 * gradient)


def add_a_gradient(step: TrainingStep) -> None:
    for parameter in step.loss.parameters():
        parameter.grad = torch.ones_like(parameter)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The training step runs eagerly:RuntimeWarning")
def test_between_calls_the_user_may_change_loss_and_optimizer():
    for changes in (
        (load_optimizer, move_optimizer, clear_optimizer, add_a_gradient),
        (exchange_optimizer, exchange_loss),
        (hook_a_parameter,),
    ):
        pair = Pair()
        pair()
        for change in changes:
            for step in pair.steps:
                change(step)
            pair()


@pytest.mark.parametrize("where", ["layer", slow("all modules"), slow("new table")])
def test_while_there_is_a_hook_the_step_is_eager_and_names_it(where: str):
    step, calls = make_step(), []
    for _ in range(2):
        step(minibatch())
    layer = next(m for m in step.loss.modules() if isinstance(m, nn.Linear))
    if where == "new table":
        layer._forward_hooks = OrderedDict()
    register = layer.register_forward_hook
    if where == "all modules":
        register = torch.nn.modules.module.register_module_forward_hook
    with register(lambda *_: calls.append(1)):
        with pytest.warns(RuntimeWarning, match="runs eagerly: .*hook"):
            step(minibatch())
        assert calls
        assert "eager: a module" in step.extra_repr()
    calls.clear()
    step(minibatch())
    assert not calls
    assert "compiled" in step.extra_repr()


HEAD_CONSTRUCTORS = {"scale": 1.0}  # a name like that of a table of tensordict's


class UserHead(nn.Module):
    act = staticmethod(F.relu)
    uses_bias = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.tensor(2.0))  # without dimensions

    def forward(self, x: Tensor) -> Tensor:
        bias = self.linear.bias if self.uses_bias else None  # a parameter that is not always used
        y = F.linear(x, self.linear.weight, bias) * HEAD_CONSTRUCTORS["scale"] * self.scale
        return self.act(y) + y


@pytest.mark.slow
def test_changes_of_the_users_code_are_seen(monkeypatch: pytest.MonkeyPatch):
    results = []
    for compile in (False, EAGER):
        torch.manual_seed(0)
        head = UserHead()
        loss = DualClipPPOLoss(make_actor(), ValueOperator(head, in_keys=["observation"]))
        step = make_step(loss, torch.optim.AdamW, compile=compile)
        found = [step(minibatch())["loss_critic"] for _ in range(3)]
        with monkeypatch.context() as patch:
            for change in (
                partial(patch.setitem, HEAD_CONSTRUCTORS, "scale", 3.0),
                partial(patch.setattr, UserHead, "act", staticmethod(F.elu)),
                partial(patch.setattr, head, "uses_bias", True),
                partial(patch.setattr, head, "uses_bias", False),
            ):
                change()
                found += [step(minibatch())["loss_critic"] for _ in range(2)]
        results.append(torch.stack([*found, head.scale.detach(), head.linear.bias.detach()[0]]))
        assert (head.scale - 2.0).abs() > 0.05
    assert step.extra_repr().endswith("compiled")
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_parameter_that_is_thawed_before_a_skipped_step_is_trained():
    step, frames = make_step(nonfinite="skip"), minibatch()
    weight = next(step.loss.parameters()).requires_grad_(False)
    for _ in range(2):
        step(frames)
    weight.requires_grad_()
    bad = frames.clone()
    bad["advantage"][0] = torch.nan
    assert not step(bad)["stepped"]
    before = weight.detach().clone()
    for _ in range(2):
        step(frames)
    assert not torch.equal(weight, before)
    assert "compiled" in step.extra_repr()


@pytest.mark.slow
def test_errors_do_not_end_compiling():
    """A minibatch that lacks an entry, and a call without gradients, raise as in eager mode."""
    step, frames = make_step(), minibatch()
    for _ in range(2):
        step(frames.clone())
    before = parameters_of(step.loss)
    with pytest.raises(KeyError, match="action"):
        step(frames.exclude("action"))
    with torch.no_grad(), pytest.raises(ValueError, match="has a gradient"):
        step(frames.clone())
    assert torch.equal(parameters_of(step.loss), before)
    step(frames)
    assert "compiled" in step.extra_repr()
    other = copy.deepcopy(step)  # which captures its own graph
    for one in (step, other, other, step):
        one(frames)
    torch.testing.assert_close(parameters_of(step.loss), parameters_of(other.loss))


# -- steps that run eagerly ------------------------------------------------------------


class Counts(nn.Linear):
    """Scales its output by the number of calls."""

    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(input) * (1 + 0.1 * self.calls)


@pytest.mark.slow
def test_networks_that_change_in_each_call():
    results = []
    batches = [minibatch(24) for _ in range(3)]
    for compile in (EAGER, False):
        loss = make_loss()
        torch.manual_seed(3)
        loss.critic_network.module = Counts(4, 1)
        options = {"minibatch_size": 8, "seed": 0, "compile": compile}
        update = ppo_update(loss, torch.optim.SGD(loss.parameters(), lr=0.1), **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for batch in batches:
                update(batch.clone())
        results.append((parameters_of(loss), loss.critic_network.module.calls))
    torch.testing.assert_close(*results)


class OfTasks(nn.Module):
    """A loss that reads a text."""

    in_keys = ("x", "task")

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, minibatch: TensorDictBase) -> TensorDict:
        factor = {"walk": 1.0, "run": 3.0}[minibatch["task"][0]]
        return TensorDict({"loss_a": factor * (self.weight * minibatch["x"]).square().mean()})


def test_a_loss_that_reads_a_text_runs_eagerly(monkeypatch: pytest.MonkeyPatch):
    """Forms without guards would keep the text of the minibatch before."""
    monkeypatch.setattr(compiled, "WORTH", 1)
    found = []
    for compile in (False, EAGER):
        torch.manual_seed(0)
        loss = OfTasks()
        options = {"compile": compile, "epochs": 1, "minibatch_size": 2, "shuffle": False}
        update = ppo_update(loss, torch.optim.SGD(loss.parameters(), lr=0.1), **options)
        batch = TensorDict({"x": torch.randn(12, dtype=torch.float64)}, [12])
        batch["task"] = NonTensorStack.from_list(["walk"] * 6 + ["run"] * 6)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append([update(batch.clone())["loss_a"] for _ in range(3)])
        if compile:
            assert "is no tensor" in repr(update.step)
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The training step runs eagerly. .*graphs:RuntimeWarning")
def test_a_functional_loss_and_options_that_change_in_each_step_run_eagerly(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(_compiling, "FREE_TRACES", 2)  # each takes seconds
    step = make_step(make_loss(functional=True))
    with pytest.warns(RuntimeWarning, match="runs eagerly: functional=True.*functional=False"):
        step(minibatch())
    assert "functional=True" in repr(step)
    step = make_step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for number in range(4):
            step.optimizer.param_groups[0]["weight_decay"] = number / 100
            assert step(minibatch())["stepped"]
    assert "changed again after" in step.extra_repr()


# -- KL stop -----------------------------------------------------------------------------


@pytest.mark.parametrize(("nonfinite", "kl_key"), [slow(None, "kl"), ("skip", "kl_approx")])
def test_a_kl_that_is_not_finite_decides_as_in_eager_mode(nonfinite: Any, kl_key: str):
    found = []
    for compile in (EAGER, False):
        stopper = KLEarlyStopper(0.5, kl_key=kl_key, check_every=2)
        own: Any = {"stopper": stopper, "nonfinite": nonfinite, "compile": compile}
        step = make_step(kind=torch.optim.SGD, **own)
        minibatches = [minibatch() for _ in range(4)]
        minibatches[2]["action_log_prob"][0] = -torch.inf
        minibatches[3]["action_log_prob"][0] = torch.inf
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            steps = [bool(step(frames)["stepped"]) for frames in minibatches]
        found.append((steps, step.stopped))
    assert found[0] == found[1]


# -- many steps --------------------------------------------------------------------------


@pytest.mark.slow
def test_a_hundred_steps_in_one_process_are_all_compiled():
    captured: list[int] = []
    for _ in range(100):
        step = make_step(compile={"backend": lambda graph, _: captured.append(1) or graph})
        for _ in range(3):
            step(minibatch())
        assert step.extra_repr().endswith("compiled")
    assert len(captured) == 100


@pytest.mark.slow
def test_the_first_step_after_loading_a_state_is_captured(monkeypatch: pytest.MonkeyPatch):
    """A divergence of torch's that was not computed before fills a table in its first call."""
    logits = TensorDictModule(nn.Linear(4, 3), ["observation"], ["logits"])
    actor = actor_of(logits, MaskedCategorical, {"logits": "logits", "mask": "action_mask"})
    loss = DualClipPPOLoss(actor, make_critic(), kl_coeff=0.3)
    optimizer = torch.optim.Adam(loss.parameters())
    batch = minibatch(24).set("action_mask", torch.ones(24, 3, dtype=torch.bool))
    with torch.no_grad():
        batch.update(actor(batch))
    PPOUpdate(TrainingStep(loss, optimizer))(batch.clone())  # makes Adam's state
    monkeypatch.setattr(torch.distributions.kl, "_KL_MEMOIZE", {})
    step = TrainingStep(loss, optimizer, compile=EAGER)
    PPOUpdate(step, minibatch_size=8)(batch.clone())
    assert repr(step).endswith("compiled)")


@pytest.mark.parametrize("scheduled", [slow(False), True])
def test_a_wrapper_of_the_optimizers_step_is_called(scheduled: bool):
    loss, calls = make_loss(), []
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.01)
    inner = optimizer.step

    def wrapper(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(1)
        return inner(*args, **options)

    optimizer.step = types.MethodType(wrapper, optimizer)
    if scheduled:
        torch.optim.lr_scheduler.StepLR(optimizer, 100)
    step, batch = TrainingStep(loss, optimizer, compile=EAGER), minibatch()
    for _ in range(4):
        step(batch)
    assert len(calls) == 4


class Tasks(DualClipPPOLoss):
    """Reads an entry that only some minibatches have."""

    def forward(self, tensordict: Any) -> Any:
        losses = super().forward(tensordict)
        for name in "abcd":
            if name in tensordict.keys():
                losses["loss_objective"] = losses["loss_objective"] * tensordict[name].mean()
        return losses


@pytest.mark.slow
def test_kinds_of_minibatches_in_turn_have_a_graph_each():
    """They do not count as code that changes in each call."""
    kinds = [minibatch() for _ in range(5)]
    for name, kind in zip("abcd", kinds[1:], strict=True):
        kind[name] = torch.rand(8)
    steps = [
        make_step(Tasks(make_actor(), make_critic()), compile=compile) for compile in (EAGER, False)
    ]
    for _ in range(4):
        for kind in kinds:
            for step in steps:
                step(kind.clone())
    assert repr(steps[0]).endswith("compiled)")
    own, expected = (parameters_of(step.loss) for step in steps)
    torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("first", [slow(False), True])
def test_a_lazily_stacked_minibatch_is_compiled(first: bool):
    steps = [make_step(compile=compile) for compile in (EAGER, False)]
    frames = [minibatch() for _ in range(4)]
    for n in range(4):
        given = lazy_stack([*frames[n].unbind(0)]) if n == 1 or (first and not n) else frames[n]
        for step in steps:
            step(given.clone())
    assert repr(steps[0]).endswith("compiled)")
    own, expected = (parameters_of(step.loss) for step in steps)
    torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_captures_that_are_interrupted_are_made_again():
    """Five of them do not count as captures that do not fit."""
    interrupts = [True]

    def backend(graph: Any, _: Any) -> Any:
        if interrupts[0]:
            raise KeyboardInterrupt
        return graph

    step = make_step(compile={"backend": backend})
    step(minibatch())
    for _ in range(9):
        with pytest.raises(KeyboardInterrupt):
            step(minibatch())
    interrupts.clear()
    interrupts.append(False)
    step(minibatch())
    assert repr(step).endswith("compiled)")


@pytest.mark.slow
def test_steps_that_are_skipped_after_a_thaw_do_not_end_compiling():
    loss = make_loss()
    thawed = [*loss.critic_network.parameters()]
    for p in thawed:
        p.requires_grad_(False)
    optimizer = torch.optim.Adam(loss.actor_network.parameters(), lr=0.01)
    step = TrainingStep(loss, optimizer, compile=EAGER, nonfinite="skip")
    for _ in range(3):
        step(minibatch())
    for p in thawed:
        p.requires_grad_(True)
    optimizer.add_param_group({"params": thawed})
    bad = minibatch()
    bad["advantage"][0] = torch.nan
    for _ in range(7):
        assert not step(bad)["stepped"]
    for _ in range(3):
        step(minibatch())
    assert repr(step).endswith("compiled)")


class Plain(torch.optim.Optimizer):
    """Has its own name for the rate."""

    def __init__(self, params: Any, rate: float) -> None:
        super().__init__(params, {"rate": rate})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["rate"] * p.grad


@pytest.mark.parametrize("compile", [EAGER, False])
def test_an_optimizer_without_a_learning_rate(compile: Any):
    loss, expected = make_loss(), make_loss()
    update = ppo_update(loss, Plain(loss.parameters(), 0.1), compile=compile, seed=0)
    other = ppo_update(expected, torch.optim.SGD(expected.parameters(), 0.1), seed=0)
    for frames in [minibatch(24) for _ in range(3)]:
        assert "lr" not in update(frames.clone())
        other(frames.clone())
    torch.testing.assert_close(parameters_of(loss), parameters_of(expected))


def test_the_norm_of_float16_gradients_is_that_of_eager_mode():
    """Their squares are below the smallest number of float16."""
    norms = []
    for compile in (EAGER, False):
        loss = Given(lambda w, x: TensorDict({"loss_any": (w * x["x"]).sum()}, []), "x")
        loss.weight = nn.Parameter(torch.ones(4, dtype=torch.float16))
        step = make_step(loss, torch.optim.SGD, compile=compile)
        frames = TensorDict({"x": torch.full((4,), 1e-4, dtype=torch.float16)}, [4])
        norms += [float(step(frames)["grad_norm"]) for _ in range(3)]
    assert norms == pytest.approx([2e-4] * 6, rel=1e-2)
