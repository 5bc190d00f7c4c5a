"""One rank of `scaling.py`: RANK and WORLD_SIZE from the environment; prints one JSON line of what it took.

Phases exclude each other: what a phase calls that is a phase of its own counts there only. A collective operation's
time holds the waiting for other ranks.
"""

import argparse
import functools
import json
import os
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from transformers import LlamaForCausalLM

from lightning_compress.algorithms.base import RowTile, Solved
from lightning_compress.algorithms.gptq import Gptq
from lightning_compress.algorithms.rows import here
from lightning_compress.calibration import loop, solve
from lightning_compress.calibration.batches import collect
from lightning_compress.distributed.collective import Collective, ProcessGroup, SingleProcess
from lightning_compress.distributed.share import fill, shares_factor
from lightning_compress.export.writer import CheckpointWriter
from lightning_compress.plugin.job import prepare_job
from lightning_compress.plugin.run import run_job
from lightning_compress.plugin.settings import Settings
from lightning_compress.recipe.load import load_recipe
from lightning_compress.report.report import Report
from lightning_compress.statistics import InputGram, Reduction


class Phases:
    """Wall seconds by phase, and of every operation, as it ends: [phase, seconds, bytes exchanged or tiles solved]."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.events: list[list[Any]] = []
        self._running = ["other"]
        self._since = time.perf_counter()

    def _switch(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[self._running[-1]] += now - self._since
        self._since = now

    def enter(self, phase: str) -> None:
        self._switch()
        self._running.append(phase)

    def leave(self) -> None:
        self._switch()
        self._running.pop()

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.enter(phase)
            before = self.seconds[phase]
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()
                self.events.append([phase, self.seconds[phase] - before, 0])

        return call


class Measured:
    """A collective whose operations are timed and counted."""

    def __init__(self, inner: Collective, phases: Phases) -> None:
        self._inner, self._phases = inner, phases
        self.rank, self.size, self.close = inner.rank, inner.size, inner.close

    def meet(self, what: str) -> None:
        self.gather(None, what)

    def reduce(self, tensor: Tensor, reduction: Reduction, what: str) -> None:
        phase = "gather" if what.startswith("the factor") else "reduce"
        self._phases.timed(phase, self._inner.reduce)(tensor, reduction, what)
        self._phases.events[-1][-1] = tensor.nbytes

    def broadcast(self, value: Any, what: str, source: int = 0) -> Any:
        kinds = {"the solution": "gather", "writing": "write", "verifying": "write"}
        phase = next((phase for start, phase in kinds.items() if what.startswith(start)), "agree")
        found = self._phases.timed(phase, self._inner.broadcast)(value, what, source)
        self._phases.events[-1][-1] = _nbytes(found)
        return found

    def gather(self, value: Any, what: str) -> Any:
        kinds = {"writing": "write", "comparing": "trace"}
        phase = next((phase for start, phase in kinds.items() if what.startswith(start)), "agree")
        return self._phases.timed(phase, self._inner.gather)(value, what)


def _counted(phases: Phases, solve_tiles: Callable[..., list[Solved]]) -> Callable[..., list[Solved]]:
    def call(algorithm: Gptq, parts: Sequence[RowTile]) -> list[Solved]:
        solved: list[Solved] = phases.timed("solve", solve_tiles)(algorithm, parts)
        phases.events[-1][-1] = len(parts)
        return solved

    return call


def _panels(phases: Phases, by_rows: Callable[..., None]) -> Callable[..., None]:
    """A `ByRows` whose work is a phase of its own where two ranks would share it: [channels, tiles, bytes]."""

    def call(compute: Callable[[slice], Tensor], tiles: Sequence[slice], to: Tensor, **options: Any) -> None:
        if not shares_factor(len(to), 2):
            by_rows(compute, tiles, to, **options)
            return
        phases.timed("panels", by_rows)(compute, tiles, to, **options)
        nbytes = to.element_size() * to.shape[1] * sum(tile.stop - tile.start for tile in tiles)
        phases.events[-1][-1] = [len(to), len(tiles), nbytes]

    return call


def _nbytes(value: object) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, list):
        return sum(map(_nbytes, value))
    return sum(_nbytes(field) for field in vars(value).values()) if hasattr(value, "__dict__") else 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--num-samples", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    given = parser.parse_args()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank))) if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # NCCL, and kernels that Triton starts, run on the current one
    phases = Phases()
    inner: Collective = SingleProcess()
    if size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        inner = ProcessGroup(timedelta(minutes=10))
    collective = Measured(inner, phases)
    loop._run_step = phases.timed("forward", loop._run_step)
    InputGram.update = phases.timed("statistics", InputGram.update)  # type: ignore[method-assign]
    Gptq.prepare = phases.timed("factor", Gptq.prepare)  # type: ignore[method-assign]
    Gptq.solve_tiles = _counted(phases, Gptq.solve_tiles)  # type: ignore[method-assign]
    solve.here, solve.fill = _panels(phases, here), _panels(phases, fill)  # type: ignore[attr-defined]
    Report.save = phases.timed("write", Report.save)  # type: ignore[method-assign]
    for name in ("pack", "commit", "close"):
        setattr(CheckpointWriter, name, phases.timed("write", getattr(CheckpointWriter, name)))

    model = LlamaForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    rows = torch.load(given.tokens)["calibration"][: given.num_samples]
    batches = [{"input_ids": ids} for ids in rows.split(given.batch_size)]
    if rank == 0:
        shutil.rmtree(given.output_dir, ignore_errors=True)
    collective.gather(None, "the start")
    phases.seconds.clear()
    phases.events.clear()
    start = time.perf_counter()
    phases.enter("trace")
    modifier = {"algorithm": "gptq", "scheme": "W4A16", "ignore": ["lm_head"]}
    settings = Settings(load_recipe({"modifiers": [modifier]}), given.output_dir, verify=False)
    job = prepare_job(model, collect(batches), settings, device, collective)
    phases.leave()
    for _ in run_job(job):
        pass
    phases.enter("other")  # closes what runs
    total_s = time.perf_counter() - start
    phases.events.append(["other", phases.seconds["other"], 0])
    found = {"rank": rank, "total_s": total_s, "seconds": phases.seconds, "events": phases.events}
    print(json.dumps({**found, "link": link_of(inner)}))
    if size > 1:
        dist.destroy_process_group()  # gloo's threads may abort an exit soon after a sum (PyTorch 2.13)


def link_of(collective: Collective) -> tuple[float, float]:
    """Bytes per second of a sum over the ranks, counted once each way, and seconds of a small one."""
    if collective.size == 1:
        return 0.0, 0.0
    taken = []
    for numel in (1, 1 << 21):
        tensor = torch.zeros(numel, dtype=torch.float64)
        times = []
        for _ in range(15):
            start = time.perf_counter()
            collective.reduce(tensor, "sum", "measuring the links")
            times.append(time.perf_counter() - start)
        taken.append(statistics.median(times))
    ring = 2 * (collective.size - 1)
    return ring / collective.size * 8 * (1 << 21) / (taken[1] - taken[0]), taken[0] / ring


if __name__ == "__main__":
    main()
