"""Evaluation of a model larger than memory: all batches through one subgraph after the other.

Weights are read once for all batches, where running batch after batch would read them for each. The sequential targets
run as the modules they are (single calls of the graph), so the outputs are those of the model itself, bit for bit
(for half precision on some CPUs, of the model within `graph.products.in_float32`).
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from lightning_compress.calibration.batches import CalibrationSet
from lightning_compress.calibration.flow import Flow, Values, flow_of, onloaded, prefetch, run_step
from lightning_compress.calibration.recording import trace_on
from lightning_compress.calibration.reference import Reference
from lightning_compress.calibration.target import Target
from lightning_compress.graph.stages import forward_subgraphs
from lightning_compress.graph.targets import sequential_modules, with_parameters
from lightning_compress.memory.heap import heap_kept
from lightning_compress.memory.placement import Placement


@dataclass(frozen=True)
class Evaluation:
    """A forward pass that is prepared and checked.

    Attributes:
        flow: the model's subgraphs, and where their weights and the values between them are.
        results: the value of each tensor that the model returns, by its key path ("logits"; "" for a lone tensor).
    """

    flow: Flow
    results: Mapping[str, fx.Node]


def prepare_evaluation(
    target: Target,
    data: CalibrationSet,
    placement: Placement,
    sequential_targets: Sequence[str] | None = None,
    share: Sequence[int] | None = None,
) -> Evaluation:
    """Trace the model's forward.

    Args:
        target: the model, in eval mode (see `prepare.evaluating`).
        data: the batches, on every rank all of them.
        placement: where weights and activations live.
        sequential_targets: what is onloaded at a time; None takes the model's layers.
        share: the numbers of those that are run; None: all.

    Raises:
        UntraceableModelError: the forward cannot be recorded.
        CalibrationDataError: batches that would take different paths through the model.
    """
    boundaries = sequential_modules(target.root, sequential_targets, with_parameters(target.root))
    traced = trace_on(target, boundaries, boundaries, data, placement.source, needs_outputs=True)
    parts = forward_subgraphs(traced)
    (end,) = (node for node in traced.graph.nodes if node.op == "output")
    results = dict(zip(traced.outputs, end.args[0], strict=True))
    batches = {number: data.batches[number] for number in (range(len(data.batches)) if share is None else share)}
    flow = flow_of(target.root, traced, parts, batches, placement, tuple(results.values()), {}, Reference())
    return Evaluation(flow, results)


@torch.no_grad()
def outputs(evaluation: Evaluation) -> Iterator[dict[str, object]]:
    """Run it.

    Yields:
        For each batch that is run, in order, what the model returns for it, by key path, on the device. The last
        subgraph runs when they are asked for, so the outputs of one batch are there at a time.
    """
    flow, results = evaluation.flow, evaluation.results

    def returned(values: Values) -> dict[str, object]:
        return {path: values[node] for path, node in results.items()}

    *before, end = range(len(flow.subgraphs))
    with heap_kept():
        for index in before:
            with onloaded(flow, index):
                prefetch(flow, index)
                for number, step in flow.steps(index):
                    deque(run_step(flow, step, number), maxlen=0)
        with onloaded(flow, end):
            ((number, step),) = flow.steps(end)
            yield from map(returned, run_step(flow, step, number, wanted=frozenset(results.values())))
