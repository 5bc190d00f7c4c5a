"""Steps of fine-tuning as plans foresee them, beside throughputs that were published.

    python benchmarks/plan_finetuning.py    # two minutes on a CPU; of it, it measures the optimizer alone

Published: https://gist.github.com/chenyaofo/d4cd6a20ab4b95cb3a49491747e2139a, LLaMA-7B on eight A800 (80 GB) with
DeepSpeed 0.14.2, sequences of 4096 tokens; its table has no unit, so what is compared is each row's ratio to the first.
Rows with offloaded parameters or ZeRO++ are left out, as plans have no such thing. Rates are the assumed ones of an
A100, whose products an A800 has; 200 GB/s between ranks are half of its NVLink's 400 both ways.

Below the table: how much longer the published steps with offload are, told apart by how many micro-batches they have;
and at what rate torch's AdamW goes over 28 bytes per parameter on one thread of this CPU.
"""

import time
from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lightning_compress.foresight.finetuning_cost import CPU_OPTIMIZER, FineTuningTask, MicroBatch, foreseen
from lightning_compress.foresight.jobs import FineTuningJob, on_fakes
from lightning_compress.foresight.layouts import Layout
from lightning_compress.foresight.machine import Rate, named_gpu
from lightning_compress.foresight.shares import largest_layer
from lightning_compress.foresight.training import rehearse
from lightning_compress.memory.source import parameters_on_meta
from lightning_compress.memory.tracker import LiveMemory
from lightning_compress.memory.work import WorkMeter

PUBLISHED = [  # ZeRO, offload, checkpointing, micro-batch, sequences per step, throughput
    (2, False, False, 1, 64, 5.33),
    (2, False, True, 1, 64, 4.19),
    (2, True, True, 1, 64, 1.81),
    (2, False, True, 4, 64, 4.69),
    (3, False, False, 2, 64, 4.95),
    (3, False, True, 2, 64, 4.45),
    (3, True, True, 2, 64, 2.05),
    (3, False, True, 8, 64, 4.73),
    (3, False, True, 8, 128, 4.32),
]
LENGTH, RANKS = 4096, 8
NUMEL = 40_000_000


def main() -> None:
    """Print a row for each."""
    with parameters_on_meta():
        model = AutoModelForCausalLM.from_config(LlamaConfig(), dtype=torch.bfloat16)
    machine = named_gpu("a100-80gb", None)
    added = {"cpu_optimizer": Rate(CPU_OPTIMIZER, "assumed"), "between_ranks": Rate(200e9, "given")}
    machine = replace(machine, rates={**machine.rates, **added})
    runs: dict[tuple[int, bool], MicroBatch] = {}
    first: tuple[float, float] | None = None
    print(
        "| ZeRO | offload | checkpointing | micro-batch | batch | published | ratio | tokens/s foreseen | ratio | off |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for zero, offload, checkpoints, size, batch, published in PUBLISHED:
        if (size, checkpoints) not in runs:
            job = FineTuningJob(size, LENGTH, 2, implementation="fused", gradient_checkpointing=checkpoints)
            with on_fakes(model):
                runs[size, checkpoints] = MicroBatch(size, checkpoints, rehearse(model, job, LiveMemory(), WorkMeter()))
        task = FineTuningTask(batch, LENGTH, RANKS, 32, 4096, 2, largest_layer(model, {}))
        step = foreseen(task, runs[size, checkpoints], Layout(data=RANKS, zero=zero, offload=offload), machine)
        first = first or (published, step.tokens_per_s)
        ratios = published / first[0], step.tokens_per_s / first[1]
        cells = (zero, "yes" if offload else "no", "yes" if checkpoints else "no", size, batch, published)
        off = f"{ratios[1] / ratios[0] - 1:+.0%}"
        print(
            "| "
            + " | ".join(map(str, (*cells, f"{ratios[0]:.2f}", f"{step.tokens_per_s:.0f}", f"{ratios[1]:.2f}", off)))
            + " |"
        )
    each, once = with_offload()
    print(f"offload, if the unit is sequences/s: {each:.2f} s for every micro-batch, {once:.1f} s for every step")
    for implementation in ("fused", "foreach"):
        rate = 28 * NUMEL / optimizer_seconds(implementation)
        print(f"AdamW, {implementation}, on one thread here: {rate / 1e9:.1f} GB/s")


def with_offload() -> tuple[float, float]:
    """Seconds that offloading adds to a micro-batch and to a step, as published, taken to be alike with ZeRO-2 and 3,
    whose steps have eight and four micro-batches."""
    taken = {(zero, offload, size): batch / rate for zero, offload, checks, size, batch, rate in PUBLISHED if checks}
    eight, four = taken[2, True, 1] - taken[2, False, 1], taken[3, True, 2] - taken[3, False, 2]
    each = (eight - four) / 4
    return each, four - 4 * each


def optimizer_seconds(implementation: str) -> float:
    """Of a step on one thread, the fastest of five."""
    torch.set_num_threads(1)
    parameter = torch.nn.Parameter(torch.randn(NUMEL))
    parameter.grad = torch.randn(NUMEL)
    optimizer = torch.optim.AdamW([parameter], **{implementation: True})
    seconds = []
    for _ in range(6):  # the first makes the states
        start = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


if __name__ == "__main__":
    main()
