"""All rules of the tape: importing this module registers them."""

from lapwing.tangent import squares_norms, squares_products, squares_resampling
from lapwing.tangent.squares import RULES

__all__ = ["RULES", "squares_norms", "squares_products", "squares_resampling"]
