"""One compression from a prepared job to a verified checkpoint, as a generator that a Trainer's loop (or anything else)
drives."""

import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_compress.calibration.boundary import FOLDER
from lightning_compress.calibration.loop import calibrate
from lightning_compress.calibration.prepare import calibrating
from lightning_compress.calibration.records import UNREACHED, ModuleRecord, SubgraphRecord
from lightning_compress.calibration.resume import Begun, versions
from lightning_compress.distributed.bars import no_bars
from lightning_compress.errors import RunWarning, UnreachedModulesWarning, listed
from lightning_compress.export.claim import claimed
from lightning_compress.export.verify import Verification, of_all, verify, verify_files, why_unreadable
from lightning_compress.export.writer import CheckpointWriter, Unwritten
from lightning_compress.graph.restore import kept_by, state_restored
from lightning_compress.plugin.agreement import unlike_threads
from lightning_compress.plugin.budget import finished_use
from lightning_compress.plugin.identity import (
    beyond_made_for,
    model_path,
    num_samples_and_tokens,
    unlike_where_fused,
)
from lightning_compress.plugin.job import Job
from lightning_compress.plugin.progress import Progress, check_continues
from lightning_compress.report.experts import ExpertCoverageWarning, advice, more_samples
from lightning_compress.report.report import Report

_MORE_MEMORY = (
    "Of a device that is nearly full a fifth may lie idle in PyTorch's segments of fixed size: start Python with "
    "PYTORCH_ALLOC_CONF=expandable_segments:True in its environment, as the command lightning-compress does, use "
    "smaller batches, or give memory.device_budget less."
)

_REPLACED = (
    "{} held the finished checkpoint of another run (another recipe, model, data or software, or resume='never'), "
    "which this one replaces with its first subgraph."
)


_DEQUANTIZED = (
    "The weights in {} are {}: the model that is compressed, and that errors are told of, is the one they are "
    "dequantized to."
)


def run_job(
    job: Job, max_subgraphs: int | None = None, continues: Progress | None = None
) -> Generator[SubgraphRecord, bool | None, Report]:
    """Quantize, write, verify.

    Args:
        job: from `prepare_job`.
        max_subgraphs: stop after so many, without writing anything.
        continues: the run that a Lightning checkpoint was saved in, if it has to be that one.

    Yields:
        A record per finished subgraph. Sending True in return stops the run there: the report says partial, and what is
        written is continued by the next run.

    Returns:
        The report, once exhausted.

    Raises:
        OutputDirectoryError: the output folder holds an unfinished run of something else, or cannot be written to.
    """
    output_dir = job.settings.output_dir if max_subgraphs is None else None
    claim = nullcontext() if output_dir is None else claimed(output_dir, job.run.collective)
    owners = kept_by(job.target.module)  # without the modules that are in place of others
    with calibrating(job.target.root), job.modules.in_place(), claim:
        return (yield from _run(job, owners, output_dir, max_subgraphs, continues))


def _run(
    job: Job, owners: Sequence[object], output_dir: Path | None, max_subgraphs: int | None, continues: Progress | None
) -> Generator[SubgraphRecord, bool | None, Report]:
    start = time.perf_counter()
    bytes_before = _num_bytes(job.target.root)
    writer = None if output_dir is None else _writer(job, output_dir)
    beyond = [] if job.data is None else beyond_made_for(job.target.root, job.data.batches)
    unlike = unlike_where_fused(job.target.root, job.run) if writer is not None else []
    said = [*beyond, *unlike, *unlike_threads(job.run.collective, job.run.flow.device)]
    replaced = [_REPLACED.format(writer.folder)] if writer is not None and writer.replaces_finished else []
    source = job.source
    read = [_DEQUANTIZED.format(job.settings.weights, source.method)] if source is not None and source.method else []
    if job.run.collective.rank == 0:
        for note in said:
            warnings.warn(note, RunWarning, stacklevel=2)
        for note in replaced:
            rank_zero_info(note)
    num_resumed = 0 if writer is None else len(writer.finished)
    if continues is not None and writer is not None:
        check_continues(continues, job.fingerprints, str(output_dir), num_resumed, job.settings.resume)
    records: list[SubgraphRecord] = []
    stop: bool | None = False
    try:
        keep_in = writer.shared.child(FOLDER) if writer is not None and job.settings.keep_activations else None
        for record in _leaving_nothing(calibrate(job.run, writer or Unwritten(), keep_in), owners):
            records.append(record)
            stop = yield record
            if stop or len(records) == max_subgraphs:
                break
    except Exception as error:
        error.add_note(_what_changed(job, records, writer))
        if isinstance(error, torch.OutOfMemoryError):
            error.add_note(_MORE_MEMORY)
        raise
    partial = len(records) < len(job.run.flow.subgraphs)
    verification = None
    if writer is not None and not partial:
        with no_bars():
            writer.close(job.settings.tokenizer)
            verification = _verified(job, writer.folder)
    total_s = job.prepare_s + time.perf_counter() - start
    report = _report(job, records, bytes_before, total_s, writer, num_resumed, verification, (*read, *said, *replaced))
    if (factor := more_samples(report.coverage)) is not None:
        warnings.warn(advice(factor), ExpertCoverageWarning, stacklevel=2)
    _warn_of_unreached(report.modules)
    report = job.run.collective.broadcast(report, "sending the report")
    if writer is not None and not partial and writer.shared.is_first:
        save_report(report, writer.folder)
    return report


def _leaving_nothing(steps: Iterator[SubgraphRecord], owners: Sequence[object]) -> Iterator[SubgraphRecord]:
    """The steps, of which none leaves anything in what modules keep for the epoch's end; who is called between them
    may."""
    while True:
        with state_restored(owners):
            record = next(steps, None)
        if record is None:
            return
        yield record


def _warn_of_unreached(modules: Sequence[ModuleRecord]) -> None:
    """Of modules inside opaque leaves, of which it shows at the end only; experts lean on what the others saw."""
    found = [each.module for each in modules if UNREACHED in each.notes and each.num_lent is None]
    if found:
        warnings.warn(
            f"{listed(found, 3)}: no calibration token reached them, so they were rounded to nearest. Give "
            "data that reaches them, or add them to `ignore`.",
            UnreachedModulesWarning,
            stacklevel=3,
        )


def save_report(report: Report, output_dir: Path) -> None:
    """Write it beside a checkpoint. An error here would let a run that has succeeded look like one that has to be
    started again."""
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
    notes: tuple[str, ...],
) -> Report:
    num_samples, num_tokens = (0, 0) if job.data is None else num_samples_and_tokens(job.data.batches)
    saved = sum(module.bytes_before - module.bytes_after for record in records for module in record.modules)
    return Report(
        model=type(job.target.root).__name__,
        model_path=model_path(job.target.root),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions(),
        num_samples=num_samples,
        num_tokens=num_tokens,
        notes=notes,
        recipe=job.resolved.recipe.to_dict(),
        schedule=job.schedule.value,
        device=_device_name(job.run.flow.device),
        subgraphs=tuple(records),
        excluded=job.resolved.excluded,
        fallbacks=job.run.flow.traced.fallbacks if job.run.flow.traced is not None else (),
        num_batches=len(job.data.batches) if job.data is not None else 0,
        has_padding=job.data is not None and job.data.has_padding,
        bytes_before=bytes_before,
        bytes_after=bytes_before - saved,
        trace_s=job.prepare_s,
        total_s=total_s,
        output_dir=None if writer is None else str(writer.folder),
        verification=verification,
        is_partial=len(records) < len(job.run.flow.subgraphs),
        num_resumed=num_resumed,
        num_ranks=job.run.collective.size,
        num_copies=1 if writer is None else writer.shared.num_copies,
        extra={},
        memory=finished_use(job.memory, job.run.flow.device, max((each.peak_bytes for each in records), default=0)),
    )


def _writer(job: Job, output_dir: Path) -> CheckpointWriter:
    return CheckpointWriter(
        output_dir,
        job.target.root,
        job.resolved,
        job.run.flow.subgraphs,
        job.run.flow.store,
        job.fingerprints,
        resume=job.settings.resume,
        collective=job.run.collective,
        begun=Begun(job.expert_parts, job.source is not None),
    )


def _what_changed(job: Job, records: Sequence[SubgraphRecord], writer: CheckpointWriter | None) -> str:
    """For a run that failed: which weights in memory it has replaced, and what is in the output folder."""
    in_memory = [part for part in job.run.flow.subgraphs if any(_is_in_memory(job, name) for name in part.solved)]
    failed = job.run.flow.subgraphs[min(len(records), len(job.run.flow.subgraphs) - 1)]
    changed = ", ".join(part.name for part in job.run.flow.subgraphs[: len(records)] if part in in_memory) or "none"
    perhaps = f"; perhaps some of {failed.name}, where it failed" if failed in in_memory else ""
    model = f"Subgraphs of the model in memory that hold quantized weights already: {changed}{perhaps}."
    if not in_memory:
        model = (
            f"It failed in {failed.name}. The model holds no weights and is as before; those it was given are intact."
        )
    written = "Nothing was written."
    finished = 0 if writer is None else max(len(records), len(writer.finished))  # of those an earlier run's
    if writer is not None and finished and writer.folder.is_dir():
        written = f"{finished} finished subgraphs are in {writer.folder}; the same run continues there."
    return f"{model} {written}"


def _is_in_memory(job: Job, module: str) -> bool:
    return not job.target.root.get_submodule(module).get_parameter("weight").is_meta


def _verified(job: Job, folder: Path) -> Verification | None:
    """Read the checkpoint back, if that is wanted; one of weights on disk has been, shard by shard. On all ranks, for
    the folder may be another one on each node, and compressed-tensors loads as one of them."""
    if not job.settings.verify:
        return None
    names, unreadable = job.resolved.assignments, why_unreadable(job.target.root, job.resolved)
    if job.source is not None:
        found = verify_files(folder, names, unreadable)
    else:
        batch = job.data.batches[0] if job.data is not None else None
        found = verify(folder, job.target, names, batch, unreadable)
    return of_all(job.run.collective.gather(found, "verifying the checkpoint"))


def _num_bytes(root: nn.Module) -> int:
    """Bytes of the state dict; tied tensors count once."""
    tensors = root.state_dict(keep_vars=True).values()
    return sum({id(tensor): tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor)}.values())


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
