"""Weights in a file that `torch.save` wrote (a Lightning checkpoint), located without reading them.

Such a file is a zip archive of uncompressed records: a pickle, and one record per storage. Only the pickle is read.
Tensors are rebuilt on the meta device, where torch notes at which byte of the file each storage begins; so optimizer
states, which lie in the same file, are never touched.

A pickle may name any class (hyper-parameters, states of callbacks). Whatever is not part of a plain tensor becomes an
inert object: nothing is imported, and no code of the file's choice runs. Alternative not taken:
`torch.load(weights_only=True)` is as safe, but refuses the whole file for one unknown class in the hyper-parameters.
"""

import pickle
import warnings
import zipfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, final

import torch
from torch import Tensor

from lightning_compress.errors import CompressionError, RunWarning
from lightning_compress.memory.files import StoredFile, StoredTensor, stored_file

_TENSOR_PARTS = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch._utils", "_rebuild_parameter_with_state"),
    ("torch._utils", "_rebuild_tensor"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor_v3"),
    ("torch.nn.parameter", "Parameter"),
    ("torch.storage", "UntypedStorage"),
}
_LOCAL_HEADER_BYTES = 30
UNFINISHED_KEY = "lightning_compress.unfinished"
"""In checkpoints that were saved behind a compression that had ended before its time, of weights half of which are
quantized: callbacks that save at an exception do that."""
QUANTIZED_KEY = "lightning_compress.quantized"
"""In checkpoints that were saved behind a compression, of weights that are as that left them."""


def said_of_quantized(file: object) -> str:
    """What is to be told of a checkpoint that is marked so, and is taken for the original weights."""
    return (
        f"{file} was saved behind a compression: its weights are quantized already, and this run starts from those, "
        "not from the original's. To compress anew give a checkpoint of the training."
    )


def stored_state_dict(file: Path) -> dict[str, StoredTensor]:
    """The tensors of the `state_dict` in a Lightning checkpoint, or of the state dict that the file itself is.

    Raises:
        CompressionError: not such a file, of torch's format before 1.6, cut off, without tensors, or saved in the midst
            of a compression.
    """
    with file.open("rb") as opened:
        content, locate = load_located(file, opened)
    if isinstance(content, dict) and UNFINISHED_KEY in content:
        raise CompressionError(
            f"{file} was saved when a compression had not finished: some of its weights are quantized and others are "
            "not. Give one that was saved in the training."
        )
    if isinstance(content, dict) and QUANTIZED_KEY in content:
        warnings.warn(said_of_quantized(file), RunWarning, stacklevel=2)
    state = content.get("state_dict", content) if isinstance(content, dict) else {}
    found = {
        name: locate(tensor)
        for name, tensor in (state.items() if isinstance(state, Mapping) else ())
        if isinstance(tensor, Tensor) and not (tensor.is_conj() or tensor.is_neg())
    }
    if not found:
        raise CompressionError(
            f"{file} holds no weights: there is no `state_dict` with tensors in it. Give a checkpoint that "
            "`trainer.save_checkpoint` wrote, or a folder of safetensors files."
        )
    return found


def load_located(file: Path, opened: BinaryIO, first: int = 0) -> tuple[Any, Callable[[Tensor], StoredTensor]]:
    """What an archive holds, its tensors on the meta device, and what tells where the values of one of them lie.

    Args:
        file: for messages, and where the values are.
        opened: the archive.
        first: the byte of the file at which the archive begins.

    Raises:
        CompressionError: not such an archive, of torch's format before 1.6, or cut off.
    """
    starts, as_found = _record_starts(file, opened), stored_file(file)
    try:
        content = torch.load(
            opened,
            map_location="meta",
            weights_only=False,  # `_TensorsOnly` builds nothing else
            pickle_module=SimpleNamespace(Unpickler=_TensorsOnly, __name__=__name__),
        )
    except Exception as error:
        raise CompressionError(f"{file} cannot be read as a checkpoint: {error}") from error
    return content, lambda tensor: _located(as_found, tensor, starts, first)


def _record_starts(file: Path, opened: BinaryIO) -> frozenset[int]:
    """The bytes of an archive at which its records begin."""
    if not zipfile.is_zipfile(opened):
        raise CompressionError(
            f"{file} is no file that `torch.save` of torch 1.6 or later wrote, or it is cut off. An older one is "
            "rewritten by `torch.save(torch.load(file), file)`."
        )
    starts = set()
    with zipfile.ZipFile(opened) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED or entry.filename.endswith("/constants.pkl"):
                raise CompressionError(
                    f"{file} is compressed or a TorchScript archive, so its tensors cannot be read piece by piece. "
                    "Save the state dict with `torch.save`."
                )
            opened.seek(entry.header_offset)
            header = opened.read(_LOCAL_HEADER_BYTES)
            lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
            starts.add(entry.header_offset + _LOCAL_HEADER_BYTES + lengths)
    opened.seek(0)
    return frozenset(starts)


def _located(file: StoredFile, tensor: Tensor, starts: frozenset[int], first: int) -> StoredTensor:
    # torch computes the offsets of later records from the first; the archive's own directory is the proof
    start = tensor.untyped_storage()._checkpoint_offset
    if start not in starts:
        raise CompressionError(
            f"{file} is not laid out as `torch.save` does it. Rewrite it with "
            "`torch.save(torch.load(file, weights_only=False), file)`."
        )
    offset = first + start + int(tensor.storage_offset()) * tensor.element_size()
    stride = None if tensor.is_contiguous() else tensor.stride()
    return StoredTensor(file, offset, tuple(tensor.shape), tensor.dtype, stride)


@final
class _Inert:
    """Stands for an object of any other class: accepts whatever a pickle does to objects, and forgets it."""

    def __new__(cls, *args: object, **kwargs: object) -> "_Inert":
        return object.__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def _ignore(self, *args: object, **kwargs: object) -> None:
        pass

    __setstate__ = __setitem__ = append = extend = add = _ignore

    def __call__(self, *args: object, **kwargs: object) -> "_Inert":
        return self


class InertUnpickler(pickle.Unpickler):
    """Imports the classes in `allowed` and dtypes of torch, and nothing else.

    Attributes:
        allowed: (module, name) of classes and functions that do no more than hold or rebuild values.
    """

    allowed: Collection[tuple[str, str]] = ()

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        return super().find_class(module, name) if is_dtype or (module, name) in self.allowed else _Inert


@final
class _TensorsOnly(InertUnpickler):
    """Builds tensors and plain containers."""

    allowed = _TENSOR_PARTS
