"""Weights in the safetensors files of a checkpoint, read tensor by tensor, by position.

Nothing is mapped, and nothing but what is asked for is read.

Large tensors are read in pieces by several threads: `os.preadv` into one buffer is the fastest way from a warm and from
a cold disk alike (a mapped file faults in page by page).
"""

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from huggingface_hub import parse_local_safetensors_file_metadata
from torch import Tensor

from lightning_compress.errors import CompressionError
from lightning_compress.memory.buffers import host_buffer

INDEX = "model.safetensors.index.json"
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
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: `nbytes` bytes from `offset` of `file` on."""

    file: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize


def has_safetensors(folder: Path) -> bool:
    """Whether the folder holds safetensors files."""
    return any(folder.glob("*.safetensors"))


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint folder by name, from the files' headers.

    Raises:
        CompressionError: no safetensors files, a shard that the index names is missing, or one is cut off.
    """
    found: dict[str, StoredTensor] = {}
    for file in _files(folder):
        try:
            header = parse_local_safetensors_file_metadata(file)
            with file.open("rb") as opened:
                start = 8 + int.from_bytes(opened.read(8), "little")
        except Exception as error:
            raise CompressionError(f"{file} is no readable safetensors file: {error}") from error
        end = start
        for name, info in header.tensors.items():
            if info.dtype not in _DTYPES:
                raise CompressionError(f"{name} in {file} has dtype {info.dtype}, which cannot be read.")
            stored = StoredTensor(file, start + info.data_offsets[0], tuple(info.shape), _DTYPES[info.dtype])
            found[name] = stored
            end = max(end, stored.offset + stored.nbytes)
        if file.stat().st_size < end:
            raise CompressionError(
                f"{file} is cut off: it has {file.stat().st_size} bytes, and its header speaks of {end}. Download or "
                "copy it again."
            )
    return found


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CompressionError(f"{folder} lacks {', '.join(missing[:5])}, which its index names.")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CompressionError(
            f"{folder} holds no safetensors files, so weights cannot be read from there piece by piece."
        )
    return files


def read_tensor(stored: StoredTensor, pin: bool = False) -> Tensor:
    """Read a tensor into a new buffer in host memory, pinned if asked for.

    Raises:
        CompressionError: the file ends too early, or cannot be read.
    """
    buffer = host_buffer(stored.nbytes, pin)
    if stored.nbytes:
        view = memoryview(buffer.numpy())  # type: ignore[arg-type]
        descriptor = os.open(stored.file, os.O_RDONLY)
        try:
            pieces = [(view[at : at + _PIECE], stored.offset + at) for at in range(0, stored.nbytes, _PIECE)]
            if len(pieces) == 1:
                _read_piece(descriptor, *pieces[0])
            else:
                with ThreadPoolExecutor(_THREADS) as pool:
                    list(pool.map(lambda piece: _read_piece(descriptor, *piece), pieces))
        except OSError as error:
            raise CompressionError(
                f"{stored.file} cannot be read: {error}. Download or copy it again; a run that writes to an output_dir "
                "can be started again and continues."
            ) from error
        finally:
            os.close(descriptor)
    return buffer.view(stored.dtype).reshape(stored.shape)


def _read_piece(descriptor: int, view: memoryview, offset: int) -> None:
    while view:
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise OSError(f"it ends at byte {offset}, in the middle of a tensor")
        view, offset = view[count:], offset + count


def files_fingerprint(folder: Path) -> str:
    """A digest of the files' names, sizes, headers, and 64 bytes from the middle of every tensor."""
    digest = hashlib.sha256()
    for part in _sampled(folder):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _sampled(folder: Path) -> Iterator[bytes]:
    by_file: dict[Path, list[tuple[str, StoredTensor]]] = {}
    for name, stored in stored_tensors(folder).items():
        by_file.setdefault(stored.file, []).append((name, stored))
    for file, entries in by_file.items():
        yield f"{file.name} {file.stat().st_size}".encode()
        with file.open("rb") as opened:
            for name, stored in entries:
                yield f"{name} {stored.offset} {stored.shape} {stored.dtype}".encode()
                yield os.pread(opened.fileno(), 64, stored.offset + stored.nbytes // 2)
