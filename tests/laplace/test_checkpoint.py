"""Fits that are killed and started again: the same curvature bit for bit, or a refusal that says what differs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import chosen
from lapwing import Laplace
from lapwing.errors import CurvatureError, DataError, OptionError, StorageError
from lapwing.estimate import leading_eigenpairs
from lapwing.laplace import BaseLaplace
from lapwing.laplace.checkpoint import digest
from lapwing.laplace.factory import CLASSES
from lapwing.likelihoods import from_function
from lapwing.serialize import pack, read, replacing
from lapwing.serialize.files import PARTIAL
from unchanged import unchanged

D, C, SIZE, COUNT = 4, 3, 3, 11
Batch = tuple[Tensor, Tensor]


def mlp(seed: int = 0, dtype: torch.dtype = torch.float32, width: int = 5) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(D, width), nn.Tanh(), nn.BatchNorm1d(width), nn.Linear(width, C)).to(dtype)


def batches(task: str = "classification", dtype: torch.dtype = torch.float32, count: int = COUNT) -> list[Batch]:
    g = torch.Generator().manual_seed(2)
    x = [torch.randn(SIZE, D, generator=g).to(dtype) for _ in range(count)]
    if task == "classification":
        return [(each, torch.randint(C, (SIZE,), generator=g)) for each in x]
    return [(each, torch.randn(SIZE, C, generator=g).to(dtype)) for each in x]


def made(
    subset: str = "all", structure: str = "kron", task: str = "classification", model: Any = None, **options: Any
) -> BaseLaplace:
    if subset == "subnetwork":
        options["subnetwork_indices"] = chosen.positions(mlp(), structure)
    return Laplace(mlp() if model is None else model, task, subset, structure, **options)


class Interrupted:
    """A loader that breaks off before batch `at`."""

    def __init__(self, data: list[Batch], at: int) -> None:
        self.data, self.at = data, at

    def __iter__(self) -> Iterator[Batch]:
        for number, batch in enumerate(self.data):
            if number == self.at:
                raise KeyboardInterrupt
            yield batch


def generator(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def facts(la: BaseLaplace) -> dict[str, Any]:
    description, tensors = pack((la.fitted.curvature, la.fitted.fit, la.fitted.mean, la.n_data))
    return {"": description, "shape": la.fitted.output_shape} | tensors


def assert_same(a: BaseLaplace, b: BaseLaplace) -> None:
    ours, theirs = facts(a), facts(b)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]) if isinstance(value, Tensor) else value == theirs[name], name


adding = pytest.mark.parametrize(("subset", "structure"), [key for key in CLASSES if key[1] != "matrix_free"])


@adding
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_segments_add_up_to_the_fit_in_one_go(tmp_path: Path, subset: str, structure: str, task: str) -> None:
    model, data = mlp(dtype=torch.float64), batches(task, torch.float64)
    one, cut = (made(subset, structure, task, model) for _ in range(2))
    one.fit(data)
    with unchanged(model):
        cut.fit(data, checkpoint=tmp_path / "c", checkpoint_every=4)
    assert cut.n_data == one.n_data == SIZE * COUNT
    torch.testing.assert_close(cut.fitted.curvature.dense(), one.fitted.curvature.dense(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(cut.log_marginal_likelihood(), one.log_marginal_likelihood(), rtol=1e-9, atol=0)
    assert not list(tmp_path.iterdir()), "the file is removed"


@adding
def test_an_interrupted_fit_goes_on_bit_for_bit(tmp_path: Path, subset: str, structure: str) -> None:
    data, path = batches(), tmp_path / "c"
    whole = made(subset, structure)
    whole.fit(data, checkpoint=path, checkpoint_every=3)
    for at in (2, 4, 9):
        la = made(subset, structure)
        with unchanged(la.model), pytest.raises(KeyboardInterrupt):
            la.fit(Interrupted(data, at), checkpoint=path, checkpoint_every=3)
        assert path.exists() == (at >= 3)
        assert la.n_data == 0
        again = made(subset, structure)  # as in another process
        again.fit(data, checkpoint=str(path), checkpoint_every=3)
        assert_same(again, whole)
        assert not path.exists()


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_a_monte_carlo_fit_goes_on_with_the_same_draws(tmp_path: Path, structure: str) -> None:
    data, path = batches(), tmp_path / "c"
    options = {"estimator": "mc", "backend_kwargs": {"mc_samples": 2}}
    whole, other = made("all", structure, **options), made("all", structure, **options)
    end = generator()
    whole.fit(data, checkpoint=path, checkpoint_every=2, generator=end)
    other.fit(data, checkpoint=path, checkpoint_every=2, generator=generator(6))
    for at in (3, 8):
        la, drawn = made("all", structure, **options), generator()
        with pytest.raises(KeyboardInterrupt):
            la.fit(Interrupted(data, at), checkpoint=path, checkpoint_every=2, generator=drawn)
        # the same object, which has moved on since, and a fresh one: both get the state that was kept
        for each in (drawn,) if at == 3 else (generator(),):
            again = made("all", structure, **options)
            again.fit(data, checkpoint=path, checkpoint_every=2, generator=each)
            assert_same(again, whole)
            assert torch.equal(each.get_state(), end.get_state())
    with pytest.raises(AssertionError):
        assert_same(other, whole)  # draws matter


def test_a_fit_that_had_only_to_end(tmp_path: Path) -> None:
    """Killed after the last write: nothing is left to compute."""
    data, path = batches(count=6), tmp_path / "c"
    whole, la = made(), made()
    whole.fit(data, checkpoint=path, checkpoint_every=3)
    with pytest.raises(KeyboardInterrupt):
        la.fit(Interrupted([*data, data[0]], 6), checkpoint=path, checkpoint_every=3)
    assert read(path)[1]["batches"] == 6
    la.fit(data, checkpoint=path, checkpoint_every=3)
    assert_same(la, whole)


def test_loaders_of_other_kinds(tmp_path: Path) -> None:
    data, path = batches(), tmp_path / "c"
    x, y = (torch.cat(each) for each in zip(*data, strict=True))
    whole = made()
    whole.fit(data, checkpoint=path, checkpoint_every=4)
    for loader in (
        iter(data),
        DataLoader(TensorDataset(x, y), batch_size=SIZE),
        [[a, b] for a, b in data],
    ):
        la = made()
        la.fit(loader, checkpoint=path, checkpoint_every=4, progress_bar=False)
        assert_same(la, whole)

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, a: dict[str, Tensor]) -> Tensor:
            return self.net(a["x"])

    mappings = [{"x": a, "labels": b} for a, b in data]
    la = made(model=Named())
    with pytest.raises(KeyboardInterrupt):
        la.fit(Interrupted(mappings, 5), checkpoint=path, checkpoint_every=4)  # pyright: ignore[reportArgumentType]
    la.fit(mappings, checkpoint=path, checkpoint_every=4)
    assert la.n_data == SIZE * COUNT


def test_a_seeded_shuffle_is_an_order_that_comes_again(tmp_path: Path) -> None:
    x, y = (torch.cat(each) for each in zip(*batches(), strict=True))

    def loader(seed: int) -> DataLoader[Any]:
        return DataLoader(TensorDataset(x, y), batch_size=SIZE, shuffle=True, generator=generator(seed))

    path, whole, la = tmp_path / "c", made(), made()
    whole.fit(loader(0), checkpoint=path, checkpoint_every=4)
    with pytest.raises(KeyboardInterrupt):
        la.fit(Interrupted(list(loader(0)), 7), checkpoint=path, checkpoint_every=4)
    with pytest.raises(StorageError, match=r"first 4 batches are not those.*shuffle=False"):
        la.fit(loader(1), checkpoint=path, checkpoint_every=4)
    la.fit(loader(0), checkpoint=path, checkpoint_every=4)
    assert_same(la, whole)


def test_data_are_added_to_those_seen_before(tmp_path: Path) -> None:
    data, path = batches(), tmp_path / "c"
    one, two = made("all", "full"), made("all", "full")
    for la in (one, two):
        la.fit(data[:4])
    one.fit(data[4:], override=False)
    with pytest.raises(KeyboardInterrupt):
        two.fit(Interrupted(data[4:], 5), override=False, checkpoint=path, checkpoint_every=2)
    assert two.n_data == 4 * SIZE, "as it was"
    two.fit(data[4:], override=False, checkpoint=path, checkpoint_every=2)
    assert two.n_data == SIZE * COUNT
    torch.testing.assert_close(two.H, one.H, rtol=1e-5, atol=1e-6)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint after nine of eleven batches."""
    with pytest.raises(KeyboardInterrupt):
        made().fit(Interrupted(batches(), 10), checkpoint=tmp_path / "c", checkpoint_every=3)
    return tmp_path / "c"


def trained() -> nn.Module:
    model = mlp()
    with torch.no_grad():
        model[3].bias[1] += 1e-4
    return model


def buffered() -> nn.Module:
    model = mlp()
    model[2].running_mean += 1e-4
    return model


def exchanged() -> list[Batch]:
    data = batches()
    return [data[1], data[0], *data[2:]]


def wide() -> list[Batch]:
    return batches(dtype=torch.float64)


def touched() -> list[Batch]:
    data = batches()
    data[8][0][0, 0] += 1e-4
    return data


@pytest.mark.parametrize(
    ("make", "data", "every", "message"),
    [
        (lambda: made(model=trained()), batches, 3, "weights or buffers have other numbers"),
        (lambda: made(model=buffered()), batches, 3, "weights or buffers have other numbers"),
        (lambda: made(model=mlp(width=6)), batches, 3, r"network: '0.weight' was \[5, 4\] and is \[6, 4\]"),
        (
            lambda: made(model=mlp(dtype=torch.float64)),
            lambda: batches(dtype=torch.float64),
            3,
            "dtype was torch.float32",
        ),
        (lambda: made("all", "diag"), batches, 3, "class was KronLaplace and is DiagLaplace"),
        (lambda: made("last_layer", "kron"), batches, 3, "class was KronLaplace and is KronLLLaplace"),
        (lambda: made(estimator="empirical"), batches, 3, "options: 'estimator' was exact and is empirical"),
        (lambda: made(bias="separate"), batches, 3, "options: 'joint_bias' was not there and is False"),
        (lambda: made(task="regression"), lambda: batches("regression"), 3, "likelihood: 'task' was classification"),
        (made, batches, 4, "checkpoint_every was 3 and is 4"),
        (made, exchanged, 3, "first 9 batches are not those"),
        (made, touched, 3, "first 9 batches are not those"),
        (made, lambda: batches(count=8), 3, "after 9 batches, and the loader has 8"),
    ],
)
def test_another_fit_is_refused(
    path: Path, make: Callable[[], BaseLaplace], data: Callable[[], list[Batch]], every: int, message: str
) -> None:
    before = path.read_bytes()
    la = make()
    with unchanged(la.model), pytest.raises(StorageError, match=message) as error:
        la.fit(data(), checkpoint=path, checkpoint_every=every)
    assert "delete the file" in str(error.value)
    assert path.read_bytes() == before
    assert la.n_data == 0


class Small(nn.Module):
    """What it computes is not in its weights alone."""

    def __init__(self, activation: nn.Module, scale: float = 1.0, shift: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.activation, self.scale = nn.Linear(D, C), activation, scale
        self.register_buffer("shift", torch.full((C,), shift), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.layer(x)) * self.scale + self.shift


class Twice(Small):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def _renamed() -> Small:
    """The same names and other code, as after an edit of a script."""
    kind = type("Small", (Small,), {"forward": Twice.forward, "__qualname__": "Small", "__module__": Small.__module__})
    return kind(nn.Tanh())


def test_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with pytest.raises(KeyboardInterrupt):
        made(structure="diag", model=Small(nn.Tanh())).fit(
            Interrupted(batches(), 4), checkpoint=path, checkpoint_every=2
        )
    for model, message in (
        (Small(nn.ReLU()), "class 'ReLU' at 'activation', and had 'Tanh'"),
        (Small(nn.Tanh(), scale=2.0), "scale = 2.0, and had 1.0"),
        (Small(nn.Tanh(), shift=1.0), "weights or buffers have other numbers"),
        (_renamed(), "other code in the class 'Small'"),
    ):
        with unchanged(model), pytest.raises(StorageError, match=message):
            made(structure="diag", model=model).fit(batches(), checkpoint=path, checkpoint_every=2)
    made(structure="diag", model=Small(nn.Tanh())).fit(batches(), checkpoint=path, checkpoint_every=2)


def _squares(weight: float) -> Any:
    return from_function(lambda f, y: weight * (f - y).square().sum())


def _fourths(weight: float) -> Any:
    return from_function(lambda f, y: weight * (f - y).pow(4).sum())


def test_another_likelihood_of_ones_own_is_refused(tmp_path: Path) -> None:
    path, data = tmp_path / "c", batches("regression")
    with pytest.raises(KeyboardInterrupt):
        made(structure="diag", task=_squares(0.5)).fit(Interrupted(data, 4), checkpoint=path, checkpoint_every=2)
    for other in (_squares(0.6), _fourths(0.5)):
        with pytest.raises(StorageError, match="likelihood has other code, or closes over other values"):
            made(structure="diag", task=other).fit(data, checkpoint=path, checkpoint_every=2)
    made(structure="diag", task=_squares(0.5)).fit(data, checkpoint=path, checkpoint_every=2)


def test_attributes_that_another_torch_has_do_not_matter(tmp_path: Path) -> None:
    path, model = tmp_path / "c", mlp()
    with pytest.raises(KeyboardInterrupt):
        made(structure="diag", model=model).fit(Interrupted(batches(), 4), checkpoint=path, checkpoint_every=2)
    model[0].later = True
    la, whole = made(structure="diag", model=model), made(structure="diag")
    la.fit(batches(), checkpoint=path, checkpoint_every=2)
    whole.fit(batches())
    torch.testing.assert_close(la.H, whole.H, rtol=1e-5, atol=1e-7)


def test_an_older_checkpoint_is_resumed(tmp_path: Path) -> None:
    """Written before checkpoints held the structure of the model. Its weights: a seed gives others elsewhere."""
    path, stored = tmp_path / "c", Path(__file__).parent / "stored"
    path.write_bytes((stored / "checkpoint.lapwing").read_bytes())
    with pytest.raises(StorageError, match="weights or buffers have other numbers"):
        made(structure="diag", model=mlp(1)).fit(batches(), checkpoint=path, checkpoint_every=3)
    model = mlp()
    model.load_state_dict(
        {key: torch.tensor(value) for key, value in np.load(stored / "checkpoint-weights.npz").items()}
    )
    la, whole = made(structure="diag", model=model), made(structure="diag", model=model)
    la.fit(batches(), checkpoint=path, checkpoint_every=3)
    whole.fit(batches(), checkpoint=path, checkpoint_every=3)
    torch.testing.assert_close(la.H, whole.H, rtol=1e-5, atol=1e-7)


def test_another_seed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with pytest.raises(KeyboardInterrupt):
        made(estimator="mc").fit(Interrupted(batches(), 4), checkpoint=path, checkpoint_every=2, generator=generator(5))
    with pytest.raises(StorageError, match="generator's seed was 5 and is 6"):
        made(estimator="mc").fit(batches(), checkpoint=path, checkpoint_every=2, generator=generator(6))


def test_a_damaged_checkpoint_is_refused(path: Path) -> None:
    raw = path.read_bytes()
    cuts = [raw[:length] for length in (0, 5, 100, len(raw) // 2, len(raw) - 1)]
    flips = [raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :] for at in (0, 60, len(raw) // 2, len(raw) - 1)]
    for content in [*cuts, *flips, b"\x80\x04N." * 9]:
        path.write_bytes(content)
        with pytest.raises(StorageError, match=r"checkpoint cannot be used.*Delete it to begin anew"):
            made().fit(batches(), checkpoint=path, checkpoint_every=3)
        assert path.read_bytes() == content
    path.unlink()
    made().fit(batches(), checkpoint=path, checkpoint_every=3)


def test_a_file_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    la = made()
    la.fit(batches())
    la.save(tmp_path / "a")
    before = (tmp_path / "a").read_bytes()
    with pytest.raises(StorageError, match=r"holds 'posterior'.*another path"):
        la.fit(batches(), checkpoint=tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == before


class Counted:
    """A loader that breaks off after so many batches of all passes together."""

    def __init__(self, data: list[Batch], left: int) -> None:
        self.data, self.left = data, left

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.data:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            yield batch


@pytest.mark.long
@pytest.mark.parametrize(("structure", "stops"), [("ekfac", (13, 18)), ("lowrank", (2, 5, 46))])
def test_a_fit_of_several_passes_goes_on_bit_for_bit(
    tmp_path: Path, structure: str, stops: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leading_eigenpairs, "GRAM_ROWS", 40)
    options: dict[str, Any] = {"rank": 5} if structure == "lowrank" else {}
    options["backend_kwargs"] = {"mc_samples": 3}  # 99 rows
    data, path = batches(dtype=torch.float64), tmp_path / "c"
    model = mlp(dtype=torch.float64)
    plain, whole = (made("all", structure, model=model, estimator="mc", **options) for _ in range(2))
    plain.fit(data, generator=generator())
    whole.fit(data, generator=generator(), checkpoint=path, checkpoint_every=3)
    if structure == "lowrank":  # ekfac has its vectors from the other pass, and other draws
        torch.testing.assert_close(whole.H.dense(), plain.H.dense(), rtol=1e-9, atol=1e-12)
    for stop in stops:
        la = made("all", structure, model=model, estimator="mc", **options)
        with pytest.raises(KeyboardInterrupt):
            la.fit(Counted(data, stop), generator=generator(), checkpoint=path, checkpoint_every=3)
        la.fit(data, generator=generator(), checkpoint=path, checkpoint_every=3)
        assert_same(la, whole)
        assert not path.exists()


def test_what_cannot_be_checkpointed_says_so(tmp_path: Path) -> None:
    def never() -> Iterator[Batch]:
        raise AssertionError("refused before the data are asked for")
        yield

    path = tmp_path / "c"
    for source in ("mc", "projection"):
        with pytest.raises(OptionError, match="has no generator"):
            made(estimator=source).fit(never(), checkpoint=path)
    for every in (0, -1, True):
        with pytest.raises(OptionError, match="checkpoint_every"):
            made().fit(never(), checkpoint=path, checkpoint_every=every)
    with pytest.raises(StorageError, match="does not exist"):
        made().fit(never(), checkpoint=tmp_path / "none" / "c")
    with pytest.raises(StorageError, match="is a folder"):
        made().fit(never(), checkpoint=tmp_path)
    with pytest.raises(StorageError, match="too long"):
        made().fit(never(), checkpoint=tmp_path / ("x" * 250))
    assert not list(tmp_path.iterdir())


def test_the_end_of_a_fit_leaves_the_file_that_another_is_writing(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with replacing(path) as partial:
        made("all", "diag").fit(batches(), checkpoint=path, checkpoint_every=4)
        assert partial.exists()


def test_bad_data(tmp_path: Path) -> None:
    path, data = tmp_path / "c", batches()
    with pytest.raises(DataError, match="no batch"):
        made().fit([], checkpoint=path)
    data[5][0][0, 0] = float("nan")
    with pytest.raises(DataError, match="from batch 4 on, counted from there: batch 1: "):
        made().fit(data, checkpoint=path, checkpoint_every=4)
    assert read(path)[1]["batches"] == 4, "what was good is kept"
    with pytest.raises(DataError, match="a batch holds a object"):
        digest([object()])


def test_the_limit_on_rows_is_one_of_the_whole(tmp_path: Path) -> None:
    la = made("all", "gp", limit=20)
    with pytest.raises(CurvatureError, match=r"the data so far make \d+ rows; expected at most 20"):
        la.fit(batches(), checkpoint=tmp_path / "c", checkpoint_every=2)


def test_hashes_tell_apart() -> None:
    x = torch.arange(6.0)
    different = [
        x, x.reshape(2, 3), x.double(), x.int(), x + 1, x.flip(0), [x], (x,), {"a": x}, {"b": x}, [x, x], [[x], x],
        [x, [x]], None, 0, 0.0, False, "", "0", b"0", "None", [], (), {},
    ]  # fmt: skip
    assert len({digest(each) for each in different}) == len(different)
    assert digest(x) == digest(x.clone()) == digest(nn.Parameter(x.clone())) == digest(torch.stack([x, x]).mT[:, 0])


# -- kill -9 -----------------------------------------------------------------------------------------------------------

FIT = """
import sys, time
import torch
torch.set_num_threads(1)
sys.path[:0] = [sys.argv[1]]
from laplace.test_checkpoint import batches, facts, generator, made
from lapwing.serialize import write
from torch import Tensor

def loader():
    for number, batch in enumerate(batches(count=20)):
        print(number, flush=True)
        time.sleep(0.02)
        yield batch

la = made("all", "kron", estimator="mc")
la.fit(loader(), checkpoint=sys.argv[2], checkpoint_every=3, generator=generator())
write(sys.argv[3], {name: value for name, value in facts(la).items() if isinstance(value, Tensor)}, {})
print("done", flush=True)
"""


def run(path: Path, out: Path, kill_at: int | None) -> list[bytes]:
    """The lines that the process wrote, killed once it has drawn batch `kill_at`."""
    arguments = [sys.executable, "-c", FIT, str(Path(__file__).parents[1]), str(path), str(out)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line.strip())
            if kill_at is not None and line.strip() == str(kill_at).encode():
                os.kill(process.pid, signal.SIGKILL)
                break
    return lines


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="kill -9 is of Unix")
def test_a_fit_that_is_killed_again_and_again(tmp_path: Path) -> None:
    path, out = tmp_path / "c", tmp_path / "out"
    assert run(tmp_path / "other", tmp_path / "whole", None)[-1] == b"done"
    for kill_at, kept in ((1, 0), (7, 6), (8, 6), (16, 15)):
        assert b"done" not in run(path, out, kill_at)
        assert (read(path)[1]["batches"] if path.exists() else 0) == kept
    (tmp_path / f".c.123{PARTIAL}").write_bytes(b"what a kill in the middle of a write leaves")
    lines = run(path, out, None)
    assert lines[-1] == b"done"
    found, expected = read(out)[0], read(tmp_path / "whole")[0]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out", "whole"]
