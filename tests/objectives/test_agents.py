"""The loss of several agents, with keys in a group."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import distributions as d
from torch import nn
from torchrl.modules import IndependentNormal, MultiAgentMLP, ProbabilisticActor, TanhNormal
from torchrl.objectives import ClipPPOLoss

from ppokit import DualClipPPOLoss
from tests.blocks import actor_of
from tests.objectives.common import assert_same, results

DISTRIBUTIONS: dict[str, Any] = {"tanh-normal": TanhNormal, "normal": IndependentNormal}
DISTRIBUTIONS["categorical"] = d.Categorical
NAMES = {"action": "action", "sample_log_prob": "action_log_prob", "value": "state_value"}
NAMES |= {name: name for name in ("advantage", "value_target")}
KEYS = {name: ("agents", key) for name, key in NAMES.items()}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"normalize_advantage": True, "normalize_advantage_exclude_dims": (-2,)},
    {"clip_value": 0.3, "entropy_coeff": 0.1, "functional": False},
    {"entropy_bonus": False, "reduction": "sum", "loss_critic_type": "l2"},
]


def network(outputs: int, agents: int, dtype: torch.dtype, **options: Any) -> MultiAgentMLP:
    return MultiAgentMLP(4, outputs, agents, depth=1, num_cells=8, **options).to(dtype)


def make_networks(
    kind: str = "tanh-normal",
    agents: int = 3,
    *,
    share_params: bool = True,
    centralized: bool = True,
    dtype: torch.dtype = torch.float32,
) -> tuple[ProbabilisticActor, TensorDictModule]:
    torch.manual_seed(0)
    options: dict[str, Any] = {"share_params": share_params, "dtype": dtype}
    of_actor: Any = network(4, agents, centralized=False, **options)
    names = ["logits"]
    if kind != "categorical":
        of_actor, names = nn.Sequential(of_actor, NormalParamExtractor()), ["loc", "scale"]
    keys: Any = [("agents", name) for name in names]
    of_actor = TensorDictModule(of_actor, [("agents", "observation")], keys)
    actor = actor_of(of_actor, DISTRIBUTIONS[kind], out_keys=[KEYS["action"]])
    of_critic = network(1, agents, centralized=centralized, **options)
    return actor, TensorDictModule(of_critic, [("agents", "observation")], [KEYS["value"]])


def make_minibatch(actor: Any, *shape: int, agents: int = 3, dtype: Any = None) -> TensorDict:
    torch.manual_seed(1)
    seen = TensorDict({"observation": torch.randn(*shape, agents, 4, dtype=dtype)})
    with torch.no_grad():
        batch = actor(TensorDict({"agents": seen.auto_batch_size_(len(shape) + 1)}, shape))
    log_prob = batch[KEYS["sample_log_prob"]]
    assert log_prob.shape == (*shape, agents)
    batch[KEYS["sample_log_prob"]] = log_prob + 0.3 * torch.randn_like(log_prob)
    for name in ("advantage", "value_target", "value"):
        batch[KEYS[name]] = torch.randn(*shape, agents, 1, dtype=dtype)
    return batch


def with_keys(loss: Any) -> Any:
    loss.set_keys(**KEYS)
    return loss


@pytest.mark.parametrize("options", OPTIONS, ids=repr)
@pytest.mark.parametrize("kind", DISTRIBUTIONS)
@pytest.mark.parametrize("shape", [(7,), (2, 3)], ids=str)
def test_it_is_torchrls_loss(kind: str, shape: tuple[int, ...], options: dict[str, Any]):
    for share_params, centralized in itertools.product((True, False), repeat=2):
        dtype = torch.float64
        arguments: Any = {"share_params": share_params, "centralized": centralized, "dtype": dtype}
        networks = make_networks(kind, **arguments)
        batch = make_minibatch(networks[0], *shape, dtype=dtype)
        theirs, ours = (with_keys(x(*networks, **options)) for x in (ClipPPOLoss, DualClipPPOLoss))
        assert_same(theirs, ours, batch, tolerance=1e-12)


@pytest.mark.filterwarnings("ignore:You requested advantage normalization:UserWarning")
@pytest.mark.parametrize("exclude", [(), (-2,)], ids=str)
def test_masked_frames_change_nothing(exclude: tuple[int, ...]):
    options: Any = {"normalize_advantage": True, "normalize_advantage_exclude_dims": exclude}
    options |= {"kl_coeff": 0.1, "dual_clip": 2.0}
    actor, critic = make_networks("normal")
    batch = make_minibatch(actor, 9)
    mask = torch.tensor([True, True, False, True, False, True, True, True, False])
    plain = with_keys(DualClipPPOLoss(actor, critic, **options))
    expected, their_gradients = results(plain, batch[mask])
    for name in ("observation", "action", "action_log_prob", "advantage", "value_target"):
        batch["agents", name][~mask] = torch.nan
    batch["collector", "mask"] = mask
    result, gradients = results(plain, batch)
    for name, value in expected.items():
        if name not in ("ESS", "explained_variance"):  # torchrl's are of each agent without a mask
            torch.testing.assert_close(result[name], value, msg=lambda m, n=name: f"{n}: {m}")
        assert result[name].isfinite().all()
    for name, theirs in their_gradients.items():
        for one, other in zip(gradients[name], theirs, strict=True):
            assert one is other is None or torch.allclose(one, other, atol=1e-6), name


def test_a_mask_of_agents_takes_single_agents_out():
    actor, critic = make_networks("categorical", centralized=False)
    batch = make_minibatch(actor, 8)
    mask = torch.rand(8, 3) < 0.6
    batch["agents", "mask"] = mask
    loss = with_keys(DualClipPPOLoss(actor, critic))
    loss.loss_mask_key = ("agents", "mask")
    result = loss(batch)
    with torch.no_grad():
        log_prob = actor.get_dist(batch).log_prob(batch[KEYS["action"]])
        log_ratio = (log_prob - batch[KEYS["sample_log_prob"]])[mask]
        advantage = batch[KEYS["advantage"]].squeeze(-1)[mask]
        ratio = log_ratio.exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    torch.testing.assert_close(result["loss_objective"], -gain.mean())
    torch.testing.assert_close(result["kl"], (log_ratio.exp() - 1 - log_ratio).mean())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("frames", "agents"), [(3, 2), (3, 3), (3, 1), (1, 2)])
def test_a_mask_and_one_value_of_the_team(frames: int, agents: int, reduction: str):
    """Log-probabilities of each agent, but one value of the team, each with the mask's frames."""
    actor, _ = make_networks("normal", agents)
    value = nn.Sequential(nn.Flatten(-2), nn.Linear(4 * agents, 1))
    critic = TensorDictModule(value, [("agents", "observation")], ["state_value"])
    batch = make_minibatch(actor, frames, agents=agents)
    batch["advantage"], batch["value_target"] = torch.randn(frames, 1), torch.randn(frames, 1)
    mask = torch.ones(frames, dtype=torch.bool)
    batch["collector", "mask"] = mask
    theirs, ours = (x(actor, critic, reduction=reduction) for x in (ClipPPOLoss, DualClipPPOLoss))
    for loss in (theirs, ours):
        loss.set_keys(**{name: KEYS[name] for name in ("action", "sample_log_prob")})
    expected, result = theirs(batch), ours(batch)
    for name in ("loss_objective", "loss_critic", "loss_entropy"):
        torch.testing.assert_close(result[name], expected[name], msg=lambda m, n=name: f"{n}: {m}")


# -- what is refused ----------------------------------------------------------------------


def test_forgotten_keys_are_named():
    actor, critic = make_networks()
    batch = make_minibatch(actor, 6)
    loss = DualClipPPOLoss(actor, critic)  # which knows the actor's own keys
    with pytest.raises(KeyError, match=r"'advantage' is not in the batch.*set_keys\(advantage="):
        loss(batch)
    loss.set_keys(advantage=KEYS["advantage"])
    with pytest.raises(KeyError, match=r"'value_target' is not in.*set_keys.*'value_target'\)"):
        loss(batch)
    loss.set_keys(value_target=KEYS["value_target"])
    with pytest.raises(KeyError, match=r"'state_value' is not in.*set_keys.*'state_value'\)"):
        loss(batch)


@pytest.mark.parametrize(
    ("name", "shape", "match"),
    [
        ("sample_log_prob", (6,), r"'other' has shape \[6\].*has shape \[6, 3\]"),
        ("sample_log_prob", (6, 4), r"'other' has shape \[6, 4\].*has shape \[6, 3\]"),
        ("advantage", (6, 4, 1), r"log_prob'\) has shape \[6, 3\].*'other' \[6, 4, 1\]"),
        ("value_target", (6, 4, 1), r"'other' has shape \[6, 4, 1\].*has shape \[6, 3, 1\]"),
    ],
)
def test_other_numbers_of_agents(name: str, shape: tuple[int, ...], match: str):
    actor, critic = make_networks()
    batch = make_minibatch(actor, 6)
    batch["other"] = torch.randn(shape)
    loss = with_keys(DualClipPPOLoss(actor, critic))
    loss.set_keys(**{name: "other"})
    with pytest.raises(ValueError, match=match):
        loss(batch)
