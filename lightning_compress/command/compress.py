"""A compression as it is configured: load the model, read the data, run, and measure before and after."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from lightning_compress.calibration.prepare import needs_data
from lightning_compress.command.evaluation import measured_perplexity
from lightning_compress.command.models import (
    agreed_from_disk,
    check_not_quantized,
    left_out,
    load_model,
    memory_options,
    weights_place,
)
from lightning_compress.command.planned_run import keep_plan, plan_for_run, with_plan
from lightning_compress.command.ranks import is_first_rank, ranks_of
from lightning_compress.data.batches import calibration_batches, evaluation_dataloader
from lightning_compress.data.config import CustomConfig, load_data_config
from lightning_compress.distributed.collective import Collective
from lightning_compress.distributed.folder import shared_folder
from lightning_compress.errors import CompressionError, RunWarning
from lightning_compress.export.checkpoint import check_output_dir
from lightning_compress.export.processors import with_other_files
from lightning_compress.plugin.callback import CompressionCallback
from lightning_compress.plugin.compressor import Compressor
from lightning_compress.plugin.job import plan_recipe
from lightning_compress.plugin.module import onload_device, onloads
from lightning_compress.plugin.run import save_report
from lightning_compress.plugin.settings import Settings, check_number
from lightning_compress.plugin.strategy import check_precision
from lightning_compress.recipe.load import load_recipe
from lightning_compress.report.plan import described, minutes
from lightning_compress.report.report import Report


def run_compress(config: DictConfig, output_dir: Path) -> Report:
    """Load the model, read the data, compress.

    Args:
        config: composed from `configs/compress.yaml`.
        output_dir: folder of the checkpoint.

    Raises:
        CompressionError: see `CompressionCallback`; also a model that cannot be loaded.
    """
    trainer = instantiate(
        config.trainer,
        callbacks=_made(config, "callbacks"),
        logger=_made(config, "logger") or False,
    )
    with ranks_of(trainer) as ranks:
        return _compress_among(ranks, trainer, config, output_dir)


def _made(config: DictConfig, group: str) -> list[Any]:
    """
    Raises:
        CompressionError: one is no object of a class.
    """
    made = {name: instantiate(node) if OmegaConf.is_config(node) else node for name, node in config[group].items()}
    for name, each in made.items():
        if type(each).__module__ == "builtins" or OmegaConf.is_config(each):  # a number or a mapping
            raise CompressionError(f"{group}.{name}={each} is no class of Lightning's with arguments: give _target_.")
    return list(made.values())


def _compress_among(ranks: Collective, trainer: pl.Trainer, config: DictConfig, output_dir: Path) -> Report:
    memory_options(config.memory)  # what is misspelt is told before anything is loaded
    check_number("data.num_samples", config.data.num_samples, 1)
    check_output_dir(output_dir)
    check_not_quantized(config.model)
    _check_alike(config, ranks)
    planned = None
    if config.plan is not None:
        planned = plan_for_run(config, trainer, onload_device(trainer), output_dir, ranks)
        config = with_plan(config, planned)
        keep_plan(planned, output_dir, ranks)
        if is_first_rank():
            print(f"plan: {described(planned.best)}; foreseen: {minutes(planned.best.total_s)}")
    resumes = config.calibration.resume != "never"
    from_disk = agreed_from_disk(config.model, trainer, ranks, output_dir if resumes else None)
    weights, device = weights_place(config.model) if from_disk else None, onload_device(trainer)
    options: dict[str, Any] = {
        "recipe": load_recipe(config.recipe),
        "output_dir": output_dir,
        "max_samples": config.data.num_samples,
        "weights": weights,
        "memory": memory_options(config.memory),
        **cast(dict[str, Any], OmegaConf.to_container(config.calibration, resolve=True)),
    }
    settings = CompressionCallback(when="only", **options).settings
    model, processor = load_model(config.model, from_disk)
    if (left := left_out(config.model, model)) and is_first_rank():
        warnings.warn(left, RunWarning, stacklevel=2)
    needs = _check(trainer, model, settings)
    is_left_out = processor is None and not needs and config.data.source != CustomConfig.source
    dataloader = None if is_left_out else calibration_batches(load_data_config(config.data), processor, model)
    held_out: list[Mapping[str, Tensor]] = []
    before = None
    if config.get("held_out") is not None:
        held_out = list(evaluation_dataloader(load_data_config(config.held_out), processor))
        before = measured_perplexity(model, held_out, weights, config.memory, device, ranks)
    saved = with_other_files(processor, Path(config.model.path))
    ranks.meet("reading model and data")  # the Trainer's own operations do not say why a rank does not come
    report = Compressor(trainer).compress(model, dataloaders=dataloader, tokenizer=saved, **options)
    if planned is not None and not report.is_partial:
        report = replace(report, plan=planned.best)
    if before is not None and not report.is_partial:
        written = None if weights is None else output_dir
        after = measured_perplexity(model, held_out, written, config.memory, device, ranks)
        report = replace(report, extra={"perplexity_before": before, "perplexity_after": after})
    if left and not report.is_partial:
        report = replace(report, notes=(*report.notes, left))
    if report.plan is not None or report.extra or left:
        _save_again(report, output_dir, ranks)
    return report


def _check_alike(config: DictConfig, ranks: Collective) -> None:
    """
    Raises:
        CompressionError: some ranks are given what has them exchange something, and others are not.
    """
    given = {name: config.get(key) is not None for name, key in (("plan", "plan"), ("data@held_out", "held_out"))}
    of_ranks = ranks.gather(given, "comparing what the ranks were given")
    for name in given:
        having = [str(rank) for rank, theirs in enumerate(of_ranks) if theirs[name]]
        if having and len(having) < ranks.size:
            raise CompressionError(
                f"{name} is given on ranks {', '.join(having)} of {ranks.size} only. Every rank has to be given the "
                "same."
            )


def _check(trainer: pl.Trainer, model: nn.Module, settings: Settings) -> bool:
    """What the run would refuse, before texts are read and evaluated; whether it needs any."""
    needs = needs_data(plan_recipe(model, settings)[1])
    if onloads(trainer):
        check_precision(str(trainer.precision), model)
    return needs


def _save_again(report: Report, output_dir: Path, ranks: Collective) -> None:
    """With what was found out behind the run; on every disk that has the checkpoint."""
    if shared_folder(output_dir, ranks).is_first:
        save_report(report, output_dir)
