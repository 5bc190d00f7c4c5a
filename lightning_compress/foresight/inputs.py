"""What a transformers model takes at least, as far as its configuration says: zeros, of which only the sizes count."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightning_compress.errors import CompressionError
from lightning_compress.foresight.jobs import FineTuningJob, InferenceJob
from lightning_compress.graph.configs import size_in

_WITH_DATA: Final = "lightning_compress.MemoryReportCallback foresees a training of any model on its own data"


def inputs_of(model: PreTrainedModel, rows: int, length: int) -> dict[str, Tensor]:
    """A batch by the model's `main_input_name`: so many tokens in each of so many rows; or an image per row, or a sound
    of the longest kind. For decoders beside an encoder as many tokens.

    Args:
        model: where its parameters are does not matter.
        rows: of the batch.
        length: tokens of each row; fewer where a decoder has fewer positions.

    Raises:
        CompressionError: the sizes are not in the configuration.
    """
    config, name = model.config, model.main_input_name
    if name == "input_ids":
        given = {name: torch.zeros(rows, length, dtype=torch.long)}
    else:
        shape = _SHAPES[name](config) if name in _SHAPES else None
        if shape is None or None in shape:
            raise CompressionError(
                f"{type(model).__name__} takes {name}, and of what size its configuration does not say, so nothing can "
                f"be foreseen without data. {_WITH_DATA}, and memory.host_budget a compression; `inspect` takes "
                "data=custom and data=multimodal."
            )
        given = {name: torch.zeros(rows, *shape, dtype=model.dtype)}
    if getattr(config, "is_encoder_decoder", False):
        most = size_in(config, "max_target_positions") or length
        given["decoder_input_ids"] = torch.zeros(rows, min(length, most), dtype=torch.long)
    return given


def check_takes_tokens(model: PreTrainedModel, job: InferenceJob | FineTuningJob) -> None:
    """
    Raises:
        CompressionError: the job is none for this kind of model.
    """
    name, generates = type(model).__name__, isinstance(job, InferenceJob)
    if generates and getattr(model.config, "is_encoder_decoder", False):
        raise CompressionError(
            f"job=inference is of models that continue their prompt; {name} has an encoder for it, and is not foreseen."
        )
    if model.main_input_name != "input_ids":
        raise CompressionError(
            f"job={'inference' if generates else 'finetuning'} is of models that read tokens, and {name} takes "
            f"{model.main_input_name}. {_WITH_DATA}."
        )


def beyond_positions(model: PreTrainedModel, length: int) -> str:
    """What there is to say about so many tokens, where the model is made for fewer; "" otherwise."""
    most = size_in(model.config.get_text_config(decoder=True), "max_position_embeddings")
    if most is None or length <= most or model.main_input_name != "input_ids":
        return ""
    return f"{length} tokens are more than the {most} positions that {type(model).__name__} is made for."


def _image(config: Any) -> tuple[Any, ...]:
    part = getattr(config, "encoder", config)
    size = getattr(part, "image_size", None)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return getattr(part, "num_channels", 3), height, width


def _features(config: Any) -> tuple[Any, ...]:
    frames = size_in(config, "max_source_positions")
    return size_in(config, "num_mel_bins"), None if frames is None else 2 * frames


_SHAPES: Final[dict[str, Callable[[Any], tuple[Any, ...]]]] = {"pixel_values": _image, "input_features": _features}
"""Of one row: an image as ViT takes it, the spectrum of a sound as Whisper does (whose convolutions halve its length).
"""
