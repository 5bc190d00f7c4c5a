"""Writes what `vllm_check.py` compares: small trained models, each compressed by several recipes, and prompts.

    python benchmarks/_vllm_inputs.py FOLDER [--train-steps N]

FOLDER/MODEL/original, FOLDER/MODEL/RECIPE   checkpoints in bfloat16; models 256 wide, 2 layers, heads of 64
FOLDER/cases.json   {"prompts": windows of the held-out documentation [4, 64], "dtypes": {MODEL: to serve it in}}
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

from lightning_compress import Compressor
from lightning_compress.data import DocsConfig, calibration_dataloader, evaluation_dataloader

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from finetune_then_compress import LanguageModel, build_tokenizer, model_config

WIDTH, LENGTH, BATCH, NUM_SAMPLES = 256, 128, 8, 16
NUM_PROMPTS, PROMPT_LENGTH = 4, 64
CHANNEL = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
STATIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}


def modifier(scheme: str | dict[str, Any], **others: object) -> dict[str, Any]:
    return {"algorithm": "gptq", "scheme": scheme, "targets": ["Linear"], **others}


def embedded(scheme: dict[str, Any]) -> list[dict[str, Any]]:
    return [modifier("W4A16"), {"algorithm": "rtn", "scheme": scheme, "targets": ["Embedding"]}]


W8 = {"weights": {**CHANNEL, "strategy": "group", "group_size": 128}}
MODIFIERS: dict[str, list[dict[str, Any]]] = {
    "w4_channel": [modifier({"weights": {**CHANNEL, "num_bits": 4}})],
    "w4_asymmetric": [modifier("W4A16_ASYM")],
    "w4_lm_head": [modifier("W4A16", ignore=[])],
    "w4_embedding4": [{"algorithm": "rtn", "scheme": "W4A16", "targets": ["Embedding"]}, modifier("W4A16")],
    "w4_embedding8": embedded(W8),
    "w4_embedding8_packed": embedded({**W8, "format": "pack-quantized"}),
    "w8_channel": [modifier({"weights": {**CHANNEL, "group_size": -1}})],  # of 8-bit experts vLLM 0.24 takes no null
    "w8a8_static": [modifier({"weights": CHANNEL, "input_activations": STATIC})],
    "fp8_static": [modifier("FP8")],
    "fp8_block": [modifier("FP8_BLOCK")],
    "mxfp4": [modifier("MXFP4")],
    "mxfp8": [modifier("MXFP8")],
}
"""Recipes that are not shipped, by name."""
INTEGERS = ["w4a16_gptq", "w3a16_gptq", "w2a16_best", "w8a16_rtn", "w4_mixed_w8", "w8a8_gptq"]
FLOATS = ["fp8_dynamic_rtn", "mxfp4a16_gptq", "nvfp4a16_gptq", "nvfp4_gptq"]
OF_FLOATS = ["fp8_static", "fp8_block", "mxfp4", "mxfp8"]
RECIPES: dict[str, list[str]] = {
    "llama": [*INTEGERS, *(name for name in MODIFIERS if name not in OF_FLOATS)],
    "llama_floats": [*FLOATS, *OF_FLOATS],
    "qwen3": ["w4a16_gptq", "w4_mixed_w8", "w8a8_gptq", "w4_asymmetric"],
    "gemma3_text": ["w4a16_gptq", "w8a8_gptq"],
    "gpt2": ["w4a16_gptq", "w4_mixed_w8"],
    "qwen3_moe": ["w4a16_gptq", "w8a16_rtn", "w8_channel", "w8a8_gptq", "w4_asymmetric"],
    "qwen3_moe_floats": [*FLOATS, "fp8_static", "fp8_block"],
    "mixtral": ["w4a16_gptq", "w3a16_gptq", "w8a8_gptq"],
}

IN_BFLOAT16 = ("gemma3_text", "llama_floats", "qwen3_moe_floats")
"""Served in the dtype that they are stored in: Gemma has values too large for float16, scales of FP4 ask for it."""


def configs(tokenizer: PreTrainedTokenizerFast) -> dict[str, PretrainedConfig]:
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    sizes = {"vocab_size": len(tokenizer), "hidden_size": WIDTH, "num_hidden_layers": 2}
    common = {**special, **heads, **sizes, "max_position_embeddings": 256, "tie_word_embeddings": False}
    experts = {"num_experts_per_tok": 2, "output_router_logits": False}
    gpt2 = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 256, "vocab_size": len(tokenizer), **special}
    llama = LlamaConfig(**common, intermediate_size=512)
    qwen3_moe = Qwen3MoeConfig(
        **common, **experts, intermediate_size=512, moe_intermediate_size=256, num_experts=4, norm_topk_prob=True
    )
    return {
        "llama": llama,
        "llama_floats": llama,
        "qwen3": Qwen3Config(**common, intermediate_size=512),
        "gemma3_text": Gemma3TextConfig(**common, intermediate_size=512, query_pre_attn_scalar=64),
        "gpt2": GPT2Config(**gpt2),
        "qwen3_moe": qwen3_moe,
        "qwen3_moe_floats": qwen3_moe,
        "mixtral": MixtralConfig(**common, **experts, intermediate_size=256, num_local_experts=4),
    }


class Learner(LanguageModel):
    """The demo's module for any architecture: Muon wants to know which matrices are in layers, AdamW does not."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def write_original(folder: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerFast, num_steps: int) -> None:
    L.seed_everything(0)
    lm = Learner(model_config(tokenizer))
    lm.model = AutoModelForCausalLM.from_config(config)
    data = DocsConfig(num_samples=num_steps * BATCH, max_length=LENGTH, batch_size=BATCH)
    trainer = L.Trainer(max_epochs=1, gradient_clip_val=1.0, logger=False, enable_checkpointing=False)
    trainer.fit(lm, calibration_dataloader(data, tokenizer))
    lm.model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_compressed(folder: Path, recipe: str, tokenizer: PreTrainedTokenizerFast) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder.parent / "original")
    data = DocsConfig(num_samples=NUM_SAMPLES, max_length=LENGTH, batch_size=BATCH)
    given = {"modifiers": MODIFIERS[recipe]} if recipe in MODIFIERS else recipe
    trainer = L.Trainer(logger=False, enable_checkpointing=False, enable_model_summary=False)
    loader = calibration_dataloader(data, tokenizer)
    Compressor(trainer).compress(model, dataloaders=loader, recipe=given, output_dir=folder, tokenizer=tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train-steps", type=int, default=30)
    arguments = parser.parse_args()
    tokenizer = build_tokenizer()
    for name, config in configs(tokenizer).items():
        folder = arguments.folder / name
        if not (folder / "original" / "tokenizer.json").exists():
            write_original(folder / "original", config, tokenizer, arguments.train_steps)
        for recipe in RECIPES[name]:
            if not (folder / recipe / "config.json").exists():
                write_compressed(folder / recipe, recipe, tokenizer)
    held_out = DocsConfig(split="test", num_samples=NUM_PROMPTS, max_length=PROMPT_LENGTH, batch_size=NUM_PROMPTS)
    prompts = next(iter(evaluation_dataloader(held_out, tokenizer)))["input_ids"].tolist()
    dtypes = {name: "bfloat16" if name in IN_BFLOAT16 else "float16" for name in RECIPES}
    (arguments.folder / "cases.json").write_text(json.dumps({"prompts": prompts, "dtypes": dtypes}))


if __name__ == "__main__":
    main()
