"""What an estimate says: for each part of a job, what is where, and what else people would have said."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from lightning_compress.memory.budget import Place


@final
@dataclass(frozen=True)
class Row:
    """A worst moment, in bytes.

    Attributes:
        name: of the part of the job.
        place: whose memory.
        at: where in the model; empty: all of it.
        parts: what it consists of.
        closed_form: what the formulas say of all of it; None: there are none.
    """

    name: str
    place: Place
    parts: Mapping[str, int]
    closed_form: int | None = None
    at: str = ""

    @property
    def total(self) -> int:
        """All parts."""
        return sum(self.parts.values())


@final
@dataclass(frozen=True)
class Estimate:
    """What a job will take, foreseen.

    Attributes:
        model: its class.
        num_parameters: of it.
        job: what it is, in words.
        rows: its worst moments.
        allocated: all of it as PyTorch's CUDA allocator rounds it (`torch.cuda.max_memory_allocated`); None: likewise.
        reserved: what the allocator takes of the device for it; None: not asked, or not known.
        others: what rules of thumb and published formulas say, in bytes.
        notes: what is assumed, as sentences.
    """

    model: str
    num_parameters: int
    job: str
    rows: tuple[Row, ...]
    allocated: int | None
    reserved: int | None
    others: Mapping[str, int]
    notes: tuple[str, ...]

    def peak(self, place: Place) -> int:
        """The most of a place."""
        return max((row.total for row in self.rows if row.place == place), default=0)
