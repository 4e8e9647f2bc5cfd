"""The step of the optimiser, whatever its parameter groups; and which optimisers are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ppokit import DualClipPPOLoss, KLEarlyStopper, PPOUpdate, TrainingStep
from tests.blocks import make_actor, make_critic, make_minibatch, ppo_update
from tests.ranks import run_on_two_ranks


def make_loss() -> DualClipPPOLoss:
    return DualClipPPOLoss(make_actor(), make_critic(), functional=False)


def parameters_of(loss: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(loss.parameters()).detach().clone()


def train(loss: DualClipPPOLoss, optimizer: torch.optim.Optimizer, **options: Any) -> torch.Tensor:
    ppo_update(loss, optimizer, seed=0, **options)(make_minibatch(make_actor(), 32))
    return parameters_of(loss)


@pytest.mark.parametrize("fused", [False, True])
def test_groups_that_are_added_later_are_clipped(fused: bool):
    found = []
    for later in (False, True):
        loss = make_loss()
        actor, critic = loss.actor_network.parameters(), loss.critic_network.parameters()
        first = actor if later else [*actor, *critic]
        optimizer = torch.optim.SGD(first, lr=1.0, fused=fused)
        loss.critic_network.requires_grad_(not later)
        update = PPOUpdate(TrainingStep(loss, optimizer, max_grad_norm=1e-2), epochs=1, seed=0)
        if later:
            loss.critic_network.requires_grad_(True)
            optimizer.add_param_group({"params": critic})
        statistics = update(make_minibatch(make_actor(), 32))
        found.append((parameters_of(loss), torch.tensor(statistics["grad_norm"])))
    torch.testing.assert_close(*found)


def on_rank(rank: int) -> dict[str, torch.Tensor]:
    loss = make_loss()
    optimizer = torch.optim.SGD(loss.actor_network.parameters(), lr=1.0)
    loss.critic_network.requires_grad_(False)
    update = PPOUpdate(TrainingStep(loss, optimizer), epochs=1, minibatch_size=4, seed=0)
    share = make_minibatch(make_actor(), 16, seed=rank)
    update(share.clone())
    loss.critic_network.requires_grad_(True)
    optimizer.add_param_group({"params": loss.critic_network.parameters()})
    update(share.clone())
    result = {"parameters": parameters_of(loss)}
    if rank:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(RuntimeError, match="start from different parameters"):
        update(share.clone())
    empty = share.clone()
    empty["collector", "mask"] = torch.full((16,), not rank)
    with pytest.raises(ValueError, match="4 minibatches, and another only 0 elements"):
        PPOUpdate(TrainingStep(loss, torch.optim.SGD(loss.parameters())), minibatch_size=4)(empty)
    return result


@pytest.mark.slow
def test_groups_that_are_added_later_are_averaged_over_ranks(tmp_path: Any):
    one, other = run_on_two_ranks(on_rank, tmp_path)
    assert torch.equal(one["parameters"], other["parameters"])


MIXED = [(True, False), (None, True), (True, None)]  # of the optimiser, and of the second group


@pytest.mark.parametrize(("whole", "second"), MIXED)
def test_groups_some_of_which_are_fused(whole: Any, second: Any):
    found = []
    for mixed in (False, True):
        loss = make_loss()
        groups: list[dict[str, Any]] = [
            {"params": list(part.parameters())}
            for part in (loss.actor_network, loss.critic_network)
        ]
        if mixed:
            groups[1] |= {"fused": second, "foreach": False}
        optimizer = torch.optim.Adam(groups, lr=1e-2, fused=whole if mixed else None)
        found.append(train(loss, optimizer, max_grad_norm=1e-3))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_float16_and_groups_some_of_which_are_fused():
    loss = make_loss()
    groups = [
        {"params": loss.actor_network.parameters()},
        {"params": loss.critic_network.parameters(), "fused": False, "foreach": False},
    ]
    optimizer = torch.optim.Adam(groups, lr=1e-2, fused=True)
    with pytest.raises(ValueError, match=r"amp_dtype=torch.float16.*Adam.*some parameter groups"):
        PPOUpdate(TrainingStep(loss, optimizer, amp_dtype=torch.float16))


def test_an_optimizer_that_evaluates_the_loss_itself():
    loss = make_loss()
    with pytest.raises(TypeError, match="step of LBFGS needs a closure"):
        PPOUpdate(TrainingStep(loss, torch.optim.LBFGS(loss.parameters())))


def test_gradients_that_others_have_left_do_not_count():
    """Of a look at the gradients between updates, or of an update that was interrupted."""
    found, batch = [], make_minibatch(make_actor(), 32)
    for looked_at in (False, True):
        loss = make_loss()
        update = PPOUpdate(TrainingStep(loss, torch.optim.SGD(loss.parameters(), lr=1.0)), seed=0)
        if looked_at:
            loss(batch.clone())["loss_objective"].backward()
        update(batch.clone())
        found.append(parameters_of(loss))
    assert torch.equal(*found)


def test_a_kl_stop_that_an_exception_has_left_does_not_end_the_next_update():
    found, batch = [], make_minibatch(make_actor(), 32)
    for left in (False, True):
        loss, stopper = make_loss(), KLEarlyStopper(10.0)
        optimizer = torch.optim.SGD(loss.parameters(), lr=1.0)
        update = PPOUpdate(TrainingStep(loss, optimizer, stopper=stopper), minibatch_size=8, seed=0)
        if left:
            stopper.update(100.0)
            assert stopper.stopped
        statistics = update(batch.clone())
        assert not stopper.stopped
        found.append((parameters_of(loss), torch.tensor(statistics["minibatches"])))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert found[0][1] > 1


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("amp_dtype", [None, torch.float16])
def test_an_update_that_was_interrupted_in_a_step_is_forgotten(amp_dtype: Any):
    found, batch = [], make_minibatch(make_actor(), 32)
    for interrupted in (False, True):
        loss = make_loss()
        optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
        update = PPOUpdate(TrainingStep(loss, optimizer, amp_dtype=amp_dtype), seed=0, epochs=2)
        order = update.generator.get_state()
        if interrupted:
            hook = optimizer.register_step_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                update(batch.clone())
            hook.remove()
            update.generator.set_state(order)
        update(batch.clone())
        found.append(parameters_of(loss))
    assert torch.equal(*found)


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
