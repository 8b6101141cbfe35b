"""All rules of the tape: importing this module registers them."""

from lapwing.tangent import squares_norms, squares_products, squares_resampling
from lapwing.tangent.squares import RULES, Entrywise, Reduction, Rule, Selection, register
from lapwing.tangent.squares_products import Multilinear

__all__ = [
    "RULES",
    "Entrywise",
    "Multilinear",
    "Reduction",
    "Rule",
    "Selection",
    "register",
    "squares_norms",
    "squares_products",
    "squares_resampling",
]
