"""Posteriors in files: the same predictions bit for bit; what does not fit is refused before it changes anything."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chosen
import lapwing
from lapwing import Laplace
from lapwing.errors import DataError, OptionError, ParameterError, StorageError
from lapwing.laplace import BaseLaplace, DiagLaplace, KronLaplace
from lapwing.laplace.factory import CLASSES
from lapwing.laplace.persistence import POSTERIORS, register
from lapwing.laplace.structures import STRUCTURES
from lapwing.likelihoods import Gaussian, HeteroscedasticGaussian, from_function
from lapwing.serialize import pack, read, write
from unchanged import unchanged

B, D, C = 6, 4, 3


def mlp(
    seed: int = 0, dtype: torch.dtype = torch.float64, activation: type[nn.Module] = nn.Tanh, outputs: int = C
) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = nn.Linear(D, 5), activation(), nn.BatchNorm1d(5), nn.Linear(5, outputs)
    model = nn.Sequential(*layers).to(dtype)
    with torch.no_grad():
        model[2].running_mean.copy_(torch.randn(5))
        model[2].running_var.copy_(torch.rand(5) + 0.5)
    return model


def inputs(n: int = B, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def batches(task: str, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    if task == "classification":
        return [(inputs(8, s, dtype), torch.randint(C, (8,), generator=generator)) for s in range(3)]
    return [(inputs(8, s, dtype), torch.randn(8, C, generator=generator, dtype=dtype)) for s in range(3)]


def made(subset: str, structure: str, task: str = "classification", dtype: torch.dtype = torch.float64) -> BaseLaplace:
    options: dict[str, Any] = {"rank": 5} if structure == "lowrank" else {}
    if subset == "subnetwork":
        options["subnetwork_indices"] = chosen.positions(mlp(), structure)
    la = Laplace(mlp(dtype=dtype), task, subset, structure, prior_precision=2.0, temperature=0.5, **options)
    la.fit(batches(task, dtype))
    la.optimize_prior_precision()
    if task == "regression":
        la.sigma_noise = 0.3
    return la


def outputs(la: BaseLaplace, x: Tensor) -> dict[str, Tensor]:
    """Predictions of every kind, draws and the evidence."""
    found = la(x)
    out = dict(zip(("mean", "variance"), found, strict=True)) if isinstance(found, tuple) else {"probabilities": found}
    for kind in ("glm", "nn"):
        out[kind] = la.functional_samples(x, kind, 3, generator=torch.Generator().manual_seed(5))
    out["weights"] = la.sample(2, generator=torch.Generator().manual_seed(6))
    out["evidence"] = la.log_marginal_likelihood()
    return {name: value.detach() for name, value in out.items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), f"{name} differs by {float((value - b[name]).abs().max())}"


SAVED = [key for key in CLASSES if STRUCTURES[key[1]].stored]
every_class = pytest.mark.parametrize(("subset", "structure"), SAVED)


@every_class
@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_loaded_posterior_is_the_saved_one(
    tmp_path: Path, subset: str, structure: str, task: str, dtype: torch.dtype
) -> None:
    la, x = made(subset, structure, task, dtype), inputs(dtype=dtype)
    before = outputs(la, x)
    with unchanged(la.model):
        la.save(tmp_path / "a.lapwing")
    model = mlp(seed=9, dtype=dtype).train()
    again = lapwing.load(tmp_path / "a.lapwing", model)
    assert again.model is model
    assert all(module.training for module in model.modules())
    for name, value in la.model.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])
    assert type(again) is type(la)
    assert (again.n_data, again.n_outputs) == (24, C)
    assert torch.equal(again.prior_precision, la.prior_precision)
    assert_same(outputs(again, x), before)


def save_all(folder: Path) -> dict[str, dict[str, Tensor]]:
    expected = {}
    for subset, structure in SAVED:
        la = made(subset, structure)
        la.save(folder / f"{subset} {structure}.lapwing")
        expected[f"{subset} {structure}"] = outputs(la, inputs())
    return expected


OTHER = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path[:0] = [sys.argv[1]]
import lapwing
from lapwing.serialize import write
from laplace.test_files import inputs, mlp, outputs
for path in sorted(Path(sys.argv[2]).glob("*.lapwing")):
    write(path.with_suffix(".out"), outputs(lapwing.load(path, mlp(7)), inputs()), {})
"""


@pytest.mark.slow
def test_another_process_predicts_the_same(tmp_path: Path) -> None:
    expected = save_all(tmp_path)
    tests = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", OTHER, str(tests), str(tmp_path)], check=True, timeout=300)
    for name, value in expected.items():
        assert_same(read(tmp_path / f"{name}.out")[0], value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_half_precision(tmp_path: Path, dtype: torch.dtype, structure: str) -> None:
    def small(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, C)).to(dtype)

    la = Laplace(small(0), "classification", "all", structure)
    la.fit(batches("classification", dtype))
    la.save(tmp_path / "a")
    again = lapwing.load(tmp_path / "a", small(1))
    assert {value.dtype for value in again.model.state_dict().values()} == {dtype}
    assert torch.equal(again(inputs(dtype=dtype)), la(inputs(dtype=dtype)))
    with pytest.raises(StorageError, match=rf"dtype {dtype} in the file and torch.float32 .*model\.to\({dtype}\)"):
        lapwing.load(tmp_path / "a", small(1).float())


# -- options, likelihoods, hyper-parameters ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("subset", "structure", "options"),
    [
        ("all", "kron", {"damping": True}),
        ("all", "kron", {"damping": "plain"}),
        ("all", "kron", {"bias": "separate", "dense_limit": 2}),
        ("all", "kron", {"estimator": "mc", "backend_kwargs": {"mc_samples": 3}}),
        ("all", "kron", {"backend": lapwing.curvature.BackPackEF}),
        ("all", "full", {"estimator": "hessian", "prior_precision": 1e3}),
        ("all", "full", {"prior_mean": 0.25, "prior_precision": torch.full((6,), 3.0)}),
        ("all", "auto", {}),
        ("all", "blocks", {"by": "tensor"}),
        ("all", "gp", {"n_subset": 8, "seed": 4}),
        ("all", "diag", {"enable_backprop": True}),
        ("last_layer", "kron", {"last_layer_name": "3", "damping": True}),
        ("last_layer", "full", {"last_layer_name": "3"}),
        ("last_layer", "full", {"last_layer_name": "3", "estimator": "hessian", "prior_precision": 1e3}),
        ("last_layer", "full", {"last_layer_name": "0"}),
        ("last_layer", "gp", {"n_subset": 7}),
    ],
)
def test_options_come_back(tmp_path: Path, subset: str, structure: str, options: dict[str, Any]) -> None:
    la = Laplace(mlp(), "regression", subset, structure, **options)
    la.fit(batches("regression"), generator=torch.Generator().manual_seed(3))
    la.save(tmp_path / "a")
    again = lapwing.load(tmp_path / "a", mlp(1))
    assert again.recipe == la.recipe
    assert again.reason == la.reason
    for name in ("damping", "last_layer_name", "feature_reduction", "n_subset", "seed", "enable_backprop"):
        assert getattr(again, name, None) == getattr(la, name, None)
    assert type(again._tangent) is type(la._tangent)
    assert_same(outputs(again, inputs()), outputs(la, inputs()))
    for each in (la, again):  # more data are added in the same way
        each.fit(batches("regression")[:1], override=False, generator=torch.Generator().manual_seed(4))
    assert_same(outputs(again, inputs()), outputs(la, inputs()))


@pytest.mark.parametrize(
    "likelihood",
    [
        Gaussian(sigma=0.2),
        Gaussian(sigma=torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)),
        "poisson",
        lapwing.Likelihood.REGRESSION,
    ],
)
def test_likelihoods_come_back(tmp_path: Path, likelihood: Any) -> None:
    la = Laplace(mlp(), likelihood, "all", "diag")
    la.fit([(x, y.abs().round()) for x, y in batches("regression")])
    la.save(tmp_path / "a")
    again = lapwing.load(tmp_path / "a", mlp(1))
    assert type(again.distribution) is type(la.distribution)
    assert_same(outputs(again, inputs()), outputs(la, inputs()))
    with pytest.raises(OptionError, match="expected none"):
        lapwing.load(tmp_path / "a", mlp(1), likelihood=HeteroscedasticGaussian())


def test_a_likelihood_of_ones_own_is_given_again(tmp_path: Path) -> None:
    own = from_function(lambda f, y: (f - y).square().sum())
    la = Laplace(mlp(), own, "all", "full")
    la.fit(batches("regression"))
    la.save(tmp_path / "a")
    with pytest.raises(OptionError, match=r"load\(path, model, likelihood=...\)"):
        lapwing.load(tmp_path / "a", mlp(1))
    with pytest.raises(OptionError, match="expected the same"):
        lapwing.load(tmp_path / "a", mlp(1), likelihood=HeteroscedasticGaussian())
    again = lapwing.load(tmp_path / "a", mlp(1), likelihood=own)
    assert torch.equal(again.posterior_variance, la.posterior_variance)


def test_a_posterior_that_saw_no_data(tmp_path: Path) -> None:
    for subset in ("all", "last_layer"):
        Laplace(mlp(), "regression", subset, "kron", prior_precision=7.0, sigma_noise=0.5).save(tmp_path / "a")
        again = lapwing.load(tmp_path / "a", mlp(1))
        assert (float(again.prior_precision), float(again.sigma_noise), again.n_data) == (7.0, 0.5, 0)
        again.fit(batches("regression"))
        assert again.n_data == 24


def test_shared_weights(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(D, D), nn.Linear(D, D)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x).tanh())

    la = Laplace(Tied(), "regression", "all", "full")
    data = [(inputs(dtype=torch.float32), inputs(seed=3, dtype=torch.float32))]
    la.fit(data)
    la.save(tmp_path / "a")
    again = lapwing.load(tmp_path / "a", Tied())
    assert again.model.one.weight is again.model.two.weight
    assert torch.equal(again(data[0][0])[1], la(data[0][0])[1])


# -- which model -------------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made("all", "kron").save(tmp_path / "a.lapwing")
    return tmp_path / "a.lapwing"


class Network(nn.Sequential):
    """Another class with the same names."""


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: mlp(outputs=2), r"'3.weight' has shape \[3, 5\] in the file and \[2, 5\] in the model; '3.bias'"),
        (lambda: nn.Sequential(nn.Linear(D, C)).double(), "'2.running_mean' is not in the model"),
        (lambda: nn.Sequential(*mlp(), nn.Linear(C, C).double()), "'4.weight' is not in the file"),
        (lambda: nn.ModuleDict({"a": mlp()}), "'0.weight' is not in the model.* and .* more"),
        (lambda: Network(*mlp()), "class 'Network', and the file 'Sequential'"),
        (lambda: mlp(activation=nn.ReLU), "class 'ReLU' at '1', and the file 'Tanh'"),
        (lambda: mlp(dtype=torch.float32), r"float64 in the file and torch.float32.*model.to\(torch.float64\)"),
        (lambda: mlp().to("meta"), "no memory"),
    ],
)
def test_another_model_is_refused_and_not_changed(path: Path, build: Callable[[], nn.Module], message: str) -> None:
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(StorageError, match=message):
        lapwing.load(path, model)
    after = model.state_dict()
    assert all(value.is_meta or torch.equal(value, after[name]) for name, value in before.items())


def test_a_model_that_only_describes_itself_in_another_way_can_be_loaded(path: Path) -> None:
    again = lapwing.load(path, Network(*mlp(3)), strict=False)
    assert_same(outputs(again, inputs()), outputs(made("all", "kron"), inputs()))


class Settings(nn.Module):
    """What a network computes by more than its weights."""

    def __init__(
        self, scale: float = 1.0, function: Callable = torch.tanh, shift: float = 0.5, mask: float = 1.0
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale, self.function = nn.Linear(D, C, dtype=torch.float64), scale, function
        self.register_buffer("shift", torch.full((C,), shift, dtype=torch.float64), persistent=False)
        self.mask = torch.full((C,), mask, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.mask * self.function(self.scale * self.layer(x) + self.shift)


def settled() -> BaseLaplace:
    la = Laplace(Settings(), "classification", "all", "full")
    la.fit(batches("classification"))
    return la


@pytest.mark.parametrize("weights", [True, False])
def test_settings_that_are_in_no_weight_are_compared(tmp_path: Path, weights: bool) -> None:
    la = settled()
    la.save(tmp_path / "a", weights=weights)
    again = lapwing.load(tmp_path / "a", Settings())
    assert_same(outputs(again, inputs()), outputs(la, inputs()))
    for other, message in (
        (Settings(scale=2.0), "scale = 2.0, and the file 1.0"),
        (Settings(function=torch.sin), "function = sin, and the file tanh"),
        (Settings(mask=2.0), "'mask' has other numbers"),
    ):
        with unchanged(other), pytest.raises(StorageError, match=message):
            lapwing.load(tmp_path / "a", other)
        lapwing.load(tmp_path / "a", other, strict=False)
    if weights:  # a buffer is filled, whether state_dict has it or not
        again = lapwing.load(tmp_path / "a", Settings(shift=3.0))
        assert_same(outputs(again, inputs()), outputs(la, inputs()))
    else:
        with pytest.raises(StorageError, match="'shift' has other numbers"):
            lapwing.load(tmp_path / "a", Settings(shift=3.0))


def test_how_a_model_describes_itself_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    la = settled()
    la.save(tmp_path / "a")
    monkeypatch.setattr(nn.Linear, "extra_repr", lambda self: "as a later torch describes it")
    assert_same(outputs(lapwing.load(tmp_path / "a", Settings()), inputs()), outputs(la, inputs()))


def test_attributes_that_another_torch_has_do_not_matter(tmp_path: Path) -> None:
    la = made("all", "diag")
    la.save(tmp_path / "a")
    model = mlp(1)
    model[0].later = True
    assert_same(outputs(lapwing.load(tmp_path / "a", model), inputs()), outputs(la, inputs()))
    tensors, metadata = read(tmp_path / "a")
    metadata["model"]["structure"]["0"]["attributes"]["earlier"] = "True"
    write(tmp_path / "a", tensors, metadata)
    lapwing.load(tmp_path / "a", mlp(1))


STORED = Path(__file__).parent / "stored"


@pytest.mark.parametrize("name", ["posterior", "without-weights"])
def test_older_files_are_read(name: str) -> None:
    """Written before files held the structure of a model: these know it by its repr."""
    model = mlp(1)
    if name == "without-weights":
        lapwing.load(
            STORED / "posterior.lapwing", model
        )  # has the same weights: from a seed they depend on the processor
    again = lapwing.load(STORED / f"{name}.lapwing", model)
    row = torch.tensor([0.21544137795442025, 0.21648611053074615, 0.5680725115148336], dtype=torch.float64)
    torch.testing.assert_close(again(inputs())[0], row, rtol=1e-9, atol=0)
    with pytest.raises(StorageError, match=r"'\(1\): ReLU\(\)', and the file '\(1\): Tanh\(\)'"):
        lapwing.load(STORED / f"{name}.lapwing", mlp(activation=nn.ReLU))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    return [path, *(found for key, each in inside for found in places(each, (*path, key)))]


def test_whatever_a_description_holds_is_read_or_refused_with_our_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made("all", "diag").save(tmp_path / "a")
    tensors, metadata = read(tmp_path / "a")
    strange = (None, True, -1, 10**30, 1.5, float("nan"), "", "x", [], [[]], {}, {"a": [1]}, [None], "1e999")
    refused = 0
    for number, path in enumerate(places(metadata)[1:]):
        changed = copy.deepcopy(metadata)
        inner = changed
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = strange[number % len(strange)]
        monkeypatch.setattr("lapwing.laplace.loading.read", lambda _, changed=changed: (dict(tensors), changed))
        try:
            lapwing.load("a", mlp(1))
        except StorageError:
            refused += 1
    assert refused > 40


def test_other_trainable_parameters_are_refused(path: Path) -> None:
    model = mlp(1)
    model[0].requires_grad_(False)
    with (
        unchanged(model),
        pytest.raises((ParameterError, StorageError), match=r"same choice of weights|prior_precision"),
    ):
        lapwing.load(path, model)


def test_without_weights_the_model_must_have_them(tmp_path: Path) -> None:
    la = made("all", "kron")
    la.save(tmp_path / "a", weights=False)
    assert not [name for name in read(tmp_path / "a")[0] if name.startswith("model.")]
    model = copy.deepcopy(la.model)
    with unchanged(model):
        assert_same(outputs(lapwing.load(tmp_path / "a", model), inputs()), outputs(la, inputs()))
    for name in ("0.weight", "2.running_var"):  # a buffer, too, changes what the network computes
        model = copy.deepcopy(la.model)
        with torch.no_grad():
            model.state_dict()[name].add_(1e-3)
        with pytest.raises(StorageError, match=f"'{name}' .*other numbers"):
            lapwing.load(tmp_path / "a", model)


def test_weights_that_changed_since_the_fit_are_not_saved(tmp_path: Path) -> None:
    la = made("all", "kron")
    with torch.no_grad():
        la.model[0].weight.add_(1)
    with pytest.raises(ParameterError, match="not those that this posterior was fitted at"):
        la.save(tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_a_state_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> str:
            return "more"

        def set_extra_state(self, state: object) -> None:
            pass

    la = Laplace(Extra(D, C).double(), "classification", "all", "diag")
    la.fit(batches("classification"))
    with pytest.raises(StorageError, match=r"'_extra_state', which is no tensor.*weights=False"):
        la.save(tmp_path / "a")
    la.save(tmp_path / "a", weights=False)
    assert torch.equal(lapwing.load(tmp_path / "a", la.model)(inputs()), la(inputs()))


@pytest.mark.parametrize("place", ["cpu", torch.device("cpu")])
def test_a_place_for_the_posterior(path: Path, place: str | torch.device) -> None:
    again = lapwing.load(path, mlp(1), map_location=place)
    assert {value.device.type for value in again.model.state_dict().values()} == {"cpu"}
    assert_same(outputs(again, inputs()), outputs(made("all", "kron"), inputs()))


@pytest.mark.parametrize("place", ["nowhere", "meta", "cuda:99"])
def test_a_place_that_is_not_there(path: Path, place: str) -> None:
    model = mlp(1)
    with unchanged(model), pytest.raises(OptionError, match=f"map_location is '{place}'"):
        lapwing.load(path, model, map_location=place)


# -- files that are not what they should be ----------------------------------------------------------------------------


def test_damage_is_refused_and_the_model_not_changed(path: Path) -> None:
    raw = path.read_bytes()
    model = mlp(1)
    for at in (3, 50, len(raw) // 3, len(raw) // 2, len(raw) - 1):
        flipped = bytearray(raw)
        flipped[at] ^= 1
        path.write_bytes(flipped)
        with unchanged(model), pytest.raises(StorageError):
            lapwing.load(path, model)
    path.write_bytes(raw[:-9])
    with unchanged(model), pytest.raises(StorageError, match="truncated"):
        lapwing.load(path, model)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", {}, {"kind": "checkpoint"})
    with pytest.raises(StorageError, match="holds 'checkpoint'; expected a 'posterior'"):
        lapwing.load(tmp_path / "a", mlp())
    write(tmp_path / "a", {}, {})
    with pytest.raises(StorageError, match="holds None"):
        lapwing.load(tmp_path / "a", mlp())


def forgeries() -> dict[str, Callable[[dict[str, Tensor], dict[str, Any]], object]]:
    """Changes that somebody might make on purpose, with every hash right."""
    blocks = {"kind": "Blocks", "fields": {"params": 10**15, "blocks": {"items": []}}}
    return {
        "class": lambda t, m: m.update({"class": "os.system"}),
        "class of a kind": lambda t, m: m.update({"class": "Dense"}),
        "class that is none": lambda t, m: m.update({"class": ["KronLaplace"]}),
        "no class": lambda t, m: m.pop("class"),
        "options": lambda t, m: m.update({"options": pack([["draws", 1], ["backend", "os.system"]])[0]}),
        "unknown options": lambda t, m: m.update({"options": pack([["draws", 1], ["hook", "x"]])[0]}),
        "options that are none": lambda t, m: m.update({"options": 3}),
        "no draws": lambda t, m: m.update({"options": pack([])[0]}),
        "a likelihood": lambda t, m: m.update({"likelihood": {"task": "os.system"}}),
        "a likelihood of a kind": lambda t, m: m.update({"likelihood": {"object": {"items": []}}}),
        "no likelihood": lambda t, m: m.update({"likelihood": {}}),
        "no state": lambda t, m: m.pop("state"),
        "half a state": lambda t, m: t.pop("state.mean"),
        "no parameters": lambda t, m: m["state"].pop("parameters"),
        "a structure": lambda t, m: m["state"].update({"structure": '{"kind": "os.system", "fields": {}}'}),
        "a structure that is no JSON": lambda t, m: m["state"].update({"structure": "{"}),
        "a tensor as structure": lambda t, m: m["state"].update({"structure": '{"tensor": "x"}'}),
        "a huge curvature": lambda t, m: m["state"].update({"structure": str(blocks).replace("'", '"')}),
        "another curvature": lambda t, m: (
            t.update({"state.curvature.x": torch.ones(2)}),
            m["state"].update({"structure": '{"kind": "Diagonal", "fields": {"values": {"tensor": "x"}}}'}),
        ),
        "no weights": lambda t, m: t.pop("model.0.weight"),
        "weights of another shape": lambda t, m: t.update({"model.0.weight": torch.ones(1, dtype=torch.float64)}),
        "no model": lambda t, m: m.pop("model"),
        "a shape for a precision": lambda t, m: t.update({"state.prior_precision": torch.ones(2, 2)}),
        "a negative precision": lambda t, m: t.update({"state.prior_precision": -torch.ones(1)}),
    }


@pytest.mark.parametrize("name", list(forgeries()))
def test_a_forgery_is_refused_and_the_model_not_changed(path: Path, name: str) -> None:
    tensors, metadata = read(path)
    forgeries()[name](tensors, metadata)
    write(path, tensors, metadata)
    model = mlp(1)
    with unchanged(model), pytest.raises((DataError, ParameterError, StorageError)):
        lapwing.load(path, model)


def test_only_known_classes_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(DiagLaplace):
        pass

    la = Mine(mlp(), "classification")
    la.fit(batches("classification"))
    with pytest.raises(StorageError, match=r"a Mine cannot be saved.*Register"):
        la.save(tmp_path / "a")
    monkeypatch.setitem(POSTERIORS, "Mine", DiagLaplace)  # taken out again after the test
    register(Mine)
    la.save(tmp_path / "a")
    assert torch.equal(lapwing.load(tmp_path / "a", mlp(1))(inputs()), la(inputs()))
    assert {each.__name__ for each in CLASSES.values()} <= POSTERIORS.keys()


def test_what_cannot_be_packed_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError):
        KronLaplace(mlp(), "classification", sharing="expand", hook=print)
    la = KronLaplace(mlp(), "classification", backend_kwargs={"dense_limit": object()})
    with pytest.raises(DataError, match="is a object, which cannot be stored"):
        la.save(tmp_path / "a")
