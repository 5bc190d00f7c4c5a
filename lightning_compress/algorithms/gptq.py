"""GPTQ: quantize the input channels one after the other, each making up for the errors of those before it.

Reference: Frantar et al., GPTQ (arXiv 2210.17323), code IST-DASLab/gptq. Method, as Babai's nearest plane (Chen et al.,
arXiv 2507.18553): with the damped Gram H = L Lᵀ, L lower triangular, the output error of a row w splits into
(w - q) H (w - q)ᵀ = ||(w - q) L||² = sum over k of L_kk² (t_k - q_k)², where the target
t_k = w_k + sum_{i>k} (w_i - q_i) L_ik / L_kk only looks at channels behind k. So go from the last channel to the first,
and take for q_k the grid point next to t_k. In exact arithmetic this is the reference GPTQ (which goes from first to
last, on the inverse), but it takes one Cholesky factorization and no inverse, and it tells the output error on the way.

Channels are taken in descending order of C_kk (static activation order): large ones are rounded while many others can
still make up for it. Scales belong to groups in the original order, so inference sees nothing of it.

Scales are searched with the weights L_kk² of that sum: what a rounding error costs once the later channels make up for
it. The Gram's diagonal, which is what it would cost alone (and what other tools use), overrates channels that others
can stand in for.

A channel that was always zero in calibration neither influences the others nor is influenced: it is rounded to nearest.
The reference sets its weights to zero; keeping them costs nothing, and is right if the channel comes alive later.

Alternatives not taken: the inverse Hessian of the paper (two more factorizations' worth of work); round-to-nearest when
the factorization fails (the user would not know): damping is raised, and said to be.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from lightning_compress.algorithms.base import (
    Algorithm,
    Factor,
    Kinds,
    Prepared,
    RowTile,
    Solved,
    check_weight,
    drift_of,
    input_gram,
    runs,
    stacks,
)
from lightning_compress.algorithms.correction import JUDGED, WITHOUT_CHOICE, correct, correction_bytes
from lightning_compress.algorithms.factor import MAX_DAMPING, PANEL, factorize
from lightning_compress.algorithms.gptaq import STRENGTH, pass_on, pass_on_bytes
from lightning_compress.algorithms.grids import Grid, make_grid, shares_rows
from lightning_compress.algorithms.nearest_plane import ALIGNMENT, nearest_plane
from lightning_compress.algorithms.refit import ROUNDS, Candidate, best_rows, errors_held_out, refit_bytes, refitted
from lightning_compress.algorithms.rows import ByRows
from lightning_compress.algorithms.scales import (
    Scales,
    calls_of_search,
    num_groups,
    scales_bytes,
    scales_of_rows_together,
    values_of,
)
from lightning_compress.algorithms.target import Correction, row_errors
from lightning_compress.algorithms.tiling import Tiling, tiling_of
from lightning_compress.errors import SolveError
from lightning_compress.statistics import Drift, InputDrift, InputGram, Statistic, matrix_bytes, row_products

CORRECTS = ("none", "inputs", "residual", "qronos", "gptaq")
_ONE_BY_ONE, _SEARCHED, _REFITTED = 1100, 450, 1500
_NOT_CORRECTED = (
    "Not corrected: it is an expert, or called several times, or inside a module that cannot be traced, or reads what "
    "such a module does."
)

_NOT_CHOSEN = (
    "There is one batch only, so none was held out to choose by: what was to be chosen is strength {}, ridge {}, no "
    "refitting."
).format(*WITHOUT_CHOICE)
_ROWS_SHARE = "Scales were not refitted to codes: rows share them (tensor and block strategies)."
_NEVER_REFITTED = (
    "Scales were not refitted to codes: how often (refit=null) is chosen by batches that a correction holds out, and "
    "there is none."
)


@final
@dataclass(frozen=True)
class Gptq(Algorithm):
    """GPTQ with static activation order and searched scales.

    Attributes:
        block_size: channels whose mutual corrections are applied singly; those of earlier blocks come as one product.
        damping: what is added to the Gram's diagonal, as a fraction of its mean.
        activation_order: quantize the channels with the largest inputs first.
        scale_search: choose scales that minimize the rounding error, weighted by what it costs, instead of min-max.
        correct: what the weight makes good for before it is quantized: errors of its "inputs", of these and of the
            "residual" that its output is added to, or "none"; see `correction`. Takes a run of the original model
            beside the quantized one. "qronos": of its inputs, in full, with the damping for a ridge. "gptaq": of its
            inputs, channel by channel; see `gptaq`.
        strength, ridge: of the correction, fractions; None: chosen for every group by batches that are held out (by
            gptaq: `gptaq.STRENGTH`, and there is no ridge).
        refit: how often scales are fitted to the codes, and codes found anew; None: chosen for every row tile, at most
            `refit.ROUNDS`, by batches that are held out; 0 where there are none. Has no
            effect where rows share scales.
    """

    block_size: int = 128
    damping: float = 0.01
    activation_order: bool = True
    scale_search: bool = True
    correct: str = "none"
    strength: float | None = None
    ridge: float | None = None
    refit: int | None = 0

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {self.block_size}; 128 is a good choice.")
        if not 0 <= self.damping <= MAX_DAMPING:
            raise ValueError(f"damping must be from 0 to {MAX_DAMPING}, not {self.damping}; 0.01 is a good choice.")
        if self.correct not in CORRECTS:
            raise ValueError(f"correct must be one of {', '.join(CORRECTS)}, not {self.correct}.")
        if self.correct == "qronos" and (not self.damping or (self.strength, self.ridge) != (None, None)):
            raise ValueError(
                "correct=qronos corrects in full, with the damping for a ridge: leave strength and ridge out, and give "
                "a damping of more than 0; or take correct=inputs."
            )
        if self.correct == "gptaq" and (self.ridge is not None or self.refit != 0):
            raise ValueError(
                "correct=gptaq corrects channel by channel, as it rounds: leave ridge and refit out, or take "
                "correct=inputs."
            )
        if self.strength is not None and not 0 <= self.strength <= 1:
            raise ValueError(f"strength must be from 0 to 1, or null to choose it, not {self.strength}.")
        if self.ridge is not None and not 0 < self.ridge < math.inf:
            raise ValueError(
                f"ridge must be more than 0 and finite, or null to choose it, not {self.ridge}; 0.1 is a good choice."
            )
        if self.correct == "none" and (self.strength, self.ridge) != (None, None):
            raise ValueError(
                f"strength={self.strength} and ridge={self.ridge} are of a correction, and there is none: give correct "
                "(inputs or residual, say), or leave them out."
            )
        if self.refit is not None and self.refit < 0:
            raise ValueError(
                f"refit must be at least 0, or null to choose it, not {self.refit}; 1 or 2 help at 2 bits."
            )

    @property
    def corrects_residual(self) -> bool:
        return self.correct == "residual"

    def _correction(self, damping: float) -> tuple[float | None, float | None]:
        """Strength and ridge, where they are given, with what the factor was damped by in the end."""
        return (1.0, damping) if self.correct == "qronos" else (self.strength, self.ridge)

    @property
    def _most_rounds(self) -> int:
        """Of refitting."""
        return ROUNDS if self.refit is None else self.refit

    def statistics(self, weights: QuantizationArgs) -> tuple[type[Statistic], ...]:
        if self.correct == "none":
            return (InputGram,)
        return InputGram, InputDrift if self.correct == "gptaq" else Drift

    def costs(self, num_rows: int, num_channels: int) -> tuple[float, float]:
        # in floating-point operations of a fast product, measured on a CPU core (widths of 256 to 2048): factor and
        # products run at that rate; every weight costs what is done one by one, a search of scales included; and every
        # channel costs calls, on each rank, that would do a million of them
        per_weight = _ONE_BY_ONE + (_SEARCHED if self.scale_search else 0)
        serial = num_channels**3 / 3 + 1e6 * num_channels
        rows: float = num_rows * num_channels * (num_channels + per_weight)
        if self.correct == "gptaq":  # three triangular solves, and a product per row
            serial, rows = serial + 3 * num_channels**3, rows + 2 * num_rows * num_channels**2
        elif self.correct != "none":  # factors and judged outputs for every ridge, and the last; a solution per row
            serial += 4 * num_channels**3 / 3 + 12 * min(num_rows, JUDGED) * num_channels**2
            # by inputs or by outputs, as the calibration mostly has it (`statistics.drift_form`)
            rows += (4 if 4 * num_rows >= 3 * num_channels else 1.5) * num_rows * num_channels**2
        return serial, rows + self._most_rounds * num_rows * num_channels * (2.6 * num_channels + _REFITTED)

    def calls(self, num_rows: int, num_channels: int, tiling: Tiling, number: int = 1) -> float:
        # measured on an H100 (`benchmarks/solve_costs.py`), widths of 256 to 14336
        heights = number * [tile.stop - tile.start for tile in tiling.row_tiles(num_rows)]
        together = runs(heights, heights, tiling.stack_rows(num_channels))
        walk = -(-num_channels // self.block_size) * (14 * len(together) + 7 * len(heights))
        search = number * calls_of_search(num_rows, tiling) * self.scale_search
        return number * 185 + 40 * len(heights) + search + walk * (1 + self._most_rounds)

    def prepare_bytes(
        self, num_rows: int, num_channels: int, args: QuantizationArgs, kinds: Kinds, tiling: Tiling
    ) -> tuple[int, int]:
        gram, vectors = 4 * num_channels**2, 40 * num_channels
        panels = 3 * 4 * PANEL * num_channels  # of the reordered Gram, and of the factor that takes its place
        scales = 0
        if shares_rows(args):
            scales = scales_bytes(num_rows, num_channels, args, self.scale_search, tiling)
        held = 2 * gram + vectors
        if self._corrects(kinds):
            correcting, corrected = (
                pass_on_bytes(num_channels)
                if self.correct == "gptaq"
                else correction_bytes(num_rows, num_channels, InputDrift in kinds, self.refit is None)
            )
            whole = 8 * num_rows * num_channels if shares_rows(args) else 0  # what is quantized, of all rows
            correcting += gram if tiling.copies_factor else 0
            scales, held = max(scales + corrected + whole, correcting), held + corrected
        beside = gram if tiling.copies_factor else panels
        return max(matrix_bytes(num_channels), 2 * gram + vectors + max(beside, scales)), held

    def tiles_bytes(
        self,
        heights: Sequence[int],
        num_channels: int,
        args: QuantizationArgs,
        kinds: Kinds,
        tiling: Tiling,
        number: int = 1,
    ) -> int:
        num_rows = len(heights) * (max(heights) + -max(heights) % ALIGNMENT)
        # [R, I] each: the weight and w - q as float32, codes, codes in their own order, and transposed
        matrices = num_rows * num_channels * (4 + 4 + 1 + 1 + 1)
        if number > 1:  # scales, and zero points, of every place
            matrices += num_rows * num_channels * (4 if args.symmetric else 8)
        width = min(self.block_size, num_channels)
        # targets, rounded values, a product; the factors within the block, of which some channels' are in another order
        blocks = 3 * 4 * num_rows * width + 2 * 4 * width**2 * (len(heights) if number > 1 else 1)
        stored = num_rows * (13 * num_groups(num_channels, args) + 32)
        targets = 2 * 4 * num_rows * num_channels if self._corrects(kinds) else 0  # what is quantized, and M
        searching = scales_bytes(max(heights), num_channels, args, self.scale_search, tiling)
        transposing = (8 * len(heights) + 4) * (num_rows // len(heights)) * num_channels  # float32, and one tile more
        solving = targets + stored + max(matrices + blocks, transposing, searching)
        codes = num_rows * num_channels * (2 + self._most_rounds)  # of every round, and of the result
        measuring = targets + 5 * 4 * num_rows * num_channels if self._corrects(kinds) else 0
        refitting = 0 if not self._most_rounds else refit_bytes(num_rows, num_channels, num_groups(num_channels, args))
        return max(solving, codes + stored * (1 + self._most_rounds) + max(measuring, refitting))

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
        statistic = input_gram(statistics)
        if statistic is None or not statistic.num_tokens + (statistic.num_lent or 0):
            raise SolveError(
                f"GPTQ of the weight {tuple(weight.shape)} needs inputs, but calibration brought it no token: give "
                "more or other samples, or quantize this module with the algorithm `rtn`."
            )
        gram = statistic.matrix()
        if gram.shape[0] != weight.shape[1]:
            raise SolveError(f"The weight {tuple(weight.shape)} does not fit a Gram of {gram.shape[0]} channels.")
        factor = factorize(gram, self.damping, self.activation_order, by_rows)
        notes = list(factor.notes)
        drift, correction = None if self.correct == "none" else drift_of(statistics), None
        if drift is not None:
            if self.correct == "gptaq":
                assert isinstance(drift, InputDrift)
                strength = STRENGTH if self.strength is None else self.strength
                factor, correction = pass_on(factor, drift, strength, factor.damping)
            else:
                given = self._correction(factor.damping)
                correction = correct(weight, gram, drift, *given, self.refit is None)
                if not drift.inputs.num_held_out and None in (*given, self.refit):
                    notes.append(_NOT_CHOSEN)
            if grid.rows_together != 1:
                tiles = [(weight[rows], rows) for rows in tiling_of(weight.device).row_tiles(len(weight))]
                weight = torch.cat([correction.target(w, correction.lack.missing(w, rows)) for w, rows in tiles])
        elif self.correct != "none":
            notes.append(_NOT_CORRECTED)
        notes += self._not_refitted(grid, correction)
        num_dead = int((gram.diagonal() == 0).sum())
        if num_dead:
            notes.append(
                f"{num_dead} of {len(gram)} input channels were always zero; their weights were rounded to nearest."
            )
        weighting = torch.empty_like(factor.pivots)
        weighting[factor.order] = factor.pivots
        return Prepared(
            grid=grid,
            gram=gram,
            weighting=weighting,
            scale_search=self.scale_search,
            known_scales=scales_of_rows_together(weight, weighting, grid, self.scale_search, row_splits),
            factor=factor,
            correction=correction,
            notes=tuple(notes),
        )

    @torch.no_grad()
    def solve_tiles(self, tiles: Sequence[RowTile]) -> list[Solved]:
        return [solved for stack in stacks(tiles) for solved in self._solve_stack(stack)]

    def _solve_stack(self, stack: Sequence[RowTile]) -> list[Solved]:
        """Tiles that go through the channels together."""
        missing = [_missing(tile) for tile in stack]
        targets = [
            tile.values
            if lacks is None or tile.prepared.correction is None
            else tile.prepared.correction.target(tile.values, lacks)
            for tile, lacks in zip(stack, missing, strict=True)
        ]
        found = self._candidates(targets, stack)
        return [self._best(*each) for each in zip(stack, missing, found, strict=True)]

    def _best(self, tile: RowTile, lacks: Tensor | None, candidates: Sequence[Candidate]) -> Solved:
        """What a tile is solved to; `lacks`: see `Lack.missing`."""
        weight, prepared, correction = tile.values, tile.prepared, tile.prepared.correction
        assert prepared.gram is not None
        if correction is None or lacks is None:
            codes, scales, error, _ = best_rows(candidates)
            return _solved(codes, scales, error, row_products(weight, prepared.gram), prepared)
        held_out = None
        if correction.judge is not None:
            held_out = errors_held_out(candidates, weight, tile.rows, correction.judge, prepared.grid)
        codes, scales, _, rounds = best_rows(candidates, held_out)
        quantized, squares = values_of(codes, scales, prepared.grid), correction.lack.squares(weight, tile.rows)
        error = row_errors(weight, quantized, lacks, squares, prepared.gram)
        energy = row_errors(weight, torch.zeros_like(lacks), lacks, squares, prepared.gram)
        made = _solved(codes, scales, error, energy, prepared)
        row_rounds = torch.full(error.shape, rounds, dtype=torch.int8, device=error.device)
        return made if self.refit is not None else replace(made, row_rounds=row_rounds)

    def _candidates(self, targets: Sequence[Tensor], stack: Sequence[RowTile]) -> list[list[Candidate]]:
        """Codes, scales and row errors of what is quantized, of every tile, after every round."""
        factors = [_factor_of(tile) for tile in stack]
        scales = [tile.prepared.scales_of(target, tile.rows) for target, tile in zip(targets, stack, strict=True)]
        grid = stack[0].prepared.grid
        found = nearest_plane(targets, factors, scales, grid, self.block_size)
        tried = [[(codes, scale, error)] for scale, (codes, error) in zip(scales, found, strict=True)]
        rounds = [self._rounds(tile.prepared) for tile in stack]
        for number in range(max(rounds)):
            if number:
                found = nearest_plane(targets, factors, scales, grid, self.block_size)
            for place, (target, tile) in enumerate(zip(targets, stack, strict=True)):
                codes, gram = found[place][0], tile.prepared.gram
                assert gram is not None
                scales[place] = refitted(target, gram, codes, scales[place], tile.prepared.grid)
                error = row_products(target.float() - values_of(codes, scales[place], grid), gram)
                tried[place].append((codes, scales[place], error))
        return [each[: 1 + most] for each, most in zip(tried, rounds, strict=True)]

    def _not_refitted(self, grid: Grid, correction: Correction | None) -> list[str]:
        """Why `refit` has no effect, if so."""
        if grid.rows_together != 1:
            return [_ROWS_SHARE] if self.refit != 0 else []
        return [_NEVER_REFITTED] if self.refit is None and correction is None else []

    def _corrects(self, kinds: Kinds) -> bool:
        return self.correct != "none" and any(issubclass(kind, Drift) for kind in kinds)

    def _rounds(self, prepared: Prepared) -> int:
        if prepared.grid.rows_together != 1:
            return 0
        if self.refit is not None:
            return self.refit
        return ROUNDS if prepared.correction is not None and prepared.correction.judge is not None else 0


def _factor_of(tile: RowTile) -> Factor:
    assert tile.prepared.factor is not None
    return tile.prepared.factor


def _missing(tile: RowTile) -> Tensor | None:
    """What the outputs of a tile lack; None: it is not corrected."""
    correction = tile.prepared.correction
    return None if correction is None else correction.lack.missing(tile.values, tile.rows)


def _solved(codes: Tensor, scales: Scales, row_error: Tensor, row_energy: Tensor, prepared: Prepared) -> Solved:
    assert prepared.factor is not None
    return Solved(
        codes=codes,
        scale=scales.scale,
        zero_point=scales.zero_point,
        row_error=row_error,
        row_energy=row_energy,
        damping=prepared.factor.damping,
        notes=prepared.notes,
        rows_together=prepared.grid.rows_together,
        global_scale=prepared.grid.global_scale,
        correction={} if prepared.correction is None else prepared.correction.record,
    )
