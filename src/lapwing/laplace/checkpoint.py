"""Fits that survive a kill: the pass is cut into segments, whose curvatures are added, and the sum so far is on disk.

After every segment one file holds the sum, what was seen, the number of batches, the generator's state and a running
hash of the batches: memory and disk O(curvature). Started again with the same path, a fit draws the batches that are in
the sum, checks that they are the same, and goes on; its result is bit for bit that of a fit which was not interrupted,
on the same machine. The file is removed in the end. Structures with several passes have sums for each (`stages`).

The loader must give the same batches in the same order every time: a DataLoader with `shuffle=False`, or with
`generator=torch.Generator().manual_seed(0)` made anew for every attempt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.errors import CurvatureError, DataError, LapwingError, OptionError, StorageError
from lapwing.estimate.data_pass import Watched, no_batch, one_shot, repeated
from lapwing.estimate.dual_rows import LIMIT
from lapwing.evidence.seen import Seen
from lapwing.laplace.descriptions import code_of, text
from lapwing.laplace.identity import difference, further, structure
from lapwing.laplace.persistence import described
from lapwing.laplace.setup import Setup
from lapwing.laplace.stages import SEVERAL, InBasis, Iterated, Stage, stage_of
from lapwing.laplace.structures import RANDOM, AnyTangent
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Curvature, Dual, Independent
from lapwing.linalg.addends import Sum
from lapwing.linalg.budget import current_budget
from lapwing.serialize import KINDS, compact, pack, read, unpack, write
from lapwing.serialize.files import AnyPath, check_writable, sha256
from lapwing.tangent.features import FeatureTangent

EVERY = 50
"""Batches between two writes."""
_NONE = object()


@dataclass
class SumSoFar:
    """How far a pass has come: the sum of its parts, and the number and the running hash of the batches in it."""

    total: Sum | None = None
    batches: int = 0
    data: str = ""

    def add(self, part: Any) -> None:
        """Laid out as from a file, so that what is made of it rounds in the same way."""
        self.total = compact(part if self.total is None else self.total.pooled(part))

    def draw(self, batch: Any) -> Any:
        """The batch, counted and hashed."""
        self.batches, self.data = self.batches + 1, digest((self.data, batch))
        return batch


@dataclass(frozen=True, eq=False)
class Checkpointed:
    """A fit whose sums are kept in the file at `path` after every `every` batches."""

    setup: Setup
    tangent: AnyTangent
    seen: Seen
    generator: torch.Generator | None
    path: AnyPath
    every: int = EVERY

    def __post_init__(self) -> None:
        _check(self.setup, self.generator, self.every)

    @property
    def same(self) -> dict[str, Any]:
        return identity(self.setup, self.tangent, self.generator, self.every)

    def run(self, pairs: Iterable[Any], before: Curvature | None = None) -> Curvature:
        """The curvature of all batches; goes on where the file ends, if there is one.

        `before` is a curvature of other data, to which this one will be added.
        """
        path, same = check_writable(self.path), self.same
        saved = stored(path, same, self.setup.model) if path.exists() else None
        stage = stage_of(self.setup.recipe, before, None if saved is None else saved.get("stage", 0))
        pairs = repeated(pairs) if isinstance(stage, InBasis) and stage.number == 0 else pairs
        while True:
            total = self._passed(stage, pairs, saved, path, same)
            following, saved = stage.following(total, self.tangent), None
            if following is None:
                return stage.result(total, self.tangent)
            if one_shot(pairs):
                repeated(pairs)  # refuses them
            stage = following

    def _passed(
        self,
        stage: Stage,
        pairs: Iterable[Any],
        saved: dict[str, Any] | None,
        path: Path,
        same: dict[str, Any],
    ) -> Sum:
        """One pass, in segments; `saved` is the file, if it is of this pass."""
        batches, progress = iter(pairs), SumSoFar()
        self.seen.start()
        if stage.number and isinstance(stage, Iterated) and self.generator is not None:
            self.generator.manual_seed(self.generator.initial_seed())  # the same draws in every pass
        if saved is not None:
            _skip(batches, progress, saved["batches"], saved["data"], path)
            progress.total = resumed(saved, self.seen, self.generator, self.tangent.space.device, path)
        while not stage.ended(progress.total) and (first := next(batches, _NONE)) is not _NONE:
            start = progress.batches
            segment = map(progress.draw, chain([first], islice(batches, self.every - 1)))
            try:
                progress.add(self.part(stage, segment, self.generator, progress.total))
            except LapwingError as error:
                raise type(error)(f"from batch {start} on, counted from there: {error}") from error
            assert progress.total is not None
            check_rows(self.setup, progress.total)
            counted = {"stage": stage.number, "batches": progress.batches, "data": progress.data}
            save(path, same, counted, progress.total, self.seen, self.generator)
        if progress.total is None:
            raise no_batch()
        return progress.total

    def part(self, stage: Stage, segment: Iterable[Any], generator: torch.Generator | None, total: Sum | None) -> Sum:
        """The sum over some of the batches."""
        watched = Watched(segment, _nothing, self.seen.saw)
        return stage.part(self.tangent, self.setup.distribution, watched, generator, total)


def remove(path: AnyPath) -> None:
    """Removes the file of a fit that is done."""
    Path(path).resolve().unlink(missing_ok=True)


def _nothing() -> None:
    """A segment does not begin the pass anew."""


# -- what must be the same ---------------------------------------------------------------------------------------------


def identity(setup: Setup, tangent: AnyTangent, generator: torch.Generator | None, every: int) -> dict[str, Any]:
    """What the sums depend on, besides the data; as JSON gives it back."""
    made, tensors = described(setup)
    space, entries = tangent.space, _entries(setup.model)
    found = {
        "network": {name: list(value.shape) for name, value in entries.items()},
        "parameters": [[name, list(shape)] for name, shape in zip(space.names, space.shapes, strict=True)],
        "class": made["class"],
        "likelihood": made["likelihood"],
        "options": {
            n: digest(v) if isinstance(v, Tensor) else v for n, v in setup.options.items() if n != "memory_budget"
        },
        "memory budget": current_budget().total,  # batches are counted as they are divided
        "numbers of the likelihood": {n: digest(v) for n, v in tensors.items() if n.startswith("likelihood.")},
        "closed form": isinstance(tangent, FeatureTangent),
        "dtype": str(space.dtype),
        "device": space.device.type,
        "checkpoint_every": every,
        "generator's seed": None if generator is None else generator.initial_seed(),
        "weights": digest(entries),
        "further numbers": digest(further(setup.model)),
        "structure": structure(setup.model, code=True),
        "code of the likelihood": _code_of(setup.likelihood),
    }
    return json.loads(json.dumps(found))


_LATER = ("further numbers", "structure", "code of the likelihood")
"""What older checkpoints do not hold: of these the rest is compared."""


def _code_of(likelihood: Any) -> str | None:
    """A likelihood of one's own by its class, its functions (bytecode, constants, closures) and its plain values."""
    if not isinstance(likelihood, Likelihood) or KINDS.get(type(likelihood).__name__) is type(likelihood):
        return None
    return text((code_of(type(likelihood)), likelihood, tuple(sorted(vars(likelihood).items()))), code=True)


def _entries(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def digest(value: Any) -> str:
    """sha256 of tensors, numbers and strings, nested in any way: of their kind, shape and numbers."""
    if isinstance(value, Tensor):
        text = f"{value.dtype} {tuple(value.shape)} {sha256(value)}"
    elif isinstance(value, Mapping):
        text = " ".join(f"{key!r} {digest(each)}" for key, each in value.items())
    elif isinstance(value, (tuple, list)):
        text = " ".join(map(digest, value))
    elif value is None or isinstance(value, (bool, int, float, str, bytes)):
        text = repr(value)
    else:
        raise DataError(
            f"a batch holds a {type(value).__name__}, which cannot be compared with that of another attempt; expected "
            "tensors, numbers and strings. Convert it, or fit without a checkpoint."
        )
    kind = "Tensor" if isinstance(value, Tensor) else type(value).__name__  # a Parameter counts as a tensor
    return hashlib.sha256(f"{kind}({text})".encode()).hexdigest()


def _check(setup: Setup, generator: torch.Generator | None, every: int) -> None:
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise OptionError(f"checkpoint_every is {every!r}; expected a number of batches >= 1.")
    if not setup.recipe.row.stored:
        raise OptionError(
            f"a {setup.recipe.structure!r} posterior cannot be fitted with a checkpoint: it keeps no numbers "
            "that a file could hold. Expected another structure: 'kron', 'ekfac', 'diag', 'blocks', 'full', 'lowrank' "
            "or 'gp'. Leave checkpoint out."
        )
    if (what := setup.recipe.row.not_additive) and setup.recipe.structure not in SEVERAL:
        raise OptionError(
            f"a {setup.recipe.structure!r} curvature cannot be fitted with a checkpoint: the {what} of parts do not "
            "add up to those of the whole. Expected another structure: 'kron', 'ekfac', 'diag', 'blocks', 'full', "
            "'lowrank' or 'gp'."
        )
    if setup.recipe.source == "recursive":
        raise OptionError(
            "a recursive curvature cannot be fitted with a checkpoint: it propagates expectations over all data, and "
            "those of parts do not add up to them. Expected another estimator: 'mc' or 'exact'."
        )
    if setup.recipe.source in RANDOM and generator is None:
        raise OptionError(
            "a Monte-Carlo fit with a checkpoint has no generator; expected one, whose state is kept: "
            "fit(..., generator=torch.Generator().manual_seed(0))."
        )


def check_rows(setup: Setup, total: Sum) -> None:
    """The limit on rows is one of the whole, and each segment knows only its own."""
    limit = setup.recipe.options.get("limit", LIMIT)
    if setup.recipe.structure in SEVERAL or not isinstance(total, (Dual, Independent)) or total.entries <= limit**2:
        return
    if isinstance(total, Dual):
        what = f"{total.rows.count} rows; expected at most {limit}"
    else:
        what = f"Gram matrices of {total.entries} numbers; expected at most those of {limit} rows, {limit**2}"
    raise CurvatureError(
        f"the data so far make {what}. Use fewer data points (n_subset), a Kronecker structure, or raise `limit`."
    )


# -- the file ----------------------------------------------------------------------------------------------------------


def save(
    path: Path,
    same: dict[str, Any],
    counted: dict[str, Any],
    total: Sum,
    seen: Seen,
    generator: torch.Generator | None,
    kind: str = "checkpoint",
) -> None:
    """Writes the sum so far; `counted` says which data are in it."""
    description, tensors = pack(total)
    tensors = {f"sum.{name}": value for name, value in tensors.items()}
    assert isinstance(seen.total, Tensor)
    assert seen.shape is not None
    tensors["seen"] = seen.total
    if generator is not None:
        tensors["generator"] = generator.get_state()
    metadata = {
        "kind": kind,
        "same": same,
        "structure": description,
        **counted,
        "seen": {"points": seen.points, "targets": seen.targets, "shape": list(seen.shape)},
        "fingerprint": seen.fingerprint,
    }
    write(path, tensors, metadata)


def stored(path: Path, same: dict[str, Any], model: nn.Module, kind: str = "checkpoint") -> dict[str, Any]:
    """The file, if it is a checkpoint of the same fit."""
    try:
        tensors, metadata = read(path)
    except StorageError as error:
        raise StorageError(f"the checkpoint cannot be used. {error} Delete it to begin anew.") from error
    if metadata.get("kind") != kind or not isinstance(metadata.get("same"), dict):
        raise StorageError(
            f"{path} holds {metadata.get('kind')!r}; expected a {kind!r} of this fit, or no file. Choose another path."
        )
    saved = metadata["same"]
    compared = [name for name in same if name in saved or name not in _LATER]
    what = "; ".join(filter(None, (_difference(model, name, saved.get(name), same[name]) for name in compared)))
    if what:
        raise StorageError(
            f"{path} is a checkpoint of another fit: {what}. Expected the same model, weights and options. Restore "
            "them, or delete the file to begin anew."
        )
    return {**metadata, "tensors": tensors}


def _difference(model: nn.Module, name: str, saved: Any, ours: Any) -> str:
    if saved == ours:
        return ""
    if name in ("weights", "further numbers"):
        return "the model's weights or buffers have other numbers"
    if name == "structure":
        found = difference(model, ours, saved, "had")  # nothing where only the version of torch is another
        return f"the model has {found}" if found else ""
    if name == "code of the likelihood":
        return "the likelihood has other code, or closes over other values"
    if isinstance(saved, dict) and isinstance(ours, dict):
        was, now = ({key: each.get(key, "not there") for key in {**saved, **ours}} for each in (saved, ours))
        key = next(key for key in was if was[key] != now[key])
        return f"{name}: {key!r} was {was[key]} and is {now[key]}"
    return f"{name} was {saved} and is {ours}"


def _skip(batches: Iterator[Any], progress: SumSoFar, count: int, data: str, path: Path) -> None:
    """Draws the batches that are in the sum already, and makes sure that they are the same."""
    for batch in islice(batches, count):
        progress.draw(batch)
    if progress.batches < count:
        raise StorageError(
            f"{path} is a checkpoint after {count} batches, and the loader has {progress.batches}; expected the same "
            "data. Restore them, or delete the file to begin anew."
        )
    if progress.data != data:
        raise StorageError(
            f"the first {count} batches are not those that the checkpoint {path} is of; expected the same data in the "
            "same order. Use shuffle=False, or a DataLoader with generator=torch.Generator().manual_seed(...) made "
            "anew for every attempt; or delete the file to begin anew."
        )


def resumed(
    saved: dict[str, Any], seen: Seen, generator: torch.Generator | None, device: torch.device, path: Path
) -> Sum:
    """The sum so far; what was seen and the generator's state are put back."""
    try:
        tensors: dict[str, Tensor] = saved["tensors"]
        parts = {n.removeprefix("sum."): t.to(device) for n, t in tensors.items() if n.startswith("sum.")}
        total, facts = unpack(saved["structure"], parts), saved["seen"]
        if not isinstance(total, Sum):
            raise StorageError(f"the checkpoint {path} holds no curvature; expected one. Delete it to begin anew.")
        seen.points, seen.targets, seen.shape = facts["points"], facts["targets"], torch.Size(facts["shape"])
        seen.total, seen.prints = tensors["seen"].to(device), saved.get("fingerprint")
        if generator is not None:
            generator.set_state(tensors["generator"])
    except (KeyError, TypeError) as error:
        raise StorageError(f"the checkpoint {path} is incomplete ({error}). Delete it to begin anew.") from error
    return total
