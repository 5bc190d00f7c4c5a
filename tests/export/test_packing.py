"""Packing keeps codes and scales exactly, and takes the bits it should."""

import threading
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, preset_name_to_scheme
from helpers import IS_RECENT, modifier, recipe, tiny_llama, tiny_mixtral, weights
from torch import nn
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from lightning_compress.algorithms.base import split
from lightning_compress.algorithms.rtn import Rtn
from lightning_compress.calibration.quantized import QuantizedModule
from lightning_compress.calibration.static_inputs import static_input
from lightning_compress.export.packing import (
    checkpoint_names,
    fails_to_initialize,
    nbytes,
    pack,
    quantization_config,
    scheme_format,
    unpack,
)
from lightning_compress.export.verify import why_unreadable
from lightning_compress.graph.unfold import unfolded
from lightning_compress.recipe.load import load_recipe
from lightning_compress.recipe.resolve import resolve
from lightning_compress.statistics import MinMax


def quantized(scheme: QuantizationScheme, dtype: torch.dtype, num_channels: int = 96) -> QuantizedModule:
    weight = (torch.randn(64, num_channels) + 0.2).to(dtype)
    assert scheme.weights is not None
    (solved,) = split(Rtn().solve(weight, {}, scheme.weights, dtype), [64])
    return QuantizedModule("linear", scheme, solved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strategy", ["group", "channel", "tensor"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("num_bits", range(2, 9))
def test_unpacking_gives_the_dequantized_weight(
    num_bits: int, symmetric: bool, strategy: str, dtype: torch.dtype
) -> None:
    """Broken once by packing the dequantized weight in its own dtype (bf16 at 8 bits fails)."""
    of_weights = weights(num_bits, symmetric=symmetric, strategy=strategy)
    module = quantized(QuantizationScheme.model_validate({"targets": [], "weights": of_weights}), dtype)
    packed = pack(module)
    assert torch.equal(unpack(packed, module.scheme), module.dequantized())
    assert packed["weight_packed"].nbytes == 64 * 96 * num_bits // 8
    assert packed["weight_scale"].dtype == dtype
    assert ("weight_zero_point" in packed) == (not symmetric)
    assert nbytes(packed) == sum(tensor.nbytes for tensor in packed.values())
    assert all(tensor.is_contiguous() for tensor in packed.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("preset", "format", "num_bytes"),
    [
        ("FP8", "float-quantized", 64 * 128),
        ("FP8_DYNAMIC", "float-quantized", 64 * 128),
        ("FP8_BLOCK", "float-quantized", 64 * 128),
        ("MXFP8A16", "mxfp8-quantized", 64 * 128),
        ("MXFP4A16", "mxfp4-pack-quantized", 64 * 128 // 2),
        ("NVFP4A16", "nvfp4-pack-quantized", 64 * 128 // 2),
    ],
)
def test_floats_in_each_of_their_formats(preset: str, format: str, num_bytes: int, dtype: torch.dtype) -> None:
    """Seen to fail: with scales of NVFP4 packed as they multiply; with weights of FP4 read as float32."""
    module = quantized(preset_name_to_scheme(preset, []), dtype, 128)
    packed = pack(module)
    assert scheme_format(module.scheme) == format
    weight, stored = unpack(packed, module.scheme), module.dequantized()
    assert (weight.dtype, stored.dtype) == 2 * (torch.bfloat16 if "FP8" not in preset or "MX" in preset else dtype,)
    assert torch.equal(weight, stored)
    assert packed["weight_packed" if "4" in preset else "weight"].nbytes == num_bytes
    few_bits = {"MXFP8A16": torch.uint8, "MXFP4A16": torch.uint8, "NVFP4A16": torch.float8_e4m3fn}
    assert packed["weight_scale"].dtype == few_bits.get(preset, dtype)


def test_static_inputs_in_floats() -> None:
    """Of FP8 the scale of the largest value; of NVFP4 what makes the largest scale of a group that of FP8."""
    seen = MinMax(1, "cpu")
    seen.update(torch.tensor([[-3.0], [7.0]]))
    found = static_input(preset_name_to_scheme("FP8", []), {MinMax: seen}, torch.float32)
    assert found.tensors == {"input_scale": torch.tensor([7 / 448])}
    found = static_input(preset_name_to_scheme("NVFP4", []), {MinMax: seen}, torch.float32)
    assert found.tensors["input_global_scale"].tolist() == pytest.approx([448 * 6 / 7])
    assert found.tensors.keys() == {"input_global_scale"}
    assert static_input(preset_name_to_scheme("FP8_DYNAMIC", []), {}, torch.float32).tensors == {}


@pytest.mark.parametrize("symmetric", [True, False])
def test_static_inputs_of_a_range_beyond_float16(symmetric: bool) -> None:
    """Seen to fail: the range of asymmetric ones was an infinity of the weights' dtype, and so was their scale."""
    inputs = {"num_bits": 8, "symmetric": symmetric, "strategy": "tensor", "dynamic": False}
    scheme = {"targets": [], "weights": weights(8, strategy="channel"), "input_activations": inputs}
    seen = MinMax(1, "cpu")
    seen.update(torch.tensor([[-40000.0], [40000.0]]))
    scale = static_input(QuantizationScheme.model_validate(scheme), {MinMax: seen}, torch.float16).scale
    assert scale is not None
    assert scale.dtype == torch.float16
    assert scale.item() == pytest.approx(80000 / 255, rel=1e-3)


def test_static_inputs_as_they_are_stored() -> None:
    """A range too small for the dtype, and a zero point that is of the rounded scale. Seen to fail: a scale of 0; the
    zero point of the exact one."""
    inputs = {"num_bits": 8, "symmetric": False, "strategy": "tensor", "dynamic": False}
    scheme = QuantizationScheme.model_validate({"targets": [], "weights": weights(8), "input_activations": inputs})
    torch.manual_seed(0)
    for low, high in (torch.rand(200, 2) * torch.tensor([-8.0, 2.0])).tolist():
        seen = MinMax(1, "cpu")
        seen.update(torch.tensor([[low], [high]]))
        found = static_input(scheme, {MinMax: seen}, torch.bfloat16)
        scale, zero_point = found.scale, found.zero_point
        assert scale is not None
        assert zero_point is not None
        assert zero_point.item() == min(round(-128 - low / scale.item()), 127)
    seen = MinMax(1, "cpu")
    seen.update(torch.tensor([[-1e-6], [1e-6]]))
    scale = static_input(scheme, {MinMax: seen}, torch.float16).scale
    assert scale is not None
    assert scale.item() > 0


def test_formats() -> None:
    assert scheme_format(load_recipe("w4a16_gptq").modifiers[0].scheme) == "pack-quantized"
    assert scheme_format(load_recipe("w8a8_gptq").modifiers[0].scheme) == "int-quantized"
    with_floats = preset_name_to_scheme("W4AFP8", [])
    assert scheme_format(with_floats) == "pack-quantized"  # which vLLM's kernel reads; compressed-tensors infers bytes
    assert scheme_format(with_floats.model_copy(update={"format": "int-quantized"})) == "int-quantized"
    assert scheme_format(preset_name_to_scheme("W4A8", [])) == "int-quantized"


def test_models_that_initialize_what_is_packed_say_dequantize() -> None:
    """T5's initializer reaches for weights of its children, Falcon's for those of its own Linears; Llama's does not.
    The model is as before, and so is the random state."""
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    t5 = T5ForConditionalGeneration(T5Config(**sizes))
    falcon = FalconForCausalLM(FalconConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32))
    for model, wanted in ((t5, True), (falcon, True), (tiny_llama(1), False)):
        before, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
        config = quantization_config(resolve(load_recipe(recipe(4)), model), model, {})
        assert config.get("dequantize", False) is wanted
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("given", "is_said"),
    [
        ({"modifiers": [modifier(4), modifier(8, targets=["re:.*wo"])]}, True),
        (recipe(scheme="NVFP4"), True),
        (recipe(4), not IS_RECENT),
        (recipe(scheme="W8A8"), False),
    ],
    ids=["two schemes", "packed, with inputs", "weights alone", "codes that are named weight"],
)
def test_what_is_initialized_packed_is_known_before(given: dict[str, Any], is_said: bool) -> None:
    """That loading such a checkpoint fails is seen by reading it back; of weights on disk this alone tells."""
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    model = T5ForConditionalGeneration(T5Config(**sizes)).to(torch.bfloat16)
    found = why_unreadable(model, resolve(load_recipe(given), model))
    assert ("initializes weights that are packed" in str(found)) is is_said


class Growing(LlamaForCausalLM):
    """As SeamlessM4T's positions do: a buffer grows when it is used, and is initialized in the size that it had."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.register_buffer("positions", torch.zeros(3))

    def _init_weights(self, module: nn.Module) -> None:
        if module is self:
            self.positions.copy_(torch.zeros(3))


def test_buffers_that_have_grown_say_nothing_of_what_is_packed() -> None:
    """Seen to fail: with the error of the initializer, of a model that had been run."""
    model = Growing(tiny_llama(1).config)
    resolved = resolve(load_recipe(recipe(scheme="W8A8")), model)
    for size in (3, 5):
        model.positions = torch.zeros(size)
        assert not fails_to_initialize(model, resolved)


def test_models_that_hold_what_cannot_be_copied() -> None:
    """Seen to fail: with the lock's error, behind the last subgraph, however often the run was started."""
    model = tiny_llama(1)
    model.model.lock, model.kept = threading.Lock(), model(torch.zeros(1, 2, dtype=torch.long)).logits
    resolved = resolve(load_recipe(recipe(4)), model)
    assert not quantization_config(resolved, model, {}).get("dequantize", False)


def test_routers_are_ignored_by_both_names() -> None:
    """Readers that have them as Linears would look for packed weights. Broken once by listing Linears alone: vLLM
    refused a Qwen3-MoE."""
    with unfolded(model := tiny_mixtral(1, 4)):
        resolved = resolve(load_recipe(recipe(4)), model)
        ignore = quantization_config(resolved, model, checkpoint_names(model))["ignore"]
    assert ignore == ["lm_head", "model.layers.0.block_sparse_moe.gate", "model.layers.0.mlp.gate"]


def test_output_embeddings_are_named_and_embeddings_targeted_by_class() -> None:
    """Neither is what the other way would find in vLLM, which refused both. Broken once: left out of the targets."""
    model = tiny_llama(1)
    config = quantization_config(resolve(load_recipe({"modifiers": [modifier(4, ignore=[])]}), model), model, {})
    groups = QuantizationConfig.model_validate(config).config_groups
    assert (groups["group_0"].targets, config["ignore"]) == (["Linear", "lm_head"], [])
    rounded = {**modifier(8, targets=["Embedding"]), "algorithm": "rtn"}
    config = quantization_config(resolve(load_recipe({"modifiers": [modifier(4), rounded]}), model), model, {})
    groups = QuantizationConfig.model_validate(config).config_groups
    assert ["model.embed_tokens", "Embedding"] in [group.targets for group in groups.values()]


def test_config_of_one_and_of_several_schemes() -> None:
    model = tiny_llama(1)
    config = quantization_config(resolve(load_recipe(recipe(4)), model), model, {})
    assert QuantizationConfig.model_validate(config).config_groups["group_0"].targets == ["Linear"]
    assert (config["format"], config["ignore"], config["quantization_status"]) == (
        "pack-quantized",
        ["lm_head"],
        "compressed",
    )
    given = {"modifiers": [modifier(4), modifier(targets=["re:.*down_proj"], scheme="W8A8")]}
    config = quantization_config(resolve(load_recipe(given), model), model, {"model.layers.0.mlp.down_proj": "renamed"})
    groups = QuantizationConfig.model_validate(config).config_groups
    assert groups["group_1"].targets == ["renamed", "model.layers.0.mlp.down_proj"]
    assert len(groups["group_0"].targets) == 6
    assert (config["format"], groups["group_0"].format, groups["group_1"].format) == (
        "mixed-precision",
        "pack-quantized",
        "int-quantized",
    )
