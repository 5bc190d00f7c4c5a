"""A user's script and the command on several ranks, under Lightning's own launchers and torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
from helpers import contents
from lightning.pytorch.strategies import FSDPStrategy

from lightning_compress import CompressionCallback
from lightning_compress.errors import UnsupportedModelError

from .conftest import TinyModule

SCRIPT = str(Path(__file__).with_name("trainer_of_ranks.py"))
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_instead_of_training(tmp_path: Path) -> None:
    """Eleven samples, shuffled: Lightning's own samplers would pad them, and take every second one for a rank."""
    folders = [tmp_path / name for name in ("one", "popen", "torchrun")]
    run(SCRIPT, str(folders[0]))
    said = run(SCRIPT, str(folders[1]), "--devices=2")
    assert all(f"rank {rank} of 2, 6 batches" in said for rank in (0, 1))
    run(*TORCHRUN, SCRIPT, str(folders[2]), "--devices=2")
    assert contents(folders[0]) == contents(folders[1]) == contents(folders[2])


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_after_a_training(strategy: str, tmp_path: Path) -> None:
    """The calibration data is the training data, undivided; what is spawned takes its report with it."""
    said = run(SCRIPT, str(tmp_path / "out"), "--devices=2", f"--strategy={strategy}", "--when=after_train")
    assert ("rank 1 of 2, 6 batches" if strategy == "ddp" else "no report in this process") in said
    assert (tmp_path / "out" / "report.html").is_file()


def test_what_splits_the_model_is_refused() -> None:
    trainer = pl.Trainer(accelerator="cpu", devices=2, logger=False)
    trainer.strategy.__class__ = FSDPStrategy  # which cannot be made without a GPU
    callback = CompressionCallback("w4a16_gptq", output_dir=None)
    with pytest.raises(UnsupportedModelError, match=r"FSDPStrategy splits the model over 2 ranks.*strategy='ddp'"):
        callback.setup(trainer, TinyModule(), "fit")
    kept = CompressionCallback("w4a16_gptq", output_dir="out", keep_activations=True)
    trainer = pl.Trainer(accelerator="cpu", devices=2, logger=False, strategy="ddp")
    with pytest.raises(UnsupportedModelError, match="keep_activations=True is for one rank, and there are 2"):
        kept.setup(trainer, TinyModule(), "fit")
