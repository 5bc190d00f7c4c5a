"""Where activations wait, and how fast a calibration is then: a linear programme per way to run it.

After FlexGen's policy search (arXiv 2303.06865, section 4): seconds are the most that any lane takes (computing, the
disk, the link), memory bounds what may wait where, and what is discrete (batch size, schedule, prefetch depth, where
weights come from) is enumerated outside. What differs: a calibration comes by every weight once, so weights that wait
in a faster place than they come from would serve nobody, and where they come from is enumerated too; activations wait
in bytes, not in fractions, because the cache fills one place after the other (`memory.activations`).

For a subgraph's moments m with w bytes that may wait, of them g on the device, c in host memory and s in the file:

    g + c + s = w          g <= B_g, c <= B_c           (the same budgets for all moments)
    device: rest_m + g <= device budget                 host: rest_m + c <= host budget
    disk:   s <= what is left beside the checkpoint

and for its steps, with computing seconds C, and bytes L loaded and S stored, each in proportion to what waits where:

    r >= C;   link: r >= (1 - g/w) L/h2d, (1 - g/w) S/d2h, (1 - g/w) (L + S)/duplex;   file: r >= s/w (L/read + S/write)
    on a CPU, whose cores copy what goes to the file and comes from it: r >= C + s/w (L + S)/copied
    depth >= 1: t >= sum r + solve, t >= next weights/read + file's seconds, t >= (next weights + loaded)/h2d
    depth  = 0: t  = sum r + solve + weights/read + weights/h2d

On a CPU rest_m has what a process takes beyond its tensors (see `memory.budget.Spare`). That is tried twice: with all
that the C heap keeps free, a fraction k of what a run has in it, so c counts (1 + k) times; and with the least, where
what the heap gives back has to be mapped again, which is counted when the programme is solved.

On the host of a GPU what waits there is pinned, once: seconds of the moment with the most.

All activations in memory is a programme of its own (no s, and nothing on its way to the file). So is, on a GPU, every
level of w up to which all wait there (B_g is w or more): at such moments nothing is on its way, and nothing waits in
host memory, which no bound on B_g and B_c alone would say. Subgraphs that are alike share their variables. The least
time has many solutions where computing is the longest lane, so a second programme minimizes the seconds of file and
link within half a percent of it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf

import torch

from lightning_compress.foresight.linear import LinearProgramme
from lightning_compress.foresight.machine import Machine
from lightning_compress.foresight.plan import (
    Candidate,
    Choice,
    Lanes,
    Plan,
    Resources,
    bringing,
    foreseen,
    peaks_of,
    seconds_of,
)
from lightning_compress.memory.budget import KEPT_FREE, Budgets, Place, Spare, rounding, swing, with_reserve
from lightning_compress.memory.needs import Moment, Needs, Waiting

SLACK = 1.005
"""How much longer than the least a plan may take to spare the disk and the link."""
_AS_FAST = 1.01
"""Likewise, to bring fewer weights ahead: what reads them beside the run takes its cores and caches, which no lane has
(1 to 8 % of streamed runs on two cores, whose weights were in the page cache)."""

_NEARLY_AS_FAST = 1.05
"""Candidates whose rough plans take longer than so many times the fastest one's are left with those."""


def plans(candidates: Sequence[Candidate], machine: Machine, resources: Resources) -> list[Plan]:
    """The best plan of each candidate that fits, the fastest first."""
    rough = [best(each, machine, resources, rough=True) for each in candidates]
    least = min((plan.total_s for plan in rough if plan is not None), default=inf)
    pairs = zip(candidates, rough, strict=True)
    found = [_refined(each, plan, least, machine, resources) for each, plan in pairs]
    return sorted((plan for plan in found if plan is not None), key=lambda plan: plan.total_s)


def _refined(
    candidate: Candidate, rough: Plan | None, least: float, machine: Machine, resources: Resources
) -> Plan | None:
    """A candidate's best plan if it may be the fastest of all, where `least` is what the fastest rough one takes."""
    is_slow = rough is not None and rough.total_s > _NEARLY_AS_FAST * least
    if machine.device == "cpu":  # where nothing waits on a device, and a rough plan is the best one
        return rough
    if is_slow or _bound_s(candidate, machine, resources) >= least:
        return rough
    return best(candidate, machine, resources)


def simplest_first(found: Sequence[Plan]) -> list[Plan]:
    """Plans, the fastest first, with that in front which of all that are as fast brings the fewest weights ahead."""
    as_fast = [plan for plan in found if plan.total_s <= _AS_FAST * found[0].total_s]
    first = min(as_fast, key=lambda plan: plan.choice.prefetch_depth)
    return [first, *(plan for plan in found if plan is not first)]


def least_s(candidates: Sequence[Candidate], machine: Machine, resources: Resources, known: float = inf) -> float:
    """Seconds of the fastest plan of all, or of one that is `known`; infinite where none fits. Candidates that could
    not be faster, whatever there is of memory, are not tried."""
    least, tried = known, list[tuple[Candidate, Plan | None]]()
    for bound, number in sorted((_bound_s(each, machine, resources), i) for i, each in enumerate(candidates)):
        if bound >= least:
            break
        plan = best(candidates[number], machine, resources, rough=True)
        tried.append((candidates[number], plan))
        least = min(least, plan.total_s) if plan is not None else least
    found = [_refined(each, plan, least, machine, resources) for each, plan in tried]
    return min((known, *(plan.total_s for plan in found if plan is not None)))


def could_use_more(candidate: Candidate, machine: Machine, resources: Resources, place: str) -> bool:
    """Whether there is less of a place than a candidate takes with all that can wait there: else more changes
    nothing."""
    if place == "disk":
        most = candidate.output_bytes + resources.ranks * _most_waiting(candidate)
        return resources.disk is not None and most > resources.disk
    device = torch.device(machine.device)
    reserved = with_reserve(Budgets(resources.host, candidate.held), device).host
    limit = reserved if place == "host" else resources.device
    everything = Waiting(0 if place == "host" else None, None)
    taken = peaks_of(candidate, machine, "host" if place == "host" else "device", everything, "kept")
    beyond = swing(_rows(candidate)) if machine.device == "cpu" else 0
    return limit is not None and max(peak.num_bytes for peak in taken) + beyond > limit


def best(candidate: Candidate, machine: Machine, resources: Resources, rough: bool = False) -> Plan | None:
    """The best plan of a candidate; None if it does not fit. A rough one is found in a fraction of the time, with room
    for values on their way at all moments.

    Room is left for what a process takes beside its tensors, unless that is what it fails for. On a CPU it is worth
    trying to leave all that the heap keeps: less costs seconds, as does what waits in a file instead.
    """
    device = torch.device(machine.device)
    reserved = replace(resources, host=with_reserve(Budgets(resources.host, candidate.held), device).host)
    spares: tuple[Spare, ...] = ("kept", "least") if machine.device == "cpu" else ("none",)
    levels = [0] if rough else _levels(candidate, machine)
    found = _best(candidate, machine, reserved, spares, levels)
    return found or _best(candidate, machine, resources, ("none",), levels)


def smallest(candidates: Sequence[Candidate], machine: Machine) -> dict[Place, tuple[Choice, int]]:
    """For each place the candidate that needs least of it, and how much that is: with all activations in the file, or
    where nothing is on its way there, which of few batches may take more than waits."""
    places: tuple[Place, ...] = ("host",) if machine.device == "cpu" else ("device", "host")
    found: dict[Place, tuple[Choice, int]] = {}
    for place in places:
        least = [
            min(
                max(peak.num_bytes for peak in peaks_of(each, machine, place, waiting))
                for waiting in _plainest(each, machine)
            )
            for each in candidates
        ]
        number = least.index(min(least))
        found[place] = candidates[number].choice, least[number]
    return found


def _plainest(candidate: Candidate, machine: Machine) -> list[Waiting]:
    """Everything in the file, and every way in which some moments have nothing on its way there."""
    in_memory = [] if machine.device == "cuda" else [Waiting(0, None)]
    return [*(Waiting(level, 0) for level in _levels(candidate, machine)), *in_memory]


def _levels(candidate: Candidate, machine: Machine) -> list[int]:
    """Bytes that are to be able to wait on the device, at least: nothing, or all that waits at some moments."""
    if machine.device == "cpu":
        return [0]
    return sorted({0, *(moment.waiting for row in _rows(candidate) for moment in row.moments)})


def _best(
    candidate: Candidate, machine: Machine, resources: Resources, spares: Sequence[Spare], levels: Sequence[int]
) -> Plan | None:
    found: list[Plan] = []
    bound = _bound_s(candidate, machine, resources)
    ways = product(spares, levels, (False, True))
    for spare, level, spills in ways:
        if spills and level == _most_waiting(candidate) > 0:
            continue  # nothing is left for the file
        waiting = _solved(candidate, machine, resources, spills, spare, level)
        if waiting is not None:
            plan = foreseen(candidate, machine, waiting, resources.ranks, resources.host)
            found.append(plan)
            if plan.total_s <= bound:
                break
    return min(found, key=lambda plan: plan.total_s, default=None)


def _bound_s(candidate: Candidate, machine: Machine, resources: Resources) -> float:
    """Seconds with all activations in the fastest place and a heap without limits: no plan takes less."""
    most = _most_waiting(candidate) if machine.device == "cuda" else 0
    return foreseen(candidate, machine, Waiting(most, None), resources.ranks).total_s


def _most_waiting(candidate: Candidate) -> int:
    return max((moment.waiting for row in _rows(candidate) for moment in row.moments), default=0)


def _rows(candidate: Candidate) -> list[Needs]:
    """Those that are like none before them."""
    return [candidate.rows[number] for number in candidate.distinct]


def _solved(
    candidate: Candidate, machine: Machine, resources: Resources, spills: bool, spare: Spare, level: int = 0
) -> Waiting | None:
    """The budgets of activations that make the run fastest, with `level` on the device at least; None if it does not
    fit."""
    programme = LinearProgramme()
    most = _most_waiting(candidate)
    on_device = programme.variable(most if machine.device == "cuda" else 0)
    budgets = _Budgets(on_device, programme.variable(most), most if spills else 0, level)
    programme.at_most({on_device: -1}, -level)
    if not _bound(programme, budgets, candidate, machine, resources, spare):
        return None
    seconds: dict[int, float] = {}
    if machine.device == "cuda":
        seconds[_pinning(programme, budgets, candidate, machine)] = 1
    traffic: dict[int, float] = {}
    for number, count in _distinct(candidate):
        total, moved = _subgraph(programme, budgets, candidate, machine, resources, number)
        seconds[total] = count
        traffic |= {variable: factor * count for variable, factor in moved.items()}
    first = programme.minimized(seconds)
    if first is None:
        return None
    programme.at_most(seconds, SLACK * first.cost)
    second = programme.minimized(traffic) or first
    device, host = (int(second.values[budget] + 0.5) for budget in (budgets.device, budgets.host))
    return Waiting(max(device, level), host if spills else None)


def _pinning(programme: LinearProgramme, budgets: "_Budgets", candidate: Candidate, machine: Machine) -> int:
    """The variable of the seconds in which host memory is pinned, once: that of the moment which needs the most."""
    pinning, rate = programme.variable(), machine.rate("pinning")
    ratio = rounding(_rows(candidate), torch.device(machine.device))
    found = peaks_of(candidate, machine, "host", Waiting(budgets.level, 0))
    names = ("weights", "prefetch", "waiting", "in_flight")
    others = [sum(peak.parts.get(each, 0) for each in names) for peak in found]
    programme.at_most({pinning: -1}, -max(others) / rate)
    waits = {  # what waits somewhere else than on the device alone, and what there is in host memory beside it
        number: peak.moment.waiting for number, peak in enumerate(found) if peak.moment.waiting > budgets.level
    }
    if waits and budgets.file:
        beside = max(others[number] for number, waiting in waits.items() if waiting == max(waits.values()))
        programme.at_most({pinning: -1, budgets.host: ratio / rate}, -beside / rate)
    elif waits:
        takes = max(others[number] + ratio * waiting for number, waiting in waits.items())
        programme.at_most({pinning: -1, budgets.device: -ratio / rate}, -takes / rate)
    return pinning


@dataclass(frozen=True)
class _Budgets:
    """The variables of what may wait on the device and in host memory, the bytes that may wait in the file, and those
    that are to be able to wait on the device at least."""

    device: int
    host: int
    file: int
    level: int


def _bound(
    programme: LinearProgramme,
    budgets: _Budgets,
    candidate: Candidate,
    machine: Machine,
    resources: Resources,
    spare: Spare,
) -> bool:
    """What every moment leaves of memory; beside what waits in the heap, that keeps a part free. Whether it fits with
    everything elsewhere but what is to be on the device."""
    moments = [moment for row in _rows(candidate) for moment in row.moments if moment.waiting]
    in_heap = max((each.heap_waiting / each.waiting for each in moments), default=0.0)
    free = KEPT_FREE * in_heap if spare == "kept" else 0.0
    places: tuple[Place, ...] = ("host",) if machine.device == "cpu" else ("device", "host")
    for place in places:
        limit = resources.host if place == "host" else resources.device
        if limit is None:
            continue
        ratio = rounding(_rows(candidate), torch.device(machine.device)) if place == "host" else 1.0
        limit -= swing(_rows(candidate)) if spare == "kept" else 0  # beyond that the heap gives back what it has free
        for peak in peaks_of(candidate, machine, place, Waiting(budgets.level, 0 if budgets.file else None), spare):
            waits = peak.moment.waiting  # of which a byte takes `ratio`
            on_device, on_host, _ = Waiting(budgets.level, 0 if budgets.file else None).shares(waits)
            left = limit - peak.num_bytes + (on_device if place == "device" else int(ratio * on_host))
            all_wait_here = place == "host" and not budgets.file
            keeps = free if place == "host" and budgets.file else 0.0
            if left < (on_device if place == "device" else 0):
                return False
            if budgets.level and waits <= budgets.level:
                continue  # all of it on the device
            if all_wait_here and ratio * waits > left:
                programme.at_most({budgets.device: -ratio}, left - ratio * waits)
            elif not all_wait_here and (ratio + keeps) * waits > left:
                of_budget = budgets.device if place == "device" else budgets.host
                programme.at_most({of_budget: ratio + keeps}, left)
            elif keeps:  # for what waits at other moments
                programme.at_most({budgets.host: keeps}, left - waits)
    return True


def _distinct(candidate: Candidate) -> list[tuple[int, int]]:
    """The number of the first subgraph of every kind, and how many there are of it."""
    last = len(candidate.table) - 1
    kinds = [(kind, number == 0, number == last) for number, kind in enumerate(candidate.alike[: last + 1])]
    return [(kinds.index(kind), number) for kind, number in Counter(kinds).items()]


def _subgraph(
    programme: LinearProgramme,
    budgets: _Budgets,
    candidate: Candidate,
    machine: Machine,
    resources: Resources,
    number: int,
) -> tuple[int, dict[int, float]]:
    """The variable of a subgraph's seconds, and those of the seconds that its values are moved for."""
    row, depth = candidate.table[number], candidate.choice.prefetch_depth
    total, solve_s = programme.variable(), seconds_of(row, "solve", machine)
    running: dict[int, float] = {}
    file: dict[int, float] = {}
    link: dict[int, float] = {}
    link_s = 0.0
    for moment in row.moments:
        on_device, in_file = _place(programme, budgets, moment)
        if resources.disk is not None:
            left = resources.disk - candidate.output_bytes
            programme.at_most({in_file: resources.ranks}, left)
        if moment.what != "batch":
            continue
        alone = Lanes(moment, Waiting(0, None), machine, resources.ranks)
        spilled = Lanes(moment, Waiting(0, 0), machine, resources.ranks)
        step = programme.variable()
        running[step] = 1
        programme.at_most({step: -1, in_file: spilled.copying / max(moment.waiting, 1)}, -alone.compute)
        per_byte = spilled.file / max(moment.waiting, 1)
        file[in_file] = per_byte
        programme.at_most({step: -1, in_file: per_byte}, 0)
        for seconds in (alone.up, alone.down, alone.duplex):
            programme.at_most({step: -1, on_device: -seconds / max(moment.waiting, 1)}, -seconds)
        link[on_device] = alone.up / max(moment.waiting, 1)
        link_s += alone.up
    brought = sum(bringing(candidate, row, machine)) if depth == 0 or number == 0 else 0.0
    programme.at_most({total: -1, **running}, -solve_s - brought)
    if depth and number + 1 < len(candidate.table):
        read_s, send_s = bringing(candidate, candidate.table[number + 1], machine)
        programme.at_most({total: -1, **file}, -read_s - brought)
        programme.at_most(
            {total: -1, **{variable: -factor for variable, factor in link.items()}}, -send_s - link_s - brought
        )
    return total, {**file, **{variable: -factor / 10 for variable, factor in link.items()}}


def _place(programme: LinearProgramme, budgets: _Budgets, moment: Moment) -> tuple[int, int]:
    """The variables of what waits on the device and in the file, of the values that wait in a moment."""
    on_device, on_host = programme.variable(moment.waiting), programme.variable(moment.waiting)
    in_file = programme.variable(min(moment.waiting, budgets.file))
    programme.at_most({on_device: -1, on_host: -1, in_file: -1}, -moment.waiting)
    programme.at_most({on_device: 1, budgets.device: -1}, 0)
    programme.at_most({on_host: 1, budgets.host: -1}, 0)
    return on_device, in_file
