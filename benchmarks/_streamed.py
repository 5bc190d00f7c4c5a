"""One streamed compression in a process of its own; prints its memory and time as JSON. See `memory_depth.py` and
`save.py`.

`save_s` begins when the last subgraph is solved and ends when config.json is there; `report_s` is the time from there
to the end, `finish_s` that from the last subgraph's shard to the end.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import AutoConfig, LlamaForCausalLM

from lightning_compress.calibration.batches import collect
from lightning_compress.calibration.prepare import calibrating
from lightning_compress.graph.stages import Schedule
from lightning_compress.memory.placement import MemoryConfig
from lightning_compress.memory.source import parameters_on_meta
from lightning_compress.memory.tracker import peak_bytes
from lightning_compress.plugin.job import prepare_job
from lightning_compress.plugin.run import run_job
from lightning_compress.plugin.settings import Settings
from lightning_compress.recipe.load import load_recipe

CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--num-batches", type=int, default=4)
    parser.add_argument("--schedule", default="staged")
    parser.add_argument("--prefetch-depth", type=int, default=1)
    parser.add_argument("--activation-budget", type=int)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    with parameters_on_meta():
        model = LlamaForCausalLM._from_config(AutoConfig.from_pretrained(arguments.model), dtype=torch.bfloat16).eval()
    idle_bytes = peak_bytes(CPU)
    ids = [torch.randint(0, model.config.vocab_size, (4, 256)) for _ in range(arguments.num_batches)]
    settings = Settings(
        load_recipe("w4a16_gptq"),
        arguments.output_dir,
        weights=arguments.model,
        schedule=Schedule(arguments.schedule),
        memory=MemoryConfig(activation_budget=arguments.activation_budget, prefetch_depth=arguments.prefetch_depth),
        resume=False,
    )
    start = time.perf_counter()
    with calibrating(model):
        job = prepare_job(model, collect({"input_ids": batch} for batch in ids), settings, CPU)
        prepared_s, prepared_bytes = time.perf_counter() - start, peak_bytes(CPU)
        generator = run_job(job)
        committed = [time.time()]
        try:
            while True:
                last = next(generator)
                committed.append(time.time())
        except StopIteration as finished:
            report = finished.value
    ended, saved = time.time(), (arguments.output_dir / "config.json").stat().st_mtime
    last_solved = committed[-2] + last.onload_s + last.run_s + last.solve_s
    print(
        json.dumps(
            {
                "idle_bytes": idle_bytes,
                "prepared_bytes": prepared_bytes,
                "peak_bytes": peak_bytes(CPU),
                "onload_s": sum(record.onload_s for record in report.subgraphs),
                "prepared_s": prepared_s,
                "save_s": saved - last_solved,
                "report_s": ended - saved,
                "finish_s": ended - committed[-1],
                "total_s": time.perf_counter() - start,
                "verified": report.verification.passed,
            }
        )
    )


if __name__ == "__main__":
    main()
