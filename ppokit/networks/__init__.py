"""Policies and critics for the spaces of an environment."""

from ppokit.networks.actor_critic import actor_critic

__all__ = ["actor_critic"]
