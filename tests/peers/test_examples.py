"""Torchrl's own examples, with our blocks in them: the losses of the first epoch are theirs."""

from __future__ import annotations

import importlib.util
import math

import pytest

from tests.peers.examples import EXAMPLES, Example

pytestmark = pytest.mark.slow


def skip_without(example: Example) -> None:
    missing = [name for name in example.needs if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{example.script} needs {', '.join(missing)}")


@pytest.mark.parametrize("name", EXAMPLES)
def test_losses_of_the_first_epoch(name: str, checkout: str):
    example = EXAMPLES[name]
    skip_without(example)
    (theirs, _), (ours, _) = example.run(checkout, ours=False), example.run(checkout, ours=True)
    assert len(theirs) == len(ours) >= example.minibatches
    assert all(math.isfinite(loss) for losses in ours for loss in losses.values())
    if not example.same_maths:
        return
    first = [(x, y) for x, y in zip(theirs, ours, strict=True)][: example.minibatches]
    for key in first[0][0]:
        # Relative to the largest of the batch: the mean of normalised advantages is about 0.
        size = max(abs(x[key]) for x, _ in first)
        assert max(abs(x[key] - y[key]) for x, y in first) <= 1e-5 * size, key
