"""A plan with what it is for and what it was chosen from; as a file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from lightning_compress.errors import CompressionError, reason
from lightning_compress.foresight.machine import Machine, machine_of
from lightning_compress.foresight.plan import Choice, Foreseen, Plan, Resources
from lightning_compress.memory.budget import gib
from lightning_compress.memory.needs import Waiting
from lightning_compress.recipe.config import Recipe
from lightning_compress.recipe.load import load_recipe

CONTEXT = 600 << 20
"""Bytes of a GPU that its context and workspaces of libraries are assumed to take."""
FRAGMENTED = 0.08
"""What the CUDA allocator is assumed to reserve beyond what tensors take, as a fraction: with segments that expand, as
the command asks for. Those of fixed size need 0.14 to 0.19 (docs/gpu.md)."""


def tensors_on(card_bytes: int) -> int:
    """What tensors may take of a GPU's memory."""
    return max(0, int((card_bytes - CONTEXT) / (1 + FRAGMENTED)))


def card_for(tensor_bytes: int) -> int:
    """The memory of a GPU on which tensors may take so much."""
    return int(tensor_bytes * (1 + FRAGMENTED)) + 2 + CONTEXT  # never less, however it is rounded


def device_to_give(tensor_bytes: int) -> str:
    """What a user gives for the device so that tensors may take so much: a card, of which not all is for tensors."""
    card = card_for(tensor_bytes)
    return f"device={card} ({gib(card)} card, {gib(tensor_bytes)} of it for tensors)"


@final
@dataclass(frozen=True)
class Situation:
    """What a plan is for.

    Attributes:
        recipe: to be run.
        num_samples, max_length: of the calibration set; every sample is taken to be full.
        num_images, image_size: in each sample, as of `CalibrationJob`.
        ranks: processes that share the batches.
        nodes: that they are spread over evenly.
        verify: the checkpoint of a model in memory is loaded a second time at the end.
        device: bytes that tensors of a rank may take of it; None: no limit.
        host, disk: bytes that there are for all ranks of a node together; None: no limit.
        budgets: those of the three that the user gave, which the run shall keep; the others are what there is.
    """

    recipe: Recipe
    num_samples: int
    max_length: int
    ranks: int = 1
    nodes: int = 1
    verify: bool = True
    device: int | None = None
    host: int | None = None
    disk: int | None = None
    budgets: tuple[str, ...] = ()
    num_images: int = 0
    image_size: Sequence[int] | None = None

    @property
    def together(self) -> int:
        """Ranks on a node, which share its memory and its disk."""
        return self.ranks // self.nodes

    @property
    def resources(self) -> Resources:
        """Of one rank."""
        host = None if self.host is None else self.host // self.together
        return Resources(self.device, host, self.disk, self.together)


@final
@dataclass(frozen=True)
class Planned:
    """A plan with what it was chosen from.

    Attributes:
        model: class of the model.
        num_parameters, dtype: of it.
        machine: whose rates were used.
        best: the plan.
        runners_up: the best plans of other choices, the fastest first.
        saved_s: seconds that one GiB more of each place would save, whatever is chosen then: of every rank's device, of
            a node's memory, of its disk.
        num_candidates, num_fitting: how many ways to run were looked at, and fit.
        situation: what it is for.
        planning_s: how long planning took.
    """

    model: str
    num_parameters: int
    dtype: str
    machine: Machine
    best: Plan
    runners_up: tuple[Plan, ...]
    saved_s: dict[str, float]
    num_candidates: int
    num_fitting: int
    situation: Situation
    planning_s: float


def save_planned(planned: Planned, file: Path) -> None:
    """Write it as JSON.

    Raises:
        OSError: it cannot be written.
    """
    situation = {**asdict(planned.situation), "recipe": planned.situation.recipe.to_dict()}
    file.write_text(json.dumps({**asdict(planned), "situation": situation}, indent=2) + "\n", encoding="utf-8")


def load_planned(file: Path) -> Planned:
    """What `save_planned` wrote.

    Raises:
        CompressionError: there is no such file, or it is something else.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if other := next((job for key, job in _OTHERS.items() if key in found), None):
            raise ValueError(f"it is one of {other}")
        situation = {**found["situation"], "recipe": load_recipe(found["situation"]["recipe"])}
        situation["budgets"] = tuple(situation["budgets"])
        if wrong := {name: situation[name] for name in ("device", "host", "disk") if _is_no_size(situation[name])}:
            raise ValueError(f"its situation has {wrong}, which are to be bytes")
        return Planned(
            **{
                **found,
                "machine": machine_of(found["machine"]),
                "best": plan_of(found["best"]),
                "runners_up": tuple(plan_of(plan) for plan in found["runners_up"]),
                "situation": Situation(**situation),
            }
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CompressionError(
            f"plan={file} is no plan of a compression: {reason(error)}. Make one with "
            "`lightning-compress plan ... json=FILE`, or use plan=auto."
        ) from error


_OTHERS = {"itemsize": "fine-tuning (job=finetuning)", "hardware": "text generation (job=inference)"}
"""What files of other plans are of, by a key that they alone have."""


def _is_no_size(value: object) -> bool:
    return value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0)


def plan_of(found: Mapping[str, Any]) -> Plan:
    """A plan from plain data."""
    choice, targets = found["choice"], found["choice"]["sequential_targets"]
    return Plan(
        **{
            **found,
            "choice": Choice(**{**choice, "sequential_targets": None if targets is None else tuple(targets)}),
            "waiting": Waiting(**found["waiting"]),
            "subgraphs": tuple(Foreseen(**part) for part in found["subgraphs"]),
        }
    )
