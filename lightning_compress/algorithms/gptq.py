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

Layout: everything is transposed to [I, O], so that a channel is one contiguous vector over the rows. Three levels:
products with all earlier blocks (of `block_size` channels), products within the block, and a thin matrix-vector product
within 16 channels. On a GPU with Triton, one kernel does the two inner levels (`gptq_triton`).

A channel that was always zero in calibration neither influences the others nor is influenced: it is rounded to nearest.
The reference sets its weights to zero; keeping them costs nothing, and is right if the channel comes alive later.

Alternatives not taken: the inverse Hessian of the paper (two more factorizations' worth of work); round-to-nearest when
the factorization fails (the user would not know): damping is raised, and said to be.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import final

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor
from torch.nn import functional as F

from lightning_compress.algorithms import gptq_triton
from lightning_compress.algorithms.base import (
    Algorithm,
    Factor,
    Prepared,
    Solved,
    check_weight,
    input_gram,
    row_products,
    stacks,
)
from lightning_compress.algorithms.scales import Grid, Scales, make_grid, num_groups, scales_bytes, tensor_scales
from lightning_compress.errors import NonFiniteError, SolveError
from lightning_compress.statistics import InputGram, Statistic, matrix_bytes

_SUB_BLOCK = 16
_PANEL = 128
_ALIGNMENT = 32  # of the matrices' rows, in elements
_LEAST_RAISED_DAMPING = 0.001
_MAX_DAMPING = 1.0


@final
@dataclass(frozen=True)
class Gptq(Algorithm):
    """GPTQ with static activation order and searched scales.

    Attributes:
        block_size: channels whose mutual corrections are applied singly; those of earlier blocks come as one product.
        damping: what is added to the Gram's diagonal, as a fraction of its mean.
        activation_order: quantize the channels with the largest inputs first.
        scale_search: choose scales that minimize the rounding error, weighted by what it costs, instead of min-max.
    """

    block_size: int = 128
    damping: float = 0.01
    activation_order: bool = True
    scale_search: bool = True

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {self.block_size}; 128 is a good choice.")
        if not 0 <= self.damping <= _MAX_DAMPING:
            raise ValueError(f"damping must be from 0 to {_MAX_DAMPING}, not {self.damping}; 0.01 is a good choice.")

    def statistics(self, weights: QuantizationArgs) -> tuple[type[Statistic], ...]:
        return (InputGram,)

    def costs(self, num_rows: int, num_channels: int) -> tuple[float, float]:
        # in floating-point operations of a fast product, measured on a CPU core: the factor runs at that rate, the rows
        # at a third of it, and every channel costs calls, on each rank, that would do a million of them
        return num_channels**3 / 3 + 1e6 * num_channels, 3 * num_rows * num_channels**2

    def prepare_bytes(
        self, num_rows: int, num_channels: int, args: QuantizationArgs, has_gram: bool
    ) -> tuple[int, int]:
        gram, vectors = 4 * num_channels**2, 40 * num_channels
        panels = 3 * 4 * _PANEL * num_channels  # of the reordered Gram, and of the factor that takes its place
        scales = scales_bytes(num_rows, num_channels, args, self.scale_search) if args.strategy == "tensor" else 0
        return max(matrix_bytes(num_channels), 2 * gram + vectors + max(panels, scales)), 2 * gram + vectors

    def tile_bytes(self, num_rows: int, num_channels: int, args: QuantizationArgs, has_gram: bool) -> int:
        num_rows += -num_rows % _ALIGNMENT
        # [R, I] each: the weight and w - q as float32, codes, codes in their own order, and transposed
        matrices = num_rows * num_channels * (4 + 4 + 1 + 1 + 1)
        blocks = 3 * 4 * num_rows * min(self.block_size, num_channels)  # targets, rounded values, a product
        stored = num_rows * (13 * num_groups(num_channels, args) + 32)
        return max(matrices + blocks + stored, scales_bytes(num_rows, num_channels, args, self.scale_search))

    @torch.no_grad()
    def prepare(
        self,
        weight: Tensor,
        statistics: Mapping[type[Statistic], Statistic],
        args: QuantizationArgs,
        scale_dtype: torch.dtype,
        row_splits: Sequence[int],
    ) -> Prepared:
        check_weight(weight, args)
        grid = make_grid(args, weight.shape, scale_dtype, self.signed_scales)
        statistic = input_gram(statistics)
        if statistic is None or statistic.num_tokens == 0:
            raise SolveError(
                f"GPTQ of the weight {tuple(weight.shape)} needs inputs, but calibration brought it no token: give "
                "more or other samples, or quantize this module with the algorithm `rtn`."
            )
        gram = statistic.matrix()
        if gram.shape[0] != weight.shape[1]:
            raise SolveError(f"The weight {tuple(weight.shape)} does not fit a Gram of {gram.shape[0]} channels.")
        factor = factorize(gram, self.damping, self.activation_order)
        num_dead = int((gram.diagonal() == 0).sum())
        dead = f"{num_dead} of {len(gram)} input channels were always zero; their weights were rounded to nearest."
        weighting = torch.empty_like(factor.pivots)
        weighting[factor.order] = factor.pivots
        return Prepared(
            grid=grid,
            gram=gram,
            weighting=weighting,
            scale_search=self.scale_search,
            tensor_scales=tensor_scales(weight, weighting, grid, self.scale_search, row_splits),
            factor=factor,
            notes=(*factor.notes, dead) if num_dead else factor.notes,
        )

    @torch.no_grad()
    def solve_tiles(self, weight: Tensor, tiles: Sequence[slice], prepared: Prepared) -> list[Solved]:
        factor = prepared.factor
        assert factor is not None
        solved: list[Solved] = []
        for stack in stacks(tiles):
            parts = [weight[rows] for rows in stack]
            scales = [prepared.scales_of(part, rows) for part, rows in zip(parts, stack, strict=True)]
            found = nearest_plane(parts, factor, scales, prepared.grid, self.block_size)
            solved += [
                Solved(
                    codes=codes,
                    scale=scale.scale,
                    zero_point=scale.zero_point,
                    row_error=row_error,
                    row_energy=row_products(part, prepared.gram),
                    damping=factor.damping,
                    notes=prepared.notes,
                    per_tensor=prepared.grid.per_tensor,
                )
                for part, scale, (codes, row_error) in zip(parts, scales, found, strict=True)
            ]
        return solved


def factorize(gram: Tensor, damping: float, activation_order: bool = True) -> Factor:
    """Damp, order and factorize a Gram [I, I]; if that fails, with ten times the damping, up to its mean diagonal.

    Raises:
        NonFiniteError: NaN or Inf in the Gram.
        SolveError: it is zero, or cannot be factorized with any admitted damping.
    """
    num_channels, diagonal = len(gram), gram.diagonal()
    if not bool(torch.isfinite(diagonal).all()):  # no entry of a Gram is larger than its diagonal
        raise NonFiniteError(
            f"The Gram of {num_channels} input channels holds NaN or Inf: activations overflowed during calibration. "
            "Run the model in bfloat16 or float32, or exclude the module with `ignore`."
        )
    mean = float(diagonal.mean(dtype=torch.float64))
    if mean <= 0:
        raise SolveError(
            f"All {num_channels} input channels were zero in every calibration token: exclude the module with "
            "`ignore`, or quantize it with the algorithm `rtn`."
        )
    first_to_last = torch.arange(num_channels, device=gram.device)
    if activation_order:
        first_to_last = diagonal.argsort(descending=True, stable=True)
    order = first_to_last.flip(0)
    tried = damping
    while (lower := _cholesky(_reordered(gram, order), tried * mean)) is None:
        if tried >= _MAX_DAMPING:
            raise SolveError(
                f"The Gram of {num_channels} input channels cannot be factorized even with damping {tried:g}: "
                "calibrate with more tokens, or quantize this module with the algorithm `rtn`."
            )
        tried = min(max(10 * tried, _LEAST_RAISED_DAMPING), _MAX_DAMPING)
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
    """The Gram [I, I] with rows and columns in `order`, by panels: whole, a third matrix would exist for a moment."""
    result = torch.empty_like(gram)
    for panel, rows in zip(result.split(_PANEL), order.split(_PANEL), strict=True):
        torch.index_select(gram.index_select(0, rows), 1, order, out=panel)
    return result


def _cholesky(matrix: Tensor, added: float) -> Tensor | None:
    """The lower Cholesky factor of `matrix` [I, I] + added * identity, in its place; None if not positive definite.

    On a CPU in panels, because LAPACK's last bits depend on the number of threads: panels are factorized by one thread,
    and products do the rest. Theirs were the same at 1 to 4 threads wherever 128 divides I (at I = 1000, at 1 and 2
    only). It is also faster than LAPACK, and no less accurate.
    """
    matrix.diagonal().add_(added)
    if matrix.device.type != "cpu":
        factor, info = torch.linalg.cholesky_ex(matrix)
        return factor if int(info) == 0 and bool(torch.isfinite(factor.diagonal()).all()) else None
    lower, size = matrix, len(matrix)
    for start in range(0, size, _PANEL):
        end = min(start + _PANEL, size)
        lower[start:, start:end].addmm_(lower[start:, :start], lower[start:end, :start].t(), alpha=-1)
        with _one_thread():
            corner, info = torch.linalg.cholesky_ex(lower[start:end, start:end])
            if int(info) != 0 or not bool(torch.isfinite(corner).all()):
                return None
            inverse = torch.linalg.solve_triangular(corner, torch.eye(end - start), upper=False)
        lower[start:end, start:end] = corner
        lower[end:, start:end] = lower[end:, start:end] @ inverse.t()
        lower[start:end, end:] = 0
    return lower


def nearest_plane(
    tiles: Sequence[Tensor], factor: Factor, scales: Sequence[Scales], grid: Grid, block_size: int = 128
) -> list[tuple[Tensor, Tensor]]:
    """Codes int8 [R, I] of each row tile [R, I], and the output error of its rows without damping, float64 [R].

    The tiles go through the channels together, which saves calls; all products are made tile by tile, because the last
    bits of a product depend on its shape and on how its rows are aligned. So a tile's result does not depend on the
    others.
    """
    order, lower = factor.order, factor.lower
    ends = list(accumulate(len(tile) for tile in tiles))
    spans = [slice(end - len(tile), end) for tile, end in zip(tiles, ends, strict=True)]
    padding = -ends[-1] % _ALIGNMENT
    places = F.pad(torch.cat([tile.float().t() for tile in tiles], 1), (0, padding)).index_select(0, order)  # [I, R]
    groups = order // grid.group_size
    scale = F.pad(torch.cat([tile.scale.float().t() for tile in scales], 1), (0, padding), value=1.0)
    shifts = [tile.zero_point.float().t() for tile in scales if tile.zero_point is not None]
    zero_point = F.pad(torch.cat(shifts, 1), (0, padding)) if shifts else None
    num_channels, num_rows = places.shape
    delta = torch.zeros_like(places)  # w - q
    codes = torch.empty(places.shape, dtype=torch.int8, device=places.device)
    target, rounded = places.new_empty(2, min(block_size, num_channels), num_rows)
    row_error = torch.zeros(num_rows, dtype=torch.float64, device=places.device)
    for end in range(num_channels, 0, -block_size):
        start = max(end - block_size, 0)
        t, q, w, d = target[: end - start], rounded[: end - start], places[start:end], delta[start:end]
        for span in spans:
            torch.addmm(w[:, span], lower[end:, start:end].t(), delta[end:, span], out=t[:, span])
        block = (t, w, lower[start:end, start:end], scale, zero_point, groups[start:end], grid, q, d)
        if gptq_triton.usable(places):
            gptq_triton.quantize_block(*block)
        else:
            quantize_block(*block, spans)
        codes[start:end].copy_(q)
        t.sub_(w).add_(d).square_()
        for span in spans:
            row_error[span] += factor.pivots[start:end] @ t[:, span]
            row_error[span] -= factor.added * d[:, span].square().sum(0)
    inverse = order.argsort()
    return [(codes[:, span].index_select(0, inverse).t().contiguous(), row_error[span].clamp(min=0)) for span in spans]


def quantize_block(
    target: Tensor,
    weight: Tensor,
    lower: Tensor,
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
        lower: [n, n], the unit lower triangular factor within the block.
        scale: float32 [G, R].
        zero_point: float32 [G, R]; None for symmetric grids.
        groups: int64 [n], the group of each channel.
        grid: the codes' limits.
        codes: written, as floats.
        delta: written, w - q; zero on entry.
        spans: the row tiles; products are made for each.
    """
    scales, shifts = scale.unbind(0), () if zero_point is None else zero_point.unbind(0)
    for end in range(len(target), 0, -_SUB_BLOCK):
        start = max(end - _SUB_BLOCK, 0)
        if end < len(target):
            for span in spans:
                target[start:end, span].addmm_(lower[end:, start:end].t(), delta[end:, span])
        # Channels not quantized yet have zero coefficients and zero deltas, so every product has the same shape.
        coefficients = lower[start:end, start:end].tril(-1).t().contiguous()
        earlier = [delta[start:end, span].t() for span in spans]
        targets = zip(*(target[start:end, span].unbind(0) for span in spans), strict=True)
        channels = (matrix[start:end].unbind(0) for matrix in (target, codes, delta, weight))  # views made all at once
        numbered = zip(*channels, targets, coefficients.unbind(0), groups[start:end].tolist(), strict=True)
        for t, q, d, w, parts, coefficient, group in reversed(list(numbered)):
            s = scales[group]
            for part, errors in zip(parts, earlier, strict=True):
                torch.addmv(part, errors, coefficient, out=part)
            if zero_point is None:
                torch.div(t, s, out=q).round_().clamp_(grid.low, grid.high)
                torch.addcmul(w, q, s, value=-1, out=d)
            else:
                torch.addcdiv(shifts[group], t, s, out=q).round_().clamp_(grid.low, grid.high)
                torch.addcmul(w, q - shifts[group], s, value=-1, out=d)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
