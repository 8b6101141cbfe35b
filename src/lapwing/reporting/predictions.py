"""Targets and what was predicted for them, laid out flat: one class for each kind of target.

    Numbers   a `Distribution` [n]: a Gaussian for every target, or a mixture of them where the noise is learnt too
    Counts    a `Distribution` of whole numbers [n], say Poisson laws with uncertain rates
    Classes   probabilities of the network as trained and of the posterior [n, C]

"network" is the network alone (MAP), "laplace" its posterior. `uncertainty` [n] is what unfamiliar inputs should have
more of.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lapwing.distributions import Distribution
from lapwing.metrics import entropy

Source = Literal["network", "laplace"]
SOURCES: tuple[Source, ...] = ("network", "laplace")


@dataclass(frozen=True, eq=False)
class Targets(ABC):
    """Targets on a line that were to be predicted, and the laws that were predicted for them."""

    targets: Float[Tensor, " n"]
    laplace: Distribution
    network: Distribution

    @property
    def mean(self) -> Float[Tensor, " n"]:
        return self.laplace.mean

    @property
    def deviation(self) -> Float[Tensor, " n"]:
        """Of a new target: what the weights leave open, and chance given them."""
        return self.laplace.deviation

    @property
    def epistemic(self) -> Float[Tensor, " n"]:
        return self.laplace.epistemic

    @property
    def uncertainty(self) -> Float[Tensor, " n"]:
        return self.epistemic

    @property
    def parts(self) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """The deviation as two: by the weights, which more data would settle, and by chance given them."""
        return self.laplace.parts

    def expected(self, source: Source) -> Float[Tensor, " n"]:
        return self._by(source).mean

    def log_prob(self, source: Source) -> Float[Tensor, " n"]:
        """Of every target."""
        return self._by(source).log_prob(self.targets)

    @abstractmethod
    def below(self, source: Source) -> Float[Tensor, " n"]:
        """The predicted probability of a value below the target: uniform where predictions are right."""

    @abstractmethod
    def inside(self, source: Source, level: float) -> Bool[Tensor, " n"]:
        """Whether a target is in the central interval of this probability."""

    @abstractmethod
    def widths(self, source: Source, levels: Sequence[float]) -> list[float]:
        """Mean widths of the central intervals."""

    def _by(self, source: Source) -> Distribution:
        return self.laplace if source == "laplace" else self.network


@dataclass(frozen=True, eq=False)
class Numbers(Targets):
    """Numbers, and what was predicted for them."""

    def below(self, source: Source) -> Float[Tensor, " n"]:
        """The predicted probability of a value below the target: uniform where predictions are right."""
        return self._below[source]

    @cached_property
    def _below(self) -> dict[Source, Float[Tensor, " n"]]:
        return {source: self._by(source).cdf(self.targets) for source in SOURCES}

    def inside(self, source: Source, level: float) -> Bool[Tensor, " n"]:
        """Whether a target is in the central interval of this probability."""
        return (2 * self.below(source) - 1).abs() <= level

    def widths(self, source: Source, levels: Sequence[float], rows: int = 2000) -> list[float]:
        """Mean widths of the central intervals, of some of the rows where there are more."""
        law = self._by(source)
        if len(self.targets) > rows:
            some = torch.randperm(len(self.targets), generator=torch.Generator().manual_seed(0))[:rows]
            law = law.rows(some)
        return [float(law.width(level).mean()) for level in levels]

    def rescaled(self, scale: float, shift: float) -> Numbers:
        """In other units: value * scale + shift."""
        both = (law.rescaled(scale, shift) for law in (self.laplace, self.network))
        return Numbers(self.targets * scale + shift, *both)


@dataclass(frozen=True, eq=False)
class Counts(Targets):
    """Counts, and what was predicted for them."""

    def below(self, source: Source, seed: int = 0) -> Float[Tensor, " n"]:
        """A draw between P(count < y) and P(count <= y): uniform where predictions are right, as for numbers."""
        upper, lower = self._cdf(source)
        share = torch.rand(len(upper), dtype=upper.dtype, generator=torch.Generator().manual_seed(seed))
        return lower + share * (upper - lower)

    def inside(self, source: Source, level: float) -> Bool[Tensor, " n"]:
        """Whether a count is between the (1 - level) / 2 and the (1 + level) / 2 quantile, both included."""
        upper, lower = self._cdf(source)
        return (upper >= (1 - level) / 2) & (lower < (1 + level) / 2)

    def widths(self, source: Source, levels: Sequence[float], rows: int = 1000, draws: int = 2000) -> list[float]:
        """Mean widths of those intervals, the number of counts in each less one, from draws for some of the rows."""
        generator = torch.Generator().manual_seed(0)
        some = torch.randperm(len(self.targets), generator=generator)[:rows]
        drawn = self._by(source).rows(some).draw(draws, generator)
        level = torch.tensor(levels, dtype=drawn.dtype)
        low, high = (drawn.quantile(q, 0, interpolation="higher") for q in ((1 - level) / 2, (1 + level) / 2))
        return (high - low).mean(1).tolist()

    def _cdf(self, source: Source) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """P(count <= y) and P(count < y)."""
        law = self._by(source)
        return law.cdf(self.targets), law.cdf(self.targets - 1)


@dataclass(frozen=True, eq=False)
class Classes:
    """Classes that were to be predicted, and the probabilities they were given."""

    targets: Int[Tensor, " n"]
    network: Float[Tensor, "n classes"]
    probabilities: Float[Tensor, "n classes"]
    epistemic: Float[Tensor, " n"]
    """Standard deviation of the logits, the root mean square over classes."""
    scaled: Float[Tensor, "n classes"] | None = None
    """Of the network with a temperature, where that is known."""

    @property
    def uncertainty(self) -> Float[Tensor, " n"]:
        return entropy(self.probabilities)
