"""One file of named tensors and a JSON description, which is read whole or refused. Memory: the tensors, once.

    write(path, tensors, metadata)      atomic: a reader sees the old file or the new one, also after a kill
    read(path)     -> (tensors, metadata)
    describe(path) -> what the file says of itself, without its tensors

A file in the format of safetensors, so that others can open it; its metadata has one entry, "lapwing", a JSON object:

    digest     sha256 of the file up to the tensors, with this digest as 64 zeros: nothing in it can change unseen
    format     "lapwing"            version   of the format            library   version that wrote it
    tensors    sha256 of the bytes of every tensor
    metadata   the caller's

Nothing that is read can run code: JSON and arrays of numbers, of which none is larger than the file.

>>> import tempfile
>>> import torch
>>> folder = tempfile.TemporaryDirectory()
>>> write(f"{folder.name}/a.lapwing", {"x": torch.ones(2)}, {"kind": "example"})
>>> read(f"{folder.name}/a.lapwing")
({'x': tensor([1., 1.])}, {'kind': 'example'})
>>> folder.cleanup()
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from math import prod
from pathlib import Path
from shutil import copymode
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lapwing.errors import StorageError

try:
    import fcntl
except ImportError:  # Windows, where a file that is open cannot be removed anyway
    fcntl = None

FORMAT = "lapwing"
VERSION = 1
LIMIT = 100_000_000
"""Bytes of description that are accepted: the limit of safetensors."""
PARTIAL = ".partial"
"""How the names of files end that are being written; one is left behind where the writer was killed."""
OLD = 86_400.0
"""Seconds after which such a file is taken for left behind, where there are no locks to tell."""

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TYPES = {name: dtype for dtype, name in DTYPES.items()}
AnyPath = str | os.PathLike[str]
_BLANK = b"0" * 64
_MARK = b'"lapwing":"{\\"digest\\":\\"'  # no tensor's name can look like it: quotes within names are escaped
_AGAIN = "Write it again, or take another copy."


# -- writing -----------------------------------------------------------------------------------------------------------


def write(path: AnyPath, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Tensors by name and what JSON can hold, in one file; whatever happens, `path` is the old file or the new one."""
    if sys.byteorder != "little":
        raise StorageError("this machine is big-endian; expected a little-endian one, as the files are.")
    plain = {name: _plain(name, tensor) for name, tensor in tensors.items()}
    try:
        text = json.dumps(
            {
                "digest": _BLANK.decode(),
                "format": FORMAT,
                "version": VERSION,
                "library": library(),
                "tensors": {name: sha256(tensor) for name, tensor in plain.items()},
                "metadata": dict(metadata),
            },
            separators=(",", ":"),
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise StorageError(
            f"the metadata cannot be written as JSON: {error}; expected numbers, strings, lists and mappings of them."
        ) from error
    places, end = {}, 0
    for name in sorted(plain, key=lambda name: -plain[name].itemsize):  # wide numbers first: all are then aligned
        start, end = end, end + plain[name].nbytes
        places[name] = {"dtype": DTYPES[plain[name].dtype], "shape": list(plain[name].shape)}
        places[name]["data_offsets"] = [start, end]
    header = json.dumps({"__metadata__": {FORMAT: text}} | places, separators=(",", ":")).encode()
    if len(header) > LIMIT:
        raise StorageError(f"the description has {len(header)} bytes; expected at most {LIMIT}. Store more as tensors.")
    header += b" " * (-len(header) % 8)
    header = len(header).to_bytes(8, "little") + header
    with replacing(Path(path)) as partial, partial.open("wb") as file:
        file.write(_sealed(header, hashlib.sha256(header).hexdigest().encode()))
        for name in places:
            file.write(_bytes(plain[name]))


def _sealed(header: bytes, digest: bytes) -> bytes:
    """The header with a digest in its place."""
    at = header.index(_MARK) + len(_MARK)
    return header[:at] + digest + header[at + len(digest) :]


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def sha256(tensor: Tensor) -> str:
    """Of the numbers in memory, row-major."""
    return hashlib.sha256(_bytes(tensor.detach().cpu().contiguous())).hexdigest()


def library() -> str:
    """The version of lapwing that is installed."""
    try:
        return version("lapwing")
    except PackageNotFoundError:  # a source tree on the path
        return "0+unknown"


def check_writable(path: AnyPath) -> Path:
    """The path, if a file can be put there: asked before long work, not after it, by making one and removing it."""
    target = _target(Path(path))
    try:
        partial = _partial(target)
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        partial.unlink()
    except OSError as error:
        raise _unwritable(path, error) from error
    return Path(path)


def _target(path: Path) -> Path:
    """Where a file of that name is to be, links followed: a link stays a link."""
    try:
        target = path.resolve()
        if not target.parent.is_dir():
            raise StorageError(
                f"the folder {target.parent} does not exist; expected one to write {path.name} into. Create it."
            )
        if target.is_dir():
            raise StorageError(f"{path} is a folder; expected the name of a file.")
        if not os.access(target.parent, os.W_OK):
            raise StorageError(f"the folder {target.parent} is read-only; expected one to write {path.name} into.")
    except StorageError:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # a name that is too long, no name at all, links in a circle
        raise _unwritable(path, error) from error
    return target


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(6)}{PARTIAL}")


def _unwritable(path: AnyPath, error: Exception) -> StorageError:
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        most = 255 - len(_partial(Path("a")).name) + 1
        return StorageError(
            f"the name of the file {str(path)[:60]}... is too long for the file system; expected at most {most} bytes, "
            "as one of 22 more is written first. Choose a shorter one."
        )
    return StorageError(
        f"{path} could not be written: {error}; expected room on the disk and the right to write. What was there "
        "before is as it was."
    )


def _plain(name: str, tensor: Tensor) -> Tensor:
    """A tensor in main memory and row-major."""
    if tensor.layout != torch.strided or tensor.dtype not in DTYPES or name == "__metadata__":
        raise StorageError(
            f"the tensor {name!r} has layout {tensor.layout} and dtype {tensor.dtype}; expected a dense one with a "
            f"name of its own and one of the dtypes {[str(dtype) for dtype in DTYPES]}. Convert it."
        )
    return tensor.detach().cpu().contiguous()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file beside `path`, which takes its place, synced to disk, once the body is done; else the old one stays.

    The new file is locked while it is written, and goes with the process: those that killed ones have left behind are
    removed first, and those of others that are still at work are not touched.
    """
    target = _target(path)
    partial, lock = _partial(target), None
    try:
        _sweep(target)
        lock = _locked(partial)
        if target.exists():
            copymode(target, partial)
        yield partial
        _sync(partial)
        os.replace(partial, target)
        if os.name == "posix":  # the new name, too, survives a power cut
            _sync(target.parent)
    except OSError as error:
        if error.filename is not None and Path(error.filename) not in (partial, target, target.parent):
            raise  # of a file that the body reads
        raise _unwritable(path, error) from error
    finally:
        with suppress(OSError):
            partial.unlink()
        if lock is not None:
            os.close(lock)


def _sync(path: Path) -> None:
    found = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(found)
    finally:
        os.close(found)


def _locked(partial: Path) -> int | None:
    """A new file, locked by this process as long as what is returned is open."""
    while True:
        found = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
        if fcntl is None:
            os.close(found)
            return None
        with suppress(OSError):  # not every file system has locks: age decides there
            fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(found).st_nlink:
            return found
        os.close(found)  # swept in the moment before it was locked


def _sweep(target: Path) -> None:
    """Removes what killed processes have left of this file: such as nobody has locked, or, without locks, old ones."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]+{re.escape(PARTIAL)}")
    with suppress(OSError):
        for entry in os.scandir(target.parent):
            if not pattern.fullmatch(entry.name):
                continue
            with suppress(OSError):
                if fcntl is None:
                    if time.time() - entry.stat().st_mtime > OLD:
                        os.unlink(entry.path)
                    continue
                found = os.open(entry.path, os.O_RDWR)
                try:
                    _unlink_if_free(entry, found)
                finally:
                    os.close(found)


def _unlink_if_free(entry: os.DirEntry[str], found: int) -> None:
    assert fcntl is not None
    try:
        fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    except OSError:  # a file system without locks
        if time.time() - entry.stat().st_mtime <= OLD:
            return
    os.unlink(entry.path)


# -- reading -----------------------------------------------------------------------------------------------------------


def read(path: AnyPath, device: str | torch.device = "cpu") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and metadata of a file, if every byte of it is as it was written.

    The file is opened once: one that takes its place meanwhile is not mixed with it.
    """
    path = Path(path)
    with _opened(path) as file:
        found, places, start = _described(file, path)
        tensors = {name: _tensor(file, start, name, place, path) for name, place in places.items()}
        for name, tensor in tensors.items():
            if sha256(tensor) != found["tensors"][name]:
                raise StorageError(f"{path} is damaged in the tensor {name!r}; expected other numbers. {_AGAIN}")
    return {name: tensors[name].to(device) for name in found["tensors"]}, found["metadata"]


def describe(path: AnyPath) -> dict[str, Any]:
    """What a file says of itself: format, version, library, hashes and shapes of its tensors, metadata. Checked."""
    path = Path(path)
    with _opened(path) as file:
        found, places, _ = _described(file, path)
    return found | {"shapes": {name: place["shape"] for name, place in places.items()}}


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        if not path.is_file():
            raise StorageError(f"{path} is no file; expected one that lapwing has written. Check the path.")
        with path.open("rb") as file:
            yield file
    except StorageError:
        raise
    except (OSError, ValueError) as error:  # of a name that no file can have, too
        raise StorageError(f"{path} cannot be read: {error}; expected the right to read it.") from error


def _described(file: BinaryIO, path: Path) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Our description, the places of the tensors, and where these begin."""
    raw, size = _head(file, path), os.fstat(file.fileno()).st_size
    header, found = _parsed(raw, path)
    if found.get("format") != FORMAT or type(found.get("version")) is not int:
        raise StorageError(f"{path} says it has format {found.get('format')!r}; expected {FORMAT!r}. {_AGAIN}")
    if found["version"] > VERSION:
        raise StorageError(
            f"{path} has format version {found['version']}; expected at most {VERSION}. It was written by a later "
            f"lapwing ({found.get('library')}): upgrade to read it."
        )
    if _sealed(raw, hashlib.sha256(_sealed(raw, _BLANK)).hexdigest().encode()) != raw:
        raise StorageError(f"{path} is damaged in its description; expected the one that its hash is of. {_AGAIN}")
    places = {name: entry for name, entry in header.items() if name != "__metadata__"}
    _check_description(found, places, path)
    end = len(raw) + max((entry["data_offsets"][1] for entry in places.values()), default=0)
    if size != end:
        what = "is truncated" if size < end else "goes on after its end"
        raise StorageError(f"{path} {what}: it has {size} bytes; expected {end}. {_AGAIN}")
    return found, places, len(raw)


def _tensor(file: BinaryIO, start: int, name: str, place: dict[str, Any], path: Path) -> Tensor:
    """One tensor, read into memory of its own, which is aligned as that of any other."""
    tensor = torch.empty(place["shape"], dtype=_TYPES[place["dtype"]])
    file.seek(start + place["data_offsets"][0])
    if file.readinto(_bytes(tensor)) != tensor.nbytes:  # pyright: ignore[reportAttributeAccessIssue]
        raise StorageError(f"{path} is truncated in the tensor {name!r}; expected {tensor.nbytes} bytes. {_AGAIN}")
    return tensor


def _head(file: BinaryIO, path: Path) -> bytes:
    """The file up to its tensors: eight bytes that say how long the description is, and the description."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    start = file.read(9)
    length = int.from_bytes(start[:8], "little")
    if size < 10 or start[8:] != b"{":
        raise StorageError(f"{path} {_kind(start, size)}; expected a file that lapwing has written.")
    if length > min(size - 8, LIMIT):
        raise StorageError(
            f"{path} is truncated or damaged: its description has {length} bytes; expected at most "
            f"{min(size - 8, LIMIT)}, as the file has {size}. {_AGAIN}"
        )
    file.seek(0)
    return file.read(8 + length)


def _kind(start: bytes, size: int) -> str:
    if not size:
        return "is empty"
    if start.startswith(b"PK"):
        return "is a zip archive, as torch.save writes them, and such files can run code: it was not opened"
    if start[0] == 0x80 and start[1:2] in (b"\2", b"\3", b"\4", b"\5"):
        return "is a pickle, and pickles can run code: it was not opened"
    return "is truncated or not ours"


def _parsed(raw: bytes, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The header of safetensors, and our description in it."""
    if _MARK not in raw:
        raise StorageError(f"{path} has no description of lapwing; expected a file that lapwing has written.")
    try:
        header = json.loads(raw[8:])
        found = json.loads(header["__metadata__"][FORMAT])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise StorageError(f"{path} is damaged: its description is no JSON ({error}). {_AGAIN}") from error
    if not isinstance(found, dict):
        raise StorageError(f"{path} has a description that is no mapping; expected one that lapwing has written.")
    return header, found


def _check_description(found: dict[str, Any], places: dict[str, Any], path: Path) -> None:
    """Hashes of the tensors that there are, each with a place of its size: also in a file that somebody made up."""
    fits = all(isinstance(found.get(name), dict) for name in ("tensors", "metadata"))
    fits = fits and found["tensors"].keys() == places.keys() and all(map(_placed, places.values()))
    if fits:  # one after the other, without holes
        spans = sorted(tuple(entry["data_offsets"]) for entry in places.values())
        fits = all(a[1] == b[0] for a, b in pairwise([(0, 0), *spans]))
    if not fits:
        raise StorageError(f"{path} has a description that does not fit its tensors; expected one of lapwing. {_AGAIN}")


def _placed(entry: Any) -> bool:
    """Whether an entry has a type, a shape, and a place in the file that is as large as they say."""
    if not isinstance(entry, dict) or not all(_counts(entry.get(name)) for name in ("shape", "data_offsets")):
        return False
    if not isinstance(entry.get("dtype"), str) or entry["dtype"] not in _TYPES or len(entry["data_offsets"]) != 2:
        return False
    first, last = entry["data_offsets"]
    if len(entry["shape"]) > 64 or any(size > 2**62 for size in entry["shape"]):
        return False
    return last - first == prod(entry["shape"]) * _TYPES[entry["dtype"]].itemsize


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
