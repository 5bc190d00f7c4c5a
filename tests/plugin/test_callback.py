"""`CompressionCallback`: what happens to the training around it, and when it refuses."""

import inspect
import random
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, EMAWeightAveraging, LearningRateFinder
from torch.utils.data import DataLoader, TensorDataset

from lightning_compress import CompressionCallback, CompressionError, Compressor
from lightning_compress.errors import CalibrationDataError, OutputDirectoryError, UnsupportedModelError

from .conftest import (
    GPTQ,
    RTN,
    WEIGHTS,
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


class AtTrainEnd(Callback):
    """Keeps, and can change, the weights in `on_train_end`."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self.weights: dict[str, torch.Tensor] = {}

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.mul_(self.factor)
        self.weights = weights_of(pl_module)


# ---- training is what it was without the callback


def _train(
    make_trainer: Any, data: Any, *callbacks: Callback, **options: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(7)
    module, last = TinyModule(), AtTrainEnd()
    make_trainer(*callbacks, last, max_epochs=2, **options).fit(module, data() if callable(data) else data)
    return module.losses, last.weights


class Noisy(torch.utils.data.Dataset[Any]):
    """Draws from torch's, NumPy's and Python's global generators."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        noise = int(torch.randint(0, 20, ())) + np.random.randint(0, 20) + random.randint(0, 20)
        return {"input_ids": (samples(1, index)[0]["input_ids"] + noise) % 64}


@pytest.mark.parametrize(
    "data",
    [
        lambda: loader(shuffle=True),
        lambda: loader(shuffle=True, generator=torch.Generator().manual_seed(3)),
        lambda: DataLoader(Noisy(), batch_size=4, shuffle=True),
    ],
    ids=["shuffled", "own-generator", "random-samples"],
)
def test_training_is_the_same_with_and_without(make_trainer: Any, data: Any) -> None:
    """Fails when `calibration_set` reads without `rng_kept`, or without `kept_generators`."""
    outcomes = []
    for callbacks in ([], [compression()]):
        np.random.seed(1)
        random.seed(1)
        outcomes.append(_train(make_trainer, data, *callbacks))
    assert outcomes[0][0] == outcomes[1][0]
    assert len(outcomes[0][0]) == 8
    assert same(outcomes[0][1], outcomes[1][1])


def test_persistent_workers_start_anew_for_training(make_trainer: Any) -> None:
    """Fails when the loader itself is iterated for calibration: its workers keep their random state."""

    def data() -> DataLoader[Any]:
        return DataLoader(Noisy(), batch_size=4, num_workers=1, persistent_workers=True)

    without, with_callback = (_train(make_trainer, data, *callbacks) for callbacks in ([], [compression()]))
    assert without[0] == with_callback[0]


# ---- after_train


def test_compresses_behind_all_on_train_end_hooks(make_trainer: Any, output_dir: Path) -> None:
    """Fails when the compression runs in our own `on_train_end`: then the doubling comes too late."""
    module, last = TinyModule(), AtTrainEnd(factor=2.0)
    callback = compression(output_dir=output_dir)
    make_trainer(callback, last).fit(module, loader())
    assert callback.report is not None
    assert callback.report.verification is not None
    assert callback.report.verification.passed
    written = exported(output_dir)
    assert same(written, weights_of(module.model))
    # what is not quantized is bit for bit what the last hook left; what is, is near it
    assert torch.equal(written["model.embed_tokens.weight"], last.weights["model.model.embed_tokens.weight"])
    name = "model.layers.1.mlp.down_proj.weight"
    before = last.weights[f"model.{name}"]
    assert 0 < (written[name] - before).norm() / before.norm() < 0.2


def test_averaged_weights_are_what_is_compressed(make_trainer: Any) -> None:
    averaging = EMAWeightAveraging(decay=0.5)
    module, callback, last = TinyModule(), compression(RTN), AtTrainEnd()
    make_trainer(callback, averaging, last, max_epochs=2).fit(module, loader())
    assert same(_rounded(last.weights), weights_of(module))


def _rounded(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Round-to-nearest of given weights by another way in."""
    module = TinyModule()
    module.load_state_dict(weights)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    Compressor(trainer).compress(module, recipe=RTN, output_dir=None)
    return weights_of(module)


def test_test_measures_the_quantized_weights(make_trainer: Any) -> None:
    module, held_out = TinyModule(), loader(4, start=99)
    trainer = make_trainer(
        compression({"modifiers": [{"algorithm": "rtn", "scheme": {"weights": {**WEIGHTS, "num_bits": 2}}}]})
    )
    trainer.fit(module, loader())
    quantized = weights_of(module)
    trainer.test(module, held_out, verbose=False)
    batch = next(iter(held_out))
    with torch.no_grad():
        expected = module.model(**batch, labels=batch["input_ids"]).loss.item()
    assert module.test_losses == [pytest.approx(expected)]
    assert same(weights_of(module), quantized)
    assert len(module.model.model.layers[0].mlp.up_proj.weight.unique()) <= 4 * 64 * 2  # 2 bits, 128 groups


def test_max_epochs_0_still_compresses(make_trainer: Any) -> None:
    module, callback = TinyModule(), compression()
    make_trainer(callback, max_epochs=0).fit(module, loader())
    assert module.losses == []
    assert callback.report is not None
    assert [record.name for record in callback.report.subgraphs] == [
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.1",
    ]


def test_fast_dev_run_is_one_layer_and_no_files(make_trainer: Any, output_dir: Path) -> None:
    module, callback = TinyModule(), compression(output_dir=output_dir)
    make_trainer(callback, fast_dev_run=2).fit(module, loader())
    assert callback.report is not None
    assert callback.report.is_partial
    assert [callback.report.num_batches, len(module.losses)] == [2, 2]
    assert {record.subgraph for record in callback.report.modules} == {"model.layers.0"}
    assert not output_dir.exists()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_fit_can_be_called_again(make_trainer: Any, strategy: str, output_dir: Path) -> None:
    module, callback = TinyModule(), compression(output_dir=output_dir)
    module.model.model.layers[0].mlp.eval()
    modes = {name: part.training for name, part in module.named_modules()}
    trainer = make_trainer(callback, strategy=strategy, log_every_n_steps=3)
    before = trainer_state(trainer)
    with pytest.warns(UserWarning, match="eval mode at the start of training"):
        trainer.fit(module, loader())
    assert trainer_state(trainer) == before
    assert {name: part.training for name, part in module.named_modules()} == modes
    assert trainer.global_step == 4
    first = callback.report
    trainer.fit_loop.max_epochs = 2
    module.train()
    with warnings.catch_warnings():  # DDP sends the weights around, and does not know them again
        warnings.filterwarnings("ignore", "14 weights .* are as an earlier compression left them")
        trainer.fit(module, loader())
    assert len(module.losses) == 8
    assert trainer.global_step == 8
    assert callback.report is not first
    assert same(exported(output_dir), weights_of(module.model))


# ---- only


def test_only_does_not_train(make_trainer: Any, output_dir: Path) -> None:
    module = TinyModule()
    module.validation_step = lambda batch, index: pytest.fail("validated")  # type: ignore[method-assign]
    before = weights_of(module)
    callback = compression(output_dir=output_dir, when="only")
    trainer = make_trainer(callback, num_sanity_val_steps=2)
    state = trainer_state(trainer)
    trainer.fit(module, loader(), loader(4))
    after = weights_of(module)
    assert module.losses == []
    assert trainer.global_step == 0
    assert trainer_state(trainer) == state
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "_proj" in name}
    assert same(exported(output_dir), weights_of(module.model))


@pytest.mark.parametrize("strategy", ["auto", "sequential_onload"])
def test_only_compresses_the_weights_of_ckpt_path(make_trainer: Any, tmp_path: Path, strategy: str) -> None:
    """And of its weights alone: it had more epochs, and another optimizer. Seen to fail: with a strategy that loads
    nothing out of checkpoints, and with loops and optimizers restored."""
    trained = TinyModule()
    trained.configure_optimizers = lambda: torch.optim.Adam(trained.parameters())  # type: ignore[method-assign]
    trainer = make_trainer(max_epochs=3)
    trainer.fit(trained, loader())
    trainer.save_checkpoint(tmp_path / "trained.ckpt")
    fresh, callback = TinyModule(), compression(RTN, when="only")
    make_trainer(callback, strategy=strategy).fit(fresh, loader(), ckpt_path=tmp_path / "trained.ckpt")
    assert same(_rounded(weights_of(trained)), weights_of(fresh))


def test_validation_and_sanity_check_are_as_before_after_train(make_trainer: Any) -> None:
    counts = []
    for callbacks in ([], [compression()]):
        module = TinyModule()
        calls: list[int] = []
        module.validation_step = lambda batch, index, calls=calls: calls.append(index)  # type: ignore[method-assign]
        make_trainer(*callbacks, num_sanity_val_steps=1).fit(module, loader(), loader(8))
        counts.append(calls)
    assert counts[0] == counts[1] == [0, 0, 1]


def test_learning_rate_finder_does_not_compress(make_trainer: Any) -> None:
    """It runs the fit loop by itself in `on_fit_start`; Lightning puts it before other callbacks, so before ours."""
    module, callback = TinyModule(), compression()
    reports: list[Any] = []
    module.on_train_start = lambda: reports.append(callback.report)  # type: ignore[method-assign]
    finder = LearningRateFinder(num_training_steps=3, attr_name="learning_rate")
    make_trainer(callback, finder).fit(module, loader())
    assert reports == [None, None]  # once in the finder, once in training
    assert callback.report is not None


class EveryEpoch(LearningRateFinder):
    """As Lightning's documentation has it: searches anew in epochs of the training."""

    def on_fit_start(self, *args: Any) -> None:
        return

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.lr_find(trainer, pl_module)


class BatchSizes(BatchSizeFinder):
    def on_fit_start(self, *args: Any) -> None:
        return

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.scale_batch_size(trainer, pl_module)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("finder", [EveryEpoch, BatchSizes])
def test_a_search_in_mid_training_does_not_compress(make_trainer: Any, finder: type[Any]) -> None:
    """It takes this callback from the trainer's. Compressing there, the second epoch trains quantized weights."""
    finds = finder(**({"num_training_steps": 3} if finder is EveryEpoch else {"steps_per_trial": 1, "max_trials": 1}))
    module, callback, reports = TinyModule(), compression(), list[Any]()
    module.batch_size = 4  # type: ignore[assignment]
    module.train_dataloader = lambda: loader(batch_size=module.batch_size)  # type: ignore[method-assign]
    module.on_train_batch_end = lambda *_: reports.append(callback.report)  # type: ignore[method-assign]
    make_trainer(callback, finds, max_epochs=2).fit(module)
    assert set(reports) == {None}
    assert callback.report is not None


# ---- refused before training


def _refused(
    make_trainer: Any,
    callback: CompressionCallback,
    match: str,
    error: type[Exception] = CompressionError,
    data: Any = None,
) -> None:
    module = TinyModule()
    trainer = make_trainer(callback)
    state = trainer_state(trainer)
    torch.manual_seed(7)
    numbers = torch.get_rng_state().tolist(), random.getstate()
    with pytest.raises(error, match=match):
        trainer.fit(module, loader() if data is None else data)
    assert module.losses == []
    assert trainer_state(trainer) == state
    assert (torch.get_rng_state().tolist(), random.getstate()) == numbers


def test_foreign_output_dir_is_found_before_training(make_trainer: Any, output_dir: Path) -> None:
    output_dir.mkdir()
    (output_dir / "thesis.tex").touch()
    _refused(
        make_trainer, compression(output_dir=output_dir), "was not written by lightning_compress", OutputDirectoryError
    )
    assert [path.name for path in output_dir.iterdir()] == ["thesis.tex"]


def test_bad_group_size_is_found_before_training(make_trainer: Any) -> None:
    recipe = {"modifiers": [{"algorithm": "gptq", "scheme": {"weights": {**WEIGHTS, "group_size": 24}}}]}
    _refused(make_trainer, compression(recipe), r"model\.layers\.0\.self_attn\.q_proj.*24", UnsupportedModelError)


def test_bad_data_is_found_before_training(make_trainer: Any) -> None:
    """Seen to fail: what is drawn afterwards was what a seed of 0 gives."""
    _refused(make_trainer, compression(calibration=[]), "empty", CalibrationDataError)


def test_two_callbacks_are_refused(make_trainer: Any) -> None:
    module = TinyModule()
    with pytest.raises(UnsupportedModelError, match="several CompressionCallbacks"):
        make_trainer(compression(), compression(RTN)).fit(module, loader())
    assert module.losses == []


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"when": "later"}, "'later' is not known.*'after_train' or 'only'"),
        ({"max_samples": 0}, "max_samples=0"),
        ({"max_samples": "16"}, "max_samples='16' is no whole number of at least 1"),
        ({"max_samples": 10.5}, "max_samples=10.5 is no whole number"),
        ({"seed": "x"}, "seed='x' is no whole number"),
        ({"seed": 2**40}, "seed=1099511627776 is more than 4294967295"),
        ({"schedule": "fast"}, "fast"),
        ({"output_dir": 5}, "output_dir=5 is no path"),
        ({"output_dir": ""}, "output_dir='' is no path"),
        ({"output_dir": "???"}, "output_dir has to be given: a folder; or None"),
        ({"sequential_targets": 3}, "sequential_targets=3 is no list of class names"),
        ({"sequential_targets": ["Linear", 3]}, r"sequential_targets=\['Linear', 3\] is no list"),
        ({"memory": {"prefetch_depth": "1"}}, "prefetch_depth='1' is no number"),
        ({"memory": {"scratch_dir": 3}}, "scratch_dir=3 is no path"),
        ({"recipe": [{"algorithm": "rtn"}]}, r"this is a list. A list of modifiers is given as \{modifiers"),
        ({"weights": 5, "when": "only"}, "weights=5 is no path"),
        ({"verify": "no"}, "verify='no' is neither True nor False"),
        ({"keep_activations": "no"}, "keep_activations='no' is neither"),
        ({"tokenizer": 5}, r"tokenizer=5 has no `save_pretrained`.*AutoTokenizer.from_pretrained"),
        ({"tokenizer": "gpt2"}, r"tokenizer='gpt2' is no folder: give one, or .*AutoTokenizer.from_pretrained"),
        ({"tokenizer": Path(__file__).parent}, r"tokenizer='.*plugin' cannot be loaded: "),
        ({"calibration": 5}, "The calibration data is a int: give a DataLoader"),
        ({"calibration": TensorDataset(torch.zeros(2, 3))}, r"a dataset \(TensorDataset\).*DataLoader\(dataset, batch"),
    ],
)
def test_bad_arguments(options: dict[str, Any], match: str) -> None:
    with pytest.raises(CompressionError, match=match):
        compression(**{"recipe": GPTQ, **options})


def test_output_dir_is_not_left_out_unseen() -> None:
    """It has a default all the same, since jsonargparse takes what has none, and is null, as left out."""
    assert inspect.signature(CompressionCallback).parameters["output_dir"].default == "???"
    with pytest.raises(CompressionError, match="output_dir has to be given"):
        CompressionCallback(GPTQ)


def test_the_model_alone_is_the_reference(make_trainer: Any) -> None:
    """The seeds of this file's helpers give one model, without which comparisons above would be idle."""
    assert same(weights_of(tiny_model()), weights_of(TinyModule().model))


def test_a_tokenizer_by_its_folder(checkpoint: Path) -> None:
    """As configuration files give it; seen to fail."""
    found = compression(GPTQ, tokenizer=str(checkpoint)).settings.tokenizer
    assert found.eos_token == "<eos>"  # type: ignore[union-attr]
