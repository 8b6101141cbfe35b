"""ContinualPlugin: tasks of an Avalanche strategy under the posterior of those before; needs `avalanche-lib`.

    continual = Continual(model, "classification", method="online", structure="kron")
    strategy = Naive(model=model, optimizer=optimizer, plugins=[ContinualPlugin(continual)], train_epochs=5)

The gradient of the quadratic is added between the backward pass and the optimiser's step, and an experience is
remembered when its training has ended: one curvature pass over its data. Predictions with error bars are
`continual.predict`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from lapwing.errors import ModelError, OptionError
from lapwing.training.continual import Continual
from lapwing.training.quadratic_term import QuadraticTerm

try:
    from avalanche.core import SupervisedPlugin  # pyright: ignore[reportMissingImports]
except ImportError:  # this module can be read without it, and its class says what is missing
    SupervisedPlugin = object


class ContinualPlugin(SupervisedPlugin):  # pyright: ignore[reportGeneralTypeIssues, reportUntypedBaseClass]
    """`continual` has the strategy's model; the strategy's loss is to be the mean over a batch of -log p(y | f)."""

    def __init__(self, continual: Continual) -> None:
        if SupervisedPlugin is object:
            raise OptionError(
                "ContinualPlugin needs Avalanche, which is not installed; expected it. Install it with pip install "
                "avalanche-lib, or call Continual.learn for every task."
            )
        super().__init__()
        self.continual = continual
        self._term: QuadraticTerm | None = None
        self._points = 0

    def before_training_exp(self, strategy: Any, *_: Any, **__: Any) -> None:
        if strategy.model is not self.continual.model:
            raise ModelError(
                "the strategy trains another model than that of Continual; expected the same object. A strategy that "
                "wraps or adapts its model is not supported."
            )
        self._points = len(strategy.adapted_dataset)
        self._term = self.continual.term(self._points)

    def before_update(self, strategy: Any, *_: Any, **__: Any) -> None:
        assert self._term is not None
        space = self.continual.space
        held = dict(strategy.model.named_parameters())
        self._term.at([held[name] for name in space.names])[1](1.0)

    def after_training_exp(self, strategy: Any, *_: Any, **__: Any) -> None:
        self.continual.remember(_Pairs(strategy.dataloader), self._points)
        self._term = None


@dataclass(frozen=True)
class _Pairs:
    """Batches without the task labels, which Avalanche puts third."""

    loader: Iterable[Any]

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return ((batch[0], batch[1]) for batch in self.loader)
