"""Bringing weights to a GPU while it computes: seconds and device memory against the prefetch depth.

    python benchmarks/gpu_onload.py [--home host disk] [--prefetch-depths 0 1 2] [--runs 3] [--device cuda]

A random Llama in bfloat16, 2048 wide with 8 layers (0.8 GB), its weights in host memory or in safetensors files, W4A16
GPTQ, 64 samples of 512 tokens in batches of 8; depths alternate within a run. `waiting` is the time in which no
subgraph computed because its weights were not there yet; `peak` is `torch.cuda.max_memory_allocated`, `device` beside
it two subgraphs' weights. Every depth has to give the same checkpoint, which is checked.
"""

import argparse
import hashlib
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_compress import load_recipe, parameters_on_meta
from lightning_compress.calibration.batches import collect
from lightning_compress.calibration.prepare import calibrating
from lightning_compress.memory.placement import MemoryConfig
from lightning_compress.plugin.job import prepare_job
from lightning_compress.plugin.run import run_job
from lightning_compress.plugin.settings import Settings


def run(home: str, depth: int, folder: Path, config: LlamaConfig, device: torch.device) -> dict[str, Any]:
    weights = folder / "in" if home == "disk" else None
    if weights is None:
        model = LlamaForCausalLM.from_pretrained(folder / "in", dtype=torch.bfloat16)
    else:
        with parameters_on_meta():
            model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    batches = [{"input_ids": torch.randint(0, config.vocab_size, (8, 512), generator=generator)} for _ in range(8)]
    out = folder / f"out-{home}-{depth}"
    settings = Settings(
        load_recipe("w4a16_gptq"),
        out,
        weights=weights,
        memory=MemoryConfig(prefetch_depth=depth),
        resume=False,
        verify=False,
    )
    with calibrating(model):
        job = prepare_job(model.eval(), collect(batches), settings, device)
        start = time.perf_counter()
        records = list(run_job(job))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    shards = sorted(out.glob("*.safetensors"))
    return {
        "total_s": time.perf_counter() - start,
        "waiting_s": sum(record.onload_s for record in records),
        "peak_bytes": max(record.peak_bytes for record in records),
        "layer_bytes": max(sum(module.bytes_before for module in record.modules) for record in records),
        "digest": hashlib.sha256(b"".join(shard.read_bytes() for shard in shards)).hexdigest(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", nargs="+", default=["host", "disk"], choices=["host", "disk"])
    parser.add_argument("--prefetch-depths", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--num-layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    device = torch.device(arguments.device, 0 if arguments.device == "cuda" else None)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=arguments.width,
        intermediate_size=arguments.width * 11 // 4,
        num_hidden_layers=arguments.num_layers,
        num_attention_heads=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    print("home  depth  seconds  waiting s   peak MB  two subgraphs MB")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        torch.manual_seed(0)
        LlamaForCausalLM(config).bfloat16().save_pretrained(folder / "in", max_shard_size="200MB")
        digests = set()
        for home in arguments.home:
            taken: dict[int, list[dict[str, Any]]] = {depth: [] for depth in arguments.prefetch_depths}
            for _ in range(arguments.runs):
                for depth in arguments.prefetch_depths:
                    taken[depth].append(run(home, depth, folder, config, device))
            for depth, runs in taken.items():
                digests |= {one["digest"] for one in runs}
                median = {
                    key: statistics.median(one[key] for one in runs) for key in ("total_s", "waiting_s", "peak_bytes")
                }
                print(
                    f"{home:5} {depth:5} {median['total_s']:8.2f} {median['waiting_s']:10.3f}"
                    f" {median['peak_bytes'] / 1e6:9.0f} {2 * runs[0]['layer_bytes'] / 1e6:17.0f}",
                    flush=True,
                )
    print("all checkpoints are identical" if len(digests) == 1 else f"DIFFERENT: {len(digests)} checkpoints")
    if device.type == "cuda":
        print(torch.cuda.get_device_name(device))


if __name__ == "__main__":
    main()
