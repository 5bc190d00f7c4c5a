"""A self-contained page of a report: no scripts, no external files, the figure inline as SVG."""

import html
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_compress.foresight.compare import Compared
from lightning_compress.foresight.planned import plan_of
from lightning_compress.memory.budget import MemoryUse
from lightning_compress.report.experts import collapsed, coverage, coverage_lines
from lightning_compress.report.figures import error_figure, lanes_figure, memory_figure
from lightning_compress.report.plan import amount, described
from lightning_compress.report.sizes import sized

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}table{border-collapse:collapse;width:100%;font-size:13px}
th,td{padding:.25rem .6rem;border-bottom:1px solid #ddd;text-align:left;vertical-align:top}
td:first-child{overflow-wrap:anywhere;min-width:9rem}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}dl{display:grid;grid-template-columns:max-content
auto;gap:.2rem 1.2rem}
dt{color:#666}dd{margin:0}.bad{color:#b00020;font-weight:600}.good{color:#176b2c;font-weight:600}svg{max-width:100%;height:auto}
"""


def render_html(report: Mapping[str, Any]) -> str:
    """The page for `Report.to_dict()`."""
    modules = [{**module, "subgraph": part["name"]} for part in report["subgraphs"] for module in part["modules"]]
    rows = collapsed(modules)
    sections = [
        f"<h1>{_text(report['model'])}: {len(modules)} module{'s'[: len(modules) != 1]} quantized</h1>",
        _facts(report),
        *(_plan_sections(report) if report["plan"] else ()),
        "<h2>Error of each module</h2>",
        "<p>The error of the outputs on the calibration data, relative to the outputs: tr(dW C dW<sup>T</sup>) / "
        "tr(W C W<sup>T</sup>), C being the mean of x x<sup>T</sup> over the inputs, which are not rounded there "
        "even if a scheme quantizes them.</p>",
        error_figure([(row["module"], row["error"]) for row in rows]),
        "<h2>Modules</h2>",
        _table(
            (
                "module",
                "scheme",
                "shape",
                "relative error",
                "tokens",
                "size, of before",
                "solved with",
                "damping",
                "notes",
            ),
            [_module_row(row) for row in rows],
            numeric=(3, 4, 5, 7),
        ),
        *_experts_section(modules),
        "<h2>Subgraphs</h2>",
        _table(
            ("subgraph", "onload s", "run s", "solve s", "write s", "cached activations MB", "peak memory MB"),
            [_subgraph_row(part) for part in report["subgraphs"]],
            numeric=(1, 2, 3, 4, 5, 6),
        ),
    ]
    if report["excluded"]:
        left = [(e["module"], e["class_name"], "x".join(map(str, e["shape"])), e["reason"]) for e in report["excluded"]]
        sections += ["<h2>Left as they are</h2>", _table(("module", "class", "shape", "reason"), left)]
    for how in dict.fromkeys(each["how"] for each in report["fallbacks"]):
        told = [(each["module"] or "the model", each["reason"]) for each in report["fallbacks"] if each["how"] == how]
        sections += [f"<h2>{how.capitalize()}</h2>", _table(("module", "reason"), told)]
    title = f"lightning_compress: {_text(report['model'])}"
    head = f"<meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang=en>{head}{''.join(sections)}</html>\n"


def _plan_sections(report: Mapping[str, Any]) -> list[str]:
    """What was planned beside what came of it."""
    plan, ran = plan_of(report["plan"]), report["subgraphs"]
    rows = [Compared(*(row[key] for key in ("name", "unit", "foreseen", "measured"))) for row in report["comparison"]]
    planned = report["plan"]["subgraphs"]
    of_device = [part["peak_bytes"] for part in ran]
    place_measured = "host" if report["device"] == "cpu" else "device"
    figures = [
        memory_figure(place, planned, of_device if place == place_measured and rows else [])
        for place in ("device", "host")
        if any(place in part["peaks"] for part in planned)
    ]
    table = _table(
        ("", "foreseen", "measured", "error of the plan"),
        [(row.name, amount(row, row.foreseen), amount(row, row.measured), f"{row.error:+.0%}") for row in rows],
        numeric=(1, 2, 3),
    )
    return [
        "<h2>The plan, and what came of it</h2>",
        f"<p>{_text(described(plan))}</p>",
        table if rows else "<p>The run was continued or stopped, so its seconds are not those of the plan.</p>",
        "<h2>Memory, as foreseen</h2>",
        *figures,
        "<h2>Lanes, as foreseen, and phases, as measured</h2>",
        "<p>A colour is one subgraph, the same in all rows; after ten they begin again.</p>",
        lanes_figure(planned, ran if rows else []),
    ]


def _experts_section(modules: Sequence[Mapping[str, Any]]) -> list[str]:
    """How many calibration tokens were routed to the experts of each layer."""
    found = coverage(modules)
    if not found:
        return []
    rows = [
        (
            layer.layer,
            str(len(layer.num_tokens)),
            *(f"{of(layer.num_tokens):g}" for of in (min, statistics.median, max)),
            str(layer.num_starved),
            str(layer.num_unseen),
        )
        for layer in found
    ]
    headings = ("layer", "experts", "fewest tokens", "median", "most", "fewer than channels", "none")
    lines = "".join(f"<p>{_text(line[0].upper() + line[1:])}.</p>" for line in coverage_lines(found))
    return ["<h2>Experts</h2>", lines, _table(headings, rows, numeric=range(1, 7))]


def _data(report: Mapping[str, Any]) -> str:
    """Of samples without token ids, images say, only the number of batches is known."""
    if not report["num_batches"]:
        return "none was needed"
    of_text = f"{report['num_samples']} samples, {report['num_tokens']} tokens, " if report["num_samples"] else ""
    return f"{of_text}{report['num_batches']} batches"


def _facts(report: Mapping[str, Any]) -> str:
    verification = report["verification"]
    modules = [module for part in report["subgraphs"] for module in part["modules"]]
    kinds = dict.fromkeys((module["algorithm"], module["scheme"]) for module in modules)
    facts: list[tuple[str, str]] = [
        ("model", _text(" of ".join(filter(None, (report["model"], report["model_path"]))))),
        ("data", _data(report)),
        ("date", _text(report["date"])),
        ("versions", _text(", ".join(f"{name} {number}" for name, number in report["versions"].items()))),
        ("recipe", "<br>".join(_text(f"{algorithm}, {scheme}") for algorithm, scheme in kinds)),
        (
            "all weights, quantized or not",
            f"{sized(report['bytes_before'])} &rarr; {sized(report['bytes_after'])}",
        ),
        (
            "ran",
            _text(
                f"{report['schedule']} on {report['devices']}, "
                f"{report['num_batches']} batches, padding: {'yes' if report['has_padding'] else 'no'}"
            ),
        ),
        ("time", f"{report['total_s']:.1f} s, of which {report['trace_s']:.1f} s before the first subgraph"),
        *((_text(name.replace("_", " ")), f"{value:.4g}") for name, value in report["extra"].items()),
    ]
    if verification is not None:
        verdict = "<span class=good>identical</span>" if report["verified"] else "<span class=bad>different</span>"
        outputs = verification["max_abs_difference"]
        detail = (
            "" if outputs is None else f"; outputs on {_text(verification['batch'])} differ by at most {outputs:.3g}"
        )
        if verification["failed_on"]:
            detail += f"; on ranks {', '.join(map(str, verification['failed_on']))}"
        if verification["failure"]:
            detail += f"; {_text(verification['failure'])}"
        facts.append(("read back", f"{verdict} with {_text(verification['loaded_with'])}{detail}"))
    if report["memory"] is not None:
        facts.append(("memory", _text(MemoryUse(**report["memory"]).summary())))
    facts += [("note", _text(note)) for note in report["notes"]]
    if report["is_partial"]:
        facts.append(
            ("state", "<span class=bad>partial: not every subgraph was quantized, no checkpoint was written</span>")
        )
    if report["place"]:
        facts.append(("checkpoint", _text(report["place"])))
    return "<dl>" + "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in facts) + "</dl>"


def _module_row(module: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        module["module"],
        module["scheme"],
        "x".join(map(str, module["shape"])),
        f"{module['error']:.3e}",
        str(module["num_tokens"]),
        f"{module['bytes_after'] / module['bytes_before']:.1%}",
        ", ".join(name.rpartition(".")[2] for name in module["solved_with"]),
        f"{module['damping']:g}",
        "; ".join((*_corrected(module["correction"]), *module["notes"])),
    )


def _corrected(correction: Mapping[str, float]) -> tuple[str, ...]:
    if not correction:
        return ()
    judged = f", {correction['held_out']:.3f} of the error of held-out batches" if "held_out" in correction else ""
    rounds = f", {correction['rounds']:.1f} rounds of refitting" if "rounds" in correction else ""
    return (f"corrected with strength {correction['strength']:.2f}, ridge {correction['ridge']:g}{rounds}{judged}",)


def _subgraph_row(part: Mapping[str, Any]) -> tuple[str, ...]:
    seconds = (f"{part[key]:.2f}" for key in ("onload_s", "run_s", "solve_s", "write_s"))
    return part["name"], *seconds, f"{part['activation_bytes'] / 1e6:.1f}", f"{part['peak_bytes'] / 1e6:.0f}"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[int] = ()) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        inner = (
            f"<{tag}{' class=n' if number in numeric else ''}>{_text(cell)}</{tag}>"
            for number, cell in enumerate(cells)
        )
        return f"<tr>{''.join(inner)}</tr>"

    return f"<table>{row(headings, 'th')}{''.join(row(cells, 'td') for cells in rows)}</table>"


def _text(value: object) -> str:
    return html.escape(str(value))
