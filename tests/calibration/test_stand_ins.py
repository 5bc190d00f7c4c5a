"""What stands in for what cannot run on fake tensors takes what that takes."""

import pytest
import torch
from compressed_tensors.quantization import preset_name_to_scheme
from torch import nn

from lightning_compress.calibration.quantized import InputQuantizer
from lightning_compress.calibration.stand_ins import quantizing_bytes
from lightning_compress.calibration.static_inputs import StaticInput
from lightning_compress.memory.tracker import LiveMemory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("preset", ["INT8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP8", "MXFP4", "NVFP4"])
def test_quantizing_an_input(preset: str, dtype: torch.dtype) -> None:
    """Seen to fail: with four copies of FP4, and with those of NVFP4 in the input's dtype."""
    inputs = preset_name_to_scheme(preset, []).input_activations
    assert inputs is not None
    scale, global_scale = torch.tensor([0.1]).to(dtype), torch.tensor([300.0])
    static = StaticInput(scale if preset == "FP8" else None, None, global_scale if preset == "NVFP4" else None)
    x, memory = torch.randn(4, 256, 512).to(dtype), LiveMemory()
    with torch.no_grad(), memory:
        memory.ignore(x)
        InputQuantizer(inputs, static)(nn.Linear(512, 8, dtype=dtype), (x,), {})
    found = quantizing_bytes(inputs, x)
    assert found * 0.8 <= memory.peak_bytes <= found * 1.02, "but for the scales of groups"
