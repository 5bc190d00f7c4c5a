"""An estimate as a table, and as JSON."""

import json
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.table import Table

from lightning_compress.foresight.estimate import Estimate, Row
from lightning_compress.memory.budget import gib


def estimate_table(estimate: Estimate) -> Table:
    """A column per moment and place; lines for what it consists of."""
    unit, name = (1 << 30, "GiB") if max(row.total for row in estimate.rows) >= _SMALL else (1 << 20, "MiB")
    parts = list(dict.fromkeys(part for row in estimate.rows for part, size in row.parts.items() if size))
    has_closed_form = any(row.closed_form is not None for row in estimate.rows)
    title = f"{estimate.model}, {estimate.num_parameters / 1e9:.3g} B parameters, {estimate.job}; {name}"
    table = Table(title=title, box=box.SIMPLE, title_justify="left", collapse_padding=True, pad_edge=False)
    table.add_column("", no_wrap=True)
    for row in estimate.rows:
        heading = f"{row.place}\n{row.name}"
        table.add_column(heading, justify="right", overflow="fold", min_width=len(_cell(row.total, unit)))
    for part in parts:
        table.add_row(part, *(_cell(row.parts.get(part, 0), unit) for row in estimate.rows))
    table.add_section()
    table.add_row("all", *(_cell(row.total, unit) for row in estimate.rows))
    if has_closed_form:
        forms, differences = zip(*(_closed_form(row, unit) for row in estimate.rows), strict=True)
        table.add_row("closed form", *forms)
        table.add_row("differs", *differences)
    return table


_SMALL = 1 << 29
"""Below so many bytes sizes are in MiB."""


def _told(size: int) -> str:
    """
    >>> _told(61131981), _told(1 << 30)
    ('58.30 MiB', '1.00 GiB')
    """
    return gib(size) if size >= _SMALL else f"{_cell(size, 1 << 20)} MiB"


def _cell(size: int, unit: int) -> str:
    return f"{size / unit:.2f}"


def estimate_lines(estimate: Estimate) -> list[str]:
    """What stands below the table."""
    lines = []
    if estimate.peak("device"):
        lines.append(f"most of the device's memory: {_told(estimate.peak('device'))}")
    if estimate.reserved is not None:
        rounded = "" if estimate.allocated is None else f" allocates {_told(estimate.allocated)} and"
        lines[0] += f" in tensors, for which PyTorch's CUDA allocator{rounded} reserves {_told(estimate.reserved)}"
    if estimate.peak("host"):
        lines.append(f"most of the host's memory: {_told(estimate.peak('host'))}")
    lines += [f"{row.place}: {row.name} at {row.at}" for row in estimate.rows if row.at]
    return [*lines, *(f"{name}: {_told(size)}" for name, size in estimate.others.items()), *estimate.notes]


def save_estimate(estimate: Estimate, file: Path) -> None:
    """Write it as JSON; sizes are bytes."""
    rows = [{**asdict(row), "total": row.total} for row in estimate.rows]
    file.write_text(json.dumps({**asdict(estimate), "rows": rows}, indent=2) + "\n", encoding="utf-8")


def _closed_form(row: Row, unit: int) -> tuple[str, str]:
    if row.closed_form is None:
        return "", ""
    return _cell(row.closed_form, unit), f"{100 * (row.closed_form / row.total - 1):+.1f} %"
