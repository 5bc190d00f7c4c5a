"""Batches flowing through a traced model: one subgraph's weights at a time, and for each of its steps all batches.

Calibration (`loop`) and evaluation (`evaluate`) are both made of this.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import fx, nn

from lightning_compress.calibration.observe import stretches
from lightning_compress.graph.execute import execute
from lightning_compress.graph.stages import Source, Step, Subgraph, last_steps
from lightning_compress.graph.trace import Traced
from lightning_compress.memory.activations import ActivationCache, versions
from lightning_compress.memory.placement import Placement
from lightning_compress.memory.store import WeightStore

Values = dict[fx.Node, object]
Watch = Callable[[Sequence[Source], Values], AbstractContextManager[None]]


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
    """

    root: nn.Module
    subgraphs: tuple[Subgraph, ...]
    traced: Traced | None
    cache: ActivationCache
    store: WeightStore
    placement: Placement
    last: Mapping[fx.Node, int]
    masks: Mapping[Source, fx.Node]

    @property
    def device(self) -> torch.device:
        """Where subgraphs run."""
        return self.placement.device

    @property
    def moved(self) -> Counter[str]:
        """Bytes of weights and values moved so far, by lane."""
        return self.store.moved + self.cache.moved


def last_uses(subgraphs: Sequence[Subgraph], until_end: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """For each value the number of the last step that reads it, which is the number of steps for values that have to
    outlive them all."""
    num_steps = sum(len(subgraph.steps) for subgraph in subgraphs)
    return {**last_steps(subgraphs), **dict.fromkeys(until_end, num_steps)}


def onloaded(flow: Flow, index: int) -> AbstractContextManager[None]:
    """Within: the weights of a subgraph are on the device."""
    subgraph = flow.subgraphs[index]
    return flow.store.onload(subgraph.modules, subgraph.tensors, stay=flow.placement.weights.get(index))


def prefetch(flow: Flow, index: int) -> None:
    """Begin to bring the weights of the subgraphs behind subgraph `index`."""
    for following in flow.subgraphs[index + 1 : index + 1 + flow.placement.prefetch_depth]:
        flow.store.prefetch(following.modules, following.tensors)


def run_step(
    flow: Flow,
    step: Step,
    number: int,
    watch: Watch = lambda sources, values: nullcontext(),
    wanted: frozenset[fx.Node] = frozenset(),
) -> Iterator[Values]:
    """Run a step's nodes on every batch; to be exhausted.

    Args:
        flow: what the step is part of; its subgraph is onloaded.
        step: what to run.
        number: of the step.
        watch: entered while nodes run, with the sources to observe there.
        wanted: values to be yielded though no later step reads them.

    Yields:
        For each batch the values that are there when its nodes have run.
    """
    if flow.traced is None or not (step.nodes or step.observe or wanted):
        return
    masks = {flow.masks[source] for source in step.observe if source in flow.masks}
    read = {node for computed in step.nodes for node in computed.all_input_nodes}
    observed = {source.node for source in step.observe} | masks | wanted
    outliving = {node for node, use in flow.last.items() if use > number}
    pieces = stretches(step)
    needed_at_end = {source.node for source in pieces[-1][1]} | masks | wanted
    drop_after = _drops(step, needed_at_end | outliving if step.keep else needed_at_end)
    for batch in range(len(flow.cache)):
        values = flow.cache.load(batch, read | observed, copy=not step.keep)
        before = {node: versions(value) for node, value in values.items()}
        for nodes, sources in pieces:
            with watch(sources, values):
                execute(nodes, values, flow.root, flow.traced.constants, flow.device, drop_after)
        if step.keep:
            changed = {node: value for node, value in values.items() if before.get(node) != versions(value)}
            flow.cache.store(batch, {node: value for node, value in changed.items() if node in outliving})
            flow.cache.retain(batch, outliving)
            del changed  # what went to the file must not live on while the next batch runs
        yield values
        del values


def _drops(step: Step, kept: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each node of a step the values that nothing reads after it: freed at once, within the batch."""
    last: dict[fx.Node, fx.Node] = {}
    for node in step.nodes:
        last.update(dict.fromkeys((*node.all_input_nodes, node), node))
    drops: dict[fx.Node, list[fx.Node]] = {}
    for value, node in last.items():
        if value not in kept:
            drops.setdefault(node, []).append(value)
    return drops
