"""Work that falls into tiles of rows, and so can be shared out."""

from collections.abc import Callable, Sequence

from torch import Tensor

ByRows = Callable[[Callable[[slice], Tensor], Sequence[slice], Tensor], None]
"""Fills tiles of rows of a tensor, given how one is computed: by this process (`here`), or by several together."""


def here(compute: Callable[[slice], Tensor], tiles: Sequence[slice], to: Tensor) -> None:
    """One tile after the other, by this process."""
    for rows in tiles:
        to[rows] = compute(rows)
