"""C38: a mixture of Gaussians widens the components far from the data; a VAE, an infinite mixture, does not.

Points on an arc in the plane. The mixture has its means on a grid and equal weights, and learns variances alone, by
gradients and by expectation maximisation. The VAE has a learned variance; what is looked at is the variance of its
decoder over the latent plane. Beside them the Laplacian autoencoder, trained online: its variance by the weights.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import log, pi
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from autoencoders import Shuffled, Variational, train
from common import COLOURS, Checks, Experiment, Figures

from lapwing.likelihoods import Gaussian
from lapwing.training import LaplacianAutoencoder

CORRELATION, LITTLE, AS_EM = 0.9, 2.0, 0.01
SOURCE = {
    "claim": "variances of components far away from the data increase, in order to push probability mass to where the "
    "data are; the Gaussian VAE should do the same to be most likely, and in practice does not",
    "note": "appendix F and figure 14: pictures without numbers, data and sizes not given",
}


def arc(points: int, noise: float, seed: int) -> Tensor:
    """Points [N, 2] on half a circle, with noise."""
    generator = torch.Generator().manual_seed(seed)
    angle = torch.rand(points, 1, generator=generator, dtype=torch.float64) * pi
    away = noise * torch.randn(points, 2, generator=generator, dtype=torch.float64)
    return torch.cat([angle.cos(), angle.sin()], 1) + away


# -- the mixture ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Mixture:
    """Components of equal weight around fixed means [K, 2], with log-variances [K]."""

    means: Tensor
    log_variances: Tensor

    def each(self, x: Tensor) -> Tensor:
        """log p(x, component) [N, K]."""
        squares = (x[:, None] - self.means).square().sum(2)
        return -squares / self.log_variances.exp() / 2 - self.log_variances - log(2 * pi) - log(len(self.means))

    def log_prob(self, x: Tensor) -> Tensor:
        """log p(x), the mean over points."""
        return self.each(x).logsumexp(1).mean()

    def maximised(self, x: Tensor) -> Mixture:
        """A step of expectation maximisation: a component's variance is that of the points it answers for."""
        share = self.each(x).softmax(1)
        squares = (x[:, None] - self.means).square().sum(2)
        return Mixture(self.means, ((share * squares).sum(0) / share.sum(0) / 2).log())


def grid(side: int, reach: Tensor | float, centre: Tensor | float = 0.0) -> Tensor:
    """[side^2, 2] around `centre`."""
    line = torch.linspace(-1, 1, side, dtype=torch.float64)
    return torch.cartesian_prod(line, line) * reach + centre


def mixtures(x: Tensor, config: dict[str, Any]) -> tuple[dict[int, Mixture], Mixture]:
    """By gradients after the steps to be shown; and by expectation maximisation, which comes to rest."""
    means = grid(config["side"], config["reach"])
    start = torch.full((len(means),), 2 * log(config["start"]), dtype=torch.float64)
    values = start.clone().requires_grad_()
    adam = torch.optim.Adam([values], lr=config["rate"])
    kept = {0: Mixture(means, start)}
    for step in range(1, config["steps"] + 1):
        adam.zero_grad()
        (-Mixture(means, values).log_prob(x)).backward()
        adam.step()
        if step in config["shown"]:
            kept[step] = Mixture(means, values.detach().clone())
    found = kept[0]
    for _ in range(config["maximisations"]):
        found = found.maximised(x)
    return kept, found


# -- autoencoders -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flat:
    """Encoders and decoders of points in the plane, by way of a plane."""

    hidden: tuple[int, ...]

    def encoder(self) -> nn.Sequential:
        layers: list[nn.Module] = []
        for a, b in zip((2, *self.hidden), (*self.hidden, 2), strict=True):
            layers += [nn.Linear(a, b), nn.Tanh()]
        return nn.Sequential(*layers[:-1])

    decoder = encoder  # the mirror of equal widths is the same


def variational(x: Tensor, config: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, latent points around them, and the decoder's learned variance there, summed over the plane."""
    torch.manual_seed(config["seed"])
    model: Any = Variational(Flat(tuple(config["hidden"])))  # pyright: ignore[reportArgumentType]
    generator = torch.Generator().manual_seed(config["seed"])
    train(model, Shuffled(x, config["batch"], generator), config["epochs"], generator=generator)
    with torch.no_grad():
        codes = model.encoder(x)
        places = around(codes, config["grid"])
        return codes, places, model.variance(places).exp().sum(1)


def laplacian(x: Tensor, config: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The same of an autoencoder with a posterior: the variance of the output by the weights."""
    torch.manual_seed(config["seed"])
    shape, generator = Flat(tuple(config["hidden"])), torch.Generator().manual_seed(config["seed"])
    noise = Gaussian(config["noise"])
    model = LaplacianAutoencoder(shape.encoder(), shape.decoder(), likelihood=noise, generator=generator)
    model.fit(Shuffled(x, config["batch"], generator), config["epochs"])
    with torch.no_grad():
        codes = model.whole.encode(x)
    places = around(codes, config["grid"])
    return codes, places, model.decode(places, config["samples"]).variance.sum(1)


def around(codes: Tensor, side: int) -> Tensor:
    """A grid over three times the range of the codes, in every direction."""
    low, high = codes.amin(0), codes.amax(0)
    return grid(side, 1.5 * (high - low).double(), (low + high).double() / 2).float()


# -- figures ----------------------------------------------------------------------------------------------------------


def growth(places: Tensor, data: Tensor, variance: Tensor) -> Figures:
    """How the variance at `places` goes with their distance from the nearest of the data.

    The farthest quarter of places against the nearest: the ratio of geometric means; and the rank correlation.
    """
    distance = torch.cdist(places.double(), data.double()).amin(1)
    order, quarter, logs = distance.argsort(), len(places) // 4, variance.double().log()
    far, near = logs[order[-quarter:]].mean(), logs[order[:quarter]].mean()
    ranks = torch.stack([each.argsort().argsort().double() for each in (distance, logs)])
    return {"far_over_near": float((far - near).exp()), "rank_correlation": float(torch.corrcoef(ranks)[0, 1])}


def one_seed(experiment: Experiment) -> tuple[Figures, Checks]:
    config = experiment.config
    x = arc(config["points"], config["noise"], config["seed"])
    kept, by_em = mixtures(x, config)
    last, start = kept[config["steps"]], 2 * log(config["start"])
    order = torch.cdist(last.means, x).amin(1).argsort()
    quarter = len(order) // 4
    far, near = last.log_variances[order[-quarter:]] - start, last.log_variances[order[:quarter]] - start
    found: Figures = {
        "mixture": growth(last.means, x, last.log_variances.exp())
        | {
            "far_over_start": float(far.mean().exp()),
            "near_over_start": float(near.mean().exp()),
            "log_prob": float(last.log_prob(x)),
            "log_prob_at_start": float(kept[0].log_prob(x)),
            "log_prob_by_em": float(by_em.log_prob(x)),
        }
    }
    planes = {"VAE": variational(x.float(), config), "LAE": laplacian(x.float(), config)}
    for name, (codes, places, variance) in planes.items():
        found[name] = growth(places, codes, variance)
    if config["seed"] == config["seeds"][0]:
        experiment.save(picture(x, kept, planes, config))
    print(config["seed"], found, flush=True)
    held = {
        "mixture: every component of the farthest quarter is wider than at the start": bool((far > 0).all()),
        "mixture: the nearest quarter is narrower than at the start, in the geometric mean": float(near.mean()) < 0,
        f"mixture: variance and distance from the data have a rank correlation above {CORRELATION}": found["mixture"][
            "rank_correlation"
        ]
        > CORRELATION,
        f"mixture: gradients are within {AS_EM} of the log p(x) of expectation maximisation, or above": found[
            "mixture"
        ]["log_prob"]
        > found["mixture"]["log_prob_by_em"] - AS_EM,
        f"VAE: the learned variance far from the codes is less than {LITTLE:g} times that near them": found["VAE"][
            "far_over_near"
        ]
        < LITTLE,
        f"LAE: the variance by the weights far from the codes is more than {LITTLE:g} times that near them": found[
            "LAE"
        ]["far_over_near"]
        > LITTLE,
    }
    return found, held


def picture(x: Tensor, kept: dict[int, Mixture], planes: dict[str, Any], config: dict[str, Any]) -> Figure:
    figure, axes = plt.subplots(1, 5, figsize=(19, 4.1))
    reach = 2 * config["reach"]
    for axis, (step, mixture) in zip(axes, kept.items(), strict=False):
        for mean, value in zip(mixture.means.tolist(), mixture.log_variances.tolist(), strict=True):
            wider = value > 2 * log(config["start"]) + 1e-9
            colour = COLOURS["sampled"] if wider else COLOURS["laplace"]
            radius = float(torch.tensor(value / 2).exp())
            axis.add_patch(Circle((mean[0], mean[1]), radius, fill=False, ec=colour, lw=0.8, alpha=0.7))
        axis.plot(*x.T, ".", ms=2, color=COLOURS["map"])
        axis.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal", title=f"mixture after {step} steps")
    names = {"VAE": "VAE: learned variance", "LAE": "LAE, online: variance by the weights"}
    for axis, (name, (codes, places, variance)) in zip(axes[3:], planes.items(), strict=True):
        side = config["grid"]
        drawn = axis.pcolormesh(
            *(places[:, k].reshape(side, side) for k in (0, 1)), variance.log10().reshape(side, side), shading="auto"
        )
        axis.plot(*codes.T, ".", ms=2, color="white")
        axis.set(title=names[name], xlabel="latent plane")
        figure.colorbar(drawn, ax=axis, label="log10 variance")
    return figure


def main(experiment: Experiment) -> None:
    ours, held = experiment.over_seeds(one_seed)
    experiment.write(ours, SOURCE, held, notes="data and sizes are ours, as the source gives none")


if __name__ == "__main__":
    main(Experiment.of(__file__))
