"""Calibration data out of what a Trainer user already has.

In this order: the callback's `calibration`; `calibration_dataloader()` of the module or the datamodule; the training
data, unless it is an iterator that training is still to read. Several loaders are read one after the other (Lightning's
default for them repeats samples), each up to its share; a batch is what one of them gives.
"""

import random
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import PreTrainedModel

from lightning_compress.calibration.batches import CalibrationSet, collect, in_host_memory
from lightning_compress.calibration.target import fields_of, find_target, takes_any_field
from lightning_compress.errors import CalibrationDataError, CalibrationWarning
from lightning_compress.graph.compat import pytree
from lightning_compress.graph.restore import attributes_restored, contents_restored, state_restored
from lightning_compress.graph.synthesize import flatten_batch
from lightning_compress.plugin import compat
from lightning_compress.plugin.rng import rng_kept
from lightning_compress.recipe.parts import transformers_models

DEFAULT_SAMPLES = 512
_OF_HUGGING_FACE = {("datasets.arrow_dataset", "Dataset"), ("datasets.iterable_dataset", "IterableDataset")}


def calibration_set(
    trainer: pl.Trainer, module: Any, calibration: Any | None, max_samples: int | None, seed: int, *, trains: bool
) -> CalibrationSet | None:
    """The calibration set; None if the user gave no data at all.

    Args:
        trainer: its `limit_train_batches` holds for calibration too.
        module: may have a `calibration_dataloader()`.
        calibration: a loader, a collection of loaders, or any iterable of batches.
        max_samples: how many samples to read, rounded up to whole batches; None means 512 where the size is known, and
            is refused for streams.
        seed: for shuffling loaders and augmentations; the global random state is left as it was.
        trains: the training data is to be trained on afterwards.

    Raises:
        CalibrationDataError: empty, streaming without a limit, a loader that cannot be iterated, or unequal batches; or
            training would lack what is read.
    """
    owners = (module, trainer.lightning_module, getattr(trainer, "datamodule", None))
    with rng_kept(), ExitStack() as stack:
        stack.enter_context(state_restored(owners))  # training goes on from where its own would
        _seed(seed)
        loaders = _source(trainer, module, calibration, trains)
        if loaders is None:
            return None
        flattened = [compat.of_all_ranks(loader) for loader in _flattened(loaders)]
        for loader in flattened:
            _check_bounded(loader, trainer.limit_train_batches, max_samples)
            stack.enter_context(state_restored([loader]))
        share = -(-(max_samples or DEFAULT_SAMPLES) // len(flattened))
        with attributes_restored(module), contents_restored(module):  # which its hooks may change
            batches = [batch for loader in flattened for batch in _read(trainer, loader, share)]
        takes_fields = find_target(module).takes_fields
        if takes_fields:
            (model,) = transformers_models(module).values()
            batches = _taken(batches, model)
        return collect(batches, keeps_masks=not takes_fields)


def _taken(batches: Sequence[Any], model: PreTrainedModel) -> list[Any]:
    """The fields that the model is called with: others may be texts, or differ from batch to batch. All of a batch of
    which it takes none, and fails."""
    fields = fields_of(model)
    taken = [fields(batch) or batch if isinstance(batch, Mapping) else batch for batch in batches]
    mappings = [(batch, some) for batch, some in zip(batches, taken, strict=True) if isinstance(batch, Mapping)]
    left = {key for batch, some in mappings for key in batch if key not in some and isinstance(batch[key], Tensor)}
    if left and takes_any_field(model) and not type(model).__module__.startswith("transformers."):  # theirs name all
        warnings.warn(
            f"{type(model).__name__}.forward has **kwargs and names no {', '.join(sorted(left))}, which calibration "
            "data has: it is called without. If it reads such a field, name it in `forward`, or give the "
            "LightningModule a `calibration_step(self, batch)`; otherwise leave it out of the batches.",
            CalibrationWarning,
            stacklevel=2,
        )
    return taken


def check_data_given(calibration: object) -> None:
    """
    Raises:
        CalibrationDataError: it is no loader, no collection of loaders and no iterable of batches.
    """
    if isinstance(calibration, str) or not (calibration is None or _is_iterable(calibration)):
        raise CalibrationDataError(
            f"The calibration data is a {type(calibration).__name__}: give a DataLoader, several, or an iterable of "
            "batches."
        )
    if isinstance(calibration, Mapping):
        if any(isinstance(value, Tensor) for value in calibration.values()):
            raise CalibrationDataError(
                f"The calibration data is a {type(calibration).__name__} of tensors: one batch, it seems. Give a list "
                "of batches, or a DataLoader."
            )
        for value in calibration.values():
            check_data_given(value)
    is_dataset = isinstance(calibration, Dataset) and not isinstance(calibration, IterableDataset)
    kinds = {(kind.__module__, kind.__name__) for kind in type(calibration).__mro__}
    if is_dataset or kinds & _OF_HUGGING_FACE:  # not imported for this
        raise CalibrationDataError(
            f"The calibration data is a dataset ({type(calibration).__name__}), whose items are samples: give batches "
            "of them, as DataLoader(dataset, batch_size=8); batch_size=None if its items are batches already."
        )


def _is_iterable(given: object) -> bool:
    return hasattr(given, "__iter__") or hasattr(given, "__getitem__")


def begins_once(loader: Any) -> bool:
    """Whether it, or the dataset or sampler of a DataLoader, is an iterator: most of these have one beginning only."""
    if not isinstance(loader, DataLoader):
        return iter(loader) is loader
    return any(hasattr(part, "__next__") for part in (loader.dataset, loader.sampler, loader.batch_sampler))


def _source(trainer: pl.Trainer, module: Any, calibration: Any | None, trains: bool) -> Any | None:
    if calibration is not None:
        return calibration
    for owner in (module, trainer.lightning_module, getattr(trainer, "datamodule", None)):
        method = getattr(owner, "calibration_dataloader", None)
        if callable(method):
            return method()
    loaders = compat.train_dataloaders(trainer)
    if trains and loaders is not None and any(map(begins_once, _flattened(loaders))):
        raise CalibrationDataError(
            "The training data is an iterator (a generator, or a DataLoader over a dataset with `__next__`), and "
            "training would lack what calibration reads of it. Give other data as calibration= or "
            "`calibration_dataloader()`; or the same, if it begins anew whenever it is iterated over."
        )
    return loaders


def _seed(seed: int) -> None:
    """What samplers and augmentations draw from; `seed_everything` would change environment variables for good."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def _flattened(loaders: Any) -> list[Iterable[Any]]:
    """The loaders in a collection. A list of anything but DataLoaders is itself an iterable of batches."""
    if isinstance(loaders, CombinedLoader):
        return list(loaders.flattened)
    if isinstance(loaders, dict):
        return [each for part in loaders.values() if part is not None for each in _flattened(part)]
    leaves = [leaf for leaf in pytree.tree_leaves(loaders) if leaf is not None]
    return leaves if leaves and all(isinstance(leaf, DataLoader) for leaf in leaves) else [loaders]


def _length(loader: Any) -> int | None:
    """Batches in a loader; None for streams."""
    try:
        return len(loader)
    except TypeError:
        return None


def _check_bounded(loader: Any, limit: int | float | None, max_samples: int | None) -> None:
    bounded = isinstance(limit, int) or (max_samples is not None and limit == 1.0)
    if _length(loader) is None and not bounded:
        raise CalibrationDataError(
            "The calibration data is a stream (IterableDataset) of unknown length. Say how much of it to use: "
            f"CompressionCallback(max_samples={DEFAULT_SAMPLES}) or Trainer(limit_train_batches=<int>)."
        )


def _read(trainer: pl.Trainer, loader: Any, num_samples: int) -> Iterator[Any]:
    limit, length = trainer.limit_train_batches, _length(loader)
    if isinstance(limit, float) and length is not None:
        limit = int(limit * length)
    if limit == 0 and length != 0:
        given = f"limit_train_batches={trainer.limit_train_batches}" + (f" of {length} batches" if length else "")
        raise CalibrationDataError(f"{given} leaves no calibration data: it holds for calibration, too.")
    seen = 0
    if isinstance(loader, DataLoader):
        loader = copy(loader)  # so that persistent workers do not carry their random state into training
    for batch in islice(loader, limit if isinstance(limit, int) else None):
        prepared = in_host_memory(compat.prepare_batch(trainer, batch))
        yield prepared
        seen += _num_samples(prepared)
        if seen >= num_samples:
            return


def _num_samples(batch: Any) -> int:
    """Rows of the tokens; else the first size that most tensors have, for some may be of patches, boxes or nodes, or of
    none or one of a thing that is not the samples'; those inside of lists are looked at if there are no others."""
    tensors, structure = flatten_batch(batch)
    found = dict(zip(structure.paths, tensors, strict=True))
    tokens = [found[key] for key in ("input_ids", "inputs_embeds") if key in found]
    outer = [tensor for path, tensor in found.items() if "." not in path]
    sizes = Counter(tensor.shape[0] for tensor in tokens[:1] or outer or tensors if tensor.ndim)
    several = Counter({size: count for size, count in sizes.items() if size > 1})
    return several.most_common(1)[0][0] if several else 1
