"""Python's collector of reference cycles, which stops a rank, and so all of them, and slows planning down."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NEVER = 2**31 - 1


@contextmanager
def no_full_collections() -> Iterator[None]:
    """Within: cycles among new objects are collected as ever, but not all objects of all libraries are looked at.

    That takes some tenths of a second, once or twice in a run, on every rank at another moment, while the others wait
    for it. Trainers of large models collect at moments that they agree on (torchtitan's `GarbageCollection`); a run
    makes too few cycles that live long to need that.
    """
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)
