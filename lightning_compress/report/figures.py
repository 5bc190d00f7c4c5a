"""The figures of a report's page, as inline SVG; they need matplotlib."""

import importlib.util
import io
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from lightning_compress.memory.budget import TITLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Options = ParamSpec("Options")
_MISSING = "<p>The figure needs matplotlib: <code>pip install 'lightning-compress[report]'</code></p>"
_LANES = ("disk", "to_device", "pinning", "compute", "mapping", "solve", "to_host", "writing")


def figure(
    height: float,
) -> Callable[[Callable[Concatenate["Axes", Options], None]], Callable[Options, str]]:
    """Make a function that draws into axes one that returns SVG; or says what to install."""

    def decorate(draw: Callable[Concatenate["Axes", Options], None]) -> Callable[Options, str]:
        @wraps(draw)
        def drawn(*args: Options.args, **kwargs: Options.kwargs) -> str:
            if importlib.util.find_spec("matplotlib") is None:
                return _MISSING
            from matplotlib.backends.backend_svg import FigureCanvasSVG
            from matplotlib.figure import Figure

            canvas = Figure(figsize=(11, height), layout="constrained")
            axes = canvas.add_subplot()
            draw(axes, *args, **kwargs)
            axes.spines[["top", "right"]].set_visible(False)
            buffer = io.StringIO()
            FigureCanvasSVG(canvas).print_svg(buffer)
            return buffer.getvalue().partition("<!DOCTYPE")[2].partition(">")[2]

        return drawn

    return decorate


@figure(3.6)
def error_figure(axes: "Axes", errors: Sequence[tuple[str, float]]) -> None:
    """A point per module on a logarithmic axis, which has no zero for bars to stand on."""
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name, _ in errors))
    for number, kind in enumerate(kinds):
        chosen = [(position, error) for position, (name, error) in enumerate(errors) if name.rpartition(".")[2] == kind]
        # with a space, as matplotlib leaves labels out that begin with _
        axes.plot(*zip(*chosen, strict=True), "o", markersize=5, label=f" {kind}", color=f"C{number % 10}")
    if any(error > 0 for _, error in errors):
        axes.set_yscale("log")
    axes.set_xlabel("module, in the model's order")
    axes.set_ylabel("relative output error")
    axes.set_xlim(-0.7, len(errors) - 0.3)
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    if len(kinds) <= 12:
        columns = min(len(kinds), 7)
        legend = axes.legend(ncols=columns, fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1))
        for text in legend.get_texts():
            text.set_parse_math(False)  # names may hold $


@figure(3.2)
def memory_figure(axes: "Axes", place: str, subgraphs: Sequence[Mapping[str, Any]], measured: Sequence[int]) -> None:
    """What a plan has in a place while each subgraph runs, a stack of parts; crosses are what was measured (B)."""
    parts = list(dict.fromkeys(part for row in subgraphs for part in row["peaks"].get(place, {})))
    bottom = [0.0] * len(subgraphs)
    for part in parts:
        heights = [row["peaks"].get(place, {}).get(part, 0) / 2**30 for row in subgraphs]
        axes.bar(range(len(subgraphs)), heights, bottom=bottom, width=0.85, label=TITLES[part])
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    if measured:
        axes.plot(
            range(len(measured)), [size / 2**30 for size in measured], "kx", markersize=5, label="measured so far"
        )
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("subgraph, in the order of the run")
    axes.set_ylabel(f"{place}, GiB")
    axes.set_xlim(-0.7, len(subgraphs) - 0.3)
    axes.legend(ncols=5, fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1))


@figure(2.8)
def lanes_figure(axes: "Axes", subgraphs: Sequence[Mapping[str, Any]], measured: Sequence[Mapping[str, Any]]) -> None:
    """When each lane is busy, as foreseen, and below the phases as they were measured; colours tell subgraphs apart.

    The disk reads a subgraph's weights before it runs, so its work ends where the run begins, or has begun with the
    first subgraph at the latest.
    """
    lanes = [lane for lane in _LANES if any(row["lanes"].get(lane) for row in subgraphs)]
    phases = ("onload_s", "run_s", "solve_s", "write_s") if measured else ()
    now = 0.0
    for number, row in enumerate(subgraphs):
        run, solved = now + row["onload_s"], now + row["onload_s"] + row["run_s"]
        starts = {"solve": solved, "writing": solved + row["solve_s"]}
        starts["disk"] = max(0.0, run - row["lanes"].get("disk", 0.0))
        for place, lane in enumerate(lanes):
            length = row["lanes"].get(lane, 0.0)
            axes.barh(-place, length, left=starts.get(lane, run), height=0.8, color=f"C{number % 10}")
        now += sum(row[phase] for phase in ("onload_s", "run_s", "solve_s", "write_s"))
    now = 0.0
    for number, row in enumerate(measured):
        for place, phase in enumerate(phases):
            axes.barh(-len(lanes) - place - 0.5, row[phase], left=now, height=0.8, color=f"C{number % 10}")
            now += row[phase]
    names = [*lanes, *(f"measured: {phase.removesuffix('_s')}" for phase in phases)]
    ticks = [-place if place < len(lanes) else -place - 0.5 for place in range(len(names))]
    axes.set_yticks(ticks, [name.replace("_", " ") for name in names])
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds since the first subgraph")
