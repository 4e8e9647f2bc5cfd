"""torchrl's recurrent modules, faster in training."""

from ppokit.recurrent.modules import GRUModule, LSTMModule

__all__ = ["GRUModule", "LSTMModule"]
