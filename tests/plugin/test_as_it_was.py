"""A training with a compression behind it is the training without: what trying a batch, and recording it, leave."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, default_collate
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from lightning_compress import Compressor
from lightning_compress.errors import UnsupportedModelError

from .conftest import BATCH_SIZE, GPTQ, RTN, VOCABULARY, TinyModule, compression, loader, same, samples, weights_of


class Meter:
    """As users write them: numbers, a tensor that is added to, a list."""

    def __init__(self) -> None:
        self.sum, self.count, self.losses = torch.zeros(()), 0, list[Tensor]()

    def update(self, loss: Tensor) -> None:
        self.sum += loss
        self.count += 1
        self.losses.append(loss)


class Counts(TinyModule):
    """Its step is what calibration runs."""

    def __init__(self) -> None:
        super().__init__()
        names = {"top1": MulticlassAccuracy(VOCABULARY), "top3": MulticlassAccuracy(VOCABULARY, top_k=3)}
        self.metrics = MetricCollection(names)
        self.meter, self.kept = Meter(), SimpleNamespace(out=None)
        self.found: list[dict[str, Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        labels = batch.pop("labels").flatten()
        logits = self.model(**batch).logits.flatten(0, 1)
        self.kept = BaseModelOutput(last_hidden_state=logits)
        self.metrics.update(logits, labels)
        loss = cross_entropy(logits, labels)
        self.meter.update(loss.detach())
        return loss

    def calibration_step(self, batch: Any) -> Tensor:
        return self.training_step(batch, 0)

    def on_train_epoch_end(self) -> None:
        self.found.append(self.metrics.compute())
        self.metrics.reset()


def labelled(batch: list[dict[str, Tensor]]) -> BatchEncoding:
    made = default_collate(batch)
    return BatchEncoding({**made, "labels": made["input_ids"].clone()})


def test_metrics_and_meters_count_the_training_alone(make_trainer: Any) -> None:
    """Seen to fail: a collection took metrics for one whose states were alike while nothing was counted; meters counted
    the batch that was tried, and held tensors without values behind the compression; an output of transformers lets
    nobody clear it; and a step that takes something out of its batch took it out of the calibration set's."""
    found = []
    for callbacks in ([], [compression(GPTQ)]):
        module = Counts()
        make_trainer(*callbacks, max_epochs=2).fit(
            module,
            DataLoader(samples(), BATCH_SIZE, collate_fn=labelled),  # type: ignore[arg-type]
        )
        assert module.meter.count == len(module.meter.losses) == 8
        found.append([*module.found, {"sum": module.meter.sum}])
    assert found[0] == found[1]
    assert all(epoch["top1"] < epoch["top3"] for epoch in found[0][:2])


def test_a_step_that_writes_to_its_batch(make_trainer: Any) -> None:
    """Seen to fail: the first batch of the calibration set was changed by trying it, and all of a user's list by the
    run."""

    class Writes(TinyModule):
        def calibration_step(self, batch: Any) -> Any:
            batch["input_ids"].add_(1).remainder_(VOCABULARY)
            return self.model(**batch)

    batches = [default_collate(samples(4, start)) for start in range(2)]
    before = [batch["input_ids"].clone() for batch in batches]
    callback = compression(GPTQ)
    callback.calibration = batches
    make_trainer(callback).fit(Writes(), loader())
    assert all(torch.equal(batch["input_ids"], ids) for batch, ids in zip(batches, before, strict=True))


@pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint")
@pytest.mark.parametrize("how", ["done", "only", "compressor"])
def test_averages_of_a_checkpoint_are_what_is_compressed(how: str, make_trainer: Any, tmp_path: Path) -> None:
    """As behind the training itself. Seen to fail: the weights that it had averaged."""
    trained, saves = TinyModule(), ModelCheckpoint(tmp_path, save_last=True)
    make_trainer(EMAWeightAveraging(decay=0.9), saves, max_epochs=2, enable_checkpointing=True).fit(trained, loader())
    expected, module = TinyModule(), TinyModule()
    expected.load_state_dict(torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"])
    Compressor(make_trainer()).compress(expected, recipe=RTN, output_dir=None)
    averaging, place = EMAWeightAveraging(decay=0.9), tmp_path / "last.ckpt"
    if how == "compressor":
        Compressor(make_trainer(averaging)).compress(module, recipe=RTN, output_dir=None, ckpt_path=place)
    else:
        callback = compression(RTN, when="only" if how == "only" else "after_train")
        make_trainer(averaging, callback, max_epochs=2).fit(module, loader(), ckpt_path=place)
    assert same(weights_of(module), weights_of(expected))


def test_a_state_dict_without_some_of_the_weights(make_trainer: Any, tmp_path: Path) -> None:
    """Seen to fail: KeyError behind the training, or a checkpoint without them."""

    class Leaves(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
            self.steps = 0

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.steps += 1
            return self.second(self.first(batch)).sum()  # type: ignore[no-any-return]

        def calibration_step(self, batch: Tensor) -> Tensor:
            return self.second(self.first(batch))  # type: ignore[no-any-return]

        def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
            return {key: value for key, value in super().state_dict(*args, **kwargs).items() if "first" not in key}

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Leaves()
    with pytest.raises(UnsupportedModelError, match=r"leaves out, or .* 2 parameters \(first.weight, first.bias"):
        make_trainer(compression(RTN, tmp_path / "out")).fit(module, DataLoader(torch.randn(4, 16), 2))  # type: ignore[arg-type]
    assert module.steps == 0

    class Renames(Leaves):
        def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
            return {f"inner.{key}": value for key, value in pl.LightningModule.state_dict(self, *args).items()}

    with pytest.raises(UnsupportedModelError, match=r"names otherwise, 4 parameters"):
        make_trainer(compression(RTN, tmp_path / "out")).fit(Renames(), DataLoader(torch.randn(4, 16), 2))  # type: ignore[arg-type]
