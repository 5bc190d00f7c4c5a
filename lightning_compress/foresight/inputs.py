"""What a transformers model takes at least, as far as its configuration says: zeros, of which only the sizes count."""

from collections.abc import Callable
from typing import Any, Final, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightning_compress.errors import CompressionError
from lightning_compress.foresight.jobs import FineTuningJob, InferenceJob, on_fakes
from lightning_compress.graph.configs import size_in
from lightning_compress.graph.trees import tensors_in

_UNKNOWN: Final = (
    "What images are to {} cannot be known from its configuration alone; put its processor (processor_config.json or "
    "preprocessor_config.json, and the tokenizer) into model.path"
)
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


def with_images(model: PreTrainedModel, rows: int, length: int, num_images: int) -> dict[str, Tensor]:
    """As `inputs_of`, with images of the size that the configuration says in each row; how many tokens these are, the
    model's `get_image_features` says on tensors without values.

    Raises:
        CompressionError: the configuration and that do not say it all (sizes of grids, tiles, masks), or there is no
            room for the images' tokens.
    """
    config, name = model.config, type(model).__name__
    token = size_in(config, "image_token_id") or size_in(config, "image_token_index")
    shape = _image(getattr(config, "vision_config", config))
    if token is None or None in shape or not hasattr(model, "get_image_features"):
        raise CompressionError(f"{_UNKNOWN.format(name)}: its configuration has no image token or size of images.")
    pixels = torch.zeros(num_images, *shape, dtype=model.dtype)
    try:
        with on_fakes(model) as fake, torch.no_grad():
            found = cast(Any, model).get_image_features(pixel_values=fake(pixels))
            features = tensors_in(getattr(found, "pooler_output", found))
            width = cast(Tensor, model.get_input_embeddings().weight).shape[-1]
            num_tokens = sum(each.numel() for each in features) // width
    except Exception as error:  # the model's own code
        raise CompressionError(
            f"{_UNKNOWN.format(name)}: by itself get_image_features fails ({type(error).__name__}: {error})."
        ) from error
    if num_tokens > length:
        raise CompressionError(
            f"{num_images} images are {num_tokens} tokens to {name}, and samples have {length}. Give longer samples, "
            "or fewer images."
        )
    ids = torch.full((rows, length), int(token == 0), dtype=torch.long)
    ids[:, :num_tokens] = token
    return {"input_ids": ids, "pixel_values": pixels.repeat(rows, *[1] * len(shape))}


def images_left_out(model: PreTrainedModel, num_images: int) -> str:
    """What there is to say where a model reads images and is given none; "" otherwise."""
    reads = any(hasattr(model.config, name) for name in ("image_token_id", "image_token_index", "vision_config"))
    if num_images or not reads or model.main_input_name != "input_ids":
        return ""
    return "Of text alone: images, which this model reads, are not counted."


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
