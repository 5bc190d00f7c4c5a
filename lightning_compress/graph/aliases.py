"""Which values of a traced graph share memory, and who writes to it."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import fx

from lightning_compress.graph.trees import storages, tensors_in, versions
from lightning_compress.graph.values import SIZE_READERS

_OPERATOR = type(torch.ops.aten.add.Tensor)
_VIEWED = "viewed"
Viewed = frozenset[tuple[int, bool]]
"""Of the tensors that a call is given, by number, those that have memory in common with what it returns, or that it
writes to; and whether it does."""


def viewed(given: object, output: object, before: tuple[int, ...]) -> Viewed:
    """What a call is `Viewed` of; `before` are the `versions` of what it was given."""
    memory = storages(output)
    calls = zip(tensors_in(given), versions(given), before, strict=True)
    found = [(now != then, not memory.isdisjoint(storages(tensor))) for tensor, now, then in calls]
    return frozenset((number, is_write) for number, (is_write, is_view) in enumerate(found) if is_write or is_view)


def note_viewed(node: fx.Node, values: Sequence[tuple[fx.Node, bool]]) -> None:
    """Note that what a call of a module returns has the memory of some of the values that it is given, or that it
    writes to them: each with whether it does."""
    node.meta[_VIEWED] = tuple(values)


def aliased(node: fx.Node) -> list[tuple[fx.Node, bool]]:
    """Values whose memory an operation's result may share, each with whether the operation writes to it."""
    if not isinstance(node.target, _OPERATOR):
        return list(node.meta.get(_VIEWED, ()))
    found = []
    for number, declared in enumerate(node.target._schema.arguments):
        value = node.args[number] if number < len(node.args) else node.kwargs.get(declared.name)
        if declared.alias_info is not None and isinstance(value, fx.Node):
            found.append((value, declared.alias_info.is_write))
    return found


@final
@dataclass(frozen=True)
class Memory:
    """Who shares memory with whom, and when it is written to. Modules that write to their inputs are single calls only
    where nothing else serves (see `note_viewed`).

    Attributes:
        position: of each node in execution order.
        owner: the value whose memory a value shares, itself if it has its own.
        sharing: all values with this owner.
        writes: positions of the operations that write to this owner's memory.
    """

    position: Mapping[fx.Node, int]
    owner: Mapping[fx.Node, fx.Node]
    sharing: Mapping[fx.Node, list[fx.Node]]
    writes: Mapping[fx.Node, list[int]]

    def is_unchanged(self, value: fx.Node, reader: fx.Node) -> bool:
        """Whether nothing is written to `value` from where it is computed to where it is read."""
        first, last = self.position[value], self.position[reader]
        return not any(first < at < last for at in self.writes.get(self.owner[value], ()))

    def rewritten(self) -> frozenset[fx.Node]:
        """The values that are written to, by whatever name, after they are computed."""
        last = {owner: max(writes) for owner, writes in self.writes.items()}
        return frozenset(name for owner, at in last.items() for name in self.sharing[owner] if self.position[name] < at)

    def readers(self, value: fx.Node) -> set[fx.Node]:
        """Who reads or changes `value`, also by an older name of the same memory. To ask for a size is not to read."""
        now = self.position[value]
        names = [name for name in self.sharing[self.owner[value]] if self.position[name] <= now]
        users = {user for name in names for user in name.users if self.position[user] > now}
        return {user for user in users if user.target not in SIZE_READERS}


def memory_of(graph: fx.Graph) -> Memory:
    """Follow views and in-place operations through a graph."""
    position = {node: at for at, node in enumerate(graph.nodes)}
    owner: dict[fx.Node, fx.Node] = {}
    sharing: dict[fx.Node, list[fx.Node]] = {}
    writes: dict[fx.Node, list[int]] = {}
    for node, at in position.items():
        owner[node] = node
        shared = aliased(node)
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            shared = [(node.args[0], False)]  # a part of a list of views
        for value, is_write in shared:
            owner[node] = owner[value]
            if is_write:
                writes.setdefault(owner[value], []).append(at)
        sharing.setdefault(owner[node], []).append(node)
    return Memory(position, owner, sharing, writes)
