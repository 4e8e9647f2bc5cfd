"""A normalizer inside torchrl's PPOTrainer, as the postproc of its collector."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.checkpoint import Checkpoint
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import GymEnv, SerialEnv
from torchrl.modules import ProbabilisticActor
from torchrl.trainers.algorithms import PPOTrainer

from ppokit import DualClipPPOLoss, RewardNormalizer
from tests.blocks import make_critic

FRAMES, BATCHES = 64, 4


class Run:
    """A trainer on CartPole, its normalizer, and the batches it was given."""

    def __init__(self, *, batches: int = BATCHES) -> None:
        torch.manual_seed(0)
        actor = ProbabilisticActor(
            TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"]),
            in_keys=["logits"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        )
        self.loss = DualClipPPOLoss(actor, make_critic())
        self.normalizer = RewardNormalizer(0.99)
        env = SerialEnv(2, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True))
        env.set_seed(0)
        collector = Collector(
            env,
            actor,
            frames_per_batch=FRAMES,
            total_frames=FRAMES * batches,
            postproc=self.normalizer,
            auto_register_policy_transforms=False,
        )
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(FRAMES), sampler=SamplerWithoutReplacement(), batch_size=16
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "experimental", and torchrl's own deprecated stages
            self.trainer = PPOTrainer(
                collector=collector,
                total_frames=FRAMES * batches,
                frame_skip=1,
                optim_steps_per_batch=None,
                loss_module=self.loss,
                optimizer=torch.optim.SGD(self.loss.parameters(), lr=0.1),
                num_epochs=2,
                progress_bar=False,
                replay_buffer=buffer,
                enable_logging=False,
            )
        self.trainer.register_module("reward_normalizer", self.normalizer)
        self.batches: list[TensorDictBase] = []
        self.trainer.register_op("batch_process", self._keep)

    def _keep(self, batch: TensorDictBase) -> TensorDictBase:
        self.batches.append(batch.clone())
        return batch


def test_it_trains_on_scaled_rewards():
    run = Run()
    before = [p.clone() for p in run.loss.parameters()]
    run.trainer.train()
    assert len(run.batches) == BATCHES
    assert run.normalizer.count == BATCHES * FRAMES
    alone = RewardNormalizer(0.99)
    for batch in run.batches:
        raw = batch["next", "raw_reward"]
        assert torch.equal(raw, torch.ones_like(raw))
        again = alone(batch.exclude(("next", "raw_reward")).set(("next", "reward"), raw))
        assert torch.equal(again["next", "reward"], batch["next", "reward"])
    assert torch.equal(alone.moments, run.normalizer.moments)
    assert all(not torch.equal(a, b) for a, b in zip(before, run.loss.parameters(), strict=True))


@pytest.mark.parametrize("way", ["state_dict", "save_trainer", "Checkpoint"])
def test_it_is_saved_with_the_trainer(tmp_path: Path, way: str):
    run, fresh = Run(), Run()
    saved: dict[str, Any] = {}

    def save() -> None:  # a collector that is shut down has no state any more
        if len(run.batches) < BATCHES or saved:
            return
        saved["moments"] = run.normalizer.moments
        if way == "state_dict":
            torch.save(run.normalizer.state_dict(), tmp_path / "saved")
        elif way == "save_trainer":
            run.trainer.save_trainer_file = str(tmp_path / "saved")
            run.trainer.save_trainer(force_save=True)
        else:
            Checkpoint(reward_normalizer=run.normalizer).save(tmp_path / "saved")

    run.trainer.register_op("post_steps", save)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchrl's old format is deprecated
        run.trainer.train()
    if way == "state_dict":
        fresh.normalizer.load_state_dict(torch.load(tmp_path / "saved", weights_only=True))
    elif way == "save_trainer":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fresh.trainer.load_from_file(tmp_path / "saved")
    else:
        Checkpoint(reward_normalizer=fresh.normalizer).load(tmp_path / "saved")
    assert torch.equal(fresh.normalizer.moments, saved["moments"])
    assert torch.equal(fresh.normalizer.open_returns, run.normalizer.open_returns)
