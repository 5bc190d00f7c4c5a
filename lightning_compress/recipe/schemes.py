"""Which of compressed-tensors' schemes are implemented."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import (
    ActivationOrdering,
    DynamicType,
    QuantizationArgs,
    QuantizationScheme,
    QuantizationStrategy,
    QuantizationType,
)
from torch import nn

from lightning_compress.algorithms.base import Algorithm
from lightning_compress.errors import UnsupportedModelError


@dataclass(frozen=True)
class _Kind:
    """Arguments that are implemented.

    Attributes:
        type, bits, strategies, dynamic: what those fields may be.
        group_size: None: any that divides.
        scale_dtype: of scales that are stored in few bits; None: they are in the weight's dtype.
    """

    type: QuantizationType
    bits: Collection[int]
    strategies: Collection[QuantizationStrategy]
    dynamic: bool | DynamicType = False
    group_size: int | None = None
    scale_dtype: torch.dtype | None = None

    def fits(self, args: QuantizationArgs) -> bool:
        """Whether the arguments are of this kind, but for their scales."""
        has_values = args.type == self.type and args.num_bits in self.bits
        in_groups = args.strategy in self.strategies and self.group_size in (None, args.group_size)
        return has_values and in_groups and args.dynamic == self.dynamic


_INT, _FLOAT = QuantizationType.INT, QuantizationType.FLOAT
_TENSOR, _CHANNEL, _TOKEN = QuantizationStrategy.TENSOR, QuantizationStrategy.CHANNEL, QuantizationStrategy.TOKEN
_GROUP, _TENSOR_GROUP = QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP
_BLOCK = QuantizationStrategy.BLOCK
_MX, _NV = (_GROUP,), (_TENSOR_GROUP,)
_WEIGHTS = (
    _Kind(_INT, range(2, 9), (_TENSOR, _CHANNEL, _GROUP)),
    _Kind(_FLOAT, (8,), (_TENSOR, _CHANNEL, _GROUP, _BLOCK)),
    _Kind(_FLOAT, (4, 8), _MX, group_size=32, scale_dtype=torch.uint8),
    _Kind(_FLOAT, (4,), _NV, group_size=16, scale_dtype=torch.float8_e4m3fn),
)
_INPUTS = (
    *(_Kind(kind, (8,), (_TENSOR,)) for kind in (_INT, _FLOAT)),
    *(_Kind(kind, (8,), (_TOKEN,), dynamic=True) for kind in (_INT, _FLOAT)),
    _Kind(_FLOAT, (8,), (_GROUP,), dynamic=True),
    _Kind(_FLOAT, (4, 8), _MX, dynamic=True, group_size=32, scale_dtype=torch.uint8),
    _Kind(_FLOAT, (4,), _NV, dynamic=DynamicType.LOCAL, group_size=16, scale_dtype=torch.float8_e4m3fn),
)
_FORMATS = {
    _INT: (CompressionFormat.pack_quantized, CompressionFormat.int_quantized, CompressionFormat.naive_quantized),
    _FLOAT: (CompressionFormat.float_quantized, CompressionFormat.naive_quantized),
}
"""Of scales in the weight's dtype; the others have one format each."""
_STATIC = (ActivationOrdering.WEIGHT, ActivationOrdering.STATIC)
_LOWEST_AND_HIGHEST = ("minmax", "static_minmax", "memoryless_minmax")


def check_scheme(scheme: QuantizationScheme, algorithm: Algorithm) -> None:
    """
    Raises:
        UnsupportedModelError: a scheme that is not implemented, or asks for what the algorithm's own options decide.
    """
    weights, inputs = scheme.weights, scheme.input_activations
    if weights is None:
        raise UnsupportedModelError(
            "The scheme has no `weights` and would change nothing; use one such as W4A16 or W8A8."
        )
    _check_format(scheme)
    if not any(weights.type == kind.type and weights.num_bits in kind.bits for kind in _WEIGHTS):
        raise UnsupportedModelError(
            f"Weights of type {weights.type} with {weights.num_bits} bits are not supported; use int with 2 to 8 bits, "
            "or float with 8 or 4 (FP8_DYNAMIC, MXFP4A16, NVFP4A16)."
        )
    if not any(kind.fits(weights) for kind in _WEIGHTS):
        choice = (
            "the preset NVFP4A16 or MXFP4A16, whose groups are of 16 and 32, without a `group_size`"
            if weights.type == _FLOAT and weights.num_bits == 4
            else "static tensor, channel or group, or block for floats of 8 bits"
        )
        of = "" if weights.group_size in (None, -1) else f" with group_size {weights.group_size}"
        raise UnsupportedModelError(f"The weights' strategy {weights.strategy!r}{of} is not supported; use {choice}.")
    if scheme.output_activations is not None:
        raise UnsupportedModelError("Quantized output activations are not supported; leave out `output_activations`.")
    is_searched = getattr(algorithm, "scale_search", False)
    in_order = getattr(algorithm, "activation_order", False)
    _check_left_out("weights", weights, "whether `scale_search` is set decides how scales are found", is_searched)
    if weights.actorder is not None and not (in_order and weights.actorder in _STATIC):
        raise UnsupportedModelError(
            f"The weights' actorder {weights.actorder!r} is not supported here: leave it out. Channels are taken in "
            "the order of their inputs if the algorithm has `activation_order`, and are stored in their own."
        )
    if inputs is None:
        return
    _check_left_out("input_activations", inputs, "they are those of the lowest and highest value", False)
    if not any(kind.fits(inputs) for kind in _INPUTS):
        raise UnsupportedModelError(
            f"Input activations of type {inputs.type}, {inputs.num_bits} bits, strategy {inputs.strategy!r}, "
            f"dynamic={inputs.dynamic} are not supported; use int8 or float8, either static per tensor or dynamic per "
            "token, or what the presets NVFP4, MXFP4 and MXFP8 have."
        )


def _check_format(scheme: QuantizationScheme) -> None:
    assert scheme.weights is not None
    formats: Sequence[CompressionFormat] = _FORMATS[QuantizationType(scheme.weights.type)]
    if scheme.weights.scale_dtype is not None:
        formats = [infer_module_format(nn.Linear, scheme)]
    names = [CompressionFormat(each).value for each in formats]
    if scheme.format not in (None, *names):
        raise UnsupportedModelError(
            f"The format {scheme.format!r} is none of these {scheme.weights.type} weights: leave it out, or give "
            f"{' or '.join(names)}."
        )


def _check_left_out(part: str, args: QuantizationArgs, reason: str, is_searched: bool) -> None:
    """Fields that other tools read, and that would be written into the checkpoint's configuration as if they had been
    followed."""
    kinds = _WEIGHTS if part == "weights" else _INPUTS
    scales = {kind.scale_dtype for kind in kinds if kind.fits(args)}
    if scales and args.scale_dtype is None and None not in scales:
        raise UnsupportedModelError(
            f"Floats of {args.num_bits} bits in groups of {args.group_size} have scales of their own: give `{part}` "
            f"the field scale_dtype: {scales.pop()}, as the presets have it."
        )
    if args.type == _FLOAT and not args.symmetric:
        raise UnsupportedModelError(f"Floats have no zero points here: set `symmetric: true` in `{part}`.")
    stored = "scales are stored in the weight's dtype, zero points as int8"
    wanted = {
        "observer": (args.observer if is_searched or args.observer not in _LOWEST_AND_HIGHEST else None, reason),
        "observer_kwargs": (args.observer_kwargs, reason),
        "scale_dtype": (args.scale_dtype if scales and args.scale_dtype not in scales else None, stored),
        "zp_dtype": (args.zp_dtype if args.type == _INT and args.zp_dtype != torch.int8 else None, stored),
    }
    for name, (value, why) in wanted.items():
        if value:
            raise UnsupportedModelError(
                f"The field {name}={value!r} of `{part}` is not supported: leave it out; {why}."
            )


def scheme_format(scheme: QuantizationScheme) -> str:
    """The storage format of a Linear under `scheme`: the scheme's own, else the one compressed-tensors infers.

    But integers of less than 8 bits beside inputs of floats (`W4AFP8`), for which it infers a byte each, are packed:
    vLLM, which alone computes with them, reads them so.
    """
    if scheme.format is None and _is_int_beside_floats(scheme):
        return str(CompressionFormat.pack_quantized.value)
    return str(CompressionFormat(scheme.format or infer_module_format(nn.Linear, scheme)).value)


def _is_int_beside_floats(scheme: QuantizationScheme) -> bool:
    weights, inputs = scheme.weights, scheme.input_activations
    assert weights is not None
    return (
        weights.type == QuantizationType.INT
        and weights.num_bits < 8
        and inputs is not None
        and inputs.type == QuantizationType.FLOAT
    )
