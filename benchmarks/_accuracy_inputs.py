"""Writes what `accuracy.py` compares on: a trained model, or the tokens of all models, into one folder.

    python benchmarks/_accuracy_inputs.py FOLDER --model llama [--train-steps N]
    python benchmarks/_accuracy_inputs.py FOLDER --tokens
    python benchmarks/_accuracy_inputs.py FOLDER --tokens-of smollm

FOLDER/llama        the model of `_gptq_inputs.py`, 256 wide
FOLDER/neox         GPT-NeoX, 256 wide: attention and MLP in parallel, GELU, biases
FOLDER/gemma        Gemma 2, 384 wide: gated GELU, norms before and after attention and MLP
FOLDER/tokens_S.pt  for seed S: {"calibration": [128, 128] drawn from the training split, "evaluation": the test split}
FOLDER/smollm/tokens_S.pt  likewise, [128, 256], in the tokens of the model that `_pretrained_inputs.py` writes

Those trained have 4 layers and the demo's tokenizer, data module and optimizers, the last two seeds of their own.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import lightning as L
from _gptq_inputs import train, write_tokens
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    GPTNeoXConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from finetune_then_compress import DocsDataModule, LanguageModel, build_tokenizer, model_config

NUM_SAMPLES = 128
LENGTH = 128
PRETRAINED_LENGTH = 256


def _sizes(tokenizer: PreTrainedTokenizerFast, width: int) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": width // 64,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def neox_config(tokenizer: PreTrainedTokenizerFast) -> GPTNeoXConfig:
    return GPTNeoXConfig(**_sizes(tokenizer, 256), use_parallel_residual=True)


def gemma_config(tokenizer: PreTrainedTokenizerFast) -> Gemma2Config:
    sizes = _sizes(tokenizer, 384) | {"num_key_value_heads": 2, "head_dim": 64, "query_pre_attn_scalar": 64}
    return Gemma2Config(**sizes, sliding_window=512)


@final
@dataclass(frozen=True)
class Family:
    config: Callable[[PreTrainedTokenizerFast], PretrainedConfig]
    seed: int


FAMILIES = {"neox": Family(neox_config, 1), "gemma": Family(gemma_config, 2)}


def learn(family: Family, tokenizer: PreTrainedTokenizerFast, num_steps: int) -> PreTrainedModel:
    L.seed_everything(family.seed)
    lm = LanguageModel(model_config(tokenizer))
    lm.model = AutoModelForCausalLM.from_config(family.config(tokenizer), attn_implementation="eager")
    trainer = L.Trainer(max_steps=num_steps, gradient_clip_val=1.0, logger=False, enable_checkpointing=False)
    trainer.fit(lm, DocsDataModule(tokenizer, max_length=LENGTH))
    model: PreTrainedModel = lm.model
    return model


def write_model(folder: Path, name: str, num_steps: int) -> None:
    tokenizer = build_tokenizer()
    model = learn(FAMILIES[name], tokenizer, num_steps) if name in FAMILIES else train(tokenizer, num_steps)
    model.save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=("llama", *FAMILIES))
    parser.add_argument("--tokens", action="store_true")
    parser.add_argument("--tokens-of", help="a model of the folder with a tokenizer of its own")
    parser.add_argument("--train-steps", type=int, default=1000)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.tokens:
        write_tokens(arguments.folder, build_tokenizer(), NUM_SAMPLES, LENGTH)
    if arguments.tokens_of is not None:
        own = arguments.folder / arguments.tokens_of
        write_tokens(own, AutoTokenizer.from_pretrained(own), NUM_SAMPLES, PRETRAINED_LENGTH)
    if arguments.model is not None:
        write_model(arguments.folder, arguments.model, arguments.train_steps)


if __name__ == "__main__":
    main()
