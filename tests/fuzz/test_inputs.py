"""Every block gives the same result however a batch is stored, and names what it cannot use.

No input is written to, and a batch that raises changes no state.
"""

from __future__ import annotations

import copy
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase

import ppokit
from ppokit.testing import BlockCase as Case
from ppokit.testing import call
from tests.fuzz.disguises import DAMAGES, damage, disguised, disguises
from tests.test_contract import CASES
from tests.test_state import assert_same_state, flat

ROOM = str(Path(ppokit.__file__).parent)
SEEDS = st.integers(0, 5)
warns = pytest.mark.filterwarnings("ignore:The KL divergence is:RuntimeWarning")
every_block = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def tensors(batch: TensorDictBase) -> dict[Any, torch.Tensor]:
    return {key: x for key, x in batch.items(True, True) if isinstance(x, torch.Tensor)}


def is_clear(error: Exception, key: Any) -> bool:
    """Whether it is raised by ppokit, names the entry, or is of the user's network."""
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    name = key if isinstance(key, str) else key[-1]
    theirs = ("torch/nn/", "torch/distributions/")
    return (
        frames[-1].startswith(ROOM)
        or name in str(error)
        or any(part in frame for part in theirs for frame in frames)
    )


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
    _, error = answer(block, batch)
    if error is not None:
        assert "lock" in str(error)
        assert_same_state(flat(block.state_dict()), state)
        assert set(batch.keys(True)) == keys


@warns
@pytest.mark.parametrize("name", CASES)
@given(seed=SEEDS, data=st.data(), kind=st.sampled_from(["missing", *DAMAGES]))
def test_one_damaged_entry_raises_or_changes_nothing(
    name: str, seed: int, data: st.DataObject, kind: str
):
    case = CASES[name]
    plain = case.batch(seed)
    key = data.draw(st.sampled_from(sorted(plain.keys(True, True), key=str)))
    batch = damage(plain, key, kind)
    given = tensors(batch)
    before = {key: x.clone() for key, x in given.items()}
    block = case.make()
    state = copy.deepcopy(flat(block.state_dict()))
    expected = call(case.make(), plain)
    found, error = answer(block, batch)
    if found is None:
        assert is_clear(error, key), "".join(traceback.format_exception(error))
        assert_same_state(flat(block.state_dict()), state)
        assert set(tensors(batch)) == set(given)
    else:
        check_is_right(found, expected, block.out_keys, key, kind)
    for name, x in given.items():
        assert torch.equal(x.nan_to_num(), before[name].nan_to_num()), name


def check_is_right(
    found: TensorDictBase, expected: TensorDict, out_keys: Any, key: Any, kind: str
) -> None:
    """An entry that is not needed changes nothing but the precision."""
    if kind in ("twice as wide", "flags", "integers", "missing") or key == "observation":
        return  # another question: an entry that may be missing, a network that saturates
    if kind == "infinite" and key in ("action", "action_log_prob"):
        return  # a ratio of 0, as torchrl has it
    losses = [found[name] for name in out_keys if str(name).startswith("loss_")]
    if not all(x.isfinite() for x in losses):
        return  # to be seen
    loose = {"rtol": 2e-2, "atol": 2e-2} if kind == "half" else {"rtol": 1e-4, "atol": 1e-5}
    for name in out_keys:
        ours, right = found.get(name), expected.get(name)
        if kind in ("NaN", "infinite") and not ours.isfinite().all():
            continue  # to be seen
        if kind in ("NaN", "infinite") and (name == key or ours.dtype == torch.bool):
            continue
        ours = ours.real if ours.is_complex() else ours
        ours = ours.reshape(right.shape) if kind == "one more dimension" else ours  # one agent
        torch.testing.assert_close(ours.to(right.dtype), right, **loose, msg=f"{name}: {ours}")
