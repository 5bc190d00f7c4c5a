"""One compression from a model to a verified checkpoint, as a generator that a Trainer's loop (or anything else)
drives."""

import time
import warnings
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lightning_compress.calibration.batches import CalibrationSet
from lightning_compress.calibration.loop import Calibration, calibrate
from lightning_compress.calibration.prepare import calibrating, check_layout, needs_data, prepare
from lightning_compress.calibration.records import SubgraphRecord
from lightning_compress.calibration.resume import fingerprints
from lightning_compress.calibration.target import Target, find_target
from lightning_compress.errors import UnsupportedModelError
from lightning_compress.export.checkpoint import SavesPretrained, check_output_dir
from lightning_compress.export.verify import Verification, verify, verify_files
from lightning_compress.export.writer import CheckpointWriter, Unwritten
from lightning_compress.graph.stages import Schedule
from lightning_compress.memory.placement import Placement
from lightning_compress.memory.source import WeightSource, is_on_meta, weight_source
from lightning_compress.recipe.config import Recipe
from lightning_compress.recipe.resolve import ResolvedRecipe, resolve
from lightning_compress.report.report import Report


@dataclass(frozen=True)
class Settings:
    """What a user chose, apart from the model and the data.

    Attributes:
        output_dir: where the checkpoint goes; None quantizes the model in memory only.
        weights: checkpoint folder that the values of parameters on the meta device are read from.
        sequential_targets: what is onloaded at a time; None takes the model's layers.
        cache_on_device: keep activations on the device between steps instead of in host memory.
        prefetch: read the next subgraph's weights from disk while one is computed.
        activation_budget: bytes of activations that may wait there; None: all. The others wait in a file.
        scratch_dir: folder of that file; None: the system's temporary folder.
        verify: read the checkpoint back and compare.
        resume: continue an interrupted run that is the same, if `output_dir` holds one.
    """

    recipe: Recipe
    output_dir: Path | None
    weights: Path | None = None
    schedule: Schedule = Schedule.STAGED
    sequential_targets: tuple[str, ...] | None = None
    cache_on_device: bool = False
    prefetch: bool = True
    activation_budget: int | None = None
    scratch_dir: Path | None = None
    verify: bool = True
    resume: bool = True
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
    source: WeightSource | None
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
    source = _source(target.root, settings)
    if source is None:
        module.to("cpu")
    schedule = settings.schedule if needs_data(resolved) else Schedule.DATAFREE
    placement = Placement(
        device,
        cache_device=device if settings.cache_on_device else torch.device("cpu"),
        source=source,
        prefetch=settings.prefetch,
        activation_budget=settings.activation_budget,
        scratch_dir=settings.scratch_dir,
    )
    with calibrating(target.root):
        run = prepare(
            target,
            resolved,
            data,
            placement,
            schedule=schedule,
            sequential_targets=settings.sequential_targets,
        )
    return Job(target, resolved, data, run, settings, schedule, source, time.perf_counter() - start)


def _source(root: nn.Module, settings: Settings) -> WeightSource | None:
    """Where the weights are read from, if they are not in memory."""
    if not is_on_meta(root):
        return None
    if settings.weights is None or settings.output_dir is None:
        missing = "weights=FOLDER that says where to read them" if settings.weights is None else "an output_dir"
        raise UnsupportedModelError(
            f"Parameters of {type(root).__name__} are on the meta device, so compressing it needs {missing}."
        )
    return weight_source(root, settings.weights)


def run_job(job: Job, max_subgraphs: int | None = None) -> Generator[SubgraphRecord, bool | None, Report]:
    """Quantize, write, verify.

    Args:
        job: from `prepare_job`.
        max_subgraphs: stop after so many, without writing anything.

    Yields:
        A record per finished subgraph. Sending True in return stops the run there: the report says partial, and what is
        written is continued by the next run.

    Returns:
        The report, once exhausted.

    Raises:
        OutputDirectoryError: the output folder holds an unfinished run of something else, or cannot be written to.
    """
    start = time.perf_counter()
    root = job.target.root
    bytes_before = _num_bytes(root)
    output_dir = job.settings.output_dir if max_subgraphs is None else None
    writer = None if output_dir is None else _writer(job, output_dir)
    num_resumed = 0 if writer is None else len(writer.finished)
    records: list[SubgraphRecord] = []
    stop: bool | None = False
    with calibrating(root):
        try:
            for record in calibrate(job.run, writer or Unwritten()):
                records.append(record)
                stop = yield record
                if stop or len(records) == max_subgraphs:
                    break
        except Exception as error:
            error.add_note(_what_changed(job, records))
            raise
        partial = len(records) < len(job.run.subgraphs)
        verification = None
        if writer is not None and not partial:
            writer.close(job.settings.tokenizer)
            verification = _verified(job, writer.folder)
    total_s = job.prepare_s + time.perf_counter() - start
    report = _report(job, records, bytes_before, total_s, writer, num_resumed, verification)
    if output_dir is not None and not partial:
        _save(report, output_dir)
    return report


def _save(report: Report, output_dir: Path) -> None:
    """An error here would let a run that has succeeded look like one that has to be started again."""
    try:
        report.save(output_dir)
    except OSError as error:
        warnings.warn(
            f"The checkpoint {output_dir} is complete, but its report could not be written there: {error}", stacklevel=2
        )


def _report(
    job: Job,
    records: Sequence[SubgraphRecord],
    bytes_before: int,
    total_s: float,
    writer: CheckpointWriter | None,
    num_resumed: int,
    verification: Verification | None,
) -> Report:
    saved = sum(module.bytes_before - module.bytes_after for record in records for module in record.modules)
    return Report(
        model=type(job.target.root).__name__,
        recipe=job.resolved.recipe.to_dict(),
        schedule=job.schedule.value,
        device=_device_name(job.run.device),
        subgraphs=tuple(records),
        excluded=job.resolved.excluded,
        fallbacks=job.run.traced.fallbacks if job.run.traced is not None else (),
        num_batches=len(job.data.batches) if job.data is not None else 0,
        has_padding=job.data is not None and job.data.has_padding,
        bytes_before=bytes_before,
        bytes_after=bytes_before - saved,
        trace_s=job.prepare_s,
        total_s=total_s,
        output_dir=None if writer is None else str(writer.folder),
        verification=verification,
        is_partial=len(records) < len(job.run.subgraphs),
        num_resumed=num_resumed,
        extra={},
    )


def _writer(job: Job, output_dir: Path) -> CheckpointWriter:
    layout = {
        "schedule": job.schedule.value,
        "subgraphs": [(part.name, part.solved) for part in job.run.subgraphs],
        "device": job.run.device.type,
    }
    batches = job.data.batches if job.data is not None else ()
    weights = "" if job.source is None else job.source.fingerprint
    given = fingerprints(job.resolved.recipe.to_dict(), layout, job.target.root, weights, batches)
    return CheckpointWriter(
        output_dir, job.target.root, job.resolved, job.run.subgraphs, job.run.store, given, resume=job.settings.resume
    )


def _what_changed(job: Job, records: Sequence[SubgraphRecord]) -> str:
    """For a run that failed: the model in memory is as before but for these."""
    changed = ", ".join(part.name for part in job.run.subgraphs[: len(records)] if part.solved) or "none"
    failed = job.run.subgraphs[min(len(records), len(job.run.subgraphs) - 1)].name
    written = "Nothing was written."
    if job.settings.output_dir is not None and records:
        written = f"{len(records)} finished subgraphs are in {job.settings.output_dir}; the same run continues there."
    return (
        f"Subgraphs of the model in memory that hold quantized weights already: {changed}; perhaps some of {failed}, "
        f"where it failed. {written}"
    )


def _verified(job: Job, folder: Path) -> Verification | None:
    """Read the checkpoint back, if that is wanted; one of weights on disk has been, shard by shard."""
    if not job.settings.verify:
        return None
    if job.source is not None:
        return verify_files(folder, job.resolved.assignments)
    batch = job.data.batches[0] if job.data is not None else None
    return verify(folder, job.target.root, job.resolved.assignments, batch, "the first calibration batch")


def _num_bytes(root: nn.Module) -> int:
    """Bytes of the state dict; tied tensors count once."""
    tensors = root.state_dict(keep_vars=True).values()
    return sum({id(tensor): tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor)}.values())


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
