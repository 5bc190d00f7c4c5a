"""One recording for all tests of a process that compress the same model on the same batches.

To record a tiny model takes longer than to compress it, and most tests compress one of a few. Models with code of a
test's own, and recordings that warn, are made anew every time. That two recordings are the same is tested by runs that
are continued in other processes (`distributed/test_ranks.py`, `export/test_resume.py`), and `graph/conftest.py` does
without this.
"""

import hashlib
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_compress.calibration.batches import CalibrationSet
from lightning_compress.calibration.target import Target
from lightning_compress.graph.synthesize import flatten_batch
from lightning_compress.graph.trace import Traced


def remembering(record: Callable[..., Traced]) -> Callable[..., Traced]:
    """`calibration.recording.trace_on`, that keeps what it has recorded."""
    found: dict[str, Traced] = {}

    def trace_on(target: Target, *given: Any, **options: Any) -> Traced:
        key = _key(target, *given, **options) if _is_all_of_transformers(target) else None
        if key in found:
            return found[key]
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            traced = record(target, *given, **options)
        for each in warned:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno, source=each.source)
        if key is not None and not warned:
            found[key] = traced
        return traced

    return trace_on


def _is_all_of_transformers(target: Target) -> bool:
    model = target.module
    if not isinstance(model, PreTrainedModel) or model is not target.root or not target.takes_fields:
        return False
    return all(
        type(module).__module__.partition(".")[0] in ("torch", "transformers", "lightning_compress")
        and not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
        for module in model.modules()
    )


def _key(
    target: Target,
    leaves: Sequence[str],
    boundaries: Sequence[str],
    data: CalibrationSet,
    source: object = None,
    multiplied: Collection[str] = (),
    needs_outputs: bool = False,
) -> str:
    """Of everything that a recording depends on."""
    model = target.root
    digest = hashlib.sha256()
    of_all = (list(leaves), list(boundaries), source is None, sorted(multiplied), needs_outputs)
    for each in (of_all, torch.get_default_dtype(), *_of_model(model), *_of_data(data)):
        digest.update(each if isinstance(each, bytes) else repr(each).encode())
    return digest.hexdigest()


def _of_model(model: nn.Module) -> Iterator[object]:
    yield model.config.to_json_string(use_diff=False)  # type: ignore[union-attr,operator]
    yield model.config._attn_implementation  # type: ignore[union-attr]
    yield from ((name, type(module), module.extra_repr()) for name, module in model.named_modules())
    numbers: dict[int, int] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, each in named(remove_duplicate=False):
            number = numbers.setdefault(id(each), len(numbers))  # what is tied has one
            yield name, number, each.shape, each.stride(), each.dtype, each.device, each.requires_grad


def _of_data(data: CalibrationSet) -> Iterator[object]:
    for batch in data.batches:
        tensors, structure = flatten_batch(batch)
        yield type(batch), structure.paths
        for tensor in tensors:
            yield tensor.shape, tensor.stride(), tensor.dtype, tensor.device
            yield _values(tensor)


def _values(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
