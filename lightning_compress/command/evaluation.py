"""The perplexity of a model that a command names: in memory, or a layer at a time; of whole batches, shared out over
the ranks."""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import nn

from lightning_compress.calibration.resume import fingerprints
from lightning_compress.command.models import agreed_from_disk, left_out, load_model, memory_options, weights_place
from lightning_compress.command.plan import device_kind
from lightning_compress.command.ranks import ranks_of
from lightning_compress.data.batches import evaluation_dataloader
from lightning_compress.data.config import load_data_config
from lightning_compress.data.perplexity import Batch, perplexity
from lightning_compress.distributed.collective import Collective
from lightning_compress.errors import CompressionError, RunWarning
from lightning_compress.export.checkpoint import MARKER
from lightning_compress.export.packed import checkpoint_source, unfolded_as_packed
from lightning_compress.export.verify import why_unreadable
from lightning_compress.graph.unfold import unfolded
from lightning_compress.memory.files import has_safetensors
from lightning_compress.memory.placement import placement
from lightning_compress.memory.source import WeightSource
from lightning_compress.plugin.agreement import check_same
from lightning_compress.plugin.identity import beyond_made_for
from lightning_compress.plugin.module import onload_device
from lightning_compress.recipe.load import load_recipe
from lightning_compress.recipe.resolve import named_by, resolve


def run_evaluate(config: DictConfig) -> float:
    """Perplexity of the model that `config` names, on its data; the same on all ranks.

    Raises:
        CompressionError: a model or data that cannot be loaded.
    """
    kind = device_kind(config.device, "device")
    trainer = instantiate(config.trainer, accelerator=kind, logger=False)
    with ranks_of(trainer) as ranks:
        folder = Path(config.model.path)
        is_folder, is_ours = folder.is_dir() and has_safetensors(folder), (folder / MARKER).is_file()
        # what is packed is dequantized layer by layer, by a reader that knows all of it
        from_disk = agreed_from_disk(config.model, trainer, ranks) or (
            config.model.load == "auto" and is_folder and (is_ours or kind == "cuda")
        )
        if is_ours and not from_disk:
            _check_read_by_transformers(config.model)
        model, processor = load_model(config.model, from_disk)
        batches = list(evaluation_dataloader(load_data_config(config.data), processor))
        said = filter(None, [left_out(config.model, model), *beyond_made_for(model, batches)])
        for note in said if ranks.rank == 0 else ():
            warnings.warn(note, RunWarning, stacklevel=2)
        weights = weights_place(config.model) if from_disk else None
        return measured_perplexity(model, batches, weights, config.memory, onload_device(trainer), ranks)


def _check_read_by_transformers(config: DictConfig) -> None:
    """Of a checkpoint that this package has written.

    Raises:
        CompressionError: transformers would misread it, or leave out that inputs are quantized.
    """
    root: Any = load_model(config, from_disk=True)[0]
    del root.config.quantization_config  # as the model was that the recipe was for
    recipe = load_recipe(json.loads((Path(config.path) / MARKER).read_text(encoding="utf-8"))["recipe"])
    with unfolded(root, named_by(recipe)):
        reason = why_unreadable(root, resolve(recipe, root))
    if reason is not None:
        raise CompressionError(
            f"model.path={config.path} is not what transformers would read into memory: {reason}. Leave out "
            "model.load=memory, or give model.load=disk."
        )


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
