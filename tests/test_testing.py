"""Each check of the contract finds a block that breaks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import Tensor, nn

from ppokit import testing
from ppokit.testing import CHECKS, BlockCase, check_block

OTHER = ("agent", "seen")


def batch(seed: int) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    place = torch.randint(0, 9, (2, 5), generator=generator)
    return TensorDict({"x": torch.randn(2, 5, 3, generator=generator), "place": place}, [2, 5])


class Ranked(TensorDictModuleBase):
    """Multiplies by a weight, and by the number of batches seen so far."""

    seen: Tensor

    def __init__(self, in_key: Any = "x") -> None:
        super().__init__()
        self.in_keys, self.out_keys = [in_key], ["y"]
        self.weight = nn.Parameter(torch.full((), 2.0))
        self.register_buffer("seen", torch.tensor(0.0))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        x = tensordict[self.in_keys[0]]
        self.seen += 1
        return tensordict.set("y", x * self.weight * self.seen)


GOOD: dict[str, Any] = {
    "batch": batch,
    "required": ["x"],
    "differentiable": ["y"],
    "make_nested": lambda: Ranked(OTHER),
    "nested": {"x": OTHER},
}


class Forgets(Ranked):
    """Has a state that is in no ``state_dict``."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.calls += 1
        result = super().forward(tensordict)
        return result.set("y", result["y"] + self.calls)


class Shares(Ranked):
    """Has a state that copies share."""

    total = 0.0

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        Shares.total += 1
        result = super().forward(tensordict)
        return result.set("y", result["y"] + Shares.total)


class WritesInPlace(Ranked):
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        result = super().forward(tensordict)
        tensordict["x"].add_(1)
        return result


class Promises(Ranked):
    def __init__(self) -> None:
        super().__init__()
        self.out_keys = ["y", "z"]


class MovesFirst(Ranked):
    """Counts a batch that it then refuses."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.seen += 1
        return super().forward(tensordict)


class WritesFirst(Ranked):
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        tensordict["y"] = torch.zeros(tensordict.shape)
        return super().forward(tensordict)


class TakesAnything(Ranked):
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return super().forward(tensordict) if "x" in tensordict else tensordict


class Detaches(Ranked):
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        result = super().forward(tensordict)
        return result.set("y", result["y"].detach())


class KnowsItsKey(Ranked):
    """Finds another number under another key."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        result = super().forward(tensordict)
        return result if self.in_keys == ["x"] else result.set("y", result["y"] + 1)


class KnowsItsDtype(Ranked):
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        result = super().forward(tensordict)
        return result if result["y"].dtype is torch.float32 else result.set("y", result["y"] + 1)


class KnowsItsCompiler(Ranked):
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        result = super().forward(tensordict)
        return result.set("y", result["y"] + 1) if torch.compiler.is_compiling() else result


class Averages(Ranked):
    """Subtracts a mean over padding, too."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        result = super().forward(tensordict)
        return result.set("y", result["y"] - result["y"].mean())


class AveragesWithoutNaN(Ranked):
    """Counts padding, and takes NaN for 0."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        result = super().forward(tensordict)
        return result.set("y", result["y"] - result["y"].nan_to_num().mean())


class Remembers(Ranked):
    """Lets padding into its state, which tells in the next batch."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        before = self.seen.clone()
        result = super().forward(tensordict)
        self.seen += tensordict[self.in_keys[0]].mean().detach()
        return result.set("y", result["y"] * 0 + before)


class LosesItsState(Ranked):
    """Keeps a mean that padding makes NaN, and writes what does not show it."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        result = super().forward(tensordict)
        self.seen += 0 * tensordict[self.in_keys[0]].mean().detach()
        return result


class CountsPadding(Ranked):
    """Counts the whole numbers of padding."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        result = super().forward(tensordict)
        return result.set("y", result["y"] + tensordict["place"].float().mean())


class WritesLater(Ranked):
    """Writes into the tensors of its second batch."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        result = super().forward(tensordict)
        if self.seen > 1:
            tensordict["x"].add_(1)
        return result


class Deletes(Ranked):
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        result = super().forward(tensordict)
        del tensordict["x"]
        return result


class NamesItByChance(Ranked):
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self.in_keys[0] not in tensordict.keys(True):
            raise KeyError("the next entry is not there")  # with an x in it
        return super().forward(tensordict)


class RaisesAnother(Ranked):
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self.in_keys[0] not in tensordict.keys(True):
            raise AttributeError("x")
        return super().forward(tensordict)


class Overwrites(Ranked):
    """Replaces an entry, and then finds that another is missing."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        tensordict["place"] = tensordict["place"] + 1
        return super().forward(tensordict)


class WritesMoreCompiled(Ranked):
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        result = super().forward(tensordict)
        return result.set("z", result["y"]) if torch.compiler.is_compiling() else result


class Keyless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ranked = Ranked()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self.ranked(tensordict)


class Nameless(Ranked):
    def __repr__(self) -> str:
        return "a block"


class ReturnsNothing(Ranked):
    """Writes, and hands nothing on."""

    def forward(self, tensordict: TensorDictBase) -> Any:
        super().forward(tensordict)


BROKEN: dict[str, list[Callable[[], nn.Module]]] = {
    "state_goes_on_bit_for_bit": [Forgets],
    "copies_go_on_alone": [Shares],
    "tensors_of_the_batch_are_not_written_to": [WritesInPlace, WritesLater, Deletes],
    "out_keys_are_written": [Promises, Keyless],
    "it_composes": [ReturnsNothing],
    "a_missing_entry_is_named_and_nothing_half_written": [
        MovesFirst,
        WritesFirst,
        TakesAnything,
        NamesItByChance,
        RaisesAnother,
        Overwrites,
    ],
    "gradients_flow_where_wanted": [Detaches],
    "compiled_equals_eager": [KnowsItsCompiler, WritesMoreCompiled],
    "nested_keys_give_the_same": [KnowsItsKey],
    "float64_gives_the_same": [KnowsItsDtype],
    "masked_frames_do_not_matter": [
        Averages,
        AveragesWithoutNaN,
        Remembers,
        LosesItsState,
        CountsPadding,
    ],
    "it_says_what_it_is": [Nameless],
}


def test_a_good_block_passes():
    check_block(BlockCase(Ranked, **GOOD))


def test_every_check_is_shown_to_fail():
    assert set(BROKEN) == {check.__name__ for check in CHECKS}


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, kinds in BROKEN.items() for kind in kinds]
)
def test_a_block_that_breaks_it_is_found(name: str, kind: Any):
    nested = {"make_nested": lambda: kind(OTHER)} if kind is KnowsItsKey else {"make_nested": None}
    case = BlockCase(kind, **GOOD | nested)
    with pytest.raises(AssertionError):
        getattr(testing, name)(case)


class Keeps(Ranked):
    """Keeps more than tensors in its state."""

    calls = 0

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        result = super().forward(tensordict)
        self.calls += 1
        return result

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def with_nan(seed: int) -> TensorDict:
    made = batch(seed)
    made["x"][0, 0] = torch.nan
    return made


def test_right_blocks_of_other_kinds_pass():
    apart: Any = {"make_nested": None, "differentiable": []}
    new = lambda: TensorDictModule(nn.Tanh(), ["x"], ["y"], inplace=False)  # noqa: E731
    check_block(BlockCase(new, **GOOD | apart))
    check_block(BlockCase(new, **GOOD | apart | {"batch": with_nan}))
    check_block(BlockCase(Keeps, **GOOD | {"make_nested": None}))


def test_a_case_that_cannot_be_right_is_said():
    with pytest.raises(AssertionError, match="The batch of the case has no 'q'"):
        check_block(BlockCase(Ranked, **GOOD | {"required": ["q"]}))
    with pytest.raises(AssertionError, match=r"no \{'q'\}, which are to be differentiable"):
        check_block(BlockCase(Ranked, **GOOD | {"differentiable": ["y", "q"]}))


def test_compiling_is_checked_however_often():
    """After eight graphs of one forward, torch would call it uncompiled."""
    for _ in range(10):
        with pytest.raises(AssertionError):
            testing.compiled_equals_eager(BlockCase(KnowsItsCompiler, **GOOD))
