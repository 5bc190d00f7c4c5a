"""How inputs are quantized whatever the batch: what of their scales is known beforehand."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from compressed_tensors.quantization import DynamicType, QuantizationScheme, QuantizationStrategy, QuantizationType
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import Tensor

from lightning_compress.statistics import MinMax, Statistic

_LEAST, _MOST = -128, 127


@final
@dataclass(frozen=True)
class StaticInput:
    """What a checkpoint holds of the inputs of a module.

    Attributes:
        scale: [1]; None: every token, or group of channels, has its own.
        zero_point: [1], of schemes that are not symmetric.
        global_scale: float32 [1], by which the scales of groups are multiplied before they are rounded to FP8.
    """

    scale: Tensor | None = None
    zero_point: Tensor | None = None
    global_scale: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """By their local names in a checkpoint."""
        named = {
            "input_scale": self.scale,
            "input_zero_point": self.zero_point,
            "input_global_scale": self.global_scale,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "StaticInput":
        """From what `tensors` gives, and others beside."""
        return cls(tensors.get("input_scale"), tensors.get("input_zero_point"), tensors.get("input_global_scale"))

    def to(self, device: torch.device) -> "StaticInput":
        """The same, on `device`."""
        return StaticInput.of({name: tensor.to(device) for name, tensor in self.tensors.items()})


NOT_STATIC = StaticInput()
"""Of inputs of which nothing is known beforehand, or that are not quantized."""


def has_static_input(scheme: QuantizationScheme) -> bool:
    """Whether the range of the inputs has to be known."""
    return scheme.input_activations is not None and scheme.input_activations.dynamic is not True


def static_input(
    scheme: QuantizationScheme, statistics: Mapping[type[Statistic], Statistic], dtype: torch.dtype
) -> StaticInput:
    """What is known of a module's inputs by the range that was seen, scales in `dtype`.

    Scale and zero point are computed in float32: of float16 the range's width may be more than the largest number. The
    zero point is that of the scale as it is stored.
    """
    inputs = scheme.input_activations
    if inputs is None or not has_static_input(scheme):
        return NOT_STATIC
    seen = statistics[MinMax]
    assert isinstance(seen, MinMax)
    low, high = seen.minimum.float().reshape(1), seen.maximum.float().reshape(1)
    if inputs.dynamic == DynamicType.LOCAL:
        return StaticInput(global_scale=generate_gparam(low, high))
    assert inputs.strategy == QuantizationStrategy.TENSOR
    assert inputs.num_bits == 8
    scale, zero_point = calculate_qparams(low, high, inputs)
    scale = scale.to(dtype).clamp_min(torch.finfo(dtype).smallest_normal)
    if inputs.symmetric:
        return StaticInput(scale)
    assert inputs.type == QuantizationType.INT
    of_zero = (_LEAST - low.clamp(max=0) / scale.float()).round().clamp(_LEAST, _MOST)
    return StaticInput(scale, of_zero.to(zero_point.dtype))
