"""What a run tells: one record per module and per subgraph. Plain values only, so that they serialize."""

from collections.abc import Mapping
from dataclasses import dataclass, field

UNREACHED = "No calibration token reached it."
"""A note of modules that were solved without inputs of their own."""


@dataclass(frozen=True)
class ModuleRecord:
    """What happened to one module.

    Attributes:
        error: relative output error, tr(dW C dW^T) / tr(W C W^T) with C the mean Gram matrix of the inputs; without
            statistics the relative squared error of the weights.
        num_tokens: calibration tokens that the statistics saw.
        num_calls: calls of the module in one forward.
        solved_with: the other members of its group.
        damping: fraction of the mean diagonal that was added to the Gram matrix; 0 where there is none.
        bytes_before, bytes_after: of the weight as it was, and packed with its scales and zero points.
        notes: anything the solver did beyond the plain path.
        correction: of errors made before: its `strength` and `ridge`, the error on batches that were held out as a
            fraction of what it is without (`held_out`), and `rounds` of refitting, the mean of the rows, if these were
            chosen too; none where nothing is corrected.
        num_lent: tokens that an expert was lent of those that all experts of its layer saw; None: it is no expert.
    """

    module: str
    subgraph: str
    algorithm: str
    scheme: str
    shape: tuple[int, ...]
    error: float
    num_tokens: int
    num_calls: int
    solved_with: tuple[str, ...]
    damping: float
    bytes_before: int
    bytes_after: int
    notes: tuple[str, ...]
    correction: Mapping[str, float] = field(default_factory=dict)
    num_lent: int | None = None

    @property
    def quantizes_inputs(self) -> bool:
        """Whether the module reads quantized inputs; `error` is of the weights alone."""
        return not self.scheme.partition(" ")[0].endswith("A16")


@dataclass(frozen=True)
class SubgraphRecord:
    """What one subgraph took. Times are wall seconds.

    Attributes:
        onload_s: waiting for its weights.
        run_s, solve_s: its nodes on all batches; its groups, until their results are packed.
        write_s: of its shards, until they are read back and on disk.
        activation_bytes: that wait in memory at its end.
        peak_bytes: of the device (see `memory.tracker.peak_bytes`).
        moved_bytes: through each lane: `disk_read`, `disk_write` (of activations in the file), `to_device`, `to_host`.
    """

    name: str
    index: int
    num_subgraphs: int
    modules: tuple[ModuleRecord, ...]
    num_tokens: int
    onload_s: float
    run_s: float
    solve_s: float
    activation_bytes: int
    peak_bytes: int
    write_s: float = 0.0
    moved_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def mean_error(self) -> float:
        """Mean relative output error of its modules; 0 where it quantizes none."""
        return sum(record.error for record in self.modules) / len(self.modules) if self.modules else 0.0
