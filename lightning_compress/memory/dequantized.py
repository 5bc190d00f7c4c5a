"""Weights that a model was released with in 8 or 4 bits, as the floats they stand for: read a tensor at a time.

Large models are often published in no other form: in float8 with a scale per block (DeepSeek-V3, arXiv 2412.19437,
section 3.3; transformers' `FineGrainedFP8Config`), or with experts in MXFP4 (gpt-oss; OCP Microscaling formats 1.0).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor

from lightning_compress.errors import CompressionError
from lightning_compress.memory.buffers import host_buffer
from lightning_compress.memory.files import StoredTensor

METHODS = ("fp8", "mxfp4")
"""Of the `quant_method`s in a `config.json`, those read here."""
_SCALE_INV = "_scale_inv"
_BLOCKS, _SCALES = "_blocks", "_scales"
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_AT_ONCE = 1 << 22
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class BlockScaled:
    """A matrix in float8, or a stack of such, and what each block of it is multiplied by.

    Attributes:
        values: [..., O, I].
        scale: [..., O / block rows, I / block columns], both rounded up; of a matrix also one number.
        block: rows and columns, of which the last ones may be fewer.
        dtype: that it is read in.
    """

    values: StoredTensor
    scale: StoredTensor
    block: tuple[int, int]
    dtype: torch.dtype
    is_matrix = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight."""
        return self.values.shape

    def part(self, start: int, stop: int) -> "BlockScaled":
        """Of a stack the matrices from `start` up to `stop`."""
        return replace(self, values=self.values.part(start, stop), scale=self.scale.part(start, stop))

    def read(self) -> Tensor:
        """values x scale, computed in float32."""
        *_, rows, columns = self.shape
        values = self.values.read().reshape(-1, rows, columns)
        scale = _floats(self.scale.read())
        scale = scale.reshape(len(values), *(scale.shape[-2:] if scale.numel() > len(values) else (1, 1)))
        result = _buffer(values.shape, self.dtype)
        height, width = self.block
        step = height * max(1, _AT_ONCE // (height * columns))
        for at, matrix in enumerate(values):
            by_columns = scale[at].repeat_interleave(width, dim=1)[:, :columns]
            for start in range(0, rows, step):
                part = matrix[start : start + step].float()
                first = start // height
                by_rows = by_columns[first : first + ceil(len(part) / height)].repeat_interleave(height, dim=0)
                result[at, start : start + step] = part.mul_(by_rows[: len(part)])
        return result.reshape(self.shape)


@dataclass(frozen=True)
class Mxfp4Stack:
    """Experts as gpt-oss stores them, 32 input channels to a scale.

    Attributes:
        blocks: [E, O, I / 32, 16], two values to a byte, the first one in its lower half.
        scales: [E, O, I / 32], exponents.
        dtype: that it is read in.
    """

    blocks: StoredTensor
    scales: StoredTensor
    dtype: torch.dtype
    is_matrix = False

    @property
    def shape(self) -> tuple[int, ...]:
        """[E, I, O]: the model multiplies with inputs on the left."""
        experts, outputs, groups, size = self.blocks.shape
        return experts, groups * size * 2, outputs

    def part(self, start: int, stop: int) -> "Mxfp4Stack":
        """The experts from `start` up to `stop`."""
        return replace(self, blocks=self.blocks.part(start, stop), scales=self.scales.part(start, stop))

    def read(self) -> Tensor:
        """Their floats, exact in any dtype of 16 bits and more."""
        blocks, scales = self.blocks.read(), self.scales.read()
        table = torch.tensor(_E2M1, dtype=torch.float32)
        result = _buffer(self.shape, self.dtype)
        for at, (packed, exponents) in enumerate(zip(blocks, scales, strict=True)):
            pairs = torch.stack((packed & 15, packed >> 4), dim=-1)  # [O, I / 32, 16, 2]
            values = table[pairs.flatten(2).int()] * _floats(exponents).unsqueeze(-1)
            result[at] = values.flatten(1).t()
        return result


Dequantized = BlockScaled | Mxfp4Stack


def dequantized(
    stored: Mapping[str, StoredTensor], config: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, StoredTensor | Dequantized]:
    """The tensors of the model that was quantized, by the names it has for them.

    Args:
        stored: what the checkpoint holds.
        config: the `quantization_config` of its config.json, of one of `METHODS`.
        dtype: of the weights that are dequantized.

    Raises:
        CompressionError: a tensor in float8 without its scale, or one of a shape that does not fit.
    """
    found: dict[str, StoredTensor | Dequantized] = dict(stored)
    for key, tensor in stored.items():
        if tensor.dtype in _FLOAT8 and not key.endswith(_SCALE_INV):
            found[key] = _block_scaled(key, tensor, found.pop(key + _SCALE_INV, None), config, dtype)
        elif key.endswith(_BLOCKS) and key.removesuffix(_BLOCKS) + _SCALES in stored:
            name = key.removesuffix(_BLOCKS)
            found[name] = _mxfp4_stack(name, stored[key], stored[name + _SCALES], dtype)
            del found[key], found[name + _SCALES]
    return found


def _block_scaled(
    key: str, values: StoredTensor, scale: object, config: Mapping[str, Any], dtype: torch.dtype
) -> BlockScaled:
    if not isinstance(scale, StoredTensor):
        raise CompressionError(
            f"{key} {list(values.shape)} in {values.file} is {_name(values.dtype)}, and its scale, {key}{_SCALE_INV}, "
            "is not in the checkpoint. Convert it to bfloat16 with its publisher's script, and give that."
        )
    rows, columns = values.shape[-2:] if len(values.shape) > 1 else (0, 0)
    is_one = prod(scale.shape) == 1 and len(values.shape) == 2
    counts = (1, 1) if is_one else scale.shape[-2:]
    height, width = config.get("weight_block_size") or (None, None)
    fits = is_one or (len(scale.shape) == len(values.shape) and scale.shape[:-2] == values.shape[:-2])
    block = (_block(rows, counts[0], height), _block(columns, counts[1], width)) if fits and rows else (0, 0)
    if 0 in block:
        raise CompressionError(
            f"{key} {list(values.shape)} in {values.file} has a scale of {list(scale.shape)}, which is none for each "
            f"block of {[height, width]}. Convert it to bfloat16 with its publisher's script, and give that."
        )
    return BlockScaled(values, scale, block, dtype)


def _block(size: int, count: int, given: int | None) -> int:
    """How many rows or columns a scale is for, of so many, with so many scales; 0: that cannot be said."""
    if given is not None and ceil(size / given) == count:
        return given
    return size // count if count and size % count == 0 else 0


def _mxfp4_stack(name: str, blocks: StoredTensor, scales: StoredTensor, dtype: torch.dtype) -> Mxfp4Stack:
    if len(blocks.shape) != 4 or blocks.shape[:-1] != scales.shape or blocks.dtype != torch.uint8:
        raise CompressionError(
            f"{name}{_BLOCKS} {list(blocks.shape)} and {name}{_SCALES} {list(scales.shape)} in {blocks.file} are not "
            "laid out as gpt-oss' experts are, [E, O, I / 32, 16] and [E, O, I / 32]."
        )
    return Mxfp4Stack(blocks, scales, dtype)


def _floats(scale: Tensor) -> Tensor:
    """A scale in float32; bytes are exponents of two."""
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).float()


def _buffer(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return host_buffer(prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
