"""Damping: tau of the quadratic and zeta of the curvature that stands for it, and how both follow the steps.

    E(theta + d)  ~ (tau)  q(d; G)  ~ (zeta)  q(d; G~)                                            (thesis 4.22)

tau says how far the quadratic with the exact Gauss-Newton matrix is trusted, by the ratio rho of the decrease that was
seen to the one it promised; zeta is the one of three neighbours whose direction promises most. Both are numbers beside
a mean curvature.

>>> damping = Damping(tau=1.0, zeta=1.0, tau_decay=0.5)
>>> damping.after(0.9).tau, damping.after(0.5).tau
(0.5, 2.0)
>>> Damping(tau=1.0, zeta=4.0, zeta_decay=0.5).candidates()
(2.0, 4.0, 8.0)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, isfinite

from lapwing.errors import OptionError

THRESHOLD = 0.75
"""Of rho, above which the quadratic is trusted more than before."""
RAISED = 4.0
"""What a refused step multiplies tau by: the slow rule would spend many passes on what is plainly too small.

Twice as it is, twice its square, and so on, for what is too small by far.
"""
SMALL = 1e-4
"""Where tau begins, in units of the curvature along a refused step, if it was zero."""
BOUNDS = 1e-20, 1e20


@dataclass(frozen=True)
class Damping:
    """The two numbers, the factor of each (omega in the thesis), and after how many steps each is looked at.

    `zeta` None is tau at all times: for a curvature that is exact, whose best zeta is tau.
    """

    tau: float | int
    zeta: float | int | None
    tau_decay: float = 0.95
    tau_every: int = 5
    zeta_decay: float = 0.95
    zeta_every: int = 20

    def __post_init__(self) -> None:
        for name in ("tau", "zeta"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and isfinite(value) and value >= 0):
                raise OptionError(f"{name} is {value!r}; expected a finite number >= 0.")
        for name in ("tau_decay", "zeta_decay"):
            if not 0 < getattr(self, name) < 1:
                raise OptionError(f"{name} is {getattr(self, name)!r}; expected a factor between 0 and 1.")
        for name in ("tau_every", "zeta_every"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(f"{name} is {value!r}; expected a number of steps >= 1.")

    @property
    def of_curvature(self) -> float:
        return self.tau if self.zeta is None else self.zeta

    def candidates(self) -> tuple[float, ...]:
        """omega zeta, zeta, zeta / omega."""
        if self.zeta is None:
            return (self.tau,)
        return self.zeta_decay * self.zeta, self.zeta, self.zeta / self.zeta_decay

    def after(self, ratio: float) -> Damping:
        """Levenberg and Marquardt's rule: less damping where the quadratic kept its promise, more where it did not."""
        return self._with_tau(self.tau * (self.tau_decay if ratio > THRESHOLD else 1 / self.tau_decay))

    def after_refusal(self, number: int, curvature: float) -> Damping:
        """After the refusal with this number, from 0 on, of a step along which the quadratic has this curvature."""
        start = self.tau or (SMALL * curvature if 0 < curvature < inf else 1.0)
        return self._with_tau(start * RAISED ** (1 + number // 2))

    def with_zeta(self, zeta: float) -> Damping:
        return self if self.zeta is None else replace(self, zeta=min(max(zeta, BOUNDS[0]), BOUNDS[1]))

    def _with_tau(self, tau: float) -> Damping:
        return replace(self, tau=min(max(tau, BOUNDS[0]), BOUNDS[1]) if tau else 0.0)
