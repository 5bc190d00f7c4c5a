"""Round-to-nearest: every weight on its own.

Method: min-max scales of compressed-tensors and the nearest code. Needs no data, so it is the baseline of every comparison and
the only choice where nothing can be run. If a Gram is at hand all the same, it weighs the scale search and the reported error.

Alternative not taken: searching scales by default. It helps at 4 bits and below, but a round-to-nearest that is not what other
tools call round-to-nearest is no baseline; `scale_search=True` turns it on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from lightning_compress.algorithms.base import Algorithm, Prepared, Solved, check_weight, input_gram, row_products
from lightning_compress.algorithms.scales import choose_scales, make_grid, round_to_grid, tensor_scales, values_of
from lightning_compress.statistics import Statistic


@final
@dataclass(frozen=True)
class Rtn(Algorithm):
    """Round-to-nearest.

    Attributes:
        scale_search: minimize the squared error over scales (weighted by the Gram's diagonal where there is one) instead
            of covering the whole range.
    """

    scale_search: bool = False

    def statistics(self, weights: QuantizationArgs) -> tuple[type[Statistic], ...]:
        return ()

    def prepare(
        self,
        weight: Tensor,
        statistics: Mapping[type[Statistic], Statistic],
        args: QuantizationArgs,
        scale_dtype: torch.dtype,
        row_splits: Sequence[int],
    ) -> Prepared:
        check_weight(weight, args)
        grid = make_grid(args, weight.shape, scale_dtype)
        gram = input_gram(statistics)
        weighting = gram.diagonal() if gram is not None and self.scale_search else None
        return Prepared(
            grid=grid,
            gram=None if gram is None else gram.matrix(),
            weighting=weighting,
            tensor_scales=tensor_scales(weight, weighting, grid, self.scale_search, row_splits),
        )

    def solve_rows(self, weight: Tensor, rows: slice, prepared: Prepared) -> Solved:
        weight, grid = weight[rows], prepared.grid
        shared = prepared.tensor_scales
        scales = choose_scales(weight, prepared.weighting, grid, self.scale_search) if shared is None else shared.rows(rows)
        codes = round_to_grid(weight, scales, grid)
        return Solved(
            codes=codes,
            scale=scales.scale,
            zero_point=scales.zero_point,
            row_error=row_products(weight.float() - values_of(codes, scales, grid), prepared.gram),
            row_energy=row_products(weight, prepared.gram),
            notes=prepared.notes,
            per_tensor=grid.per_tensor,
        )
