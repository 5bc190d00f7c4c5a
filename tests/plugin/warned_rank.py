"""One of several ranks that compress what is warned of, as `test_ranks.py` starts it."""

import sys
from pathlib import Path

from lightning_compress import Compressor

# isort: split
# behind that, which imports it in two thirds of the time
import lightning.pytorch as pl
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import Counting, recipe

if __name__ == "__main__":
    torch.manual_seed(0)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="sequential_onload",
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    batches = list(torch.randn(4, 1, 2, 16))
    Compressor(trainer).compress(
        Counting().eval(), recipe=recipe(4, strategy="channel"), output_dir=None, dataloaders=batches
    )
