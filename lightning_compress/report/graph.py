"""A model's graph with its cuts, as text and as a picture."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

from lightning_compress.errors import CompressionError, listed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARGIN, _TITLE, _LINE, _GAP = 0.4, 0.42, 0.34, 0.5
"""Heights in a picture, in inches."""
_NUMBER = re.compile(r"\.\d+\.")


@dataclass(frozen=True)
class GroupView:
    """Modules that read one value and are solved together: names within the subgraph, and the stack's shape."""

    members: tuple[str, ...]
    rows: int
    channels: int


@dataclass(frozen=True)
class SubgraphView:
    """What is on the device at a time.

    Attributes:
        name: as in the report of a run; of several alike the first and the last.
        class_name: of its module; '' if it is none.
        alike: how many subgraphs like this follow one another.
        nbytes: of its weights.
        steps: the groups that are solved at each cut, in order.
        single_calls: modules and methods in it that could not be looked into.
        num_crossing, crossing_bytes: values of the batch that wait behind it for later ones.
    """

    name: str
    class_name: str
    nbytes: int
    steps: tuple[tuple[GroupView, ...], ...]
    single_calls: tuple[str, ...]
    num_crossing: int
    crossing_bytes: int
    alike: int = 1


@dataclass(frozen=True)
class GraphView:
    """A model cut for a schedule.

    Attributes:
        model: its class.
        schedule: see `graph.stages`.
        batch: what it was traced on.
        parts: in order.
        uncalled: modules that the recipe targets and the batch does not reach.
        failed: of batches that reach more of it, why it could not be recorded on them.
    """

    model: str
    schedule: str
    batch: str
    parts: tuple[SubgraphView, ...]
    uncalled: tuple[str, ...]
    failed: tuple[str, ...]


def collapsed(parts: Sequence[SubgraphView]) -> list[SubgraphView]:
    """Subgraphs that are alike and follow one another, as one."""
    found: list[SubgraphView] = []
    for _, same in groupby(parts, lambda part: (part.class_name, part.nbytes, part.steps)):
        group = list(same)
        name = group[0].name if len(group) == 1 else f"{group[0].name} ... {group[-1].name}"
        found.append(replace(group[-1], name=name, alike=len(group), single_calls=group[0].single_calls))
    return found


def graph_lines(view: GraphView) -> list[str]:
    """For the terminal."""
    lines = [_heading(view), f"traced on {view.batch}", ""]
    for part in collapsed(view.parts):
        lines.append(f"{part.name}  {_description(part)}")
        lines += [f"  {'- cut - ' if is_cut else '        '}{text}" for text, is_cut in _rows(part)]
        if part.num_crossing:
            lines.append(f"  |       {_crossing(part)}")
    if view.uncalled:
        lines += [
            "",
            f"{len(view.uncalled)} modules that the recipe targets are not reached by this batch "
            f"({listed(view.uncalled, 3)}), and would stay as they are: give one that does reach them "
            "(data=multimodal, data=custom).",
        ]
    return [*lines, *chain.from_iterable(("", text) for text in view.failed)]


def _heading(view: GraphView) -> str:
    return f"{view.model}, schedule {view.schedule}: {len(view.parts)} subgraphs"


def _description(part: SubgraphView) -> str:
    number, each = (f" x {part.alike}", " each") if part.alike > 1 else ("", "")
    return f"{part.class_name}{number}, {part.nbytes / 1e6:.2f} MB{each}"


def _crossing(part: SubgraphView) -> str:
    return f"{part.num_crossing} values, {part.crossing_bytes / 1e6:.2f} MB of the batch wait"


def _rows(part: SubgraphView) -> list[tuple[str, bool]]:
    """What is in a subgraph, each with whether a cut is before it."""
    rows = [(text, number == 0) for step in part.steps for number, text in enumerate(_texts(step))]
    return rows + [(f"single call: {name}", False) for name in part.single_calls]


def _texts(step: Sequence[GroupView]) -> list[str]:
    """The groups of a cut; those of experts that differ in their number alone, as one."""
    counts: dict[str, int] = {}
    for group in step:
        names = ", ".join(dict.fromkeys(_NUMBER.sub(".*.", name) for name in group.members))
        text = f"{names}  [{group.rows} x {group.channels}]"
        counts[text] = counts.get(text, 0) + 1
    return [text if count == 1 else f"{text} x {count}" for text, count in counts.items()]


def check_picture(file: Path) -> None:
    """
    Raises:
        CompressionError: matplotlib is not there, or does not know the format.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CompressionError("A picture needs matplotlib: pip install 'lightning-compress[report]'.") from error
    known, given = sorted(Figure().canvas.get_supported_filetypes()), file.suffix.removeprefix(".")
    if given and given.lower() not in known:
        raise CompressionError(f"graph={file}: Format {given!r} is not supported; supported are {', '.join(known)}.")


def save_picture(view: GraphView, file: Path) -> None:
    """Draw the graph from top to bottom, in the format that the file's name ends in (svg, png, pdf; see
    `check_picture`)."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"text.parse_math": False}):  # names may hold $
        figure = Figure()
        _draw(figure, view)
        figure.savefig(file)


def _draw(figure: "Figure", view: GraphView) -> None:
    parts = collapsed(view.parts)
    heights = [_height(part) for part in parts]
    total = sum(heights) + _GAP * len(parts) + 2 * _MARGIN + _TITLE + _LINE
    figure.set_size_inches(11, total)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, 11)
    axes.set_ylim(0, total)
    top = total - _MARGIN
    axes.text(0.4, top, _heading(view), fontsize=11, weight="bold", va="top")
    top -= _TITLE
    axes.text(0.4, top, shorten(f"traced on {view.batch}", 150), fontsize=8, color="0.35", va="top")
    top -= _LINE
    for part, height in zip(parts, heights, strict=True):
        _draw_part(axes, part, top, height)
        top -= height
        if part.num_crossing:
            axes.annotate("", (1.2, top - _GAP + 0.03), (1.2, top), arrowprops={"arrowstyle": "-|>", "color": "0.35"})
            axes.text(1.4, top - _GAP / 2, _crossing(part), fontsize=8, color="0.35", va="center")
        top -= _GAP


def _height(part: SubgraphView) -> float:
    return _TITLE + _LINE * len(_rows(part)) + 0.08


def _draw_part(axes: "Axes", part: SubgraphView, top: float, height: float) -> None:
    from matplotlib.patches import FancyBboxPatch

    color = "#dbe9f6" if part.steps else "#eeeeee"
    style = "round,pad=0,rounding_size=0.08"
    for shift in reversed(range(min(part.alike, 3))):  # a stack, where several are alike
        corner = (0.4 + 0.06 * shift, top - height - 0.06 * shift)
        axes.add_patch(FancyBboxPatch(corner, 10.1, height, boxstyle=style, facecolor=color, edgecolor="0.4"))
    axes.text(0.55, top - 0.1, part.name, fontsize=9, weight="bold", va="top")
    axes.text(10.35, top - 0.1, _description(part), fontsize=8.5, va="top", ha="right")
    for number, (text, is_cut) in enumerate(_rows(part)):
        y = top - _TITLE - _LINE * number
        if is_cut:
            axes.plot([0.5, 10.4], [y + 0.03, y + 0.03], color="#c0392b", linewidth=1, linestyle=(0, (4, 3)))
        axes.text(0.8, y - _LINE / 2 + 0.03, text, fontsize=8.5, va="center", family="monospace")
