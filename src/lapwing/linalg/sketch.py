"""Sketch: a random linear map of vectors [P] to far fewer numbers that keeps lengths and angles. Memory O(block).

A block of the vector at a time: random signs, a Fourier transform, and a random choice of frequencies, added up over
blocks. |S v|^2 is |v|^2 in the mean, with a relative standard deviation of about sqrt(2 / rows); for all vectors of a
space of k dimensions at once the error is about 2 sqrt(k / rows). Signs and frequencies come from the seed whenever
they are needed, and are not kept.

>>> import torch
>>> v = torch.ones(1, 10_000, dtype=torch.float64)
>>> Sketch(10_000, rows=2000)(v).shape, bool((Sketch(10_000, rows=2000)(v).norm() - 100).abs() < 5)
(torch.Size([1, 2000]), True)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lapwing.errors import CurvatureError

BLOCK = 2**18
"""Entries that are transformed at a time: a few MB."""
SIDE_BY_SIDE = 4
"""Blocks that are transformed in one call, so that threads have one each."""
SPARSE = 8
"""Frequencies to each that is chosen, from which on they are drawn with replacement: few are met twice."""


@dataclass(frozen=True)
class Sketch:
    """S [rows, size]; the identity where `size` is not above `rows`."""

    size: int
    rows: int
    seed: int = 0
    block: int = BLOCK

    def __post_init__(self) -> None:
        if self.rows < 2 or self.rows % 2:
            raise CurvatureError(f"a sketch of {self.rows} rows; expected an even number of at least 2.")

    def __call__(self, v: Float[Tensor, "k size"]) -> Float[Tensor, "k rows"]:
        if v.shape[-1] != self.size:
            raise CurvatureError(f"vectors of {v.shape[-1]} entries for a sketch of {self.size}; expected as many.")
        if self.size <= self.rows:
            return v
        width = min(self.block, self.size)
        length = 1 << (max(width, self.rows + 2, 4) - 1).bit_length()
        out = v.new_zeros(len(v), self.rows)
        for start in range(0, self.size, SIDE_BY_SIDE * width):
            part = v[:, start : start + SIDE_BY_SIDE * width]
            blocks = -(-part.shape[1] // width)
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + start // width)
            signs = torch.randint(0, 2, (part.shape[1],), generator=generator, dtype=torch.int8) * 2 - 1
            part = torch.nn.functional.pad(part * signs.to(v), (0, blocks * width - part.shape[1]))
            found = torch.fft.rfft(part.unflatten(1, (blocks, width)), n=length)
            chosen = self._frequencies(blocks, length, generator).to(v.device)
            kept = found.gather(2, chosen.expand(len(v), -1, -1)).sum(1)
            out += torch.cat([kept.real, kept.imag], dim=1)
        return out * (2 / self.rows) ** 0.5

    def _frequencies(self, blocks: int, length: int, generator: torch.Generator) -> Int[Tensor, "blocks half"]:
        """Half as many as rows for each block; the first, which is real, and the last are left out."""
        half, every = self.rows // 2, length // 2 - 1
        if every >= SPARSE * half:
            return 1 + torch.randint(every, (blocks, half), generator=generator)
        return 1 + torch.stack([torch.randperm(every, generator=generator)[:half] for _ in range(blocks)])
