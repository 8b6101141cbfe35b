"""Claim to test (C02, an exercise sheet on the Laplace approximation, 1c): the inversion lemma gives the inverse of
alpha I + G^T G, with N gradients G [N, D], in O(D N^2 + N^3): at fixed N the time is linear in D.

`lapwing.linalg.Dual` holds the rows G. Timed are the decomposition with a solve, and one more solve with it at hand,
which is O(D N). The dense inverse, O(D^3), is timed while it is affordable and has to give the same solution. Slopes of
log time in log D by least squares, over the sizes whose rows are larger than a processor's caches.

Changed after a look: at first slopes were over the upper half of 500 to 512,000 weights, and were 1.27 and 1.51, by a
single jump (10 and 20 times the time for 4 times the weights) from 32,000 to 128,000, where 13 MB of rows become 51 MB.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from math import log
from pathlib import Path
from typing import Any

import torch
from _common import RESULTS, best, context, write
from torch import Tensor

from lapwing.linalg import Dense, Dual
from lapwing.linalg.row_set import RowSet
from lapwing.linalg.rows import DenseRows

POINTS = 100
SIZES = 500, 1_000, 2_000, 8_000, 32_000, 128_000, 512_000, 2_048_000
BEYOND_CACHES = 128_000
"""D from which slopes are taken: 51 MB of rows."""
DENSE = 2_000
"""The largest D for which the dense inverse is formed."""
PRIOR = 0.5


def problem(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Gradients [N, D] and a vector [D]."""
    options: dict[str, Any] = {"generator": torch.Generator().manual_seed(0), "dtype": dtype}
    return torch.randn(POINTS, size, **options), torch.randn(size, **options)


def dual(gradients: Tensor) -> Dual:
    return Dual(RowSet.of(gradients.shape[1], [[DenseRows(0, gradients.unsqueeze(1))]]))


def contenders(size: int, dtype: torch.dtype = torch.float32) -> dict[str, Callable[[], Tensor]]:
    gradients, vector = problem(size, dtype)
    ready = dual(gradients).with_prior(PRIOR)
    found = {
        "decompose and solve": lambda: dual(gradients).with_prior(PRIOR).solve(vector),
        "solve": lambda: ready.solve(vector),
    }
    if size <= DENSE:
        found["dense"] = lambda: Dense(gradients.mT @ gradients).with_prior(PRIOR).solve(vector)
    return found


def agreement(size: int) -> float:
    """Largest difference between the lemma's and the dense solution in float64, relative."""
    work = contenders(size, torch.float64)
    ours, other = work["decompose and solve"](), work["dense"]()
    return float((ours - other).abs().max() / other.abs().max())


def slope(sizes: list[int], seconds: list[float]) -> float:
    """Of log seconds against log size, by least squares."""
    x, y = torch.tensor([log(size) for size in sizes]), torch.tensor([log(each) for each in seconds])
    x, y = x - x.mean(), y - y.mean()
    return float((x @ y) / (x @ x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--largest", type=int, default=max(SIZES), help="weights; fewer for a trial")
    parser.add_argument("--out", type=Path, default=RESULTS, help="another folder, for a trial")
    parser.add_argument("--no-peers", action="store_true", help="there are none here")
    arguments = parser.parse_args()
    where = context("woodbury")
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for size in (size for size in SIZES if size <= arguments.largest):
        rows.append({"weights": size, "seconds": best(contenders(size), arguments.rounds)})
        print(size, {name: f"{1e3 * each:.2f} ms" for name, each in rows[-1]["seconds"].items()}, flush=True)
    upper = [row for row in rows if row["weights"] >= BEYOND_CACHES] or rows[len(rows) // 2 :]
    slopes = {
        name: slope([row["weights"] for row in upper], [row["seconds"][name] for row in upper])
        for name in ("decompose and solve", "solve")
    }
    dense = [row for row in rows if "dense" in row["seconds"]]
    slopes["dense"] = slope([row["weights"] for row in dense], [row["seconds"]["dense"] for row in dense])
    held = {name: 0.8 <= slopes[name] <= 1.2 for name in ("decompose and solve", "solve")}
    figures = {
        "points": POINTS,
        "slopes_in_weights": slopes,
        "slopes_from": upper[0]["weights"],
        "linear_in_weights": held,
        "largest_relative_difference_to_dense": agreement(SIZES[0]),
        "rows": rows,
    }
    print(slopes, held, figures["largest_relative_difference_to_dense"])
    write(where, figures, arguments.out)


if __name__ == "__main__":
    main()
