"""Global random numbers go on as if nobody had drawn any meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch.utilities.seed import isolate_rng


@contextmanager
def rng_kept() -> Iterator[None]:
    """As Lightning's `isolate_rng`, which restores nothing after an exception."""
    isolating = isolate_rng()
    isolating.__enter__()
    try:
        yield
    finally:
        isolating.__exit__(None, None, None)
