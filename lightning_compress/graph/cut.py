"""Which modules of a model are recorded how: as single calls, or by what they are made of."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from torch import nn
from torchmetrics import Metric

from lightning_compress.graph.methods import Method
from lightning_compress.recipe.forms import reader


class Body(IntEnum):
    """How a leaf's output shape is found."""

    SYMBOLIC = 0
    STATIC = 1
    OBSERVED = 2


@dataclass(frozen=True)
class Cut:
    """Which modules are recorded how; all names are qualified names in the root.

    Attributes:
        leaves: single calls.
        containers: are looked into.
        boundaries: their calls are marked as spans.
        bodies: how the output shape of a leaf is found.
        observed: what real runs of two batches, and of true ones beside, told of leaves and methods, call by call.
        methods: of containers, single calls too, with bodies that are observed.
        given_up: methods that cannot be.
        decides: branches that values decide are taken as all batches take them.
        multiplied: leaves that count as called where code multiplies with their weights.
        counted: leaves behind whose last call the recording ends, and how many there are; none: it goes on to the end.
    """

    leaves: Mapping[str, nn.Module]
    containers: Mapping[str, nn.Module]
    boundaries: frozenset[str]
    bodies: Mapping[str, Body]
    observed: Mapping[str, Sequence[Sequence[Any]]]
    methods: Mapping[str, Method] = field(default_factory=dict)
    given_up: frozenset[str] = frozenset()
    decides: bool = False
    multiplied: frozenset[str] = frozenset()
    counted: tuple[frozenset[str], int] = (frozenset(), 0)


def first_cut(root: nn.Module, leaf_names: Collection[str], boundary_names: Collection[str]) -> Cut:
    """Leaves: targets, and modules with neither targets nor boundaries inside. Containers: what holds those. Neither
    are modules that have no `forward` (lists of modules), but those in them may be; and metrics, which a step has count
    nothing while it is recorded."""
    chosen = {id(root.get_submodule(name)): name for name in boundary_names}
    targets: set[int] = set()
    for name in leaf_names:
        module = root.get_submodule(name)
        targets.add(id(reader(module)))
        chosen[id(reader(module))] = name if reader(module) is module else f"{name}.rows"
    leaves: dict[str, nn.Module] = {}
    containers: dict[str, nn.Module] = {}
    holds = _holders(root, set(chosen))
    seen: set[int] = set()

    def visit(name: str, module: nn.Module) -> None:
        if id(module) in seen or isinstance(module, Metric):
            return
        seen.add(id(module))
        name = chosen.get(id(module), name)
        is_called = not name or _has_forward(module)
        if id(module) in targets or (is_called and id(module) not in holds):
            leaves[name] = module
            return
        if is_called:
            containers[name] = module
        for key, child in module.named_children():
            visit(f"{name}.{key}" if name else key, child)

    visit("", root)
    return Cut(leaves, containers, frozenset(boundary_names), {}, {})


def _has_forward(module: nn.Module) -> bool:
    # classes are not asked for it: those of scripted modules cannot tell
    kinds = (vars(kind) for kind in type(module).__mro__ if kind is not nn.Module)
    return any("forward" in names for names in (vars(module), *kinds))


def _holders(root: nn.Module, chosen: set[int]) -> set[int]:
    """Ids of the modules that are chosen or have a chosen module inside; the root always."""
    holds = {id(root)}

    def visit(module: nn.Module) -> bool:
        inside = [visit(child) for child in module.children()]
        if any(inside) or id(module) in chosen:
            holds.add(id(module))
        return id(module) in holds

    visit(root)
    return holds
