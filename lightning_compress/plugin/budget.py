"""Budgets of memory and a prepared run: refused or fitted before any work, compared with the process after it."""

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor, fx, nn

from lightning_compress.algorithms.tiling import tiling_of
from lightning_compress.calibration.amounts import statistics_bytes
from lightning_compress.calibration.batches import CalibrationSet
from lightning_compress.calibration.flow import cached_inputs
from lightning_compress.calibration.footprint import footprint
from lightning_compress.calibration.layout import rest_sizes
from lightning_compress.calibration.loop import Calibration
from lightning_compress.calibration.observe import Statistics, begin_statistics
from lightning_compress.calibration.solve import stacked_shape
from lightning_compress.errors import BudgetError
from lightning_compress.graph.cuda import AsOnCuda
from lightning_compress.graph.names import weight_of
from lightning_compress.graph.sizes import binding, traced_bytes
from lightning_compress.graph.synthesize import flatten_batch
from lightning_compress.graph.trace import Traced
from lightning_compress.memory.budget import Budgets, Fit, MemoryUse, fit, gib
from lightning_compress.memory.heap import trim_heap
from lightning_compress.memory.host import available_bytes, memory_bytes
from lightning_compress.memory.needs import Moment, Needs
from lightning_compress.memory.placement import LEAST, MemoryConfig
from lightning_compress.memory.source import is_on_meta
from lightning_compress.memory.tracker import held_bytes, high_water_bytes
from lightning_compress.memory.workspaces import cublas_workspace_bytes
from lightning_compress.recipe.resolve import ResolvedRecipe


class BudgetWarning(UserWarning):
    """The process took more than its budget."""


def within_budgets(
    run: Calibration, data: CalibrationSet | None, config: MemoryConfig, writes: bool, verifies: bool
) -> tuple[Calibration, MemoryUse | None]:
    """The run with the prefetch depth and the activation budget that fit, and what it will take; as it is, and None,
    where there are no budgets.

    Args:
        run: prepared.
        data: its calibration set.
        config: the user's budgets.
        writes: whether a checkpoint is written.
        verifies: whether that is loaded a second time at the end.

    Raises:
        BudgetError: it cannot fit.
    """
    if config.host_budget is None and config.device_budget is None:
        _check_widths(run)
        return run, None
    placement, root = run.flow.placement, run.flow.root
    batches = [] if data is None else [data.batches[number] for number in run.flow.share]
    measured = batches or ([] if data is None else data.batches[:1])  # a rank without any runs a part of the rest too
    table = (*footprint(run, [flatten_batch(batch)[0] for batch in measured]),)
    if writes:
        table += tuple(at_the_end(run, data, verifies))
    trim_heap()
    budgets = budgets_of(config, placement.device, held_bytes(placement.device), has_weights=not is_on_meta(root))
    if placement.source is not None:
        budgets = replace(budgets, converting=placement.source.converting)
    found = fit(table, placement.device, budgets)
    placement = replace(
        placement,
        prefetch_depth=found.depth,
        device_activation_budget=found.waiting.device,
        activation_budget=found.waiting.host,
        is_tight=False,
        most_resident=found.most_resident,
    )
    flow = replace(run.flow, placement=placement)
    if flow.traced is not None:
        flow = replace(flow, cache=cached_inputs(flow.traced, batches, placement, flow.reference.diverging))
    return replace(run, flow=flow), _use(budgets, found, run.flow.device)


def budgets_of(config: MemoryConfig, device: torch.device, held: int, *, has_weights: bool) -> Budgets:
    """What there is of memory, as the user says, where a process holds `held` bytes before the run."""
    return Budgets(
        host=config.num_bytes("host_budget", device),
        held=held,
        device=config.num_bytes("device_budget", device),
        device_activations=config.num_bytes("device_activation_budget", device),
        activations=config.num_bytes("activation_budget", device),
        depth=config.prefetch_depth,
        has_weights=has_weights,
        is_lean=config.host_budget == LEAST,
        libraries=cublas_workspace_bytes(device),
    )


def _check_widths(run: Calibration) -> None:
    """Without budgets nothing is foreseen. But statistics grow with the square of a module's input channels, of which a
    convolution has those of all its taps, so one group alone may be more than there is."""
    device = run.flow.device
    there = available_bytes() if device.type == "cpu" else memory_bytes(device)
    assignments, known = run.resolved.assignments, dict[tuple[object, ...], int]()
    for group in (group for part in run.flow.subgraphs for step in part.steps for group in step.solve):
        name, sources = group.members[0], [source for source in group.sources if run.needs.get(source)]
        if not sources:
            continue
        shape = stacked_shape(group, run.flow.root)
        kinds = frozenset(kind for source in sources for kind in run.needs[source])
        case = (shape, kinds, assignments[name].algorithm, id(assignments[name].scheme))  # of experts few
        if case not in known:
            statistics: Statistics = {}
            with nullcontext() if device.type == "cpu" else AsOnCuda():  # blocks of Grams are wider there
                begin_statistics(sources[:1], run.needs, run.sizes, torch.device("meta"), statistics)
            of = (*shape, assignments[name].weights, kinds, tiling_of(device))
            workspace = assignments[name].algorithm.workspace_bytes(*of)
            known[case] = statistics_bytes(statistics.values()) + workspace
        if known[case] > there:
            raise BudgetError(
                f"{name} has a weight of shape {list(weight_of(run.flow.root, name).shape)}: statistics of its "
                f"{shape[1]} input channels and what solving it needs take {gib(known[case])}, and there are "
                f"{gib(there)} of {'host' if device.type == 'cpu' else 'device'} memory. Add it to `ignore`, or to "
                "the `targets` of a modifier with `algorithm: rtn`, which needs no statistics."
            )


def _use(budgets: Budgets, found: Fit, device: torch.device) -> MemoryUse:
    return MemoryUse(
        host_budget=budgets.host,
        device_budget=budgets.device,
        held_bytes=budgets.held,
        high_water_before=high_water_bytes(),
        host_bytes=found.host_bytes,
        device_bytes=found.device_bytes,
        prefetch_depth=found.depth,
        activation_budget=found.waiting.host,
        notes=found.notes,
        peak_bytes=0,
        held_on_device=torch.cuda.memory_allocated(device) if device.type == "cuda" else 0,
    )


def at_the_end(run: Calibration, data: CalibrationSet | None, verifies: bool) -> list[Needs]:
    """Rows of the table for what comes behind the last subgraph."""
    root, parts = run.flow.root, run.flow.subgraphs
    total, rest, largest = rest_sizes(root, parts)
    copied = 0 if run.flow.device.type == "cpu" else rest
    moment = Moment("write", "", on_host=copied + largest, work={"writing": total})
    rows = [Needs("what no subgraph holds", rest if is_on_meta(root) else 0, (moment,))]
    if verifies:
        outputs = 0
        if run.flow.traced is not None and data is not None:
            (end,) = (node for node in run.flow.traced.graph.nodes if node.op == "output")
            outputs = _nbytes(run.flow.traced, end.all_input_nodes, data)
        on_host = _loaded_bytes(root, run.resolved) + 3 * outputs  # of both models, and their difference
        work = {"packing": sum(weight_of(root, n).numel() for n in run.resolved.assignments)}
        rows.append(Needs("the checkpoint", 0, (Moment("verification", "", on_host=on_host, work=work),)))
    return rows


def _nbytes(traced: Traced, outputs: Sequence[fx.Node], data: CalibrationSet) -> int:
    """Of the first batch's outputs."""
    try:
        sizes = binding(traced)(flatten_batch(data.batches[0])[0])
        return sum(traced_bytes(node, sizes) for node in outputs)
    except ValueError as error:
        raise BudgetError(
            f"What the model's outputs will take cannot be foreseen, so no budget can be promised: {error}. Set "
            "verify=False, or leave host_budget and device_budget out."
        ) from error


def _loaded_bytes(root: nn.Module, resolved: ResolvedRecipe) -> int:
    """Of a second model, whose modules hold packed weights and, once they have run, those weights as they were."""
    dense: int = sum(tensor.nbytes for tensor in root.state_dict(keep_vars=True).values() if isinstance(tensor, Tensor))
    packed: int = sum(
        weight_of(root, name).numel() * assignment.weights.num_bits // 8
        for name, assignment in resolved.assignments.items()
    )
    return dense + packed


def finished_use(use: MemoryUse | None, device: torch.device, taken: int) -> MemoryUse | None:
    """`use` with the process's own peak; warns if that, or what was `taken` of the device, is over the budget.

    A high-water mark never falls: one that was over the budget before the run says nothing about it.
    """
    if use is None:
        return None
    use = replace(use, peak_bytes=high_water_bytes())
    if use.host_budget is not None and use.peak_bytes > max(use.host_budget, use.high_water_before):
        warnings.warn(
            f"The process took {gib(use.peak_bytes)} of host memory, more than memory.host_budget="
            f"{gib(use.host_budget)}; the run had foreseen {gib(use.host_bytes)}. What is beyond that "
            "belongs to libraries and to holes in the heap: give the run a budget that is so much smaller.",
            BudgetWarning,
            stacklevel=2,
        )
    taken -= use.held_on_device
    if device.type == "cuda" and use.device_budget is not None and taken > use.device_budget:
        warnings.warn(
            f"The run took {gib(taken)} of the device, more than memory.device_budget={gib(use.device_budget)}; "
            f"it had foreseen {gib(use.device_bytes)}.",
            BudgetWarning,
            stacklevel=2,
        )
    return use
