"""A calibration that is only thought of, measured on fake tensors: what `estimate` and `plan` stand on."""

import time
from dataclasses import dataclass, replace
from typing import Any, cast, final

import torch
from transformers import PreTrainedModel

from lightning_compress.calibration.footprint import footprint
from lightning_compress.calibration.loop import Calibration
from lightning_compress.calibration.prepare import calibrating, needs_data, prepare
from lightning_compress.calibration.target import Target
from lightning_compress.command.samples import samples
from lightning_compress.distributed.collective import SingleProcess
from lightning_compress.errors import UntraceableModelError
from lightning_compress.foresight.inputs import beyond_positions
from lightning_compress.foresight.jobs import CalibrationJob
from lightning_compress.graph.stages import Schedule
from lightning_compress.graph.synthesize import flatten_batch
from lightning_compress.graph.targets import as_patterns
from lightning_compress.graph.trace import Traced, violated_guards
from lightning_compress.memory.needs import Needs
from lightning_compress.memory.placement import MemoryConfig, placement
from lightning_compress.plugin.budget import at_the_end
from lightning_compress.recipe.resolve import ResolvedRecipe

READING = 40 * 10**6
"""Bytes that reading and tokenizing samples leaves in a process which is only planned (Python's documentation)."""


@final
@dataclass(frozen=True)
class _Planned(SingleProcess):
    """The first of several ranks that are only thought of."""

    size: int = 1


@final
@dataclass(frozen=True)
class Measured:
    """A calibration's table of memory and work.

    Attributes:
        run: as prepared.
        table: a row per subgraph.
        end: rows of what comes behind them.
        prepare_s: what preparing it took, whatever else ran on the machine.
    """

    run: Calibration
    table: tuple[Needs, ...]
    end: tuple[Needs, ...]
    prepare_s: float


def measured(
    target: Target,
    resolved: ResolvedRecipe,
    job: CalibrationJob,
    device: torch.device,
    *,
    verifies: bool,
    memory: MemoryConfig | None = None,
    processor: Any = None,
    traced: Traced | None = None,
) -> Measured:
    """The table of a job on a model whose parameters are on the meta device.

    Args:
        target: the model, of transformers; its experts are unfolded, in the job's number of parts.
        resolved: its recipe.
        job: what is done; every sample has its full length.
        device: where subgraphs run; it need not be here.
        verifies: the checkpoint is loaded a second time at the end.
        memory: what the user says about it.
        processor: of the model, where samples have images.
        traced: the graph, if one is known; it is recorded anew where that does not serve the job's batches.

    Raises:
        CompressionError: a job that cannot be prepared, or a model whose inputs are not known.
    """
    model = cast(PreTrainedModel, target.root)
    data = samples(model, job, processor)
    if traced is not None and any(violated_guards(traced, data.batches[number]) for number in (0, -1)):
        traced = None
    where = replace(placement(memory or MemoryConfig(), device, None), device_activation_budget=0)
    has_data, start = needs_data(resolved), time.thread_time()
    with calibrating(target.root):
        try:
            run = prepare(
                target,
                resolved,
                data if has_data else None,
                where,
                schedule=Schedule(job.schedule) if has_data else Schedule.DATAFREE,
                sequential_targets=as_patterns(job.sequential_targets),
                collective=_Planned(job.ranks) if job.ranks > 1 else SingleProcess(),
                traced=traced,
            )
        except UntraceableModelError as error:
            raise UntraceableModelError(f"{error} {beyond_positions(model, job.max_length)}".rstrip()) from error
        prepare_s = time.thread_time() - start
        table = footprint(run, [flatten_batch(data.batches[number])[0] for number in run.flow.share])
        return Measured(run, table, tuple(at_the_end(run, data, verifies)), prepare_s)
