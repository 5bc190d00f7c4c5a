"""Which of compressed-tensors' schemes are implemented."""

import torch
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import (
    ActivationOrdering,
    QuantizationArgs,
    QuantizationScheme,
    QuantizationStrategy,
    QuantizationType,
)

from lightning_compress.algorithms.base import Algorithm
from lightning_compress.errors import UnsupportedModelError

_WEIGHT_STRATEGIES = (QuantizationStrategy.TENSOR, QuantizationStrategy.CHANNEL, QuantizationStrategy.GROUP)
_FORMATS = tuple(
    each.value
    for each in (CompressionFormat.pack_quantized, CompressionFormat.int_quantized, CompressionFormat.naive_quantized)
)
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
    if scheme.format not in (None, *_FORMATS):
        raise UnsupportedModelError(
            f"The format {scheme.format!r} is none of int weights: leave it out, or give {' or '.join(_FORMATS)}."
        )
    if weights.type != QuantizationType.INT or not 2 <= weights.num_bits <= 8:
        raise UnsupportedModelError(
            f"Weights of type {weights.type} with {weights.num_bits} bits are not supported; use int with 2 to 8 bits."
        )
    if weights.strategy not in _WEIGHT_STRATEGIES or weights.dynamic:
        raise UnsupportedModelError(
            f"The weights' strategy {weights.strategy!r} is not supported; use static tensor, channel or group."
        )
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
    static = inputs.strategy == QuantizationStrategy.TENSOR and not inputs.dynamic
    per_token = inputs.strategy == QuantizationStrategy.TOKEN and inputs.dynamic is True
    if inputs.type != QuantizationType.INT or inputs.num_bits != 8 or not (static or per_token):
        raise UnsupportedModelError(
            f"Input activations of type {inputs.type}, {inputs.num_bits} bits, strategy {inputs.strategy!r}, "
            f"dynamic={inputs.dynamic} "
            "are not supported; use int8, either static per tensor or dynamic per token."
        )


def _check_left_out(part: str, args: QuantizationArgs, reason: str, is_searched: bool) -> None:
    """Fields that other tools read, and that would be written into the checkpoint's configuration as if they had been
    followed."""
    wanted = {
        "observer": args.observer if is_searched or args.observer not in _LOWEST_AND_HIGHEST else None,
        "observer_kwargs": args.observer_kwargs,
        "scale_dtype": args.scale_dtype,
        "zp_dtype": args.zp_dtype if args.zp_dtype != torch.int8 else None,
    }
    for name, value in wanted.items():
        if value:
            why = (
                reason
                if name.startswith("observer")
                else "scales are stored in the weight's dtype, zero points as int8"
            )
            raise UnsupportedModelError(
                f"The field {name}={value!r} of `{part}` is not supported: leave it out; {why}."
            )
