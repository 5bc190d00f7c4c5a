"""Reading the next subgraph's weights while one is computed, against reading them when they are needed.

    python benchmarks/prefetch.py [--runs 5] [--num-batches 1 4] [--work-dir DIR]

The 8-layer model of `memory_depth.py`, streamed; runs with and without prefetch alternate, each in a fresh process,
from files in the page cache (warm) and from files that were dropped from it (cold). Medians. `hidden` is the
fraction of the time spent waiting for weights that prefetch takes away.
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
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("outputs/prefetch.json"))
    arguments = parser.parse_args()
    model = arguments.work_dir / "llama-8"
    if not (model / "config.json").is_file():
        subprocess.run([sys.executable, "-c", MODEL, str(model), "8"], check=True, capture_output=True)
    rows: list[dict[str, Any]] = []
    print("samples  files  with s  without s  ratio  waiting with s  without s  hidden")
    for num_batches in arguments.num_batches:
        for name, prepare in (("warm", warm), ("cold", drop_from_page_cache)):
            taken: dict[str, list[dict[str, Any]]] = {"with": [], "without": []}
            for _ in range(arguments.runs):
                for side, options in (("with", ()), ("without", ("--prefetch-depth", "0"))):
                    prepare(model)
                    taken[side].append(run(model, num_batches, arguments.work_dir, *options))
            total = {
                side: statistics.median(r["total_s"] - r["prepared_s"] for r in runs) for side, runs in taken.items()
            }
            waiting = {side: statistics.median(r["onload_s"] for r in runs) for side, runs in taken.items()}
            rows.append({"num_samples": 4 * num_batches, "files": name, "total_s": total, "onload_s": waiting})
            print(
                f"{4 * num_batches:7}  {name:5} {total['with']:7.2f} {total['without']:10.2f}"
                f" {total['with'] / total['without']:6.3f} {waiting['with']:15.3f} {waiting['without']:10.3f}"
                f" {1 - waiting['with'] / waiting['without']:7.2f}",
                flush=True,
            )
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
