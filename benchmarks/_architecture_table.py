"""The document that `architectures.py` writes."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import transformers
from _architecture_kinds import KINDS, LEAST_SHARE, MOST_HIDDEN

Row = Mapping[str, Any]

STAGES: Mapping[str, str] = {
    "config": "its tiny configuration cannot be built",
    "inputs": "the model itself does not run on the sample inputs",
    "recipe": "the recipe does not apply",
    "trace": "it cannot be recorded as a graph",
    "calibrate": "the run fails",
    "export": "the checkpoint cannot be written",
    "reload": "what is read back is missing something or differs",
    "process": "the process did not end by itself",
}
"""What the words in `Result.failed` mean."""


def markdown(rows: Sequence[Row], total: int) -> str:
    """The whole document, for the rows that there are."""
    works = [row for row in rows if not row["failed"]]
    refused = [row for row in works if not _is_read_by_transformers(row)]
    parts = [
        "# Architectures\n",
        _INTRO.format(
            torch=torch.__version__, transformers=transformers.__version__, least=LEAST_SHARE, most=MOST_HIDDEN
        ),
        _MODULES,
        f"**{len(works)} of {total} work ({len(works) / total:.1%}).** Of these, transformers cannot read "
        f"the checkpoints of {len(refused)}, which `lightning_compress.load_compressed` reads; with only those that it "
        f"reads itself, {len(works) - len(refused)} work ({(len(works) - len(refused)) / total:.1%}).\n",
        _counts(rows),
        *(_table(kind, [row for row in rows if row["kind"] == kind]) for kind in KINDS),
        _by_reason("## What transformers cannot read, and why\n", refused),
        _failures([row for row in rows if row["failed"]]),
    ]
    return "\n".join(parts)


_INTRO = """Made by `python benchmarks/architectures.py`, torch {torch}, transformers {transformers}: every model type
of transformers' auto-mappings for causal language models, vision-language models, encoder-decoders, speech models, and
encoders of text and images. A type that is in several kinds has a row in each. Its default configuration is shrunk, the
model gets random weights, and `Compressor(trainer).compress(model, recipe, ...)` quantizes it to 4 bits with GPTQ and
reads the checkpoint back with `from_pretrained` or, where that refuses it, `load_compressed`; quantized
weights have to be the same bit for bit. A model does not work if one call of the graph holds more than {most:.0%} of
what is quantized, or if less than {least:.0%} is of the weights that are meant to be.

- **traced**: *whole*, or the classes of modules that became single calls: their Linears have no node of their own.
  *(methods)*: of code between the layers, methods that read values are nodes. The graph's outputs are compared with
  the model's. *batches of one size*: the graph serves batches whose images have the sizes of the first (a run refuses
  others).
- **quantized**: Linears that were, of all that are (each expert counts); and, if that is not all, their share of the
  weights in matrices that are meant to be. Output embeddings, routers, towers beside a language model and what these
  inputs do not reach are left alone; stacks that nothing describes are too, and do count.
- **modules**: names of those that were quantized, without the path.
- **reload error**: the largest difference of the outputs of the quantized model in memory and of what is read back,
  absolute; it passes up to rounding. *ours*: not by transformers (see below).
- **fed**: what the model was run on. *position ids* were given where it could not be recorded without.
"""

_MODULES = "\n".join(
    [
        "| module | targeted by | read back by |",
        "|---|---|---|",
        "| `Linear` | class, name or pattern | transformers, vLLM, `load_compressed` |",
        "| stacked experts | as a `Linear` each | the same, if their checkpoints hold single experts |",
        "| transformers' `Conv1D` (GPT-2) | as a `Linear`, or by its class | `load_compressed`, vLLM, which keeps "
        "them as they are packed; transformers refuses |",
        "| `Embedding` | class or name; rounded to nearest, by searched scales with `gptq` | "
        "transformers (beside Linears of another scheme with 8 "
        "bits alone), `load_compressed`; vLLM as [vllm.md](vllm.md) says |",
        "| `nn.MultiheadAttention`, outside of transformers' models | as Linears `q_proj`, `k_proj`, `v_proj`, "
        "`out_proj` | `load_compressed` |",
        "| a Linear in all but its class (torch_geometric's) | class or name | `load_compressed` |",
        "| `Conv1d`, `Conv2d`, if not of several groups | class or name; as a `Linear` of its patches | "
        "`load_compressed`; transformers refuses |",
        "",
    ]
)


def _counts(rows: Sequence[Row]) -> str:
    lines = ["| kind | families | work | read by transformers | fail |", "|---|---|---|---|---|"]
    for kind in KINDS:
        mine = [row for row in rows if row["kind"] == kind]
        works = [row for row in mine if not row["failed"]]
        read = sum(map(_is_read_by_transformers, works))
        lines.append(f"| {kind} | {len(mine)} | {len(works)} | {read} | {len(mine) - len(works)} |")
    return "\n".join(lines) + "\n"


def _table(kind: str, rows: Sequence[Row]) -> str:
    lines = [
        f"## {kind[0].upper()}{kind[1:]}\n",
        "| family | traced | quantized | modules | subgraphs | reload error | fed |",
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for row in rows:
        if row["failed"]:
            lines.append(f"| {row['model_type']} | *fails: {row['failed']}* | | | | | {row['fed']} |")
            continue
        fed = "text only" if row["fed"] == "text" and kind in ("vision-language", "speech") else row["fed"]
        share = f", {row['quantized_share']:.0%}" if row["quantized_share"] < 0.995 else ""
        numbers = f"{row['num_quantized']} / {row['num_targets']}{share} | {', '.join(row['modules'])}"
        lines.append(
            f"| {row['model_type']} | {_traced(row)} | {numbers} | {row['num_subgraphs']} | {_error(row)} | {fed} |"
        )
    return "\n".join(lines) + "\n"


def _traced(row: Row) -> str:
    calls = Counter(name for name, _, hidden in row["fallbacks"] if hidden)
    rows_fixed = any("one size only" in reason for _, reason, _ in row["fallbacks"])
    notes = [", ".join(f"{count} {name}" for name, count in calls.items()) + " as single calls"] if calls else ["whole"]
    methods = ["(methods)"] if any("." in name for name, _, _ in row["fallbacks"]) else []
    return "; ".join([" ".join([*notes, *methods]), *(["batches of one size"] if rows_fixed else [])])


def _error(row: Row) -> str:
    difference = row["reload_difference"]
    by = "" if _is_read_by_transformers(row) else " (ours)"
    if difference is None:
        return f"not compared{by}"
    return f"0{by}" if difference == 0 else f"{difference:.0e}{by}"


def _is_read_by_transformers(row: Row) -> bool:
    return bool(row["loaded_with"].startswith("transformers"))


def _failures(rows: Iterable[Row]) -> str:
    lines = ["## What fails, and why\n"]
    by_stage: dict[str, list[Row]] = {}
    for row in rows:
        by_stage.setdefault(row["failed"], []).append(row)
    for stage, mine in sorted(by_stage.items(), key=lambda item: list(STAGES).index(item[0])):
        lines.append(_by_reason(f"**{stage}** ({len(mine)}): {STAGES[stage]}\n", mine))
    return "\n".join(lines)


def _by_reason(heading: str, rows: Sequence[Row]) -> str:
    reasons: dict[str, list[str]] = {}
    for row in rows:
        reasons.setdefault(_reason(row), []).append(f"{row['model_type']} ({row['kind']})")
    return "\n".join([heading, *(f"- {', '.join(names)}: {reason}" for reason, names in reasons.items()), ""])


def _reason(row: Row) -> str:
    """The first sentence, without what no document needs."""
    text = row["reason"].partition(". Check that the model runs")[0]
    text = re.sub(r"\S*/tmp\w+/out\b", "the checkpoint", text.partition(" cannot: ")[2] or text)
    return f"`{text.replace('`', '').replace('|', '/')[:300]}`"
