"""The scale and zero-point of every group of weights.

Method: the starting point is the min-max rule of compressed-tensors (`calculate_qparams`): a symmetric scale is amax
over half the grid's range, (2^b - 1) / 2 for integers; an asymmetric range is widened to hold 0. The search then
shrinks the range, because a finer grid for the many is often worth clipping the few: it minimizes
sum_j C_jj (w_j - q_j)^2 per group, C_jj being the mean square of input channel j (the diagonal of GPTQ's Hessian; the
weighting of llama.cpp's importance matrix and of AutoRound's opt-RTN). For every shrink factor the best scale *for
those codes* is known in closed form, s = sum(d w q) / sum(d q^2), and competes too, so that few and coarse factors do.

A symmetric grid of integers reaches one step further down than up (-8 to 7), so where a group's largest weight is
positive its searched scale is negative: the largest weight gets the extra code. At 2 bits (-2 to 1) that is most of
what the search gains. (llama.cpp's and AutoRound's symmetric formats do the same.)

Every scale is rounded to what is stored before it is judged, and solving uses the rounded one: what is solved is
what is stored. Rows are processed in tiles that stay in the cache.

Alternative not taken: 20 to 100 uniform shrink factors without the closed form (the `mse` observers of llmcompressor
and AutoGPTQ): no lower an error at several times the cost.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from lightning_compress.algorithms import kernels
from lightning_compress.algorithms.grids import Grid, width_of_groups
from lightning_compress.algorithms.tiling import Tiling, tiling_of

SHRINKS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
"""Factors of the min-max scale to start from; the small ones are for groups with an outlier."""


@final
@dataclass(frozen=True)
class Scales:
    """Scale [R, G] in the storage dtype and zero-point int8 [R, G] (None for symmetric grids) of R rows."""

    scale: Tensor
    zero_point: Tensor | None

    def rows(self, rows: slice) -> "Scales":
        return Scales(self.scale[rows], None if self.zero_point is None else self.zero_point[rows])


def minmax_scales(weight: Tensor, grid: Grid) -> Scales:
    """Scales that just cover every group of `weight` [R, I], the rows of one module if they share scales."""
    low, high = _ranges(weight, grid)
    if grid.symmetric:
        return Scales(grid.covering(torch.maximum(-low, high)), None)
    scale = grid.stored((high - low) / (grid.high - grid.low))
    zero_point = (grid.low - low / scale.float()).round_().clamp_(grid.low, grid.high)
    return Scales(scale, zero_point.to(torch.int8))


def _ranges(weight: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """The lowest and highest weight of every group, or 0 if that is beyond it, float32 [R, G]."""
    groups = weight.reshape(weight.shape[0], -1, grid.group_size)
    low = groups.amin(-1).float().clamp_(max=0)  # `aminmax` along a dimension takes six times as long as both
    high = groups.amax(-1).float().clamp_(min=0)
    return _of_rows_together(low, grid, torch.amin), _of_rows_together(high, grid, torch.amax)


def _of_rows_together(values: Tensor, grid: Grid, reduced: Callable[..., Tensor]) -> Tensor:
    """Values of all rows, [..., R, G], reduced over those that share scales, for each of them."""
    if grid.rows_together == 1:
        return values
    parts = values.split(grid.rows_together or values.shape[-2], -2)
    return torch.cat([reduced(part, -2, keepdim=True).expand_as(part) for part in parts], -2)


def search_scales(weight: Tensor, weighting: Tensor | None, grid: Grid) -> Scales:
    """Scales that minimize the weighted squared rounding error of every group.

    Args:
        weight: [R, I], any float dtype.
        weighting: [I], not negative; None weighs all input channels equally.
        grid: the scheme. If rows share scales, `weight` is one module.
    """
    start = minmax_scales(weight, grid)
    if weighting is None:
        weighting = torch.ones(weight.shape[1], dtype=torch.float32, device=weight.device)
    first = start.scale.float()
    if grid.signed_scales:
        low, high = _ranges(weight, grid)
        first = torch.where(high > -low, -first, first)
    shrinks = torch.tensor(SHRINKS, dtype=torch.float32, device=weight.device)
    candidates = grid.stored(first * shrinks[:, None, None]).float()
    cross, square = moments(weight, weighting, candidates, start.zero_point, grid)
    cross, square = (_of_rows_together(total, grid, torch.sum) for total in (cross, square))
    refitted = grid.stored(cross / square.clamp_min(torch.finfo(torch.float32).tiny)).float()
    candidates, cross, square = torch.cat([candidates, refitted]), cross.repeat(2, 1, 1), square.repeat(2, 1, 1)
    error = candidates * (candidates * square - 2 * cross)  # less sum(d w^2), which all candidates share
    best = candidates.gather(0, error.argmin(0, keepdim=True))[0]
    return Scales(best.to(grid.scale_dtype), start.zero_point)


def choose_scales(weight: Tensor, weighting: Tensor | None, grid: Grid, search: bool) -> Scales:
    """Searched or min-max scales of the rows of `weight`."""
    return search_scales(weight, weighting, grid) if search else minmax_scales(weight, grid)


def num_groups(num_channels: int, args: QuantizationArgs) -> int:
    """Groups G of a row of I channels under a scheme."""
    return num_channels // (width_of_groups(args) or num_channels)


def calls_of_search(num_rows: int, tiling: Tiling) -> int:
    """How many operators' time a search of scales takes on a GPU (measured on an H100)."""
    return 120 * len(tiling.row_tiles(num_rows))


def scales_bytes(num_rows: int, num_channels: int, args: QuantizationArgs, search: bool, tiling: Tiling) -> int:
    """At most alive inside `choose_scales` for R rows of I channels, with its result, beside its arguments.

    A search judges two scales per shrink factor: at its end there are the scales, both moments and three terms of the
    error of each, and about the halves that they came from. Its tiles are four float32 copies of some rows, and two of
    the next.
    """
    per_group = 4 * 13 * len(SHRINKS) if search else 20
    tile = min(max(tiling.searched, num_channels), num_rows * num_channels)
    tiles = 6 * 4 * tile + 12 * num_channels if search else 0
    return num_rows * num_groups(num_channels, args) * per_group + tiles


def scales_of_rows_together(
    weight: Tensor, weighting: Tensor | None, grid: Grid, search: bool, row_splits: Sequence[int]
) -> Scales | None:
    """For grids whose rows share scales, those of all rows [O, G]; None for others.

    They are found in each stacked module, but for one scale of floats, which all stacked modules share: servers compute
    what they fuse with one, and round the codes of smaller ones anew (vLLM's `requantize_with_max_scale`). To floats
    that is nearly the same; integers would lose bits, and their scales servers expand to one for each row.
    """
    if grid.rows_together == 1:
        return None
    is_one = grid.rows_together is None and grid.floats is not None
    modules = [weight] if is_one else torch.split(weight, list(row_splits))
    parts = [choose_scales(module, weighting, grid, search) for module in modules]
    zero_points = [part.zero_point for part in parts if part.zero_point is not None]
    return Scales(torch.cat([part.scale for part in parts]), torch.cat(zero_points) if zero_points else None)


def moments(
    weight: Tensor, weighting: Tensor, candidates: Tensor, zero_point: Tensor | None, grid: Grid
) -> tuple[Tensor, Tensor]:
    """sum(d w q) and sum(d q^2) over each group, float32 [K, R, G], where q are the codes less the zero-point.

    Args:
        weight: [R, I].
        weighting: d, [I].
        candidates: K scales per group, float32 [K, R, G].
        zero_point: int8 [R, G] or None.
        grid: the codes' limits.
    """
    if kernels.usable(weight):
        return kernels.moments(weight, weighting, candidates, zero_point, grid)
    cross, square = torch.empty_like(candidates), torch.empty_like(candidates)
    groups = weight.reshape(weight.shape[0], -1, grid.group_size)
    root = weighting.sqrt().view(groups.shape[1:])
    height = max(tiling_of(weight.device).searched // weight.shape[1], 1)
    for first in range(0, weight.shape[0], height):
        rows = slice(first, first + height)
        values = groups[rows].float()
        weighted = values * weighting.view(groups.shape[1:])
        shift = None if zero_point is None else zero_point[rows, :, None].float()
        codes, scratch = torch.empty_like(values), torch.empty_like(values)
        for index, scale in enumerate(candidates[:, rows, :, None].unbind(0)):
            if shift is None:
                grid.round_(torch.div(values, scale, out=codes))
            else:
                grid.round_(torch.addcdiv(shift, values, scale, out=codes)).sub_(shift)
            torch.sum(torch.mul(codes, weighted, out=scratch), -1, out=cross[index, rows])
            torch.linalg.vector_norm(torch.mul(codes, root, out=scratch), dim=-1, out=square[index, rows])
    return cross, square.square_()


def round_to_grid(weight: Tensor, scales: Scales, grid: Grid) -> Tensor:
    """Codes of the nearest grid points, [R, I]: clamp(round(w / s + z)), as compressed-tensors' `quantize`."""
    groups = weight.float().reshape(weight.shape[0], -1, grid.group_size) / scales.scale.float()[..., None]
    if scales.zero_point is not None:
        groups += scales.zero_point[..., None].float()
    return grid.round_(groups).to(grid.code_dtype).reshape(weight.shape)


def values_of(codes: Tensor, scales: Scales, grid: Grid) -> Tensor:
    """(code - zero_point) * scale, float32 [R, I]."""
    groups = codes.reshape(codes.shape[0], -1, grid.group_size).float()
    if scales.zero_point is not None:
        groups = groups - scales.zero_point[..., None].float()
    return (groups * scales.scale.float()[..., None]).reshape(codes.shape)
