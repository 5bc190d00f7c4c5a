"""Writes what `moe_vs_llmcompressor.py` compares on: models with experts, a dense one, and their tokens, in one folder.

    python benchmarks/_moe_inputs.py FOLDER [--train-steps N]

FOLDER/large        the speed case: Qwen3-MoE, 512 wide, 4 layers, 32 experts 256 wide of which 4 run, random weights
FOLDER/qwen3_moe    trained on Python's documentation for N steps: 128 wide, 4 layers, 8 experts 128 wide, 2 run
FOLDER/mixtral      likewise
FOLDER/dense        likewise, a Llama with an MLP of 256, which is what two experts have
FOLDER/tokens_S.pt  for seed S: {"calibration": [128, 256] drawn from the training split, "evaluation": the test split}
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from _gptq_inputs import write_tokens
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from finetune_then_compress import DocsDataModule, LanguageModel, build_tokenizer, model_config

NUM_SAMPLES = 128
LENGTH = 256


def _common(tokenizer: PreTrainedTokenizerFast, width: int) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "num_hidden_layers": 4,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 64,
        "head_dim": 64,
        "max_position_embeddings": LENGTH,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def large_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeConfig:
    experts = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "norm_topk_prob": True}
    return Qwen3MoeConfig(**_common(tokenizer, 512), intermediate_size=1024, **experts)


def small_configs(tokenizer: PreTrainedTokenizerFast) -> dict[str, PretrainedConfig]:
    """Those that are trained, by name."""
    common = _common(tokenizer, 128)
    qwen = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
    mixtral = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 128}
    balanced = {"output_router_logits": True, "router_aux_loss_coef": 0.01}
    return {
        "qwen3_moe": Qwen3MoeConfig(**common, intermediate_size=256, **qwen, **balanced),
        "mixtral": MixtralConfig(**common, **mixtral, **balanced),
        "dense": LlamaConfig(**common, intermediate_size=256),
    }


def learn(config: PretrainedConfig, tokenizer: PreTrainedTokenizerFast, num_steps: int) -> PreTrainedModel:
    L.seed_everything(0)
    lm = LanguageModel(model_config(tokenizer))
    lm.model = AutoModelForCausalLM.from_config(config)
    trainer = L.Trainer(max_steps=num_steps, gradient_clip_val=1.0, logger=False, enable_checkpointing=False)
    trainer.fit(lm, DocsDataModule(tokenizer, max_length=LENGTH))
    model: PreTrainedModel = lm.model
    if hasattr(model.config, "output_router_logits"):
        model.config.output_router_logits = False  # the loss that balances experts is over
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train-steps", type=int, default=1000)
    arguments = parser.parse_args()
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    models = {"large": lambda: AutoModelForCausalLM.from_config(large_config(tokenizer))}
    for name, config in small_configs(tokenizer).items():
        models[name] = lambda config=config: learn(config, tokenizer, arguments.train_steps)
    for name, make in models.items():
        if not (arguments.folder / name / "tokenizer.json").exists():
            make().save_pretrained(arguments.folder / name)
            tokenizer.save_pretrained(arguments.folder / name)
    write_tokens(arguments.folder, tokenizer, NUM_SAMPLES, LENGTH)


if __name__ == "__main__":
    main()
