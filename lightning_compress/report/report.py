"""The result of a compression run as data, as a table for the terminal, and as files."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rich import box
from rich.table import Table

from lightning_compress.calibration.records import ModuleRecord, SubgraphRecord
from lightning_compress.calibration.resume import replace_file
from lightning_compress.errors import listed
from lightning_compress.export.verify import Verification
from lightning_compress.foresight.compare import Compared, compared
from lightning_compress.foresight.plan import Plan
from lightning_compress.graph.fallback import Fallback
from lightning_compress.memory.budget import MemoryUse
from lightning_compress.recipe.resolve import Excluded
from lightning_compress.report.experts import Coverage, collapsed, coverage, coverage_lines
from lightning_compress.report.html import render_html
from lightning_compress.report.plan import comparison_lines
from lightning_compress.report.sizes import sized


@dataclass(frozen=True)
class Report:
    """Everything a run found out. Sizes in bytes, times in wall seconds.

    Attributes:
        model: class name of what was compressed.
        recipe: as plain data.
        schedule, device: how and where it ran.
        subgraphs: one record each, with their modules.
        excluded: matrices of weights that stay as they are, each with its reason.
        fallbacks: modules that had to be run as a whole, or recorded for some batches only, each with its reason.
        num_batches, has_padding: of the calibration set.
        bytes_before, bytes_after: of the whole model's weights.
        trace_s, total_s: preparation, and everything up to the verified checkpoint.
        output_dir: where the checkpoint is; None where nothing was written.
        verification: None where nothing was written or reading it back was switched off.
        num_resumed: subgraphs that an interrupted run had finished before.
        is_partial: not all subgraphs were quantized (`fast_dev_run`, or the Trainer was told to stop).
        num_ranks: processes that shared the work.
        num_copies: how many nodes have a whole checkpoint in an `output_dir` of their own; 1: all share one.
        plan: that the run followed, if any.
        memory: budgets, what was foreseen and what was taken; None where there are no budgets.
        model_path: where the model was read from, if that is known.
        date: of the end, in UTC, as ISO 8601 has it.
        versions: of the packages that decide the result.
        num_samples, num_tokens: of the calibration set, without padding; None where it has no token ids.
        notes: what else there is to know of the run.
        extra: figures that the caller adds, e.g. perplexities.
    """

    model: str
    recipe: dict[str, object]
    schedule: str
    device: str
    subgraphs: tuple[SubgraphRecord, ...]
    excluded: tuple[Excluded, ...]
    fallbacks: tuple[Fallback, ...]
    num_batches: int
    has_padding: bool
    bytes_before: int
    bytes_after: int
    trace_s: float
    total_s: float
    output_dir: str | None
    verification: Verification | None
    is_partial: bool
    num_resumed: int
    extra: dict[str, float]
    num_ranks: int = 1
    num_copies: int = 1
    memory: MemoryUse | None = None
    plan: Plan | None = None
    model_path: str = ""
    date: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    num_samples: int | None = 0
    num_tokens: int | None = 0
    notes: tuple[str, ...] = ()

    @property
    def modules(self) -> tuple[ModuleRecord, ...]:
        """The records of all quantized modules, in order."""
        return tuple(record for subgraph in self.subgraphs for record in subgraph.modules)

    @property
    def coverage(self) -> list[Coverage]:
        """How many tokens reached the experts of each layer that has some."""
        return coverage([asdict(record) for record in self.modules])

    @property
    def devices(self) -> str:
        """Of all ranks."""
        return self.device if self.num_ranks == 1 else f"{self.num_ranks} x {self.device}"

    @property
    def place(self) -> str | None:
        """Where the checkpoint is."""
        return (
            f"{self.output_dir} (all of it on each of {self.num_copies} nodes)"
            if self.num_copies > 1
            else self.output_dir
        )

    def to_dict(self) -> dict[str, object]:
        """Plain containers and scalars only."""
        passed = None if self.verification is None else self.verification.passed
        more = {"verified": passed, "num_modules": len(self.modules), "devices": self.devices, "place": self.place}
        return {**asdict(self), **more, "comparison": [asdict(row) for row in self.comparison]}

    @property
    def comparison(self) -> list[Compared]:
        """What the plan foresaw and what the run took; empty without one, or where subgraphs are of an earlier run."""
        if self.plan is None or self.num_resumed or self.is_partial:
            return []
        return compared(self.plan, [asdict(part) for part in self.subgraphs], self.trace_s, self.device)

    def table(self) -> Table:
        """Per-module results for the terminal."""
        table = Table(box=box.SIMPLE, pad_edge=False)
        table.add_column("module", overflow="fold")  # the one that a narrow terminal breaks
        table.add_column("scheme", no_wrap=True)
        for heading in ("shape", "error", "size"):
            table.add_column(heading, justify="right", no_wrap=True)
        noted = [record.notes for record in self.modules]
        common = [note for note in noted[0] if all(note in notes for notes in noted)] if len(noted) > 1 else []
        others = [tuple(note for note in notes if note not in common) for notes in noted]
        if any(others):
            table.add_column("notes", overflow="fold")
        records = [replace(record, notes=notes) for record, notes in zip(self.modules, others, strict=True)]
        for row in collapsed([asdict(record) for record in records]):
            shape, size = "x".join(map(str, row["shape"])), f"{row['bytes_after'] / row['bytes_before']:.0%}"
            notes = ["; ".join(row["notes"])] if any(others) else []
            table.add_row(row["module"], row["scheme"], shape, f"{row['error']:.2e}", size, *notes)
        if common:
            table.caption, table.caption_justify = "all modules: " + "; ".join(common), "left"
        return table

    def summary(self) -> str:
        """A few lines: size, error, verification, what was left out and why."""
        errors = [record.error for record in self.modules]
        lines = [
            f"{len(errors)} modules quantized in {self.total_s:.1f} s ({self.schedule} on {self.devices}, "
            f"{self.num_batches} batches); "
            f"all weights: {sized(self.bytes_before)} -> {sized(self.bytes_after)}"
        ]
        if errors:
            worst = max(self.modules, key=lambda record: record.error)
            has_inputs = any(record.quantizes_inputs for record in self.modules)
            lines.append(
                f"relative output error{' of the weights, with inputs as they are' if has_inputs else ''}: mean "
                f"{sum(errors) / len(errors):.2e}, largest {worst.error:.2e} ({worst.module})"
            )
        made = [record.correction for record in self.modules if record.correction]
        if made:
            used = [each for each in made if each["strength"]]
            left = [each["held_out"] for each in used if "held_out" in each]
            judged = f", which leave {sum(left) / len(left):.3f} of the error of held-out batches" if left else ""
            strength = sum(each["strength"] for each in used) / max(len(used), 1)
            number = f"{len(used)} modules" if len(used) == len(made) else f"{len(used)} of {len(made)} modules"
            how = f", with strength {strength:.2f}{judged} (means, before rounding)" if used else ""
            lines.append(f"corrected: {number}{how}")
        lines += coverage_lines(self.coverage)
        if self.excluded:
            lines.append(f"left as they are: {listed([f'{entry.module} ({entry.reason})' for entry in self.excluded])}")
        lines += [f"{each.how}: {each.module or 'the model'} ({each.reason})" for each in self.fallbacks]
        if self.verification is not None:
            lines.append(f"read back with {self.verification.loaded_with}: {self.verification.verdict}")
            if self.verification.different_buffers:
                most = self.verification.max_abs_difference_as_loaded or 0.0
                lines.append(
                    f"note: {listed(self.verification.different_buffers, 3)} differ after loading (a checkpoint "
                    f"does not store them), which changes {f'outputs by up to {most:.2g}' if most else 'no output'}"
                )
        lines += self.added_lines()
        lines += [f"note: {note}" for note in self.notes]
        if self.memory is not None:
            lines.append(self.memory.summary())
        if self.num_resumed and self.num_resumed == len(self.subgraphs):
            lines.append("all subgraphs had been finished by an earlier run of the same; resume='never' starts over")
        elif self.num_resumed:
            lines.append(f"continued an interrupted run, which had finished {self.num_resumed} subgraphs")
        if self.is_partial:
            lines.append(partial_line(self.output_dir))
        elif self.output_dir is not None:
            lines.append(f"checkpoint: {self.place}")
        else:
            lines.append("nothing was written (output_dir is None): the model in memory has the quantized weights")
        return "\n".join(lines)

    def added_lines(self) -> list[str]:
        """Of the summary, what was found out when the run had ended: other numbers, and how good the plan was."""
        extra = ", ".join(f"{name.replace('_', ' ')} {value:.5g}" for name, value in self.extra.items())
        return [*([extra] if extra else []), *(f"plan, {line}" for line in comparison_lines(self.comparison))]

    def save(self, directory: str | Path) -> tuple[Path, Path]:
        """Write report.json and report.html into `directory`, each whole or not at all; returns their paths."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        as_json, as_html = directory / "report.json", directory / "report.html"
        replace_file(as_json, (json.dumps(self.to_dict(), indent=2, default=str) + "\n").encode())
        replace_file(as_html, render_html(self.to_dict()).encode(errors="backslashreplace"))
        return as_json, as_html


def partial_line(output_dir: str | Path | None) -> str:
    """What a run that ended early leaves."""
    where = "nothing was written" if output_dir is None else f"the same run continues in {output_dir}"
    return f"PARTIAL: not every subgraph was quantized; {where}"
