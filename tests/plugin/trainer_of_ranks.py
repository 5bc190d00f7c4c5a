"""A user's script, as `test_ranks.py` starts it: OUTPUT_DIR DEVICES STRATEGY WHEN."""

import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_compress import CompressionCallback

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import recipe, tiny_llama


class Module(pl.LightningModule):
    """Eleven samples in batches of two, which Lightning's own samplers would pad and stride."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_llama(2)

    def calibration_step(self, batch: Tensor) -> object:
        return self.model(input_ids=batch)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[Tensor]:
        ids = torch.randint(0, 64, (11, 16), generator=torch.Generator().manual_seed(1))
        return DataLoader(ids, batch_size=2, shuffle=True)  # type: ignore[arg-type]


if __name__ == "__main__":
    folder, devices, strategy, when = sys.argv[1:]
    callback = CompressionCallback(recipe(4), output_dir=folder, when=when)  # type: ignore[arg-type]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(devices),
        strategy=strategy,
        callbacks=[callback],
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    trainer.fit(Module())
    if callback.report is None:
        sys.exit(print("no report in this process"))
    assert callback.report.verification is not None
    assert callback.report.verification.passed
    print(f"rank {trainer.global_rank} of {callback.report.num_ranks}, {callback.report.num_batches} batches")
