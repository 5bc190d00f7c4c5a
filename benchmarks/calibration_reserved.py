"""What `estimate` says that PyTorch's CUDA allocator reserves for a calibration, against what a run asks a device for.

    python benchmarks/calibration_reserved.py [--widths 512 768 1024 1536]    # a quarter of an hour on a CPU

There is no GPU in it: a run on the CPU copies weights and activations to and from host memory that stands for a device,
every storage it makes is followed, and both lists of requests, of the run and foreseen, are replayed by the allocator's
rules (`foresight/allocator.py`). So it says what the forecast makes of solves, of later batches and of the order of
things, and nothing of the operators of a GPU. Llamas of four layers with random weights, 16 samples of 512 tokens in
batches of 4, GPTQ to 4 bits; MiB, copies to the device apart.
"""

import argparse
import weakref
from collections import deque
from itertools import count
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_compress.calibration.batches import collect
from lightning_compress.calibration.footprint import footprint
from lightning_compress.calibration.loop import calibrate
from lightning_compress.calibration.prepare import calibrating
from lightning_compress.export.writer import Unwritten
from lightning_compress.foresight.allocator import replay, reserved_by_calibration
from lightning_compress.graph.stages import Schedule
from lightning_compress.graph.synthesize import flatten_batch
from lightning_compress.memory.tracker import LiveMemory
from lightning_compress.memory.transfer import Lane, Sent
from lightning_compress.plugin.job import Job, prepare_job
from lightning_compress.plugin.settings import Settings
from lightning_compress.recipe.load import load_recipe

Events = list[tuple[int, int]]


def prepared(width: int, schedule: str) -> Job:
    """A job whose result is dropped."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=(11 * width // 4) // 128 * 128,
        num_hidden_layers=4,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        vocab_size=2048,
    )
    data = collect([{"input_ids": torch.randint(0, 2048, (4, 512))} for _ in range(4)])
    settings = Settings(load_recipe("w4a16_gptq"), None, schedule=Schedule(schedule))
    return prepare_job(LlamaForCausalLM(config).eval(), data, settings, torch.device("cpu"))


def requests(job: Job) -> tuple[Events, Events]:
    """What a run asks a device for: of computing, and of copies."""
    memory, copies, numbers = LiveMemory(), Events(), count()

    def fetch(_: Lane, tensor: Tensor, *, wait: bool = False) -> Tensor:
        with _disable_current_modes():
            copy = tensor.detach().clone()
        memory.ignore(copy)
        return copy

    def send(lane: Lane, tensor: Tensor) -> Sent:
        copy, number = fetch(lane, tensor), next(numbers)
        size = copy.untyped_storage().nbytes()
        copies.append((number, size))
        weakref.finalize(copy.untyped_storage(), lambda: copies.append((number, -size)))
        return Sent(copy)

    root = job.target.root
    memory.ignore(*root.parameters(), *root.buffers())
    with (
        patch.object(Lane, "is_away", lambda *_: True),
        patch.object(Lane, "send", send),
        patch.object(Lane, "fetch", fetch),
        calibrating(root),
        job.modules.in_place(),
        memory,
    ):
        deque(calibrate(job.run, Unwritten()), maxlen=0)
    return memory.events, copies


def main() -> None:
    """Print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="*", default=[512, 768, 1024, 1536])
    print("case            tensors  computing  foreseen    off   copies  foreseen    off")
    for width in parser.parse_args().widths:
        for schedule in ("staged", "block"):
            job = prepared(width, schedule)
            assert job.data is not None
            with calibrating(job.target.root), job.modules.in_place():
                table = footprint(job.run, [flatten_batch(batch)[0] for batch in job.data.batches])
            foreseen = replay(event for row in table for event in row.requests.computed).reserved
            copied = reserved_by_calibration(table, job.run.flow.placement.prefetch_depth) - foreseen
            computed, copies = map(replay, requests(prepared(width, schedule)))
            cells = [
                f"{size / 2**20:>{space}.0f}" if space else f"{100 * (size - 1):>+5.0f}%"
                for size, space in (
                    *((computed.allocated, 8), (computed.reserved, 10), (foreseen, 9)),
                    *((foreseen / computed.reserved, 0), (copies.reserved, 8), (copied, 9)),
                    (copied / copies.reserved, 0),
                )
            ]
            print(f"{schedule} {width}".ljust(14), *cells, flush=True)


if __name__ == "__main__":
    main()
