"""One PPO update on one collected batch."""

from ppokit.update.ppo_update import PPOUpdate
from ppokit.update.training_step import TrainingStep

__all__ = ["PPOUpdate", "TrainingStep"]
