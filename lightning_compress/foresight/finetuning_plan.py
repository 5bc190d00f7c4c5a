"""The fastest way to fine-tune on several ranks within what there is: every way is foreseen, those that fit compete.

Method: what is discrete is enumerated, and nothing is continuous here: layouts of the ranks, micro-batches that divide
a replica's batch (their number per step follows), gradient checkpointing. `finetuning_cost` says what each takes. The
batch per step stays as the user has it, so all ways do the same training.

Not enumerated, as it makes no sense or nobody has it: ZeRO without another replica, but for offloading (ZeRO-Offload on
one GPU), where stage 3 would be stage 2; ZeRO-1 where the optimizer has no state; offloading of 8-bit optimizers, and
tensor parallelism of 4-bit layers, which bitsandbytes does not have; pipelines with ZeRO-2 or 3, which DeepSpeed
refuses (gradients would be divided anew for every micro-batch), or with offloading.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import final

from lightning_compress.errors import BudgetError
from lightning_compress.foresight.finetuning_cost import FineTuningTask, MicroBatch, Step, foreseen
from lightning_compress.foresight.jobs import FineTuningJob
from lightning_compress.foresight.layouts import Layout, worst_shares
from lightning_compress.foresight.machine import Machine
from lightning_compress.foresight.planned import device_to_give
from lightning_compress.memory.budget import Place, gib

GIB = 1 << 30
Budget = Mapping[Place, int | None]
"""Bytes that tensors of a rank may take of its device, and those of all ranks of host memory; None: no limit."""


@final
@dataclass(frozen=True)
class PlannedFineTuning:
    """A way to fine-tune, and what it was chosen from.

    Attributes:
        model: class of the model.
        num_parameters, itemsize: of it, and bytes of each.
        job: that was asked for; its batch size and accumulation say the batch per step only.
        task: what is the same for all ways.
        machine: whose rates were used.
        budgets: of places.
        best: the fastest way that fits.
        runners_up: the fastest of other kinds (layout and checkpointing).
        saved_s: seconds of a step that one GiB more of each place would save, whatever is chosen then.
        num_ways, num_fitting: that were looked at, and that fit.
        planning_s: how long planning took.
        note: what else there is to say.
    """

    model: str
    num_parameters: int
    itemsize: int
    job: FineTuningJob
    task: FineTuningTask
    machine: Machine
    budgets: Budget
    best: Step
    runners_up: tuple[Step, ...]
    saved_s: Mapping[Place, float]
    num_ways: int
    num_fitting: int
    planning_s: float
    note: str = ""


def layouts(
    ranks: int, heads: int | None, layers: int | None, job: FineTuningJob, fixed: Mapping[str, int | bool]
) -> list[Layout]:
    """How ranks can share a job.

    Args:
        ranks: of all.
        heads: that tensor ranks divide among them evenly; None: not known, so nothing is divided so.
        layers: that stages of a pipeline divide; likewise.
        job: what is trained how.
        fixed: values of a layout's fields.

    >>> [str(layout.zero) for layout in layouts(2, None, None, FineTuningJob(optimizer="sgd"), {"offload": False})]
    ['0', '2', '3']
    """
    widths = [2**power for power in range(ranks.bit_length()) if ranks % 2**power == 0]
    tensors = _dividing(widths, heads)
    found = [
        Layout(data=ranks // (tensor * pipeline), zero=zero, offload=offload, tensor=tensor, pipeline=pipeline)
        for tensor, pipeline in product(tensors, _dividing(widths, layers))
        if ranks % (tensor * pipeline) == 0
        for zero, offload in product(range(4), (False, True))
        if zero or not offload
    ]
    fitting = [layout for layout in found if not nobody_has(layout, job)]
    return [layout for layout in fitting if all(getattr(layout, name) == value for name, value in fixed.items())]


def _dividing(widths: Sequence[int], count: int | None) -> list[int]:
    return [width for width in widths if width == 1 or (count is not None and count % width == 0)]


def nobody_has(layout: Layout, job: FineTuningJob) -> str:
    """Why there is no such way to fine-tune, or no sense in it; "" where there is.

    >>> nobody_has(Layout(data=2, zero=3, pipeline=2), FineTuningJob())
    'pipelines are not combined with ZeRO-2, ZeRO-3 or offloading, which DeepSpeed refuses'
    """
    zero, offload = layout.zero, layout.offload
    if layout.tensor > 1 and job.method == "qlora":
        return "bitsandbytes has no tensor ranks of 4-bit layers"
    if layout.pipeline > 1 and (offload or zero > 1):
        return "pipelines are not combined with ZeRO-2, ZeRO-3 or offloading, which DeepSpeed refuses"
    if offload and job.optimizer == "adamw_8bit":
        return "bitsandbytes has no 8-bit optimizer whose states are offloaded"
    if zero and layout.data == 1 and (not offload or zero == 3):
        return "ZeRO divides among replicas, of which there is one; with offloading its stages 1 and 2 work on one"
    if zero == 1 and job.optimizer == "sgd":
        return "ZeRO-1 divides the optimizer's states, of which SGD has none"
    return ""


def micro_batch_sizes(batch: int, among: Iterable[Layout]) -> list[int]:
    """Those that divide some layout's batch per replica, in ascending order.

    >>> micro_batch_sizes(12, [Layout(data=2)])
    [1, 2, 3, 6]
    """
    shares = {batch // layout.data for layout in among}
    return [size for size in range(1, batch + 1) if any(share % size == 0 for share in shares)]


def rehearsed(
    sizes: Sequence[int],
    checkpoints: Collection[bool],
    among: Sequence[Layout],
    task: FineTuningTask,
    room: int | None,
    run: Callable[[int, bool, int], MicroBatch],
) -> list[MicroBatch]:
    """Run micro-batches on fake tensors, once each, until they are too large for every layout.

    Args:
        sizes: in ascending order.
        checkpoints: with and without gradient checkpointing.
        among: layouts that may be taken.
        task: what is the same for all.
        room: bytes of a device that may be had; None: no limit.
        run: of a size, with checkpointing or not, in a step with so many of them.
    """
    found: list[MicroBatch] = []
    for checkpointing in sorted(checkpoints):
        for size in sizes:
            dividing = [layout for layout in among if task.batch // layout.data % size == 0]
            most = max(task.batch // layout.data // size for layout in dividing)
            found.append(run(size, checkpointing, most))
            if room is not None and not any(_least(task, found[-1], layout) <= room for layout in among):
                break  # a larger one takes more of everything
    return found


def _least(task: FineTuningTask, micro: MicroBatch, layout: Layout) -> int:
    """Bytes of a device without accumulation, so that no larger micro-batch takes less."""
    shares = worst_shares(micro.rehearsal.alone, layout, task.largest_layer, task.stages.get(layout.pipeline))
    return max(share.peak for share, _ in shares.values())


def ways(task: FineTuningTask, found: Sequence[MicroBatch], among: Sequence[Layout], machine: Machine) -> list[Step]:
    """Every way to do a step, the fastest first; of those as fast, the one that takes least of the device."""
    steps = [
        foreseen(task, micro, layout, machine)
        for micro in found
        for layout in among
        if task.batch // layout.data % micro.size == 0
    ]
    return sorted(steps, key=lambda step: (step.seconds, step.peaks["device"], step.peaks["host"]))


def fits(step: Step, budgets: Budget) -> bool:
    """Within all of them."""
    return all(limit is None or step.peaks[place] <= limit for place, limit in budgets.items())


def fastest(steps: Sequence[Step], budgets: Budget) -> tuple[Step, tuple[Step, ...], dict[Place, float]]:
    """The first that fits, the first ones of other kinds behind it, and seconds that a GiB more of a place would save.

    Args:
        steps: in ascending order of seconds.
        budgets: of places.

    Raises:
        BudgetError: nothing fits; says the smallest budgets that would do.
    """
    fitting = [step for step in steps if fits(step, budgets)]
    if not fitting:
        raise BudgetError(_nothing_fits(steps, budgets))
    best = fitting[0]
    kinds: dict[tuple[Layout, bool], Step] = {}
    for step in fitting:
        kinds.setdefault((step.layout, step.checkpoints), step)
    saved: dict[Place, float] = {}
    for place, limit in budgets.items():
        if limit is not None:
            more = {**budgets, place: limit + GIB}
            saved[place] = best.seconds - next(step for step in steps if fits(step, more)).seconds
    return best, tuple(kinds.values())[1:6], saved


def described(step: Step) -> str:
    """Its choices in words.

    >>> described(Step(Layout(data=4, zero=2), 2, 8, True, 1.0, 1.0, {}, {}, {}, {}, {}, "step"))
    '4 replicas, ZeRO-2, micro-batches of 2, 8 per step, gradient checkpointing'
    """
    layout = step.layout
    words = [f"{layout.data} replicas" if layout.data > 1 else "1 replica"]
    words += [f"{layout.pipeline} pipeline stages each"] if layout.pipeline > 1 else []
    words += [f"{layout.tensor} tensor ranks each"] if layout.tensor > 1 else []
    words += [f"ZeRO-{layout.zero}{' with offload' if layout.offload else ''}"] if layout.zero else []
    words += [f"micro-batches of {step.micro_batch}", f"{step.accumulate} per step"]
    return ", ".join([*words, f"{'' if step.checkpoints else 'no '}gradient checkpointing"])


def _nothing_fits(steps: Sequence[Step], budgets: Budget) -> str:
    least = min(steps, key=lambda step: (step.peaks["device"], step.peaks["host"], step.seconds))
    alone = [_alone(steps, "device", "host", budgets), _alone(steps, "host", "device", budgets)]
    answers = [answer for answer in alone if answer is not None]
    if not fits(least, {"host": budgets["host"]}):
        answers.append(_told(least, ("device", "host")))
    given = ", ".join(f"{place}={gib(size)}" for place, size in budgets.items() if size is not None)
    return (
        f"No plan fits {given} for tensors: none of {len(steps)} ways to fine-tune. The smallest that could do, with "
        f"what is not named as it is: {'; or '.join(answers)}. Lower them by shorter samples (job.length), "
        "job.method=lora or qlora, job.optimizer=adamw_8bit, or more ranks."
    )


def _alone(steps: Sequence[Step], place: Place, other: Place, budgets: Budget) -> str | None:
    """The least of a place, with the other as it is; None: no amount would do."""
    left = [step for step in steps if fits(step, {other: budgets[other]})]
    return _told(min(left, key=lambda step: (step.peaks[place], step.seconds)), (place,)) if left else None


def _told(step: Step, places: Sequence[Place]) -> str:
    sizes = []
    for place in places:
        size = step.peaks[place]
        sizes.append(device_to_give(size) if place == "device" else f"{place}={size} ({gib(size)} for all ranks)")
    return f"{' and '.join(sizes)}, with {described(step)}"
