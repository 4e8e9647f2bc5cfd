"""The entries of sequences: what is filled in from the batch, and what is asked of them."""

from __future__ import annotations

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor

from ppokit._keys import get_if_any, get_tensor
from ppokit.functional._checks import check_same_shape
from ppokit.sequences.gathering import expand, frames_of, gather
from ppokit.sequences.reading import find_states


class SequenceEntries(TensorDictModuleBase):
    """What :class:`SequenceBatcher` knows of keys."""

    state_keys: list[NestedKey] | None
    cut_keys: list[NestedKey]
    mask_key: NestedKey
    index_key: NestedKey
    shape_key: NestedKey
    burn_in_key: NestedKey

    def _fill(self, places: TensorDictBase, batch: TensorDictBase) -> TensorDictBase:
        """Return the sequences at these places of the batch."""
        states, index = self._states(batch), places.get(self.index_key)
        sequences = gather(batch, index, leave_out={self.mask_key, *states})
        self._end(sequences, self._masks(places, "minibatches")[1])
        for key in states:
            at_start = frames_of(batch.get(key), index[:, 0], batch.batch_size)
            sequences.set(key, expand(at_start, index.shape[1]))
        return sequences.update(places)

    def _end(self, sequences: TensorDictBase, real: Tensor) -> None:
        """Let no padding be the start of an episode."""
        for key in self.cut_keys:
            flag = get_if_any(sequences, key)
            if flag is not None:
                padding = ~real.reshape(real.shape + (1,) * (flag.ndim - 2))
                flag.masked_fill_(padding, False)

    def _masks(self, sequences: TensorDictBase, who: str) -> tuple[Tensor, Tensor]:
        """Return which frames count, and which are not padding, ``[N, L]``."""
        counted = get_tensor(sequences, self.mask_key, fix=fix_of(who))
        burnt = get_if_any(sequences, self.burn_in_key)
        return counted, counted if burnt is None else counted | burnt

    def _states(self, tensordict: TensorDictBase) -> list[NestedKey]:
        """Return the states that are there; entries may have been selected."""
        if self.state_keys is None:
            return find_states(tensordict)
        return [key for key in self.state_keys if get_if_any(tensordict, key) is not None]

    def _check_states(self, batch: TensorDictBase) -> None:
        # Without a primer torchrl's modules write states and never read one, without a word.
        for key in find_states(batch, written=True) if self.state_keys is None else self.state_keys:
            state = get_tensor(batch, key, fix=FIX_OF_STATES)
            frames = state.new_empty(state.shape[: batch.ndim])
            check_same_shape({"the batch": state.new_empty(batch.batch_size), repr(key): frames})

    def _check_batch(self, batch: TensorDictBase, places: TensorDictBase) -> None:
        shape = get_tensor(places, self.shape_key, fix=fix_of("minibatches"))[0, 0].tolist()
        get_tensor(places, self.index_key, fix=fix_of("minibatches"))
        if shape != list(batch.batch_size):
            raise ValueError(
                f"The batch has shape {list(batch.batch_size)}, but the sequences were cut from "
                f"one of shape {shape}. Pass the batch that was given to places()."
            )


FIX_OF_STATES = (
    "The policy must store its recurrent state at every step: append "
    "lstm.make_tensordict_primer() to the environment."
)


def fix_of(who: str) -> str:
    """Return what to do where sequences lack what the batcher wrote."""
    return f"{who} takes what the batcher returned, with the entries that it wrote."
