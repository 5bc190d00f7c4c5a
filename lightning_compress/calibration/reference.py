"""The original model beside the quantized one, on the same batches: what error-correcting algorithms learn from.

Where a recipe asks for it (`Drift` is among an algorithm's statistics), every node behind a quantized module runs twice
for each batch, the second time with the original weights on the original values. Both runs share what is onloaded, the
steps, and the cache; see `graph.shadow` for what exists twice.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, fx, nn

from lightning_compress.calibration.quantized import InputHook
from lightning_compress.graph.execute import execute
from lightning_compress.graph.leaf import Leaf
from lightning_compress.graph.names import Names, is_in, weight_of
from lightning_compress.graph.residual import Residual, residuals
from lightning_compress.graph.shadow import Key, SecondRun, diverging_nodes
from lightning_compress.graph.shared_inputs import Group, Source, quantizable_calls
from lightning_compress.graph.stages import Subgraph
from lightning_compress.graph.trace import Traced
from lightning_compress.statistics import Drift, InputDrift, InputGram, Statistic, drift_form
from lightning_compress.statistics.sums import full_float32

Kinds = tuple[type[Statistic], ...]
_EVERY = 8
"""One batch of so many is held out."""


@final
@dataclass(frozen=True)
class Reference:
    """What the original model needs beside the quantized one; without values of its own it does not run.

    Attributes:
        diverging: values that both have of their own.
        members: of values that modules of one group read, and only they, those modules; their rows one after the other.
        forms: in which form what they lack is summed.
        residuals: what the outputs of some of them are added to.
        held_out: numbers of the batches of the calibration set that are kept apart, to judge by.
        last_calls: for each quantized module the number of the last subgraph that runs it.
        originals: weights of modules that are quantized already, as long as they run again; the state of the run.
    """

    diverging: frozenset[fx.Node] = frozenset()
    members: Mapping[Source, tuple[str, ...]] = field(default_factory=dict)
    forms: Mapping[Source, type[Drift]] = field(default_factory=dict)
    residuals: Mapping[str, Residual] = field(default_factory=dict)
    held_out: frozenset[int] = frozenset()
    last_calls: Mapping[str, int] = field(default_factory=dict)
    originals: dict[str, Tensor] = field(default_factory=dict)

    def residual_nodes(self, sources: Collection[Source]) -> set[fx.Node]:
        """The values that are read to observe these sources, beside their own."""
        found = (self.residuals.get(name) for source in sources for name in self.members.get(source, ()))
        return {node for residual in found if residual is not None for node, _ in residual.terms}

    def in_their_forms(self, needs: Mapping[Source, Kinds]) -> dict[Source, Kinds]:
        """What each source has to gather, with the form of a `Drift` for it and for the Gram, which it brings."""

        def others(kinds: Kinds) -> Kinds:
            return tuple(kind for kind in kinds if not issubclass(kind, (Drift, InputGram)))

        return {**needs, **{source: (form, *others(needs[source])) for source, form in self.forms.items()}}

    def keep(self, name: str, root: nn.Module, index: int) -> None:
        """Remember the weight of a module that is about to be quantized in subgraph `index`."""
        if self.last_calls.get(name, -1) >= index:
            self.originals[name] = weight_of(root, name).detach().clone()

    def forget(self, index: int) -> None:
        """Drop the weights that nothing behind subgraph `index` needs."""
        for name in [name for name in self.originals if self.last_calls[name] <= index]:
            del self.originals[name]


def reference_for(
    traced: Traced,
    parts: Sequence[Subgraph],
    corrected: Mapping[Source, type[Drift]],
    with_residual: Callable[[str], bool],
    sizes: Mapping[Source, tuple[int, int]],
    num_batches: int,
) -> Reference:
    """The reference run that the statistics of some sources ask for.

    Args:
        traced: the graph.
        parts: its subgraphs.
        corrected: sources whose modules are to be corrected, with the form that is asked for: `Drift`, any.
        with_residual: of which modules the residual counts.
        sizes: of each source the channels, and the rows of all modules that read it.
        num_batches: of the calibration set.
    """
    solved = Names(name for part in parts for name in part.solved)
    last_calls = {
        name: index
        for index, part in enumerate(parts)
        for step in part.steps
        for node in step.nodes
        for name, _ in quantizable_calls(node, solved)
    }
    groups = _readers(parts)
    members = {source: groups[source][0].members for source in corrected if len(groups[source]) == 1}
    every = min(_EVERY, num_batches)
    own = [groups[source][0] for source in members]
    added_to = residuals(traced.graph, [group for group in own if with_residual(group.members[0])])
    forms = dict.fromkeys(corrected, InputDrift) | {
        source: drift_form(*sizes[source], is_alone=not any(name in added_to for name in names))
        for source, names in members.items()
        if corrected[source] is Drift
    }
    return Reference(
        diverging=diverging_nodes(traced.graph, lambda node: bool(quantizable_calls(node, solved))),
        members=members,
        forms=forms,
        residuals=added_to,
        held_out=frozenset(range(every - 1, num_batches, every)) if num_batches > 1 else frozenset(),
        last_calls=last_calls,
    )


def correctable(parts: Sequence[Subgraph]) -> frozenset[Source]:
    """The sources whose modules can be corrected: those that are the only input of all that read them. Of several
    groups (the keys and values of all cross-attentions) what is lacked follows from their inputs.

    What runs inside an opaque module is not among them, nor are experts: there the two runs may take other paths.
    """
    return frozenset(
        source
        for source, groups in _readers(parts).items()
        if source.inner is None and source.rows is None and all(len(group.sources) == 1 for group in groups)
    )


def _readers(parts: Sequence[Subgraph]) -> dict[Source, list[Group]]:
    """The groups that read each source."""
    found: dict[Source, list[Group]] = {}
    for group in (group for part in parts for step in part.steps for group in step.solve):
        for source in group.sources:
            found.setdefault(source, []).append(group)
    return found


def run_original(
    nodes: Sequence[fx.Node],
    values: MutableMapping[Key, object],
    root: nn.Module,
    traced: Traced,
    device: torch.device,
    reference: Reference,
    drop_after: Mapping[fx.Node, Sequence[fx.Node]],
    seed: int | None = None,
) -> None:
    """Execute `nodes`, whose values exist twice, with the original weights; see `graph.execute.execute`."""
    drops = {node: [dead for dead in drop_after.get(node, ()) if dead in reference.diverging] for node in nodes}
    called = {module for node in nodes if isinstance(node.target, Leaf) for module in node.target.modules}
    with _original_weights(root, reference.originals, called):
        execute(nodes, SecondRun(values), root, traced.constants, device, drops, seed)


@contextmanager
def _original_weights(root: nn.Module, originals: Mapping[str, Tensor], called: Collection[str]) -> Iterator[None]:
    """Within: the modules `called`, and those inside them, are as they were before they were quantized."""
    names = [name for name in originals if is_in(name, called)]
    modules = [root.get_submodule(name) for name in names]
    weights = [module.get_parameter("weight") for module in modules]
    quantized = [weight.data for weight in weights]
    hooks = [module._forward_pre_hooks for module in modules]
    try:
        for name, module, weight in zip(names, modules, weights, strict=True):
            weight.data = originals[name]
            module._forward_pre_hooks = type(module._forward_pre_hooks)(
                (key, hook) for key, hook in module._forward_pre_hooks.items() if not isinstance(hook, InputHook)
            )
        yield
    finally:
        for module, weight, data, own in zip(modules, weights, quantized, hooks, strict=True):
            weight.data, module._forward_pre_hooks = data, own


def differences(
    source: Source, values: MutableMapping[Key, object], root: nn.Module, reference: Reference
) -> tuple[Tensor, Tensor | None] | None:
    """What the original model says of a source, as its statistic asks for it, float32: x_ref - x [..., I]; or what
    the outputs of its modules lack, W (x_ref - x) + r_ref - r [..., O]. None: they are not corrected.

    With it the root mean square of r for every token, [..., 1]; None where there is none.
    """
    if source not in reference.forms:
        return None
    original = SecondRun(values)
    drift = _difference(source.node, values, original)
    if reference.forms[source] is InputDrift:
        return drift, None
    parts, squares = [], []
    for name in reference.members[source]:
        weight = weight_of(root, name)
        with full_float32(drift.device):
            part = drift @ weight.float().t()
        residual = reference.residuals.get(name)
        terms = () if residual is None else residual.terms
        for node, factor in terms:
            part.add_(_difference(node, values, original).reshape(part.shape), alpha=factor)
        if terms:
            added = sum(_value(node, values).reshape(part.shape) * factor for node, factor in terms)
            squares.append(torch.as_tensor(added).square().mean(-1, keepdim=True))
        parts.append(part)
    magnitude = torch.stack(squares).mean(0).sqrt() if squares else None
    return (parts[0] if len(parts) == 1 else torch.cat(parts, -1)), magnitude


def _difference(node: fx.Node, values: Mapping[Key, object], original: SecondRun) -> Tensor:
    """Of the original value and that of now, float32."""
    return _value(node, original) - _value(node, values)


def _value(node: fx.Node, values: Mapping[Any, object]) -> Tensor:
    value = values[node]
    assert isinstance(value, Tensor)
    return value.float()
