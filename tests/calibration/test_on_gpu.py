"""The engine on a GPU: where things wait decides about no bit, and what is found is what a CPU finds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import CPU, contents, recipe, run, saved, tiny_llama, token_batches

from lightning_compress.calibration.batches import collect
from lightning_compress.foresight.allocator import replay
from lightning_compress.foresight.jobs import FineTuningJob, InferenceJob, infer, on_fakes
from lightning_compress.foresight.training import finetune
from lightning_compress.graph.stages import Schedule
from lightning_compress.memory.placement import MemoryConfig
from lightning_compress.memory.tracker import LiveMemory
from lightning_compress.memory.workspaces import cublas_workspace_bytes
from lightning_compress.plugin.job import Job, prepare_job
from lightning_compress.plugin.run import run_job
from lightning_compress.plugin.settings import Settings
from lightning_compress.recipe.load import load_recipe
from lightning_compress.statistics import InputGram

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
]
GPU = torch.device("cuda", 0)
HOW = recipe(4, group_size=32)


def model() -> Any:
    return tiny_llama(3, dtype=torch.bfloat16, hidden_size=128, intermediate_size=256, num_attention_heads=4)


def job(folder: Path, where: torch.device = GPU, of: Any = None, how: Any = HOW, **settings: Any) -> Job:
    data = collect(token_batches(4, rows=4, length=48))
    given = Settings(load_recipe(how), folder, **{"verify": False, **settings})
    return prepare_job(model() if of is None else of, data, given, where)


@pytest.mark.parametrize(
    "memory",
    [
        {"prefetch_depth": 0},
        {"prefetch_depth": 2, "device_activation_budget": None},
        {"activation_budget": 0},
        {"device_budget": "1GiB", "device_activation_budget": None},
        {"device_budget": "80%", "host_budget": "least"},
    ],
)
@pytest.mark.parametrize("on_disk", [False, True])
def test_where_things_wait_decides_about_nothing(memory: dict[str, Any], on_disk: bool, tmp_path: Path) -> None:
    run(job(tmp_path / "expected"))
    of = saved(model(), tmp_path / "model") if on_disk else None
    weights = tmp_path / "model" if on_disk else None
    report = run(job(tmp_path / "found", of=of, weights=weights, memory=MemoryConfig(**memory)))
    assert contents(tmp_path / "found") == contents(tmp_path / "expected")
    assert max(record.peak_bytes for record in report.subgraphs) > 0


def test_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    run(job(tmp_path / "expected"))
    begun = run_job(job(tmp_path / "found"))
    next(begun)
    next(begun)
    begun.close()
    run(job(tmp_path / "found"))
    assert contents(tmp_path / "found") == contents(tmp_path / "expected")


@pytest.mark.parametrize("schedule", [Schedule.STAGED, Schedule.BLOCK, Schedule.BASIC])
@pytest.mark.parametrize("bits", [4, 8])
def test_errors_are_those_of_a_cpu(schedule: Schedule, bits: int, tmp_path: Path) -> None:
    how = recipe(bits, group_size=32)
    on_cpu, on_gpu = (
        run(job(tmp_path / where.type, where, how=how, schedule=schedule)).modules for where in (CPU, GPU)
    )
    ours, theirs = (sum(each.error for each in found) for found in (on_gpu, on_cpu))
    assert ours == pytest.approx(theirs, rel=0.02)


@pytest.mark.parametrize("preset", ["FP8", "FP8_BLOCK", "MXFP4A16", "MXFP8", "NVFP4A16", "NVFP4"])
def test_floats_are_read_back_as_they_are_in_memory(preset: str, tmp_path: Path) -> None:
    """By transformers, on the CPU."""
    verification = run(job(tmp_path / "out", how=recipe(scheme=preset), verify=True)).verification
    assert verification is not None
    assert verification.passed
    assert verification.different_modules == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gram(dtype: torch.dtype) -> None:
    """Of 16-bit tokens by tensor cores, which sum in float32."""
    x = (torch.randn(4096, 300) @ torch.randn(300, 300) / 17).to(dtype)
    gram = InputGram(300, GPU)
    for part in x.split(1500):
        gram.update(part.to(GPU))
    expected = x.double().t() @ x.double() / len(x)
    assert float((gram.matrix().cpu() - expected).norm() / expected.norm()) < 2e-6


WIDE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("do", "threads"),
    [
        (lambda model, memory: infer(model, InferenceJob(4, 512, 8), memory), 1),
        (lambda model, memory: finetune(model, FineTuningJob(4, 256), memory), 2),
        (lambda model, memory: finetune(model, FineTuningJob(4, 256, precision="bf16-mixed"), memory), 2),
    ],
)
def test_foreseen_is_measured(dtype: torch.dtype, do: Callable[..., Any], threads: int) -> None:
    """What the allocator hands out at most, within a percent."""
    fake, memory = tiny_llama(4, dtype=dtype, **WIDE), LiveMemory(on_cuda=True)
    with on_fakes(fake, on_cuda=True):
        do(fake, memory)
    workspaces = [(-1 - number, cublas_workspace_bytes(GPU)) for number in range(threads)]
    foreseen = replay([*workspaces, *memory.events]).allocated
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    real = tiny_llama(4, dtype=dtype, **WIDE).to(GPU)
    torch.cuda.reset_peak_memory_stats()
    do(real, LiveMemory())
    assert torch.cuda.max_memory_allocated() - before == pytest.approx(foreseen, rel=0.01)
