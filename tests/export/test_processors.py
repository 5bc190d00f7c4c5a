"""What goes with a checkpoint beside its weights."""

import json
from pathlib import Path

from lightning_compress.export.processors import with_other_files


class Tokenizer:
    """One that saves a file."""

    def save_pretrained(self, save_directory: str, /) -> None:
        (Path(save_directory) / "tokenizer.json").write_text("{}")


def test_pooling_of_a_sentence_encoder(tmp_path: Path) -> None:
    """How sentence-transformers goes on from the model is saved with its tokenizer. Seen to fail: a checkpoint without
    it was pooled by the mean, whatever the model had been trained for."""
    model, out = tmp_path / "model", tmp_path / "out"
    modules = [{"idx": 0, "path": ""}, {"idx": 1, "path": "1_Pooling"}, {"idx": 2, "path": "2_Normalize"}]
    files = {"modules.json": json.dumps(modules), "1_Pooling/config.json": '{"pooling_mode_cls_token": true}'}
    files |= {"sentence_bert_config.json": "{}", "config_sentence_transformers.json": '{"prompts": {}}'}
    for name, text in {**files, "config.json": "{}", "model.safetensors": "", "other/config.json": ""}.items():
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_text(text)
    out.mkdir()
    saved = with_other_files(Tokenizer(), model)
    assert saved is not None
    saved.save_pretrained(str(out))
    written = {str(path.relative_to(out)): path.read_text() for path in out.rglob("*") if path.is_file()}
    assert written == {**files, "tokenizer.json": "{}"}


def test_models_of_no_sentence_encoder(tmp_path: Path) -> None:
    """Also one whose model is in a folder of its own: its weights are not copied."""
    assert with_other_files(None, tmp_path) is None
    (tmp_path / "modules.json").write_text(json.dumps([{"idx": 0, "path": "0_Transformer"}]))
    tokenizer = Tokenizer()
    assert with_other_files(tokenizer, tmp_path) is tokenizer


def test_the_licence_of_a_model(tmp_path: Path) -> None:
    """It goes with what is made of the model; the model's card, which is about another, does not. Seen to fail."""
    model, out = tmp_path / "model", tmp_path / "out"
    licences = ["LICENSE", "Notice.txt", "USE_POLICY.md", "licence.md"]
    for name in [*licences, "README.md", "LICENSES/other", "licensed.py"]:
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_text(name)
    out.mkdir()
    saved = with_other_files(Tokenizer(), model)
    assert saved is not None
    saved.save_pretrained(str(out))
    written = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    assert written == sorted([*licences, "tokenizer.json"])
    assert (out / "LICENSE").read_text() == "LICENSE"
