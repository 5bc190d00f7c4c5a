"""Host memory beside the C heap."""

import ctypes
import mmap
from contextlib import suppress

import torch
from torch import Tensor

_LEAST_MAPPED = 1 << 20
_POPULATE_WRITE = 23  # Linux's number for `madvise`, since 5.14


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


def make_writable(tensor: Tensor) -> None:
    """Call before a tensor in host memory is overwritten: all its pages become writable at once, where the system can.

    Weights that are mapped from their file are copied page by page when they are written to, which takes most of the
    time of the writing (151 MB: 370 ms, and 225 ms with this).
    """
    if tensor.device.type != "cpu" or tensor.nbytes < _LEAST_MAPPED or not tensor.is_contiguous():
        return
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is not None:
        start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        advise(ctypes.c_void_p(start), ctypes.c_size_t(tensor.data_ptr() + tensor.nbytes - start), _POPULATE_WRITE)
