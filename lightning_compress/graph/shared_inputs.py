"""Which modules of a traced graph read the same value, and so are solved together.

A *group* is a set of modules that read the same value with the same scheme: q/k/v, gate/up, whatever the architecture.
It falls out of the graph (same input node), so there are no per-architecture tables. One Gram matrix, one factorization
and one solve over the stacked rows serve all members.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from lightning_compress.graph.aliases import memory_of
from lightning_compress.graph.leaf import Grouped, Leaf, leaf_input, takes_a_value
from lightning_compress.graph.names import Names

GroupKey = Callable[[str], object]


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


Calls = tuple[tuple[str, Source], ...]
_WRITES = "writes"


def count_writes(graph: fx.Graph) -> None:
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


def grouped(calls: Iterable[tuple[str, Source]], key: GroupKey) -> tuple[Group, ...]:
    """Modules with equal inputs (all their calls taken together) and equal key form one group."""
    sources: dict[str, dict[Source, None]] = {}
    for name, source in calls:
        sources.setdefault(name, {})[source] = None
    members: dict[tuple[tuple[Source, ...], object], list[str]] = {}
    for name, found in sources.items():
        members.setdefault((tuple(found), key(name)), []).append(name)
    return tuple(Group(found, tuple(names)) for (found, _), names in members.items())


def sources_of(groups: Iterable[Group]) -> tuple[Source, ...]:
    return tuple(dict.fromkeys(source for group in groups for source in group.sources))


def unlike(graph: fx.Graph, names: Collection[str], kind: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Modules of one parent that read the same value, and of which not all are of the same `kind`, if of any.

    Args:
        graph: a traced graph.
        names: of the modules that are looked at.
        kind: of some of them.
    """
    known = Names(names)
    calls = (call for node in graph.nodes for call in quantizable_calls(node, known))
    found = [group.members for group in grouped(calls, lambda name: name.rpartition(".")[0])]
    return [members for members in found if len({kind.get(name) for name in members}) > 1]
