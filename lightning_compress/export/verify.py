"""Read the checkpoint back and compare it with what was in memory.

Every shard is read back when it has been written, and compared bit for bit while its tensors are at hand (`read_back`):
that costs a subgraph's time and memory, whatever the model's size. A model in memory is loaded as well when all is
written, and its weights and its outputs on a batch are compared (`verify`).

Alternative not taken: reading all shards again at the end, which takes longer the deeper the model is and, without the
tensors, could tell no more than that the files did not change since.
"""

import json
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from compressed_tensors.compressors import decompress_module
from compressed_tensors.quantization import QuantizationStatus, QuantizationStrategy, QuantizationType
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_compress.algorithms.grids import has_global_scale
from lightning_compress.calibration.resume import file_digest, sync, written_shards
from lightning_compress.calibration.target import Target
from lightning_compress.errors import CompressionError, OutputDirectoryError, listed
from lightning_compress.export.copies import copy_of
from lightning_compress.export.outputs import output_difference
from lightning_compress.export.packed import load_compressed
from lightning_compress.export.packing import (
    becomes_bfloat16,
    fails_to_initialize,
    forgets_zero_points,
    keeps_weight,
)
from lightning_compress.graph.experts import Experts
from lightning_compress.graph.restore import attributes_restored, contents_restored
from lightning_compress.graph.unfold import unfolded
from lightning_compress.memory.files import INDEX
from lightning_compress.recipe.forms import OtherForm
from lightning_compress.recipe.resolve import Assignment, ResolvedRecipe

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BATCH = "the first calibration batch"
READ_BACK = "safetensors, each shard when it was written"


class ReadBackWarning(UserWarning):
    """The checkpoint is right, but the library it is made for cannot read it."""


@dataclass(frozen=True)
class Verification:
    """What reading the checkpoint back showed.

    Attributes:
        loaded_with: what read it.
        num_modules: quantized modules whose weights were compared.
        different_modules: those whose weights are not bit for bit those in memory; for a model on disk, shards that
            are no longer there in their size.
        different_buffers: buffers that no checkpoint stores (rotary frequencies) and that differ in memory, e.g.
            because the model was cast to bfloat16 as a whole while a loader computes them in float32.
        max_abs_difference: of the outputs (logits) on one batch, those buffers being equal; None where the module
            cannot be called on it.
        max_abs_difference_as_loaded: the same with the buffers as the loader made them.
        batch: which batch that was.
        tolerance: how much outputs may differ, for float32 kernels round otherwise where memory is aligned otherwise.
        failure: why it could not be loaded or run as the model in memory is; '' where it could.
        failed_on: of several ranks, each of which reads what it finds in the folder, those where it did not pass; the
            rest is what the first of them found.
    """

    loaded_with: str
    num_modules: int
    different_modules: tuple[str, ...]
    different_buffers: tuple[str, ...]
    max_abs_difference: float | None
    max_abs_difference_as_loaded: float | None
    batch: str
    tolerance: float = 0.0
    failure: str = ""
    failed_on: tuple[int, ...] = ()

    @property
    def passed(self) -> bool:
        """Weights identical, and outputs too (but for rounding) where they could be compared."""
        return not self.failure and not self.different_modules and (self.max_abs_difference or 0.0) <= self.tolerance

    @property
    def verdict(self) -> str:
        """In a few words."""
        if self.passed:
            return "identical"
        where = f" on ranks {', '.join(map(str, self.failed_on))}" if self.failed_on else ""
        return f"DIFFERENT{where}: {listed(self.different_modules) or self.failure or 'outputs'}"


@torch.no_grad()
def verify(
    directory: Path,
    target: Target,
    names: Iterable[str],
    batch: Any | None,
    unreadable: str | None = None,
) -> Verification:
    """Compare the checkpoint in `directory` with the quantized model in memory. Whatever goes wrong is the finding: the
    checkpoint is complete, and its report has to be written.

    Args:
        directory: what `CheckpointWriter` wrote.
        target: the model in memory, quantized, in eval mode, in host memory.
        names: the quantized modules.
        batch: the first of the calibration, as the target's step takes it, or None.
        unreadable: why transformers will not read it (see `why_unreadable`); None: it will.
    """
    names, root = list(names), target.root
    try:
        reloaded, loaded_with, as_one = _reload(directory, root, names, unreadable)
    except Exception as error:
        return Verification("nothing", len(names), (), (), None, None, "none", failure=_told("loading it", error))
    failure, as_loaded, difference, tolerance = "", None, None, 0.0
    buffers: tuple[str, ...] = ()
    try:
        with _restored(target.module):
            as_loaded, tolerance = output_difference(target, reloaded, batch)
        buffers = _align_unsaved_buffers(root, reloaded)
        with _restored(target.module):
            difference, tolerance = output_difference(target, reloaded, batch) if buffers else (as_loaded, tolerance)
    except Exception as error:
        failure = _told(f"running both models on {_BATCH}", error)
    if as_one:
        warnings.warn(
            f"transformers will quantize all that {listed([*as_one], 2)} read at once by one scale, for it takes the "
            "first two dimensions for those of tokens, and there are not three. Here, in the report, by "
            "lightning_compress.load_compressed and in vLLM each token has its own: compare with those.",
            ReadBackWarning,
            stacklevel=2,
        )
    try:
        different = _different(root, reloaded, names)
    except Exception as error:
        different, failure = (), _told("comparing weights", error)
    batch_name = "none" if difference is None else _BATCH
    return Verification(
        loaded_with, len(names), different, buffers, difference, as_loaded, batch_name, tolerance, failure
    )


@contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Within: the user's step may keep what it likes on its module, and count in its metrics."""
    with attributes_restored(module), contents_restored(module):
        yield


def of_all(found: Sequence[Verification]) -> Verification:
    """What the ranks found, each in the copy that is its node's: one that did not pass is enough."""
    failed_on = tuple(rank for rank, each in enumerate(found) if not each.passed)
    if not failed_on or len(found) == 1:
        return found[0]
    return replace(found[failed_on[0]], failed_on=failed_on)


def _different(root: nn.Module, reloaded: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """The quantized modules whose weights are not those in memory."""
    with unfolded(reloaded, lambda name, _: name in names):
        for name in names:  # a model that has not run yet still holds packed weights
            module = reloaded.get_submodule(name)
            if getattr(module, "quantization_status", None) == QuantizationStatus.COMPRESSED:
                decompress_module(module)
        return tuple(name for name in names if not _same_weight(root.get_submodule(name), reloaded.get_submodule(name)))


def _told(what: str, error: Exception) -> str:
    first = str(error).strip().partition("\n")[0]
    return f"{what} failed with {type(error).__name__}: {first}"


def read_back(path: Path, written: Mapping[str, Tensor]) -> str:
    """Compare a file just written, bit for bit, with the tensors it was written from; returns its SHA-256 as read.

    The file is synced and let go from the page cache before, so that the bytes come from the disk where the file system
    allows for that.

    Raises:
        OutputDirectoryError: it holds something else.
    """
    sync(path)
    if sys.platform == "linux":
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    digest = file_digest(path)
    try:
        with safe_open(path, framework="pt", backend="pread") as stored:
            different = sorted(written.keys() ^ set(stored.keys()))
            different += [key for key in written if key not in different and not _same_bits(written[key], stored, key)]
    except SafetensorError as error:
        different = [f"its header ({error})"]
    if different:
        raise OutputDirectoryError(
            f"{path} does not hold what was written to it: {listed(different)} came back different. The disk or "
            "the memory is faulty; what is in the manifest was read back well. Start the same run again, or copy the "
            "folder to another disk and continue there."
        )
    return digest


def verify_files(directory: Path, names: Iterable[str], unreadable: str | None = None) -> Verification:
    """What `read_back` has shown of every shard, for models that do not fit into memory; looked at now are only their
    sizes and that the index is right about them. `unreadable`: see `why_unreadable`."""
    shards = written_shards(directory)
    index = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
    damaged = set(index.values()) - {shard.name for shard in shards}
    for shard in shards:
        file = directory / shard.name
        is_whole = file.is_file() and file.stat().st_size == shard.nbytes
        if not is_whole or any(index.get(key) != shard.name for key in shard.keys):
            damaged.add(shard.name)
    reader = READ_BACK if unreadable is None else f"{READ_BACK} (transformers will not read it as it is: {unreadable})"
    return Verification(reader, len(list(names)), tuple(sorted(damaged)), (), None, None, "none")


def _reload(
    directory: Path, root: nn.Module, quantized: Sequence[str], unreadable: str | None
) -> tuple[nn.Module, str, Mapping[str, object]]:
    """Also what `_read_by_rows` returns."""
    name = type(root).__name__
    reader = "lightning_compress.load_compressed"
    if unreadable is not None:
        reader += f" (transformers will not read it as it is: {unreadable})"
    elif isinstance(root, PreTrainedModel):
        try:
            loaded: Any = type(root).from_pretrained(
                directory,
                dtype=root.dtype,
                attn_implementation=_attention_of(root.config),
                output_loading_info=True,
            )
            model, found = loaded
            computed = dict(root.named_buffers()).keys() - root.state_dict().keys()
            if missing := sorted(found["missing_keys"] - computed):
                raise CompressionError(f"it does not find {listed(missing, 3)} in it")
            if (handle := getattr(model, "ct_decompress_hook", None)) is not None:
                model._forward_pre_hooks[handle.id](model, ())  # as a call does, but not one of `model.forward`
            as_one = _read_by_rows(model)
            # parameters ask for no gradients, as in the run (see `prepare.evaluating`)
            return model.eval().requires_grad_(False), f"transformers {name}.from_pretrained", as_one
        except Exception as error:  # whatever it is: the finding is that this reader cannot read it
            reason = str(error)
            if any(isinstance(root.get_submodule(module), OtherForm) for module in quantized):
                reason = "it does not know other classes (Conv1D, Conv2d) packed as the Linears that they are"
            reader += f", for {name}.from_pretrained of transformers {transformers.__version__} cannot: {reason}"
            warnings.warn(f"The checkpoint {directory} was read back with {reader}", ReadBackWarning, stacklevel=2)
    empty = copy_of(root)
    for parameter in empty.parameters():
        parameter.zero_()
    return load_compressed(empty, directory).eval().requires_grad_(False), reader, {}


def _read_by_rows(model: nn.Module) -> Mapping[str, object]:
    """Let Linears quantize their inputs per token whatever dimensions those have, as the model in memory and kernels
    do: compressed-tensors' own forward takes the first two for those of tokens. Returns what will hold, when the model
    has run, the names of those of which it makes something else."""
    as_one: dict[str, object] = {}
    for name, module in model.named_modules():
        scheme = getattr(module, "quantization_scheme", None)
        if isinstance(module, nn.Linear) and scheme is not None and scheme.input_activations is not None:
            shapes: list[torch.Size] = []
            by_token = scheme.input_activations.strategy == QuantizationStrategy.TOKEN
            module.register_forward_pre_hook(partial(_as_rows, shapes, as_one if by_token else {}, name))
            module.register_forward_hook(partial(_as_before, shapes))
    return as_one


def _as_rows(
    shapes: list[torch.Size], as_one: dict[str, object], name: str, module: nn.Module, args: tuple[Tensor]
) -> Tensor:
    (input,) = args
    shapes.append(input.shape)
    if input.ndim != 3 and input.numel() > input.shape[-1]:
        as_one[name] = None
    return input.reshape(1, -1, input.shape[-1])


def _as_before(shapes: list[torch.Size], module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
    return output.reshape(*shapes.pop()[:-1], -1)


def why_unreadable(root: nn.Module, resolved: ResolvedRecipe) -> str | None:
    """Why transformers will not read a checkpoint, as far as that is known before there is one; it would give experts
    new values and list them as missing, read them by another scheme, or fail."""
    schemes: dict[str, str] = {}
    for name, module in root.named_modules():
        if not isinstance(module, Experts):
            continue
        inside = [f"{name}.{path}" for path, part in module.named_modules() if isinstance(part, nn.Linear)]
        chosen = [resolved.assignments[path] for path in inside if path in resolved.assignments]
        if not chosen and (not module.is_assembled or not resolved.assignments):
            continue
        if not module.is_assembled:
            return f"it makes no stacks of single experts for {type(module.folded).__name__} ({name})"
        if not chosen:
            return f"the experts of {name} are not quantized, and other modules are"
        if len(chosen) < len(inside):
            return f"of the experts of {name} some modules are quantized and others not"
        if any(assignment.scheme.input_activations is not None for assignment in chosen):
            return f"the experts of {name} have quantized inputs"
        if not all(assignment.weights.symmetric for assignment in chosen):
            return f"the experts of {name} have zero points"
        if any(has_global_scale(assignment.weights) for assignment in chosen):
            return f"the experts of {name} have a global scale, which it forgets"
        if any(map(_is_misread_in_experts, chosen)):
            return f"of the experts of {name} it reads FP8 by row or by tensor and packed weights, no other codes"
        for path, assignment in zip(inside, chosen, strict=True):
            schemes.setdefault(str(assignment.scheme.weights), path)
        if len(schemes) > 1:
            return f"it reads all experts by one scheme, and {' and '.join(list(schemes.values())[:2])} have two"
    if isinstance(root, PreTrainedModel) and becomes_bfloat16(root, resolved):
        return f"it reads FP4 and MX weights as bfloat16, and the model is in {root.dtype}: compress it in bfloat16"
    if isinstance(root, PreTrainedModel) and forgets_zero_points(root, resolved):
        return "beside other schemes or quantized inputs it forgets (from 5.23) that zero points are packed"
    if isinstance(root, PreTrainedModel) and fails_to_initialize(root, resolved):
        fails = "which fails beside other schemes or quantized inputs, and before 5.23"
        return f"{type(root).__name__} initializes weights that are packed, {fails}"
    return None


def _is_misread_in_experts(assignment: Assignment) -> bool:
    """Whether codes that are not packed are no FP8 that a scale of each row, or of all, is multiplied by."""
    weights = assignment.weights
    by_row = weights.strategy in (QuantizationStrategy.CHANNEL, QuantizationStrategy.TENSOR)
    is_float = weights.type == QuantizationType.FLOAT
    return keeps_weight(assignment.scheme) and not (is_float and by_row)


def _attention_of(config: Any) -> dict[str, str | None]:
    """The implementation of attention that a model and its parts have."""
    parts = {key: getattr(config, key, None) for key in config.sub_configs}
    found = {key: part._attn_implementation for key, part in parts.items() if part is not None}
    return {"": config._attn_implementation, **found}


def _align_unsaved_buffers(root: nn.Module, reloaded: nn.Module) -> tuple[str, ...]:
    """Copy buffers that are in no state dict from memory into the reloaded model; returns the names that differed."""
    saved = root.state_dict().keys()
    loaded = dict(reloaded.named_buffers())
    different = []
    for name, buffer in root.named_buffers():
        other, buffer = loaded.get(name), buffer.detach().cpu()  # one that its forward has made anew is on the device
        if name in saved or other is None or (other.dtype == buffer.dtype and torch.equal(other, buffer)):
            continue
        different.append(name)
        other.data = buffer.clone()
    return tuple(different)


def _same_bits(tensor: Tensor, stored: Any, key: str) -> bool:
    """Also where there are NaNs."""
    other = stored.get_tensor(key)
    if (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
        return False
    bits = _BITS[tensor.dtype.itemsize]
    return torch.equal(tensor.view(bits), other.view(bits))


def _same_weight(mine: nn.Module, other: nn.Module) -> bool:
    weight, reloaded = mine.get_parameter("weight"), getattr(other, "weight", None)
    if not isinstance(reloaded, Tensor) or reloaded.shape != weight.shape:
        return False
    return torch.equal(weight.detach().cpu(), reloaded.detach().to("cpu", weight.dtype))
