"""How `kfra` refuses what it cannot follow."""

from __future__ import annotations

from lapwing.errors import UnsupportedOperationError

ALTERNATIVES = (
    "Use estimate.kflr or kfac (a Kronecker structure that propagates nothing), or estimate.propagated_diagonal, which "
    "follows every operation."
)


def refuse(name: str, found: str) -> UnsupportedOperationError:
    return UnsupportedOperationError(
        f"kfra cannot pass curvature through '{name}': {found}; expected operations whose Jacobian is the same for "
        "every data point (linear, convolution, reshape, average, sum, batch_norm in eval mode), entrywise ones, or "
        f"max-pooling. {ALTERNATIVES}"
    )
