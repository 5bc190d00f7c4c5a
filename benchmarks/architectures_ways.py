"""Every family of transformers' auto-mappings: whether all ways to run a compression end in the same bytes.

    python benchmarks/architectures_ways.py [--only FAMILY ...] [--kinds KIND ...] [--results FILE] [--part I/N]

The tiny model of `architectures.py` is compressed with that one's recipe; then with `schedule="recompute"`, in a run
that was stopped behind its first subgraph and started again, and by two ranks: files of tensors have to be equal. With
8-bit inputs (`w8a8_gptq`) what is read back has to be the model in memory. Lines of JSON in FILE, a verdict for each
way; families that are in it are not run again.
"""

import json
import os
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
from _architecture_inputs import Sample, sample, with_positions
from _architecture_kinds import Family
from _architecture_run import Result, build, four_bits, tell
from architectures import families_asked_for, in_a_process
from lightning.pytorch.callbacks import Timer
from torch import nn

from lightning_compress import Compressor
from lightning_compress.errors import UntraceableModelError
from lightning_compress.graph.unfold import unfolded
from lightning_compress.report.report import Report

SAME = "same"
WAYS = ("recompute", "resumed", "two ranks", "w8a8")


class Stop(Timer):
    """Timers take part in the compression; this one has it stopped behind each subgraph."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_end(trainer, *args, **kwargs)
        trainer.should_stop = True


@dataclass(frozen=True)
class Case:
    """A family, whose model is made anew for each run, and what it is compressed with."""

    family: Family
    folder: Path
    recipe: Any
    fed: Sample

    def compress(self, name: str, *callbacks: Timer, recipe: Any = None, devices: int = 1, **settings: Any) -> Report:
        trainer = L.Trainer(
            strategy="sequential_onload", accelerator="cpu", devices=devices, max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=list(callbacks),
        )  # fmt: skip
        given = {"recipe": recipe or self.recipe, "output_dir": self.folder / name, **settings}
        return Compressor(trainer).compress(build(self.family), dataloaders=list(self.fed.batches), **given)

    def verdict(self, name: str) -> str:
        """Of what is there under a name, beside what the plain run has written."""
        plain, other = self._files("plain"), self._files(name)
        unlike = sorted(file for file in plain | other if plain.get(file) != other.get(file))
        return SAME if not unlike else f"different: {', '.join(unlike)}"

    def _files(self, name: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (self.folder / name).glob("*.safetensors")}


def try_family(family: Family) -> Result:
    """All ways; `where` has a verdict for each, as JSON."""
    result = Result(family.kind, family.model_type, family.class_name, failed="not compressed")
    try:
        with TemporaryDirectory() as folder:
            result.where = json.dumps(_tried(family, Path(folder), result))
            result.failed = ""
    except Exception as error:
        tell(result, error)
        result.failed = "not compressed"
    return result


def _tried(family: Family, folder: Path, result: Result) -> dict[str, str]:
    model = build(family)
    with unfolded(model):
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    case = Case(family, folder, four_bits(linears, result), sample(model, family.kind))
    try:
        case.compress("plain")
    except UntraceableModelError:
        given = with_positions(model, case.fed)
        if given is None:
            raise
        case = Case(family, folder, case.recipe, given)
        case.compress("plain")
    ways: dict[str, Callable[[], str]] = {
        "recompute": lambda: _recompute(case),
        "resumed": lambda: _resumed(case),
        "two ranks": lambda: _by_two_ranks(case),
        "w8a8": lambda: _read_back(case),
    }
    return {name: _or_error(way) for name, way in ways.items()}


def _or_error(way: Callable[[], str]) -> str:
    try:
        return way()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]


def _recompute(case: Case) -> str:
    case.compress("recompute", schedule="recompute")
    return case.verdict("recompute")


def _resumed(case: Case) -> str:
    case.compress("resumed", Stop())
    report = case.compress("resumed")
    return case.verdict("resumed") if report.num_resumed else "nothing was continued"


def _by_two_ranks(case: Case) -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
            given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "ways"}
            os.environ.update({name: str(value) for name, value in given.items()})
            said = _or_error(lambda: str(case.compress("ranks", devices=2).num_ranks))
            (case.folder / f"said-{rank}").write_text(said)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    said = {path.read_text() for path in case.folder.glob("said-*")}
    return case.verdict("ranks") if said == {"2"} else "; ".join(sorted(said))


def _read_back(case: Case) -> str:
    verification = case.compress("w8a8", recipe="w8a8_gptq").verification
    assert verification is not None
    return SAME if verification.passed else verification.verdict


def main() -> None:
    arguments, chosen = families_asked_for(__doc__, "architectures_ways.jsonl")
    lines = arguments.results.read_text().splitlines() if arguments.results.exists() else []
    found = {row["family"]: row for row in map(json.loads, lines)}
    for number, family in enumerate(chosen, 1):
        if family.key in found and not arguments.only:
            continue
        row = in_a_process(family, arguments.limit_s, try_family)
        ways = json.loads(row["where"]) if not row["failed"] else {}
        found[family.key] = {"family": family.key, "failed": row["failed"] and row["reason"], "ways": ways}
        with arguments.results.open("a") as file:
            file.write(json.dumps(found[family.key]) + "\n")
        unlike = {name: verdict for name, verdict in ways.items() if verdict != SAME}
        print(f"{number}/{len(chosen)} {family.key}: {unlike or found[family.key]['failed'] or SAME}", flush=True)
    compressed = [row["ways"] for row in found.values() if row["ways"]]
    print(
        f"{len(compressed)} of {len(found)} compressed;",
        dict(Counter(n for ways in compressed for n in WAYS if ways[n] == SAME)),
    )


if __name__ == "__main__":
    main()
