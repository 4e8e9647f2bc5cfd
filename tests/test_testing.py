"""ppokit.testing: each check of the contract fails for a block that breaks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import Tensor, nn

from ppokit import testing
from ppokit.functional import masked_mean
from ppokit.testing import CHECKS, BlockCase, check_block

OTHER = ("agent", "seen")


def batch(seed: int) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    place = torch.randint(0, 9, (2, 5), generator=generator)
    return TensorDict({"x": torch.randn(2, 5, 3, generator=generator), "place": place}, [2, 5])


class Good(TensorDictModuleBase):
    """Multiplies by a weight, and by the number of batches seen so far."""

    seen: Tensor
    change: Callable[[Any, TensorDictBase], Any] | None = None

    def __init__(self, in_key: Any = "x") -> None:
        super().__init__()
        self.in_keys, self.out_keys = [in_key], ["y"]
        self.weight = nn.Parameter(torch.full((), 2.0))
        self.register_buffer("seen", torch.tensor(0.0))
        self.calls = 0

    def forward(self, tensordict: TensorDictBase) -> Any:
        if self.change is not None:
            return type(self).change(self, tensordict)  # pyright: ignore
        return self.right(tensordict)

    def right(self, tensordict: TensorDictBase) -> TensorDictBase:
        x = tensordict[self.in_keys[0]]
        self.seen += 1
        return tensordict.set("y", x * self.weight * self.seen)


class CountsAll(TensorDictModuleBase):
    """Divides by masked frames, too: in a loss, or in a buffer."""

    seen: Tensor

    def __init__(self, in_state: bool) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["x"], ["loss_any"]
        self.register_buffer("seen", torch.tensor(0.0))
        self.in_state = in_state

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        mask, x = tensordict.get(("collector", "mask"), None), tensordict["x"].square().sum(-1)
        valid = x if mask is None else x[mask]
        self.seen += tensordict.numel() if self.in_state else 1
        loss = valid.mean() if self.in_state else valid.sum() / x.numel()
        return TensorDict({"loss_any": loss})


@pytest.mark.parametrize("in_state", [False, True])
def test_a_block_that_counts_masked_frames_is_found(in_state: bool):
    case = BlockCase(lambda: CountsAll(in_state), batch, required=["x"])
    name = "buffer 'seen'" if in_state else "'loss_any'"
    with pytest.raises(AssertionError, match=f"{name} without the masked frames"):
        check_block(case)


GOOD: dict[str, Any] = {
    "batch": batch,
    "required": ["x"],
    "differentiable": ["y"],
    "make_nested": lambda: Good(OTHER),
    "nested": {"x": OTHER},
}
total = [0.0]  # state that copies share


def forgets_a_state(self: Any, td: Any) -> Any:
    self.calls += 1
    return self.right(td).set("y", td["y"] + self.calls)


def shares_a_state(self: Any, td: Any) -> Any:
    total[0] += 1
    return self.right(td).set("y", td["y"] + total[0])


def writes_in_place(self: Any, td: Any) -> Any:
    self.right(td)["x"].add_(1)
    return td


def writes_in_place_later(self: Any, td: Any) -> Any:
    self.right(td)
    if self.seen > 1:
        td["x"].add_(1)
    return td


def deletes_an_entry(self: Any, td: Any) -> Any:
    self.right(td)
    del td["x"]
    return td


def returns_nothing(self: Any, td: Any) -> Any:
    self.right(td)


def counts_before_it_raises(self: Any, td: Any) -> Any:
    self.seen += 1
    return self.right(td)


def writes_before_it_raises(self: Any, td: Any) -> Any:
    td["y"] = torch.zeros(td.shape)
    return self.right(td)


def replaces_before_it_raises(self: Any, td: Any) -> Any:
    td["place"] = td["place"] + 1
    return self.right(td)


def names_the_key_by_chance(self: Any, td: Any) -> Any:
    if self.in_keys[0] not in td.keys(True):
        raise KeyError("the next entry is missing")  # with an x in it
    return self.right(td)


def raises_another_error(self: Any, td: Any) -> Any:
    if self.in_keys[0] not in td.keys(True):
        raise AttributeError("x")
    return self.right(td)


def writes_more_compiled(self: Any, td: Any) -> Any:
    self.right(td)
    return td.set("z", td["y"]) if torch.compiler.is_compiling() else td


def masks_the_loss_alone(self: Any, td: Any) -> Any:
    """Return a finite loss of masked NaN, whose gradient is NaN."""
    x = td[self.in_keys[0]].mean(-1)
    mask = td.get(("collector", "mask"), torch.ones_like(x, dtype=torch.bool))
    return TensorDict({"y": masked_mean(x * self.weight, mask)})


def remembers_padding(self: Any, td: Any) -> Any:
    before = self.seen.clone()
    self.right(td)
    self.seen += td[self.in_keys[0]].mean().detach()
    return td.set("y", td["y"] * 0 + before)


def keeps_nan_of_padding(self: Any, td: Any) -> Any:
    self.right(td)
    self.seen += 0 * td[self.in_keys[0]].mean().detach()
    return td


def loses_a_buffer(self: Any, td: Any) -> Any:
    count = getattr(self, "count", torch.zeros(()))
    self.register_buffer("count", count + 1, persistent=False)
    return self.right(td)


def counts_padding(self: Any, td: Any) -> Any:
    self.seen += (td[self.in_keys[0]] > 1).sum()
    return td.set("y", td[self.in_keys[0]] * self.weight)


def adds(more: Callable[[Any, Any], Any]) -> Any:
    """A block whose output has a term more."""
    return lambda self, td: self.right(td).set("y", td["y"] + more(self, td))


depends_on_the_compiler = adds(lambda self, td: torch.compiler.is_compiling())

BROKEN: dict[str, dict[str, Any]] = {
    "state_goes_on_bit_for_bit": {
        "forgets a state": forgets_a_state,
        "loses a buffer": loses_a_buffer,
    },
    "copies_go_on_alone": {"shares a state": shares_a_state},
    "tensors_of_the_batch_are_not_written_to": {
        "in place": writes_in_place,
        "in place, later": writes_in_place_later,
        "deletes an entry": deletes_an_entry,
    },
    "out_keys_are_written": {"no output": lambda self, td: td, "nothing": returns_nothing},
    "a_missing_entry_is_named_and_nothing_half_written": {
        "counts before it raises": counts_before_it_raises,
        "writes before it raises": writes_before_it_raises,
        "replaces before it raises": replaces_before_it_raises,
        "takes anything": lambda self, td: self.right(td) if "x" in td else td,
        "names the key by chance": names_the_key_by_chance,
        "another error": raises_another_error,
    },
    "gradients_flow_where_wanted": {
        "detaches": lambda self, td: self.right(td).set("y", td["y"].detach())
    },
    "compiled_equals_eager": {
        "depends on the compiler": depends_on_the_compiler,
        "writes more, compiled": writes_more_compiled,
    },
    "nested_keys_give_the_same": {
        "depends on its key": adds(lambda self, td: self.in_keys != ["x"])
    },
    "float64_gives_the_same": {
        "depends on the dtype": adds(lambda self, td: td["y"].dtype is not torch.float32)
    },
    "masked_frames_do_not_matter": {
        "averages over padding": adds(lambda self, td: -td["y"].mean()),
        "averages over padding without NaN": adds(lambda self, td: -td["y"].nan_to_num().mean()),
        "masks the loss alone": masks_the_loss_alone,
        "remembers padding": remembers_padding,
        "counts padding": counts_padding,
        "keeps NaN of padding": keeps_nan_of_padding,
        "counts integers of padding": adds(lambda self, td: td["place"].float().mean()),
    },
}


def broken(change: Any) -> type[Good]:
    return type("Broken", (Good,), {"change": change})


def test_every_check_has_a_block_that_breaks_it():
    assert set(BROKEN) == {check.__name__ for check in CHECKS}


@pytest.mark.parametrize(
    ("name", "change"),
    [pytest.param(name, x, id=id) for name, blocks in BROKEN.items() for id, x in blocks.items()],
)
def test_a_broken_block_fails_its_check(name: str, change: Any):
    kind = broken(change)
    globals()["Broken"] = kind  # for pickle
    case = BlockCase(kind, **GOOD | {"make_nested": lambda: kind(OTHER)})
    with pytest.raises(AssertionError):
        getattr(testing, name)(case)


class Keeps(Good):
    """Has a state that is no tensor."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        result = self.right(tensordict)
        self.calls += 1
        return result

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Averages(Good):
    """A loss whose gradient needs the buffer that the next call writes to."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        x = tensordict["x"].mean(-1)
        mask = tensordict.get(("collector", "mask"), torch.ones_like(x, dtype=torch.bool))
        self.seen += 1
        return TensorDict({"y": (torch.where(mask, x, 0) * self.weight * self.seen).sum()})


def with_nan(seed: int) -> TensorDict:
    made = batch(seed)
    made["x"][0, 0] = torch.nan
    return made


def test_right_blocks_pass():
    check_block(BlockCase(Good, **GOOD))
    for kind in (Keeps, Averages):
        check_block(BlockCase(kind, **GOOD | {"make_nested": None}))
    new = lambda: TensorDictModule(nn.Tanh(), ["x"], ["y"], inplace=False)  # noqa: E731
    apart: Any = {"make_nested": None, "differentiable": [], "batch": with_nan}
    check_block(BlockCase(new, **GOOD | apart))


def test_a_case_that_contradicts_its_batch_raises():
    with pytest.raises(AssertionError, match="The batch of the case has no 'q'"):
        check_block(BlockCase(Good, **GOOD | {"required": ["q"]}))
    with pytest.raises(AssertionError, match=r"no \{'q'\}, which are to be differentiable"):
        check_block(BlockCase(Good, **GOOD | {"differentiable": ["y", "q"]}))
    keyless: Any = lambda: nn.Sequential(Good())  # noqa: E731
    with pytest.raises(AssertionError, match="has no out_keys"):
        testing.out_keys_are_written(BlockCase(keyless, batch))


@pytest.mark.slow
def test_the_compiled_check_fails_however_often_it_runs():
    """After eight graphs of one forward, torch would run it eagerly."""
    for _ in range(10):
        with pytest.raises(AssertionError):
            testing.compiled_equals_eager(BlockCase(broken(depends_on_the_compiler), **GOOD))
