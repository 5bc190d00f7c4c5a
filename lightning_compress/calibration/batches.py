"""The calibration set: collected once, checked, and freed of padding masks that mask nothing.

Whether there is padding is one decision for the whole run: without it the mask is left out before tracing, so that
attention keeps its fast causal path.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any

import torch
from torch import Tensor

from lightning_compress.errors import CalibrationDataError, listed
from lightning_compress.graph.compat import pytree
from lightning_compress.graph.masks import is_token_mask
from lightning_compress.graph.synthesize import Part, flatten_batch, parts_of


@dataclass(frozen=True)
class CalibrationSet:
    """Batches of equal structure, in host memory.

    Attributes:
        batches: as the model takes them.
        has_padding: whether an attention mask is among the fields.
    """

    batches: tuple[Any, ...]
    has_padding: bool


def collect(batches: Iterable[Any], limit: int | None = None, keeps_masks: bool = False) -> CalibrationSet:
    """Read and check the calibration set; tensors are moved to host memory.

    Args:
        batches: an iterable of tensors, mappings, sequences, dataclasses, or trees of them, which keep their types.
        limit: how many to read at most.
        keeps_masks: also those that mask nothing, for code that reads them.

    Raises:
        CalibrationDataError: there are none, or no tensors in them, all is padding, or their keys, structure,
            constants, dtypes or values do not fit together.
    """
    collected = [in_host_memory(batch) for batch in islice(iter(batches), limit)]
    if not collected:
        raise CalibrationDataError(
            "The calibration dataloader is empty. Give it at least one batch, or use a recipe that needs no data "
            "(algorithm: rtn)."
        )
    _check_all_or_none(collected)
    for number, batch in enumerate(collected):
        _check_like_first(collected[0], batch, number)
        _check_values(batch, number)
    fields = [_tensors_by_path(batch) for batch in collected]
    masks = [path for path, tensor in fields[0].items() if is_token_mask(path) and tensor.ndim == 2]
    for path in masks:
        if _is_of_text(path) and not any(bool(tensors[path].any()) for tensors in fields):
            raise CalibrationDataError(
                f"The field {path!r} marks every token of all {len(collected)} calibration batches as padding: it "
                "has to be 1 where a token counts. Leave it out if all do."
            )
    idle = [path for path in masks if all(bool(tensors[path].bool().all()) for tensors in fields)]
    has_padding = len(idle) < len(masks)
    idle = [] if keeps_masks else [path for path in idle if _is_of_text(path)]
    return CalibrationSet(tuple(_without(batch, idle) for batch in collected), has_padding=has_padding)


def num_elements(batch: Any) -> int:
    """Of all its tensors: for batches of tokens, in proportion to their number."""
    return sum(tensor.numel() for tensor in flatten_batch(batch)[0])


def in_host_memory(batch: Any) -> Any:
    """A batch, less what autograd keeps of how it was made."""
    tensors, structure = flatten_batch(batch)
    return structure.build([(tensor.detach() if tensor.requires_grad else tensor).cpu() for tensor in tensors])


def _without(batch: Any, idle: Sequence[str]) -> Any:
    """A model is given the fields of a mapping; masks that are elsewhere stay."""
    if isinstance(batch, Mapping) and any(key in idle for key in batch):
        return {key: value for key, value in batch.items() if key not in idle}
    return batch


def _tensors_by_path(batch: Any) -> dict[str, Tensor]:
    tensors, structure = flatten_batch(batch)
    return dict(zip(structure.paths, tensors, strict=True))


def _is_of_text(path: str) -> bool:
    """Whether a mask is one that a model computes for itself where it is not given; those of sounds are not."""
    return path.rpartition(".")[2] in ("attention_mask", "decoder_attention_mask")


_MEDIA = ("pixel", "image", "video", "audio", "input_features")
_SHOWN = 8
"""Numbers of batches in a message, at most."""


def counted(numbers: Sequence[int]) -> str:
    """Batches by their numbers.

    >>> counted([3]), counted([0, 2]), counted(range(20))
    ('batch 3', 'batches 0, 2', 'batches 0, 1, 2, 3, 4, 5, 6, 7 and 12 more')
    """
    return f"batch{'es' if len(numbers) > 1 else ''} {listed(list(map(str, numbers)), _SHOWN)}"


def _check_all_or_none(batches: Sequence[Any]) -> None:
    """Batches with images (or sounds) and without: the model takes two ways, of which a graph has one.

    Raises:
        CalibrationDataError: there are both.
    """
    fields = [_tensors_by_path(batch).keys() for batch in batches]
    media = {path for path in set().union(*fields) if any(word in path for word in _MEDIA)}
    some = sorted(path for path in media if any(path not in each for each in fields))
    without = [number for number, each in enumerate(fields) if media.isdisjoint(each)]
    if not some or not without:
        return
    having = [number for number, each in enumerate(fields) if not media.isdisjoint(each)]
    raise CalibrationDataError(
        f"Of {len(batches)} calibration batches {len(having)} have {', '.join(some)} ({counted(having)}) and "
        f"{len(without)} have not ({counted(without)}). With images (or sounds) and without, a model takes two ways, "
        "and a run knows one. Leave the batches without out; or put their rows into batches that have some "
        "(a larger batch_size), where the model reads such; or leave the images out of all, to calibrate on text alone."
    )


def _check_like_first(first: Any, batch: Any, number: int) -> None:
    if isinstance(first, Mapping) and isinstance(batch, Mapping) and first.keys() != batch.keys():
        raise CalibrationDataError(
            f"Batch {number} of the calibration data has the keys {sorted(batch)}, but batch 0 has {sorted(first)}. "
            "Make the collate function return the same fields for every batch."
        )
    pairs = list(zip_longest(parts_of(batch), parts_of(first)))
    for mine, other in pairs:
        if mine is None or other is None or (mine.path, mine.kind) != (other.path, other.kind):
            raise CalibrationDataError(
                f"Batch {number} of the calibration data has another structure than batch 0: {_described(mine)} where "
                f"that has {_described(other)}. Make the collate function return the same fields in the same order for "
                "every batch."
            )
    for mine, other in pairs:
        if mine.kind is None:
            _check_like(_field(mine.path), mine.value, other.value, number)


def _check_like(field: str, mine: Any, other: Any, number: int) -> None:
    if isinstance(mine, Tensor) != isinstance(other, Tensor):
        raise CalibrationDataError(
            f"The {field} of batch {number} is a tensor where batch 0 has none, or the other way round."
        )
    if isinstance(mine, Tensor) and (mine.dtype, mine.ndim) != (other.dtype, other.ndim):
        raise CalibrationDataError(
            f"The {field} of batch {number} has dtype {mine.dtype} and shape {list(mine.shape)}, but in batch "
            f"0 {other.dtype} and {list(other.shape)}."
        )
    if not isinstance(mine, Tensor) and not _is_equal(mine, other):
        raise CalibrationDataError(
            f"The {field} of batch {number} is no tensor and differs from batch 0 ({mine!r} and {other!r}); "
            "the model is recorded once for all batches. Drop the field in the collate function, or turn it into a "
            f"tensor. {_FOUND_IN}"
        )


_FOUND_IN = "Tensors are found in mappings, lists, tuples and dataclasses; return one of these for any other object."


def _is_equal(mine: object, other: object) -> bool:
    """Objects that hold tensors or arrays have no answer, unless they are one: then they are taken not to be."""
    try:
        return mine is other or bool(mine == other)
    except (RuntimeError, ValueError):
        return False


def _field(path: str) -> str:
    return f"field {path!r}" if path else "value"


def _described(part: Part | None) -> str:
    if part is None:
        return "nothing"
    kind = type(part.value) if part.kind is None else part.kind
    return f"{part.path or 'all'} ({kind.__name__})"


def _check_values(batch: Any, number: int) -> None:
    tensors, structure = flatten_batch(batch)
    if not tensors:
        has_numbers = any(isinstance(leaf, int | float) for leaf in pytree.tree_leaves(batch))
        remedy = (
            "Numbers in lists are none: of a Hugging Face dataset give DataLoader(dataset.with_format('torch'), "
            "batch_size=8)."
        )
        raise CalibrationDataError(
            f"No tensor is found in batch {number} of the calibration data ({type(batch).__name__}). "
            f"{remedy if has_numbers else _FOUND_IN}"
        )
    for path, tensor in zip(structure.paths, tensors, strict=True):
        if tensor.layout is not torch.strided or tensor.is_nested:
            kind, remedy = ("nested", "padded, with a mask") if tensor.is_nested else ("sparse", "`.to_dense()`")
            raise CalibrationDataError(
                f"The {_field(path)} of calibration batch {number} is {kind} ({tensor.layout}), and a run keeps and "
                f"records dense tensors alone. Give it {remedy}."
            )
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise CalibrationDataError(f"The {_field(path)} of calibration batch {number} holds NaN or Inf.")
        if tensor.shape[:1] == (0,) or not any(each.numel() for each in tensors):
            raise CalibrationDataError(
                f"The {_field(path)} of calibration batch {number} is empty (shape {list(tensor.shape)})."
            )
