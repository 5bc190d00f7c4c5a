"""What `lightning-compress estimate` says against what real runs take, on this machine's device.

    python benchmarks/estimate_accuracy.py [--only NAME ...] [--scale 1]

Models with random weights run two steps of training, or a prompt and its last token, or are quantized and written.
Truth on CUDA is
`torch.cuda.max_memory_allocated` (and `reserved`); on a CPU the peak of the allocations and frees that torch.profiler
records, on top of the weights, which is no part of this package. Every case is a fresh process. Signed errors in
percent: of the run on fake tensors, of the closed form, of LLMem's formula, of 4 times the weights (`accelerate
estimate-memory`'s rule for Adam) or the weights (its rule for inference), of 8 bytes per parameter for fine-tuning and
2 for inference, and, on CUDA, of what the allocator was said to reserve.
"""

import argparse
import json
import multiprocessing
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_compress.calibration.batches import collect
from lightning_compress.calibration.target import find_target
from lightning_compress.command.measure import measured
from lightning_compress.foresight.allocator import replay
from lightning_compress.foresight.closed_form import decoder, finetuning_phases, inference_phases, llmem
from lightning_compress.foresight.jobs import CalibrationJob, FineTuningJob, InferenceJob, Phase, infer, on_fakes
from lightning_compress.foresight.training import finetune
from lightning_compress.graph.stages import Schedule
from lightning_compress.graph.unfold import unfolded
from lightning_compress.memory.budget import Budgets, peaks
from lightning_compress.memory.needs import Waiting
from lightning_compress.memory.source import parameters_on_meta
from lightning_compress.memory.tracker import LiveMemory
from lightning_compress.memory.workspaces import cublas_workspace_bytes
from lightning_compress.plugin.job import prepare_job
from lightning_compress.plugin.run import run_job
from lightning_compress.plugin.settings import Settings
from lightning_compress.recipe.load import load_recipe
from lightning_compress.recipe.resolve import named_by, resolve

RECIPE = load_recipe("w4a16_gptq")
SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 8192,
    "max_position_embeddings": 2048,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen3": SIZES,
    "gemma2": SIZES,
    "gpt_neox": SIZES,
    "gpt2": {"n_embd": 512, "n_layer": 6, "n_head": 8, "n_positions": 2048, "vocab_size": 8192},
    "opt": {**SIZES, "ffn_dim": 2048, "word_embed_proj_dim": 512},
}
Job = InferenceJob | FineTuningJob | CalibrationJob
CASES: dict[str, tuple[str, torch.dtype, Job]] = {
    "llama bf16, generate": ("llama", torch.bfloat16, InferenceJob(4, 1024, 64)),
    "llama fp32, generate": ("llama", torch.float32, InferenceJob(4, 1024, 64)),
    "gpt2 fp32, generate": ("gpt2", torch.float32, InferenceJob(4, 1024, 64)),
    "llama fp32, foreach": ("llama", torch.float32, FineTuningJob(4, 512)),
    "llama bf16, foreach": ("llama", torch.bfloat16, FineTuningJob(4, 512)),
    "llama fp32, single": ("llama", torch.float32, FineTuningJob(4, 512, implementation="single")),
    "llama fp32, fused, checkpointing": (
        "llama",
        torch.float32,
        FineTuningJob(4, 512, implementation="fused", gradient_checkpointing=True),
    ),
    "llama fp32, autocast": ("llama", torch.float32, FineTuningJob(4, 512, precision="bf16-mixed")),
    "llama fp32, sgd, accumulate 2": (
        "llama",
        torch.float32,
        FineTuningJob(2, 512, accumulate=2, optimizer="sgd", implementation="single"),
    ),
    "qwen3 fp32, foreach": ("qwen3", torch.float32, FineTuningJob(4, 512)),
    "gemma2 fp32, foreach": ("gemma2", torch.float32, FineTuningJob(4, 512)),
    "gpt_neox fp32, foreach": ("gpt_neox", torch.float32, FineTuningJob(4, 512)),
    "gpt2 fp32, fused": ("gpt2", torch.float32, FineTuningJob(4, 512, implementation="fused")),
    "opt fp32, foreach": ("opt", torch.float32, FineTuningJob(4, 512)),
    "llama fp32, gptq, staged": ("llama", torch.float32, CalibrationJob(16, 512, 4)),
    "llama bf16, gptq, staged": ("llama", torch.bfloat16, CalibrationJob(16, 512, 4)),
    "llama fp32, gptq, block": ("llama", torch.float32, CalibrationJob(16, 512, 4, schedule="block")),
    "gpt_neox fp32, gptq, staged": ("gpt_neox", torch.float32, CalibrationJob(16, 512, 4)),
}


def build(family: str, dtype: torch.dtype, scale: int) -> nn.Module:
    """A model whose widths are `scale` times those of the table."""
    wide = {"hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "n_embd", "n_head"}
    wide |= {"ffn_dim", "word_embed_proj_dim"}
    sizes = {name: size * scale if name in wide else size for name, size in FAMILIES[family].items()}
    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes), dtype=dtype)
    return model


def run(model: nn.Module, job: InferenceJob | FineTuningJob, memory: LiveMemory) -> list[Phase]:
    """The job on the model's own tensors."""
    return infer(model, job, memory) if isinstance(job, InferenceJob) else finetune(model, job, memory)


def calibrate(model: nn.Module, job: CalibrationJob, device: torch.device, folder: str) -> None:
    """GPTQ to 4 bits, written to a folder."""
    ids = torch.randint(0, SIZES["vocab_size"], (job.num_samples, job.max_length))
    batches = [{"input_ids": part} for part in ids.split(job.batch_size)]
    settings = Settings(RECIPE, Path(folder) / "out", schedule=Schedule(job.schedule), verify=False)
    deque(run_job(prepare_job(model, collect(batches), settings, device)), maxlen=0)


def foreseen_calibration(model: nn.Module, job: CalibrationJob, device: torch.device) -> int:
    """The most that `estimate` has of the device; on a CPU beside the model's weights, which are there already."""
    target = find_target(model)
    with unfolded(target.root, named_by(RECIPE), 1):
        found = measured(target, resolve(RECIPE, target.root), job, device, verifies=False)
    rows = (*found.table, *found.end)
    if device.type == "cpu":
        rows = tuple(replace(row, weights=0) for row in rows)
        held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        return held + max(each.num_bytes for each in peaks(rows, device, Budgets(None, 0), "host", 1, Waiting()))
    budgets = Budgets(None, 0, libraries=cublas_workspace_bytes(device))
    return max(each.num_bytes for each in peaks(rows, device, budgets, "device", 1, Waiting()))


def truth(model: nn.Module, do: Callable[[], object]) -> tuple[int, int | None]:
    """Bytes that the job took, and those that the CUDA allocator reserved for it."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        do()
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        do()
    results = profiler.profiler.kineto_results
    events = sorted((event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]")
    live = peak = 0
    for _, size in events:
        live += size
        peak = max(peak, live)
    return held + peak, None


def case(name: str, scale: int) -> dict[str, Any]:
    """One row, in bytes."""
    family, dtype, job = CASES[name]
    torch.manual_seed(0)
    with parameters_on_meta():
        empty = build(family, dtype, scale)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if isinstance(job, CalibrationJob):
        foreseen, model = foreseen_calibration(empty, job, device), build(family, dtype, scale)
        with tempfile.TemporaryDirectory() as folder:
            taken, _ = truth(model, partial(calibrate, model, job, device, folder))
        return {"case": name, "taken": taken, "fakes": foreseen}
    is_inference, on_cuda = isinstance(job, InferenceJob), device.type == "cuda"
    memory = LiveMemory(on_cuda=on_cuda)
    with on_fakes(empty, on_cuda=on_cuda):
        foreseen = max(phase.peak for phase in run(empty, job, memory))
    workspaces = (1 if is_inference else 2) * [cublas_workspace_bytes(device)]
    blocks = replay([*((-1 - number, size) for number, size in enumerate(workspaces) if size), *memory.events])
    model = build(family, dtype, scale).to(device)
    taken, reserved = truth(model, partial(run, model, job, LiveMemory()))
    num_parameters = sum(parameter.numel() for parameter in empty.parameters())
    sizes = decoder(empty.config, num_parameters, dtype.itemsize)
    forms = None
    if sizes is not None:
        forms = inference_phases(sizes, job) if isinstance(job, InferenceJob) else finetuning_phases(sizes, job)
    weights = num_parameters * dtype.itemsize
    return {
        "case": name,
        "taken": taken,
        "fakes": blocks.allocated if on_cuda else foreseen,
        "closed form": None if forms is None else max(form.peak for form in forms) + sum(workspaces),
        "LLMem": None if sizes is None or isinstance(job, InferenceJob) else llmem(sizes, job),
        "accelerate": weights if is_inference else 4 * weights,
        "2X, 8X": num_parameters * (2 if is_inference else 8),
        "reserved": reserved,
        "reserved foreseen": blocks.reserved,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--scale", type=int, default=1, help="of the widths; 4 on a large GPU")
    parser.add_argument("--json", type=Path, default=Path("outputs/estimate_accuracy.json"))
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
    columns = ("fakes", "closed form", "LLMem", "accelerate", "2X, 8X")
    print(f"{'case':34} {'taken MiB':>10}", *(f"{column:>12}" for column in columns), f"{'reserved':>12}")
    rows = []
    for name in arguments.only:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            row = pool.apply(case, (name, arguments.scale))
        rows.append(row)
        said = [row.get(each) for each in columns]
        errors = ["-" if each is None else f"{100 * (each / row['taken'] - 1):+.1f} %" for each in said]
        held = row.get("reserved")
        errors.append("-" if held is None else f"{100 * (row['reserved foreseen'] / held - 1):+.1f} %")
        print(f"{name:34} {row['taken'] / 2**20:10.1f}", *(f"{error:>12}" for error in errors), flush=True)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
