"""One PPO update on one collected batch."""

from ppokit.update.ppo_update import PPOUpdate

__all__ = ["PPOUpdate"]
