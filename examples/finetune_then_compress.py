"""Train a small language model as usual, and leave with a 4-bit checkpoint: one callback more in the Trainer.

Everything comes from this machine: the text is Python's own documentation, the tokenizer is trained on it, and the
model is a Llama small enough to learn some English in about a minute on two cores. The callback compresses it when
training is over. The same run then measures what that cost: perplexity on held-out text of the original, of
round-to-nearest and of GPTQ (all 4 bits), bytes on disk, and text from the reloaded checkpoint.

    python examples/finetune_then_compress.py [--output-dir DIR] [--train-steps N] [--max-time SECONDS]
"""

import argparse
import copy
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import lightning as L
import torch
from datasets import Dataset
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lightning_compress import CompressionCallback, Compressor
from lightning_compress.data import (
    DocsConfig,
    calibration_dataloader,
    evaluation_dataloader,
    load_documents,
    perplexity,
)
from lightning_compress.graph.products import in_float32, slow_dtypes

VOCABULARY = 4096
END_OF_TEXT = "<|endoftext|>"
PROMPT = "Return a list of"
ALL_OF_IT = 10**6  # more windows than the text has


# The reusable parts: a tokenizer, a data module, a model. Nothing in them knows of compression.


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 4096 tokens, trained on the training split of the documentation (about a second)."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(load_documents(DocsConfig()), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)


def model_config(tokenizer: PreTrainedTokenizerFast, width: int = 128) -> LlamaConfig:
    """A Llama of 4 layers whose widths are multiples of the group size 128.

    A minute of training suffices for no more than 128 (1.4 million weights beside the embedding): at 256, the same
    minute ends with a higher perplexity.
    """
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=4,
        num_attention_heads=width // 64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


class DocsDataModule(L.LightningDataModule):
    """Windows of the documentation: shuffled for training, held out for testing, and a sample for calibration.

    Windows are as long in calibration and in testing as in training: the model has seen no later positions.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, batch_size: int = 8, max_length: int = 128) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.max_length = max_length

    def setup(self, stage: str) -> None:
        if stage == "fit":
            config = DocsConfig(num_samples=ALL_OF_IT, max_length=self.max_length)
            batches = evaluation_dataloader(config, self.tokenizer)
            rows = [row for batch in batches for row in batch["input_ids"].tolist()]
            self.windows = Dataset.from_dict({"input_ids": rows}).with_format("torch")

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(self.windows, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def test_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        config = DocsConfig(split="test", num_samples=ALL_OF_IT, max_length=self.max_length, batch_size=16)
        return evaluation_dataloader(config, self.tokenizer)

    def calibration_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        config = DocsConfig(num_samples=256, max_length=self.max_length, batch_size=16)
        return calibration_dataloader(config, self.tokenizer)


class Together(torch.optim.Optimizer):
    """Several optimizers as one, so that Lightning's automatic optimization and one schedule serve them all.

    It shares their parameter groups (a schedule set here reaches them) and keeps no state of its own. Muon multiplies
    in bfloat16, which CPUs without instructions for it do one number at a time: there it is done in float32.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        self.slow_dtypes = slow_dtypes(optimizers[0].param_groups[0]["params"][0].device)
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with in_float32(self.slow_dtypes):
            for optimizer in self.optimizers:
                optimizer.step()
        return loss


class LanguageModel(L.LightningModule):
    """A causal language model with its loss and optimizer: Muon for the layers' matrices, AdamW for the rest.

    In the same number of steps Muon gets much further than AdamW alone, which is what a minute of training needs.
    """

    def __init__(self, config: LlamaConfig, learning_rate: float = 6e-3) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(config)
        self.learning_rate = learning_rate

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch, labels=batch["input_ids"], use_cache=False).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def build_optimizer(self) -> Together:
        matrices = [p for name, p in self.named_parameters() if p.ndim == 2 and ".layers." in name]
        others = [p for name, p in self.named_parameters() if p.ndim != 2 or ".layers." not in name]
        rate = self.learning_rate
        return Together(
            torch.optim.Muon(matrices, lr=2.5 * rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
        )

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = self.build_optimizer()
        num_steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step / num_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def rate_factor(progress: float) -> float:
    """The learning rate over the training (0 to 1), as a fraction of its peak: a short warm-up, then down linearly.

    >>> [rate_factor(p) for p in (0.0, 0.05, 0.5, 1.0)]
    [0.01, 0.5, 0.5, 0.01]
    """
    return max(min(progress / 0.1, 1 - progress), 0.01)


def steps_within(seconds: float, config: LlamaConfig, data: DocsDataModule) -> int:
    """How many training steps this machine does in that time, from the fastest of five (the first ones are slow)."""
    lm = LanguageModel(config)
    optimizer = lm.build_optimizer()
    ids = torch.zeros(data.batch_size, data.max_length, dtype=torch.int64)
    times_s = []
    for _ in range(5):
        start = time.perf_counter()
        lm.model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times_s.append(time.perf_counter() - start)
    return max(int(seconds / min(times_s)), 10)


# The demo.


class KeepOriginal(L.Callback):
    """Keeps a copy of the trained model, to compare with: the callback below quantizes the model itself."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, LanguageModel)
        self.model = copy.deepcopy(pl_module.model)


def train_and_compress(
    data: DocsDataModule, num_steps: int, output_dir: Path
) -> tuple[LanguageModel, LlamaForCausalLM, CompressionCallback]:
    """The trained and then compressed module, the model before compression, and the callback with its report."""
    lm = LanguageModel(model_config(data.tokenizer))
    original = KeepOriginal()
    compression = CompressionCallback("w4a16_gptq", output_dir=output_dir / "checkpoint", tokenizer=data.tokenizer)
    trainer = L.Trainer(
        max_steps=num_steps,
        gradient_clip_val=1.0,
        callbacks=[original, compression],
        logger=CSVLogger(output_dir, name="logs"),
        enable_checkpointing=False,
        log_every_n_steps=10,
    )
    trainer.fit(lm, data)
    return lm, original.model, compression


def round_to_nearest(model: LlamaForCausalLM, data: DocsDataModule, output_dir: Path) -> LlamaForCausalLM:
    """A copy of the model, compressed without calibration: what GPTQ has to be better than."""
    rounded = copy.deepcopy(model)
    trainer = L.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_model_summary=False)
    Compressor(trainer).compress(
        rounded, dataloaders=data.calibration_dataloader(), recipe="w4a16_rtn", output_dir=output_dir / "rtn"
    )
    return rounded


def stored_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def generate(checkpoint: Path) -> str:
    """Text that the checkpoint writes, loaded by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    prompt = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    written = model.generate(**prompt, max_new_tokens=40, do_sample=False, repetition_penalty=1.3)
    return str(tokenizer.decode(written[0], skip_special_tokens=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/demo"))
    parser.add_argument("--train-steps", type=int, default=650, help="about a minute on two cores")
    parser.add_argument("--max-time", type=float, default=110, help="as many steps as fit in so many seconds, if fewer")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    started = time.perf_counter()

    data = DocsDataModule(build_tokenizer())
    num_steps = min(arguments.train_steps, steps_within(arguments.max_time, model_config(data.tokenizer), data))
    if num_steps < arguments.train_steps:
        print(f"Training for {num_steps} steps, not {arguments.train_steps}: those fit in --max-time on this machine.")
    L.seed_everything(0)
    lm, original, compression = train_and_compress(data, num_steps, arguments.output_dir)
    original.save_pretrained(arguments.output_dir / "original")
    rounded = round_to_nearest(original, data, arguments.output_dir)

    held_out = data.test_dataloader()
    perplexities = {
        "perplexity_original": perplexity(original, held_out),
        "perplexity_rtn": perplexity(rounded, held_out),
        "perplexity_gptq": perplexity(lm.model, held_out),
    }
    assert compression.report is not None
    files = replace(compression.report, extra=perplexities).save(arguments.output_dir)
    sizes = [stored_bytes(arguments.output_dir / folder) for folder in ("original", "rtn", "checkpoint")]
    print(f"\n{'':22}{'original':>12}{'4-bit RTN':>12}{'4-bit GPTQ':>12}")
    print(f"{'held-out perplexity':22}" + "".join(f"{value:12.3f}" for value in perplexities.values()))
    print(f"{'bytes on disk':22}" + "".join(f"{size:12,}" for size in sizes))
    print(f"\nThe reloaded checkpoint writes: {generate(arguments.output_dir / 'checkpoint')!r}\n")
    for file in (*files, arguments.output_dir / "checkpoint"):
        print(file)
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
