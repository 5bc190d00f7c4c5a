"""Gather statistics of the values that groups read, without their padding tokens."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_compress.distributed.collective import Collective
from lightning_compress.graph.stages import Source, Step, quantizable_calls
from lightning_compress.statistics import Statistic

Statistics = dict[Source, dict[type[Statistic], Statistic]]


@contextmanager
def observing(
    root: nn.Module,
    sources: Sequence[Source],
    values: Mapping[fx.Node, object],
    masks: Mapping[Source, fx.Node],
    needs: Mapping[Source, tuple[type[Statistic], ...]],
    statistics: Statistics,
) -> Iterator[None]:
    """Update the statistics of `sources` with what one batch computes inside the context.

    A value of the graph is read from `values` at the end; the input of a module inside an opaque leaf is caught by a
    hook while the leaf runs.
    """

    def update(source: Source, x: object) -> None:
        assert isinstance(x, Tensor)
        if not needs[source]:
            return
        mask = values[masks[source]] if source in masks else None
        kept = tokens(x, mask if isinstance(mask, Tensor) else None)
        found = statistics.setdefault(source, {})
        for kind in needs[source]:
            if kind not in found:
                found[kind] = kind(x.shape[-1], x.device)
            found[kind].update(kept)

    with ExitStack() as hooks:
        for source in sources:
            if source.inner is not None:
                hooks.enter_context(_catching(root.get_submodule(source.inner), source, update))
        yield
        for source in sources:
            if source.inner is None:
                update(source, values[source.node])


def reduce_statistics(
    sources: Sequence[Source],
    needs: Mapping[Source, tuple[type[Statistic], ...]],
    channels: Mapping[Source, int],
    device: torch.device,
    statistics: Statistics,
    collective: Collective,
) -> None:
    """Let the statistics of `sources` be those of all ranks; one that saw no token takes part.

    Sources that no rank has met are left out, as they are where there is one rank only.
    """
    if collective.size == 1:
        return
    for source in sorted(sources, key=lambda source: (source.node.name, source.inner or "", source.writes)):
        what = f"the statistics of {source.inner or source.node.name}"
        found = statistics.setdefault(source, {})
        for kind in needs[source]:
            if kind not in found:
                found[kind] = kind(channels[source], device)
            for tensor, reduction in found[kind].reductions().values():
                collective.reduce(tensor, reduction, what)
        if not any(statistic.num_tokens for statistic in found.values()):
            del statistics[source]


def stretches(step: Step) -> list[tuple[tuple[fx.Node, ...], list[Source]]]:
    """The nodes of a step in pieces, each with the sources to observe while it runs or at its end.

    A value is observed right before the first module that reads it, because the model may change it in place afterwards
    (`x += f(x)`). What is read inside an opaque leaf is observed while that one call runs.
    """
    solved = frozenset(name for group in step.solve for name in group.members)
    calls = [{source for _, source in quantizable_calls(node, solved)} for node in step.nodes]
    ends: dict[int, list[Source]] = {len(step.nodes): []}
    for source in step.observe:
        first = next((at for at, read in enumerate(calls) if source in read), len(calls))
        ends.setdefault(first, [])
        ends.setdefault(first if source.inner is None else first + 1, []).append(source)
    starts = [0, *sorted(ends)]
    return [(step.nodes[start:end], ends[end]) for start, end in zip(starts, sorted(ends), strict=False)]


def tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """The tokens [T, I] of `x` [..., I]; `mask` [B, L] tells, where it fits x's leading sizes, which are not
    padding."""
    flat = x.reshape(-1, x.shape[-1])
    if mask is None or mask.numel() != flat.shape[0]:
        return flat
    keep = mask.reshape(-1).bool()
    return flat if bool(keep.all()) else flat[keep]


@contextmanager
def _catching(module: nn.Module, source: Source, update: Any) -> Iterator[None]:
    def hook(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        update(source, args[0] if args else kwargs["input"])

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
