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

import hashlib
import json
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from shutil import copymode
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lapwing.errors import StorageError

FORMAT = "lapwing"
VERSION = 1
LIMIT = 100_000_000
"""Bytes of description that are accepted: the limit of safetensors."""
PARTIAL = ".partial"
"""How the names of files end that are being written; one is left behind where the writer was killed."""

_DTYPES = {
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
        places[name] = {"dtype": _DTYPES[plain[name].dtype], "shape": list(plain[name].shape)}
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
        file.flush()
        os.fsync(file.fileno())


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
    """The path, if a file can be put there: asked before long work, not after it."""
    found = Path(path)
    folder = found.resolve().parent
    if not folder.is_dir():
        raise StorageError(f"the folder {folder} does not exist; expected one to write {found.name} into. Create it.")
    if found.is_dir():
        raise StorageError(f"{found} is a folder; expected the name of a file.")
    if not os.access(folder, os.W_OK):
        raise StorageError(f"the folder {folder} is read-only; expected one to write {found.name} into.")
    return found


def _plain(name: str, tensor: Tensor) -> Tensor:
    """A tensor in main memory and row-major."""
    if tensor.layout != torch.strided or tensor.dtype not in _DTYPES or name == "__metadata__":
        raise StorageError(
            f"the tensor {name!r} has layout {tensor.layout} and dtype {tensor.dtype}; expected a dense one with a "
            f"name of its own and one of the dtypes {[str(dtype) for dtype in _DTYPES]}. Convert it."
        )
    return tensor.detach().cpu().contiguous()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file beside `path`, which takes its place once the body is done; the old one stays where it is not."""
    check_writable(path)
    target = path.resolve()  # a link stays a link
    partial = target.with_name(f".{target.name}.{secrets.token_hex(6)}{PARTIAL}")
    try:
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        if target.exists():
            copymode(target, partial)
        yield partial
        os.replace(partial, target)
        if os.name == "posix":  # the new name, too, survives a power cut
            folder = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except OSError as error:
        raise StorageError(
            f"{path} could not be written: {error}; expected room on the disk and the right to write. What was there "
            "before is as it was."
        ) from error
    finally:
        with suppress(OSError):
            partial.unlink()


# -- reading -----------------------------------------------------------------------------------------------------------


def read(path: AnyPath, device: str | torch.device = "cpu") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and metadata of a file, if every byte of it is as it was written."""
    path = Path(path)
    found = describe(path)
    hashes = found["tensors"]
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in hashes:
                tensor = file.get_tensor(name)
                if sha256(tensor) != hashes[name]:
                    raise StorageError(f"{path} is damaged in the tensor {name!r}; expected other numbers. {_AGAIN}")
                # a copy: the file may be replaced later, and memory of our own is aligned as that of any other tensor
                tensors[name] = tensor.clone().to(device)
    except (SafetensorError, OSError) as error:
        raise StorageError(f"{path} is damaged: {error}. {_AGAIN}") from error
    return tensors, found["metadata"]


def describe(path: AnyPath) -> dict[str, Any]:
    """What a file says of itself: format, version, library, hashes and shapes of its tensors, metadata. Checked."""
    path = Path(path)
    if not path.is_file():
        raise StorageError(f"{path} is no file; expected one that lapwing has written. Check the path.")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            raw = _head(file, path)
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error}; expected the right to read it.") from error
    header, found = _parsed(raw, path)
    if found.get("format") != FORMAT or not isinstance(found.get("version"), int):
        raise StorageError(f"{path} says it has format {found.get('format')!r}; expected {FORMAT!r}. {_AGAIN}")
    if found["version"] > VERSION:
        raise StorageError(
            f"{path} has format version {found['version']}; expected at most {VERSION}. It was written by a later "
            f"lapwing ({found.get('library')}): upgrade to read it."
        )
    if _sealed(raw, hashlib.sha256(_sealed(raw, _BLANK)).hexdigest().encode()) != raw:
        raise StorageError(f"{path} is damaged in its description; expected the one that its hash is of. {_AGAIN}")
    shapes = {name: entry for name, entry in header.items() if name != "__metadata__"}
    _check_description(found, shapes, path)
    end = len(raw) + max((entry["data_offsets"][1] for entry in shapes.values()), default=0)
    if size != end:
        what = "is truncated" if size < end else "goes on after its end"
        raise StorageError(f"{path} {what}: it has {size} bytes; expected {end}. {_AGAIN}")
    found["shapes"] = {name: entry["shape"] for name, entry in shapes.items()}
    return found


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


def _check_description(found: dict[str, Any], shapes: dict[str, Any], path: Path) -> None:
    """Hashes of the tensors that there are, each with a shape and a place: also in a file that somebody made up."""
    fits = all(isinstance(found.get(name), dict) for name in ("tensors", "metadata"))
    if not fits or found["tensors"].keys() != shapes.keys() or not all(map(_placed, shapes.values())):
        raise StorageError(f"{path} has a description that does not fit its tensors; expected one of lapwing. {_AGAIN}")


def _placed(entry: Any) -> bool:
    """Whether an entry has a shape and a place in the file."""
    if not isinstance(entry, dict) or not all(_counts(entry.get(name)) for name in ("shape", "data_offsets")):
        return False
    return len(entry["data_offsets"]) == 2


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
