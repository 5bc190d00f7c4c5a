"""Weights in FP8 and MXFP4 against their definitions in float64, and transformers' own conversion."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from lightning_compress.errors import CompressionError
from lightning_compress.memory.dequantized import Dequantized, dequantized
from lightning_compress.memory.files import StoredTensor, stored_tensors

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
FLOAT8 = torch.float8_e4m3fn


def read_from(
    folder: Path, tensors: dict[str, Tensor], config: dict[str, object] = FP8, dtype: torch.dtype = torch.float32
) -> dict[str, StoredTensor | Dequantized]:
    save_file(tensors, folder / "model.safetensors")
    return dequantized(stored_tensors(folder), config, dtype)


def expected(values: Tensor, scale: Tensor, height: int, width: int) -> Tensor:
    """An element times the scale of the block that it is in, one by one."""
    result = torch.empty(values.shape, dtype=torch.float64)
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            result[row, column] = values[row, column].double() * scale[row // height, column // width].double()
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scale_for_each_block(tmp_path: Path, dtype: torch.dtype) -> None:
    """As DeepSeek's `kv_a_proj_with_mqa` [576, 7168] has it, the last block is cut off."""
    values, scale = torch.randn(200, 300).to(FLOAT8), torch.rand(2, 3)
    found = read_from(tmp_path, {"a.weight": values, "a.weight_scale_inv": scale, "b": torch.ones(3)}, dtype=dtype)
    assert found.keys() == {"a.weight", "b"}
    assert (found["a.weight"].shape, found["a.weight"].dtype) == ((200, 300), dtype)
    torch.testing.assert_close(found["a.weight"].read(), expected(values, scale, 128, 128).to(dtype), rtol=1e-6, atol=0)


def test_more_rows_than_are_computed_at_once(tmp_path: Path) -> None:
    values, scale = torch.randn(1100, 4096).to(FLOAT8), torch.rand(9, 32)
    read = read_from(tmp_path, {"a": values, "a_scale_inv": scale})["a"].read()
    rows = torch.arange(1100) // 128
    assert torch.equal(read, values.float() * scale[rows].repeat_interleave(128, dim=1))


def test_stacked_experts_and_a_part_of_them(tmp_path: Path) -> None:
    values, scale = torch.randn(3, 130, 140).to(FLOAT8), torch.rand(3, 2, 2)
    (stack,) = read_from(tmp_path, {"up_proj": values, "up_proj_scale_inv": scale}).values()
    assert isinstance(stack, Dequantized)
    read = stack.read()
    for at in range(3):
        torch.testing.assert_close(read[at].double(), expected(values[at], scale[at], 128, 128), rtol=1e-6, atol=0)
    assert torch.equal(stack.part(1, 3).read(), read[1:])


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_for_a_matrix(tmp_path: Path, shape: tuple[int, ...]) -> None:
    values, scale = torch.randn(20, 30).to(FLOAT8), torch.full(shape, 0.25)
    config: dict[str, object] = {"quant_method": "fp8", "weight_block_size": None}
    (found,) = read_from(tmp_path, {"a": values, "a_scale_inv": scale}, config).values()
    assert torch.equal(found.read(), values.float() / 4)


@pytest.mark.parametrize("stored", [torch.uint8, torch.float8_e8m0fnu])
def test_scales_that_are_exponents(tmp_path: Path, stored: torch.dtype) -> None:
    values, exponents = torch.randn(20, 64).to(FLOAT8), torch.tensor([[120, 130]] * 20, dtype=torch.uint8)
    config: dict[str, object] = {"quant_method": "fp8", "weight_block_size": [1, 32]}
    (found,) = read_from(tmp_path, {"a": values, "a_scale_inv": exponents.view(stored)}, config).values()
    factors = torch.tensor([2.0**-7, 2.0**3]).repeat_interleave(32)
    assert torch.equal(found.read(), values.float() * factors)


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    blocks = torch.randint(0, 256, (3, 10, 4, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 10, 4), dtype=torch.uint8)
    stored = {"experts.up_blocks": blocks, "experts.up_scales": scales, "experts.up_bias": torch.ones(3, 10)}
    found = read_from(tmp_path, stored, {"quant_method": "mxfp4"}, torch.bfloat16)
    assert found.keys() == {"experts.up", "experts.up_bias"}
    stack = found["experts.up"]
    assert isinstance(stack, Dequantized)
    assert stack.shape == (3, 128, 10)
    assert torch.equal(stack.read(), convert_moe_packed_tensors(blocks, scales))
    assert torch.equal(stack.part(2, 3).read(), stack.read()[2:])


def test_a_scale_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CompressionError, match=r"a.weight \[2, 3\] in .* is float8_e4m3fn, and its scale, .* is not"):
        read_from(tmp_path, {"a.weight": torch.ones(2, 3).to(FLOAT8)})


@pytest.mark.parametrize(
    ("values", "scale"),
    [((200, 300), (3, 3)), ((200, 300), (2, 7)), ((2, 200, 300), (2, 3)), ((200,), (2,)), ((2, 200, 300), (1,))],
)
def test_scales_of_no_blocks(tmp_path: Path, values: tuple[int, ...], scale: tuple[int, ...]) -> None:
    with pytest.raises(CompressionError, match=r"a .* has a scale of \[.*\], which is none for each block of \[128"):
        read_from(tmp_path, {"a": torch.ones(values).to(FLOAT8), "a_scale_inv": torch.ones(scale)})


def test_other_layouts_of_mxfp4(tmp_path: Path) -> None:
    stored = {"a_blocks": torch.zeros(4, 2, 16, dtype=torch.uint8), "a_scales": torch.zeros(4, 2, dtype=torch.uint8)}
    with pytest.raises(CompressionError, match=r"a_blocks \[4, 2, 16\] and a_scales \[4, 2\].* are not laid out as"):
        read_from(tmp_path, stored, {"quant_method": "mxfp4"})
