"""Host memory for what is read."""

import ctypes
import mmap

import torch
from torch import Tensor

_LEAST_MAPPED = 1 << 20


def host_buffer(nbytes: int) -> Tensor:
    """An uninitialized uint8 [nbytes] in memory of its own, which goes back to the system when the tensor is freed.

    The C heap keeps what is freed, and where several threads take and give large blocks of many sizes its holes add up
    to a multiple of what is in use.
    """
    if nbytes < _LEAST_MAPPED:
        return torch.empty(nbytes, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


def trim_heap() -> None:
    """Let the C heap give back what is free in it, where it can (glibc); costs milliseconds.

    Without this its holes grow for some ten subgraphs, to a hundred megabytes and more.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
