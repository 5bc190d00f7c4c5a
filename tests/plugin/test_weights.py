"""Models without values under a Trainer: how they are built, where their weights come from, and what is refused."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers import contents
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_compress import CompressionError, Compressor, parameters_on_meta
from lightning_compress.errors import UnsupportedModelError
from lightning_compress.memory.source import is_on_meta
from lightning_compress.plugin.strategy import SequentialOnloadStrategy

from .conftest import GPTQ, RTN, TinyModule, compression, exported, loader, same, tiny_model, trainer_state, weights_of

IGNORING_LM_HEAD = {"modifiers": [{**GPTQ["modifiers"][0], "ignore": ["re:.*lm_head"]}]}


class Configured(TinyModule):
    """Builds its model in `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        del self.model

    def build(self) -> nn.Module:
        return tiny_model()

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = self.build()


class Headed(TinyModule):
    """Has weights beside the transformers model's, so it is compressed as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.head = head()

    def calibration_step(self, batch: dict[str, Tensor]) -> Tensor:
        hidden: Tensor = self.head(self.model.model(**batch).last_hidden_state)
        return hidden


def head() -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Linear(32, 16)


def trained(make_trainer: Any, file: Path, kind: type[TinyModule] = TinyModule) -> TinyModule:
    """A module and its Lightning checkpoint, optimizer states inside."""
    module = kind()
    trainer = make_trainer()
    trainer.fit(module, loader())
    trainer.save_checkpoint(file)
    assert torch.load(file, weights_only=True)["optimizer_states"][0]["state"]
    return module


@pytest.mark.sampled(4)
@pytest.mark.parametrize("source", ["folder", "checkpoint"])
@pytest.mark.parametrize("way", ["init_module", "configure_model", "parameters_on_meta"])
def test_every_way_to_a_module_on_meta(
    make_trainer: Any, tmp_path: Path, output_dir: Path, way: str, source: str
) -> None:
    """The files are those of the run in memory. Fails where a way builds in memory: `weights=` is refused then."""
    reference = trained(make_trainer, tmp_path / "trained.ckpt")
    reference.model.save_pretrained(tmp_path / "folder")
    weights = tmp_path / ("folder" if source == "folder" else "trained.ckpt")
    callback = compression(output_dir=output_dir, when="only", weights=weights)
    trainer = make_trainer(callback, strategy="sequential_onload", enable_model_summary=True)
    contexts = {"init_module": trainer.init_module(empty_init=True), "parameters_on_meta": parameters_on_meta()}
    with contexts.get(way, nullcontext()):
        module = Configured() if way == "configure_model" else TinyModule()
    state = trainer_state(trainer)
    trainer.fit(module, loader())
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
    assert trainer_state(trainer) == state
    assert callback.report is not None
    assert callback.report.verification is not None
    assert callback.report.verification.passed
    make_trainer(compression(output_dir=tmp_path / "memory", when="only")).fit(reference, loader())
    assert contents(output_dir) == contents(tmp_path / "memory")


def test_a_transformers_model_from_a_lightning_checkpoint(make_trainer: Any, tmp_path: Path, output_dir: Path) -> None:
    """Its names in there begin with the LightningModule's attribute, which nobody told."""
    reference = trained(make_trainer, tmp_path / "trained.ckpt")
    with parameters_on_meta():
        model = tiny_model()
    trainer = make_trainer(strategy="sequential_onload")
    options: dict[str, Any] = {"recipe": GPTQ, "dataloaders": loader()}
    Compressor(trainer).compress(model, output_dir=output_dir, weights=tmp_path / "trained.ckpt", **options)
    Compressor(trainer).compress(reference.model, output_dir=tmp_path / "memory", **options)
    assert contents(output_dir) == contents(tmp_path / "memory")


def test_a_checkpoint_with_a_second_like_model(make_trainer: Any, tmp_path: Path, output_dir: Path) -> None:
    """The LightningModule says where its model is in there; of a model alone that is not known."""
    trained(make_trainer, tmp_path / "trained.ckpt")
    content = torch.load(tmp_path / "trained.ckpt", weights_only=True)
    averages = {name.replace("model.", "ema.", 1): value + 1 for name, value in content["state_dict"].items()}
    torch.save({"state_dict": {**averages, **content["state_dict"]}}, tmp_path / "both.ckpt")
    for name in ("trained", "both"):
        with parameters_on_meta():
            module = TinyModule()
        callback = compression(RTN, tmp_path / name, when="only", weights=tmp_path / f"{name}.ckpt")
        make_trainer(callback, strategy="sequential_onload").fit(module, loader())
    assert contents(tmp_path / "both") == contents(tmp_path / "trained")
    with pytest.raises(CompressionError, match="holds 2 models that LlamaForCausalLM may be: ema, model"):
        Compressor(make_trainer(strategy="sequential_onload")).compress(
            module.model, recipe=RTN, output_dir=output_dir, weights=tmp_path / "both.ckpt"
        )


def test_configure_model_keeps_its_values_where_nothing_is_read(
    make_trainer: Any, tmp_path: Path, output_dir: Path
) -> None:
    """`from_pretrained` in there, too. Fails when it runs on meta: its values would be gone."""
    tiny_model(seed=3).save_pretrained(tmp_path / "folder")

    class Pretrained(Configured):
        def build(self) -> nn.Module:
            model: nn.Module = AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
            return model

    module = Pretrained()
    trainer = make_trainer(compression(RTN, output_dir, when="only"), strategy="sequential_onload")
    trainer.fit(module, loader())
    assert not is_on_meta(module)
    assert same(exported(output_dir), weights_of(module.model))
    with parameters_on_meta():
        lost = AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    with pytest.raises(UnsupportedModelError, match=r"needs weights=.*also by `from_pretrained`, are not kept"):
        Compressor(trainer).compress(lost, recipe=RTN, output_dir=output_dir)
    callback = compression(RTN, tmp_path / "streamed", when="only", weights=tmp_path / "folder")
    make_trainer(callback, strategy="sequential_onload").fit(Pretrained(), loader())
    assert contents(tmp_path / "streamed") == contents(output_dir)


def test_evaluation_reads_the_weights_that_were_named(make_trainer: Any, tmp_path: Path, output_dir: Path) -> None:
    """Into what `configure_model` builds: those of the strategy or, of the callback, what it has written, else what it
    reads. Seen to fail: built in memory, with values of its own."""

    class Random(Configured):
        def build(self) -> nn.Module:
            return tiny_model(seed=int(torch.randint(1000, ())))

    def loss(trainer: pl.Trainer, module: TinyModule) -> float:
        trainer.test(module, loader(4), verbose=False)
        return float(module.test_losses[-1])

    tiny_model(seed=3).save_pretrained(tmp_path / "folder")
    callback = compression(RTN, output_dir, when="only", weights=tmp_path / "folder")
    trainer = make_trainer(callback, strategy="sequential_onload")
    plain = make_trainer(strategy=SequentialOnloadStrategy(weights=tmp_path / "folder"))
    reference = TinyModule()
    reference.model = tiny_model(seed=3)
    original = loss(make_trainer(), reference)
    module = Random()
    assert loss(trainer, module) == pytest.approx(original)
    assert is_on_meta(module)
    assert loss(plain, Random()) == pytest.approx(original)
    trainer.fit(Random(), loader())
    reference.model = AutoModelForCausalLM.from_pretrained(output_dir)
    quantized = loss(make_trainer(), reference)
    assert quantized != pytest.approx(original)
    assert loss(trainer, Random()) == pytest.approx(quantized)
    with pytest.raises(UnsupportedModelError, match=r"but all parameters of TinyModule are in memory, and those would"):
        loss(plain, reference)
    with trainer.init_module():
        assert not is_on_meta(TinyModule())


def test_init_module_takes_the_precision(make_trainer: Any) -> None:
    trainer = make_trainer(strategy="sequential_onload", precision="bf16-true")
    for empty in (True, False):
        with trainer.init_module(empty_init=empty):
            module = TinyModule()
        assert {(p.dtype, p.device.type) for p in module.parameters()} == {(torch.bfloat16, "meta" if empty else "cpu")}
    assert {buffer.device.type for buffer in module.buffers()} == {"cpu"}


@pytest.mark.slow
def test_a_module_with_more_than_a_transformers_model(make_trainer: Any, tmp_path: Path, output_dir: Path) -> None:
    """Folders of transformers name the inner model's tensors; the head is in memory, or in a Lightning checkpoint."""
    reference = trained(make_trainer, tmp_path / "trained.ckpt", Headed)
    reference.model.save_pretrained(tmp_path / "folder")

    def attempt(module: pl.LightningModule, weights: Path | None, folder: Path) -> None:
        callback = compression(IGNORING_LM_HEAD, folder, when="only", weights=weights)
        make_trainer(callback, strategy="sequential_onload").fit(module, loader())

    with parameters_on_meta():
        module = Headed()
    with pytest.raises(
        CompressionError, match=r"lacks 2 parameters of Headed: head.weight \[16, 32\], head.bias \[16\]"
    ):
        attempt(module, tmp_path / "folder", output_dir)
    attempt(module, tmp_path / "trained.ckpt", output_dir)
    module.head = nn.Linear(32, 16)
    module.head.load_state_dict(reference.head.state_dict())  # type: ignore[operator, union-attr]
    attempt(module, tmp_path / "folder", tmp_path / "partly")
    attempt(reference, None, tmp_path / "memory")
    assert contents(output_dir) == contents(tmp_path / "partly") == contents(tmp_path / "memory")


def test_weights_for_a_model_in_memory_are_refused(make_trainer: Any, tmp_path: Path, output_dir: Path) -> None:
    """They would be ignored."""
    tiny_model().save_pretrained(tmp_path / "folder")
    for strategy, module in (("sequential_onload", TinyModule()), ("auto", Configured())):
        callback = compression(RTN, output_dir, when="only", weights=tmp_path / "folder")
        with pytest.raises(
            UnsupportedModelError, match=r"weights=\S+folder was given, but all.*LlamaForCausalLM are in memory.*Leave"
        ):
            make_trainer(callback, strategy=strategy).fit(module, loader())
    with pytest.raises(ValueError, match=r"weights= is read in place of a training; use when='only'"):
        compression(RTN, output_dir, weights=tmp_path / "folder")
    assert not output_dir.exists()


@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_models_on_meta_need_the_strategy(make_trainer: Any, tmp_path: Path, output_dir: Path, strategy: str) -> None:
    """Fails with PyTorch's "Cannot copy out of meta tensor" otherwise; in `configure_model` that gets a note."""
    tiny_model().save_pretrained(tmp_path / "folder")

    class OnMeta(Configured):
        def build(self) -> nn.Module:
            with parameters_on_meta():
                return tiny_model()

    with parameters_on_meta():
        module, model = TinyModule(), tiny_model()
    weights = {"weights": tmp_path / "folder", "when": "only"}
    match = r"are on the meta device, and \w+Strategy puts .*Trainer\(strategy='sequential_onload'\)"
    for options in (weights, {}):
        with pytest.raises(UnsupportedModelError, match=match):
            make_trainer(compression(RTN, output_dir, **options), strategy=strategy).fit(module, loader())
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM " + match):
        Compressor(make_trainer(strategy=strategy)).compress(
            model, recipe=RTN, output_dir=output_dir, weights=tmp_path / "folder"
        )
    with pytest.raises(NotImplementedError) as caught:
        make_trainer(compression(RTN, output_dir, **weights), strategy=strategy).fit(OnMeta(), loader())
    assert any("strategy='sequential_onload'" in note for note in caught.value.__notes__)


def test_ckpt_path_does_not_fill_a_model_on_meta(make_trainer: Any, tmp_path: Path, output_dir: Path) -> None:
    """PyTorch would load nothing into it, and only warn."""
    trained(make_trainer, tmp_path / "trained.ckpt")
    tiny_model().save_pretrained(tmp_path / "folder")
    with parameters_on_meta():
        module = TinyModule()
    callback = compression(RTN, output_dir, when="only", weights=tmp_path / "folder")
    with pytest.raises(UnsupportedModelError, match=r"`ckpt_path` would load nothing. Give the checkpoint as weights="):
        make_trainer(callback, strategy="sequential_onload").fit(module, loader(), ckpt_path=tmp_path / "trained.ckpt")


def test_errors_of_a_streamed_run_say_what_changed(make_trainer: Any, tmp_path: Path, output_dir: Path) -> None:
    """Nothing did: fails when the note speaks of quantized weights in memory."""
    broken = tiny_model()
    with torch.no_grad():
        broken.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    broken.save_pretrained(tmp_path / "folder")
    with parameters_on_meta():
        module = TinyModule()
    callback = compression(output_dir=output_dir, when="only", weights=tmp_path / "folder")
    with pytest.raises(CompressionError, match="NaN or Inf") as caught:
        make_trainer(callback, strategy="sequential_onload").fit(module, loader())
    (note,) = caught.value.__notes__
    assert note.startswith("It failed in model.layers.1. The model holds no weights and is as before")
    assert note.endswith(f"2 finished subgraphs are in {output_dir}; the same run continues there.")


class Attending(TinyModule):
    """torch's own attention, whose parameters are in other forms in a checkpoint of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.cross = nn.MultiheadAttention(16, 2, kdim=8, vdim=8, batch_first=True)

    def calibration_step(self, x: Tensor) -> Tensor:
        found: Tensor = self.cross(self.model(x), x[..., :8], x[..., :8])[0]
        return found

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.test_losses.append(self.calibration_step(batch).abs().mean().item())


def test_attention_on_disk(make_trainer: Any, tmp_path: Path) -> None:
    """Its original is read in one piece, and what was written in several."""
    module, checkpoint = Attending(), tmp_path / "trained.ckpt"
    torch.save({"state_dict": module.state_dict(), "pytorch-lightning_version": pl.__version__}, checkpoint)
    batches = [torch.randn(4, 6, 16) for _ in range(2)]
    scheme = {"weights": {"num_bits": 4, "strategy": "channel"}}
    recipe = {"modifiers": [{"algorithm": "gptq", "scheme": scheme}]}
    with parameters_on_meta():
        empty, other = Attending(), Attending()
    for given, name in ((module, "memory"), (empty, "disk")):
        compressor = Compressor(make_trainer(strategy="sequential_onload"))
        weights = None if name == "memory" else checkpoint
        how: dict[str, Any] = {"recipe": recipe, "dataloaders": batches, "output_dir": tmp_path / name}
        assert len(compressor.compress(given, weights=weights, **how).modules) == 10
    assert contents(tmp_path / "memory") == contents(tmp_path / "disk")
    make_trainer(strategy=SequentialOnloadStrategy(weights=tmp_path / "disk")).test(other, loader_of(batches))
    make_trainer().test(module, loader_of(batches))
    assert other.test_losses == pytest.approx(module.test_losses, rel=1e-5)


def loader_of(batches: list[Tensor]) -> DataLoader[Any]:
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
