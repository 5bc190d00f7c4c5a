"""What a run needs at its worst moments, and how it is fitted into budgets, before any work.

Method: `calibration.footprint` fills a table, per subgraph the bytes of its weights and of every moment at which much
is alive at once; `fit` finds the largest prefetch depth, and what may wait in memory between steps, with which all
stays within the budgets. Home of weights and device are given: a model in memory stays there, and one on disk is read
one subgraph at a time, because a calibration comes by every subgraph once, so weights that stay anywhere else would
serve nobody.

Alternative not taken: measuring, and giving room where it gets tight. A run that dies after hours because its last
layer is wider than the others could have said so before the first.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, final

import torch

from lightning_compress.errors import BudgetError, listed
from lightning_compress.memory.needs import Moment, Needs, Waiting, pinned_ratio

KEPT_FREE = 0.6
"""How much the C heap is let keep free, as a fraction of what a run has in it at most. Holes between blocks of many
sizes grow to 0.5 to 1.1 times that where nothing is given back; giving all of it back costs a tenth to a third of the
time, and with this much kept 0 to 8 % (Llamas of 512 and 768 channels, `staged` and `block`, batches of 4 to 16)."""
SWING = 2
"""What a batch takes of the C heap beyond its tensors where that had given back what was free, as a multiple of what it
has there: 1.0 to 1.9 were measured (likewise)."""
RESERVE = 0.2
"""What a process with a GPU may take of host memory beyond its tensors in (rounded) blocks of pinned memory, as a
fraction of them (assumed)."""
_NAMES = {
    "held": "held by the process before the run",
    "libraries": "workspaces of libraries",
    "weights": "weights",
    "prefetch": "weights of the next subgraph",
    "converting": "weights as they are stored, while they are brought into another form",
    "waiting": "activations that wait",
    "in_flight": "activations from and to the file",
    "batch": "a batch",
    "statistics": "statistics",
    "workspace": "the solve's, packing's or writing's workspace",
    "heap": "free in the C heap",
}
TITLES = {
    "held": "process before",
    "libraries": "libraries",
    "weights": "weights",
    "prefetch": "next weights",
    "converting": "converted weights",
    "waiting": "waiting activations",
    "in_flight": "on their way",
    "batch": "batch",
    "statistics": "statistics",
    "workspace": "workspace",
    "heap": "free in the heap",
}
"""What a moment consists of, as columns and legends name it."""
_REMEDIES = {
    "weights": "sequential_targets of smaller modules",
    "waiting": "a smaller activation_budget",
    "in_flight": "a smaller batch size or shorter samples",
    "batch": "a smaller batch size or shorter samples",
    "statistics": "sequential_targets of smaller modules",
    "workspace": "the algorithm rtn for, or `ignore` of, the widest modules",
    "verification": "verify=False, or weights that stay on disk (`weights=`, model.load=disk)",
}
_LESS_IN_PARTS = frozenset(("weights", "statistics", "workspace"))


@final
@dataclass(frozen=True)
class Budgets:
    """What there is, in bytes; None: no limit.

    Attributes:
        host: of the process, `held` included.
        held: what the process holds before the run begins.
        device: of what the run has on the device.
        device_activations, activations: what the user lets wait on the device, and in host memory.
        depth: how many subgraphs ahead the user wants to bring.
        has_weights: `held` includes the model's weights.
        is_lean: the C heap is to keep nothing free, at the cost of time.
        libraries: what workspaces of libraries take of the device.
        converting: what bringing a weight into another form than it is stored in takes beside it, at most.
    """

    host: int | None
    held: int
    device: int | None = None
    device_activations: int | None = 0
    activations: int | None = None
    depth: int = 1
    has_weights: bool = False
    is_lean: bool = False
    libraries: int = 0
    converting: int = 0


@final
@dataclass(frozen=True)
class Fit:
    """How the run stays within its budgets.

    Attributes:
        depth: how many subgraphs ahead of the one that computes weights are brought.
        waiting: which values may wait in memory.
        host_bytes, device_bytes: what the run foresees to take, at most; the host's with what was held before, and with
            what is free in the C heap.
        most_resident: bytes of the process above which the heap gives back what is free in it, behind a batch.
        notes: what is not as asked, as sentences.
    """

    depth: int
    waiting: Waiting
    host_bytes: int
    device_bytes: int
    most_resident: int
    notes: tuple[str, ...] = ()


def fit(table: Sequence[Needs], device: torch.device, budgets: Budgets) -> Fit:
    """The largest depth, and then the most activations in memory, that the budgets admit.

    On a CPU the host holds all, and the device's budget is for what the run adds to it. A process takes more than its
    tensors (`Spare`, `RESERVE`): depth and activations are given up for the least of that, but nothing is refused for
    it.

    Raises:
        BudgetError: a budget that cannot hold the run; says which could, what takes it, and what would lower it.
    """
    ways: tuple[tuple[Spare, Budgets], ...] = (("least", with_reserve(budgets, device)), ("none", budgets))
    for spare, given in ways:
        for depth in range(budgets.depth, -1, -1):
            waiting = _waiting(table, device, given, depth, spare)
            where = (table, device, given)
            host, on_device = (_most(peaks(*where, place, depth, waiting, spare)) for place in ("host", "device"))
            if host.num_bytes <= _limit(given.host) and on_device.num_bytes <= _limit(given.device):
                notes = _notes(budgets, depth, waiting)
                taken, most_resident = process_bytes(table, device, budgets, depth, waiting)
                return Fit(depth, waiting, taken, on_device.num_bytes, most_resident, notes)
    if host.num_bytes > _limit(budgets.host):
        raise BudgetError(_refusal("host_budget", budgets.host, host, budgets), "host", host.num_bytes)
    raise BudgetError(_refusal("device_budget", budgets.device, on_device, budgets), "device", on_device.num_bytes)


def process_bytes(
    table: Sequence[Needs],
    device: torch.device,
    budgets: Budgets,
    depth: int,
    waiting: Waiting,
    numbers: Collection[int] | None = None,
) -> tuple[int, int]:
    """What the process will take at most, and above how much of it the heap gives back what is free in it.

    That happens behind a batch, so as much less of a budget is kept as the next one may take.
    """
    where = (table, device, budgets)
    kinds: tuple[Spare, ...] = ("none", "least", "kept")
    none, least, kept = (_most(peaks(*where, "host", depth, waiting, kind, numbers)).num_bytes for kind in kinds)
    if budgets.is_lean:
        return least, none
    return kept, int(min(kept, max(none, _limit(budgets.host) - swing(table))))


@final
@dataclass(frozen=True)
class MemoryUse:
    """Budgets and what became of them, for the report. Bytes.

    Attributes:
        host_budget, device_budget: what the user gave.
        held_bytes: resident in the process before the run.
        high_water_before: the process's peak until then.
        host_bytes, device_bytes: foreseen, at most; the host's with what was held.
        prefetch_depth, activation_budget: that the run was given to stay within; None: all activations in memory.
        notes: what is not as asked.
        peak_bytes: the process's own peak (VmHWM) after the run.
        held_on_device: of the device before the run, by others of the process.
    """

    host_budget: int | None
    device_budget: int | None
    held_bytes: int
    high_water_before: int
    host_bytes: int
    device_bytes: int
    prefetch_depth: int
    activation_budget: int | None
    notes: tuple[str, ...]
    peak_bytes: int
    held_on_device: int = 0

    def summary(self) -> str:
        """A line for the user."""
        budget = "" if self.host_budget is None else f" of a budget of {gib(self.host_budget)}"
        said = "".join(f" {note}" for note in self.notes)
        return f"host memory: {gib(self.peak_bytes)}{budget}, foreseen {gib(self.host_bytes)}.{said}"


Place = Literal["host", "device"]
Spare = Literal["none", "least", "kept"]
"""What the process of a run on a CPU takes beyond its tensors: at least holes within a batch; or what the C heap keeps
free if it may, as far as the budget has room for it."""


@dataclass(frozen=True)
class Peak:
    """A moment, and what it consists of in one place."""

    row: Needs
    moment: Moment
    parts: dict[str, int]

    @property
    def num_bytes(self) -> int:
        return sum(self.parts.values())


def with_reserve(budgets: Budgets, device: torch.device) -> Budgets:
    """On the host of a GPU, a budget that is smaller by what a process takes beside its tensors."""
    if budgets.host is None or device.type == "cpu":
        return budgets
    return replace(budgets, host=budgets.held + int((budgets.host - budgets.held) / (1 + RESERVE)))


def _limit(budget: int | None) -> float:
    return float("inf") if budget is None else budget


def _most(found: Sequence[Peak]) -> Peak:
    """The moment that takes the most."""
    return max(found, key=lambda peak: peak.num_bytes)


def peaks(
    table: Sequence[Needs],
    device: torch.device,
    budgets: Budgets,
    place: Place,
    depth: int,
    waiting: Waiting,
    spare: Spare = "none",
    numbers: Collection[int] | None = None,
) -> list[Peak]:
    """What every moment takes of a place, with weights brought `depth` subgraphs ahead and such activations waiting in
    memory; of the rows of these numbers alone, where all others are like one of them."""
    looked_at = range(len(table)) if numbers is None else numbers
    rows = [table[number] for number in looked_at]
    kept, ratio = kept_free(rows, waiting), rounding(rows, device)
    found = []
    for number, row in zip(looked_at, rows, strict=True):
        ahead = table[number + 1 : number + 1 + depth]
        for moment in row.moments:
            parts = _parts(row, ahead, moment, device, budgets, place, waiting, ratio)
            if place == "host" and device.type == "cpu" and spare != "none":
                left = _limit(budgets.host) - sum(parts.values())
                parts["heap"] = SWING * moment.heap_batch if spare == "least" else int(max(0, min(kept, left)))
            found.append(Peak(row, moment, parts))
    return found


def rounding(table: Sequence[Needs], device: torch.device) -> float:
    """How many bytes of host memory a byte takes that waits there: it is pinned where the device is another."""
    return 1.0 if device.type == "cpu" else pinned_ratio(table)


def swing(table: Sequence[Needs]) -> int:
    """What the process may take more within a batch than it had behind the one before."""
    return SWING * max((moment.heap_batch for row in table for moment in row.moments), default=0)


def kept_free(table: Sequence[Needs], waiting: Waiting) -> int:
    """What the C heap keeps free if it may."""
    moments = (moment for row in table for moment in row.moments)
    return int(KEPT_FREE * max((moment.heap_batch + _in_heap(moment, waiting) for moment in moments), default=0))


def _in_heap(moment: Moment, waiting: Waiting) -> float:
    """Bytes of the values that wait in the C heap."""
    return waiting.shares(moment.waiting)[1] * moment.heap_waiting / max(moment.waiting, 1)


def _parts(
    row: Needs,
    ahead: Sequence[Needs],
    moment: Moment,
    device: torch.device,
    budgets: Budgets,
    place: Place,
    waiting: Waiting,
    ratio: float,
) -> dict[str, int]:
    """The tensors of a moment in a place, by kind. `ahead`: later subgraphs whose weights are on their way; `ratio`:
    see `rounding`."""
    on_device, on_host, in_file = waiting.shares(moment.waiting)
    small_here, small_there = (0, moment.fixed) if waiting.device is None else (moment.fixed, 0)
    is_moved = in_file or (on_host and device.type != "cpu")
    cached = {"waiting": on_host + small_here, "in_flight": moment.in_flight if is_moved else 0}
    window = {"weights": row.weights, "prefetch": sum(later.weights for later in ahead)}
    running = {"batch": moment.batch, "statistics": moment.statistics, "workspace": moment.workspace}
    if budgets.converting and place == "host":
        running["converting"] = budgets.converting
    if device.type == "cpu":
        running["workspace"] += moment.on_host
        return {**({"held": budgets.held} if place == "host" else {}), **window, **cached, **running}
    if place == "host":  # weights come through pinned memory, which is kept and reused
        window = {"weights": max(each.pinned for each in (row, *ahead))}
        cached = {name: int(ratio * size) for name, size in cached.items()}
        running["workspace"] = moment.on_host
        there = {name: size for name, size in running.items() if name in ("workspace", "converting")}
        return {"held": budgets.held, **window, **cached, **there}
    libraries, on_its_way = {"libraries": budgets.libraries}, {"in_flight": cached["in_flight"]}
    return {**libraries, **window, "waiting": on_device + small_there, **on_its_way, **running}


def _waiting(table: Sequence[Needs], device: torch.device, budgets: Budgets, depth: int, spare: Spare) -> Waiting:
    """What may wait in memory: as the user says; else all, if that is within the budgets, else what they leave."""

    def most(places: Sequence[Place], waiting: Callable[[int | None], Waiting]) -> int | None:
        limits = {"host": _limit(budgets.host), "device": _limit(budgets.device)}

        def left(size: int | None) -> float:
            where = (table, device, budgets)
            return min(
                limits[each] - _most(peaks(*where, each, depth, waiting(size), spare)).num_bytes for each in places
            )

        ratio = rounding(table, device) if "host" in places else 1.0
        everything, nothing = left(None), left(0)
        if everything >= min(nothing, 0):  # of few batches more may be on its way to the file than waits
            return None
        return max(int(nothing / ratio), 0)

    is_apart, on_device = device.type != "cpu", budgets.device_activations
    if is_apart and on_device is None:
        on_device = most(("device",), lambda size: Waiting(size, 0))
    on_device = on_device if is_apart else 0
    if budgets.activations is not None:
        return Waiting(on_device, budgets.activations)
    places: tuple[Place, ...] = ("host",) if is_apart else ("host", "device")
    return Waiting(on_device, most(places, lambda size: Waiting(on_device, size)))


def _notes(budgets: Budgets, depth: int, waiting: Waiting) -> tuple[str, ...]:
    notes = []
    if depth < budgets.depth:
        notes.append(f"prefetch_depth is {depth}, not {budgets.depth}, to stay within the budget.")
    if waiting.device is not None and budgets.device_activations is None:
        notes.append(f"Of the activations {gib(waiting.device)} wait on the device, the rest in host memory.")
    if waiting.host is not None and budgets.activations is None:
        notes.append(f"Of the activations {gib(waiting.host)} wait in memory, the rest in a file.")
    return tuple(notes)


def _refusal(name: str, given: int | None, peak: Peak, budgets: Budgets) -> str:
    assert given is not None
    needed = peak.num_bytes
    verb = {"batch": "runs", "solve": "is solved", "write": "is written", "verification": "is read back"}
    parts = sorted(peak.parts.items(), key=lambda part: -part[1])
    contents = ", ".join(f"{_NAMES[part]} {gib(size)}" for part, size in parts if size > needed / 100)
    names = peak.moment.of.split(", ")
    where = f"{peak.row.name}: {listed(names, 3)}" if peak.moment.of else peak.row.name
    large = [part for part, size in parts if part in _REMEDIES and size > needed / 20]
    lower = [_REMEDIES[part] for part in large]
    if _LESS_IN_PARTS.intersection(large):
        lower.append("more expert_parts, where these are experts")
    if peak.moment.what == "verification":
        lower = [_REMEDIES["verification"]]
    elif budgets.has_weights and name == "host_budget":
        lower.append("weights that stay on disk (`weights=`, model.load=disk)")
    remedy = (
        f"Lower it by {'; or '.join(dict.fromkeys(lower))}." if lower else "No setting lowers it by much: give so much."
    )
    if name == "host_budget":
        remedy += (
            f" What the process holds before it begins ({gib(budgets.held)} of it) differs by some MiB from start to "
            "start, so give a little more."
        )
    return (
        f"memory.{name}={gib(given)} cannot hold this run, the smallest that can is {needed} bytes ({gib(needed)}). "
        f"It takes that while {where} {verb[peak.moment.what]}: {contents}. {remedy}"
    )


def gib(size: int) -> str:
    """
    >>> gib(1610612736)
    '1.50 GiB'
    >>> gib(1048576)
    '1.00 MiB'
    """
    units = (("GiB", 30), ("MiB", 20), ("KiB", 10))
    name, power = next((unit for unit in units if size >= 2 ** unit[1] / 200 or not size), units[-1])
    return f"{size / 2**power:.2f} {name}"
