"""What every rank does in tests/laplace/test_ranks.py: `python ranks.py RANK SIZE FILE RESULTS`.

Cases run one after the other in one start, as processes take seconds to begin. Each compares the fit of all ranks with
one of all data in this process. What went wrong is written to RESULTS, a case a line.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lapwing import Laplace
from lapwing.laplace import BaseLaplace

CASES: list[Callable[[], None]] = []
POINTS = 23
"""No multiple of two: the sampler repeats one."""


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES.append(function)
    return function


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def images() -> nn.Module:
    torch.manual_seed(2)
    layers = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
    return nn.Sequential(*layers).double().eval()


def data(points: int = POINTS, shape: tuple[int, ...] = (3,), seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(points, *shape, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (points,), generator=generator))


def sharded(points: TensorDataset, size: int = 4, shuffle: bool = True, **options: Any) -> DataLoader:
    return DataLoader(points, size, sampler=DistributedSampler(points, shuffle=shuffle, **options))


def whole(points: TensorDataset, size: int = 5) -> DataLoader:
    return DataLoader(points, size)


def close(found: Tensor, expected: Tensor, rtol: float = 1e-9) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-12 * float(expected.abs().max()))


def alike(tensor: Tensor) -> None:
    """The same bits on all ranks."""
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(every, tensor.contiguous())
    assert all(torch.equal(each, every[0]) for each in every)


def both(structure: str, subset: str = "all", **options: Any) -> tuple[BaseLaplace, BaseLaplace]:
    """A posterior fitted by all ranks, and one by this process with all data."""
    shape, model = ((1, 4, 4), images()) if options.pop("convolution", False) else ((3,), network())
    points = data(shape=shape)
    ours, alone = (Laplace(model, "classification", subset, structure, **options) for _ in range(2))
    ours.fit(sharded(points))
    alone.fit(whole(points))
    return ours, alone


def check(ours: BaseLaplace, alone: BaseLaplace, rtol: float = 1e-9) -> None:
    assert ours.n_data == alone.n_data
    assert ours.fitted.fingerprint == alone.fitted.fingerprint
    close(ours.loss, alone.loss)
    x = torch.randn(4, *_shape(ours), generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    mean, covariance = ours.predict_moments(x)
    other, expected = alone.predict_moments(x)
    close(mean, other)
    close(covariance, expected, rtol)
    close(ours.log_marginal_likelihood(), alone.log_marginal_likelihood(), rtol)
    alike(ours.curvature.diagonal())
    alike(covariance)
    if ours.structure != "gp" or not ours.recipe.options.get("independent_outputs"):
        close(ours.curvature.dense(), alone.curvature.dense(), rtol)


def _shape(la: BaseLaplace) -> tuple[int, ...]:
    return (1, 4, 4) if isinstance(next(la.model.children()), nn.Conv2d) else (3,)


@case
def structures_equal_those_of_one_process() -> None:
    for structure in ("diag", "kron", "full"):
        check(*both(structure))


def main() -> None:
    rank, size, file, results = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{file}", timedelta(seconds=20), size, rank)
    found: dict[str, str] = {}
    for each in CASES:
        try:
            each()
            found[each.__name__] = ""
        except BaseException:
            found[each.__name__] = traceback.format_exc()
        results.write_text(json.dumps(found))
        if found[each.__name__]:
            break
    if rank == 0 or found[CASES[-1].__name__ if len(found) == len(CASES) else next(iter(found))]:
        pass
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
