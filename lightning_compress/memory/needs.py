"""What a run needs, moment by moment: the table that `calibration.footprint` fills and `memory.budget` fits."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, final

from lightning_compress.memory.transfer import PIECE
from lightning_compress.memory.work import Work

What = Literal["batch", "solve", "write", "verification"]


@final
@dataclass(frozen=True)
class Moment:
    """What is alive at once beside the weights, in bytes.

    Attributes:
        what: while a `batch` runs, a group is `solve`d and packed, a shard is `write`n, or all is read back.
        of: the modules that are solved, or what else it is about.
        waiting: of all batches but the one that runs, values that may wait in the scratch file.
        fixed: of the same, those too small for it.
        in_flight: what is on its way from and to that file, if it is used, or to and from the device.
        batch: values of the batch that runs.
        statistics: sums over tokens.
        workspace: what a solve or packing makes where it computes.
        on_host: what is in host memory wherever it computes: what is packed and not written yet, a shard's tensors that
            are copied from a device, those that are read back.
        work: what there is to compute, for all batches of the rank.
        loaded, stored: bytes of values that may wait in the file, read from the cache and put into it, for all batches.
        heap_waiting, heap_batch: of `waiting` and `batch`, bytes in blocks of the C heap (see `memory.heap`).
        num_batches: of the rank.
    """

    what: What
    of: str = ""
    waiting: int = 0
    fixed: int = 0
    in_flight: int = 0
    batch: int = 0
    statistics: int = 0
    workspace: int = 0
    on_host: int = 0
    work: Work = field(default_factory=dict)
    loaded: int = 0
    stored: int = 0
    heap_waiting: int = 0
    heap_batch: int = 0
    num_batches: int = 0


@final
@dataclass(frozen=True)
class Held:
    """Bytes of the values that wait (those that may go to the file, and small ones), and of statistics."""

    waiting: int
    fixed: int
    statistics: int


def as_one(solves: Sequence[Moment]) -> list[Moment]:
    """Solves with the same beside them, as the one that takes the most, of either place."""
    if not solves:
        return []
    most, work = max(solves, key=lambda each: each.workspace), Counter[str]()
    for each in solves:
        work.update(each.work)
    on_host = max(each.on_host for each in solves)
    return [replace(most, of=", ".join(each.of for each in solves), work=dict(work), on_host=on_host)]


@final
@dataclass(frozen=True)
class Requests:
    """What a subgraph asks a device's allocator for, one thing after the other, where no activations wait on it.

    Attributes:
        weights: bytes of each tensor that it brings.
        loaded: for each of its steps, bytes of each value that a batch has copied to the device.
        computed: (number of a storage, its bytes) where one is made, (its number, minus its bytes) where it is freed:
            what a batch computes, statistics, what solving and packing take.
    """

    weights: tuple[int, ...] = ()
    loaded: tuple[tuple[int, ...], ...] = ()
    computed: tuple[tuple[int, int], ...] = ()


@final
@dataclass(frozen=True)
class Needs:
    """A subgraph's row of the table.

    Attributes:
        name: of the subgraph.
        weights: bytes that it brings; none of those whose home is where it runs.
        moments: in the order of the run.
        requests: of the same, one by one.
    """

    name: str
    weights: int
    moments: tuple[Moment, ...]
    requests: Requests = field(default=Requests(), compare=False, repr=False)

    @property
    def pinned(self) -> int:
        """Bytes of pinned memory that its weights take on their way to a device, a piece behind the other."""
        return min(self.weights, PIECES * PIECE)


PIECES = 4
"""Of `PIECE` bytes that are on their way to a device at once, at most (assumed: a link is some times faster than what
is copied to pinned memory)."""


def pinned_bytes(size: int) -> int:
    """What a block of so many bytes takes of pinned memory: PyTorch rounds it up to a power of two.

    >>> pinned_bytes(4096), pinned_bytes(5000)
    (4096, 8192)
    """
    return 1 << (size - 1).bit_length() if size else 0


def pinned_ratio(table: Sequence[Needs]) -> float:
    """How many bytes of pinned memory a byte of what waits takes, at worst, of values that are not small: which of a
    batch's wait in host memory depends on what the device has room for."""
    sizes = [size for row in table for step in row.requests.loaded for size in step]
    large = [size for size in sizes if 8 * size >= max(sizes)]
    return max((pinned_bytes(size) / size for size in large if size), default=1.0)


@final
@dataclass(frozen=True)
class Waiting:
    """How many bytes of activations may wait on the device, and then in host memory; None: all. What finds no room in
    either waits in a file. On a CPU there is no device apart."""

    device: int | None = 0
    host: int | None = None

    def shares(self, num_bytes: int) -> tuple[int, int, int]:
        """How many of so many bytes wait on the device, in host memory, and in the file.

        >>> Waiting(10, 20).shares(25), Waiting(10, 20).shares(40)
        ((10, 15, 0), (10, 20, 10))
        """
        on_device = num_bytes if self.device is None else min(num_bytes, self.device)
        rest = num_bytes - on_device
        on_host = rest if self.host is None else min(rest, self.host)
        return on_device, on_host, rest - on_host
