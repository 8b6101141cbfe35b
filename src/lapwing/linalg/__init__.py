"""Linear algebra of curvature: structures that meet the contracts of `contracts.py`. Torch only; knows no networks."""

from lapwing.linalg.blocks import Block, Blocks, BlocksPrecision
from lapwing.linalg.contracts import Curvature, LinearMap, Precision
from lapwing.linalg.dense import CholeskyPrecision, Dense, EigenPrecision
from lapwing.linalg.diagonal import Diagonal, DiagonalPrecision
from lapwing.linalg.dual import Dual, DualPrecision
from lapwing.linalg.independent_outputs import Independent, IndependentPrecision
from lapwing.linalg.kronecker.corrected import CorrectedKronecker, EigenColumns
from lapwing.linalg.kronecker.factored import FactoredPrecision
from lapwing.linalg.kronecker.factors import Term, nearest_kronecker
from lapwing.linalg.kronecker.precision import KroneckerPrecision
from lapwing.linalg.kronecker.structure import Kronecker, KroneckerSum
from lapwing.linalg.layout import MatrixLayout, Segments
from lapwing.linalg.low_rank import LowRank, Subspace
from lapwing.linalg.matrix_free import Effort, MatrixFree, MatrixFreePrecision, Products
from lapwing.linalg.row_set import RowSet
from lapwing.linalg.rows import DenseRows, LookupRows, OuterRows, Piece
from lapwing.linalg.sums import MixedSum, merged_factors, total

__all__ = [
    "Block",
    "Blocks",
    "BlocksPrecision",
    "CholeskyPrecision",
    "CorrectedKronecker",
    "Curvature",
    "Dense",
    "DenseRows",
    "Diagonal",
    "DiagonalPrecision",
    "Dual",
    "DualPrecision",
    "Effort",
    "EigenColumns",
    "EigenPrecision",
    "FactoredPrecision",
    "Independent",
    "IndependentPrecision",
    "Kronecker",
    "KroneckerPrecision",
    "KroneckerSum",
    "LinearMap",
    "LookupRows",
    "LowRank",
    "MatrixFree",
    "MatrixFreePrecision",
    "MatrixLayout",
    "MixedSum",
    "OuterRows",
    "Piece",
    "Precision",
    "Products",
    "RowSet",
    "Segments",
    "Subspace",
    "Term",
    "merged_factors",
    "nearest_kronecker",
    "total",
]
