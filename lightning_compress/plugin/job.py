"""One compression from a model to a verified checkpoint, as a generator that a Trainer's loop (or anything else)
drives."""

import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_compress.calibration.batches import CalibrationSet
from lightning_compress.calibration.loop import Calibration, calibrate
from lightning_compress.calibration.prepare import calibrating, check_layout, needs_data, prepare
from lightning_compress.calibration.records import SubgraphRecord
from lightning_compress.calibration.solve import QuantizedModule
from lightning_compress.calibration.target import Target, find_target
from lightning_compress.export.checkpoint import SavesPretrained, check_output_dir, write_checkpoint
from lightning_compress.export.packing import PackedModule, nbytes, pack, packed_state_dict
from lightning_compress.export.verify import Verification, verify
from lightning_compress.graph.stages import Schedule
from lightning_compress.recipe.config import Recipe
from lightning_compress.recipe.resolve import ResolvedRecipe, resolve
from lightning_compress.report.report import Report


@dataclass(frozen=True)
class Settings:
    """What a user chose, apart from the model and the data.

    Attributes:
        output_dir: where the checkpoint goes; None quantizes the model in memory only.
        sequential_targets: what is onloaded at a time; None takes the model's layers.
        cache_on_device: keep activations on the device between steps instead of in host memory.
        verify: read the checkpoint back and compare.
        max_shard_size: of one safetensors file.
    """

    recipe: Recipe
    output_dir: Path | None
    schedule: Schedule = Schedule.STAGED
    sequential_targets: tuple[str, ...] | None = None
    cache_on_device: bool = False
    verify: bool = True
    max_shard_size: str = "5GB"
    tokenizer: SavesPretrained | None = None


@dataclass(frozen=True)
class Job:
    """A compression that is prepared and checked, and has not changed anything yet."""

    target: Target
    resolved: ResolvedRecipe
    data: CalibrationSet | None
    run: Calibration
    settings: Settings
    schedule: Schedule
    prepare_s: float


def plan_recipe(module: nn.Module, settings: Settings) -> tuple[Target, ResolvedRecipe]:
    """Everything that can be checked without data: the recipe against the model, and the output folder."""
    target = find_target(module)
    if settings.output_dir is not None:
        check_output_dir(settings.output_dir)
    resolved = resolve(settings.recipe, target.root)
    check_layout(target, resolved, settings.schedule, settings.sequential_targets)
    return target, resolved


def prepare_job(module: nn.Module, data: CalibrationSet | None, settings: Settings, device: torch.device) -> Job:
    """Resolve, trace and lay out. The model is moved to host memory, its gradients are dropped.

    Raises:
        CompressionError: one of its kinds, for anything in the recipe, model, data or output folder that cannot work.
    """
    start = time.perf_counter()
    target, resolved = plan_recipe(module, settings)
    module.to("cpu")
    schedule = settings.schedule if needs_data(resolved) else Schedule.DATAFREE
    with calibrating(target.root):
        run = prepare(
            target,
            resolved,
            data,
            schedule=schedule,
            sequential_targets=settings.sequential_targets,
            device=device,
            cache_device=device if settings.cache_on_device else torch.device("cpu"),
        )
    return Job(target, resolved, data, run, settings, schedule, time.perf_counter() - start)


def run_job(job: Job, max_subgraphs: int | None = None) -> Generator[SubgraphRecord, bool | None, Report]:
    """Quantize, write, verify.

    Args:
        job: from `prepare_job`.
        max_subgraphs: stop after so many, without writing a checkpoint.

    Yields:
        A record per finished subgraph. Sending True in return stops the run there: the report says partial.

    Returns:
        The report, once exhausted.
    """
    start = time.perf_counter()
    root = job.target.root
    bytes_before = _model_bytes(root, {})
    packed: dict[str, PackedModule] = {}
    records: list[SubgraphRecord] = []

    def write(quantized: QuantizedModule) -> int:
        packed[quantized.module] = pack(quantized)
        return nbytes(packed[quantized.module])

    stop: bool | None = False
    with calibrating(root):
        try:
            for record in calibrate(job.run, write):
                records.append(record)
                stop = yield record
                if stop or len(records) == max_subgraphs:
                    break
        except Exception as error:
            error.add_note(_what_changed(job, packed))
            raise
        partial = len(records) < len(job.run.subgraphs)
        output_dir = None if partial else job.settings.output_dir
        verification = None if output_dir is None else _export(job, packed, output_dir)
    report = Report(
        model=type(root).__name__,
        recipe=job.resolved.recipe.to_dict(),
        schedule=job.schedule.value,
        device=_device_name(job.run.device),
        subgraphs=tuple(records),
        excluded=job.resolved.excluded,
        fallbacks=job.run.traced.fallbacks if job.run.traced is not None else (),
        num_batches=len(job.data.batches) if job.data is not None else 0,
        has_padding=job.data is not None and job.data.has_padding,
        bytes_before=bytes_before,
        bytes_after=_model_bytes(root, packed),
        trace_s=job.prepare_s,
        total_s=job.prepare_s + time.perf_counter() - start,
        output_dir=None if output_dir is None else str(output_dir),
        verification=verification,
        is_partial=partial,
        extra={},
    )
    if output_dir is not None:
        report.save(output_dir)
    return report


def _what_changed(job: Job, packed: Mapping[str, PackedModule]) -> str:
    """For a run that failed: the model in memory is as before but for these."""
    changed = [part.name for part in job.run.subgraphs if not packed.keys().isdisjoint(part.solved)]
    names = ", ".join(changed) or "none"
    return f"Subgraphs of the model in memory that hold quantized weights already: {names}. Nothing was written."


def _export(job: Job, packed: Mapping[str, PackedModule], output_dir: Path) -> Verification | None:
    """Write the checkpoint and read it back."""
    root = job.target.root
    write_checkpoint(output_dir, root, job.resolved, packed, job.settings.tokenizer, job.settings.max_shard_size)
    if not job.settings.verify:
        return None
    batch = job.data.batches[0] if job.data is not None else None
    return verify(output_dir, root, packed, batch, "the first calibration batch")


def _model_bytes(root: nn.Module, packed: Mapping[str, PackedModule]) -> int:
    """Bytes of the state dict with the packed weights in place; tied tensors count once."""
    seen: dict[tuple[int, Any], int] = {}
    for tensor in packed_state_dict(root, packed).values():
        seen[tensor.data_ptr(), tensor.shape] = tensor.nbytes
    return sum(seen.values())


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
