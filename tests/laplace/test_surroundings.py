"""Fits and predictions inside autocast, anomaly mode and torch.func; tensors on meta or made in inference mode."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lapwing import Laplace
from lapwing.errors import DataError, ModelError
from lapwing.tangent.quiet import quiet


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 3, generator=generator), torch.randint(2, (8,), generator=generator)


def results(structure: str, subset: str) -> list[Tensor]:
    x, y = data()
    la = Laplace(model(), "classification", subset_of_weights=subset, hessian_structure=structure)
    la.fit([(x, y)])
    drawn = [la.functional_samples(x, kind, n_samples=3, generator=torch.Generator().manual_seed(1)) for kind in KINDS]
    la.optimize_prior_precision(method="mackay")
    jacobian = torch.cos(torch.arange(4.0 * la.n_params)).reshape(2, 2, -1)
    gaussian = [
        *(la.sample(2, torch.Generator().manual_seed(1)), la.log_prob(1.1 * la.mean), la.square_norm(1.1 * la.mean)),
        *(la.functional_variance(jacobian), la.functional_covariance(jacobian), la.posterior_variance),
        *(la.posterior_covariance, *([la.posterior_precision, la.posterior_scale] if structure == "full" else [])),
    ]
    return [la(x), *drawn, la.log_marginal_likelihood(), la.prior_precision, *gaussian]


KINDS = ("glm", "nn")


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("structure", ["full", "kron", "diag", "gp"])
def test_autocast_changes_nothing(structure: str, subset: str) -> None:
    expected = results(structure, subset)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = results(structure, subset)
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16  # the user's is still on
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("structure", ["full", "kron", "propagated_diag"])
def test_anomaly_mode_says_nothing(structure: str, capfd: pytest.CaptureFixture) -> None:
    expected = results(structure, "all")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with torch.autograd.set_detect_anomaly(True):
            said.clear()  # that it is on
            found = results(structure, "all")
    assert not said
    assert capfd.readouterr() == ("", "")
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


TRANSFORMS: dict[str, Callable] = {
    "grad": lambda la, x: torch.func.grad(lambda t: la(t).sum())(x),
    "vmap": lambda la, x: torch.vmap(lambda t: la(t[None]))(x),
    "jacrev": lambda la, x: torch.func.jacrev(la)(x),
    "nn": lambda la, x: torch.vmap(lambda t: la(t[None], pred_type="nn", n_samples=2))(x),
}


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_an_input_inside_torch_func_is_refused(name: str, subset: str) -> None:
    x, y = data()
    la = Laplace(model(), "classification", subset_of_weights=subset)
    la.fit([(x, y)])
    with pytest.raises(DataError, match=r"inside torch\.func .* expected a plain tensor"):
        TRANSFORMS[name](la, x)


def test_nothing_of_torch_func_stays() -> None:
    x, y = data()
    la = Laplace(model(), "classification", "all", "diag", prior_precision=2.0)
    la.fit([(x, y)])
    expected = la(x)
    assert torch.func.grad(la.log_marginal_likelihood)(torch.tensor(3.0)).shape == ()
    assert la.prior_precision.tolist() == [2.0]
    assert torch.equal(la(x), expected)


def test_data_on_meta_are_refused() -> None:
    x, y = data()
    la = Laplace(model(), "classification", subset_of_weights="all")
    with pytest.raises(DataError, match="lies on meta"):
        la.fit([(x, y.to("meta"))])
    la.fit([(x, y)])
    with pytest.raises(DataError, match="lies on meta"):
        la(x.to("meta"))


def test_parameters_of_inference_mode_are_refused_and_a_copy_is_taken() -> None:
    x, y = data()
    with torch.inference_mode():
        made = model()
    with pytest.raises(ModelError, match=r"made in torch\.inference_mode"):
        Laplace(made, "classification", subset_of_weights="all")
    la = Laplace(copy.deepcopy(made), "classification", subset_of_weights="all")
    la.fit([(x, y)])
    assert torch.allclose(la(x).sum(-1), torch.ones(8))


def test_filters_of_warnings_can_be_taken_along_by_others() -> None:
    """scikit-learn copies them into its workers by their patterns, and processes get them pickled."""
    Parallel, delayed = (
        getattr(pytest.importorskip("sklearn.utils.parallel"), name) for name in ("Parallel", "delayed")
    )
    with quiet():
        ours = [each for each in warnings.filters if type(each[1]).__module__.startswith("lapwing")]
    assert ours, "the filter that stays"
    assert Parallel(n_jobs=1)(delayed(abs)(number) for number in (-1, 2)) == [1, 2]
    (copied,) = pickle.loads(pickle.dumps(ours))
    for text in ("There is a performance drop", "", "anything"):
        assert copied[1].match(text) is None
        assert re.compile(ours[0][1].pattern, ours[0][1].flags).match(text) is None
