"""Training steps as CUDA graphs: on CUDA, and with a recorder of operators on the CPU."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from gymnasium.spaces import Box

from ppokit import GAE, DualClipPPOLoss, TrainingStep
from ppokit.networks import actor_critic
from ppokit.update.compiled import CompiledStep
from tests.blocks import make_actor, make_critic, make_minibatch, ppo_update
from tests.fake_cuda_graph import RecordedGraph, pretend_cuda
from tests.update.parts import make_batch, make_loss
from tests.update.step_cases import KINDS, Case, clip_harder, halve_rates, make_case, move_data


def test_compile_is_checked():
    loss = make_loss()
    optimizer = torch.optim.Adam(loss.parameters())
    with pytest.raises(ValueError, match=r"needs CUDA, and the parameters are on cpu"):
        TrainingStep(loss, optimizer, compile="cudagraphs")
    with pytest.raises(ValueError, match=r"compile must be a bool, 'cudagraphs' or options"):
        TrainingStep(loss, optimizer, compile="reduce-overhead")
    with pytest.raises(ValueError, match=r"compile=\{'mode': .*excludes options.*max_autotune"):
        TrainingStep(loss, optimizer, compile={"mode": "reduce-overhead"})


def replace_coefficient(step: TrainingStep) -> None:
    step.loss.critic_coeff = step.loss.critic_coeff * 0.5


CHANGES = ((), (replace_coefficient,), (move_data,), (clip_harder, halve_rates))


Results = tuple[list[dict[str, Any]], list[torch.Tensor]]


def train(name: str, compile: Any = False, **options: Any) -> Results:
    """Return outputs and parameters after four batches, with a change between them."""
    records = compile == "recorded"
    case = make_case(name, compile=not records and compile, **options)
    step, outputs = case.step, []
    if records:
        step.graphs = CompiledStep({"backend": "aot_eager"}, replays=True)
    for changes in CHANGES:
        for change in changes:
            change(step)
        for number in (0, 1, 0, 1, 0, 2, 1):
            outputs.append(dict(step(case.minibatches[number].clone()).items()))
        step.reset()
    return outputs, [p.detach() for p in step.loss.parameters()]


@pytest.mark.filterwarnings("ignore:The KL divergence is:RuntimeWarning")
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.slow
def test_replayed_steps_are_eager_steps(name: str, monkeypatch: pytest.MonkeyPatch):
    pretend_cuda(monkeypatch)
    expected = train(name)
    found = train(name, "recorded")
    # In each batch two steps check guards, and so do the step of the other size and the next. In
    # the first, one captures the form and one confirms it; it is late if a step creates the state.
    creates_state = name in ("masked", "a2c")
    assert RecordedGraph.captures == 4 - creates_state
    assert RecordedGraph.replays == 3 * 3 + (not creates_state)
    check(found, expected)


def check(found: Results, expected: Results) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9, equal_nan=True)


def replaying_case(name: str = "masked") -> Case:
    case = make_case(name, compile=False)
    case.step.graphs = CompiledStep({"backend": "aot_eager"}, replays=True)
    return case


@pytest.mark.slow
def test_other_entries_are_not_replayed(monkeypatch: pytest.MonkeyPatch):
    pretend_cuda(monkeypatch)
    found: list[Any] = []
    minibatch: Any = None
    step: Any = None
    for replays in (False, True):
        case = replaying_case() if replays else make_case("masked", compile=False)
        step = case.step
        for number in range(12):
            minibatch = case.minibatches[number % 2].clone()
            if number >= 6:
                minibatch["collector", "mask"] = torch.arange(16) % 2 == 0
            step(minibatch)
        found.append([p.detach() for p in step.loss.parameters()])
    assert RecordedGraph.captures == 2
    torch.testing.assert_close(*found, rtol=1e-7, atol=1e-9)
    with pytest.raises(ValueError, match="shape"):
        step(minibatch.set("observation", minibatch["observation"][:, :1]))


@pytest.mark.slow
def test_minibatches_of_many_sizes(monkeypatch: pytest.MonkeyPatch):
    pretend_cuda(monkeypatch)
    case = replaying_case()
    step = case.step
    for size in (16, *range(2, 13), 16):
        for _ in range(5):
            step(case.minibatches[0][:size].clone())
    assert RecordedGraph.captures == 4  # further sizes share a graph, which is not replayed
    assert "compiled" in step.extra_repr()


# -- on a GPU ----------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The KL divergence is:RuntimeWarning")
@pytest.mark.parametrize("name", KINDS)
def test_on_a_gpu_replayed_steps_are_eager_steps(name: str):
    check(train(name, "cudagraphs", device="cuda"), train(name, device="cuda"))


@pytest.mark.gpu
def test_on_a_gpu_each_replay_draws_other_numbers_and_does_not_wait():
    actor = make_actor("tanh_normal")  # whose entropy is sampled
    loss = DualClipPPOLoss(actor, make_critic()).cuda()
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.0)
    step = TrainingStep(loss, optimizer, max_grad_norm=0.5, compile="cudagraphs")
    minibatch = make_minibatch(actor.cpu(), 64).cuda()
    actor.cuda()
    for _ in range(4):
        step(minibatch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = [step(minibatch) for _ in range(5)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len({float(x["entropy"]) for x in outputs}) == 5
    assert all(x["stepped"] for x in outputs)
    assert step.graphs is not None
    assert step.graphs.reason is None


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True, "cudagraphs"])
def test_on_a_gpu_an_update_waits_twice(compile: Any):
    actor, critic = actor_critic((Box(-9, 9, (4,)), Box(-9, 9, (2,))))
    loss = DualClipPPOLoss(actor, critic, functional=False).cuda()
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2, fused=True)
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=loss.critic_network)
    options: Any = {"advantage": gae, "epochs": 4, "minibatch_size": 4, "seed": 0}
    update = ppo_update(loss, optimizer, max_grad_norm=0.5, compile=compile, **options)
    update(make_batch(0, 0).cuda())
    batch = make_batch(1, 1).cuda()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            update(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [x for x in found if "synchronizing CUDA operation" in str(x.message)]
    assert len(waits) <= 2, [f"{x.filename}:{x.lineno}" for x in waits]
