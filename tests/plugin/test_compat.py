"""What this package needs of Lightning beyond its public interface, and what it refuses."""

import inspect
import re
import typing
from typing import Any

import lightning
import lightning.pytorch as pl
import pytest
import pytorch_lightning as other_tree
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
from packaging.version import Version
from torch.utils.data import DataLoader

from lightning_compress import CompressionCallback, Compressor
from lightning_compress.command.ranks import ranks_of
from lightning_compress.plugin import compat

from .conftest import RTN, TinyModule, compression, loader, tiny_model


def test_the_installed_minor_is_the_tested_one() -> None:
    """Fails when Lightning moves on: read its release notes, run this folder, then widen `TESTED_MINOR`."""
    assert Version(lightning.__version__).release[:2] == compat.TESTED_MINOR
    compat.check_lightning()


@pytest.mark.parametrize("version", ["2.5.6", "2.7.0", "2.7.0.dev20260101", "3.0.0"])
def test_other_minors_are_refused(make_trainer: Any, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(lightning, "__version__", version)
    module = TinyModule()
    with pytest.raises(
        ImportError, match=rf"tested with lightning 2\.6\.\*, but {re.escape(version)} is installed.*pip install"
    ):
        make_trainer(compression()).fit(module, loader())
    assert module.losses == []


def test_private_names_exist(make_trainer: Any) -> None:
    """Each private name that `compat` uses on objects (those it imports fail at import)."""
    trainer, module = make_trainer(), TinyModule()
    trainer.fit(module, loader())
    loop = trainer.fit_loop
    assert isinstance(loop, compat.FitLoop)
    assert isinstance(trainer._logger_connector, _LoggerConnector)
    for name in (
        "on_batch_start",
        "on_batch_end",
        "update_train_step_metrics",
        "epoch_end_reached",
        "on_epoch_end",
        "reset_results",
    ):
        assert callable(getattr(trainer._logger_connector, name))
    assert isinstance(loop._data_source.instance, DataLoader)
    assert loop._data_source.is_defined()
    assert callable(module._apply_batch_transfer_handler)
    assert compat.logged_steps(loop) == loop.epoch_loop._batches_that_stepped == 4
    for progress in (
        loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step,
        loop.epoch_loop.manual_optimization.optim_step_progress,
    ):
        assert callable(progress.increment_completed)


def test_private_names_stay_in_one_file() -> None:
    """The other files of the folder ask Lightning for public names only."""
    folder = compat.__file__.rpartition("/")[0]
    for file in ("callback", "loop", "strategy", "compressor", "data"):
        with open(f"{folder}/{file}.py") as source:
            text = source.read()
        assert not re.search(r"(trainer|pl_module|lightning_module|fit_loop|strategy|epoch_loop)\._[a-z]", text), file
        assert not re.search(r"from lightning\S* import .*\b_[a-zA-Z]", text), file


# ---- the `pytorch_lightning` class tree


class OtherModule(other_tree.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_model()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch, labels=batch["input_ids"]).loss

    def configure_optimizers(self) -> None:
        return None


def other_trainer(*callbacks: Any) -> Any:
    return other_tree.Trainer(
        accelerator="cpu", logger=False, max_epochs=1, enable_checkpointing=False, callbacks=list(callbacks)
    )


def test_a_trainer_of_the_other_tree_is_refused() -> None:
    with pytest.raises(TypeError, match=r"`pytorch_lightning` package.*`lightning\.pytorch`"):
        Compressor(other_trainer()).compress(tiny_model(), recipe=RTN, output_dir=None)
    with pytest.raises((TypeError, ValueError), match=r"pytorch_lightning|lightning\.pytorch"):
        other_trainer(compression(RTN)).fit(OtherModule(), loader())
    with pytest.raises(TypeError, match="`pytorch_lightning` package"):
        compression(RTN).setup(other_trainer(), TinyModule(), "fit")


def test_a_module_of_the_other_tree_is_refused(make_trainer: Any) -> None:
    with pytest.raises(TypeError, match="OtherModule comes from the `pytorch_lightning` package"):
        Compressor(make_trainer()).compress(OtherModule(), recipe=RTN, output_dir=None)
    with pytest.raises(TypeError, match="must be a `LightningModule`"):  # by Lightning, before any hook
        make_trainer(compression(RTN)).fit(OtherModule(), loader())


def test_a_datamodule_of_the_other_tree_is_refused(make_trainer: Any) -> None:
    with pytest.raises(TypeError, match="LightningDataModule comes from the `pytorch_lightning` package"):
        Compressor(make_trainer()).compress(
            tiny_model(), recipe=RTN, output_dir=None, datamodule=other_tree.LightningDataModule()
        )


# ---- LightningCLI


def test_the_callback_is_typed_and_documented() -> None:
    """LightningCLI reads types from `__init__` and texts from the docstring."""
    hints = typing.get_type_hints(CompressionCallback.__init__)
    names = list(inspect.signature(CompressionCallback).parameters)
    documentation = inspect.getdoc(CompressionCallback) or ""
    assert set(names) <= set(hints)
    assert all(re.search(rf"^ +{name}: ", documentation, re.MULTILINE) for name in names)


def test_lightning_cli_by_class_path(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonargparse")
    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning still uses what jsonargparse renamed
    from lightning.pytorch.cli import LightningCLI

    arguments = [
        "--trainer.callbacks+=lightning_compress.CompressionCallback",
        "--trainer.callbacks.recipe=w4a16_rtn",
        f"--trainer.callbacks.output_dir={tmp_path / 'out'}",
        "--trainer.callbacks.when=only",
        "--trainer.logger=false",
        "--seed_everything=0",
    ]
    cli = LightningCLI(TinyModule, pl.LightningDataModule, args=arguments, run=False, save_config_callback=None)
    (callback,) = (one for one in cli.trainer.callbacks if isinstance(one, CompressionCallback))
    assert callback.when == "only"


@pytest.mark.parametrize("by_torchrun", [False, True])
def test_who_starts_the_ranks(by_torchrun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: under torchrun a multirun was refused, with the advice to use torchrun."""
    if by_torchrun:
        for name in ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "GROUP_RANK"):
            monkeypatch.setenv(name, "0")
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.setenv(name, "2")
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False)
    assert compat.starts_scripts(trainer) is not by_torchrun


def test_the_device_that_is_meant_is_the_current_one(make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is measured. Seen to fail: of several cards the first was, whatever `devices` said."""
    trainer, found = make_trainer(), []
    monkeypatch.setattr(trainer.accelerator, "setup_device", found.append)
    with ranks_of(trainer):
        assert found == [trainer.strategy.root_device]
