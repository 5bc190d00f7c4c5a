"""Compressed checkpoints read a layer at a time: the outputs are those of the model that was compressed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from compressed_tensors.quantization.utils import helpers as ranges
from helpers import CPU, compress, recipe, tiny_llama, tiny_mixtral, token_batches
from torch import nn

from lightning_compress.data import perplexity
from lightning_compress.errors import CompressionError
from lightning_compress.export.packed import checkpoint_source
from lightning_compress.memory.placement import Placement
from lightning_compress.memory.source import is_on_meta, parameters_on_meta

INT8 = {"num_bits": 8, "strategy": "tensor", "dynamic": False}
PER_TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True}


def like(model: nn.Module) -> nn.Module:
    with parameters_on_meta():
        return type(model)._from_config(model.config, dtype=model.dtype).eval()  # type: ignore[attr-defined,no-any-return]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("weights", "inputs"),
    [
        ({"num_bits": 4, "strategy": "group", "group_size": 16}, None),
        ({"num_bits": 3, "strategy": "channel", "symmetric": False}, None),
        ({"num_bits": 8, "strategy": "channel"}, INT8),
        ({"num_bits": 8, "strategy": "channel"}, PER_TOKEN),
        (PRESET_SCHEMES["NVFP4"]["weights"].model_dump(), PRESET_SCHEMES["NVFP4"]["input_activations"].model_dump()),
    ],
    ids=["w4", "w3 asymmetric", "w8a8 static", "w8a8 dynamic", "nvfp4"],
)
@pytest.mark.filterwarnings("ignore:.*reads FP4 and MX weights as bfloat16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_perplexity_is_that_of_the_quantized_model(
    weights: dict[str, Any], inputs: dict[str, Any] | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Seen to fail without the quantization of inputs, and with zero points left out."""
    model, batches = tiny_llama(2, dtype=dtype), token_batches()
    scheme = {"weights": weights} | ({"input_activations": inputs} if inputs else {})
    given = {"modifiers": [{"algorithm": "gptq", "scheme": scheme}]}
    compress(model, batches, given, tmp_path / "out")
    empty = like(model)
    placement = Placement(CPU, checkpoint_source(empty, tmp_path / "out"))
    assert perplexity(empty, batches, placement) == perplexity(model, batches)
    assert is_on_meta(empty)


def test_nothing_fake_is_left_by_the_trace(tmp_path: Path) -> None:
    """compressed-tensors caches the range of a quantization, as a tensor of whoever asks first. Seen to fail, with
    logits that are fake tensors, where hooks on inputs take part in the trace."""
    model, batches = tiny_llama(1), token_batches()
    scheme = {"weights": {"num_bits": 8, "strategy": "channel"}, "input_activations": PER_TOKEN}
    compress(model, batches, {"modifiers": [{"algorithm": "rtn", "scheme": scheme}]}, tmp_path / "out")
    expected = perplexity(model, batches)
    empty = like(model)
    placement = Placement(CPU, checkpoint_source(empty, tmp_path / "out"))
    cached = getattr(ranges, "_calculate_range", None)  # not in every version
    if cached is not None:
        cached.cache_clear()
    assert perplexity(empty, batches, placement) == expected


def test_modules_that_transformers_renames_and_stacks(tmp_path: Path) -> None:
    """Attention is quantized, experts stay as they are, stacked in memory and apart in the file."""
    model, batches = tiny_mixtral(2, 4), token_batches()
    compress(model, batches, recipe(4, ignore=["lm_head", "re:.*gate$"]), tmp_path / "out", verify=False)
    empty = like(model)
    placement = Placement(CPU, checkpoint_source(empty, tmp_path / "out"))
    assert perplexity(empty, batches, placement) == perplexity(model, batches)


def test_an_uncompressed_folder_is_read_as_it_is(tmp_path: Path) -> None:
    model, batches = tiny_llama(2), token_batches()
    model.save_pretrained(tmp_path)
    empty = like(model)
    placement = Placement(CPU, checkpoint_source(empty, tmp_path))
    assert perplexity(empty, batches, placement) == perplexity(model, batches)


def test_what_cannot_be_read(tmp_path: Path) -> None:
    model = tiny_llama(1)
    model.save_pretrained(tmp_path)
    (tmp_path / "INCOMPLETE").touch()
    with pytest.raises(CompressionError, match="unfinished compression"):
        checkpoint_source(like(model), tmp_path)
    (tmp_path / "INCOMPLETE").unlink()
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    with pytest.raises(CompressionError, match="quantized by 'gptq'; only"):
        checkpoint_source(like(model), tmp_path)
