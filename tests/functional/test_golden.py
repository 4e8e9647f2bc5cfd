"""GAE and losses equal the numbers that rl8 1.0.0 computed (tests/data/rl8.json)."""

import pytest
import torch

from ppokit.functional import clipped_critic_loss, clipped_surrogate, gae, kl_estimate, masked_std
from tests.golden import assert_golden, rl8

pytestmark = pytest.mark.usefixtures("kernel")

GAE = rl8("gae")
LOSSES = rl8("ppo_losses")

# rl8's function defaults, where a case records no parameters
LOSS_DEFAULTS = {
    "clip_param": 0.2,
    "dual_clip_param": None,
    "entropy_coeff": 0.0,
    "vf_clip_param": 1.0,
    "vf_coeff": 1.0,
}


def by_name(case):
    return case["name"]


@pytest.mark.parametrize("case", GAE, ids=by_name)
def test_gae(case):
    # values and rewards are [B, T + 1]: the last column holds the bootstrap value, and a reward
    # that is not read. Nothing ends within the T steps. Rewards are divided by reward_scale + 1e-8,
    # advantages standardized with the unbiased deviation + 1e-8; returns (the value targets) are
    # made of the advantages before that. In the last column the advantage is 0.
    params = case["params"]
    dtype = getattr(torch, case["dtype"])
    values = torch.tensor(case["values"], dtype=dtype)
    rewards = torch.tensor(case["rewards"], dtype=dtype) / (params["reward_scale"] + 1e-8)
    never = torch.zeros_like(values[:, :-1], dtype=torch.bool)
    advantage, target = gae(
        reward=rewards[:, :-1],
        value=values[:, :-1],
        next_value=values[:, 1:],
        done=never,
        terminated=never,
        gamma=params["gamma"],
        lmbda=params["gae_lambda"],
        dim=-1,
    )
    if params["normalize_advantages"]:
        advantage = (advantage - advantage.mean()) / (masked_std(advantage) + 1e-8)
    last = torch.zeros_like(values[:, -1:])
    assert_golden(torch.cat([advantage, last], 1), case["advantages"])
    assert_golden(torch.cat([target, values[:, -1:]], 1), case["returns"])


def log_prob_and_entropy(distribution, features, actions):
    if distribution == "categorical":
        policy = torch.distributions.Categorical(logits=features["logits"])
        return policy.log_prob(torch.tensor(actions)).sum(-1), policy.entropy().sum(-1)
    actions = torch.tensor(actions, dtype=torch.float64)
    policy = torch.distributions.Normal(features["mean"], features["log_std"].exp())
    if distribution == "normal":
        return policy.log_prob(actions).sum(-1), policy.entropy().sum(-1)
    squash = torch.distributions.TanhTransform(cache_size=1)
    squashed = torch.distributions.TransformedDistribution(policy, [squash])
    return squashed.log_prob(actions).sum(-1), None


@pytest.mark.parametrize("case", LOSSES, ids=by_name)
def test_ppo_losses(case):
    assert case["dtype"] == "float64"
    params = {**LOSS_DEFAULTS, **case["params"]}
    features = {
        name: torch.tensor(value, dtype=torch.float64, requires_grad=True)
        for name, value in case["features"].items()
    }
    values = torch.tensor(case["values"], dtype=torch.float64, requires_grad=True)
    advantages, returns, old_logp = (
        torch.tensor(case[name], dtype=torch.float64)
        for name in ("advantages", "returns", "old_logp")
    )
    new_logp, entropy = log_prob_and_entropy(case["distribution"], features, case["actions"])
    log_ratio = new_logp - old_logp
    assert_golden(new_logp, case["new_logp"])
    assert_golden(log_ratio.exp(), case["ratio"])
    if case["dist_entropy"] is not None:
        assert entropy is not None
        assert_golden(entropy, case["dist_entropy"])

    policy = clipped_surrogate(
        log_ratio,
        advantages,
        clip_epsilon=params["clip_param"],
        dual_clip=params["dual_clip_param"],
    ).mean()
    critic = clipped_critic_loss(values, returns, loss_clip=params["vf_clip_param"]).mean()
    total = params["vf_coeff"] * critic - policy
    if params["entropy_coeff"] != 0:
        assert entropy is not None
        assert_golden(entropy.mean(), case["out"]["entropy"])
        total = total - params["entropy_coeff"] * entropy.mean()
    else:
        assert case["out"]["entropy"] == 0
    assert_golden(policy, case["out"]["policy"])
    assert_golden(critic, case["out"]["vf"])
    assert_golden(total, case["out"]["total"])
    assert_golden(kl_estimate(log_ratio).mean(), case["kl_k3"])

    assert set(case["grad_features"]) == set(features)
    names = list(features)
    grad_values, *grads = torch.autograd.grad(total, [values, *(features[n] for n in names)])
    assert_golden(grad_values, case["grad_values"])
    for name, grad in zip(names, grads, strict=True):
        assert_golden(grad, case["grad_features"][name])
