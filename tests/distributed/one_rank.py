"""One of several ranks, as `test_ranks.py` starts them: RANK SIZE STORE FOLDER, then CASE or CASE:STOP_AFTER.

Each case is written to FOLDER/CASE; what the rank has then goes to FOLDER/CASE-rankRANK.pt.
"""

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from lightning_compress.calibration import amounts
from lightning_compress.calibration.batches import collect
from lightning_compress.distributed.buffers import share_buffers
from lightning_compress.distributed.collective import Collective, ProcessGroup, closing_all
from lightning_compress.export import shards, writer
from lightning_compress.graph.stages import Schedule
from lightning_compress.memory.placement import MemoryConfig
from lightning_compress.plugin.job import prepare_job
from lightning_compress.plugin.run import run_job
from lightning_compress.plugin.settings import Settings
from lightning_compress.recipe.load import load_recipe
from lightning_compress.report import html

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import (
    CPU,
    Counting,
    ListMixture,
    padded,
    ragged_batches,
    recipe,
    saved,
    tiny_llama,
    tiny_mixtral,
    token_batches,
)

amounts._LEAST_SPLIT_BYTES = 1 << 11  # a subgraph takes several shards, which ranks share out
html.error_figure = lambda _: ""  # which takes as long as a fifth of the runs
STATIC = {
    "weights": {"num_bits": 8, "strategy": "channel"},
    "input_activations": {"num_bits": 8, "strategy": "tensor", "dynamic": False},
}
CASES: dict[str, Any] = {
    "staged": lambda: (tiny_llama(3), token_batches(7), recipe(4), {}),
    "one batch": lambda: (tiny_llama(2), token_batches(1), recipe(4), {}),
    "padded": lambda: (tiny_llama(2), padded(token_batches(5)), recipe(4), {"schedule": Schedule.BLOCK}),
    "ragged": lambda: (tiny_llama(2), ragged_batches(), recipe(3), {"schedule": Schedule.RECOMPUTE}),
    "corrected": lambda: (tiny_llama(2), padded(token_batches(9)), recipe(3, correct="residual", refit=None), {}),
    "static": lambda: (tiny_llama(2), token_batches(5), recipe(algorithm="gptq", scheme=STATIC), {}),
    "floats": lambda: (tiny_llama(2, dtype=torch.bfloat16), token_batches(5), recipe(scheme="NVFP4"), {}),
    "experts": lambda: (tiny_mixtral(2, 8), token_batches(5, rows=1, length=2), recipe(4), {"verify": False}),
    "parts": lambda: (tiny_mixtral(2, 8), token_batches(5, rows=1, length=2), recipe(4), {"expert_parts": 3}),
    "listed experts": lambda: (_shunning(), _vectors(7), recipe(4, strategy="channel"), {}),
    "row tiles": lambda: (
        tiny_llama(1, hidden_size=64, intermediate_size=4352),
        token_batches(6, rows=4),
        recipe(4),
        {},
    ),
    "budget": lambda: (tiny_llama(2), token_batches(2), recipe(4), {"memory": MemoryConfig(host_budget="64GiB")}),
    "own disks": lambda: (tiny_llama(3), token_batches(7), recipe(4), {"keep_activations": True}),
    "kept": lambda: (tiny_llama(3), token_batches(7), recipe(4), {"keep_activations": True}),
    "gptaq": lambda: (tiny_llama(2), token_batches(9), recipe(3, correct="gptaq"), {}),
    "kept corrected": lambda: (*CASES["corrected"]()[:3], {"keep_activations": True}),
    "late": lambda: (tiny_llama(2), token_batches(2), recipe(4), {"verify": False}),
    "late at once": lambda: (
        tiny_llama(2),
        token_batches(2),
        recipe(4),
        {"schedule": Schedule.BASIC, "sequential_targets": None, "verify": False},
    ),
    "written buffers": lambda: (Counting().eval(), _vectors(5), recipe(4, strategy="channel"), {}),
    "own buffers": lambda: (_of_rank(Counting().eval()), _vectors(5), recipe(4, strategy="channel"), {}),
    "no data": lambda: (tiny_llama(2), [], recipe(4, algorithm="rtn"), {}),
    "disk": lambda: (tiny_llama(2, tie_word_embeddings=True), token_batches(5), recipe(4), {}),
    "other data": lambda: (tiny_llama(2), token_batches(2, seed=dist.get_rank()), recipe(4), {}),
    "NaN": lambda: (_Root(), [_vectors(1)[0].abs(), _vectors(1)[0]], recipe(algorithm="rtn", scheme=STATIC), {}),
    "failing 0": lambda: (tiny_llama(2), token_batches(4), recipe(4), {}),
    "failing 2": lambda: (tiny_llama(2), token_batches(4), recipe(4), {}),
    "stuck": lambda: (tiny_llama(2), token_batches(4), recipe(4), {}),
}


def _of_rank(model: Counting) -> Counting:
    """With running means of the rank's own, as DDP leaves them."""
    model.norm.running_mean.fill_(dist.get_rank())  # type: ignore[union-attr,operator]
    return model


def _shunning() -> ListMixture:
    model = ListMixture()
    model.shun(0, 3)
    return model


def _vectors(number: int) -> list[torch.Tensor]:
    """Batches of so few tokens that none reaches all experts."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(1, 2, 16, generator=generator) for _ in range(number)]


class _Root(nn.Module):
    """What its Linear reads holds a NaN where a batch has negative values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x.sqrt())


def be_late() -> None:
    """The first rank of a node takes its time to empty the folder, and to put there what it was sent."""
    before, replacing = writer.written_before, shards.replacing

    def found_late(folder: Path) -> list[Path]:
        time.sleep(1)
        return before(folder)

    @contextmanager
    def replacing_late(path: Path) -> Iterator[Path]:
        with replacing(path) as partial:
            yield partial
            time.sleep(0.2)

    writer.written_before = found_late
    writer.replacing = shards.replacing = replacing_late


def run(name: str, stop_after: int, folder: Path) -> dict[str, Any]:
    """A case on this rank, which draws the same numbers whatever cases were before."""
    torch.manual_seed(0)
    model, batches, given, options = CASES[name]()
    if name == "disk":
        weights = folder / f"weights-{dist.get_rank()}"  # each node may have a copy of its own
        model, options = saved(model, weights), {"weights": weights}
        dist.barrier()
        if dist.get_rank():  # transformers saves on rank 0 only
            shutil.copytree(folder / "weights-0", weights, dirs_exist_ok=True)
    ranks_of_node = 3 if name.startswith("late") else 2
    has_own = ranks_of_node == 3 or name == "own disks"
    place = folder / f"disk-{dist.get_rank() // ranks_of_node}" if has_own else folder
    if name.startswith("late") and dist.get_rank() == 3:
        be_late()
    settings = Settings(load_recipe(given), place / name, **options)
    timeout = timedelta(seconds=5 if name == "stuck" else 100)
    with closing_all(ProcessGroup(timeout)) as collective:
        if name == "own buffers":
            share_buffers(model, collective)
        return run_among(collective, name, stop_after, model, batches, settings)


def run_among(
    collective: Collective, name: str, stop_after: int, model: nn.Module, batches: list[Any], settings: Settings
) -> dict[str, Any]:
    job = prepare_job(model, collect(batches) if batches else None, settings, CPU, collective)
    generator = run_job(job)
    stop: bool | None = None
    try:
        while True:
            record = generator.send(stop)
            stop = record.index + 1 == stop_after
            if name.startswith("failing") and dist.get_rank() == int(name[-1]):
                raise ArithmeticError("of this rank alone")
            if name == "stuck" and dist.get_rank() == 1:
                time.sleep(100)
    except StopIteration as finished:
        return {"state": model.state_dict(), "report": finished.value, "share": job.run.flow.share}


def main() -> None:
    rank, size, store, folder, *names = sys.argv[1:]
    address = f"file://{store}"
    dist.init_process_group("gloo", address, timedelta(seconds=100), rank=int(rank), world_size=int(size))
    for name, _, stop_after in (given.partition(":") for given in names):
        found = run(name, int(stop_after or -1), Path(folder))
        torch.save(found, f"{folder}/{name}-rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
