"""What a training run takes of memory, foreseen on fake tensors and measured: equal to the byte on a CPU."""

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from helpers import NEEDS_RECENT, tiny_mixtral
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader, IterableDataset, Sampler

from lightning_compress import CompressionError, MemoryReport, MemoryReportCallback
from lightning_compress.calibration.quantized import InputQuantizer, quantize_inputs
from lightning_compress.foresight.jobs import Phase
from lightning_compress.plugin.memory_report import MemoryRow
from tests.plugin.conftest import VOCABULARY, tiny_model

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, foreach=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=False),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
}


class Perceptron(pl.LightningModule):
    """Remembers the batches it saw, and keeps outputs for the epoch's end."""

    def __init__(self, make: Make = OPTIMIZERS["adam"], fails_at: int | None = None) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(40, 70), nn.BatchNorm1d(70), nn.ReLU(), nn.Dropout(0.3), nn.Linear(70, 30), nn.Linear(30, 1)
        )
        self.make, self.fails_at = make, fails_at
        self.outputs: dict[str, list[Tensor]] = {"train": []}
        self.seen: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        if batch_idx == self.fails_at:
            raise ArithmeticError("as told")
        predicted = self.layers(batch[0])
        self.outputs["train"].append(predicted.detach())
        return {"loss": (predicted[:, 0] - batch[1]).square().mean(), "predicted": predicted.detach()}

    def on_train_batch_end(self, outputs: Any, batch: list[Tensor], batch_idx: int) -> None:
        self.seen.append(batch[1].clone())

    def on_train_epoch_end(self) -> None:
        torch.cat(self.outputs["train"]).mean().item()  # fails on fake tensors

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(5)
        data = torch.utils.data.TensorDataset(torch.randn(48, 40, generator=generator), torch.arange(48.0))
        return DataLoader(data, batch_size=8, shuffle=True)


class Llama(Perceptron):
    """A language model, the embeddings of which are frozen."""

    def __init__(self, make: Make = OPTIMIZERS["adam"]) -> None:
        super().__init__(lambda _: make([p for p in self.layers.parameters() if p.requires_grad]))
        self.layers = tiny_model()  # type: ignore[assignment]
        self.layers.get_input_embeddings().requires_grad_(False)  # type: ignore[operator]

    def training_step(self, batch: Tensor) -> Tensor:  # type: ignore[override]
        loss: Tensor = self.layers(input_ids=batch, labels=batch, use_cache=False).loss
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass

    def on_train_epoch_end(self) -> None:
        pass

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randint(VOCABULARY, (24, 12)), batch_size=4)  # type: ignore[arg-type]


class Mixture(Llama):
    """Experts in float32, whose grouped product torch takes no tensors without values of."""

    def __init__(self, make: Make = OPTIMIZERS["adam"]) -> None:
        super().__init__(make)
        self.layers = tiny_mixtral(1, 4).train()  # type: ignore[assignment]


def fit(module: pl.LightningModule, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, *options.pop("callbacks", ())],
        **options,
    )
    trainer.fit(module)
    return trainer


def report(module: pl.LightningModule, **options: Any) -> MemoryReport:
    callback = MemoryReportCallback()
    fit(module, callback, **options)
    assert callback.report is not None
    return callback.report


@pytest.mark.sampled(3)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("module", [Perceptron, Llama])
def test_foreseen_is_measured(module: Any, optimizer: str) -> None:
    """To the byte.

    Seen to fail: with gradients set to None before the forward, as loops other than Lightning's do (the forward is
    foreseen too low, and all else is equal); without the copy of the loss that Lightning keeps (4 bytes in `step`);
    with the `step` that a scheduler puts on the optimizer (that of the real one).
    """
    found = report(module(OPTIMIZERS[optimizer]))
    assert [row.phase for row in found.rows] == ["forward", "backward", "step"]
    assert [row.foreseen_bytes for row in found.rows] == [row.measured_bytes for row in found.rows]
    assert [row.error for row in found.rows] == [0.0] * 3
    assert not found.notes
    assert found.num_steps == 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"accumulate_grad_batches": 3},
        {"gradient_clip_val": 0.5},
        {"callbacks": [GradientAccumulationScheduler({0: 3})]},
    ],
)
def test_options_of_the_trainer(options: dict[str, Any]) -> None:
    """Seen to fail: without the precision plugin's context; with one batch per step; without clipping; a schedule that
    says of the first epoch what `accumulate_grad_batches` does not yet."""
    found = report(Llama(OPTIMIZERS["adam" if "precision" in options else "sgd"]), **options)
    assert [row.foreseen_bytes for row in found.rows] == [row.measured_bytes for row in found.rows]


def test_a_step_that_takes_its_batch_apart() -> None:
    """Also where anomalies are looked for, which are values. Seen to fail: a KeyError in the second step."""

    class Takes(Llama):
        def training_step(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
            ids = batch.pop("ids")
            loss: Tensor = self.layers(input_ids=ids, labels=ids, use_cache=False).loss
            return loss

        def train_dataloader(self) -> Any:
            return DataLoader([{"ids": row} for row in torch.randint(VOCABULARY, (24, 12))], batch_size=4)  # type: ignore[arg-type]

    for options in ({}, {"detect_anomaly": True}):
        found = report(Takes(OPTIMIZERS["sgd"]), **options)
        assert not found.notes
        assert [row.error for row in found.rows] == pytest.approx([0.0] * 3, abs=1e-4)


def test_an_epoch_that_a_hook_ends() -> None:
    """Seen to fail: the tracker stayed on for everything behind the run."""

    class Ends(Perceptron):
        def on_fit_start(self) -> None:
            self.trainer.fit_loop.max_epochs = 3

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 1 else None

    before = _get_current_dispatch_mode_stack()
    fit(Ends(), MemoryReportCallback())
    assert _get_current_dispatch_mode_stack() == before


def test_inputs_that_are_quantized() -> None:
    """A module that was compressed before is trained with them. Seen to fail: foreseen without."""
    module = Llama()
    args = QuantizationArgs(num_bits=8, strategy="token", dynamic=True)
    for each in module.layers.modules():
        if isinstance(each, nn.Linear):
            quantize_inputs(each, InputQuantizer(args))
    assert [row.error for row in report(module).rows] == pytest.approx([0.0] * 3, abs=1e-3)


def test_distributed_data_parallel() -> None:
    """Its buckets are as large as the gradients, and always there. Seen to fail: without them."""
    found = report(Llama(), strategy="ddp")
    assert [row.foreseen_bytes for row in found.rows] == [row.measured_bytes for row in found.rows]
    with pytest.warns(UserWarning, match="with gradient_as_bucket_view gradients live in DDP's buckets"):
        report(Llama(), strategy=DDPStrategy(gradient_as_bucket_view=True))


def test_what_it_consists_of() -> None:
    """Seen to fail: with all parameters trainable on the fake module, whatever they are on the real one."""
    module = Llama()
    forward, backward, step = (row.foreseen for row in report(module).rows)
    assert forward is not None
    assert backward is not None
    assert step is not None
    weights = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    trainable = sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
    assert {phase.weights for phase in (forward, backward, step)} == {weights}
    assert forward.gradients == step.gradients == trainable, "gradients of the step before, in the forward"
    assert step.optimizer == pytest.approx(2 * trainable, rel=0.01)
    assert step.stepping > trainable
    assert step.working == 4 * 12 * 8, "the batch"


def final(*callbacks: pl.Callback, **options: Any) -> tuple[list[Tensor], list[Tensor], Tensor]:
    torch.manual_seed(3)
    module = Perceptron()
    trainer = fit(module, *callbacks, **options)
    states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
    return [*module.state_dict().values(), *states], module.seen, torch.rand(1)


@pytest.mark.parametrize("foresee", [True, False])
def test_the_run_is_as_without(foresee: bool) -> None:
    """Weights, running means, the optimizer's state, the order of the data, the random numbers after: bit by bit.

    Seen to fail: without the random numbers put back (order and dropout differ); without the contents of the module's
    lists put back (the epoch's end meets tensors without values).
    """
    weights, order, after = final()
    watched, same_order, same_after = final(MemoryReportCallback(foresee=foresee))
    assert all(torch.equal(one, other) for one, other in zip(weights, watched, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(order, same_order, strict=True))
    assert torch.equal(after, same_after)


def test_a_loader_with_its_own_generator() -> None:
    """Seen to fail: without the generators put back."""

    class Own(Perceptron):
        def train_dataloader(self) -> Any:
            data = super().train_dataloader().dataset
            return DataLoader(data, 8, shuffle=True, generator=torch.Generator().manual_seed(1))

    class Drawing(Sampler[int]):
        def __init__(self) -> None:
            self.rng = random.Random(3)

        def __iter__(self) -> Iterator[int]:
            return iter(self.rng.sample(range(48), 48))

        def __len__(self) -> int:
            return 48

    class Sampled(Perceptron):
        def train_dataloader(self) -> Any:
            return DataLoader(super().train_dataloader().dataset, 8, sampler=Drawing())

    for kind in (Own, Sampled):
        plain, watched = kind(), kind()
        fit(plain)
        fit(watched, MemoryReportCallback())
        assert all(torch.equal(one, other) for one, other in zip(plain.seen, watched.seen, strict=True))


class Batches:
    """No DataLoader."""

    def __init__(self, data: list[list[Tensor]]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[list[Tensor]]:
        return iter(self.data)


class Reads(Llama):
    def training_step(self, batch: Tensor) -> Tensor:  # type: ignore[override]
        loss = super().training_step(batch)
        self.log("loss", loss.item())
        return loss


class Searches(Perceptron):
    """With an optimizer that compares losses."""

    def __init__(self) -> None:
        super().__init__(lambda parameters: torch.optim.LBFGS(parameters, max_iter=3))


class Manual(Perceptron):
    def __init__(self) -> None:
        super().__init__(OPTIMIZERS["sgd"])
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        for _ in range(2):
            loss = self.layers(batch[0]).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def on_train_epoch_end(self) -> None:
        pass


class Several(Perceptron):
    def train_dataloader(self) -> Any:
        return {"one": super().train_dataloader(), "other": super().train_dataloader()}

    def training_step(self, batch: dict[str, list[Tensor]], batch_idx: int) -> Any:  # type: ignore[override]
        return super().training_step(batch["one"], batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


class Stream(IterableDataset[Any]):
    """Which can be read once."""

    def __init__(self) -> None:
        self.items = iter(torch.randn(48, 41))

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        item = next(self.items)
        return [item[:40], item[40]]


class Once(Perceptron):
    def train_dataloader(self) -> Any:
        return DataLoader(Stream(), 8)


@pytest.mark.parametrize(
    ("module", "reason", "phases"),
    [
        (Reads, "training does not run on tensors without values: DataDependentOutput", 3),
        (Searches, "training does not run on tensors without values: DataDependentOutput", 3),
        (Manual, "with manual optimization, and with several optimizers, the steps are the module's own", 1),
        (Several, "there are several training dataloaders", 3),
        (Once, "the training dataloader cannot be begun twice", 3),
    ],
)
def test_measured_only(module: Any, reason: str, phases: int) -> None:
    """With a warning that says why.

    Seen to fail: without the check for manual optimization (its steps are foreseen as those of an automatic one), for
    several loaders, and for streams (which lose their first batch).
    """
    callback, watched = MemoryReportCallback(), module()
    with pytest.warns(UserWarning, match=f"nothing is foreseen, only measured: .*{reason}"):
        fit(watched, callback)
    assert callback.report is not None
    assert reason in callback.report.notes[0]
    assert len(callback.report.rows) == phases
    assert all(row.foreseen is None and row.error is None for row in callback.report.rows)
    assert all(row.measured_bytes for row in callback.report.rows)
    if module is Once:
        assert len(watched.seen) == 6, "no batch was lost"
    weights = [row.measured_bytes for row in callback.report.rows]
    assert min(size or 0 for size in weights) > sum(p.nbytes for p in watched.parameters())


@pytest.mark.parametrize("fails_at", [0, 1])
def test_a_failing_run(fails_at: int) -> None:
    """Nothing is followed any more afterwards.

    Seen to fail: without `on_exception` and `teardown`.
    """
    callback = MemoryReportCallback(foresee=False)
    met: list[Any] = []
    begin = callback.on_train_batch_start

    def remembered(*args: Any) -> None:
        met.append(callback._meter)
        begin(*args)

    callback.on_train_batch_start = remembered  # type: ignore[method-assign]
    with pytest.raises(ArithmeticError, match="as told"):
        fit(Perceptron(fails_at=fails_at), callback)
    before = len(met[-1]._memory.events)
    kept = torch.zeros(3) + 1
    assert len(met[-1]._memory.events) == before
    assert kept.sum() == 3
    assert callback.report is None


def test_short_runs_and_long_ones() -> None:
    """The report stands after enough steps, and after fewer if the run ends."""
    short = report(Perceptron(), max_steps=1)
    assert short.num_steps == 1
    assert "of which 1 ran" in short.notes[0]
    sizes = {row.phase: row for row in short.rows}
    assert sizes["step"].error == pytest.approx(0, abs=0.001), "of the output of one batch more"
    forward = sizes["forward"]
    assert forward.error is not None
    assert forward.error > 0, "the first forward has neither gradients nor states"
    callback = MemoryReportCallback(num_steps=5)
    fit(Perceptron(), callback)
    assert callback.report is not None
    assert callback.report.num_steps == 5


def test_logged_values_are_a_few_bytes() -> None:
    """What Lightning keeps of a logged value is measured, and not foreseen."""

    class Logs(Llama):
        def training_step(self, batch: Tensor) -> Tensor:  # type: ignore[override]
            loss = super().training_step(batch)
            self.log("loss", loss)
            return loss

    for row in report(Logs()).rows:
        assert row.foreseen_bytes is not None
        assert row.measured_bytes is not None
        assert 0 <= row.measured_bytes - row.foreseen_bytes <= 64


@pytest.mark.parametrize("is_loader", [True, False])
def test_batches_that_the_dataset_keeps(is_loader: bool) -> None:
    """They are no part of a step, but for the one at hand. Seen to fail: with batches followed like other tensors."""

    class Kept(Perceptron):
        def train_dataloader(self) -> Any:
            data = [[torch.randn(8, 40), torch.randn(8)] for _ in range(3)]
            return DataLoader(data, batch_size=None) if is_loader else Batches(data)  # type: ignore[arg-type]

    found = report(Kept())
    assert [row.error for row in found.rows] == [0.0] * 3


def test_an_operator_that_keeps_more() -> None:
    """The mean of `mse_loss` keeps, on a CPU, the storage of all squares, which tensors without values do not show."""

    class Squares(Perceptron):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            return nn.functional.mse_loss(self.layers(batch[0])[:, 0], batch[1])

        def on_train_epoch_end(self) -> None:
            pass

    for row in report(Squares()).rows:
        assert row.foreseen_bytes is not None
        assert row.measured_bytes is not None
        assert 0 <= row.measured_bytes - row.foreseen_bytes <= 8 * 4
        assert row.error == pytest.approx(0, abs=0.01)


@NEEDS_RECENT
def test_experts_in_float32() -> None:
    """But for numbers of tokens that the experts' code keeps. Seen to fail: with torch's refusal of such products."""
    for row in report(Mixture()).rows:
        assert row.foreseen_bytes is not None
        assert row.measured_bytes == pytest.approx(row.foreseen_bytes, abs=4 * 8)


@pytest.mark.parametrize(("kind", "is_told"), [(nn.LSTM, True), (nn.GRU, False)], ids=["lstm", "gru"])
def test_recurrent_layers(kind: type[nn.Module], is_told: bool) -> None:
    """Seen to fail: with nothing said of LSTMs, and with it said of GRUs."""

    class Recurrent(Perceptron):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.recurrent = nn.Sequential(nn.Linear(16, 1)), kind(8, 16, batch_first=True)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            return self.layers(self.recurrent(batch[0].reshape(-1, 5, 8))[0]).square().mean()

        def on_train_epoch_end(self) -> None:
            pass

    found = report(Recurrent())
    errors = [row.error for row in found.rows]
    assert [note.startswith("oneDNN runs recurrent as a whole (LSTM)") for note in found.notes] == [True] * is_told
    assert (errors == [0.0] * 3) == (not is_told)


def test_the_lines() -> None:
    rows = (MemoryRow("forward", Phase("forward", 3 << 20), 4 << 20), MemoryRow("batch", None, 1 << 20))
    lines = MemoryReport("cpu", rows, 1, ("A note.",)).lines()
    assert lines[1].split() == ["forward", "3.00", "4.00", "-25.0%"]
    assert lines[2].split() == ["batch", "-", "1.00"]
    assert lines[3] == "A note."
    assert all(len(one) <= 80 for one, _ in pairwise(lines))


def test_wrong_input() -> None:
    with pytest.raises(CompressionError, match="num_steps=0"):
        MemoryReportCallback(num_steps=0)
