"""Models that were released in FP8 or MXFP4: compressed as the floats that they stand for."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import contents
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, LlamaConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from lightning_compress import Compressor, parameters_on_meta

from .conftest import GPTQ, Command, loader, refused

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
EXPERTS = {"num_experts_per_tok": 2, "head_dim": 16}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
MODELS = {
    "llama": LlamaConfig(**SIZES),
    "deepseek_v3": DeepseekV3Config(
        **SIZES, **MLA, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, n_shared_experts=1,
        moe_intermediate_size=32, first_k_dense_replace=1,
    ),
    "gpt_oss": GptOssConfig(**SIZES, **EXPERTS, num_local_experts=4, sliding_window=8),
}  # fmt: skip
BLOCK = (40, 24)  # neither divides a width
SMALL = ["data.num_samples=4", "data.max_length=32", "data.batch_size=2", "trainer=cpu"]


def released(folder: Path, kind: str) -> tuple[Path, Path]:
    """A model's checkpoint as it is released, and one that holds the floats it stands for."""
    torch.manual_seed(0)
    plain, quantized = folder / "plain", folder / "released"
    AutoModelForCausalLM.from_config(MODELS[kind], dtype=torch.bfloat16).save_pretrained(plain)
    return plain, as_released(plain, quantized, "mxfp4" if kind == "gpt_oss" else "fp8")


def as_released(plain: Path, quantized: Path, method: str) -> Path:
    """Quantizes a checkpoint, and rounds the weights of the one it was made from."""
    stored: dict[str, Tensor] = {}
    rounded: dict[str, Tensor] = {}
    for name, value in load_file(plain / "model.safetensors").items():
        parts = {name: value}
        if method == "mxfp4" and name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = value.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(120, 124, blocks.shape[:-1], dtype=torch.uint8)
            parts = {f"{name}_blocks": blocks, f"{name}_scales": scales}
            value = convert_moe_packed_tensors(blocks, scales)
        elif method == "fp8" and name.endswith("proj.weight"):
            codes, scale = in_float8(value)
            parts = {name: codes, f"{name}_scale_inv": scale}
            value = (codes.float() * of_elements(scale, value.shape)).to(value.dtype)
        stored.update(parts)
        rounded[name] = value.contiguous()
    shutil.copytree(plain, quantized)
    save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    save_file(rounded, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "weight_block_size": BLOCK}
    (quantized / "config.json").write_text(json.dumps(config))
    return quantized


def in_float8(value: Tensor) -> tuple[Tensor, Tensor]:
    (largest,) = torch.nn.functional.max_pool2d(value.abs().float()[None], BLOCK, BLOCK, ceil_mode=True)
    scale = largest / torch.finfo(torch.float8_e4m3fn).max
    return (value.float() / of_elements(scale, value.shape)).to(torch.float8_e4m3fn), scale


def of_elements(scale: Tensor, shape: torch.Size) -> Tensor:
    return scale[torch.arange(shape[0]) // BLOCK[0]][:, torch.arange(shape[1]) // BLOCK[1]]


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:transformers' from_pretrained will not read:UserWarning")  # gpt-oss' experts
@pytest.mark.parametrize("kind", MODELS)
def test_it_is_the_checkpoint_of_the_floats(make_trainer: Any, tmp_path: Path, kind: str) -> None:
    """Experts that are stored one by one, or stacked; blocks that are cut off."""
    plain, quantized = released(tmp_path, kind)
    for weights in (plain, quantized):
        config = AutoConfig.from_pretrained(weights)
        if weights == quantized:
            del config.quantization_config
        with parameters_on_meta():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        report = Compressor(make_trainer(strategy="sequential_onload")).compress(
            model, dataloaders=loader(48), recipe=GPTQ, output_dir=tmp_path / f"{weights.name}-w4", weights=weights
        )
        assert any("dequantized" in note for note in report.notes) == (weights == quantized)
    assert contents(tmp_path / "plain-w4") == contents(tmp_path / "released-w4")


@pytest.fixture
def fp8(checkpoint: Path, tmp_path: Path) -> Path:
    plain = tmp_path / "plain"
    shutil.copytree(checkpoint, plain)
    return as_released(plain, tmp_path / "released", "fp8")


@pytest.mark.slow
def test_from_the_command(command: Command, fp8: Path, tmp_path: Path) -> None:
    """Planned, compressed and measured; what is written is read without the key."""
    arguments = (f"model.path={fp8}", *SMALL)
    assert "weights" in command("estimate", f"model.path={fp8}", "model.dequantize=true", "job=inference")
    command("compress", *arguments, "model.dequantize=true", "recipe=w4a16_rtn", f"output_dir={tmp_path / 'w4'}")
    (note,) = json.loads((tmp_path / "w4" / "report.json").read_text())["notes"]
    assert "are fp8: the model that is compressed" in note
    command("compress", f"model.path={tmp_path / 'plain'}", "model.load=disk", *SMALL, "recipe=w4a16_rtn",
            f"output_dir={tmp_path / 'same'}")  # fmt: skip
    assert contents(tmp_path / "w4") == contents(tmp_path / "same")
    data = ("data=docs_test", "data.num_samples=4", "data.max_length=32", "trainer=cpu")
    values = [command("evaluate", f"model.path={path}", "model.load=disk", *data) for path in (fp8, tmp_path / "plain")]
    assert values[0] == values[1]


def test_without_the_key(command: Command, fp8: Path, tmp_path: Path) -> None:
    given = (f"model.path={fp8}", *SMALL, f"output_dir={tmp_path / 'out'}")
    assert "model.dequantize=true" in refused(command, "compress", *given, "model.load=disk")
    if find_spec("accelerate") is None:  # with which transformers does it in memory
        assert "model.dequantize=true" in refused(command, "compress", *given)


def test_what_cannot_be_dequantized(command: Command, fp8: Path, checkpoint: Path, tmp_path: Path) -> None:
    given = ("compress", *SMALL, f"output_dir={tmp_path / 'out'}", "model.dequantize=true")
    assert "is not quantized; leave it out" in refused(command, *given, f"model.path={checkpoint}")
    assert "leave model.load=memory out" in refused(command, *given, f"model.path={fp8}", "model.load=memory")
    config = json.loads((fp8 / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "awq"
    (fp8 / "config.json").write_text(json.dumps(config))
    assert "is quantized by awq" in refused(command, *given, f"model.path={fp8}")
