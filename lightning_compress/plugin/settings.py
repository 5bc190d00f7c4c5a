"""What a user chose for a compression."""

from dataclasses import dataclass, field
from pathlib import Path

from lightning_compress.errors import CompressionError
from lightning_compress.export.checkpoint import SavesPretrained
from lightning_compress.graph.stages import Schedule
from lightning_compress.memory.placement import MemoryConfig
from lightning_compress.recipe.config import Recipe


@dataclass(frozen=True)
class Settings:
    """What a user chose, apart from the model and the data.

    Attributes:
        output_dir: where the checkpoint goes; None quantizes the model in memory only.
        weights: folder or checkpoint that the values of parameters on the meta device are read from.
        sequential_targets: what is onloaded at a time; None takes the model's layers.
        expert_parts: in how many parts the experts of a layer are onloaded and solved, one after the other; None: one,
            or as many as budgets demand.
        memory: budgets, and what waits where.
        verify: read the checkpoint back and compare.
        resume: continue an interrupted run that is the same, if `output_dir` holds one.
        keep_activations: write them to `output_dir` after each subgraph, for that.
    """

    recipe: Recipe
    output_dir: Path | None
    weights: Path | None = None
    schedule: Schedule = Schedule.STAGED
    sequential_targets: tuple[str, ...] | None = None
    expert_parts: int | None = None
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    verify: bool = True
    resume: bool = True
    keep_activations: bool = False
    tokenizer: SavesPretrained | None = None

    def __post_init__(self) -> None:
        parts = self.expert_parts
        if parts is not None and (type(parts) is not int or parts < 1):
            raise CompressionError(f"expert_parts={parts!r} is no number of at least 1.")
