"""Layers and experts that are alike: what was found out about one holds for the next, node by node.

Alike are two runs of subgraphs, one behind the other (layers of one subgraph each, or of several, where experts are run
in parts), whose nodes do the same with values of the same sizes, read what corresponds, are observed and solved alike,
and are followed by readers at the same distance.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from typing import Any, final

import torch
from torch import Tensor, fx, nn

from lightning_compress.calibration.flow import Values
from lightning_compress.calibration.loop import Calibration
from lightning_compress.graph.compat import pytree
from lightning_compress.graph.experts import sizes_of
from lightning_compress.graph.leaf import Leaf
from lightning_compress.graph.names import module_named
from lightning_compress.graph.shadow import Key, Shadow
from lightning_compress.graph.shared_inputs import Group, Rows, Source
from lightning_compress.graph.stages import Step, Subgraph
from lightning_compress.graph.values import expression
from lightning_compress.memory.needs import Needs

_NUMBER = re.compile(r"\.\d+")
NUMBERS = ("layer_idx", "layer_id")
"""Attributes of modules that say no more than which layer they are."""


def widths(parts: Sequence[Subgraph], index: int) -> list[int]:
    """How many subgraphs a layer may have of which subgraph `index` is the first: one, or as many as there are since
    the last one that has its name but for the number of the layer.

    >>> layer = ["layers.{}", "layers.{}.experts[0:2]", "layers.{}.experts[2:4]"]
    >>> parts = [Subgraph(name.format(number), (), ()) for number in range(2) for name in layer]
    >>> widths(parts, 3), widths(parts, 2)
    ([1, 3], [1])
    """

    def masked(at: int) -> str:
        return _NUMBER.sub(".#", parts[at].name)

    name = masked(index)
    last = next((at for at in range(index - 1, -1, -1) if masked(at) == name), index - 1)
    return list(dict.fromkeys((1, index - last)))


Structure = list[tuple[object, ...]]
"""What decides how a module runs, but for the values of its tensors."""


def repeated(
    run: Calibration, index: int, width: int, cached: set[Key], structure: Callable[[str], Structure]
) -> dict[Key, Key] | None:
    """The nodes of as many subgraphs as `width` from `index` on by those of as many before them, and what both read
    from outside; None where the two are not alike.

    Args:
        run: prepared.
        index: of a subgraph.
        width: how many are compared.
        cached: the values that wait when the earlier ones begin.
        structure: see `structures`.
    """
    parts = run.flow.subgraphs
    earlier, later = parts[max(index - width, 0) : index], parts[index : index + width]
    if [len(part.steps) for part in earlier] != [len(part.steps) for part in later]:
        return None
    match = _Match(run, structure)
    steps = ([step for part in found for step in part.steps] for found in (earlier, later))
    pairs = list(zip(*steps, strict=True))
    if not all(match.steps(one, other) for one, other in pairs):
        return None
    first = sum(len(part.steps) for part in parts[: index - width])
    second, end = first + len(pairs), first + 2 * len(pairs)
    last = run.flow.last
    diverging = run.flow.reference.diverging
    if any((one in diverging) != (other in diverging) for one, other in match.nodes.items()):
        return None
    keys: dict[Key, Key] = dict(match.nodes.items())
    keys.update({Shadow(one): Shadow(other) for one, other in match.nodes.items() if one in diverging})
    for one, other in {**keys, **{key: keys.get(key, key) for key in cached}}.items():
        if one is other:
            if one in cached and last.get(one, end) < end:
                return None
        elif (one in last) != (other in last) or (one in last and last[one] - first != last[other] - second):
            return None
    return keys


@final
class _Match:
    """Nodes of one subgraph and of the next that correspond; grows from step to step."""

    def __init__(self, run: Calibration, structure: Callable[[str], Structure]) -> None:
        self.nodes: dict[fx.Node, fx.Node] = {}
        self._run = run
        self._structure = structure

    def steps(self, one: Step, other: Step) -> bool:
        if len(one.nodes) != len(other.nodes) or one.keep != other.keep or len(one.solve) != len(other.solve):
            return False
        return (
            all(self._computed(*pair) for pair in zip(one.nodes, other.nodes, strict=True))
            and self._sources(one.observe, other.observe)
            and self._sources(one.forget, other.forget)
            and all(self._groups(*pair) for pair in zip(one.solve, other.solve, strict=True))
        )

    def _computed(self, one: fx.Node, other: fx.Node) -> bool:
        if not self._targets(one.target, other.target) or _signature(one) != _signature(other):
            return False
        ours, spec = pytree.tree_flatten((one.args, one.kwargs))
        theirs, other_spec = pytree.tree_flatten((other.args, other.kwargs))
        if spec != other_spec or not all(self._arguments(*pair) for pair in zip(ours, theirs, strict=True)):
            return False
        self.nodes[one] = other
        return True

    def _arguments(self, one: object, other: object) -> bool:
        if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
            return type(one) is type(other) and one == other
        if one not in self.nodes and _signature(one) == _signature(other) and one.op == other.op:
            self.nodes[one] = other
        return self.nodes.get(one) is other

    def _targets(self, one: object, other: object) -> bool:
        if isinstance(one, Leaf) and isinstance(other, Leaf) and one.within is None and other.within is None:
            return self._structure(one.weights_of) == self._structure(other.weights_of)
        return one == other

    def _sources(self, ours: tuple[Source, ...], theirs: tuple[Source, ...]) -> bool:
        run = self._run
        return len(ours) == len(theirs) and all(
            self._arguments(one.node, other.node)
            and self._rows(one.rows, other.rows)
            and (one.inner is None) == (other.inner is None)
            and one.writes == other.writes
            and run.needs.get(one) == run.needs.get(other)
            and run.sizes.get(one) == run.sizes.get(other)
            for one, other in zip(ours, theirs, strict=True)
        )

    def _rows(self, one: Rows | None, other: Rows | None) -> bool:
        if one is None or other is None:
            return one is other
        same_values = self._arguments(one.token, other.token) and self._arguments(one.counts, other.counts)
        return same_values and replace(one, token=other.token, counts=other.counts) == other

    def _groups(self, one: Group, other: Group) -> bool:
        assignments = self._run.resolved.assignments
        return (
            self._sources(one.sources, other.sources)
            and len(one.members) == len(other.members)
            and all(
                assignments[mine].algorithm == assignments[yours].algorithm
                and assignments[mine].scheme == assignments[yours].scheme
                and self._structure(mine) == self._structure(yours)
                for mine, yours in zip(one.members, other.members, strict=True)
            )
        )


def structures(root: nn.Module) -> Callable[[str], Structure]:
    """That of each module, by its name; asked of it once."""
    return cache(partial(_structure, root))


def _structure(root: nn.Module, name: str) -> Structure:
    found: Structure = []
    for path, module in module_named(root, name).named_modules():
        tensors = {**module._parameters, **module._buffers}
        sizes = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items() if tensor is not None}
        found.append((path, type(module), sizes, _scalars(vars(module))))
    return found


def _scalars(attributes: Mapping[str, Any]) -> dict[str, object]:
    kinds = (bool, int, float, str, torch.dtype, type(None))
    return {key: value for key, value in attributes.items() if isinstance(value, kinds) and key not in NUMBERS}


def _signature(node: fx.Node) -> list[object]:
    """What a value is, without its contents."""
    return [
        (leaf.dtype, tuple(map(expression, leaf.shape)), tuple(map(expression, leaf.stride())))
        if isinstance(leaf, Tensor)
        else str(leaf)
        for leaf in pytree.tree_leaves(node.meta.get("val"))
    ]


def one_of_each(sources: Sequence[Source], values: Values) -> list[tuple[Source, int]]:
    """Of the sources that are rows of a value, one of every number of rows, with how many have it."""
    found: dict[tuple[object, ...], list[Source]] = {}
    for source in (each for each in sources if each.rows is not None):
        assert source.rows is not None
        token, counts = values[source.rows.token], values[source.rows.counts]
        assert isinstance(token, Tensor)
        assert isinstance(counts, Tensor)
        size = sizes_of(counts, len(token))[source.rows.expert]
        found.setdefault((source.node, source.rows.counts, size), []).append(source)
    return [(alike[0], len(alike)) for alike in found.values()]


def of_another(row: Needs, subgraph: Subgraph, brought: int) -> Needs:
    """The row of a subgraph that is like the one whose row is given."""
    members = iter([name for step in subgraph.steps for group in step.solve for name in group.members])
    moments = (
        replace(each, of=", ".join(islice(members, each.of.count(", ") + 1))) if each.what == "solve" else each
        for each in row.moments
    )
    return Needs(subgraph.name, brought, tuple(moments), row.requests)
