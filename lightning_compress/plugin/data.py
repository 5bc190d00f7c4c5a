"""Calibration data out of what a Trainer user already has.

In this order: the callback's `calibration`; `calibration_dataloader()` of the module or the datamodule; the training
data. Several loaders are read one after the other (Lightning's default for them repeats samples), each up to its share.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset

from lightning_compress.calibration.batches import CalibrationSet, collect
from lightning_compress.errors import CalibrationDataError
from lightning_compress.plugin import compat

DEFAULT_SAMPLES = 512


def calibration_set(
    trainer: pl.Trainer, module: Any, calibration: Any | None, max_samples: int | None, seed: int
) -> CalibrationSet | None:
    """The calibration set; None if the user gave no data at all.

    Args:
        trainer: its `limit_train_batches` holds for calibration too.
        module: may have a `calibration_dataloader()`.
        calibration: a loader, a collection of loaders, or any iterable of batches.
        max_samples: how many samples to read; None means 512 where the size is known, and is refused for streams.
        seed: for shuffling loaders; the global random state is left as it was.

    Raises:
        CalibrationDataError: empty, streaming without a limit, a loader that cannot be iterated, or unequal batches.
    """
    loaders = _source(trainer, module, calibration)
    if loaders is None:
        return None
    flattened = _flattened(loaders)
    for loader in flattened:
        _check_bounded(loader, trainer.limit_train_batches, max_samples)
    share = -(-(max_samples or DEFAULT_SAMPLES) // len(flattened))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        batches = [batch for loader in flattened for batch in _read(trainer, loader, share)]
    return collect(batches)


def _source(trainer: pl.Trainer, module: Any, calibration: Any | None) -> Any | None:
    if calibration is not None:
        return calibration
    for owner in (module, trainer.lightning_module, getattr(trainer, "datamodule", None)):
        method = getattr(owner, "calibration_dataloader", None)
        if callable(method):
            return method()
    return compat.train_dataloaders(trainer)


def _flattened(loaders: Any) -> list[Iterable[Any]]:
    if isinstance(loaders, CombinedLoader):
        return list(loaders.flattened)
    if isinstance(loaders, dict) or (isinstance(loaders, list | tuple) and loaders and all(isinstance(one, DataLoader) for one in loaders)):
        return [leaf for leaf in pytree.tree_leaves(loaders) if leaf is not None]
    return [loaders]


def _check_bounded(loader: Any, limit: int | float | None, max_samples: int | None) -> None:
    streams = isinstance(getattr(loader, "dataset", None), IterableDataset) or not hasattr(loader, "__len__")
    bounded = max_samples is not None or (isinstance(limit, int) and not isinstance(limit, bool))
    if streams and not bounded:
        raise CalibrationDataError(
            "The calibration data is a stream (IterableDataset) of unknown length. Say how much of it to use: "
            f"CompressionCallback(max_samples={DEFAULT_SAMPLES}) or Trainer(limit_train_batches=<int>)."
        )


def _read(trainer: pl.Trainer, loader: Any, num_samples: int) -> Iterator[Any]:
    limit = trainer.limit_train_batches
    if isinstance(limit, float) and hasattr(loader, "__len__"):
        limit = int(limit * len(loader))
    seen = 0
    for batch in islice(loader, limit if isinstance(limit, int) else None):
        if seen >= num_samples:
            return
        prepared = compat.prepare_batch(trainer, batch)
        seen += _num_samples(prepared)
        yield prepared


def _num_samples(batch: Any) -> int:
    sizes = [leaf.shape[0] for leaf in pytree.tree_leaves(dict(batch) if hasattr(batch, "keys") else batch) if isinstance(leaf, Tensor) and leaf.ndim]
    return max(sizes, default=1)
