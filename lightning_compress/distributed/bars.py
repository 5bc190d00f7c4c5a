"""Progress bars: of several ranks those of the first are enough, of writing and reading back none.

transformers, datasets and compressed-tensors draw theirs with tqdm, each in a way of its own; only the first two can be
told not to. Alternative not taken: `TQDM_DISABLE`, which is read when tqdm is imported, before ranks know their number.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

from tqdm import tqdm

from lightning_compress.graph.restore import assigned


@contextmanager
def bars_of_first(rank: int) -> Iterator[None]:
    """Within: tqdm draws nothing, unless `rank` is 0."""
    with nullcontext() if rank == 0 else no_bars():
        yield


@contextmanager
def no_bars() -> Iterator[None]:
    """Within: new bars of tqdm are not drawn."""
    drawing = tqdm.__init__

    @wraps(drawing)
    def undrawn(bar: tqdm, *args: Any, **options: Any) -> None:
        drawing(bar, *args, **{**options, "disable": True})

    with assigned(tqdm, __init__=undrawn):
        yield
