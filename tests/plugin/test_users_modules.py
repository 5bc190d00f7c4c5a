"""LightningModules as people write them: batches that `forward` does not take, layers that are compiled or fused, what
cannot be copied, adapters, averages."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers import compress, compress_in_memory
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, TensorDataset, default_collate
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy
from transformers import BatchEncoding, LlamaForCausalLM

from lightning_compress import CompressionCallback, load_compressed
from lightning_compress.calibration.quantized import read_whole
from lightning_compress.errors import OutputDirectoryError, UnsupportedModelError, UntraceableModelError
from lightning_compress.export.checkpoint import INCOMPLETE
from lightning_compress.export.copies import copy_of
from lightning_compress.export.outputs import FEW, few_tokens
from lightning_compress.graph import execute
from lightning_compress.plugin import compat
from lightning_compress.plugin.beforehand import warn_of_later
from lightning_compress.plugin.data import _num_samples

from .conftest import (
    BATCH_SIZE,
    GPTQ,
    RTN,
    TinyModule,
    compression,
    exported,
    loader,
    same,
    samples,
    tiny_model,
    weights_of,
)

CHANNEL = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}
PER_CHANNEL = {"modifiers": [{"algorithm": "gptq", "scheme": {"weights": CHANNEL}}]}


class Classifier(pl.LightningModule):
    """`forward` takes images alone, and a batch has labels too."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = net or nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        self.num_steps = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.num_steps += 1
        x, y = batch
        return nn.functional.cross_entropy(self(x).flatten(0, -2), y.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Stepping(Classifier):
    def calibration_step(self, batch: Any) -> Tensor:
        return self(batch[0])  # type: ignore[no-any-return]


def images(*shape: int) -> DataLoader[Any]:
    x = torch.randn(16, *(shape or (16,)))
    return DataLoader(TensorDataset(x, torch.zeros(x.shape[:-1], dtype=torch.long)), batch_size=4)


def fitted(make_trainer: Any, module: pl.LightningModule, *shape: int, **options: Any) -> Any:
    """The report of a module that was trained and compressed."""
    callback = compression(PER_CHANNEL, **options)
    make_trainer(callback).fit(module, images(*shape))
    assert callback.report is not None
    return callback.report


@pytest.mark.filterwarnings("ignore:.fit. ended by")
def test_what_calibration_cannot_run_is_said_before_the_training(make_trainer: Any) -> None:
    """Seen to fail: after it, and without `calibration_step`."""
    module = Classifier()
    with pytest.raises(
        UnsupportedModelError,
        match=r"Classifier.forward\(batch\) fails .*`calibration_step.self, batch.` of Classifier has to run",
    ):
        make_trainer(compression(PER_CHANNEL)).fit(module, images())
    assert module.num_steps == 0
    with pytest.raises(UntraceableModelError, match="calibration_step"):
        make_trainer(compression(PER_CHANNEL, when="only")).fit(module, images())
    module = Stepping()
    assert len(fitted(make_trainer, module).modules) == 2
    assert module.num_steps == 4


class StepsAsItTrains(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        self.log_dict({"half": loss / 2})
        return loss

    def calibration_step(self, batch: Any) -> Tensor:
        return self.training_step(batch, 0)


def test_a_training_step_that_logs(make_trainer: Any) -> None:
    """Seen to fail: MisconfigurationException, for Lightning takes nothing outside its loops."""
    module = StepsAsItTrains()
    module.log = partial(module.log)  # type: ignore[method-assign]
    mine = module.log
    trainer = make_trainer(compression(PER_CHANNEL))
    trainer.fit(module, images())
    assert "loss" in trainer.callback_metrics
    assert module.log is mine
    assert "log_dict" not in vars(module)


class CountsAsItTrains(pl.LightningModule):
    """Metrics, a counter, lists and tensors that a step keeps, beside a model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_model()
        self.mean, self.accuracy = MeanMetric(), MulticlassAccuracy(num_classes=self.model.config.vocab_size)
        self.seen, self.kept, self.last = 0, list[Tensor](), torch.zeros(1)

    def calibration_step(self, batch: Any) -> Tensor:
        out = self.model(**batch, labels=batch["input_ids"])
        self.mean.update(out.loss)
        accuracy = self.accuracy(out.logits.flatten(0, 1), batch["input_ids"].flatten())
        self.log_dict({"mean": self.mean.compute(), "accuracy": accuracy + 0})
        self.seen, self.last = self.seen + 1, out.logits
        self.kept.append(out.loss)
        return out.loss  # type: ignore[no-any-return]


def test_what_a_step_keeps_is_as_it_was(tmp_path: Path) -> None:
    """Seen to fail: states of metrics and kept tensors were those of the recording, which have no values, and
    `MeanMetric`, which looks at them, could not be recorded."""
    module = CountsAsItTrains()
    before, last = [vars(each).copy() for each in module.modules()], module.last
    report = compress(module, list(loader()), GPTQ, tmp_path)
    assert report.verification is not None
    assert report.verification.passed
    assert report.verification.max_abs_difference is not None
    assert module.last is last
    assert (module.seen, module.kept) == (0, [])
    for metric in (module.mean, module.accuracy):
        assert not any(isinstance(value, FakeTensor) for value in vars(metric).values())
        assert metric._update_count == 0
    assert [vars(each).keys() for each in module.modules()] == [each.keys() for each in before]
    module.mean.update(2.0)
    assert module.mean.compute() == 2


class CountsAsItSteps(Stepping):
    """A metric that is called, beside layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()

    def calibration_step(self, batch: Any) -> Tensor:
        out = super().calibration_step(batch)
        self.log("mean", self.metric(out.mean()))
        return out


@pytest.mark.parametrize("schedule", ["staged", "basic"])
def test_metrics_are_no_part_of_what_runs(schedule: str) -> None:
    """Seen to fail: as calls of the graph, which the schedule `basic` ran, they counted calibration batches."""
    module = CountsAsItSteps()
    compress_in_memory(module, list(images()), PER_CHANNEL, schedule=schedule)
    assert module.metric._update_count == 0


class Preferences(pl.LightningModule):
    """Answers that are chosen and rejected, each as long as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_model()

    def calibration_step(self, batch: dict[str, Tensor]) -> list[Tensor]:
        return [
            self.model(batch[name], attention_mask=batch[f"{name}_attention_mask"]).logits
            for name in ("chosen", "rejected")
        ]


def test_two_lengths_that_do_not_depend_on_each_other() -> None:
    """Padding of either counts in no statistics. Seen to fail: batches of one length only; padding of fields with such
    names counted."""
    batches = []
    for chosen, rejected in ((9, 16), (12, 12), (7, 15)):
        batch = {}
        for name, length in (("chosen", chosen), ("rejected", rejected)):
            batch[name] = torch.randint(1, 50, (2, length))
            batch[f"{name}_attention_mask"] = torch.ones(2, length, dtype=torch.long)
            batch[f"{name}_attention_mask"][0, length - 3 :] = 0
        batches.append(batch)
    report = compress_in_memory(Preferences(), batches, GPTQ, schedule="basic")
    masks = [mask for batch in batches for name, mask in batch.items() if name.endswith("mask")]
    assert {record.num_tokens for record in report.modules} == {sum(int(mask.sum()) for mask in masks)}
    assert report.has_padding


class Sampler(Classifier):
    """Draws from a distribution, which checks its arguments' values."""

    def calibration_step(self, batch: Any) -> Tensor:
        mean, spread = self(batch[0]).chunk(2, -1)
        return torch.distributions.Normal(mean, spread.exp()).rsample()


def test_a_distribution() -> None:
    """Seen to fail: a branch on values. What torch checks outside is what it was."""
    before = torch.distributions.Distribution._validate_args  # type: ignore[attr-defined]
    report = compress_in_memory(Sampler(), list(images()), PER_CHANNEL)
    assert len(report.modules) == 2
    assert torch.distributions.Distribution._validate_args == before  # type: ignore[attr-defined]


def test_weights_without_a_shape() -> None:
    module = Classifier(nn.Sequential(nn.LazyLinear(32), nn.Linear(32, 4)))
    with pytest.raises(UnsupportedModelError, match=r"net.0.weight \(LazyLinear\) has no shape .* run a batch"):
        compress_in_memory(module, list(images()), PER_CHANNEL)
    module(torch.randn(1, 16))
    assert len(compress_in_memory(module, [x for x, _ in images()], PER_CHANNEL).modules) == 2


class OtherFields(TinyModule):
    """Its batches have names that the transformers model does not know."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step({"input_ids": batch["tokens"]}, batch_idx)

    def calibration_step(self, batch: dict[str, Tensor]) -> Any:
        return self.model(input_ids=batch["tokens"])


def test_reading_back_runs_what_calibration_runs(make_trainer: Any, output_dir: Path) -> None:
    """Seen to fail: the transformers model called with such a batch."""
    renamed = [{"tokens": sample["input_ids"]} for sample in samples()]
    callback = compression(GPTQ, output_dir)
    make_trainer(callback).fit(OtherFields(), DataLoader(renamed, BATCH_SIZE))  # type: ignore[arg-type]
    assert callback.report is not None
    verification = callback.report.verification
    assert verification is not None
    assert verification.passed
    assert verification.max_abs_difference == 0


class Keeps(Stepping):
    """Keeps what cannot be copied, knows its Trainer, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
        self.lock = threading.Lock()
        self.outputs: list[Tensor] = []
        normed = torch.nn.utils.weight_norm(nn.Conv1d(4, 4, 1))  # its weight is not a leaf
        self.normed = nn.Sequential(normed, parametrizations.weight_norm(nn.Conv1d(4, 4, 1)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.last = loss
        self.outputs.append(loss)
        return loss

    def calibration_step(self, batch: Any) -> Tensor:
        assert self.trainer.max_epochs == 1
        noise = 0.1 * torch.randn_like(batch[0])
        return self.normed(self(batch[0] + noise).unsqueeze(-1))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_modules_that_keep_what_cannot_be_copied(make_trainer: Any, output_dir: Path) -> None:
    """Seen to fail: with an error behind the complete checkpoint, outputs that differ by the noise, and with
    parametrized modules asked what is copied of them, which they refuse to say."""
    report = fitted(make_trainer, Keeps(), output_dir=output_dir)
    assert report.verification.passed, report.verification
    assert report.verification.max_abs_difference < 1e-6


def test_what_cannot_be_run_again_is_a_finding(make_trainer: Any, output_dir: Path) -> None:
    """The checkpoint is complete, and its report is written. Seen to fail: the error was raised."""

    class Counts(Stepping):
        def calibration_step(self, batch: Any) -> Tensor:
            if (output_dir / "config.json").exists() or (output_dir / "model.safetensors").exists():
                raise RuntimeError("not twice")
            return super().calibration_step(batch)

    report = fitted(make_trainer, Counts(), output_dir=output_dir)
    assert not report.verification.passed
    assert "failed with RuntimeError: not twice" in report.summary()
    assert "not twice" in (output_dir / "report.html").read_text()


def test_compiled_parts_are_run_as_they_are_written(make_trainer: Any) -> None:
    """Seen to fail: "never called"."""
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    net[1] = torch.compile(nn.Sequential(nn.Linear(32, 32), nn.ReLU()), backend="eager")  # type: ignore[call-overload]
    assert len(fitted(make_trainer, Stepping(net), when="only").modules) == 3


def test_layers_of_a_transformers_model_that_are_wrapped_by_compile() -> None:
    """Seen to fail: a checkpoint whose names transformers does not know, with a warning."""
    model = tiny_model()
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")  # type: ignore[assignment]
    batches = [{"input_ids": torch.zeros(1, 5, dtype=torch.long)}]
    with pytest.raises(UnsupportedModelError, match=r"1 modules are wrapped .*layers\.0, .*`layer\.compile\(\)`"):
        compress_in_memory(model, batches, RTN)
    model = tiny_model()
    model.model.layers[0].compile(backend="eager")
    assert len(compress_in_memory(model, batches, GPTQ).modules) == 14


def test_reading_back_of_parts_that_are_compiled_in_place(output_dir: Path) -> None:
    """What is read back computes with its own weights. Seen to fail: with those in memory."""
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    model[0].compile(backend="eager")
    copied: Any = copy_of(model)
    x = torch.randn(2, 16)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        assert torch.equal(copied(x), model(x))
        copied[0].weight.zero_()
        assert torch.equal(copied[0](x), copied[0].bias.expand(2, -1))
        assert not torch.equal(copied(x), model(x))


class Watcher:
    """As Lightning's PyTorchProfiler: hooks of it hold what cannot be copied."""

    def __init__(self) -> None:
        self.lock, self.seen = threading.Lock(), 0

    def see(self, *_: Any) -> None:
        self.seen += 1


def test_hooks_that_cannot_be_copied_are_shared() -> None:
    """Seen to fail: a checkpoint that is right, told as different, since it could not be read into a copy."""
    model, watcher = nn.Sequential(nn.Linear(16, 16)), Watcher()
    model[0].register_forward_hook(watcher.see)
    copy_of(model)(torch.randn(2, 16))
    assert watcher.seen == 1


class Features(Stepping):
    """Hooks of its own keep what its `forward` reads."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Tensor] = {}
        self.net[0].register_forward_hook(lambda module, args, output: self.seen.update(first=output))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.clear()
        return super().forward(x) + self.seen["first"].mean()


def test_hooks_around_a_module_are_around_its_copy(output_dir: Path) -> None:
    """Seen to fail: a checkpoint that is right, told as different, as the hook wrote to the original."""
    report = compress(Features(), [[torch.randn(4, 16)] for _ in range(2)], PER_CHANNEL, output_dir)
    assert report.verification is not None
    assert report.verification.passed, report.verification.verdict


def test_outputs_are_compared_on_afew_tokens() -> None:
    """Of the sample that has most of them, wherever its padding is."""
    ids = torch.arange(600).reshape(2, 300)
    assert torch.equal(few_tokens({"input_ids": ids})["input_ids"], ids[:1, :FEW])
    assert torch.equal(few_tokens(ids), ids[:1, :FEW])
    mask = torch.ones_like(ids)
    mask[0, 50:], mask[1, :100] = 0, 0
    few = few_tokens({"input_ids": ids, "attention_mask": mask})
    assert torch.equal(few["input_ids"], ids[1:, 100 : 100 + FEW])
    assert few["attention_mask"].all()
    for other in ({"input_ids": ids, "pixel_values": ids}, {"input_ids": ids, "labels": torch.zeros(2)}, {"x": ids}):
        assert few_tokens(other) is other


class RowsTogether(LlamaForCausalLM):
    """Rows come in pairs."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:  # type: ignore[override]
        logits = super().forward(input_ids, attention_mask).logits
        return {"logits": logits.view(-1, 2, *logits.shape[1:]).sum(1)}


@pytest.mark.filterwarnings("ignore::lightning_compress.export.verify.ReadBackWarning")
def test_a_model_that_takes_rows_together(output_dir: Path) -> None:
    """Outputs are compared on a whole batch then. Seen to fail: on one row."""
    batches = [{"input_ids": torch.randint(1, 50, (4, length))} for length in (9, 12)]
    model = RowsTogether(tiny_model().config).eval()
    report = compress(model, batches, GPTQ, output_dir)
    assert report.verification is not None
    assert report.verification.passed
    assert report.verification.max_abs_difference == 0


class Hidden(TinyModule):
    """Its step has a way of its own to the model."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = [self.model]

    def calibration_step(self, batch: dict[str, Tensor]) -> Any:
        return self.ways[0](**batch)


def test_a_step_that_cannot_be_sent_through_what_is_read_back(make_trainer: Any, output_dir: Path) -> None:
    """Seen to fail: outputs of the model in memory, twice, that were of course the same."""
    callback = compression(RTN, output_dir)
    make_trainer(callback).fit(Hidden(), loader())
    assert callback.report is not None
    verification = callback.report.verification
    assert verification is not None
    assert verification.passed
    assert (verification.max_abs_difference, verification.batch) == (None, "none")


class Counts(Stepping):
    """Keeps what every forward adds to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.sums, self.seen = torch.zeros(2), list[int]()

    def forward(self, x: Tensor) -> Tensor:
        if self.training or torch.is_grad_enabled() or not self._is_calibrated:
            self.count += 1
            self.sums += 1
            self.seen.append(1)
        return super().forward(x)

    _is_calibrated = False


def test_trying_a_batch_leaves_nothing(make_trainer: Any) -> None:
    """Seen to fail: counters, metrics and lists that had one more."""
    module = Counts()
    found: list[tuple[float, float, int]] = []

    class Looks(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            found.append((float(module.count), float(module.sums[0]), len(module.seen)))
            module._is_calibrated = True

    callback = compression(PER_CHANNEL)
    make_trainer(callback, Looks()).fit(module, images())
    assert found == [(4, 4, 4)]


class Crowded(Counts):
    """Runs out of the device's memory at the batch that is tried."""

    def forward(self, x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


@pytest.mark.filterwarnings("ignore:.fit. ended by")
def test_a_batch_that_finds_no_room_is_said_to_be_one(make_trainer: Any) -> None:
    """Seen to fail: a `calibration_step` was asked for."""
    with pytest.raises(torch.OutOfMemoryError) as caught:
        make_trainer(compression(PER_CHANNEL)).fit(Crowded(), images())
    assert "tried before the training: give a smaller batch size" in caught.value.__notes__[0]


class Worded(Stepping):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 4))

    def calibration_step(self, batch: Any) -> Tensor:
        return self.net(batch[0].abs().long())  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.fit. ended by")
def test_a_table_is_asked_before_the_device_is(make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU would say of rows that there are not only that something failed, somewhere later."""

    def refusing(table: nn.Embedding, arguments: Any) -> None:
        raise IndexError(table.num_embeddings)

    monkeypatch.setattr(execute, "check_rows", refusing)
    module = Worded()
    with pytest.raises(
        UnsupportedModelError, match=r"IndexError: net.0 \(Embedding\) has 8 rows, and a batch asks for"
    ):
        make_trainer(compression(PER_CHANNEL)).fit(module, images())
    assert not module.net[0]._forward_pre_hooks  # type: ignore[index]


@pytest.mark.filterwarnings("ignore:.*num_workers")
def test_gradients_of_ddp_are_gone_when_calibration_begins(make_trainer: Any) -> None:
    """Seen to fail: its buckets, a copy of all gradients, stayed on the device."""
    times, is_wrapped = 0, True

    class Wrapped(Stepping):
        def calibration_step(self, batch: Any) -> Tensor:
            nonlocal times, is_wrapped  # a list would forget what is put into it while the step is recorded
            times, is_wrapped = times + 1, isinstance(self.trainer.strategy.model, DistributedDataParallel)
            return super().calibration_step(batch)

    make_trainer(compression(PER_CHANNEL), strategy="ddp").fit(Wrapped(), images())
    assert times > 1
    assert not is_wrapped


class Encoder(Stepping):
    """torch's own layers, which run as one fused kernel in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.net = nn.TransformerEncoder(layer, 2)

    def calibration_step(self, batch: Any) -> Tensor:
        padding = torch.zeros(batch[0].shape[:2], dtype=torch.bool)
        padding[0, 3:] = True
        return self.net(batch[0], src_key_padding_mask=padding)  # type: ignore[no-any-return]


def test_fused_layers_are_run_module_by_module(make_trainer: Any) -> None:
    """Seen to fail: their Linears never called, and tensors of unequal rows where there is padding."""
    module = Encoder()
    names = list(module.state_dict())
    report = fitted(make_trainer, module, 6, 16)
    parts = ["k_proj", "linear1", "linear2", "out_proj", "q_proj", "v_proj"]
    assert sorted({record.module.rpartition(".")[2] for record in report.modules}) == parts
    assert not report.excluded
    assert list(module.state_dict()) == names
    assert torch.backends.mha.get_fastpath_enabled()


def test_fused_layers_quantize_their_inputs(make_trainer: Any, tmp_path: Path) -> None:
    """Seen to fail: an encoder gave its layers nested tensors, which only fused kernels take."""
    module, folder = Encoder(), tmp_path / "w8"
    scheme = {"weights": CHANNEL | {"num_bits": 8}, "input_activations": {"num_bits": 8, "strategy": "token"}}
    scheme["input_activations"] |= {"type": "int", "symmetric": True, "dynamic": True}
    recipe = {"modifiers": [{"algorithm": "rtn", "scheme": scheme}]}
    make_trainer(compression(recipe, folder)).fit(module, images(6, 16))
    fresh = load_compressed(Encoder(), folder)
    batch = next(iter(images(6, 16)))
    with torch.no_grad():
        found = module.eval().calibration_step(batch)
        assert torch.equal(fresh.eval().calibration_step(batch), found)
        load_compressed(plain := Encoder(), folder)
        assert len(read_whole(plain)) == 12
        assert not torch.equal(plain.eval().calibration_step(batch), found), "inputs of attention are quantized, too"


def test_weights_that_are_computed() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(16, 16)), nn.Linear(16, 4))
    with pytest.raises(UnsupportedModelError, match=r"0 \(.*\[16, 16\]\) cannot .*remove_parametrizations.*ignore"):
        compress_in_memory(model, [torch.randn(8, 16)], PER_CHANNEL)


class Switches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.autocast("cpu", torch.bfloat16):
            return self.second(x)  # type: ignore[no-any-return]


def test_autocast_is_as_before_when_a_model_is_refused() -> None:
    """Seen to fail: on, for the rest of the process."""
    with pytest.raises(UntraceableModelError, match="autocast"):
        compress_in_memory(Switches(), [torch.randn(8, 16)], PER_CHANNEL)
    assert not torch.is_autocast_enabled("cpu")
    assert nn.Linear(16, 4)(torch.randn(2, 16)).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


class LoraLinear(nn.Module):
    """As peft has it."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.a, self.b = nn.Linear(16, 2, bias=False), nn.Linear(2, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.b(self.a(x))  # type: ignore[no-any-return]

    def merge(self) -> None:
        self.base_layer.weight.data += self.b.weight @ self.a.weight


class Adapted(Stepping):
    def __init__(self, merges: bool) -> None:
        super().__init__()
        self.net[0] = LoraLinear(self.net[0])  # type: ignore[index, operator, arg-type]
        self.merges = merges

    def on_train_end(self) -> None:
        if self.merges:
            self.net[0].merge()  # type: ignore[index, union-attr, operator]
            self.net[0] = self.net[0].base_layer  # type: ignore[index, union-attr, operator]


@pytest.mark.filterwarnings("ignore:.fit. ended by")
def test_adapters_are_merged_before(make_trainer: Any) -> None:
    """Seen to fail: merging at the end of the training was refused at its beginning."""
    with pytest.raises(UnsupportedModelError, match=r"1 modules carry adapters .*net.0.*merge_and_unload"):
        fitted(make_trainer, Adapted(merges=False))
    with pytest.raises(UnsupportedModelError, match="merge_and_unload"):
        fitted(make_trainer, Adapted(merges=False), when="only")
    assert len(fitted(make_trainer, Adapted(merges=True)).modules) == 2


@pytest.mark.filterwarnings("ignore:.fit. ended by")
def test_adapters_that_nothing_merges_are_told_of_before(make_trainer: Any) -> None:
    """Seen to fail: refused behind the training, and not a word before it."""

    class Forgets(Stepping):
        def __init__(self) -> None:
            super().__init__()
            self.net[0] = LoraLinear(self.net[0])  # type: ignore[index, operator, arg-type]

    told = r"1 modules carry adapters \(net.0, ...\).* define `on_train_end` in Forgets"
    with pytest.warns(UserWarning, match=told), pytest.raises(UnsupportedModelError, match="merge_and_unload"):
        fitted(make_trainer, Forgets())


def test_learned_prompts_are_refused() -> None:
    """peft's prompts come before the tokens in code of its own. Seen to fail: calibrated without them."""
    module = Stepping()
    module.net.peft_config = {"default": SimpleNamespace(is_prompt_learning=True)}  # type: ignore[assignment]
    with pytest.raises(UnsupportedModelError, match=r"net \(Sequential\) has learned prompts.*get_base_model"):
        compress_in_memory(module, list(images()), PER_CHANNEL)


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_a_weight_without_numbers() -> None:
    """Seen to fail: ZeroDivisionError where the checkpoint is laid out."""
    module = Stepping(nn.Sequential(nn.Linear(16, 0), nn.Linear(0, 4)))
    with pytest.raises(UnsupportedModelError, match=r"net.0 has a weight of shape \[0, 16\], without numbers"):
        compress_in_memory(module, list(images()), PER_CHANNEL)


def test_what_stays_in_other_processes_is_told_before(make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: `report` was None behind `ddp_spawn`, without a word."""
    monkeypatch.setattr(compat, "spawns", lambda trainer: True)
    trainer = make_trainer(compression(PER_CHANNEL))
    with pytest.warns(UserWarning, match="`report` stays.*quantized weights, but neither.*load here into it"):
        warn_of_later(trainer, Stepping(), "here")


def test_a_recipe_without_data_asks_for_none_with_adapters_either(make_trainer: Any, tmp_path: Path) -> None:
    callback = compression({"modifiers": [{"algorithm": "rtn", "scheme": {"weights": CHANNEL}}]})
    x = torch.randn(8, 16)
    ragged = [[x[:4], torch.zeros(4, dtype=torch.long), "a"], [x[4:], torch.zeros(4, dtype=torch.long), "b"]]

    class Named(Adapted):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch[:2], batch_idx)

    make_trainer(callback).fit(Named(merges=True), DataLoader(ragged, batch_size=None))  # type: ignore[arg-type]
    assert callback.report is not None
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    module = Named(merges=True)
    with pytest.raises(OutputDirectoryError, match="was not written by"):
        make_trainer(compression(RTN, tmp_path / "mine")).fit(module, DataLoader(ragged, batch_size=None))  # type: ignore[arg-type]
    assert module.num_steps == 0


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_averages_do_not_come_back(make_trainer: Any, output_dir: Path, tmp_path: Path) -> None:
    """Seen to fail: what was validated and saved afterwards was the average, not quantized."""
    seen: list[dict[str, Tensor]] = []

    class Validated(TinyModule):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(weights_of(self.model))

    module = Validated()
    trainer = make_trainer(EMAWeightAveraging(decay=0.5), compression(RTN, output_dir))
    trainer.fit(module, loader())
    seen.clear()
    trainer.validate(module, loader())
    assert same(seen[0], exported(output_dir))
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    saved = torch.load(tmp_path / "after.ckpt", weights_only=False)["state_dict"]
    assert same({name.removeprefix("model."): value for name, value in saved.items()}, exported(output_dir))


class Pools(TinyModule):
    """Its own code reads the mask."""

    def calibration_step(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(**batch).logits
        mask = batch["attention_mask"].unsqueeze(-1)
        return (logits * mask).sum(1) / mask.sum(1)


def test_masks_that_mask_nothing_reach_code_that_reads_them(make_trainer: Any) -> None:
    """Seen to fail: KeyError."""
    masked = [{**sample, "attention_mask": torch.ones_like(sample["input_ids"])} for sample in samples()]
    callback = compression(GPTQ)
    make_trainer(callback).fit(Pools(), DataLoader(masked, BATCH_SIZE))  # type: ignore[arg-type]
    assert callback.report is not None


class Reads(TinyModule):
    """By attributes, as a BatchEncoding has them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step({"input_ids": batch.input_ids}, batch_idx)

    def calibration_step(self, batch: Any) -> Any:
        return self.model(input_ids=batch.input_ids)


def test_batches_reach_code_as_they_are(make_trainer: Any, output_dir: Path) -> None:
    """Also what is read back. Seen to fail: 'dict' object has no attribute 'input_ids'."""
    callback = compression(GPTQ, output_dir)
    batches = [BatchEncoding(default_collate(samples(4, start))) for start in range(3)]
    make_trainer(callback).fit(Reads(), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    assert callback.report is not None
    assert callback.report.verification is not None
    assert callback.report.verification.max_abs_difference == 0


@pytest.mark.parametrize(
    ("batch", "number"),
    [
        ({"input_ids": torch.zeros(4, 7), "pixel_values": torch.zeros(600, 4)}, 4),
        ({"boxes": torch.zeros(600, 4), "image": torch.zeros(4, 3, 8, 8), "label": torch.zeros(4)}, 4),
        ([torch.zeros(5, 3), torch.zeros(5)], 5),
        (torch.zeros(3, 2), 3),
        ({"n": 3}, 1),
        ([torch.zeros(8, 3, 4, 4), [{"boxes": torch.zeros(1, 4), "labels": torch.zeros(1)}] * 8], 8),
        ({"x": torch.zeros(8, 4), "scale": torch.zeros(1), "mean": torch.zeros(1, 4)}, 8),
        ({"x": torch.zeros(8, 4), "a": torch.zeros(0, 2), "b": torch.zeros(0, 2)}, 8),
        ([torch.zeros(0, 2)], 1),
        ({name: BatchEncoding({"input_ids": torch.zeros(4, 7)}) for name in ("query", "doc")}, 4),
    ],
)
def test_samples_are_counted(batch: Any, number: int) -> None:
    """Seen to fail: as many as the longest tensor is long, so that most of the data was left out."""
    assert _num_samples(batch) == number


def test_an_unfinished_folder_is_told_before_the_training(
    make_trainer: Callable[..., pl.Trainer], output_dir: Path
) -> None:
    output_dir.mkdir()
    (output_dir / INCOMPLETE).touch()
    with pytest.warns(UserWarning, match=r"holds an unfinished compression.*resume='never'"):
        make_trainer(CompressionCallback(RTN, output_dir)).fit(TinyModule(), loader())
