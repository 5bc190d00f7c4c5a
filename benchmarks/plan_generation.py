"""What the cost model of offloaded generation foresees for the runs that FlexGen's paper measured on a T4.

    python benchmarks/plan_generation.py

Two questions, a table each. Rates: how long would the published policies take, by our equations and the machine's
constants, against how long they took. Search: what do our own policies promise, and do they keep the order of systems
and sizes. Runs on a CPU, in seconds; nothing is measured here.
"""

import sys
from dataclasses import replace
from pathlib import Path

from lightning_compress.foresight.generation import Policy, best_policy, foreseen, row_by_row

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "foresight"))

from published import MACHINES, OPT, RUNS, Published


def described(policy: Policy) -> str:
    """Batches, and the percentages as FlexGen's command line has them."""
    schedule, shares = policy.schedule, policy.fractions
    percent = " ".join(f"{100 * shares[kind + tier]:.0f}" for kind in "wch" for tier in "gc")
    attention = ", CPU attention" if schedule.cpu_attention else ""
    return f"{schedule.gpu_batch_size}x{schedule.num_gpu_batches}, {percent}{attention}"


def own(run: Published, machine: str) -> Policy:
    """What we would do in a system's place."""
    search = best_policy if run.system == "FlexGen" else row_by_row
    return search(OPT[run.model], MACHINES[machine], run.task)


def rates() -> None:
    """The published policies."""
    print("| system | model | prompt | policy | measured | paper's disk | ratio | fitted disk | ratio | peaks, GiB |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for run in RUNS:
        found = {
            name: foreseen(OPT[run.model], machine, run.task, run.schedule, run.fractions)
            for name, machine in MACHINES.items()
        }
        cells = [
            cell
            for policy in found.values()
            for cell in (f"{policy.tokens_per_s:.3g}", f"{policy.tokens_per_s / run.tokens_per_s:.2f}")
        ]
        first = found["the paper's disk"]
        peaks = " / ".join(f"{size / 2**30:.0f}" for size in first.peaks.values())
        row = (run.system, run.model, run.prompt_length, described(first), run.tokens_per_s, *cells, peaks)
        print("| " + " | ".join(map(str, row)) + " |")


def searched() -> None:
    """Policies of our own."""
    print("| system | model | prompt | measured | our policy | tokens/s | ratio | bottleneck | fitted disk |")
    print("|---|---|---|---|---|---|---|---|---|")
    for run in RUNS:
        policy, fitted = own(run, "the paper's disk"), own(run, "the fitted disk")
        ratio = f"{policy.tokens_per_s / run.tokens_per_s:.2f}"
        row = (run.system, run.model, run.prompt_length, run.tokens_per_s, described(policy))
        tail = (f"{policy.tokens_per_s:.3g}", ratio, policy.bottleneck, f"{fitted.tokens_per_s:.3g}")
        print("| " + " | ".join(map(str, (*row, *tail))) + " |")


def without_gpu_memory() -> None:
    """What the appendix itself has of OPT-6.7B: no bound by the GPU's memory."""
    run = RUNS[0]
    machine = replace(MACHINES["the fitted disk"], gpu_memory=1e18)
    policy = foreseen(OPT[run.model], machine, run.task, run.schedule, run.fractions)
    print(
        f"Without the bound by the GPU's memory, {run.model} {described(policy)} would make {policy.tokens_per_s:.3g} "
        f"tokens/s, {policy.tokens_per_s / run.tokens_per_s:.1f} times what was measured."
    )


if __name__ == "__main__":
    rates()
    print()
    searched()
    print()
    without_gpu_memory()
