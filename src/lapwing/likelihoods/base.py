"""The contract of an output distribution p(y | f): what curvature, evidence and prediction need to know of it.

A network output f holds, for each of B data points, one vector of C numbers per position. Layouts: [B, C],
[B, T, C] (class axis last), [B, C, H, W] and [B, C, D, H, W] (class axis 1); `class_axis` overrides that rule, e.g.
`class_axis=1` for [B, C, L]. `to_last` brings every layout to [*lead, C] with lead[0] = B; positions lead[1:] are
independent given f, so second derivatives are C x C blocks, one per position.

    log_prob      [B]             log p(y | f), summed over positions, every constant included
    grad          shape of f      d(-log p)/df
    hessian       [*lead, C, C]   d^2(-log p)/df^2
    hessian_sqrt  [*lead, C, R]   S with S S^T = psd_hessian: the Hessian itself where `convex`
    hessian_mv    shape of f      psd_hessian v, without the matrix where a closed form is known
    hessian_diagonal              the diagonal of psd_hessian, of the shape of f, likewise
    fisher        [*lead, C, C]   E_{y ~ p(.|f)}[grad grad^T]
    fisher_sqrt   [*lead, C, R]
    sample        a target        y ~ p(. | f), fresh at each call

What follows for a prediction is the likelihood's own, too. Where it says nothing, a prediction is the mean and the
variance of f, grids score by draws, and there is neither calibration nor report.

    links             closed forms from Gaussian f to probabilities, by name; `predicted` and `outputs_of` at a point
    predictive        the law of every target for Gaussian f: a `distributions.Distribution`
    signal_and_noise  the mean of y and the variance of Gaussian noise around it
    split_noise       the noise level that is free to change after a fit; `at_noise` sets it

Cost: O(positions x C) for vectors and O(positions x C x C) for matrices; nothing loops over data in Python. Outputs in
float16 or bfloat16 are computed, and returned, in float32. `check` reads the values of the targets (one reduction); the
other methods look at shape, dtype and device only, so that they neither synchronise a GPU nor break under `vmap`.

>>> import torch
>>> from lapwing.likelihoods import Gaussian
>>> f, y = torch.zeros(1, 2, 4, 4), torch.ones(1, 2, 4, 4)
>>> Gaussian().to_last(f).shape, Gaussian().grad(f, y).unique().item()   # f - y = -1 for unit variance
(torch.Size([1, 4, 4, 2]), -1.0)
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from lapwing.distributions import Distribution
from lapwing.errors import DataError, LikelihoodError, OptionError
from lapwing.likelihoods.links import DEFAULT, Link, check_link


@dataclass(frozen=True, eq=False)
class Likelihood(ABC):
    """Output distribution p(y | f). Finals that factor over positions extend `Positionwise`."""

    REGRESSION: ClassVar[str] = "regression"
    CLASSIFICATION: ClassVar[str] = "classification"
    REWARD_MODELING: ClassVar[str] = "reward_modeling"
    """Names of tasks, as code written for laplace-torch takes them from its enumeration of this name."""

    convex: ClassVar[bool]
    """True when -log p is convex in f for every y, so that `hessian_sqrt` factorises the exact Hessian."""

    per_output: ClassVar[bool] = False
    """True when y carries the class axis (regression, multi-label), False when there is one target per position."""

    diagonal: ClassVar[bool] = False
    """True when `psd_hessian` is diagonal: its root is then that of `hessian_diagonal`, without a matrix [C, C]."""

    links: ClassVar[Mapping[str, Link]] = {}
    """Closed forms to probabilities by the names of `link_approx`, `DEFAULT` among them; none for other predictions."""

    adds_noise: ClassVar[bool] = False
    """Whether y is f plus Gaussian noise that does not depend on f."""

    class_axis: int | None = field(default=None, kw_only=True)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.links and DEFAULT not in cls.links:
            raise LikelihoodError(
                message(
                    f"{cls.__name__} with the links {sorted(cls.links)}",
                    f"{DEFAULT!r} among them, which is asked for where nobody chose",
                    f"give the closed form that should serve by default the name {DEFAULT!r} too",
                )
            )

    def __post_init__(self) -> None:
        if self.class_axis == 0:
            raise LikelihoodError(
                message("class_axis=0", "an axis after the batch axis", "use class_axis=-1 or class_axis=1")
            )

    # -- layout

    def to_last(self, f: Shaped[Tensor, "batch *outputs"]) -> Shaped[Tensor, "*lead C"]:
        """View with the class axis last: [*lead, C], lead[0] = B."""
        return f.movedim(self._axis(f), -1)

    def from_last(
        self, f_last: Shaped[Tensor, "*lead C"], shape: torch.Size | None = None
    ) -> Shaped[Tensor, "batch *outputs"]:
        """Undo `to_last`. `shape` is that of the original outputs; only `from_function` needs it."""
        return f_last.movedim(-1, self._axis(f_last))

    def _axis(self, f: Tensor) -> int:
        if f.ndim < 2:
            raise LikelihoodError(
                message(
                    f"outputs of shape {tuple(f.shape)}",
                    "a batch axis and an output axis, [B, C], [B, T, C] or [B, C, H, W]",
                    "add the output axis: f.unsqueeze(-1)",
                )
            )
        if self.class_axis is None:
            return f.ndim - 1 if f.ndim <= 3 else 1
        axis = self.class_axis + f.ndim if self.class_axis < 0 else self.class_axis
        if not 1 <= axis < f.ndim:
            raise LikelihoodError(
                message(
                    f"class_axis={self.class_axis} for outputs of shape {tuple(f.shape)}",
                    f"an axis from 1 to {f.ndim - 1}",
                    "set class_axis to the axis that holds the classes, or leave it None",
                )
            )
        return axis

    # -- checks

    def check(self, f: Tensor, y: Tensor) -> None:
        """Raise `LikelihoodError` or `DataError` unless y is a valid target for f. Reads y once."""
        self._check_metadata(f, y)
        if self._all_valid(f, y):
            return
        invalid = self._invalid(f, y)
        index = invalid.nonzero()[0].tolist()
        value = y[tuple(index)].item()
        found = f"{type(self).__name__} target {value} at index {index} ({int(invalid.sum())} such values)"
        expected, remedy = self._domain(f)
        if y.is_floating_point() and not bool(torch.isfinite(y[tuple(index)])):
            remedy = f"remove or impute the missing targets, data point {index[0]} of this batch first"
            raise DataError(message(found, "finite targets", remedy))
        raise LikelihoodError(message(found, expected, remedy))

    def _check_outputs(self, f: Tensor) -> None:
        self._axis(f)
        if not f.is_floating_point():
            raise LikelihoodError(
                message(f"outputs of dtype {f.dtype}", "floating-point outputs", "pass the network's raw outputs")
            )

    def _check_metadata(self, f: Tensor, y: Tensor) -> None:
        self._check_outputs(f)
        if y.device != f.device:
            raise LikelihoodError(
                message(
                    f"targets on {y.device} and outputs on {f.device}", "one device", f"move them: y.to('{f.device}')"
                )
            )
        self._check_target(f, y)

    @abstractmethod
    def _check_target(self, f: Tensor, y: Tensor) -> None:
        """Shape and dtype of y; values are left to `_invalid`."""

    @abstractmethod
    def _invalid(self, f: Tensor, y: Tensor) -> Bool[Tensor, "*target"]:
        """True where a value of y is outside the support, NaN and infinity included."""

    def _all_valid(self, f: Tensor, y: Tensor) -> bool:
        """Whether `_invalid` is nowhere true; where there is a cheaper way to ask."""
        return not bool(self._invalid(f, y).any())

    @abstractmethod
    def _domain(self, f: Tensor) -> tuple[str, str]:
        """What `_invalid` accepts, and the remedy, in words."""

    def observed(self, y: Tensor) -> Bool[Tensor, "*lead"] | None:
        """Which positions have a target; None where all do. The others contribute nothing, whatever is drawn there."""
        return None

    # -- the distribution

    @abstractmethod
    def log_prob(self, f: Float[Tensor, "batch *outputs"], y: Tensor) -> Float[Tensor, " batch"]:
        """log p(y_n | f_n) for each data point, summed over its positions, with every constant."""

    def total_loss(self, f: Float[Tensor, "batch *outputs"], y: Tensor) -> Float[Tensor, ""]:
        """-log p(y | f) summed over data points: what training minimises, in as few operations as there may be."""
        return -self.log_prob(f, y).sum()

    @abstractmethod
    def grad(self, f: Float[Tensor, "batch *outputs"], y: Tensor) -> Float[Tensor, "batch *outputs"]:
        """Gradient of the negative log-likelihood in f."""

    @abstractmethod
    def hessian(self, f: Float[Tensor, "batch *outputs"], y: Tensor) -> Float[Tensor, "*lead C C"]:
        """Exact Hessian of the negative log-likelihood in f; indefinite where not `convex`."""

    @abstractmethod
    def hessian_sqrt(self, f: Float[Tensor, "batch *outputs"], y: Tensor) -> Float[Tensor, "*lead C R"]:
        """S with S S^T = `psd_hessian(f, y)`."""

    @abstractmethod
    def psd_hessian(self, f: Float[Tensor, "batch *outputs"], y: Tensor) -> Float[Tensor, "*lead C C"]:
        """The Hessian where `convex`, else the positive semi-definite substitute that the final class states."""

    def hessian_mv(self, f: Float[Tensor, "batch *outputs"], y: Tensor, v: Tensor) -> Float[Tensor, "batch *outputs"]:
        """`psd_hessian(f, y)` times v, which has the shape of f: the middle of a product J^T H J with a vector."""
        require_vector(f, v)
        product = torch.einsum("... i j, ... j -> ... i", self.psd_hessian(f, y), self.to_last(working(v)))
        return self.from_last(product, f.shape)

    def hessian_diagonal(self, f: Float[Tensor, "batch *outputs"], y: Tensor) -> Float[Tensor, "batch *outputs"]:
        """The diagonal of `psd_hessian(f, y)`."""
        return self.from_last(self.psd_hessian(f, y).diagonal(dim1=-2, dim2=-1), f.shape)

    @abstractmethod
    def fisher(self, f: Float[Tensor, "batch *outputs"]) -> Float[Tensor, "*lead C C"]:
        """E[grad grad^T] over y ~ p(. | f)."""

    @abstractmethod
    def fisher_sqrt(self, f: Float[Tensor, "batch *outputs"]) -> Float[Tensor, "*lead C R"]:
        """S with S S^T = `fisher(f)`."""

    @abstractmethod
    def sample(self, f: Float[Tensor, "batch *outputs"], generator: torch.Generator | None = None) -> Tensor:
        """Targets y ~ p(. | f) that `check` accepts; no gradient flows through them."""

    # -- predictions

    @property
    def has_probabilities(self) -> bool:
        """Whether a prediction is a probability for every output; else it is their mean and variance."""
        return bool(self.links)

    @property
    def has_classes(self) -> bool:
        """Whether y is a class or an event, of which `predicted` gives probabilities."""
        return bool(self.links)

    @property
    def has_closed_form(self) -> bool:
        """Whether `target_log_prob` is known."""
        return bool(self.links) or type(self).predictive is not Likelihood.predictive

    def of_targets(self) -> "Likelihood":
        """The likelihood that predicts targets: itself, unless users ask for something else of it (`Preference`)."""
        return self

    def predicted(self, f: Float[Tensor, "batch *outputs"]) -> Float[Tensor, "batch *prediction"]:
        """The prediction at known outputs: probabilities of classes or events, else f itself."""
        return f

    def outputs_of(self, p: Float[Tensor, "batch *outputs"]) -> Float[Tensor, "batch *outputs"]:
        """Outputs of which p is `predicted`; needed where there are `links`."""
        raise LikelihoodError(
            message(f"{type(self).__name__} without outputs_of", "the inverse of predicted", "write _outputs_of")
        )

    def link(self, name: str) -> Link:
        """The closed form of that name."""
        if name not in self.links:
            check_link(name)
            raise OptionError(
                f"link {name!r} for {type(self).__name__}; expected 'probit' or 'mc', which serve every shape, or "
                f"another of {sorted(self.links)}. 'quadrature' is for single events, 'bridge' and 'bridge_norm' are "
                "for classes that exclude each other; draws ('mc') have no closed form."
            )
        return self.links[name]

    def probabilities(
        self, mean: Float[Tensor, "batch *outputs"], spread: Float[Tensor, "batch *spread"], link: str = DEFAULT
    ) -> Float[Tensor, "batch *outputs"]:
        """For Gaussian outputs; `spread` is their variance, or [B, C, C] where the link is joint."""
        closed = self.link(link)
        closed.check(mean)
        if closed.joint:
            return closed.of(mean, spread)
        return self.from_last(closed.of(self.to_last(mean), self.to_last(spread)), mean.shape)

    def predictive(
        self, mean: Float[Tensor, "*lead C"], variance: Float[Tensor, "*lead C"], sigma: float | Tensor = 1.0
    ) -> Distribution | None:
        """The law of every target in turn, for Gaussian outputs; None where there is no closed form.

        `sigma` multiplies the noise level of a likelihood that has one.
        """
        return None

    def target_log_prob(
        self,
        mean: Float[Tensor, "n C"],
        variance: Float[Tensor, "n C"],
        y: Shaped[Tensor, "n *D"],
        sigma: float | Tensor = 1.0,
    ) -> Float[Tensor, " count"]:
        """log p of every target in turn, for Gaussian outputs, where it `has_closed_form`."""
        law = self.predictive(mean, variance, sigma)
        assert law is not None
        return law.log_prob(y.flatten())

    def signal_and_noise(
        self, f: Float[Tensor, "*lead C"], sigma: float | Tensor = 1.0
    ) -> tuple[Float[Tensor, "*lead D"], Float[Tensor, "*lead D"]] | None:
        """The mean of y, and the variance of Gaussian noise around it; None for targets of another kind."""
        return None

    def split_noise(self) -> tuple["Likelihood", float | None]:
        """The likelihood at unit noise, and the level that is free to change after a fit; itself and None without."""
        return self, None

    def at_noise(self, sigma: float) -> "Likelihood":
        """With this noise level, for a likelihood that has one that is free."""
        return self

    def refuse_probabilities(self, f: Float[Tensor, "batch *outputs"]) -> None:  # noqa: B027
        """Refuses outputs that are probabilities where logits belong, if that is certain; warns if it is likely."""


class Positionwise(Likelihood):
    """A likelihood that factors over positions: finals compute on [*lead, C], this class handles the layout.

    The defaults are those of an exponential family in its natural parameters: the Hessian does not depend on y and
    is the Fisher.
    """

    def log_prob(self, f: Float[Tensor, "batch *outputs"], y: Tensor) -> Float[Tensor, " batch"]:
        per_position = self._log_prob(*self._prepare(f, y))
        return per_position.flatten(1).sum(1) if per_position.ndim > 1 else per_position

    def grad(self, f: Float[Tensor, "batch *outputs"], y: Tensor) -> Float[Tensor, "batch *outputs"]:
        return self.from_last(self._grad(*self._prepare(f, y)), f.shape)

    def hessian(self, f: Float[Tensor, "batch *outputs"], y: Tensor) -> Float[Tensor, "*lead C C"]:
        return self._hessian(*self._prepare(f, y))

    def hessian_sqrt(self, f: Float[Tensor, "batch *outputs"], y: Tensor) -> Float[Tensor, "*lead C R"]:
        return self._hessian_sqrt(*self._prepare(f, y))

    def psd_hessian(self, f: Float[Tensor, "batch *outputs"], y: Tensor) -> Float[Tensor, "*lead C C"]:
        return self._psd_hessian(*self._prepare(f, y))

    def hessian_mv(self, f: Float[Tensor, "batch *outputs"], y: Tensor, v: Tensor) -> Float[Tensor, "batch *outputs"]:
        require_vector(f, v)
        return self.from_last(self._hessian_mv(*self._prepare(f, y), self.to_last(working(v))), f.shape)

    def hessian_diagonal(self, f: Float[Tensor, "batch *outputs"], y: Tensor) -> Float[Tensor, "batch *outputs"]:
        return self.from_last(self._hessian_diagonal(*self._prepare(f, y)), f.shape)

    def fisher(self, f: Float[Tensor, "batch *outputs"]) -> Float[Tensor, "*lead C C"]:
        self._check_outputs(f)
        return self._fisher(self.to_last(working(f)))

    def fisher_sqrt(self, f: Float[Tensor, "batch *outputs"]) -> Float[Tensor, "*lead C R"]:
        self._check_outputs(f)
        return self._fisher_sqrt(self.to_last(working(f)))

    @torch.no_grad()
    def sample(self, f: Float[Tensor, "batch *outputs"], generator: torch.Generator | None = None) -> Tensor:
        self._check_outputs(f)
        # Drawn where the generator lives, so that a CPU generator gives the same targets for outputs on any device.
        place = f.device if generator is None else generator.device
        y = self._sample(self.to_last(working(f)).to(place), generator).to(f.device)
        return self.from_last(y, f.shape) if self.per_output else y

    def predicted(self, f: Float[Tensor, "batch *outputs"]) -> Float[Tensor, "batch *prediction"]:
        return self.from_last(self._predicted(self.to_last(f)), f.shape) if self.links else f

    def outputs_of(self, p: Float[Tensor, "batch *outputs"]) -> Float[Tensor, "batch *outputs"]:
        return self.from_last(self._outputs_of(self.to_last(p)), p.shape)

    def target_log_prob(
        self,
        mean: Float[Tensor, "n C"],
        variance: Float[Tensor, "n C"],
        y: Shaped[Tensor, "n *D"],
        sigma: float | Tensor = 1.0,
    ) -> Float[Tensor, " count"]:
        if not self.links:
            return super().target_log_prob(mean, variance, y, sigma)
        link = self.links[DEFAULT]
        f = self._outputs_of(link.of(mean, variance)) if link.outputs is None else link.outputs(mean, variance)
        return self._log_prob(f.reshape(-1, 1), y.reshape(-1, 1)) if self.per_output else self._log_prob(f, y)

    def _predicted(self, f: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C"]:
        if self.links:
            raise LikelihoodError(
                message(f"{type(self).__name__} with links and without _predicted", "both", "write _predicted")
            )
        return f

    def _outputs_of(self, p: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C"]:
        return super().outputs_of(p)

    def _prepare(self, f: Tensor, y: Tensor) -> tuple[Float[Tensor, "*lead C"], Tensor]:
        self._check_metadata(f, y)
        f_last = self.to_last(working(f))
        return f_last, self._target_to_last(f_last, y)

    def _target_to_last(self, f: Float[Tensor, "*lead C"], y: Tensor) -> Tensor:
        return (self.to_last(y) if self.per_output else y).to(f.dtype)

    @abstractmethod
    def _log_prob(self, f: Float[Tensor, "*lead C"], y: Tensor) -> Float[Tensor, "*lead"]: ...

    @abstractmethod
    def _grad(self, f: Float[Tensor, "*lead C"], y: Tensor) -> Float[Tensor, "*lead C"]: ...

    @abstractmethod
    def _fisher(self, f: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C C"]: ...

    @abstractmethod
    def _fisher_sqrt(self, f: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C R"]: ...

    @abstractmethod
    def _sample(self, f: Float[Tensor, "*lead C"], generator: torch.Generator | None) -> Tensor: ...

    def _hessian(self, f: Float[Tensor, "*lead C"], y: Tensor) -> Float[Tensor, "*lead C C"]:
        return self._fisher(f)

    def _hessian_sqrt(self, f: Float[Tensor, "*lead C"], y: Tensor) -> Float[Tensor, "*lead C R"]:
        return self._fisher_sqrt(f)

    def _psd_hessian(self, f: Float[Tensor, "*lead C"], y: Tensor) -> Float[Tensor, "*lead C C"]:
        return self._hessian(f, y)

    def _hessian_mv(
        self, f: Float[Tensor, "*lead C"], y: Tensor, v: Float[Tensor, "*lead C"]
    ) -> Float[Tensor, "*lead C"]:
        return torch.einsum("... i j, ... j -> ... i", self._psd_hessian(f, y), v)

    def _hessian_diagonal(self, f: Float[Tensor, "*lead C"], y: Tensor) -> Float[Tensor, "*lead C"]:
        return self._psd_hessian(f, y).diagonal(dim1=-2, dim2=-1)


def working(f: Tensor) -> Tensor:
    """f in the precision of computation: float32 for half-precision outputs, otherwise f itself."""
    return f.float() if f.dtype.itemsize < 4 else f


def positive_eigen(
    matrix: Float[Tensor, "*lead C C"],
) -> tuple[Float[Tensor, "*lead C"], Float[Tensor, "*lead C C"]]:
    """Eigenvalues clamped at zero, and eigenvectors, in float64."""
    values, vectors = torch.linalg.eigh(matrix.double())
    return values.clamp_min(0.0), vectors


def positive_sqrt(matrix: Float[Tensor, "*lead C C"]) -> Float[Tensor, "*lead C C"]:
    """S with S S^T the positive part of a symmetric matrix; O(C^3) per matrix."""
    values, vectors = positive_eigen(matrix)
    return (vectors * values.sqrt().unsqueeze(-2)).to(matrix.dtype)


def positive_part(matrix: Float[Tensor, "*lead C C"]) -> Float[Tensor, "*lead C C"]:
    """The nearest positive semi-definite matrix in Frobenius norm; O(C^3) per matrix."""
    values, vectors = positive_eigen(matrix)
    return ((vectors * values.unsqueeze(-2)) @ vectors.mT).to(matrix.dtype)


def require_shape(owner: Likelihood, f: Tensor, y: Tensor, expected: torch.Size, meaning: str, remedy: str) -> None:
    """Refuse targets of another shape: [B] against [B, 1] would broadcast to [B, B] without a word."""
    if y.shape != expected:
        raise LikelihoodError(
            message(
                f"{type(owner).__name__} targets of shape {tuple(y.shape)} for outputs of shape {tuple(f.shape)}",
                f"{tuple(expected)}, {meaning}",
                remedy,
            )
        )


def require_vector(f: Tensor, v: Tensor) -> None:
    """A vector that a matrix of the outputs is multiplied with: one number per output."""
    if v.shape != f.shape:
        raise LikelihoodError(
            message(
                f"a vector of shape {tuple(v.shape)} for outputs of shape {tuple(f.shape)}",
                "the shape of the outputs",
                "give one number per output",
            )
        )


def require_same_shape(owner: Likelihood, f: Tensor, y: Tensor) -> None:
    """Targets with one value per output."""
    axis = owner._axis(f)
    squeezed = f.shape[:axis] + f.shape[axis + 1 :]
    missing_axis = f.shape[axis] == 1 and y.shape == squeezed
    remedy = f"add the output axis: y.unsqueeze({axis})" if missing_axis else "give y the shape of the outputs"
    require_shape(owner, f, y, f.shape, "one value per output", remedy)


def require_one_per_position(owner: Likelihood, f: Tensor, y: Tensor, meaning: str) -> None:
    """Targets with one value per position: the shape of the outputs without the class axis."""
    axis = owner._axis(f)
    expected = f.shape[:axis] + f.shape[axis + 1 :]
    if y.ndim == f.ndim and y.shape[axis] == 1:
        remedy = f"drop the class axis: y.squeeze({axis})"
    elif y.shape == f.shape:
        remedy = f"for one-hot targets, y.argmax({axis})"
    else:
        remedy = "check the targets, or class_axis if the classes are on another axis"
    require_shape(owner, f, y, expected, meaning, remedy)


def require_real(owner: Likelihood, y: Tensor, *, allow_bool: bool) -> None:
    """Targets that are numbers: floating point or integers, and truth values where those make sense."""
    if y.is_complex() or (y.dtype == torch.bool and not allow_bool):
        raise LikelihoodError(
            message(
                f"{type(owner).__name__} targets of dtype {y.dtype}", "real numbers", "convert: y.to(torch.float32)"
            )
        )


def message(found: str, expected: str, remedy: str) -> str:
    return f"found {found}; expected {expected}; remedy: {remedy}"
