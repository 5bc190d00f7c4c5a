"""A quantized module: its codes and scales, and how it computes in the model from then on.

The dequantized weight comes from compressed-tensors' own `dequantize` on the stored codes and scales, so the model in
memory holds bit for bit what a reader of the checkpoint computes.
"""

from abc import ABC
from dataclasses import dataclass
from typing import Any, final

import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    QuantizationStrategy,
    QuantizationType,
)
from compressed_tensors.quantization.lifecycle.forward import dequantize, fake_quantize
from compressed_tensors.quantization.utils import calculate_range, compute_dynamic_scales_and_zp
from torch import Tensor, nn

from lightning_compress.algorithms.base import Solved, is_finite
from lightning_compress.algorithms.grids import read_dtype
from lightning_compress.calibration.static_inputs import NOT_STATIC, StaticInput
from lightning_compress.errors import SolveError
from lightning_compress.graph.compat import FakeTensor, outside_modes
from lightning_compress.graph.fakes import Shapes
from lightning_compress.graph.leaf import first_tensor
from lightning_compress.memory.store import WeightStore


@dataclass(frozen=True)
class QuantizedModule:
    """The result for one module: codes and scales of its weight, and what is known of its inputs."""

    module: str
    scheme: QuantizationScheme
    solved: Solved
    inputs: StaticInput = NOT_STATIC

    @property
    def weights(self) -> QuantizationArgs:
        """The weights' arguments."""
        assert self.scheme.weights is not None
        return self.scheme.weights

    def dequantized(self) -> Tensor:
        """The weight [O, I] that the codes and scales stand for, as it is read from the checkpoint."""
        solved = self.solved
        dtype = read_dtype(self.weights, solved.scale.dtype)
        return dequantize_weight(solved.codes, solved.scale, solved.zero_point, self.weights, dtype)


@dataclass(frozen=True)
class Restored:
    """What a quantized module computes with: its dequantized weight [O, I], and what is known of its inputs."""

    weight: Tensor
    inputs: StaticInput


def dequantize_weight(
    codes: Tensor, scale: Tensor, zero_point: Tensor | None, args: QuantizationArgs, dtype: torch.dtype
) -> Tensor:
    """compressed-tensors' value of codes [O, I] under scales, computed in the scale's dtype."""
    weight: Tensor = dequantize(x_q=codes, scale=scale, zero_point=zero_point, args=args)
    return weight.to(dtype)


class InputHook(ABC):  # noqa: B024 (what it does is up to those who register it)
    """Marks the forward pre-hooks by which quantized modules read quantized inputs."""


@final
@dataclass(frozen=True)
class InputQuantizer(InputHook):
    """A forward pre-hook that quantizes and dequantizes a linear's input, as the checkpoint's runtime will."""

    args: QuantizationArgs
    static: StaticInput = NOT_STATIC

    def __call__(
        self, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        place, x = first_tensor(args, kwargs)
        if isinstance(place, str):
            return args, {**kwargs, place: self._quantized(module, x)}
        return (*args[:place], self._quantized(module, x), *args[place + 1 :]), kwargs

    def _quantized(self, module: nn.Module, x: Tensor) -> Tensor:
        if isinstance(x, FakeTensor):
            if isinstance(x.fake_mode.shape_env, Shapes):  # recorded: the model is, without this
                return x
            with outside_modes():  # what compressed-tensors keeps for good must not be fake
                calculate_range(self.args, x.device)
        if x.numel() == 0:
            return x
        static = self.static.to(x.device)
        is_dynamic = static.scale is None
        rows = x.reshape(1, -1, x.shape[-1]) if is_dynamic and isinstance(module, nn.Linear) else x
        scale, zero_point, global_scale = static.scale, static.zero_point, static.global_scale
        if is_dynamic:  # compressed-tensors takes the first two dimensions for those of tokens
            scale, zero_point = compute_dynamic_scales_and_zp(rows, self.args, module, global_scale)
        found: Tensor = fake_quantize(rows, scale, zero_point, self.args, global_scale)
        quantized = found.reshape(x.shape).to(x.dtype)  # static scales have that of the calibration
        if not torch.is_grad_enabled():
            return quantized
        rounded: Tensor = _StraightThrough.apply(x, quantized)  # type: ignore[no-untyped-call]
        return rounded


class _StraightThrough(torch.autograd.Function):
    """Rounding, through which gradients pass as if there were none (Bengio et al., arXiv 1308.3432)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def quantize_inputs(module: nn.Module, quantizer: InputQuantizer) -> None:
    """Quantize what `module` reads from now on, instead of how an earlier run did."""
    read_whole(module)
    module.register_forward_pre_hook(quantizer, with_kwargs=True)


def read_whole(root: nn.Module) -> list[str]:
    """Let all modules read their inputs as they are; the names of those that quantized them."""
    found: list[str] = []
    for name, module in root.named_modules():
        for number, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, InputQuantizer):
                del module._forward_pre_hooks[number], module._forward_pre_hooks_with_kwargs[number]
                found.append(name)
    return found


_VERSION = "_quantized_version"


def _mark(weight: Tensor) -> None:
    """Remember which version of it is quantized; any later write gives it another."""
    if not weight.is_inference():
        setattr(weight, _VERSION, weight._version)


def already_quantized(root: nn.Module) -> list[str]:
    """The names of the parameters that are as an earlier run in this process left them."""
    marked = ((name, weight) for name, weight in root.named_parameters() if hasattr(weight, _VERSION))
    return [name for name, weight in marked if getattr(weight, _VERSION) == weight._version]


def describe_scheme(scheme: QuantizationScheme) -> str:
    """A scheme in a word, e.g. `W4A16 group 128`."""
    weights, inputs = scheme.weights, scheme.input_activations
    assert weights is not None
    activations = "" if inputs is None else f", {'dynamic' if inputs.dynamic else 'static'} {_name(inputs)}"
    bits = f"W{weights.num_bits}A{inputs.num_bits if inputs else 16}"
    return f"{bits} {_name(weights)}{'' if weights.symmetric else ' asymmetric'}{activations}"


def _name(arguments: QuantizationArgs) -> str:
    """Of type and strategy, which is an enum where it was not given but follows from the group size."""
    kind = "float " if arguments.type == QuantizationType.FLOAT else ""
    sizes = arguments.block_structure or ([] if arguments.group_size in (None, -1) else [arguments.group_size])
    size = f" {'x'.join(map(str, sizes))}" if sizes else ""
    return f"{kind}{QuantizationStrategy(arguments.strategy).value}{size}"


def apply(quantized: QuantizedModule, root: nn.Module, store: WeightStore) -> None:
    """Let the model compute with the quantized weight and, where the scheme says so, with quantized inputs.

    Raises:
        SolveError: what codes and scales stand for is beyond the weight's dtype (float16 ends at 65504).
    """
    found = Restored(quantized.dequantized(), quantized.inputs)
    if not is_finite(found.weight):
        raise SolveError(
            f"{quantized.module}: its weights {list(found.weight.shape)} reach so far that "
            f"{describe_scheme(quantized.scheme)} rounds some of them to Inf in {found.weight.dtype}. Load the model "
            f"in bfloat16 or float32, or add {quantized.module!r} to `ignore`."
        )
    put(found, quantized.module, quantized.scheme, root, store)


def put(restored: Restored, name: str, scheme: QuantizationScheme, root: nn.Module, store: WeightStore) -> None:
    """`apply` for a module whose dequantized weight is at hand."""
    module = root.get_submodule(name)
    store.write(module.get_parameter("weight"), restored.weight)
    _mark(module.get_parameter("weight"))
    if scheme.input_activations is not None:
        quantize_inputs(module, InputQuantizer(scheme.input_activations, restored.inputs))
