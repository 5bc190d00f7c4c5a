"""The C heap, from which a CPU's tensors come that are smaller than 32 MiB."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_GROWS_FOR = 32 << 20  # larger blocks are mapped one by one and go back when they are freed; glibc allows no more
LARGEST_IN_HEAP = 2 * _GROWS_FOR
"""Bytes of a block that is taken to come from the heap at most: where it is a little larger than the heap grows for,
something large enough is mostly free there."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's numbers for `mallopt`


def trim_heap() -> None:
    """Let the C heap give back what is free in it, where it can (glibc); costs milliseconds.

    Without this its holes grow for some ten subgraphs, to a hundred megabytes and more.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def heap_kept() -> Iterator[None]:
    """Within: what a batch frees stays in the C heap for the next one, where it can (glibc), until `trim_heap`.

    By itself the heap gives back what is free at its end as soon as that is twice the largest block it had, and maps it
    anew for the next batch: every few operators or hardly ever, by the chance of what lies at its end (batches of 16
    times 512 tokens, layers 512 wide: 3 to 15 % of the time, and three times as many page faults in one run as in
    another).
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        yield
        return
    set_option(_MMAP_THRESHOLD, _GROWS_FOR)
    set_option(_TRIM_THRESHOLD, 2**31 - 1)
    try:
        yield
    finally:
        set_option(_TRIM_THRESHOLD, 2 * _GROWS_FOR)  # as glibc has it once it has met blocks of that size
        trim_heap()
