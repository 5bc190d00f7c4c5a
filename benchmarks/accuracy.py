"""What quantization costs: perplexity of four models in several schemes, here, in LLM Compressor and in AutoRound.

    python benchmarks/accuracy.py [--models llama] [--schemes W2g64] [--seeds 0] [--only plain corrected] [--table]

models    llama (256 wide), neox (GPT-NeoX: attention and MLP in parallel) and gemma (Gemma 2, 384 wide), which this
          trains for --train-steps on Python's documentation and keeps under --work-dir; see `_accuracy_inputs.py`.
          smollm (SmolLM2-135M-Instruct, 576 wide, 30 layers), pretrained on two trillion tokens, comes by pip.
schemes   weights of 4, 3 and 2 bits in groups of 128, 128 and 64 (of smollm, whose width 128 does not divide, in groups
          of 64); 4 bits with a scale for each output channel; 4 bits in groups with inputs of 8 bits, quantized for
          every token. Symmetric. Of llama and smollm also presets of floats: FP8_DYNAMIC, MXFP4A16, NVFP4A16 and NVFP4.
          The head is left out.
seeds     of the calibration sample, 128 windows of 128 tokens (smollm: 256); all tools read the same file of tokens.
columns   rtn: rounding to nearest, scales from the range. plain: the algorithm gptq with its defaults. corrected: and
          `correct: residual`. refit: and `refit: null`, chosen, as in the recipe `w2a16_best`.
          qronos, gptaq: plain with `correct: qronos`, `gptaq`. peer, peer_mse: LLM Compressor's GPTQ with its default
          scales and with searched ones. autoround: AutoRound, 200 steps. LLM Compressor's AWQ is left out: without an
          accelerator it stops where it pins memory.

Perplexity is of the whole held-out split (about 25,000 tokens), in float32, of the model in memory. Seconds are from
the loaded to the quantized model, on two threads. Columns are means over seeds, with their difference to
`corrected` on the same seeds and its standard error.

Each number is kept in a file under --work-dir and not computed again, unless its column is named by --again: the whole
takes hours on two cores. Cheap columns come first. The tools get environments of their own, unless --peer-venv and
--autoround-venv name them.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import final

from gptq_vs_llmcompressor import HERE, PEER, SCRIPTS, THREADS, Bench, ensure_peer

AUTOROUND = ("torch==2.13.0", "auto-round==0.15.1")
TRAINED, PRETRAINED = ("llama", "neox", "gemma"), ("smollm",)
MODELS = (*TRAINED, *PRETRAINED)
GGUF = ("gguf==0.19.0",)
PRESETS = ("FP8_DYNAMIC", "MXFP4A16", "NVFP4A16", "NVFP4")
SCHEMES: dict[str, dict[str, object]] = {
    "W4g128": {"num_bits": 4, "group_size": 128},
    "W3g128": {"num_bits": 3, "group_size": 128},
    "W2g64": {"num_bits": 2, "group_size": 64},
    "W4channel": {"num_bits": 4, "group_size": 0},
    "W4A8g128": {"num_bits": 4, "group_size": 128, "activation_bits": 8},
    "W4g64": {"num_bits": 4, "group_size": 64},
    "W3g64": {"num_bits": 3, "group_size": 64},
    "W4A8g64": {"num_bits": 4, "group_size": 64, "activation_bits": 8},
    **{preset: {"preset": preset} for preset in PRESETS},
}
SCHEMES_OF = {
    **dict.fromkeys(TRAINED, ("W4g128", "W3g128", "W2g64", "W4channel", "W4A8g128")),
    **dict.fromkeys(PRETRAINED, ("W4g64", "W3g64", "W2g64", "W4channel", "W4A8g64")),
}
SCHEMES_OF |= {model: (*SCHEMES_OF[model], *PRESETS) for model in ("llama", "smollm")}
SEEDS = (0, 1, 2)
NUM_SAMPLES = 128
REFERENCE = "corrected"


@final
@dataclass(frozen=True)
class Column:
    """A tool and how it is set.

    Attributes:
        seeded: whether it sees the calibration sample.
        turn: columns of the first turn are computed for everything before those of the next.
    """

    side: str
    options: dict[str, object]
    seeded: bool = True
    turn: int = 0


COLUMNS = {
    "rtn": Column("ours", {"algorithm": "rtn"}, seeded=False),
    "plain": Column("ours", {"scales": "weighted"}),
    "corrected": Column("ours", {"scales": "weighted", "correct": "residual"}),
    "refit": Column("ours", {"scales": "weighted", "correct": "residual", "refit": "null"}),
    "qronos": Column("ours", {"scales": "weighted", "correct": "qronos"}),
    "gptaq": Column("ours", {"scales": "weighted", "correct": "gptaq"}),
    "peer": Column("peer", {}),
    "peer_mse": Column("peer", {"scales": "mse"}),
    "autoround": Column("autoround", {}, turn=1),
}


@final
@dataclass(frozen=True)
class Cell:
    """One number of the table."""

    model: str
    scheme: str
    seed: int
    column: str

    def path(self, folder: Path) -> Path:
        return folder / f"{self.model}-{self.scheme}-{self.column}-{self.seed}.json"


@final
@dataclass(frozen=True)
class Result:
    cell: Cell
    original: float
    perplexity: float
    solve_s: float


def cells(models: Iterable[str], schemes: Iterable[str], seeds: Iterable[int], columns: Iterable[str]) -> list[Cell]:
    """In the order of the work: by turns, then seeds, so that all models and schemes soon have a number."""
    found: dict[Cell, int] = {}
    for seed, model, scheme, column in product(seeds, models, schemes, columns):
        if scheme not in SCHEMES_OF[model]:
            continue
        seeded = COLUMNS[column].seeded
        found[Cell(model, scheme, seed if seeded else SEEDS[0], column)] = COLUMNS[column].turn
    return sorted(found, key=found.__getitem__)


def ensure_inputs(inputs: Path, models: Iterable[str], train_steps: int, peer_venv: Path) -> None:
    """The tokens and models, written where they are not there (a model takes minutes)."""
    script = [sys.executable, str(HERE / "_accuracy_inputs.py"), str(inputs), "--train-steps", str(train_steps)]
    if not list(inputs.glob("tokens_*.pt")):
        subprocess.run([*script, "--tokens"], check=True)
    for model in models:
        if model in TRAINED and not (inputs / model / "tokenizer.json").exists():
            subprocess.run([*script, "--model", model], check=True)
        if model in PRETRAINED and not list((inputs / model).glob("tokens_*.pt")):
            reader = ensure_peer(peer_venv, (*PEER, *GGUF))
            subprocess.run([reader, HERE / "_pretrained_inputs.py", inputs / model], check=True)
            subprocess.run([*script, "--tokens-of", model], check=True)


def compute(cell: Cell, bench: Bench, folder: Path) -> None:
    """Runs a cell that has no number yet, and keeps it."""
    path = cell.path(folder)
    if path.exists():
        return
    column = COLUMNS[cell.column]
    options = {**SCHEMES[cell.scheme], **column.options, "evaluate": True}
    found = bench.run(column.side, cell.model, NUM_SAMPLES, cell.seed, **options)
    result = Result(cell, found["original_perplexity"], found["perplexity"], found["solve_s"])
    path.write_text(json.dumps(asdict(result)))


def read(wanted: Iterable[Cell], folder: Path) -> list[Result]:
    """Those of the cells that have a number."""
    return [read_one(cell.path(folder)) for cell in wanted if cell.path(folder).exists()]


def read_one(path: Path) -> Result:
    found = json.loads(path.read_text())
    return Result(**{**found, "cell": Cell(**found["cell"])})


@final
@dataclass(frozen=True)
class Row:
    """A column's numbers of a model and a scheme, means over seeds.

    Attributes:
        difference: to `REFERENCE` on the same seeds; None: there is none.
        standard_error: of it; None: there are fewer than two seeds.
    """

    model: str
    scheme: str
    column: str
    num_seeds: int
    original: float
    perplexity: float
    solve_s: float
    difference: float | None
    standard_error: float | None


def summarize(results: Sequence[Result]) -> Iterator[Row]:
    of = {result.cell: result for result in results}
    for model, scheme, column in product(MODELS, SCHEMES, COLUMNS):
        mine = [result for seed in SEEDS if (result := of.get(Cell(model, scheme, seed, column))) is not None]
        if not mine:
            continue
        differences = []
        for seed in SEEDS:
            reference = of.get(Cell(model, scheme, seed, REFERENCE))
            paired = of.get(Cell(model, scheme, seed, column)) if COLUMNS[column].seeded else mine[0]
            if reference is not None and paired is not None:
                differences.append(paired.perplexity - reference.perplexity)
        enough = len(differences) > 1
        yield Row(
            model,
            scheme,
            column,
            len(mine),
            mine[0].original,
            statistics.mean(result.perplexity for result in mine),
            statistics.mean(result.solve_s for result in mine),
            statistics.mean(differences) if differences else None,
            statistics.stdev(differences) / len(differences) ** 0.5 if enough else None,
        )


def print_tables(rows: Sequence[Row]) -> None:
    for model in MODELS:
        mine = [row for row in rows if row.model == model]
        if not mine:
            continue
        print(f"\n{model}, perplexity {mine[0].original:.3f} before quantization")
        print(f"scheme      column      perplexity   less {REFERENCE} (standard error)   seconds   seeds")
        for row in mine:
            difference = "" if row.difference is None or row.column == REFERENCE else f"{row.difference:+.3f}"
            error = "" if not difference or row.standard_error is None else f"({row.standard_error:.3f})"
            print(
                f"{row.scheme:11} {row.column:10} {row.perplexity:11.3f} {difference:>16} {error:>16}"
                f" {row.solve_s:9.1f} {row.num_seeds:7}"
            )


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, default=Path.home() / ".cache" / "lightning_compress" / "accuracy")
    parser.add_argument("--peer-venv", type=Path, help="an environment with " + " and ".join(PEER))
    parser.add_argument("--autoround-venv", type=Path, help="an environment with " + " and ".join(AUTOROUND))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=tuple(SCHEMES))
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, default=SEEDS)
    parser.add_argument("--only", nargs="+", choices=COLUMNS, default=tuple(COLUMNS), help="these columns")
    parser.add_argument("--again", nargs="+", choices=COLUMNS, default=(), help="forget what is kept of these columns")
    parser.add_argument("--table", action="store_true", help="show all that is kept, and compute nothing")
    parser.add_argument("--train-steps", type=int, default=1000)
    parser.add_argument("--json", type=Path, default=Path("outputs/accuracy.json"))
    return parser.parse_args()


def report(folder: Path, path: Path, train_steps: int) -> list[Row]:
    """Writes all that is kept as JSON."""
    results = read(cells(MODELS, SCHEMES, SEEDS, COLUMNS), folder)
    rows = list(summarize(results))
    found = {"peer": PEER, "autoround": AUTOROUND, "threads": THREADS, "train_steps": train_steps}
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = {"rows": [asdict(row) for row in rows], "cells": [asdict(result) for result in results]}
    path.write_text(json.dumps({**found, **numbers}, indent=2))
    return rows


def main() -> None:
    arguments = read_arguments()
    inputs = arguments.work_dir / f"inputs-{arguments.train_steps}"
    folder = inputs / "cells"
    folder.mkdir(parents=True, exist_ok=True)
    if not arguments.table:
        wanted = cells(arguments.models, arguments.schemes, arguments.seeds, arguments.only)
        peer_venv = arguments.peer_venv or arguments.work_dir / "peer"
        ensure_inputs(inputs, arguments.models, arguments.train_steps, peer_venv)
        sides = {COLUMNS[cell.column].side for cell in wanted}
        pythons = {"ours": Path(sys.executable)}
        if "peer" in sides:
            pythons["peer"] = ensure_peer(peer_venv)
        if "autoround" in sides:
            venv = arguments.autoround_venv or arguments.work_dir / "autoround"
            pythons["autoround"] = ensure_peer(venv, AUTOROUND)
        bench = Bench(pythons, inputs, {**SCRIPTS, "autoround": "_accuracy_autoround.py"})
        for cell in wanted:
            if cell.column in arguments.again:
                cell.path(folder).unlink(missing_ok=True)
        for cell in wanted:
            compute(cell, bench, folder)
            report(folder, arguments.json, arguments.train_steps)
    print_tables(report(folder, arguments.json, arguments.train_steps))
    print(f"\n{arguments.json}")


if __name__ == "__main__":
    main()
