"""`lightning-compress plan`: how to run a calibration within what there is, and how long it will take.

The model is built from its configuration, without weights; every combination of the choices is measured on fake tensors
(`command.measure`), and placed and timed by `foresight.planner`.
"""

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, final

import torch
from transformers import PreTrainedModel

from lightning_compress.algorithms.rtn import Rtn
from lightning_compress.calibration.layout import stored_bytes
from lightning_compress.calibration.prepare import needs_data
from lightning_compress.calibration.target import Target, find_target
from lightning_compress.command.measure import READING, Measured, measured
from lightning_compress.errors import BudgetError, CompressionError
from lightning_compress.foresight.jobs import CalibrationJob, check_images
from lightning_compress.foresight.machine import Machine, cache_file, load_machine, named_gpu, save_machine
from lightning_compress.foresight.plan import Candidate, Choice, Plan
from lightning_compress.foresight.planned import CONTEXT, FRAGMENTED, Planned, Situation, device_to_give
from lightning_compress.foresight.planner import could_use_more, least_s, plans, simplest_first, smallest
from lightning_compress.foresight.probe import probe
from lightning_compress.graph.stages import Schedule
from lightning_compress.graph.targets import as_patterns
from lightning_compress.graph.trace import Traced
from lightning_compress.graph.unfold import most_experts, unfolded
from lightning_compress.memory.budget import gib
from lightning_compress.memory.files import nearest_existing
from lightning_compress.memory.garbage import no_full_collections
from lightning_compress.memory.tracker import held_bytes, parse_bytes
from lightning_compress.plugin.settings import check_number
from lightning_compress.recipe.resolve import ResolvedRecipe, named_by, resolve


@final
@dataclass(frozen=True)
class Choices:
    """What the planner may choose from.

    Attributes:
        batch_size: samples per forward.
        schedule: as of `compress`.
        prefetch_depth: how many subgraphs ahead weights are brought.
        load: where weights are read: before the run into "memory", or from "disk" during it.
        sequential_targets: tried in this order until something fits; null: the model's layers.
        expert_parts: in how many parts the experts of a layer are onloaded and solved; tried in this order, with each
            of the sequential targets, until something fits.
    """

    batch_size: Sequence[int] = (1, 2, 4, 8, 16, 32)
    schedule: Sequence[str] = ("staged", "recompute", "block")
    prefetch_depth: Sequence[int] = (0, 1, 2)
    load: Sequence[str] = ("memory", "disk")
    sequential_targets: Sequence[Sequence[str] | None] = (None, ("Linear",))
    expert_parts: Sequence[int] = (1, 4, 16)

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            if isinstance(given, str) or not isinstance(given, Sequence) or not given:
                raise CompressionError(f"choices.{field.name}={given} is no list of what may be chosen.")
        known = [str(schedule) for schedule in Schedule]
        wrong = [f"choices.schedule={each}" for each in self.schedule if each not in known]
        wrong += [f"choices.load={each}" for each in self.load if each not in ("memory", "disk")]
        for name, least in (("batch_size", 1), ("prefetch_depth", 0), ("expert_parts", 1)):
            wrong += [f"choices.{name}={n}" for n in getattr(self, name) if not isinstance(n, int) or n < least]
        if wrong:
            raise CompressionError(
                f"{', '.join(wrong)}: schedules are {', '.join(known)}, load is memory or disk, batch sizes and parts "
                "are at least 1 and prefetch depths at least 0."
            )


@no_full_collections()
def plan_calibration(
    model: PreTrainedModel, situation: Situation, choices: Choices, machine: Machine, processor: Any = None
) -> Planned:
    """The fastest way to run a calibration within what there is.

    Args:
        model: with its parameters on the meta device.
        situation: what it is for.
        choices: what may be chosen from.
        machine: how fast it is.
        processor: of the model, where samples have images.

    Raises:
        BudgetError: nothing fits; says the smallest budgets that would.
        CompressionError: a recipe or model that cannot be prepared.
    """
    start = time.perf_counter()
    for name in ("num_samples", "max_length"):
        given = getattr(situation, name)
        check_number(f"data.{name}", "null" if given is None else given, 1)
    check_images("", situation.num_images, situation.image_size)
    choices = replace(choices, batch_size=_possible(choices.batch_size, situation))
    target = find_target(model)
    resources = situation.resources
    tried: list[Candidate] = []
    found: list[Plan] = []
    most = most_experts(target.root)
    parts = dict.fromkeys(min(number, most) for number in choices.expert_parts)
    for targets, number in product(choices.sequential_targets, parts):
        with unfolded(target.root, named_by(situation.recipe), number):
            resolved = resolve(situation.recipe, target.root)
            described = (situation, choices, machine.device, targets, number)
            here = list(_candidates(target, resolved, *described, processor))
        tried += here
        found = plans(here, machine, resources)
        if found:
            break
    if not found:
        raise BudgetError(_nothing_fits(tried, machine, situation))
    least, found = found[0].total_s, simplest_first(found)
    return Planned(
        model=type(model).__name__,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        dtype=str(model.dtype).removeprefix("torch."),
        machine=machine,
        best=found[0],
        runners_up=_others(found)[:5],
        saved_s=_saved_s(tried, machine, situation, least),
        num_candidates=len(tried),
        num_fitting=len(found),
        situation=situation,
        planning_s=time.perf_counter() - start,
    )


def _saved_s(tried: Sequence[Candidate], machine: Machine, situation: Situation, least: float) -> dict[str, float]:
    """Of the `least` seconds what one GiB more of each place would save (see `Planned`)."""
    resources = situation.resources
    given = {"device": resources.device, "host": resources.host, "disk": resources.disk}
    beyond = {"device": 1 << 30, "host": (1 << 30) // situation.together, "disk": 1 << 30}
    more = {
        place: replace(resources, **{place: size + beyond[place]}) for place, size in given.items() if size is not None
    }
    saved: dict[str, float] = {}
    for place, each in more.items():
        among = [candidate for candidate in tried if could_use_more(candidate, machine, resources, place)]
        saved[place] = least - least_s(among, machine, each, least)
    return saved


def _possible(batch_sizes: Sequence[int], situation: Situation) -> tuple[int, ...]:
    """
    Raises:
        CompressionError: none of them.
    """
    number = situation.num_samples
    found = tuple(size for size in batch_sizes if size <= number)
    if not found:
        raise CompressionError(
            f"choices.batch_size={list(batch_sizes)}: no batch can have more than the {number} samples that there are "
            "(data.num_samples)."
        )
    if situation.num_images:  # many models need as many rows in each
        found = tuple(size for size in found if number % size == 0)
    if not found:
        raise CompressionError(
            f"choices.batch_size={list(batch_sizes)}: none divides data.num_samples={number}, which batches with "
            "images have to."
        )
    return found


def _others(found: Sequence[Plan]) -> tuple[Plan, ...]:
    """Of plans that differ from the best one in more than the prefetch depth, the best of each kind."""
    kinds: dict[tuple[object, ...], Plan] = {}
    for plan in found:
        choice = plan.choice
        kind = (choice.batch_size, choice.schedule, choice.load, choice.sequential_targets, choice.expert_parts)
        kinds.setdefault(kind, plan)
    return tuple(kinds.values())[1:]


def _candidates(
    target: Target,
    resolved: ResolvedRecipe,
    situation: Situation,
    choices: Choices,
    device: str,
    targets: Sequence[str] | None,
    expert_parts: int,
    processor: Any,
) -> Iterator[Candidate]:
    """All that can be chosen with these sequential targets and parts; the model is recorded once for them."""
    traced: Traced | None = None
    prepare_s, output_bytes = 0.0, 0
    if needs_data(resolved):
        ways = list(product(choices.schedule, choices.batch_size))
    else:  # nothing runs
        ways = [(str(Schedule.DATAFREE), choices.batch_size[0])]
    for schedule, batch_size in ways:
        job = CalibrationJob(
            num_samples=situation.num_samples,
            max_length=situation.max_length,
            batch_size=batch_size,
            schedule=schedule,
            sequential_targets=targets,
            expert_parts=expert_parts,
            ranks=situation.ranks,
            num_images=situation.num_images,
            image_size=situation.image_size,
        )
        what = (target, resolved, job, torch.device(device))
        found = measured(*what, verifies=situation.verify, processor=processor, traced=traced)
        if found.run.flow.traced is not traced:
            prepare_s = found.prepare_s
            traced = found.run.flow.traced
        output_bytes = output_bytes or sum(stored_bytes(target.root, found.run.flow.subgraphs, resolved))
        for load, depth in product(choices.load, choices.prefetch_depth):
            named = as_patterns(targets)
            choice = Choice(batch_size, schedule, depth, load, named, expert_parts)
            yield _candidate(choice, found, target, device, prepare_s, output_bytes)


def _candidate(
    choice: Choice, found: Measured, target: Target, device: str, prepare_s: float, output_bytes: int
) -> Candidate:
    weights = sum(parameter.nbytes for parameter in target.root.parameters())
    in_memory = choice.load == "memory"
    table, end = found.table, found.end
    if in_memory and device == "cpu":  # weights are where they are used
        table, end = (tuple(replace(row, weights=0) for row in rows) for rows in (table, end))
    if not in_memory:  # the checkpoint is read back as it is written
        end = tuple(row for row in end if all(moment.what != "verification" for moment in row.moments))
    return Candidate(
        choice=choice,
        table=table,
        end=end,
        held=held_bytes(torch.device(device)) + READING + (weights if in_memory else 0),
        prepare_s=prepare_s,
        read_bytes=weights if in_memory else 0,
        output_bytes=output_bytes,
    )


def _nothing_fits(tried: Sequence[Candidate], machine: Machine, situation: Situation) -> str:
    given = {"device": situation.device, "host": situation.host, "disk": situation.disk}
    taken = f" for tensors (of a card {CONTEXT >> 20} MiB and {FRAGMENTED:.0%} are taken off)"
    less = {"device": taken, "host": "", "disk": ""}
    said = ", ".join(f"{place}={gib(size)}{less[place]}" for place, size in given.items() if size is not None)
    least = smallest(tried, machine)
    disk = min(candidate.output_bytes for candidate in tried)
    of_rank = {**given, "host": situation.resources.host}
    sizes: dict[str, int] = {**{str(place): size for place, (_, size) in least.items()}, "disk": disk}
    too_little = [place for place, size in sizes.items() if (limit := of_rank[place]) is not None and size > limit]
    needed = []
    for place, (choice, size) in least.items():
        whole = size * situation.together
        needed.append(
            f"{device_to_give(size) if place == 'device' else f'{place}={whole} ({gib(whole)})'}, with batch size "
            f"{choice.batch_size}, schedule {choice.schedule}, prefetch depth {choice.prefetch_depth}, weights from "
            f"{choice.load}"
        )
    solves = not all(isinstance(each.algorithm, Rtn) for each in situation.recipe.modifiers)
    failed = " and ".join(too_little) or "what there is together"
    return (
        f"No plan fits {said}: none of {len(tried)} ways to run, for {failed} is too little for any. The smallest that "
        f"could do, each with enough of the others: {'; '.join(needed)}; disk={disk} ({gib(disk)}) for the checkpoint "
        f"alone. Lower them by shorter samples (data.max_length), {'' if solves else 'or '}"
        f"choices.sequential_targets of smaller modules{', or the algorithm rtn for the widest modules' * solves}."
    )


def size_of(name: str, given: int | str | None) -> int | None:
    """A budget in bytes.

    Raises:
        CompressionError: it is no size.
    """
    try:
        return None if given is None else parse_bytes(given)
    except ValueError as error:
        raise CompressionError(f"{name}: {error}") from error


def machine_for(gpu: str | None, device: str, folder: Path) -> Machine:
    """The machine that is planned for.

    Args:
        gpu: a name that `foresight.machine` knows; None: this machine.
        device: what to run on here, "auto", "cpu" or "cuda".
        folder: on the disk that is measured, if nothing is known of this machine yet.

    Raises:
        CompressionError: an unknown name; no such device.
    """
    if gpu is not None:
        file = next((file for kind in ("cuda", "cpu") if (file := record_of(kind)).is_file()), None)
        return named_gpu(gpu, None if file is None else load_machine(file))
    kind = device_kind(device, remedy="name the one to plan for as gpu=..., e.g. gpu=rtx4090")
    file = record_of(kind)
    if file.is_file() and (known := load_machine(file)).is_complete:
        return known
    return probed(kind, folder)


def device_kind(device: str, key: str = "run_on", remedy: str = "") -> str:
    """What "auto" is here, given as `key`.

    Raises:
        CompressionError: no such device, or there is none.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise CompressionError(f"{key}={device} is not known; use auto, cpu or cuda.")
    if device == "cuda" and not torch.cuda.is_available():
        raise CompressionError(f"There is no CUDA device here; {remedy or f'use {key}=cpu'}.")
    return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def record_of(kind: str) -> Path:
    """Where what was measured of this host is kept; with each of its kinds of GPU by itself."""
    if kind == "cpu" or not torch.cuda.is_available():
        return cache_file(kind)
    card = torch.cuda.get_device_properties(torch.cuda.current_device())
    return cache_file(f"{kind}-{re.sub('[^0-9A-Za-z]+', '-', card.name)}-{card.total_memory >> 20}")


def probed(kind: str, folder: Path) -> Machine:
    """Measure this machine, and keep it for later plans.

    Raises:
        CompressionError: the folder cannot be written to.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    existing = nearest_existing(folder)
    try:
        found = probe(device, existing)
        save_machine(found, record_of(kind))
    except OSError as error:
        raise CompressionError(f"This machine could not be measured in {existing}: {error}") from error
    return found
