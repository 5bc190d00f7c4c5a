"""Interrupted and failing runs: nothing is written, and the Trainer and the process are as before."""

import itertools
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers import contents, saved
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_compress.errors import UnsupportedModelError
from lightning_compress.report.report import Report

from .conftest import Bystander, TinyModule, compression, loader, same, trainer_state, weights_of


def _raise(kind: type[BaseException]) -> Any:
    def step(batch: Any, batch_idx: int) -> None:
        raise kind("stop")

    return step


@pytest.mark.parametrize(
    ("kind", "surfaces_as"), [(RuntimeError, RuntimeError), (KeyboardInterrupt, SystemExit)], ids=["error", "interrupt"]
)
def test_failed_training_is_not_compressed(make_trainer: Any, output_dir: Path, kind: Any, surfaces_as: Any) -> None:
    module, callback = TinyModule(), compression(output_dir=output_dir)
    module.training_step = _raise(kind)  # type: ignore[method-assign]
    trainer = make_trainer(callback)
    state, handler = trainer_state(trainer), signal.getsignal(signal.SIGINT)
    before = weights_of(module)
    try:
        with (
            pytest.warns(UserWarning, match=f"{kind.__name__} before the compression stage: nothing was compressed"),
            pytest.raises(surfaces_as),
        ):
            trainer.fit(module, loader())
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores it from a KeyboardInterrupt on
    assert trainer_state(trainer) == state
    assert callback.report is None
    assert not output_dir.exists()
    assert same(before, weights_of(module))


class TermAtTrainEnd(Callback):
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


class TermInTraining(Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("terminator", [TermInTraining, TermAtTrainEnd])
def test_sigterm_in_training_is_not_compressed(make_trainer: Any, output_dir: Path, terminator: type[Callback]) -> None:
    module, callback = TinyModule(), compression(output_dir=output_dir)
    trainer = make_trainer(callback, terminator())
    state = trainer_state(trainer)
    with (
        pytest.warns(UserWarning, match="SIGTERMException before the compression stage"),
        pytest.raises(SIGTERMException),
    ):
        trainer.fit(module, loader())
    assert trainer_state(trainer) == state
    assert callback.report is None
    assert not output_dir.exists()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_sigterm_in_compression_stops_behind_the_subgraph(make_trainer: Any, tmp_path: Path, where: str) -> None:
    """Behind each in turn, and the same run continues there to the same files."""

    def fit(folder: Path, *others: Callback) -> Report:
        module, options = TinyModule(), {"output_dir": folder, "when": "only"}
        if where == "disk":
            module.model = saved(module.model, tmp_path / "weights")
            options |= {"weights": tmp_path / "weights"}
        callback = compression(**options)
        trainer = make_trainer(callback, *others, strategy="sequential_onload")
        state = trainer_state(trainer)
        with nullcontext() if not others else pytest.raises(SIGTERMException):
            trainer.fit(module, loader())
        assert callback.report is not None
        assert trainer_state(trainer) == state
        return callback.report

    num_subgraphs = len(fit(tmp_path / "whole").subgraphs)
    assert num_subgraphs == 3
    for number in range(1, num_subgraphs):
        out, seen = tmp_path / str(number), []

        def terminate(seen: list[None] = seen, number: int = number) -> None:
            seen.append(None)
            if len(seen) == number:
                os.kill(os.getpid(), signal.SIGTERM)

        report = fit(out, Bystander(terminate))
        assert report.is_partial
        assert len(report.subgraphs) == number
        assert (out / "INCOMPLETE").exists()
        assert fit(out).num_resumed == number
        assert contents(out) == contents(tmp_path / "whole")


def test_interrupted_compressions_say_that_they_can_be_continued(
    make_trainer: Any, output_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Lightning says that it shuts down, and no more."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    callback, handler = compression(output_dir=output_dir, when="only"), signal.getsignal(signal.SIGINT)
    try:
        with caplog.at_level("INFO"), pytest.raises(SystemExit):
            make_trainer(callback, Bystander(interrupt)).fit(TinyModule(), loader())
    finally:
        signal.signal(signal.SIGINT, handler)
    assert f"PARTIAL: not every subgraph was quantized; the same run continues in {output_dir}" in caplog.messages
    make_trainer(continued := compression(output_dir=output_dir, when="only")).fit(TinyModule(), loader())
    assert continued.report is not None
    assert continued.report.num_resumed == 1


def test_timer_ends_compression_early(make_trainer: Any, output_dir: Path) -> None:
    module, callback = TinyModule(), compression(output_dir=output_dir, when="only")
    make_trainer(callback, Bystander(duration={"microseconds": 1})).fit(module, loader())
    assert callback.report is not None
    assert "PARTIAL" in callback.report.summary()
    assert (output_dir / "INCOMPLETE").exists()


def test_errors_inside_compression_name_what_was_changed(make_trainer: Any, output_dir: Path) -> None:
    """The second layer fails behind its attention; everything but the weights is as before."""
    module, callback = TinyModule(), compression(output_dir=output_dir, when="only")
    module.model.model.layers[1].mlp.up_proj.register_forward_pre_hook(_fails_on_real_data)
    modes = {name: part.training for name, part in module.named_modules()}
    trainer = make_trainer(callback)
    state = trainer_state(trainer)
    with pytest.raises(ZeroDivisionError) as caught:
        trainer.fit(module, loader())
    assert any(
        "hold quantized weights already: model.layers.0; perhaps some of model.layers.1" in note
        for note in caught.value.__notes__
    )
    assert trainer_state(trainer) == state
    assert {name: part.training for name, part in module.named_modules()} == modes
    assert callback.report is None
    assert not (output_dir / "config.json").exists()


@pytest.mark.parametrize("strategy", ["auto", "sequential_onload"])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.filterwarnings("ignore:.*fit.ckpt_path=")
def test_what_is_saved_at_an_error_is_not_taken_for_trained_weights(
    make_trainer: Any, tmp_path: Path, strategy: str, layer: int
) -> None:
    """Nothing is said of it where no weight had been replaced. Seen to fail: without the mark, and with one for every
    error."""
    module = TinyModule()
    layers = module.model.model.layers
    first = layers[1].mlp.up_proj if layer else layers[0].input_layernorm
    first.register_forward_pre_hook(_fails_on_real_data)
    callbacks = (compression(when="only"), OnExceptionCheckpoint(tmp_path, "error"))
    said = pytest.warns(UserWarning, match="some weights are quantized and others are not")
    with said if layer else nullcontext(), pytest.raises(ZeroDivisionError):
        make_trainer(*callbacks, strategy=strategy, enable_checkpointing=True).fit(module, loader())
    file = tmp_path / "error.ckpt"
    again = make_trainer(callback := compression(when="only"))
    with pytest.raises(UnsupportedModelError, match="had not finished: some of") if layer else nullcontext():
        again.fit(TinyModule(), loader(), ckpt_path=file)
    assert (callback.report is None) == bool(layer)


def _fails_on_real_data(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    if type(args[0]) is torch.Tensor:
        raise ZeroDivisionError("a hook of the user's")


def test_errors_in_hooks_leave_the_process_as_it_was(make_trainer: Any) -> None:
    """Fails when the loop does not close its job: gradients stay switched off."""

    def fail() -> None:
        raise ZeroDivisionError

    module, trainer = TinyModule(), make_trainer(compression(when="only"), Bystander(fail))
    with pytest.raises(ZeroDivisionError) as caught:
        trainer.fit(module, loader())
    assert torch.is_grad_enabled()
    assert module.training
    assert module.model.training
    del caught
    assert torch.is_grad_enabled()


def test_errors_between_subgraphs_name_what_was_changed(make_trainer: Any) -> None:
    """Seen to fail: a hook's error left half of the weights quantized, and said nothing."""
    called = itertools.count()

    def fail() -> None:
        if next(called) == 1:
            raise ZeroDivisionError("a hook of the user's")

    with pytest.raises(ZeroDivisionError, match="a hook of the user's") as caught:
        make_trainer(compression(when="only"), Bystander(fail)).fit(TinyModule(), loader())
    (note,) = caught.value.__notes__
    assert "hold quantized weights already: model.layers.0;" in note
