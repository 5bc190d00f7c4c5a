"""A user's script, as `test_ranks.py` and `multinode/test_two_nodes.py` start it."""

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from lightning_compress import CompressionCallback, SequentialOnloadStrategy

# isort: split
# behind that, which imports them in two thirds of the time
import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Timer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_compress.plugin.loop import CompressionLoop
from lightning_compress.report import html

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import recipe, tiny_llama

html.error_figure = lambda _: ""  # which would have a rank import matplotlib


class Module(pl.LightningModule):
    """Eleven samples in batches of two, which Lightning's own samplers would pad and stride."""

    def __init__(self, num_layers: int, failing: int = -1, shares: bool = False, leaving: int = -1) -> None:
        super().__init__()
        self.model = tiny_llama(num_layers)
        self.failing = failing
        self.leaving = leaving
        self.shares = shares

    def calibration_step(self, batch: Tensor) -> object:
        return self.model(input_ids=batch)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        print("trains")
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def setup(self, stage: str) -> None:
        if self.global_rank == self.leaving:
            os._exit(3)

    def train_dataloader(self) -> DataLoader[Tensor]:
        if self.global_rank == self.failing:
            raise ArithmeticError(f"in the data of rank {self.failing}")
        ids = torch.randint(0, 64, (11, 16), generator=torch.Generator().manual_seed(1))
        if self.shares:
            return DataLoader(Stream(ids[self.global_rank :: self.trainer.world_size]), batch_size=2)
        return DataLoader(ids, batch_size=2, shuffle=True)  # type: ignore[arg-type]


class Stream(IterableDataset[Tensor]):
    """Of some of the samples."""

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.ids)


class Preempted(Timer):
    """Timers take part in the compression. This one has its rank sent signals in the second subgraph."""

    def __init__(self, rank: int, signals: list[str]) -> None:
        super().__init__()
        self.rank = rank
        self.signals = signals

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, index: int
    ) -> None:
        is_compressing = isinstance(trainer.fit_loop, CompressionLoop)
        if is_compressing and index == 1 and trainer.global_rank == self.rank:
            for name in self.signals:
                os.kill(os.getpid(), signal.Signals[name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output_dir")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--strategy", default="sequential_onload")
    parser.add_argument("--when", default="only")
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--timeout", type=int, default=1800)
    parser.add_argument("--keep-activations", action="store_true")
    parser.add_argument("--preempted", type=int, default=-1, help="the rank")
    parser.add_argument("--failing", type=int, default=-1, help="the rank whose data cannot be read")
    parser.add_argument("--leaving", type=int, default=-1, help="the rank whose process ends before `fit` begins")
    parser.add_argument("--sharing", action="store_true", help="the data is a stream that gives each rank its share")
    parser.add_argument("--signals", nargs="*", default=["SIGTERM"])
    arguments = parser.parse_args()
    strategy = arguments.strategy
    if strategy == "sequential_onload":
        strategy = SequentialOnloadStrategy(timeout=timedelta(seconds=arguments.timeout))
    callback = CompressionCallback(
        recipe(4),
        output_dir=arguments.output_dir,
        when=arguments.when,
        keep_activations=arguments.keep_activations,
        max_samples=11,
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=arguments.devices,
        num_nodes=arguments.num_nodes,
        strategy=strategy,
        callbacks=[callback, Preempted(arguments.preempted, arguments.signals)],
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    trainer.fit(Module(arguments.num_layers, arguments.failing, arguments.sharing, arguments.leaving))
    if callback.report is None:
        print("no report in this process")
        return
    assert callback.report.verification is not None
    assert callback.report.verification.passed
    print(f"rank {trainer.global_rank} of {callback.report.num_ranks}, {callback.report.num_batches} batches")


if __name__ == "__main__":
    main()
