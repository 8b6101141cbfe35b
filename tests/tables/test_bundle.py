"""Bundles in files: what is read is what was written, and what is not a bundle is refused. Chunks change nothing."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console

from lapwing.cli.inspecting import inspected, lines
from lapwing.errors import DataError, LapwingError, StorageError
from lapwing.serialize.files import read, write
from lapwing.tables.bundle import Bundle
from lapwing.tables.fit import fit_table
from lapwing.tables.training import Spec
from lapwing.tables.writing import write_predictions


def table(rows: int = 150) -> pd.DataFrame:
    random = np.random.default_rng(0)
    frame = pd.DataFrame({"a": random.normal(size=rows), "c": random.choice(["x", "ü"], rows)})
    frame["y"] = frame["a"] * 2 + (frame["c"] == "x")
    frame["k"] = np.where(frame["a"] + random.normal(size=rows) > 0, "up", "down")
    return frame


@pytest.fixture(scope="module", params=["full", "varying", "kron", "classes"])
def bundle(request: pytest.FixtureRequest, quick: Callable[[], AbstractContextManager[None]]) -> Bundle:
    width = 60 if request.param == "kron" else 5
    target, other = ("k", "y") if request.param == "classes" else ("y", "k")
    spec = Spec(1, 1, width=width, depth=2 if width == 60 else 1)
    noise = "varying" if request.param == "varying" else "constant"
    with quick():
        fitted = fit_table(table().drop(columns=other), target, epochs=3, spec=spec, noise=noise)
    assert fitted.spec.varying == (request.param == "varying")
    assert type(fitted.la).__name__ == ("KronLaplace" if request.param == "kron" else "FullLaplace")
    return fitted


def test_a_bundle_comes_back_bit_for_bit(bundle: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "m.lapwing"
    bundle.save(path)
    again = Bundle.load(path)
    pd.testing.assert_frame_equal(again.predict(table()), bundle.predict(table()), check_exact=True)
    assert again.summary == bundle.summary
    assert again.notes == bundle.notes
    assert again.ood == bundle.ood
    assert again.target == bundle.target
    assert again.spec == bundle.spec
    assert torch.equal(again.conformal.scores, bundle.conformal.scores)
    assert [p.name for p in tmp_path.iterdir()] == ["m.lapwing"]
    state, kept = again.la.state_dict(), bundle.la.state_dict()
    assert state.keys() == kept.keys()
    again.save(tmp_path / "again.lapwing")
    assert (tmp_path / "again.lapwing").read_bytes() == path.read_bytes()


def test_many_classes_come_back_with_their_sampled_curvature(tmp_path: Path) -> None:
    """Beyond 20 classes Kronecker factors are sampled, and what is built to hold them must be of the same kind."""
    random = np.random.default_rng(0)
    frame = pd.DataFrame({"a": random.normal(size=120), "k": [f"class {i % 24}" for i in range(120)]})
    fitted = fit_table(frame, "k", epochs=1, spec=Spec(1, 1, width=60, depth=2))
    assert (fitted.la.structure, fitted.la.recipe.source) == ("kron", "mc")
    fitted.save(tmp_path / "m")
    again = Bundle.load(tmp_path / "m")
    assert again.la.recipe == fitted.la.recipe
    before, after = fitted.la.state_dict(), again.la.state_dict()
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(after[name], value) if isinstance(value, torch.Tensor) else after[name] == value, name
    # products of several threads depend on where in memory a tensor begins, in the last bits
    pd.testing.assert_frame_equal(again.predict(frame), fitted.predict(frame), rtol=1e-12)


def test_predictions_do_not_depend_on_chunks(bundle: Bundle, tmp_path: Path) -> None:
    frame = table().drop(columns=["y", "k"])
    whole = bundle.predict(frame)
    parts = bundle.predict(frame, chunk=17)
    pd.testing.assert_frame_equal(parts, whole, rtol=1e-4)
    frame.to_csv(tmp_path / "new.csv", index=False)
    frame.to_parquet(tmp_path / "new.parquet")
    for name in ("new.csv", "new.parquet"):
        pd.testing.assert_frame_equal(bundle.predict(tmp_path / name), whole, rtol=1e-5)
    written = write_predictions(bundle, tmp_path / "new.csv", tmp_path / "out.csv", chunk=40)
    assert (written.rows, written.notes) == (len(frame), [])
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "out.csv"), whole, rtol=1e-4, check_dtype=False)
    assert not list(tmp_path.glob("*.partial"))


def test_the_index_of_a_frame_is_kept(bundle: Bundle) -> None:
    frame = table().set_index(pd.Index([f"row {i}" for i in range(150)]))
    assert bundle.predict(frame, chunk=60).index.equals(frame.index)


def test_new_levels_and_extra_columns_are_noted(bundle: Bundle) -> None:
    frame = table(10).assign(c=["x"] * 8 + ["z", None], more=1, further=2)
    notes = bundle.predict(frame, chunk=4).attrs["notes"]
    assert any("1 values of 'c' are new (such as 'z')" in note for note in notes)
    assert any("'more', 'further'" in note for note in notes)


def test_missing_columns_are_named(bundle: Bundle) -> None:
    with pytest.raises(DataError, match=r"lacks 1 of the 2 columns.*'a'"):
        bundle.predict(table().drop(columns="a"))
    with pytest.raises(DataError, match="no rows"):
        bundle.predict(table().iloc[:0])


def test_a_failed_prediction_leaves_no_file(bundle: Bundle, tmp_path: Path) -> None:
    old = tmp_path / "out.csv"
    old.write_text("old")
    with pytest.raises(DataError):
        write_predictions(bundle, table().iloc[:0], old)
    assert old.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out.csv"]


def test_the_target_may_be_missing_in_predict_but_not_in_evaluate(bundle: Bundle) -> None:
    bare = table().drop(columns=bundle.target.name)
    assert len(bundle.predict(bare)) == 150
    with pytest.raises(DataError, match="has no column"):
        bundle.evaluate(bare)
    with pytest.raises(DataError, match="no row has a known value"):
        bundle.evaluate(bare.assign(**{bundle.target.name: None}))


@pytest.mark.parametrize("level", [0.5, 0.8])
def test_levels_name_their_columns(bundle: Bundle, level: float) -> None:
    found = bundle.predict(table(), level=level)
    if bundle.task == "regression":
        half = (found[f"upper_{100 * level:g}"] - found[f"lower_{100 * level:g}"]) / 2
        z = {0.5: 0.6744897501960817, 0.8: 1.2815515655446004}[level]
        if bundle.spec.varying:  # heavier tails: a narrower middle for the same deviation
            assert (half < z * found["sd"]).all()
            assert (half > 0.7 * z * found["sd"]).all()
        else:
            np.testing.assert_allclose(half, z * found["sd"], rtol=1e-9)
    else:
        narrow, wide = (bundle.predict(table(), level=at)["prediction_set"].str.len() for at in (level, 0.9))
        assert (narrow <= wide).all()


# -- files that are not what they should be --------------------------------------------------------------------------


def test_something_else_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "m.lapwing"
    write(path, {"x": torch.ones(2)}, {"kind": "posterior"})
    with pytest.raises(StorageError, match=r"lapwing\.load"):
        Bundle.load(path)
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(StorageError, match="pickle"):
        Bundle.load(path)
    with pytest.raises(StorageError, match="no file"):
        Bundle.load(tmp_path / "nothing")


def test_what_does_not_fit_together_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "m.lapwing"
    bundle.save(path)
    tensors, stored = read(path)
    for change in (
        {"kind_version": 99},
        {"spec": {**stored["spec"], "width": stored["spec"]["width"] + 1}},
        {"spec": {"inputs": 1}},
        {"laplace": {**stored["laplace"], "cls_name": "os.system"}},
        {"encoder": {}},
        {"summary": None},
        {"ood": {"threshold": 1.0}},
        {"target": {**stored["target"], "further": 1}},
    ):
        write(path, tensors, {**stored, **change})
        with pytest.raises(StorageError, match=r"fit again|Fit again"):
            Bundle.load(path)
    for name in ("conformal", next(name for name in tensors if name.startswith("model."))):
        write(path, {key: value for key, value in tensors.items() if key != name}, stored)
        with pytest.raises(StorageError, match="Fit again"):
            Bundle.load(path)


def test_every_flipped_byte_is_noticed(bundle: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "m.lapwing"
    bundle.save(path)
    data = path.read_bytes()
    for place in np.linspace(0, len(data) - 1, 40).astype(int):
        broken = bytearray(data)
        broken[place] ^= 1
        path.write_bytes(bytes(broken))
        with pytest.raises(StorageError):
            Bundle.load(path)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(StorageError, match="truncated"):
        Bundle.load(path)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a description, the whole first."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, each in inside:
        yield from places(each, (*path, key))


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """The description with something else in one place; `...` takes it away."""
    if not path:
        return new
    out = dict(value) if isinstance(value, dict) else list(value)
    if new is ... and len(path) == 1:
        del out[path[0]]
    else:
        out[path[0]] = put(value[path[0]], path[1:], new)
    return out


STRANGE = (..., None, True, -1, 10**30, 1.5, float("nan"), "", "x", [], [[]], {}, {"a": [1]}, [None], "1e999")
OLDER = Path(__file__).parent / "stored" / "table.lapwing"


def test_an_older_bundle_is_read() -> None:
    found = Bundle.load(OLDER).predict(table(3))
    np.testing.assert_allclose(
        found["p_down"], [0.3526148836305425, 0.41389206798048744, 0.2662212358745771], rtol=1e-9
    )


def test_the_evidence_is_given_with_the_temperature_it_is_of() -> None:
    found = inspected(OLDER)
    assert found["temperature"] == float(Bundle.load(OLDER).la.temperature)
    for temperature, said in ((0.001, "at temperature 0.001"), (1.0, None)):
        shown = io.StringIO()
        Console(file=shown, width=200).print(*lines(found | {"temperature": temperature}))
        assert ("temperature" in shown.getvalue()) == (said is not None)
        assert said is None or said in shown.getvalue()


def test_a_table_that_cannot_be_read_is_not_called_one_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, out = tmp_path / "data.csv", tmp_path / "predictions.csv"
    table(3).to_csv(data, index=False)
    bundle = Bundle.load(OLDER)

    def refuse(path: Path, *_: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refuse)
        with pytest.raises(PermissionError, match=r"data\.csv"):
            write_predictions(bundle, data, out)
    assert [path.name for path in tmp_path.iterdir()] == ["data.csv"]


def test_whatever_a_description_holds_is_of_use_or_refused_with_our_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, stored = read(OLDER)
    refused, rows = 0, table(3)
    for number, path in enumerate(list(places(stored))[1:]):
        for new in (STRANGE[number % 15], STRANGE[(number + 5) % 15]):
            changed = put(stored, path, new)
            monkeypatch.setattr("lapwing.tables.bundle.read", lambda _, changed=changed: (dict(tensors), changed))
            try:
                found = Bundle.load(OLDER)
            except StorageError:
                refused += 1
                continue
            with suppress(LapwingError):
                found.predict(rows)
            assert lines(inspected(OLDER))
    assert refused > 100


@pytest.mark.parametrize(
    "change",
    [{"width": 10**9}, {"depth": 10**9}, {"inputs": 10**9}, {"outputs": 10**9}, {"kind": "resnet", "depth": 10**8}],
)
def test_a_network_larger_than_its_tensors_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    tensors, stored = read(OLDER)
    changed = {**stored, "spec": {**stored["spec"], **change}}
    monkeypatch.setattr("lapwing.tables.bundle.read", lambda _: (tensors, changed))
    start = perf_counter()
    with pytest.raises(StorageError, match="Fit again"):
        Bundle.load(OLDER)
    assert perf_counter() - start < 5


def test_thousands_of_levels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, stored = read(OLDER)
    columns = stored["encoder"]["columns"]
    wide = [{**c, "levels": [str(i) for i in range(15_000)]} if c["kind"] == "category" else c for c in columns]
    changed = {**stored, "encoder": {"columns": wide}, "spec": {**stored["spec"], "inputs": 15_002}}
    tensors["model.0.weight"] = torch.zeros(3, 15_002, dtype=torch.float64)
    monkeypatch.setattr("lapwing.tables.bundle.read", lambda _: (tensors, changed))
    with pytest.raises(StorageError, match="at most 2000"):
        Bundle.load(OLDER)
