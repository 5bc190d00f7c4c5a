"""Scales that fit the codes, and the choice between the solutions that come of it.

With the codes K of a row fixed, the scales of its groups that minimize (v - sK) C (v - sK)ᵀ solve a system of one
equation per group; GPTQ finds new codes for them, in turns. No round has to be better than the one before, so
every row takes its best of them, by the error that GPTQ minimizes.

How many rounds there are to choose from can be chosen: by the error on batches that were held out, against the original
model (`target.Judge`), of all rows of a tile. Tiles choose for themselves, so ranks need not agree on anything. (Rows
that choose for themselves follow the noise of those batches: they gave away a third of the gain at 2 bits.) The codes
of all candidates were found with sums that hold those batches too, one in eight: a solve without them, to choose by,
would cost as much as the one that counts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_compress.algorithms.grids import Grid
from lightning_compress.algorithms.scales import Scales, values_of
from lightning_compress.algorithms.target import Judge, row_errors

ROUNDS = 2
"""At most so many are tried where their number is chosen."""
Candidate = tuple[Tensor, Scales, Tensor]
"""Codes [R, I], scales and an error of every row, float64 [R]."""
_TOWARDS_OLD = 1e-3  # how much refitted scales are drawn to those before, as a fraction of the mean diagonal


def refit_bytes(num_rows: int, num_channels: int, num_groups: int) -> int:
    """At most alive inside `refitted` for R rows of I channels."""
    return 4 * num_rows * (5 * num_channels + 3 * num_groups**2)


def refitted(target: Tensor, gram: Tensor, codes: Tensor, scales: Scales, grid: Grid) -> Scales:
    """The scales that fit the codes best, min over s of (v - s K) C (v - s K)ᵀ for every row v.

    Args:
        target: [R, I].
        gram: C, float32 [I, I].
        codes: [R, I].
        scales: that the codes were found with; the result is drawn to them a little.
        grid: the scheme; not per tensor.
    """
    num_rows, num_channels = codes.shape
    size = grid.group_size
    num_groups = num_channels // size
    values = codes.float().view(num_rows, num_groups, size)
    if scales.zero_point is not None:
        values = values - scales.zero_point[..., None].float()
    flat = values.reshape(num_rows, num_channels)
    normal = torch.empty(num_rows, num_groups, num_groups, dtype=torch.float32, device=codes.device)
    for group in range(num_groups):
        rows = gram[group * size : (group + 1) * size]
        normal[:, group] = ((values[:, group] @ rows) * flat).view(num_rows, num_groups, size).sum(-1)
    right = ((target.float() @ gram) * flat).view(num_rows, num_groups, size).sum(-1)
    before = scales.scale.float()
    pull = _TOWARDS_OLD * normal.diagonal(dim1=1, dim2=2).mean(-1, keepdim=True)
    normal.diagonal(dim1=1, dim2=2).add_(pull + torch.finfo(torch.float32).tiny)
    found = torch.linalg.solve(normal, right + pull * before)
    is_good = found.isfinite() & (found != 0)
    if not grid.signed_scales:
        is_good &= found > 0
    return Scales(grid.stored(torch.where(is_good, found, before)), scales.zero_point)


def best_rows(candidates: Sequence[Candidate], held_out: Tensor | None = None) -> tuple[Tensor, Scales, Tensor, int]:
    """Of solutions of the same rows, for every row the one of least error: codes, scales, error.

    Args:
        candidates: without refitting, and after every round.
        held_out: their errors on batches that were held out, float64 [candidates, R]: as many of the candidates as are
            best by the sum of these may be taken; None: all.

    Returns:
        also the number of rounds after which those that may be taken end.
    """
    errors = torch.stack([error for _, _, error in candidates])
    best_of = [errors[: last + 1].argmin(0) for last in range(len(candidates))]
    last = len(candidates) - 1
    if held_out is not None:
        last = int(torch.stack([held_out.gather(0, best[None]).sum() for best in best_of]).argmin())
    best, rows = best_of[last], torch.arange(errors.shape[1], device=errors.device)
    codes = torch.stack([codes for codes, _, _ in candidates])[best, rows]
    scale = torch.stack([scales.scale for _, scales, _ in candidates])[best, rows]
    return codes, Scales(scale, candidates[0][1].zero_point), errors[best, rows], last


def errors_held_out(candidates: Sequence[Candidate], weight: Tensor, rows: slice, judge: Judge, grid: Grid) -> Tensor:
    """Of solutions for these rows of a weight W, which are `weight`, float64 [candidates, R]."""
    missing, squares = judge.lack.missing(weight, rows), judge.lack.squares(weight, rows)
    values = (values_of(codes, scales, grid) for codes, scales, _ in candidates)
    return torch.stack([row_errors(weight, value, missing, squares, judge.gram) for value in values])
