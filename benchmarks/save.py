"""Time from the last solve to a loadable checkpoint against the model's depth: it should not grow.

    python benchmarks/save.py [--depths 8 16 32 64] [--runs 3] [--work-dir DIR]

The models of `memory_depth.py`, streamed, with four samples of 256 tokens; every run is a fresh process, figures are
medians. `save` begins when the last decoder layer is solved and ends when config.json is there: that layer
is packed, written, synced and read back, what no layer holds likewise, and index and configuration are written.
`report` is what comes after it. `reading all` is the alternative not taken: the checksums of all shards at the end.
"""

import argparse
import hashlib
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from memory_depth import MODEL, run


def reading_s(folder: Path) -> float:
    """Seconds to read and digest all shards, from the page cache."""
    start = time.perf_counter()
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            hashlib.file_digest(opened, "sha256")
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, default=Path.home() / ".cache" / "lightning_compress" / "memory_depth")
    parser.add_argument("--depths", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path("outputs/save.json"))
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print("layers  checkpoint MB  total s  save s  report s  reading all s")
    for depth in arguments.depths:
        model, out = arguments.work_dir / f"llama-{depth}", arguments.work_dir / "out"
        if not (model / "config.json").is_file():
            subprocess.run([sys.executable, "-c", MODEL, str(model), str(depth)], check=True, capture_output=True)
        runs, reading = [], []
        for _ in range(arguments.runs):
            runs.append(run(model, 1, arguments.work_dir, keep=True))
            reading.append(reading_s(out))
            size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
            shutil.rmtree(out)
        row = {"depth": depth, "checkpoint_bytes": size, "reading_s": statistics.median(reading)}
        row |= {key: statistics.median(taken[key] for taken in runs) for key in ("total_s", "save_s", "report_s")}
        rows.append(row)
        print(
            f"{depth:6} {size / 1e6:14.0f} {row['total_s']:8.1f} {row['save_s']:7.2f} {row['report_s']:9.2f}"
            f" {row['reading_s']:14.2f}",
            flush=True,
        )
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
