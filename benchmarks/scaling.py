"""How calibration scales with ranks, here and in LLM Compressor 0.14.0.1, and what more ranks would bring.

    python benchmarks/scaling.py [--ranks 1 2] [--runs 3] [--peer-venv DIR | --no-peer] [--simulate 4 8 64 512]

The case of `gptq_vs_llmcompressor.py` (Llama 768 wide, 8 layers, fp32; W4A16 in groups of 128; 64 samples of 256 tokens
in batches of 8), from the loaded model to the written checkpoint (the peer: to the solved model in memory). Ranks are
processes of one thread each on this machine, or of one GPU each by NCCL where there are GPUs. Runs of both sides and of
all sizes alternate; medians.

Printed: seconds per phase at each number of ranks, of the slowest rank (collective operations hold the waiting for
others); the speed-up of calibration and solving (all but tracing and writing), and the bound that the serial part of
the run on one rank allows (Amdahl's law). In every round as many runs of one rank as there are ranks take place at the
same time, too, which share nothing: what they lose to one another (clock rate, caches, memory) no way of sharing work
could keep. Then what the simulation says: every operation of the run on one rank, with
batches and row tiles shared out as the product does, and links of the given rate between ranks. It is checked against
the measurement of two ranks, for links as fast as this machine's own, and then asked for --simulate ranks.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptq_vs_llmcompressor import HERE, PEER, SPEED_SAMPLES, ensure_inputs, ensure_peer

from lightning_compress.distributed.share import shares_factor

BATCH_SIZE = 8
SHARED = ("forward", "statistics", "panels", "solve")
PHASES = ("trace", "forward", "statistics", "agree", "reduce", "factor", "panels", "solve", "gather", "write", "other")
NOT_CALIBRATION = ("trace", "write")
BESIDE = "side by side"  # runs of one rank at the same time

Event = list[Any]  # [phase, seconds, bytes exchanged or tiles solved; of panels channels, tiles and bytes]


@dataclass(frozen=True)
class Link:
    """Between two ranks.

    Attributes:
        rate: bytes per second, one way.
        latency: seconds until a small message is there.
    """

    rate: float
    latency: float


def start_ranks(command: list[str], size: int) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            command,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "TOKENIZERS_PARALLELISM": "false"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def start_side_by_side(command: list[str], number: int) -> list[subprocess.Popen[str]]:
    """Runs of one rank that have nothing to do with one another."""
    folder = Path(command[command.index("--output-dir") + 1])
    return [
        run
        for place in range(number)
        for run in start_ranks([*command, "--output-dir", str(folder.with_name(f"{folder.name}-{place}"))], 1)
    ]


def results_of(ranks: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """What each of them printed."""
    outputs = [rank.communicate() for rank in ranks]
    for rank, (_, errors) in zip(ranks, outputs, strict=True):
        if rank.returncode:
            raise SystemExit(errors[-4000:])
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


def simulate(events: list[Event], size: int, link: Link, num_batches: int) -> dict[str, float]:
    """Seconds per phase on `size` ranks with `num_batches` batches, from the operations of a run on one."""
    seconds = dict.fromkeys(PHASES, 0.0)
    measured = next(number for number in _updates_per_step(events) if number)
    updates: list[float] = []
    for phase, taken, amount in events:
        if phase == "statistics":
            updates.append(taken)
        elif phase == "forward":  # a step ends; its updates came before
            mine = -(-num_batches // size)
            seconds["forward"] += taken / measured * mine
            seconds["statistics"] += sum(updates) / measured * mine
            updates.clear()
        elif phase == "solve":
            seconds["solve"] += taken / amount * -(-amount // size)  # tiles of about one height
        elif phase == "panels":
            channels, tiles, nbytes = amount
            together = size > 1 and tiles > 0 and shares_factor(channels, size)
            seconds[phase] += taken / tiles * -(-tiles // size) if together else taken
            seconds["gather"] += ring_s(nbytes, size, link) if together else 0
        elif size > 1 and phase == "reduce":
            seconds[phase] += ring_s(amount, size, link)
        elif size > 1 and phase == "gather":  # of each rank's part in turn, along a tree
            seconds[phase] += (size - 1).bit_length() * (amount / link.rate + size * link.latency)
        elif size > 1 and phase == "agree":
            seconds[phase] += (size - 1).bit_length() * link.latency
        else:
            seconds[phase] += taken
    return seconds


def ring_s(nbytes: int, size: int, link: Link) -> float:
    """Of a sum over the ranks."""
    return 2 * (size - 1) / size * nbytes / link.rate + 2 * (size - 1) * link.latency


def _updates_per_step(events: list[Event]) -> list[int]:
    """How often statistics were updated in each step that has any."""
    numbers, number = [], 0
    for phase, *_ in events:
        number += phase == "statistics"
        if phase == "forward":
            numbers.append(number)
            number = 0
    return numbers


def calibration_s(seconds: dict[str, float]) -> float:
    """Of calibration and solving."""
    return sum(value for phase, value in seconds.items() if phase not in NOT_CALIBRATION)


def slowest(ranks: list[dict[str, Any]]) -> dict[str, float]:
    return {phase: max(rank["seconds"].get(phase, 0.0) for rank in ranks) for phase in PHASES}


def of_typical_rank(ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Means over the ranks, which add up to the time of the run."""
    return {phase: statistics.mean(rank["seconds"].get(phase, 0.0) for rank in ranks) for phase in PHASES}


def median_run(runs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return sorted(runs, key=lambda ranks: max(rank["total_s"] for rank in ranks))[(len(runs) - 1) // 2]


def print_row(name: str, seconds: dict[str, float]) -> None:
    print(f"{name:>14}" + "".join(f"{seconds[phase]:11.3f}" for phase in PHASES) + f"{calibration_s(seconds):11.2f}")


def print_header(title: str) -> None:
    print(f"\n{title}\n{'ranks':>14}" + "".join(f"{phase:>11}" for phase in PHASES) + f"{'calibration':>11}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, default=Path.home() / ".cache" / "lightning_compress" / "benchmarks")
    parser.add_argument("--peer-venv", type=Path, help="an environment with " + " and ".join(PEER))
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--simulate", type=int, nargs="*", default=[2, 4, 8, 64, 512])
    parser.add_argument("--link-rate", type=float, default=10e9, help="bytes per second between ranks")
    parser.add_argument("--link-latency", type=float, default=20e-6, help="seconds")
    parser.add_argument("--simulated-batches", type=int, nargs="+", default=[8, 4096])
    parser.add_argument("--train-steps", type=int, default=1000)
    parser.add_argument("--json", type=Path, default=Path("outputs/scaling.json"))
    given = parser.parse_args()
    commands = commands_of(given, ensure_inputs(given.work_dir, given.train_steps))
    runs: dict[tuple[str, int], list[Any]] = {
        (side, size): [] for side in commands for size in given.ranks if side != BESIDE or size > 1
    }
    for _ in range(given.runs):
        for (side, size), taken in runs.items():
            beside = side == BESIDE
            taken.append(results_of((start_side_by_side if beside else start_ranks)(commands[side], size)))
            print(f"  {side} {size}: {max(rank['total_s'] for rank in taken[-1]):.1f} s", file=sys.stderr)
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps({f"{side} {size}": taken for (side, size), taken in runs.items()}))
    report(given, runs)
    print(f"\n{given.json}")


def commands_of(given: argparse.Namespace, inputs: Path) -> dict[str, list[str]]:
    """What a rank runs, by side."""
    case: list[object] = ["--model", inputs / "large", "--tokens", inputs / "tokens_0.pt"]
    case += ["--num-samples", SPEED_SAMPLES, "--batch-size", BATCH_SIZE]
    ours = [sys.executable, HERE / "_scaling_rank.py", *case, "--output-dir", given.work_dir / "scaled"]
    commands = {"ours": ours, BESIDE: ours}
    if not given.no_peer:
        peer = ensure_peer(given.peer_venv or given.work_dir / "peer")
        commands["peer"] = [peer, HERE / "_scaling_peer.py", *case, "--threads", 1]
    return {side: [str(word) for word in command] for side, command in commands.items()}


def report(given: argparse.Namespace, runs: dict[tuple[str, int], list[Any]]) -> None:
    """The tables."""
    median = {key: median_run(taken) for key, taken in runs.items()}
    print_header("Seconds per phase, mean over the ranks, of the median run")
    for size in given.ranks:
        print_row(str(size), of_typical_rank(median["ours", size]))
    alone = of_typical_rank(median["ours", 1])
    shared = sum(alone[phase] for phase in SHARED) / calibration_s(alone)
    for size in given.ranks[1:]:
        times = {
            n: statistics.median(calibration_s(of_typical_rank(run)) for run in runs["ours", n]) for n in (1, size)
        }
        speed_up, bound = times[1] / times[size], 1 / (1 - shared + shared / size)
        print(
            f"\nCalibration and solving on {size} ranks: {speed_up:.3f} times as fast. With {1 - shared:.1%} of one "
            f"rank's time not shared out the bound is {bound:.3f}, of which this is {speed_up / bound:.1%}."
        )
        beside = statistics.median(calibration_s(of_typical_rank(run)) for run in runs[BESIDE, size])
        kept = times[1] / beside
        print(
            f"{size} runs of one rank at the same time take {beside:.2f} s each, {times[1]:.2f} s alone: the cores "
            f"keep {kept:.1%} of their speed, so the bound is {kept * bound:.3f}, of which this is "
            f"{speed_up / (kept * bound):.1%}."
        )
        writing = {n: statistics.median(of_typical_rank(run)["write"] for run in runs["ours", n]) for n in (1, size)}
        print(f"Writing: {writing[1]:.2f} s on one rank, {writing[size]:.2f} s on {size}.")
        for side in sorted({side for side, _ in runs} - {BESIDE}):
            total = {
                n: statistics.median(max(rank["total_s"] for rank in run) for run in runs[side, n]) for n in (1, size)
            }
            print(f"All, {side}: {total[1]:.1f} s and {total[size]:.1f} s, {total[1] / total[size]:.3f} times.")
    events = median["ours", 1][0]["events"]
    here = Link(*median["ours", max(given.ranks)][0]["link"]) if max(given.ranks) > 1 else None
    if here is not None:
        print_header(f"Simulated, links as on this machine ({here.rate / 1e9:.2f} GB/s, {here.latency * 1e6:.0f} us)")
        for size in given.ranks:
            print_row(str(size), simulate(events, size, here, SPEED_SAMPLES // BATCH_SIZE))
    link = Link(given.link_rate, given.link_latency)
    for num_batches in given.simulated_batches:
        print_header(f"Simulated, {num_batches} batches, {link.rate / 1e9:g} GB/s, {link.latency * 1e6:g} us")
        for size in given.simulate:
            print_row(str(size), simulate(events, size, link, num_batches))


if __name__ == "__main__":
    main()
