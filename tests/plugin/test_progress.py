"""Lightning's checkpoints during a compression: small, and continued by `ckpt_path`."""

import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers import contents
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_compress import Compressor, Report
from lightning_compress.errors import OutputDirectoryError, UnsupportedModelError
from lightning_compress.plugin.progress import STATE_KEY

from .conftest import (
    GPTQ,
    RTN,
    Bystander,
    TinyModule,
    compression,
    exported,
    loader,
    same,
    tiny_model,
    trainer_state,
    weights_of,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used"),
]


def saver(folder: Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, **{"every_n_train_steps": 1, "save_top_k": -1, "save_last": True, **options})


class DiedError(Exception):
    """The run dies behind the second subgraph is written, before a checkpoint says so."""


def killed(make_trainer: Any, tmp_path: Path) -> Path:
    """The last checkpoint of a run to `tmp_path/compressed` that died."""
    count: list[int] = []

    def die() -> None:
        count.append(1)
        if len(count) == 2:
            raise DiedError

    trainer = make_trainer(
        compression(output_dir=tmp_path / "compressed", when="only"),
        Bystander(die),
        saver(tmp_path / "saved"),
        strategy="sequential_onload",
        enable_checkpointing=True,
    )
    with pytest.raises(DiedError):
        trainer.fit(TinyModule(), loader())
    return tmp_path / "saved" / "last.ckpt"


def go_on(make_trainer: Any, checkpoint: Path, output_dir: Path, **options: Any) -> Report:
    callback = compression(output_dir=output_dir, when="only", **options)
    make_trainer(callback, strategy="sequential_onload").fit(TinyModule(), loader(), ckpt_path=checkpoint)
    assert callback.report is not None
    return callback.report


def test_checkpoints_between_subgraphs_are_small_and_plain(make_trainer: Any, tmp_path: Path, output_dir: Path) -> None:
    """Fails without an empty state dict, and where steps are counted behind `on_train_batch_end` (one is missing)."""
    callback = compression(output_dir=output_dir, when="only")
    trainer = make_trainer(callback, saver(tmp_path / "saved"), strategy="sequential_onload", enable_checkpointing=True)
    state = trainer_state(trainer)
    trainer.fit(TinyModule(), loader())
    assert trainer_state(trainer) == state
    assert trainer.global_step == 0
    names = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert names == ["epoch=0-step=1.ckpt", "epoch=0-step=2.ckpt", "epoch=0-step=3.ckpt", "last.ckpt"]
    for number, name in enumerate((*names[:3], "epoch=0-step=3.ckpt"), 1):
        content = torch.load(tmp_path / "saved" / name, weights_only=True)
        assert content["state_dict"] == {}
        assert content["global_step"] == min(number, 3)
        progress = content["callbacks"][STATE_KEY]
        assert (progress["schema"], progress["next_subgraph"]) == (1, min(number, 3))
        assert progress["output_dir"] == str(output_dir)
        assert set(progress["fingerprints"]) == {"recipe", "layout", "model", "data", "software"}
        assert (tmp_path / "saved" / name).stat().st_size < 20_000


@pytest.mark.slow
def test_a_checkpoint_continues_its_run(make_trainer: Any, tmp_path: Path, output_dir: Path) -> None:
    """The manifest knows of a subgraph more than the checkpoint does, and is right."""
    make_trainer(compression(output_dir=tmp_path / "whole", when="only")).fit(TinyModule(), loader())
    checkpoint = killed(make_trainer, tmp_path)
    assert torch.load(checkpoint, weights_only=True)["callbacks"][STATE_KEY]["next_subgraph"] == 1
    module, callback = TinyModule(), compression(output_dir=output_dir, when="only")
    trainer = make_trainer(callback, saver(tmp_path / "saved"), strategy="sequential_onload", enable_checkpointing=True)
    trainer.fit(module, loader(), ckpt_path="last")
    assert callback.report is not None
    assert callback.report.num_resumed == 2
    assert trainer.global_step == 0, "nothing of the stage is left in the loop that trains"
    assert contents(output_dir) == contents(tmp_path / "whole")
    assert same(exported(output_dir), weights_of(module.model))


def test_compressor_continues_too(make_trainer: Any, tmp_path: Path) -> None:
    checkpoint = killed(make_trainer, tmp_path)
    moved = shutil.move(tmp_path / "compressed", tmp_path / "moved")
    trainer = make_trainer(strategy="sequential_onload")
    report = Compressor(trainer).compress(
        tiny_model(), recipe=GPTQ, output_dir=moved, dataloaders=loader(), ckpt_path=checkpoint
    )
    assert report.num_resumed == 2
    again = Compressor(trainer).compress(tiny_model(), recipe=GPTQ, output_dir=None, dataloaders=loader())
    assert again.num_resumed == 0


def test_training_afterwards_saves_its_own_steps(make_trainer: Any, tmp_path: Path) -> None:
    """Fails when the callback still knows of the stage's last step: training's step of that number is left out."""
    trainer = make_trainer(
        saver(tmp_path / "saved", every_n_train_steps=2, save_last=None),
        strategy="sequential_onload",
        enable_checkpointing=True,
    )
    Compressor(trainer).compress(tiny_model(), recipe=RTN, output_dir=tmp_path / "out")
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["epoch=0-step=2.ckpt"]
    training = make_trainer(*trainer.callbacks, enable_checkpointing=True)
    training.fit(TinyModule(), loader())
    for name in ("epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt"):
        assert torch.load(tmp_path / "saved" / name, weights_only=True)["state_dict"]


@pytest.mark.slow
def test_other_runs_are_not_continued(make_trainer: Any, tmp_path: Path, output_dir: Path) -> None:
    """Each of them would start over without being asked to, or take another run's shards."""
    checkpoint = killed(make_trainer, tmp_path)
    before = contents(output_dir)

    def refused(match: str, folder: Path = output_dir, **options: Any) -> None:
        with pytest.raises(OutputDirectoryError, match=match):
            go_on(make_trainer, checkpoint, folder, **options)

    refused("resume='never' starts over", resume="never")
    refused("holds an unfinished run that differs in recipe", recipe=RTN)
    refused("differs in layout and was written to", tmp_path / "new", schedule="block")
    refused(r"when 1 subgraphs were in \S+compressed, and \S+new holds 0", tmp_path / "new")
    assert contents(output_dir) == before
    assert go_on(make_trainer, checkpoint, output_dir).num_resumed == 2
    finished = contents(output_dir)
    again = go_on(make_trainer, checkpoint, output_dir)
    assert again.num_resumed == len(again.subgraphs)
    assert contents(output_dir) == finished
    shutil.rmtree(output_dir)
    refused("if it has been removed since")


def test_ordinary_checkpoints_are_loaded_strictly(make_trainer: Any, tmp_path: Path) -> None:
    """Fails when the strategy takes every state dict for an empty one."""
    trainer = make_trainer()
    trainer.fit(TinyModule(), loader())
    trainer.save_checkpoint(tmp_path / "trained.ckpt")
    content = torch.load(tmp_path / "trained.ckpt", weights_only=True)
    for name, match in (("model.lm_head.weight", 'Missing key.*"model.lm_head.weight"'), (None, "Missing key")):
        content["state_dict"] = {} if name is None else {k: v for k, v in content["state_dict"].items() if k != name}
        torch.save(content, tmp_path / "other.ckpt")
        with pytest.raises(RuntimeError, match=match):
            go_on(make_trainer, tmp_path / "other.ckpt", tmp_path / "out")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("strategy", ["auto", "sequential_onload"])
def test_of_a_training_only_the_weights_are_loaded(
    make_trainer: Any, tmp_path: Path, strategy: str, weights_only: bool
) -> None:
    """Seen to fail where Lightning restores all: "You restored a checkpoint with current_epoch=3", or a KeyError for
    optimizers' states. The Trainer trains afterwards as if it had loaded nothing."""
    trained = TinyModule()
    trainer = make_trainer(max_epochs=3)
    trainer.fit(trained, loader())
    trainer.save_checkpoint(tmp_path / "trained.ckpt", weights_only=weights_only)
    one, other = make_trainer(strategy=strategy), make_trainer(strategy=strategy)
    module = TinyModule()
    Compressor(one).compress(
        module, recipe=GPTQ, output_dir=None, dataloaders=loader(), ckpt_path=tmp_path / "trained.ckpt"
    )
    Compressor(other).compress(trained, recipe=GPTQ, output_dir=None, dataloaders=loader())
    assert same(weights_of(module), weights_of(trained))
    assert (one.current_epoch, one.global_step) == (0, 0)


def test_a_checkpoint_without_weights_is_no_model(make_trainer: Any, tmp_path: Path) -> None:
    checkpoint = killed(make_trainer, tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"holds no weights: they are in \S+compressed"):
        make_trainer(strategy="sequential_onload").test(TinyModule(), loader(4), ckpt_path=checkpoint)


@pytest.mark.parametrize(
    ("strategy", "written", "options"),
    [
        ("auto", True, {}),
        ("sequential_onload", False, {}),
        ("sequential_onload", True, {"save_weights_only": True}),
        ("sequential_onload", True, {"every_n_train_steps": None, "every_n_epochs": 1, "save_last": None}),
    ],
    ids=["another strategy", "in memory", "weights only", "behind epochs"],
)
def test_checkpoints_that_would_be_large_or_idle_are_not_saved(
    make_trainer: Any, tmp_path: Path, strategy: str, written: bool, options: dict[str, Any]
) -> None:
    callback = compression(RTN, tmp_path / "out" if written else None, when="only")
    trainer: pl.Trainer = make_trainer(
        callback, saver(tmp_path / "saved", **options), strategy=strategy, enable_checkpointing=True
    )
    trainer.fit(TinyModule(), loader())
    assert callback.report is not None
    assert not (tmp_path / "saved").exists()
