"""What a job that is only thought of gives to the model: full samples, with the images that are asked for."""

from typing import Any

from omegaconf import DictConfig
from torch import Tensor
from transformers import PreTrainedModel

from lightning_compress.calibration.batches import CalibrationSet, collect
from lightning_compress.command.models import find_processor
from lightning_compress.data.multimodal import blank_images, takes_images
from lightning_compress.errors import CompressionError
from lightning_compress.foresight.inputs import inputs_of, with_images
from lightning_compress.foresight.jobs import CalibrationJob, InferenceJob


def processor_for(config: DictConfig, num_images: int) -> Any:
    """What makes the model's images of images, if there are any; None where the folder of `config` has no such."""
    return find_processor(config) if num_images else None


def samples(model: PreTrainedModel, job: CalibrationJob, processor: Any) -> CalibrationSet:
    """All batches of a calibration, the last one smaller where the samples do not suffice.

    Args:
        model: where its parameters are does not matter.
        job: what is done; every sample has its full length.
        processor: the model's; None: sizes are those of its configuration.

    Raises:
        CompressionError: what the model takes is not known, or has no room in the samples; batches with images of which
            the last one is smaller.
    """
    whole, rest = divmod(job.num_samples, job.batch_size)
    if job.num_images and rest:
        raise CompressionError(
            f"batch_size={job.batch_size} does not divide num_samples={job.num_samples}: models that make a list of "
            "their images need as many rows in every batch."
        )
    sizes = [job.batch_size] * min(whole, 1) + [rest] * min(rest, 1)
    made = collect([_batch(model, job, processor, rows, job.max_length) for rows in sizes])
    return CalibrationSet(made.batches[:1] * whole + made.batches[min(whole, 1) :], made.has_padding)


def prompts(model: PreTrainedModel, job: InferenceJob, processor: Any) -> dict[str, Tensor] | None:
    """What the model takes of the prompts of text generation; None: tokens alone.

    Raises:
        CompressionError: as `samples`.
    """
    if not job.num_images:
        return None
    (batch,) = collect([_batch(model, job, processor, job.batch_size, job.context)]).batches
    given: dict[str, Tensor] = batch
    return given


def _batch(
    model: PreTrainedModel, job: CalibrationJob | InferenceJob, processor: Any, rows: int, length: int
) -> dict[str, Tensor]:
    if not job.num_images:
        return inputs_of(model, rows, length)
    if takes_images(processor):
        return blank_images(processor, rows, job.num_images, job.image_size, length)
    if job.image_size is not None:
        raise CompressionError(
            f"image_size={list(job.image_size)} is what a processor makes the model's images of, and model.path has "
            "none that can be loaded. Without one, images have the size of the configuration."
        )
    return with_images(model, rows, length, job.num_images)
