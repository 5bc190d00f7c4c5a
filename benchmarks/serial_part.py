"""What every rank does for itself of solving a dense group, the factor of its Gram, and what sharing it out brings.

    python benchmarks/serial_part.py [--ranks 2] [--widths 2048 3072 4096 8192] [--simulate 8 64]

Ranks are processes of one thread each on this machine. Of each width, in milliseconds of rank 0: the factor that it
makes alone (of this the tiles below the corners, which can be shared out); the factor made by all, with what they
exchange; and the Gram's sums brought to all ranks (`all_reduce`) or to one that would be the only one to need them
(`reduce`), by gloo. CPU time where a rank computes, so that what else the machine does matters little; wall time where
ranks exchange. The least of several turns. Then the same factor on more ranks, with links of a given rate: tiles as
they are assigned, exchanges around a ring, everything else as measured.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from scaling import Link, results_of, ring_s, start_ranks
from torch import Tensor
from torch import distributed as dist

from lightning_compress.algorithms.factor import factorize
from lightning_compress.algorithms.rows import ByRows, here
from lightning_compress.distributed.collective import ProcessGroup
from lightning_compress.distributed.share import assign, fill, shares_factor

TURNS = 3


def least(work: Callable[[], object], clock: Callable[[], float]) -> float:
    """Seconds, after all ranks have met."""
    found = []
    for _ in range(TURNS):
        dist.barrier()
        start = clock()
        work()
        found.append(clock() - start)
    return min(found)


def rank(widths: Sequence[int]) -> None:
    """Measure, and print one JSON line."""
    dist.init_process_group("gloo")
    ranks = ProcessGroup(timedelta(minutes=5))
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    for width in widths:
        x = torch.randn(width + 300, width, generator=torch.Generator().manual_seed(0))
        gram = x.t() @ x / len(x)
        panels: list[tuple[float, list[int]]] = []

        def timed(compute: Callable[[slice], Tensor], tiles: Sequence[slice], to: Tensor) -> None:
            start = time.process_time()
            here(compute, tiles, to)
            panels.append((time.process_time() - start, [tile.stop - tile.start for tile in tiles]))  # noqa: B023

        def factor(by_rows: ByRows) -> Callable[[], object]:
            return partial(factorize, gram, 0.01, True, by_rows)  # noqa: B023

        together: ByRows = partial(fill, collective=ranks, what="the factor")
        alone_s, together_s = (least(factor(by_rows), time.process_time) for by_rows in (here, together))
        for _ in range(TURNS):
            panels.clear()
            factor(timed)()
        sums = torch.zeros(width * (width + 256) // 2, dtype=torch.float64)
        to_all = least(partial(dist.all_reduce, sums), time.perf_counter)
        to_one = least(partial(dist.reduce, sums, 0), time.perf_counter)
        seconds = {"alone": alone_s, "together": together_s, "to all": to_all, "to one": to_one}
        found.append({"width": width, "seconds": seconds, "panels": panels})
    print(json.dumps(found))
    dist.destroy_process_group()


def predicted(found: dict[str, Any], size: int, link: Link) -> float:
    """Seconds of the factor, made by `size` ranks."""
    seconds: float = found["seconds"]["alone"]
    for taken, heights in found["panels"]:
        if heights:
            most = max(sum(heights[number] for number in share) for share in assign(heights, size))
            seconds += taken * (most / sum(heights) - 1) + ring_s(4 * 128 * sum(heights), size, link)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--widths", type=int, nargs="+", default=[2048, 3072, 4096, 8192])
    parser.add_argument("--simulate", type=int, nargs="*", default=[8, 64])
    parser.add_argument("--link-rate", type=float, default=10e9, help="bytes per second between ranks")
    parser.add_argument("--link-latency", type=float, default=20e-6, help="seconds")
    given = parser.parse_args()
    if "RANK" in os.environ:
        rank(given.widths)
        return
    command = [sys.executable, __file__, "--widths", *map(str, given.widths)]
    link = Link(given.link_rate, given.link_latency)
    columns = ["alone", "tiles", f"by {given.ranks}", *(f"by {size}" for size in given.simulate), "to all", "to one"]
    print(f"{'channels':>10}" + "".join(f"{column:>10}" for column in columns))
    for found in results_of(start_ranks(command, given.ranks))[0]:
        seconds, width = found["seconds"], found["width"]
        tiles = sum(taken for taken, _ in found["panels"])
        more = [predicted(found, size, link) for size in given.simulate]
        row = [seconds["alone"], tiles, seconds["together"], *more, seconds["to all"], seconds["to one"]]
        shared = [str(size) for size in (given.ranks, *given.simulate) if shares_factor(width, size)]
        values = "".join(f"{1e3 * value:10.0f}" for value in row)
        print(f"{width:>10}{values}  shared by {', '.join(shared) or 'none'}")


if __name__ == "__main__":
    main()
