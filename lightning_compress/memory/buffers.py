"""Host memory beside the C heap, and the heap itself."""

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

_LEAST_MAPPED = 1 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_MOST_ON_HEAP = 1 << 25  # what glibc's own threshold goes up to; larger blocks are mapped
_KEPT = 1 << 29


def host_buffer(nbytes: int) -> Tensor:
    """An uninitialized uint8 [nbytes] in memory of its own, which goes back to the system when the tensor is freed.

    The C heap keeps what is freed, and where several threads take and give large blocks of many sizes its holes add up
    to a multiple of what is in use. Where the system has huge pages they are asked for: most of what it takes to read
    a file that is in the page cache is to fault small ones in (26 MB: 24 ms, and 5 ms with huge ones).
    """
    if nbytes < _LEAST_MAPPED:
        return torch.empty(nbytes, dtype=torch.uint8)
    block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            block.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(block, dtype=torch.uint8)


def outside_heap(tensor: Tensor) -> Tensor:
    """A copy of a contiguous CPU tensor in memory of its own, for what outlives many blocks of the heap that are made
    after it; a small one as it is."""
    if tensor.nbytes < _LEAST_MAPPED:
        return tensor
    copy = host_buffer(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


@contextmanager
def keeping_heap() -> Iterator[None]:
    """Within: the C heap (glibc's) keeps up to 512 MiB that are free, and serves blocks of up to 32 MiB.

    By itself it gives back the memory of a batch's values when the batch ends, and faults it in again with the next:
    half of the time of elementwise operators. Afterwards it is trimmed, with thresholds as large as its own may become.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        yield
        return
    libc.mallopt(_M_MMAP_THRESHOLD, _MOST_ON_HEAP)
    libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)
    try:
        yield
    finally:
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _MOST_ON_HEAP)
        trim_heap()


def trim_heap() -> None:
    """Let the C heap give back what is free in it, where it can (glibc); costs milliseconds.

    Without this its holes grow for some ten subgraphs, to a hundred megabytes and more.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
