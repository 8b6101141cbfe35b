"""Setup: what a posterior is made with. It does not change after construction, and is what files describe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lapwing.laplace.structures import Recipe
from lapwing.likelihoods import Likelihood


@dataclass(frozen=True, eq=False)
class Setup:
    """`likelihood` as it was given, `distribution` at unit noise; `arguments` of the constructor that files keep."""

    kind: type
    model: nn.Module
    likelihood: str | Likelihood
    distribution: Likelihood
    has_noise: bool
    recipe: Recipe
    arguments: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of the posterior's class."""
        return self.kind.__name__

    @property
    def options(self) -> dict[str, Any]:
        """Everything that a constructor needs again, by name; `draws` is the number of draws of a random estimator."""
        recipe = self.recipe
        drawn = {"distribution": recipe.distribution} if recipe.source == "projection" else {}
        return {**self.arguments, "estimator": recipe.source, "draws": recipe.draws, **drawn, **recipe.options}
