"""Gather statistics of the values that groups read, without their padding tokens."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, fx, nn

from lightning_compress.distributed.collective import Collective
from lightning_compress.graph.shadow import Key
from lightning_compress.graph.stages import Source, Step, quantizable_calls
from lightning_compress.statistics import Beside, Statistic

Statistics = dict[Source, dict[type[Statistic], Statistic]]


@contextmanager
def observing(
    root: nn.Module,
    sources: Sequence[Source],
    values: Mapping[Key, object],
    masks: Mapping[Source, fx.Node],
    statistics: Statistics,
    differences: Callable[[Source], Tensor | None] = lambda source: None,
    held_out: bool = False,
) -> Iterator[None]:
    """Update the statistics of `sources`, which have begun, with what one batch computes inside the context.

    `differences` tells what `Beside` does of a source, with padding, before the batch has changed it; `held_out`,
    whether the batch is one to judge by.

    A value of the graph is read from `values` at the end; the input of a module inside an opaque leaf is caught by a
    hook while the leaf runs. However often the batch calls that module, its statistics are updated once: the batch is
    the unit that makes sums the same on any number of ranks.
    """

    caught: dict[Source, list[Tensor]] = {}

    def unpadded(source: Source, x: object) -> Tensor:
        assert isinstance(x, Tensor)
        mask = values[masks[source]] if source in masks else None
        return tokens(x, mask if isinstance(mask, Tensor) else None)

    def catch(source: Source, x: object) -> None:
        kept = unpadded(source, x)
        is_view = isinstance(x, Tensor) and kept.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        kept = kept.clone() if is_view else kept  # the model may write into it afterwards
        caught.setdefault(source, []).append(kept)

    wanted = [source for source in sources if statistics[source]]
    with ExitStack() as hooks:
        for source in wanted:
            if source.inner is not None:
                hooks.enter_context(_catching(root.get_submodule(source.inner), partial(catch, source)))
        yield
        for source in wanted:
            beside = None
            if source.inner is None:
                x = unpadded(source, values[source.node])
                difference = differences(source)
                beside = None if difference is None else Beside(unpadded(source, difference), held_out)
            elif source in caught:
                parts = caught.pop(source)
                x = parts[0] if len(parts) == 1 else torch.cat(parts)
            else:
                continue  # not called
            for statistic in statistics[source].values():
                statistic.update(x, beside)


def begin_statistics(
    sources: Sequence[Source],
    needs: Mapping[Source, tuple[type[Statistic], ...]],
    sizes: Mapping[Source, tuple[int, int]],
    device: torch.device,
    statistics: Statistics,
) -> None:
    """Let `sources` have the statistics that they need, which have seen nothing yet."""
    for source in sources:
        channels, outputs = sizes[source]
        statistics[source] = {kind: kind(channels, device, outputs) for kind in needs[source]}


def settle_statistics(
    sources: Sequence[Source], statistics: Statistics, collective: Collective, first_rank: int
) -> None:
    """When every rank has run its first batch: let all sums be made as the first batch of all, on rank `first_rank`,
    asks for."""
    for source in sources:
        agree = partial(collective.broadcast, what=f"the first batch at {_title(source)}", source=first_rank)
        for statistic in statistics[source].values():
            statistic.settle(agree)


def reduce_statistics(sources: Sequence[Source], statistics: Statistics, collective: Collective) -> None:
    """Let the statistics of `sources` be those of all ranks; one that saw no token takes part.

    Sources that no rank has met are left out.
    """
    for source in sources:
        for statistic in statistics[source].values():
            for tensor, reduction in statistic.reductions().values():
                collective.reduce(tensor, reduction, f"the statistics of {_title(source)}")
        if not any(statistic.num_tokens for statistic in statistics[source].values()):
            del statistics[source]


def _title(source: Source) -> str:
    return source.inner or source.node.name


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
def _catching(module: nn.Module, catch: Callable[[object], None]) -> Iterator[None]:
    def hook(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        catch(args[0] if args else kwargs["input"])

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
