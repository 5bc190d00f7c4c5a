"""A run laid out within its budgets: experts in as many parts as those demand."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from lightning_compress.calibration.batches import CalibrationSet
from lightning_compress.calibration.loop import Calibration
from lightning_compress.calibration.prepare import calibrating, needs_data, prepare
from lightning_compress.calibration.resume import begun_run
from lightning_compress.calibration.target import Target
from lightning_compress.distributed.collective import Collective
from lightning_compress.errors import BudgetError, CompressionError, OutputDirectoryError
from lightning_compress.export.checkpoint import is_unfinished
from lightning_compress.export.packed import original_source
from lightning_compress.graph.restore import contents_restored
from lightning_compress.graph.stages import Schedule
from lightning_compress.graph.unfold import Unfolded, most_experts, unfold
from lightning_compress.memory.budget import MemoryUse
from lightning_compress.memory.placement import placement
from lightning_compress.memory.source import WeightSource
from lightning_compress.plugin.budget import within_budgets
from lightning_compress.plugin.settings import Settings
from lightning_compress.recipe.resolve import ResolvedRecipe, named_by


@dataclass(frozen=True)
class LaidOut:
    """What a run consists of.

    Attributes:
        run: prepared.
        modules: of the model, which are Linears while it runs.
        schedule: that it has.
        source: of parameters on the meta device.
        memory: what it is expected to take, where there are budgets.
        expert_parts: in how many parts the experts of a layer are run.
    """

    run: Calibration
    modules: Unfolded
    schedule: Schedule
    source: WeightSource | None
    memory: MemoryUse | None
    expert_parts: int


def in_parts(
    target: Target,
    resolved: ResolvedRecipe,
    data: CalibrationSet | None,
    settings: Settings,
    device: torch.device,
    place: str,
    collective: Collective,
) -> LaidOut:
    """The run with the experts of each layer in as many parts as the user says; else in one, or in twice as many as do
    not fit into the budgets, until they fit. A run that is continued has those that it began with.

    Args:
        target: the model.
        resolved: what happens to each module.
        data: the calibration set.
        settings: what the user chose.
        device: where subgraphs run.
        place: the path of the model in the user's module.
        collective: the ranks, which take as many parts as the one that needs most.

    Raises:
        BudgetError: the budgets cannot hold it, in however many parts.
        OutputDirectoryError: the run that would be continued has another number of parts than the user says.
        CompressionError: parts under a schedule that has none.
    """
    schedule = settings.schedule if needs_data(resolved) else Schedule.DATAFREE
    most, given = most_experts(target.root), settings.expert_parts
    lay_out = partial(_laid_out, target, resolved, data, settings, device, place, collective, schedule)
    if schedule in (Schedule.BASIC, Schedule.DATAFREE):
        if settings.schedule is Schedule.BASIC and (given or 1) > 1:
            raise CompressionError(f"expert_parts={given}: schedule basic has one subgraph, so there are no parts.")
        return lay_out(1)
    of_ranks = collective.gather(_begun(settings), "looking for an unfinished run")
    begun = next((number for number in of_ranks if number is not None), None)
    if given is not None or begun is not None:
        number = min(given or begun or 1, most)
        if begun not in (None, number):
            raise OutputDirectoryError(
                f"{settings.output_dir} holds an unfinished run that has experts in {begun} parts, not {number}. Leave "
                "expert_parts out to continue it, give another output_dir, or resume='never' to start over there."
            )
        return lay_out(number)
    found = lay_out(1) if most == 1 else _doubled(lay_out, most)
    agreed = max(collective.gather(found.expert_parts, "comparing the parts of experts"))
    return found if agreed == found.expert_parts else lay_out(agreed)


def _begun(settings: Settings) -> int | None:
    """In how many parts the run has experts that is to be continued, if there is one."""
    folder = settings.output_dir
    if folder is None or not settings.resume or not is_unfinished(folder):
        return None
    begun = begun_run(folder)
    return None if begun is None else begun.expert_parts


def _doubled(lay_out: Callable[[int], LaidOut], most: int) -> LaidOut:
    """Gives up where twice as many parts do not bring down what the refused budget would have to be."""
    refused: BudgetError | None = None
    number = 1
    while True:
        try:
            return lay_out(number)
        except BudgetError as error:
            if error.needed is None:
                raise
            if refused is not None and error.budget == refused.budget and error.needed > 0.99 * (refused.needed or 0):
                raise refused from None
            said = f"{error} That is with the experts of a layer in {number} parts." if number > 1 else str(error)
            refused = BudgetError(said, error.budget, error.needed)
            if number == most:
                raise refused from None
            number = min(2 * number, most)


def _laid_out(
    target: Target,
    resolved: ResolvedRecipe,
    data: CalibrationSet | None,
    settings: Settings,
    device: torch.device,
    place: str,
    collective: Collective,
    schedule: Schedule,
    expert_parts: int,
) -> LaidOut:
    with contents_restored(target.module):  # forwards of Linears are tried
        modules = unfold(target.root, named_by(settings.recipe), expert_parts)
    with calibrating(target.root), modules.in_place():
        source = None if settings.weights is None else original_source(target.root, settings.weights, place)
        run = prepare(
            target,
            resolved,
            data,
            placement(settings.memory, device, source),
            schedule=schedule,
            sequential_targets=settings.sequential_targets,
            collective=collective,
        )
        writes = settings.output_dir is not None
        run, use = within_budgets(run, data, settings.memory, writes, writes and settings.verify and source is None)
    if use is not None and expert_parts > 1:
        note = f"The experts of a layer are onloaded and solved in {expert_parts} parts."
        use = replace(use, notes=(*use.notes, note))
    return LaidOut(run, modules, schedule, source, use, expert_parts)
