"""`Compressor(trainer).compress(model)`: compression as one call, like `Tuner(trainer).lr_find`."""

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any, final

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer

from lightning_compress.graph.restore import assigned, owning
from lightning_compress.plugin import compat
from lightning_compress.plugin.callback import CompressionCallback
from lightning_compress.plugin.module import Adapter
from lightning_compress.recipe.load import RecipeLike
from lightning_compress.report.report import Report

_OF_TRAINING = (CompressionCallback, LearningRateFinder, BatchSizeFinder, BaseFinetuning, StochasticWeightAveraging)
"""Callbacks that sit out: there is no training that could be searched for its settings, that they could change, or that
a compression could follow."""
_LOADERS = "; loaders are given as `dataloaders`"


@final
class Compressor:
    """Compress models with an existing Trainer: its device, loggers, profiler and progress bar.

    Args:
        trainer: not changed; ideally made with `strategy="sequential_onload"`, which leaves the model in host memory.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer

    def compress(
        self,
        model: nn.Module,
        *,
        recipe: RecipeLike,
        output_dir: Any,
        dataloaders: Any | None = None,
        datamodule: pl.LightningDataModule | None = None,
        ckpt_path: Any | None = None,
        weights_only: bool | None = None,
        **options: Any,
    ) -> Report:
        """Quantize `model` and write it to `output_dir`.

        Args:
            model: a LightningModule, a transformers `PreTrainedModel`, or any module whose `forward` takes a batch.
            recipe: a shipped name, a path, a mapping, or a `Recipe`.
            output_dir: folder of the checkpoint and the report, or None.
            dataloaders: calibration data: a DataLoader, a collection of them, or any iterable of batches.
            datamodule: instead of `dataloaders`; its `calibration_dataloader()`, else its `train_dataloader()`.
            ckpt_path: a checkpoint that is loaded before, as by `trainer.fit`: of the LightningModule's weights
                (its epochs and optimizers are not restored); or one that was saved during this compression, which is
                then continued.
            weights_only: of that, as `trainer.fit` has it.
            options: further arguments of `CompressionCallback`.

        Raises:
            CompressionError: see `CompressionCallback`.
            ValueError: both `dataloaders` and `datamodule`.
            TypeError: a `trainer`, `model` or `datamodule` that is none, or of the `pytorch_lightning` package.
            RuntimeError: the run was interrupted, or its report stayed in processes that the strategy spawned.
        """
        if dataloaders is not None and datamodule is not None:
            raise ValueError("Give either `dataloaders` or `datamodule`, not both.")
        for given in (self._trainer, model, datamodule):
            compat.check_class_tree(given)
        _check_kinds(self._trainer, model, datamodule)
        callback = CompressionCallback(recipe, output_dir, when="only", calibration=dataloaders, **options)
        others = [other for other in compat.callbacks(self._trainer) if not isinstance(other, _OF_TRAINING)]
        with (
            _fittable(compat.unwrapped(model)) as carried,
            assigned(self._trainer, callbacks=[callback, *others]),
        ):
            # the loaders too, for optimizers that ask how long a training will be
            options = {"datamodule": datamodule, "ckpt_path": ckpt_path, "weights_only": weights_only}
            self._trainer.fit(carried, dataloaders, **options)
        if callback.report is None:
            if compat.spawns(self._trainer):
                raise RuntimeError(
                    f"{type(self._trainer.strategy).__name__} ran in processes of its own, where model and report "
                    f"stayed; what was written is in output_dir={output_dir}. Use strategy='sequential_onload' to have "
                    "them here."
                )
            raise RuntimeError("The run was interrupted before it ended; nothing was written.")
        return callback.report


def _check_kinds(trainer: object, model: object, datamodule: object) -> None:
    """
    Raises:
        TypeError: one is of another kind.
    """
    kinds: tuple[tuple[str, object, Any, str, str], ...] = (
        ("trainer", trainer, pl.Trainer, "a Trainer", ""),
        ("model", model, nn.Module, "a Module", "; a model is loaded before"),
        ("datamodule", datamodule, pl.LightningDataModule | None, "a LightningDataModule", _LOADERS),
    )
    for name, given, kind, wanted, remedy in kinds:
        if not isinstance(given, kind):
            raise TypeError(f"The {name} is {wanted}, not {_said(given)}{remedy}.")


def _said(given: object) -> str:
    """What was given, without all of its values."""
    if isinstance(given, type):
        return f"the class {given.__name__}"
    return repr(given) if isinstance(given, str | PathLike | None) else f"a {type(given).__name__}"


@contextmanager
def _fittable(model: nn.Module) -> Iterator[pl.LightningModule]:
    """What `Trainer.fit` takes: a LightningModule itself, for its hooks and the names in its checkpoints, with what
    `fit` asks for before any hook runs, where the class has none."""
    carried = model if isinstance(model, pl.LightningModule) else Adapter(model)
    stand_ins = {"training_step": _training_step, "configure_optimizers": _configure_optimizers}
    with owning(carried, {name: of for name, of in stand_ins.items() if not is_overridden(name, carried)}):
        yield carried


def _training_step(batch: Any, batch_idx: int) -> None:
    """Never called, for the compression stage runs in its place."""
    raise RuntimeError("A model that is only compressed cannot be trained.")


def _configure_optimizers() -> list[Optimizer]:
    """There is nothing to optimize."""
    return []
