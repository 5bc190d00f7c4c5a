"""The graph that serves all batches of a calibration set."""

import warnings
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch

from lightning_compress.calibration.batches import CalibrationSet, counted, num_elements
from lightning_compress.calibration.target import Target
from lightning_compress.errors import CalibrationDataError, CalibrationWarning, UntraceableModelError
from lightning_compress.graph.fallback import OF_ONE_SIZE, Fixed
from lightning_compress.graph.ones import first_of_one, same_operations, sizes_of_one
from lightning_compress.graph.restore import attributes_restored, contents_restored
from lightning_compress.graph.trace import Traced, trace, violated_guards
from lightning_compress.memory.calls import onloaded_when_called
from lightning_compress.memory.source import WeightSource
from lightning_compress.memory.store import WeightStore
from lightning_compress.memory.transfer import Lane

_Record = Callable[..., Traced]
_TRIED = 3
"""Batches to record the model on, one after the other, until one serves all."""


def trace_on(
    target: Target,
    leaves: Sequence[str],
    boundaries: Sequence[str],
    data: CalibrationSet,
    source: WeightSource | None = None,
    multiplied: Collection[str] = (),
    needs_outputs: bool = False,
) -> Traced:
    """Record the model on the largest batch, or on one of the next where that has sizes that are equal by chance.

    Where no outputs are needed, what comes behind the last module (a loss) need not be what a graph can hold.

    Args:
        target: the model.
        leaves: modules that are single calls.
        boundaries: the sequential targets.
        data: the batches that the graph has to serve.
        source: where the values of parameters on the meta device are, should the model have to be run once.
        multiplied: see `trace`.
        needs_outputs: the graph is to have the step's outputs.

    Raises:
        UntraceableModelError: the forward cannot be recorded.
        CalibrationDataError: another batch would take another path.
    """
    onloading = None
    if source is not None:
        store = WeightStore(target.root, Lane(torch.device("cpu")), source)
        onloading = partial(onloaded_when_called, target.root, boundaries, store)

    def record(batch: Any, fixed: Fixed = frozenset(), *, to_the_end: bool = True) -> Traced:
        with attributes_restored(target.module), contents_restored(target.module):
            return trace(
                target.root,
                target.step,
                batch,
                leaf_names=leaves,
                boundary_names=boundaries,
                others=data.batches,
                onloading=onloading,
                fixed=fixed,
                multiplied=multiplied,
                to_the_end=to_the_end,
            )

    try:
        return _serving_all(data, record)
    except (UntraceableModelError, CalibrationDataError) as error:
        if needs_outputs:
            raise
        try:
            return _serving_all(data, partial(record, to_the_end=False))
        except Exception:  # whatever it is, it is the first one that tells
            raise error from error.__cause__


def _serving_all(data: CalibrationSet, record: _Record) -> Traced:
    problems: dict[int, list[str]] = {}
    because = ""
    for batch in sorted(data.batches, key=num_elements, reverse=True)[:_TRIED]:
        traced = _with_ones(record(batch), record, data.batches)
        found = {number: violated_guards(traced, other) for number, other in enumerate(data.batches)}
        others = [number for number, violated in found.items() if violated]
        if not others:
            return traced
        if not problems or len(others) < len(problems):
            problems = {number: found[number] for number in others}
            because = "".join(f" Of one size: {each.reason}." for each in traced.fallbacks if each.how == OF_ONE_SIZE)
    first, violated = next(iter(problems.items()))
    raise CalibrationDataError(
        f"{len(problems)} of {len(data.batches)} calibration batches ({counted(list(problems))}) would take another "
        f"path through the model than the one recorded (batch {first}: {'; '.join(violated[:3])}).{because} Bring the "
        "batches to one form: one length, as many rows (drop_last) and images in each, of one size; or leave these "
        "out; or put what decides so, or takes a size for a plain number, into an nn.Module in which nothing is "
        "quantized, which runs anew for every batch."
    )


def _with_ones(traced: Traced, record: _Record, batches: Sequence[Any]) -> Traced:
    """What batches of one row (or token) take, where the model has another path for them: all do, or it is told."""
    found = first_of_one(traced, batches)
    if found is None:
        return traced
    number, ones = found
    try:
        other = record(batches[number], ones)
    except UntraceableModelError:
        return traced
    if same_operations(traced, other):
        return traced
    if all(sizes_of_one(traced, batch) >= ones for batch in batches):
        return other
    warnings.warn(
        f"The model computes something else for a batch of one row or token (batch {number} of {len(batches)}) than "
        "for others, and it is run as they are: leave it out (drop_last=True), or bring the batches to one size.",
        CalibrationWarning,
        stacklevel=3,
    )
    return traced
