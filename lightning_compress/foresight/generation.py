"""The fastest way to generate text with a model that may not fit on the GPU, and the usual way beside it.

Method: FlexGen's policy search (Sheng et al., arXiv 2303.06865, sections 4.2 and 4.3). What is discrete (sequences per
GPU batch, batches per block, where attention is computed) is enumerated; where weights, cache and hidden states wait is
a linear programme for each (`generation_cost` has its terms):

    minimize (layers T_pre + (new_tokens - 1) layers T_gen) / block size
    T_pre, T_gen >= every lane's seconds (their sum where nothing overlaps);  fractions of a kind sum to one
    every tier's peak, in prefill and in decoding, within its budget

It is the check of this project's cost model against numbers that others have measured (`docs/generation_plan.md`).
Alternative not taken: whole layers and tensors as integers. Fractions are what the runtime's own search has, and the
error of rounding is that of one layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import final

from lightning_compress.errors import BudgetError
from lightning_compress.foresight.generation_cost import (
    ALWAYS,
    FRACTIONS,
    Form,
    Hardware,
    Lane,
    Phase,
    Schedule,
    Task,
    Tier,
    Transformer,
    lanes,
    peaks,
    value,
)
from lightning_compress.foresight.linear import LinearProgramme
from lightning_compress.foresight.planned import device_to_give
from lightning_compress.memory.budget import gib

GPU_BATCH_SIZES = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 384, 512)
NUM_GPU_BATCHES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 32)
"""What is tried; the paper takes batches of multiples of 4, and fewer than 20 of them."""
SLACK = 1e-4
"""How much longer, relatively, the best policy may take to keep its lanes less busy."""
_TOLERANCE = 1e-6
"""What the solver may exceed a bound by, relatively, with room to spare."""
_TIERS: tuple[Tier, ...] = ("device", "host", "disk")
_PHASES: tuple[Phase, ...] = ("prefill", "decode")


@final
@dataclass(frozen=True)
class Policy:
    """How to generate, and what that takes.

    Attributes:
        schedule: of batches.
        fractions: of weights, cache and hidden states per tier, by the names of `FRACTIONS`.
        prefill_s, decode_s: of a block: until its first new tokens, and for the others.
        tokens_per_s: new tokens of a block over the seconds of both.
        lanes: seconds that each lane is busy for a block.
        peaks: bytes per tier at most.
    """

    schedule: Schedule
    fractions: Mapping[str, float]
    prefill_s: float
    decode_s: float
    tokens_per_s: float
    lanes: Mapping[Lane, float]
    peaks: Mapping[Tier, int]

    @property
    def bottleneck(self) -> Lane:
        """The lane that is busy longest."""
        return max(self.lanes, key=lambda lane: self.lanes[lane])


def best_policy(
    model: Transformer,
    hardware: Hardware,
    task: Task,
    gpu_batch_sizes: Sequence[int] = GPU_BATCH_SIZES,
    num_gpu_batches: Sequence[int] = NUM_GPU_BATCHES,
) -> Policy:
    """The policy of most tokens per second, of the zig-zag block schedule.

    Args:
        gpu_batch_sizes, num_gpu_batches: that are tried, in ascending order.

    Raises:
        BudgetError: nothing fits; says the smallest budgets that would do.
    """
    found: list[Policy] = []
    for cpu_attention, batch_size in product((True, False), gpu_batch_sizes):
        for count in num_gpu_batches:
            schedule = Schedule(batch_size, count, cpu_attention)
            placed = _placed(model, hardware, task, schedule) if _has(task, schedule) else None
            if placed is None:
                break  # a larger block takes more of everything
            found.append(foreseen(model, hardware, task, schedule, placed))
    if not found:
        raise BudgetError(_nothing_fits(model, hardware, task, {}))
    fastest = max(found, key=lambda policy: policy.tokens_per_s)
    spared = _placed(model, hardware, task, fastest.schedule, spares=True)
    return fastest if spared is None else foreseen(model, hardware, task, fastest.schedule, spared)


def row_by_row(
    model: Transformer, hardware: Hardware, task: Task, gpu_batch_sizes: Sequence[int] = GPU_BATCH_SIZES
) -> Policy:
    """What offloading usually does, as Hugging Face Accelerate and DeepSpeed ZeRO-Inference: weights are brought for
    every batch, first what the GPU holds is filled with them, then host memory, then the disk; the cache and hidden
    states are on the GPU; and (as in Accelerate) a layer's transfers end before it computes.

    Raises:
        BudgetError: nothing fits; says the smallest budgets that would do.
    """
    found: list[Policy] = []
    for batch_size in gpu_batch_sizes:
        schedule = Schedule(batch_size, 1, cpu_attention=False, overlaps=False)
        placed = _greedy(model, hardware, task, schedule) if _has(task, schedule) else None
        if placed is not None:
            found.append(foreseen(model, hardware, task, schedule, placed))
    if not found:
        raise BudgetError(_nothing_fits(model, hardware, task, {"cg": 1, "hg": 1}))
    return max(found, key=lambda policy: policy.tokens_per_s)


def foreseen(
    model: Transformer, hardware: Hardware, task: Task, schedule: Schedule, fractions: Mapping[str, float]
) -> Policy:
    """What a policy takes, whether it fits or not."""
    seconds: dict[Phase, float] = {}
    busy: dict[Lane, float] = {}
    for phase in _PHASES:
        steps = model.layers * _steps(task, phase)
        forms = lanes(model, hardware, task, schedule, phase)
        each = {lane: value(form, fractions) * steps for lane, form in forms.items()}
        seconds[phase] = max(each.values()) if schedule.overlaps else sum(each.values())
        busy = {lane: busy.get(lane, 0.0) + lane_s for lane, lane_s in each.items()}
    rows = [(tier, value(form, fractions)) for tier, form in peaks(model, task, schedule)]
    return Policy(
        schedule=schedule,
        fractions=dict(fractions),
        prefill_s=seconds["prefill"],
        decode_s=seconds["decode"],
        tokens_per_s=schedule.block_size * task.new_tokens / sum(seconds.values()),
        lanes=busy,
        peaks={tier: round(max(size for other, size in rows if other == tier)) for tier in _TIERS},
    )


def smallest(
    model: Transformer, task: Task, tier: Tier, others: Mapping[Tier, int], fixed: Mapping[str, float]
) -> int | None:
    """The least bytes of a tier with which one sequence can be generated; None: no number of them would do.

    Args:
        others: bytes of other tiers; of what is not named there is enough.
        fixed: fractions that are given.
    """
    sizes: list[int] = []
    for cpu_attention in (True, False):
        programme, places = _programme(fixed)
        most, unit = programme.variable(), model.layer_bytes
        for other, form in peaks(model, task, Schedule(1, 1, cpu_attention)):
            left = others.get(other, 0) - form.get(ALWAYS, 0.0)
            if other == tier:
                programme.at_most({**_sum(form, places, unit), most: -1}, -form.get(ALWAYS, 0.0) / unit)
            elif other in others:
                programme.at_most(_sum(form, places, unit), left / unit)
        solution = programme.minimized({most: 1})
        if solution is not None:
            sizes.append(int(solution.cost * unit * (1 + _TOLERANCE)) + 1)
    return min(sizes, default=None)


def _steps(task: Task, phase: Phase) -> int:
    """How often every layer computes a block in a phase."""
    return 1 if phase == "prefill" else task.new_tokens - 1


def _has(task: Task, schedule: Schedule) -> bool:
    return task.num_prompts is None or schedule.block_size <= task.num_prompts


def _placed(
    model: Transformer, hardware: Hardware, task: Task, schedule: Schedule, spares: bool = False
) -> dict[str, float] | None:
    """The fractions of least seconds, of those (`spares`) the ones that keep lanes least busy; None: nothing fits."""
    programme, places = _programme({})
    _within(programme, places, model, hardware, task, schedule)
    seconds: dict[int, float] = {}
    busy: dict[int, float] = {}
    for phase in _PHASES:
        steps = _steps(task, phase)
        forms = lanes(model, hardware, task, schedule, phase)
        unit = sum(sum(form.values()) for form in forms.values())
        longest = programme.variable()
        seconds[longest] = steps * unit
        for form in forms.values():
            row = _sum(form, places, unit)
            programme.at_most({**row, longest: -1}, -form.get(ALWAYS, 0.0) / unit)
            for variable, factor in row.items():
                busy[variable] = busy.get(variable, 0.0) + factor * steps * unit
    least = max(seconds.values())
    first = programme.minimized({variable: factor / least for variable, factor in seconds.items()})
    if first is None or not spares:
        return None if first is None else _fractions(first.values, places)
    programme.at_most({variable: factor / least for variable, factor in seconds.items()}, (1 + SLACK) * first.cost)
    second = programme.minimized({variable: factor / least for variable, factor in busy.items()})
    return None if second is None else _fractions(second.values, places)


def _greedy(model: Transformer, hardware: Hardware, task: Task, schedule: Schedule) -> dict[str, float] | None:
    """Cache and hidden states on the GPU, of the weights as many as fit there too, then in host memory."""
    programme, places = _programme({"cg": 1, "hg": 1})
    _within(programme, places, model, hardware, task, schedule)
    found = programme.minimized({places["wg"]: -1000, places["wc"]: -1})
    return None if found is None else _fractions(found.values, places)


def _programme(fixed: Mapping[str, float]) -> tuple[LinearProgramme, dict[str, int]]:
    """With the fractions as variables, by name, of which those of a kind sum to one."""
    programme = LinearProgramme()
    places = {name: programme.variable(1.0) for name in FRACTIONS}
    for kind in "wch":
        programme.at_most({places[kind + tier]: 1 for tier in "gcd"}, 1)
        programme.at_most({places[kind + tier]: -1 for tier in "gcd"}, -1)
    for name, fraction in fixed.items():
        programme.at_most({places[name]: -1}, -fraction)
    return programme, places


def _within(
    programme: LinearProgramme,
    places: Mapping[str, int],
    model: Transformer,
    hardware: Hardware,
    task: Task,
    schedule: Schedule,
) -> None:
    """Every tier's peaks are within its budget."""
    for tier, form in peaks(model, task, schedule):
        unit = max(hardware.budgets[tier], model.layer_bytes)
        left = hardware.budgets[tier] - form.get(ALWAYS, 0.0)
        programme.at_most(_sum(form, places, unit), left / unit)


def _sum(form: Form, places: Mapping[str, int], unit: float) -> dict[int, float]:
    """A form's factors by variable, in multiples of `unit`: the solver's tolerances are absolute."""
    return {places[name]: factor / unit for name, factor in form.items() if name != ALWAYS}


def _fractions(values: Sequence[float], places: Mapping[str, int]) -> dict[str, float]:
    """Of a solution, without its rounding."""
    raw = {name: max(0.0, values[place]) for name, place in places.items()}
    total = {kind: sum(raw[kind + tier] for tier in "gcd") for kind in "wch"}
    return {name: fraction / total[name[0]] for name, fraction in raw.items()}


def _nothing_fits(model: Transformer, hardware: Hardware, task: Task, fixed: Mapping[str, float]) -> str:
    given = hardware.budgets
    ways = []
    for tier in _TIERS:
        size = smallest(model, task, tier, {other: given[other] for other in _TIERS if other != tier}, fixed)
        ways += [] if size is None else [_to_give(tier, size)]
    together: dict[Tier, int] = {}
    for tier in _TIERS:
        size = smallest(model, task, tier, together, fixed)
        assert size is not None, "of the tiers that come later there is enough"
        together[tier] = max(size, given[tier])
    ways.append(" and ".join(_to_give(tier, size) for tier, size in together.items()))
    cache = model.layers * (task.prompt_length + task.new_tokens) * model.cache_bytes
    return (
        f"Not even one sequence of {task.prompt_length} + {task.new_tokens} tokens can be generated with "
        f"{', '.join(_told(tier, size) for tier, size in given.items())} for tensors: the layers' weights are "
        f"{gib(int(model.layers * model.layer_bytes))}, the cache of a sequence is {gib(int(cache))}"
        f"{', and it must be on the device' if fixed else ''}. The smallest that could do, with what is not named as "
        f"it is: {'; or '.join(ways)}. Give more, or take a shorter prompt or a smaller model."
    )


def _told(tier: Tier, size: int) -> str:
    return f"{tier}={size} ({gib(size)})"


def _to_give(tier: Tier, size: int) -> str:
    return device_to_give(size) if tier == "device" else _told(tier, size)
