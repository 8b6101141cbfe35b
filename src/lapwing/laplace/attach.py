"""attach(model, loader, likelihood): a trained network gets error bars in one call; every choice is said in words.

    la = lapwing.attach(model, train_loader, "classification", val_loader=val_loader)
    print(*la.choices, sep="\\n")

fit         one pass over the loader; the structure is the most exact one that is affordable
tune        the prior precision, and the noise of a regression, by the evidence: no held-out data are needed. Where the
            structure is an approximation, that of a regression is the exact evidence of some rows
            (`lapwing.laplace.row_evidence`)
calibrate   with `val_loader`: one factor on the posterior covariance (and one on the noise), by the likelihood of its
            targets; kept where it gains more than it has free numbers (Akaike's rule), else nothing changes

The model is never changed. Cost: one pass, one decomposition, and one prediction pass over `val_loader`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from lapwing.errors import ParameterError
from lapwing.laplace import BaseLaplace, Laplace
from lapwing.laplace.calibration import calibrate
from lapwing.laplace.row_evidence import can_tune, tune_by_rows
from lapwing.likelihoods import Likelihood

ROWS = 1000
"""Outputs of rows whose exact evidence tunes a regression; their Gram matrix takes eight megabytes, and a second."""


def attach(
    model: nn.Module,
    loader: Iterable[Any],
    likelihood: str | Likelihood,
    *,
    val_loader: Iterable[Any] | None = None,
    structure: str = "auto",
    subset_of_weights: str = "all",
    prior_structure: str = "scalar",
    rows: int = ROWS,
    generator: torch.Generator | None = None,
    progress_bar: bool = False,
    **options: Any,
) -> BaseLaplace:
    """The posterior of a trained network: fitted, tuned, and calibrated where `val_loader` is given.

    `structure` is any `hessian_structure` of `Laplace`; "auto" keeps every covariance up to 3000 weights, Kronecker
    factors beyond; parameters that form no Kronecker product have exact blocks of their own. What was chosen, and why,
    is in `la.choices`. Further options are those of the structure. `rows` is how many outputs of rows may serve to tune
    a regression whose structure is an approximation; 0 tunes by the evidence of that structure, whose noise and error
    bars are usually too large.

    >>> x = torch.linspace(-1, 1, 40).reshape(-1, 1)
    >>> model = nn.Linear(1, 1)
    >>> with torch.no_grad(): _ = model.weight.fill_(2.0), model.bias.fill_(0.0)
    >>> la = attach(model, [(x, 2 * x + 0.1 * torch.sin(100 * x))], "regression")
    >>> la.choices[0]
    'Structure: full: 2 weights, so every covariance fits (up to 3,000).'
    >>> round(float(la.sigma_noise), 2)                       # the sine has mean square 0.1^2 / 2
    0.07
    """
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 0:
        raise ParameterError(f"rows is {rows!r}; expected a whole number >= 0.")
    if isinstance(loader, Iterator):  # a structure may go through it twice
        loader = list(loader)
    la = Laplace(model, likelihood, subset_of_weights, structure, **options)
    la.fit(loader, progress_bar=progress_bar, generator=generator)
    said = [f"Structure: {la.reason or f'{la.structure}, as asked for'}."]
    said += [la.exact_blocks] if la.exact_blocks else []
    if rows and can_tune(la, subset_of_weights, prior_structure):
        how = {"subset": subset_of_weights, "prior_structure": prior_structure, "options": options}
        said.append(tune_by_rows(la, loader, rows, generator=generator, **how))
    else:
        la.optimize_prior_precision(prior_structure=prior_structure, optimize_sigma_noise=la.has_noise)
    said.append(_prior(la))
    if la.has_noise:
        said.append(f"Noise: standard deviation {float(la.sigma_noise):.4g}, by the evidence.")
    said.append("Calibration: none, as no val_loader was given." if val_loader is None else calibrate(la, val_loader))
    la.choices = tuple(said)
    return la


def _prior(la: BaseLaplace) -> str:
    values = la.prior_precision
    shown = f"{float(values[0]):.4g}" if len(values) == 1 else f"{float(values.min()):.4g} to {float(values.max()):.4g}"
    evidence = float(la.log_marginal_likelihood())
    return f"Prior precision: {shown}, by the evidence of {la.n_data:,} points (log evidence {evidence:.6g})."
