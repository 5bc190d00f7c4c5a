"""`Compressor`: which models it takes, how it calls them, and that the Trainer is as before."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from torch import Tensor, nn

from lightning_compress import CompressionCallback, CompressionError, Compressor, load_compressed
from lightning_compress.errors import CalibrationDataError, OutputDirectoryError, UnsupportedModelError

from .conftest import (
    GPTQ,
    RTN,
    TinyModule,
    compression,
    exported,
    loader,
    same,
    samples,
    tiny_model,
    trainer_state,
    weights_of,
)


def test_a_transformers_model_alone(compressor: Compressor, output_dir: Path) -> None:
    model = tiny_model()
    report = compressor.compress(model, recipe=GPTQ, output_dir=output_dir, dataloaders=loader())
    assert report.model == "LlamaForCausalLM"
    assert [module.num_tokens for module in report.modules] == [16 * 12] * 14
    assert same(exported(output_dir), weights_of(model))
    assert not same(weights_of(model), weights_of(tiny_model()))


def test_the_result_is_the_callbacks(compressor: Compressor, make_trainer: Any) -> None:
    model, module = tiny_model(), TinyModule()
    compressor.compress(model, recipe=GPTQ, output_dir=None, dataloaders=loader())
    make_trainer(compression(when="only")).fit(module, loader())
    assert same(weights_of(model), weights_of(module.model))


def test_fields_that_forward_does_not_name_are_left_out(compressor: Compressor) -> None:
    plain, extra = tiny_model(), tiny_model()
    batches = [{**batch, "ids": torch.arange(4)} for batch in loader()]
    compressor.compress(plain, recipe=GPTQ, output_dir=None, dataloaders=loader())
    compressor.compress(extra, recipe=GPTQ, output_dir=None, dataloaders=batches)
    assert same(weights_of(plain), weights_of(extra))


class Regression(pl.LightningModule):
    """Cannot be trained: no training_step, no transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, batch: Tensor) -> Tensor:
        result: Tensor = self.layers(batch)
        return result


def test_a_lightning_module_without_training_step(compressor: Compressor, output_dir: Path) -> None:
    module = Regression()
    compressor.compress(module, recipe=GPTQ, output_dir=output_dir, dataloaders=torch.randn(6, 8, 32))
    assert same(weights_of(load_compressed(Regression(), output_dir)), weights_of(module))


class Hooked(Regression):
    """Makes its layers and its batches in hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.called = nn.Sequential(), list[str]()

    def prepare_data(self) -> None:
        self.called.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.called.append("setup")

    def configure_model(self) -> None:
        if not len(self.layers):
            self.layers = Regression().layers

    def on_before_batch_transfer(self, batch: dict[str, Tensor], dataloader_idx: int) -> Tensor:
        return batch["x"]


@pytest.mark.parametrize("strategy", ["sequential_onload", "auto"])
def test_hooks_of_a_lightning_module_without_training_step(make_trainer: Any, strategy: str) -> None:
    """Seen to fail: carried by another LightningModule, whose hooks were called in place of its own."""
    module, other = Hooked(), Regression()
    compressor, data = Compressor(make_trainer(strategy=strategy)), torch.randn(6, 8, 32)
    compressor.compress(module, recipe=GPTQ, output_dir=None, dataloaders=[{"x": each} for each in data])
    compressor.compress(other, recipe=GPTQ, output_dir=None, dataloaders=data)
    assert module.called == ["prepare_data", "setup"]
    assert same(weights_of(module), weights_of(other))
    assert not {"training_step", "configure_optimizers"} & set(vars(module))


@pytest.mark.parametrize("strategy", ["sequential_onload", "auto"])
def test_a_checkpoint_of_a_lightning_module_without_training_step(
    make_trainer: Any, strategy: str, tmp_path: Path
) -> None:
    """By its own names. Seen to fail: asked for the names that another LightningModule around it had."""
    trained, module = Regression(), Regression()
    with torch.no_grad():
        trained.layers[0].weight.mul_(2)  # type: ignore[operator]
    fitted = make_trainer()
    fitted.strategy.connect(trained)
    fitted.save_checkpoint(tmp_path / "trained.ckpt")
    compressor, data = Compressor(make_trainer(strategy=strategy)), torch.randn(6, 8, 32)
    given = {"recipe": GPTQ, "output_dir": None, "dataloaders": data}
    compressor.compress(module, ckpt_path=tmp_path / "trained.ckpt", **given)
    compressor.compress(trained, **given)
    assert same(weights_of(module), weights_of(trained))


def test_what_fit_asks_for_is_gone_after_an_error(compressor: Compressor) -> None:
    module = Regression()
    with pytest.raises(CalibrationDataError):
        compressor.compress(module, recipe=GPTQ, output_dir=None)
    assert not {"training_step", "configure_optimizers"} & set(vars(module))


class Trainable(Regression):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        raise AssertionError

    def configure_optimizers(self) -> None:
        return None


def test_forward_is_called_with_the_batch(compressor: Compressor) -> None:
    module, other = Trainable(), Regression()
    data = torch.randn(6, 8, 32)
    report = compressor.compress(module, recipe=GPTQ, output_dir=None, dataloaders=data)
    compressor.compress(other, recipe=GPTQ, output_dir=None, dataloaders=data)
    assert [record.num_tokens for record in report.modules] == [48, 48]
    assert (report.num_samples, report.num_tokens) == (None, None), "what has no token ids has no number of them"
    assert same(weights_of(module), weights_of(other))


class WithStep(TinyModule):
    """Has a calibration step of its own, with a dropout that must be off in it."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.9)

    def calibration_step(self, batch: dict[str, Tensor]) -> Tensor:
        embedded = self.dropout(self.model.get_input_embeddings()(batch["tokens"]))
        logits: Tensor = self.model(inputs_embeds=embedded).logits
        return logits


def test_calibration_step_comes_first_and_runs_in_eval_mode(compressor: Compressor) -> None:
    """`tokens` is no field of the model: only the step can have run. Fails when only the model is set to eval."""
    module, plain = WithStep(), tiny_model()
    batches = [{"tokens": batch["input_ids"]} for batch in loader()]
    compressor.compress(module, recipe=GPTQ, output_dir=None, dataloaders=batches)
    compressor.compress(plain, recipe=GPTQ, output_dir=None, dataloaders=loader())
    assert same(weights_of(module.model), weights_of(plain))
    assert module.dropout.training


class TwoModels(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = tiny_model(seed=1)


class TwoModelsWithStep(TwoModels):
    def calibration_step(self, batch: dict[str, Tensor]) -> Tensor:
        logits: Tensor = self.model(**batch).logits + self.teacher(**batch).logits
        return logits


@pytest.mark.slow
def test_two_models_need_a_calibration_step(compressor: Compressor) -> None:
    with pytest.raises(UnsupportedModelError, match=r"TwoModels holds several.*calibration_step\(self, batch\)"):
        compressor.compress(TwoModels(), recipe=GPTQ, output_dir=None, dataloaders=loader())
    recipe = {"modifiers": [{**GPTQ["modifiers"][0], "ignore": ["re:.*lm_head"]}]}
    report = compressor.compress(TwoModelsWithStep(), recipe=recipe, output_dir=None, dataloaders=loader())
    assert len(report.modules) == 28


def test_a_batch_without_names(compressor: Compressor) -> None:
    with pytest.raises(CompressionError, match=r"^A batch of type list cannot be passed to LlamaForCausalLM by name"):
        compressor.compress(
            tiny_model(),
            recipe=GPTQ,
            output_dir=None,
            dataloaders=[[sample["input_ids"][None]] for sample in samples(2)],
        )


@pytest.mark.parametrize("is_tensor", [True, False])
def test_samples_in_place_of_batches(compressor: Compressor, is_tensor: bool) -> None:
    """As iterating over a dataset gives them. Seen to fail: with what attention says of sizes that do not match."""
    data = [sample["input_ids"] if is_tensor else sample for sample in samples(3)]
    with pytest.raises(CompressionError, match=r"^A batch of LlamaForCausalLM has rows.*DataLoader\(dataset, batch_"):
        compressor.compress(tiny_model(), recipe=GPTQ, output_dir=None, dataloaders=data)


# ---- datamodules


class Data(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.stages: list[str] = []

    def setup(self, stage: str) -> None:
        self.stages.append(stage)

    def train_dataloader(self) -> Any:
        return loader(8)


class CalibrationData(Data):
    def calibration_dataloader(self) -> Any:
        return loader(4, start=50)


@pytest.mark.parametrize(("data", "num_batches"), [(Data, 2), (CalibrationData, 1)])
def test_datamodules(make_trainer: Any, data: type[Data], num_batches: int) -> None:
    datamodule = data()
    report = Compressor(make_trainer()).compress(TinyModule(), recipe=GPTQ, output_dir=None, datamodule=datamodule)
    assert report.num_batches == num_batches
    assert datamodule.stages == ["fit"]


# ---- the Trainer


def test_the_trainer_is_as_before(make_trainer: Any, output_dir: Path) -> None:
    """Its own CompressionCallback sits out; afterwards it trains, and that callback compresses."""
    own, module = compression(output_dir=output_dir), TinyModule()
    trainer = make_trainer(own, num_sanity_val_steps=1)
    state = trainer_state(trainer)
    for bits in (8, 4):
        recipe = {"modifiers": [{"algorithm": "rtn", "scheme": {"weights": {**_WEIGHTS, "num_bits": bits}}}]}
        report = Compressor(trainer).compress(tiny_model(), recipe=recipe, output_dir=None)
        assert {record.scheme for record in report.modules} == {record.scheme for record in report.modules[:1]}
        assert trainer_state(trainer) == state
    assert own.report is None
    assert not output_dir.exists()
    trainer.fit(module, loader())
    assert len(module.losses) == 4
    assert own.report is not None
    assert Compressor(trainer).compress(tiny_model(), recipe=RTN, output_dir=None).output_dir is None
    assert trainer_state(trainer) == state


_WEIGHTS = {"type": "int", "symmetric": True, "strategy": "group", "group_size": 16}


def test_errors_restore_the_trainer(make_trainer: Any, output_dir: Path) -> None:
    output_dir.mkdir()
    (output_dir / "other").touch()
    trainer = make_trainer(strategy="sequential_onload")
    state = trainer_state(trainer)
    model = tiny_model()
    with pytest.raises(OutputDirectoryError):
        Compressor(trainer).compress(model, recipe=RTN, output_dir=output_dir)
    assert trainer_state(trainer) == state
    assert model.training
    assert same(weights_of(model), weights_of(tiny_model()))
    assert len(Compressor(trainer).compress(model, recipe=RTN, output_dir=None).modules) == 14


def test_data_is_asked_for_only_where_needed(compressor: Compressor) -> None:
    with pytest.raises(CalibrationDataError, match=r"calibration=.*calibration_dataloader\(\).*w4a16_rtn"):
        compressor.compress(tiny_model(), recipe=GPTQ, output_dir=None)
    with pytest.raises(ValueError, match="either `dataloaders` or `datamodule`"):
        compressor.compress(tiny_model(), recipe=GPTQ, output_dir=None, dataloaders=loader(), datamodule=Data())
    assert compressor.compress(tiny_model(), recipe=RTN, output_dir=None).num_batches == 0


def test_precision_of_the_trainer(make_trainer: Any, output_dir: Path) -> None:
    """Stock strategies cast the model to `bf16-true`, before it is quantized."""
    module = TinyModule()
    Compressor(make_trainer(precision="bf16-true")).compress(
        module, recipe=GPTQ, output_dir=output_dir, dataloaders=loader()
    )
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    restored = load_compressed(tiny_model().to(torch.bfloat16), output_dir)
    assert same(weights_of(restored), weights_of(module.model))


def test_options_are_the_callbacks(compressor: Compressor) -> None:
    report = compressor.compress(
        tiny_model(), recipe=GPTQ, output_dir=None, dataloaders=loader(), max_samples=4, schedule="block"
    )
    assert (report.num_batches, report.schedule) == (1, "block")
    with pytest.raises(TypeError, match="unknown_option"):
        compressor.compress(tiny_model(), recipe=GPTQ, output_dir=None, unknown_option=1)


def test_what_is_of_another_kind(compressor: Compressor) -> None:
    """Seen to fail: with errors about attributes that nobody has heard of."""
    with pytest.raises(CompressionError, match=r"^memory='4GiB' is no mapping of options such as host_budget: "):
        CompressionCallback(GPTQ, None, memory="4GiB")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^The trainer is a Trainer, not None"):
        Compressor(None).compress(tiny_model(), recipe=RTN, output_dir=None)  # type: ignore[arg-type]
    for given, said in ((pl.LightningDataModule, "the class LightningDataModule"), (loader(), "a DataLoader")):
        with pytest.raises(
            TypeError, match=rf"^The datamodule is a LightningDataModule, not {said}; loaders are given"
        ):
            compressor.compress(tiny_model(), recipe=RTN, output_dir=None, datamodule=given)
    with pytest.raises(TypeError, match=r"^The model is a Module, not 'folder'; a model is loaded before"):
        compressor.compress("folder", recipe=RTN, output_dir=None)  # type: ignore[arg-type]


def test_callback_of_an_earlier_run_is_gone(make_trainer: Any) -> None:
    trainer = make_trainer()
    Compressor(trainer).compress(tiny_model(), recipe=RTN, output_dir=None)
    assert not any(isinstance(callback, CompressionCallback) for callback in trainer.callbacks)


@pytest.mark.parametrize("finder", [LearningRateFinder, BatchSizeFinder])
def test_callbacks_that_search_for_settings_of_a_training_sit_out(make_trainer: Any, finder: type[Any]) -> None:
    trainer = make_trainer(finder())
    state = trainer_state(trainer)
    assert Compressor(trainer).compress(tiny_model(), recipe=GPTQ, output_dir=None, dataloaders=loader()).num_batches
    assert trainer_state(trainer) == state
