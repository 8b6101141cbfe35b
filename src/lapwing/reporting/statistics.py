"""The figures of a report, one function for each part of the page: plain dictionaries of numbers, ready for JSON.

"network" is the network as trained (MAP), "laplace" its posterior. Intervals and sets are those of the `LEVELS`; the
conformal ones are calibrated on held-out scores, and in `crossed` each half of the data calibrates the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lapwing import metrics
from lapwing.errors import CurvatureError
from lapwing.laplace import BaseLaplace
from lapwing.priors import Gaussian, Prior
from lapwing.reporting.observations import Observations
from lapwing.reporting.predictions import SOURCES, Classes, Counts, Numbers, Source
from lapwing.reporting.words import Figures
from lapwing.tables.conformal import amount_scores, class_scores, class_sets, quantile

DENSE = 4000
"""Up to so many parameters a full curvature is made dense in float64."""
LEVELS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)


def summary(data: Numbers | Counts | Classes) -> list[Figures]:
    """Rows (measure, network, laplace, goal): goal is "low", "high" or the number to be near.

    Of classes also "scaled", the network with a temperature, where that is known.
    """
    if isinstance(data, Classes):
        known, y = [p for p in (data.network, data.probabilities, data.scaled) if p is not None], data.targets
        rows = [
            _row("Negative log-likelihood", "low", [metrics.nll(p, y) for p in known]),
            _row("Accuracy", "high", [metrics.accuracy(p, y) for p in known]),
            _row("Calibration error (ECE)", "low", [metrics.calibration_error(p, y) for p in known]),
            _row("Brier score", "low", [metrics.brier(p, y) for p in known]),
        ]
        levels = (0.9, 0.95)
        return rows + [_row(f"Coverage of {v:.0%} sets", v, [_covered_sets(p, y, v) for p in known]) for v in levels]
    rows = [
        _row("Negative log-likelihood", "low", [-float(data.log_prob(source).mean()) for source in SOURCES]),
        _row("Root mean squared error", "low", [metrics.rmse(data.expected(s), data.targets) for s in SOURCES]),
    ]
    for level in (0.5, 0.9, 0.95):
        covered = [_covered(data, source, level) for source in SOURCES]
        rows.append(_row(f"Coverage of {level:.0%} intervals", level, covered))
    return rows


def _row(measure: str, goal: str | float, values: Sequence[float]) -> Figures:
    return {"measure": measure, **dict(zip(("network", "laplace", "scaled"), values, strict=False)), "goal": goal}


def reliability(data: Classes, bins: int = 10) -> Figures:
    """Confidence and accuracy in bins of equal width, empty bins left out."""
    by_source: Figures = {}
    for name, p in (("network", data.network), ("laplace", data.probabilities)):
        confidence, chosen = p.max(-1)
        right = (chosen == data.targets).double()
        index = (confidence * bins).ceil().long().clamp(1, bins) - 1
        count = torch.bincount(index, minlength=bins)
        kept = count > 0
        sums = [torch.zeros(bins, dtype=torch.float64).index_add(0, index, v)[kept] for v in (confidence, right)]
        by_source[name] = {
            "confidence": (sums[0] / count[kept]).tolist(),
            "accuracy": (sums[1] / count[kept]).tolist(),
            "count": count[kept].tolist(),
            "mean_confidence": float(confidence.mean()),
            "ece": metrics.calibration_error(p, data.targets),
        }
    return by_source


def transform(data: Numbers | Counts) -> Figures:
    """Histogram of the predicted probability of a value below the observed one (PIT): flat where calibrated."""
    bins = min(20, max(4, len(data.targets) // 15))
    shares = {s: torch.histc(data.below(s), bins, 0, 1).div(len(data.targets)).mul(bins).tolist() for s in SOURCES}
    return {"bins": bins, **shares}


def coverage(data: Numbers | Counts | Classes, conformal: Figures | None = None, seed: int = 0) -> Figures:
    """Share of targets inside the interval or set of every level, and how wide or large they are."""
    if isinstance(data, Classes):
        both = {"network": _sets(data.network, data.targets), "laplace": _sets(data.probabilities, data.targets)}
    else:
        both = {source: _intervals(data, source) for source in SOURCES}
    return {"levels": list(LEVELS), **both, "conformal": conformal or crossed(data, seed)}


def _intervals(data: Numbers | Counts, source: Source) -> Figures:
    covered = [_covered(data, source, level) for level in LEVELS]
    return {"covered": covered, "width": data.widths(source, LEVELS)}


def _covered(data: Numbers | Counts, source: Source, level: float) -> float:
    return float(data.inside(source, level).double().mean())


def _sets(p: Float[Tensor, "n classes"], targets: Tensor) -> Figures:
    """Coverage and size of the sets of fewest classes whose probabilities reach the level."""
    totals = p.sort(-1, descending=True).values.cumsum(-1)
    size = [float(((totals < level).sum(-1) + 1).clamp_max(p.shape[-1]).double().mean()) for level in LEVELS]
    return {"covered": [_covered_sets(p, targets, level) for level in LEVELS], "width": size}


def _covered_sets(p: Float[Tensor, "n classes"], targets: Tensor, level: float) -> float:
    own = p.gather(1, targets.unsqueeze(1))
    before = torch.where(p > own, p, 0.0).sum(-1)
    return float((before < level).double().mean())


def crossed(data: Numbers | Counts | Classes, seed: int = 0) -> Figures:
    """Split-conformal intervals or sets: each half of the rows is covered by what the other half calibrates."""
    n = len(data.targets)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    halves = order[: n // 2], order[n // 2 :]
    if n < 4:
        return {"covered": [None] * len(LEVELS), "width": [None] * len(LEVELS), "how": "too few rows"}
    scores = _conformal_scores(data)
    covered, width = [], []
    for level in LEVELS:
        inside, sizes = [], []
        for calibration, rest in (halves, halves[::-1]):
            bound = quantile(scores[calibration], level)
            hit, size = _conformal_hits(data, scores, rest, bound)
            inside.append(hit)
            sizes.append(size)
        covered.append(float(torch.cat(inside).double().mean()))
        width.append(float(torch.cat(sizes).mean()))
    how = "calibrated on one half of these rows and tested on the other, both ways"
    return {"covered": covered, "width": width, "how": how}


def _conformal_scores(data: Numbers | Counts | Classes) -> Float[Tensor, " n"]:
    """How unusual a target is: its error in predicted deviations, or the probability that its class was not given."""
    if isinstance(data, Classes):
        return class_scores(data.probabilities, data.targets)
    return amount_scores(data.mean, data.deviation, data.targets)


def _conformal_hits(
    data: Numbers | Counts | Classes, scores: Float[Tensor, " n"], rows: Tensor, bound: float
) -> tuple[Bool[Tensor, " rows"], Float[Tensor, " rows"]]:
    """Which of the rows are covered, and how large their sets or intervals are."""
    if isinstance(data, Classes):
        sets = class_sets(data.probabilities[rows], bound)
        return sets.gather(1, data.targets[rows].unsqueeze(1)).squeeze(1), sets.sum(-1).double()
    return scores[rows] <= bound, 2 * bound * data.deviation[rows]


def errors(data: Numbers | Counts | Classes, points: int = 1500, seed: int = 0) -> Figures:
    """Rows in bins of equal count by predicted uncertainty: what was predicted, and the error that came."""
    predicted = data.uncertainty if isinstance(data, Classes) else data.deviation
    order = predicted.argsort()
    groups = [g for g in order.tensor_split(min(10, max(2, len(order) // 12))) if len(g)]
    bins: Figures = {"predicted": [float(predicted[g].mean()) for g in groups], "count": [len(g) for g in groups]}
    if isinstance(data, Classes):
        wrong = (data.probabilities.argmax(-1) != data.targets).double()
        bins["error"] = [float(wrong[g].mean()) for g in groups]
        kept = torch.arange(1, len(order) + 1)
        risk = wrong[order].cumsum(0) / kept
        at = torch.linspace(0, len(order) - 1, min(100, len(order))).long()
        return bins | {"kept": ((at + 1) / len(order)).tolist(), "risk": risk[at].tolist()}
    error = (data.targets - data.mean).abs()
    chosen = torch.randperm(len(order), generator=torch.Generator().manual_seed(seed))[:points]
    bins["error"] = [float(error[g].square().mean().sqrt()) for g in groups]
    return bins | {"points": {"predicted": predicted[chosen].tolist(), "error": error[chosen].tolist()}}


def noise(observed: Observations) -> Figures | None:
    """The noise of numbers: whether it varies, the middle 90 % of its deviations, its share of the variance."""
    data = observed.data
    if not isinstance(data, Numbers):
        return None
    level = data.parts[1]
    of_rows = level.reshape(observed.rows, -1)
    low, high = (_quantile(level, share) for share in (0.05, 0.95))
    share = float(level.square().mean() / data.deviation.square().mean())
    return {"varies": bool((of_rows != of_rows[0]).any()), "low": low, "high": high, "share": share}


def _quantile(values: Float[Tensor, " n"], level: float) -> float:
    """Interpolated linearly, as by torch.quantile, which takes no more than 2^24 numbers."""
    at = level * (len(values) - 1)
    low, high = values.kthvalue(int(at) + 1).values, values.kthvalue(ceil(at) + 1).values
    return float(torch.lerp(low, high, at - int(at)))


def unfamiliar(observed: Observations, bins: int = 30) -> Figures | None:
    """Histograms of the uncertainty of familiar and of unfamiliar inputs, and how well it tells them apart."""
    outside = observed.outside
    if outside is None:
        return None
    inside = observed.data.uncertainty
    largest = float(torch.cat([inside, outside]).max())
    if isinstance(observed.data, Classes):
        largest = log(observed.data.probabilities.shape[-1])
    edges = torch.linspace(0, largest or 1.0, bins + 1, dtype=torch.float64)
    shares = [torch.histc(v, bins, 0, largest or 1.0).div(len(v)).tolist() for v in (inside, outside)]
    figures: Figures = {
        "edges": edges.tolist(),
        "inside": shares[0],
        "outside": shares[1],
        "mean_inside": float(inside.mean()),
        "mean_outside": float(outside.mean()),
        "auroc": metrics.auroc(inside, outside),
        "made": observed.outside_is_made,
        "count": len(outside),
    }
    if observed.outside_network is not None and isinstance(observed.data, Classes):
        figures["auroc_network"] = metrics.auroc(metrics.entropy(observed.data.network), observed.outside_network)
        figures["mean_outside_network"] = float(observed.outside_network.mean())
    if observed.outside_epistemic is not None:
        figures["auroc_epistemic"] = metrics.auroc(observed.data.epistemic, observed.outside_epistemic)
    return figures


def evidence(la: BaseLaplace, decades: float = 4.0, count: int = 49) -> Figures | None:
    """log Z where every prior precision is multiplied by one factor; None where one is zero, or none of them free."""
    prior = la.prior
    if isinstance(prior, Gaussian) or bool((prior.precisions <= 0).any()):
        return None
    factors = torch.logspace(-decades, decades, count, dtype=torch.float64)
    with torch.no_grad():
        values = _evidences(la, prior, factors)
        chosen = _evidences(la, prior, torch.ones(1, dtype=torch.float64))[0]
    alone = len(prior.precisions) == 1
    scale = float(prior.precisions[0]) if alone else 1.0
    return {
        "precision": (factors * scale).tolist(),
        "log_evidence": values,
        "chosen": scale,
        "chosen_log_evidence": chosen,
        "common_factor": not alone,
        "temperature": float(la.temperature),
    }


def _evidences(la: BaseLaplace, prior: Prior, factors: Float[Tensor, " k"]) -> list[float]:
    """log Z for the prior precisions times each factor.

    A small full matrix is decomposed once, in float64, whatever the groups of the prior D: with the eigenvalues l of
    D^-1/2 H D^-1/2 the log-determinants differ by sum log(1 + l / factor). NaN where a posterior is singular.
    """
    hyper = la.sigma_noise, la.temperature
    if la.structure != "full" or la.space.size > DENSE:
        values = []
        for factor in factors.tolist():
            try:
                value = la.evidence.log_marginal(prior.with_precisions(prior.precisions * factor), *hyper)
            except CurvatureError:  # rounding, where the prior is next to nothing
                value = float("nan")
            values.append(float(value))
        return values
    root = prior.precision().expand(la.space.size).double().rsqrt()
    scale = float(la.sigma_noise) ** la.evidence.noise_power * float(la.temperature)
    matrix = root.unsqueeze(1) * la.fitted.curvature.dense().double() * root / scale
    eigenvalues = torch.linalg.eigvalsh(matrix).clamp_min(0)
    ratios = torch.log1p(eigenvalues / factors.to(eigenvalues).unsqueeze(1)).sum(1).cpu()
    scatter = float(prior.scatter(la.fitted.mean))
    return (float(la.log_likelihood) - (ratios + factors * scatter) / 2).tolist()


def effective(la: BaseLaplace) -> Figures:
    """gamma of every parameter tensor: how many of its entries the data determine."""
    space, prior = la.space, la.hyper.base(la.space)
    present, groups = space.groups("tensor").unique(return_inverse=True)
    sizes = torch.bincount(groups)
    with torch.no_grad():
        precision = la.posterior.precision
        if prior.structure != "diagonal":
            first = torch.tensor([int((groups == g).nonzero()[0]) for g in range(len(sizes))], device=groups.device)
            own = prior.precision().expand(space.size)[first]
            gamma = sizes - own * precision.inverse_trace(groups)
        else:  # one precision per entry
            shrunk = prior.precision() * precision.variance()
            gamma = sizes - shrunk.new_zeros(len(sizes)).index_add(0, groups, shrunk)
    # rounding may leave a hair outside of [0, size]
    gamma = gamma.double().clamp_min(0).minimum(sizes.double())
    names = [space.names[int(i)] for i in present]
    return {"name": names, "size": sizes.tolist(), "gamma": gamma.tolist()}


def uncertain(observed: Observations, count: int = 10) -> list[Figures]:
    """The entries with the largest predicted uncertainty, numbered as in the data."""
    data = observed.data
    predicted = data.uncertainty if isinstance(data, Classes) else data.deviation
    spread: dict[str, Tensor] = {}
    if not isinstance(data, Classes):
        weights, noise = data.parts
        spread = {"mean": data.mean, "epistemic": weights, "noise": noise, "deviation": data.deviation}
    rows = []
    for i in predicted.topk(min(count, len(predicted))).indices.tolist():
        row: Figures = {"row": int(observed.row[i])}
        if isinstance(data, Classes):
            chosen = int(data.probabilities[i].argmax())
            row |= {
                "predicted": chosen,
                "probability": float(data.probabilities[i, chosen]),
                "network_probability": float(data.network[i].max()),
                "entropy": float(predicted[i]),
                "target": int(data.targets[i]),
            }
        else:
            row["target"] = float(data.targets[i])
            row |= {name: float(values[i]) for name, values in spread.items()}
        rows.append(row)
    return rows
