"""An estimate as a table, and as JSON."""

import json
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from lightning_compress.foresight.estimate import Estimate, Row
from lightning_compress.memory.budget import gib


def estimate_table(estimate: Estimate) -> Table:
    """A line per moment and place; columns for what it consists of."""
    unit, name = (1 << 30, "GiB") if max(row.total for row in estimate.rows) >= 1 << 29 else (1 << 20, "MiB")
    parts = list(dict.fromkeys(part for row in estimate.rows for part, size in row.parts.items() if size))
    has_closed_form = any(row.closed_form is not None for row in estimate.rows)
    title = f"{estimate.model}, {estimate.num_parameters / 1e9:.3g} B parameters, {estimate.job}; {name}"
    table = Table(title=title)
    for column in ("place", "phase"):
        table.add_column(column, no_wrap=True)
    for column in (*parts, "all", *(("closed form", "differs") if has_closed_form else ())):
        table.add_column(column, justify="right")
    if any(row.at for row in estimate.rows):
        table.add_column("at", overflow="fold")
    for row in estimate.rows:
        cells = [f"{row.parts.get(part, 0) / unit:.2f}" for part in parts]
        forms = _closed_form(row, unit) if has_closed_form else ()
        table.add_row(row.place, row.name, *cells, f"{row.total / unit:.2f}", *forms, *([row.at] if row.at else ()))
    return table


def estimate_lines(estimate: Estimate) -> list[str]:
    """What stands below the table."""
    lines = []
    if estimate.peak("device"):
        lines.append(f"most of the device's memory: {gib(estimate.peak('device'))}")
    if estimate.reserved is not None:
        lines[0] += f" in tensors, for which PyTorch's CUDA allocator reserves {gib(estimate.reserved)}"
    if estimate.peak("host"):
        lines.append(f"most of the host's memory: {gib(estimate.peak('host'))}")
    return [*lines, *(f"{name}: {gib(size)}" for name, size in estimate.others.items()), *estimate.notes]


def save_estimate(estimate: Estimate, file: Path) -> None:
    """Write it as JSON; sizes are bytes."""
    rows = [{**asdict(row), "total": row.total} for row in estimate.rows]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**asdict(estimate), "rows": rows}, indent=2) + "\n")


def _closed_form(row: Row, unit: int) -> tuple[str, str]:
    if row.closed_form is None:
        return "", ""
    return f"{row.closed_form / unit:.2f}", f"{100 * (row.closed_form / row.total - 1):+.1f} %"
