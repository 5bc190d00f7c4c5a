"""Everything before the first subgraph: the model's state, the graph, the stages, the caches."""

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from lightning_compress.algorithms.grids import has_global_scale
from lightning_compress.calibration.batches import CalibrationSet, num_elements
from lightning_compress.calibration.flow import Flow, flow_of, weights_of
from lightning_compress.calibration.loop import Calibration
from lightning_compress.calibration.recording import trace_on
from lightning_compress.calibration.reference import Kinds, Reference, correctable, reference_for
from lightning_compress.calibration.solve import group_key, needed_statistics
from lightning_compress.calibration.target import Target
from lightning_compress.distributed.collective import Collective, SingleProcess
from lightning_compress.distributed.share import assign
from lightning_compress.errors import (
    CalibrationDataError,
    CalibrationWarning,
    UnreachedModulesWarning,
    UnsupportedModelError,
    listed,
)
from lightning_compress.graph.experts import Experts
from lightning_compress.graph.leaf import Leaf, leaf_input
from lightning_compress.graph.masks import TokenMask, masks_of_sounds, row_mask_for, token_mask_for
from lightning_compress.graph.names import Names, is_in, module_named, weight_of
from lightning_compress.graph.shared_inputs import Source, quantizable_calls
from lightning_compress.graph.stages import Schedule, Subgraph, datafree_subgraphs, subgraphs
from lightning_compress.graph.synthesize import flatten_batch
from lightning_compress.graph.targets import sequential_modules
from lightning_compress.graph.trace import Traced
from lightning_compress.graph.values import is_symbolic
from lightning_compress.memory.activations import ActivationCache
from lightning_compress.memory.placement import Placement
from lightning_compress.recipe.attention import Attention
from lightning_compress.recipe.config import Recipe
from lightning_compress.recipe.parts import transformers_models
from lightning_compress.recipe.resolve import Assignment, ResolvedRecipe, without
from lightning_compress.statistics import Drift, Statistic


def needs_data(resolved: ResolvedRecipe) -> bool:
    """Whether any module's algorithm or scheme asks for statistics, or for what else reads its input: modules that do
    have one global scale, as readers that fuse them want it."""
    return any(map(_needs_data, resolved.assignments.values()))


def may_need_data(recipe: Recipe) -> bool:
    """The same of a recipe, before it is known which modules it is for."""
    return any(_needs_data(Assignment("", each.algorithm, each.scheme)) for each in recipe.modifiers)


def _needs_data(assignment: Assignment) -> bool:
    return bool(needed_statistics(assignment)) or has_global_scale(assignment.weights)


def check_layout(
    target: Target, resolved: ResolvedRecipe, schedule: Schedule, sequential_targets: Sequence[str] | None
) -> tuple[str, ...]:
    """The names of the sequential targets; needs no data, so it can be checked before a training.

    Raises:
        UnsupportedModelError: `datafree` with an algorithm that needs data, or a target that matches no module.
    """
    if schedule is Schedule.DATAFREE and needs_data(resolved):
        raise UnsupportedModelError(
            "Schedule 'datafree' runs nothing, but the recipe has algorithms or static activation scales that need "
            "statistics, or weights under a global scale, which is that of all modules with the same input (NVFP4). "
            "Use schedule 'staged', or algorithm rtn with weight-only or dynamic schemes."
        )
    return sequential_modules(target.root, sequential_targets, tuple(resolved.assignments))


def prepare(
    target: Target,
    resolved: ResolvedRecipe,
    data: CalibrationSet | None,
    placement: Placement,
    *,
    schedule: Schedule = Schedule.STAGED,
    sequential_targets: Sequence[str] | None = None,
    collective: Collective | None = None,
    traced: Traced | None = None,
) -> Calibration:
    """Trace the model and lay the run out.

    Args:
        target: the model, in host memory and in eval mode (see `calibrating`).
        resolved: what happens to each module.
        data: the calibration set; None for schedule `datafree`.
        placement: where weights and activations live.
        schedule: where the graph is cut.
        sequential_targets: what is onloaded at a time; None takes the model's layers.
        collective: the ranks; all give the same arguments, `data` whole. None: this process is the only one.
        traced: the graph, if the same model was recorded for the same targets before; None: record it.

    Raises:
        UnsupportedModelError: `datafree` with an algorithm that needs data; the forward calls no module that the recipe
            targets, or not one that it names.
        UntraceableModelError: the forward cannot be recorded.
        CalibrationDataError: batches that would take different paths through the model.
    """
    collective = collective or SingleProcess()
    names = tuple(resolved.assignments)
    boundaries = check_layout(target, resolved, schedule, sequential_targets)
    if schedule is Schedule.DATAFREE:
        parts = datafree_subgraphs(_by_boundary(names, boundaries))
        cache = ActivationCache([], device=placement.device)
        flow = Flow(target.root, parts, None, cache, weights_of(target.root, placement), placement, {}, {})
        return Calibration(flow, resolved, {}, {}, collective)
    data = _given(data)
    traced = traced or trace_on(target, names, boundaries, data, placement.source, multiplied(resolved, target.root))
    resolved = _reached(resolved, traced, target)
    parts = subgraphs(
        traced,
        frozenset(resolved.assignments),
        lambda name: group_key(resolved.assignments[name], module_named(target.root, name)),
        schedule,
    )
    shares = assign([num_elements(batch) for batch in data.batches], collective.size)
    needs, sizes = _needs(parts, resolved), _sizes(parts, target.root)
    reference, needs = _reference(traced, parts, needs, resolved, sizes, len(data.batches))
    masks = _masks(traced, needs, data)
    _warn_of_unseen(traced, parts, resolved, schedule)
    until_end = [mask.node for mask in masks.values()]
    batches = {number: data.batches[number] for number in shares[collective.rank]}
    flow = flow_of(target.root, traced, parts, batches, placement, until_end, masks, reference)
    first_rank = next(rank for rank, share in enumerate(shares) if 0 in share)
    return Calibration(flow, resolved, needs, sizes, collective, first_rank)


def multiplied(resolved: ResolvedRecipe, root: nn.Module) -> frozenset[str]:
    """Linears that need not be called by the code that multiplies with their weights: not those whose inputs are
    quantized, as only a call does it, nor those of transformers models, whose readers leave no weight to read."""
    inside = tuple(transformers_models(root))
    return frozenset(
        name
        for name, assignment in resolved.assignments.items()
        if assignment.scheme.input_activations is None
        and not name.startswith(inside)
        and isinstance(module_named(root, name), nn.Linear)
    )


def _given(data: CalibrationSet | None) -> CalibrationSet:
    if data is None:
        raise CalibrationDataError(
            "This recipe needs calibration data (with weights rounded to nearest for static scales of inputs; of NVFP4 "
            "one batch, to see what reads the same input): give `dataloaders`, a datamodule, or `calibration`."
        )
    return data


def _reference(
    traced: Traced,
    parts: Sequence[Subgraph],
    needs: dict[Source, Kinds],
    resolved: ResolvedRecipe,
    sizes: Mapping[Source, tuple[int, int]],
    num_batches: int,
) -> tuple[Reference, dict[Source, Kinds]]:
    """The run of the original model beside the quantized one, if any statistic asks for it; and what each source has to
    gather then."""
    corrected = {source: kind for source, kinds in needs.items() for kind in kinds if issubclass(kind, Drift)}

    def with_residual(name: str) -> bool:
        return resolved.assignments[name].algorithm.corrects_residual

    if not corrected:
        return Reference(), needs
    reference = reference_for(traced, parts, corrected, with_residual, sizes, num_batches)
    return reference, reference.in_their_forms(needs)


@contextmanager
def calibrating(root: nn.Module) -> Iterator[None]:
    """As `evaluating`; gradients are dropped for good."""
    for parameter in root.parameters():
        if not parameter.is_leaf:  # averages that were written to outside of `no_grad`: they have all steps' history
            parameter.detach_()
        parameter.grad = None
    with evaluating(root):
        yield


@contextmanager
def evaluating(root: nn.Module) -> Iterator[None]:
    """Eval mode and no gradients inside; every module's mode is as before afterwards.

    What is compiled runs as it is written, and attention of torch's own layers module by module: their fused kernels
    and compiled code call no modules. No parameter asks for gradients, as none does that is read from disk:
    `torch.matmul` multiplies by one that does with other kernels, even where none are computed.
    """
    modes = {module: module.training for module in root.modules()}
    there = [each for each in root.parameters() if not is_lazy(each)]
    trained = [each for each in there if each.requires_grad and each.is_leaf and not each.is_inference()]
    fused = torch.backends.mha.get_fastpath_enabled()
    root.eval()
    for parameter in trained:
        parameter.requires_grad_(False)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for module in root.modules():
            if isinstance(module, Attention | Experts) and module.folded in modes:  # it stays, and quantizes its inputs
                module.train(modes[module.folded])
        for module, training in modes.items():
            module.training = training
        for parameter in trained:
            parameter.requires_grad_()
        for module in root.modules():
            if isinstance(module, Attention):
                module.ask_for_gradients()


def _needs(parts: Sequence[Subgraph], resolved: ResolvedRecipe) -> dict[Source, tuple[type[Statistic], ...]]:
    needs: dict[Source, dict[type[Statistic], None]] = {}
    single = correctable(parts)
    for part in parts:
        for step in part.steps:
            for group in step.solve:
                for source in group.sources:
                    needs.setdefault(source, {}).update(
                        dict.fromkeys(needed_statistics(resolved.assignments[group.members[0]]))
                    )
    return {
        source: tuple(kind for kind in kinds if not issubclass(kind, Drift) or source in single)
        for source, kinds in needs.items()
    }


def _sizes(parts: Sequence[Subgraph], root: nn.Module) -> dict[Source, tuple[int, int]]:
    """Of each source the channels, and the rows of all modules that read it."""
    found: dict[Source, tuple[int, int]] = {}
    for group in (group for part in parts for step in part.steps for group in step.solve):
        shapes = [weight_of(root, name).shape for name in group.members]
        for source in group.sources:
            _, outputs = found.get(source, (0, 0))
            found[source] = shapes[0][1], outputs + sum(shape[0] for shape in shapes)
    return found


def _masks(traced: Traced, needs: Mapping[Source, Any], data: CalibrationSet) -> dict[Source, TokenMask]:
    @cache
    def mask_for(node: fx.Node, of_experts: bool) -> TokenMask | None:
        return row_mask_for(traced, node) if of_experts else token_mask_for(traced, node)

    def of(source: Source) -> TokenMask | None:
        if not source.inner:
            return mask_for(source.node, source.rows is not None)
        hidden = next(filter(_may_be_hidden, source.node.all_input_nodes), None)
        return mask_for(leaf_input(source.node) if hidden is None else hidden, False)

    masks = {source: mask for source in needs if (mask := of(source)) is not None}
    known = {mask.node for mask in masks.values()}
    for path in (path for path, node in masks_of_sounds(traced) if node not in known):
        if any(
            not bool(dict(zip(traced.placeholders, flatten_batch(each)[0], strict=True))[path].all())
            for each in data.batches
        ):
            warnings.warn(
                f"The batches have padding, and {path} marks it in the samples of a sound, of which the model makes "
                "frames: what is padding enters the statistics. Give sounds of one length, or batches of one.",
                CalibrationWarning,
                stacklevel=3,
            )
    return masks


def _may_be_hidden(node: fx.Node) -> bool:
    """Whether a value is one for each token, [B, L, ..., C]: tables of positions, and [1, L, C], are none."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 2 and is_symbolic(value.shape[0])


def _reached(resolved: ResolvedRecipe, traced: Traced, target: Target) -> ResolvedRecipe:
    """The recipe without what the model never calls; see `without` for errors."""
    names = Names(resolved.assignments)
    called = {name for node in traced.graph.nodes for name, _ in quantizable_calls(node, names)}
    never = [name for name in resolved.assignments if name not in called and name not in traced.only_read]
    reasons = dict.fromkeys(traced.only_read, "its weight is read by other code, which never calls it")
    reasons |= dict.fromkeys(never, f"{target.step_name} never calls it on the calibration data")
    left = without(resolved, target.root, reasons)
    if never:
        warnings.warn(
            f"{listed(never, 3)} will not be quantized: {target.step_name} never calls them on the "
            "calibration data. Give data that does (with images, say), or add them to `ignore`.",
            UnreachedModulesWarning,
            stacklevel=2,
        )
    return left


def _warn_of_unseen(traced: Traced, parts: Sequence[Subgraph], resolved: ResolvedRecipe, schedule: Schedule) -> None:
    """Of what the model does and calibration does not see, or keep."""
    if traced.written:
        warnings.warn(
            f"The model writes to its buffers {listed(traced.written)}, in eval mode too. While it is "
            "compressed every batch finds them as they are now, and they are stored as that.",
            CalibrationWarning,
            stacklevel=3,
        )
    steps = [step.nodes for part in parts for step in part.steps]
    called = [{node.target.name for node in nodes if isinstance(node.target, Leaf)} for nodes in steps]
    if cut := [name for name in traced.remembering if sum(name in each for each in called) > 1]:
        warnings.warn(
            f"{listed(cut, 3)} keeps something from one call to the next, and modules are solved between them: it "
            f"begins anew each time. schedule=basic runs all calls at once (now it is {schedule.value}).",
            CalibrationWarning,
            stacklevel=3,
        )
    groups = [group for part in parts for step in part.steps for group in step.solve]
    seen = {name: set(group.sources) for group in groups if group.sources for name in group.members}
    names = Names(seen)
    calls = (call for node in traced.graph.nodes for call in quantizable_calls(node, names))
    unseen = Counter(name for name, source in calls if source not in seen[name])
    unseen = Counter({name: n for name, n in unseen.items() if needed_statistics(resolved.assignments[name])})
    if unseen:
        name, number = unseen.most_common(1)[0]
        others = f", and so are {len(unseen) - 1} others" if len(unseen) > 1 else ""
        warnings.warn(
            f"{name} is called several times and quantized by the inputs of its first calls; {number} later ones are "
            f"not seen{others}. schedule=basic sees all (now it is {schedule.value}).",
            CalibrationWarning,
            stacklevel=3,
        )


def _by_boundary(names: Sequence[str], boundaries: Sequence[str]) -> list[tuple[str, list[str]]]:
    grouped: dict[str, list[str]] = {}
    for name in names:
        boundary = next((owner for owner in boundaries if is_in(name, (owner,))), name)
        grouped.setdefault(boundary, []).append(name)
    return list(grouped.items())
