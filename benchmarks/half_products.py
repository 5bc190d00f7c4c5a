"""Calibration of a model in half precision on this CPU: its own products against those of `graph/products.py`.

    python benchmarks/half_products.py [--dtype bfloat16] [--runs 3] [--samples 16] [--json FILE]

A random Llama (512 wide, intermediate 1408, 2 layers) and a random Mixtral (8 experts of 512), samples of 512 tokens
in batches of 4, `w4a16_gptq`, nothing written. Both sides in turn in one process; seconds are of all subgraphs' batches
(`run_s`), medians. Whether a run takes them by itself is said first: where the CPU has instructions for the type, it
does not.
"""

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_compress.calibration.batches import collect
from lightning_compress.graph import products
from lightning_compress.plugin.job import prepare_job
from lightning_compress.plugin.run import run_job
from lightning_compress.plugin.settings import Settings
from lightning_compress.recipe.load import load_recipe

CPU = torch.device("cpu")
WIDTHS = {"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8}
MODELS = {
    "llama": {**WIDTHS, "intermediate_size": 1408, "vocab_size": 4096},
    "mixtral": {**WIDTHS, "intermediate_size": 512, "num_local_experts": 8, "vocab_size": 4096},
}


def seconds(kind: str, dtype: torch.dtype, samples: int, slow: frozenset[torch.dtype]) -> float:
    """Of the batches of a run, where these types are taken to be slow."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **MODELS[kind]), dtype=dtype).eval()
    batches = [{"input_ids": torch.randint(4096, (4, 512))} for _ in range(samples // 4)]
    products._slow_on_cpu = lambda: slow  # type: ignore[assignment]
    job = prepare_job(model, collect(batches), Settings(load_recipe("w4a16_gptq"), None, verify=False), CPU)
    return sum(record.run_s for record in run_job(job))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--json", type=Path, default=Path("outputs/half_products.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    dtype = getattr(torch, arguments.dtype)
    by_itself = "takes them by itself" if dtype in products.slow_dtypes(CPU) else "does not take them by itself"
    print(f"{arguments.dtype}, {torch.backends.cpu.get_cpu_capability()}: a run {by_itself}")
    rows: list[dict[str, Any]] = []
    for kind in MODELS:
        own, ours = [], []
        for _ in range(arguments.runs):
            own.append(seconds(kind, dtype, arguments.samples, frozenset()))
            ours.append(seconds(kind, dtype, arguments.samples, frozenset({dtype})))
        row = {"model": kind, "own_s": statistics.median(own), "float32_s": statistics.median(ours)}
        rows.append(row)
        ratio = row["own_s"] / row["float32_s"]
        print(f"{kind:8} {row['own_s']:7.2f} s, in float32 {row['float32_s']:7.2f} s: {ratio:.2f} times", flush=True)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
