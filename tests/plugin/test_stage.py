"""The compression stage as Lightning's other parts see it: bars, loggers, profilers, other callbacks."""

import csv
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import (
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    ModelCheckpoint,
    ModelSummary,
    RichProgressBar,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import PyTorchProfiler, SimpleProfiler

from lightning_compress.plugin.callback import CompressionCallback

from .conftest import RTN, Bystander, TinyModule, compression, loader

SUBGRAPHS = ["model.embed_tokens", "model.layers.0", "model.layers.1"]
DESCRIPTIONS = [*(f"Compressing {name}" for name in SUBGRAPHS), "Writing", "Compressed"]


class CountsHooks(Callback):
    """Stands for averaging, pruning and the like: whatever acts in training and is unknown to us."""

    def __init__(self) -> None:
        self.batches = 0
        self.train_ends = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches += 1

    def on_train_end(self, *args: Any) -> None:
        self.train_ends += 1


def rows(logger: CSVLogger) -> list[dict[str, str]]:
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_metrics_of_each_subgraph_with_increasing_steps(make_trainer: Any, tmp_path: Path) -> None:
    """`accumulate_grad_batches` and `log_every_n_steps` are for training. Fails without `set_logged_steps`."""
    logger = CSVLogger(tmp_path)
    callback = compression()
    make_trainer(callback, logger=logger, log_every_n_steps=2, accumulate_grad_batches=2).fit(TinyModule(), loader(32))
    logged = rows(logger)
    trained = [int(row["step"]) for row in logged if row.get("loss")]
    compressed = [row for row in logged if row.get("compress/error")]
    steps = [int(row["step"]) for row in compressed]
    assert trained
    assert steps == list(range(max(trained) + 1, max(trained) + 4))
    assert callback.report is not None
    assert [float(row["compress/error"]) for row in compressed] == pytest.approx(
        [r.mean_error for r in callback.report.subgraphs]
    )
    assert [float(row["compress/tokens"]) for row in compressed] == [0.0, 384.0, 384.0]
    for name in ("onload_s", "run_s", "solve_s", "peak_memory_bytes"):
        assert all(float(row[f"compress/{name}"]) >= 0 for row in compressed)


def test_metrics_can_be_read_from_the_trainer(make_trainer: Any) -> None:
    trainer = make_trainer(compression(RTN, when="only"))
    trainer.fit(TinyModule(), loader())
    assert trainer.callback_metrics["compress/error"] > 0


def test_tqdm_shows_subgraphs(
    make_trainer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

    seen: list[str] = []
    original = Tqdm.set_description
    monkeypatch.setattr(
        Tqdm, "set_description", lambda self, text, *args: (seen.append(text), original(self, text, *args))[1]
    )
    callback = compression()
    make_trainer(callback, TQDMProgressBar(), enable_progress_bar=True).fit(TinyModule(), loader())
    assert seen == ["Epoch 0", "Epoch 0", *DESCRIPTIONS]
    shown = capsys.readouterr().out
    assert "Compressing model.layers.1:  67%" in shown
    assert "Compressed: 100%" in shown
    assert "3/3" in shown


def test_rich_shows_subgraphs(make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.callbacks.progress.rich_progress import CustomProgress

    seen: list[str] = []
    original = CustomProgress.update

    def update(self: Any, task_id: Any, **options: Any) -> None:
        original(self, task_id, **options)
        if "description" in options:
            seen.append(options["description"])
            assert self.tasks[task_id].total == 3

    monkeypatch.setattr(CustomProgress, "update", update)
    make_trainer(compression(), RichProgressBar(), enable_progress_bar=True).fit(TinyModule(), loader())
    assert seen == DESCRIPTIONS


def test_profiler_has_the_sections(make_trainer: Any) -> None:
    profiler = SimpleProfiler()
    make_trainer(compression(), profiler=profiler).fit(TinyModule(), loader())
    durations = {
        name: len(times) for name, times in profiler.recorded_durations.items() if "lightning_compress]" in name
    }
    assert durations == {
        "[lightning_compress]prepare": 1,
        "[lightning_compress]subgraph.training_step": 3,
        "[lightning_compress]export": 1,
    }
    assert "run_training_epoch" in profiler.recorded_durations


@pytest.mark.filterwarnings("ignore:The PyTorch Profiler default schedule will be overridden")  # of three steps
def test_a_profiler_of_steps_where_nothing_is_trained(make_trainer: Any, tmp_path: Path) -> None:
    """It begins to record at its second step, and raised behind the finished run when nothing was one."""
    profiler = PyTorchProfiler(dirpath=tmp_path, filename="profile")
    callback = compression(when="only")
    make_trainer(callback, profiler=profiler).fit(TinyModule(), loader())
    assert callback.report is not None
    assert "[lightning_compress]subgraph" in next(tmp_path.glob("*.txt")).read_text()


def test_bystanders_take_part_and_others_do_not(make_trainer: Any, tmp_path: Path) -> None:
    """EarlyStopping on a training metric raised, averaging overwrote compressed weights, when all took part."""
    counts, module = CountsHooks(), TinyModule()
    callback, bystander = compression(), Bystander(lambda: present.append(list(trainer.callbacks)))
    present: list[list[Callback]] = []
    checkpoint = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=1, save_top_k=-1)
    trainer: pl.Trainer = make_trainer(
        counts,
        callback,
        EarlyStopping("loss", check_on_train_epoch_end=True),
        checkpoint,
        bystander,
        TQDMProgressBar(),
        ModelSummary(),
        DeviceStatsMonitor(),
        enable_checkpointing=True,
        enable_progress_bar=True,
        enable_model_summary=True,
        log_every_n_steps=1,
        logger=CSVLogger(tmp_path),
    )
    trainer.fit(module, loader())
    assert callback.report is not None
    assert (counts.batches, counts.train_ends) == (4, 1)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 4
    assert len(present) == 3
    assert {type(one) for one in present[0]} == {
        CompressionCallback,
        Bystander,
        TQDMProgressBar,
        ModelSummary,
        DeviceStatsMonitor,
    }
    assert bystander.time_elapsed("train") > 0
    logged = rows(trainer.logger)  # type: ignore[arg-type]
    assert any(row.get("compress/error") for row in logged)
    assert any(key.startswith("DeviceStatsMonitor.on_train_batch_end") for key in logged[-1])


def test_a_timer_that_ended_training_does_not_end_compression(make_trainer: Any) -> None:
    """`should_stop` is training's; the clock of the compression starts anew."""
    module, callback = TinyModule(), compression()
    trainer = make_trainer(callback, Timer(duration={"seconds": 20}), max_epochs=3)
    module.on_train_batch_end = lambda *args: setattr(trainer, "should_stop", True)  # type: ignore[method-assign]
    trainer.fit(module, loader())
    assert len(module.losses) == 1
    assert callback.report is not None
    assert not callback.report.is_partial


@pytest.mark.slow
def test_a_timer_ends_a_compression_behind_a_training(make_trainer: Any) -> None:
    """Seen to fail: with the end of the training as the time that it is by its clock."""
    callback, slow = compression(), Bystander(lambda: time.sleep(2.1), duration={"seconds": 2})
    make_trainer(callback, slow).fit(TinyModule(), loader())
    assert callback.report is not None
    assert callback.report.is_partial
    assert len(callback.report.subgraphs) == 2
    assert slow.time_elapsed("train") > 2
