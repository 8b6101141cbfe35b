"""gathered(function, loader): predictions of all ranks, each for its own shard, in the order of the data set."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lapwing.errors import DataError
from lapwing.estimate.data_pass import no_batch
from lapwing.laplace.process_group import ProcessGroup
from lapwing.laplace.sampler import sampler_of
from lapwing.laplace.shards import group_of, shard_of

Found = Tensor | tuple[Tensor, ...]


def gathered(
    function: Callable[[Any], Found], loader: Iterable[Any], process_group: dist.ProcessGroup | None = None
) -> Found:
    """`function` of the inputs of every batch, [N, ...]: what all ranks have found, on all ranks.

    `function` takes inputs and returns a tensor, or several, with a row for each of them: a posterior `la`,
    `la.predict_proba`, `la.predict_moments`. Batches are pairs (inputs, targets), whose targets are left out, or inputs
    alone: a tensor or a mapping. With a `DistributedSampler` each rank goes through its shard, points that the sampler
    repeats are left out, and rows are in the order of the data set. In one process, all batches one after the other.

    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> x = torch.arange(3.0).unsqueeze(1)
    >>> gathered(lambda x: 2 * x, DataLoader(TensorDataset(x, x), 2)).flatten()
    tensor([0., 2., 4.])
    """
    ranks = group_of(loader, process_group, torch.device("cpu"))
    if ranks is None:
        return _joined([_found(function, batch) for batch in loader])
    with ranks.together():
        return _of_ranks(function, loader, ranks)


def _of_ranks(function: Callable[[Any], Found], loader: Iterable[Any], ranks: ProcessGroup) -> Found:
    shard, sampler = shard_of(loader, loader, ranks, named=False), sampler_of(loader)
    if shard.counted is None or sampler is None:
        raise DataError(
            "the loader has no DistributedSampler, so that the order of the predictions of several ranks is not known; "
            "expected DataLoader(dataset, sampler=DistributedSampler(dataset)). Or predict on every rank as it is."
        )
    mine = torch.tensor(list(sampler))[shard.counted]
    found = _joined([_found(function, batch) for batch in shard])
    parts = found if isinstance(found, tuple) else (found,)
    mine = mine[: len(parts[0])]  # a loader with drop_last leaves some out
    every = [ranks.sent((mine, *(part.detach() for part in parts)), rank) for rank in range(ranks.size)]
    order = torch.cat([each[0] for each in every]).argsort()
    whole = tuple(torch.cat([each[1 + i] for each in every])[order].to(part) for i, part in enumerate(parts))
    return whole if isinstance(found, tuple) else whole[0]


def _found(function: Callable[[Any], Found], batch: Any) -> Found:
    return function(batch[0] if isinstance(batch, (tuple, list)) else batch)


def _joined(found: list[Found]) -> Found:
    if not found:
        raise no_batch()
    if isinstance(found[0], Tensor):
        return torch.cat([each for each in found if isinstance(each, Tensor)])
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))
