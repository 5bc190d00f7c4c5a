"""Packing keeps codes and scales exactly, and takes the bits it should."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from helpers import modifier, recipe, tiny_llama, tiny_mixtral, weights
from transformers import FalconConfig, FalconForCausalLM, T5Config, T5ForConditionalGeneration

from lightning_compress.algorithms.rtn import Rtn
from lightning_compress.calibration.solve import QuantizedModule
from lightning_compress.calibration.static_inputs import static_input
from lightning_compress.export.packing import (
    checkpoint_names,
    nbytes,
    pack,
    quantization_config,
    scheme_format,
    unpack,
)
from lightning_compress.graph.unfold import unfolded
from lightning_compress.recipe.load import load_recipe
from lightning_compress.recipe.resolve import resolve
from lightning_compress.statistics import MinMax


def quantized(num_bits: int, symmetric: bool, strategy: str, dtype: torch.dtype) -> QuantizedModule:
    scheme = QuantizationScheme.model_validate(
        {"targets": [], "weights": weights(num_bits, symmetric=symmetric, strategy=strategy)}
    )
    weight = (torch.randn(64, 96) + 0.2).to(dtype)
    assert scheme.weights is not None
    solved = Rtn().solve(weight, {}, scheme.weights, dtype)
    if strategy == "tensor":
        zero_point = None if solved.zero_point is None else solved.zero_point[:1].reshape(1)
        solved = type(solved)(**{**vars(solved), "scale": solved.scale[:1].reshape(1), "zero_point": zero_point})
    return QuantizedModule("linear", scheme, solved, None, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strategy", ["group", "channel", "tensor"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("num_bits", range(2, 9))
def test_unpacking_gives_the_dequantized_weight(
    num_bits: int, symmetric: bool, strategy: str, dtype: torch.dtype
) -> None:
    """Broken once by packing the dequantized weight in its own dtype (bf16 at 8 bits fails)."""
    module = quantized(num_bits, symmetric, strategy, dtype)
    packed = pack(module)
    assert torch.equal(unpack(packed, module.scheme), module.dequantized())
    assert packed["weight_packed"].nbytes == 64 * 96 * num_bits // 8
    assert packed["weight_scale"].dtype == dtype
    assert ("weight_zero_point" in packed) == (not symmetric)
    assert nbytes(packed) == sum(tensor.nbytes for tensor in packed.values())
    assert all(tensor.is_contiguous() for tensor in packed.values())


@pytest.mark.parametrize("symmetric", [True, False])
def test_static_inputs_of_a_range_beyond_float16(symmetric: bool) -> None:
    """Seen to fail: the range of asymmetric ones was an infinity of the weights' dtype, and so was their scale."""
    inputs = {"num_bits": 8, "symmetric": symmetric, "strategy": "tensor", "dynamic": False}
    scheme = {"targets": [], "weights": weights(8, strategy="channel"), "input_activations": inputs}
    seen = MinMax(1, "cpu")
    seen.update(torch.tensor([[-40000.0], [40000.0]]))
    scale, _ = static_input(QuantizationScheme.model_validate(scheme), {MinMax: seen}, torch.float16)
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
        scale, zero_point = static_input(scheme, {MinMax: seen}, torch.bfloat16)
        assert scale is not None
        assert zero_point is not None
        assert zero_point.item() == min(round(-128 - low / scale.item()), 127)
    seen = MinMax(1, "cpu")
    seen.update(torch.tensor([[-1e-6], [1e-6]]))
    scale, _ = static_input(scheme, {MinMax: seen}, torch.float16)
    assert scale is not None
    assert scale.item() > 0


def test_formats() -> None:
    assert scheme_format(load_recipe("w4a16_gptq").modifiers[0].scheme) == "pack-quantized"
    assert scheme_format(load_recipe("w8a8_gptq").modifiers[0].scheme) == "int-quantized"


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
