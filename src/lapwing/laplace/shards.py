"""Which data points of a loader are this rank's: every point of the data set counts once, over all ranks.

A loader with a `torch.utils.data.DistributedSampler` has one shard per rank. The sampler repeats a few points so that
all shards are of one length; those are found by the indices that it gives on all ranks, and left out. Of any other
loader nobody knows which points it has: as the shard of a process group that is named, its data must differ from those
of all other ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import BatchSampler

from lapwing.errors import DataError, OptionError
from lapwing.estimate.data_pass import Batches, Wrapped
from lapwing.evidence.seen import Seen, fingerprint
from lapwing.laplace.process_group import ProcessGroup
from lapwing.laplace.sampler import sampler_of
from lapwing.tangent.inputs import batch_size, map_tensors, tensors


def group_of(loader: Iterable[Any], group: dist.ProcessGroup | None, device: torch.device) -> ProcessGroup | None:
    """The ranks that fit together: those of the group, or of all processes where the loader has a shard."""
    sampler = sampler_of(loader)
    if group is None and sampler is None:
        return None
    if not dist.is_available() or not dist.is_initialized():
        if group is None and sampler is not None and sampler.num_replicas == 1:
            return None
        found = "a process_group was given" if sampler is None else f"the loader has 1 of {sampler.num_replicas} shards"
        raise DataError(
            f"{found}, and there is no process group; expected torch.distributed.init_process_group(...) before, in a "
            "script that torchrun starts. For one process, give a loader without DistributedSampler."
        )
    if group is None:
        assert dist.group.WORLD is not None
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):  # what new_group returns to a process that is not in it
        raise OptionError(
            f"process_group is {group!r}, which this process is not in; expected a group of its own. Call fit on the "
            "ranks of the group alone."
        )
    found = ProcessGroup(group, device)
    if sampler is not None and (sampler.num_replicas, sampler.rank) != (found.size, found.rank):
        raise DataError(
            f"the sampler has shard {sampler.rank} of {sampler.num_replicas}, and this process is rank {found.rank} of "
            f"{found.size}; expected the same. Make it by DistributedSampler(dataset), which asks the process group."
        )
    return found


@dataclass(eq=False)
class Shard(Wrapped):
    """The batches of this rank without points that count elsewhere: `counted` [L] by their place in the loader.

    `order` has the number of each place among all data points, in an order that is the same for any number of ranks.
    Without `counted`, all are kept, and their hash is noted.
    """

    batches: Batches
    size: int | None = None
    counted: Tensor | None = None
    order: Tensor | None = None
    print: int = 0

    @property
    def source(self) -> Batches:
        return self.batches

    def __iter__(self) -> Iterator[Any]:
        at, self.print = 0, 0
        for batch in self.batches:
            if self.counted is None:
                self.print = added_print(self.print, batch)
                yield batch
                continue
            rows = self.rows(batch, at)
            at += rows
            kept = kept_rows(batch, self.counted[at - rows : at])
            if kept is not None:
                yield kept

    def rows(self, batch: Any, at: int) -> int:
        """How many data points a batch has, which are as many as it has indices."""
        assert self.counted is not None
        assert self.size is not None
        rows, expected = batch_size(batch), min(self.size, len(self.counted) - at)
        if rows != expected:
            raise DataError(
                f"a batch has {rows} rows for {expected} indices of its DistributedSampler; expected as many, to find "
                "the points that the sampler repeats. Use a collate_fn that gives one row per data point."
            )
        return rows


def kept_rows(batch: Any, kept: Tensor) -> Any:
    """The data points of a batch that are kept; None where there are none."""
    if bool(kept.all()):
        return batch
    where, size = kept.nonzero().squeeze(1), len(kept)
    if not len(where):
        return None
    return map_tensors(lambda t: t[where.to(t.device)] if t.dim() and len(t) == size else t, batch)


def shard_of(batches: Batches, loader: Iterable[Any], ranks: ProcessGroup, named: bool) -> Shard:
    """The batches that a loader gives, as this rank's part of the data; `named` if the user vouches for them."""
    sampler, inner = sampler_of(loader), getattr(loader, "batch_sampler", None)
    if sampler is None or (named and type(inner) is not BatchSampler):
        return Shard(batches)
    if type(inner) is not BatchSampler:
        raise DataError(
            f"the loader's batch_sampler is a {type(inner).__name__}, whose order is not known; expected that of "
            "DataLoader(dataset, batch_size, sampler=DistributedSampler(dataset)). Or see to it that each point is in "
            "one shard, and name the group: fit(loader, process_group=torch.distributed.group.WORLD)."
        )
    mine = torch.tensor(list(sampler), dtype=torch.int64)
    every = _gathered(mine, inner.batch_size, ranks)
    # place by place and rank by rank: the sampler's own order, for any number of ranks; what comes again is padding
    order = every.T.flatten().numpy()
    firsts = np.sort(np.unique(order, return_index=True)[1])
    whole = min(len(order), len(sampler.dataset))  # pyright: ignore[reportArgumentType]
    if len(firsts) < whole:
        raise DataError(
            f"the samplers of {ranks.size} ranks have {len(firsts)} different points of {whole}; expected each in one "
            "shard. Give all of them the same seed, and the same set_epoch."
        )
    number = np.full(len(order), -1)
    number[firsts] = np.arange(len(firsts))
    own = torch.from_numpy(number).reshape(-1, ranks.size)[:, ranks.rank]
    shard = Shard(batches, inner.batch_size, own >= 0, own)
    if not bool(shard.counted.any()):  # pyright: ignore[reportOptionalMemberAccess]
        raise DataError(
            f"rank {ranks.rank} has no data point, as there are {len(firsts)} for {ranks.size} ranks; expected one or "
            "more for each. Start fewer processes."
        )
    return shard


def _gathered(mine: Tensor, batch: int, ranks: ProcessGroup) -> Tensor:
    """The indices of all ranks, [ranks, L]."""
    said = ranks.agreed("comparing samplers", [len(mine), batch])
    if any(each != said[0] for each in said):
        raise DataError(
            f"the ranks have {[each[0] for each in said]} points in batches of {[each[1] for each in said]}; expected "
            "the same on all of them. Check drop_last, batch_size and the data set of each rank."
        )
    every = torch.zeros(ranks.size, len(mine), dtype=torch.int64)
    every[ranks.rank] = mine
    return ranks.summed(every)


def added_print(total: int, batch: Any) -> int:
    """A hash of data points, whatever their order and batches, with those of one more batch."""
    size = batch_size(batch)
    rows = [t.reshape(size, -1).double() for t in tensors(batch) if t.dim() and len(t) == size]
    return wrapped_sum((total, int(fingerprint(torch.cat(rows, dim=1)))))


def wrapped_sum(values: Iterable[int]) -> int:
    """Modulo 2^64, as hashes of data points add."""
    return (sum(values) + 2**63) % 2**64 - 2**63


def facts_of(seen: Seen) -> dict[str, Any]:
    """What was seen, as plain values."""
    return {
        "points": seen.points,
        "targets": seen.targets,
        "total": float(seen.total),
        "shape": None if seen.shape is None else list(seen.shape),
        "prints": seen.fingerprint,
    }


def total_of(facts: Iterable[dict[str, Any] | None], like: Seen) -> Seen:
    """What was seen altogether; None stands for nothing."""
    said = [each for each in facts if each is not None]
    prints = [each["prints"] for each in said]
    shapes = [each["shape"] for each in said if each["shape"] is not None]
    device = like.total.device if isinstance(like.total, Tensor) else None
    return replace(
        like,
        points=sum(each["points"] for each in said),
        targets=sum(each["targets"] for each in said),
        total=torch.tensor(sum(each["total"] for each in said), dtype=torch.float64, device=device),
        shape=torch.Size(shapes[0]) if shapes else None,
        prints=None if None in prints else wrapped_sum(prints),
    )


def seen_by_all(seen: Seen, shard: Shard, ranks: ProcessGroup) -> Seen:
    """What all ranks have seen; two that have seen the same data are refused."""
    own = [facts_of(seen), shard.print if shard.counted is None else None]
    said = ranks.agreed("adding up what was seen", own)
    data = [(facts["points"], found) for facts, found in said if found is not None]
    twice = [rank for rank, each in enumerate(data) if data.count(each) > 1]
    if twice:
        raise DataError(
            f"the ranks {twice} were given the same data, which would count {len(twice)} times; expected a shard each. "
            "Use DataLoader(dataset, sampler=DistributedSampler(dataset)), or leave process_group out: every rank then "
            "fits all of its data on its own."
        )
    return total_of([facts for facts, _ in said], seen)
