"""Writes what `gptq_vs_llmcompressor.py` compares on: two models and their tokens, into one folder.

    python benchmarks/_gptq_inputs.py FOLDER [--train-steps N]

FOLDER/large     the speed case: Llama, 768 wide, 8 layers, intermediate 2048, 12 heads, vocabulary 4096, random weights
FOLDER/trained   the perplexity case: the demo's model at twice its width (256), trained on its data for N steps
FOLDER/tokens_S.pt   for seed S: {"calibration": [256, 256] drawn from the training split, "evaluation": the test split}
"""

import argparse
import sys
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lightning_compress.data import DocsConfig, calibration_dataloader, evaluation_dataloader

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from finetune_then_compress import ALL_OF_IT, DocsDataModule, LanguageModel, build_tokenizer, model_config

NUM_SEEDS = 3
NUM_SAMPLES = 256
LENGTH = 256


def large_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=12,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def train(tokenizer: PreTrainedTokenizerFast, num_steps: int) -> LlamaForCausalLM:
    """The demo's model at twice its width, after so many steps of the demo's training."""
    L.seed_everything(0)
    lm = LanguageModel(model_config(tokenizer, width=256))
    trainer = L.Trainer(max_steps=num_steps, gradient_clip_val=1.0, logger=False, enable_checkpointing=False)
    trainer.fit(lm, DocsDataModule(tokenizer, batch_size=4, max_length=LENGTH))
    return lm.model


def stacked(loader: DataLoader[dict[str, Tensor]]) -> Tensor:
    return torch.cat([batch["input_ids"] for batch in loader])


def write_tokens(folder: Path, tokenizer: PreTrainedTokenizerFast, num_samples: int, length: int) -> None:
    """Calibration samples of every seed, and the whole test split, as tokens_S.pt."""
    held_out = DocsConfig(split="test", num_samples=ALL_OF_IT, max_length=length)
    evaluation = stacked(evaluation_dataloader(held_out, tokenizer))
    for seed in range(NUM_SEEDS):
        config = DocsConfig(num_samples=num_samples, max_length=length, seed=seed)
        calibration = stacked(calibration_dataloader(config, tokenizer))
        torch.save({"calibration": calibration, "evaluation": evaluation}, folder / f"tokens_{seed}.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train-steps", type=int, default=1000)
    arguments = parser.parse_args()
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    large = LlamaForCausalLM(large_config(tokenizer))
    for name, model in (("large", large), ("trained", train(tokenizer, arguments.train_steps))):
        model.save_pretrained(arguments.folder / name)
        tokenizer.save_pretrained(arguments.folder / name)
    write_tokens(arguments.folder, tokenizer, NUM_SAMPLES, LENGTH)


if __name__ == "__main__":
    main()
