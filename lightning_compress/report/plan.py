"""A plan as tables and lines; what became of it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from lightning_compress.foresight.compare import Compared
from lightning_compress.foresight.machine import UNITS, UNITS_OF_PLANS, Machine
from lightning_compress.foresight.plan import Plan
from lightning_compress.foresight.planned import CONTEXT, FRAGMENTED, Planned
from lightning_compress.memory.budget import RESERVE, gib


def plan_lines(planned: Planned) -> list[str]:
    """The plan in words: what to do, how long it takes, what would help."""
    plan, situation = planned.best, planned.situation
    given = {"device": situation.device, "host": situation.host, "disk": situation.disk}
    sizes = {place: size * (situation.together if place == "host" else 1) for place, size in plan.peaks.items()}
    most = [
        f"{place} {gib(size)}" + (f" of {gib(limit)}" if (limit := given.get(place)) is not None else "")
        for place, size in sizes.items()
    ]
    lanes = ", ".join(f"{lane} {seconds:.1f}" for lane, seconds in sorted(plan.lanes.items(), key=lambda x: -x[1]))
    lines = [
        f"plan: {described(plan)}",
        f"foreseen: {minutes(plan.total_s)}: {plan.load_s:.1f} s reading weights before, {plan.prepare_s:.1f} s "
        f"preparing, {plan.loop_s:.1f} s for {len(plan.subgraphs)} subgraphs, {plan.finish_s:.1f} s finishing",
        f"peaks: {', '.join(most)}",
        f"bottleneck: {plan.bottleneck}; lanes are busy for (s): {lanes}",
    ]
    lines += _tight(plan, situation.resources.host, planned.machine.device)
    lines += saved_lines(planned.saved_s, plan.total_s, "{:.1f} s")
    lines.append(
        f"{planned.num_fitting} of {planned.num_candidates} ways to run fit; planned in {planned.planning_s:.1f} s. "
        "Not foreseen: ranks that wait for one another, samples shorter than the longest"
    )
    if planned.machine.device == "cuda":
        lines.append(context_line())
    return lines


def saved_lines(saved_s: Mapping[str, float], all_s: float, told: str) -> list[str]:
    """What one more GiB of each place would save of so many seconds.

    >>> saved_lines({"device": 2.0, "host": 0.1}, 60, "{:.1f} s"), saved_lines({"host": 0.1}, 60, "{:.1f} s")
    (['1 GiB more of device would save 2.0 s'], ['1 GiB more of any place would save nothing worth mentioning'])
    """
    worth = {place: seconds for place, seconds in saved_s.items() if seconds > 0.005 * all_s}
    if saved_s and not worth:
        return ["1 GiB more of any place would save nothing worth mentioning"]
    return [f"1 GiB more of {place} would save {told.format(seconds)}" for place, seconds in worth.items()]


def _tight(plan: Plan, host: int | None, device: str) -> list[str]:
    """What there is no room for beside tensors."""
    held = max(part.peaks["host"].get("held", 0) for part in plan.subgraphs)
    if device != "cpu" and host is not None and held + (1 + RESERVE) * (plan.peaks["host"] - held) > host:
        return [
            f"host memory is tight: a process may take {RESERVE:.0%} more than its tensors; there is no room for it"
        ]
    seconds = plan.lanes.get("mapping", 0.0)
    if seconds:
        return [f"host memory is tight: to give back what batches free, and map it anew, takes {seconds:.1f} s"]
    return []


def context_line() -> str:
    """What is taken off a card before tensors."""
    return (
        f"a GPU's context is assumed to take {CONTEXT >> 20} MiB, and its allocator {FRAGMENTED:.0%} more than tensors"
    )


def described(plan: Plan) -> str:
    """Its choices in words."""
    choice, waiting = plan.choice, plan.waiting
    where = []
    if waiting.device is None or waiting.device:
        where.append("all on the device" if waiting.device is None else f"{gib(waiting.device)} on the device")
    where.append(
        "in host memory" if waiting.host is None else f"{gib(waiting.host)} in host memory, the rest in a file"
    )
    targets = (
        "" if choice.sequential_targets is None else f", sequential targets {', '.join(choice.sequential_targets)}"
    )
    targets += f", experts of a layer in {choice.expert_parts} parts" if choice.expert_parts > 1 else ""
    return (
        f"schedule {choice.schedule}, batch size {choice.batch_size}, prefetch depth {choice.prefetch_depth}, weights "
        f"from {choice.load}, activations {', then '.join(where)}{targets}"
    )


def runners_up_table(planned: Planned) -> Table:
    """The plan and those that come next."""
    table = Table(title="the plan, and those behind it", box=box.SIMPLE, title_justify="left")
    table.add_column("schedule", no_wrap=True)
    for column in ("batch", "depth", "weights from", "seconds", "device GiB", "host GiB", "disk GiB"):
        table.add_column(column, justify="left" if column == "weights from" else "right")
    for plan in (planned.best, *planned.runners_up):
        choice = plan.choice
        sizes = [f"{plan.peaks[place] / 2**30:.2f}" if place in plan.peaks else "-" for place in _PLACES]
        row = (choice.schedule, str(choice.batch_size), str(choice.prefetch_depth), choice.load)
        table.add_row(*row, f"{plan.total_s:.1f}", *sizes)
    return table


def save_plain(planned: Any, file: Path) -> None:
    """Write a plan of another job as JSON; sizes are bytes.

    Raises:
        OSError: it cannot be written.
    """
    file.write_text(json.dumps(asdict(planned), indent=2) + "\n", encoding="utf-8")


_PLACES = ("device", "host", "disk")


def machine_table(machine: Machine) -> Table:
    """Every rate, and whether it was measured, cached, assumed or refitted."""
    table = Table(title=f"rates of {machine.name} ({machine.device})", box=box.SIMPLE, title_justify="left")
    for column in ("rate", "value", "unit", "origin"):
        table.add_column(column, justify="right" if column == "value" else "left")
    units = {**UNITS, **UNITS_OF_PLANS}
    for kind, rate in machine.rates.items():
        table.add_row(kind, f"{rate.value:.3g}", units[kind.partition(" ")[0]], rate.origin)
    return table


def comparison_lines(rows: Sequence[Compared]) -> list[str]:
    """A line per phase, place and lane.

    >>> comparison_lines([Compared("run", "s", 1.1, 1.0)])
    ['run: 1.1 s foreseen, 1.0 s measured (+10%)']
    """
    return [
        f"{row.name}: {amount(row, row.foreseen)} foreseen, {amount(row, row.measured)} measured ({row.error:+.0%})"
        for row in rows
        if row.measured
    ]


def amount(row: Compared, value: float) -> str:
    """A figure with its unit."""
    return f"{value:.1f} s" if row.unit == "s" else gib(int(value))


def minutes(seconds: float) -> str:
    """
    >>> minutes(59.3), minutes(4000)
    ('59.3 s', '1 h 07 min')
    """
    if seconds < 120:
        return f"{seconds:.1f} s"
    hours, rest = divmod(round(seconds / 60), 60)
    return f"{hours} h {rest:02d} min" if hours else f"{rest} min"
