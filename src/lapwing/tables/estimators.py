"""scikit-learn estimators: a network with a Laplace posterior that needs no tuning by hand.

    LaplaceRegressor     predict(X, return_std=True) -> mean [N] or [N, C], standard deviation of the same shape
    LaplaceClassifier    predict_proba(X) -> [N, C]; predict(X) -> labels [N]

Inputs (and targets of a regression) are standardised inside; the prior, and the noise of a regression, are tuned by the
evidence, and a tenth of the rows scales the posterior of classes (that of a regression too, where it is too large for
the full matrix). All arithmetic is in float64. Needs scikit-learn: `pip install lapwing[tabular]`.

    >>> import numpy as np
    >>> X = np.linspace(-2, 2, 40).reshape(-1, 1)
    >>> fitted = LaplaceRegressor(width=10, depth=1, epochs=200, random_state=0).fit(X, X[:, 0] ** 2)
    >>> mean, std = fitted.predict([[0.5], [6.0]], return_std=True)
    >>> bool(std[1] > 5 * std[0])                                  # far from the data it does not know
    True
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from lapwing.errors import DataError, OptionError
from lapwing.linalg import LinearMap
from lapwing.predictive import Amounts, probit
from lapwing.tables.network import Spec, as_trained, noise_level
from lapwing.tables.restoring import restored
from lapwing.tables.training import train

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
except ImportError as error:
    raise ImportError(
        f"lapwing.tables.estimators needs scikit-learn 1.6 or later, and found: {error}. Install it with "
        "pip install 'lapwing[tabular]'; everything else in lapwing works without it."
    ) from error

ROWS = 4096
"""Rows that are predicted at a time, so that memory stays bounded."""


class _Estimator(BaseEstimator):
    """What both share. Arguments are stored as they come and checked by `fit`, as scikit-learn asks."""

    _task: str
    n_features_in_: int
    feature_names_in_: np.ndarray
    sigma_: Any

    def __init__(
        self,
        width: Any = 50,
        depth: Any = 1,
        kind: Any = "mlp",
        activation: Any = "tanh",
        epochs: Any = None,
        batch_size: Any = None,
        structure: Any = "auto",
        random_state: Any = None,
    ) -> None:
        self.width = width
        self.depth = depth
        self.kind = kind
        self.activation = activation
        self.epochs = epochs
        self.batch_size = batch_size
        self.structure = structure
        self.random_state = random_state

    # -- fitting -----------------------------------------------------------------------------------------------------

    def _train(self, X: np.ndarray, y: Tensor, outputs: int, **options: Any) -> None:
        """Everything learned: standardisation of X, model_ and laplace_."""
        self._x_mean, self._x_scale = _standards(X)
        x = self._inputs(X)
        spec = Spec(x.shape[1], outputs, self.width, self.depth, self.kind, self.activation)
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        options |= {"epochs": self.epochs, "batch_size": self.batch_size, "structure": self.structure}
        options["dtype"] = torch.float64  # predictions that do not depend on how rows are batched
        self.model_, self.laplace_, self._shift = train(x, y, self._task, spec, seed=seed, **options)
        self.spec_ = as_trained(spec, self.model_)
        with torch.no_grad():
            self.log_marginal_likelihood_ = float(self.laplace_.log_marginal_likelihood())

    def _inputs(self, X: np.ndarray) -> Tensor:
        return torch.from_numpy((X.astype(np.float64) - self._x_mean) / self._x_scale)

    def _checked(self, X: Any) -> Tensor:
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=[np.float64, np.float32])
        return self._inputs(cast(np.ndarray, X))

    def _generator(self, n_samples: Any, random_state: Any) -> torch.Generator:
        if isinstance(n_samples, bool) or not isinstance(n_samples, (int, np.integer)) or n_samples < 1:
            raise OptionError(f"n_samples is {n_samples!r}; expected a whole number >= 1.")
        seed = int(check_random_state(random_state).randint(np.iinfo(np.int32).max))
        return torch.Generator().manual_seed(seed)

    # -- copies ------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Network and posterior as plain tensors and numbers: no objects of torch or lapwing that may change."""
        state = {**cast(dict[str, Any], super().__getstate__())}
        model, laplace = state.pop("model_", None), state.pop("laplace_", None)
        if laplace is not None:
            state["spec_"] = asdict(self.spec_)
            state["_weights"] = dict(model.state_dict())
            state["_posterior"] = laplace.structure, laplace.state_dict()
        return state

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        kept = dict(state)
        weights, posterior = kept.pop("_weights", None), kept.pop("_posterior", None)
        super().__setstate__(kept)
        if weights is not None:
            self.spec_ = Spec(**kept["spec_"])
            own = {name: weight.clone() for name, weight in weights.items()}
            self.model_, self.laplace_ = restored(self.spec_, self._task, own, posterior[1])
            self._shift = kept.get("_shift")  # copies from before have their mean at the weights


class LaplaceRegressor(RegressorMixin, _Estimator):
    """Regression by a network whose weights have a Laplace posterior; one target or several.

    `width`, `depth`, `kind` ("mlp", "resnet") and `activation` ("tanh", "relu", "silu") say what the network is;
    `epochs` and `batch_size` None choose themselves by the number of rows; `structure` of the posterior is "auto",
    "full", "kron" or "diag"; `noise` is "constant", "varying" with the inputs, or "auto", which lets the evidence
    choose where there are rows enough.

    After `fit`: `model_` and `laplace_` (in standardised units), `sigma_` (the noise level, in units of the target;
    where it varies, the level around which), `log_marginal_likelihood_` (of the targets as they were given),
    `n_features_in_`, `feature_names_in_`.
    """

    _task = "regression"

    def __init__(
        self,
        width: Any = 50,
        depth: Any = 1,
        kind: Any = "mlp",
        activation: Any = "tanh",
        epochs: Any = None,
        batch_size: Any = None,
        structure: Any = "auto",
        noise: Any = "auto",
        random_state: Any = None,
    ) -> None:
        super().__init__(width, depth, kind, activation, epochs, batch_size, structure, random_state)
        self.noise = noise

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        super().__setstate__({"noise": "constant", **state})  # copies from before there was a choice

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any) -> LaplaceRegressor:
        X, y = validate_data(
            self, X, y, dtype=[np.float64, np.float32], multi_output=True, y_numeric=True, ensure_min_samples=2
        )
        y = np.asarray(y, dtype=np.float64)
        self._single = y.ndim == 1
        y = y.reshape(len(y), -1)
        self._y_mean, self._y_scale = _standards(y)
        self._train(X, torch.from_numpy((y - self._y_mean) / self._y_scale), y.shape[1], noise=self.noise)
        level = noise_level(self.model_) if self.spec_.varying else self.laplace_.sigma_noise
        sigma = level.numpy() * self._y_scale
        self.sigma_ = float(sigma[0]) if self._single else sigma
        # the density of y is that of the standardised y over the scale
        self.log_marginal_likelihood_ -= len(y) * float(np.log(self._y_scale).sum())
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The mean, and with `return_std` the standard deviation of a new observation.

        The latter holds both what the weights leave open and the noise. Where the noise is constant it is `sigma_`, and
        the weights' share is sqrt(std^2 - sigma_^2).
        """
        x = self._checked(X)
        if not return_std:
            with torch.no_grad():
                outputs = torch.cat([self.model_(part) for part in x.split(ROWS)])
            return self._shaped(outputs[:, : len(self._y_scale)].numpy())
        parts = [self.laplace_(part, diagonal_output=True) for part in x.split(ROWS)]
        value, variance = (torch.cat(part) for part in zip(*parts, strict=True))
        if self.spec_.varying:
            amounts = Amounts.of_heads(value, variance)
        else:
            amounts = Amounts.of_sigma(value, variance, self.laplace_.sigma_noise)
        mean, std = (moment.reshape(len(x), -1).numpy() for moment in (amounts.mean, amounts.deviation))
        return self._shaped(mean), self._shaped(std, shift=False)

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Draws of new observations, [N, n_samples] or [N, C, n_samples]: one draw of the weights moves all rows."""
        x, generator = self._checked(X), self._generator(n_samples, random_state)
        drawn = self.laplace_.functional_samples(x, n_samples=int(n_samples), generator=generator)
        mean, sigma = drawn, self.laplace_.sigma_noise
        if self.spec_.varying:
            mean, level = drawn.chunk(2, -1)
            sigma = (level / 2).exp()
        noise = torch.randn(mean.shape, dtype=mean.dtype, generator=generator)
        drawn = (mean + sigma * noise).numpy() * self._y_scale + self._y_mean  # [S, N, C]
        drawn = drawn.transpose(1, 2, 0)
        return drawn[:, 0] if self._single else drawn

    def _shaped(self, values: np.ndarray, shift: bool = True) -> np.ndarray:
        values = values * self._y_scale + (self._y_mean if shift else 0.0)
        return values[:, 0] if self._single else values


class LaplaceClassifier(ClassifierMixin, _Estimator):
    """Classification by a network whose weights have a Laplace posterior; labels of any kind.

    Arguments as for `LaplaceRegressor`. After `fit`: `classes_`, `model_`, `laplace_`, `log_marginal_likelihood_`,
    `n_features_in_`, `feature_names_in_`. The posterior learns also from rows that the network was trained without, so
    that its mean may not be at the weights of `model_`: see `lapwing.tables.shift`.
    """

    _task = "classification"

    def fit(self, X: Any, y: Any) -> LaplaceClassifier:
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], ensure_min_samples=2)
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise DataError(
                f"y has one class, {self.classes_[0]!r}; expected two or more. A classifier has nothing to tell apart."
            )
        self._train(X, torch.from_numpy(numbers.astype(np.int64)), len(self.classes_))
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probability of each class, [N, C], in the order of `classes_`."""
        x = self._checked(X)
        p = torch.cat([self._probable(part) for part in x.split(ROWS)]).double()
        return (p / p.sum(1, keepdim=True)).numpy()

    @torch.no_grad()
    def _probable(self, x: Tensor) -> Tensor:
        linear = self.laplace_.linearise(x)
        variance = self.laplace_.posterior.precision.variances(linear).reshape(linear.value.shape)
        return probit(linear.value + self._moved(linear), variance.clamp_min(0))

    def _moved(self, linear: LinearMap) -> Tensor | float:
        """What the shift of the mean adds to the logits."""
        return 0.0 if self._shift is None else linear.mv(self._shift)

    def predict(self, X: Any) -> np.ndarray:
        """The most probable label."""
        probabilities = self.predict_proba(X)
        return self.classes_[probabilities.argmax(1)]

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Draws of labels, [N, n_samples]: one draw of the weights moves all rows, and each row draws its label."""
        x, generator = self._checked(X), self._generator(n_samples, random_state)
        drawn = self.laplace_.functional_samples(x, n_samples=int(n_samples), generator=generator)  # [S, N, C]
        with torch.no_grad():
            drawn = (drawn + self._moved(self.laplace_.linearise(x))).softmax(-1)
        labels = torch.multinomial(drawn.flatten(0, 1), 1, generator=generator).reshape(drawn.shape[:2])
        return self.classes_[labels.numpy().T]


# -- details --------------------------------------------------------------------------------------------------------


def _standards(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and scale of each column; a column that is constant, to rounding, keeps the scale 1.

    Taken of the differences from the first row, in units of the largest: no square over- or underflows, and what is
    common to all rows takes no digits from how they differ.
    """
    values = values.astype(np.float64)
    moved = values - values[0]
    unit = np.abs(moved).max(0)
    unit = np.where((unit > 0) & np.isfinite(unit), unit, 1.0)
    mean, scale = values[0] + unit * (moved / unit).mean(0), unit * (moved / unit).std(0)
    constant = scale <= 10 * np.finfo(np.float64).eps * np.abs(mean)
    return mean, np.where(constant, 1.0, scale)
