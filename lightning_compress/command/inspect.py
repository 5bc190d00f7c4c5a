"""`lightning-compress inspect`: a model's graph with its cuts, without running a calibration."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from sympy import Symbol
from torch import Tensor, fx, nn

from lightning_compress.calibration.batches import CalibrationSet, collect
from lightning_compress.calibration.prepare import calibrating, check_layout
from lightning_compress.calibration.recording import trace_on
from lightning_compress.calibration.solve import group_key
from lightning_compress.calibration.target import Target, find_target
from lightning_compress.command.models import find_processor, load_config_only, load_model
from lightning_compress.data.batches import calibration_batches
from lightning_compress.data.config import load_data_config
from lightning_compress.data.multimodal import blank_images, takes_images
from lightning_compress.errors import CompressionError, UntraceableModelError
from lightning_compress.foresight.inputs import inputs_of
from lightning_compress.graph.leaf import Leaf
from lightning_compress.graph.shared_inputs import Group
from lightning_compress.graph.sizes import binding, traced_bytes
from lightning_compress.graph.stages import Schedule, Subgraph, subgraphs
from lightning_compress.graph.synthesize import flatten_batch
from lightning_compress.graph.targets import as_patterns
from lightning_compress.graph.trace import Traced
from lightning_compress.graph.unfold import unfolded
from lightning_compress.recipe.load import load_recipe
from lightning_compress.recipe.resolve import named_by, resolve
from lightning_compress.report.graph import GraphView, GroupView, SubgraphView

_NUM_BATCHES = 2
Sizes = Mapping[Symbol, int | float]


def run_inspect(config: DictConfig) -> GraphView:
    """Trace the model that `config` names and cut it.

    Without `data` its configuration is enough, and it is traced on what the processor beside it makes of an image and a
    word, if there is one; else on tokens, or on what it takes in their place. With `data` it is loaded, and traced on
    that.

    Raises:
        CompressionError: a model that cannot be built or traced, or a recipe that does not fit it.
    """
    if config.schedule not in tuple(Schedule) or not all(
        isinstance(n, int) and n > 0 for n in (config.rows, config.length, config.expert_parts)
    ):
        raise CompressionError(
            f"schedule={config.schedule} rows={config.rows} length={config.length} expert_parts={config.expert_parts}: "
            f"schedules are {', '.join(Schedule)}; the others are positive numbers."
        )
    schedule = Schedule(config.schedule)
    if schedule is Schedule.DATAFREE:
        raise CompressionError("With schedule=datafree nothing runs, so there is no graph that is cut.")
    model, inputs = _given(config)
    recipe = load_recipe(cast(Mapping[str, Any], OmegaConf.to_container(config.recipe, resolve=True)))
    target = find_target(model)
    with calibrating(model), unfolded(model, named_by(recipe), config.expert_parts):
        resolved = resolve(recipe, model)
        names = tuple(resolved.assignments)
        patterns = as_patterns(config.sequential_targets)
        boundaries = check_layout(target, resolved, schedule, patterns)
        traced, batch, failed = _recorded(target, names, boundaries, inputs)
        tensors, structure = flatten_batch(batch)
        sizes = binding(traced)(tensors)
        names = tuple(name for name in names if name not in traced.only_read)
        parts = subgraphs(
            traced,
            frozenset(names),
            lambda name: group_key(resolved.assignments[name], model.get_submodule(name)),
            schedule,
        )
        views = tuple(_view(part, later, traced, model, sizes) for part, later in _with_later(parts))
    of_batch = ", ".join(f"{path} {[*each.shape]}" for path, each in zip(structure.paths, tensors, strict=True))
    solved = {name for part in parts for name in part.solved}
    uncalled = tuple(name for name in names if name not in solved)
    return GraphView(type(model).__name__, schedule.value, of_batch, views, uncalled, failed)


_Inputs = Mapping[str, Callable[[], CalibrationSet]]


def _given(config: DictConfig) -> tuple[nn.Module, _Inputs]:
    """The model, and what to trace it on, of which the first that serves is taken."""
    if config.get("data") is not None:
        loaded, processor = load_model(config.model, from_disk=False)
        data = load_data_config(config.data)
        return loaded, {"the data": lambda: collect(calibration_batches(data, processor, loaded), _NUM_BATCHES)}
    model, processor = load_config_only(config.model), find_processor(config.model)
    inputs = {"tokens": lambda: CalibrationSet((inputs_of(model, config.rows, config.length),), has_padding=False)}
    if not takes_images(processor):
        return model, inputs
    return model, {"an image and a word": lambda: collect([blank_images(processor, config.rows)]), **inputs}


def _recorded(
    target: Target, names: Sequence[str], boundaries: Sequence[str], inputs: _Inputs
) -> tuple[Traced, Any, tuple[str, ...]]:
    """The graph, a batch that it is of, and why it could not be recorded on what is better than that.

    Where weights are not here, not all can be recorded of models that read images.
    """
    *better, (_, tokens_or_data) = inputs.items()
    failed: list[str] = []
    for kind, make in better:
        try:
            data = make()
            return trace_on(target, names, boundaries, data), data.batches[0], tuple(failed)
        except CompressionError as error:
            failed.append(f"It could not be recorded on {kind}: {error}")
    try:
        data = tokens_or_data()
        return trace_on(target, names, boundaries, data), data.batches[0], tuple(failed)
    except CompressionError as error:
        raise UntraceableModelError("\n".join([str(error), *failed])) from error


def _with_later(parts: Sequence[Subgraph]) -> list[tuple[Subgraph, set[fx.Node]]]:
    """Each subgraph with the values that wait behind it for later ones."""
    computed: set[fx.Node] = set()
    found = []
    for number, part in enumerate(parts):
        computed.update(node for step in part.steps for node in step.nodes)
        later = [step for other in parts[number + 1 :] for step in other.steps]
        read = {value for step in later for node in step.nodes for value in node.all_input_nodes}
        read |= {value for step in later for source in step.observe for value in source.reads}
        found.append((part, read & computed))
    return found


def _view(part: Subgraph, waiting: set[fx.Node], traced: Traced, root: nn.Module, sizes: Sizes) -> SubgraphView:
    modules = dict(root.named_modules(remove_duplicate=False))
    tensors: dict[int, Tensor] = {}
    for name in part.modules:
        tensors.update({id(parameter): parameter for parameter in modules[name].parameters()})
    tensors.update({id(each): each for each in map(root.get_parameter, _parameters(part, root))})
    calls = {node.target.name for step in part.steps for node in step.nodes if isinstance(node.target, Leaf)}
    solving = [step for step in part.steps if step.solve]
    return SubgraphView(
        name=part.name,
        class_name=type(modules[part.name]).__name__ if part.name in modules else "",
        nbytes=sum(tensor.nbytes for tensor in tensors.values()),
        steps=tuple(tuple(_group(each, part.name, modules) for each in step.solve) for step in solving),
        single_calls=tuple(sorted({fallback.module for fallback in traced.fallbacks} & calls)),
        num_crossing=len(waiting),
        crossing_bytes=sum(traced_bytes(node, sizes) for node in waiting),
    )


def _parameters(part: Subgraph, root: nn.Module) -> list[str]:
    named = dict(root.named_parameters(remove_duplicate=False))
    return [name for name in part.tensors if name in named]


def _group(group: Group, within: str, modules: Mapping[str, nn.Module]) -> GroupView:
    weights = [modules[name].get_parameter("weight") for name in group.members]
    members = tuple(name.removeprefix(f"{within}.") for name in group.members)
    return GroupView(members, sum(len(weight) for weight in weights), weights[0].shape[1])
