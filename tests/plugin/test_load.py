"""What is loaded. `model.load=auto` looks at what is free: the same on all ranks, and for a run that is continued. Seen
to fail: such a run was another one, of other weights, and a finished checkpoint was computed anew."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from transformers import BertConfig

from lightning_compress.calibration.resume import Begun, begun_run
from lightning_compress.command import models
from lightning_compress.command.compress import run_compress
from lightning_compress.command.models import agreed_from_disk, load_config_only, reads_from_disk
from lightning_compress.distributed.collective import SingleProcess
from lightning_compress.errors import OutputDirectoryError, RunWarning
from lightning_compress.export.writer import CheckpointWriter
from lightning_compress.recipe.load import config_dir

SMALL = ("data.num_samples=4", "data.max_length=32", "data.batch_size=2", "trainer=cpu", "recipe=w4a16_rtn")


def composed(checkpoint: Path, *overrides: str) -> DictConfig:
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        given = [f"model.path={checkpoint}", "output_dir=unused", *SMALL, *overrides]
        return compose("compress", overrides=given)


def size_of(checkpoint: Path) -> int:
    return sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))


def set_free(monkeypatch: pytest.MonkeyPatch, num_bytes: float) -> None:
    monkeypatch.setattr(models, "available_bytes", lambda: int(num_bytes))


def test_a_run_is_continued_as_it_began(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed one, and a finished one that is started again; unless its weights fit no more, which is said."""
    commit, out = CheckpointWriter.commit, tmp_path / "out"

    def killed(writer: CheckpointWriter, subgraph: Any, record: Any) -> Any:
        if record.index == 1:
            raise RuntimeError("killed")
        return commit(writer, subgraph, record)

    config = composed(checkpoint)
    set_free(monkeypatch, 10 * size_of(checkpoint))
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "commit", killed)
        with pytest.raises(RuntimeError, match="killed"):
            run_compress(config, out)
    assert begun_run(out) == Begun(expert_parts=1, from_disk=False)
    set_free(monkeypatch, 0)
    with pytest.raises(
        OutputDirectoryError, match=r"were all in memory, and are not now: with model.load=memory it may"
    ):
        run_compress(config, out)
    set_free(monkeypatch, 1.5 * size_of(checkpoint))
    assert reads_from_disk(config.model)
    assert run_compress(config, out).num_resumed == 1
    report = run_compress(config, out)
    assert report.num_resumed == len(report.subgraphs)
    assert run_compress(composed(checkpoint, "calibration.resume=never"), out).num_resumed == 0
    assert begun_run(out) == Begun(expert_parts=1, from_disk=True)
    set_free(monkeypatch, 10 * size_of(checkpoint))
    assert run_compress(config, out).num_resumed == len(report.subgraphs)


@dataclass(frozen=True)
class OfTwo(SingleProcess):
    """Rank 0 of two on one machine; the other says `theirs`."""

    theirs: bool = False
    size: int = 2

    def gather(self, value: Any, what: str) -> list[Any]:
        return [value, self.theirs]


def test_ranks_agree(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If there is not room for all of them in one place, none loads the model."""
    trainer: Any = SimpleNamespace(world_size=2, num_nodes=1)
    model = composed(checkpoint).model
    for sizes, theirs, expected in ((5, False, False), (5, True, True), (3, False, True)):
        set_free(monkeypatch, sizes * size_of(checkpoint))
        assert agreed_from_disk(model, trainer, OfTwo(theirs=theirs)) is expected
    assert not agreed_from_disk(composed(checkpoint, "model.load=memory").model, trainer, OfTwo())


@pytest.mark.parametrize("load", ["memory", "disk"])
def test_a_part_of_what_is_in_the_folder_is_told(load: str, checkpoint: Path, tmp_path: Path) -> None:
    """Seen to fail: without a word, an encoder was left out of a Whisper that was taken for a causal language model."""
    recipe = "recipe.modifiers.0.scheme={weights:{num_bits:8,strategy:channel}}"
    told = r"has 1 weights that LlamaModel has no place for, so they are left out: lm_head.weight. model.auto_class="
    config = composed(checkpoint, f"model.load={load}", recipe, "model.auto_class=AutoModel")
    with pytest.warns(RunWarning, match=told):
        report = run_compress(config, tmp_path / "part")
    assert [note for note in report.notes if "lm_head.weight. model.auto_class=AutoModelForCausalLM makes a" in note]
    assert report.notes == tuple(json.loads((tmp_path / "part" / "report.json").read_text())["notes"])
    whole = run_compress(composed(checkpoint, f"model.load={load}", recipe), tmp_path / "whole")
    assert not [note for note in whole.notes if "left out" in note]


def test_a_configuration_of_another_class_is_told(tmp_path: Path) -> None:
    config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=64)
    config.architectures = ["BertForMaskedLM"]
    config.save_pretrained(tmp_path)
    told = "is a BertForMaskedLM, and taken for a BertLMHeadModel, which may be a part of it. model.auto_class="
    with pytest.warns(RunWarning, match=f"{told}AutoModelForMaskedLM makes a BertForMaskedLM"):
        load_config_only(composed(tmp_path).model)
    load_config_only(composed(tmp_path, "model.auto_class=AutoModelForMaskedLM").model)
