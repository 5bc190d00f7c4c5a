"""What a job goes on from that SLURM requeues during the compression: never weights that are half quantized."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers import contents
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_compress import CompressionCallback
from lightning_compress.calibration.resume import MANIFEST
from lightning_compress.command import compress as compress_module
from lightning_compress.command import evaluation
from lightning_compress.plugin.requeue import TRAINED_KEY

from .conftest import Bystander, Command, TinyModule, compression, loader, same, weights_of

NUM_SUBGRAPHS = 3
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.usefixtures("slurm")]


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of one task, whose `scontrol` cannot be found."""
    job = {"JOB_ID": "7", "NTASKS": "1", "JOB_NAME": "train", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.ckpt"))


def sending(at: int, *signals: signal.Signals) -> Bystander:
    """Gets them behind a subgraph, while the run still knows of nothing but that it is computed."""
    seen: list[int] = []

    def send() -> None:
        seen.append(1)
        if len(seen) == at:
            for number in signals:
                os.kill(os.getpid(), number)

    return Bystander(send)


Fit = Callable[..., CompressionCallback]


@pytest.fixture
def fit(make_trainer: Any, tmp_path: Path) -> Fit:
    """A job in `tmp_path`, which writes to a folder there and may get signals; and its module's losses."""

    def run(
        *others: Callback,
        when: str,
        strategy: str,
        folder: str = "out",
        module: TinyModule | None = None,
        **options: Any,
    ) -> CompressionCallback:
        callback = compression(output_dir=tmp_path / folder, when=when, **options)
        trainer: pl.Trainer = make_trainer(callback, *others, strategy=strategy, max_epochs=2)
        trainer.fit(module or TinyModule(), loader())
        assert "save_checkpoint" not in vars(trainer)
        return callback

    return run


def preempted(fit: Fit, at: int, *others: Callback, **options: Any) -> None:
    with pytest.raises(SIGTERMException):
        fit(sending(at, signal.SIGUSR1, signal.SIGTERM), *others, **options)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("resume", ["auto", "never"])
@pytest.mark.parametrize("at", [2, NUM_SUBGRAPHS], ids=["amid", "last"])
@pytest.mark.parametrize(
    ("when", "strategy"), [("only", "sequential_onload"), ("only", "auto"), ("after_train", "auto")]
)
def test_nothing_is_quantized_twice(fit: Fit, tmp_path: Path, when: str, strategy: str, at: int, resume: str) -> None:
    """Seen to fail with Lightning's own saving: the requeued job was refused for another model, or replaced a finished
    checkpoint by one that is twice quantized."""
    how = {"when": when, "strategy": strategy}
    fit(folder="whole", **how)
    assert checkpoints(tmp_path) == []
    preempted(fit, at, **how)
    assert checkpoints(tmp_path) == (["hpc_ckpt_1.ckpt"] if when == "after_train" else [])
    module = TinyModule()
    callback = fit(module=module, resume=resume, **how)
    assert module.losses == []
    assert callback.report is not None
    assert callback.report.num_resumed == (at if resume == "auto" else 0)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert checkpoints(tmp_path) == []


@pytest.mark.slow
def test_a_job_may_be_requeued_again(fit: Fit, tmp_path: Path) -> None:
    how = {"when": "after_train", "strategy": "auto"}
    fit(folder="whole", **how)
    preempted(fit, 1, **how)
    preempted(fit, 2, **how)
    assert len(checkpoints(tmp_path)) == 1
    fit(**how)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert checkpoints(tmp_path) == []


def test_a_training_that_stopped_early_is_over(fit: Fit, tmp_path: Path) -> None:
    """Seen to fail where Lightning decides: it trains for another epoch, before it looks whether to stop."""
    how: dict[str, Any] = {"when": "after_train", "strategy": "auto"}

    def stopping() -> EarlyStopping:
        return EarlyStopping("loss", stopping_threshold=1e9, check_on_train_epoch_end=True)

    fit(stopping(), folder="whole", **how)
    preempted(fit, 2, stopping(), **how)
    module = TinyModule()
    fit(stopping(), module=module, **how)
    assert module.losses == []
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_what_is_left_is_the_end_of_the_training(fit: Fit, make_trainer: Any, tmp_path: Path) -> None:
    reference = TinyModule()
    make_trainer(max_epochs=2).fit(reference, loader())
    preempted(fit, 2, when="after_train", strategy="auto")
    content = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=True)
    assert same(content["state_dict"], weights_of(reference))
    assert content["optimizer_states"] == []
    assert content[TRAINED_KEY] is True


def test_a_failing_stage_says_where_the_training_is(fit: Fit, make_trainer: Any, tmp_path: Path) -> None:
    """Under a name that no other job takes for its own; and what the user gives is never removed."""
    how: dict[str, Any] = {"when": "after_train", "strategy": "auto"}

    def fail() -> None:
        raise ArithmeticError

    with pytest.raises(ArithmeticError) as error:
        fit(Bystander(fail), **how)
    assert checkpoints(tmp_path) == ["trained_by_job_7.ckpt"]
    assert f"in {tmp_path}/trained_by_job_7.ckpt: ckpt_path= goes on" in "".join(error.value.__notes__)
    module, callback = TinyModule(), compression(output_dir=tmp_path / "out", when="after_train")
    given = tmp_path / "trained_by_job_7.ckpt"
    make_trainer(callback, max_epochs=2).fit(module, loader(), ckpt_path=given)
    assert module.losses == []
    assert callback.report is not None
    assert callback.report.num_resumed == 1
    assert given.is_file()


def test_a_disk_that_is_full_ends_no_job(fit: Fit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("lightning.fabric.plugins.io.torch_io._atomic_save", full)
    with pytest.warns(UserWarning, match=r"could not be saved in \S+ \(No space left on device\).*trains again"):
        assert fit(when="after_train", strategy="auto").report is not None
    assert checkpoints(tmp_path) == []


def test_a_training_elsewhere_is_not_touched(fit: Fit, make_trainer: Any, tmp_path: Path) -> None:
    """Lightning's own checkpoint of a job that was preempted while it trained."""
    trainer = make_trainer(ModelCheckpoint(tmp_path / "own"), enable_checkpointing=True, max_epochs=1)
    trainer.fit(TinyModule(), loader())
    trainer.save_checkpoint(tmp_path / "hpc_ckpt_1.ckpt")
    module = TinyModule()
    fit(module=module, when="after_train", strategy="auto")
    assert len(module.losses) == 4, "the second of two epochs"
    assert checkpoints(tmp_path) == ["hpc_ckpt_1.ckpt"]


def test_commands_find_no_other_job(
    command: Command, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, make_trainer: Any, tmp_path: Path
) -> None:
    """Seen to fail where the command's Trainer has the working directory: missing keys."""
    trainer = make_trainer()
    trainer.fit(TinyModule(), loader())
    trainer.save_checkpoint(tmp_path / "hpc_ckpt_1.ckpt")
    monkeypatch.chdir(tmp_path)
    small = ("data.num_samples=4", "data.max_length=32", "trainer=cpu")
    command("compress", f"model.path={checkpoint}", "recipe=w4a16_rtn", "output_dir=out", *small)
    assert (tmp_path / "out" / "report.json").is_file()


@pytest.mark.parametrize("command_name", ["compress", "evaluate"])
def test_a_signal_before_and_behind_the_stage(
    command: Command, command_name: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It has SLURM requeue the job behind the first subgraph, from which it goes on; with nothing to go on from, it is
    not answered. Seen to fail without a handler: it ends the process."""
    out, scontrol = tmp_path / "out", tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\nwc -l < {out}/{MANIFEST} >> {tmp_path}/asked\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)

    def preempted(module: Any, name: str) -> None:
        called = getattr(module, name)

        def signalled(*args: Any, **options: Any) -> Any:
            os.kill(os.getpid(), signal.SIGUSR1)
            return called(*args, **options)

        monkeypatch.setattr(module, name, signalled)

    preempted(compress_module, "load_model")
    preempted(evaluation, "perplexity")
    small = ("data.num_samples=4", "data.max_length=32", "trainer=cpu")
    if command_name == "evaluate":
        assert "perplexity" in command("evaluate", f"model.path={checkpoint}", *small)
        assert not (tmp_path / "asked").exists()
        return
    held_out = ("data@held_out=docs_test", "held_out.num_samples=4", "held_out.max_length=32")
    command("compress", f"model.path={checkpoint}", "recipe=w4a16_rtn", f"output_dir={out}", *held_out, *small)
    assert (tmp_path / "asked").read_text().split() == ["requeue", "7", "2"], "the head of the manifest and a subgraph"
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
