"""The rules of the tape, one per operation. Importing this package registers those that lapwing has."""

from lapwing.tape.nodes import Rule
from lapwing.tape.rules import norms, resampling
from lapwing.tape.rules.kinds import RULES, Entrywise, Reduction, Selection, register
from lapwing.tape.rules.products import Multilinear

__all__ = ["RULES", "Entrywise", "Multilinear", "Reduction", "Rule", "Selection", "norms", "register", "resampling"]
