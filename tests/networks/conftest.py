from collections.abc import Iterator

import pytest
from tensordict.nn import set_composite_lp_aggregate


@pytest.fixture(autouse=True)
def _log_prob_of_each_part() -> Iterator[None]:
    with set_composite_lp_aggregate(False):
        yield
