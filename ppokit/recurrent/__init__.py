"""torchrl's recurrent modules without padding."""

from ppokit.recurrent.modules import GRUModule, LSTMModule

__all__ = ["GRUModule", "LSTMModule"]
