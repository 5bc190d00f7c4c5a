"""CUDA kernels, in Triton: what would otherwise be hundreds of small operators.

`quantize_block` is the part of GPTQ within one block of channels. A program takes a few output rows through all
channels of the block, last to first, and keeps their rounding errors in registers: one launch per block instead of five
per channel. Rows are independent, so programs never wait for each other, and a row's result does not depend on which
others it is solved with. `nearest_plane.quantize_block` is the reference; here sums run in another order, so codes can
differ at ties on rounding borders. `benchmarks/gpu_gptq_kernel.py` compares their times.

`moments` is what a search of scales judges candidates by: a program takes a few rows of one group through all of them.

Alternative not taken: a CUDA graph of the eager operations. It saves the launches, but every channel would still read
the errors of those before it from memory.
"""

import importlib.util
import warnings
from functools import cache

import torch
from torch import Tensor

from lightning_compress.algorithms.grids import Grid

AVAILABLE = importlib.util.find_spec("triton") is not None

_ROWS_PER_PROGRAM = 16
_CHANNELS_AT_ONCE = 128  # of a group, by `moments`
_NUM_WARPS = 4

if AVAILABLE:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def _rounded(q, low, high, shift, least, FLOATS: tl.constexpr):  # type: ignore[no-untyped-def]
        """`Grid.round_`; beside `shift` float32 has no bits left that codes have not: those of floats, times a power of
        two."""
        q = tl.minimum(tl.maximum(q, low), high)
        if FLOATS:
            power = (q.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
            shift = tl.maximum(power, least) * shift
        return (q + shift) - shift

    @triton.jit  # type: ignore[untyped-decorator]
    def _block_kernel(  # type: ignore[no-untyped-def]
        target_ptr,
        weight_ptr,
        lower_ptr,
        pivot_ptr,
        added_ptr,
        scale_ptr,
        zero_point_ptr,
        groups_ptr,
        codes_ptr,
        delta_ptr,
        error_ptr,
        num_rows,
        rows_of_factor,
        lower_stride,
        lower_row_stride,
        lower_column_stride,
        pivot_stride,
        low,
        high,
        shift,
        least,
        FLOATS: tl.constexpr,
        ASYMMETRIC: tl.constexpr,
        NUM_CHANNELS: tl.constexpr,
        CHANNELS: tl.constexpr,
        ROWS: tl.constexpr,
    ):
        factor = tl.program_id(0) * ROWS // rows_of_factor
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        valid = rows < num_rows
        channels = tl.arange(0, CHANNELS)
        delta = tl.zeros((CHANNELS, ROWS), dtype=tl.float32)
        error = tl.load(error_ptr + rows, mask=valid, other=0.0)
        added = tl.load(added_ptr + factor)
        for step in range(NUM_CHANNELS):
            k = NUM_CHANNELS - 1 - step
            place = k * num_rows + rows
            group = tl.load(groups_ptr + k) * num_rows + rows
            coefficients = tl.load(  # column k of the factor below its diagonal: channels that are already quantized
                lower_ptr + factor * lower_stride + channels * lower_row_stride + k * lower_column_stride,
                mask=(channels > k) & (channels < NUM_CHANNELS),
                other=0.0,
            )
            t = tl.load(target_ptr + place, mask=valid, other=0.0) + tl.sum(coefficients[:, None] * delta, axis=0)
            w = tl.load(weight_ptr + place, mask=valid, other=0.0)
            s = tl.load(scale_ptr + group, mask=valid, other=1.0)
            q = tl.div_rn(t, s)
            z = tl.zeros((ROWS,), dtype=tl.float32)
            if ASYMMETRIC:
                z = tl.load(zero_point_ptr + group, mask=valid, other=0.0)
                q += z
            q = _rounded(q, low, high, shift, least, FLOATS)
            d = w - (q - z) * s
            delta = tl.where(channels[:, None] == k, d[None, :], delta)
            pivot, left = tl.load(pivot_ptr + factor * pivot_stride + k).to(tl.float64), (t - w + d).to(tl.float64)
            error += pivot * left * left - added * d.to(tl.float64) * d.to(tl.float64)
            tl.store(codes_ptr + place, q.to(codes_ptr.dtype.element_ty), mask=valid)
            tl.store(delta_ptr + place, d, mask=valid)
        tl.store(error_ptr + rows, error, mask=valid)

    @triton.jit  # type: ignore[untyped-decorator]
    def _moments_kernel(  # type: ignore[no-untyped-def]
        weight_ptr,
        weighting_ptr,
        scale_ptr,
        zero_point_ptr,
        cross_ptr,
        square_ptr,
        num_rows,
        num_groups,
        group_size,
        low,
        high,
        shift,
        least,
        FLOATS: tl.constexpr,
        ASYMMETRIC: tl.constexpr,
        NUM_SCALES: tl.constexpr,
        NUM_PARTS: tl.constexpr,
        CHANNELS: tl.constexpr,
        ROWS: tl.constexpr,
    ):
        rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        group = tl.program_id(1)
        valid = rows < num_rows
        z = tl.zeros((ROWS,), dtype=tl.float32)
        if ASYMMETRIC:
            z = tl.load(zero_point_ptr + rows * num_groups + group, mask=valid, other=0).to(tl.float32)
        for number in range(NUM_SCALES):
            place = (number * num_rows + rows) * num_groups + group
            s = tl.load(scale_ptr + place, mask=valid, other=1.0)
            cross = tl.zeros((ROWS,), dtype=tl.float32)
            square = tl.zeros((ROWS,), dtype=tl.float32)
            for part in range(NUM_PARTS):
                within = part * CHANNELS + tl.arange(0, CHANNELS)
                channels = group * group_size + within
                exists = within < group_size
                d = tl.load(weighting_ptr + channels, mask=exists, other=0.0)
                w = tl.load(
                    weight_ptr + rows[:, None] * (num_groups * group_size) + channels[None, :],
                    mask=valid[:, None] & exists[None, :],
                    other=0.0,
                ).to(tl.float32)
                q = tl.div_rn(w, tl.broadcast_to(s[:, None], (ROWS, CHANNELS))) + z[:, None]
                q = _rounded(q, low, high, shift, least, FLOATS) - z[:, None]
                cross += tl.sum(q * (w * d[None, :]), axis=1)
                square += tl.sum(q * q * d[None, :], axis=1)
            tl.store(cross_ptr + place, cross, mask=valid)
            tl.store(square_ptr + place, square, mask=valid)


def usable(tensor: Tensor) -> bool:
    """Whether kernels run on this tensor here: it is on a CUDA device, and Triton is installed and finds the C compiler
    that it needs."""
    return AVAILABLE and tensor.is_cuda and _launches(tensor.device)


@cache
def _launches(device: torch.device) -> bool:
    one = torch.ones(1, 1, 1, dtype=torch.float32, device=device)
    try:
        moments(one[0], one[0, 0], one, None, Grid(-8, 7, True, 1, 1, torch.float32))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        warnings.warn(
            f"Weights are quantized without fused kernels, many times slower, because Triton cannot build them: "
            f"{error}. It needs a C compiler (gcc or clang), and a cache that can be written to (TRITON_CACHE_DIR).",
            stacklevel=2,
        )
        return False
    return True


def _rounding(grid: Grid) -> tuple[float, float, float, float]:
    """The arguments of `_rounded`."""
    floats = grid.floats
    return grid.low, grid.high, grid.shift, 0.0 if floats is None else floats.least


def quantize_block(
    target: Tensor,
    weight: Tensor,
    lowers: Tensor,
    pivots: Tensor,
    added: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    groups: Tensor,
    grid: Grid,
    codes: Tensor,
    delta: Tensor,
    row_error: Tensor,
) -> None:
    """Quantize the channels of one block of T row tiles, last to first, and add up their output errors.

    All but `lowers` and `pivots` contiguous, and float32 where nothing else is said; H a multiple of 16 where there
    are several tiles.

    Args:
        target: [n, T, H], w plus what earlier blocks left to make up for.
        weight: w, [n, T, H].
        lowers: [F, n, n], the unit lower triangular factors within the block, of each tile or (F = 1) of all.
        pivots: [F, n], of the channels of the block.
        added: float64 [F], to the diagonal.
        scale, zero_point, groups: see `nearest_plane.quantize_block`.
        grid: of the codes.
        codes: written, int8 [n, T, H]; float16 of grids of floats (Triton has FP8 on some GPUs only).
        delta: written, w - q.
        row_error: float64 [T, H], sum over k of pivot_k (t_k - q_k)^2 - added (w_k - q_k)^2 is added.
    """
    num_channels, num_tiles, height = target.shape
    num_rows = num_tiles * height
    with torch.cuda.device_of(target):  # Triton takes the current one
        _block_kernel[(triton.cdiv(num_rows, _ROWS_PER_PROGRAM),)](
            target,
            weight,
            lowers,
            pivots,
            added,
            scale,
            scale if zero_point is None else zero_point,
            groups,
            codes,
            delta,
            row_error,
            num_rows,
            num_rows // len(lowers),
            *lowers.stride(),  # cuSOLVER's factors are stored by columns
            pivots.stride(0),
            *_rounding(grid),
            FLOATS=grid.floats is not None,
            ASYMMETRIC=zero_point is not None,
            NUM_CHANNELS=num_channels,
            CHANNELS=triton.next_power_of_2(num_channels),
            ROWS=_ROWS_PER_PROGRAM,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,
        )


def moments(
    weight: Tensor,
    weighting: Tensor,
    candidates: Tensor,
    zero_point: Tensor | None,
    grid: Grid,
) -> tuple[Tensor, Tensor]:
    """The contract of `scales.moments`."""
    group_size = grid.group_size
    num_scales, num_rows, num_groups = candidates.shape
    cross, square = candidates.new_empty(2, *candidates.shape)
    channels = min(triton.next_power_of_2(group_size), _CHANNELS_AT_ONCE)
    with torch.cuda.device_of(weight):
        _moments_kernel[(triton.cdiv(num_rows, _ROWS_PER_PROGRAM), num_groups)](
            weight.contiguous(),
            weighting.contiguous(),
            candidates.contiguous(),
            candidates if zero_point is None else zero_point.contiguous(),
            cross,
            square,
            num_rows,
            num_groups,
            group_size,
            *_rounding(grid),
            FLOATS=grid.floats is not None,
            ASYMMETRIC=zero_point is not None,
            NUM_SCALES=num_scales,
            NUM_PARTS=triton.cdiv(group_size, channels),
            CHANNELS=channels,
            ROWS=_ROWS_PER_PROGRAM,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,
        )
    return cross, square
