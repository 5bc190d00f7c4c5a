"""Weights in a folder that `torch.distributed.checkpoint` wrote (FSDP, ModelParallelStrategy), located without reading
them.

Its `.metadata` says of every tensor which blocks it consists of, and where in the ranks' files each was written: as an
archive of `torch.save` of its own (see `memory.pickled`). Only directories are read here; no process group is needed,
and optimizer states, which lie in the same files, are never touched. The metadata are a pickle: of it, too, nothing is
imported but torch's own plain records.
"""

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, cast, final

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from lightning_compress.errors import CompressionError
from lightning_compress.memory.buffers import host_buffer
from lightning_compress.memory.files import SHARDS, StoredTensor, read_into
from lightning_compress.memory.pickled import InertUnpickler, load_located

_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = {
    *((_METADATA, name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex")),
    *((_METADATA, name) for name in ("StorageMeta", "TensorProperties", "TensorStorageMetadata")),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
}
_STATES = ("state_dict", "model")
"""Under what FSDPStrategy, ModelParallelStrategy and others put the model's state beside that of optimizers."""


@final
@dataclass(frozen=True)
class ShardedTensor:
    """A tensor of which several files hold one block each.

    Attributes:
        blocks: where each begins in the tensor, and where it lies; they cover it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: tuple[tuple[tuple[int, ...], StoredTensor], ...]
    is_matrix = False

    def read(self) -> Tensor:
        """Its values, in host memory. Blocks of whole rows are read to where they belong."""
        values = host_buffer(prod(self.shape) * self.dtype.itemsize).view(self.dtype).reshape(self.shape)
        for start, stored in self.blocks:
            place = values[tuple(slice(at, at + size) for at, size in zip(start, stored.shape, strict=True))]
            if stored.stride is None and place.is_contiguous():
                read_into(stored, place.reshape(-1).view(torch.uint8))
            else:
                place.copy_(stored.read())
        return values

    def part(self, start: int, stop: int) -> "ShardedTensor":
        """Of its first dimension the indices from `start` up to `stop`."""
        return ShardedTensor((stop - start, *self.shape[1:]), self.dtype, tuple(self._blocks(start, stop)))

    def _blocks(self, start: int, stop: int) -> Iterator[tuple[tuple[int, ...], StoredTensor]]:
        for (first, *others), stored in self.blocks:
            low, high = max(start, first), min(stop, first + stored.shape[0])
            if low < high:
                yield (low - start, *others), stored.part(low - first, high - first)


def sharded_state_dict(folder: Path) -> dict[str, ShardedTensor]:
    """The tensors of the model that is saved in a folder: of what is saved as `state_dict` or `model`, or else of all.

    Raises:
        CompressionError: it cannot be read, lacks files or blocks, or holds none.
    """
    metadata = _metadata(folder)
    names = _names(metadata)
    opened: dict[Path, io.BufferedReader] = {}
    try:
        found = {
            name: _sharded(folder, key, entry, metadata.storage_data, opened)
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and (name := names.get(key)) is not None
        }
    finally:
        for file in opened.values():
            file.close()
    if not found:
        raise CompressionError(f"{folder} holds no weights: its `{SHARDS}` names no tensors.")
    return found


def blocks_of(tensors: Mapping[str, ShardedTensor]) -> dict[str, StoredTensor]:
    """All that is stored, by names of its own."""
    return {f"{name} {start}": stored for name, tensor in tensors.items() for start, stored in tensor.blocks}


def _metadata(folder: Path) -> Metadata:
    class Records(InertUnpickler):
        """Builds the records of which the metadata consist."""

        allowed = _RECORDS

    try:
        with (folder / SHARDS).open("rb") as opened:
            metadata = Records(opened).load()
    except Exception as error:
        raise CompressionError(f"{folder / SHARDS} cannot be read as the metadata of a checkpoint: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CompressionError(f"{folder / SHARDS} is not what torch.distributed.checkpoint writes to a folder.")
    return metadata


def _names(metadata: Metadata) -> dict[str, str]:
    """For the keys of the model's state, its names. The planner's data tell how what was saved was nested."""
    keys = metadata.state_dict_metadata
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    nested = {key: path if isinstance(path := paths.get(key), tuple) else (key,) for key in keys}
    for state in _STATES:
        inside = {key: ".".join(map(str, path[1:])) for key, path in nested.items() if path[0] == state and path[1:]}
        if inside:
            return inside
    return {key: key for key in keys}


def _sharded(
    folder: Path,
    key: str,
    entry: TensorStorageMetadata,
    places: Mapping[MetadataIndex, Any],
    opened: dict[Path, io.BufferedReader],
) -> ShardedTensor:
    shape, dtype = tuple(entry.size), entry.properties.dtype
    blocks = []
    for chunk in entry.chunks:
        if 0 not in chunk.sizes:
            blocks.append((tuple(chunk.offsets), _block(folder, key, chunk, places, opened)))
    if sum(prod(stored.shape) for _, stored in blocks) != prod(shape):
        raise CompressionError(f"{folder} does not hold all of {key} {list(shape)}. Save the checkpoint again.")
    if any(stored.dtype != dtype for _, stored in blocks):
        raise CompressionError(f"{folder}: not all blocks of {key} have its dtype, {dtype}. Save the checkpoint again.")
    return ShardedTensor(shape, dtype, tuple(blocks))


def _block(
    folder: Path,
    key: str,
    chunk: ChunkStorageMetadata,
    places: Mapping[MetadataIndex, Any],
    opened: dict[Path, io.BufferedReader],
) -> StoredTensor:
    place = places.get(MetadataIndex(key, chunk.offsets))
    if place is None:
        raise CompressionError(f"{folder / SHARDS} does not say where {key} from {list(chunk.offsets)} on is stored.")
    if getattr(place, "transform_descriptors", None):
        raise CompressionError(
            f"{folder}: {key} is stored through extensions ({', '.join(place.transform_descriptors)}), so it cannot be "
            "read piece by piece. Save the checkpoint without them."
        )
    file = folder / place.relative_path
    if file not in opened:
        if not file.is_file():
            raise CompressionError(f"{folder} lacks {place.relative_path}, which its `{SHARDS}` names.")
        opened[file] = file.open("rb")
    if file.stat().st_size < place.offset + place.length:
        raise CompressionError(
            f"{file} is cut off: it has {file.stat().st_size} bytes, and `{SHARDS}` speaks of "
            f"{place.offset + place.length}. Copy it again."
        )
    archive = _Slice(opened[file], place.offset, place.length)
    content, locate = load_located(file, cast(BinaryIO, archive), place.offset)
    if not isinstance(content, Tensor) or tuple(content.shape) != tuple(chunk.sizes):
        raise CompressionError(
            f"{file} holds something else, or a tensor of a class of its own, where {key} {list(chunk.sizes)} should "
            "be."
        )
    return locate(content)


@final
class _Slice(io.RawIOBase):
    """A part of an open file as a file."""

    def __init__(self, file: io.BufferedReader, first: int, length: int) -> None:
        self._file, self._first, self._length, self._at = file, first, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence] + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._first + self._at)
        view = memoryview(buffer)[: max(self._length - self._at, 0)]
        count = self._file.readinto(view)
        self._at += count
        return count
