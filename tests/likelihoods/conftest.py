"""The likelihoods under test: how to build each, draw targets for it, and know its truth without lapwing's formulas.

A test that asks for `problem` runs for every likelihood in every layout; one that asks for `case` or `vector_problem`,
for every likelihood. A new likelihood is one row in `CASES`.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributions
from torch.nn.functional import binary_cross_entropy_with_logits

from lapwing.likelihoods import (
    Bernoulli,
    BernoulliMixture,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
)

SIGMA = torch.tensor([0.5, 1.5], dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """A likelihood, with C outputs per position, on the layout with the class axis last."""

    name: str
    build: Callable[..., Likelihood]
    n_outputs: int
    targets: Callable[[torch.Size, torch.Generator], Tensor]  # (lead, generator) -> y with any class axis last
    reference: Callable[[Tensor, Tensor], Tensor]  # (f [*lead, C], y) -> log p [*lead], by torch.distributions
    per_output: bool = True
    # f [B, C] -> targets [K, B, ...] and weights [K, B] (None: exp(log_prob)) that integrate E_y exactly
    nodes: Callable[[Tensor], tuple[Tensor, Tensor | None]] | None = None
    natural: bool = True  # whether the outputs are natural parameters, where the Fisher is the Hessian


@dataclass(frozen=True)
class Problem:
    """A likelihood with outputs and targets in one layout."""

    case: Case
    likelihood: Likelihood
    f: Tensor
    y: Tensor
    axis: int

    @property
    def f_last(self) -> Tensor:
        return self.f.movedim(self.axis, -1)

    @property
    def y_last(self) -> Tensor:
        return self.y.movedim(self.axis, -1) if self.case.per_output else self.y

    def nll(self, n: int) -> Callable[[Tensor], Tensor]:
        """-log p of data point n as a function of its outputs [positions * C], class axis fastest."""
        shape = self.f_last[:1].shape

        def of_flat(flat: Tensor) -> Tensor:
            f = flat.reshape(shape).movedim(-1, self.axis)
            return -self.likelihood.log_prob(f, self.y[n : n + 1])[0]

        return of_flat

    def flat(self, n: int) -> Tensor:
        return self.f_last[n].reshape(-1)


def enumerate_targets(values: range, length: int) -> Callable[[Tensor], tuple[Tensor, None]]:
    def nodes(f: Tensor) -> tuple[Tensor, None]:
        grid = torch.tensor(list(itertools.product(values, repeat=length)), dtype=torch.float64)
        return grid[:, None, :].expand(-1, f.shape[0], -1), None

    return nodes


def enumerate_classes(n_classes: int, dtype: torch.dtype) -> Callable[[Tensor], tuple[Tensor, None]]:
    return lambda f: (torch.arange(n_classes).to(dtype)[:, None].expand(-1, f.shape[0]), None)


def gauss_hermite(moments: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Tensor grid of five nodes: exact for polynomials in y up to degree nine."""

    def nodes(f: Tensor) -> tuple[Tensor, Tensor]:
        mean, sd = moments(f)
        x, w = (torch.from_numpy(a) for a in np.polynomial.hermite.hermgauss(5))
        grid = torch.cartesian_prod(*[x] * mean.shape[-1]).reshape(-1, 1, mean.shape[-1])
        weight = torch.cartesian_prod(*[w / math.sqrt(math.pi)] * mean.shape[-1]).reshape(-1, mean.shape[-1]).prod(-1)
        return mean + math.sqrt(2) * sd * grid, weight[:, None].expand(-1, f.shape[0])

    return nodes


def halves(f: Tensor) -> tuple[Tensor, Tensor]:
    return f[..., : f.shape[-1] // 2], (f[..., f.shape[-1] // 2 :] / 2).exp()


def normal(f: Tensor, y: Tensor, sd: Any) -> Tensor:
    return distributions.Normal(f, sd).log_prob(y).sum(-1)


def mixture(f: Tensor, y: Tensor) -> Tensor:
    weights = distributions.Categorical(logits=torch.stack([f[..., 0], torch.zeros_like(f[..., 0])], -1))
    coins = distributions.Bernoulli(logits=f[..., 1:], validate_args=False)
    return distributions.MixtureSameFamily(weights, coins, validate_args=False).log_prob(y.to(f.dtype))


def randn(n: int) -> Callable[[torch.Size, torch.Generator], Tensor]:
    return lambda lead, g: torch.randn(*lead, n, generator=g, dtype=torch.float64)


def randint(low: int, high: int, n: int | None = None) -> Callable[[torch.Size, torch.Generator], Tensor]:
    return lambda lead, g: torch.randint(low, high, (*lead, n) if n else tuple(lead), generator=g)


def categorical_reference(f: Tensor, y: Tensor) -> Tensor:
    return distributions.Categorical(logits=f).log_prob(y)


CASES = [
    Case(
        "gaussian", lambda **k: Gaussian(0.7, **k), 2, randn(2), lambda f, y: normal(f, y, 0.7),
        nodes=gauss_hermite(lambda f: (f, torch.full_like(f, 0.7))),
    ),
    Case(
        "gaussian_per_output", lambda **k: Gaussian(SIGMA, **k), 2, randn(2), lambda f, y: normal(f, y, SIGMA),
        nodes=gauss_hermite(lambda f: (f, SIGMA)),
    ),
    Case(
        "categorical", Categorical, 4, randint(0, 4), categorical_reference, per_output=False,
        nodes=enumerate_classes(4, torch.int64),
    ),
    Case(
        "categorical_two_classes", Categorical, 2, randint(0, 2), categorical_reference, per_output=False,
        nodes=enumerate_classes(2, torch.int64),
    ),
    Case(
        "categorical_ignore", lambda **k: Categorical(ignore_index=-100, **k), 3,
        lambda lead, g: torch.tensor([-100, 0, 1, 2])[torch.randint(0, 4, tuple(lead), generator=g)],
        lambda f, y: torch.where(y < 0, 0.0, categorical_reference(f, y.clamp_min(0))), per_output=False,
        nodes=enumerate_classes(3, torch.int64),
    ),
    Case(
        "bernoulli", Bernoulli, 3, randint(0, 2, 3),
        lambda f, y: distributions.Bernoulli(logits=f).log_prob(y.to(f.dtype)).sum(-1),
        nodes=enumerate_targets(range(2), 3),
    ),
    Case(
        "bernoulli_soft", Bernoulli, 2, lambda lead, g: torch.rand(*lead, 2, generator=g, dtype=torch.float64),
        lambda f, y: -binary_cross_entropy_with_logits(f, y, reduction="none").sum(-1),
        nodes=enumerate_targets(range(2), 2),
    ),
    Case(
        "poisson", Poisson, 2, randint(0, 6, 2),
        lambda f, y: distributions.Poisson(f.exp()).log_prob(y.to(f.dtype)).sum(-1),
        nodes=enumerate_targets(range(60), 2),
    ),
    Case(
        "heteroscedastic", HeteroscedasticGaussian, 4, randn(2), lambda f, y: normal(halves(f)[0], y, halves(f)[1]),
        nodes=gauss_hermite(halves), natural=False,
    ),
    Case(
        "bernoulli_mixture", BernoulliMixture, 3, randint(0, 2), mixture, per_output=False,
        nodes=enumerate_classes(2, torch.float64), natural=False,
    ),
]  # fmt: skip

# name -> shape without the class axis, the class axis, and class_axis for the constructor
LAYOUTS = {
    "vector": ((5,), 1, None),
    "sequence": ((3, 4), 2, None),
    "image": ((2, 2, 3), 1, None),
    "volume": ((2, 2, 1, 2), 1, None),
    "channels_first": ((3, 4), 1, 1),
    "channels_last": ((2, 2, 3), 3, -1),
}


def make_problem(case: Case, layout: str, seed: int = 0) -> Problem:
    lead, axis, class_axis = LAYOUTS[layout]
    generator = torch.Generator().manual_seed(seed)
    f = torch.randn(*lead, case.n_outputs, generator=generator, dtype=torch.float64)
    y = case.targets(torch.Size(lead), generator)
    f, y = f.movedim(-1, axis), y.movedim(-1, axis) if case.per_output else y
    return Problem(case, case.build(class_axis=class_axis), f, y, axis)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "problem" in metafunc.fixturenames:
        rows = list(itertools.product(CASES, LAYOUTS))
        ids = [f"{case.name}-{layout}" for case, layout in rows]
        metafunc.parametrize("problem", [make_problem(case, layout) for case, layout in rows], ids=ids)
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", CASES, ids=[case.name for case in CASES])
    if "vector_problem" in metafunc.fixturenames:
        problems = [make_problem(case, "vector") for case in CASES]
        metafunc.parametrize("vector_problem", problems, ids=[case.name for case in CASES])
