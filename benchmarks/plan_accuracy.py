"""Plans beside the runs that follow them; and the chosen plan beside all others, run for real.

    python benchmarks/plan_accuracy.py [--budgets none 1.3GiB 1.1GiB 0.95GiB] [--runs 1] [--work-dir DIR] [--json FILE]

A random Llama in bfloat16 on disk (512 wide, intermediate 1408, 4 layers of 8 heads, vocabulary 32000), 128 samples of
512 tokens of Python's documentation. The machine is measured (`lightning-compress probe`) and, with --refit, corrected
by one run. Then for every budget of host memory each way to run (2 schedules, 2 batch sizes, 2 prefetch depths) is
planned alone with `lightning-compress plan` and run with `compress plan=FILE`, all in turn, --runs times over: medians
of the seconds, the largest peak. The planner's own choice among them is what a user would have got. Every run is a
process of its own.
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from within_budget import MODEL

COMMAND = "from lightning_compress.command.cli import main; main()"
SIZES = ("4", "512", "1408", "8")
DATA = ("data=docs", "data.num_samples=128", "data.max_length=512")
CHOICES = [
    {"schedule": schedule, "batch_size": batch_size, "prefetch_depth": depth}
    for schedule, batch_size, depth in itertools.product(("staged", "block"), (4, 16), (0, 1))
]


def command(*arguments: str) -> str:
    """Run a command of lightning-compress; what it printed, or (where it refuses) nothing."""
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode and "No plan fits" not in done.stderr:
        raise SystemExit(done.stderr)
    return "" if done.returncode else done.stdout


def planned(model: Path, budget: str, choices: list[dict[str, Any]], file: Path) -> float | None:
    """Make a plan from these choices; its seconds, or None if nothing fits."""
    given = {key: list(dict.fromkeys(choice[key] for choice in choices)) for key in choices[0]}
    lists = [f"choices.{key}=[{','.join(map(str, values))}]" for key, values in given.items()]
    host = () if budget == "none" else (f"host={budget}",)
    said = command("plan", f"model.path={model}", *DATA, *lists, "choices.load=[disk]", *host, f"json={file}")
    return None if not said else float(json.loads(file.read_text())["planning_s"])


def ran(model: Path, file: Path, out: Path) -> dict[str, Any]:
    """Follow a plan; what the report says of it."""
    shutil.rmtree(out, ignore_errors=True)
    command("compress", f"model.path={model}", *DATA, "trainer=cpu", f"plan={file}", f"output_dir={out}")
    found: dict[str, Any] = json.loads((out / "report.json").read_text())
    return found


def row(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Foreseen and measured figures of the comparisons in the reports of one plan's runs."""
    names = {"all subgraphs": "loop_s", "run": "run_s", "solve": "solve_s", "peak of the host": "peak"}
    found: dict[str, Any] = {}
    for said, name in names.items():
        compared = [each for report in reports for each in report["comparison"] if each["name"] == said]
        of_all = max if name == "peak" else statistics.median
        found |= {f"{name}_{side}": of_all(each[side] for each in compared) for side in ("foreseen", "measured")}
        found[f"{name}_runs"] = [each["measured"] for each in compared]
    return found


def measured(model: Path, budget: str, runs: int, folder: Path) -> list[dict[str, Any]]:
    """All ways under a budget beside the plans that were followed; none if nothing fits."""
    file = folder / "plan.json"
    if planned(model, budget, CHOICES, file) is None:
        print(f"{budget}: nothing fits", flush=True)
        return []
    chosen = json.loads(file.read_text())["best"]["choice"]
    files = {folder / f"plan-{number}.json": choice for number, choice in enumerate(CHOICES)}
    files = {file: choice for file, choice in files.items() if planned(model, budget, [choice], file) is not None}
    reports: dict[Path, list[dict[str, Any]]] = {file: [] for file in files}
    for _ in range(runs):
        for file in files:
            reports[file].append(ran(model, file, folder / "out"))
    rows = [
        {"budget": budget, **choice, "is_chosen": choice.items() <= chosen.items(), **row(reports[file])}
        for file, choice in files.items()
    ]
    for each in rows:
        print_row(each)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, default=Path.home() / ".cache" / "lightning_compress" / "plan")
    parser.add_argument("--budgets", nargs="+", default=["none", "1.3GiB", "1.1GiB", "0.95GiB"])
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--refit", action="store_true")
    parser.add_argument("--json", type=Path, default=Path("outputs/plan_accuracy.json"))
    arguments = parser.parse_args()
    folder: Path = arguments.work_dir
    model, file, out = folder / "llama", folder / "plan.json", folder / "out"
    if not (model / "config.json").is_file():
        subprocess.run([sys.executable, "-c", MODEL, str(model), *SIZES], check=True)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    command("probe", f"output_dir={folder}")
    if arguments.refit:
        planned(model, "none", CHOICES, file)
        ran(model, file, out)
        command("probe", f"refit=[{out / 'report.json'}]")
    rows = [each for budget in arguments.budgets for each in measured(model, budget, arguments.runs, folder)]
    summary(rows)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(rows, indent=2))
    shutil.rmtree(out, ignore_errors=True)


def print_row(found: dict[str, Any]) -> None:
    choice = f"{found['schedule']:7} batch {found['batch_size']:2} depth {found['prefetch_depth']}"
    seconds = f"{found['loop_s_foreseen']:6.1f} s foreseen {found['loop_s_measured']:6.1f} s measured"
    error = found["loop_s_foreseen"] / found["loop_s_measured"] - 1
    peak = f"{found['peak_foreseen'] / 2**30:.2f} GiB foreseen {found['peak_measured'] / 2**30:.2f} GiB measured"
    print(
        f"{found['budget']:7} {choice}: {seconds} ({error:+.1%}), {peak} {'<- chosen' * found['is_chosen']}", flush=True
    )


def summary(rows: list[dict[str, Any]]) -> None:
    for budget in dict.fromkeys(found["budget"] for found in rows):
        here = [found for found in rows if found["budget"] == budget]
        best = min(found["loop_s_measured"] for found in here)
        (chosen,) = (found for found in here if found["is_chosen"])
        print(f"{budget}: the chosen plan took {chosen['loop_s_measured'] / best:.3f} of the fastest of {len(here)}")
    errors = [found["loop_s_foreseen"] / found["loop_s_measured"] - 1 for found in rows]
    sizes = [abs(error) for error in errors]
    print(f"seconds: median error {statistics.median(sizes):.1%}, largest {max(sizes):.1%}, of {len(rows)} plans")
    for schedule in dict.fromkeys(found["schedule"] for found in rows):
        of_it = [error for error, found in zip(errors, rows, strict=True) if found["schedule"] == schedule]
        print(f"  {schedule}: from {min(of_it):+.1%} to {max(of_it):+.1%}, median {statistics.median(of_it):+.1%}")
    peaks = [found["peak_foreseen"] / found["peak_measured"] - 1 for found in rows]
    print(f"peak: median error {statistics.median(peaks):+.1%}, from {min(peaks):+.1%} to {max(peaks):+.1%}")


if __name__ == "__main__":
    main()
