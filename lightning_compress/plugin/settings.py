"""What a user chose for a compression."""

from dataclasses import dataclass, field
from numbers import Integral
from os import PathLike
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from lightning_compress.errors import CompressionError
from lightning_compress.export.checkpoint import SavesPretrained
from lightning_compress.export.processors import load_processor
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
        """
        Raises:
            CompressionError: a value of another kind, such as configuration files give.
        """
        check_number("expert_parts", self.expert_parts, 1)
        for name in ("verify", "resume", "keep_activations"):
            if not isinstance(getattr(self, name), bool):
                raise CompressionError(f"{name}={getattr(self, name)!r} is neither True nor False.")
        if self.tokenizer is not None and not callable(getattr(self.tokenizer, "save_pretrained", None)):
            raise CompressionError(
                f"tokenizer={self.tokenizer!r} has no `save_pretrained`: give the tokenizer or processor itself, as "
                "from AutoTokenizer.from_pretrained(...)."
            )


def as_folder(name: str, given: object) -> Path | None:
    """A folder that may be given as text.

    Raises:
        CompressionError: it is neither, or nothing: as a path that would be the folder one is in.
    """
    if given == MISSING:  # a default other than None, for which jsonargparse takes an argument that is null as left out
        raise CompressionError(f"{name} has to be given: a folder; or None, which changes the module in memory only.")
    if given is not None and (not isinstance(given, str | PathLike) or given == ""):
        raise CompressionError(f"{name}={given!r} is no path.")
    return None if given is None else Path(given)


def as_processor(given: object) -> Any:
    """A tokenizer or processor that may be given as the folder that it is in, as configuration files do.

    Raises:
        CompressionError: there is no such folder, or none in it.
    """
    if not isinstance(given, str | PathLike):
        return given
    if not Path(given).is_dir():
        raise CompressionError(
            f"tokenizer={str(given)!r} is no folder: give one, or the tokenizer or processor itself, as from "
            "AutoTokenizer.from_pretrained(...)."
        )
    try:
        return load_processor(given)
    except (OSError, ValueError, ImportError, TypeError) as error:
        raise CompressionError(f"tokenizer={str(given)!r} cannot be loaded: {error}") from error


def check_number(name: str, given: object, least: int, most: int | None = None) -> None:
    """
    Raises:
        CompressionError: it is given, and no whole number of at least `least`, and at most `most`.
    """
    if given is not None and (isinstance(given, bool) or not isinstance(given, Integral) or given < least):
        raise CompressionError(f"{name}={given!r} is no whole number of at least {least}.")
    if most is not None and isinstance(given, Integral) and int(given) > most:
        raise CompressionError(f"{name}={given!r} is more than {most}.")
