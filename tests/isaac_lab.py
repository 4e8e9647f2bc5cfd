"""Isaac Lab's training loop on torchrl's pieces, and the loop of the page on ppokit's."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import Bounded
from torchrl.modules import MLP, IndependentNormal, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss, KLAdaptiveLR
from torchrl.objectives.value import GAE

PAGE = Path(__file__).parents[1] / "docs" / "howto" / "isaac_lab.md"


def settings(**changes: Any) -> SimpleNamespace:
    """Return a configuration with the names of Isaac Lab's ``TorchRlPpoCfg``."""
    return SimpleNamespace(
        **{
            "seed": 0,
            "num_steps_per_env": 16,
            "max_iterations": 100,
            "hidden": (32, 32),
            "init_noise_std": 1.0,
            "num_learning_epochs": 5,
            "num_mini_batches": 4,
            "learning_rate": 1e-3,
            "gamma": 0.99,
            "lam": 0.95,
            "clip_param": 0.2,
            "use_clipped_value_loss": False,
            "desired_kl": 0.01,
            "entropy_coef": 0.005,
            "value_loss_coef": 1.0,
            "max_grad_norm": 1.0,
        }
        | changes
    )


def make_networks(env: Any, cfg: Any) -> tuple[TensorDictModule, ValueOperator]:
    """Return a policy of the group ``"policy"``, and a critic of ``"critic"``."""
    torch.manual_seed(cfg.seed)

    def mlp(group: str, outputs: int) -> MLP:
        size = env.observation_spec[group].shape[-1]
        return MLP(size, outputs, num_cells=cfg.hidden, activation_class=nn.ELU)

    spec = env.action_spec
    scale = NormalParamExtractor(scale_mapping=f"biased_softplus_{cfg.init_noise_std}")
    network = nn.Sequential(mlp("policy", 2 * spec.shape[-1]), scale)
    options: dict[str, Any] = {"distribution_class": IndependentNormal}
    if isinstance(spec, Bounded):
        space: Any = env.action_spec_unbatched.space
        bounds = {"low": space.low, "high": space.high}
        options = {"distribution_class": TanhNormal, "distribution_kwargs": bounds}
    actor = ProbabilisticActor(
        TensorDictModule(network, ["policy"], ["loc", "scale"]),
        spec=spec,
        in_keys=["loc", "scale"],
        return_log_prob=True,
        **options,
    )
    critic = ValueOperator(mlp("critic", 1), in_keys=["critic"])
    return actor.to(env.device).eval(), critic.to(env.device).eval()


def train_with_torchrl(env: Any, cfg: Any, actor: Any, critic: Any) -> Iterator[dict[str, float]]:
    """Yield statistics of each iteration: what Isaac Lab's ``train_ppo`` does for each batch."""
    discounts = {"gamma": cfg.gamma, "lmbda": cfg.lam}
    gae = GAE(**discounts, value_network=critic, average_gae=True)
    loss = ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=cfg.clip_param,
        entropy_bonus=cfg.entropy_coef > 0,
        entropy_coeff=cfg.entropy_coef,
        critic_coeff=cfg.value_loss_coef,
        clip_value=cfg.use_clipped_value_loss,
    )
    optimizer = torch.optim.Adam(loss.parameters(), lr=cfg.learning_rate)
    adaptive = KLAdaptiveLR(optimizer, target_kl=cfg.desired_kl)
    frames = env.batch_size[0] * cfg.num_steps_per_env
    total = frames * cfg.max_iterations
    collector = Collector(
        env,
        actor,
        frames_per_batch=frames,
        total_frames=total,
        auto_register_policy_transforms=True,
    )
    for batch in collector:
        started, rows = time.perf_counter(), []
        for _ in range(cfg.num_learning_epochs):
            with torch.no_grad():
                gae(batch)
            flat = batch.reshape(-1)
            for index in torch.randperm(len(flat), device=flat.device).chunk(cfg.num_mini_batches):
                optimizer.zero_grad()
                losses = loss(flat[index])
                names = [name for name in losses.keys() if name.startswith("loss_")]
                torch.stack([losses[name] for name in names]).sum().backward()
                nn.utils.clip_grad_norm_(loss.parameters(), cfg.max_grad_norm)
                optimizer.step()
                rows.append(losses.detach())
            with torch.no_grad():
                adaptive.step(loss(flat)["kl_approx"])
        collector.update_policy_weights_()
        means = torch.stack(rows).mean(0)
        yield {name: float(x) for name, x in means.items()} | {
            "lr": float(optimizer.param_groups[0]["lr"]),
            "seconds_updating": time.perf_counter() - started,
        }
    collector.shutdown()


def page_program() -> Any:
    """Return ``train_ppo`` of the page."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    return names["train_ppo"]
