"""What codes and scales can be: grids of integers, and of floats of 4 and 8 bits.

A grid of floats is fine near 0 and coarse far from it: FP8 is E4M3 (Micikevicius et al., arXiv 2209.05433), FP4 is
E2M1 (OCP Microscaling Formats 1.0). Their scales are in the weight's dtype, or stored in few bits themselves: powers of
two for groups of 32 (MXFP4, MXFP8 of the same specification), or FP8 for groups of 16, under a global scale of the
whole weight (NVFP4). Ranges, and how scales are rounded, are compressed-tensors'.

Codes are kept as the numbers that they stand for: int8, or float8_e4m3fn, which holds those of FP4 too.

Alternative not taken: rounding by conversion to `torch.float8_e4m3fn` and back. It is no faster on a CPU, there is no
such dtype for FP4, and Triton has no conversion on GPUs older than Ada.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, final

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy, QuantizationType
from compressed_tensors.quantization.utils import calculate_range
from torch import Tensor

from lightning_compress.errors import SolveError

_STRATEGIES = (
    QuantizationStrategy.TENSOR,
    QuantizationStrategy.CHANNEL,
    QuantizationStrategy.GROUP,
    QuantizationStrategy.TENSOR_GROUP,
    QuantizationStrategy.BLOCK,
)
_GROUPED = (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP)
_FLOAT8: Final = torch.float8_e4m3fn
_EXPONENT = 0x7F800000  # of a float32
_LEAST_POWER, _MOST_POWER = -126 + 8, 127  # of two; less the exponent of the largest code, a normal float32
_LEAST_SCALE, _LARGEST_SCALE = 0.125, 448.0  # in FP8; the former is what compressed-tensors takes for a scale of 0


@final
@dataclass(frozen=True)
class FloatFormat:
    """How small floats are spaced.

    Attributes:
        mantissa: bits.
        least: the smallest normal number; below it all are as far apart as just above it.
    """

    mantissa: int
    least: float


E4M3, E2M1 = FloatFormat(3, 2.0**-6), FloatFormat(1, 1.0)
_FORMATS = {8: E4M3, 4: E2M1}


@final
@dataclass(frozen=True)
class Grid:
    """The grid of a scheme on weights with a given number of input channels.

    Attributes:
        low, high: the smallest and the largest code.
        symmetric: no zero-point.
        group_size: consecutive input channels that share a scale; all of them for channel and tensor strategies.
        rows_together: consecutive rows of a module that share their scales; None: all of them.
        scale_dtype: the dtype scales are in: that they are stored in; float32 where that has fewer bits.
        signed_scales: a searched scale may be negative (symmetric grids of integers).
        floats: how codes are spaced; None: they are integers.
        powers_of_two: scales are.
        global_scale: scales are numbers in FP8, divided by this; None: they are not.
    """

    low: float
    high: float
    symmetric: bool
    group_size: int
    rows_together: int | None
    scale_dtype: torch.dtype
    signed_scales: bool = True
    floats: FloatFormat | None = None
    powers_of_two: bool = False
    global_scale: float | None = None

    @property
    def code_dtype(self) -> torch.dtype:
        """What holds any code."""
        return torch.int8 if self.floats is None else _FLOAT8

    def round_(self, values: Tensor) -> Tensor:
        """Let each value, float32, be the code next to it; of two, the even one."""
        if self.floats is None:
            return values.round_().clamp_(self.low, self.high)
        values.clamp_(self.low, self.high)
        power = values.view(torch.int32).bitwise_and(_EXPONENT).view(torch.float32)  # of two, below the value
        shift = power.clamp_(min=self.floats.least).mul_(self.shift)
        return values.add_(shift).sub_(shift)

    @property
    def shift(self) -> float:
        """Beside this many times the power of two below a value, float32 has as many bits for it as its code."""
        return 1.5 * 2.0 ** (23 - (0 if self.floats is None else self.floats.mantissa))

    def covering(self, largest: Tensor) -> Tensor:
        """The scale with which the largest absolute weight of a group is the largest code, as it can be stored."""
        if self.powers_of_two:  # weights of up to 8/7 of the next power below, which ends at the largest code
            return _power_of_two(largest * (8 / 7)) / 2.0 ** math.floor(math.log2(self.high))
        return self.stored(largest / ((self.high - self.low) / 2))

    def stored(self, scale: Tensor) -> Tensor:
        """`scale` as it can be stored, in `scale_dtype`; 0 (an all-zero group) becomes another number."""
        if self.powers_of_two:
            return _power_of_two(scale * math.sqrt(2))
        if self.global_scale is None:
            rounded, least = scale.to(self.scale_dtype), torch.finfo(self.scale_dtype).eps
            return rounded.masked_fill_(rounded == 0, least)
        rounded = (scale * self.global_scale).clamp_(-_LARGEST_SCALE, _LARGEST_SCALE).to(_FLOAT8).float()
        # By a tensor, as readers do: CUDA multiplies by the reciprocal of a number, which ends in other last bits.
        divisor = torch.full((), self.global_scale, dtype=torch.float32, device=rounded.device)
        return rounded.masked_fill_(rounded == 0, _LEAST_SCALE) / divisor

    def over(self, weight: Tensor) -> "Grid":
        """The same, with the global scale of a weight, if scales have one: its largest scale is the largest of FP8."""
        if self.global_scale is None:
            return self
        largest = torch.stack(weight.aminmax()).abs().amax().float()
        scale = float(_LARGEST_SCALE * self.high / largest.clamp_min(torch.finfo(torch.float32).tiny))
        return replace(self, global_scale=scale if math.isfinite(scale) else 1.0)


def make_grid(
    args: QuantizationArgs, shape: Sequence[int], scale_dtype: torch.dtype, signed_scales: bool = True
) -> Grid:
    """The grid of scheme `args` on a weight of `shape` [O, I].

    Raises:
        SolveError: neither integers of 2 to 8 bits nor floats of 4 or 8, an unsupported strategy, or a group size that
            does not divide I.
    """
    is_float = args.type == QuantizationType.FLOAT
    if args.num_bits not in (_FORMATS if is_float else range(2, 9)):
        raise SolveError(
            f"The weight {tuple(shape)} cannot be quantized to {args.num_bits}-bit {args.type}: choose integers of 2 "
            "to 8 bits, such as W4A16 or W8A8, or floats of 4 or 8, such as FP8_DYNAMIC or NVFP4A16."
        )
    if args.strategy not in _STRATEGIES:
        raise SolveError(
            f"The weight {tuple(shape)} cannot be quantized with strategy {args.strategy!r}: choose tensor, channel, "
            "group or block."
        )
    block = args.block_structure or (1, width_of_groups(args) or shape[1])
    if shape[1] % block[1]:
        divisors = [str(size) for size in (256, 128, 64, 32, 16, 8) if shape[1] % size == 0]
        raise SolveError(
            f"Group size {block[1]} does not divide the {shape[1]} input channels of the weight {tuple(shape)}: "
            f"choose {' or '.join(divisors[:3]) or 'the channel strategy'}, or exclude the module with `ignore`."
        )
    low, high = (float(limit) for limit in calculate_range(args, "cpu"))
    return Grid(
        low,
        high,
        args.symmetric,
        block[1],
        rows_together=None if args.strategy == QuantizationStrategy.TENSOR else block[0],
        scale_dtype=scale_dtype if args.scale_dtype is None else torch.float32,
        signed_scales=signed_scales and args.symmetric and not is_float,
        floats=_FORMATS[args.num_bits] if is_float else None,
        powers_of_two=args.scale_dtype == torch.uint8,
        global_scale=1.0 if has_global_scale(args) else None,
    )


def width_of_groups(args: QuantizationArgs) -> int | None:
    """How many consecutive input channels share a scale; None: all of them."""
    width: int | None = args.group_size if args.strategy in _GROUPED else None
    return width if args.block_structure is None else int(args.block_structure[1])


def has_global_scale(args: QuantizationArgs) -> bool:
    """Whether scales are FP8, under one of all modules that are solved together."""
    return bool(args.strategy == QuantizationStrategy.TENSOR_GROUP)


def shares_rows(args: QuantizationArgs) -> bool:
    """Whether rows share scales, which are found before rows are shared out."""
    return args.strategy in (QuantizationStrategy.TENSOR, QuantizationStrategy.BLOCK)


def _power_of_two(values: Tensor) -> Tensor:
    """The largest one that is not above each value, float32; 1 in place of 0."""
    mantissa, exponent = torch.frexp(values)
    power = torch.where(mantissa == 0, 0, exponent - 1).clamp_(_LEAST_POWER, _MOST_POWER)
    return torch.ldexp(torch.ones_like(mantissa), power)


def read_dtype(args: QuantizationArgs, scale_dtype: torch.dtype) -> torch.dtype:
    """In which a weight is read from a checkpoint: that of its scales, but where these are stored in few bits,
    compressed-tensors reads them, and the weight, as bfloat16, whatever the model is in."""
    return scale_dtype if args.scale_dtype is None else torch.bfloat16
