"""GPTQ's walk through the channels (Babai's nearest plane; see `gptq`), for tiles of one weight or of several.

Layout: everything is transposed to [I, O], so that a channel is one contiguous vector over the rows. Three levels:
products with all earlier blocks (of `block_size` channels), products within the block, and a thin matrix-vector product
within 16 channels. On a GPU with Triton, one kernel does the two inner levels (`gptq_triton`).
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_compress.algorithms import gptq_triton
from lightning_compress.algorithms.base import Factor
from lightning_compress.algorithms.scales import Grid, Scales

ALIGNMENT = 32
"""Of the matrices' rows, in elements."""
_SUB_BLOCK = 16


def nearest_plane(
    tiles: Sequence[Tensor], factors: Sequence[Factor], scales: Sequence[Scales], grid: Grid, block_size: int = 128
) -> list[tuple[Tensor, Tensor]]:
    """Codes int8 [R, I] of each row tile [R, I], and the output error of its rows without damping, float64 [R].

    The tiles, each with the factor of its Gram, go through the channels together, which saves calls; all products are
    made tile by tile, because the last bits of a product depend on its shape and on how its rows are aligned. So a
    tile's result does not depend on the others.
    """
    ends = list(accumulate(len(tile) for tile in tiles))
    spans = [slice(end - len(tile), end) for tile, end in zip(tiles, ends, strict=True)]
    padding = -ends[-1] % ALIGNMENT
    ordered = [tile.float().t().index_select(0, each.order) for tile, each in zip(tiles, factors, strict=True)]
    places = F.pad(torch.cat(ordered, 1), (0, padding))  # [I, R]
    del ordered
    groups, scale, zero_point = _by_place(factors, scales, grid, padding)
    num_channels, num_rows = places.shape
    delta = torch.zeros_like(places)  # w - q
    codes = torch.empty(places.shape, dtype=torch.int8, device=places.device)
    target, rounded = places.new_empty(2, min(block_size, num_channels), num_rows)
    row_error = torch.zeros(num_rows, dtype=torch.float64, device=places.device)
    for end in range(num_channels, 0, -block_size):
        start = max(end - block_size, 0)
        t, q, w, d = target[: end - start], rounded[: end - start], places[start:end], delta[start:end]
        for span, factor in zip(spans, factors, strict=True):
            torch.addmm(w[:, span], factor.lower[end:, start:end].t(), delta[end:, span], out=t[:, span])
        corner = {id(factor): factor.lower[start:end, start:end] for factor in factors}
        within = [corner[id(factor)] for factor in factors]
        block = (scale, zero_point, groups[start:end], grid, q, d)
        if gptq_triton.usable(places):
            gptq_triton.quantize_block(t, w, within[0], *block)
        else:
            quantize_block(t, w, within, *block, spans)
        codes[start:end].copy_(q)
        t.sub_(w).add_(d).square_()
        for span, factor in zip(spans, factors, strict=True):
            row_error[span] += factor.pivots[start:end] @ t[:, span]
            row_error[span] -= factor.added * d[:, span].square().sum(0)
    found = []
    for span, factor in zip(spans, factors, strict=True):
        of_tile = codes[:, span].index_select(0, factor.order.argsort()).t().contiguous()
        found.append((of_tile, row_error[span].clamp(min=0)))
    return found


def _by_place(
    factors: Sequence[Factor], scales: Sequence[Scales], grid: Grid, padding: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """For each place among the channels the row of its scales, int64 [I]; those, float32 [G, R], and zero points.

    Tiles of one factor have the same group at a place; of several, every place has a row of its own.
    """
    order = factors[0].order
    zero_points = [tile.zero_point for tile in scales if tile.zero_point is not None]
    is_one = all(factor is factors[0] for factor in factors)
    groups = order // grid.group_size if is_one else torch.arange(len(order), device=order.device)

    def placed(parts: Sequence[Tensor], fill: float) -> Tensor:
        rows = [part.float().t() for part in parts]
        if not is_one:
            rows = [row[each.order // grid.group_size] for row, each in zip(rows, factors, strict=True)]
        return F.pad(torch.cat(rows, 1), (0, padding), value=fill)

    return groups, placed([tile.scale for tile in scales], 1.0), placed(zero_points, 0.0) if zero_points else None


def quantize_block(
    target: Tensor,
    weight: Tensor,
    lowers: Sequence[Tensor],
    scale: Tensor,
    zero_point: Tensor | None,
    groups: Tensor,
    grid: Grid,
    codes: Tensor,
    delta: Tensor,
    spans: Sequence[slice] = (slice(None),),
) -> None:
    """Quantize the channels of one block, last to first; all matrices are [n, R], n channels by R rows.

    Args:
        target: w plus what earlier blocks left to make up for; the block's own corrections are added in place.
        weight: w.
        lowers: for each tile [n, n], the unit lower triangular factor within the block.
        scale: float32 [G, R].
        zero_point: float32 [G, R]; None for symmetric grids.
        groups: int64 [n], for each channel which row of these it has.
        grid: the codes' limits.
        codes: written, as floats.
        delta: written, w - q; zero on entry.
        spans: the row tiles; products are made for each.
    """
    scales, shifts = scale.unbind(0), () if zero_point is None else zero_point.unbind(0)
    for end in range(len(target), 0, -_SUB_BLOCK):
        start = max(end - _SUB_BLOCK, 0)
        if end < len(target):
            for span, lower in zip(spans, lowers, strict=True):
                target[start:end, span].addmm_(lower[end:, start:end].t(), delta[end:, span])
        # Channels not quantized yet have zero coefficients and zero deltas, so every product has the same shape.
        of_factor = {id(lower): lower[start:end, start:end].tril(-1).t().contiguous() for lower in lowers}
        coefficients = zip(*(of_factor[id(lower)].unbind(0) for lower in lowers), strict=True)
        earlier = [delta[start:end, span].t() for span in spans]
        targets = zip(*(target[start:end, span].unbind(0) for span in spans), strict=True)
        channels = (matrix[start:end].unbind(0) for matrix in (target, codes, delta, weight))  # views made all at once
        numbered = zip(*channels, targets, coefficients, groups[start:end].tolist(), strict=True)
        for t, q, d, w, parts, of_parts, group in reversed(list(numbered)):
            s = scales[group]
            for part, errors, coefficient in zip(parts, earlier, of_parts, strict=True):
                torch.addmv(part, errors, coefficient, out=part)
            if zero_point is None:
                torch.div(t, s, out=q).round_().clamp_(grid.low, grid.high)
                torch.addcmul(w, q, s, value=-1, out=d)
            else:
                torch.addcdiv(shifts[group], t, s, out=q).round_().clamp_(grid.low, grid.high)
                torch.addcmul(w, q - shifts[group], s, value=-1, out=d)
