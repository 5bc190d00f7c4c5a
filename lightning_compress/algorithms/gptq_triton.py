"""The part of GPTQ within one block of channels, as one fused CUDA kernel.

Method: a program takes a few output rows through all channels of the block, last to first, and keeps their rounding
errors in registers: one launch per block instead of five per channel. Rows are independent, so programs never wait for
each other. `nearest_plane.quantize_block` is the reference; here sums run in another order, so codes can differ at ties
on rounding borders. `benchmarks/gpu_gptq_kernel.py` compares their times.

Alternative not taken: a CUDA graph of the eager operations. It saves the launches, but every channel would still read
the errors of those before it from memory.
"""

import importlib.util
import warnings
from functools import cache

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from lightning_compress.algorithms.scales import Grid, make_grid

AVAILABLE = importlib.util.find_spec("triton") is not None

_ROWS_PER_PROGRAM = 16
_NUM_WARPS = 4

if AVAILABLE:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def _kernel(  # type: ignore[no-untyped-def]
        target_ptr,
        weight_ptr,
        lower_ptr,
        scale_ptr,
        zero_point_ptr,
        groups_ptr,
        codes_ptr,
        delta_ptr,
        num_rows,
        lower_row_stride,
        lower_column_stride,
        low,
        high,
        ASYMMETRIC: tl.constexpr,
        NUM_CHANNELS: tl.constexpr,
        CHANNELS: tl.constexpr,
        ROWS: tl.constexpr,
    ):
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        valid = rows < num_rows
        channels = tl.arange(0, CHANNELS)
        delta = tl.zeros((CHANNELS, ROWS), dtype=tl.float32)
        for step in range(NUM_CHANNELS):
            k = NUM_CHANNELS - 1 - step
            place = k * num_rows + rows
            group = tl.load(groups_ptr + k) * num_rows + rows
            # Column k of the factor below its diagonal: the channels that are already quantized.
            coefficients = tl.load(
                lower_ptr + channels * lower_row_stride + k * lower_column_stride,
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
            q = tl.minimum(tl.maximum(q, low), high)
            q = (q + 12582912.0) - 12582912.0  # 1.5 * 2^23: rounds to nearest, ties to even
            d = w - (q - z) * s
            delta = tl.where(channels[:, None] == k, d[None, :], delta)
            tl.store(target_ptr + place, t, mask=valid)
            tl.store(codes_ptr + place, q, mask=valid)
            tl.store(delta_ptr + place, d, mask=valid)


def usable(tensor: Tensor) -> bool:
    """Whether blocks of this tensor can be quantized here: it is on a CUDA device, and Triton is installed and finds
    the C compiler that it needs."""
    return AVAILABLE and tensor.is_cuda and _launches(tensor.device)


@cache
def _launches(device: torch.device) -> bool:
    ones = torch.ones(1, 1, device=device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    target, codes, delta = ones.clone(), ones.clone(), ones.clone()
    args = QuantizationArgs(num_bits=4, symmetric=True, strategy="channel")
    try:
        quantize_block(target, ones, ones, ones, None, zero, make_grid(args, ones.shape, torch.float32), codes, delta)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        warnings.warn(
            f"GPTQ runs without its fused kernel, many times slower, because Triton cannot build it: {error}. It needs "
            "a C compiler (gcc or clang) on this machine.",
            stacklevel=2,
        )
        return False
    return True


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
) -> None:
    """The contract of `nearest_plane.quantize_block`, for all tiles, of one weight and with one factor [n, n], at once;
    all float32 and, but for `lower`, contiguous."""
    num_channels, num_rows = len(target), target[0].numel()
    with torch.cuda.device_of(target):  # Triton takes the current one
        _kernel[(triton.cdiv(num_rows, _ROWS_PER_PROGRAM),)](
            target,
            weight,
            lower,
            scale,
            scale if zero_point is None else zero_point,
            groups,
            codes,
            delta,
            num_rows,
            lower.stride(0),
            lower.stride(1),  # cuSOLVER's factors are stored by columns
            float(grid.low),
            float(grid.high),
            ASYMMETRIC=zero_point is not None,
            NUM_CHANNELS=num_channels,
            CHANNELS=triton.next_power_of_2(num_channels),
            ROWS=_ROWS_PER_PROGRAM,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,
        )
