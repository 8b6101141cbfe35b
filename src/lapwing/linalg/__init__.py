"""Linear algebra of curvature: structures that meet the contracts of `psd.py`. Torch only; knows no networks."""

from lapwing.linalg.blocks import Block, Blocks, BlocksPrecision
from lapwing.linalg.dense import CholeskyPrecision, Dense, EigenPrecision
from lapwing.linalg.diagonal import Diagonal, DiagonalPrecision
from lapwing.linalg.dual import Dual
from lapwing.linalg.dual_precision import DualPrecision
from lapwing.linalg.eigenbasis import Kronecker, KroneckerSum
from lapwing.linalg.ekfac import CorrectedKronecker, EigenColumns
from lapwing.linalg.factors import Term, nearest_kronecker
from lapwing.linalg.independent import Independent, IndependentPrecision
from lapwing.linalg.kronecker_precision import KroneckerPrecision
from lapwing.linalg.low_rank import LowRank
from lapwing.linalg.psd import Curvature, LinearMap, Precision
from lapwing.linalg.row_set import RowSet
from lapwing.linalg.rows import DenseRows, LookupRows, MatrixLayout, OuterRows, Piece, Segments

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
    "EigenColumns",
    "EigenPrecision",
    "Independent",
    "IndependentPrecision",
    "Kronecker",
    "KroneckerPrecision",
    "KroneckerSum",
    "LinearMap",
    "LookupRows",
    "LowRank",
    "MatrixLayout",
    "OuterRows",
    "Piece",
    "Precision",
    "RowSet",
    "Segments",
    "Term",
    "nearest_kronecker",
]
