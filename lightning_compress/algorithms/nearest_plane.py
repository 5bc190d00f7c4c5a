"""GPTQ's walk through the channels (Babai's nearest plane; see `gptq`), for tiles of one weight or of several.

Layout: everything is [I, T, H], channels by tiles by the rows of each, so that a channel is one contiguous vector over
all rows. Three levels: products with all earlier blocks (of `block_size` channels), products within the block, and
within 16 channels each error is passed on at once. On a GPU with Triton, one kernel does the two inner levels, and the
sums of errors (`kernels`).

Alternative not taken: compiling the inner level for the CPU with Numba, a large dependency for where solving matters
least.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_compress.algorithms import kernels
from lightning_compress.algorithms.base import Factor
from lightning_compress.algorithms.grids import Grid
from lightning_compress.algorithms.scales import Scales
from lightning_compress.algorithms.threads import one_thread

ALIGNMENT = 32
"""Of the tiles' heights, in rows: a vector's last elements are computed by other instructions."""
_SUB_BLOCK = 16


def nearest_plane(
    tiles: Sequence[Tensor], factors: Sequence[Factor], scales: Sequence[Scales], grid: Grid, block_size: int = 128
) -> list[tuple[Tensor, Tensor]]:
    """Codes [R, I] of each row tile [R, I], and the output error of its rows without damping, float64 [R].

    The tiles, each with the factor of its Gram, go through the channels together, which saves calls; all products are
    made tile by tile, because the last bits of a product depend on its shape and on how its rows are aligned. So a
    tile's result does not depend on the others.
    """
    heights = [len(tile) for tile in tiles]
    found = []
    with torch.inference_mode():  # calls are short: a fifth of their time is autograd's
        codes, row_error = _walk(tiles, heights, factors, scales, grid, block_size)
    for place, (height, factor) in enumerate(zip(heights, factors, strict=True)):
        of_tile = codes[:, place, :height].index_select(0, factor.order.argsort()).t().contiguous()
        found.append((of_tile, row_error[place, :height].clamp(min=0)))
    return found


def _walk(
    tiles: Sequence[Tensor],
    heights: Sequence[int],
    factors: Sequence[Factor],
    scales: Sequence[Scales],
    grid: Grid,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """Codes [I, T, H], channels in each factor's order, and errors float64 [T, H]."""
    places = _side_by_side([tile.float().t() for tile in tiles], [factor.order for factor in factors], 0.0)
    groups, scale, zero_point = _by_place(factors, scales, grid)
    num_channels, _, num_rows = places.shape
    delta = torch.zeros_like(places)  # w - q
    codes = torch.empty(places.shape, dtype=grid.code_dtype, device=places.device)
    row_error = torch.zeros(len(tiles), num_rows, dtype=torch.float64, device=places.device)
    of_tiles = factors[:1] if all(factor is factors[0] for factor in factors) else factors
    pivots = torch.stack([factor.pivots for factor in of_tiles])
    added = torch.tensor([factor.added for factor in of_tiles], dtype=torch.float64, device=places.device)
    target, rounded = places.new_empty(2, min(block_size, num_channels), len(tiles), num_rows)
    for end in range(num_channels, 0, -block_size):
        start = max(end - block_size, 0)
        t, q, w, d = target[: end - start], rounded[: end - start], places[start:end], delta[start:end]
        for place, (height, factor) in enumerate(zip(heights, factors, strict=True)):
            lower, earlier = factor.lower[end:, start:end], delta[end:, place, :height]
            torch.addmm(w[:, place, :height], lower.t(), earlier, out=t[:, place, :height])
        corners = [factor.lower[start:end, start:end] for factor in of_tiles]
        within = torch.stack(corners) if len(corners) > 1 else corners[0][None]
        stored = (scale, zero_point, groups[start:end])
        if kernels.usable(places):
            of_block = codes[start:end] if grid.floats is None else torch.empty_like(t, dtype=torch.float16)
            kernels.quantize_block(t, w, within, pivots[:, start:end], added, *stored, grid, of_block, d, row_error)
            if of_block.dtype != codes.dtype:
                codes[start:end].copy_(of_block)
            continue
        with one_thread():  # sharing out a channel's rows gains nothing, and loses beside other work
            quantize_block(t, w, within, *stored, grid, q, d, heights)
        codes[start:end].copy_(q)
        t.sub_(w).add_(d).square_()
        for place, (height, factor) in enumerate(zip(heights, factors, strict=True)):
            row_error[place, :height] += factor.pivots[start:end] @ t[:, place, :height]
            row_error[place, :height] -= factor.added * d[:, place, :height].square().sum(0)
    return codes, row_error


def _side_by_side(columns: Sequence[Tensor], orders: Sequence[Tensor], fill: float) -> Tensor:
    """Of matrices [n, R], one of each tile, the rows that its order names, float32 [n, T, H]."""
    num_rows = max(matrix.shape[1] for matrix in columns)
    num_rows += -num_rows % ALIGNMENT
    shape = (len(orders[0]), len(columns), num_rows)
    result = torch.full(shape, fill, dtype=torch.float32, device=columns[0].device)
    for place, (matrix, order) in enumerate(zip(columns, orders, strict=True)):
        # rows that are contiguous are gathered three times as fast, the transposition included
        torch.index_select(matrix.float().contiguous(), 0, order, out=result[:, place, : matrix.shape[1]])
    return result


def _by_place(factors: Sequence[Factor], scales: Sequence[Scales], grid: Grid) -> tuple[Tensor, Tensor, Tensor | None]:
    """For each place among the channels the row of its scales, int64 [I]; those, float32 [G, T, H], and zero points.

    Tiles of one factor have the same group at a place; of several, every place has a row of its own.
    """
    groups = [factor.order // grid.group_size for factor in factors]
    of_place, orders = torch.arange(len(groups[0]), device=groups[0].device), groups
    if all(factor is factors[0] for factor in factors):
        num_groups = scales[0].scale.shape[1]
        of_place, orders = groups[0], [torch.arange(num_groups, device=groups[0].device)] * len(factors)
    scale = _side_by_side([tile.scale.t() for tile in scales], orders, 1.0)
    zero_points = [tile.zero_point.t() for tile in scales if tile.zero_point is not None]
    return of_place, scale, _side_by_side(zero_points, orders, 0.0) if zero_points else None


def quantize_block(
    target: Tensor,
    weight: Tensor,
    lowers: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    groups: Tensor,
    grid: Grid,
    codes: Tensor,
    delta: Tensor,
    heights: Sequence[int],
) -> None:
    """Quantize the channels of one block, last to first; all matrices are [n, T, H]: n channels, T tiles of H rows.

    Args:
        target: w plus what earlier blocks left to make up for; the block's own corrections are added in place.
        weight: w.
        lowers: [F, n, n], the unit lower triangular factors within the block, of each tile or (F = 1) of all.
        scale: float32 [G, T, H].
        zero_point: float32 [G, T, H]; None for symmetric grids.
        groups: int64 [n], for each channel which row of these it has.
        grid: the codes' limits.
        codes: written, as floats.
        delta: written, w - q.
        heights: how many rows of each tile are not padding; products are made for each.
    """
    scales, shifts = scale.unbind(0), () if zero_point is None else zero_point.unbind(0)
    for end in range(len(target), 0, -_SUB_BLOCK):
        start = max(end - _SUB_BLOCK, 0)
        if end < len(target):
            below = lowers[:, end:, start:end].expand(len(heights), -1, -1)
            for place, (height, lower) in enumerate(zip(heights, below, strict=True)):
                target[start:end, place, :height].addmm_(lower.t(), delta[end:, place, :height])
        coefficients = lowers[:, start:end, start:end].permute(1, 2, 0).contiguous()[..., None]  # [n, n, F, 1]
        left = target[start:end]
        channels = (matrix[start:end].unbind(0) for matrix in (target, codes, delta, weight))  # views made all at once
        numbered = enumerate(zip(*channels, coefficients.unbind(0), groups[start:end].tolist(), strict=True))
        for number, (t, q, d, w, of_left, group) in reversed(list(numbered)):
            s = scales[group]
            if zero_point is None:
                grid.round_(torch.div(t, s, out=q))
                torch.addcmul(w, q, s, value=-1, out=d)
            else:
                grid.round_(torch.addcdiv(shifts[group], t, s, out=q))
                torch.addcmul(w, q - shifts[group], s, value=-1, out=d)
            if number:
                left[:number].addcmul_(of_left[:number], d)
