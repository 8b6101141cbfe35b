"""One file that is read whole or refused: flips, cuts, strangers, forgeries, and kills in the middle of writing."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lapwing.errors import LapwingError, StorageError
from lapwing.serialize import describe, files, read, replacing, write
from lapwing.serialize.files import check_writable

METADATA = {"kind": "test", "numbers": [1, 2.5, None, True], "text": 'Δ "quoted" \\ {}', "nested": {"digest": "0"}}


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "double": torch.randn(3, 5, dtype=torch.float64, generator=generator),
        "by columns": torch.randn(4, 3, generator=generator).mT,
        "permuted": torch.randn(2, 3, 4, generator=generator).permute(2, 0, 1),
        "half": torch.randn(7, generator=generator).half(),
        "bfloat16": torch.randn(2, 2, generator=generator).bfloat16(),
        "number": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False]),
        "index": torch.tensor([5, -1]),
        "bytes": torch.arange(9, dtype=torch.uint8),
        'odd "lapwing":"{name}\n\u00e9': torch.ones(1),
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "a.lapwing"
    write(found, tensors(), METADATA)
    return found


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], value) and found[name].dtype == value.dtype and found[name].is_contiguous()
        for name, value in expected.items()
    )


# -- there and back ----------------------------------------------------------------------------------------------------


def test_what_was_written_is_read(path: Path) -> None:
    found, metadata = read(path)
    assert metadata == METADATA
    assert same(found, tensors())


def test_a_file_without_tensors_and_one_with_shared_tensors(tmp_path: Path) -> None:
    write(tmp_path / "a", {}, {})
    assert read(tmp_path / "a") == ({}, {})
    shared = torch.arange(6.0)
    write(tmp_path / "a", {"whole": shared, "again": shared, "part": shared[2:], "wide": shared[:1].expand(3)}, {})
    found, _ = read(tmp_path / "a")
    assert torch.equal(found["whole"], found["again"])
    assert torch.equal(found["part"], shared[2:])
    assert torch.equal(found["wide"], torch.zeros(3))


def test_what_is_read_has_memory_of_its_own(path: Path) -> None:
    found, _ = read(path)
    path.write_bytes(b"")
    assert same(found, tensors())
    assert all(value.data_ptr() % 64 == 0 for value in found.values() if value.numel())


def test_others_can_open_the_file(path: Path) -> None:
    found = load_file(path)
    assert torch.equal(found["double"], tensors()["double"])
    assert torch.equal(found["by columns"], tensors()["by columns"])
    assert {name: value.dtype for name, value in found.items()} == {name: t.dtype for name, t in tensors().items()}


def test_a_file_says_what_it_is(path: Path) -> None:
    found = describe(path)
    assert (found["format"], found["version"], found["metadata"]) == ("lapwing", 1, METADATA)
    assert found["library"] == files.library()
    assert found["shapes"] == {name: list(value.shape) for name, value in tensors().items()}
    assert found["tensors"]["double"] == hashlib.sha256(tensors()["double"].numpy().tobytes()).hexdigest()


def test_tensors_go_to_a_device(path: Path) -> None:
    found, _ = read(path, device="meta")
    assert {value.device.type for value in found.values()} == {"meta"}


# -- damage ------------------------------------------------------------------------------------------------------------


def regions(path: Path) -> dict[str, range]:
    """The length, our metadata, the rest of the header, and every tensor that has bytes."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    inside = 8 + raw[8:start].index(b'"double":{')
    found = {"length": range(8), "metadata": range(8, inside), "shapes": range(inside, start)}
    for name, entry in header.items():
        if name != "__metadata__" and entry["data_offsets"][0] < entry["data_offsets"][1]:
            found[name] = range(start + entry["data_offsets"][0], start + entry["data_offsets"][1])
    assert sum(map(len, found.values())) == len(raw), "the regions make up the file"
    return found


def refused(path: Path) -> bool:
    try:
        read(path)
    except StorageError:
        return True
    return False


def test_every_bit_flip_is_refused(tmp_path: Path) -> None:
    path, damaged = tmp_path / "a", tmp_path / "damaged"
    some = "double", "by columns", "half", "bfloat16", "flags", "index"
    write(path, {name: value for name, value in tensors().items() if name in some}, METADATA)
    raw = path.read_bytes()
    for name, region in regions(path).items():
        # every bit of a short region; of a long one, bit k of the bytes n where n + k is a multiple of 8
        for byte in region:
            for bit in range(8):
                if len(region) > 100 and (byte + bit) % 8:
                    continue
                flipped = bytearray(raw)
                flipped[byte] ^= 1 << bit
                damaged.write_bytes(flipped)
                assert refused(damaged), f"bit {bit} of byte {byte} ({name}) was flipped unseen"


def test_damage_is_located(path: Path) -> None:
    raw = path.read_bytes()
    for name, message in (("index", "tensor 'index'"), ("metadata", "description"), ("length", "truncated or damaged")):
        flipped = bytearray(raw)
        region = regions(path)[name]
        flipped[region[len(region) // 2]] ^= 4
        path.write_bytes(flipped)
        with pytest.raises(StorageError, match=message):
            read(path)


def test_a_file_cut_at_any_length_is_refused(path: Path) -> None:
    raw = path.read_bytes()
    for length in {*range(64), *range(64, len(raw), 7), *range(len(raw) - 64, len(raw))}:
        path.write_bytes(raw[:length])
        with pytest.raises(StorageError, match=r"truncated|empty"):
            read(path)


@pytest.mark.parametrize("more", [b"\0", b"more", bytes(4096)])
def test_bytes_after_the_end_are_refused(path: Path, more: bytes) -> None:
    path.write_bytes(path.read_bytes() + more)
    with pytest.raises(StorageError, match="goes on after its end"):
        read(path)


# -- strangers ---------------------------------------------------------------------------------------------------------


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.path}",)


def strangers(evil: Path) -> dict[str, tuple[bytes, str]]:
    saved, zipped = io.BytesIO(), io.BytesIO()
    torch.save({"x": torch.ones(2)}, saved)
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("data.pkl", pickle.dumps(Evil(evil)))
    found = {f"pickle {p}": (pickle.dumps(Evil(evil), protocol=p), "pickle|not ours") for p in range(6)}
    return found | {
        "torch.save": (saved.getvalue(), "zip archive"),
        "zip": (zipped.getvalue(), "zip archive"),
        "empty": (b"", "is empty"),
        "one byte": (b"{", "truncated or not ours"),
        "text": (b"x,y\n1,2\n" * 9, "truncated or not ours"),
        "json": (b'{"lapwing": 1}' * 9, "truncated or not ours"),
        "zeros": (bytes(99), "truncated or not ours"),
        "ones": (b"\xff" * 99, "truncated or not ours"),
        "a header of 8 EiB": ((2**63 - 1).to_bytes(8, "little") + b"{" + bytes(99), "truncated or damaged"),
        "a header of 90 MB": ((90_000_000).to_bytes(8, "little") + b"{" + bytes(99), "truncated or damaged"),
    }


@pytest.mark.parametrize("name", [*strangers(Path("x"))])
def test_a_stranger_is_refused_and_runs_nothing(tmp_path: Path, name: str) -> None:
    evil = tmp_path / "evil"
    content, message = strangers(evil)[name]
    path = tmp_path / "model.lapwing"
    path.write_bytes(content)
    with pytest.raises(StorageError, match=message) as found:
        read(path)
    assert str(found.value).count("expected") == 1  # one reason, and not that of a file that may not be read
    assert not evil.exists()


def test_a_plain_safetensors_file_is_not_ours(tmp_path: Path) -> None:
    for metadata in (None, {"lapwing": "hello"}, {"format": "pt"}):
        save_file({"x": torch.ones(2)}, tmp_path / "a", metadata=metadata)
        with pytest.raises(StorageError, match="no description of lapwing"):
            read(tmp_path / "a")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for each in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(StorageError, match=rf"^{re.escape(str(each))} is no file.*Check the path\.$"):
            read(each)
    if os.name == "posix":
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(StorageError, match="is no file"):
            read(tmp_path / "pipe")


def test_a_later_version_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "VERSION", 2)
    write(path, tensors(), METADATA)
    monkeypatch.undo()
    with pytest.raises(StorageError, match=r"format version 2; expected at most 1.*upgrade"):
        read(path)


# -- forgeries: every hash is right, as somebody who means harm would have it ------------------------------------------


def forged(path: Path, header: dict[str, object], data: bytes = bytes(8), **description: object) -> None:
    text = {"digest": "0" * 64, "format": "lapwing", "version": 1, "library": "1", "tensors": {}}
    inside = json.dumps(text | {"metadata": {}} | description, separators=(",", ":"))
    raw = json.dumps({"__metadata__": {"lapwing": inside}} | header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    raw = len(raw).to_bytes(8, "little") + raw
    path.write_bytes(raw.replace(b"0" * 64, hashlib.sha256(raw).hexdigest().encode(), 1) + data)


def entry(shape: list[int], end: int = 8, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}


ZEROS = hashlib.sha256(bytes(8)).hexdigest()


def test_a_forgery_that_is_right_is_read(tmp_path: Path) -> None:
    forged(tmp_path / "a", {"x": entry([2])}, tensors={"x": ZEROS})
    assert torch.equal(read(tmp_path / "a")[0]["x"], torch.zeros(2))


@pytest.mark.parametrize(
    ("header", "description"),
    [
        ({"x": entry([2**40])}, {"tensors": {"x": ZEROS}}),
        ({"x": entry([2**40], 4 * 2**40)}, {"tensors": {"x": ZEROS}}),
        ({"x": entry([2**62, 2**62])}, {"tensors": {"x": ZEROS}}),
        ({"x": entry([-2])}, {"tensors": {"x": ZEROS}}),
        ({"x": entry([2], dtype="PICKLE")}, {"tensors": {"x": ZEROS}}),
        ({"x": entry([2]), "y": entry([2])}, {"tensors": {"x": ZEROS, "y": ZEROS}}),
        ({"x": entry([2])}, {}),
        ({"x": entry([2])}, {"tensors": {"x": ZEROS, "y": ZEROS}}),
        ({"x": entry([2])}, {"tensors": {"x": None}}),
        ({"x": entry([2])}, {"tensors": ["x"]}),
        ({"x": entry([2])}, {"tensors": {"x": ZEROS}, "metadata": []}),
        ({"x": [1]}, {"tensors": {"x": ZEROS}}),
        ({"x": {"dtype": "F32"}}, {"tensors": {"x": ZEROS}}),
        ({"x": entry([2])}, {"tensors": {"x": ZEROS}, "version": "1"}),
        ({"x": entry([2])}, {"tensors": {"x": ZEROS}, "format": "other"}),
    ],
)
def test_a_forgery_is_refused_without_memory(
    tmp_path: Path, header: dict[str, object], description: dict[str, object]
) -> None:
    forged(tmp_path / "a", header, **description)
    with pytest.raises(StorageError):
        read(tmp_path / "a")


def test_a_description_without_bottom_is_refused(tmp_path: Path) -> None:
    deep = '{"a":' * 100_000
    forged(tmp_path / "a", {}, b"", metadata={})
    raw = (tmp_path / "a").read_bytes()
    text = raw[8:].replace(b'\\"metadata\\":{}', b'\\"metadata\\":' + deep.replace('"', '\\"').encode())
    (tmp_path / "a").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(StorageError, match="damaged"):
        read(tmp_path / "a")


# -- writing -----------------------------------------------------------------------------------------------------------


def test_a_failed_write_leaves_the_old_file_and_nothing_else(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match="JSON"):
        write(path, {}, {"x": object()})
    with pytest.raises(StorageError, match=r"layout torch\.sparse_coo"):
        write(path, {"x": torch.eye(2).to_sparse()}, {})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            with pytest.raises(StorageError, match=r"No space left.*as it was"):
                write(path, {}, {})
    assert same(read(path)[0], tensors())
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"^the folder .* does not exist; expected one.*Create it\.$"):
        write(tmp_path / "none" / "a", {}, {})
    with pytest.raises(StorageError, match=r"is a folder; expected the name of a file\.$"):
        write(tmp_path, {}, {})
    assert issubclass(StorageError, LapwingError)
    assert issubclass(StorageError, ValueError)


@pytest.mark.skipif(os.name != "posix", reason="modes and links as on Unix")
def test_modes_and_links_are_kept(path: Path) -> None:
    path.chmod(0o640)
    link = path.with_name("link")
    link.symlink_to(path)
    write(link, {}, {"new": 1})
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    assert read(path)[1] == {"new": 1}
    mask = os.umask(0o022)
    try:
        write(path.with_name("fresh"), {}, {})
    finally:
        os.umask(mask)
    assert path.with_name("fresh").stat().st_mode & 0o777 == 0o644


WRITERS = """
import os, sys, time, torch
from lapwing.serialize import write
torch.set_num_threads(1)
path, number, sync = sys.argv[1], 0, os.fsync
os.fsync = lambda file: (time.sleep(0.02), sync(file))  # as on a slow disk: most kills come in the middle of a write
for _ in sys.stdin:  # a new process for every line; imports take seconds, a fork does not
    writer = os.fork()
    while not writer:
        number += 1
        write(path, {name: torch.full((200_000,), float(number)) for name in "ab"}, {"number": number})
    print(writer, flush=True)
    os.waitpid(writer, 0)
    print("killed", flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes as on Unix")
def test_a_kill_in_the_middle_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "a.lapwing"
    write(path, {name: torch.zeros(200_000) for name in "ab"}, {"number": 0})
    partial, numbers = 0, []
    command = [sys.executable, "-c", WRITERS, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for round_ in range(30):  # at least four kills, and as many as it takes to hit the middle of a write
            process.stdin.write("next\n")
            writer = int(process.stdout.readline())
            time.sleep(0.05 + 0.0137 * (round_ % 7) + 0.03 * round_)  # on a busy machine the first write takes longer
            os.kill(writer, signal.SIGKILL)
            assert process.stdout.readline() == "killed\n"
            found, metadata = read(path)
            numbers.append(metadata["number"])
            assert all(torch.equal(value, torch.full((200_000,), float(numbers[-1]))) for value in found.values())
            partial += len(list(tmp_path.glob(f"*{files.PARTIAL}")))
            if partial and any(numbers) and round_ >= 3:
                break
        process.stdin.close()
    assert any(numbers), "the writer has written"
    assert partial, "no kill hit the middle of a write: the test shows nothing"


# -- others at work on the same file -----------------------------------------------------------------------------------


def test_a_file_that_is_replaced_while_it_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = files._parsed

    def replaced(*arguments):
        monkeypatch.setattr(files, "_parsed", parsed)
        write(path, {name: value[:0] for name, value in tensors().items() if value.ndim}, {"kind": "other"})
        return parsed(*arguments)

    monkeypatch.setattr(files, "_parsed", replaced)
    found, metadata = read(path)
    assert metadata == METADATA, "the file that was opened"
    assert same(found, tensors())
    assert read(path)[1] == {"kind": "other"}


def test_what_a_kill_has_left_is_removed_by_the_next_write_and_what_is_being_written_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a"
    left, other = tmp_path / f".a.12ab{files.PARTIAL}", tmp_path / f".a.b.12ab{files.PARTIAL}"
    left.write_bytes(b"half")
    other.write_bytes(b"of another file")
    with replacing(path) as busy:
        busy.write_text("one")
        write(path, {}, {"kind": "two"})  # as another process would
        assert busy.exists()
        assert not left.exists()
    assert path.read_text() == "one"
    assert sorted(each.name for each in tmp_path.iterdir()) == [other.name, "a"]


LEFT = """
import os, sys
from pathlib import Path
from lapwing.serialize import replacing
with replacing(Path(sys.argv[1])) as partial:
    print(partial, flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(os.name != "posix", reason="kill -9 is of Unix")
def test_the_file_of_a_process_is_left_while_it_lives_and_removed_when_it_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", LEFT, str(path)], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        partial = Path(process.stdout.readline().decode().strip())
        write(path, {}, {})
        assert partial.exists()
        process.kill()
    assert partial.exists()
    write(path, {}, {})
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_every_file_is_synced_before_it_takes_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions and reports, too, are written through `replacing`."""
    synced, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda found: (synced.append(os.fstat(found).st_ino), sync(found)))
    path = tmp_path / "a.csv"
    with replacing(path) as partial:
        partial.write_text("1,2")
        assert not synced
    assert synced == [path.stat().st_ino, tmp_path.stat().st_ino]


@pytest.mark.parametrize("length", [240, 300, 5000])
def test_a_name_that_is_too_long_is_found_before_the_work(tmp_path: Path, length: int) -> None:
    with pytest.raises(StorageError, match="too long for the file system; expected at most 233 bytes"):
        check_writable(tmp_path / ("x" * length))
    check_writable(tmp_path / ("x" * 233))
    write(tmp_path / ("x" * 233), {}, {})
    assert len(list(tmp_path.iterdir())) == 1


def leftovers(folder: Path) -> tuple[Path, Path]:
    """What a killed process has left of the file `a`: a minute before it counts as old, and a minute after."""
    young, old = (folder / f".a.{name}{files.PARTIAL}" for name in ("12ab", "34cd"))
    for path, age in ((young, files.OLD - 60), (old, files.OLD + 60)):
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age, time.time() - age))
    return young, old


def test_without_fcntl_old_leftovers_are_removed_and_young_ones_may_be_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "fcntl", None)
    young, old = leftovers(tmp_path)
    write(tmp_path / "a", tensors(), METADATA)
    assert young.exists()
    assert not old.exists()
    assert same(read(tmp_path / "a")[0], tensors())
    assert sorted(each.name for each in tmp_path.iterdir()) == [young.name, "a"]


def test_on_a_file_system_without_locks_age_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")

    def unlocked(found: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unlocked)
    young, old = leftovers(tmp_path)
    write(tmp_path / "a", tensors(), METADATA)
    assert young.exists()
    assert not old.exists()
    assert same(read(tmp_path / "a")[0], tensors())


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are counted by /proc")
@pytest.mark.parametrize("locks", [True, False])
def test_no_file_stays_open(tmp_path: Path, locks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not locks:
        monkeypatch.setattr(files, "fcntl", None)
    before = len(os.listdir("/proc/self/fd"))
    leftovers(tmp_path)
    write(tmp_path / "a", {}, {})
    read(tmp_path / "a")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("shape", "fits"), [([1] * 63 + [2], True), ([1] * 64 + [2], False), ([2**62 + 1, 0], False)])
def test_shapes_that_torch_cannot_have_are_refused(tmp_path: Path, shape: list[int], fits: bool) -> None:
    data = bytes(0 if 0 in shape else 8)
    forged(tmp_path / "a", {"x": entry(shape, len(data))}, data, tensors={"x": hashlib.sha256(data).hexdigest()})
    if fits:
        assert list(read(tmp_path / "a")[0]["x"].shape) == shape
    else:
        with pytest.raises(StorageError, match="description that does not fit its tensors"):
            read(tmp_path / "a")
