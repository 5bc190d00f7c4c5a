"""What a run will need of memory, subgraph by subgraph, before any work: the table that `memory.budget` fits.

Method: the run's own code, `flow.run_step`, runs on fake tensors of the largest batch, while every storage is followed:
batches, and statistics with them, are what the same code takes on real tensors. Solving looks at values, so its part is
the closed form that each algorithm states (`Algorithm.workspace_bytes`); packing's is a constant of compressed-tensors
per weight. Values of the other batches are those of the largest, in the ratio of their sizes.

A module that cannot run on fake tensors because it reads values (a loop over experts) is given an allowance: float32
copies of its inputs and outputs, and per token twice the wide side of each of its matrices, of layers in a list those
of the widest (`stand_ins`). That is more than they take at sizes that matter; scores that attention inside it would
write down, token by token, it does not cover.

Sizes that follow from values (tokens that a mask chooses, numbers of patches) are computed on each batch itself, as far
as no weights are needed for them; a mask of activations is taken to choose all, a number read from them is refused. The
largest batch is the one with the most numbers in it: another one, of which values choose more, may take more.

Layers that are alike are run once: the rows of the others are those of the first (see `repeats`).

Alternative not taken: adding up sizes of the graph's values. Half of what a norm takes happens inside it, and views and
in-place writes have to be told from copies.
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import sympy
import torch
from torch import Tensor, fx

from lightning_compress.algorithms.base import result_bytes
from lightning_compress.algorithms.tiling import tiling_of
from lightning_compress.calibration import amounts
from lightning_compress.calibration.batches import num_elements
from lightning_compress.calibration.flow import Values, run_step
from lightning_compress.calibration.layout import stored_bytes
from lightning_compress.calibration.loop import Calibration
from lightning_compress.calibration.observe import Statistics, begin_statistics, observing
from lightning_compress.calibration.reference import differences
from lightning_compress.calibration.repeats import of_another, one_of_each, repeated, structures, widths
from lightning_compress.calibration.solve import bytes_together, stacked_groups, stacked_shape
from lightning_compress.calibration.stand_ins import LikeQuantizing, failures_allowed
from lightning_compress.errors import BudgetError
from lightning_compress.graph.buffers import KeptBuffers
from lightning_compress.graph.cuda import AsOnCuda
from lightning_compress.graph.fakes import fake_like, new_fake_mode, replace_by_fakes
from lightning_compress.graph.leaf import leaf_input
from lightning_compress.graph.names import weight_of
from lightning_compress.graph.restore import attributes_restored, caches_restored
from lightning_compress.graph.shadow import Key, Shadow, node_of, with_shadows
from lightning_compress.graph.shared_inputs import Group, Source
from lightning_compress.graph.sizes import binding, traced_bytes
from lightning_compress.graph.stages import Step, Subgraph
from lightning_compress.memory.activations import LEAST_SPILLED, ActivationCache
from lightning_compress.memory.heap import LARGEST_IN_HEAP
from lightning_compress.memory.needs import Held, Moment, Needs, Requests, as_one
from lightning_compress.memory.tracker import LiveMemory
from lightning_compress.memory.work import Work, WorkMeter, times

PACKING = 16
"""Bytes per weight that compressed-tensors has alive while it packs one module, its result included (0.19 and 0.20)."""
_CPU = torch.device("cpu")


def footprint(run: Calibration, batches: Sequence[Sequence[Tensor]]) -> tuple[Needs, ...]:
    """The table of a prepared run; changes nothing.

    Args:
        run: what will be done.
        batches: the tensors of each batch, in the order of the graph's placeholders; none where nothing runs.
    """
    meter = _Meter(run, batches)
    rows: list[Needs] = []
    with meter.on_fakes():
        for index, subgraph in enumerate(run.flow.subgraphs):
            if index < len(rows):
                continue
            if width := meter.repeats(index):
                for row, later in zip(rows[-width:], run.flow.subgraphs[index:], strict=False):
                    rows.append(of_another(row, later, meter.brought(later)))
                continue
            moments: list[Moment] = []
            packed = 0
            for number, step in run.flow.steps(index):
                moments += meter.run(step, number, packed)
                together = bytes_together(step.solve, run.flow.root) if run.collective.size > 1 else 0
                held = meter.held()
                solves: list[Moment] = []
                for groups in stacked_groups(step.solve, run.flow.root, run.resolved, tiling_of(run.flow.device)):
                    solve, size = meter.solve(groups, packed, together, held)
                    solves.append(solve)
                    packed += size
                    for group in groups:
                        meter.keep(group, index)
                moments += as_one(solves)
                meter.forget(step)
            moments.append(meter.write(index, packed))
            meter.forget_originals(index)
            rows.append(Needs(subgraph.name, meter.brought(subgraph), tuple(moments), meter.requests(subgraph)))
    return tuple(rows)


class _Meter:
    """Follows the run on fake tensors; one subgraph after the other, step by step."""

    def __init__(self, run: Calibration, batches: Sequence[Sequence[Tensor]]) -> None:
        self._run, self._flow = run, run.flow
        self._root = run.flow.root
        self._structure = structures(self._root)
        away_bytes, parts = run.flow.store.away_bytes, run.flow.subgraphs
        self._brought = {part.name: away_bytes(part.modules, part.tensors) for part in parts}
        self._stored = stored_bytes(self._root, parts, run.resolved)
        self._statistics: Statistics = {}
        self._memory = LiveMemory(on_cuda=run.flow.device.type == "cuda")
        self._largest = max(batches, key=num_elements, default=())
        self._numbers = [num_elements(batch) for batch in batches]
        self._sizes: list[Mapping[sympy.Symbol, int | float]] = []
        if run.flow.traced is not None:
            bind = binding(run.flow.traced)
            self._sizes = [bind(batch) for batch in batches]
            self._sizes_of_largest = bind(self._largest)
        self._num_cached = 0  # bytes of the batch's values that wait now
        self._starts: dict[int, set[Key]] = {}  # what waits when a subgraph begins
        self._work = WorkMeter(on_cpu=self._is_on_cpu)
        self._loaded: list[tuple[int, ...]] = []  # bytes of the values that each step reads
        self._num_events = 0  # of earlier subgraphs

    @contextmanager
    def on_fakes(self) -> Iterator[None]:
        """Within: the model has fake parameters, and the largest batch waits in a cache of its own."""
        traced = self._run.flow.traced
        if traced is None:
            yield
            return
        mode = new_fake_mode(symbolic=False)
        placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
        inputs = [fake_like(mode, tensor) for tensor in self._largest]
        known: dict[Key, object] = dict(zip(placeholders, inputs, strict=True))
        reference = replace(self._run.flow.reference, originals={})
        known.update({Shadow(node): known[node] for node in placeholders if node in reference.diverging})
        cache = ActivationCache([known], device=_CPU, rewritten=self._run.flow.cache.rewritten)
        buffers = KeptBuffers(self._root, ())  # they have no values to keep
        given = replace(self._run.flow, cache=cache, masks={}, reference=reference, buffers=buffers)
        self._flow = replace(given, placement=replace(given.placement, device=_CPU))
        with attributes_restored(self._root), caches_restored(self._root):
            replace_by_fakes(self._root, mode)
            self._memory.ignore(*self._root.parameters(), *self._root.buffers(), *inputs)
            allowing = failures_allowed(self._root, traced.graph, self._sizes_of_largest)
            there = AsOnCuda() if self._run.flow.device.type == "cuda" else nullcontext()
            with allowing, torch.no_grad(), mode, self._memory, self._work, there:
                yield

    def run(self, step: Step, number: int, packed: int) -> list[Moment]:
        """The moment of the step's largest batch, beside all others that wait and `packed` bytes of the subgraph."""
        if self._flow.traced is None or not (step.nodes or step.observe):
            return []
        before, cached, in_heap = self._waiting(), self.cached, self._part_in_heap()
        read = {node for computed in step.nodes for node in computed.all_input_nodes}
        observed = {node for source in step.observe for node in source.reads}
        observed |= self._flow.reference.residual_nodes(step.observe)
        _, loaded = self._flow.cache.sizes(0, cached & with_shadows(read | observed, self._diverging))
        self._loaded.append(tuple(loaded))
        self._memory.reset_peak()
        try:
            begin_statistics(step.observe, self._run.needs, self._run.sizes, _CPU, self._statistics)
            self._work.work.clear()
            deque(run_step(self._flow, step, number, self._watch), maxlen=0)
        except Exception as error:
            first = step.nodes[0] if step.nodes else step.observe[0].node
            raise BudgetError(
                f"What {first.name} and what follows it will take cannot be foreseen, so no budget can be "
                f"promised: {type(error).__name__}: {error}. Leave host_budget and device_budget out; "
                "activation_budget and prefetch_depth work without them."
            ) from error
        peak, gathered = self._memory.peak_bytes, self._statistics.values()
        statistics = amounts.statistics_bytes(gathered)
        heap_batch = self._memory.heap_peak_bytes - amounts.statistics_bytes(gathered, below=LARGEST_IN_HEAP)
        self._num_cached = self._memory.live_bytes - statistics
        for value in amounts.storages(self._flow.cache.load(0, self.cached)):
            self._memory.moved_away(value)
        after = self._waiting()
        self._quantize_inputs(step)
        large, small = (amounts.worst_mixture(earlier, later) for earlier, later in zip(before, after, strict=True))
        in_flight = max(before[0], default=0) + max(after[0], default=0)
        workspace, on_host = self._places(self._originals, packed)
        return [
            Moment(
                "batch",
                waiting=large,
                fixed=small,
                in_flight=in_flight,
                batch=peak - statistics,
                statistics=statistics,
                workspace=workspace,
                on_host=on_host,
                work=self._work_of_all(step),
                loaded=self._moved(cached & with_shadows(read | observed, self._diverging)),
                stored=self._moved(self.cached - cached),
                heap_waiting=round(large * max(in_heap, self._part_in_heap())) if self._is_on_cpu else 0,
                heap_batch=heap_batch if self._is_on_cpu else 0,
                num_batches=len(self._numbers),
            )
        ]

    def _work_of_all(self, step: Step) -> Work:
        """The work of all batches, that of the largest being known; the others' is in the ratio of their sizes."""
        ratio = sum(self._numbers) / max(num_elements(self._largest), 1)
        calls = self._work.work["call"] + (0 if self._is_on_cpu else amounts.calls_beside_batch(step))
        return {**times(self._work.work, ratio), "call": calls * len(self._numbers)}

    @property
    def _diverging(self) -> frozenset[fx.Node]:
        return self._flow.reference.diverging

    @property
    def _originals(self) -> int:
        """Bytes of original weights that are kept beside the quantized ones."""
        return sum(weight.nbytes for weight in self._flow.reference.originals.values())

    def _places(self, workspace: int, on_host: int) -> tuple[int, int]:
        """What a moment has where it computes and what in host memory apart from that, which on a CPU is one place."""
        return (workspace + on_host, 0) if self._is_on_cpu else (workspace, on_host)

    @property
    def _is_on_cpu(self) -> bool:
        return self._run.flow.device.type == "cpu"

    def _part_in_heap(self) -> float:
        """Of what waits of the batch, how much is in the C heap."""
        _, sizes = self._flow.cache.sizes(0, self.cached)
        return sum(size for size in sizes if size < LARGEST_IN_HEAP) / max(sum(sizes), 1)

    def _moved(self, keys: Set[Key]) -> int:
        """Bytes of these values, of all batches, that may go to the file."""
        nodes = [node for node in map(node_of, keys) if node.op != "placeholder"]
        found = [traced_bytes(node, sizes) for sizes in self._sizes for node in nodes]
        return sum(size for size in found if size >= LEAST_SPILLED)

    @property
    def cached(self) -> set[Key]:
        """What waits now."""
        return set() if self._flow.traced is None else self._flow.cache.keys(0)

    def repeats(self, index: int) -> int:
        """How many subgraphs from `index` on are as those before them; then all is as behind them. 0: none."""
        self._starts[index] = self.cached
        if self._statistics or self._originals or self._flow.traced is None:
            return 0
        for width in widths(self._run.flow.subgraphs, index):
            before = self._starts.get(index - width)
            nodes = None if before is None else repeated(self._run, index, width, before, self._structure)
            if before is not None and nodes is not None and self.cached == {nodes.get(node, node) for node in before}:
                self._flow.cache.rename(0, nodes)
                return width
        return 0

    def held(self) -> Held:
        """What is there whatever is done with it."""
        large, small = (sum(sizes) for sizes in self._waiting())
        return Held(large, small, amounts.statistics_bytes(self._statistics.values()))

    def solve(self, groups: Sequence[Group], packed: int, together: int, held: Held) -> tuple[Moment, int]:
        """The moment at which groups of one kind are solved together or packed, with `packed` bytes there already and
        `together` of other groups' results, and how many they add."""
        group, number = groups[0], len(groups)
        assignment = self._run.resolved.assignments[group.members[0]]
        weights = [weight_of(self._root, name) for name in group.members]
        num_rows, num_channels = stacked_shape(group, self._root)
        gathered = [self._statistics[source] for source in group.sources if source in self._statistics]
        kinds = {kind for found in gathered for kind in found}
        tiling, args = tiling_of(self._run.flow.device), assignment.weights
        workspace = assignment.algorithm.workspace_bytes(num_rows, num_channels, args, kinds, tiling, number)
        merged = number * amounts.statistics_bytes(gathered[:1]) if len(gathered) > 1 else 0
        if any(source.rows is not None or source.inner for source in group.sources):
            merged += 4 * num_channels**2  # what experts that saw few tokens are lent
        stacked = number * num_rows * num_channels * weights[0].itemsize
        results = number * result_bytes(num_rows, num_channels, assignment.weights)
        added = results - number * num_rows * num_channels * (8 - assignment.weights.num_bits) // 8
        packing, beside = PACKING * max(weight.numel() for weight in weights), added if self._is_on_cpu else 0
        most = together + self._originals + merged + max(stacked + workspace, results + beside + packing)
        workspace_there, on_host = self._places(most, packed + added - beside)
        piece = 4 * num_channels * max(num_channels, min(number * num_rows, tiling.stack_rows(num_channels)))
        self._memory.stands_for([merged, stacked, *amounts.in_pieces(workspace, piece)])
        self._memory.stands_for([results + added, *amounts.in_pieces(packing, packing // PACKING * 4)])
        size = self._run.collective.size
        work = amounts.work_of_solves(assignment.algorithm, num_rows, num_channels, tiling, number, len(weights), size)
        on_cpu = {"solve": work["product float32"], "packing": work["packing"]}
        moment = Moment(
            "solve",
            ", ".join(name for group in groups for name in group.members),
            waiting=held.waiting,
            fixed=held.fixed,
            statistics=held.statistics,
            workspace=workspace_there,
            on_host=on_host,
            work=on_cpu if self._is_on_cpu else work,
        )
        return moment, added

    def write(self, index: int, packed: int) -> Moment:
        """The moment at which a subgraph's shard, with `packed` bytes of modules, is read back tensor by tensor."""
        subgraph = self._run.flow.subgraphs[index]
        held, tensors = self.held(), amounts.tensors_of(self._root, subgraph)
        solved = {f"{name}.weight" for name in subgraph.solved}
        kept = [tensor.nbytes for name, tensor in tensors.items() if name not in solved]
        copied = 0 if self._is_on_cpu else sum(kept)
        workspace, on_host = self._places(self._originals, 2 * packed + copied + max(kept, default=0))
        return Moment(
            "write",
            waiting=held.waiting,
            fixed=held.fixed,
            statistics=held.statistics,
            workspace=workspace,
            on_host=on_host,
            work=amounts.work_of_writing(self._stored[index], len(solved), self._run.collective.size),
        )

    def requests(self, subgraph: Subgraph) -> Requests:
        """Those since the last subgraph."""
        weights = tuple(tensor.nbytes for tensor in amounts.tensors_of(self._root, subgraph).values())
        found = Requests(weights, tuple(self._loaded), tuple(self._memory.events[self._num_events :]))
        self._loaded, self._num_events = [], len(self._memory.events)
        return found

    def keep(self, group: Group, index: int) -> None:
        """As the run does with the weights of a group that is solved in subgraph `index`; here they are not changed."""
        reference = self._flow.reference
        for name in group.members:
            if reference.last_calls.get(name, -1) >= index:
                reference.originals[name] = weight_of(self._root, name).detach()

    def forget_originals(self, index: int) -> None:
        """As the run does behind subgraph `index`."""
        self._flow.reference.forget(index)

    def forget(self, step: Step) -> None:
        """As the run does, when a step's groups are solved."""
        for source in step.forget:
            self._statistics.pop(source, None)

    def brought(self, subgraph: Subgraph) -> int:
        """Bytes of the weights that are not where they are used."""
        return self._brought[subgraph.name]

    def _waiting(self) -> tuple[list[int], list[int]]:
        """For each batch the bytes of the values that wait now: of those that may go to the file, and of small ones.

        Views keep the whole storage that they are of, which only the live bytes tell.
        """
        if self._flow.traced is None:
            return [], []
        values, _ = self._flow.cache.sizes(0, self._flow.last.keys())
        cached = {key: sizes for key, sizes in values.items() if node_of(key).op != "placeholder"}
        leaves = [size for sizes in cached.values() for size in sizes]
        if not leaves:
            return [0] * len(self._sizes), [0] * len(self._sizes)
        small = sum(size for size in leaves if size < LEAST_SPILLED) / sum(leaves)
        known: dict[tuple[object, ...], int] = {}
        totals = []
        for sizes in self._sizes:
            key = tuple(sizes.values())
            if key not in known:
                known[key] = sum(traced_bytes(node_of(each), sizes) for each in cached)
            totals.append(known[key] * self._num_cached / max(sum(leaves), 1))
        return [round(total * (1 - small)) for total in totals], [round(total * small) for total in totals]

    @contextmanager
    def _watch(self, batch: int, sources: Sequence[Source], values: Values) -> Iterator[None]:
        """Gather statistics; where a mask leaves padding out, the other tokens are copied."""
        run = self._run
        masked = [
            traced_bytes(leaf_input(source.node) if source.inner else source.node, self._sizes_of_largest)
            for source in sources
            if source in run.flow.masks
        ]
        beside = partial(differences, values=values, root=self._root, reference=self._flow.reference)
        others = [source for source in sources if source.rows is None]
        with observing(self._root, others, values, {}, self._statistics, beside):
            copied = torch.empty(max(masked, default=0), dtype=torch.uint8)
            yield
        for source, number in one_of_each(sources, values):
            before = Counter(self._work.work)
            with observing(self._root, [source], values, {}, self._statistics, beside):
                pass
            self._work.work.update(times(self._work.work - before, number - 1))
        del copied

    def _quantize_inputs(self, step: Step) -> None:
        """What is solved computes with quantized inputs from then on."""
        for name in (name for group in step.solve for name in group.members):
            if (inputs := self._run.resolved.assignments[name].scheme.input_activations) is not None:
                hook = LikeQuantizing(torch.ones(2, dtype=torch.float32), inputs)
                self._root.get_submodule(name).register_forward_pre_hook(hook)
