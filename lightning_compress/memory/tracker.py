"""Exact count of the bytes alive during a run, by following every storage an operator returns.

The method is that of `torch.distributed._tools.MemTracker`, reduced to storages: a dispatch mode sees each operator's
outputs, counts a storage when it is first seen and discounts it when it is collected. Unlike a process' high-water mark
it is the same on every machine.
"""

import re
import resource
import sys
import weakref
from collections.abc import Callable, Iterable
from math import isfinite
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_compress.graph.compat import TorchDispatchMode
from lightning_compress.graph.cuda import temporary_bytes
from lightning_compress.graph.trees import tensors_in
from lightning_compress.memory.heap import LARGEST_IN_HEAP

DEVICE_OF = torch.ops.prim.device.default
"""What a backward asks of each fake tensor, more often than it computes: modes answer it at once."""


@final
class LiveMemory(TorchDispatchMode):
    """Bytes of the storages created inside the context that are alive, and their peak.

    Storages that existed before are not counted unless `track` is called on them.

    Args:
        on_cuda: fake tensors stand for a GPU's, whose operators have temporaries (see `graph.cuda`).

    Attributes:
        live_bytes, peak_bytes: now, and at most since the last reset.
        heap_bytes, heap_peak_bytes: likewise, of storages that come from the C heap where they are a CPU's.
        events: in order, (number of a storage, its bytes) where it was first seen, (its number, minus its bytes) where
            it was freed.
    """

    def __init__(self, *, on_cuda: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_cuda = on_cuda
        self.live_bytes = self.heap_bytes = 0
        self.peak_bytes = self.heap_peak_bytes = 0
        self.events: list[tuple[int, int]] = []
        self._seen = WeakIdKeyDictionary()
        self._numbers = WeakIdKeyDictionary()

    def ignore(self, *tensors: Tensor) -> None:
        """Leave these tensors' storages out of the count."""
        for tensor in tensors:
            self._seen[tensor.untyped_storage()] = None

    def track(self, tensor: Tensor) -> None:
        """Count this tensor's storage from now on."""
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        number, size = len(self.events), storage.size()
        self._seen[storage] = weakref.ref(storage, lambda _: self._freed(number, size))
        self._numbers[storage] = number
        self.events.append((number, size))
        self._add(size, size)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.heap_peak_bytes = max(self.heap_peak_bytes, self.heap_bytes)

    def moved_away(self, tensor: Tensor) -> None:
        """What stands for this tensor's storage goes elsewhere: among the events, and there alone, it is freed."""
        storage = tensor.untyped_storage()
        if storage in self._numbers:
            self.events.append((self._numbers[storage], -storage.size()))

    def stands_for(self, sizes: Iterable[int]) -> None:
        """Among the events, and there alone, storages of so many bytes are made one after the other, then freed."""
        made = [(number, size) for number, size in enumerate(sizes, len(self.events)) if size]
        self.events += [*made, *((number, -size) for number, size in made)]

    def reset_peak(self) -> None:
        """Start the peak anew from what is alive."""
        self.peak_bytes, self.heap_peak_bytes = self.live_bytes, self.heap_bytes

    def _freed(self, number: int, size: int) -> None:
        self.events.append((number, -size))
        self._add(-size, size)

    def _add(self, change: int, size: int) -> None:
        self.live_bytes += change
        self.heap_bytes += change if size < LARGEST_IN_HEAP else 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF:
            return args[0].device
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            self.track(tensor)
        if self._on_cuda and (size := temporary_bytes(func, args)):
            self.stands_for([size])
            self.peak_bytes = max(self.peak_bytes, self.live_bytes + size)
        return out


def peak_bytes(device: torch.device) -> int:
    """Peak memory so far: allocated on a CUDA device since the last reset, else this process' resident high-water
    mark."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else high_water_bytes()


def high_water_bytes() -> int:
    """The most host memory that this process had resident so far (VmHWM)."""
    found = _status("VmHWM")
    if found is not None:
        return found
    unit = 1 if sys.platform == "darwin" else 1024  # on Linux this would include what a parent had before `exec`
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_bytes() -> int:
    """Host memory that this process has resident now; where the system does not tell, the most it had."""
    return _status("VmRSS") or high_water_bytes()


def held_bytes(device: torch.device) -> int:
    """Host memory that is not there for a run's own tensors: what this process has resident now and, where the run is
    on a CPU, what MKL is about to keep of it for its buffers (16, 44, 74, 125 and 177 MB were measured on 1, 2, 4, 8
    and 16 threads; counted twice where it has them already)."""
    buffers = 20 * 10**6 + 12 * 10**6 * torch.get_num_threads() if device.type == "cpu" else 0
    return resident_bytes() + buffers


def _status(field: str) -> int | None:
    """A size in /proc/self/status, where that exists (Linux)."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8", errors="replace").splitlines() if status.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), None)


def reset_peak(device: torch.device) -> None:
    """Start the peak of a CUDA device anew; a process' high-water mark cannot be reset without privileges."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def parse_bytes(size: int | str, of: Callable[[], int] | None = None) -> int:
    """Bytes of a size like "4GiB", "500 MB" or "1e9", or of a part like "80%".

    >>> parse_bytes("1.5GiB"), parse_bytes("2MB"), parse_bytes(7), parse_bytes("80%", of=lambda: 1000)
    (1610612736, 2000000, 7, 800)

    Args:
        of: gives the bytes that a percentage is of; None: there is nothing for it to be of.

    Raises:
        ValueError: it is not like these, or negative.
    """
    number = r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[0-9]+)?)"
    part = re.fullmatch(rf"\s*{number}\s*%\s*", str(size))
    if part is not None and of is not None and float(part[1]) <= 100:
        return int(of() * float(part[1]) / 100)
    found = re.fullmatch(rf"\s*{number}\s*(?:([KMGT])(i?)B?|B)?\s*", str(size), re.IGNORECASE)
    amount, unit, binary = found.groups() if found is not None else ("inf", None, None)
    base = 1024 if binary else 1000
    num_bytes = float(amount) * base ** (" KMGT".index(unit.upper()) if unit else 0)
    if not isfinite(num_bytes) or not (unit or num_bytes.is_integer()):  # infinite: beyond what floats hold
        percent = "" if of is None else ", or up to 100%"
        raise ValueError(
            f"{size!r} is no size; write bytes, or a number with KB, MB, GB, TB, KiB, MiB, GiB or TiB{percent}."
        )
    return int(num_bytes)
