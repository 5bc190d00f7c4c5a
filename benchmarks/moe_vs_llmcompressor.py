"""Mixtures of experts here and in LLM Compressor: time, memory, and what quantization costs.

    python benchmarks/moe_vs_llmcompressor.py [--peer-venv DIR] [--only speed perplexity] [--runs 3]

speed       Qwen3-MoE 512 wide, 4 layers, 32 experts 256 wide of which 4 run, vocabulary 4096, fp32, 2 threads; W4A16 in
            groups of 128; 64 samples of 256 tokens in batches of 8. Seconds from the loaded to the solved model and
            peak resident memory of the process, runs of both sides alternating, each in a fresh process; medians. The
            peer sends every token to every expert, which is its default.
perplexity  a Qwen3-MoE and a Mixtral (8 experts, 2 run) and a dense Llama of the same width (128), trained here: at 4
            bits in groups of 64, 128 samples; scales from the range on both sides, and ours searched.

Both sides use GPTQ with damping 0.01 and static activation order; routers and the head are left alone.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from gptq_vs_llmcompressor import HERE, PEER, THREADS, Bench, ensure_peer

SPEED_SAMPLES, PERPLEXITY_SAMPLES = 64, 128
TRAINED = ("qwen3_moe", "mixtral", "dense")
SIDES: tuple[tuple[str, str], ...] = (("ours", "minmax"), ("ours", "weighted"), ("peer", "minmax"))


def speed(bench: Bench, runs: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {"ours": [], "peer": []}
    for _ in range(runs):
        for side, results in found.items():
            results.append(bench.run(side, "large", SPEED_SAMPLES))
    median = {
        key: {side: statistics.median(result[key] for result in results) for side, results in found.items()}
        for key in ("solve_s", "peak_rss_bytes")
    }
    ratios = {key: each["ours"] / each["peer"] for key, each in median.items()}
    return {"all": found, "median": median, "ours_to_peer": ratios}


def perplexity(bench: Bench, num_seeds: int) -> list[dict[str, Any]]:
    rows = []
    for model in TRAINED:
        for side, scales in SIDES:
            options = {"num_bits": 4, "group_size": 64, "scales": scales, "evaluate": True}
            found = [bench.run(side, model, PERPLEXITY_SAMPLES, seed, **options) for seed in range(num_seeds)]
            values = [each["perplexity"] for each in found]
            original = found[0]["original_perplexity"]
            mean = statistics.mean(values)
            rows.append({"model": model, "side": side, "scales": scales, "original": original, "mean": mean})
            rows[-1] |= {"lost_percent": 100 * (mean / original - 1), "all": values}
    return rows


def print_tables(report: dict[str, Any]) -> None:
    if "speed" in report:
        median, ratios = report["speed"]["median"], report["speed"]["ours_to_peer"]
        print("\nmedians             ours       peer   ours/peer")
        print(f"seconds       {median['solve_s']['ours']:10.2f} {median['solve_s']['peer']:10.2f}", end="")
        print(f" {ratios['solve_s']:11.3f}")
        ours, peer = (median["peak_rss_bytes"][side] / 1e6 for side in ("ours", "peer"))
        print(f"resident MB   {ours:10.0f} {peer:10.0f} {ratios['peak_rss_bytes']:11.3f}")
    if "perplexity" in report:
        print("\nmodel      side  scales      original  quantized     lost   of each calibration draw")
        for row in report["perplexity"]:
            each = " ".join(f"{value:.3f}" for value in row["all"])
            print(
                f"{row['model']:10} {row['side']:5} {row['scales']:9} {row['original']:10.3f} {row['mean']:10.3f}"
                f" {row['lost_percent']:7.2f}%   {each}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, default=Path.home() / ".cache" / "lightning_compress" / "moe")
    parser.add_argument("--peer-venv", type=Path, help="an environment with " + " and ".join(PEER))
    parser.add_argument("--only", nargs="+", choices=("speed", "perplexity"), default=("speed", "perplexity"))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3, choices=(1, 2, 3))
    parser.add_argument("--train-steps", type=int, default=1000)
    parser.add_argument("--json", type=Path, default=Path("outputs/moe_vs_llmcompressor.json"))
    arguments = parser.parse_args()
    inputs = arguments.work_dir / f"inputs-{arguments.train_steps}"
    if not list(inputs.glob("tokens_*.pt")):
        command = [sys.executable, HERE / "_moe_inputs.py", inputs, "--train-steps", str(arguments.train_steps)]
        subprocess.run(command, check=True)
    peer = ensure_peer(arguments.peer_venv or arguments.work_dir / "peer")
    bench = Bench({"ours": Path(sys.executable), "peer": peer}, inputs)
    report: dict[str, Any] = {"peer": PEER, "threads": THREADS, "train_steps": arguments.train_steps}
    if "speed" in arguments.only:
        report["speed"] = speed(bench, arguments.runs)
    if "perplexity" in arguments.only:
        report["perplexity"] = perplexity(bench, arguments.seeds)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(report, indent=2))
    print_tables(report)
    print(f"\n{arguments.json}")


if __name__ == "__main__":
    main()
