"""Host memory that there is: of the machine, within the limits that a container or a batch system sets (cgroups)."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from lightning_compress.errors import CompressionError


def free_on(device: torch.device) -> int:
    """Bytes of a CUDA device that nobody uses: free there, or kept by PyTorch to be used again."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + kept


def available_bytes(root: Path = Path("/")) -> int:
    """Host memory that this process can have without swapping or being killed; where Linux does not tell, all there is.

    Args:
        root: where /proc and /sys are.
    """
    left = [limit - used for limit, used in _limits(root)]
    return max(0, min([_meminfo(root, "MemAvailable"), *left]))


def total_bytes(root: Path = Path("/")) -> int:
    """Host memory of the machine, or of the container or batch job that this process is in.

    Args:
        root: where /proc and /sys are.
    """
    return min([_meminfo(root, "MemTotal"), *(limit for limit, _ in _limits(root))])


def memory_bytes(device: torch.device) -> int:
    """All memory of a device.

    Raises:
        CompressionError: it is not here.
    """
    if device.type != "cuda":
        return total_bytes()
    if not torch.cuda.is_available():
        raise CompressionError("A percentage of a GPU's memory needs that GPU, and there is none here; give bytes.")
    return torch.cuda.get_device_properties(device).total_memory


def _meminfo(root: Path, field: str) -> int:
    file = root / "proc/meminfo"
    if file.is_file():
        fields = dict(line.split(":", 1) for line in file.read_text(encoding="utf-8").splitlines())
        return int(fields[field].split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Bytes that the process's control groups allow, and that they use without what is cached of files.

    Both versions of cgroups are read: https://docs.kernel.org/admin-guide/cgroup-v2.html and cgroup-v1/memory.html.
    """
    own = root / "proc/self/cgroup"
    for line in os.fsdecode(own.read_bytes()).splitlines() if own.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, names, prefix = root / "sys/fs/cgroup", ("memory.max", "memory.current"), ""
        elif "memory" in controllers.split(","):
            names, prefix = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"
            top = root / "sys/fs/cgroup/memory"
        else:
            continue
        group = top / path.strip("/")  # not to be seen in a container that has the outside's names: its own is the top
        for folder in (group, *group.parents):
            if folder.is_relative_to(top) and all((folder / name).is_file() for name in (*names, "memory.stat")):
                limit, used = ((folder / name).read_text(encoding="utf-8").strip() for name in names)
                stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines())
                cached = int(stat[f"{prefix}inactive_file"]) + int(stat[f"{prefix}active_file"])
                if limit != "max":
                    yield int(limit), max(0, int(used) - cached)
