"""LSTMModule, GRUModule and TransformerModule: memories that run over whole batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from importlib.metadata import version
from itertools import groupby
from typing import Any, TypeGuard, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, dispatch
from tensordict.utils import NestedKey, expand_as_right
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.utils.rnn import PackedSequence
from torchrl.data import TensorSpec, Unbounded
from torchrl.envs import TensorDictPrimer
from torchrl.modules import GRUModule as TorchRLGRUModule
from torchrl.modules import LSTMModule as TorchRLLSTMModule
from torchrl.modules import recurrent_mode

from ppokit import kernels
from ppokit._batch import (
    IS_INIT,
    MEMORY,
    STATE_FIX,
    STEPS,
    as_key,
    check_context,
    get_tensor,
    key_parts,
    takes_tensordict,
    valid_mask,
)
from ppokit._state import WholeState
from ppokit.functional._checks import check_bool
from ppokit.kernels.operator import run_lstm

_Module = TorchRLLSTMModule | TorchRLGRUModule

try:  # torchrl 0.14 has no transformer
    from torchrl.modules import (
        CausalTransformer,  # pyright: ignore[reportAttributeAccessIssue]
        positions_from_is_init,  # pyright: ignore[reportAttributeAccessIssue]
        segment_causal_mask_from_is_init,  # pyright: ignore[reportAttributeAccessIssue]
    )
except ImportError:
    CausalTransformer = None
    positions_from_is_init = segment_causal_mask_from_is_init = cast("Any", None)


class _Unsplit(WholeState):
    #: the network's, in the graph of a training step: Dynamo looks at no ``nn.LSTM``
    graph_weights: Sequence[Tensor] = ()

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Generator[tuple[str, nn.Module], None, None]:
        """Yield this module and its network, which is left out in a graph."""
        if self.graph_weights:
            yield prefix, self
        else:
            yield from super().named_modules(memo, prefix, remove_duplicate)

    @takes_tensordict
    @dispatch  # pyright: ignore[reportArgumentType]
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tensordict: TensorDictBase
    ) -> TensorDictBase:
        """Write the output and the states after each run into the TensorDict, and return it."""
        module, parent = cast("_Module", self), cast(Any, super()).forward
        backend = module.recurrent_backend
        if module.recurrent_mode and self.graph_weights:
            return _run_in_graph(module, self.graph_weights, tensordict)
        # The other backends are in the graphs that torchrl captures.
        if module.recurrent_mode and (
            backend == "pad" or (backend == "auto" and not is_dynamo_compiling())
        ):
            return _run(module, tensordict, parent)  # pyright: ignore[reportCallIssue]
        _check_step(module, tensordict)
        return parent(tensordict)


class LSTMModule(_Unsplit, TorchRLLSTMModule):
    r"""torchrl's :class:`~torchrl.modules.LSTMModule`, without splitting batches.

    With :math:`i_t, f_t, o_t` the gates of :class:`torch.nn.LSTM`,

    .. math:: c_t = f_t \odot c_{t-1} + i_t \odot g_t, \qquad h_t = o_t \odot \tanh(c_t).

    Losses set the recurrent mode; GAE evaluates each step from its stored state. In this mode a run
    is the frames of one episode in one row. torchrl pads all runs to one length. This module calls
    ``nn.LSTM`` once for all steps
    at which the same runs go on. In training, if no episode starts within a row, it calls
    ``nn.LSTM`` once for all rows, padding included.

    Frames after a row's last True at ``("collector", "mask")`` are padding: the module ignores
    them, and their output is 0. ``("next", state)`` holds the state after the last step of each
    run, and zeros elsewhere. If gradients are recorded, it is also 0 after a row that ends in
    padding.

    The parent's code runs with two directions, ``python_based=True``, ``recurrent_backend="scan"``
    or ``"triton"``, under ``vmap`` and outside the recurrent mode. ``torch.compile`` leaves the
    module out of its graphs, but :class:`~ppokit.TrainingStep` has one layer in its own. Arguments,
    keys, parameters and ``state_dict`` are the parent's.

    Args:
        *args: those of the parent.
        **kwargs: those of the parent.

    Shape:
        - the input: ``[*B, T, I]``, float32 or float64.
        - states: ``[*B, T, layers, H]``, of which those at a row's first step and where ``is_init``
          is True are read; zeros where there are none.
        - ``"is_init"``: bool ``[*B, T, 1]``. A single step begins at zero there, and ignores a
          stored state.

    Raises:
        KeyError: there is no ``"is_init"``. (A missing state within an episode warns, on the CPU.)

    References:
        Hochreiter and Schmidhuber, 1997, "Long Short-Term Memory"; Gers, Schmidhuber and Cummins,
        2000, "Learning to Forget".

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.modules import set_recurrent_mode
        >>> from ppokit import LSTMModule
        >>> lstm = LSTMModule(input_size=3, hidden_size=4, in_key="x", out_key="features")
        >>> starts = torch.zeros(2, 5, 1, dtype=torch.bool)
        >>> batch = TensorDict({"x": torch.randn(2, 5, 3), "is_init": starts}, [2, 5])
        >>> with set_recurrent_mode(True):
        ...     lstm(batch)["features"].shape
        torch.Size([2, 5, 4])
    """


class GRUModule(_Unsplit, TorchRLGRUModule):
    r"""torchrl's :class:`~torchrl.modules.GRUModule`, without splitting batches.

    With :math:`r_t, z_t` the gates of :class:`torch.nn.GRU`,

    .. math:: n_t = \tanh(x_n + r_t \odot h_n), \qquad h_t = n_t + z_t \odot (h_{t-1} - n_t).

    It differs from the parent as :class:`LSTMModule` does, and has the same shapes.

    Args:
        *args: those of the parent.
        **kwargs: those of the parent.

    Raises:
        KeyError: there is no ``"is_init"``. (A missing state within an episode warns, on the CPU.)

    References:
        Cho et al., 2014, "Learning Phrase Representations using RNN Encoder-Decoder", section 2.3,
        with the reset gate after the product, as in torch.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.modules import set_recurrent_mode
        >>> from ppokit import GRUModule
        >>> gru = GRUModule(input_size=3, hidden_size=4, in_key="x", out_key="features")
        >>> starts = torch.zeros(2, 5, 1, dtype=torch.bool)
        >>> batch = TensorDict({"x": torch.randn(2, 5, 3), "is_init": starts}, [2, 5])
        >>> with set_recurrent_mode(True):
        ...     gru(batch)["next", "recurrent_state"].shape
        torch.Size([2, 5, 1, 4])
    """


class TransformerModule(TensorDictModuleBase):
    r"""torchrl's causal transformer, with the inputs of an episode so far as its memory.

    With :math:`e` the encoder, and :math:`x_1, ..., x_t` the inputs since the episode's start,

    .. math:: y_t = f_\theta(e_\theta(x_1), ..., e_\theta(x_t))_t,

    where :math:`f` is a transformer with positions counted from the episode's start. torchrl's own
    ``TransformerModule`` keeps keys and values, forgets them where weights change, and trains on
    rows that start with an episode. This module remembers the inputs themselves, as they were
    given: the memory is never stale, rows may start anywhere, and gradients go through the whole
    context, the encoder included.

    In recurrent mode (``torchrl.modules.set_recurrent_mode``), which losses and
    :class:`~ppokit.GAE` set, a whole row is one window. The module then reads the memory before
    the row's first frame, honours episode starts within the row, ignores frames after the last
    True at ``("collector", "mask")``, and writes the output alone. Otherwise it computes one step
    from the memory before it, and writes the memory after it, too.
    :class:`~ppokit.GymCollector` calls :meth:`stepper`, which keeps keys and values for a batch.

    Args:
        transformer: torchrl's ``CausalTransformer``, or a module with its interface. Its
            ``max_seq_len`` is the number of steps of the longest episode, plus 1 for the
            observation after the last step.
        specs: the inputs, and their shapes and dtypes.
        out_key: of the output.
        encoder: from the inputs ``[R, T, *shape]`` to features ``[R, T, I]``; None for one input
            ``[R, T, I]``.
        name: the first letters of the names of the memory: a critic's own needs other ones.

    Shape:
        - inputs: ``[*B, *shape]``, in recurrent mode ``[*B, T, *shape]``; ``"is_init"`` bool
          ``[*B, T, 1]``.
        - memory: an entry ``(name + "transformer_memory", input)`` for each input, ``[*B, T,
          context, *shape]``, with ``context = max_seq_len - 1``. In recurrent mode its first frame
          is read: :class:`~ppokit.GymCollector` stores one for a row, and
          :class:`~ppokit.SequenceBatcher` one for a sequence, expanded over its frames.
        - ``name + "transformer_steps"``: int64 ``[*B, T, 2]``, how many frames of the episode are
          before this one, and how many frames of the row since its memory was stored.
        - output: ``[*B, T, H]``.

    Raises:
        ImportError: torchrl has no transformer.
        KeyError: an entry is missing.
        ValueError: an episode is longer than the context, a row was cut off from its memory, or
            lacks frames within an episode.

    References:
        Vaswani et al., 2017, "Attention Is All You Need"; Parisotto et al., 2020, "Stabilizing
        Transformers for Reinforcement Learning"; torchrl pull request 4193.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import Unbounded
        >>> from torchrl.modules import CausalTransformer, set_recurrent_mode
        >>> from ppokit import TransformerModule
        >>> transformer = CausalTransformer(3, 8, num_heads=2, max_seq_len=6)
        >>> module = TransformerModule(transformer, {"x": Unbounded(3)}, "features")
        >>> batch = TensorDict({"x": torch.randn(2, 5, 3)}, [2, 5])
        >>> batch["is_init"] = torch.zeros(2, 5, 1, dtype=torch.bool)
        >>> batch["transformer_memory"] = {"x": torch.randn(2, 1, 5, 3).expand(2, 5, 5, 3)}
        >>> batch["transformer_steps"] = torch.arange(5).view(5, 1).expand(2, 5, 2)
        >>> with set_recurrent_mode(True):
        ...     module(batch)["features"].shape
        torch.Size([2, 5, 8])
    """

    recurrent_backend = "auto"  # what no graph holds

    def __init__(
        self,
        transformer: nn.Module,
        specs: Mapping[NestedKey, TensorSpec],
        out_key: NestedKey,
        *,
        encoder: nn.Module | None = None,
        name: str = "",
    ) -> None:
        check_has_transformer()
        super().__init__()
        self.transformer, self.encoder = cast("Any", transformer), encoder
        self.specs = {as_key(key): spec for key, spec in specs.items()}
        if not self.specs or (encoder is None and len(self.specs) > 1):
            raise ValueError(f"specs names {[*self.specs]}: one input, or several and an encoder.")
        memories = [as_key((name + MEMORY, *key_parts(key))) for key in self.specs]
        self._states: list[NestedKey] = [*memories, name + STEPS]
        self.in_keys: list[NestedKey] = [*self.specs, *self._states, IS_INIT]
        after = (as_key(("next", *key_parts(x))) for x in self._states)
        self.out_keys: list[NestedKey] = [out_key, *after]

    @property
    def context(self) -> int:
        """The number of earlier frames that an episode may have."""
        return self.transformer.max_seq_len - 1

    @property
    def recurrent_mode(self) -> bool:
        """Whether a call takes rows, and not single steps."""
        return bool(recurrent_mode())

    def make_tensordict_primer(self) -> TensorDictPrimer:
        """Return the transform with which torchrl's collectors carry the memory."""
        *memories, steps = self._states
        specs: dict[NestedKey, TensorSpec] = {steps: Unbounded(torch.Size([2]), dtype=torch.int64)}
        for key, spec in zip(memories, self.specs.values(), strict=True):
            specs[key] = Unbounded(torch.Size([self.context, *spec.shape]), dtype=spec.dtype)
        return TensorDictPrimer(specs, expand_specs=True)  # pyright: ignore[reportArgumentType]

    @dispatch  # pyright: ignore[reportArgumentType]
    @torch.compiler.disable
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tensordict: TensorDictBase
    ) -> TensorDictBase:
        """Write the output, and of a single step the memory after it; return the TensorDict."""
        shape, is_window = tensordict.batch_size, self.recurrent_mode
        frames = tensordict if is_window else tensordict.unsqueeze(-1)
        if not (frames.ndim and frames.batch_size.numel()):
            raise ValueError(f"A batch of shape {list(shape)} has no rows of frames.")
        is_init, real = _starts_of(frames)
        entries = [get_tensor(frames, key, fix=STATE_FIX) for key in self.in_keys[:-1]]
        entries = [x.reshape(*is_init.shape, *x.shape[frames.ndim :]) for x in entries]
        inputs, states = entries[: len(self.specs)], entries[len(self.specs) :]
        *memories, steps = (x[:, 0] for x in states)
        alone = is_init if real is None else is_init | ~real
        number = states[-1][..., 0].masked_fill(is_init, 0)
        if (lost := (number[:, 1:] != number[:, :-1] + 1) & ~alone[:, 1:]).any():
            row, step = lost.nonzero()[0].tolist()
            raise ValueError(
                f"{self._states[-1]!r} of row {row} has {number[row, step : step + 2].tolist()} at "
                f"steps {step} and {step + 1}, within an episode: the row lacks frames between "
                'them, or its padding is not False at ("collector", "mask").'
            )
        count = self._count(steps, alone[:, 0])
        output = self._window(inputs, memories, count, is_init, real)
        tensordict.set(self.out_keys[0], output.reshape(*shape, output.shape[-1]))
        if not is_window:
            after = _memories_after(memories, count, inputs)
            for key, x in zip(self.out_keys[1:], after, strict=True):
                tensordict.set(key, x.reshape(*shape, *x.shape[1:]))
        return tensordict

    def stepper(self) -> Callable[..., tuple[Tensor, ...]]:
        """Return one step as a function of the entries of ``in_keys``, that returns those written.

        From the second call on it keeps keys and values, and so is called while no weights change.
        If it is given another memory than it returned, it computes a step from that. It returns
        memories that it writes to in the next call.
        """
        after: Sequence[Tensor] = ()
        cache: object = None

        def step(*given: Tensor) -> tuple[Tensor, ...]:
            nonlocal after, cache
            shape, held = given[-1].shape[:-1], given[len(self.specs) : -2]
            x = [y.reshape(-1, *y.shape[len(shape) :]) for y in given]
            inputs = [y.unsqueeze(1) for y in x[: len(self.specs)]]
            *memories, steps, is_init = x[len(self.specs) :]
            count = self._count(steps, is_init.squeeze(1))
            if not after or any(y is not z for y, z in zip(held, after, strict=True)):
                output = self._window(inputs, memories, count, is_init)
                *memories, _ = _memories_after(memories, count, inputs)
                after, cache = [y.reshape(*shape, *y.shape[1:]) for y in memories], None
            else:
                cache = self._prefilled(memories, count) if cache is None else cache
                cache = self.transformer.reset_kv_cache(cache, is_init.squeeze(1))
                features, positions = self._features(inputs), count.unsqueeze(1)
                output, cache = self.transformer(features, positions, kv_cache=cache)
                for memory, y in zip(memories, inputs, strict=True):  # which after is a view of
                    _append(memory, count, y)
            output = output.reshape(*shape, output.shape[-1])
            return output, *after, _counted(count).reshape(*shape, 2)

        return step

    def _count(self, steps: Tensor, is_init: Tensor) -> Tensor:
        """Return the number of inputs in the memory of each row ``[R]``, which must be its own."""
        count, since = steps.masked_fill(is_init.unsqueeze(1), 0).unbind(1)
        check_context(count, self.context)
        if ((count > 0) & (since > 0)).any():
            raise ValueError(
                f"{self._states[0]!r} is the memory before an earlier frame than the first that is "
                "given. Call the network in recurrent mode (torchrl.modules.set_recurrent_mode), "
                "on whole rows of a batch or on sequences of SequenceBatcher."
            )
        return count

    def _window(
        self,
        inputs: Sequence[Tensor],
        memories: Sequence[Tensor],
        count: Tensor,
        is_init: Tensor,
        real: Tensor | None = None,
    ) -> Tensor:
        """Return the output ``[R, T, H]`` of rows, after so many inputs of their memories."""
        held, starts = int(count.max()), is_init.clone()
        starts[:, 0] = count == 0
        if real is not None:  # padding is alone, and may not be finite
            starts |= ~real
            inputs = [x.masked_fill(~expand_as_right(real, x), 0) for x in inputs]
        if held:
            slots = torch.arange(held, device=count.device) - held + count.unsqueeze(1)
            before = [_taken(memory, slots) for memory in memories]
            inputs = [torch.cat([x.to(y), y], 1) for x, y in zip(before, inputs, strict=True)]
            starts = torch.cat([slots <= 0, starts], 1)
        positions = positions_from_is_init(starts)
        check_context(positions, self.context)
        mask = segment_causal_mask_from_is_init(starts)
        return self.transformer(self._features(inputs), positions, mask=mask)[0][:, held:]

    def _features(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the transformer's input, in the dtype of its parameters."""
        features = inputs[0] if self.encoder is None else self.encoder(*inputs)
        return features.to(next(self.transformer.parameters()).dtype)

    def _prefilled(self, memories: Sequence[Tensor], count: Tensor) -> object:
        """Return the keys and values of so many inputs in the memory of each row."""
        cache = self.transformer.new_kv_cache(len(count), device=count.device)
        positions = torch.arange(int(count.max()), device=count.device).expand(len(count), -1)
        slots = positions.masked_fill(positions >= count.unsqueeze(1), -1)
        features = self._features([_taken(x, slots) for x in memories]) if slots.numel() else slots
        for t in range(slots.shape[1]):  # what follows an input that counts is replaced when read
            at = slice(t, t + 1)
            _, cache = self.transformer(features[:, at], positions[:, at], kv_cache=cache)
        return cache


def check_has_transformer() -> None:
    """Raise an ImportError if the installed torchrl has no transformer."""
    if CausalTransformer is None:
        raise ImportError(
            "A transformer needs torchrl.modules.CausalTransformer, which torchrl "
            f"{version('torchrl')} does not have: pip install torchrl-nightly tensordict-nightly "
            "(of October 2026 or later). LSTMModule and GRUModule need no nightly."
        )


def _taken(memory: Tensor, slots: Tensor) -> Tensor:
    """Return the inputs ``[R, n, ...]`` of these slots of a memory, and zeros for negative ones."""
    taken = memory[torch.arange(len(memory), device=memory.device).unsqueeze(1), slots.clamp_min(0)]
    return taken.masked_fill(expand_as_right(slots < 0, taken), 0)


def _append(memory: Tensor, count: Tensor, x: Tensor) -> None:
    """Write an input ``[R, 1, ...]`` behind so many in a memory, unless that is full."""
    rows = (count < memory.shape[1]).nonzero().squeeze(1)
    memory[rows, count[rows]] = x[rows, 0].detach().to(memory.dtype)


def _counted(count: Tensor) -> Tensor:
    """Return the numbers ``[R, 2]`` of the memory after a step."""
    return torch.stack([count + 1, torch.zeros_like(count)], 1)


def _memories_after(
    memories: Sequence[Tensor], count: Tensor, inputs: Sequence[Tensor]
) -> list[Tensor]:
    """Return copies of the memories, in the dtypes of the inputs and with them; their numbers."""
    copies = [torch.empty_like(x, dtype=y.dtype) for x, y in zip(memories, inputs, strict=True)]
    for copy, memory, x in zip(copies, memories, inputs, strict=True):
        _append(copy.copy_(memory.detach()), count, x)
    return [*copies, _counted(count)]


def has_memory(module: nn.Module) -> TypeGuard[_Module | TransformerModule]:
    """Return whether a module is one of these."""
    return isinstance(module, (_Unsplit, TransformerModule))


def no_graph_of(module: _Module | TransformerModule, amp_dtype: torch.dtype | None) -> str | None:
    """Return why the graph of a training step cannot hold a recurrent module, or None."""
    network = module.lstm if isinstance(module, TorchRLLSTMModule) else None
    if type(network) is not nn.LSTM or network.num_layers > 1 or network.bidirectional:
        return "is no nn.LSTM of one layer, the one that a graph can hold"
    if not network.bias or network.proj_size or not torch.backends.mkldnn.is_available():
        return "has no biases, or proj_size, or torch has no oneDNN"
    if module.recurrent_backend not in ("pad", "auto"):
        return f"has recurrent_backend={module.recurrent_backend!r}"
    weights = lstm_weights(module)
    if not all(p.requires_grad for p in weights) or {*weights} != {*module.parameters()}:
        return "has frozen weights, or others than its LSTM's"
    if len({*weights}) < len(weights):
        return "has tied weights"
    if amp_dtype is not None or torch.is_autocast_enabled("cpu"):
        return "is in mixed precision"
    is_plain = all(p.is_cpu and p.dtype is torch.float32 for p in weights)
    return None if is_plain else "is not in float32 on the CPU"


def lstm_weights(module: nn.Module) -> list[nn.Parameter]:
    """Return the four weights of one layer, in the order of torch's functions."""
    names = "weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"
    return [module.get_parameter(f"lstm.{name}") for name in names]


def _check_step(module: _Module, tensordict: TensorDictBase) -> None:
    """Raise a KeyError without "is_init"; warn where a step within an episode has no state."""
    if is_dynamo_compiling() or kernels.in_function_transform():
        return
    fix = (
        "At inference pass True at the first step of an episode and else False, [*B, 1], and as "
        f"states the entries ('next', state) of the step before. {STATE_FIX}"
    )
    is_init = get_tensor(tensordict, "is_init", fix=fix)
    if module.recurrent_mode or not is_init.is_cpu or is_init.all():
        return
    missing = [key for key in module.in_keys[1:-1] if tensordict.get(key, None) is None]
    if missing:
        warnings.warn(
            f"{missing} are not in the batch: the state begins at zero in every step. {STATE_FIX}",
            RuntimeWarning,
            stacklevel=3,
        )


def _run_in_graph(
    module: _Module, weights: Sequence[Tensor], tensordict: TensorDictBase
) -> TensorDictBase:
    """Write output and states as :func:`_run` does, by an operator of a graph."""
    x, is_init, real, states = _read(module, tensordict)
    states = states or [x.new_zeros(*x.shape[:2], 1, weights[1].shape[1])] * 2
    following = is_init[:, 1:]  # whether the next step is of another run
    if real is not None:
        x = x.masked_fill(~real.unsqueeze(-1), 0)
        following = following | (real[:, :-1] & ~real[:, 1:] & following.any())
    starts = nn.functional.pad(following, (1, 0))
    steps_first = (y.transpose(0, 1) for y in (x, starts, *(z[:, :, 0] for z in states)))
    found = [y.transpose(0, 1) for y in run_lstm(*steps_first, *weights)[:2]]
    ends = nn.functional.pad(following, (0, 1), value=True)
    ends = ends if real is None else ends & real
    after = [y.masked_fill(~ends.unsqueeze(-1), 0).unsqueeze(2) for y in found]
    output = found[0] if real is None else found[0].masked_fill(~real.unsqueeze(-1), 0)
    return _write(module, tensordict, [output, *after])


@torch.compiler.disable
def _run(
    module: _Module, tensordict: TensorDictBase, parent: Callable[[TensorDictBase], TensorDictBase]
) -> TensorDictBase:
    """Write output and states for a TensorDict ``[*B, T]``, eagerly, or let the parent do it."""
    network: nn.RNNBase = module.lstm if isinstance(module, TorchRLLSTMModule) else module.gru
    shape = tensordict.batch_size
    if 0 in shape:
        raise ValueError(f"The batch is empty: it has shape {list(shape)}.")
    is_missing = {tensordict.get(key, None) is None for key in module.in_keys[1:-1]}
    is_plain = type(network) in (nn.LSTM, nn.GRU) and not network.bidirectional
    is_batch = shape and isinstance(tensordict.get(module.in_keys[0], None), Tensor)
    if not (is_batch and is_plain) or len(is_missing) > 1 or kernels.in_function_transform():
        return parent(tensordict)
    x, is_init, real, states = _read(module, tensordict)
    knows_states = real is None or not real.any()
    if (knows_states or torch.is_grad_enabled()) and not is_init[:, 1:].any():
        found = _run_rows(network, x, [state[:, 0] for state in states], real)
    else:
        found = _run_packed(network, x, states, is_init, real)
    return _write(module, tensordict, found)


def _read(
    module: _Module, tensordict: TensorDictBase
) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
    """Return input, episode starts, frames that are no padding or None, and states ``[R, T]``."""
    is_init, real = _starts_of(tensordict)
    is_init = is_init if real is None else is_init & real
    entries = (tensordict.get(key) for key in module.in_keys[:-1] if key in tensordict)
    x, *states = (x.reshape(*is_init.shape, *x.shape[tensordict.ndim :]) for x in entries)
    return x, is_init, real, [state.to(x.dtype) for state in states]


def _write(module: _Module, tensordict: TensorDictBase, found: Sequence[Tensor]) -> TensorDictBase:
    """Write output and states ``[R, T, ...]`` into the TensorDict ``[*B, T]``, and return it."""
    shape = tensordict.batch_size
    for key, made in zip(module.out_keys, found, strict=True):
        tensordict.set(key, made if tensordict.ndim == 2 else made.reshape(*shape, *made.shape[2:]))
    return tensordict


def _starts_of(tensordict: TensorDictBase) -> tuple[Tensor, Tensor | None]:
    """Return episode starts ``[R, T]``, and the frames that are not padding or None if all are not.

    The frames after the last valid frame of a row are padding. A graph does not look at the mask.
    """
    shape = tensordict.batch_size
    is_init = get_tensor(tensordict, IS_INIT, fix=STATE_FIX)
    check_bool(IS_INIT, is_init)
    if (is_init.squeeze(-1) if is_init.ndim > len(shape) else is_init).shape != shape:
        raise ValueError(
            f"{IS_INIT!r} has shape {list(is_init.shape)}; it is one flag for each frame of "
            f"{list(shape)}, with a trailing 1. torchrl's InitTracker writes it."
        )
    rows, mask = (shape[:-1].numel(), shape[-1]), valid_mask(tensordict)
    if mask is None or (not is_dynamo_compiling() and mask.all()):
        return is_init.reshape(rows), None
    return is_init.reshape(rows), mask.reshape(rows).flip(1).cummax(1).values.flip(1)


def _run_rows(
    network: nn.RNNBase, x: Tensor, states: list[Tensor], real: Tensor | None
) -> list[Tensor]:
    """Return output ``[B, T, H]`` and last states ``[B, T, layers, H]``, 0 after padding."""
    if real is not None and not x.detach().sum().isfinite():  # a gradient of 0 times NaN is NaN
        x = x.masked_fill(~real.unsqueeze(-1), 0)
    output, after = _call(network, x, [state.transpose(0, 1) for state in states])
    after = [state.transpose(0, 1).unsqueeze(1) for state in after]
    if real is not None:
        # Not by a product: the gradient of padding may not be finite.
        output = output.masked_fill(~real.unsqueeze(-1), 0)
        after = [state.masked_fill(~real[:, -1].view(-1, 1, 1, 1), 0) for state in after]
    before = (0, 0, 0, 0, x.shape[1] - 1, 0)
    return [output, *(nn.functional.pad(state, before) for state in after)]


def _run_packed(
    network: nn.RNNBase, x: Tensor, states: list[Tensor], is_init: Tensor, real: Tensor | None
) -> list[Tensor]:
    """Return the output ``[B, T, H]``, and the states after each run ``[B, T, layers, H]``."""
    frames, starts, ends, sizes = _pack(is_init, real)
    rows, steps = x.shape[:2]
    packed = x.flatten(0, 1).index_select(0, frames)
    first = [state[starts // steps, starts % steps].transpose(0, 1) for state in states]
    if x.is_cuda:
        output, after = _call(network, PackedSequence(packed, torch.tensor(sizes)), first)
        output = output.data
    else:
        output, after = _run_segments(network, packed, first, sizes)

    def unpack(values: Tensor, places: Tensor) -> Tensor:
        whole = values.new_zeros(rows * steps, *values.shape[1:])
        return whole.index_copy(0, places, values).unflatten(0, (rows, steps))

    return [unpack(output, frames), *(unpack(state.transpose(0, 1), ends) for state in after)]


def _run_segments(
    network: nn.RNNBase, packed: Tensor, states: list[Tensor], sizes: list[int]
) -> tuple[Tensor, list[Tensor]]:
    """Return the output of packed frames ``[F, H]``, and the last states ``[layers, N, H]``."""
    # On the CPU, torch takes several times as long over packed sequences.
    segments = [(running, len(list(same))) for running, same in groupby(sizes)]
    outputs, ended = [], []
    for part, (running, steps), (going_on, _) in zip(
        packed.split([running * steps for running, steps in segments]),
        segments,
        [*segments[1:], (0, 0)],
        strict=True,
    ):
        x = part.view(steps, running, -1).transpose(0, 1)
        output, states = _call(network, x, states)
        outputs.append(output.transpose(0, 1).flatten(0, 1))
        ended.append([state[:, going_on:] for state in states])
        states = [state[:, :going_on] for state in states]
    return torch.cat(outputs), [torch.cat(parts[::-1], 1) for parts in zip(*ended, strict=True)]


def _call(network: nn.RNNBase, x: object, states: list[Tensor]) -> tuple[Any, list[Tensor]]:
    """Return output and states after the last step; no states stand for zeros."""
    given = tuple(state.contiguous() for state in states)
    if isinstance(network, nn.LSTM):
        output, after = network(x, given or None)
        return output, list(after)
    output, after = network(x, *given)
    return output, [after]


def _pack(is_init: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Return the runs of a batch ``[B, T]``, as in :class:`torch.nn.utils.rnn.PackedSequence`.

    A run goes from a row's start, or a True of ``is_init``, to the next one or to the row's last
    frame; only ``real`` frames ``[B, T]``, a row's first ones, are in runs (None: all). Returns
    the positions in the flattened batch of the packed frames ``[F]``, by their step in a run,
    longer runs first, and of the first and the last frame of each run ``[N]``; and the number of
    runs that have a frame at each step.
    """
    starts, ends = is_init.clone(), torch.ones_like(is_init)
    starts[:, 0] = True
    ends[:, :-1] = is_init[:, 1:]
    if real is not None:
        starts &= real
        ends[:, :-1] |= ~real[:, 1:]
        ends &= real
    first, last = (x.flatten().nonzero().squeeze(1) for x in (starts, ends))
    lengths, order = (last - first).sort(descending=True, stable=True)
    first, last = first[order], last[order]
    step = torch.arange(int(lengths[0]) + 1, device=first.device).unsqueeze(1)
    running = lengths >= step
    return (first + step)[running], first, last, running.sum(1).tolist()
