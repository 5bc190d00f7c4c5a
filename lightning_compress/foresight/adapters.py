"""LoRA and QLoRA as far as memory goes: what is trained, what is kept for the backward, what is unpacked on the way.

After PEFT 0.21 (`peft/tuners/lora/layer.py` and `bnb.py`: the adapter in float32 whatever the layer has, its input cast
to that) and bitsandbytes 0.50 (`bitsandbytes/autograd/_functions.py`, `MatMul4Bit`; `functional.py`, `quantize_4bit`
with `compress_statistics`). Neither is needed here, nor would their kernels run on fake tensors; so a packed weight has
the tensors of one, but no values: what is trained with these modules is nonsense of the right size. Papers: arXiv
2106.09685, 2305.14314.
"""

import re
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from lightning_compress.errors import CompressionError

BLOCK, SCALES_BLOCK = 64, 256
"""Weights that share an 8-bit scale, and such scales that share one in float32 (bitsandbytes' defaults)."""
ALL_LINEAR = "all-linear"


def packed_bytes(num_weights: int) -> int:
    """Of a linear weight in 4 bits with double quantization, without its tables of values.

    >>> packed_bytes(4096 * 4096) / (4096 * 4096)
    0.515869140625
    """
    blocks = -(-num_weights // BLOCK)
    return -(-num_weights // 2) + blocks + 4 * -(-blocks // SCALES_BLOCK)


def saved_by_packing(model: nn.Module, method: str) -> dict[Tensor, int]:
    """Bytes that linear weights have less of where a method of fine-tuning packs them."""
    weights = [linear.weight for linear in _packable(model).values()] if method == "qlora" else []
    return {weight: weight.nbytes - packed_bytes(weight.numel()) for weight in weights}


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """By name, all linear layers but the output embedding: PEFT's `all-linear`."""
    find = getattr(model, "get_output_embeddings", None)
    last = None if find is None else find()
    return {name: module for name, module in model.named_modules() if type(module) is nn.Linear and module is not last}


def _packable(model: nn.Module) -> dict[str, nn.Linear]:
    """What bitsandbytes packs of `linears`: not those that the model's class keeps in float32 (T5's `wo`)."""
    kept = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    return {name: linear for name, linear in linears(model).items() if not name.endswith(kept)}


def targets_of(model: nn.Module, targets: str | Sequence[str] | None) -> dict[str, nn.Linear]:
    """The linear layers that get an adapter.

    Args:
        model: with linear layers.
        targets: as PEFT's `target_modules`: ends of names; a regular expression for whole names, if it is one string;
            `all-linear` or None: all but the output embedding.

    Raises:
        CompressionError: no linear layer is meant, or one of several targets means none; no regular expression.
    """
    if targets is None or targets == ALL_LINEAR:
        found = linears(model)
        if not found:
            raise CompressionError(f"{type(model).__name__} has no linear layer but its output embedding.")
        return found
    every = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    named = [targets] if isinstance(targets, str) else list(targets)
    matches = {
        target: [name for name in every if _means(target, name, is_pattern=isinstance(targets, str))]
        for target in named
    }
    idle = [target for target, names in matches.items() if not names]
    if idle or not matches:
        known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in every)) or "none"
        remedy = " A single string is a regular expression for whole names; a list has their ends: '[q_proj]'."
        raise CompressionError(
            f"job.lora_targets: {', '.join(map(repr, idle)) or 'none'} means no linear layer of "
            f"{type(model).__name__}, whose names end in: {known}.{remedy if isinstance(targets, str) else ''}"
        )
    chosen = {name for names in matches.values() for name in names}
    return {name: module for name, module in every.items() if name in chosen}


def _means(target: str, name: str, is_pattern: bool) -> bool:
    if is_pattern:
        try:
            return re.fullmatch(target, name) is not None
        except re.error as error:
            raise CompressionError(f"job.lora_targets={target} is no regular expression: {error}.") from error
    return name == target or name.endswith(f".{target}")


def num_trainable(model: nn.Module, rank: int, targets: str | Sequence[str] | None) -> int:
    """Parameters of the adapters: rank times (inputs + outputs) of each target.

    Raises:
        CompressionError: as `targets_of`.
    """
    found = targets_of(model, targets).values()
    return sum(rank * (linear.in_features + linear.out_features) for linear in found)


def adapt(model: nn.Module, rank: int, targets: str | Sequence[str] | None, packs: bool) -> None:
    """Freeze a model and put adapters into it, in place.

    Args:
        model: on real or on fake tensors; its linear layers lose their values if they are packed.
        rank: of the adapters.
        targets: as of `targets_of`.
        packs: linear layers but the output embedding have 4 bits (QLoRA), with and without an adapter.

    Raises:
        CompressionError: as `targets_of`.
    """
    chosen = targets_of(model, targets)
    model.requires_grad_(False)
    packable = _packable(model) if packs else {}
    for name, linear in {**packable, **chosen}.items():
        base: nn.Linear | Packed = Packed(linear) if name in packable else linear
        module = Adapted(base, rank) if name in chosen else base
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, module)


class _Product(torch.autograd.Function):
    """With a weight that is unpacked where it is needed, and not kept: forward, and again in the backward."""

    @staticmethod
    def forward(ctx: FunctionCtx, inputs: Tensor, packed: "Packed") -> Tensor:
        ctx.packed = packed  # type: ignore[attr-defined]
        with torch.autocast(inputs.device.type, enabled=False):  # a kernel that autocast does not know
            bias = None if packed.bias is None else packed.bias.to(inputs.dtype)
            return nn.functional.linear(inputs, packed.unpacked(inputs.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.packed.unpacked(gradient.dtype), None


@final
class Packed(nn.Module):
    """What bitsandbytes' `Linear4bit` has in memory, without values.

    Attributes:
        weight: two weights a byte, `[(O * I + 1) // 2, 1]`.
        scales: 8 bits per block of weights.
        scales_of_scales: float32 per block of those.
        tables: the values of 4-bit and of 8-bit codes, and what all scales lack.
        bias: `[O]`, or None.
    """

    weight: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        """Of the same sizes."""
        super().__init__()
        self.in_features, self.out_features, self.dtype = linear.in_features, linear.out_features, linear.weight.dtype
        device, blocks = linear.weight.device, -(-linear.weight.numel() // BLOCK)
        self.register_buffer("weight", torch.zeros(-(-linear.weight.numel() // 2), 1, dtype=torch.uint8, device=device))
        self.register_buffer("scales", torch.zeros(blocks, dtype=torch.uint8, device=device))
        self.register_buffer(
            "scales_of_scales", torch.zeros(-(-blocks // SCALES_BLOCK), dtype=torch.float32, device=device)
        )
        self.register_buffer("tables", torch.zeros(16 + 256 + 1, dtype=torch.float32, device=device))
        self.register_buffer("bias", linear.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """`[..., I]` to `[..., O]`."""
        return _Product.apply(inputs, self)  # type: ignore[no-any-return, no-untyped-call]

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """`[O, I]`: as `dequantize_4bit`, which unpacks the scales first, then the weight, in the model's type."""
        scales = self.scales.float()
        weight = torch.zeros(self.out_features, self.in_features, dtype=self.dtype, device=scales.device)
        del scales
        return weight.to(dtype)


@final
class Adapted(nn.Module):
    """A linear layer that stays as it is, and a low-rank one beside it that is trained; no dropout (PEFT's default).
    Weight and bias are the base's, for models that look at them (T5) or multiply by them (Mamba)."""

    def __init__(self, base: "nn.Linear | Packed", rank: int) -> None:
        super().__init__()
        device = base.weight.device
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, dtype=torch.float32, device=device)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, dtype=torch.float32, device=device)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    def forward(self, inputs: Tensor) -> Tensor:
        """`[..., I]` to `[..., O]`, in the base's type."""
        result: Tensor = self.base_layer(inputs)
        dtype, is_packed = result.dtype, isinstance(self.base_layer, Packed)
        is_cast = not is_packed or not torch.is_autocast_enabled(inputs.device.type)
        if is_packed:
            result = result.clone()
        added: Tensor = self.lora_B(self.lora_A(inputs.to(torch.float32) if is_cast else inputs)) * 1.0
        if is_packed:
            return result + (added.to(dtype) if is_cast else added)
        return (result + added).to(dtype)
