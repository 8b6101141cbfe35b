"""What every rank does in tests/laplace/test_ranks.py: `python ranks.py RANK SIZE FILE RESULTS [CASE ...]`.

Cases run one after the other in one start, as processes take seconds to begin. Each compares the fit of all ranks with
one of all data in this process. What went wrong is written to RESULTS, a case a line.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lapwing import Laplace, Tangent, estimate, gathered
from lapwing.errors import CurvatureError, DataError, ModelError, OptionError, RanksError, StorageError
from lapwing.estimate import leading_eigenpairs
from lapwing.laplace import BaseLaplace
from lapwing.laplace.process_group import ProcessGroup
from lapwing.laplace.same import own_generator
from lapwing.likelihoods import Categorical
from lapwing.serialize import read

CASES: list[Callable[[], None]] = []
TIMEOUT = 120
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
    alike(covariance)
    if not ours.recipe.options.get("independent_outputs"):
        alike(ours.curvature.diagonal())
        close(ours.curvature.dense(), alone.curvature.dense(), rtol)


def _shape(la: BaseLaplace) -> tuple[int, ...]:
    return (1, 4, 4) if isinstance(next(la.model.children()), nn.Conv2d) else (3,)


def rank() -> int:
    return dist.get_rank()


@case
def every_structure_equals_that_of_one_process() -> None:
    for structure in ("diag", "kron", "full", "blocks", "ekfac", "gp", "propagated_diag", "mixed_diag"):
        check(*both(structure))
    check(*both("lowrank", rank=5), rtol=1e-7)
    check(*both("gp", independent_outputs=True))
    for structure in ("kron", "ekfac"):
        check(*both(structure, convolution=True))
    for structure in ("kron", "diag", "full", "gp"):
        check(*both(structure, "last_layer"))
    check(*both("full", "subnetwork", subnetwork_indices=torch.tensor([1, 4, 20, 40])))
    check(*both("full", estimator="hessian", prior_precision=100.0))
    check(*both("kron", estimator="empirical", bias="separate"))
    check(*both("kron", damping=True))


@case
def low_rank_by_subspace_iteration() -> None:
    points, tangent = data(), Tangent(network())
    group = ProcessGroup(dist.group.WORLD, torch.device("cpu"))
    x, y = points.tensors
    options = {"rank": 4, "gram_rows": 40, "passes": 3}  # one rank alone would have few enough rows
    mine = estimate.low_rank(tangent, Categorical(), [(x[rank() :: 2], y[rank() :: 2])], ranks=group, **options)
    close(mine.dense(), estimate.low_rank(tangent, Categorical(), [(x, y)], **options).dense(), rtol=1e-7)


@case
def regression_and_data_that_are_added() -> None:
    first, second = data(seed=1), data(10, seed=2)
    first, second = (TensorDataset(each.tensors[0], each.tensors[0] ** 2) for each in (first, second))
    for structure in ("kron", "ekfac", "full"):
        ours, alone = (Laplace(network(), "regression", "all", structure, sigma_noise=0.5) for _ in range(2))
        for points, override in ((first, True), (second, False)):
            ours.fit(sharded(points, shuffle=False), override=override)
            alone.fit(whole(points), override=override)
        assert ours.n_data == 33
        check(ours, alone)


@case
def draws_are_the_ranks_own() -> None:
    ours = Laplace(network(), "classification", "all", "diag", estimator="mc")
    ours.fit(sharded(data()), generator=torch.Generator().manual_seed(3))
    alike(ours.curvature.diagonal())
    # the same point on both ranks: with the same draws the sum would be twice that of one rank
    x, y = data(1).tensors
    seeds = [own_generator(torch.Generator().manual_seed(3), each, torch.device("cpu")) for each in (0, 1)]
    alone = [Laplace(network(), "classification", "all", "diag", estimator="mc") for _ in seeds]
    for la, seed in zip(alone, seeds, strict=True):
        la.fit([(x.repeat(50, 1), y.repeat(50))], generator=seed)
    assert not torch.equal(alone[0].curvature.diagonal(), alone[1].curvature.diagonal())


@case
def shards_of_ones_own_with_a_group_that_is_named() -> None:
    x, y = data().tensors
    ours, alone = (Laplace(network(), "classification", "all", "kron") for _ in range(2))
    mine = slice(0, 9) if rank() == 0 else slice(9, None)
    ours.fit([(x[mine], y[mine])], process_group=dist.group.WORLD)
    alone.fit([(x, y)])  # without a group every rank is on its own
    check(ours, alone)
    before = ours.fitted
    with raises(DataError, "the ranks [0, 1] were given the same data"):
        ours.fit(DataLoader(data(), 4, shuffle=True), process_group=dist.group.WORLD)
    assert ours.fitted is before
    if rank() == 0:  # nobody waits for the others
        ours.fit(whole(data()))


class Branches(nn.Module):
    """Some data use a layer that others do not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.extra, self.last = (nn.Linear(a, b).double() for a, b in ((3, 4), (4, 4), (4, 3)))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        return self.last(self.extra(hidden).tanh() if bool((x[:, 0] > 50).all()) else hidden)


@case
def layers_that_one_rank_alone_uses() -> None:
    x, y = data().tensors
    batches = [(x[:9], y[:9]), (x[9:] + torch.tensor([100.0, 0.0, 0.0]), y[9:])]
    for structure in ("kron", "ekfac"):
        ours, alone = (Laplace(Branches(), "classification", "all", structure) for _ in range(2))
        ours.fit([batches[rank()]], process_group=dist.group.WORLD)
        alone.fit(batches)
        check(ours, alone)


@case
def few_points_and_dropped_ones() -> None:
    points = data(3)
    ours, alone = (Laplace(network(), "classification", "all", "full") for _ in range(2))
    ours.fit(sharded(points, 1))
    alone.fit(whole(points))
    check(ours, alone)
    ours.fit(sharded(data(), drop_last=True))
    assert ours.n_data == POINTS - 1
    with raises(RanksError if rank() == 0 else DataError, "rank 1 has no data point"):
        ours.fit(sharded(data(1)))


@case
def what_does_not_add_up_is_refused() -> None:
    for options, words in (
        ({"hessian_structure": "matrix_free"}, "reads its data again"),
        ({"hessian_structure": "kron", "estimator": "recursive"}, "expectations over all data"),
        ({"hessian_structure": "gp", "n_subset": 5}, "n_subset draws from all data"),
    ):
        with raises(OptionError, words):
            Laplace(network(), "classification", "all", **options).fit(sharded(data()))
    with raises(CurvatureError, "the data so far make 46 rows; expected at most 30"):
        Laplace(network(), "classification", "all", "gp", limit=30).fit(sharded(data()))
    la = Laplace(network(), "classification", "all", "kron")
    la.fit(sharded(data()))
    with raises(DataError, "expected all data"):
        la.optimize_prior_precision(method="gridsearch", val_loader=sharded(data()))
    with raises(DataError, "shard 0 of 3"):
        la.fit(DataLoader(data(), 4, sampler=DistributedSampler(data(), 3, 0)))
    with raises(DataError, "Give all of them the same seed"):
        la.fit(sharded(data(), seed=rank()))
    with raises(DataError, "points in batches of"):
        la.fit(sharded(data(), 4 + rank()))
    with raises(DataError, "rows for"):
        la.fit(DataLoader(data(), 4, sampler=DistributedSampler(data()), collate_fn=twice))


def twice(points: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    x, y = zip(*points, strict=True)
    return torch.stack(x + x), torch.stack(y + y)


@case
def networks_that_differ_are_refused() -> None:
    model = network()
    with torch.no_grad():
        model[2].bias += rank()
    with raises(RanksError, "rank 1 and rank 0 differ in weights or buffers '2.bias'"):
        Laplace(model, "classification", "all", "diag").fit(sharded(data()))
    with raises(RanksError, "option 'dense_limit'"):
        Laplace(network(), "classification", "all", "kron", dense_limit=3 + rank()).fit(sharded(data()))


@case
def an_error_on_one_rank_is_one_on_all() -> None:
    points = data()
    points.tensors[0][1] = torch.nan  # in the shard of rank 1
    la = Laplace(network(), "classification", "all", "kron")
    with raises(DataError if rank() == 1 else RanksError, "NaN or infinite values, data point 0"):
        la.fit(sharded(points, shuffle=False))
    la.fit(sharded(data()))  # the group goes on


@case
def wrapped_and_sharded_networks() -> None:
    model = network()
    ours, alone = (Laplace(each, "classification", "all", "kron") for each in (DistributedDataParallel(model), model))
    assert ours.model is model
    ours.fit(sharded(data()))
    alone.fit(whole(data()))
    check(ours, alone)
    mesh = init_device_mesh("cpu", (2,))
    split = network()
    split[0].weight = nn.Parameter(distribute_tensor(split[0].weight.detach(), mesh))
    with raises(ModelError, "parameter '0.weight' is a DTensor"):
        Laplace(split, "classification", "all", "kron")


@case
def predictions_are_gathered_in_order() -> None:
    la = Laplace(network(), "classification", "all", "kron")
    la.fit(sharded(data()))
    points = data(11, seed=5)
    close(gathered(la, sharded(points)), la(points.tensors[0]))
    mean, covariance = gathered(la.predict_moments, sharded(points))
    expected = la.predict_moments(points.tensors[0])
    close(mean, expected[0])
    close(covariance, expected[1])
    if rank() == 0:
        close(gathered(la, whole(points)), la(points.tensors[0]))


class Broken(TensorDataset):
    """Data that cannot be read from the point `stop` on."""

    stop: int | None = None
    reads: int = 0
    """How often they can be read from there before."""

    def __getitem__(self, index: int) -> Any:
        if self.stop is not None and index >= self.stop:
            self.reads -= 1
            if self.reads < 0:
                raise OSError("the disk is gone")
        return super().__getitem__(index)


@case
def a_checkpointed_fit_goes_on_with_another_number_of_ranks() -> None:
    folder = Path(sys.argv[4]).parent
    alone_group = dist.new_group([0])
    leading_eigenpairs.GRAM_ROWS = 20
    for structure in ("kron", "ekfac", "gp", "lowrank"):
        options = {"rank": 5} if structure == "lowrank" else {}
        expected = Laplace(network(), "classification", "all", structure, **options)
        expected.fit(whole(data()))
        for first in (2, 1):
            path, points = folder / f"{structure}{first}", Broken(*data().tensors)
            la = Laplace(network(), "classification", "all", structure, **options)

            def fit(size: int, la: BaseLaplace = la, points: Broken = points, path: Path = path) -> None:
                if size == 1 and rank() == 1:
                    return
                sampler = DistributedSampler(points, size, rank(), shuffle=False)
                loader = DataLoader(points, 4 - size, sampler=sampler)
                group = alone_group if size == 1 else None
                la.fit(loader, checkpoint=path, checkpoint_every=2, process_group=group)

            stage = int(structure in ("ekfac", "lowrank"))
            # in the first pass, or the second; the first of lowrank does not come so far
            points.stop, points.reads = 17, (structure == "ekfac") * 6 // first
            if first == 2 or rank() == 0:
                with raises((OSError, RanksError), "the disk is gone"):
                    fit(first)
            dist.barrier()
            at = read(path)[1]["stage"], read(path)[1]["points"]
            assert at in ((stage, 8), (stage, 12), (stage, 16)), (structure, first, at)
            points.stop = None
            points.tensors[0][3] += 1
            if 3 - first == 2 or rank() == 0:
                with raises((StorageError, RanksError), "points of the sampler are not those"):
                    fit(3 - first)
            dist.barrier()
            points.tensors[0][3] -= 1
            fit(3 - first)
            dist.barrier()
            assert not path.exists()
            if first == 1 or rank() == 0:
                close(la.curvature.dense(), expected.curvature.dense(), 1e-7 if options else 1e-9)
                assert la.n_data == POINTS
                assert la.fitted.fingerprint == expected.fitted.fingerprint
                close(la.loss, expected.loss)
    with raises(OptionError, "without DistributedSampler"):
        x, y = data().tensors
        la.fit([(x + rank(), y)], checkpoint=folder / "none", process_group=dist.group.WORLD)


@case
def a_rank_that_does_not_come_is_named_after_the_timeout() -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank() == 0:
        with raises(RanksError, "Ranks 1 failed"):
            Laplace(network(), "classification", "all", "diag").fit(whole(data()), process_group=group)
    dist.barrier()


@case
def a_rank_that_is_killed_ends_the_fit_of_the_others() -> None:
    x, y = data().tensors

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        yield x[rank() :: 2], y[rank() :: 2]
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    started = time.monotonic()
    with raises(RanksError, "rank 0 of 2 got no answer") as caught:
        Laplace(network(), "classification", "all", "kron").fit(batches(), process_group=dist.group.WORLD)
    assert "Ranks 1 failed" in str(caught.value)
    assert time.monotonic() - started < 10  # its connection is closed at once


def raises(kind: type[BaseException] | tuple[type[BaseException], ...], words: str) -> Any:
    return pytest.raises(kind, match=re.escape(words))


def main() -> None:
    own, size, file, results = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group(None, f"file://{file}", timedelta(seconds=TIMEOUT), size, own)  # as most scripts do
    found: dict[str, Any] = {}
    for each in [case for case in CASES if case.__name__ in (sys.argv[5:] or [case.__name__])]:
        started = time.monotonic()
        try:
            each()
            found[each.__name__] = time.monotonic() - started
        except BaseException:
            found[each.__name__] = traceback.format_exc()
        results.write_text(json.dumps(found))
        if isinstance(found[each.__name__], str):  # the others may be elsewhere
            break
    os._exit(0)  # a group with a dead rank cannot be taken down


if __name__ == "__main__":
    main()
