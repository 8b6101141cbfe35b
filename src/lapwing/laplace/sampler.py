"""The sampler of a loader that has one shard of the data, and a refusal where all data are needed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils.data import DistributedSampler

from lapwing.errors import DataError


def sampler_of(loader: Iterable[Any]) -> DistributedSampler | None:
    """The sampler that gives a loader one shard of several, if there is one."""
    batches = getattr(loader, "batch_sampler", None)
    for each in (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)):
        if isinstance(each, DistributedSampler):
            return each
    return None


def refuse_shard(loader: Iterable[Any]) -> None:
    """For what every rank needs all data of."""
    sampler = sampler_of(loader)
    if sampler is not None and sampler.num_replicas > 1:
        raise DataError(
            f"the loader has a DistributedSampler, so that rank {sampler.rank} sees a shard of {sampler.num_replicas}; "
            "expected all data: fit alone adds up over ranks. Give a loader of the whole data set to every rank."
        )
