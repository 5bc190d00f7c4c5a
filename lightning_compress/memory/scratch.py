"""Bytes in a temporary file, written and read in the background.

The file has no name: it is unlinked when it is made, so nothing is left however the process ends. Space that is given
back is reused for as many bytes, which is what a run stores layer after layer.
"""

import os
import tempfile
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import final

from torch import Tensor

from lightning_compress.errors import CompressionError, RunWarning, reason
from lightning_compress.memory.buffers import host_buffer

_DISK = Path("/var/tmp")


def is_in_memory(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether files there take memory (a tmpfs), as Linux says it."""
    try:
        device = folder.stat().st_dev
        lines = [line.split() for line in mounts.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return False
    name = f"{os.major(device)}:{os.minor(device)}"
    return any(words[2] == name and words[words.index("-") + 1] in ("tmpfs", "ramfs") for words in lines)


def _temporary_folder() -> Path:
    """The system's, which is in memory in some of them; larger files go to `/var/tmp` there."""
    folder = Path(tempfile.gettempdir())
    other = is_in_memory(folder) and os.access(_DISK, os.W_OK) and not is_in_memory(_DISK)
    return _DISK if other else folder


@dataclass(frozen=True)
class Stored:
    """Where bytes lie in the file."""

    offset: int
    nbytes: int


@final
class ScratchFile:
    """An unnamed file.

    One thread does all transfers in the order they were asked for, so nothing is read before it is written.

    Args:
        folder: where there is room; None takes the system's temporary folder, or `/var/tmp` where that is in memory.

    Raises:
        CompressionError: no file can be made there.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or _temporary_folder()
        self._takes_memory = folder is None and is_in_memory(self._folder)
        try:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (lives as long as this object)
        except OSError as error:
            where = f"the temporary folder {self._folder}" if folder is None else f"scratch_dir={folder}"
            given = "activation_budget" if folder is None else "scratch_dir"
            raise CompressionError(
                f"{where} cannot hold the activations: {reason(error)}. Name a folder that is there and can be written "
                f"to as memory.scratch_dir, or leave {given} out."
            ) from error
        weakref.finalize(self, self._file.close)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="scratch")
        self._free: dict[int, list[int]] = {}
        self._end = 0
        self._last_write: Future[None] | None = None

    def write(self, data: Tensor) -> Stored:
        """Begin to write bytes, uint8 [n] on the CPU, after the write before it has ended; do not change them
        afterwards.

        Raises:
            CompressionError: no room.
        """
        if self._takes_memory and data.numel():
            self._takes_memory = False  # said once
            warnings.warn(
                f"Activations wait in the temporary folder {self._folder}, which is in memory itself. Name a folder on "
                "a disk as memory.scratch_dir to save any.",
                RunWarning,
                stacklevel=2,
            )
        nbytes = data.numel()
        places = self._free.get(nbytes)
        offset = places.pop() if places else self._end
        self._end = max(self._end, offset + nbytes)
        if self._last_write is not None:
            self._last_write.result()
        self._last_write = self._worker.submit(self._transfer, os.pwritev, data, offset)
        return Stored(offset, nbytes)

    def read(self, stored: Stored) -> "Future[Tensor]":
        """Begin to read what was written; what comes is a new uint8 [n].

        Its result raises CompressionError if the last write before it failed.
        """
        return self._worker.submit(self._read, stored, self._last_write)

    def free(self, stored: Stored) -> None:
        """Give its space back."""
        self._free.setdefault(stored.nbytes, []).append(stored.offset)

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self._end

    def _read(self, stored: Stored, last_write: Future[None] | None) -> Tensor:
        if last_write is not None:
            last_write.result()  # in reused space a failed write leaves older values, which nothing else would tell
        data = host_buffer(stored.nbytes)
        self._transfer(os.preadv, data, stored.offset)
        return data

    def _transfer(self, call: Callable[[int, list[memoryview], int], int], data: Tensor, offset: int) -> None:
        view = memoryview(data.numpy())  # type: ignore[arg-type]
        try:
            while view:
                count = call(self._file.fileno(), [view], offset)
                if count == 0:
                    raise OSError("the file ends too early")
                view, offset = view[count:], offset + count
        except OSError as error:
            raise CompressionError(
                f"Activations could not be kept in {self._folder} ({self._end / 1e9:.2f} GB there so far): {error}. "
                "Make room, name another folder as scratch_dir, or raise activation_budget."
            ) from error
