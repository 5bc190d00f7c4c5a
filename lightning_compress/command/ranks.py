"""The ranks of a command: they are started and meet before any work, so that an error of one is heard of by all."""

from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_only

from lightning_compress.distributed.bars import bars_of_first
from lightning_compress.distributed.collective import Collective, SingleProcess, closing_all
from lightning_compress.errors import CompressionError
from lightning_compress.plugin import compat
from lightning_compress.plugin.strategy import check_srun
from lightning_compress.plugin.warned import warned_by_first


@contextmanager
def ranks_of(trainer: pl.Trainer) -> Iterator[Collective]:
    """The trainer's ranks, outside of its functions, which find them as they are then. An error inside ends all; bars
    and warnings are shown by the first.

    Raises:
        CompressionError: a multirun, which every rank would run anew; a SLURM job's tasks that srun has not started;
            other ranks than the launcher has started.
    """
    if compat.starts_scripts(trainer) and HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
        raise CompressionError(
            f"A multirun with trainer.devices={trainer.num_devices} would start the whole sweep anew in every rank. "
            "Start the ranks from outside (torchrun, srun), or run the recipes one by one."
        )
    with compat.holding_requeue(trainer), _met(trainer) as ranks:
        yield ranks


@contextmanager
def _met(trainer: pl.Trainer) -> Iterator[Collective]:
    """The trainer's ranks, which have met."""
    strategy = trainer.strategy
    if trainer.world_size == 1 or not isinstance(strategy, DDPStrategy) or compat.spawns(trainer):
        trainer.accelerator.setup_device(strategy.root_device)  # of several cards the one that is meant
        yield SingleProcess()  # other strategies are refused by `fit`; what is spawned has no script of its own
        return
    check_srun(strategy.cluster_environment, strategy.num_nodes)
    _check_launched(strategy)
    if strategy.launcher is None:
        strategy.setup_environment()
    else:
        strategy.launcher.launch(strategy.setup_environment, trainer=trainer)
    with closing_all(compat.collective(trainer)) as ranks, bars_of_first(ranks.rank), warned_by_first(ranks.rank):
        yield ranks


def _check_launched(strategy: DDPStrategy) -> None:
    """
    Raises:
        CompressionError: the launcher has started other ranks than the trainer is told of.
    """
    devices, nodes = strategy.num_processes, strategy.num_nodes
    try:
        assert strategy.cluster_environment is not None
        strategy.cluster_environment.validate_settings(num_devices=devices, num_nodes=nodes)
    except ValueError as error:
        raise CompressionError(
            f"trainer.devices={devices} and trainer.num_nodes={nodes} are not what the launcher (torchrun, srun) has "
            f"started: {error} Leave both out, and they are taken from the launcher."
        ) from error


def is_first_rank() -> bool:
    """Whether this process is the one that prints."""
    return getattr(rank_zero_only, "rank", 0) == 0  # from the environment, where there is one
