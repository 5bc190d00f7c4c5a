"""A run laid out within its budgets: experts in as many parts as those demand."""

from dataclasses import dataclass, replace
from functools import partial

import torch

from lightning_compress.calibration.batches import CalibrationSet
from lightning_compress.calibration.loop import Calibration
from lightning_compress.calibration.prepare import calibrating, needs_data, prepare
from lightning_compress.calibration.resume import begun_in_parts
from lightning_compress.calibration.target import Target
from lightning_compress.distributed.collective import Collective
from lightning_compress.errors import BudgetError
from lightning_compress.export.checkpoint import INCOMPLETE
from lightning_compress.graph.stages import Schedule
from lightning_compress.graph.unfold import Unfolded, most_experts, unfold
from lightning_compress.memory.budget import MemoryUse
from lightning_compress.memory.placement import placement
from lightning_compress.memory.source import WeightSource, weight_source
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
    not fit into the budgets, until they fit. A run that is continued has at least those that it began with.

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
    """
    most = most_experts(target.root)
    lay_out = partial(_laid_out, target, resolved, data, settings, device, place, collective)
    if most == 1 or settings.expert_parts is not None:
        return lay_out(min(settings.expert_parts or 1, most))
    folder, begun = settings.output_dir, 1
    if folder is not None and settings.resume and (folder / INCOMPLETE).is_file():
        begun = begun_in_parts(folder)
    found = _doubled(lay_out, begun, most)
    agreed = max(collective.gather(found.expert_parts, "comparing the parts of experts"))
    return found if agreed == found.expert_parts else lay_out(agreed)


def _doubled(lay_out: "partial[LaidOut]", number: int, most: int) -> LaidOut:
    refused: BudgetError | None = None
    while True:
        try:
            return lay_out(number)
        except BudgetError as error:
            if error.needed is None or (refused is not None and error.needed >= (refused.needed or 0)):
                raise refused or error from None
            refused = BudgetError(f"{error} That is with the experts of a layer in {number} parts.", error.needed)
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
    expert_parts: int,
) -> LaidOut:
    schedule = settings.schedule if needs_data(resolved) else Schedule.DATAFREE
    modules = unfold(target.root, named_by(settings.recipe), expert_parts)
    with calibrating(target.root), modules.in_place():
        source = None if settings.weights is None else weight_source(target.root, settings.weights, place)
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
