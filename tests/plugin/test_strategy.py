"""`SequentialOnloadStrategy`: what it leaves out, and the stock strategies beside it."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry

from lightning_compress import Compressor, SequentialOnloadStrategy
from lightning_compress.errors import UnsupportedModelError

from .conftest import RTN, Bystander, TinyModule, compression, exported, loader, same, tiny_model, weights_of


def test_importing_the_package_registers_it(make_trainer: Any) -> None:
    assert "sequential_onload" in StrategyRegistry
    assert isinstance(make_trainer(strategy="sequential_onload").strategy, SequentialOnloadStrategy)


class Building(TinyModule):
    """Builds its model in `configure_model`, and says on which device."""

    def __init__(self) -> None:
        super().__init__()
        del self.model
        self.built_on = ""

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.built_on = torch.empty(0).device.type
            self.model = tiny_model()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        raise AssertionError("nothing is optimized")


def test_nothing_is_built_that_compression_does_not_need(make_trainer: Any, output_dir: Path) -> None:
    """No process group, no optimizers, no wrapper, no move."""
    seen: list[Any] = []
    module, callback = Building(), compression(output_dir=output_dir, when="only")

    def look() -> None:
        devices = {parameter.device.type for parameter in module.parameters()}
        seen.append((torch.distributed.is_initialized(), trainer.optimizers, trainer.model is module, devices))

    trainer: pl.Trainer = make_trainer(callback, Bystander(look), strategy="sequential_onload")
    trainer.fit(module, loader())
    assert seen == [(False, [], True, {"cpu"})] * 3
    assert module.built_on == "cpu"
    assert trainer.strategy.launcher is None
    assert same(exported(output_dir), weights_of(module.model))


@pytest.mark.parametrize("strategy", ["auto", "ddp", "sequential_onload"])
def test_every_strategy_gives_the_same_result(make_trainer: Any, strategy: str) -> None:
    reference, module = TinyModule(), TinyModule()
    make_trainer(compression(when="only")).fit(reference, loader())
    make_trainer(compression(when="only"), strategy=strategy).fit(module, loader())
    assert same(weights_of(reference), weights_of(module))
    assert not torch.distributed.is_initialized() or strategy == "ddp"


def test_it_refuses_to_train(make_trainer: Any) -> None:
    """Without the check Lightning fails with an IndexError on the optimizers."""
    for callbacks in ([], [compression()]):
        with pytest.raises(UnsupportedModelError, match=r"'sequential_onload' builds no optimizers.*when='only'"):
            make_trainer(*callbacks, strategy="sequential_onload").fit(TinyModule(), loader())


def test_it_evaluates(make_trainer: Any) -> None:
    module, reference = TinyModule(), TinyModule()
    trainer = make_trainer(compression(RTN, when="only"), strategy="sequential_onload")
    trainer.fit(module, loader())
    trainer.test(module, loader(4), verbose=False)
    make_trainer().test(reference, loader(4), verbose=False)
    assert module.test_losses
    assert module.test_losses != reference.test_losses
    batch = next(iter(loader(4)))
    with torch.no_grad():
        assert module.test_losses == [pytest.approx(module.model(**batch, labels=batch["input_ids"]).loss.item())]


def test_checkpoints_hold_the_weights(make_trainer: Any, tmp_path: Path) -> None:
    module = TinyModule()
    trainer = make_trainer(compression(RTN, when="only"), strategy="sequential_onload")
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "compressed.ckpt")
    again = TinyModule.load_from_checkpoint(tmp_path / "compressed.ckpt")
    assert same(weights_of(again), weights_of(module))


def test_precision_that_contradicts_the_weights_is_refused(make_trainer: Any) -> None:
    trainer = make_trainer(strategy="sequential_onload", precision="bf16-true")
    with pytest.raises(
        UnsupportedModelError, match=r"precision='bf16-true'.*torch\.float32.*load the model in torch\.bfloat16"
    ):
        Compressor(trainer).compress(tiny_model(), recipe=RTN, output_dir=None)


def test_precision_that_agrees_with_the_weights(make_trainer: Any, output_dir: Path) -> None:
    model = tiny_model().to(torch.bfloat16)
    trainer = make_trainer(strategy="sequential_onload", precision="bf16-true")
    report = Compressor(trainer).compress(model, recipe=RTN, output_dir=output_dir)
    assert report.verification is not None
    assert report.verification.passed
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
