"""What a plan foresaw and what a run took, phase by phase; and rates that would have foreseen it."""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, final

from lightning_compress.errors import CompressionError
from lightning_compress.foresight.plan import Foreseen, Plan

PHASES = ("onload_s", "run_s", "solve_s", "write_s")
_FAMILIES = {
    "run_s": ("product", "attention", "elementwise", "call", "mapping"),
    "solve_s": ("solve", "packing"),
    "write_s": ("writing",),
}
"""Of each phase the rates that its seconds come from."""
_LEAST_S = 0.5
"""Seconds of a phase, in all runs together, below which they are of what no rate is of, as of opening files."""


@final
@dataclass(frozen=True)
class Compared:
    """A figure of a plan and of the run. `unit` is s or B."""

    name: str
    unit: Literal["s", "B"]
    foreseen: float
    measured: float

    @property
    def error(self) -> float:
        """Of the plan, signed, relative to what was measured.

        >>> Compared("run", "s", 1.5, 1.0).error
        0.5
        """
        return self.foreseen / self.measured - 1 if self.measured else math.inf if self.foreseen else 0.0


def compared(plan: Plan, subgraphs: Sequence[Mapping[str, Any]], prepare_s: float, device: str) -> list[Compared]:
    """Seconds of each phase, the peak of memory, and bytes of each lane.

    Args:
        plan: what was foreseen.
        subgraphs: the run's records, as plain data (see `SubgraphRecord`).
        prepare_s: what preparing it took.
        device: "cpu" or "cuda".
    """
    ran = [part for part, _ in _pairs(plan, subgraphs)]
    rows = [Compared("prepare", "s", plan.prepare_s, prepare_s)]
    for phase in PHASES:
        foreseen = sum(getattr(part, phase) for part in ran)
        rows.append(Compared(phase.removesuffix("_s"), "s", foreseen, sum(part[phase] for part in subgraphs)))
    rows.append(Compared("all subgraphs", "s", *(sum(getattr(row, at) for row in rows[1:]) for at in _SIDES)))
    place = "host" if device == "cpu" else "device"
    peak = max(sum(part.peaks[place].values()) for part in ran)
    rows.append(Compared(f"peak of the {place}", "B", peak, max(part["peak_bytes"] for part in subgraphs)))
    for lane in ("disk_read", "disk_write", "to_device", "to_host"):
        foreseen = sum(part.moved_bytes.get(lane, 0) for part in ran)
        measured = sum(part["moved_bytes"].get(lane, 0) for part in subgraphs)
        if foreseen or measured:
            rows.append(Compared(lane, "B", foreseen, measured))
    return rows


_SIDES = ("foreseen", "measured")


def _pairs(plan: Plan, subgraphs: Sequence[Mapping[str, Any]]) -> list[tuple[Foreseen, Mapping[str, Any]]]:
    """What was foreseen of each subgraph that ran, and its record. Layers that are called several times are as many
    subgraphs of one name, in order."""
    left: dict[str, deque[Mapping[str, Any]]] = {}
    for record in subgraphs:
        left.setdefault(record["name"], deque()).append(record)
    return [(part, left[part.name].popleft()) for part in plan.subgraphs if left.get(part.name)]


def factors(
    reports: Iterable[tuple[Plan, Sequence[Mapping[str, Any]]]], rates: Mapping[str, float]
) -> tuple[dict[str, float], list[str]]:
    """How many times longer than with these rates each family of them took, over all runs together; and the phases of
    which nothing is said because they took, or were to take, too little in all, with their seconds.

    Args:
        reports: of each run its plan, and records as plain data.
        rates: of the machine as it is known now; a plan's seconds come from those that it had.

    Raises:
        CompressionError: no run took any time in any phase, or enough in one.
    """
    foreseen, measured = dict.fromkeys(_FAMILIES, 0.0), dict.fromkeys(_FAMILIES, 0.0)
    for plan, subgraphs in reports:
        for part, record in _pairs(plan, subgraphs):
            for phase in _FAMILIES:
                if phase == "solve_s" and "to_device" in plan.rates:
                    continue  # a GPU's solves are calls and products
                if phase == "run_s" and part.lanes.get("compute", 0.0) < 0.9 * part.run_s:
                    continue  # it waited for another lane
                foreseen[phase] += getattr(part, phase) * _slower(plan, rates, phase)
                measured[phase] += record[phase]
    took = [phase for phase in _FAMILIES if foreseen[phase] > 0 and measured[phase] > 0]
    if not took:
        raise CompressionError("These reports hold no run of a plan, so there is nothing to learn from.")
    short = [phase for phase in took if min(foreseen[phase], measured[phase]) < _LEAST_S]
    left = [
        f"{phase.removesuffix('_s')} ({foreseen[phase]:.2g} s foreseen, {measured[phase]:.2g} s measured)"
        for phase in short
    ]
    if short == took:
        raise CompressionError(
            f"These runs are too short to learn from: {', '.join(left)} in all, and {_LEAST_S} s are the least. Give "
            "reports of longer ones."
        )
    learned = [phase for phase in took if phase not in short]
    return {family: measured[phase] / foreseen[phase] for phase in learned for family in _FAMILIES[phase]}, left


def _slower(plan: Plan, rates: Mapping[str, float], phase: str) -> float:
    """How many times longer a phase of a plan would take with other rates."""
    names = (name for name in rates if name.partition(" ")[0] in _FAMILIES[phase] and name in plan.rates)
    times = [plan.rates[name] / rates[name] for name in names]
    return median(times) if times else 1.0
