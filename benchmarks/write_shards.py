"""Writing a subgraph's shards side by side against one after the other, each until it is read back and on disk.

    python benchmarks/write_shards.py [--shards 8] [--mib 32] [--runs 5] [--folder DIR]

Both sides take turns in one process, on the same tensors; figures are medians, and the middle half of the ratios of
turns that follow one another. `--folder /dev/shm` is a disk that takes no time.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from lightning_compress.export.shards import write_shards

_TENSORS = 8


def seconds(states: dict[Path, dict[str, Tensor]], together: bool) -> float:
    """To write all of them."""
    start = time.perf_counter()
    for each in [states] if together else [{path: state} for path, state in states.items()]:
        write_shards(each)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--mib", type=int, default=32, help="of a shard")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"))
    arguments = parser.parse_args()
    numbers = (arguments.mib << 20) // 4 // _TENSORS
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        states = {
            Path(folder) / f"{number}.safetensors": {
                str(each): torch.randint(0, 2**31 - 1, (numbers,), dtype=torch.int32) for each in range(_TENSORS)
            }
            for number in range(arguments.shards)
        }
        turns = [[seconds(states, together) for together in (False, True)] for _ in range(arguments.runs + 1)][1:]
    alone, together = (statistics.median(side) for side in zip(*turns, strict=True))
    ratios = sorted(second / first for first, second in turns)
    middle = ratios[len(ratios) // 4 : -(len(ratios) // 4) or None]
    size = arguments.shards * arguments.mib / 1024
    print(f"{arguments.shards} shards of {arguments.mib} MiB, {torch.get_num_threads()} threads, {arguments.folder}")
    print(f"one after the other {alone:.2f} s ({size / alone:.2f} GiB/s), side by side {together:.2f} s", end=" ")
    print(f"({size / together:.2f} GiB/s): {statistics.median(ratios):.2f} ({middle[0]:.2f}-{middle[-1]:.2f})")


if __name__ == "__main__":
    main()
