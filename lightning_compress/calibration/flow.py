"""Batches flowing through a traced model: one subgraph's weights at a time, and for each of its steps all batches.

Calibration (`loop`) and evaluation (`evaluate`) are both made of this.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from lightning_compress.calibration.observe import stretches
from lightning_compress.calibration.reference import Reference, run_original
from lightning_compress.graph.aliases import memory_of
from lightning_compress.graph.buffers import KeptBuffers
from lightning_compress.graph.execute import execute
from lightning_compress.graph.leaf import Leaf
from lightning_compress.graph.masks import TokenMask
from lightning_compress.graph.names import module_named
from lightning_compress.graph.products import in_float32, slow_dtypes
from lightning_compress.graph.restore import attributes_of
from lightning_compress.graph.shadow import Key, Shadow, node_of, with_shadows
from lightning_compress.graph.shared_inputs import Source
from lightning_compress.graph.stages import Step, Subgraph, last_steps
from lightning_compress.graph.synthesize import flatten_batch
from lightning_compress.graph.trace import Traced
from lightning_compress.graph.trees import versions
from lightning_compress.memory.activations import ActivationCache
from lightning_compress.memory.heap import trim_heap
from lightning_compress.memory.placement import Placement
from lightning_compress.memory.store import WeightStore
from lightning_compress.memory.tracker import resident_bytes
from lightning_compress.memory.transfer import Lane

_KEEPING_NOTHING = ("torch.nn.", "lightning_compress.")
Values = dict[Key, object]
Watch = Callable[[int, Sequence[Source], Values], AbstractContextManager[None]]


@dataclass(frozen=True)
class Flow:
    """What runs, and where its weights and values are.

    Attributes:
        root: the model.
        subgraphs: in the order in which they run.
        traced: the graph; None where nothing has to run.
        cache: values between steps.
        store: the weights.
        placement: where both are.
        last: the number of the last step that reads a value; steps are numbered through all subgraphs.
        masks: for a source, the input that marks its padding tokens.
        reference: the original model beside the one that runs.
        buffers: those that the model writes to, as every batch finds them.
        share: the numbers in the calibration set of the batches that flow on this rank, ascending.
        in_float32: types whose products are computed in float32 (see `graph.products`).
    """

    root: nn.Module
    subgraphs: tuple[Subgraph, ...]
    traced: Traced | None
    cache: ActivationCache
    store: WeightStore
    placement: Placement
    last: Mapping[Key, int]
    masks: Mapping[Source, TokenMask]
    reference: Reference = field(default_factory=Reference)
    buffers: KeptBuffers = field(default_factory=lambda: KeptBuffers(nn.Module(), ()))
    share: Sequence[int] = ()
    in_float32: frozenset[torch.dtype] = frozenset()

    @property
    def device(self) -> torch.device:
        """Where subgraphs run."""
        return self.placement.device

    def steps(self, index: int) -> Iterator[tuple[int, Step]]:
        """The steps of subgraph `index`, each with its number among those of all subgraphs."""
        first = sum(len(part.steps) for part in self.subgraphs[:index])
        return enumerate(self.subgraphs[index].steps, first)

    @property
    def moved(self) -> Counter[str]:
        """Bytes of weights and values moved so far, by lane."""
        return self.store.moved + self.cache.moved


def flow_of(
    root: nn.Module,
    traced: Traced,
    subgraphs: tuple[Subgraph, ...],
    batches: Mapping[int, Any],
    placement: Placement,
    until_end: Sequence[fx.Node],
    masks: Mapping[Source, TokenMask],
    reference: Reference,
) -> Flow:
    """Batches, by their numbers in the calibration set, that are about to flow through all subgraphs; values that have
    to outlive the last step are `until_end`."""
    return Flow(
        root=root,
        subgraphs=subgraphs,
        traced=traced,
        cache=cached_inputs(traced, list(batches.values()), placement, reference.diverging),
        store=weights_of(root, placement),
        placement=placement,
        last=last_uses(subgraphs, until_end, reference),
        masks=masks,
        reference=reference,
        buffers=KeptBuffers(root, traced.written),
        share=tuple(batches),
        in_float32=slow_dtypes(placement.device),
    )


def weights_of(root: nn.Module, placement: Placement) -> WeightStore:
    """The model's weights, on their way to where subgraphs run."""
    return WeightStore(root, Lane(placement.device), placement.source)


def cached_inputs(
    traced: Traced, batches: Sequence[Any], placement: Placement, diverging: frozenset[fx.Node] = frozenset()
) -> ActivationCache:
    """The cache as it is at the start: with the inputs, and twice those that a reference run has of its own."""
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    inputs: list[dict[Key, object]] = [
        dict(zip(placeholders, flatten_batch(batch)[0], strict=True)) for batch in batches
    ]
    rewritten = memory_of(traced.graph).rewritten()
    if not rewritten.isdisjoint(placeholders):
        inputs = [dict(zip(values, deepcopy([*values.values()]), strict=True)) for values in inputs]  # not the user's
    for values in inputs:
        twice = [node for node in placeholders if node in diverging]
        values.update({Shadow(node): deepcopy(values[node]) for node in twice})
    return ActivationCache(
        inputs,
        device=placement.device,
        rewritten=rewritten,
        device_budget=placement.device_activation_budget,
        budget=placement.activation_budget,
        scratch_dir=placement.scratch_dir,
    )


def last_uses(subgraphs: Sequence[Subgraph], until_end: Sequence[fx.Node], reference: Reference) -> dict[Key, int]:
    """For each value the number of the last step that reads it, which is the number of steps for values that have to
    outlive them all; those that a reference run has of its own are read when the others are."""
    steps = [step for subgraph in subgraphs for step in subgraph.steps]
    found = {**last_steps(subgraphs), **dict.fromkeys(until_end, len(steps))}
    for number, step in enumerate(steps):
        found.update({node: max(found.get(node, 0), number) for node in reference.residual_nodes(step.observe)})
    return {key: found[node_of(key)] for key in with_shadows(found, reference.diverging)}


@contextmanager
def onloaded(flow: Flow, index: int) -> Iterator[None]:
    """Within: the weights of a subgraph are on the device."""
    subgraph = flow.subgraphs[index]
    with flow.store.lending(), flow.store.onload(subgraph.modules, subgraph.tensors):
        yield


def prefetch(flow: Flow, index: int) -> None:
    """Begin to bring the weights of the subgraphs behind subgraph `index`."""
    for following in flow.subgraphs[index + 1 : index + 1 + flow.placement.prefetch_depth]:
        flow.store.prefetch(following.modules, following.tensors)


def run_step(
    flow: Flow,
    step: Step,
    number: int,
    watch: Watch = lambda batch, sources, values: nullcontext(),
    wanted: frozenset[fx.Node] = frozenset(),
) -> Iterator[Values]:
    """Run a step's nodes on every batch; to be exhausted.

    Args:
        flow: what the step is part of; its subgraph is onloaded.
        step: what to run.
        number: of the step.
        watch: entered while nodes run, with the number of the batch and the sources to observe there.
        wanted: values to be yielded though no later step reads them.

    Yields:
        For each batch the values that are there when its nodes have run.
    """
    if flow.traced is None or not (step.nodes or step.observe or wanted):
        return
    traced, reference, diverging = flow.traced, flow.reference, flow.reference.diverging
    beside = {flow.masks[source].node for source in step.observe if source in flow.masks}
    beside |= reference.residual_nodes(step.observe)
    read = {node for computed in step.nodes for node in computed.all_input_nodes}
    observed = {node for source in step.observe for node in source.reads} | beside | wanted
    outliving = {key for key, use in flow.last.items() if use > number}
    pieces = [(_shared_first(nodes, diverging), sources) for nodes, sources in stretches(step)]
    ordered = [node for (shared, own), _ in pieces for node in (*shared, *own)]
    needed_at_end = {node for source in pieces[-1][1] for node in source.reads} | beside | wanted
    drop_after = _drops(ordered, needed_at_end | outliving if step.keep else needed_at_end)
    loaded = with_shadows(read | observed, diverging)
    keeping = _may_keep(flow.root, ordered, traced)
    for batch in range(len(flow.cache)):
        values = flow.cache.load(batch, loaded, copy=not step.keep)
        before = {key: versions(value) for key, value in values.items()}
        seed = flow.share[batch] if traced.draws else None
        with flow.buffers.restored(), _as_called(flow, keeping, traced):
            for (shared, own), sources in pieces:
                with in_float32(flow.in_float32), _random_state_kept(flow.device, traced):
                    execute(shared, values, flow.root, traced.constants, flow.device, drop_after, seed)
                    if diverging:
                        with attributes_of(keeping), flow.buffers.undone():
                            run_original(own, values, flow.root, traced, flow.device, reference, drop_after, seed)
                    with watch(batch, sources, values):
                        execute(own, values, flow.root, traced.constants, flow.device, drop_after, seed)
            values = flow.buffers.apart(values)
        if step.keep:
            kept = {key: value for key, value in values.items() if key in outliving}
            unchanged = {key for key, value in kept.items() if before.get(key) == versions(value)}
            flow.cache.retain(batch, outliving)  # first: what is stored may need the room
            flow.cache.store(batch, kept, unchanged)
            del kept  # what went to the file must not live on while the next batch runs
        give_back(flow.placement)
        yield values
        del values


def _may_keep(root: nn.Module, nodes: Sequence[fx.Node], traced: Traced) -> list[nn.Module]:
    """The modules that these nodes call which may keep something from one call to the next (torch's and ours do not),
    and those that the model sets something on."""
    found: dict[int, nn.Module] = {}
    for leaf in dict.fromkeys(node.target for node in nodes if isinstance(node.target, Leaf)):
        names = (leaf.name,) if leaf.within is None else leaf.within.modules
        found.update((id(module), module) for name in names for module in module_named(root, name).modules())
        if leaf.within is not None and leaf.owner is not None:
            owner = module_named(root, leaf.owner)
            found[id(owner)] = owner
    kept = {key: each for key, each in found.items() if not type(each).__module__.startswith(_KEEPING_NOTHING)}
    kept.update((id(module), module) for module in (module_named(root, name) for name, _, _ in traced.presets))
    return list(kept.values())


@contextmanager
def _as_called(flow: Flow, keeping: Sequence[nn.Module], traced: Traced) -> Iterator[None]:
    """Within: modules have what the model sets on them; what they keep of a batch is undone after it."""
    with attributes_of(keeping):
        for name, key, value in traced.presets:
            setattr(module_named(flow.root, name), key, flow.device if isinstance(value, torch.device) else value)
        yield


def _random_state_kept(device: torch.device, traced: Traced) -> AbstractContextManager[None]:
    """Within: a model that draws random numbers may, without changing what others draw."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=traced.draws)


def give_back(placement: Placement, *, always: bool = False) -> None:
    """Let the C heap give back what is free in it, if the process has more than it should."""
    if always or (placement.most_resident is not None and resident_bytes() > placement.most_resident):
        trim_heap()


def _shared_first(nodes: Sequence[fx.Node], diverging: Set[fx.Node]) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
    """The nodes whose values a reference run shares, which depend on no others; and those that run twice, or all where
    there is none."""
    if not diverging:
        return (), tuple(nodes)
    return tuple(node for node in nodes if node not in diverging), tuple(node for node in nodes if node in diverging)


def _drops(nodes: Sequence[fx.Node], kept: Set[Key]) -> dict[fx.Node, list[fx.Node]]:
    """For each of these nodes the values that none of them reads after it: freed at once, within the batch."""
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        last.update(dict.fromkeys((*node.all_input_nodes, node), node))
    drops: dict[fx.Node, list[fx.Node]] = {}
    for value, node in last.items():
        if value not in kept:
            drops.setdefault(node, []).append(value)
    return drops
