"""Experts in a report: how much calibration each saw, and their modules in one row per projection."""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WORRYING = 0.1
"""Fraction of experts with too few tokens from which on more samples are asked for."""


class ExpertCoverageWarning(UserWarning):
    """Many experts saw too few calibration tokens."""


@dataclass(frozen=True)
class Coverage:
    """Of one layer's experts, how many tokens reached them.

    Attributes:
        layer: the module that owns the experts.
        num_tokens: for each expert the calibration tokens that were routed to it.
        num_channels: the most that one of its projections reads; as many tokens show every direction once.
    """

    layer: str
    num_tokens: tuple[int, ...]
    num_channels: int

    @property
    def num_starved(self) -> int:
        """Experts that saw fewer tokens than channels, and were lent what the others saw."""
        return sum(count < self.num_channels for count in self.num_tokens)

    @property
    def num_unseen(self) -> int:
        """Those that saw none."""
        return self.num_tokens.count(0)


def coverage(modules: Sequence[Mapping[str, Any]]) -> list[Coverage]:
    """Of every layer with experts; modules as in `Report.to_dict()`."""
    layers: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for module in modules:
        if module["num_lent"] is not None:
            layer, expert, _ = _split(module["module"])
            layers.setdefault(layer, {}).setdefault(expert, []).append(module)
    return [
        Coverage(
            layer,
            tuple(each[0]["num_tokens"] for each in found.values()),
            max(module["shape"][1] for each in found.values() for module in each),
        )
        for layer, found in layers.items()
    ]


def _split(name: str) -> tuple[str, str, str]:
    """The layer's experts, which one, and the rest of its name, if it is not the module itself.

    >>> _split("layers.0.experts.3.w1"), _split("block.1.mlp.experts.expert_5.net.wi"), _split("experts.3")
    (('layers.0.experts', '3', 'w1'), ('block.1.mlp.experts', 'expert_5', 'net.wi'), ('experts', '3', ''))
    """
    parts = name.split(".")
    last = len(parts) - 1
    numbered = [at for at, part in enumerate(parts[:last]) if re.search(r"\d", part)]
    at = last if parts[last].isdecimal() or not numbered else numbered[-1]
    return ".".join(parts[:at]), parts[at], ".".join(parts[at + 1 :])


def coverage_lines(found: Sequence[Coverage]) -> list[str]:
    """What a summary says of it."""
    if not found:
        return []
    counts = sorted(count for layer in found for count in layer.num_tokens)
    starved, unseen = (sum(getattr(layer, name) for layer in found) for name in ("num_starved", "num_unseen"))
    lines = [
        f"experts: {len(counts)} in {len(found)} layers saw {counts[0]} to {counts[-1]} tokens each "
        f"(median {statistics.median(counts):g})"
    ]
    if starved:
        lines[0] += f"; {starved} saw fewer than they have channels ({unseen} none) and were lent what all saw"
    if (factor := more_samples(found)) is not None:
        lines.append(advice(factor))
    return lines


def advice(factor: int) -> str:
    """What to do about experts that saw too few tokens."""
    return f"too few tokens for many experts: about {factor} times as many samples would reach nine in ten"


def more_samples(found: Sequence[Coverage]) -> int | None:
    """By which factor to raise the number of samples so that nine in ten experts see as many tokens as they have
    channels; None where enough do."""
    shares = sorted(count / layer.num_channels for layer in found for count in layer.num_tokens)
    if not shares or sum(share < 1 for share in shares) <= WORRYING * len(shares):
        return None
    least = shares[int(WORRYING * len(shares))]
    smallest = min((share for share in shares if share), default=1.0)
    return math.ceil(1 / (least or smallest))


def collapsed(modules: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The modules, a layer's experts as one row per projection: the mean of errors, the sum of the rest.

    >>> collapsed([{"module": "mlp.up", "num_lent": None}])
    [{'module': 'mlp.up', 'num_lent': None}]
    """
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for module in modules:
        name = module["module"]
        if module["num_lent"] is not None:
            layer, _, projection = _split(name)
            name = ".".join(filter(None, (layer, "*", projection)))
        rows.setdefault(name, []).append(module)
    return [dict(found[0]) if len(found) == 1 else _joined(name, found) for name, found in rows.items()]


def _joined(name: str, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    notes: dict[str, int] = {}
    for note in (note for each in found for note in each["notes"]):
        notes[note] = notes.get(note, 0) + 1
    sums = {key: sum(each[key] for each in found) for key in ("num_tokens", "num_lent", "bytes_before", "bytes_after")}
    return {
        **found[0],
        **sums,
        "module": f"{name} ({len(found)})",
        "error": statistics.mean(each["error"] for each in found),
        "damping": max(each["damping"] for each in found),
        "notes": tuple(f"{note} ({count} of {len(found)})" for note, count in notes.items()),
    }
