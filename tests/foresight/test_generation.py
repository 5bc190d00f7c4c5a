"""The search for a policy of offloaded generation: its equations by hand, its bounds, and what was measured on a T4."""

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
from published import MACHINES, OPT, RUNS, Published

from lightning_compress.errors import BudgetError, CompressionError
from lightning_compress.foresight.generation import Policy, best_policy, foreseen, row_by_row
from lightning_compress.foresight.generation_cost import FRACTIONS, Hardware, Schedule, Task, Tier, Transformer
from lightning_compress.foresight.planned import tensors_on

T4 = MACHINES["the paper's disk"]
FAST = 1e15
TINY = Transformer(layers=2, hidden=4, intermediate=8, heads=2)
"""128 parameters per layer."""
WIDE = Transformer(layers=10, hidden=4, intermediate=512, heads=2)
"""4160 parameters, so 8320 bytes, per layer; 16 bytes of cache per token and layer."""
SHORT = Task(prompt_length=8, new_tokens=4)
SMALL = {"gpu_batch_sizes": (1, 4, 16, 48), "num_gpu_batches": (1, 2, 4, 8)}


def fast(**slow: float) -> Hardware:
    """A machine on which everything is fast and there is enough of all, but for what is given."""
    rates = {
        name: FAST
        for name in Hardware.__dataclass_fields__
        if name not in slow and name not in ("device_bytes", "host_bytes", "disk_bytes")
    }
    sizes = {name: int(slow.pop(name, 1e12)) for name in ("device_bytes", "host_bytes", "disk_bytes")}
    return Hardware(**sizes, **rates, **slow)


def placed(**given: float) -> dict[str, float]:
    """All on the GPU, but for what is given."""
    fractions = {name: float(name.endswith("g")) for name in FRACTIONS}
    for name, fraction in given.items():
        fractions[f"{name[0]}g"] -= fraction
        fractions[name] = fraction
    return fractions


def appendix_peaks(model: Transformer, task: Task, schedule: Schedule, p: Mapping[str, float]) -> dict[Tier, float]:
    """Appendix A.3 of the paper in its own letters, for heads that are not grouped, two bytes per element, and with
    this module's corrections (memory of scores in prefill; one token's states in decoding)."""
    s, n, h1, h2, nh = task.prompt_length, task.new_tokens, model.hidden, model.intermediate, model.heads
    layers = model.layers
    gbs, bls = schedule.gpu_batch_size, schedule.block_size
    w = 8 * h1**2 + 4 * h1 * h2
    home = {t: (p[f"w{t}"] * w + 4 * (s + n) * h1 * p[f"c{t}"] * bls) * layers for t in "gcd"}
    staged = 2 * (1 - p["wg"]) * w + model.outside_bytes
    prefill = staged + p["hg"] * 2 * s * h1 * bls + (1 - p["hg"]) * 2 * s * h1 * gbs
    prefill += gbs * max(8 * s * h1, 4 * s * h1 + 2 * nh * s**2, 2 * s * (h1 + h2))
    scores = 2 * (s + n) * h1 + 4 * h1 + 2 * nh * (s + n)
    elsewhere = (1 - p["cg"]) * 2 * 4 * (s + n) * h1
    attention = p["cg"] * scores if schedule.cpu_attention else scores - (1 - p["cg"]) * 2 * (s + n) * h1 + elsewhere
    decode = staged + p["hg"] * 2 * h1 * bls + (1 - p["hg"]) * 2 * h1 * gbs
    decode += gbs * max(8 * h1, attention, 2 * (h1 + h2))
    on_host = p["hc"] * 2 * s * h1 * bls + (1 - p["wg"]) * w + (1 - p["hg"]) * 2 * s * h1 * gbs
    later = p["hc"] * 2 * h1 * bls + p["wd"] * w + 2 * p["hd"] * 2 * h1 * gbs + 2 * p["cd"] * 4 * (s + n) * h1 * gbs
    later += (2 * nh * (s + n) + 2 * h1) * gbs if schedule.cpu_attention else 0
    return {
        "device": home["g"] + max(prefill, decode),
        "host": home["c"] + max(on_host, later),
        "disk": home["d"] + p["hd"] * 2 * s * h1 * bls,
    }


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str], Policy]:
    """By system and model what we would do, with a prompt of 512 tokens."""
    searches = {"FlexGen": best_policy, "Accelerate": row_by_row}
    runs = [run for run in RUNS if run.prompt_length == 512]
    return {(run.system, run.model): searches[run.system](OPT[run.model], T4, run.task) for run in runs}


@pytest.mark.slow
def test_order_of_what_was_measured(found: dict[tuple[str, str], Policy]) -> None:
    """Table 2: FlexGen is as fast as Accelerate or faster on each model, the more so the larger the model, and both are
    slower the larger it is.

    Seen to fail: with row by row in blocks of eight batches.
    """
    speed = {key: policy.tokens_per_s for key, policy in found.items()}
    for model in OPT:
        assert speed["FlexGen", model] >= speed["Accelerate", model]
    for system in ("FlexGen", "Accelerate"):
        assert speed[system, "OPT-6.7B"] > speed[system, "OPT-30B"] > speed[system, "OPT-175B"]
    gains = [speed["FlexGen", model] / speed["Accelerate", model] for model in OPT]
    assert gains == sorted(gains)
    assert gains[0] < 2 < gains[1] < 20 < gains[2]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.system} {run.model} {run.prompt_length}")
def test_seconds_of_what_was_measured(run: Published) -> None:
    """Published policies under our equations: FlexGen's within a third. Accelerate on OPT-30B is 2.6 times too fast
    here (its copies seem to be from memory that is not pinned), and on OPT-175B only one digit was published.

    Seen to fail: without the bound by the GPU's memory (2.4 times too fast on OPT-6.7B); without attention on the CPU.
    """
    policy = foreseen(OPT[run.model], T4, run.task, run.schedule, run.fractions)
    ratio = policy.tokens_per_s / run.tokens_per_s
    low, high = (0.75, 1.33) if run.system == "FlexGen" or run.model == "OPT-6.7B" else (0.45, 2.7)
    assert low < ratio < high


def test_bounds_of_memory(found: dict[tuple[str, str], Policy]) -> None:
    """Recomputed from the appendix. Seen to fail: without the second layer's weights on their way to the GPU; without
    the last tokens' cache in host memory; with budgets raised by a tenth in the programme."""
    for (_, name), policy in found.items():
        recomputed = appendix_peaks(OPT[name], Task(512, 32), policy.schedule, policy.fractions)
        for tier, size in recomputed.items():
            assert size <= T4.budgets[tier] * (1 + 1e-6)
            assert policy.peaks[tier] == pytest.approx(size, rel=1e-6, abs=1)


@pytest.mark.parametrize("schedule", [Schedule(4, 3, True), Schedule(4, 3, False)])
def test_peaks_of_any_placement(schedule: Schedule) -> None:
    """Seen to fail: with scores of one head only; with the cache of the prompt alone."""
    for task in (Task(512, 32), Task(1, 2000)):
        for fractions in (placed(), placed(wc=0.3, wd=0.2, cc=0.5, cd=0.1, hc=0.2, hd=0.7), placed(cd=1, hc=1)):
            policy = foreseen(OPT["OPT-6.7B"], T4, task, schedule, fractions)
            recomputed = appendix_peaks(OPT["OPT-6.7B"], task, schedule, fractions)
            assert policy.peaks == pytest.approx(recomputed, rel=1e-9, abs=1)


def test_fractions_sum_to_one(found: dict[tuple[str, str], Policy]) -> None:
    """Seen to fail: without the lower bound of the sums, under which nothing is stored anywhere."""
    for (system, name), policy in found.items():
        for kind in "wch":
            assert sum(policy.fractions[kind + tier] for tier in "gcd") == pytest.approx(1)
        assert all(0 <= fraction <= 1 + 1e-9 for fraction in policy.fractions.values())
        if system == "Accelerate":
            assert policy.fractions["cg"] == policy.fractions["hg"] == pytest.approx(1)
            assert policy.schedule.num_gpu_batches == 1
        if name == "OPT-175B":
            assert policy.fractions["wd"] > 0.3, "324 GiB do not fit in host memory"


def test_all_on_the_gpu_takes_its_computing() -> None:
    """By hand. Prompts: 2 * 128 * 8 FLOP of products at 1024 FLOP/s and 4 * 8 * 8 * 4 of attention at 512 are 4 s a
    layer. New tokens: 2 * 128 at 256 and 4 * 10 * 4 of attention at 160 are 2 s, in 2 layers and for 3 tokens.

    Seen to fail: with new_tokens steps of decoding; with the context of the prompt alone.
    """
    rates = {"prefill_products": 1024, "prefill_attention": 512, "decode_products": 256, "decode_attention": 160}
    hardware = fast(**rates, host_bytes=0, disk_bytes=0)
    policy = best_policy(TINY, hardware, SHORT, (1,), (1,))
    assert policy.fractions["wg"] == policy.fractions["cg"] == pytest.approx(1)
    assert policy.bottleneck == "compute"
    assert (policy.prefill_s, policy.decode_s) == pytest.approx((8, 12), rel=1e-3)
    assert policy.tokens_per_s == pytest.approx(4 / 20, rel=1e-3)


def test_the_gpus_memory_bounds_small_batches() -> None:
    """By hand: 256 bytes at 128 B/s are 2 s a layer, whether one sequence is computed or 8; of 16, products take 4 s.

    Seen to fail: with operations alone.
    """
    hardware = fast(gpu_memory=128, decode_products=1024)
    for batch_size, seconds in ((1, 2), (8, 2), (16, 4)):
        tokens = Task(8, 2)
        policy = foreseen(TINY, hardware, tokens, Schedule(batch_size, 1, True), placed(cc=1))
        assert policy.decode_s == pytest.approx(2 * seconds)


def test_weights_on_the_disk_take_its_seconds() -> None:
    """By hand: 8320 bytes at 2080 B/s are 4 s for each of 10 layers, once for the prompt and for 3 of 4 new tokens;
    a block of four batches shares them. The device has room for two layers and what works there, the host for one.

    Seen to fail: with weights read for every batch.
    """
    hardware = fast(device_bytes=26800, host_bytes=8600, disk_read=2080)
    one = best_policy(WIDE, hardware, SHORT, (1,), (1,))
    assert one.bottleneck == "disk_read"
    assert one.fractions["wd"] > 0.95
    assert one.prefill_s == pytest.approx(40 * one.fractions["wd"], rel=0.01)
    exact = foreseen(WIDE, hardware, SHORT, Schedule(1, 1, True), placed(wd=1))
    assert (exact.prefill_s, exact.decode_s) == pytest.approx((40, 120))
    assert exact.tokens_per_s == pytest.approx(4 / 160)
    block = foreseen(WIDE, hardware, SHORT, Schedule(1, 4, True), placed(wd=1))
    assert block.tokens_per_s == pytest.approx(4 * exact.tokens_per_s)


def test_without_overlapping_lanes_add_up() -> None:
    """By hand: 8320 bytes through the link at 4160 B/s, 2 s, and from the disk at 2080, 4 s, in 10 layers.

    Seen to fail: with the longest lane for both.
    """
    hardware = fast(to_device=4160, disk_read=2080)
    for overlaps, seconds in ((True, 40), (False, 60)):
        policy = foreseen(WIDE, hardware, SHORT, Schedule(1, 1, False, overlaps), placed(wd=1))
        assert policy.prefill_s == pytest.approx(seconds)


def test_cache_that_is_elsewhere() -> None:
    """By hand, for one new token after the first, at 10 tokens of context: attention on the GPU brings 10 * 16 bytes a
    layer, on the CPU a query of 8 bytes, and computes 4 * 10 * 4 FLOP there.

    Seen to fail: with the cache brought for both.
    """
    task = Task(9, 2)
    link = foreseen(WIDE, fast(to_device=160), task, Schedule(1, 1, False), placed(cc=1))
    assert link.decode_s == pytest.approx(10)
    slow = fast(to_device=8, cpu_attention=80)
    assert foreseen(WIDE, slow, task, Schedule(1, 1, True), placed(cc=1)).lanes["to_device"] == pytest.approx(10)
    assert foreseen(WIDE, slow, task, Schedule(1, 1, True), placed(cc=1)).decode_s == pytest.approx(20)
    grouped = replace(WIDE, kv_heads=1)
    assert foreseen(grouped, fast(to_device=160), task, Schedule(1, 1, False), placed(cc=1)).decode_s == pytest.approx(
        5
    )


@pytest.mark.parametrize("tier", ["device_bytes", "host_bytes", "disk_bytes"])
@pytest.mark.parametrize("name", ["OPT-30B", "OPT-175B"])
def test_more_memory_never_makes_it_slower(tier: str, name: str) -> None:
    """Seen to fail: with a bound turned round."""
    task, speeds = Task(512, 32), []
    for factor in (0.7, 1.0, 1.5, 3.0):
        hardware = replace(T4, **{tier: int(factor * getattr(T4, tier))})
        speeds.append(best_policy(OPT[name], hardware, task, **SMALL).tokens_per_s)
    assert all(later >= earlier * (1 - 2e-4) for earlier, later in pairwise(speeds))
    if tier == "host_bytes" and name == "OPT-175B":
        assert speeds[-1] > 2 * speeds[0], "here it helps"


def test_overlapping_blocks_are_never_slower_than_row_by_row() -> None:
    """Its placements are among those of the search. Seen to fail: with a cache that is always in host memory."""
    for factor in (0.8, 2.0, 30.0):
        hardware = replace(T4, device_bytes=int(factor * T4.device_bytes))
        best = best_policy(OPT["OPT-30B"], hardware, Task(512, 32), **SMALL)
        usual = row_by_row(OPT["OPT-30B"], hardware, Task(512, 32), SMALL["gpu_batch_sizes"])
        assert best.tokens_per_s >= usual.tokens_per_s * (1 - 2e-4)


def test_greedy_placement() -> None:
    """First the device is filled, then the host. Seen to fail: with the host first."""
    for host_bytes, on_disk in ((20 << 30, True), (150 << 30, False)):
        hardware = replace(T4, host_bytes=host_bytes)
        policy = row_by_row(OPT["OPT-30B"], hardware, Task(512, 32), (4,))
        assert policy.peaks["device"] == pytest.approx(hardware.device_bytes, rel=1e-6)
        assert (policy.peaks["host"] > 0.999999 * host_bytes) == on_disk == (policy.fractions["wd"] > 0.1)


def test_no_more_prompts_than_there_are() -> None:
    """Seen to fail: without that bound."""
    policy = best_policy(OPT["OPT-30B"], T4, Task(512, 32, num_prompts=20))
    assert policy.schedule.block_size <= 20
    with pytest.raises(CompressionError, match="new_tokens=0"):
        Task(512, 0)


@pytest.mark.parametrize("search", [best_policy, row_by_row])
@pytest.mark.parametrize("given", [(4 << 30, 2 << 30, 1 << 30), (12 << 30, 30 << 30, 0)])
def test_what_is_too_little_is_said(search: object, given: tuple[int, int, int]) -> None:
    """And each way out that is named is one, and hardly more than needed.

    Seen to fail: with the budgets' weights alone; with a way that leaves the other tiers out; with a device's tensors
    named where its card is given.
    """
    assert search in (best_policy, row_by_row)
    run = best_policy if search is best_policy else row_by_row
    names = ("device", "host", "disk")
    hardware = replace(T4, **{f"{name}_bytes": size for name, size in zip(names, given, strict=True)})
    model, task = OPT["OPT-30B"], Task(512, 32)
    with pytest.raises(BudgetError, match="Not even one sequence") as error:
        run(model, hardware, task)
    ways = str(error.value).partition("as it is: ")[2].split("; or ")
    assert ways
    for way in ways:
        named = dict(re.findall(r"(device|host|disk)=(\d+)", way))
        sizes = {f"{name}_bytes": tensors_on(int(n)) if name == "device" else int(n) for name, n in named.items()}
        assert run(model, replace(hardware, **sizes), task, (1,)).tokens_per_s > 0
        raised = [name for name, size in sizes.items() if size > getattr(hardware, name)]
        assert raised
        for name in raised:
            less = {**sizes, name: int(0.98 * sizes[name])}
            with pytest.raises(BudgetError):
                run(model, replace(hardware, **less), task, (1,))
