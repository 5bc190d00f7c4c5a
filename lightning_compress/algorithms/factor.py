"""Cholesky factors of Grams: damped, in GPTQ's order of channels.

On a CPU the factor is made panel by panel, and what is below a panel's corner tile by tile, which ranks may share out:
a tile has the same shape, and so the same last bits, wherever it is made. What each of them does itself are the
corners, 3 PANEL / I of the work. Alternative not taken: to share out columns of a triangular inverse; there is none.
"""

import math
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from lightning_compress.algorithms.base import Factor
from lightning_compress.algorithms.rows import ByRows, here
from lightning_compress.algorithms.threads import one_thread
from lightning_compress.errors import NonFiniteError, SolveError

PANEL = 128
_TILE = 256  # rows; products of fewer are slower
MAX_DAMPING = 1.0
_LEAST_RAISED_DAMPING = 0.001


def factorize(gram: Tensor, damping: float, activation_order: bool = True, by_rows: ByRows = here) -> Factor:
    """Damp, order and factorize a Gram [I, I]; if that fails, with ten times the damping, up to its mean diagonal.

    Raises:
        NonFiniteError: NaN or Inf in the Gram.
        SolveError: it is zero, or cannot be factorized with any admitted damping.
    """
    num_channels, diagonal = len(gram), gram.diagonal()
    mean = float(diagonal.mean(dtype=torch.float64))
    if not math.isfinite(mean):  # no entry of a Gram is larger than its diagonal
        raise NonFiniteError(
            f"The Gram of {num_channels} input channels holds NaN or Inf: activations overflowed during calibration. "
            "Run the model in bfloat16 or float32, or exclude the module with `ignore`."
        )
    if mean <= 0:
        raise SolveError(
            f"All {num_channels} input channels were zero in every calibration token that it saw (of a module that is "
            "called several times those of its first calls; schedule=basic sees all): exclude the module with "
            "`ignore`, or quantize it with the algorithm `rtn`."
        )
    first_to_last = torch.arange(num_channels, device=gram.device)
    if activation_order:
        first_to_last = diagonal.argsort(descending=True, stable=True)
    order = first_to_last.flip(0)
    tried = damping
    while (lower := cholesky(_reordered(gram, order), tried * mean, by_rows)) is None:
        if tried >= MAX_DAMPING:
            raise SolveError(
                f"The Gram of {num_channels} input channels cannot be factorized even with damping {tried:g}: "
                "calibrate with more tokens, or quantize this module with the algorithm `rtn`."
            )
        tried = min(max(10 * tried, _LEAST_RAISED_DAMPING), MAX_DAMPING)
    raised = f"Damping was raised from {damping:g} to {tried:g}: the Gram was not positive definite with less."
    pivots = lower.diagonal().clone()
    return Factor(
        order=order,
        lower=lower.div_(pivots),
        pivots=pivots.square(),
        damping=tried,
        added=tried * mean,
        notes=(raised,) if tried != damping else (),
    )


def _reordered(gram: Tensor, order: Tensor) -> Tensor:
    """The Gram [I, I] with rows and columns in `order`; on a CPU by panels: whole, a third matrix would exist for a
    moment, which on a GPU there is anyway while the factor is made."""
    result, panel = torch.empty_like(gram), PANEL if gram.device.type == "cpu" else len(gram)
    for part, rows in zip(result.split(panel), order.split(panel), strict=True):
        torch.index_select(gram.index_select(0, rows), 1, order, out=part)
    return result


def cholesky(matrix: Tensor, added: float, by_rows: ByRows = here) -> Tensor | None:
    """The lower Cholesky factor of `matrix` [I, I] + added * identity, in its place; None if not positive definite.

    On a CPU in panels, because LAPACK's last bits depend on the number of threads: corners are factorized by one
    thread, and products do the rest. Theirs depend on it less: not at all where 128 divides I on some processors, up to
    I = 768 on one with AMX. It is also faster than LAPACK, and no less accurate.
    """
    matrix.diagonal().add_(added)
    if matrix.device.type != "cpu":
        factor, info = torch.linalg.cholesky_ex(matrix)
        return factor if bool((info == 0) & torch.isfinite(factor.diagonal()).all()) else None
    lower, size = matrix, len(matrix)
    for start in range(0, size, PANEL):
        end = min(start + PANEL, size)
        done = lower[start:end, :start].t()
        lower[start:end, start:end].addmm_(lower[start:end, :start], done, alpha=-1)
        with one_thread():
            corner, info = torch.linalg.cholesky_ex(lower[start:end, start:end])
            if int(info) != 0 or not bool(torch.isfinite(corner.diagonal()).all()):  # which all of its row enters
                return None
            lower[start:end, start:end] = corner
            if end == size:
                break
            inverse = torch.linalg.solve_triangular(corner, torch.eye(end - start, dtype=torch.float32), upper=False)
        below = partial(_below, lower, slice(start, end), done, inverse.t())
        by_rows(below, _tiles(end, size), lower[:, start:end])
        lower[start:end, end:] = 0
    return lower


def _below(lower: Tensor, panel: slice, done: Tensor, inverse: Tensor, rows: slice) -> Tensor:
    """Rows of a panel below its corner, which has been inverted."""
    return torch.addmm(lower[rows, panel], lower[rows, : panel.start], done, alpha=-1) @ inverse


def _tiles(start: int, size: int) -> list[slice]:
    """Rows from `start` on, cut at multiples of the tile.

    >>> _tiles(384, 1000)
    [slice(384, 512, None), slice(512, 768, None), slice(768, 1000, None)]
    """
    bounds = [start, *range((start // _TILE + 1) * _TILE, size, _TILE), size]
    return [slice(*each) for each in pairwise(bounds)] if start < size else []
