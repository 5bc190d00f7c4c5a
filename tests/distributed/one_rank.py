"""One rank of a run of several, as `test_ranks.py` starts them: RANK SIZE STORE FOLDER CASE STOP_AFTER."""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from lightning_compress.calibration.batches import collect
from lightning_compress.distributed.collective import ProcessGroup
from lightning_compress.graph.stages import Schedule
from lightning_compress.plugin.job import Settings, prepare_job, run_job
from lightning_compress.recipe.load import load_recipe

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import padded, ragged_batches, recipe, tiny_llama, tiny_mixtral, token_batches

CPU = torch.device("cpu")
STATIC = {
    "weights": {"num_bits": 8, "strategy": "channel"},
    "input_activations": {"num_bits": 8, "strategy": "tensor", "dynamic": False},
}


def case(name: str) -> tuple[Any, list[Any], Any, dict[str, Any]]:
    """Model, batches, recipe, settings."""
    if name == "staged":
        return tiny_llama(3), token_batches(7), recipe(4), {}
    if name == "one batch":
        return tiny_llama(2), token_batches(1), recipe(4), {}
    if name == "padded":
        return tiny_llama(2), padded(token_batches(5)), recipe(4), {"schedule": Schedule.BLOCK}
    if name == "ragged":
        return tiny_llama(2), ragged_batches(), recipe(3), {"schedule": Schedule.RECOMPUTE}
    if name == "static":
        return tiny_llama(2), token_batches(5), recipe(algorithm="gptq", scheme=STATIC), {}
    if name == "experts":
        return tiny_mixtral(2, 4), token_batches(5), recipe(4), {"verify": False}
    assert name == "wide"  # several row tiles
    return tiny_llama(1, hidden_size=64, intermediate_size=4352), token_batches(6, rows=4), recipe(4), {}


def main() -> None:
    rank, size, store, folder, name, stop_after = sys.argv[1:]
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(size), timeout=timedelta(seconds=60)
    )
    model, batches, given, settings = case(name)
    settings = Settings(load_recipe(given), Path(folder), **settings)
    job = prepare_job(model, collect(batches), settings, CPU, ProcessGroup(timedelta(seconds=60)))
    generator = run_job(job)
    stop: bool | None = None
    try:
        while True:
            record = generator.send(stop)
            stop = record.index + 1 == int(stop_after)
    except StopIteration as finished:
        report = finished.value
    torch.save({"state": model.state_dict(), "report": report, "share": job.run.share}, f"{folder}-rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
