"""Linear programmes, written variable by variable and solved by HiGHS (through SciPy)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import numpy
from scipy.optimize import linprog
from scipy.sparse import csr_array

Sum = Mapping[int, float]
"""Factors by variable."""


@final
@dataclass(frozen=True)
class Solution:
    """A solved programme.

    Attributes:
        values: of the variables.
        cost: what was minimized.
    """

    values: tuple[float, ...]
    cost: float


@final
class LinearProgramme:
    """Variables are numbers that are not negative."""

    def __init__(self) -> None:
        self._upper: list[float | None] = []
        self._rows: list[Sum] = []
        self._bounds: list[float] = []

    def variable(self, upper: float | None = None) -> int:
        """A new one, at most `upper`."""
        self._upper.append(upper)
        return len(self._upper) - 1

    def at_most(self, total: Sum, bound: float) -> None:
        """The sum is `bound` or less."""
        self._rows.append(total)
        self._bounds.append(bound)

    def minimized(self, cost: Sum) -> Solution | None:
        """The solution of least cost; None where nothing satisfies all constraints."""
        matrix = _matrix(self._rows, len(self._upper)) if self._rows else None
        bounds = self._bounds or None
        limits = [(0.0, upper) for upper in self._upper]
        found = linprog(_row(cost, len(self._upper)), matrix, bounds, bounds=limits, method="highs")
        if found.status != 0:
            return None
        return Solution(tuple(map(float, found.x)), float(found.fun))


def _row(total: Sum, length: int) -> numpy.typing.NDArray[numpy.float64]:
    row = numpy.zeros(length)
    for variable, factor in total.items():
        row[variable] = factor
    return row


def _matrix(rows: list[Sum], length: int) -> csr_array:
    entries = [(number, variable, factor) for number, row in enumerate(rows) for variable, factor in row.items()]
    numbers, variables, factors = zip(*entries, strict=True)
    return csr_array((factors, (numbers, variables)), shape=(len(rows), length))
