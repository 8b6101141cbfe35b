"""Brute force for the network linearised at its trained weights: Jacobians one backward pass at a time, all dense."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

import oracle
from lapwing.laplace import BaseLaplace
from lapwing.likelihoods import Likelihood

DOUBLE = torch.float64


def network(*widths: int, seed: int = 0) -> nn.Sequential:
    """A tanh network of these widths."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def data(likelihood: str, points: int = 12, inputs: int = 2, outputs: int = 2) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a kind."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(points, inputs, dtype=DOUBLE, generator=generator)
    noise = torch.randn(points, outputs, dtype=DOUBLE, generator=generator)
    signal = torch.sin(2 * x[:, :1]) + x[:, -1:] * torch.linspace(-1, 1, outputs, dtype=DOUBLE)
    if likelihood == "classification":
        return x, (signal + noise / 2).argmax(1)
    if likelihood == "binary":
        return x, (signal + noise / 2 > 0).double()
    if likelihood == "poisson":
        return x, torch.poisson(signal.exp(), generator=generator)
    return x, signal + 0.2 * noise


@dataclass
class Dense:
    """The linearised network of a fitted posterior: outputs f [N, C], Jacobians J [N, C, P], all of the prior [P]."""

    x: Tensor
    y: Tensor
    f: Tensor
    jacobian: Tensor
    trained: Tensor
    precision: Tensor
    mean: Tensor
    weight: float
    """1 / (sigma^2 T), of a likelihood at unit noise."""
    likelihood: Likelihood

    @staticmethod
    def of(la: BaseLaplace, x: Tensor, y: Tensor) -> Dense:
        """With the model's own modules and autograd, and the posterior's hyper-parameters."""
        model = la.model.eval()
        whole = oracle.jacobian(model, x)
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        names = dict(model.named_parameters())
        starts, start = {}, 0
        for name, p in names.items():
            starts[name] = (start, start + p.numel())
            start += p.numel()
        index = torch.cat([torch.arange(*starts[name]) for name in la.space.names])
        if la.space.index is not None:
            index = index[la.space.index]
        size = la.space.size
        return Dense(
            x,
            y,
            model(x).detach(),
            whole[..., index],
            flat[index],
            la.prior_precision_diag.detach().expand(size),
            la.prior_mean.detach().expand(size),
            1 / float(la.sigma_noise**2 * la.temperature),
            la.distribution,
        )

    def outputs(self, theta: Tensor) -> Tensor:
        return self.f + torch.einsum("n c p, p -> n c", self.jacobian, theta - self.trained).reshape(self.f.shape)

    def loss(self, theta: Tensor) -> Tensor:
        """The linearised loss with the prior."""
        away = theta - self.mean
        return (
            -self.weight * self.likelihood.log_prob(self.outputs(theta), self.y).sum()
            + (self.precision * away.square()).sum() / 2
        )

    def gradient(self, theta: Tensor) -> Tensor:
        theta = theta.detach().clone().requires_grad_()
        (found,) = torch.autograd.grad(self.loss(theta), theta)
        return found

    def mode(self) -> Tensor:
        """Newton's method with Hessians by autograd, and steps that are halved until they descend."""
        theta = self.trained.clone()
        for _ in range(40):
            gradient = self.gradient(theta)
            hessian = torch.autograd.functional.hessian(self.loss, theta)
            step, size = torch.linalg.solve(hessian, gradient), 1.0
            here = self.loss(theta)
            most = here + 1e-14 * here.abs()  # the last steps change the loss by less than its rounding
            while size > 1e-9 and not self.loss(theta - size * step) <= most:
                size /= 2
            theta = theta - size * step
            if float(step.norm()) < 1e-10 * (1 + float(theta.norm())):  # the next would be of its square
                break
        return theta

    def marginal(self, precision: Tensor, sigma: Tensor) -> Tensor:
        """log p(y) of the linear model with Gaussian noise, an integral over its weights: no Laplace approximation."""
        rows = self.jacobian.flatten(0, 1)
        noise = sigma**2 * torch.eye(len(rows), dtype=DOUBLE)
        mean = self.outputs(self.mean).flatten()
        return MultivariateNormal(mean, (rows / precision) @ rows.mT + noise).log_prob(self.y.flatten())
