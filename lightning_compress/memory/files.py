"""Weights in the files of a checkpoint, read tensor by tensor, by position: where they are, in safetensors files, and
how they are read, in any.

Nothing is mapped, and nothing but what is asked for is read.

Large tensors are read in pieces by several threads: `os.preadv` into one buffer is the fastest way from a warm and from
a cold disk alike (a mapped file faults in page by page).
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TypeVar

import torch
from huggingface_hub import parse_local_safetensors_file_metadata
from torch import Tensor

from lightning_compress.errors import CompressionError, listed
from lightning_compress.memory.buffers import host_buffer

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = ".metadata"
Item = TypeVar("Item")
Result = TypeVar("Result")
_PIECE = 16 << 20
_THREADS = 4
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "C64": torch.complex64,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
READABLE = frozenset(_DTYPES.values())


def nearest_existing(folder: Path) -> Path:
    """The folder, or the nearest above it that there is: where its disk is."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def free_bytes(folder: Path) -> int:
    """Room on the disk of a folder, which need not be there yet."""
    return shutil.disk_usage(nearest_existing(folder)).free


@dataclass(frozen=True)
class StoredFile:
    """A file as it was when what is in it was found: it has to be the same when that is read.

    Attributes:
        path: of the file.
        size: of all of it, in bytes.
        changed: when it last was, in nanoseconds (`st_mtime_ns`).
    """

    path: Path
    size: int
    changed: int

    def __str__(self) -> str:
        return str(self.path)

    def is_as_found(self, descriptor: int) -> bool:
        """Whether that is what now is open."""
        now = os.fstat(descriptor)
        return (self.size, self.changed) == (now.st_size, now.st_mtime_ns)


def stored_file(path: Path) -> StoredFile:
    """A file as it is now."""
    now = path.stat()
    return StoredFile(path, now.st_size, now.st_mtime_ns)


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: `nbytes` bytes from `offset` of `file` on.

    Attributes:
        stride: of elements in the file; None: contiguous.
    """

    file: StoredFile
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] | None = None
    is_matrix = False

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the last element."""
        count = prod(self.shape)
        if self.stride is not None and count:
            count = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return count * self.dtype.itemsize

    def read(self) -> Tensor:
        """Its values, in host memory (see `read_tensor`)."""
        return read_tensor(self)

    def part(self, start: int, stop: int) -> "StoredTensor":
        """Of its first dimension the indices from `start` up to `stop`."""
        step = prod(self.shape[1:]) if self.stride is None else self.stride[0]
        offset = self.offset + start * step * self.dtype.itemsize
        return replace(self, offset=offset, shape=(stop - start, *self.shape[1:]))


def has_safetensors(folder: Path) -> bool:
    """Whether the folder holds safetensors files."""
    return bool(_unlisted(folder))


def stored_dtype(folder: Path) -> torch.dtype | None:
    """The type that transformers builds a model with whose configuration names none: that of a folder's first
    safetensors file's first floating-point tensor by name, but for float8; None: there is no such file or tensor."""
    found = stored_tensors(_files(folder)[0]) if has_safetensors(folder) else {}
    dtypes = (found[name].dtype for name in sorted(found))
    return next((dtype for dtype in dtypes if dtype.is_floating_point and dtype.itemsize > 1), None)


def is_sharded(folder: Path) -> bool:
    """Whether torch.distributed.checkpoint wrote the folder (FSDP, ModelParallelStrategy): see `memory.sharded`."""
    return (folder / SHARDS).is_file()


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint folder (or of one safetensors file) by name, from the files' headers.

    Of a folder the files that transformers would read: `model.safetensors`, else those that the index names; where
    there is neither, all.

    Raises:
        CompressionError: no safetensors files, a shard that the index names is missing, one is cut off, or two hold a
            tensor of one name and no index names them.
    """
    found: dict[str, StoredTensor] = {}
    for file in _files(folder):
        try:
            as_found = stored_file(file)
            header = parse_local_safetensors_file_metadata(file)
            with file.open("rb") as opened:
                start = 8 + int.from_bytes(opened.read(8), "little")
        except Exception as error:
            raise CompressionError(f"{file} is no readable safetensors file: {error}") from error
        end = start
        for name, info in header.tensors.items():
            if info.dtype not in _DTYPES:
                raise CompressionError(f"{name} in {file} has dtype {info.dtype}, which cannot be read.")
            if name in found and not (folder / INDEX).is_file():  # which lists files of one model
                other = found[name].file.path.name
                raise CompressionError(
                    f"{name} is both in {other} and in {file.name} of {folder}, and no {INDEX} says "
                    "which of them is meant. Give the one file, or a folder with one model's files alone."
                )
            stored = StoredTensor(as_found, start + info.data_offsets[0], tuple(info.shape), _DTYPES[info.dtype])
            found[name] = stored
            end = max(end, stored.offset + stored.nbytes)
        if as_found.size < end:
            raise CompressionError(
                f"{file} is cut off: it has {as_found.size} bytes, and its header speaks of {end}. Download or "
                "copy it again."
            )
    return found


def _files(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    index = folder / INDEX
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CompressionError(f"{folder} lacks {listed(missing)}, which its index names.")
        return [folder / name for name in names]
    files = _unlisted(folder)
    if not files:
        raise CompressionError(
            f"{folder} holds no safetensors files, so weights cannot be read from there piece by piece."
            f"{_remedy(folder)}"
        )
    return files


def _unlisted(folder: Path) -> list[Path]:
    """The safetensors files of a folder; not macOS' `._model.safetensors`, which holds none."""
    return sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("."))


def _remedy(folder: Path) -> str:
    """For the folders that sharded strategies write as checkpoints, and those of files of torch's own."""
    if is_sharded(folder):
        return (
            " It is a sharded checkpoint: give it as `weights=` (or model.weights), beside the model's configuration."
        )
    if (folder / "checkpoint").is_dir() or (folder / "latest").is_file():
        return (
            " It looks like a DeepSpeed checkpoint: make one file of it with "
            "`lightning.pytorch.utilities.deepspeed.convert_zero_checkpoint_to_fp32_state_dict`, and give that."
        )
    if any(folder.glob("pytorch_model*.bin")):
        return (
            " Its pytorch_model*.bin are read into memory, with model.load=memory; or make safetensors files of them: "
            "from_pretrained, and save_pretrained into a folder."
        )
    return ""


def read_tensor(stored: StoredTensor) -> Tensor:
    """Read a tensor into a new buffer in host memory.

    Raises:
        CompressionError: see `read_into`.
    """
    buffer = host_buffer(stored.nbytes)
    read_into(stored, buffer)
    values = buffer.view(stored.dtype)
    if stored.stride is None or 0 in stored.shape:
        return values.reshape(stored.shape)
    return values.as_strided(stored.shape, stored.stride).contiguous()


def read_into(stored: StoredTensor, buffer: Tensor) -> None:
    """Read a tensor's bytes as they are in the file.

    Args:
        stored: where they are.
        buffer: uint8 [nbytes], contiguous.

    Raises:
        CompressionError: the file ends too early, cannot be read, or is not the one in which the tensor was found.
    """
    if not stored.nbytes:
        return
    view = memoryview(buffer.numpy())  # type: ignore[arg-type]
    try:
        descriptor = os.open(stored.file.path, os.O_RDONLY)
        try:
            if not stored.file.is_as_found(descriptor):  # layers of two models would be one
                raise CompressionError(
                    f"{stored.file} has been written to or replaced since this began to read weights from it. "
                    "Give a checkpoint that nothing writes to (a copy of last.ckpt, say), and start again."
                )
            pieces = [(view[at : at + _PIECE], stored.offset + at) for at in range(0, stored.nbytes, _PIECE)]
            if len(pieces) == 1:
                _read_piece(descriptor, *pieces[0])
            else:
                with ThreadPoolExecutor(_THREADS) as pool:
                    list(pool.map(lambda piece: _read_piece(descriptor, *piece), pieces))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CompressionError(
            f"{stored.file} cannot be read: {error}. Download or copy it again; a run that writes to an output_dir "
            "can be started again and continues."
        ) from error


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """What `work` makes of each, as many at a time as torch has threads: it waits for a disk, or digests files.

    What it raises for the first of those that fail is raised here, when those that have begun have ended.
    """
    num_threads = min(len(items), torch.get_num_threads())
    if num_threads < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(num_threads, thread_name_prefix="files") as pool:
        return list(pool.map(work, items))


def _read_piece(descriptor: int, view: memoryview, offset: int) -> None:
    while view:
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise OSError(f"it ends at byte {offset}, in the middle of a tensor")
        view, offset = view[count:], offset + count


_PLACES = 16


def files_fingerprint(tensors: Mapping[str, StoredTensor]) -> str:
    """A digest of the files' names and sizes, where each tensor lies, and some of each: 64 bytes at 16 places, evenly
    spaced, so that a stretch of a sixteenth that is another one is noticed."""
    digest = hashlib.sha256()
    for part in _sampled(tensors):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _sampled(tensors: Mapping[str, StoredTensor]) -> Iterator[bytes]:
    by_file: dict[Path, list[tuple[str, StoredTensor]]] = {}
    for name, stored in tensors.items():
        by_file.setdefault(stored.file.path, []).append((name, stored))
    for file, entries in by_file.items():
        yield f"{file.name} {file.stat().st_size}".encode()
        with file.open("rb") as opened:
            for name, stored in entries:
                yield f"{name} {stored.offset} {stored.shape} {stored.stride} {stored.dtype}".encode()
                for place in range(_PLACES):
                    yield os.pread(opened.fileno(), 64, stored.offset + stored.nbytes * place // _PLACES)
