"""What error correction costs: GPTQ with and without it, on the same machine and inputs.

    python benchmarks/correction_cost.py [--runs 3]

The speed case of `gptq_vs_llmcompressor.py`: Llama 768 wide, 8 layers, intermediate 2048, fp32, 2 threads; W4A16 in
groups of 128; 64 samples of 256 tokens in batches of 8. Seconds from the loaded to the quantized model, of the clock
and of the processor (which other work on the machine disturbs less). Runs alternate, each in a fresh process; medians.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from gptq_vs_llmcompressor import SPEED_SAMPLES, THREADS, Bench, ensure_inputs

SETTINGS: dict[str, dict[str, object]] = {
    "plain": {},
    "inputs": {"correct": "inputs"},
    "gptaq": {"correct": "gptaq"},
    "residual": {"correct": "residual"},
    "residual, refit chosen": {"correct": "residual", "refit": "null"},
}
MEASURED = {"wall_s": "solve_s", "cpu_s": "cpu_s"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, default=Path.home() / ".cache" / "lightning_compress" / "benchmarks")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--train-steps", type=int, default=1000, help="of the inputs' other model, if they are not there"
    )
    parser.add_argument("--json", type=Path, default=Path("outputs/correction_cost.json"))
    arguments = parser.parse_args()
    bench = Bench({"ours": Path(sys.executable)}, ensure_inputs(arguments.work_dir, arguments.train_steps))
    taken: dict[str, dict[str, list[float]]] = {name: {key: [] for key in MEASURED} for name in SETTINGS}
    for _ in range(arguments.runs):
        for name, options in SETTINGS.items():
            result = bench.run("ours", "large", SPEED_SAMPLES, scales="weighted", **options)
            for key, measured in MEASURED.items():
                taken[name][key].append(result[measured])
    median = {name: {key: statistics.median(times) for key, times in of.items()} for name, of in taken.items()}
    report = {"threads": THREADS, "all": taken, "median": median}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(report, indent=2))
    print(f"\n{'seconds, medians':24}{'wall':>8}{'cpu':>8}{'wall/plain':>12}{'cpu/plain':>12}")
    for name, of in median.items():
        wall, cpu = (of[key] / median["plain"][key] for key in MEASURED)
        print(f"{name:24}{of['wall_s']:8.1f}{of['cpu_s']:8.1f}{wall:12.2f}{cpu:12.2f}")
    print(f"\n{arguments.json}")


if __name__ == "__main__":
    main()
