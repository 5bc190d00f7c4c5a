"""Host memory beside the C heap."""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

_LEAST_MAPPED = 1 << 20


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
