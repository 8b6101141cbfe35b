"""What a posterior predicts for held-out data, gathered over a loader: plain float64 vectors, no network any more.

Outputs of any shape are laid out flat; `row` says which row of the data an entry is of. Memory O(n C); one
linearisation per batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lapwing.distributions import Distribution
from lapwing.errors import DataError, LikelihoodError
from lapwing.estimate.data_pass import check_loss, no_batch
from lapwing.laplace import BaseLaplace
from lapwing.laplace.data import Pairs
from lapwing.laplace.predictions import moments, probabilities
from lapwing.linalg import LinearMap
from lapwing.metrics import entropy
from lapwing.reporting.predictions import Classes, Counts, Numbers
from lapwing.tangent.inputs import batch_size

OUTSIDE_ROWS = 1000
"""How many unfamiliar inputs are made where none are given."""
DRAWS = 500
"""Of the outputs, where a predictive probability has no closed form."""
SHOWN_COLUMNS = 4
"""Input columns that are kept for the table of uncertain rows."""


@dataclass(frozen=True, eq=False)
class Observations:
    """Predictions for a loader, the uncertainty of unfamiliar inputs, and the first columns of the rows."""

    data: Numbers | Counts | Classes
    row: Int[Tensor, " n"]
    outside: Float[Tensor, " m"] | None
    outside_network: Float[Tensor, " m"] | None
    outside_epistemic: Float[Tensor, " m"] | None
    outside_is_made: bool
    columns: Float[Tensor, "rows shown"] | None

    @property
    def rows(self) -> int:
        """How many rows of data were seen."""
        return int(self.row[-1]) + 1 if len(self.row) else 0

    def rescaled(self, scale: float, shift: float) -> Observations:
        if not isinstance(self.data, Numbers):
            return self
        data = self.data.rescaled(scale, shift)
        if self.outside is None:
            return replace(self, data=data)
        outside = self.outside * scale
        return replace(self, data=data, outside=outside, outside_epistemic=outside)


def observe(
    la: BaseLaplace,
    loader: Iterable[Any],
    outside: Tensor | Iterable[Any] | None = None,
    *,
    keep_columns: bool = False,
    seed: int = 0,
) -> Observations:
    """One pass over the loader, and one over `outside`: batches of inputs, with or without targets.

    Without `outside` unfamiliar inputs are made of those in the loader, where they are tensors of real numbers.
    """
    _ = la.posterior
    generator = torch.Generator().manual_seed(seed)
    found, made, columns, row, rows = [], [], [], [], 0
    for x, y in map(_pair, Pairs(loader, la.dict_key_y, la.space.device)):
        data, at = _predict(la, x, y)
        found.append(data)
        row.append(at + rows)
        rows += batch_size(x)
        if keep_columns and isinstance(x, Tensor) and x.dim() == 2:
            columns.append(x[:, :SHOWN_COLUMNS].detach().double().cpu())
        if outside is None and sum(map(len, made)) < OUTSIDE_ROWS and _can_be_disturbed(x):
            made.append(disturbed(x[:OUTSIDE_ROWS], generator))
    if not found:
        raise no_batch()
    data = _joined(found)
    unfamiliar = made if outside is None else list(_inputs(outside, la))
    scores = [_spread(la, x) for x in unfamiliar]
    networks = [network for _, network, _ in scores if network is not None]
    return Observations(
        data,
        torch.cat(row),
        outside=torch.cat([score for score, _, _ in scores]) if scores else None,
        outside_network=torch.cat(networks) if networks else None,
        outside_epistemic=torch.cat([deviation for _, _, deviation in scores]) if scores else None,
        outside_is_made=outside is None,
        columns=torch.cat(columns) if columns else None,
    )


def disturbed(x: Float[Tensor, "batch *features"], generator: torch.Generator) -> Float[Tensor, "batch *features"]:
    """Every feature shuffled over the rows on its own, then moved three times as far from its mean as it was."""
    flat = x.detach().flatten(1)
    order = torch.rand(flat.shape, generator=generator).argsort(0).to(flat.device)
    shuffled = flat.gather(0, order)
    centre = shuffled.mean(0)
    return (centre + 3 * (shuffled - centre)).reshape(x.shape)


def _can_be_disturbed(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() >= 2 and x.is_floating_point() and len(x) > 1


def _pair(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise DataError(
            f"a batch is a {type(batch).__name__}; expected a pair (x, y): a report compares predictions with targets."
        )
    return batch[0], batch[1]


def _inputs(outside: Tensor | Iterable[Any], la: BaseLaplace) -> Iterator[Any]:
    batches: Iterable[Any] = outside.split(500) if isinstance(outside, Tensor) else outside
    for batch in batches:
        yield batch[0] if isinstance(batch, (tuple, list)) and len(batch) == 2 else batch


def _predict(la: BaseLaplace, x: Any, y: Tensor) -> tuple[Numbers | Counts | Classes, Int[Tensor, " n"]]:
    """The entries of a batch, and the row within the batch that each is of."""
    likelihood = la.distribution.of_targets()
    with torch.no_grad():
        linear = la.linearise(x)
        check_loss(la.distribution, linear.value, y)
        if likelihood.has_classes:
            predictions = _classes(la, linear)
            targets, observed = y.flatten().long().cpu(), likelihood.observed(y)
            kept = slice(None) if observed is None else observed.flatten().cpu()
            return Classes(targets[kept], *(part[kept] for part in predictions)), _rows(targets, len(y))[kept]
        laplace, network = (_laws(la, linear, factor) for factor in (1.0, 0.0))
        targets = likelihood.to_last(y).reshape(-1).double().cpu()
    kind = Counts if laplace.discrete else Numbers
    return kind(targets, laplace, network), _rows(targets, len(y))


def _rows(entries: Tensor, rows: int) -> Int[Tensor, " n"]:
    return torch.arange(len(entries)) // max(1, len(entries) // rows)


def _classes(la: BaseLaplace, linear: LinearMap) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities of the network and of the posterior [n, C], and the deviation of the outputs [n]."""
    likelihood = la.distribution.of_targets()
    variance = moments(la.posterior, linear, diagonal=True)[1].double().cpu().clamp_min(0)
    if likelihood.links:
        posterior = probabilities(la.posterior, linear, likelihood)
    else:
        generator = torch.Generator(linear.value.device).manual_seed(0)
        posterior = probabilities(la.posterior, linear, likelihood, "mc", DRAWS, generator)
    network = likelihood.predicted(linear.value)
    if likelihood.per_output:  # every event of its own is one of two classes
        return _binary(network), _binary(posterior), variance.reshape(-1).sqrt()
    deviation = likelihood.to_last(variance).mean(-1).reshape(-1).sqrt()
    if network.shape != linear.value.shape:  # one event for all outputs of a position
        return _binary(network), _binary(posterior), deviation
    flat = (likelihood.to_last(p).flatten(0, -2).double().cpu() for p in (network, posterior))
    network, posterior = (p / p.sum(-1, keepdim=True) for p in flat)
    return network, posterior, deviation


def _spread(la: BaseLaplace, x: Any) -> tuple[Tensor, Tensor | None, Tensor]:
    """Of inputs without targets [n]: entropies of posterior and network, and epistemic deviations."""
    with torch.no_grad():
        linear = la.linearise(x)
        if la.distribution.has_classes:
            network, posterior, deviation = _classes(la, linear)
            return entropy(posterior), entropy(network), deviation
        deviation = _laws(la, linear).epistemic
        return deviation, None, deviation


def _binary(probability: Tensor) -> Float[Tensor, "n 2"]:
    flat = probability.reshape(-1).double().cpu()
    return torch.stack([1 - flat, flat], -1)


def _laws(la: BaseLaplace, linear: LinearMap, factor: float = 1.0) -> Distribution:
    """What is predicted for every target, with the posterior's covariance times a factor."""
    likelihood = la.distribution
    mean, variance = (likelihood.to_last(value) for value in moments(la.posterior, linear, diagonal=True))
    law = likelihood.predictive(mean, factor * variance, la.sigma_noise)
    if law is None:
        raise LikelihoodError(
            f"the likelihood is {type(likelihood).__name__}; expected a Gaussian, a heteroscedastic Gaussian, counts, "
            "classes or binary labels, whose predictions a report can compare with targets."
        )
    return law


def _joined(parts: Sequence[Numbers | Counts | Classes]) -> Numbers | Counts | Classes:
    columns = [[getattr(part, one.name) for part in parts] for one in fields(parts[0])]
    return type(parts[0])(*(_one(column) for column in columns))


def _one(column: list[Any]) -> Any:
    if column[0] is None:
        return None
    return type(column[0]).joined(column) if isinstance(column[0], Distribution) else torch.cat(column)
