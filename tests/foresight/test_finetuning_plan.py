"""Plans of fine-tuning: a step's seconds by hand, the search against all there is, budgets that would do."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest

from lightning_compress.errors import BudgetError
from lightning_compress.foresight.finetuning_cost import FineTuningTask, MicroBatch, Step, foreseen
from lightning_compress.foresight.finetuning_plan import (
    GIB,
    described,
    fastest,
    fits,
    layouts,
    micro_batch_sizes,
    rehearsed,
    ways,
)
from lightning_compress.foresight.jobs import FineTuningJob, Phase
from lightning_compress.foresight.layouts import Layout
from lightning_compress.foresight.machine import Machine, Rate
from lightning_compress.foresight.planned import tensors_on
from lightning_compress.foresight.training import Rehearsal
from lightning_compress.memory.budget import Place

TASK = FineTuningTask(batch=16, length=1, ranks=4, layers=1, hidden=2, itemsize=2, largest_layer=0)
WORK = {
    "forward": {"product float32": 400.0},
    "backward": {"product float32": 800.0},
    "accumulate": {"product float32": 900.0},
    "step": {"elementwise": 40.0},
}
RATES = {"product float32": 100.0, "elementwise": 10.0, "call": 1e9, "cpu_optimizer": 10.0, "between_ranks": 1.0}
LINK = {"to_device": 0.5, "to_host": 0.25, "duplex": 1e9}


def machine(**rates: float) -> Machine:
    """Four seconds for a forward, eight for a backward, nine for one that accumulates, four for the optimizer."""
    found = {kind: Rate(value, "assumed") for kind, value in {**RATES, **LINK, **rates}.items() if value}
    return Machine("tiny", "cuda", found, GIB)


def micro_batch(size: int = 2, checkpoints: bool = False) -> MicroBatch:
    """32 bytes of weights, half of which are trained; two states for each of those."""
    phases = (Phase("backward", 32, 16, 32, working=8), Phase("step", 32, 16, 32, stepping=4))
    return MicroBatch(size, checkpoints, Rehearsal(phases, phases, trained=16, work=WORK))


BY_HAND: dict[str, tuple[Layout, dict[str, float]]] = {
    # two micro-batches; the all-reduce sends 2 * 3/4 * 16 bytes beside the last backward
    "plain": (Layout(data=4), {"forward": 8, "backward": 8 + 24, "optimizer": 4}),
    # 3/4 * 16 bytes beside the last backward, and as many after the step, a quarter of which each rank did
    "ZeRO-1": (
        Layout(data=4, zero=1),
        {"forward": 8, "backward": 8 + 12, "optimizer": 1, "parameters gathered": 12},
    ),
    "ZeRO-2": (
        Layout(data=4, zero=2),
        {"forward": 8, "backward": 12 + 12, "optimizer": 1, "parameters gathered": 12},
    ),
    # 3/4 * 32 bytes in the forward, 3/4 * (32 + 16) in the backward
    "ZeRO-3": (Layout(data=4, zero=3), {"forward": 2 * 24, "backward": 2 * 36, "optimizer": 1}),
    # eight micro-batches of 8 bytes of activations, 2 * 2 * 3/4 times 8 bytes of which are sent and waited for
    "tensor": (
        Layout(tensor=4),
        {"forward": 8 * (1 + 24), "backward": (2 + 24) + 7 * (2.25 + 24), "optimizer": 1},
    ),
    # eight micro-batches, a quarter of each on a stage, which sends 8 bytes on or back; three of them come to nothing
    "pipeline": (
        Layout(pipeline=4),
        {
            "forward": 8 * (1 + 8),
            "backward": (2 + 8) + 7 * (2.25 + 8),
            "bubble": 3 * ((1 + 8) + (2 + 8)),
            "optimizer": 1,
        },
    ),
    # four micro-batches; the all-reduce sends 2 * 1/2 * 8 bytes beside 8 that the last backward waits for
    "pipeline and ZeRO-1": (
        Layout(data=2, pipeline=2, zero=1),
        {
            "forward": 4 * (2 + 8),
            "backward": (4 + 8) + 2 * (4.5 + 8) + (8 + 4),
            "bubble": (2 + 8) + (4 + 8),
            "optimizer": 1,
            "parameters gathered": 4,
        },
    ),
    # half of the numbers, and of 8 bytes of activations 2 * 2 * 1/2 times are sent; the all-reduce sends 2 * 1/2 * 8
    "tensor and plain": (
        Layout(data=2, tensor=2),
        {"forward": 4 * (2 + 16), "backward": (4 + 16) + 2 * (4.5 + 16) + 16 + 8, "optimizer": 2},
    ),
    # 4 bytes to the host at 1/4 B/s once; 112 bytes at 10 B/s; 4 bytes back at 1/2 B/s
    "ZeRO-1, offload": (
        Layout(data=4, zero=1, offload=True),
        {"forward": 8, "backward": 8 + 16, "optimizer": 11.2, "parameters back": 8, "parameters gathered": 12},
    ),
    "ZeRO-2, offload": (
        Layout(data=4, zero=2, offload=True),
        {"forward": 8, "backward": 16 + 16, "optimizer": 11.2, "parameters back": 8, "parameters gathered": 12},
    ),
    "ZeRO-3, offload": (
        Layout(data=4, zero=3, offload=True),
        {"forward": 48, "backward": 72, "optimizer": 11.2, "parameters back": 8},
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_seconds_by_hand(name: str) -> None:
    """Seen to fail: with the all-reduce beside every backward; without the gathering before the backward of ZeRO-3;
    with ZeRO-2's reduce-scatter once per step; with tensor ranks' exchange beside computing; with the CPU's step of a
    rank's share alone."""
    layout, parts = BY_HAND[name]
    step = foreseen(TASK, micro_batch(), layout, machine())
    if name == "tensor and plain":  # the last backward: computing and what it waits for, or all that is sent
        parts = {**parts, "backward": (4 + 16) + 2 * (4.5 + 16) + max(4.5 + 16, 16 + 8)}
    if name == "pipeline and ZeRO-1":
        parts = {**parts, "backward": (4 + 8) + 2 * (4.5 + 8) + max(4.5 + 8, 8 + 4)}
    assert {part: seconds for part, seconds in step.parts.items() if seconds} == pytest.approx(parts)
    assert step.seconds == pytest.approx(sum(parts.values()))
    assert step.tokens_per_s == pytest.approx(16 / sum(parts.values()))


@pytest.mark.parametrize(("stages", "count"), [(2, 1), (2, 8), (4, 8), (8, 64)])
def test_the_bubble_of_a_pipeline(stages: int, count: int) -> None:
    """(p - 1) / (m + p - 1) of the time, the published figure (arXiv 1811.06965, section 2.3). Seen to fail: with
    (p - 1) / m, which is of the time without it."""
    micro = micro_batch(1)
    rehearsal = replace(micro.rehearsal, work={**WORK, "accumulate": WORK["backward"]})
    task = replace(TASK, batch=count, ranks=stages)
    step = foreseen(task, replace(micro, rehearsal=rehearsal), Layout(pipeline=stages), machine(between_ranks=1e12))
    run = sum(step.parts[name] for name in ("forward", "backward", "bubble"))
    assert step.parts["bubble"] / run == pytest.approx((stages - 1) / (count + stages - 1))
    assert step.lanes["compute"] == pytest.approx(run - step.parts["bubble"] + step.parts["optimizer"])


def test_stages_that_have_more_than_others() -> None:
    """By hand: of 400 FLOP 2 * 2 * 25 are the output embedding's, and the last of four stages has a quarter of the rest
    beside them; of the weights the largest stage has half. Seen to fail: with a quarter of each."""
    task = replace(TASK, head=25, stages={4: 0.5})
    step = foreseen(task, micro_batch(), Layout(pipeline=4), machine())
    busiest = 1 / 4 + 3 / 4 / 4
    assert step.parts["forward"] == pytest.approx(8 * (4 * busiest + 8))
    assert step.parts["optimizer"] == pytest.approx(4 / 2)
    assert step.device_parts["weights"] == 16
    assert step.peaks["device"] == 16 + 8 + 16 + 8
    reduced = foreseen(replace(task, batch=4), micro_batch(), Layout(data=2, pipeline=2), machine())
    more = foreseen(replace(task, batch=4, stages={2: 0.75}), micro_batch(), Layout(data=2, pipeline=2), machine())
    assert more.lanes["ranks"] - reduced.lanes["ranks"] == pytest.approx(2 * 1 / 2 * 16 * (0.75 - 0.5))


def test_checkpointing_exchanges_activations_once_more() -> None:
    """Of eight micro-batches 24 bytes each. Seen to fail: with those of the plain backward."""
    once, again = (foreseen(TASK, micro_batch(2, each), Layout(tensor=4), machine()) for each in (False, True))
    assert again.seconds - once.seconds == pytest.approx(8 * 24)


def test_ranks_share_the_link_unless_they_have_their_own() -> None:
    """By hand: 24 bytes each way at 1 and 2 B/s, and 48 at 1.2 B/s, 40 s; in the backward 72 bytes, 60 s. Gradients on
    their way to the host go there too: 4 bytes more, 4 more back when they are added.

    Seen to fail: with what is sent left out of one way; with the longest of both ways alone.
    """
    slow = machine(between_ranks=0, to_device=1, to_host=2, duplex=1.2)
    step = foreseen(TASK, micro_batch(), Layout(data=4, zero=3), slow)
    assert (step.parts["forward"], step.parts["backward"]) == pytest.approx((80, 120))
    assert step.bottleneck == "duplex"
    assert "ranks" not in step.lanes
    offloads = foreseen(TASK, micro_batch(), Layout(data=4, zero=3, offload=True), slow)
    assert offloads.parts["backward"] == pytest.approx((76 + 80) / 1.2)


def test_peaks_and_where_they_come_from() -> None:
    """By hand, of all ranks in host memory: a quarter of 16 + 16 + 32 + 4 bytes each. Seen to fail: with one rank's."""
    step = foreseen(TASK, micro_batch(), Layout(data=4, zero=2, offload=True), machine())
    assert step.peaks == {"device": 40, "host": 68}
    assert step.host_parts == {"weights": 16, "gradients": 16, "optimizer": 32, "optimizer's temporaries": 4}
    assert sum(step.device_parts.values()) == 40
    assert step.phase == "backward"


@pytest.mark.parametrize(
    ("ranks", "heads", "layers", "options", "expected"),
    [
        (1, 8, 8, {}, ["1 1 1 0", "1 1 1 1 offload", "1 1 1 2 offload"]),
        (1, 8, 8, {"optimizer": "sgd"}, ["1 1 1 0", "1 1 1 2 offload"]),
        (1, 8, 8, {"optimizer": "adamw_8bit"}, ["1 1 1 0"]),
        (3, None, 3, {"optimizer": "adamw_8bit"}, ["3 1 1 0", "3 1 1 1", "3 1 1 2", "3 1 1 3"]),
        (2, 2, 3, {"optimizer": "adamw_8bit"}, ["2 1 1 0", "2 1 1 1", "2 1 1 2", "2 1 1 3", "1 2 1 0"]),
        (2, 2, None, {"method": "qlora", "optimizer": "adamw_8bit"}, ["2 1 1 0", "2 1 1 1", "2 1 1 2", "2 1 1 3"]),
        (
            2,
            None,
            2,
            {"method": "lora"},
            [
                *(f"2 1 1 {zero}" for zero in ("0", "1", "1 offload", "2", "2 offload")),
                "2 1 1 3",
                "2 1 1 3 offload",
                "1 1 2 0",
            ],
        ),
        (
            4,
            2,
            2,
            {"optimizer": "adamw_8bit"},
            [
                "4 1 1 0",
                "4 1 1 1",
                "4 1 1 2",
                "4 1 1 3",
                "2 1 2 0",
                "2 1 2 1",
                "2 2 1 0",
                "2 2 1 1",
                "2 2 1 2",
                "2 2 1 3",
                "1 2 2 0",
            ],
        ),
    ],
)
def test_layouts(ranks: int, heads: int | None, layers: int | None, options: Any, expected: list[str]) -> None:
    """Seen to fail: with ZeRO of one replica; with tensor ranks of layers in 4 bits; with ZeRO-2 in a pipeline."""
    found = layouts(ranks, heads, layers, FineTuningJob(**options), {})
    said = [f"{x.data} {x.tensor} {x.pipeline} {x.zero}{' offload' if x.offload else ''}" for x in found]
    assert said == expected


def synthetic(size: int, checkpoints: bool, accumulate: int = 2) -> MicroBatch:
    """Of 2 GiB of weights, where checkpointing keeps a fifth and computes a third more."""
    kept = int((0.2 if checkpoints else 1.0) * size * GIB)
    backward = Phase("backward", 2 * GIB, 0, 4 * GIB, working=kept)
    again = replace(backward, gradients=2 * GIB)
    step = Phase("step", 2 * GIB, 2 * GIB, 4 * GIB, stepping=GIB)
    flops = {
        "forward": 1e12,
        "backward": 3e12 if checkpoints else 2e12,
        "accumulate": 3.1e12 if checkpoints else 2.1e12,
    }
    work: dict[str, dict[str, float]] = {
        name: {"product float32": size * each, "call": 1e4} for name, each in flops.items()
    }
    work["step"] = {"elementwise": 2e10}
    return MicroBatch(size, checkpoints, Rehearsal((backward, step), (again, step), 2 * GIB, work))


REAL = machine(
    **{"product float32": 5e13, "elementwise": 8e11, "call": 1e5, "cpu_optimizer": 1e11, "between_ranks": 2e10},
    to_device=2.5e10,
    to_host=2.5e10,
    duplex=4e10,
)
LARGE = FineTuningTask(batch=48, length=2048, ranks=4, layers=24, hidden=2048, itemsize=2, largest_layer=GIB // 8)


def searched() -> list[Step]:
    among = layouts(4, 4, 24, FineTuningJob(), {})
    sizes = micro_batch_sizes(48, among)
    return ways(LARGE, rehearsed(sizes, [False, True], among, LARGE, None, synthetic), among, REAL)


def everything() -> Iterator[Step]:
    """All that there is, without the search's own rules."""
    for data, tensor, pipeline, zero, offload, size, checkpoints in product(
        range(1, 5), range(1, 5), range(1, 5), range(4), (False, True), range(1, 49), (False, True)
    ):
        if data * tensor * pipeline != 4 or 48 % (data * size) or (offload and not zero):
            continue
        if (data == 1 and zero and (not offload or zero == 3)) or (pipeline > 1 and (offload or zero > 1)):
            continue
        yield foreseen(LARGE, synthetic(size, checkpoints), Layout(data, zero, offload, tensor, pipeline), REAL)


@pytest.fixture(scope="module")
def steps() -> list[Step]:
    return searched()


def test_the_search_finds_the_fastest_of_all(steps: list[Step]) -> None:
    """Seen to fail: with powers of two alone as micro-batches; with the slowest that fits."""
    every = list(everything())
    assert len(steps) == len(every)
    assert {described(step) for step in steps} == {described(step) for step in every}
    budgets: list[dict[Place, int | None]] = [
        {"device": device * GIB, "host": host * GIB} for device, host in product((3, 5, 9, 20, 80), (0, 9, 100))
    ]
    for given in [*budgets, {"device": None, "host": None}]:
        fitting = [step for step in every if fits(step, given)]
        if not fitting:
            with pytest.raises(BudgetError):
                fastest(steps, given)
            continue
        best, runners_up, saved = fastest(steps, given)
        assert fits(best, given)
        assert best.seconds == min(step.seconds for step in fitting)
        assert all(one.seconds <= other.seconds for one, other in pairwise((best, *runners_up)))
        assert len({(step.layout, step.checkpoints) for step in (best, *runners_up)}) == 1 + len(runners_up)
        for place, seconds in saved.items():
            more = {**given, place: (given[place] or 0) + GIB}
            assert seconds == best.seconds - min(step.seconds for step in every if fits(step, more))
            assert seconds >= 0


def test_what_is_too_large_is_not_run() -> None:
    """Eight sequences fit with 20 GiB, twelve do not, nor does what is larger; with checkpointing all do.

    Seen to fail: without the end of the row.
    """
    among = [Layout(data=4)]
    run = rehearsed(micro_batch_sizes(48, among), [False, True], among, LARGE, 15 * GIB, synthetic)
    assert [micro.size for micro in run if not micro.checkpoints] == [1, 2, 3, 4, 6, 12]
    assert [micro.size for micro in run if micro.checkpoints] == [1, 2, 3, 4, 6, 12]
    run = rehearsed(micro_batch_sizes(48, among), [False], among, LARGE, 11 * GIB, synthetic)
    assert [micro.size for micro in run] == [1, 2, 3, 4], "the first that is too large is still foreseen"


def test_more_memory_is_never_slower(steps: list[Step]) -> None:
    """Seen to fail: with the last step that fits."""
    seconds = [fastest(steps, {"device": size * GIB, "host": 16 * GIB})[0].seconds for size in (3, 4, 6, 10, 30)]
    assert all(later <= earlier for earlier, later in pairwise(seconds))
    assert seconds[-1] < seconds[0]
    seconds = [fastest(steps, {"device": 3 * GIB, "host": size * GIB})[0].seconds for size in (8, 9, 12, 100)]
    assert all(later <= earlier for earlier, later in pairwise(seconds))


@pytest.mark.parametrize(("device", "host"), [(0.5, 0), (1.4, 1), (2.2, 4), (0.1, 100)])
def test_budgets_that_would_do_do(steps: list[Step], device: float, host: float) -> None:
    """Each of them, with what it leaves out as it was. Seen to fail: with tensors' bytes for the card's."""
    given: dict[Place, int | None] = {"device": int(device * GIB), "host": int(host * GIB)}
    with pytest.raises(BudgetError, match=rf"No plan fits device=.* none of {len(steps)} ways") as error:
        fastest(steps, given)
    answers = str(error.value).partition("as it is: ")[2].partition(". Lower")[0].split("; or ")
    for answer in answers:
        sizes = {place: int(size) for place, size in re.findall(r"(device|host)=(\d+)", answer)}
        if "device" in sizes:
            sizes["device"] = tensors_on(sizes["device"])
        enough = {**given, **sizes}
        best, _, _ = fastest(steps, enough)
        assert fits(best, enough)
        for place in sizes:
            less = {**enough, place: sizes[place] - 3}
            with pytest.raises(BudgetError):
                fastest(steps, less)
