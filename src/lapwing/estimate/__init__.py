"""Estimators: one pass over the data (ekfac: two) -> a Curvature, a sum over data points.

full, diagonal, blocks    exact GGN; `cotangents=` fisher or monte_carlo(k) for the Fisher, projections(k) for the GGN
kflr, kfac                Kronecker factors, exact or Monte-Carlo
kfra                      the same, propagated in expectation: its cost does not grow with the outputs
ekfac                     their eigenbasis, with the exact diagonal of the curvature in it
dual, low_rank            the same by its rows (P >> N C), and its largest eigenpairs; `subset` of the data
propagated_diagonal       variances carried back through squared Jacobians: any number of outputs at the cost of one
mixed_diagonal            the same from the outputs to a bottleneck of few entries, and exact columns from there
empirical                 outer products of observed gradients, any structure
last_layer                the same structures of the last layer, in closed form from its features
hessian                   the exact Hessian: full, diagonal or blocks
"""

from lapwing.estimate import last_layer
from lapwing.estimate.blocks import blocks
from lapwing.estimate.cotangents import exact, fisher, monte_carlo, projections
from lapwing.estimate.diagonal import diagonal
from lapwing.estimate.dual import dual, subset
from lapwing.estimate.ekfac import ekfac
from lapwing.estimate.empirical import empirical
from lapwing.estimate.full import full
from lapwing.estimate.hessian import hessian
from lapwing.estimate.kfra import kfra
from lapwing.estimate.kronecker import kfac, kflr
from lapwing.estimate.low_rank import low_rank
from lapwing.estimate.mixed import mixed_diagonal
from lapwing.estimate.propagated import propagated_diagonal

__all__ = [
    "blocks",
    "diagonal",
    "dual",
    "ekfac",
    "empirical",
    "exact",
    "fisher",
    "full",
    "hessian",
    "kfac",
    "kflr",
    "kfra",
    "last_layer",
    "low_rank",
    "mixed_diagonal",
    "monte_carlo",
    "projections",
    "propagated_diagonal",
    "subset",
]
