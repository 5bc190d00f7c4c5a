"""A second run of the same graph beside the first: which values it has of its own, and how its nodes are run.

Method: two runs that differ in the weights of some modules differ in what depends on these modules' outputs. Such
values exist twice, the second time under a `Shadow` of their node; all others are shared. A value that is changed in
place belongs to one run alone, so it is computed twice whatever it depends on.

Alternative not taken: two runs apart. They would compute twice, and keep twice, masks, positions and everything before
the first quantized module.
"""

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import final

from torch import fx

from lightning_compress.graph.aliases import memory_of


@final
@dataclass(frozen=True)
class Shadow:
    """Stands for the value of a node in the second run."""

    node: fx.Node

    @property
    def name(self) -> str:
        """Of the node, marked."""
        return f"{self.node.name}@original"


Key = fx.Node | Shadow


def node_of(key: Key) -> fx.Node:
    """The node that computes a value."""
    return key.node if isinstance(key, Shadow) else key


def with_shadows(nodes: Iterable[fx.Node], diverging: frozenset[fx.Node]) -> set[Key]:
    """The values of nodes in both runs."""
    return {key for node in nodes for key in ((node, Shadow(node)) if node in diverging else (node,))}


def diverging_nodes(graph: fx.Graph, differs: Callable[[fx.Node], bool]) -> frozenset[fx.Node]:
    """The values that exist twice.

    Args:
        graph: recorded.
        differs: whether a node itself does something else in the second run.
    """
    memory = memory_of(graph)
    found: set[fx.Node] = set()
    before = -1
    while before != len(found):
        before = len(found)
        for node in graph.nodes:
            is_written = bool(found) and memory.owner[node] in memory.writes
            if is_written or differs(node) or any(arg in found for arg in node.all_input_nodes):
                found.add(node)
    return frozenset(node for node in found if node.op in ("call_function", "placeholder"))


@final
class SecondRun(MutableMapping[fx.Node, object]):
    """The values of a batch as the second run sees them: its own, and where it has none, the first one's.

    Args:
        values: of both, by key.
    """

    def __init__(self, values: MutableMapping[Key, object]) -> None:
        self._values = values

    def __getitem__(self, node: fx.Node) -> object:
        key = Shadow(node)
        return self._values[key] if key in self._values else self._values[node]

    def __setitem__(self, node: fx.Node, value: object) -> None:
        self._values[Shadow(node)] = value

    def __delitem__(self, node: fx.Node) -> None:
        del self._values[Shadow(node)]

    def __iter__(self) -> Iterator[fx.Node]:
        return iter(dict.fromkeys(map(node_of, self._values)))

    def __len__(self) -> int:
        return len(set(map(node_of, self._values)))
