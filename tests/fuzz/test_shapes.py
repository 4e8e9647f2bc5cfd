"""Batches of any shape, dtype and mask give the results of the same rows laid flat."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

import ppokit
from ppokit import GAE, DualClipPPOLoss, LSTMModule, ObservationNormalizer, RewardNormalizer
from tests.blocks import make_actor, make_critic, make_minibatch

ROOM = str(Path(ppokit.__file__).parent)
MASK = ("collector", "mask")
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
warns = pytest.mark.filterwarnings("ignore::RuntimeWarning")


ANY, WIDE = st.sampled_from([*TOLERANCE]), st.sampled_from([torch.float32, torch.float64])


@st.composite
def rollouts(draw: st.DrawFn, dtypes: st.SearchStrategy[torch.dtype] = ANY) -> TensorDict:
    """Rows of any number and length, with ends, masks and ids anywhere; some have no frame."""
    rows = draw(st.lists(st.integers(0, 3), min_size=0, max_size=2))
    shape, dtype = (*rows, draw(st.integers(0, 7))), draw(dtypes)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*shape, *size, generator=generator, dtype=torch.float64).to(dtype)

    def chance(p: float) -> torch.Tensor:
        return torch.rand(*shape, 1, generator=generator) < p

    terminated, ends = chance(0.2), draw(st.sampled_from([0.0, 0.3, 1.0]))
    done = chance(ends) | terminated if draw(st.booleans()) else terminated
    is_init = torch.zeros_like(done)
    is_init[..., 1:, :] = done[..., :-1, :]
    batch = TensorDict(
        {
            "observation": normal(4),
            "is_init": is_init,
            "next": {
                "observation": normal(4),
                "reward": normal(1),
                "done": done,
                "terminated": terminated,
            },
        },
        shape,
        names=[*[None] * len(rows), "time"],
    )
    if draw(st.booleans()):
        earlier = (done.cumsum(-2) - done.long()).squeeze(-1)
        row = torch.arange(math.prod(rows)).reshape(*rows, 1)
        batch["collector", "traj_ids"] = earlier + 100 * row
    kind = draw(st.sampled_from(["none", "none", "padding", "all", "nothing"]))
    if kind == "padding" and shape[-1]:  # at the end of rows, as torchrl pads
        lengths = torch.randint(0, shape[-1] + 1, (*rows, 1), generator=generator)
        batch[MASK] = torch.arange(shape[-1]).expand(shape) < lengths
    elif kind != "none":
        batch[MASK] = torch.full(shape, kind == "all")
    return batch


def laid_flat(batch: TensorDict) -> TensorDict:
    """The same rows ``[N, T]``."""
    flat = batch.reshape(math.prod(batch.shape[:-1]), batch.shape[-1])
    flat.names = [None, "time"]
    return flat


def attempt(run: Callable[[], Any]) -> Any:
    """Return what it returns, or None where it refuses in words of ours."""
    try:
        return run()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1].filename
        if not (last.startswith(ROOM) and isinstance(error, KeyError | TypeError | ValueError)):
            raise
        return None


def assert_close(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, what: Any) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        a.double().reshape(b.shape), b.double(), rtol=tolerance, atol=tolerance, msg=f"{what}"
    )


RECURRENT: Any = {"in_key": "observation", "out_key": "y", "default_recurrent_mode": True}
H, C = "recurrent_state_h", "recurrent_state_c"
BLOCKS: dict[str, tuple[Callable[[torch.dtype], Any], list[Any]]] = {
    "GAE": (
        lambda dtype: GAE(gamma=0.9, lmbda=0.8, value_network=make_critic(dtype=dtype)),
        ["advantage", "value_target"],
    ),
    "RewardNormalizer": (lambda dtype: RewardNormalizer(0.9), [("next", "reward")]),
    "ObservationNormalizer": (lambda dtype: ObservationNormalizer(4).to(dtype), ["observation"]),
    "LSTMModule": (
        lambda dtype: LSTMModule(4, 3, **RECURRENT).to(dtype),
        ["y", ("next", H), ("next", C)],
    ),
}


def make(name: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    return BLOCKS[name][0](dtype)


@warns
@pytest.mark.parametrize("name", BLOCKS)
@given(batch=rollouts())
def test_rows_of_any_shape_equal_rows_laid_flat(name: str, batch: TensorDict):
    dtype = batch["observation"].dtype
    valid = batch[MASK] if MASK in batch.keys(True) else torch.ones(batch.shape).bool()
    given = {key: x.clone() for key, x in batch.items(True, True)}
    block, flat = make(name, dtype), make(name, dtype)
    found = attempt(lambda: block(batch.clone()))
    expected = attempt(lambda: flat(laid_flat(batch.clone())))
    assert (found is None) == (expected is None)
    for key, x in given.items():
        assert torch.equal(batch[key], x), key
    if found is None:
        assert not valid.any() or dtype in (torch.float16, torch.bfloat16)
        return
    for key in BLOCKS[name][1]:
        assert found[key].shape[: batch.ndim] == batch.shape
        mask = valid.reshape(expected[key].shape[:2])
        assert expected[key][mask].isfinite().all(), key
        assert_close(found[key].reshape(expected[key].shape)[mask], expected[key][mask], dtype, key)


@st.composite
def minibatches(draw: st.DrawFn) -> tuple[str, TensorDict]:
    """Of any shape and policy, some of it masked."""
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)))
    kind = draw(st.sampled_from(["normal", "tanh_normal", "categorical"]))
    actor = make_actor(kind, dtype=torch.float64)
    options: Any = {"spread": draw(st.sampled_from([0.0, 0.1, 2.0])), "dtype": torch.float64}
    whole = [max(1, size) for size in shape]  # torch's distributions have no log_prob of nothing
    batch = make_minibatch(actor, *whole, seed=draw(st.integers(0, 10**6)), **options)
    batch: Any = batch[tuple(slice(size) for size in shape)].contiguous()
    share = draw(st.sampled_from([None, 0.0, 0.5, 1.0]))
    if share is not None:
        batch[MASK] = torch.rand(shape) < share
    return kind, batch


@warns
@given(drawn=minibatches(), options=st.fixed_dictionaries({
    "dual_clip": st.sampled_from([None, 1.5, 3.0]),
    "kl_coeff": st.sampled_from([None, 0.3]),
    "critic_loss_clip": st.sampled_from([None, 0.5]),
    "clip_value": st.sampled_from([None, 0.2]),
    "normalize_advantage": st.booleans(),
    "reduction": st.sampled_from(["mean", "sum"]),
}))  # fmt: skip
def test_losses_of_any_shape_equal_those_of_the_valid_frames(
    drawn: tuple[str, TensorDict], options: dict[str, Any]
):
    kind, batch = drawn
    dtype = torch.float64

    networks = make_actor(kind, dtype=dtype), make_critic(dtype=dtype)
    loss = DualClipPPOLoss(*networks, **options).double()
    valid = batch[MASK] if MASK in batch.keys(True) else torch.ones(batch.shape).bool()
    found = attempt(lambda: loss(batch.clone()))
    if found is None:
        assert not valid.any()
        return
    alone: Any = batch.exclude(MASK).reshape(-1)[valid.flatten()]
    if not len(alone):
        names = [name for name in found.keys() if str(name).startswith("loss_")]
        assert all(found[name].nan_to_num() == 0 for name in names)
        return
    if len(alone) == 1 and options["normalize_advantage"]:
        return  # torchrl does not normalize a single frame, but one valid frame of several
    expected = loss(alone)
    for name in expected.keys():
        if "entropy" in str(name) and kind == "tanh_normal":
            continue  # estimated from a sample
        if found[name].shape != expected[name].shape:
            continue  # torchrl's diagnostics of each column
        assert_close(found[name], expected[name], torch.float32, name)
