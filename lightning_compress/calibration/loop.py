"""The run: every subgraph in turn is brought onto the device, the calibration set flows through it, and it is
quantized.

    for subgraph in subgraphs:                    # a slice of the traced graph
        with store.onload(subgraph):              # its weights are on the device in here only
            for step in subgraph.steps:
                run the step's nodes on every batch, gathering statistics of what its groups read
                add them up over the ranks, which have a share of the batches each
                solve its groups, rows shared out over the ranks, and put the quantized weights in place
        output.commit(subgraph)                   # packed and written: a run that dies later continues behind it

All schedules are this loop; they differ in the steps that `graph.stages` lays out. Values that later steps read wait in
the activation cache and are dropped at their last use.
"""

import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from lightning_compress.calibration.boundary import restore_boundary, save_boundary
from lightning_compress.calibration.flow import Flow, Values, give_back, onloaded, prefetch, run_step
from lightning_compress.calibration.observe import (
    Statistics,
    begin_statistics,
    merged,
    num_tokens_lent,
    num_tokens_seen,
    observing,
    reduce_statistics,
    settle_statistics,
)
from lightning_compress.calibration.quantized import QuantizedModule, Restored, apply, describe_scheme, put
from lightning_compress.calibration.records import UNREACHED, ModuleRecord, SubgraphRecord
from lightning_compress.calibration.reference import differences
from lightning_compress.calibration.solve import solve_groups
from lightning_compress.distributed.collective import Collective
from lightning_compress.distributed.folder import SharedFolder
from lightning_compress.graph.leaf import Leaf
from lightning_compress.graph.names import weight_of
from lightning_compress.graph.shared_inputs import Group, Source
from lightning_compress.graph.stages import Step, Subgraph
from lightning_compress.memory.garbage import no_full_collections
from lightning_compress.memory.heap import heap_kept
from lightning_compress.memory.tracker import peak_bytes, reset_peak
from lightning_compress.recipe.resolve import ResolvedRecipe
from lightning_compress.statistics import Statistic


class Output(Protocol):
    """Where finished subgraphs go (`export.writer.CheckpointWriter`), and what an interrupted run has left there."""

    @property
    def finished(self) -> Sequence[SubgraphRecord]:
        """The subgraphs that need no computing again: the first ones of the run."""

    def restore(self, index: int, module: str) -> Restored:
        """A module that the finished subgraph `index` quantized."""

    def pack(self, quantized: QuantizedModule) -> int:
        """Called with each quantized module while it is at hand; returns its packed bytes, 0 on a rank that leaves it
        to another."""

    def commit(self, subgraph: Subgraph, record: SubgraphRecord) -> SubgraphRecord:
        """Called at the end of each subgraph, while its weights are on the device; returns the record to keep."""


@dataclass(frozen=True)
class Calibration:
    """Everything a run needs, prepared and checked (see `prepare`).

    Attributes:
        flow: the model's subgraphs, and where their weights and the values between them are.
        resolved: what happens to each module.
        needs: which statistics each source has to gather.
        sizes: of each source the input channels, and the rows of all modules that read it.
        collective: all ranks of the run; each has the whole model, and its share of the batches.
        first_rank: the rank on which the first batch flows.
    """

    flow: Flow
    resolved: ResolvedRecipe
    needs: Mapping[Source, tuple[type[Statistic], ...]]
    sizes: Mapping[Source, tuple[int, int]]
    collective: Collective
    first_rank: int = 0


@torch.no_grad()
def calibrate(run: Calibration, output: Output, keep_in: SharedFolder | None = None) -> Iterator[SubgraphRecord]:
    """Quantize the model, one subgraph per item of the iterator.

    Args:
        run: what to do.
        output: takes what is quantized. Subgraphs that it knows to be finished are run through once, with their
            quantized weights, for the activations that later ones need.
        keep_in: where the activations between two subgraphs are kept, so that those need not be run through.

    Yields:
        A record of each finished subgraph. The model holds the quantized weights of all subgraphs yielded so far.
    """
    flow, num_finished = run.flow, len(output.finished)
    progress = _Progress(run, output, {}, num_finished, _num_calls(flow))
    if flow.traced is None or num_finished == len(flow.subgraphs):
        keep_in = None  # nothing flows
    with heap_kept(), no_full_collections():
        restored = -1 if keep_in is None else restore_boundary(keep_in, flow, num_finished, run.collective)
        for index, subgraph in enumerate(flow.subgraphs):
            is_finished = index < num_finished
            if is_finished and not flow.reference.diverging:  # which asks for the original weights first
                _take_from_output(flow, index, output)
            reset_peak(flow.device)
            meter = _Meter(flow.device, flow.moved)
            with onloaded(flow, index):
                meter.lap("onload")
                prefetch(flow, index)
                if is_finished:
                    _repeat(progress, index, has_run=index <= restored)
                    record = output.finished[index]
                else:
                    record = output.commit(subgraph, _solve(progress, index, meter))
                _take_from_output(flow, index, output)
                is_last = index + 1 == len(flow.subgraphs)
                if keep_in is not None and not (is_finished or is_last or progress.statistics):  # those are not kept
                    save_boundary(keep_in, index, flow, run.collective)
            flow.reference.forget(index)
            yield record


@dataclass(frozen=True)
class _Progress:
    """What goes on through all subgraphs.

    Attributes:
        statistics: that later groups still need.
        num_finished: subgraphs that an earlier run finished.
        num_calls: of each module in one forward.
    """

    run: Calibration
    output: Output
    statistics: Statistics
    num_finished: int
    num_calls: Counter[str]


def _num_calls(flow: Flow) -> Counter[str]:
    nodes = flow.traced.graph.nodes if flow.traced is not None else ()
    return Counter(node.target.weights_of for node in nodes if isinstance(node.target, Leaf))


def _take_from_output(flow: Flow, index: int, output: Output) -> None:
    """A weight that is at home on disk is quantized from now on; later subgraphs that share it read the output."""
    for name in flow.subgraphs[index].solved:
        flow.store.redirect(f"{name}.weight", partial(_restored_weight, output, index, name))


def _restored_weight(output: Output, index: int, name: str) -> Tensor:
    return output.restore(index, name).weight


def _solve(progress: _Progress, index: int, meter: "_Meter") -> SubgraphRecord:
    """Run, observe and quantize an onloaded subgraph."""
    flow = progress.run.flow
    modules: list[ModuleRecord] = []
    for number, step in flow.steps(index):
        _run_step(progress, step, number)
        meter.lap("run")
        # holes that activations left do not serve what a solve asks for
        give_back(flow.placement, always=flow.placement.is_tight)
        modules += _solve_groups(progress, index, step.solve)
        for source in step.forget:
            progress.statistics.pop(source, None)
        meter.lap("solve")  # what was packed is in host memory then
    return SubgraphRecord(
        name=flow.subgraphs[index].name,
        index=index,
        num_subgraphs=len(flow.subgraphs),
        modules=tuple(modules),
        num_tokens=max((module.num_tokens for module in modules), default=0),
        onload_s=meter.seconds["onload"],
        run_s=meter.seconds["run"],
        solve_s=meter.seconds["solve"],
        activation_bytes=flow.cache.num_bytes,
        peak_bytes=peak_bytes(flow.device),
        moved_bytes=dict(flow.moved - meter.moved_before),
    )


def _solve_groups(progress: _Progress, index: int, groups: Sequence[Group]) -> Iterator[ModuleRecord]:
    """Quantize the modules of groups that are ready together; nothing of one but what is packed outlives its turn."""
    run = progress.run
    group_of = {name: group for group in groups for name in group.members}

    def gathered(group: Group) -> dict[type[Statistic], Statistic]:
        return merged(group, run.needs, run.sizes, run.flow.device, progress.statistics)

    for quantized in solve_groups(groups, run.flow.root, run.resolved, gathered, run.collective):
        packed = progress.output.pack(quantized)
        group = group_of[quantized.module]
        record = _record(progress, index, group, quantized, packed)
        run.flow.reference.keep(quantized.module, run.flow.root, index)
        apply(quantized, run.flow.root, run.flow.store)
        del quantized  # the next group is about to be solved
        yield record


def _repeat(progress: _Progress, index: int, has_run: bool) -> None:
    """Put a finished subgraph's weights in place and, if others are to follow, run what outlives it, once, unless the
    cache holds that.

    Statistics are gathered again where a later subgraph shares them.
    """
    run, flow = progress.run, progress.run.flow
    for name in flow.subgraphs[index].solved:
        flow.reference.keep(name, flow.root, index)
        restored = progress.output.restore(index, name)
        put(restored, name, run.resolved.assignments[name].scheme, flow.root, flow.store)
    remaining = flow.subgraphs[progress.num_finished :]
    shared = {s for part in remaining for step in part.steps for group in step.solve for s in group.sources}
    for number, step in flow.steps(index):
        observe = tuple(source for source in step.observe if source in shared)
        if remaining and not has_run and (step.keep or observe):
            _run_step(progress, replace(step, observe=observe, solve=()), number)


def _run_step(progress: _Progress, step: Step, number: int) -> None:
    """Run a step's nodes on this rank's batches and gather the statistics of its sources, on all."""
    run, flow, statistics = progress.run, progress.run.flow, progress.statistics

    def watch(batch: int, sources: Sequence[Source], values: Values) -> AbstractContextManager[None]:
        beside = partial(differences, values=values, root=flow.root, reference=flow.reference)
        is_held_out = flow.share[batch] in flow.reference.held_out
        return observing(flow.root, sources, values, flow.masks, statistics, beside, is_held_out)

    begin_statistics(step.observe, run.needs, run.sizes, flow.device, statistics)
    batches = run_step(flow, step, number, watch)
    next(batches, None)
    if step.observe:
        settle_statistics(step.observe, run.sizes, statistics, run.collective, run.first_rank)
    deque(batches, maxlen=0)  # keeps no batch's values while the next one runs
    reduce_statistics(step.observe, run.sizes, statistics, run.collective)


def _record(progress: _Progress, index: int, group: Group, quantized: QuantizedModule, packed: int) -> ModuleRecord:
    run, statistics = progress.run, progress.statistics
    weight = weight_of(run.flow.root, quantized.module)
    num_tokens = num_tokens_seen(group, statistics)
    is_unreached = not num_tokens and any(run.needs[source] for source in group.sources)
    return ModuleRecord(
        module=quantized.module,
        subgraph=run.flow.subgraphs[index].name,
        algorithm=type(run.resolved.assignments[quantized.module].algorithm).__name__,
        scheme=describe_scheme(quantized.scheme),
        shape=tuple(weight.shape),
        error=quantized.solved.error,
        num_tokens=num_tokens,
        num_calls=progress.num_calls[quantized.module],
        solved_with=tuple(name for name in group.members if name != quantized.module),
        damping=quantized.solved.damping,
        bytes_before=weight.nbytes,
        bytes_after=packed,
        notes=(*quantized.solved.notes, UNREACHED) if is_unreached else quantized.solved.notes,
        correction=quantized.solved.chosen,
        num_lent=num_tokens_lent(group, statistics),
    )


class _Meter:
    """What a subgraph takes from now on: wall seconds per phase, and what has been `moved` since.

    It waits for the device, so that a phase pays for what it started.
    """

    def __init__(self, device: torch.device, moved: Counter[str]) -> None:
        self.seconds = {"onload": 0.0, "run": 0.0, "solve": 0.0}
        self.moved_before = moved
        self._device = device
        self._since = time.perf_counter()

    def lap(self, phase: str) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # not the copies of what comes next
        now = time.perf_counter()
        self.seconds[phase] += now - self._since
        self._since = now
