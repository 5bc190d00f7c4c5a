"""Bytes in a temporary file, written and read in the background.

The file has no name: it is unlinked when it is made, so nothing is left however the process ends. Space that is given
back is reused, in pieces where no piece of it is large enough, so the file is as large as what waited in it at most:
that much a plan has room for.

Alternative not taken: space for as many bytes only. Values of a step have other sizes than those of the step before,
and the file of a `staged` run grew a third larger than what waited.
"""

import bisect
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


Piece = tuple[int, int]
"""Where it begins in the file, and how many bytes it has."""


@dataclass(frozen=True)
class Stored:
    """Where bytes lie in the file: one piece behind the other."""

    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return sum(size for _, size in self.pieces)


@final
class Space:
    """Which bytes of a file are in use.

    Attributes:
        end: of all that ever were.
    """

    def __init__(self) -> None:
        self.end = 0
        self._free: list[Piece] = []  # in order, none next to another

    def take(self, nbytes: int) -> tuple[Piece, ...]:
        """The smallest free piece that has room; else all that is free, the largest pieces first, and more."""
        large_enough = [piece for piece in self._free if piece[1] >= nbytes]
        ahead = [min(large_enough, key=_size)] if large_enough else sorted(self._free, key=_size, reverse=True)
        taken: list[Piece] = []
        for start, size in ahead:
            if not nbytes:
                break
            used = min(size, nbytes)
            del self._free[bisect.bisect_left(self._free, (start, size))]
            taken.append((start, used))
            nbytes -= used
            if used < size:
                bisect.insort(self._free, (start + used, size - used))
        if nbytes:
            taken.append((self.end, nbytes))
            self.end += nbytes
        return tuple(taken)

    def give_back(self, pieces: tuple[Piece, ...]) -> None:
        """Join them with their free neighbours."""
        for start, size in pieces:
            place = bisect.bisect_left(self._free, (start, 0))
            if place < len(self._free) and self._free[place][0] == start + size:
                size += self._free.pop(place)[1]
            if place and sum(self._free[place - 1]) == start:
                start, before = self._free.pop(place - 1)
                size += before
            bisect.insort(self._free, (start, size))


def _size(piece: Piece) -> int:
    return piece[1]


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
        self._space = Space()
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
        stored = Stored(self._space.take(data.numel()))
        if self._last_write is not None:
            self._last_write.result()
        self._last_write = self._worker.submit(self._transfer, os.pwritev, data, stored)
        return stored

    def read(self, stored: Stored) -> "Future[Tensor]":
        """Begin to read what was written; what comes is a new uint8 [n].

        Its result raises CompressionError if the last write before it failed.
        """
        return self._worker.submit(self._read, stored, self._last_write)

    def free(self, stored: Stored) -> None:
        """Give its space back."""
        self._space.give_back(stored.pieces)

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self._space.end

    def _read(self, stored: Stored, last_write: Future[None] | None) -> Tensor:
        if last_write is not None:
            last_write.result()  # in reused space a failed write leaves older values, which nothing else would tell
        data = host_buffer(stored.nbytes)
        self._transfer(os.preadv, data, stored)
        return data

    def _transfer(self, call: Callable[[int, list[memoryview], int], int], data: Tensor, stored: Stored) -> None:
        view = memoryview(data.numpy())  # type: ignore[arg-type]
        try:
            for start, size in stored.pieces:
                piece, view = view[:size], view[size:]
                while piece:
                    count = call(self._file.fileno(), [piece], start + size - len(piece))
                    if count == 0:
                        raise OSError("the file ends too early")
                    piece = piece[count:]
        except OSError as error:
            raise CompressionError(
                f"Activations could not be kept in {self._folder} ({self.num_bytes / 1e9:.2f} GB there so far): "
                f"{error}. Make room, name another folder as scratch_dir, or raise activation_budget."
            ) from error
