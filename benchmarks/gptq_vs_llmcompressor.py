"""GPTQ here against GPTQ in LLM Compressor 0.14.0.1: time, memory and perplexity, on the same machine and inputs.

    python benchmarks/gptq_vs_llmcompressor.py [--peer-venv DIR] [--only speed memory perplexity] [--runs 3]

speed       Llama 768 wide, 8 layers, intermediate 2048, 12 heads, vocabulary 4096, fp32, 2 threads; W4A16 in groups of
            128; 64 samples of 256 tokens in batches of 8, damping 0.01, blocks of 128, static activation order. Seconds
            from the loaded model to the solved model: tracing included; imports, loading and saving apart. Runs of both
            sides and of the bare matrix products (`_matrix_floor.py`) alternate, each in a fresh process; medians.
memory      the same, and with 256 samples: peak resident memory of the whole process, ours as it is and at the
            least, both with schedule `recompute`, too, and with activations that wait in a file.
perplexity  the demo's model at 256 wide, trained for --train-steps, 128 samples: held-out perplexity at 4 and 3 bits in
            groups of 128 and at 2 bits in groups of 64, mean over --seeds calibration draws; scales from the range
            (minmax), searched (mse), or searched with weights from the inputs' energy (weighted).

The peer gets an environment of its own under --work-dir, unless --peer-venv names one. This process imports nothing
large: a child's peak resident memory starts from its parent's.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import venv
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PEER = ("torch==2.13.0", "llmcompressor==0.14.0.1")
THREADS = 2
SPEED_SAMPLES, MEMORY_SAMPLES, PERPLEXITY_SAMPLES = 64, 256, 128
GRIDS = ((4, 128), (3, 128), (2, 64))
SCALES = {"ours": ("minmax", "weighted"), "peer": ("minmax", "mse", "weighted")}
MEMORY_SETTINGS: tuple[tuple[str, dict[str, object]], ...] = (
    ("peer", {}),
    ("ours", {}),
    ("ours", {"host_budget": "least"}),
    ("ours", {"schedule": "recompute"}),
    ("ours", {"schedule": "recompute", "host_budget": "least"}),
    ("ours", {"activation_budget": 0}),
)
SCRIPTS = {"ours": "_our_gptq.py", "peer": "_peer_gptq.py", "floor": "_matrix_floor.py"}

Result = dict[str, float]


def ensure_peer(folder: Path, requirements: Iterable[str] = PEER) -> Path:
    """The Python of the peer's environment, created where it is not there."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    for requirement in requirements:  # torch first: its version is the one that is tested here
        installed = subprocess.run([python, "-m", "pip", "freeze"], check=True, capture_output=True, text=True).stdout
        if not any(line.partition("+")[0] == requirement for line in installed.splitlines()):
            subprocess.run([python, "-m", "pip", "install", "--quiet", requirement], check=True)
    return python


def ensure_inputs(folder: Path, train_steps: int) -> Path:
    """The folder of models and tokens, written where it is not there (the trained model takes minutes)."""
    inputs = folder / f"inputs-{train_steps}"
    if not list(inputs.glob("tokens_*.pt")):
        command = [sys.executable, HERE / "_gptq_inputs.py", inputs, "--train-steps", str(train_steps)]
        subprocess.run(command, check=True)
    return inputs


class Bench:
    """Runs the sides, each in a fresh process."""

    def __init__(self, pythons: dict[str, Path], inputs: Path, scripts: dict[str, str] = SCRIPTS) -> None:
        self.pythons = pythons
        self.inputs = inputs
        self.scripts = scripts

    def run(self, side: str, model: str, num_samples: int, seed: int = 0, **options: object) -> Result:
        own = self.inputs / model / f"tokens_{seed}.pt"  # of a model with a tokenizer of its own
        tokens = own if own.exists() else self.inputs / own.name
        command = [self.pythons[side], HERE / self.scripts[side], "--model", self.inputs / model]
        command += ["--tokens", tokens, "--num-samples", num_samples, "--threads", THREADS]
        for name, value in options.items():
            flag = f"--{name.replace('_', '-')}"
            command += [flag] if value is True else [flag, value]
        environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run([str(word) for word in command], env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{side} failed:\n{done.stderr[-4000:]}")
        result: Result = json.loads(done.stdout.splitlines()[-1])
        print(f"  {side:6}{model:9}{dict(options)} {result}", file=sys.stderr)
        return result


def speed(bench: Bench, runs: int) -> dict[str, object]:
    taken: dict[str, list[float]] = {side: [] for side in SCRIPTS}
    for _ in range(runs):
        for side in SCRIPTS:
            taken[side].append(bench.run(side, "large", SPEED_SAMPLES)["solve_s"])
    median = {side: statistics.median(times) for side, times in taken.items()}
    return {
        "all_s": taken,
        "median_s": median,
        "ours_to_peer": median["ours"] / median["peer"],
        "ours_to_matrix_products": median["ours"] / median["floor"],
    }


def memory(bench: Bench) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for num_samples in (SPEED_SAMPLES, MEMORY_SAMPLES):
        for side, options in MEMORY_SETTINGS:
            result = bench.run(side, "large", num_samples, **options)
            rows.append({"num_samples": num_samples, "side": side, "options": options, **result})
    return rows


def perplexity(bench: Bench, seeds: Iterable[int]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for num_bits, group_size in GRIDS:
        for side, settings in SCALES.items():
            for scales in settings:
                options = {"num_bits": num_bits, "group_size": group_size, "scales": scales, "evaluate": True}
                results = [bench.run(side, "trained", PERPLEXITY_SAMPLES, seed, **options) for seed in seeds]
                values = [result["perplexity"] for result in results]
                rows.append(
                    {
                        "num_bits": num_bits,
                        "group_size": group_size,
                        "side": side,
                        "scales": scales,
                        "original": results[0]["original_perplexity"],
                        "mean": statistics.mean(values),
                        "all": values,
                    }
                )
    return rows


def print_tables(report: dict[str, Any]) -> None:
    if "speed" in report:
        taken = report["speed"]
        print("\nseconds, medians      ours     peer  matrix products   ours/peer  ours/products")
        median = taken["median_s"]
        print(
            f"{'':18}{median['ours']:8.2f} {median['peer']:8.2f} {median['floor']:16.2f}"
            f" {taken['ours_to_peer']:11.3f} {taken['ours_to_matrix_products']:14.3f}"
        )
    if "memory" in report:
        print("\nsamples  side  peak resident MB   seconds")
        for row in report["memory"]:
            peak, options = row["peak_rss_bytes"] / 1e6, " ".join(f"{k}={v}" for k, v in row["options"].items())
            print(f"{row['num_samples']:7}  {row['side']:5} {peak:16.0f} {row['solve_s']:9.1f}   {options}")
    if "perplexity" in report:
        print("\nbits  group  side  scales      perplexity   (original)   of each calibration draw")
        for row in report["perplexity"]:
            each = " ".join(f"{value:.3f}" for value in row["all"])
            print(
                f"{row['num_bits']:4} {row['group_size']:6}  {row['side']:5} {row['scales']:9}"
                f" {row['mean']:12.3f} {row['original']:12.3f}   {each}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, default=Path.home() / ".cache" / "lightning_compress" / "benchmarks")
    parser.add_argument("--peer-venv", type=Path, help="an environment with " + " and ".join(PEER))
    parser.add_argument("--only", nargs="+", choices=("speed", "memory", "perplexity"))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3, choices=(1, 2, 3))
    parser.add_argument("--train-steps", type=int, default=1000)
    parser.add_argument("--json", type=Path, default=Path("outputs/gptq_vs_llmcompressor.json"))
    arguments = parser.parse_args()
    peer = ensure_peer(arguments.peer_venv or arguments.work_dir / "peer")
    inputs = ensure_inputs(arguments.work_dir, arguments.train_steps)
    ours = Path(sys.executable)
    bench = Bench({"ours": ours, "peer": peer, "floor": ours}, inputs)
    parts: dict[str, Callable[[], object]] = {
        "speed": lambda: speed(bench, arguments.runs),
        "memory": lambda: memory(bench),
        "perplexity": lambda: perplexity(bench, range(arguments.seeds)),
    }
    report: dict[str, Any] = {"peer": PEER, "threads": THREADS, "train_steps": arguments.train_steps}
    for name in arguments.only or parts:
        report[name] = parts[name]()
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(report, indent=2))
    print_tables(report)
    print(f"\n{arguments.json}")


if __name__ == "__main__":
    main()
