"""Cut a traced graph into what is onloaded at a time and what is solved together.

Two words are kept apart. A *subgraph* is what sits on the device at once and what progress counts in: the nodes of one
sequential target (by default a decoder layer) with the glue that follows it. A *step* is a part of a subgraph that runs
over all batches before something is solved.

What is solved together are the groups of `graph.shared_inputs`.

The schedules differ in where they cut and in nothing else:

- `staged` (default): cut right before each group. Every node runs once, and a group sees the quantization error of all
  groups before it, also within its layer.
- `recompute`: as `staged`, but an input that is wider than what it is computed from (a down projection's) is computed
  twice, to observe it and to go on from it, instead of waiting for the solve in memory.
- `block`: one cut per subgraph, which runs twice: once to observe, once through the quantized weights. Fewer values
  cross a cut; the computation doubles. This is the usual scheme of other tools.
- `basic`: the whole graph is one subgraph and runs once; nothing sees anyone's error.
- `datafree`: nothing runs; for algorithms that need no statistics.

A module that is called several times is solved once, on the inputs of all its calls up to the first cut behind one of
them; later calls run with the result.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from math import prod

import torch
from torch import fx

from lightning_compress.graph.leaf import Leaf
from lightning_compress.graph.names import Names
from lightning_compress.graph.shared_inputs import (
    Group,
    GroupKey,
    Source,
    count_writes,
    grouped,
    quantizable_calls,
    sources_of,
)
from lightning_compress.graph.trace import Traced
from lightning_compress.graph.values import concrete, depends_on_values, is_symbolic


class Schedule(StrEnum):
    """Where the graph is cut; see the module's docstring."""

    STAGED = "staged"
    RECOMPUTE = "recompute"
    BLOCK = "block"
    BASIC = "basic"
    DATAFREE = "datafree"


@dataclass(frozen=True)
class Step:
    """Nodes run over all batches, sources observed meanwhile, groups solved afterwards.

    `keep` tells whether the values outlive the step: not in the first of two passes. `forget` names the sources whose
    statistics nobody needs after this step.
    """

    nodes: tuple[fx.Node, ...]
    observe: tuple[Source, ...] = ()
    solve: tuple[Group, ...] = ()
    keep: bool = True
    forget: tuple[Source, ...] = ()


@dataclass(frozen=True)
class Subgraph:
    """What is on the device at a time.

    Attributes:
        name: the sequential target's name, or what its position says (`model.embed_tokens`, ...).
        steps: run in order.
        modules: names of the leaf modules whose weights the steps need.
        tensors: qualified names of parameters and buffers that glue nodes read directly.
    """

    name: str
    steps: tuple[Step, ...]
    modules: tuple[str, ...]
    tensors: tuple[str, ...] = ()

    @property
    def solved(self) -> tuple[str, ...]:
        """Names of the modules this subgraph quantizes."""
        return tuple(name for step in self.steps for group in step.solve for name in group.members)


@dataclass(frozen=True)
class Segment:
    """A run of consecutive nodes with the name of the sequential target that they hold."""

    name: str
    nodes: tuple[fx.Node, ...]


def computed_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that are executed, in order: inputs come with the batch, `get_attr` is resolved where it is used."""
    return [node for node in graph.nodes if node.op == "call_function"]


def segments(traced: Traced) -> tuple[Segment, ...]:
    """Cut at the calls of the sequential targets, and of parts of experts; what lies between two of them and owns no
    weights joins the first."""
    all_nodes = list(traced.graph.nodes)
    spans: dict[fx.Node, str] = {}
    for span in traced.spans:
        spans.update(dict.fromkeys(all_nodes[span.first : span.last + 1], f"{span.name}@{span.first}"))
    cut: list[tuple[str, list[fx.Node]]] = []
    before = None
    for node in computed_nodes(traced.graph):
        call, begins = spans.get(node, ""), _begins(node)
        if begins or call != before:
            cut.append((begins or call.partition("@")[0], []))
        cut[-1][1].append(node)
        before = call
    joined: list[tuple[str, list[fx.Node]]] = []
    for name, nodes in cut:
        if joined and not name and not _reads_weights(nodes):
            joined[-1][1].extend(nodes)
        else:
            joined.append((name, list(nodes)))
    return tuple(Segment(name or _first_leaf(nodes), tuple(nodes)) for name, nodes in joined)


def _begins(node: fx.Node) -> str | None:
    """The name of the part of experts that a node begins to run, if any."""
    return node.target.grouped.begins if isinstance(node.target, Leaf) and node.target.grouped is not None else None


def _reads_weights(nodes: Iterable[fx.Node]) -> bool:
    return any(
        isinstance(node.target, Leaf) or any(arg.op == "get_attr" for arg in node.all_input_nodes) for node in nodes
    )


def _first_leaf(nodes: Sequence[fx.Node]) -> str:
    return next((node.target.weights_of for node in nodes if isinstance(node.target, Leaf)), "inputs")


def _staged(nodes: Sequence[fx.Node], unsolved: set[str], key: GroupKey, recompute: bool = False) -> list[Step]:
    steps: list[Step] = []
    start = 0
    names = Names(unsolved)
    all_calls = [quantizable_calls(node, names) for node in nodes]
    for position, node in enumerate(nodes):
        calls = [call for call in all_calls[position] if call[0] in unsolved]
        if not calls:
            continue
        read = {source for _, source in calls}
        if calls[0][1].inner is None:
            behind = (call for later in all_calls[position:] for call in later if call[0] in unsolved)
            groups = grouped((call for call in behind if call[1] in read), key)
            before = tuple(nodes[start:position])
            keep = not (recompute and _is_wide(calls[0][1].node, before))
            steps.append(Step(before, sources_of(groups), groups, keep))
            start = position if keep else start
        else:  # inside an opaque leaf nothing can be cut, so it runs twice
            groups = grouped(calls, key)
            steps += [Step(tuple(nodes[start:position])), Step((node,), sources_of(groups), groups, keep=False)]
            start = position
        unsolved.difference_update(name for group in groups for name in group.members)
    return [*steps, Step(tuple(nodes[start:]))]


def _is_wide(value: fx.Node, nodes: Sequence[fx.Node]) -> bool:
    """Whether `value` takes more bytes than everything that `nodes`, which compute it, read."""
    computed = set(nodes)
    read = {arg for node in nodes for arg in node.all_input_nodes if arg.op != "get_attr"} - computed
    return value in computed and _nbytes(value) > sum(map(_nbytes, read))


def _nbytes(node: fx.Node) -> int:
    """Bytes of a value for the traced batch; 0 for what is no tensor, or of a size that depends on values."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or any(map(_depends, value.shape)):
        return 0
    return prod(int(concrete(size)) for size in value.shape) * value.element_size()


def _depends(size: int | torch.SymInt) -> bool:
    return is_symbolic(size) and depends_on_values(size)


def _block(nodes: Sequence[fx.Node], unsolved: set[str], key: GroupKey) -> list[Step]:
    names = Names(unsolved)
    groups = grouped((call for node in nodes for call in quantizable_calls(node, names)), key)
    unsolved.difference_update(name for group in groups for name in group.members)
    if not groups:
        return [Step(tuple(nodes))]
    return [Step(tuple(nodes), sources_of(groups), groups, keep=False), Step(tuple(nodes))]


def subgraphs(traced: Traced, quantizable: frozenset[str], key: GroupKey, schedule: Schedule) -> tuple[Subgraph, ...]:
    """Lay a traced graph out for a schedule; what comes after the last group is left out, for nothing needs it.

    Args:
        traced: the graph.
        quantizable: names of the modules to quantize.
        key: what members of one group must have in common beside their input (scheme, algorithm, dtype).
        schedule: `staged`, `recompute`, `block` or `basic`; `datafree` needs no graph, see `datafree_subgraphs`.
    """
    unsolved = set(quantizable)
    cut: Callable[[Sequence[fx.Node], set[str], GroupKey], list[Step]]
    count_writes(traced.graph)
    if schedule is Schedule.BASIC:
        parts: tuple[Segment, ...] = (Segment("model", tuple(computed_nodes(traced.graph))),)
    else:
        parts = segments(traced)
    cut = _block
    if schedule in (Schedule.STAGED, Schedule.RECOMPUTE):
        cut = partial(_staged, recompute=schedule is Schedule.RECOMPUTE)
    laid_out = [(part.name, cut(part.nodes, unsolved, key)) for part in parts]
    steps = [[step for step in part if step.nodes or step.solve] for _, part in laid_out]
    return _placed([name for name, _ in laid_out], _with_reuse(_trimmed(steps)), traced.constants)


def forward_subgraphs(traced: Traced) -> tuple[Subgraph, ...]:
    """The whole graph, a segment per subgraph, of one step each; nothing is solved, and the last step's values, which
    are the model's outputs, are not kept."""
    parts = segments(traced)
    steps = [[Step(part.nodes, keep=number < len(parts))] for number, part in enumerate(parts, 1)]
    return _placed([part.name for part in parts], steps, traced.constants)


def datafree_subgraphs(names: Sequence[tuple[str, Sequence[str]]]) -> tuple[Subgraph, ...]:
    """Subgraphs (name, modules to quantize) that are solved without running anything."""
    return tuple(
        Subgraph(name, (Step((), (), tuple(Group((), (module,)) for module in modules)),), tuple(modules))
        for name, modules in names
    )


def _trimmed(steps: list[list[Step]]) -> list[list[Step]]:
    """Drop every step behind the last one that solves something."""
    flat = [(part, position) for part, found in enumerate(steps) for position, step in enumerate(found) if step.solve]
    if not flat:
        return []
    last_part, last_position = flat[-1]
    return [*steps[:last_part], steps[last_part][: last_position + 1]]


def _with_reuse(steps: list[list[Step]]) -> list[list[Step]]:
    """Observe a source once while its value cannot change, forget it after its last group before it is observed anew.

    A value can change until the subgraph that computes it has ended, and what a step saw of it that does not keep its
    values may be older: it was computed with weights that were solved afterwards.
    """
    observed: set[Source] = set()
    observing: list[list[Step]] = []
    for found in steps:
        own = {node for step in found for node in step.nodes}
        observing.append([])
        for step in found:
            fresh = tuple(source for source in step.observe if source.node in own or source not in observed)
            observed.update(source for source in fresh if step.keep or source.node not in own)
            observing[-1].append(replace(step, observe=fresh))
    needed: set[Source] = set()
    result: list[list[Step]] = []
    for found in reversed(observing):
        result.append([])
        for step in reversed(found):
            read = sources_of(step.solve)
            result[-1].append(replace(step, forget=tuple(source for source in read if source not in needed)))
            needed = (needed | set(read)) - set(step.observe)
    return [found[::-1] for found in reversed(result)]


def _placed(names: Sequence[str], steps: list[list[Step]], constants: Collection[str]) -> tuple[Subgraph, ...]:
    """Add to each subgraph the weights it needs on the device; constants of the trace belong to no module."""
    result = []
    for name, found in zip(names, steps, strict=False):
        nodes = [node for step in found for node in step.nodes]
        calls = [node.target for node in nodes if isinstance(node.target, Leaf)]
        leaves = [module for call in calls for module in call.modules]
        solved = [member for step in found for group in step.solve for member in group.members]
        attributes = [str(arg.target) for node in nodes for arg in node.all_input_nodes if arg.op == "get_attr"]
        within = [tensor for call in calls if call.within is not None for tensor in call.within.tensors]
        tensors = [name for name in [*attributes, *within] if name not in constants]
        result.append(
            Subgraph(name, tuple(found), tuple(dict.fromkeys(leaves + solved)), tuple(dict.fromkeys(tensors)))
        )
    return tuple(result)


def last_steps(parts: Sequence[Subgraph]) -> Mapping[fx.Node, int]:
    """For each value the number (counted over all subgraphs) of the last step that reads it."""
    last: dict[fx.Node, int] = {}
    for number, step in enumerate(step for part in parts for step in part.steps):
        for node in step.nodes:
            last.update(dict.fromkeys(node.all_input_nodes, number))
        last.update({node: number for source in step.observe for node in source.reads})
    return last
