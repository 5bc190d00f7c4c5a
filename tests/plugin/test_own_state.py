"""A training with a callback of ours is the training without, whatever its data and modules keep: generators wherever
they are, counters, caches, weights that are computed when they are read."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from helpers import compress_in_memory
from lightning.pytorch.callbacks import Timer
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import BertConfig, BertForMaskedLM, DataCollatorForLanguageModeling, PreTrainedTokenizerFast

from lightning_compress import CompressionCallback, Compressor, MemoryReportCallback
from lightning_compress.errors import UnsupportedModelError
from lightning_compress.plugin.job import plan_recipe

from .conftest import compression

CHANNEL = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}
RECIPE = {"modifiers": [{"algorithm": "gptq", "scheme": {"weights": CHANNEL}}]}
OTHERS = {"modifiers": [{"algorithm": "gptq", "scheme": {"weights": CHANNEL}, "ignore": ["net.0"]}]}
DATA = torch.randn(48, 16, generator=torch.Generator().manual_seed(0))
Rows = DataLoader[Any]


class Net(pl.LightningModule):
    def __init__(self, first: nn.Module | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(first or nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def loss(self, batch: Any) -> Tensor:
        return self(batch).pow(2).mean()  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-2)


class Augment:
    """As users write transforms: with a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __call__(self, x: Tensor) -> Tensor:
        return x * (1 + self.rng.random())


class OfRows(Dataset[Tensor]):
    def __init__(self, transforms: tuple[Any, ...] = ()) -> None:
        self.transforms = transforms

    def __len__(self) -> int:
        return len(DATA)

    def __getitem__(self, index: int) -> Tensor:
        row = DATA[index]
        for transform in self.transforms:
            row = transform(row)
        return row


class Cached(OfRows):
    """Augments a row once, and counts."""

    def __init__(self) -> None:
        super().__init__((Augment(),))
        self.cache, self.reads = dict[int, Tensor](), 0

    def __getitem__(self, index: int) -> Tensor:
        self.reads += 1
        if index not in self.cache:
            self.cache[index] = super().__getitem__(index) * self.reads
        return self.cache[index]


class ByEpoch(Sampler[int]):
    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return len(DATA)

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(torch.randperm(len(DATA), generator=torch.Generator().manual_seed(self.epoch)).tolist())


def noisy(rows: list[Tensor], generator: torch.Generator) -> Tensor:
    return torch.stack(rows) * (1 + torch.rand((), generator=generator))


def enclosing() -> Callable[[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda row: row * (1 + torch.rand((), generator=generator))


class Module(pl.LightningDataModule):
    """Its hook draws, and it counts the loaders that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.augment, self.loaders = Augment(), 0

    def train_dataloader(self) -> Rows:
        self.loaders += 1
        return DataLoader(OfRows(), 8, shuffle=True, generator=torch.Generator().manual_seed(self.loaders))

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return self.augment(batch)


class Draws(Net):
    def __init__(self) -> None:
        super().__init__()
        self.augment = Augment()

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return self.augment(batch)


class Masked(Net):
    """Of transformers, whose collator makes its generator when it needs it."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        self.model = BertForMaskedLM(BertConfig(vocab_size=32, **sizes))
        del self.net

    def loss(self, batch: Any) -> Tensor:
        return self.model(**batch).loss  # type: ignore[no-any-return]


def masked() -> Rows:
    words = {**{f"w{number}": number for number in range(29)}, "[UNK]": 29, "[MASK]": 30, "[PAD]": 31}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "mask", "pad")}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    rows: Any = [{"input_ids": (row > 0).long() + number} for number, row in enumerate(DATA[:24])]
    return DataLoader(rows, 8, collate_fn=DataCollatorForLanguageModeling(tokenizer, seed=3))


class Adapted(nn.Linear):
    """LoRA as users write it; it counts its calls."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(num_inputs, num_outputs)
        self.down = nn.Parameter(0.1 * torch.randn(4, num_inputs))
        self.up = nn.Parameter(torch.zeros(num_outputs, 4))
        self.dropout, self.calls = nn.Dropout(0.5), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) + self.dropout(x) @ self.down.t() @ self.up.t()


CASES: dict[str, tuple[Callable[[], Net], Callable[[], Any]]] = {
    "transforms": (Net, lambda: DataLoader(OfRows((lambda row: row, Augment())), 8)),
    "enclosed": (Net, lambda: DataLoader(OfRows((enclosing(),)), 8)),
    "collating": (
        Net,
        lambda: DataLoader(OfRows(), 8, collate_fn=partial(noisy, generator=torch.Generator().manual_seed(0))),
    ),
    "cached": (Net, lambda: DataLoader(Cached(), 8)),
    "sampler": (Net, lambda: DataLoader(OfRows(), 8, sampler=ByEpoch())),
    "datamodule": (Net, Module),
    "module": (Draws, lambda: DataLoader(OfRows(), 8)),
    "collator": (Masked, masked),
    "adapters": (lambda: Net(Adapted(16, 32)), lambda: DataLoader(OfRows(), 8, shuffle=True)),
    "spectral": (lambda: Net(parametrizations.spectral_norm(nn.Linear(16, 32))), lambda: DataLoader(OfRows(), 8)),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("callback", [CompressionCallback, MemoryReportCallback])
@pytest.mark.parametrize("case", CASES)
def test_a_training_is_as_without(case: str, callback: Any, make_trainer: Any) -> None:
    """Seen to fail: with the generators of loaders, samplers and datasets put back, and nothing else."""
    make_module, make_data = CASES[case]
    recipe = OTHERS if case == "spectral" else RECIPE
    made = compression(recipe, max_samples=16) if callback is CompressionCallback else MemoryReportCallback()
    found = []
    for callbacks in ([], [made]):
        torch.manual_seed(3)
        module = make_module()
        make_trainer(*callbacks, max_epochs=2).fit(module, make_data())
        found.append(module.losses)
    assert found[0] == found[1]


def test_what_code_is_tried_for_leaves_nothing(make_trainer: Any) -> None:
    """Seen to fail: a Linear that drops some of its input was refused while it trains, and counted the trial."""
    module = Net(Adapted(16, 32))
    report = Compressor(make_trainer()).compress(module.train(), dataloaders=[DATA], recipe=RECIPE, output_dir=None)
    assert [each.module for each in report.modules] == ["net.0", "net.2"]
    trained = Net(Adapted(16, 32))
    plan_recipe(trained, compression(RECIPE).settings)
    layer = trained.net[0]
    assert isinstance(layer, Adapted)
    assert layer.calls == 0
    assert layer.training
    assert layer.dropout.training


def test_what_is_only_compressed_keeps_its_other_weights(make_trainer: Any) -> None:
    """Seen to fail: spectral norm takes a step whenever its weight is read."""
    module = Net(parametrizations.spectral_norm(nn.Linear(16, 32)))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    Compressor(make_trainer()).compress(module, dataloaders=[DATA], recipe=OTHERS, output_dir=None)
    changed = [name for name, value in module.state_dict().items() if not torch.equal(value, before[name])]
    assert changed == ["net.2.weight"]


class Attends(Net):
    """Its projections stay apart where they quantize their inputs."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 16))
        self.net[2] = nn.Linear(16, 8)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        rows = x[None]
        return self.net(self.attention(rows, rows, rows, need_weights=False)[0])  # type: ignore[no-any-return]


def test_what_trained_before_trains_afterwards(make_trainer: Any) -> None:
    """Seen to fail: with inputs quantized, projections of attention asked for no gradients."""
    module = Attends()
    Compressor(make_trainer()).compress(module, dataloaders=[DATA], recipe="w8a8_gptq", output_dir=None)
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    assert names == [name for name, _ in module.named_parameters()]
    assert "attention.q_proj.weight" in names


class Scheduled(Net):
    """Draws from Python's and NumPy's generators, in eval mode too, as scheduled sampling often does."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x * (1 + random.random())) * np.random.rand()  # type: ignore[no-any-return]


def test_generators_of_python_and_numpy(make_trainer: Any, tmp_path: Path) -> None:
    """Seen to fail: the checkpoint was told to give other outputs, and generators were left elsewhere."""
    before = random.getstate(), np.random.get_state()[1]
    report = Compressor(make_trainer()).compress(Scheduled(), dataloaders=[DATA], recipe=RECIPE, output_dir=tmp_path)
    assert report.verification is not None
    assert report.verification.passed
    assert random.getstate() == before[0]
    assert np.array_equal(np.random.get_state()[1], before[1])


@pytest.mark.parametrize("mode", [True, False])
def test_what_stays_in_place_of_attention_is_in_its_mode(mode: bool, make_trainer: Any) -> None:
    """Seen to fail: it stayed in that of the calibration, so a training behind it was without dropout of attention."""
    module = Attends()
    module.attention.train(mode)
    Compressor(make_trainer()).compress(module, dataloaders=[DATA], recipe="w8a8_gptq", output_dir=None)
    assert module.net.training
    assert {part.training for part in module.attention.modules()} == {mode}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["w4a16_gptq", "w2a16_best", "w8a8_gptq", "nvfp4_gptq"])
def test_the_default_dtype_is_the_users(name: str, dtype: torch.dtype) -> None:
    """Seen to fail: factors, Grams and scales were made in it."""
    found = []
    for default in (torch.float32, dtype):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64))
        batches = [torch.randn(32, 128) for _ in range(9)]
        torch.set_default_dtype(default)
        try:
            compress_in_memory(model, batches, name)
        finally:
            torch.set_default_dtype(torch.float32)
        found.append(model.state_dict())
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


def test_static_inputs_are_of_the_modules_dtype() -> None:
    """Seen to fail: in that of the calibration."""
    model = nn.Sequential(nn.Linear(16, 8))
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
    scheme = {"weights": CHANNEL | {"num_bits": 8}, "input_activations": inputs}
    compress_in_memory(model, [DATA], {"modifiers": [{"algorithm": "rtn", "scheme": scheme}]})
    assert model.bfloat16()(DATA.bfloat16()).dtype == torch.bfloat16


def test_complex_weights_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16, dtype=torch.complex64))
    with pytest.raises(UnsupportedModelError, match=r"1 \(Linear, .*\[16, 16\]\) cannot .* complex.*'1' to `ignore`"):
        compress_in_memory(model, [DATA], RECIPE)


class Keeps(nn.Module):
    """What it is called with, for the epoch's end."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.kept, self.names = inner, list[Tensor](), dict[int, int]()

    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(x)
        self.names[len(self.names)] = 1
        return self.inner(x)  # type: ignore[no-any-return]


class KeepingLinear(nn.Linear):
    """Its own forward is tried, too."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.kept, self.names = list[Tensor](), dict[int, int]()

    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(x)
        self.names[len(self.names)] = 1
        return super().forward(x)


@pytest.mark.parametrize("make", [lambda: Keeps(nn.ReLU()), lambda: Keeps(nn.Linear(16, 16)), KeepingLinear])
def test_what_modules_keep_is_of_no_calibration(make: Callable[[], Any]) -> None:
    """Seen to fail: with an entry for each batch."""
    keeping = make()
    model = nn.Sequential(nn.Linear(16, 16), keeping, nn.Linear(16, 8))
    keeping.kept.append(DATA)
    compress_in_memory(model, [DATA] * 3, RECIPE)
    assert keeping.kept == [DATA]
    assert keeping.names == {}


class Noting(Timer):
    """A bystander that keeps what it sees where the module has a place for it."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *args, **kwargs)
        pl_module.losses.append(float(trainer.global_step))


def test_who_is_called_between_subgraphs_may_keep_things(make_trainer: Any) -> None:
    """Seen to fail: with what modules keep put back behind the whole run."""
    module = Net()
    make_trainer(compression(RECIPE, when="only"), Noting()).fit(module, DataLoader(OfRows(), 8))
    assert module.losses
    assert module.losses == sorted(module.losses)


def test_weights_that_cannot_be_written_to() -> None:
    """Seen to fail: with errors of torch, amid the run and at its end."""
    with torch.inference_mode():
        made_there = nn.Sequential(nn.Linear(16, 8))
    with pytest.raises(UnsupportedModelError, match=r"0\.weight \[8, 16\] was made under .*inference_mode"):
        compress_in_memory(made_there, [DATA], RECIPE)
    expanded = nn.Sequential(nn.Linear(16, 8))
    expanded[0].weight = nn.Parameter(torch.randn(1, 16).expand(8, 16))
    with pytest.raises(UnsupportedModelError, match=r"0\.weight \[8, 16\] is one number at several places.*clone"):
        compress_in_memory(expanded, [DATA], RECIPE)


def test_what_is_no_model_is_said_shortly(make_trainer: Any) -> None:
    with pytest.raises(TypeError, match=r"^The model is a Module, not a OrderedDict; a model is loaded before\.$"):
        Compressor(make_trainer()).compress(Net().state_dict(), recipe=RECIPE, output_dir=None)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Frozen:
    x: Tensor


class Attributes(dict[str, Tensor]):
    __getattr__ = dict.__getitem__


class Reads(Net):
    """What its own hook prepares, by attribute."""

    def calibration_step(self, batch: Any) -> Tensor:
        return self(batch.x)  # type: ignore[no-any-return]

    def loss(self, batch: Any) -> Tensor:
        return self(batch.x).pow(2).mean()  # type: ignore[no-any-return]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return type(batch)(x=batch.x.to(device))


@pytest.mark.parametrize("kind", [Frozen, Attributes])
def test_batches_of_a_users_own_type(kind: Any, make_trainer: Any) -> None:
    """Seen to fail: Lightning's function moved what only the user's can; every such dict seemed to have `data`."""
    callback = compression(RECIPE)
    make_trainer(callback).fit(Reads(), DataLoader([kind(x=DATA)] * 3, batch_size=None))  # type: ignore[arg-type]
    assert callback.report is not None
