"""A way to run a calibration, and what it takes: seconds per phase and lane, and bytes per place.

The seconds of a step are those of its longest lane: computing, the scratch file, the link in each direction and in
both. On a CPU what is read and written is copied by the cores that compute, so that much is added to these. Weights of
the next subgraph come while this one runs and is solved; what they are late then is waited for.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import final

import torch

from lightning_compress.foresight.machine import Machine
from lightning_compress.memory.budget import Budgets, Peak, Place, Spare, peaks, process_bytes
from lightning_compress.memory.needs import Moment, Needs, Waiting


@final
@dataclass(frozen=True)
class Choice:
    """What is enumerated.

    Attributes:
        load: where weights come from during the run: "memory" (read before it) or "disk".
    """

    batch_size: int
    schedule: str
    prefetch_depth: int
    load: str
    sequential_targets: tuple[str, ...] | None = None
    expert_parts: int = 1


@final
@dataclass(frozen=True)
class Candidate:
    """A way to run, measured on fake tensors.

    Attributes:
        table: of the subgraphs (see `calibration.footprint`), whose weights are those that have to be brought.
        end: what comes behind them.
        held: bytes of host memory that the process has before the run.
        prepare_s: until the first subgraph, without reading weights.
        read_bytes: of weights that are read before the run.
        output_bytes: of the checkpoint.
    """

    choice: Choice
    table: tuple[Needs, ...]
    end: tuple[Needs, ...]
    held: int
    prepare_s: float
    read_bytes: int
    output_bytes: int

    @cached_property
    def rows(self) -> tuple[Needs, ...]:
        """Of all that is done."""
        return (*self.table, *self.end)

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """For each row the number of the first one which takes the same, as do those that are brought beside it."""
        own = [(row.weights, row.requests.loaded, *map(_sizes, row.moments)) for row in self.rows]
        ahead = [
            tuple(each.weights for each in self.rows[n + 1 : n + 1 + self.choice.prefetch_depth])
            for n in range(len(own))
        ]
        first: dict[object, int] = {}
        return tuple(first.setdefault(key, number) for number, key in enumerate(zip(own, ahead, strict=True)))

    @cached_property
    def distinct(self) -> tuple[int, ...]:
        """The numbers of rows that are like none before them."""
        return tuple(dict.fromkeys(self.alike))


def _sizes(moment: Moment) -> tuple[object, ...]:
    """All of a moment but what it is about."""
    return tuple(
        tuple(sorted(moment.work.items())) if each.name == "work" else getattr(moment, each.name)
        for each in fields(moment)
        if each.name != "of"
    )


@final
@dataclass(frozen=True)
class Resources:
    """What there is for one rank, in bytes; None: no limit.

    Attributes:
        device: budget for tensors there.
        host: of the process, as `memory.host_budget`.
        disk: free, for the checkpoint and the scratch file.
        ranks: processes that share the host's disk.
    """

    device: int | None
    host: int | None
    disk: int | None
    ranks: int = 1


@final
@dataclass(frozen=True)
class Foreseen:
    """A subgraph of a plan: seconds per phase, and bytes per lane.

    Attributes:
        lanes: seconds that each lane is busy: `compute` (nodes), `solve`, `disk`, `to_device`, `to_host`, `writing`,
            `mapping` (of heap that was given back to the system; nothing else goes on meanwhile), `pinning` (of host
            memory for a GPU, likewise).
        moved_bytes: through each lane, as in `SubgraphRecord`.
        peaks: of each place the parts of its worst moment.
    """

    name: str
    onload_s: float
    run_s: float
    solve_s: float
    write_s: float
    lanes: Mapping[str, float]
    moved_bytes: Mapping[str, int]
    peaks: Mapping[str, Mapping[str, int]]


@final
@dataclass(frozen=True)
class Plan:
    """How to run, and what that takes.

    Attributes:
        choice: of what is enumerated.
        waiting: budgets of activations.
        load_s: of weights that are read before the run.
        prepare_s, finish_s: before the first and behind the last subgraph.
        subgraphs: in order.
        peaks: bytes per place at most: "device", "host" (the process), "disk" (checkpoint and file).
        rates: of the machine, that the seconds come from.
    """

    choice: Choice
    waiting: Waiting
    load_s: float
    prepare_s: float
    subgraphs: tuple[Foreseen, ...]
    finish_s: float
    peaks: Mapping[str, int]
    rates: Mapping[str, float] = field(default_factory=dict)

    @property
    def loop_s(self) -> float:
        """Of all subgraphs."""
        return sum(part.onload_s + part.run_s + part.solve_s + part.write_s for part in self.subgraphs)

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.load_s + self.prepare_s + self.loop_s + self.finish_s

    @property
    def bottleneck(self) -> str:
        """The lane that is busy longest."""
        return max(self.lanes, key=lambda lane: self.lanes[lane])

    @property
    def lanes(self) -> dict[str, float]:
        """Seconds that each lane is busy."""
        names = dict.fromkeys(name for part in self.subgraphs for name in part.lanes)
        return {name: sum(part.lanes.get(name, 0.0) for part in self.subgraphs) for name in names}


def foreseen(candidate: Candidate, machine: Machine, waiting: Waiting, ranks: int = 1, host: int | None = None) -> Plan:
    """What a candidate takes with such budgets of activations, whatever there is; within `host` bytes the C heap keeps
    what is free in it."""
    parts: list[Foreseen] = []
    late: float | None = None
    pinned, started = 0, set[str]()
    most, on_cpu = _worst(candidate, machine, waiting, host), machine.device == "cpu"
    again = _mapped_again(candidate, machine, waiting, host) if on_cpu else {}
    pinned_of = {} if on_cpu else _pinned(candidate, machine, waiting)
    steps_of = {n: _steps(candidate.rows[n], waiting, machine, ranks, again.get(n, ())) for n in candidate.distinct}
    known: dict[tuple[int, float | None], Foreseen] = {}
    for number, row in zip(candidate.alike, candidate.table, strict=False):  # the first row like each
        steps = steps_of[number]
        if (number, late) not in known:
            known[number, late] = _part(candidate, machine, row, steps, late, most[number])
        part = replace(known[number, late], name=row.name)
        late = 0.0
        if candidate.choice.prefetch_depth and len(parts) + 1 < len(candidate.table):
            read_s, send_s = bringing(candidate, candidate.table[len(parts) + 1], machine)
            busy = (read_s + sum(step.file for step in steps), send_s + sum(step.up for step in steps))
            late = max(0.0, *(each - part.run_s - part.solve_s for each in busy))
        if not on_cpu:  # nothing else goes on meanwhile
            part = _for_the_first_time(part, machine, pinned_of[number] - pinned, started)
            pinned = max(pinned, pinned_of[number])
        parts.append(part)
    places = dict.fromkeys(place for row in most.values() for place in row)
    peaks_of_places = {place: max(sum(row[place].values()) for row in most.values()) for place in places}
    in_file = max(waiting.shares(moment.waiting)[2] for row in candidate.table for moment in row.moments) * ranks
    of_end = sum(seconds_of(row, what, machine) for row in candidate.end for what in ("write", "verification"))
    return Plan(
        choice=candidate.choice,
        waiting=waiting,
        load_s=candidate.read_bytes / machine.rate("disk_read"),
        prepare_s=candidate.prepare_s,
        subgraphs=tuple(parts),
        finish_s=of_end + sum(sum(bringing(candidate, row, machine)) for row in candidate.end),
        peaks={**peaks_of_places, "disk": candidate.output_bytes + in_file},
        rates={name: rate.value for name, rate in machine.rates.items()},
    )


def _steps(row: Needs, waiting: Waiting, machine: Machine, ranks: int, again: Sequence[float]) -> list["Lanes"]:
    """Of a subgraph; `again` are the seconds of each moment in which the heap is mapped again, if any."""
    beside = zip(row.moments, again or [0.0] * len(row.moments), strict=True)
    return [Lanes(each, waiting, machine, ranks, extra) for each, extra in beside if each.what == "batch"]


def _part(
    candidate: Candidate,
    machine: Machine,
    row: Needs,
    steps: Sequence["Lanes"],
    late: float | None,
    most: Mapping[str, Mapping[str, int]],
) -> Foreseen:
    """A subgraph; `late` are the seconds that it waits for its weights, None: nothing has begun to bring them."""
    read_s, send_s = bringing(candidate, row, machine)
    if late is None or candidate.choice.prefetch_depth == 0:
        late = read_s + send_s
    solve_s, write_s = (seconds_of(row, what, machine) for what in ("solve", "write"))
    lanes = {
        "compute": sum(step.compute for step in steps),
        "solve": solve_s,
        "writing": write_s,
        "disk": read_s + sum(step.file for step in steps),
        "to_device": send_s + sum(step.up for step in steps),
        "to_host": sum(step.down for step in steps),
        "mapping": sum(step.again for step in steps),
    }
    return Foreseen(
        name=row.name,
        onload_s=late,
        run_s=sum(step.seconds for step in steps),
        solve_s=solve_s,
        write_s=write_s,
        lanes={lane: seconds for lane, seconds in lanes.items() if seconds},
        moved_bytes=_moved(candidate, machine, row, steps),
        peaks=most,
    )


def _pinned(candidate: Candidate, machine: Machine, waiting: Waiting) -> dict[int, int]:
    """For each distinct row the bytes of host memory that are pinned: weights on their way, and what waits."""
    found = dict.fromkeys(candidate.distinct, 0)
    for number, peak in _by_row(candidate, peaks_of(candidate, machine, "host", waiting)):
        size = sum(peak.parts.get(each, 0) for each in ("weights", "prefetch", "waiting", "in_flight"))
        found[number] = max(found[number], size)
    return found


def _by_row(candidate: Candidate, found: Sequence[Peak]) -> Iterator[tuple[int, Peak]]:
    """Peaks of distinct rows, each with the number of its row."""
    numbers = (number for number in candidate.distinct for _ in candidate.rows[number].moments)
    return zip(numbers, found, strict=True)


def _for_the_first_time(part: Foreseen, machine: Machine, more: int, started: set[str]) -> Foreseen:
    """With what is done once: to pin `more` bytes of host memory than there are, and to load what the device computes
    with."""
    more_s = max(0, more) / machine.rate("pinning")
    start_s = {"run": 0.0, "solve": 0.0}
    for phase, lane in (("run", "compute"), ("solve", "solve")):
        if part.lanes.get(lane) and phase not in started:
            started.add(phase)
            start_s[phase] = 1 / machine.rate(f"start {phase}")
    lanes = {**part.lanes, **({"pinning": more_s} if more_s else {})}
    run_s, solve_s = part.run_s + more_s + start_s["run"], part.solve_s + start_s["solve"]
    return replace(part, run_s=run_s, solve_s=solve_s, lanes=lanes)


COPIED = 3.5e9
"""Bytes per second at which a CPU's core copies from and to files that are in memory (measured on one machine); a
batch's products, shared out evenly, wait for the core that does."""
MAPPED_AGAIN = 1.3
"""How much a batch maps anew where all that is free in the heap is given back behind each, as a multiple of what it has
there at most (1.0 to 1.5 were measured)."""


def _mapped_again(candidate: Candidate, machine: Machine, waiting: Waiting, host: int | None) -> dict[int, list[float]]:
    """For each moment of each distinct row the seconds that it takes to map again what the heap gives back: where what
    a batch leaves free does not fit under what the process is to keep. (Where it fits, holes grow until they do not,
    and little is given back.)"""
    budgets, depth = Budgets(host, candidate.held), candidate.choice.prefetch_depth
    where = (candidate.rows, torch.device(machine.device), budgets)
    _, most_resident = process_bytes(*where, depth, waiting, candidate.distinct)
    again: dict[int, list[float]] = {number: [] for number in candidate.distinct}
    for number, peak in _by_row(candidate, peaks(*where, "host", depth, waiting, numbers=candidate.distinct)):
        left_free = MAPPED_AGAIN * peak.moment.heap_batch
        is_over = left_free > 0 and peak.num_bytes - peak.moment.batch + left_free > most_resident
        again[number].append(left_free * peak.moment.num_batches / machine.rate("mapping") if is_over else 0.0)
    return again


def _worst(
    candidate: Candidate, machine: Machine, waiting: Waiting, host: int | None
) -> dict[int, dict[str, dict[str, int]]]:
    """By distinct row and place the parts of the worst moment."""
    places: tuple[Place, ...] = ("host",) if machine.device == "cpu" else ("device", "host")
    found: dict[int, dict[str, dict[str, int]]] = {}
    for place in places:
        for number, peak in _by_row(candidate, peaks_of(candidate, machine, place, waiting, "kept", host)):
            known = found.setdefault(number, {})
            if place not in known or sum(known[place].values()) < peak.num_bytes:
                known[place] = {part: size for part, size in peak.parts.items() if size}
    return found


@final
class Lanes:
    """Seconds of a step, and of each lane in it.

    Attributes:
        seconds: of the longest lane.
        compute, file, up, down, duplex: of each.
        copying: what the file takes of the cores that compute.
        again: beside them, until what the heap gave back is there again.
        moved: bytes from and to the device.
        read, written: bytes of the file.
    """

    def __init__(self, moment: Moment, waiting: Waiting, machine: Machine, ranks: int, again: float = 0.0) -> None:
        on_device, _, in_file = waiting.shares(moment.waiting)
        away = 1 - on_device / max(moment.waiting, 1) if machine.device == "cuda" else 0.0
        spilled = in_file / max(moment.waiting, 1)
        self.compute = machine.seconds_of_batches(moment.work)
        self.moved = {"loaded": moment.loaded * away, "stored": moment.stored * away}
        self.read, self.written = moment.loaded * spilled, moment.stored * spilled
        self.file = ranks * (self.read / machine.rate("scratch_read") + self.written / machine.rate("disk_write"))
        self.up = self.down = self.duplex = 0.0
        if machine.device == "cuda":
            up, down = self.moved.values()
            self.up, self.down = up / machine.rate("to_device"), down / machine.rate("to_host")
            self.duplex = (up + down) / machine.rate("duplex")
        self.copying = min(self.file, (self.read + self.written) / COPIED) if machine.device == "cpu" else 0.0
        self.again = again
        self.seconds = max(self.compute + self.copying, self.file, self.up, self.down, self.duplex) + again


def seconds_of(row: Needs, what: str, machine: Machine) -> float:
    """Of what is computed in moments of a kind."""
    return sum(machine.seconds(moment.work) for moment in row.moments if moment.what == what)


def bringing(candidate: Candidate, row: Needs, machine: Machine) -> tuple[float, float]:
    """Seconds in which a subgraph's weights come from the disk, and to the device."""
    from_disk = row.weights / machine.rate("disk_read") if candidate.choice.load == "disk" else 0.0
    return from_disk, row.weights / machine.rate("to_device") if machine.device == "cuda" else 0.0


def _moved(candidate: Candidate, machine: Machine, row: Needs, steps: Sequence[Lanes]) -> dict[str, int]:
    """Bytes by lane, as `SubgraphRecord.moved_bytes` has them."""
    weights = row.weights if candidate.choice.load == "disk" else 0
    moved = {
        "disk_read": weights + sum(step.read for step in steps),
        "disk_write": sum(step.written for step in steps),
        "to_device": row.weights + sum(step.moved["loaded"] for step in steps),
        "to_host": sum(step.moved["stored"] for step in steps),
    }
    is_apart = machine.device == "cuda"
    return {lane: round(size) for lane, size in moved.items() if lane.startswith("disk") or is_apart}


def peaks_of(
    candidate: Candidate,
    machine: Machine,
    place: Place,
    waiting: Waiting,
    spare: Spare = "none",
    host: int | None = None,
) -> list[Peak]:
    """What every moment of the distinct rows takes of a place."""
    budgets, depth = Budgets(host, candidate.held), candidate.choice.prefetch_depth
    what = (candidate.rows, torch.device(machine.device), budgets, place, depth, waiting, spare)
    return peaks(*what, candidate.distinct)
