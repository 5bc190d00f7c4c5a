"""Stand-ins for what vLLM has no kernel for on a processor (`_vllm_served.py --stand-ins`): plain products with weights
that are dequantized from what vLLM has loaded and fused. Its reading of names, schemes and shapes is then its own, its
arithmetic is not.
"""

import torch
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel, MPLinearLayerConfig
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors_embedding as embeddings
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_wna16 as experts,
)
from vllm.platforms import current_platform


def codes_in(packed: torch.Tensor, num_bits: int, count: int) -> torch.Tensor:
    """Unsigned codes [rows, count] of int32 words [rows, words], in which they lie one behind the other, lowest bit
    first: over the ends of words, too, as vLLM takes it for 3 bits (its compressed-tensors, 0.17, pads words)."""
    bits = (packed[..., None] >> torch.arange(32)) & 1
    bits = bits.flatten(-2)[:, : count * num_bits].unflatten(-1, (count, num_bits))
    return (bits << torch.arange(num_bits)).sum(-1).float()


def dequantized(
    packed: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, num_bits: int, num_inputs: int
) -> torch.Tensor:
    """The weight [O, I], in the scale's dtype, of one matrix that is packed along I, zero points along O."""
    num_outputs, num_groups = scale.shape
    codes = codes_in(packed, num_bits, num_inputs).reshape(num_outputs, num_groups, -1)
    if zero_point is None:
        codes -= 2 ** (num_bits - 1)
    else:
        codes -= codes_in(zero_point.t(), num_bits, num_outputs).t()[..., None]
    return (codes * scale.float()[..., None]).reshape(num_outputs, num_inputs).to(scale.dtype)


class DequantizedLinear(MPLinearKernel):
    """Stands in where no kernel of vLLM's takes the scheme."""

    used = False

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        DequantizedLinear.used = True
        num_bits, num_inputs = self.config.weight_type.size_bits, self.config.partition_weight_shape[0]
        zero_point = layer.weight_zero_point.data if self.config.zero_points else None
        self.weight = dequantized(layer.weight_packed.data, layer.weight_scale.data, zero_point, num_bits, num_inputs)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, bias)


def dequantize_experts(self: experts.CompressedTensorsWNA16MoEMethod, layer: torch.nn.Module) -> None:
    """Turns loaded experts into unquantized ones, in place of repacking them for a kernel."""
    DequantizedLinear.used = True
    sizes = {"w13": self.moe.hidden_dim, "w2": layer.w2_weight_scale.shape[-1] * self.group_size}
    for name, num_inputs in sizes.items():
        packed, scales = getattr(layer, f"{name}_weight_packed"), getattr(layer, f"{name}_weight_scale")
        zero_points = getattr(layer, f"{name}_weight_zero_point", [None] * len(packed))
        matrices = [
            dequantized(*parts, self.num_bits, num_inputs) for parts in zip(packed, scales, zero_points, strict=True)
        ]
        layer.register_parameter(f"{name}_weight", torch.nn.Parameter(torch.stack(matrices), requires_grad=False))
    plain = UnquantizedFusedMoEMethod(self.moe)
    plain.process_weights_after_loading(layer)
    layer.quant_method = plain


def look_up(ids: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, hidden: int, num_bits: int) -> torch.Tensor:
    """Rows [len(ids), hidden] of a packed embedding, where there is no Triton."""
    DequantizedLinear.used = True
    return dequantized(packed[ids], scale[ids], None, num_bits, hidden)


def use() -> None:
    embeddings._dequant_gather_triton = look_up
    linear._POSSIBLE_KERNELS[current_platform._enum].append(DequantizedLinear)
    experts.select_wna16_moe_backend = lambda **_: (WNA16MoEBackend.TRITON, None)
    experts.CompressedTensorsWNA16MoEMethod.process_weights_after_loading = dequantize_experts


def were_used() -> bool:
    return DequantizedLinear.used
