"""Each check of the contract finds a block that breaks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from ppokit import testing
from ppokit.testing import CHECKS, BlockCase, check_block

OTHER = ("agent", "seen")


def batch(seed: int) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    return TensorDict({"x": torch.randn(2, 5, 3, generator=generator)}, [2, 5])


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
    "tensors_of_the_batch_are_not_written_to": [WritesInPlace],
    "out_keys_are_written": [Promises],
    "it_composes": [ReturnsNothing],
    "a_missing_entry_is_named_and_nothing_half_written": [MovesFirst, WritesFirst, TakesAnything],
    "gradients_flow_where_wanted": [Detaches],
    "compiled_equals_eager": [KnowsItsCompiler],
    "nested_keys_give_the_same": [KnowsItsKey],
    "float64_gives_the_same": [KnowsItsDtype],
    "masked_frames_do_not_matter": [Averages],
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
