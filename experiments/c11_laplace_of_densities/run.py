"""C11: Laplace's approximation of a 1-d density and of a 2-d logistic regression; the probit predictive.

The 1-d density is Bishop's, f(w) = exp(-w^2 / 2) s(20 w + 4): a prior N(0, 1) and one observation, so it is itself a
logistic regression with one weight. The 2-d one has two separable classes and no bias, as in the source, so that its
posterior can be integrated on a grid of weights.
"""

from __future__ import annotations

import sys
from math import log, pi
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, softplus

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import COLOURS, Experiment, minimise, squared_norm

from lapwing import Laplace
from lapwing.laplace import FullLaplace
from lapwing.likelihoods import Bernoulli
from lapwing.predictive import probit, quadrature

DOUBLE = torch.float64


def fitted(model: nn.Module, x: Tensor, y: Tensor, precision: float) -> FullLaplace:
    """The model moved to its mode, and the posterior there."""
    minimise(model, lambda: softplus(-(2 * y - 1) * model(x)).sum() + precision / 2 * squared_norm(model))
    la = Laplace(model, Bernoulli(), "all", "full", prior_precision=precision)
    assert isinstance(la, FullLaplace)
    la.fit([(x, y)])
    return la


def expected_sigmoid(mean: Tensor, variance: Tensor) -> Tensor:
    """E s(f), f ~ N(mean, variance), by a trapezoidal rule that is exact to rounding at every variance.

    Over the Gaussian where that is narrow; where it is broad, over a logistic l, as E s(f) = E P(f > l).
    """
    deviation = variance.sqrt()
    z = torch.linspace(-9, 9, 181, dtype=DOUBLE)
    weights = torch.exp(-z.square() / 2) / (2 * pi) ** 0.5 * (z[1] - z[0])
    narrow = torch.sigmoid(mean.unsqueeze(-1) + deviation.unsqueeze(-1) * z) @ weights
    logit = torch.linspace(-45, 45, 361, dtype=DOUBLE)
    weights = torch.sigmoid(logit) * torch.sigmoid(-logit) * (logit[1] - logit[0])
    broad = torch.special.ndtr((mean.unsqueeze(-1) - logit) / deviation.unsqueeze(-1)) @ weights
    return torch.where(deviation < 1, narrow, broad)


# -- one dimension ----------------------------------------------------------------------------------------------------


class OneWeight(nn.Module):
    """The logit w x + 4."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x + 4


def one_dimension() -> tuple[dict[str, float], dict[str, Tensor]]:
    la = fitted(OneWeight(), torch.full((1, 1), 20.0, dtype=DOUBLE), torch.ones(1, 1, dtype=DOUBLE), 1.0)
    w = torch.linspace(-10, 10, 200_001, dtype=DOUBLE)
    log_f = -w.square() / 2 - log(2 * pi) / 2 + logsigmoid(20 * w + 4)
    exact = torch.trapezoid(log_f.exp(), w)
    density = log_f.exp() / exact
    approximate = la.log_prob(w.unsqueeze(-1)).exp()
    # by hand: -d^2/dw^2 log f = 1 + 20^2 s(l) s(-l) at the mode
    logit = 20 * la.mean + 4
    by_hand = 1 + 400 * torch.sigmoid(logit) * torch.sigmoid(-logit)
    found = {
        "mode": float(la.mean),
        "mode_on_a_grid": float(w[log_f.argmax()]),
        "standard_deviation": float(la.posterior_variance.sqrt()),
        "standard_deviation_by_hand": float(by_hand.rsqrt()),
        "log_normaliser_laplace": float(la.log_marginal_likelihood()),
        "log_normaliser_exact": float(exact.log()),
        "total_variation": float(torch.trapezoid((density - approximate).abs(), w) / 2),
    }
    return found, {"w": w, "density": density, "laplace": approximate}


# -- two dimensions ---------------------------------------------------------------------------------------------------


class ExactPosterior:
    """p(w | data) on a grid of weights [G, 2]."""

    def __init__(self, x: Tensor, y: Tensor, precision: float, size: int) -> None:
        span = 9 / precision**0.5
        self.axis = torch.linspace(-span / 2, span, size, dtype=DOUBLE)
        self.w = torch.cartesian_prod(self.axis, self.axis)
        self.log_joint = logsigmoid((self.w @ x.mT) * (2 * y - 1).squeeze(-1)).sum(-1) + (
            -precision / 2 * self.w.square().sum(-1) + log(precision / (2 * pi))
        )
        cell = float(self.axis[1] - self.axis[0]) ** 2
        self.log_evidence = float(torch.logsumexp(self.log_joint, 0)) + log(cell)
        self.weights = torch.softmax(self.log_joint, 0)
        edge = self.weights.reshape(size, size)
        self.mass_at_edge = float(edge[0].sum() + edge[-1].sum() + edge[:, 0].sum() + edge[:, -1].sum())

    def predict(self, x: Tensor) -> Tensor:
        return torch.stack([torch.sigmoid(self.w @ each) @ self.weights for each in x])


def main(experiment: Experiment) -> None:
    config = experiment.config
    one, curves = one_dimension()

    generator = torch.Generator().manual_seed(config["seed"])
    y = (torch.arange(config["points"]) % 2).to(DOUBLE).unsqueeze(1)
    centre = torch.tensor(config["centre"], dtype=DOUBLE)
    x = (2 * y - 1) * centre + config["spread"] * torch.randn(len(y), 2, dtype=DOUBLE, generator=generator)
    precision = config["prior_precision"]
    model = nn.Linear(2, 1, bias=False).to(DOUBLE)
    la = fitted(model, x, y, precision)
    exact = ExactPosterior(x, y, precision, config["weights_grid"])

    def everything(points: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            by_map = torch.sigmoid(model(points)).squeeze(-1)
        by_probit, by_quadrature = la(points, link_approx="probit"), la(points, link_approx="quadrature")
        assert isinstance(by_probit, Tensor)
        assert isinstance(by_quadrature, Tensor)
        variance = la.functional_variance(points.unsqueeze(1)).flatten()  # the Jacobian of a linear model is its input
        logit = (points @ la.mean.unsqueeze(-1)).squeeze(-1)
        return {
            "map": by_map,
            "probit": by_probit.squeeze(-1),
            "quadrature": by_quadrature.squeeze(-1),
            "integral": expected_sigmoid(logit, variance),
            "exact": exact.predict(points),
            "logit_variance": variance,
        }

    side = torch.linspace(-config["plane_extent"], config["plane_extent"], config["plane_grid"], dtype=DOUBLE)
    plane = torch.cartesian_prod(side, side)
    on_plane = everything(plane)
    distances = torch.logspace(0, log(config["largest_distance"]) / log(10), config["distances"], dtype=DOUBLE)
    # A direction along the mode, where MAP is surest, and one 60 degrees from it, where the data say less.
    along = la.mean / la.mean.norm()
    turn = torch.tensor([[0.5, -(0.75**0.5)], [0.75**0.5, 0.5]], dtype=DOUBLE)
    rays = {name: everything(distances.unsqueeze(1) * u) for name, u in (("0", along), ("60", turn @ along))}

    # The largest error of the probit form over every mean and variance, through the library's own functions.
    means = torch.linspace(-8, 8, 321, dtype=DOUBLE)
    ratio, variance = torch.meshgrid(means, torch.logspace(-3, 8, 111, dtype=DOUBLE), indexing="ij")
    mean = ratio * torch.sqrt(1 + variance)
    truth = expected_sigmoid(mean, variance)
    probit_error = (probit(mean.unsqueeze(-1), variance.unsqueeze(-1)).squeeze(-1) - truth).abs()
    quadrature_error = (quadrature(mean.unsqueeze(-1), variance.unsqueeze(-1)).squeeze(-1) - truth).abs()
    limit = (torch.sigmoid((8 / pi) ** 0.5 * means) - torch.special.ndtr(means)).abs().max()

    def gap(a: Tensor, b: Tensor) -> float:
        return float((a - b).abs().max())

    far = {name: {key: float(value[-1]) for key, value in ray.items()} for name, ray in rays.items()}
    near = plane.norm(dim=1) < 4
    ours: dict[str, Any] = {
        "one_dimension": one,
        "two_dimensions": {
            "mode": la.mean,
            "log_evidence_laplace": float(la.log_marginal_likelihood()),
            "log_evidence_exact": exact.log_evidence,
            "exact_posterior_mass_at_edge_of_grid": exact.mass_at_edge,
            "probit_against_exact_integral_of_gaussian_on_plane": gap(on_plane["probit"], on_plane["integral"]),
            "quadrature_link_against_exact_integral_on_plane": gap(on_plane["quadrature"], on_plane["integral"]),
            "laplace_probit_against_exact_posterior_on_plane": gap(on_plane["probit"], on_plane["exact"]),
            "laplace_probit_against_exact_posterior_within_4": gap(on_plane["probit"][near], on_plane["exact"][near]),
            "map_against_exact_posterior_on_plane": gap(on_plane["map"], on_plane["exact"]),
            "mean_error_laplace_probit": float((on_plane["probit"] - on_plane["exact"]).abs().mean()),
            "mean_error_map": float((on_plane["map"] - on_plane["exact"]).abs().mean()),
        },
        "farthest_points_by_angle_to_the_mode": far,
        "probit_error_over_all_means_and_variances": {
            "largest": float(probit_error.max()),
            "largest_for_variance_below_1": float(probit_error[variance < 1].max()),
            "limit_of_large_variance": float(limit),
        },
        "quadrature_link_error_over_all_means": {
            f"variance_below_{bound:g}": float(quadrature_error[variance <= bound].max())
            for bound in (1, 10, 100, 1e4, 1e8)
        },
    }
    held = {
        "Laplace finds mode and curvature of the 1-d density": abs(one["mode"] - one["mode_on_a_grid"]) < 1e-4
        and abs(one["standard_deviation"] / one["standard_deviation_by_hand"] - 1) < 1e-9,
        "probit is within 0.018 of the exact integral": float(probit_error.max()) < 0.0181,
        "MAP grows certain away from the data": all(f["map"] > 1 - 1e-6 for f in far.values()),
        "Laplace stays at a plateau below certainty": all(f["probit"] < 0.999 for f in far.values())
        and all(float((r["probit"][-1] - r["probit"][-10]).abs()) < 1e-3 for r in rays.values()),
        "Laplace is closer to the exact predictive than MAP is": ours["two_dimensions"][
            "laplace_probit_against_exact_posterior_on_plane"
        ]
        < ours["two_dimensions"]["map_against_exact_posterior_on_plane"],
    }
    draw(experiment, curves, la, exact, x, y, side, on_plane, distances, rays)
    experiment.write(ours, {"probit_error_over_all_means_and_variances": 0.018, "pictures": "sections 1 and 2"}, held)


def draw(
    experiment: Experiment,
    curves: dict[str, Tensor],
    la: FullLaplace,
    exact: ExactPosterior,
    x: Tensor,
    y: Tensor,
    side: Tensor,
    on_plane: dict[str, Tensor],
    distances: Tensor,
    rays: dict[str, dict[str, Tensor]],
) -> None:
    figure, ((one, two), (plane, ray)) = plt.subplots(2, 2, figsize=(11, 8.4))
    shown = (curves["w"] > -2) & (curves["w"] < 4)
    w = curves["w"][shown]
    one.fill_between(w, curves["density"][shown], color="0.85", label="density, normalised exactly")
    one.plot(w, curves["density"][shown], color=COLOURS["exact"])
    one.plot(w, curves["laplace"][shown], color=COLOURS["laplace"], label="Laplace")
    one.set(xlabel="w", ylabel="density", title=r"1-d density  $\propto e^{-w^2/2}\,\sigma(20w+4)$")
    one.legend()

    size = len(exact.axis)
    levels = [-12.0, -8.0, -5.0, -3.0, -1.5, -0.5]
    below = (exact.log_joint - exact.log_joint.max()).reshape(size, size)
    gaussian = la.log_prob(exact.w)
    gaussian = (gaussian - gaussian.max()).reshape(size, size)
    two.contour(exact.axis, exact.axis, below.mT, levels, colors=COLOURS["exact"], linestyles="solid")
    two.contour(exact.axis, exact.axis, gaussian.mT, levels, colors=COLOURS["laplace"], linestyles="dashed")
    two.plot(*la.mean, "k+", markersize=10)
    handles = [
        plt.Line2D([], [], color=COLOURS["exact"], label="log posterior"),
        plt.Line2D([], [], color=COLOURS["laplace"], linestyle="--", label="log of Laplace"),
        plt.Line2D([], [], color="k", marker="+", linestyle="", label="mode"),
    ]
    two.legend(handles=handles, loc="upper right")
    reach = 6 * la.posterior_variance.max().sqrt()
    two.set(xlim=(la.mean[0] - reach, la.mean[0] + 1.4 * reach), ylim=(la.mean[1] - reach, la.mean[1] + 1.4 * reach))
    two.set(xlabel="$w_1$", ylabel="$w_2$", title="2-d logistic regression: posterior (same levels)")

    count = len(side)
    ticks = [0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95]
    filled = plane.contourf(side, side, on_plane["probit"].reshape(count, count).mT, 20, cmap="RdBu_r", vmin=0, vmax=1)
    plane.contour(side, side, on_plane["probit"].reshape(count, count).mT, ticks, colors="0.35", linewidths=0.8)
    plane.contour(side, side, on_plane["map"].reshape(count, count).mT, [0.05, 0.5, 0.95], colors="k", linestyles="--")
    for label, marker, colour in ((0, "o", "#053061"), (1, "s", "#67001f")):
        mine = (y == label).squeeze(1)
        plane.scatter(*x[mine].mT, s=22, marker=marker, color=colour, edgecolor="w", linewidth=0.6, zorder=3)
    figure.colorbar(filled, ax=plane, label="p(y = 1 | x), Laplace (probit)", ticks=[0, 0.25, 0.5, 0.75, 1])
    plane.set(xlabel="$x_1$", ylabel="$x_2$", title="predictive: Laplace in colour; dashed MAP at .05, .5, .95")

    for name, style in (("0", "-"), ("60", "--")):
        for key, colour, label in (
            ("map", "map", "MAP"),
            ("probit", "laplace", "Laplace, probit"),
            ("quadrature", "sampled", "Laplace, 'quadrature' link"),
            ("integral", "other", "Laplace, integrated exactly"),
            ("exact", "exact", "exact posterior"),
        ):
            text = label if style == "-" else None
            thin = 1.0 if key in ("quadrature", "integral") else 1.8
            ray.semilogx(distances, rays[name][key], style, color=COLOURS[colour], label=text, linewidth=thin)
    ray.set(xlabel="distance from the origin", ylabel="p(y = 1 | x)", ylim=(0.5, 1.01))
    ray.set_title(r"along the mode (solid) and 60$\degree$ away (dashed)")
    ray.legend(loc="lower right")
    experiment.save(figure)


if __name__ == "__main__":
    main(Experiment.of(__file__))
