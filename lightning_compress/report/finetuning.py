"""A plan of fine-tuning as a table and lines."""

from collections.abc import Mapping

from rich import box
from rich.table import Table

from lightning_compress.foresight.closed_form import deepspeed
from lightning_compress.foresight.finetuning_cost import CPU_OPTIMIZER
from lightning_compress.foresight.finetuning_plan import PlannedFineTuning, described
from lightning_compress.foresight.layouts import HALF_PRECISION, is_halved
from lightning_compress.memory.budget import gib
from lightning_compress.report.plan import context_line, saved_lines

_MOST_PARTS = 3


def finetuning_lines(planned: PlannedFineTuning) -> list[str]:
    """The plan in words: what to do, how long a step takes, what would help."""
    best, task, job = planned.best, planned.task, planned.job
    lanes = ", ".join(f"{lane} {seconds:.3g}" for lane, seconds in sorted(best.lanes.items(), key=lambda x: -x[1]))
    parts = ", ".join(f"{name} {seconds:.3g}" for name, seconds in best.parts.items() if seconds)
    method = "all parameters" if job.method == "full" else job.method
    lines = [
        f"plan: {described(best)}",
        f"foreseen: {best.tokens_per_s:.3g} tokens/s; a step of {task.batch} sequences of {task.length} tokens "
        f"({method}, {job.optimizer}) takes {best.seconds:.3g} s: {parts}",
        f"device: {_place(planned, 'device')} in the {best.phase}: {_largest(best.device_parts)}",
    ]
    if best.peaks["host"]:
        lines.append(f"host, of all ranks: {_place(planned, 'host')}: {_largest(best.host_parts)}")
    lines.append(f"bottleneck: {best.bottleneck}; lanes are busy for (s): {lanes}")
    lines += saved_lines({str(place): s for place, s in planned.saved_s.items()}, best.seconds, "{:.3g} s of each step")
    lines.append(
        f"{planned.num_fitting} of {planned.num_ways} ways to fine-tune fit; planned in {planned.planning_s:.1f} s. "
        "Not foreseen: ranks that wait for one another, samples shorter than the longest, start-up times of collectives"
    )
    if planned.task.ranks > 1 and "between_ranks" not in planned.machine.rates:
        lines.append(
            "ranks are taken to talk over each card's link to the host; interconnect=300GB and the like says else"
        )
    if is_halved(job, planned.itemsize, [step.layout for step in (best, *planned.runners_up)]):
        lines.append(HALF_PRECISION)
        rule = deepspeed(planned.num_parameters, best.layout, task.largest_layer // planned.itemsize)
        lines += [f"DeepSpeed's rule for {name}, without activations: {gib(size)}" for name, size in rule.items()]
    if any(step.layout.offload for step in (best, *planned.runners_up)):
        lines.append(
            f"the CPU's optimizer is assumed to go over {CPU_OPTIMIZER / 1e9:.0f} GB/s, of all ranks together; steps "
            "with offload that were published took twice as long as foreseen (docs/finetuning_plan.md), and "
            "layout.offload=false plans without it"
        )
    return [*lines, *filter(None, [planned.note]), context_line()]


def finetuning_table(planned: PlannedFineTuning) -> Table:
    """The plan and those that come next, in 80 columns if need be."""
    table = Table(
        title="the plan, and the fastest of other kinds",
        box=box.SIMPLE,
        title_justify="left",
        padding=0,
    )
    numbers = ("data", "tensor", "stages", "micro-\nbatch", "per\nstep", "s per\nstep", "device\nGiB", "host\nGiB")
    for column in (*numbers[:3], "ZeRO", *numbers[3:5], "check-\npoints", *numbers[5:], "bottleneck"):
        is_last = column == "bottleneck"
        table.add_column(column, justify="right" if column in numbers else "left", no_wrap=not is_last, overflow="fold")
    for step in (planned.best, *planned.runners_up):
        layout = step.layout
        zero = f"{layout.zero}{', offload' if layout.offload else ''}" if layout.zero else "-"
        sizes = [f"{step.peaks[place] / 2**30:.2f}" for place in step.peaks]
        ranks = (str(layout.data), str(layout.tensor), str(layout.pipeline))
        counts = (*ranks, zero, str(step.micro_batch), str(step.accumulate))
        table.add_row(*counts, "yes" if step.checkpoints else "no", f"{step.seconds:.3g}", *sizes, step.bottleneck)
    return table


def _place(planned: PlannedFineTuning, place: str) -> str:
    limits = {str(name): limit for name, limit in planned.budgets.items()}
    sizes = {str(name): size for name, size in planned.best.peaks.items()}
    limit = limits[place]
    return gib(sizes[place]) + ("" if limit is None else f" of {gib(limit)}")


def _largest(parts: Mapping[str, int]) -> str:
    most = sorted(parts.items(), key=lambda part: -part[1])[:_MOST_PARTS]
    return ", ".join(f"{name} {gib(size)}" for name, size in most if size)
