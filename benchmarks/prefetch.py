"""Reading the weights of the next subgraphs while one is computed, against reading them when they are needed.

    python benchmarks/prefetch.py [--prefetch-depths 1 2] [--runs 5] [--num-batches 1 4] [--work-dir DIR]

The 8-layer model of `memory_depth.py`, streamed; runs of all depths alternate with runs without prefetch, each in a
fresh process and each round in the other order, from files in the page cache (warm) and from files that were dropped
from it (cold). Medians; `of depth 0` is the median of the rounds' ratios, and behind it the middle half of them.
`hidden` is the fraction of the time spent waiting for weights that prefetch takes away.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from memory_depth import MODEL, run


def drop_from_page_cache(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def warm(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, default=Path.home() / ".cache" / "lightning_compress" / "memory_depth")
    parser.add_argument("--num-batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--prefetch-depths", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--json", type=Path, default=Path("outputs/prefetch.json"))
    arguments = parser.parse_args()
    model = arguments.work_dir / "llama-8"
    if not (model / "config.json").is_file():
        subprocess.run([sys.executable, "-c", MODEL, str(model), "8"], check=True, capture_output=True)
    rows: list[dict[str, Any]] = []
    depths = [0, *arguments.prefetch_depths]
    print("samples  files  depth  seconds  of depth 0         waiting s  hidden   peak MB")
    for num_batches in arguments.num_batches:
        for name, prepare in (("warm", warm), ("cold", drop_from_page_cache)):
            taken: dict[int, list[dict[str, Any]]] = {depth: [] for depth in depths}
            for number in range(arguments.runs):
                for depth in depths[:: -1 if number % 2 else 1]:
                    prepare(model)
                    options = ("--prefetch-depth", str(depth))
                    taken[depth].append(run(model, num_batches, arguments.work_dir, *options))
            each = {depth: [run["total_s"] - run["prepared_s"] for run in runs] for depth, runs in taken.items()}
            total = {depth: statistics.median(seconds) for depth, seconds in each.items()}
            waiting = {d: statistics.median(r["onload_s"] for r in runs) for d, runs in taken.items()}
            peak = {d: statistics.median(r["peak_bytes"] for r in runs) for d, runs in taken.items()}
            rows.append({"num_samples": 4 * num_batches, "files": name, "total_s": each, "onload_s": waiting})
            for depth in depths:
                ratios = sorted(mine / other for mine, other in zip(each[depth], each[0], strict=True))
                low, ratio, high = statistics.quantiles(ratios, n=4, method="inclusive")
                print(
                    f"{4 * num_batches:7}  {name:5} {depth:6} {total[depth]:8.2f} {ratio:7.3f} ({low:.2f}-{high:.2f})"
                    f" {waiting[depth]:10.3f} {1 - waiting[depth] / waiting[0]:7.2f} {peak[depth] / 1e6:9.0f}",
                    flush=True,
                )
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
