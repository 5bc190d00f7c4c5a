"""What a run needs at its worst moments, and how it is fitted into budgets, before any work.

Method: `calibration.footprint` fills a table, per subgraph the bytes of its weights and of every moment at which much
is alive at once; `fit` finds the largest prefetch depth, and what may wait in memory between steps, with which all
stays within the budgets. Home of weights and device are given: a model in memory stays there, and one on disk is read
one subgraph at a time, because a calibration comes by every subgraph once, so weights that stay anywhere else would
serve nobody.

Alternative not taken: measuring, and giving room where it gets tight. A run that dies after hours because its last
layer is wider than the others could have said so before the first.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, final

import torch

from lightning_compress.errors import BudgetError
from lightning_compress.memory.work import Work

What = Literal["batch", "solve", "write", "verification"]
RESERVE = 0.2
"""What a process takes beyond what is foreseen, within a batch, as a fraction of a run's tensors: 0 to 0.2 were
measured (and 0.6 of 0.17 GiB, with `block` and large batches)."""
_NAMES = {
    "held": "held by the process before the run",
    "weights": "weights",
    "prefetch": "weights of the next subgraph",
    "waiting": "activations that wait",
    "in_flight": "activations from and to the file",
    "batch": "a batch",
    "statistics": "statistics",
    "workspace": "the solve's, packing's or writing's workspace",
}
TITLES = {
    "held": "process before",
    "weights": "weights",
    "prefetch": "next weights",
    "waiting": "waiting activations",
    "in_flight": "on their way",
    "batch": "batch",
    "statistics": "statistics",
    "workspace": "workspace",
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
class Moment:
    """What is alive at once beside the weights, in bytes.

    Attributes:
        what: while a `batch` runs, a group is `solve`d and packed, a shard is `write`n, or all is read back.
        of: the modules that are solved, or what else it is about.
        waiting: of all batches but the one that runs, values that may wait in the scratch file.
        fixed: of the same, those too small for it.
        in_flight: what is on its way from and to that file, if it is used, or to and from the device.
        batch: values of the batch that runs.
        statistics: sums over tokens.
        workspace: what a solve, packing or writing makes, and what is packed and not written yet.
        work: what there is to compute, for all batches of the rank.
        loaded, stored: bytes of values that may wait in the file, read from the cache and put into it, for all batches.
    """

    what: What
    of: str = ""
    waiting: int = 0
    fixed: int = 0
    in_flight: int = 0
    batch: int = 0
    statistics: int = 0
    workspace: int = 0
    work: Work = field(default_factory=dict)
    loaded: int = 0
    stored: int = 0


def as_one(solves: Sequence[Moment]) -> list[Moment]:
    """Solves with the same beside them, as the one that takes the most."""
    if not solves:
        return []
    most, work = max(solves, key=lambda each: each.workspace), Counter[str]()
    for each in solves:
        work.update(each.work)
    return [replace(most, of=", ".join(each.of for each in solves), work=dict(work))]


@final
@dataclass(frozen=True)
class Requests:
    """What a subgraph asks a device's allocator for, one thing after the other, where no activations wait on it.

    Attributes:
        weights: bytes of each tensor that it brings.
        loaded: for each of its steps, bytes of each value that a batch has copied to the device.
        computed: (number of a storage, its bytes) where one is made, (its number, minus its bytes) where it is freed:
            what a batch computes, statistics, what solving and packing take.
    """

    weights: tuple[int, ...] = ()
    loaded: tuple[tuple[int, ...], ...] = ()
    computed: tuple[tuple[int, int], ...] = ()


@final
@dataclass(frozen=True)
class Needs:
    """A subgraph's row of the table.

    Attributes:
        name: of the subgraph.
        weights: bytes that it brings; none of those whose home is where it runs.
        moments: in the order of the run.
        requests: of the same, one by one.
    """

    name: str
    weights: int
    moments: tuple[Moment, ...]
    requests: Requests = field(default=Requests(), compare=False, repr=False)


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
    """

    host: int | None
    held: int
    device: int | None = None
    device_activations: int | None = 0
    activations: int | None = None
    depth: int = 1
    has_weights: bool = False


@final
@dataclass(frozen=True)
class Waiting:
    """How many bytes of activations may wait on the device, and then in host memory; None: all. What finds no room in
    either waits in a file. On a CPU there is no device apart."""

    device: int | None = 0
    host: int | None = None

    def shares(self, num_bytes: int) -> tuple[int, int, int]:
        """How many of so many bytes wait on the device, in host memory, and in the file.

        >>> Waiting(10, 20).shares(25), Waiting(10, 20).shares(40)
        ((10, 15, 0), (10, 20, 10))
        """
        on_device = num_bytes if self.device is None else min(num_bytes, self.device)
        rest = num_bytes - on_device
        on_host = rest if self.host is None else min(rest, self.host)
        return on_device, on_host, rest - on_host


@final
@dataclass(frozen=True)
class Fit:
    """How the run stays within its budgets.

    Attributes:
        depth: how many subgraphs ahead of the one that computes weights are brought.
        waiting: which values may wait in memory.
        host_bytes, device_bytes: what the run foresees to take, at most; the host's with what was held before.
        notes: what is not as asked, as sentences.
    """

    depth: int
    waiting: Waiting
    host_bytes: int
    device_bytes: int
    notes: tuple[str, ...] = ()


def fit(table: Sequence[Needs], device: torch.device, budgets: Budgets) -> Fit:
    """The largest depth, and then the most activations in memory, that the budgets admit.

    On a CPU the host holds all, and the device's budget is for what the run adds to it. What is foreseen are tensors; a
    process takes more (`RESERVE`). Depth and activations are given up for that, but nothing is refused for it.

    Raises:
        BudgetError: a budget that cannot hold the run; says which could, what takes it, and what would lower it.
    """
    for given in (_with_reserve(budgets), budgets):
        for depth in range(budgets.depth, -1, -1):
            waiting = _waiting(table, device, given, depth)
            host, on_device = (_most(table, device, given, place, depth, waiting) for place in ("host", "device"))
            if host.num_bytes <= _limit(given.host) and on_device.num_bytes <= _limit(given.device):
                notes = _notes(given, depth, waiting)
                return Fit(depth, waiting, host.num_bytes, on_device.num_bytes, notes)
    if host.num_bytes > _limit(budgets.host):
        raise BudgetError(_refusal("host_budget", budgets.host, host, budgets), "host", host.num_bytes)
    raise BudgetError(_refusal("device_budget", budgets.device, on_device, budgets), "device", on_device.num_bytes)


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

    def summary(self) -> str:
        """A line for the user."""
        budget = "" if self.host_budget is None else f" of a budget of {gib(self.host_budget)}"
        said = "".join(f" {note}" for note in self.notes)
        return f"host memory: {gib(self.peak_bytes)}{budget}, foreseen {gib(self.host_bytes)}.{said}"


Place = Literal["host", "device"]


@dataclass(frozen=True)
class Peak:
    """A moment, and what it consists of in one place."""

    row: Needs
    moment: Moment
    parts: dict[str, int]

    @property
    def num_bytes(self) -> int:
        return sum(self.parts.values())


def _with_reserve(budgets: Budgets) -> Budgets:
    """A host budget that is smaller by what a run takes beside its tensors."""
    if budgets.host is None:
        return budgets
    return replace(budgets, host=budgets.held + int((budgets.host - budgets.held) / (1 + RESERVE)))


def _limit(budget: int | None) -> float:
    return float("inf") if budget is None else budget


def _most(
    table: Sequence[Needs], device: torch.device, budgets: Budgets, place: Place, depth: int, waiting: Waiting
) -> Peak:
    """The moment that takes the most of a place."""
    return max(peaks(table, device, budgets, place, depth, waiting), key=lambda peak: peak.num_bytes)


def peaks(
    table: Sequence[Needs], device: torch.device, budgets: Budgets, place: Place, depth: int, waiting: Waiting
) -> list[Peak]:
    """What every moment takes of a place, with weights brought `depth` subgraphs ahead and such activations waiting in
    memory."""
    return [
        Peak(row, moment, _parts(row, ahead, moment, device, budgets, place, waiting))
        for number, row in enumerate(table)
        for ahead in [sum(later.weights for later in table[number + 1 : number + 1 + depth])]
        for moment in row.moments
    ]


def _parts(
    row: Needs,
    ahead: int,
    moment: Moment,
    device: torch.device,
    budgets: Budgets,
    place: Place,
    waiting: Waiting,
) -> dict[str, int]:
    """What a moment takes of a place, by kind. `ahead`: weights of later subgraphs that are on their way."""
    on_device, on_host, in_file = waiting.shares(moment.waiting)
    small_here, small_there = (0, moment.fixed) if waiting.device is None else (moment.fixed, 0)
    cached = {"waiting": on_host + small_here, "in_flight": moment.in_flight if in_file else 0}
    window = {"weights": row.weights, "prefetch": ahead}
    running = {"batch": moment.batch, "statistics": moment.statistics, "workspace": moment.workspace}
    if device.type == "cpu":
        return {**({"held": budgets.held} if place == "host" else {}), **window, **cached, **running}
    if place == "host":  # weights are in pinned memory, which is kept and reused
        is_there = moment.what in ("write", "verification")
        return {"held": budgets.held, **window, **cached, **(running if is_there else {})}
    running = {} if moment.what == "verification" else running  # which is in host memory
    of_next_batch = moment.in_flight if on_host or in_file else 0
    return {**window, "waiting": on_device + small_there, "in_flight": of_next_batch, **running}


def _waiting(table: Sequence[Needs], device: torch.device, budgets: Budgets, depth: int) -> Waiting:
    """What may wait in memory: as the user says; else all, if that is within the budgets, else what they leave."""

    def most(places: Sequence[Place], waiting: Callable[[int | None], Waiting]) -> int | None:
        limits = {"host": _limit(budgets.host), "device": _limit(budgets.device)}
        if all(_most(table, device, budgets, each, depth, waiting(None)).num_bytes <= limits[each] for each in places):
            return None
        left = min(limits[each] - _most(table, device, budgets, each, depth, waiting(0)).num_bytes for each in places)
        return max(int(left), 0)

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
    listed = ", ".join(f"{_NAMES[part]} {gib(size)}" for part, size in parts if size > needed / 100)
    names = peak.moment.of.split(", ")
    modules = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    where = f"{peak.row.name}: {modules}" if peak.moment.of else peak.row.name
    large = [part for part, size in parts if part in _REMEDIES and size > needed / 20]
    lower = [_REMEDIES[part] for part in large]
    if _LESS_IN_PARTS.intersection(large):
        lower.append("more expert_parts, where these are experts")
    if peak.moment.what == "verification":
        lower = [_REMEDIES["verification"]]
    elif budgets.has_weights and name == "host_budget":
        lower.append("weights that stay on disk (`weights=`, model.load=disk)")
    remedy = f"Lower it by {'; or '.join(dict.fromkeys(lower))}." if lower else "No setting lowers it: give so much."
    if name == "host_budget":
        remedy += (
            f" What the process holds before it begins ({gib(budgets.held)} of it) differs by some MiB from start to "
            "start, so give a little more."
        )
    return (
        f"memory.{name}={gib(given)} cannot hold this run, the smallest that can is {needed} bytes ({gib(needed)}). "
        f"It takes that while {where} {verb[peak.moment.what]}: {listed}. {remedy}"
    )


def gib(size: int) -> str:
    """
    >>> gib(1610612736)
    '1.50 GiB'
    """
    return f"{size / 2**30:.2f} GiB"
