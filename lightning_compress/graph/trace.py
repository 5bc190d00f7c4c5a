"""Trace a model by running its own Python on fake tensors: modules that matter are nodes, the rest ATen operations.

Method: `make_fx`'s machinery (see `compat`) with leaf modules. A leaf is a target, or any module that holds neither a
target nor a boundary; its call is one node and is later run as the real module, so norms, rotary embeddings and
activations give bit-identical results. What lies between leaves is recorded as operations. Symbolic sizes make one
graph serve ragged batches. Alternatives not taken: symbolic proxies through Python control flow (needs rewritten
sources), `torch.export` (cannot keep modules, wants dynamic dimensions named), hooks on layers (do not know what
happens between).

What cannot be recorded falls back by itself: the innermost module that fails (a Mamba mixer, say), and all of its
class, become single nodes; a leaf that reads values gets its output shape from a real run; where a model unrolls over
its rows, the graph serves only batches of so many. Each is named in `Traced.fallbacks`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from lightning_compress.errors import UntraceableModelError
from lightning_compress.graph import compat
from lightning_compress.graph.awaited import substituted
from lightning_compress.graph.configs import is_encoder_decoder, without_cache
from lightning_compress.graph.cut import Cut, first_cut
from lightning_compress.graph.decisions import Decision, decide
from lightning_compress.graph.failures import about_a_size, at
from lightning_compress.graph.fakes import fake_batch, new_fake_mode, replace_by_fakes, shapes_of
from lightning_compress.graph.fallback import (
    OF_ONE_SIZE,
    Failure,
    Fallback,
    Fixed,
    Way,
    fall_back,
    in_the_end,
    otherwise,
    warn,
    with_observations,
)
from lightning_compress.graph.kept import Preset
from lightning_compress.graph.leaf import Leaf
from lightning_compress.graph.methods import methods_replaced
from lightning_compress.graph.multiplied import as_calls
from lightning_compress.graph.observed import counted
from lightning_compress.graph.outputs import Outputs
from lightning_compress.graph.reads import Reads, watching
from lightning_compress.graph.record import Attempt, LastCallRecorded
from lightning_compress.graph.recorder import Recorder, recording
from lightning_compress.graph.restore import (
    assigned,
    attributes_restored,
    caches_restored,
    calls_replaced,
    contents_restored,
)
from lightning_compress.graph.synthesize import Structure, Synthetic, flatten_batch, synthesize, true_ones
from lightning_compress.graph.values import SIZE_READERS, expression, is_symbolic, sizes_by_symbol, symbolic_sizes

_LAYERS_TO_CACHE = 20
"""Fake tensors' cache makes an operation's first run take twice as long, and later ones a third less."""


@dataclass(frozen=True)
class Span:
    """One call of a boundary module: `first` to `last` (inclusive) index its nodes in execution order."""

    name: str
    first: int
    last: int


@dataclass(frozen=True)
class Traced:
    """A model as a graph.

    Attributes:
        graph: nodes are placeholders, `get_attr`, `call_function` (ATen overloads, `operator.*`, `Leaf`) and an output.
            `node.meta["val"]` is the fake value with symbolic sizes.
        spans: calls of boundary modules, in execution order.
        placeholders: key path of each tensor of the flattened batch, in the order of the placeholder nodes.
        constants: tensors the graph names that are neither parameters nor buffers of the root.
        fallbacks: what could not be recorded as asked.
        outputs: key path of each tensor the step returned, in the order of the output node's arguments.
        guards: what has to hold of the sizes for this graph to be the path the model takes, and lines that ask for it.
        decisions: likewise of the values.
        only_read: leaves whose weight is read by other code and which are never called.
        written: buffers that the step writes to.
        draws: the step draws random numbers, in eval mode too.
        unlike_one: sizes of which the step took for granted what does not hold of 1.
        presets: what the step sets on modules before it calls them.
        remembering: leaves that keep something from one of their calls to the next.
    """

    graph: fx.Graph
    spans: tuple[Span, ...]
    placeholders: tuple[str, ...]
    constants: Mapping[str, Tensor]
    fallbacks: tuple[Fallback, ...]
    outputs: tuple[str, ...] = ()
    guards: Mapping[sympy.Basic, str] = field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()
    only_read: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    draws: bool = False
    unlike_one: frozenset[sympy.Basic] = frozenset()
    presets: tuple[Preset, ...] = ()
    remembering: frozenset[str] = frozenset()


def trace(
    root: nn.Module,
    step: Callable[[Any], Any],
    batch: Any,
    *,
    leaf_names: Collection[str],
    boundary_names: Collection[str],
    others: Sequence[Any] = (),
    onloading: Callable[[], AbstractContextManager[None]] | None = None,
    fixed: Fixed = frozenset(),
    multiplied: Collection[str] = (),
    to_the_end: bool = True,
) -> Traced:
    """Record `step(batch)`.

    Args:
        root: owns all parameters and modules.
        step: calls the model, for instance `lambda batch: root(**batch)`.
        batch: a real one, without `attention_mask` where none has padding; traced is one like it (see `synthesize`).
        leaf_names: modules to be recorded as single calls (what is quantized).
        boundary_names: modules whose calls are marked as spans (decoder layers). Nested: the outermost counts.
        others: further batches that the graph has to serve: what sizes of batches with images decide shows in them.
        onloading: within what it gives, modules whose parameters are on the meta device can be run; None: they cannot.
        fixed: (tensor, dimension) whose sizes are constants from the start.
        multiplied: leaves that are Linears, and count as called where code multiplies with their weights.
        to_the_end: False: only to the last call of a leaf that is named (which a real run tells), without outputs.

    Raises:
        UntraceableModelError: not even fallbacks help; names the module and the remedy.
    """
    tensors, structure = flatten_batch(batch)
    others_flat = [flatten_batch(other)[0] for other in others]
    made = partial(synthesize, structure.paths, tensors, separate_decoder=is_encoder_decoder(root), others=others_flat)
    first = cut = replace(first_cut(root, leaf_names, boundary_names), multiplied=frozenset(multiplied))
    lengths, rows = made()[0].lengths, made()[0].rows
    fallbacks, ways, run = dict[str, Fallback](), list[Way](), partial(_run, root, step, structure, onloading)
    with attributes_restored(root), without_cache(root), watching(root, leaf_names) as reads:
        while True:
            batches = made(fixed=fixed)
            true = true_ones(batches[0], tensors, others_flat)
            runs = [partial(run, each) for each in (batches[0].tensors, batches[1].tensors, *true)]
            try:
                cut = with_observations(root, cut, runs, fallbacks, can_run=onloading is not None)
                cut = cut if to_the_end else replace(cut, counted=counted(root, cut.leaves, leaf_names, runs[0]))
                with caches_restored(root):
                    outcome = _attempt(root, step, cut, structure, batches, others_flat or [tensors], true)
                if isinstance(outcome, Traced) and (violated := violated_guards(outcome, batch)) and lengths - fixed:
                    fallbacks[""] = _of_one_size(f"one length only: {violated[0]}")
                    fixed, cut = fixed | lengths, replace(cut, observed={})
                    continue
                if isinstance(outcome, Traced):
                    warn(root, left := in_the_end(cut, fallbacks, leaf_names))
                    return replace(outcome, fallbacks=left, only_read=_only_read(outcome.graph, leaf_names, reads))
                cut, fixed, told = fall_back(root, cut, fixed, outcome, frozenset(leaf_names))
            except UntraceableModelError as error:
                fixed, how = otherwise(error, batches[0], rows, fixed, ways)
                fallbacks = {"": _of_one_size(f"as many rows only: {error.__cause__}")} if rows <= fixed else {}
                cut, made = first, partial(made, **how)
                continue
            fallbacks |= {each.module: each for each in told if each.hidden or each.module not in fallbacks}


def _of_one_size(why: str) -> Fallback:
    return Fallback("", f"the graph serves batches of {why}", how=OF_ONE_SIZE)


def _only_read(graph: fx.Graph, names: Collection[str], reads: Reads) -> tuple[str, ...]:
    """Of leaves those that neither the graph calls nor, as far as was seen, code inside single calls of it."""
    calls = [node.target for node in graph.nodes if isinstance(node.target, Leaf)]
    experts = (members for call in calls if call.grouped is not None for members in call.grouped.members)
    called = {*(call.weights_of for call in calls), *chain.from_iterable(experts)}
    return reads.without_call([name for name in names if name not in called])


def _attempt(
    root: nn.Module,
    step: Callable[[Any], Any],
    cut: Cut,
    structure: Structure,
    batches: tuple[Synthetic, Synthetic],
    real: Sequence[Sequence[Tensor]],
    true: Sequence[Sequence[Tensor]],
) -> Traced | Failure:
    fake_mode = new_fake_mode(cached=len(cut.boundaries) >= _LAYERS_TO_CACHE)
    synthetic, second = batches
    inputs = fake_batch(fake_mode, synthetic.tensors, synthetic.dynamic)
    other = sizes_by_symbol(inputs, second.tensors)
    packed = any(path.endswith("position_ids") for path in structure.paths)
    with attributes_restored(root), compat.traceable_transformers(root, packed_sequences=packed, experts="batched_mm"):
        originals = list(root.parameters())
        recorder = Recorder(replace_by_fakes(root, fake_mode), fake_mode)
        fakes = dict(zip(map(id, originals), root.parameters(), strict=True))  # no `getattr`, which is watched
        kept_elsewhere = substituted(originals, lambda original: fakes[id(original)])
        untouched = [(name, buffer, buffer._version) for name, buffer in root.named_buffers()]
        shapes, decisions = shapes_of(fake_mode), dict[sympy.Basic, Decision]()
        observed = [sizes_by_symbol(inputs, tensors) for tensors in true]
        attempt = Attempt(cut, recorder, Outputs(cut, shapes, symbolic_sizes(inputs), other, observed))
        recorder.before_node = attempt.check_sizes
        shapes.batches = [sizes_by_symbol(inputs, tensors) for tensors in (synthetic.tensors, *real)]
        chosen = partial(decide, recorder, real, decisions) if cut.decides else shapes.decide
        try:
            replaced = calls_replaced({**cut.leaves, **cut.containers}, attempt.wrap)
            methods = methods_replaced(root, cut.methods, attempt.wrap_method)
            with replaced, methods, kept_elsewhere, recording(recorder), assigned(shapes, decide=chosen):
                attempt.kept.begin(cut.leaves.values())
                for path, value in zip(structure.paths, inputs, strict=True):
                    recorder.add_placeholder(path.replace(".", "_") or "batch", value)
                outputs, returned = _returned(step, structure.build(inputs))
                recorder.create_node("output", "output", (recorder.to_argument(tuple(outputs)),), {})
            spans, now = as_calls(recorder.graph, root, cut.multiplied, attempt.spans), set(root.buffers())
            written = tuple(n for n, each, version in untouched if each in now and each._version != version)
        except Exception as error:
            name = attempt.failure[0] if attempt.failure is not None and attempt.failure[1] is error else ""
            return _failure(name, error, inputs, real)
    guards = {each: line for each, line in reversed(shapes.decisions) if each.free_symbols <= other.keys()}
    return Traced(
        recorder.graph,
        _tidy(recorder.graph, spans),
        structure.paths,
        recorder.constants,
        (),
        returned.paths,
        guards,
        tuple(decisions.values()),
        written=written,
        draws=fake_mode.draws,
        unlike_one=frozenset(shapes.unlike_one),
        presets=tuple(attempt.kept.presets),
        remembering=frozenset(attempt.kept.remembering),
    )


def _returned(step: Callable[[Any], Any], batch: Any) -> tuple[list[Tensor], Structure]:
    try:
        return flatten_batch(step(batch))
    except LastCallRecorded:
        return flatten_batch(())


def _tidy(graph: fx.Graph, spans: Sequence[tuple[str, Sequence[fx.Node]]]) -> tuple[Span, ...]:
    """Delete what nobody reads, read sizes right where they arise, and number the spans' nodes."""
    moved: set[fx.Node] = set()
    alive: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        if node.op == "placeholder" or node.users or isinstance(node.target, Leaf) or node.is_impure():
            alive.add(node)
        else:
            graph.erase_node(node)
    last_placeholder = [node for node in graph.nodes if node.op == "placeholder"][-1:]
    for node in list(graph.nodes):
        if node.target in SIZE_READERS:
            # otherwise a large value would be kept, across stages, only to be asked for its size
            source = node.all_input_nodes[0]
            anchor = last_placeholder[0] if source.op == "placeholder" else source
            anchor.append(node)
            moved.add(node)
    order = {node: index for index, node in enumerate(graph.nodes)}
    made = []
    for name, nodes in spans:
        kept = [order[node] for node in nodes if node in alive and node not in moved]
        if kept:
            made.append(Span(name, min(kept), max(kept)))
    return tuple(sorted(made, key=lambda span: span.first))


def _failure(name: str, error: Exception, inputs: Sequence[Tensor], real: Sequence[Sequence[Tensor]]) -> Failure:
    fixed = _dimensions(inputs, error)
    rows = any(dim == 0 and inputs[i].ndim == 2 and not inputs[i].is_floating_point() for i, dim in fixed)
    ragged = any(len({tensors[i].shape[dim] for tensors in real}) > 1 for i, dim in fixed)
    return Failure(name, error, fixed, rows, ragged and not rows)


def _dimensions(inputs: Sequence[Tensor], error: Exception) -> frozenset[tuple[int, int]]:
    found = about_a_size(error)
    symbol = None if found is None else found.symbol
    sizes = [(index, dim, size) for index, tensor in enumerate(inputs) for dim, size in enumerate(tensor.shape)]
    return frozenset((i, d) for i, d, size in sizes if is_symbolic(size) and size.node._expr == symbol)


def _run(
    root: nn.Module,
    step: Callable[[Any], Any],
    structure: Structure,
    onloading: Callable[[], AbstractContextManager[None]] | None,
    tensors: Sequence[Tensor],
) -> None:
    there = (parameter.device for parameter in root.parameters() if not parameter.is_meta)
    device = next(there, torch.device("cpu"))
    with nullcontext() if onloading is None else onloading(), contents_restored(root):
        step(structure.build([tensor.to(device) for tensor in tensors]))


def violated_guards(traced: Traced, batch: Any) -> list[str]:
    """Why the model would take another path on this batch than the recorded one; empty if the graph serves it.

    Sizes of 1 where the trace saw more are fine: recorded operations do not depend on it.
    """
    tensors, structure = flatten_batch(batch)
    if structure.paths != traced.placeholders:
        return [f"its tensors are {', '.join(structure.paths)}, traced were {', '.join(traced.placeholders)}"]
    problems: list[str] = []
    values: dict[sympy.Basic, int] = {}
    inputs = [node.meta["val"] for node in traced.graph.nodes if node.op == "placeholder"]
    for path, tensor, fake in zip(structure.paths, tensors, inputs, strict=True):
        if tensor.ndim != fake.ndim or tensor.dtype != fake.dtype:
            problems.append(f"{path} is {tensor.dtype} in {tensor.ndim} dimensions, not {fake.dtype} in {fake.ndim}")
            continue
        for dim, (size, traced_size) in enumerate(zip(tensor.shape, fake.shape, strict=True)):
            expected = expression(traced_size)
            if values.setdefault(expected, int(expected) if expected.is_number else size) != size:
                problems.append(f"{path}: size {dim} is {size}, not {values[expected]}")
    for guard, line in traced.guards.items():
        if guard.xreplace({symbol: sympy.Integer(size) for symbol, size in values.items()}) == sympy.false:
            problems.append(f"its sizes do not satisfy {guard}{at(line)}")
    if not problems:
        wrong = [decision for decision in traced.decisions if not decision.holds(tensors)]
        problems += [f"by its values {each.condition} is not {each.outcome}" for each in wrong]
    return problems
