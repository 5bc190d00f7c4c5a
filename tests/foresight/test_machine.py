"""Rates, where they come from, and what is learnt from runs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_compress.errors import CompressionError
from lightning_compress.foresight.compare import compared, factors
from lightning_compress.foresight.machine import (
    SHEETS,
    UNITS,
    Machine,
    Rate,
    cache_file,
    load_machine,
    named_gpu,
    save_machine,
)
from lightning_compress.foresight.plan import Choice, Foreseen, Plan
from lightning_compress.foresight.probe import probe
from lightning_compress.memory.needs import Waiting


def plan(**seconds: float) -> Plan:
    times = {"onload_s": 0.0, "run_s": 2.0, "solve_s": 1.0, "write_s": 0.5, **seconds}
    parts = tuple(
        Foreseen(
            name, lanes={"compute": times["run_s"]}, moved_bytes={"disk_read": 7}, peaks={"host": {"a": 5}}, **times
        )
        for name in ("a", "b")
    )
    return Plan(Choice(1, "staged", 1, "disk"), Waiting(), 0.0, 1.0, parts, 0.0, {"host": 5}, {})


def ran(**seconds: float) -> list[dict[str, object]]:
    times = {"onload_s": 0.0, "run_s": 3.0, "solve_s": 0.5, "write_s": 0.5, **seconds}
    return [{"name": name, **times, "moved_bytes": {"disk_read": 8}, "peak_bytes": 10} for name in ("a", "b")]


@pytest.mark.slow
def test_every_rate_of_this_machine_is_measured_and_kept(tmp_path: Path) -> None:
    found = probe(torch.device("cpu"), tmp_path, rounds=1)
    of_gpus = {"to_device", "to_host", "duplex", "pinning", "start"}
    assert {kind.partition(" ")[0] for kind in found.rates} | of_gpus == set(UNITS)
    assert all(rate.value > 0 and rate.origin == "measured" for rate in found.rates.values())
    assert list(tmp_path.iterdir()) == []
    file = cache_file("cpu", tmp_path)
    save_machine(found, file)
    again = load_machine(file)
    assert {kind: rate.value for kind, rate in again.rates.items()} == {k: r.value for k, r in found.rates.items()}
    assert {rate.origin for rate in again.rates.values()} == {"cached"}
    for other in ("{}", "[]", '{"rates": []}'):
        file.write_text(other)
        with pytest.raises(CompressionError, match="no record of a probe"):
            load_machine(file)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_is_above_zero(rate: float, tmp_path: Path) -> None:
    """Seen to fail: any number was taken for one."""
    save_machine(Machine("x", "cpu", {"call": Rate(rate, "measured")}), tmp_path / "cpu.json")
    with pytest.raises(CompressionError, match=r"no record of a probe .*a rate is above zero, and of call is "):
        load_machine(tmp_path / "cpu.json")


def test_seconds_are_amounts_by_rates() -> None:
    machine = Machine("x", "cpu", {"product float32": Rate(10.0, "assumed"), "call": Rate(2.0, "assumed")})
    assert machine.seconds({"product float32": 30.0, "call": 4, "elementwise": 0}) == 5.0
    assert machine.seconds({"product float64": 10.0}) == 1.0, "the slowest of its family"


@pytest.mark.parametrize(("name", "sold"), [("t4", 16), ("rtx4090", 24), ("a100-80gb", 80), ("l40s", 48)])
def test_cards_have_less_memory_than_they_are_sold_with(name: str, sold: int) -> None:
    """Seen to fail: with the data sheet's."""
    found = named_gpu(name, None).device_bytes
    assert found is not None
    assert (0.9 * sold) * 2**30 < found < (sold - 0.4) * 2**30


@pytest.mark.parametrize("name", SHEETS)
def test_named_gpus_say_that_they_are_assumed(name: str) -> None:
    found = named_gpu(name, None)
    assert {kind.partition(" ")[0] for kind in found.rates} == set(UNITS) - {"mapping", "solve"}
    assert {rate.origin for rate in found.rates.values()} == {"assumed"}
    assert found.device_bytes is not None
    assert found.device_bytes > 14 * 2**30
    host = Machine("here", "cpu", {kind: Rate(7.0, "cached") for kind in (*found.rates,)})
    of_here = named_gpu(name.upper(), host)
    assert of_here.rates["disk_read"] == Rate(7.0, "cached")
    assert of_here.rates["product bfloat16"] == found.rates["product bfloat16"]
    assert of_here.rates["packing"] == found.rates["packing"], "done by the GPU, not by the host"
    older = replace(host, rates={kind: rate for kind, rate in host.rates.items() if kind != "scratch_read"})
    rate = named_gpu(name, older).rates["scratch_read"]
    assert rate == found.rates["scratch_read"], "an earlier version's probe has no such rate"
    older = replace(host, rates={kind: rate for kind, rate in host.rates.items() if kind != "writing shards"})
    assert named_gpu(name, older).rate("writing shards") == 7.0, "several are written as fast as one was seen to be"


@pytest.mark.parametrize(
    ("device", "others"),
    [("cpu", ("to_device", "to_host", "duplex", "pinning", "start")), ("cuda", ("mapping", "solve"))],
)
def test_what_an_earlier_version_measured_may_lack_a_rate(device: str, others: tuple[str, ...]) -> None:
    """It is measured anew then; not for what is of the other kind of device. Seen to fail: with every file taken for
    complete, and with a GPU that has to have a rate of solves."""
    rates = {kind: Rate(1.0, "cached") for kind in UNITS if kind not in others}
    assert Machine("x", device, rates).is_complete
    for lacking in rates:
        assert not Machine("x", device, {kind: rate for kind, rate in rates.items() if kind != lacking}).is_complete


def test_unknown_names_are_refused() -> None:
    with pytest.raises(CompressionError, match=r"gpu=rtx9999 is not known; known are t4, .*b200"):
        named_gpu("rtx9999", None)


def test_refitting_makes_the_plan_what_was_measured() -> None:
    """Seen to fail: with factors the other way round."""
    found, left = factors([(plan(), ran())], {})
    assert not left
    assert found == {
        **dict.fromkeys(("product", "attention", "elementwise", "call", "mapping"), 1.5),
        **dict.fromkeys(("solve", "packing"), 0.5),
        "writing": 1.0,
    }
    machine = Machine("x", "cpu", {"product float32": Rate(30.0, "cached"), "disk_read": Rate(4.0, "cached")})
    again = machine.refitted(found)
    assert again.rates == {"product float32": Rate(20.0, "refitted"), "disk_read": Rate(4.0, "cached")}
    waiting = replace(plan(), subgraphs=tuple(replace(part, lanes={"disk": 2.0}) for part in plan().subgraphs))
    assert "product" not in factors([(waiting, ran())], {})[0], "it was not computing that took so long"
    with pytest.raises(CompressionError, match="no run of a plan"):
        factors([(plan(), [])], {})


def test_nothing_is_learned_from_phases_that_took_next_to_nothing() -> None:
    """Seen to fail: 0.3 s for 0.01 s of writing, which are of opening files, made it 30 times slower for good."""
    short = tuple(replace(part, write_s=0.005) for part in plan().subgraphs)
    records = [{**record, "write_s": 0.15} for record in ran()]
    found, left = factors([(replace(plan(), subgraphs=short), records)], {})
    assert "product" in found
    assert "writing" not in found
    assert left == ["write (0.01 s foreseen, 0.3 s measured)"]
    short = tuple(replace(part, run_s=0.01, solve_s=0.01, lanes={"compute": 0.01}) for part in short)
    with pytest.raises(CompressionError, match=r"too short to learn from: run \(0.02 s foreseen, 6 s m.*, solve"):
        factors([(replace(plan(), subgraphs=short), records)], {})


def test_solves_of_a_gpu_are_not_refitted() -> None:
    """They are calls and products. Seen to fail: with its packing made slower for them."""
    planned = replace(plan(), rates={"product float32": 30.0, "packing": 8.0, "to_device": 1.0})
    found, _ = factors([(planned, ran())], planned.rates)
    assert "writing" in found
    assert not {"solve", "packing"} & found.keys()


def test_refitting_again_changes_nothing() -> None:
    """Seen to fail: a report that was learned from twice made rates slower twice."""
    rates = {"product float32": Rate(30.0, "cached"), "solve float32": Rate(8.0, "cached")}
    machine = Machine("x", "cpu", rates)
    planned = replace(plan(), rates={name: rate.value for name, rate in rates.items()})
    for _ in range(3):
        known = {name: rate.value for name, rate in machine.rates.items()}
        machine = machine.refitted(factors([(planned, ran())], known)[0])
    assert machine.rates["product float32"].value == pytest.approx(20.0)
    assert machine.rates["solve float32"].value == pytest.approx(16.0)


def test_layers_that_are_called_several_times() -> None:
    """Are several subgraphs of one name. Seen to fail: all of them beside the last one."""
    planned = plan()
    seconds = (1.0, 9.0)
    parts = zip(planned.subgraphs, seconds, strict=True)
    first, second = (replace(part, name="layer", run_s=each) for part, each in parts)
    planned = replace(planned, subgraphs=(first, second))
    records = [{**record, "name": "layer", "run_s": each} for record, each in zip(ran(), seconds, strict=True)]
    assert factors([(planned, records)], {})[0]["product"] == 1.0
    rows = {row.name: row for row in compared(planned, records[:1], 2.0, "cpu")}
    assert (rows["run"].foreseen, rows["run"].measured) == (1.0, 1.0)


def test_a_plan_beside_its_run() -> None:
    rows = {row.name: row for row in compared(plan(), ran(), 2.0, "cpu")}
    assert (rows["run"].foreseen, rows["run"].measured, rows["run"].error) == (4.0, 6.0, pytest.approx(-1 / 3))
    assert (rows["prepare"].foreseen, rows["prepare"].measured) == (1.0, 2.0)
    assert (rows["all subgraphs"].foreseen, rows["all subgraphs"].measured) == (7.0, 8.0)
    assert (rows["peak of the host"].foreseen, rows["peak of the host"].measured) == (5, 10)
    assert (rows["disk_read"].foreseen, rows["disk_read"].measured) == (14, 16)
    assert "to_host" not in rows
