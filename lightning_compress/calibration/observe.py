"""Gather statistics of the values that groups read, without their padding tokens, and give each group its own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, fx, nn

from lightning_compress.distributed.collective import Collective
from lightning_compress.graph.compat import outside_transforms
from lightning_compress.graph.experts import sizes_of
from lightning_compress.graph.leaf import first_tensor, leaf_input, takes_a_value
from lightning_compress.graph.masks import TokenMask
from lightning_compress.graph.names import Names
from lightning_compress.graph.reads import like
from lightning_compress.graph.shadow import Key
from lightning_compress.graph.shared_inputs import Group, Source, quantizable_calls
from lightning_compress.graph.stages import Step
from lightning_compress.recipe.forms import reader
from lightning_compress.statistics import Beside, Drift, InputGram, Reduction, Statistic

_SMALL = 1 << 16  # bytes; what is combined of less takes longer to begin than to send

Statistics = dict[Source, dict[type[Statistic], Statistic]]
Sizes = Mapping[Source, tuple[int, int]]
"""Of sources: the channels, and the rows of all modules that read it."""


@contextmanager
def observing(
    root: nn.Module,
    sources: Sequence[Source],
    values: Mapping[Key, object],
    masks: Mapping[Source, TokenMask],
    statistics: Statistics,
    differences: Callable[[Source], tuple[Tensor, Tensor | None] | None] = lambda source: None,
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
    unpadded = _reader(values, masks)

    def catch(source: Source, x: object) -> None:
        kept = unpadded(source, x)
        is_view = isinstance(x, Tensor) and kept.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        kept = kept.clone() if is_view else kept  # the model may write into it afterwards
        caught.setdefault(source, []).append(kept)

    wanted = [source for source in sources if statistics[source]]
    with ExitStack() as hooks:
        for source in wanted:
            if source.inner is not None:
                hooks.enter_context(_catching(reader(root.get_submodule(source.inner)), partial(catch, source)))
        yield
        for source in wanted:
            beside = None
            if source.inner is None:
                x = unpadded(source, values[source.node])
                found = differences(source)
                if found is not None:
                    difference, magnitude = found
                    magnitude = None if magnitude is None else unpadded(source, magnitude)
                    beside = Beside(unpadded(source, difference), held_out, magnitude)
            elif source in caught:
                parts = caught.pop(source)
                x = parts[0] if len(parts) == 1 else torch.cat(parts)
            else:
                continue  # not called
            for statistic in statistics[source].values():
                statistic.update(x, beside)


def _reader(values: Mapping[Key, object], masks: Mapping[Source, TokenMask]) -> Callable[[Source, object], Tensor]:
    """Gives the tokens [T, I] of a source, of a batch's values, without those of padding."""
    bounds: dict[fx.Node, list[int]] = {}

    def unpadded(source: Source, x: object) -> Tensor:
        assert isinstance(x, Tensor)
        mask = None if source not in masks else _in_order(values[masks[source].node], masks[source])
        if source.rows is None:
            return tokens(x, mask)
        token, counts = values[source.rows.token], values[source.rows.counts]
        assert isinstance(token, Tensor)
        assert isinstance(counts, Tensor)
        if source.rows.counts not in bounds:  # asked of the device once for all experts
            bounds[source.rows.counts] = [0, *accumulate(sizes_of(counts, len(token)))]
        mine = slice(*bounds[source.rows.counts][source.rows.expert : source.rows.expert + 2])
        return routed(x, token[mine], mine, mask, gathers=source.rows.gathers)

    return unpadded


def _in_order(mask: object, of: TokenMask) -> Tensor | None:
    if not isinstance(mask, Tensor):
        return None
    if of.is_heads_first:
        return mask.unsqueeze(1)
    return mask.t() if of.is_length_first else mask


def begin_statistics(
    sources: Sequence[Source],
    needs: Mapping[Source, tuple[type[Statistic], ...]],
    sizes: Sizes,
    device: torch.device,
    statistics: Statistics,
) -> None:
    """Let `sources` have the statistics that they need, which have seen nothing yet."""
    for source in sources:
        channels, outputs = sizes[source]
        statistics[source] = {kind: kind(channels, device, outputs) for kind in needs[source]}


def routed(x: Tensor, token: Tensor, mine: slice, mask: Tensor | None, *, gathers: bool) -> Tensor:
    """The rows [t, I] of `x` that one expert reads, without those of padding tokens.

    Args:
        x: a row for every token, if `gathers`, else one for every token and expert, sorted by expert.
        token: int64 [t], of which tokens the expert's rows are.
        mine: which of the sorted rows they are.
        mask: [B, L]; None: nothing is padding.
    """
    found = x[token] if gathers else x[mine]
    return found if mask is None else found[mask.reshape(-1)[token].bool()]


def settle_statistics(
    sources: Sequence[Source], sizes: Sizes, statistics: Statistics, collective: Collective, first_rank: int
) -> None:
    """When every rank has run its first batch: let all sums be made as the first batch of all, on rank `first_rank`,
    asks for; those of experts as the one asks for that it brought most, for it may have brought none to some."""
    siblings = [found for _, found in _siblings(sources, sizes, statistics)]
    own = [[max(entries) for entries in zip(*(each.largest() for each in found), strict=True)] for found in siblings]
    agreed = collective.broadcast(own, f"the first batch at {_titles(sources)}", first_rank)
    for found, largest in zip(siblings, agreed, strict=True):
        for statistic in found:
            statistic.settle(largest)


def reduce_statistics(sources: Sequence[Source], sizes: Sizes, statistics: Statistics, collective: Collective) -> None:
    """Let the statistics of `sources` be those of all ranks; one that saw no token takes part.

    Experts that saw few tokens lean on what all of them saw. Other sources that no rank has met are left out. Modules
    inside one opaque leaf whose names differ in numbers alone are experts if not all of them saw as many tokens.
    """
    small: dict[tuple[torch.dtype, torch.device, Reduction], list[Tensor]] = {}
    for source in sources:
        for statistic in statistics[source].values():
            for tensor, reduction in statistic.reductions().values():
                if tensor.nbytes > _SMALL:
                    collective.reduce(tensor, reduction, f"the statistics of {_title(source)}")
                else:
                    small.setdefault((tensor.dtype, tensor.device, reduction), []).append(tensor)
    for (*_, reduction), tensors in small.items():
        joined = torch.cat([tensor.flatten() for tensor in tensors])
        collective.reduce(joined, reduction, f"the statistics of {_titles(sources)}")
        for tensor, part in zip(tensors, joined.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))
    for source, found in _siblings(sources, sizes, statistics):
        if source.rows is not None or len({statistic.num_tokens for statistic in found}) > 1:
            for statistic in found:
                statistic.num_lent = 0
            type(found[0]).complete(found, _reads_hidden(source, sizes[source]))
    for source in sources:
        own = statistics[source].values()
        if source.rows is None and not any(each.num_tokens or each.num_lent is not None for each in own):
            del statistics[source]


def merged(
    group: Group,
    needs: Mapping[Source, tuple[type[Statistic], ...]],
    sizes: Sizes,
    device: torch.device,
    statistics: Statistics,
) -> dict[type[Statistic], Statistic]:
    """The statistics of a group: those of its one source, or of all calls of a module taken together.

    Of a module inside an opaque leaf that no batch called: a Gram of ones on the diagonal, which rounds to nearest.
    """
    gathered = [statistics[source] for source in group.sources if source in statistics]
    if not gathered and group.sources:
        first = group.sources[0]
        unreached: Statistics = {}
        kinds = tuple(InputGram if issubclass(kind, Drift) else kind for kind in needs[first])
        begin_statistics([first], {first: kinds}, sizes, device, unreached)
        for kind, statistic in unreached[first].items():
            kind.complete([statistic], same_channels=False)
        return unreached[first]
    if len(gathered) < 2:
        return dict(gathered[0]) if gathered else {}
    total = deepcopy(gathered[0])
    for other in gathered[1:]:
        for kind, statistic in total.items():
            statistic.merge(other[kind])
    return total


def num_tokens_seen(group: Group, statistics: Statistics) -> int:
    """Tokens that a group's statistics were gathered from, in all calls."""
    found = [statistics[source].values() for source in group.sources if source in statistics]
    return sum(max((statistic.num_tokens for statistic in kinds), default=0) for kinds in found)


def num_tokens_lent(group: Group, statistics: Statistics) -> int | None:
    """Tokens that an expert was lent; None: the group is no expert's."""
    gathered = [statistics.get(source, {}).values() for source in group.sources]
    lent = [[each.num_lent for each in kinds if each.num_lent is not None] for kinds in gathered]
    return sum(map(max, filter(None, lent))) if any(lent) else None


def _siblings(sources: Sequence[Source], sizes: Sizes, statistics: Statistics) -> list[tuple[Source, list[Statistic]]]:
    """The statistics by kind, those together that experts of one layer may read, with the first of their sources: rows
    of one value, or inputs of modules of equal sizes inside one opaque leaf, whose names differ in numbers alone."""
    found: dict[tuple[object, ...], tuple[Source, list[Statistic]]] = {}
    for source in sources:
        key: tuple[object, ...] = (source,)
        if source.rows is not None:
            key = source.node, source.rows.counts
        elif source.inner is not None:
            key = source.node, like(source.inner), sizes[source]
        for kind, statistic in statistics[source].items():
            found.setdefault((kind, *key), (source, []))[1].append(statistic)
    return list(found.values())


def _reads_hidden(source: Source, size: tuple[int, int]) -> bool:
    """Whether channels mean the same to all experts: those of what the leaf reads do that they are in."""
    if source.rows is not None:
        return source.rows.reads_hidden
    read = leaf_input(source.node).meta.get("val") if takes_a_value(source.node) else None
    return isinstance(read, Tensor) and bool(read.shape[-1] == size[0])


def _titles(sources: Sequence[Source]) -> str:
    return " to ".join(dict.fromkeys((_title(sources[0]), _title(sources[-1]))))


def _title(source: Source) -> str:
    expert = "" if source.rows is None else f", expert {source.rows.expert}"
    return source.inner or f"{source.node.name}{expert}"


def stretches(step: Step) -> list[tuple[tuple[fx.Node, ...], list[Source]]]:
    """The nodes of a step in pieces, each with the sources to observe while it runs or at its end.

    A value is observed right before the first module that reads it, because the model may change it in place afterwards
    (`x += f(x)`). What is read inside an opaque leaf is observed while that one call runs.
    """
    solved = Names(name for group in step.solve for name in group.members)
    calls = [{source for _, source in quantizable_calls(node, solved)} for node in step.nodes]
    ends: dict[int, list[Source]] = {len(step.nodes): []}
    for source in step.observe:
        first = next((at for at, read in enumerate(calls) if source in read), len(calls))
        ends.setdefault(first, [])
        ends.setdefault(first if source.inner is None else first + 1, []).append(source)
    starts = [0, *sorted(ends)]
    return [(step.nodes[start:end], ends[end]) for start, end in zip(starts, sorted(ends), strict=False)]


def tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """The tokens [T, I] of `x`; `mask` tells which are not padding.

    Args:
        x: [B * L, I]; [B, L, ..., I] with several rows (heads) for each token; [B, ..., I] with L rows of each; or,
            as modules have it that work on one position of all samples at a time, [L, B, I]. Anything else has rows
            that are no tokens, or that are in an order of its own.
        mask: [B, L]; [B, 1, L] for x [B, H, L, I].

    >>> x, mask = torch.arange(6.0)[:, None], torch.tensor([[1, 1, 1], [1, 0, 0]])
    >>> tokens(x.view(3, 2, 1), mask).flatten(), tokens(x.view(2, 3, 1, 1).expand(2, 3, 2, 1), mask).flatten()
    (tensor([0., 1., 2., 4.]), tensor([0., 0., 1., 1., 2., 2., 3., 3.]))
    """
    flat, shape = x.reshape(-1, x.shape[-1]), x.shape[:-1]
    if mask is None:
        return flat
    if mask.ndim == 3 and x.ndim == 4 and (shape[0], 1, shape[2]) == mask.shape:
        mask = mask.expand(shape)
    elif mask.ndim == 2 and x.ndim > 3 and shape[:2] == mask.shape:
        mask = mask.reshape(*mask.shape, *[1] * (x.ndim - 3)).expand(shape)
    elif mask.numel() != len(flat):
        return flat
    elif x.ndim > 2 and len(x) != len(mask):
        if shape != mask.t().shape:
            return flat
        mask = mask.t()
    keep = mask.reshape(-1).bool()
    return flat if bool(keep.all()) else flat[keep]


@contextmanager
def _catching(module: nn.Module, catch: Callable[[object], None]) -> Iterator[None]:
    def hook(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        with outside_transforms(first_tensor(args, kwargs)[1]) as x:
            catch(x)

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
