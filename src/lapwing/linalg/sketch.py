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
from jaxtyping import Float
from torch import Tensor

from lapwing.errors import CurvatureError

BLOCK = 2**18
"""Entries that are transformed at a time: a few MB."""


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
        out = v.new_zeros(len(v), self.rows)
        for number, start in enumerate(range(0, self.size, self.block)):
            part = v[:, start : start + self.block]
            length = 1 << max(part.shape[1], self.rows + 2, 4).bit_length()
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
            signs = torch.randint(0, 2, (part.shape[1],), generator=generator, dtype=torch.int8) * 2 - 1
            found = torch.fft.rfft(part * signs.to(v), n=length)
            chosen = 1 + torch.randperm(length // 2 - 1, generator=generator)[: self.rows // 2]
            found = found[:, chosen.to(v.device)]
            out += torch.cat([found.real, found.imag], dim=1)
        return out * (2 / self.rows) ** 0.5
