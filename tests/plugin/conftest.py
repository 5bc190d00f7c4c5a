"""A LightningModule around a tiny Llama, its data, and Trainers that keep quiet."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Timer
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lightning_compress import CompressionCallback, Compressor, load_compressed
from lightning_compress.command import cli
from lightning_compress.data.config import load_data_config
from lightning_compress.data.sources import load_documents
from lightning_compress.foresight.machine import Machine, Rate, cache_file, named_gpu, save_machine
from lightning_compress.plugin.loop import CompressionLoop

VOCABULARY, LENGTH, BATCH_SIZE = 64, 12, 4
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}
GPTQ = {"modifiers": [{"algorithm": "gptq", "scheme": {"weights": WEIGHTS}}]}
RTN = {"modifiers": [{"algorithm": "rtn", "scheme": {"weights": WEIGHTS}}]}


def tiny_model(seed: int = 0, num_layers: int = 2) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


class TinyModule(pl.LightningModule):
    """Remembers the losses it saw; everything random in it and its loaders goes through the global generator."""

    def __init__(self, learning_rate: float = 1e-2) -> None:
        super().__init__()
        self.model = tiny_model()
        self.learning_rate = learning_rate
        self.losses: list[float] = []
        self.test_losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch, labels=batch["input_ids"]).loss
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.test_losses.append(self.model(**batch, labels=batch["input_ids"]).loss.item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def samples(number: int = 16, start: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(start)
    return [{"input_ids": torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)} for _ in range(number)]


def loader(number: int = 16, start: int = 0, **options: Any) -> DataLoader[Any]:
    return DataLoader(samples(number, start), **{"batch_size": BATCH_SIZE, **options})  # type: ignore[arg-type]


def weights_of(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def exported(folder: Path) -> dict[str, Tensor]:
    """The weights in a checkpoint of a tiny model, dequantized."""
    return weights_of(load_compressed(tiny_model(), folder))


class Bystander(Timer):
    """Sees the compression stage from inside, for Timers take part in it."""

    def __init__(self, action: Any = None, duration: dict[str, int] | None = None) -> None:
        super().__init__(duration=duration)
        self.action = action

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_end(trainer, *args, **kwargs)
        if isinstance(trainer.fit_loop, CompressionLoop) and self.action is not None:
            self.action()


def trainer_state(trainer: pl.Trainer) -> tuple[Any, ...]:
    return (
        list(trainer.callbacks),
        trainer.fit_loop,
        "run" in vars(trainer.fit_loop),
        trainer.log_every_n_steps,
        trainer.num_sanity_val_steps,
        trainer.limit_train_batches,
    )


def compression(recipe: Any = None, output_dir: Path | None = None, **options: Any) -> CompressionCallback:
    return CompressionCallback(GPTQ if recipe is None else recipe, output_dir, **options)


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., pl.Trainer]:
    def make(*callbacks: pl.Callback, **options: Any) -> pl.Trainer:
        defaults = {
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": tmp_path,
        }
        return pl.Trainer(callbacks=list(callbacks), **{**defaults, **options})

    return make


Command = Callable[..., str]


@pytest.fixture
def compressor(make_trainer: Any) -> Compressor:
    return Compressor(make_trainer(strategy="sequential_onload"))


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `lightning-compress` in this process, and returns what it said."""

    def run(*given: str) -> str:
        monkeypatch.setattr("sys.argv", ["lightning-compress", *given])
        monkeypatch.setenv("COLUMNS", "200")
        capsys.readouterr()
        cli.main()
        return capsys.readouterr().out

    return run


def refused(command: Command, *given: str) -> str:
    """What a command that is refused says."""
    with pytest.raises(SystemExit) as error:
        command(*given)
    return str(error.value)


@pytest.fixture
def rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """What a probe would have found of this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    of_gpus = ("to_", "dup", "pinning", "start")
    rates = {kind: rate.value for kind, rate in named_gpu("t4", None).rates.items() if not kind.startswith(of_gpus)}
    found = {kind: Rate(rate / 100, "measured") for kind, rate in {**rates, "solve": 8e11, "mapping": 1e11}.items()}
    machine = Machine("here", "cpu", found)
    save_machine(machine, cache_file("cpu"))
    return machine


@pytest.fixture
def output_dir(tmp_path: Path) -> Path:
    return tmp_path / "compressed"


@pytest.fixture(autouse=True)
def _clean_state() -> Iterator[None]:
    """Every test starts from one seed, and must leave gradients switched on."""
    torch.manual_seed(0)
    environment = dict(os.environ)
    yield
    assert torch.is_grad_enabled()
    if torch.distributed.is_initialized():  # strategy "ddp" leaves it to the end of the process
        torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)  # and ranks and ports in here


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A short file as the data of a command in a process of its own, which reads `data=docs` in 3 s."""
    file = tmp_path_factory.mktemp("texts") / "topics.txt"
    file.write_text("\n\n".join(load_documents(load_data_config({"source": "docs"}))[:40]), encoding="utf-8")
    return "data=text", f"data.files=[{file}]"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer, as save_pretrained leaves them."""
    folder = tmp_path_factory.mktemp("cli") / "tiny"
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    texts = load_documents(load_data_config({"source": "docs"}))[:200]
    tokenizer.train_from_iterator(
        texts, trainers.WordLevelTrainer(vocab_size=200, special_tokens=["<unk>", "<eos>"], show_progress=False)
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=200,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
