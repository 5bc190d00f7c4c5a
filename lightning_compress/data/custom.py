"""Calibration data of the user's own making, named in the configuration."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset

from lightning_compress.data.config import CustomConfig
from lightning_compress.errors import CalibrationDataError


def custom_batches(config: CustomConfig, processor: Any) -> Iterable[Any]:
    """What `config.loader` makes: an iterable of batches as it is; of a map-style data set `num_samples` samples drawn
    with `seed`, collated by torch in batches of `batch_size`.

    Args:
        config: what to instantiate.
        processor: given to what is a function still (`_partial_: true`).

    Raises:
        CalibrationDataError: it cannot be made, or is neither.
    """
    try:
        made = instantiate(config.loader, _convert_="all")
        if callable(made) and not hasattr(made, "__iter__"):
            made = made(processor)
    except (InstantiationException, TypeError) as error:
        why = " ".join(str(error.__cause__ or error).split())  # Hydra's own advice is about what shows tracebacks
        raise CalibrationDataError(f"data.loader: {config.loader['_target_']}: {why}") from error
    if isinstance(made, Mapping | Tensor | str):
        raise CalibrationDataError(
            f"data.loader made a {type(made).__name__}: one batch, it seems. Return a list of batches, or a DataLoader."
        )
    has_items = hasattr(made, "__getitem__") and hasattr(made, "__len__")  # torch's class of streams has the former
    if has_items and not isinstance(made, list | tuple | IterableDataset):
        generator = torch.Generator().manual_seed(config.seed)
        order = torch.randperm(len(made), generator=generator)[: config.num_samples].tolist()
        return DataLoader(Subset(made, order), batch_size=config.batch_size)
    if not hasattr(made, "__iter__"):
        raise CalibrationDataError(
            f"data.loader made a {type(made).__name__}: neither a data set nor an iterable of batches. Return a "
            "DataLoader, or say _partial_: true for a function of the tokenizer or processor."
        )
    return made  # type: ignore[no-any-return]
