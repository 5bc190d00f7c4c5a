"""Warnings of what all ranks have alike: those of the first rank are enough.

Alternative not taken: ranks that ask one another who has said it; one that warns alone would wait for the others.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_compress.errors import CalibrationWarning, UnreachedModulesWarning
from lightning_compress.export.verify import ReadBackWarning
from lightning_compress.graph.fallback import TraceFallbackWarning
from lightning_compress.report.experts import ExpertCoverageWarning

_ALIKE = (CalibrationWarning, UnreachedModulesWarning, TraceFallbackWarning, ReadBackWarning, ExpertCoverageWarning)
"""Of model, recipe and data, in which ranks are compared; not of budgets, disks and files, of which each has others."""


@contextmanager
def warned_by_first(rank: int) -> Iterator[None]:
    """Within: they are not shown, unless `rank` is 0, whose filters stay: they know what was said once."""
    if rank == 0:
        yield
        return
    with warnings.catch_warnings():
        for kind in _ALIKE:
            warnings.simplefilter("ignore", kind)
        yield
