"""A compression that runs a plan: a file's, or one that is made for it.

The first rank reads or makes it, from what all of them say that there is, and the others get it: made by each for
itself, plans could differ by what is free at that moment. For the same reason the plan is kept in the output folder
until the run is finished: one that continues it follows that.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast, final

import lightning.pytorch as pl
import torch
from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedModel

from lightning_compress.calibration.resume import replacing
from lightning_compress.command.chosen import CHOICES, chosen_keys
from lightning_compress.command.models import load_config_only, memory_options
from lightning_compress.command.plan import Choices, machine_for, plan_calibration
from lightning_compress.command.planning import choices_left, max_length, plain, plain_value
from lightning_compress.data.config import CustomConfig
from lightning_compress.distributed.collective import Collective
from lightning_compress.distributed.folder import shared_folder
from lightning_compress.errors import CompressionError, OutputDirectoryError
from lightning_compress.export.checkpoint import PLAN, is_unfinished
from lightning_compress.export.claim import claimed
from lightning_compress.foresight.plan import Plan
from lightning_compress.foresight.planned import Planned, Situation, load_planned, save_planned, tensors_on
from lightning_compress.memory.files import free_bytes, has_safetensors
from lightning_compress.memory.host import available_bytes, free_on
from lightning_compress.memory.placement import FORESEEN
from lightning_compress.memory.tracker import resident_bytes
from lightning_compress.memory.workspaces import cublas_workspace_bytes
from lightning_compress.plugin.beforehand import check_ranks
from lightning_compress.recipe.load import load_recipe


@final
@dataclass(frozen=True)
class Rank:
    """What a rank finds where it runs, and may choose from.

    Attributes:
        kind: of its device.
        device: bytes that tensors may take of that; None: of a CPU, which has no memory apart.
        host: bytes that all ranks of its node may take together.
        disk: bytes that are free for the checkpoint.
        choices: what the command leaves open, and is possible there.
    """

    kind: str
    device: int | None
    host: int
    disk: int
    choices: Choices


def plan_for_run(
    config: DictConfig, trainer: pl.Trainer, device: torch.device, output_dir: Path, ranks: Collective
) -> Planned:
    """The plan that a compression is to follow, the same on all ranks.

    Raises:
        CompressionError: a file that is for something else; ranks that differ; nothing fits.
    """
    if trainer.world_size > 1:
        check_ranks(trainer)
    model = load_config_only(config.model)
    given = chosen_keys(config)
    begun = _begun(config, output_dir, ranks)
    if begun is not None:
        config = cast(DictConfig, OmegaConf.merge(config, {"plan": str(output_dir / PLAN)}))
    of_ranks: list[Rank] = []
    if config.plan == "auto":
        of_ranks = ranks.gather(_rank(config, trainer, device, output_dir, given), "comparing the ranks")
        _check_alike(of_ranks)
    planned: Planned | CompressionError | None = begun
    if ranks.rank == 0 and begun is None:
        try:
            planned = _found(config, trainer, model, of_ranks, output_dir)
        except CompressionError as error:
            planned = error  # for all to say, as what it is
    planned = ranks.broadcast(planned, f"waiting for rank 0's plan={config.plan}")
    if not isinstance(planned, Planned):
        assert planned is not None
        raise planned
    _check_same(config, planned, model, device, trainer)
    if config.plan != "auto":
        _check_given(config, planned, given)
    ranks.meet("comparing the plan and the command")  # nobody begins what another one refuses
    return planned


def _begun(config: DictConfig, output_dir: Path, ranks: Collective) -> Planned | None:
    """The plan of the interrupted run that a new one would continue, from the first rank that has it."""
    continues = config.plan == "auto" and config.calibration.resume != "never" and is_unfinished(output_dir)
    here = load_planned(output_dir / PLAN) if continues and (output_dir / PLAN).is_file() else None
    found = next(filter(None, ranks.gather(here, "looking for the plan of the run that is continued")), None)
    if found is not None and ranks.rank == 0:
        print(f"{output_dir} holds an unfinished run, which is continued by its own plan ({PLAN} there)")
    return found


def keep_plan(planned: Planned, output_dir: Path, ranks: Collective) -> None:
    """Write it into the output folder, on every disk that has one, when no other run writes there, whose plan it would
    replace.

    Raises:
        OutputDirectoryError: the folder is not ours, or another run's all the time, or cannot be written to.
    """
    with claimed(output_dir, ranks):
        if shared_folder(output_dir, ranks).is_first:
            try:
                with replacing(output_dir / PLAN) as partial:
                    save_planned(planned, partial)
            except OSError as error:
                raise OutputDirectoryError(f"{output_dir / PLAN} cannot be written: {error}") from error
        ranks.meet("keeping the plan")  # while the folder is ours


def _found(
    config: DictConfig, trainer: pl.Trainer, model: PreTrainedModel, of_ranks: Sequence[Rank], output_dir: Path
) -> Planned:
    """The file's plan, or a new one."""
    if config.plan != "auto":
        planned = load_planned(Path(config.plan))
        _check_plan(config.plan, planned.best)
        return planned
    situation, choices = _situation(config, trainer, of_ranks), _possible(of_ranks)
    return plan_calibration(model, situation, choices, machine_for(None, of_ranks[0].kind, output_dir))


def _rank(config: DictConfig, trainer: pl.Trainer, device: torch.device, output_dir: Path, given: Set[str]) -> Rank:
    memory, here = memory_options(config.memory), trainer.world_size // trainer.num_nodes
    on_device = memory.num_bytes("device_budget", device) if device.type == "cuda" else None
    if on_device is not None:
        on_device = max(on_device - cublas_workspace_bytes(device), 0)
    elif device.type == "cuda":
        on_device = tensors_on(free_on(device))
    budget = memory.num_bytes("host_budget", device)
    choices = _choices_left(config, given)
    if len(choices.load) > 1 and not has_safetensors(Path(config.model.path)):
        choices = replace(choices, load=("memory",))  # of other files, or of a name on the Hub
    return Rank(
        kind=device.type,
        device=on_device,
        host=available_bytes() + here * resident_bytes() if budget is None else here * budget,
        disk=free_bytes(output_dir),
        choices=choices,
    )


def _check_alike(of_ranks: Sequence[Rank]) -> None:
    """What a plan is for may differ in sizes only."""
    for number, rank in enumerate(of_ranks):
        here, there = ((each.kind, replace(each.choices, load=("disk",))) for each in (rank, of_ranks[0]))
        if here != there:
            raise CompressionError(
                f"plan=auto: rank {number} runs on {rank.kind} and may choose from {rank.choices}, and rank 0 on "
                f"{of_ranks[0].kind} from {of_ranks[0].choices}. Every rank has to be given the same."
            )


def _possible(of_ranks: Sequence[Rank]) -> Choices:
    """What all ranks may choose."""
    choices = of_ranks[0].choices
    load = tuple(way for way in choices.load if all(way in rank.choices.load for rank in of_ranks))
    if not load:
        raise CompressionError(
            "plan=auto: some ranks find no safetensors files in model.path, so they can read weights into memory only, "
            "and others are to read them from disk."
        )
    return replace(choices, load=load)


def _situation(config: DictConfig, trainer: pl.Trainer, of_ranks: Sequence[Rank]) -> Situation:
    """What the plan is for, with the least that there is on any rank."""
    on_devices = [rank.device for rank in of_ranks if rank.device is not None]
    return Situation(
        recipe=load_recipe(plain(config.recipe)),
        num_samples=config.data.num_samples,
        max_length=max_length(config),
        ranks=trainer.world_size,
        nodes=trainer.num_nodes,
        verify=config.calibration.verify,
        device=min(on_devices, default=None),
        host=min(rank.host for rank in of_ranks),
        disk=min(rank.disk for rank in of_ranks),
    )


def _check_plan(file: str, plan: Plan) -> None:
    """A file may have been edited."""
    choice, budgets = plan.choice, (plan.waiting.device, plan.waiting.host)
    if any(size is not None and (type(size) is not int or size < 0) for size in budgets):
        raise CompressionError(f"plan={file}: waiting.device={budgets[0]} and waiting.host={budgets[1]} are no bytes.")
    names = ("batch_size", "schedule", "prefetch_depth", "load", "expert_parts")
    try:
        Choices(**{name: (getattr(choice, name),) for name in names})
    except CompressionError as error:
        raise CompressionError(f"plan={file}: {error}") from error


def with_plan(config: DictConfig, planned: Planned) -> DictConfig:
    """The configuration that runs a plan, within the budgets that were given for it unless it has its own; on a CPU
    without any, near the host memory that is foreseen."""
    choice, waiting = planned.best.choice, planned.best.waiting
    given = {f"{place}_budget": getattr(planned.situation.resources, place) for place in planned.situation.budgets}
    if given.get("device_budget") is not None:  # which counts them, as a plan does with what else a card has to hold
        given["device_budget"] += cublas_workspace_bytes(torch.device(planned.machine.device))
    if planned.machine.device == "cpu":
        given = {"host_budget": FORESEEN, **given}
    budgets = {name: size for name, size in given.items() if name in config.memory and config.memory[name] is None}
    targets = None if choice.sequential_targets is None else list(choice.sequential_targets)
    return cast(
        DictConfig,
        OmegaConf.merge(
            config,
            {
                "model": {"load": choice.load},
                "data": {"batch_size": choice.batch_size},
                "calibration": {
                    "schedule": choice.schedule,
                    "sequential_targets": targets,
                    "expert_parts": choice.expert_parts,
                },
                "memory": {
                    **budgets,
                    "prefetch_depth": choice.prefetch_depth,
                    "device_activation_budget": waiting.device,
                    "activation_budget": waiting.host,
                },
            },
        ),
    )


def _choices_left(config: DictConfig, given: Set[str]) -> Choices:
    """What a new plan may choose from: not what the user has chosen.

    Raises:
        CompressionError: a budget of activations, which is what the plan is about.
    """
    budgets = sorted(given & {"memory.activation_budget", "memory.device_activation_budget"})
    if budgets:
        raise CompressionError(
            f"plan=auto chooses {', '.join(budgets)}; leave it out, or the plan. memory.host_budget and "
            "memory.device_budget are what it has to keep."
        )
    return choices_left(config, Choices(), given)


def _check_given(config: DictConfig, planned: Planned, given: Set[str]) -> None:
    """What the user gave is what the plan says."""
    after = with_plan(config, planned)
    keys = [
        *("model.load", "data.batch_size", "calibration.schedule", "calibration.sequential_targets"),
        "calibration.expert_parts",
        *("memory.prefetch_depth", "memory.activation_budget", "memory.device_activation_budget"),
    ]
    of_sounds = {"data.batch_size"} if config.data.get("audio_column") is not None else set()  # one in each
    pairs = {key: (plain_value(config, key), plain_value(after, key)) for key in keys if key in given | of_sounds}
    left = ("calibration.expert_parts", None)  # to whoever chooses
    different = {key: pair for key, pair in pairs.items() if pair[0] != pair[1] and (key, pair[0]) != left}
    if different:
        said = "; ".join(f"{key}={here}, and the plan {there}" for key, (here, there) in different.items())
        choices = [
            f"choices.{CHOICES[key]}=[{'null' if here is None else here}]"
            for key, (here, _) in different.items()
            if key in CHOICES
        ]
        typed = [key for key in different if key in given - of_sounds]
        remedies = [f"make a plan with {' '.join(choices)}"] if choices else []
        remedies += [f"leave {' and '.join(typed)} out"] if typed else []
        raise CompressionError(
            f"plan={config.plan} and the command differ: the command says {said}. To mend it, {' or '.join(remedies)}."
        )


def _check_same(
    config: DictConfig, planned: Planned, model: PreTrainedModel, device: torch.device, trainer: pl.Trainer
) -> None:
    situation = planned.situation
    pairs = {
        "parameters of the model": (planned.num_parameters, sum(each.numel() for each in model.parameters())),
        "model.dtype": (planned.dtype, str(model.dtype).removeprefix("torch.")),
        "data.num_samples": (situation.num_samples, config.data.num_samples),
        "data.max_length": (situation.max_length, config.data.get("max_length", situation.max_length)),
        "images in the data": (bool(situation.num_images), _has_images(config.data, bool(situation.num_images))),
        "recipe": (situation.recipe.to_dict(), load_recipe(plain(config.recipe)).to_dict()),
        "ranks": (situation.ranks, trainer.world_size),
        "nodes": (situation.nodes, trainer.num_nodes),
        "kind of device": (planned.machine.device, device.type),
    }
    different = [
        f"{name} {of_plan} in the plan, {here} here" for name, (of_plan, here) in pairs.items() if of_plan != here
    ]
    if different:
        remedy = (
            "Make a new one, or use plan=auto (a new run's, with calibration.resume=never)."
            if config.plan != "auto"
            else "Give every rank the same."
        )
        raise CompressionError(f"plan={config.plan} is for something else: {'; '.join(different)}. {remedy}")


def _has_images(data: DictConfig, planned: bool) -> bool:
    """Whether samples have images; what is planned, where nobody knows."""
    return planned if data.source == CustomConfig.source else data.get("image_column") is not None
