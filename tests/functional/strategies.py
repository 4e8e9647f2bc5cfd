"""Random trajectories for hypothesis: shapes, layouts and ends are drawn, the numbers seeded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# (rtol, atol) against a float64 reference of the same inputs: half types are rounded once.
TOLERANCE = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (2**-8, 1e-5),
    torch.float16: (2**-10, 1e-5),
}


def assert_matches(actual: Tensor, reference: Tensor, dtype: torch.dtype) -> None:
    """Raise unless the first has this dtype and the reference's numbers, NaN for NaN."""
    assert actual.dtype == dtype
    rtol, atol = TOLERANCE[dtype]
    actual = actual.cpu().double()
    torch.testing.assert_close(actual, reference, rtol=rtol, atol=atol, equal_nan=True)


@dataclass(frozen=True)
class Layout:
    """Tensors of one shape, with time at ``dim``, contiguous or not."""

    shape: tuple[int, ...]
    dim: int
    stored: str  # contiguous, transposed, sliced (every second element), both, or expanded
    generator: torch.Generator
    end_probability: float
    dtype: torch.dtype
    device: str

    @property
    def steps(self) -> int:
        """Number of steps."""
        return self.shape[self.dim]

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape without time."""
        dim = self.dim % len(self.shape)
        return self.shape[:dim] + self.shape[dim + 1 :]

    def normal(self, *, odd: bool = False) -> Tensor:
        """Normal numbers; if ``odd``, some of them are not finite."""
        x = torch.randn(self._stored(), generator=self.generator)
        if odd:
            where = torch.rand(self._stored(), generator=self.generator)
            for share, value in ((0.05, torch.nan), (0.03, torch.inf), (0.015, -torch.inf)):
                x.masked_fill_(where < share, value)
        return self._laid_out(x)

    def uniform(self) -> Tensor:
        """Numbers in [0, 1), one in five of them exactly 0."""
        numbers = torch.rand(self._stored(), generator=self.generator)
        return self._laid_out(torch.where(numbers < 0.2, 0, numbers))

    def row(self) -> Tensor:
        """Normal numbers, one for each row."""
        return torch.randn(self.row_shape, generator=self.generator).to(self.device, self.dtype)

    def ends(self) -> Tensor:
        """Flags: never, sometimes, or always True."""
        numbers = torch.rand(self._stored(), generator=self.generator, dtype=torch.float64)
        return self._laid_out(numbers, torch.float64) < self.end_probability

    def _stored(self) -> tuple[int, ...]:
        shape = self.shape
        if self.stored in ("sliced", "both"):
            shape = tuple(2 * size for size in shape)
        return shape[::-1] if self.stored in ("transposed", "both") else shape

    def _laid_out(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        x = x.to(self.device, dtype or self.dtype)
        if self.stored in ("transposed", "both"):
            x = x.permute(*reversed(range(x.ndim)))
        if self.stored in ("sliced", "both"):
            x = x[(slice(None, None, 2),) * x.ndim]
        return x[..., :1].expand(x.shape) if self.stored == "expanded" else x


STORED = ("contiguous", "transposed", "sliced", "both", "expanded")


@st.composite
def layouts(
    draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = FLOATS, device: str = "cpu"
) -> Layout:
    """Draw a layout: 1 to 4 dimensions, 1 to 70 steps."""
    others = draw(st.lists(st.integers(1, 3), max_size=3))
    position = draw(st.integers(0, len(others)))
    steps = draw(st.one_of(st.just(1), st.integers(1, 70)))
    shape = (*others[:position], steps, *others[position:])
    return Layout(
        shape=shape,
        dim=position - draw(st.sampled_from([0, len(shape)])),
        stored=draw(st.sampled_from(STORED)),
        generator=torch.Generator().manual_seed(draw(st.integers(0, 2**31))),
        end_probability=draw(st.sampled_from([0.0, 0.2, 1.0])),
        dtype=draw(st.sampled_from(dtypes)),
        device=device,
    )
