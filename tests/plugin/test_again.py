"""Modules that were compressed before: what is left of that, and what is said."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from lightning_compress import Compressor, load_compressed, parameters_on_meta
from lightning_compress.calibration.quantized import InputQuantizer, quantize_inputs
from lightning_compress.errors import RunWarning

from .conftest import GPTQ, TinyModule, compression, loader, samples, tiny_model, weights_of

CHANNEL = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
W8A8 = {"modifiers": [{"algorithm": "rtn", "scheme": {"weights": CHANNEL, "input_activations": TOKEN}}]}
ON_INPUTS = r"made 14 modules \(model.layers.0.self_attn.q_proj, \.\.\.\) quantize their inputs"
ON_WEIGHTS = r"14 weights \(model.layers.0.self_attn.q_proj.weight, \.\.\.\) are as an earlier compression left them"

SAVED = "quantized.ckpt was saved behind a compression: its weights are quantized already"


class SavesAtEnd(Callback):
    """Of the training, before what is behind it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.file)


def logits(model: torch.nn.Module) -> Tensor:
    model.eval()
    with torch.no_grad():
        found: Tensor = model(input_ids=samples(1)[0]["input_ids"][None]).logits
    return found


def test_a_checkpoint_without_quantized_inputs_is_loaded_over_one_with(compressor: Compressor, tmp_path: Path) -> None:
    """Seen to fail: with the inputs' quantizers left on the module."""
    model, other = tiny_model(), tiny_model()
    compressor.compress(model, recipe=W8A8, output_dir=None, dataloaders=loader())
    compressor.compress(other, recipe=GPTQ, output_dir=tmp_path / "w4", dataloaders=loader())
    load_compressed(model, tmp_path / "w4")
    assert torch.equal(logits(model), logits(other))


def test_what_is_compressed_again_reads_its_inputs_whole_and_says_so(compressor: Compressor, tmp_path: Path) -> None:
    """Seen to fail: with the quantizers left, where the checkpoint differs, and with nothing said of the weights."""
    model = tiny_model()
    compressor.compress(model, recipe=W8A8, output_dir=None, dataloaders=loader())
    with pytest.warns(UserWarning, match=ON_INPUTS), pytest.warns(UserWarning, match=ON_WEIGHTS):
        report = compressor.compress(model, recipe=GPTQ, output_dir=tmp_path / "w4", dataloaders=loader())
    assert report.verification is not None
    assert report.verification.passed
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_weights_that_are_loaded_anew_are_the_originals(compressor: Compressor) -> None:
    """Warnings are errors. Seen to fail: with modules that are known by having been quantized once."""
    model = tiny_model()
    original = {name: tensor.clone() for name, tensor in weights_of(model).items()}
    compressor.compress(model, recipe=GPTQ, output_dir=None, dataloaders=loader())
    model.load_state_dict(original, strict=False)
    compressor.compress(model, recipe=GPTQ, output_dir=None, dataloaders=loader())


def test_weights_that_are_read_from_files_are_the_originals(compressor: Compressor, tmp_path: Path) -> None:
    """Warnings are errors."""
    tiny_model().save_pretrained(tmp_path / "model")
    with parameters_on_meta():
        model = LlamaForCausalLM(tiny_model().config)
    for number in range(2):
        given = {"output_dir": tmp_path / f"out{number}", "weights": tmp_path / "model", "dataloaders": loader()}
        compressor.compress(model, recipe=GPTQ, **given)


def test_a_training_behind_a_compression_trains_all(make_trainer: Any) -> None:
    """Gradients pass the rounding of inputs. Seen to fail: with a rounding that has none."""
    module = TinyModule()
    make_trainer(compression(W8A8, when="only")).fit(module, loader())
    before = {name: tensor.clone() for name, tensor in weights_of(module).items()}
    make_trainer(max_epochs=1).fit(module, loader())
    same = [name for name, tensor in weights_of(module).items() if torch.equal(tensor, before[name])]
    assert not same


def test_a_checkpoint_of_the_training_is_tested_as_it_is_and_that_is_said(make_trainer: Any, tmp_path: Path) -> None:
    """Lightning loads it where no module is given. Seen to fail: with inputs that are quantized still."""
    module = TinyModule()
    trainer = make_trainer(compression(W8A8), ModelCheckpoint(tmp_path), enable_checkpointing=True)
    trainer.fit(module, loader())
    trainer.test(module, loader(), verbose=False)
    with pytest.warns(UserWarning, match=r"trainer\.test.*epoch=0.*over the compressed weights.*test\(module, data"):
        trainer.test(dataloaders=loader(), ckpt_path="best", verbose=False)
    trained = TinyModule()
    trained.load_state_dict(torch.load(tmp_path / "epoch=0-step=4.ckpt", weights_only=True)["state_dict"])
    make_trainer().test(trained, loader(), verbose=False)
    compressed, loaded = module.test_losses[:4], module.test_losses[4:]
    assert loaded == trained.test_losses != compressed


def test_a_checkpoint_of_quantized_weights_is_known_for_one(
    make_trainer: Any, compressor: Compressor, tmp_path: Path
) -> None:
    """Warnings are errors where it is tested, or was trained since. Seen to fail: weights were quantized twice, and
    nothing was said."""
    module, files = TinyModule(), [tmp_path / name for name in ("trained.ckpt", "quantized.ckpt")]
    trainer = make_trainer(compression(), SavesAtEnd(files[0]))
    trainer.fit(module, loader())
    trainer.save_checkpoint(files[1])
    make_trainer(compression()).test(TinyModule(), loader(), ckpt_path=files[1], verbose=False)
    for file, said in zip(files, (nullcontext(), pytest.warns(UserWarning, match=SAVED)), strict=True):
        with said:
            make_trainer(compression(), max_epochs=2).fit(TinyModule(), loader(), ckpt_path=file)
    with parameters_on_meta():
        meta = TinyModule()
    for number, said in enumerate((nullcontext(), pytest.warns(RunWarning, match=SAVED))):
        given = {"output_dir": tmp_path / f"out{number}", "weights": files[number], "dataloaders": loader()}
        with said:
            compressor.compress(meta, recipe=GPTQ, **given)


def test_gradients_of_rounded_inputs_are_those_of_whole_ones() -> None:
    """Of a linear layer: what arrives from behind, times the weight. Values are the rounded ones, to the bit."""
    layer = nn.Linear(4, 3, bias=False)
    quantize_inputs(layer, InputQuantizer(QuantizationArgs(**TOKEN)))
    x = torch.randn(5, 4, requires_grad=True)
    behind = torch.randn(5, 3)
    out = layer(x)
    out.backward(behind)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, behind @ layer.weight.detach())
    with torch.no_grad():
        assert torch.equal(layer(x), out)
    assert not torch.equal(nn.functional.linear(x, layer.weight), out)
