"""The contract of a block, as checks that any block can be run through.

A block is an ``nn.Module`` that takes a TensorDict and returns one, with ``in_keys`` and
``out_keys``. Under pytest, each check is a test:

.. code-block:: python

    @pytest.mark.parametrize("check", ppokit.testing.CHECKS, ids=lambda check: check.__name__)
    def test_contract(check):
        check(BlockCase(MyBlock, make_batch, required=["observation"]))
"""

from __future__ import annotations

import copy
import io
import math
import pickle
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictSequential
from tensordict.utils import NestedKey
from torch import Tensor, nn

from ppokit._batch import MASK_KEY, as_key, out_keys_of

__all__ = ["CHECKS", "BlockCase", "assert_equal", "call", "check_block"]


@dataclass(frozen=True)
class BlockCase:
    """A block, and what it is to be called on.

    Args:
        make: returns a new block, the same each time (seed inside, if weights are drawn).
        batch: returns a batch for a seed, ``[B, T]`` or ``[N]``; the same for the same seed.
        required: entries without which the block raises a KeyError that names them.
        differentiable: entries of the result that have a gradient; no other may have one.
        make_nested: returns the block with other keys, its ``out_keys`` in the same order; None if
            it has no keys to choose.
        nested: the entries that ``make_nested`` reads elsewhere, and their keys there.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], TensorDict]
    required: Sequence[NestedKey] = ()
    differentiable: Sequence[NestedKey] = ()
    make_nested: Callable[[], nn.Module] | None = None
    nested: Mapping[NestedKey, NestedKey] = field(default_factory=dict)


def check_block(case: BlockCase) -> None:
    """Run a block through all checks.

    Raises:
        AssertionError: the block breaks the contract; the message says where.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torch import nn
        >>> from tensordict.nn import TensorDictModule
        >>> from ppokit.testing import BlockCase, check_block
        >>> def make() -> nn.Module:
        ...     return TensorDictModule(nn.Tanh(), ["observation"], ["squashed"])
        >>> def batch(seed: int) -> TensorDict:
        ...     generator = torch.Generator().manual_seed(seed)
        ...     observation = torch.randn(2, 5, 3, generator=generator)
        ...     return TensorDict({"observation": observation}, [2, 5])
        >>> check_block(BlockCase(make, batch, required=["observation"]))
    """
    for check in CHECKS:
        check(case)


def call(block: Callable[[object], Any], batch: TensorDictBase) -> TensorDictBase:
    """Return the result of a block, with the same random numbers each time."""
    torch.manual_seed(0)
    result = block(batch)
    assert isinstance(result, TensorDictBase), f"It returned a {type(result).__name__}."
    return result


def assert_equal(found: TensorDictBase, expected: TensorDictBase) -> None:
    """Raise an AssertionError unless two results are equal in keys and bits, NaN included."""
    _assert_same_keys(found, expected)
    for key in found.keys(True, True):
        assert _equal(found.get(key), expected.get(key)), f"{key!r} differs."


def state_goes_on_bit_for_bit(case: BlockCase) -> None:
    """With a state that was saved and read (``weights_only=True``), a new block continues."""
    block, fresh = case.make(), case.make()
    call(block, case.batch(1))
    file = io.BytesIO(_bytes_of_state(block))
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert_equal(call(fresh, case.batch(2)), call(block, case.batch(2)))
    after = dict(fresh.named_buffers())
    for name, buffer in block.named_buffers():
        assert _equal(after.get(name), buffer), f"The state does not restore the buffer {name!r}."


def copies_go_on_alone(case: BlockCase) -> None:
    """Copies, deep and through pickle, continue as the block does, with a state of their own."""
    for copier in (copy.deepcopy, lambda block: pickle.loads(pickle.dumps(block))):
        block = case.make()
        call(block, case.batch(1))
        twin, other = copier(block), copier(block)
        assert_equal(call(twin, case.batch(2)), call(block, case.batch(2)))
        call(other, case.batch(3))  # which must not move the block
        assert_equal(call(twin, case.batch(3)), call(block, case.batch(3)))


def tensors_of_the_batch_are_not_written_to(case: BlockCase) -> None:
    """Entries may be replaced, not deleted; the tensors of the batch do not change."""
    block = case.make()
    for seed in (1, 2):
        batch = case.batch(seed)
        leaves = dict(batch.items(True, True))
        before = {key: leaf.clone() for key, leaf in leaves.items()}
        call(block, batch)
        for key, leaf in leaves.items():
            assert _equal(leaf, before[key]), f"The tensor at {key!r} was written to."
            assert key in batch.keys(True), f"The entry {key!r} was deleted from the batch."


def out_keys_are_written(case: BlockCase) -> None:
    """The result has all ``out_keys``, and is the same in a TensorDictSequential."""
    block = case.make()
    result = call(block, case.batch(1))
    missing = set(map(as_key, _out_keys(block))) - set(result.keys(True))
    assert not missing, f"out_keys name {missing}, which the result lacks."
    assert_equal(call(TensorDictSequential(cast(Any, case.make())), case.batch(1)), result)


def a_missing_entry_is_named_and_nothing_half_written(case: BlockCase) -> None:
    """Without a required entry: a KeyError that names it, batch and state as they were."""
    for key in case.required:
        assert key in case.batch(1).keys(True), f"The batch of the case has no {key!r} to miss."
        batch, block = case.batch(1).exclude(key), case.make()
        leaves, state = dict(batch.items(True, True)), _bytes_of_state(block)
        name = str(key if isinstance(key, str) else key[-1])
        raised = None
        try:
            block(batch)
        except Exception as error:
            raised = error
        assert isinstance(raised, KeyError), f"Without {key!r} it raises {raised!r}, no KeyError."
        assert re.search(rf"(?<!\w){re.escape(name)}(?!\w)", str(raised)), (
            f"The error for a missing {key!r} does not name it: {raised}"
        )
        now = dict(batch.items(True, True))
        assert now.keys() == leaves.keys() and all(now[x] is leaves[x] for x in now), (  # noqa: PT018
            f"Without {key!r} the batch is half written."
        )
        assert _bytes_of_state(block) == state, f"Without {key!r} the state has moved."


def gradients_flow_where_wanted(case: BlockCase) -> None:
    """The differentiable entries have a gradient, and no others."""
    result, wanted = call(case.make(), case.batch(1)), set(map(as_key, case.differentiable))
    missing = wanted - set(result.keys(True, True))
    assert not missing, f"The result has no {missing}, which are to be differentiable."
    for key, leaf in result.items(True, True):
        has = "a" if leaf.requires_grad else "no"
        assert leaf.requires_grad == (key in wanted), f"{key!r} has {has} gradient."


def compiled_equals_eager(case: BlockCase) -> None:
    """Under ``torch.compile`` (its graphs run eagerly) the result is the same."""
    expected = call(case.make(), case.batch(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo's remarks on torchrl's own code
        torch.compiler.reset()  # after eight graphs of one forward, torch calls it uncompiled
        result = call(torch.compile(case.make(), backend="aot_eager"), case.batch(1))
    _assert_same_keys(result, expected)
    for key in expected.keys(True, True):
        _assert_close(key, result.get(key), expected.get(key))


def nested_keys_give_the_same(case: BlockCase) -> None:
    """With other keys the result is the same."""
    if case.make_nested is None:
        return
    block, flat = case.make_nested(), case.make()
    batch = case.batch(1)
    for old, new in case.nested.items():
        batch.set(new, batch.get(old))
        del batch[old]
    found, expected = call(block, batch), call(flat, case.batch(1))
    for new, old in zip(_out_keys(block), _out_keys(flat), strict=True):
        _assert_close(new, found.get(new), expected.get(old))


def float64_gives_the_same(case: BlockCase) -> None:
    """With parameters and batch in float64 the result is the same, to single precision."""
    batch: Any = case.batch(1).apply(lambda x: x.double() if x.is_floating_point() else x)
    found, expected = call(case.make().double(), batch), call(case.make(), case.batch(1))
    for key in _out_keys(case.make()):
        _assert_close(key, found.get(key), expected.get(key), rtol=1e-4, atol=1e-5)


def masked_frames_do_not_matter(case: BlockCase) -> None:
    """Zeros, large numbers and NaN in masked frames give the same results and the same state.

    The gradients of entries without a dimension of frames, such as losses, are also the same. These
    entries, where they are single numbers, and the buffers are as without the masked frames.
    """
    if not case.batch(1).ndim:
        return
    found, gradients, states = [], [], []
    for filler in (0.0, 1e3, math.nan):
        batch = case.batch(1).clone()  # entries may be views of one tensor
        valid = torch.ones(batch.shape, dtype=torch.bool)
        valid[..., -1] = False  # padding is at the end
        for leaf in batch.values(True, True):
            if leaf.shape[: batch.ndim] != batch.shape:
                continue
            if leaf.is_floating_point():
                leaf[~valid] = filler
            elif leaf.dtype is not torch.bool and filler:  # a number that is allowed there
                leaf[~valid] = leaf.select(batch.ndim - 1, 0).reshape(leaf[~valid].shape).clone()
        batch.set(MASK_KEY, valid)
        block = case.make()
        result = call(block, batch)
        states.append(_bytes_of_state(block))
        wanted = [result.get(key, None) for key in case.differentiable]
        losses = [x for x in wanted if x is not None and x.shape[: valid.ndim] != valid.shape]
        gradients.append(_gradients(block, losses))  # before a call that may write to buffers
        found.append((result, call(block, case.batch(2))))
    assert len({*states}) == 1, "Masked frames change the state."
    for name, gradient in gradients[0].items():
        for other in gradients[1:]:
            _assert_close(f"the gradient of {name}", other[name], gradient)
    for key in _out_keys(case.make()):
        for result, _ in found:
            assert result.get(key, None) is not None, f"With a mask it writes no {key!r}."
        zeros, *others = ((a.get(key), b.get(key)) for a, b in found)
        has_frames = zeros[0].shape[: valid.ndim] == valid.shape
        at = valid if has_frames else ...  # whole if it has no dimension of frames
        for other in others:
            _assert_close(key, other[0][at], zeros[0][at])
            _assert_close(key, other[1], zeros[1])
    if case.batch(1).shape[-1] > 1:
        _assert_same_without(case, valid)


def _assert_same_without(case: BlockCase, valid: Tensor) -> None:
    """Compare a batch whose last steps are masked with one that ends before them."""
    block, short, batch = case.make(), case.make(), case.batch(1)
    without = cast("TensorDict", batch[..., :-1])
    expected = call(short, without.clone())
    found = call(block, batch.set(MASK_KEY, valid))
    tolerance = {"rtol": 1e-4, "atol": 1e-5}
    for key in _out_keys(block):
        value = found.get(key)
        if value.numel() == 1:
            _assert_close(
                f"{key!r} without the masked frames", value, expected.get(key), **tolerance
            )
    for (name, buffer), other in zip(block.named_buffers(), short.buffers(), strict=True):
        _assert_close(f"the buffer {name!r} without the masked frames", buffer, other, **tolerance)


CHECKS: tuple[Callable[[BlockCase], None], ...] = (
    state_goes_on_bit_for_bit,
    copies_go_on_alone,
    tensors_of_the_batch_are_not_written_to,
    out_keys_are_written,
    a_missing_entry_is_named_and_nothing_half_written,
    gradients_flow_where_wanted,
    compiled_equals_eager,
    nested_keys_give_the_same,
    float64_gives_the_same,
    masked_frames_do_not_matter,
)


def _out_keys(block: object) -> list[NestedKey]:
    name = type(block).__name__
    assert hasattr(block, "out_keys"), f"{name} has no out_keys: the entries that it writes."
    return [*out_keys_of(block)]


def _assert_same_keys(found: TensorDictBase, expected: TensorDictBase) -> None:
    keys, others = (set(x.keys(True, True)) for x in (found, expected))
    assert keys == others, f"The entries differ: {sorted(map(str, keys ^ others))}."


def _equal(found: object, expected: object) -> bool:
    """Return whether two leaves have the same dtype, shape and numbers, NaN being one."""
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor):
        return bool(found == expected)
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    return bool(((found == expected) | (found.isnan() & expected.isnan())).all())


def _bytes_of_state(block: nn.Module) -> bytes:
    """Return what a state holds, tensors or not, as it would be saved."""
    file = io.BytesIO()
    torch.save(block.state_dict(), file)
    return file.getvalue()


def _gradients(block: nn.Module, losses: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the gradients of the block's parameters by the sum of these losses."""
    total = sum((loss.sum() for loss in losses), torch.zeros(()))
    if total.requires_grad:
        total.backward()
    return {name: p.grad for name, p in block.named_parameters() if p.grad is not None}


def _assert_close(key: NestedKey, found: Tensor, expected: Tensor, **tolerance: object) -> None:
    options = {"check_dtype": False, "equal_nan": True, **tolerance}
    torch.testing.assert_close(found, expected, msg=lambda said: f"{key!r}: {said}", **options)
