"""Checkpointed fits of several ranks: the sum so far, of all of them, is in one file that rank 0 writes and reads.

A round is `checkpoint_every` batches of every rank. As the sampler deals out its order place by place and rank by rank,
the points of all rounds so far are the first ones of that order, for any number of ranks and any batch size: the file
has their number, and a hash of them. Started again, perhaps with another number of ranks, every rank leaves out the
points that are in the sum, having checked that they are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from lapwing.errors import OptionError, StorageError
from lapwing.estimate.data_pass import one_shot
from lapwing.evidence.seen import Seen
from lapwing.laplace.checkpoint import Checkpointed, SumSoFar, check_rows, resumed, save, stored
from lapwing.laplace.process_group import ProcessGroup
from lapwing.laplace.shards import Shard, added_print, facts_of, kept_rows, total_of, wrapped_sum
from lapwing.laplace.stages import InBasis, Iterated, Stage, stage_of
from lapwing.laplace.structures import RANDOM
from lapwing.linalg import Curvature
from lapwing.linalg.addends import Sum
from lapwing.serialize.files import check_writable

KIND = "checkpoint of ranks"
_NONE = object()


@dataclass
class _Begun:
    """What the file holds of a pass: the first `points` of the sampler's order, their hash, and what was seen."""

    stage: int = 0
    points: int = 0
    print: int = 0
    total: Sum | None = None
    seen: dict[str, Any] | None = None


@dataclass(eq=False)
class _Rounds:
    """The batches of a shard without those points that are in the sum, a round at a time, with hashes of both."""

    shard: Shard
    begun: _Begun
    every: int
    at: int = 0
    left_out: int = 0
    taken: int = 0
    more: bool = True

    def __post_init__(self) -> None:
        self.batches = iter(self.shard.batches)

    @property
    def points(self) -> int:
        """Up to which point of the order this rank has come."""
        assert self.shard.order is not None
        return int(self.shard.order[: self.at].max()) + 1 if self.at else 0

    def round(self) -> Iterator[Any]:
        assert self.shard.order is not None
        for _ in range(self.every):
            batch = next(self.batches, _NONE)
            if batch is _NONE:
                self.more = False
                return
            rows = self.shard.rows(batch, self.at)
            order = self.shard.order[self.at : self.at + rows]
            self.at += rows
            before = kept_rows(batch, (order >= 0) & (order < self.begun.points))
            self.left_out = self.left_out if before is None else added_print(self.left_out, before)
            new = kept_rows(batch, order >= self.begun.points)
            if new is not None:
                self.taken = added_print(self.taken, new)
                yield new


@dataclass(frozen=True, eq=False)
class RanksCheckpointed:
    """A checkpointed fit, of which this process is one rank."""

    fit: Checkpointed
    ranks: ProcessGroup
    shard: Shard

    def __post_init__(self) -> None:
        if self.shard.order is None:
            raise OptionError(
                "a fit of several ranks with a checkpoint has a loader without DistributedSampler, so that nobody "
                "knows which points are in the file; expected DataLoader(dataset, sampler=DistributedSampler(dataset))."
            )

    def run(self, before: Curvature | None = None) -> tuple[Curvature, Seen]:
        """The curvature of the data of all ranks, and what they have seen."""
        if one_shot(self.shard):
            raise OptionError("the data are an iterator; expected a DataLoader, which another attempt can begin anew.")
        begun = self._begun()
        stage = stage_of(self.fit.setup.recipe, before, None if begun.seen is None else begun.stage)
        if isinstance(stage, Iterated) and self.fit.setup.recipe.source in RANDOM:
            raise OptionError(
                "lowrank with a random estimator and a checkpoint was asked of several ranks, whose passes would have "
                "different draws after another start; expected estimator='exact', or no checkpoint."
            )
        while True:
            total, seen = self._passed(stage, begun)
            following = stage.following(total, self.fit.tangent)
            if following is None:
                return stage.result(total, self.fit.tangent), seen
            stage, begun = following, _Begun()

    def _begun(self) -> _Begun:
        """What rank 0 has read, on all ranks."""
        found = _Begun()
        if self.ranks.rank == 0:
            path = check_writable(self.fit.path)
            if path.exists():
                saved = stored(path, self.fit.same, self.fit.setup.model, KIND)
                seen = Seen(self.fit.setup.has_noise)
                total = resumed(saved, seen, None, self.fit.tangent.space.device, path)
                found = _Begun(saved["stage"], saved["points"], saved["print"], total, facts_of(seen))
        word = [found.stage, found.points, found.print, found.seen]
        word = self.ranks.agreed("reading the checkpoint", word)[0]
        total = None
        if word[3] is not None:
            total = self.ranks.sent(found.total, 0)
        stage, points, hashed, seen = word
        return _Begun(stage, points, hashed, total, seen)

    def _passed(self, stage: Stage, begun: _Begun) -> tuple[Sum, Seen]:
        """One pass, round by round."""
        fit, ranks = self.fit, self.ranks
        fit.seen.start()
        if isinstance(stage, InBasis) and isinstance(stage.base, Curvature):
            ranks.decomposed(stage.base, apart=True)
        rounds, progress = _Rounds(self.shard, begun, fit.every), SumSoFar(begun.total)
        checked = not begun.points
        while any(ranks.agreed("going on with the fit", rounds.more)) and not stage.ended(progress.total):
            segment = rounds.round()
            first = next(segment, _NONE)
            part = None
            if first is not _NONE:
                numbers = self._generator(stage, begun, rounds)
                part = fit.part(stage, chain([first], segment), numbers, progress.total)
            word = [rounds.left_out, rounds.taken, part is not None, facts_of(fit.seen), rounds.points]
            said = ranks.agreed("counting data", word)
            out, taken = (wrapped_sum(each[i] for each in said) for i in (0, 1))
            points = max(each[4] for each in said)
            if not checked and points >= begun.points:
                self._check(out, begun)
                checked = True
            if not any(each[2] for each in said):
                continue
            progress.add(ranks.pooled(part))
            assert progress.total is not None
            check_rows(fit.setup, progress.total)
            seen = total_of([begun.seen, *(each[3] for each in said)], fit.seen)
            if ranks.rank == 0:
                counted = {"stage": stage.number, "points": points, "print": wrapped_sum((out, taken))}
                save(check_writable(fit.path), fit.same, counted, progress.total, seen, None, KIND)
        if not checked and not stage.ended(begun.total):
            self._check(None, begun)
        assert progress.total is not None, "every rank has data"
        said = ranks.agreed("adding up what was seen", facts_of(fit.seen))
        return progress.total, total_of([begun.seen, *said], fit.seen)

    def _check(self, left_out: int | None, begun: _Begun) -> None:
        if left_out != begun.print:
            raise StorageError(
                f"the first {begun.points} points of the sampler are not those that the checkpoint {self.fit.path} is "
                "of; expected the same data, with the same seed and epoch of the sampler. Restore them, or delete the "
                "file to begin anew."
            )

    def _generator(self, stage: Stage, begun: _Begun, rounds: _Rounds) -> torch.Generator | None:
        """Numbers of its own for every rank and round."""
        given = self.fit.generator
        if given is None or self.fit.setup.recipe.source not in RANDOM:
            return given
        mixed = given.initial_seed()
        for each in (self.ranks.rank, stage.number, begun.points, rounds.at):
            mixed = (mixed * 0x5851F42D4C957F2D + each + 0x14057B7EF767814F) % 2**63
        return torch.Generator(given.device).manual_seed(mixed)
