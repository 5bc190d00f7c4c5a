"""What ranks can share of a model, and its parts that sharing goes by."""

from collections.abc import Mapping
from math import gcd

from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_compress.errors import CompressionError
from lightning_compress.foresight.jobs import FineTuningJob, InferenceJob
from lightning_compress.foresight.layouts import Layout
from lightning_compress.graph.configs import size_in
from lightning_compress.graph.targets import sequential_modules, with_parameters


def dividing_heads(model: PreTrainedModel) -> int | None:
    """That tensor ranks divide: a number of them divides those of queries and those of keys if it divides this; None:
    the configuration does not have what is to be known for it."""
    text = model.config.get_text_config(decoder=True)
    heads = size_in(text, "num_attention_heads")
    if heads is None or size_in(text, "num_hidden_layers") is None or size_in(text, "hidden_size") is None:
        return None
    return gcd(heads, size_in(text, "num_key_value_heads") or heads)


def check_shares(model: PreTrainedModel, job: InferenceJob | FineTuningJob, layout: Layout) -> None:
    """
    Raises:
        CompressionError: the model has fewer heads or layers than ranks to share them, or not a multiple of these.
    """
    heads, num_layers = dividing_heads(model), size_in(model.config.get_text_config(decoder=True), "num_hidden_layers")
    if heads is not None and heads % layout.tensor:
        raise CompressionError(
            f"layout.tensor={layout.tensor} does not divide the heads of {type(model).__name__}, of queries and of "
            f"keys: {heads} or a divisor of it does."
        )
    if num_layers is not None and num_layers % layout.pipeline:
        raise CompressionError(
            f"layout.pipeline={layout.pipeline}: there are {num_layers} layers to share; a divisor of that does, for "
            "all stages are taken to be alike."
        )
    if layout.zero and layout.data == 1 and not layout.offload:
        raise CompressionError(
            f"layout.zero={layout.zero} divides among replicas, of which there is one: give layout.data=2 or more."
        )
    if layout.zero in (1, 2) and isinstance(job, InferenceJob):
        raise CompressionError(
            f"layout.zero={layout.zero} divides optimizer states and gradients, which inference has none of; 3 divides "
            "weights."
        )
    if layout.offload and isinstance(job, InferenceJob):
        raise CompressionError("layout.offload is of gradients and optimizer states, which inference has none of.")


Saved = Mapping[Tensor, int]
"""Bytes that parameters have less of where they are packed."""


def largest_layer(model: nn.Module, saved: Saved) -> int:
    """Bytes of the weights of the largest layer or embedding, which ZeRO-3 gathers."""
    owners = with_parameters(model)
    names = {*sequential_modules(model, None, owners), *owners}
    return max(_bytes_of(model.get_submodule(name), saved) for name in names)


def largest_stage(model: nn.Module, pipeline: int, saved: Saved) -> float:
    """Of the weights, the part of a pipeline's first or last stage, which have the embeddings beside their layers."""
    if pipeline == 1:
        return 1.0
    names = sequential_modules(model, None, with_parameters(model))
    layers = sum(_bytes_of(model.get_submodule(name), saved) for name in names)
    ends = [module() for name in ("get_input_embeddings", "get_output_embeddings") if (module := getattr(model, name))]
    beside = [_bytes_of(end, saved) for end in ends if isinstance(end, nn.Module)]
    return min((layers / pipeline + max(beside, default=0)) / _bytes_of(model, saved), 1.0)


def _bytes_of(module: nn.Module, saved: Saved) -> int:
    return sum(tensor.nbytes - saved.get(tensor, 0) for tensor in module.parameters())
