"""Every block gives the same result however a batch is stored, and names what it cannot use.

No input is written to, and a batch that raises changes no state.
"""

from __future__ import annotations

import copy
import re
import traceback
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDictBase
from torch import Tensor

from ppokit.testing import BlockCase as Case
from ppokit.testing import call
from tests.fuzz.disguises import CONVERSIONS, DAMAGES, damage, disguised, disguises
from tests.test_contract import CASES
from tests.test_state import assert_same_state, flat

SEEDS = st.integers(0, 5)
warns = pytest.mark.filterwarnings("ignore:The KL divergence is:RuntimeWarning")
every_block = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
DONE, TERMINATED = ("next", "done"), ("next", "terminated")


def tensors(batch: TensorDictBase) -> dict[Any, Tensor]:
    return {key: x for key, x in batch.items(True, True) if isinstance(x, Tensor)}


def answer(block: Any, batch: TensorDictBase) -> tuple[Any, Any]:
    """Return what the block returns, or what it raises."""
    try:
        return call(block, batch), None
    except Exception as error:
        return None, error


@warns
@every_block
@given(seed=SEEDS, names=disguises())
def test_the_layout_of_a_batch_changes_no_result(case: Case, seed: int, names: list[str]):
    expected = call(case.make(), case.batch(seed))
    batch = disguised(case.batch(seed), names)
    before = {key: x.clone() for key, x in tensors(batch).items()}
    given = tensors(batch)
    found = call(case.make(), batch)
    for key, x in tensors(expected).items():
        torch.testing.assert_close(found.get(key), x, msg=lambda said, key=key: f"{key}: {said}")
    for key, x in given.items():
        assert torch.equal(x, before[key]), key


@warns
@every_block
@given(seed=SEEDS)
def test_a_locked_batch_raises_or_is_only_read(case: Case, seed: int):
    """It raises before anything is counted."""
    block, batch = case.make(), case.batch(seed).lock_()
    keys, state = set(batch.keys(True)), copy.deepcopy(flat(block.state_dict()))
    found, error = answer(block, batch)
    if error is None:
        check_equal(found, call(case.make(), case.batch(seed)), block.out_keys)
    else:
        assert type(error) is RuntimeError
        assert "lock" in str(error)
        assert_same_state(flat(block.state_dict()), state)
    assert set(batch.keys(True)) == keys


# -- one damaged entry ---------------------------------------------------------------------

#: The entry that a block uses in place of a missing one: the result is that with this entry.
DEFAULTS: dict[tuple[str, Any], Any] = {
    ("GAE", TERMINATED): lambda batch: batch[DONE],
    ("GRUModule", "recurrent_state"): lambda batch: torch.zeros_like(batch["recurrent_state"]),
}
#: Entries without which one term is computed in another way: the KL is estimated by samples.
ESTIMATED = {("DualClipPPOLoss", key): ["loss_kl"] for key in ("loc", "scale")}
#: Modules that are a network themselves: a layer of torch raises for the input that it gets.
NETWORKS = {
    "TensorActor": ["observation"],
    "LSTMModule": ["observation"],
    "GRUModule": ["observation", "recurrent_state"],
}


@warns
@pytest.mark.filterwarnings("ignore:Casting complex values to real:UserWarning")
@pytest.mark.parametrize("kind", ["missing", *DAMAGES])
@pytest.mark.parametrize("name", CASES)
def test_one_damaged_entry_raises_or_changes_nothing(name: str, kind: str):
    case = CASES[name]
    for key in sorted(case.batch(0).keys(True, True), key=str):
        batch = damage(case.batch(0), key, kind)
        given = tensors(batch)
        before = {other: x.clone() for other, x in given.items()}
        block: Any = case.make()
        state = copy.deepcopy(flat(block.state_dict()))
        found, error = answer(block, batch)
        for other, x in given.items():
            assert torch.equal(x.nan_to_num(), before[other].nan_to_num()), (key, other)
        if error is not None:
            clear = is_clear(error, name, key, is_missing=key not in given)
            assert clear, f"{key}, {kind}: {error!r}"
            assert_same_state(flat(block.state_dict()), state)
            assert set(tensors(batch)) == set(given)
        else:
            left_out = ESTIMATED.get((name, key), []) if key not in given else []
            out_keys = [x for x in block.out_keys if x not in left_out]
            check_is_right(found, case, name, key, kind, out_keys)


def is_clear(error: Exception, name: str, key: Any, *, is_missing: bool) -> bool:
    """Whether it is of the documented kind, and its message names the entry."""
    last = key if isinstance(key, str) else key[-1]
    message = str(error).replace("\\'", "'")  # of a KeyError
    names_it = re.search(rf"['\"]{last}['\"]|\b{last} (has|is|must)\b", message) is not None
    if names_it and type(error) in ([KeyError] if is_missing else [TypeError, ValueError]):
        return True
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    is_of_layer = "/torch/nn/" in frames[-1] and type(error) in (RuntimeError, ValueError)
    return is_of_layer and key in NETWORKS.get(name, [])


def check_is_right(
    found: TensorDictBase, case: Case, name: str, key: Any, kind: str, out_keys: list[Any]
) -> None:
    """Compare with the result of a batch whose entry is right, or see that the damage is visible.

    - Of another dtype, the entry counts as its values in the dtype of the plain batch.
    - Left out, it counts as the default of the block, or is not needed.
    - One NaN or infinite number changes nothing, or is in the results. An infinite number may count
      as a large one, which a layer or a clip bounds.
    - Of another shape, it changes nothing: it is not read, or holds the same numbers.
    """
    plain, shown = case.batch(0), f"{key}, {kind}"
    damaged = damage(plain, key, kind)
    if kind in CONVERSIONS:
        values = damaged[key].real if damaged[key].is_complex() else damaged[key]
        plain[key] = values.to(plain[key].dtype)
    elif key not in damaged.keys(True, True) and (name, key) in DEFAULTS:
        plain[key] = DEFAULTS[name, key](plain)
    expected = call(case.make(), plain.clone())
    if kind not in ("NaN", "infinite"):
        check_equal(found, expected, out_keys, shown, half=kind == "half")
        return
    numbers = [found[x] for x in out_keys]
    if any(not x.isfinite().all() for x in numbers) or (name == "KLEarlyStopper" and numbers[0]):
        return
    if kind == "infinite":
        large = damaged[key]
        if large.is_floating_point():
            plain[key] = large.clamp(max=1e30)
        expected = call(case.make(), plain)
    check_equal(found, expected, out_keys, shown)


def check_equal(
    found: TensorDictBase,
    expected: TensorDictBase,
    out_keys: list[Any],
    shown: str = "",
    *,
    half: bool = False,
) -> None:
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if half else {"rtol": 1e-4, "atol": 1e-5}
    for name in out_keys:
        x, right = found.get(name), expected.get(name)
        x = x.real if x.is_complex() else x
        assert x.numel() == right.numel(), f"{shown}: {name} has shape {x.shape}"
        x = x.reshape(right.shape).to(right.dtype)  # of one agent
        torch.testing.assert_close(
            x, right, **tolerance, msg=lambda said, name=name: f"{shown}: {name}: {said}"
        )
