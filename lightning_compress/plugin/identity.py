"""What a run was of, and what is to be said of it beyond its results."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_compress.calibration.loop import Calibration
from lightning_compress.foresight.inputs import beyond_positions
from lightning_compress.graph.shared_inputs import unlike
from lightning_compress.recipe.parts import transformers_models


def model_path(root: nn.Module) -> str:
    """The folder that transformers has read it, or the model in it, from; "" where that is not known."""
    paths = (model.config.name_or_path for model in transformers_models(root).values())
    return next((str(path) for path in paths if path), "")


def num_samples_and_tokens(batches: Iterable[Any]) -> tuple[int, int] | tuple[None, None]:
    """Rows of the token ids [B, T], and tokens but for padding; None where batches have no ids."""
    found = [fields for batch in batches if (fields := _fields(batch))]
    if not found:
        return None, None
    masks = (fields.get("attention_mask", torch.ones_like(fields["input_ids"])) for fields in found)
    return sum(len(fields["input_ids"]) for fields in found), sum(int(mask.count_nonzero()) for mask in masks)


def beyond_made_for(root: nn.Module, batches: Iterable[Any]) -> list[str]:
    """What is to be said where samples have more tokens than positions that the model in `root` is made for."""
    longest = max((fields["input_ids"].shape[1] for batch in batches if (fields := _fields(batch))), default=0)
    said = (beyond_positions(model, longest) for model in transformers_models(root).values())
    return [
        f"{each} What it does with the others says little; give shorter samples (data.max_length)."
        for each in said
        if each
    ]


def unlike_where_fused(root: nn.Module, run: Calibration) -> list[str]:
    """What is to be said where a server fuses modules of which each has another scheme."""
    if run.flow.traced is None or not isinstance(root, PreTrainedModel):
        return []
    linears = [name for name, module in root.named_modules() if isinstance(module, nn.Linear)]
    kinds = {name: str(each.scheme) for name, each in run.resolved.assignments.items()}
    found = unlike(run.flow.traced.graph, linears, kinds)
    if not found:
        return []
    more = f" (and {len(found) - 1} more such sets)" if len(found) > 1 else ""
    return [
        f"{', '.join(found[0])}{more} read the same input, and are not all quantized by one scheme. Where vLLM fuses "
        "such modules (q/k/v, gate/up) it will refuse the checkpoint: give them one scheme, or ignore them all."
    ]


def _fields(batch: Any) -> Mapping[str, Tensor]:
    """Of a batch with token ids [B, T], in a mapping or alone; nothing of others."""
    fields = batch if isinstance(batch, Mapping) else {"input_ids": batch}
    ids = fields.get("input_ids")
    return fields if isinstance(ids, Tensor) and ids.ndim == 2 and not ids.is_floating_point() else {}
