"""The perplexity of a model that a command names: in memory, or a layer at a time; of whole batches, shared out over
the ranks."""

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import nn

from lightning_compress.calibration.resume import fingerprints
from lightning_compress.command.models import agreed_from_disk, load_model, memory_options, weights_place
from lightning_compress.command.plan import device_kind
from lightning_compress.command.ranks import ranks_of
from lightning_compress.data.batches import evaluation_dataloader, tokenizer_of
from lightning_compress.data.config import load_data_config
from lightning_compress.data.perplexity import Batch, perplexity
from lightning_compress.distributed.collective import Collective
from lightning_compress.errors import RunWarning
from lightning_compress.export.packed import checkpoint_source, unfolded_as_packed
from lightning_compress.memory.files import has_safetensors
from lightning_compress.memory.placement import placement
from lightning_compress.memory.source import WeightSource
from lightning_compress.plugin.agreement import check_same
from lightning_compress.plugin.identity import beyond_made_for
from lightning_compress.plugin.module import onload_device


def run_evaluate(config: DictConfig) -> float:
    """Perplexity of the model that `config` names, on its data; the same on all ranks.

    Raises:
        CompressionError: a model or data that cannot be loaded.
    """
    kind = device_kind(config.device, "device")
    trainer = instantiate(config.trainer, accelerator=kind, logger=False)
    with ranks_of(trainer) as ranks:
        is_folder = Path(config.model.path).is_dir() and has_safetensors(Path(config.model.path))
        from_disk = agreed_from_disk(config.model, trainer, ranks) or (
            kind == "cuda" and is_folder and config.model.load == "auto"
        )
        model, processor = load_model(config.model, from_disk)
        batches = list(evaluation_dataloader(load_data_config(config.data), tokenizer_of(processor)))
        for note in beyond_made_for(model, batches) if ranks.rank == 0 else ():
            warnings.warn(note, RunWarning, stacklevel=2)
        weights = weights_place(config.model) if from_disk else None
        return measured_perplexity(model, batches, weights, config.memory, onload_device(trainer), ranks)


def measured_perplexity(
    model: nn.Module,
    batches: Sequence[Batch],
    weights: Path | None,
    memory: DictConfig,
    device: torch.device,
    ranks: Collective,
) -> float:
    """Layer by layer where the weights are on disk (`weights`) or have to be copied to a device.

    Raises:
        CompressionError: see `perplexity`; also ranks with different models or batches.
    """
    if weights is None and device.type == "cpu":
        _check_ranks(model, None, batches, ranks)
        return perplexity(model, batches, collective=ranks)
    with unfolded_as_packed(model, weights):
        source = None if weights is None else checkpoint_source(model, weights)
        _check_ranks(model, source, batches, ranks)
        return perplexity(model, batches, placement(memory_options(memory), device, source), ranks)


def _check_ranks(model: nn.Module, source: WeightSource | None, batches: Sequence[Batch], ranks: Collective) -> None:
    """Every rank evaluates the same, of which it takes its share."""
    if ranks.size > 1:
        weights = "" if source is None else source.fingerprint
        given = fingerprints({}, None, model, weights, batches)
        check_same(given, ranks, "comparing model and data to be evaluated")
