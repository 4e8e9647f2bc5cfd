"""kl_estimate: a slow reference, bias, bad input."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppokit.functional import kl_estimate
from tests import reference
from tests.functional.strategies import Layout, assert_matches, layouts

ESTIMATORS = ("k1", "k2", "k3")


@given(layouts(), st.sampled_from(ESTIMATORS))
def test_equals_reference(layout: Layout, estimator):
    d = layout.normal()
    assert_matches(
        kl_estimate(d, estimator=estimator),
        reference.kl_estimate(d, estimator=estimator),
        layout.dtype,
    )


def test_k1_and_k3_are_unbiased():
    # The mean over the actions of a discrete policy, each with its probability, is the KL itself.
    old, new = torch.randn(2, 5, 7).double().log_softmax(-1).unbind()
    exact = (old.exp() * (old - new)).sum(-1)
    for estimator in ("k1", "k3"):
        mean = (old.exp() * kl_estimate(new - old, estimator=estimator)).sum(-1)
        torch.testing.assert_close(mean, exact, rtol=1e-12, atol=1e-14)


def test_k3_is_never_negative():
    assert (kl_estimate(torch.linspace(-20, 20, 4001, dtype=torch.float64)) >= 0).all()


def test_k3_of_a_small_ratio_keeps_its_digits():
    # exp(d) - 1 - d would be 0 or 1e-7 in float32
    kl = kl_estimate(torch.tensor([1e-4, -1e-4]))
    torch.testing.assert_close(kl, torch.tensor([5e-9, 5e-9]), rtol=1e-2, atol=0)


def test_bad_input_raises():
    with pytest.raises(TypeError, match=r"log_ratio has dtype torch.int64 \(shape \[3\]\)"):
        kl_estimate(torch.ones(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"estimator must be 'k1', 'k2' or 'k3', got 'k4'"):
        kl_estimate(torch.ones(3), estimator="k4")
