"""scikit-learn's own checks of the two estimators, and what users of scikit-learn do with them."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lapwing.errors import DataError, OptionError
from lapwing.predictive import probit
from lapwing.tables import estimators
from lapwing.tables.estimators import LaplaceClassifier, LaplaceRegressor

SMALL: dict[str, Any] = {"width": 10, "depth": 1, "epochs": 20, "random_state": 0}


@parametrize_with_checks([LaplaceRegressor(width=10, epochs=10), LaplaceClassifier(width=10, epochs=10)])
def test_scikit_learn_accepts_it(estimator: Any, check: Any) -> None:
    """None is excluded."""
    check(estimator)


def line(rows: int = 60) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(rows, 2))
    return X, 100 + 5 * X[:, 0] + 0.5 * rng.normal(size=rows)


# -- regression -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_units_are_those_of_the_target() -> None:
    X, y = line(200)
    found = LaplaceRegressor(width=10, depth=1, epochs=100, random_state=0).fit(X, y)
    mean, std = found.predict(X, return_std=True)
    assert found.sigma_ == pytest.approx(0.5, rel=4 / np.sqrt(2 * len(y)))  # four standard errors of a deviation
    assert np.sqrt(np.mean((mean - y) ** 2)) < 0.6
    assert (std > found.sigma_).all()
    assert np.mean(np.abs(y - mean) < 1.645 * std) == pytest.approx(0.9, abs=0.06)
    np.testing.assert_allclose(found.predict(X), mean)


@pytest.mark.slow
def test_noise_that_varies() -> None:
    """Deviation 0.2 on the left and 2 on the right, where X_0 changes sign."""
    random = np.random.default_rng(0)
    X = random.normal(size=(400, 2))
    y = 3 * X[:, 1] + np.where(X[:, 0] > 0, 2.0, 0.2) * random.normal(size=400)
    made = LaplaceRegressor(width=10, epochs=60, random_state=0)
    found = clone(made).fit(X, y)
    assert found.spec_.varying
    mean, std = found.predict(X, return_std=True)
    np.testing.assert_allclose(found.predict(X), mean)
    assert std[X[:, 0] > 0.5].mean() > 5 * std[X[:, 0] < -0.5].mean()
    assert 0.2 < found.sigma_ < 2
    drawn = found.sample_y(X[:5], 4000, random_state=1)
    assert (np.abs(drawn.mean(1) - mean[:5]) < 4 * std[:5] / np.sqrt(4000)).all()
    assert (np.abs(drawn.std(1) / std[:5] - 1) < 0.1).all()  # the tails are heavier than a Gaussian's
    again = pickle.loads(pickle.dumps(found))
    np.testing.assert_array_equal(again.predict(X, return_std=True)[1], std)
    plain = clone(made).set_params(noise="constant").fit(X, y)
    assert not plain.spec_.varying
    assert found.log_marginal_likelihood_ > plain.log_marginal_likelihood_
    two = clone(made).set_params(noise="varying", epochs=3).fit(X, np.stack([y, 10 * y], 1))
    assert two.predict(X, return_std=True)[1].shape == (400, 2)
    # a level for each; four standard errors of a ratio of two deviations
    assert two.sigma_[1] == pytest.approx(10 * two.sigma_[0], rel=4 * np.sqrt(2 / (2 * len(y))))
    assert two.sample_y(X[:7], 3).shape == (7, 2, 3)


def test_scaling_the_data_scales_the_answer() -> None:
    X, y = line()
    first, second = LaplaceRegressor(**SMALL).fit(X, y), LaplaceRegressor(**SMALL).fit(1e-6 * X + 3, 1e4 * y - 7)
    (mean, std), (mean_2, std_2) = first.predict(X, True), second.predict(1e-6 * X + 3, True)
    np.testing.assert_allclose(mean_2, 1e4 * mean - 7, rtol=1e-4)
    np.testing.assert_allclose(std_2, 1e4 * std, rtol=1e-4)
    assert second.sigma_ == pytest.approx(1e4 * first.sigma_, rel=1e-4)
    # p(1e4 y) = p(y) / 1e4 for each of the rows
    shift = len(y) * np.log(1e4)
    assert second.log_marginal_likelihood_ == pytest.approx(first.log_marginal_likelihood_ - shift, rel=1e-4)


@pytest.mark.parametrize("scale", [1e-300, pytest.param(1e200, marks=pytest.mark.slow), 1e300])
def test_no_scale_is_too_large_or_small(scale: float) -> None:
    X, y = line()
    made = LaplaceRegressor(**SMALL | {"epochs": 3})
    mean, std = made.fit(X, y).predict(X, return_std=True)
    for given, factor in ((X, scale), (scale * X, 1.0)):
        found = made.fit(given, factor * y).predict(given, return_std=True)
        np.testing.assert_allclose(found[0] / factor, mean, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(found[1] / factor, std, rtol=1e-6)
    far = 1e12 + (X * 1024).round() / 1024
    moved = made.fit(far, y).predict(far)
    np.testing.assert_allclose(moved, made.fit(far - 1e12, y).predict(far - 1e12), rtol=1e-3, atol=1e-3)


def test_several_targets() -> None:
    X, y = line()
    Y = np.stack([y, -10 * y], 1)
    found = LaplaceRegressor(**SMALL).fit(X, Y)
    mean, std = found.predict(X[:7], return_std=True)
    assert mean.shape == std.shape == (7, 2)
    assert found.sigma_.shape == (2,)
    assert found.sigma_[1] == pytest.approx(10 * found.sigma_[0])
    assert found.sample_y(X[:7], 3).shape == (7, 2, 3)
    assert LaplaceRegressor(**SMALL).fit(X, Y[:, :1]).predict(X[:7]).shape == (7, 1)


def test_draws_have_the_predicted_moments_and_follow_the_seed() -> None:
    X, y = line()
    found = LaplaceRegressor(**SMALL).fit(X, y)
    mean, std = found.predict(X[:5], return_std=True)
    drawn = found.sample_y(X[:5], 4000, random_state=1)
    assert drawn.shape == (5, 4000)
    assert (np.abs(drawn.mean(1) - mean) < 4 * std / np.sqrt(4000)).all()
    assert (np.abs(drawn.std(1) / std - 1) < 4 / np.sqrt(8000)).all()
    np.testing.assert_array_equal(drawn, found.sample_y(X[:5], 4000, random_state=1))
    assert not np.array_equal(drawn, found.sample_y(X[:5], 4000, random_state=2))


def test_draws_at_one_input_move_together() -> None:
    X, y = line(10)
    found = LaplaceRegressor(**SMALL).fit(X, y)
    far = np.array([[20.0, 20.0], [20.0, 20.0]])  # where the weights' share is larger than the noise
    std = found.predict(far, return_std=True)[1][0]
    expected = 1 - (found.sigma_ / std) ** 2
    drawn = found.sample_y(far, 4000)
    assert np.corrcoef(drawn)[0, 1] == pytest.approx(expected, abs=4 / np.sqrt(4000))


def test_a_constant_target_is_predicted() -> None:
    X, _ = line()
    found = LaplaceRegressor(**SMALL | {"epochs": 150}).fit(X, np.full(60, 3.0))
    mean, std = found.predict(X, return_std=True)
    np.testing.assert_allclose(mean, 3.0, atol=0.05)
    assert np.isfinite(std).all()


# -- classification -------------------------------------------------------------------------------------------------


def labelled(rows: int = 80) -> tuple[np.ndarray, np.ndarray]:
    X = np.random.default_rng(0).normal(size=(rows, 2))
    return X, np.where(X[:, 0] > 0.7, "high", np.where(X[:, 0] < -0.7, "low", "middle"))


def test_labels_are_words() -> None:
    X, y = labelled()
    found = LaplaceClassifier(**SMALL | {"epochs": 60}).fit(X, y)
    assert list(found.classes_) == ["high", "low", "middle"]
    probabilities = found.predict_proba(X)
    assert probabilities.shape == (80, 3)
    assert found.score(X, y) > 0.85
    np.testing.assert_array_equal(found.predict(X), found.classes_[probabilities.argmax(1)])
    assert np.isfinite(found.log_marginal_likelihood_)


def test_drawn_labels_come_as_often_as_the_draws_say() -> None:
    X, y = labelled()
    found = LaplaceClassifier(**SMALL).fit(X, y)
    drawn = found.sample_y(X[:6], 4000, random_state=0)
    assert drawn.shape == (6, 4000)
    assert set(np.unique(drawn)) <= set(found.classes_)
    shares = np.stack([(drawn == name).mean(1) for name in found.classes_], 1)
    inputs = found._inputs(X[:6])
    around = found.laplace_.functional_samples(inputs, n_samples=4000, generator=torch.Generator().manual_seed(1))
    expected = (around + added(found, inputs)).softmax(-1).mean(0)
    # both are averages over 4000 draws, of numbers whose standard deviation is at most 1/2
    np.testing.assert_allclose(shares, expected, atol=4 * 2**0.5 * 0.5 / np.sqrt(4000))


def added(found: LaplaceClassifier, inputs: torch.Tensor) -> torch.Tensor:
    """What the shift of the mean adds to the logits, by the Jacobian from autograd."""
    weights = dict(found.model_.named_parameters())
    rows = torch.func.jacrev(lambda w: torch.func.functional_call(found.model_, w, (inputs,)))(weights)
    assert found._shift is not None
    return torch.cat([part.flatten(2) for part in rows.values()], 2).detach() @ found._shift


def test_probabilities_are_those_at_the_shifted_mean() -> None:
    X, y = labelled()
    found = LaplaceClassifier(**SMALL).fit(X, y)
    inputs = found._inputs(X)
    value, variance = found.laplace_.predict_moments(inputs, diagonal_output=True)
    expected = probit(value + added(found, inputs), variance.reshape(value.shape))
    np.testing.assert_allclose(found.predict_proba(X), expected.detach(), rtol=1e-9)


def test_one_class_is_refused() -> None:
    with pytest.raises(DataError, match="one class"):
        LaplaceClassifier(**SMALL).fit(np.zeros((5, 2)), ["a"] * 5)


# -- as scikit-learn's users do -------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [LaplaceRegressor(**SMALL), LaplaceClassifier(**SMALL)])
def test_a_pickle_predicts_the_same_and_holds_plain_data(made: Any) -> None:
    X, y = line()
    found = made.fit(X, y if isinstance(made, LaplaceRegressor) else y > 100)
    stored = pickle.dumps(found)
    assert b"lapwing.laplace" not in stored
    assert b"lapwing.linalg" not in stored
    again = pickle.loads(stored)
    predict = "predict" if isinstance(made, LaplaceRegressor) else "predict_proba"
    np.testing.assert_array_equal(getattr(again, predict)(X), getattr(found, predict)(X))
    np.testing.assert_array_equal(again.sample_y(X, 3), found.sample_y(X, 3))
    assert again.spec_ == found.spec_
    assert again.laplace_.n_data == 60
    unfitted = pickle.loads(pickle.dumps(clone(found)))
    with pytest.raises(NotFittedError):
        unfitted.predict(X)


def test_a_pickle_of_many_classes_with_a_sampled_curvature() -> None:
    X = np.random.default_rng(0).normal(size=(96, 2))
    found = LaplaceClassifier(width=5, epochs=1, structure="kron", random_state=0).fit(X, np.arange(96) % 24)
    assert found.laplace_.recipe.source == "mc"
    again = pickle.loads(pickle.dumps(found))
    assert again.laplace_.recipe == found.laplace_.recipe
    np.testing.assert_array_equal(again.predict_proba(X), found.predict_proba(X))


@pytest.mark.slow
def test_an_unseeded_estimator_differs_from_fit_to_fit_and_a_seeded_one_does_not() -> None:
    X, y = line()
    options = SMALL | {"random_state": None}
    loose = [LaplaceRegressor(**options).fit(X, y).predict(X) for _ in range(2)]
    firm = [LaplaceRegressor(**SMALL).fit(X, y).predict(X) for _ in range(2)]
    assert not np.array_equal(*loose)
    np.testing.assert_array_equal(*firm)


def test_names_of_columns_are_kept() -> None:
    import pandas as pd

    X, y = line()
    frame = pd.DataFrame(X, columns=["left", "right"])
    found = LaplaceRegressor(**SMALL).fit(frame, y)
    assert list(found.feature_names_in_) == ["left", "right"]
    assert found.n_features_in_ == 2


@pytest.mark.slow
def test_a_pipeline_and_a_grid_search() -> None:
    X, y = line(60)
    pipe = make_pipeline(PolynomialFeatures(2), StandardScaler(), LaplaceRegressor(**SMALL))
    search = GridSearchCV(pipe, {"laplaceregressor__width": [3, 10]}, cv=2)
    search.fit(X, y)
    assert search.best_score_ > 0.7
    mean, std = search.best_estimator_.predict(X, return_std=True)
    assert mean.shape == std.shape == (60,)
    X, labels = labelled(60)
    classes = GridSearchCV(LaplaceClassifier(**SMALL), {"activation": ["tanh", "relu"]}, cv=2, scoring="neg_log_loss")
    assert classes.fit(X, labels).best_score_ > -1.0


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"width": 0}, "width"),
        ({"depth": True}, "depth"),
        ({"kind": "cnn"}, "kind"),
        ({"epochs": -1}, "epochs"),
        ({"batch_size": 0}, "batch_size"),
        ({"structure": "dense"}, "hessian_structure"),
        ({"noise": "none"}, "noise"),
    ],
)
def test_a_wrong_argument_is_named_by_fit(wrong: dict[str, Any], match: str) -> None:
    X, y = line(10)
    with pytest.raises(OptionError, match=match):
        LaplaceRegressor(**SMALL | wrong).fit(X, y)
    fitted = LaplaceRegressor(**SMALL).fit(X, y)
    with pytest.raises(OptionError, match="n_samples"):
        fitted.sample_y(X, 0)


@pytest.mark.slow
def test_real_data_out_of_the_box() -> None:
    X, y = load_diabetes(return_X_y=True)
    scores = cross_val_score(LaplaceRegressor(random_state=0), X, y, cv=3)
    assert scores.mean() > 0.42  # ridge regression has 0.49 at its best strength
    X, y = load_breast_cancer(return_X_y=True)
    train_X, test_X, train_y, test_y = train_test_split(X, y, random_state=0, stratify=y)
    assert LaplaceClassifier(random_state=0).fit(train_X, train_y).score(test_X, test_y) > 0.95


def test_without_scikit_learn_lapwing_imports_and_the_estimators_say_what_is_missing() -> None:
    code = """
import sys
sys.modules["sklearn"] = None
import lapwing, lapwing.tables.training
try:
    import lapwing.tables.estimators
except ImportError as error:
    assert "pip install 'lapwing[tabular]'" in str(error), error
else:
    raise SystemExit("imported")
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("made", [LaplaceRegressor, LaplaceClassifier])
@pytest.mark.parametrize(
    ("options", "weights", "activation"),
    [
        ({"width": 7, "depth": 2}, 4 * 7 + 8 * 7 + 8, nn.Tanh),
        ({"width": 6, "depth": 1, "activation": "relu"}, 4 * 6 + 7, nn.ReLU),
        ({"width": 5, "depth": 1, "activation": "silu", "kind": "resnet"}, 4 * 5 + 2 * 6 * 5 + 6, nn.SiLU),
    ],
)
def test_the_network_is_the_one_asked_for(made: Any, options: dict[str, Any], weights: int, activation: type) -> None:
    """Counted by hand for three inputs and one output; the classes are two."""
    x = np.random.default_rng(0).normal(size=(30, 3))
    y = x[:, 0] if made is LaplaceRegressor else (x[:, 0] > 0).astype(int)
    found = made(**options, epochs=1, structure="diag", random_state=0).fit(x, y)
    outputs = 2 - (made is LaplaceRegressor)
    last = options["width"] + 1
    assert sum(p.numel() for p in found.model_.parameters()) == weights + (outputs - 1) * last
    kinds = {type(module) for module in found.model_.modules()} & {nn.Tanh, nn.ReLU, nn.SiLU}
    assert kinds == {activation}


@pytest.mark.parametrize("made", [LaplaceRegressor, LaplaceClassifier])
def test_epochs_batches_and_structure_are_those_asked_for(made: Any) -> None:
    """Passes over 30 rows, of which none are apart: steps of the optimiser of the weights per batch and epoch."""
    x = np.random.default_rng(0).normal(size=(30, 3))
    y = x[:, 0] if made is LaplaceRegressor else (x[:, 0] > 0).astype(int)
    counts = {}
    for epochs, size in ((4, 30), (8, 30), (4, 10), (4, 7)):
        steps: list[int] = []
        hook = register_optimizer_step_post_hook(lambda *_, steps=steps: steps.append(1))
        try:
            found = made(width=4, epochs=epochs, batch_size=size, structure="diag", random_state=0).fit(x, y)
        finally:
            hook.remove()
        assert found.laplace_.structure == "diag"
        counts[epochs, size] = len(steps)
    if made is LaplaceRegressor:
        assert counts == {(4, 30): 4, (8, 30): 8, (4, 10): 12, (4, 7): 20}
    else:  # the prior is searched in stretches of a quarter of the epochs, two or more
        assert counts[4, 30] >= 6
        assert counts[8, 30] >= 12
        assert counts[4, 10] >= 18
        assert counts[4, 7] >= 30
    assert made(width=4, epochs=1, structure="kron", random_state=0).fit(x, y).laplace_.structure == "kron"


def test_a_regression_takes_the_noise_asked_for() -> None:
    x = np.random.default_rng(0).normal(size=(30, 2))
    for noise in ("constant", "varying"):
        found = LaplaceRegressor(width=4, epochs=2, noise=noise, structure="diag", random_state=0).fit(x, x[:, 0])
        assert found.spec_.varying == (noise == "varying")


@pytest.mark.parametrize("made", [LaplaceRegressor, LaplaceClassifier])
def test_rows_are_predicted_in_parts_as_all_at_once(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).normal(size=(30, 3))
    y = x[:, 0] if made is LaplaceRegressor else (x[:, 0] > 0).astype(int)
    found = made(width=4, epochs=1, structure="diag", random_state=0).fit(x, y)
    asked = [lambda: found.predict(x)]
    asked += (
        [lambda: found.predict(x, return_std=True)] if made is LaplaceRegressor else [lambda: found.predict_proba(x)]
    )
    before = [np.stack(each()) for each in asked]
    monkeypatch.setattr(estimators, "ROWS", 7)
    for ours, each in zip(before, asked, strict=True):
        np.testing.assert_allclose(np.stack(each()), ours, rtol=1e-12)


@pytest.mark.parametrize("targets", [1, 2])
def test_draws_of_varying_noise_have_the_noise_of_their_own_draw(targets: int) -> None:
    """The first half of the outputs are means, the second the logarithms of variances, one for each target."""
    X, y = line(40)
    Y = y if targets == 1 else np.stack([y, 3 - y], 1)
    found = LaplaceRegressor(**SMALL | {"noise": "varying", "epochs": 2}).fit(X, Y)
    assert found.spec_.varying
    drawn = found.sample_y(X[:3], 50, random_state=4)
    generator = found._generator(50, 4)
    f = found.laplace_.functional_samples(found._checked(X[:3]), n_samples=50, generator=generator)
    assert f.shape == (50, 3, 2 * targets)
    noise = torch.randn(50, 3, targets, dtype=f.dtype, generator=generator)
    for i in range(targets):
        expected = f[..., i] + f[..., targets + i].exp().sqrt() * noise[..., i]
        expected = expected.mT.double().numpy() * found._y_scale[i] + found._y_mean[i]
        np.testing.assert_allclose(drawn if targets == 1 else drawn[:, i], expected, rtol=1e-4)
