"""Every family of transformers' auto-mappings: whether its weights read from disk end in the same bytes as in memory.

    python benchmarks/architectures_from_disk.py [--only FAMILY ...] [--kinds KIND ...] [--results FILE] [--part I/N]

The tiny model of `architectures.py` is saved, and compressed twice with that one's recipe: loaded by `from_pretrained`,
and within `parameters_on_meta()` with `weights=` and all activations in a file. Files of tensors have to be equal.
Families that do not find all their weights in what they save themselves, or cannot be compressed in memory, are
counted apart.
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch
from _architecture_inputs import Sample, sample, with_positions
from _architecture_kinds import Family
from _architecture_run import Result, build, four_bits, tell
from architectures import families_asked_for, in_a_process, results_of
from torch import nn
from transformers import PreTrainedModel

from lightning_compress import Compressor, parameters_on_meta
from lightning_compress.errors import UntraceableModelError
from lightning_compress.graph.unfold import unfolded

SAME, DIFFERENT, REFUSED, NOT_SAVED, NOT_IN_MEMORY = "same", "different", "refused", "not saved", "not in memory"


@dataclass(frozen=True)
class Case:
    """A model saved to `folder`, with what it is compressed with."""

    folder: Path
    model_class: type[PreTrainedModel]
    recipe: dict[str, Any]
    fed: Sample

    def compress(self, model: nn.Module, name: str, **settings: Any) -> dict[str, bytes]:
        """The tensor files of it."""
        trainer = L.Trainer(
            strategy="sequential_onload", accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        output_dir, batches = self.folder / name, list(self.fed.batches)
        Compressor(trainer).compress(model, recipe=self.recipe, output_dir=output_dir, dataloaders=batches, **settings)
        return {path.name: path.read_bytes() for path in output_dir.glob("*.safetensors")}


def compare(family: Family) -> Result:
    """Whether both ways end in the same; `failed` is what they end in."""
    result = Result(family.kind, family.model_type, family.class_name, failed=NOT_SAVED)
    try:
        with TemporaryDirectory() as folder:
            _compare(family, Path(folder), result)
    except Exception as error:
        stage = result.failed
        tell(result, error)
        result.failed = stage
    return result


def _compare(family: Family, folder: Path, result: Result) -> None:
    model = build(family)
    fed, model_class = sample(model, family.kind), type(model)
    model.save_pretrained(folder / "model")
    loaded: Any = model_class.from_pretrained(folder / "model", output_loading_info=True, dtype=torch.float32)
    model, missing = loaded[0].eval(), sorted(loaded[1]["missing_keys"])
    if missing:
        result.reason = f"it does not find {', '.join(missing[:3])}"
        return
    result.failed = NOT_IN_MEMORY
    with unfolded(model):
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    case = Case(folder, model_class, four_bits(linears, result), fed)
    try:
        in_memory = case.compress(model, "memory")
    except UntraceableModelError:
        given = with_positions(model, fed)
        if given is None:
            raise
        case = Case(folder, model_class, case.recipe, given)
        in_memory = case.compress(model, "memory")
    result.failed = REFUSED
    with parameters_on_meta():
        empty = model_class(model.config)
    from_disk = case.compress(empty.eval(), "disk", weights=folder / "model", memory={"activation_budget": 0})
    names = sorted(name for name in in_memory | from_disk if in_memory.get(name) != from_disk.get(name))
    result.failed, result.reason = (DIFFERENT, ", ".join(names)) if names else ("", "")


def main() -> None:
    arguments, chosen = families_asked_for(__doc__, "architectures_from_disk.jsonl")
    done = {} if arguments.only else results_of(arguments.results)
    for number, family in enumerate(chosen, 1):
        if family.key not in done:
            row = in_a_process(family, arguments.limit_s, compare)
            with arguments.results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{number}/{len(chosen)} {family.key}: {row['failed'] or SAME} {row['reason'][:150]}", flush=True)
    print(dict(Counter(row["failed"] or SAME for row in results_of(arguments.results).values())))


if __name__ == "__main__":
    main()
