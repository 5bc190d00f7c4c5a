"""What a Trainer's other parts do around a compression: searches and averages of trainings, loggers' steps, wrappers,
summaries, and trainings that had ended before."""

import argparse
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.data import DataLoader, TensorDataset

from lightning_compress import Compressor, SequentialOnloadStrategy, load_compressed, parameters_on_meta
from lightning_compress.errors import OutputDirectoryError, UnsupportedModelError
from lightning_compress.plugin import compat

from .conftest import compression

CHANNEL = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}
PER_CHANNEL = {"modifiers": [{"algorithm": "gptq", "scheme": {"weights": CHANNEL}}]}


class Net(pl.LightningModule):
    """Two layers, one of which is called its backbone."""

    def __init__(self, settings: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.backbone, self.head = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x).relu())  # type: ignore[no-any-return]

    def calibration_step(self, batch: Any) -> Tensor:
        return self(batch[0])  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches  # as schedules do
        return torch.optim.SGD(self.parameters(), lr=0.01)


def images() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(16, 16), torch.arange(16) % 4), batch_size=4)


@pytest.mark.parametrize("strategy", ["auto", "sequential_onload"])
@pytest.mark.parametrize("make", [lambda: StochasticWeightAveraging(1e-2), BackboneFinetuning])
def test_what_changes_a_training_sits_out(make: Any, strategy: str, make_trainer: Any) -> None:
    """Seen to fail: `SWA currently works with 1 optimizer`, a frozen backbone, and a dataloader for the schedule."""
    module = Net()
    compressor = Compressor(make_trainer(make(), strategy=strategy))
    report = compressor.compress(module, recipe=PER_CHANNEL, output_dir=None, dataloaders=images())
    assert len(report.modules) == 2
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert "configure_optimizers" not in vars(module)


@pytest.mark.parametrize(
    ("given", "who"),
    [
        (lambda out: {"callbacks": [ModelCheckpoint(out)], "enable_checkpointing": True}, "ModelCheckpoint"),
        (lambda out: {"default_root_dir": out, "enable_checkpointing": True}, "ModelCheckpoint"),
        (lambda out: {"logger": CSVLogger(out)}, "CSVLogger"),
    ],
)
def test_a_training_that_writes_into_the_checkpoint_s_folder(given: Any, who: str, tmp_path: Path) -> None:
    """Is refused before it begins. Seen to fail: when it had ended, for then the folder was somebody else's."""
    out, module = tmp_path / "out", Net()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    options = {"callbacks": [], "logger": False, "enable_checkpointing": False, **given(out)}
    options["callbacks"].append(compression(PER_CHANNEL, output_dir=out))
    quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1}
    quiet["log_every_n_steps"] = 1
    with pytest.raises(OutputDirectoryError, match=f"{who} writes to {out}.*Give a folder for the checkpoint alone"):
        pl.Trainer(**options, **quiet).fit(module, images())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


class Looks(Net):
    def on_fit_start(self) -> None:
        if not isinstance(self.trainer.strategy, SequentialOnloadStrategy):
            assert self.optimizers().param_groups  # type: ignore[union-attr]


def test_hooks_find_the_optimizers(make_trainer: Any) -> None:
    Compressor(make_trainer()).compress(Looks(), recipe=PER_CHANNEL, output_dir=None, dataloaders=images())


def test_averages_are_refused_where_nothing_trains(make_trainer: Any) -> None:
    callbacks = StochasticWeightAveraging(1e-2), compression(PER_CHANNEL, when="only")
    with pytest.raises(UnsupportedModelError, match=r"StochasticWeightAveraging wants an optimizer.*leave it out"):
        make_trainer(*callbacks, strategy="sequential_onload").fit(Net(), images())


def test_loggers_never_go_back(make_trainer: Any, tmp_path: Path) -> None:
    """Seen to fail: a second training, and a second compression, logged at steps that the first had used."""
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    trainer = make_trainer(compression(PER_CHANNEL), logger=logger, log_every_n_steps=1)
    trainer.fit(Net(), images())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Net(), images())
    text = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    place = text[0].split(",").index("step")
    steps = [int(line.split(",")[place]) for line in text[1:]]
    assert len(steps) > 8
    assert steps == sorted(set(steps))


def test_checkpoints_with_objects(make_trainer: Any, tmp_path: Path) -> None:
    """Of hyperparameters, which `trainer.fit` loads with weights_only=False. Seen to fail: no such argument."""
    trainer = make_trainer()
    trainer.fit(Net(argparse.Namespace(width=16)), images())
    trainer.save_checkpoint(tmp_path / "trained.ckpt")
    compressor = Compressor(make_trainer(strategy="sequential_onload"))
    options = {"recipe": PER_CHANNEL, "output_dir": None, "dataloaders": images()}
    report = compressor.compress(Net(), ckpt_path=tmp_path / "trained.ckpt", weights_only=False, **options)
    assert len(report.modules) == 2


@pytest.mark.parametrize(
    "wrap", [partial(torch.compile, backend="eager"), nn.DataParallel, Fabric(accelerator="cpu", devices=1).setup]
)
def test_wrappers_are_not_in_names(wrap: Any, make_trainer: Any, output_dir: Path) -> None:
    """Seen to fail: `_orig_mod.0.weight_packed`, which nothing loads, and a KeyError."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    compressor = Compressor(make_trainer(strategy="sequential_onload"))
    batches = [torch.randn(4, 16)]
    compressor.compress(wrap(model), recipe=PER_CHANNEL, output_dir=output_dir, dataloaders=batches)
    loaded = load_compressed(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), output_dir)
    assert torch.equal(loaded[0].weight, model[0].weight)


class WithExample(Net):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, 16)


class OfClass(Net):
    example_input_array = torch.zeros(2, 16)


@pytest.mark.parametrize("kind", [WithExample, OfClass])
def test_summaries_do_not_run_a_model_without_values(kind: type[Net], make_trainer: Any, tmp_path: Path) -> None:
    """Seen to fail: `Tensor on device meta is not on the expected device cpu`."""
    trainer = make_trainer()
    trainer.fit(Net(), images())
    trainer.save_checkpoint(tmp_path / "trained.ckpt")
    with parameters_on_meta():
        module = kind()
    trainer = make_trainer(strategy="sequential_onload", enable_model_summary=True)
    options = {"recipe": PER_CHANNEL, "output_dir": tmp_path / "out", "dataloaders": images()}
    report = Compressor(trainer).compress(module, weights=tmp_path / "trained.ckpt", **options)
    assert len(report.modules) == 2
    assert module.example_input_array is not None


class Folds(Net):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = parametrizations.weight_norm(self.backbone)

    def on_train_end(self) -> None:
        if hasattr(self.backbone, "parametrizations"):
            parametrize.remove_parametrizations(self.backbone, "weight")


def test_weights_that_are_folded_when_the_training_ends(make_trainer: Any) -> None:
    """Seen to fail: refused before the training, by the advice to fold them."""
    callback = compression(PER_CHANNEL)
    with pytest.warns(UserWarning, match=r"As the module is now it will not be.*on_train_end` of Folds"):
        make_trainer(callback).fit(Folds(), images())
    assert callback.report is not None
    assert len(callback.report.modules) == 2
    with pytest.raises(UnsupportedModelError, match="remove_parametrizations"):
        make_trainer(compression(PER_CHANNEL)).fit(Bare(), images())


def test_other_faults_are_found_before_a_training_that_folds(make_trainer: Any) -> None:
    """Seen to fail: refused when it had ended."""
    module = Folds()
    scheme = {"weights": CHANNEL | {"strategy": "group", "group_size": 24}}
    given = {"modifiers": [{"algorithm": "gptq", "scheme": scheme, "ignore": ["backbone"]}]}
    with pytest.raises(UnsupportedModelError, match=r"head has a weight of shape .* 24 does not divide"):
        make_trainer(compression(given)).fit(module, images())
    assert hasattr(module.backbone, "parametrizations")


class Counts(Net):
    num_steps = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.num_steps += 1


def test_masks_that_stay_are_told_before_the_training(make_trainer: Any) -> None:
    """Seen to fail: refused when it had ended."""
    module = Counts()
    pruning = ModelPruning("l1_unstructured", amount=0.3, make_pruning_permanent=False)
    with pytest.raises(UnsupportedModelError, match=r"ModelPruning\(make_pruning_permanent=False\).* of .*head"):
        make_trainer(compression(PER_CHANNEL), pruning).fit(module, images())
    assert module.num_steps == 0


def test_masks_that_a_hook_may_remove_are_no_matter(make_trainer: Any) -> None:
    class Removes(Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            for name in ("backbone", "head"):
                prune.remove(pl_module.get_submodule(name), "weight")

    callback = compression(PER_CHANNEL)
    pruning = ModelPruning("l1_unstructured", amount=0.3, make_pruning_permanent=False)
    with pytest.warns(UserWarning, match=r"As the module is now it will not be.*on_train_end` of Removes"):
        make_trainer(callback, pruning, Removes()).fit(Net(), images())
    assert callback.report is not None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of Lightning and torch
@pytest.mark.parametrize("when", ["after_train", "only"])
def test_averages_with_a_history(when: str, make_trainer: Any) -> None:
    """Seen to fail: flags of such parameters cannot be set, and the module was left in eval mode."""

    class Averages(Net):
        def __init__(self) -> None:
            super().__init__()
            self.average = nn.Parameter(torch.zeros_like(self.head.weight), requires_grad=False)

        def on_train_batch_end(self, *args: Any) -> None:
            self.average.lerp_(self.head.weight, 0.1)  # outside of `no_grad`

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.head.parameters(), 0.01)  # torch's refuse parameters with a history

    module, callback = Averages(), compression(PER_CHANNEL, when=when)
    if when == "only":
        make_trainer().fit(module, images())
        assert not module.average.is_leaf
    make_trainer(callback).fit(module, images())
    assert callback.report is not None
    assert module.training
    assert not module.average.requires_grad


class Bare(Net):
    """Nobody folds it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = parametrizations.weight_norm(self.backbone)


class Watching(Callback):
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pass


def test_the_end_of_a_training_that_had_ended(make_trainer: Any, tmp_path: Path) -> None:
    """Lightning does not call `on_train_end` again. Seen to fail: weights that were not averaged, without a word."""
    trained = make_trainer()
    trained.fit(Net(), images())
    trained.save_checkpoint(tmp_path / "last.ckpt")
    callback = compression(PER_CHANNEL)
    trainer = make_trainer(Watching(), callback)
    with pytest.warns(UserWarning, match=r"had ended when .*last.ckpt was saved.*`on_train_end` of Watching again"):
        trainer.fit(Net(), images(), ckpt_path=tmp_path / "last.ckpt")
    assert callback.report is not None


@pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint")
def test_the_end_of_a_training_whose_last_step_was_saved(make_trainer: Any, tmp_path: Path) -> None:
    """Lightning ends it, behind no step. Seen to fail: said not to be called."""
    saver = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1, save_top_k=-1)
    make_trainer(saver, enable_checkpointing=True).fit(Net(), images())
    callback = compression(PER_CHANNEL)
    (last,) = (tmp_path / "saved").glob("*step=4.ckpt")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        make_trainer(Watching(), callback).fit(Net(), images(), ckpt_path=last)
    assert callback.report is not None
    assert not [each for each in told if "had ended when" in str(each.message)]


def test_wrappers_are_taken_off_one_by_one() -> None:
    inner = nn.Linear(2, 2)
    assert compat.unwrapped(nn.DataParallel(torch.compile(inner, backend="eager"))) is inner  # type: ignore[arg-type]
    assert compat.unwrapped(inner) is inner
