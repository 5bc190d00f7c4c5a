"""Round-to-nearest: every weight on its own.

Method: min-max scales of compressed-tensors, and the nearest code. Needs no data, so it is the baseline of every
comparison and the choice where nothing can be run. If a Gram is at hand all the same, it weighs the scale search and
the reported error.

Alternative not taken: searching scales by default. It helps at 4 bits and below, but a round-to-nearest that is not
what other tools call so is no baseline; `scale_search=True` turns it on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from lightning_compress.algorithms.base import (
    Algorithm,
    Kinds,
    Prepared,
    RowTile,
    Solved,
    check_weight,
    input_gram,
    result_bytes,
)
from lightning_compress.algorithms.grids import make_grid, shares_rows
from lightning_compress.algorithms.rows import ByRows
from lightning_compress.algorithms.scales import (
    calls_of_search,
    num_groups,
    round_to_grid,
    scales_bytes,
    scales_of_rows_together,
    values_of,
)
from lightning_compress.algorithms.tiling import Tiling
from lightning_compress.statistics import InputGram, Statistic, matrix_bytes, row_products


@final
@dataclass(frozen=True)
class Rtn(Algorithm):
    """Round-to-nearest.

    Attributes:
        scale_search: choose scales that minimize the squared error (weighted by the Gram's diagonal where there is one)
            instead of covering the whole range.
    """

    scale_search: bool = False

    def statistics(self, weights: QuantizationArgs) -> tuple[type[Statistic], ...]:
        return ()

    def costs(self, num_rows: int, num_channels: int) -> tuple[float, float]:
        return 0.0, (900 if self.scale_search else 250) * num_rows * num_channels

    def calls(self, num_rows: int, num_channels: int, tiling: Tiling, number: int = 1) -> float:
        return number * (100 + calls_of_search(num_rows, tiling) * self.scale_search)

    def prepare_bytes(
        self, num_rows: int, num_channels: int, args: QuantizationArgs, kinds: Kinds, tiling: Tiling
    ) -> tuple[int, int]:
        has_gram = InputGram in kinds
        gram = 4 * num_channels**2 if has_gram else 0
        scales = scales_bytes(num_rows, num_channels, args, self.scale_search, tiling) if shares_rows(args) else 0
        return max(matrix_bytes(num_channels) if has_gram else 0, gram + scales), gram

    def tiles_bytes(
        self,
        heights: Sequence[int],
        num_channels: int,
        args: QuantizationArgs,
        kinds: Kinds,
        tiling: Tiling,
        number: int = 1,
    ) -> int:
        # [R, I] each: codes, weight, values and their factor as float32; or codes, a difference, its double, the square
        per_weight = 1 + 4 + 4 + 4 if InputGram in kinds else 1 + 4 + 8 + 8
        height = max(heights)
        matrices = height * (num_channels * per_weight + 16) + 13 * height * num_groups(num_channels, args)
        tile = max(matrices, scales_bytes(height, num_channels, args, self.scale_search, tiling))
        return tile + result_bytes(sum(heights) - height, num_channels, args)

    @torch.no_grad()
    def prepare(
        self,
        weight: Tensor,
        statistics: Mapping[type[Statistic], Statistic],
        args: QuantizationArgs,
        scale_dtype: torch.dtype,
        row_splits: Sequence[int],
        by_rows: ByRows,
    ) -> Prepared:
        check_weight(weight, args)
        grid = make_grid(args, weight.shape, scale_dtype, self.signed_scales).over(weight)
        gram = input_gram(statistics)
        weighting = gram.diagonal() if gram is not None and self.scale_search else None
        return Prepared(
            grid=grid,
            gram=None if gram is None else gram.matrix(),
            weighting=weighting,
            scale_search=self.scale_search,
            known_scales=scales_of_rows_together(weight, weighting, grid, self.scale_search, row_splits),
        )

    @torch.no_grad()
    def solve_tiles(self, tiles: Sequence[RowTile]) -> list[Solved]:
        return [_solve_rows(tile.values, tile.rows, tile.prepared) for tile in tiles]


def _solve_rows(weight: Tensor, rows: slice, prepared: Prepared) -> Solved:
    """The rows `rows`, which are `weight` [R, I]."""
    grid = prepared.grid
    scales = prepared.scales_of(weight, rows)
    codes = round_to_grid(weight, scales, grid)
    return Solved(
        codes=codes,
        scale=scales.scale,
        zero_point=scales.zero_point,
        row_error=row_products(weight.float() - values_of(codes, scales, grid), prepared.gram),
        row_energy=row_products(weight, prepared.gram),
        notes=prepared.notes,
        rows_together=grid.rows_together,
        global_scale=grid.global_scale,
    )
