"""Scales of inputs that are quantized by one grid, whatever the batch."""

from collections.abc import Mapping

import torch
from compressed_tensors.quantization import QuantizationScheme, QuantizationStrategy
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor

from lightning_compress.statistics import MinMax, Statistic

_LEAST, _MOST = -128, 127


def static_input(
    scheme: QuantizationScheme, statistics: Mapping[type[Statistic], Statistic], dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Scale [1] in `dtype` and, if the scheme is not symmetric, zero point [1]; None where it has no such inputs.

    Both are of the range that was seen, in float32: of float16 its width may be more than the largest number. The zero
    point is that of the scale as it is stored.
    """
    inputs = scheme.input_activations
    if inputs is None or inputs.dynamic:
        return None, None
    assert inputs.strategy == QuantizationStrategy.TENSOR
    assert inputs.num_bits == 8
    seen = statistics[MinMax]
    assert isinstance(seen, MinMax)
    low, high = seen.minimum.reshape(1), seen.maximum.reshape(1)
    scale, zero_point = calculate_qparams(low, high, inputs)
    scale = scale.to(dtype).clamp_min(torch.finfo(dtype).smallest_normal)
    if inputs.symmetric:
        return scale, None
    return scale, (_LEAST - low.clamp(max=0) / scale.float()).round().clamp(_LEAST, _MOST).to(zero_point.dtype)
