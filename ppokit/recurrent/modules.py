"""LSTMModule and GRUModule: torchrl's recurrent modules without splitting batches."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import dispatch
from torchrl.modules import GRUModule as TorchRLGRUModule
from torchrl.modules import LSTMModule as TorchRLLSTMModule

from ppokit._state import WholeState
from ppokit.recurrent.runs import check_step, run_recurrent, runs_in_one_call


class LSTMModule(WholeState, TorchRLLSTMModule):
    r"""torchrl's :class:`~torchrl.modules.LSTMModule`, without splitting batches.

    With :math:`i_t, f_t, o_t` the gates of :class:`torch.nn.LSTM`,

    .. math:: c_t = f_t \odot c_{t-1} + i_t \odot g_t, \qquad h_t = o_t \odot \tanh(c_t).

    Losses and advantages set the recurrent mode. In this mode a run is the frames of one episode in
    one row. torchrl pads all runs to one length. This module calls ``nn.LSTM`` once for all steps
    at which the same runs go on. In training, if no episode starts within a row, it calls
    ``nn.LSTM`` once for all rows, padding included.

    Frames after a row's last True at ``("collector", "mask")`` are padding: the module ignores
    them, and their output is 0. ``("next", state)`` holds the state after the last step of each
    run, and zeros elsewhere. If gradients are recorded, it is also 0 after a row that ends in
    padding.

    The parent's code runs with two directions, ``python_based=True``, ``recurrent_backend="scan"``
    or ``"triton"``, under ``vmap`` and outside the recurrent mode. ``torch.compile`` leaves the
    module out of its graphs. Arguments, keys, parameters and ``state_dict`` are the parent's.

    Args:
        *args: those of the parent.
        **kwargs: those of the parent.

    Shape:
        - the input: ``[*B, T, I]``, float32 or float64.
        - states: ``[*B, T, layers, H]``, of which those at a row's first step and where ``is_init``
          is True are read; zeros where there are none.
        - ``"is_init"``: bool ``[*B, T, 1]``. A single step begins at zero there, whatever is
          stored.

    Raises:
        KeyError: there is no ``"is_init"``. (A missing state within an episode warns, on the CPU.)

    References:
        Hochreiter and Schmidhuber, 1997, "Long Short-Term Memory"; Gers, Schmidhuber and Cummins,
        2000, "Learning to Forget".

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.modules import set_recurrent_mode
        >>> lstm = LSTMModule(input_size=3, hidden_size=4, in_key="x", out_key="features")
        >>> starts = torch.zeros(2, 5, 1, dtype=torch.bool)
        >>> batch = TensorDict({"x": torch.randn(2, 5, 3), "is_init": starts}, [2, 5])
        >>> with set_recurrent_mode(True):
        ...     lstm(batch)["features"].shape
        torch.Size([2, 5, 4])
    """

    @dispatch  # pyright: ignore[reportArgumentType]
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tensordict: TensorDictBase
    ) -> TensorDictBase:
        """Write the output and the states after each run into the TensorDict, and return it."""
        parent: Any = super().forward
        if runs_in_one_call(self):
            return run_recurrent(self, self.lstm, tensordict, parent)  # pyright: ignore[reportCallIssue]
        check_step(self, tensordict)
        return parent(tensordict)


class GRUModule(WholeState, TorchRLGRUModule):
    r"""torchrl's :class:`~torchrl.modules.GRUModule`, without splitting batches.

    With :math:`r_t, z_t` the gates of :class:`torch.nn.GRU`,

    .. math:: n_t = \tanh(x_n + r_t \odot h_n), \qquad h_t = n_t + z_t \odot (h_{t-1} - n_t).

    It differs from the parent as :class:`LSTMModule` does.

    Args:
        *args: those of the parent.
        **kwargs: those of the parent.

    Shape:
        - the input: ``[*B, T, I]``, float32 or float64.
        - the state: ``[*B, T, layers, H]``, of which those at a row's first step and where
          ``is_init`` is True are read; zeros where there is none.
        - ``"is_init"``: bool ``[*B, T, 1]``. A single step begins at zero there, whatever is
          stored.

    Raises:
        KeyError: there is no ``"is_init"``. (A missing state within an episode warns, on the CPU.)

    References:
        Cho et al., 2014, "Learning Phrase Representations using RNN Encoder-Decoder", section 2.3,
        with the reset gate after the product, as in torch.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.modules import set_recurrent_mode
        >>> gru = GRUModule(input_size=3, hidden_size=4, in_key="x", out_key="features")
        >>> starts = torch.zeros(2, 5, 1, dtype=torch.bool)
        >>> batch = TensorDict({"x": torch.randn(2, 5, 3), "is_init": starts}, [2, 5])
        >>> with set_recurrent_mode(True):
        ...     gru(batch)["next", "recurrent_state"].shape
        torch.Size([2, 5, 1, 4])
    """

    @dispatch  # pyright: ignore[reportArgumentType]
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tensordict: TensorDictBase
    ) -> TensorDictBase:
        """Write the output and the state after each run into the TensorDict, and return it."""
        parent: Any = super().forward
        if runs_in_one_call(self):
            return run_recurrent(self, self.gru, tensordict, parent)  # pyright: ignore[reportCallIssue]
        check_step(self, tensordict)
        return parent(tensordict)
