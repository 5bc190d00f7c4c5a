"""Where the bytes of a run live, in one place."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from lightning_compress.errors import CompressionError, check_options
from lightning_compress.memory.host import memory_bytes, total_bytes
from lightning_compress.memory.source import WeightSource
from lightning_compress.memory.tracker import parse_bytes

FORESEEN, LEAST = "foreseen", "least"


@dataclass(frozen=True)
class MemoryConfig:
    """What a user says about memory. Sizes are bytes, or text like "4GiB", or "80%" of what the device or the host has
    (within the limits of a container or a batch job), which counts for each rank.

    Attributes:
        device_budget: how much of the device's memory the run may take (on a CPU: how much it may add to what the
            process holds); None: whatever it needs.
        host_budget: how much host memory the process may take, all that it holds already included; None: whatever it
            needs. Tensors are sure to stay within it, or the run is refused before it begins; that the process does is
            checked at the end (see `memory.budget`). "foreseen": no limit, but as under one, what the run will take is
            foreseen, and the process kept near it. "least": likewise, and on a CPU what batches free is given back at
            once, which takes a tenth to a third longer.
        device_activation_budget: how much of the activations may wait on the device between steps, where that is not
            the CPU; None: all of them, or what `device_budget` leaves.
        activation_budget: how much of the others may wait in host memory, the rest waits in an unnamed file; None: all
            of them, or what `host_budget` leaves.
        prefetch_depth: how many subgraphs ahead of the one that computes weights are brought; 0: none. Fewer than asked
            where a budget demands it.
        scratch_dir: a folder with room for that file; None: the system's temporary folder, or `/var/tmp` where that
            is in memory.

    Raises:
        CompressionError: a size that is none, a depth that is no number from 0 on, or a folder that is no path.
    """

    device_budget: int | str | None = None
    host_budget: int | str | None = None
    device_activation_budget: int | str | None = 0
    activation_budget: int | str | None = None
    prefetch_depth: int = 1
    scratch_dir: str | Path | None = None

    def __post_init__(self) -> None:
        for name in ("device_budget", "host_budget", "device_activation_budget", "activation_budget"):
            self._num_bytes(name, of=lambda: 0)
        depth = self.prefetch_depth
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
            raise CompressionError(
                f"prefetch_depth={depth!r} is no number of subgraphs: 0, 1, 2, ...; 0 reads nothing ahead."
            )
        folder = self.scratch_dir
        if folder is not None and (not isinstance(folder, str | PathLike) or folder == ""):
            raise CompressionError(f"scratch_dir={folder!r} is no path of a folder; leave it out for the system's own.")

    def num_bytes(self, name: str, device: torch.device) -> int | None:
        """A budget in bytes, of a run on `device`.

        Raises:
            CompressionError: a part of a device that is not here.
        """
        return self._num_bytes(name, lambda: memory_bytes(device) if name.startswith("device_") else total_bytes())

    def _num_bytes(self, name: str, of: Callable[[], int]) -> int | None:
        size = getattr(self, name)
        if name == "host_budget" and size in (FORESEEN, LEAST):
            return None
        try:
            return None if size is None else parse_bytes(size, of)
        except ValueError as error:
            beside = f' Or "{FORESEEN}" or "{LEAST}".' if name == "host_budget" else ""
            raise CompressionError(f"{name}: {error}{beside}") from error


def memory_config(value: "MemoryConfig | Mapping[str, Any] | None") -> MemoryConfig:
    """The options in a mapping (or as they are, or the defaults).

    Raises:
        CompressionError: an unknown key (names the nearest known one), or what `MemoryConfig` refuses.
    """
    if value is None or isinstance(value, MemoryConfig):
        return value or MemoryConfig()
    known = [field.name for field in fields(MemoryConfig)]
    if not isinstance(value, Mapping):
        raise CompressionError(f"memory={value!r} is no mapping of options such as host_budget: {', '.join(known)}.")
    check_options("memory", value, known)
    return MemoryConfig(**value)


@dataclass(frozen=True)
class Placement:
    """Where weights and activations are.

    Attributes:
        device: where subgraphs run.
        source: where the values of parameters on the meta device are; all others are in host memory.
        prefetch_depth: how many subgraphs ahead of the one that computes weights are read and copied; 0: none.
        device_activation_budget: bytes of activations that may wait on the device; None: all of them.
        activation_budget: bytes of the others that may wait in host memory; None: all of them.
        scratch_dir: folder of the file for the others; None: the system's temporary folder.
        is_tight: activations have a budget of host memory and the process has none, so what is free in the C heap is
            given back to the system before a solve.
        most_resident: bytes of the process's memory above which that is given back, behind a batch and before a solve.
            None: nobody foresaw them.
    """

    device: torch.device
    source: WeightSource | None = None
    prefetch_depth: int = 1
    device_activation_budget: int | None = 0
    activation_budget: int | None = None
    scratch_dir: Path | None = None
    is_tight: bool = False
    most_resident: int | None = None


def placement(memory: MemoryConfig, device: torch.device, source: WeightSource | None) -> Placement:
    """Where a run on `device` puts what, as far as a user says it.

    Under a budget all activations wait outside of its memory, until a run has fitted what may stay (see
    `memory.budget`).
    """
    on_device = memory.num_bytes("device_activation_budget", device)
    if on_device is None and memory.device_budget is not None:
        on_device = 0
    activations = memory.num_bytes("activation_budget", device)
    if activations is None and memory.num_bytes("host_budget", device) is not None:
        activations = 0
    return Placement(
        device,
        source=source,
        prefetch_depth=memory.prefetch_depth,
        device_activation_budget=on_device,
        activation_budget=activations,
        scratch_dir=None if memory.scratch_dir is None else Path(memory.scratch_dir),
        is_tight=activations is not None,
    )
