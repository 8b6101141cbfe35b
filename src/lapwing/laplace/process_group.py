"""ProcessGroup: the ranks of `torch.distributed`, which fit one posterior together. No object is pickled.

Whatever ranks do together begins with a word from each: that it is at the same place, or which error it has met. So an
error on one rank is an error on all of them, and a rank that is gone is one after the timeout of the group at the
latest; with gloo it is named.

    pooled        sums are all-reduced in buckets of `BUCKET` bytes; what is no sum (rows, or blocks that differ between
                  ranks) is sent by each rank in turn, and pooled in that order
    decomposed    eigendecompositions are shared out by their cost, and sent to the others

Memory: a bucket; where curvatures are sent, one more of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lapwing.errors import LapwingError, RanksError
from lapwing.estimate.ranks import AnySum, Ranks
from lapwing.linalg import Blocks, Curvature, Dense, Kronecker
from lapwing.linalg.addends import Sum, with_addends
from lapwing.linalg.dense import LARGE
from lapwing.serialize import pack, unpack

BUCKET = 2**25
"""Bytes that are sent at a time."""


@dataclass(eq=False)
class ProcessGroup(Ranks):
    """The ranks of a group, seen from one of them; `over` once an error has been told, or heard of.

    `device` is where the network is.
    """

    group: dist.ProcessGroup
    device: torch.device
    over: bool = False

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """This process's number in the group."""
        return dist.get_rank(self.group)

    # -- words -------------------------------------------------------------------------------------------------------

    @contextmanager
    def together(self) -> Iterator[None]:
        """Tells the others of an error inside."""
        try:
            yield
        except Exception as error:
            if not self.over:
                self.over = True
                self._heard(json.dumps({"error": f"{type(error).__name__}: {error}"}), "telling of an error")
            raise

    def agreed(self, place: str, word: Any = None) -> list[Any]:
        """What every rank says at this place, in the order of ranks; plain values, as JSON has them."""
        found = [json.loads(each) for each in self._heard(json.dumps({"place": place, "word": word}), place)]
        failed = {rank: each["error"] for rank, each in enumerate(found) if "error" in each}
        if failed:
            self.over = True
            which = "; ".join(f"rank {rank}: {error}" for rank, error in failed.items())
            raise RanksError(
                f"another process failed, and this one (rank {self.rank} of {self.size}) stopped with it, while "
                f"{place}. Its error was: {which} Expected all ranks to go on. Mend that, and start all of them again."
            )
        places = [each["place"] for each in found]
        if len(set(places)) > 1:
            self.over = True
            raise RanksError(
                f"the ranks are at different places of their scripts, {places}; expected every rank to call the same "
                "methods in the same order. Call fit on all ranks of the group, or on none."
            )
        return [each["word"] for each in found]

    def _heard(self, text: str, place: str) -> list[str]:
        """The text of every rank."""
        with self._talking(place):
            if self._gloo is not None:  # names the ranks that do not come; left to itself it waits for half an hour
                self._gloo.monitored_barrier(self._gloo.options._timeout, wait_all_ranks=True)
            device = self._device(torch.device("cpu"))
            data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
            sizes = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(self.size)]
            dist.all_gather(sizes, torch.tensor(len(data), device=device), group=self.group)
            longest = max(map(int, sizes))
            room = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in range(self.size)]
            dist.all_gather(room, torch.cat([data, data.new_zeros(longest - len(data))]), group=self.group)
            pairs = zip(room, sizes, strict=True)
            return [bytes(each[: int(size)].tolist()).decode() for each, size in pairs]

    @cached_property
    def _gloo(self) -> Any:
        """What speaks for the CPU, if it is gloo; a group that was made without a backend's name has it beside nccl."""
        if "gloo" not in dist.get_backend_config(self.group):
            return None
        return self.group._get_backend(torch.device("cpu"))

    @contextmanager
    def _talking(self, place: str) -> Iterator[None]:
        """Errors of the group name the place, and what to do."""
        try:
            yield
        except RuntimeError as error:
            self.over = True
            raise RanksError(
                f"rank {self.rank} of {self.size} got no answer from another rank while {place}; expected all of them. "
                f"torch says: '{error}'. Look at what the others wrote last: one was killed, failed elsewhere, or is "
                "slower than the timeout of the group (init_process_group(timeout=...)). Start all ranks again; with "
                "fit(..., checkpoint=path) they go on from the last file."
            ) from error

    # -- numbers -----------------------------------------------------------------------------------------------------

    def _device(self, own: torch.device) -> torch.device:
        """Where the group takes tensors of a device: nccl has CUDA alone, gloo the CPU."""
        if "nccl" not in dist.get_backend_config(self.group) or (own.type == "cpu" and self._gloo is not None):
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def summed(self, tensor: Tensor) -> Tensor:
        self.agreed("adding up numbers", [list(tensor.shape), str(tensor.dtype)])
        return self._all_reduced([tensor.clone()])[0]

    def _all_reduced(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sums over ranks, in the place of tensors that are alike on all of them."""
        found = [tensor.detach().contiguous() for tensor in tensors]
        for buffer, parts in self._buckets(found):
            with self._talking("adding up numbers"):
                dist.all_reduce(buffer, group=self.group)
            _spread(buffer, parts)
        return found

    def _buckets(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Flat buffers, each with the parts of contiguous tensors that are in it: one dtype, at most BUCKET bytes."""
        waiting: list[Tensor] = []
        for tensor in sorted(tensors, key=lambda each: (str(each.dtype), str(each.device))):
            for part in tensor.view(-1).split(BUCKET // tensor.element_size()):
                bytes_ = sum(each.nbytes for each in waiting) + part.nbytes
                if waiting and (bytes_ > BUCKET or (waiting[0].dtype, waiting[0].device) != (part.dtype, part.device)):
                    yield self._flat(waiting), waiting
                    waiting = []
                waiting.append(part)
        if waiting:
            yield self._flat(waiting), waiting

    def _flat(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts)).to(self._device(parts[0].device))

    def sent(self, value: Any, source: int) -> Any:
        """The object of rank `source`, of what `serialize` knows, on all ranks."""
        mine, text = self.rank == source, ""
        tensors: dict[str, Tensor] = {}
        if mine:
            description, tensors = pack(value)
            tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
            shapes = {name: [list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in tensors.items()}
            text = json.dumps({"description": description, "shapes": shapes})
        facts = json.loads(self.agreed("sending a curvature", text)[source])
        if not mine:
            for name, (shape, dtype) in facts["shapes"].items():
                tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
        for buffer, parts in self._buckets(list(tensors.values())):
            with self._talking("sending a curvature"):
                dist.broadcast(buffer, dist.get_global_rank(self.group, source), group=self.group)
            if not mine:
                _spread(buffer, parts)
        # here too from contiguous tensors: products of the same numbers in another layout may round in another way
        return unpack(facts["description"], tensors)

    # -- curvatures --------------------------------------------------------------------------------------------------

    def pooled(self, curvature: AnySum | None) -> AnySum:
        said = self.agreed("adding up curvatures", None if curvature is None else _form(curvature))
        if curvature is not None and said[0] is not None and said.count(said[0]) == self.size:
            addends: list[Tensor] = []
            with_addends(curvature, lambda tensor: addends.append(tensor) or tensor)
            sums = iter(self._all_reduced(addends))
            found = with_addends(curvature, lambda tensor: next(sums).to(tensor.device))
            assert isinstance(found, type(curvature))
            return found
        holders = [rank for rank, has in enumerate(self.agreed("finding data", curvature is not None)) if has]
        if not holders:
            raise RanksError("no rank has data; expected at least one batch. Check the datasets and drop_last.")
        total: Any = None
        for rank in holders:
            part = self.sent(curvature, rank)
            total = part if total is None else total.pooled(part)
        assert total is not None
        return total

    def decomposed(self, curvature: Curvature, apart: bool = False) -> Curvature:
        jobs = [job for part in _parts(curvature) for job in _decompositions(part, apart)]
        owners: list[list[int]] = [[] for _ in range(self.size)]
        load = [0] * self.size
        for number in sorted(range(len(jobs)), key=lambda n: -jobs[n].cost):
            least = load.index(min(load))
            load[least] += jobs[number].cost
            owners[least].append(number)
        mine = tuple(getattr(jobs[number].part, jobs[number].name) for number in owners[self.rank])
        for rank, numbers in enumerate(owners):
            if numbers:
                found = self.sent(mine, rank)
                for number, value in zip(numbers, found, strict=True):
                    vars(jobs[number].part)[jobs[number].name] = value
        return curvature


@dataclass(frozen=True, eq=False)
class _Decomposition:
    """A cached property of a part of a curvature, which one rank computes for all."""

    part: Kronecker | Dense
    name: str
    cost: int


def _parts(curvature: Curvature) -> list[Curvature]:
    return [block.curvature for block in curvature.blocks] if isinstance(curvature, Blocks) else [curvature]


def _decompositions(part: Curvature, apart: bool) -> list[_Decomposition]:
    """Those that a prior will ask for which is the same for a weight and its bias, and (`apart`) of each alone."""
    if isinstance(part, Kronecker) and not part.factored_damping:
        rows, width = part.layout.rows, part.layout.width
        sides = [("eigen_rows", rows)]
        sides += [("_eigen_joint", width)] if part.joint_bias else []
        sides += [("_eigen_separate", width)] if apart or not part.joint_bias else []
        return [_Decomposition(part, name, part.layout.groups * side**3) for name, side in sides]
    if isinstance(part, Dense) and part.size <= LARGE:
        return [_Decomposition(part, "eigen", part.size**3)]
    return []


def _form(curvature: Sum) -> str | None:
    """All of a curvature but the numbers that add, as text; None where it is no sum of numbers."""
    found = with_addends(curvature, lambda tensor: tensor.new_zeros(()).expand(tensor.shape))
    if found is None:
        return None
    try:
        description, tensors = pack(found)
    except LapwingError:  # of a class that files do not know: it is refused where it has to be sent
        return None
    return json.dumps([description, [[name, list(t.shape), str(t.dtype)] for name, t in tensors.items()]])


def _spread(buffer: Tensor, parts: Sequence[Tensor]) -> None:
    """Puts a flat buffer back into its parts."""
    for part, values in zip(parts, buffer.split([len(part) for part in parts]), strict=True):
        part.copy_(values)
