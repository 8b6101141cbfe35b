"""Estimators: one pass over the data (ekfac: two) -> a Curvature, a sum over data points.

full, diagonal, blocks    exact GGN; `cotangents=` fisher or monte_carlo(k) for the Fisher, projections(k) for the GGN
kflr, kfac                Kronecker factors, exact or Monte-Carlo
kfra                      the same, propagated in expectation: its cost does not grow with the outputs
ekfac                     their eigenbasis, with the exact diagonal of the curvature in it
dual, low_rank            the same by its rows (P >> N C), and its largest eigenpairs; `subset` of the data
matrix_free               its products over the data, which are kept: conjugate gradients and Lanczos, for any P
sketched                  no curvature but a score of inputs by the directions that the data determine, for very large P
propagated_diagonal       variances carried back through squared Jacobians: any number of outputs at the cost of one
mixed_diagonal            the same from the outputs to a bottleneck of few entries, and exact columns from there
empirical                 outer products of observed gradients, any structure
last_layer                the same structures of the last layer, in closed form from its features
hessian                   the exact Hessian: full, diagonal or blocks
by_name                   any of the above by the name of its structure and source
"""

from lapwing.estimate import last_layer
from lapwing.estimate.corrected_kronecker import ekfac
from lapwing.estimate.cotangents import exact, fisher, monte_carlo, projections
from lapwing.estimate.data_products import matrix_free
from lapwing.estimate.dual_rows import dual, subset
from lapwing.estimate.empirical_fisher import empirical
from lapwing.estimate.exact_blocks import blocks
from lapwing.estimate.exact_diagonal import diagonal
from lapwing.estimate.exact_hessian import hessian
from lapwing.estimate.full_matrix import full
from lapwing.estimate.kronecker import kfac, kflr
from lapwing.estimate.leading_eigenpairs import low_rank
from lapwing.estimate.naming import by_name
from lapwing.estimate.propagated.diagonal import propagated_diagonal
from lapwing.estimate.propagated.kfra import kfra
from lapwing.estimate.propagated.mixed import mixed_diagonal
from lapwing.estimate.sketched_score import SketchedScore, sketched

__all__ = [
    "SketchedScore",
    "blocks",
    "by_name",
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
    "matrix_free",
    "mixed_diagonal",
    "monte_carlo",
    "projections",
    "propagated_diagonal",
    "sketched",
    "subset",
]
