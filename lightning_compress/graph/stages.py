"""Cut a traced graph into what is onloaded at a time and what is solved together.

Two words are kept apart. A *subgraph* is what sits on the device at once and what progress counts in: the nodes of one
sequential target (by default a decoder layer) with the glue that follows it. A *step* is a part of a subgraph that runs
over all batches before something is solved.

A *group* is a set of modules that read the same value with the same scheme: q/k/v, gate/up, whatever the architecture.
It falls out of the graph (same input node), so there are no per-architecture tables. One Gram matrix, one factorization
and one solve over the stacked rows serve all members.

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

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from math import prod

import torch
from torch import fx

from lightning_compress.graph.aliases import memory_of
from lightning_compress.graph.leaf import Grouped, Leaf, leaf_input, takes_a_value
from lightning_compress.graph.names import Names
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
class Rows:
    """Of a value the rows that are routed to one expert.

    Attributes:
        token: node of int64 [S], for each row, sorted by expert, the token that it is of.
        counts: node of int64 [E], how many rows each expert has.
        expert: which one.
        gathers: the value has a row per token, of which `token` picks; otherwise it has S rows.
        reads_hidden: its channels mean the same to all experts.
    """

    token: fx.Node
    counts: fx.Node
    expert: int
    gathers: bool
    reads_hidden: bool


@dataclass(frozen=True)
class Source:
    """Where a group's input is observed: a value of the graph, some rows of one, or the input of a module inside an
    opaque leaf.

    `writes` tells readers of one value apart that read it before and after it was changed in place.
    """

    node: fx.Node
    inner: str | None = None
    writes: int = 0
    rows: Rows | None = None

    @property
    def reads(self) -> frozenset[fx.Node]:
        """The values that it takes to observe it, beside running what is inside an opaque leaf."""
        if self.inner is not None:
            return frozenset()
        return frozenset({self.node} if self.rows is None else {self.node, self.rows.token, self.rows.counts})


@dataclass(frozen=True)
class Group:
    """Modules that are solved together, on the statistics of `sources`."""

    sources: tuple[Source, ...]
    members: tuple[str, ...]


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


GroupKey = Callable[[str], object]


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


Calls = tuple[tuple[str, Source], ...]
_WRITES = "writes"


def _count_writes(graph: fx.Graph) -> None:
    """Note at every leaf how often its input was changed in place before, directly or through a view of it."""
    memory = memory_of(graph)
    for node in graph.nodes:
        if isinstance(node.target, Leaf) and takes_a_value(node):
            writes = memory.writes.get(memory.owner[leaf_input(node)], ())
            node.meta[_WRITES] = sum(at < memory.position[node] for at in writes)


def quantizable_calls(node: fx.Node, quantizable: Names) -> Calls:
    """The quantizable modules that executing `node` calls, each with where its input can be seen."""
    if not isinstance(node.target, Leaf):
        return ()
    name = node.target.weights_of
    if node.target.grouped is not None:
        return tuple(_expert_calls(node, node.target.grouped, quantizable))
    if name in quantizable:
        x = leaf_input(node)
        if x.op == "get_attr" or node.target.hooked:  # no value of the run is what it multiplies: it is watched instead
            return ((name, Source(node, name)),)
        return ((name, Source(x, writes=node.meta.get(_WRITES, 0))),)
    inside = {name for owner in node.target.modules for name in quantizable.within(owner)}
    return tuple((name, Source(node, name)) for name in sorted(inside))


def _expert_calls(node: fx.Node, grouped: Grouped, quantizable: Names) -> Iterator[tuple[str, Source]]:
    x, token, counts = node.args
    assert isinstance(x, fx.Node)
    assert isinstance(token, fx.Node)
    assert isinstance(counts, fx.Node)
    for expert, members in enumerate(grouped.members, grouped.first):
        rows = Rows(token, counts, expert, grouped.gathers, grouped.reads_hidden)
        source = Source(x, writes=node.meta.get(_WRITES, 0), rows=rows)
        yield from ((name, source) for name in members if name in quantizable)


def _grouped(calls: Iterable[tuple[str, Source]], key: GroupKey) -> tuple[Group, ...]:
    """Modules with equal inputs (all their calls taken together) and equal key form one group."""
    sources: dict[str, dict[Source, None]] = {}
    for name, source in calls:
        sources.setdefault(name, {})[source] = None
    members: dict[tuple[tuple[Source, ...], object], list[str]] = {}
    for name, found in sources.items():
        members.setdefault((tuple(found), key(name)), []).append(name)
    return tuple(Group(found, tuple(names)) for (found, _), names in members.items())


def _sources(groups: Iterable[Group]) -> tuple[Source, ...]:
    return tuple(dict.fromkeys(source for group in groups for source in group.sources))


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
            groups = _grouped((call for call in behind if call[1] in read), key)
            before = tuple(nodes[start:position])
            keep = not (recompute and _is_wide(calls[0][1].node, before))
            steps.append(Step(before, _sources(groups), groups, keep))
            start = position if keep else start
        else:  # inside an opaque leaf nothing can be cut, so it runs twice
            groups = _grouped(calls, key)
            steps += [Step(tuple(nodes[start:position])), Step((node,), _sources(groups), groups, keep=False)]
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
    groups = _grouped((call for node in nodes for call in quantizable_calls(node, names)), key)
    unsolved.difference_update(name for group in groups for name in group.members)
    if not groups:
        return [Step(tuple(nodes))]
    return [Step(tuple(nodes), _sources(groups), groups, keep=False), Step(tuple(nodes))]


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
    _count_writes(traced.graph)
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
            read = _sources(step.solve)
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
