"""What a command says of arguments that are no keys, or paths that are empty. Each was seen to say something else."""

import json
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest

from .conftest import Command, refused


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("model.path", "DIR"), "model.path is no KEY=VALUE, such as model.path=DIR."),
        (("DIR", "output_dir=OUT"), "DIR is no KEY=VALUE, such as model.path=DIR."),
        (("--model.path=DIR", "-m"), "--model.path=DIR: keys have no dashes before them: model.path=DIR"),
        (("--data=docs", "-m"), "--data=docs: keys have no dashes before them: data=docs"),
        (("data=text", "data.files=[a b,ü]"), """'KEY="VALUE"', 'KEY=["VALUE"]'."""),
    ],
)
def test_what_is_no_key_or_no_value(command: Command, given: tuple[str, ...], said: str) -> None:
    assert said in refused(command, "compress", *given)


@pytest.mark.parametrize("key", ["model.path", "output_dir"])
def test_an_empty_path_is_not_the_folder_one_is_in(
    command: Command, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """Seen to fail: it was, and where that held other files, the advice was to remove it."""
    monkeypatch.chdir(tmp_path)
    given = {"model.path": str(checkpoint), "output_dir": "out", key: ""}
    said = refused(command, "compress", *(f"{name}={value}" for name, value in given.items()))
    assert f"{key}= is empty, as of a variable that is not set: give a folder." in said
    assert not list(tmp_path.iterdir())


def test_a_folder_that_takes_the_place_of_ours(command: Command, tmp_path: Path) -> None:
    """Seen to fail: "compress= is not known; known are ."."""
    (tmp_path / "mine.yaml").write_text(
        f"defaults: [compress, _self_]\nmodel: {{path: {tmp_path}/nowhere}}\noutput_dir: out\n"
    )
    said = refused(command, "compress", "--config-path", str(tmp_path), "--config-name", "mine")
    assert "There is no configuration 'compress'" in said
    assert "--config-dir DIR; --config-path takes their place" in said
    assert "'yours'" in refused(command, "compress", "--config-name", "yours")
    said = refused(command, "compress", "--config-dir", str(tmp_path), "--config-name", "mine")
    assert "nowhere" in said  # read, and the model is looked for


def test_a_quantized_model_is_refused_before_it_is_loaded(command: Command, checkpoint: Path, tmp_path: Path) -> None:
    """Seen to fail: the advice was to install what reads such models, which is of no use here."""
    quantized = shutil.copytree(checkpoint, tmp_path / "quantized")
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (quantized / "config.json").write_text(json.dumps(config))
    said = refused(command, "compress", f"model.path={quantized}", f"output_dir={tmp_path / 'out'}", "trainer=cpu")
    assert f"model.path={quantized} is quantized already, by gptq" in said
    assert said.endswith("Compress the original.")


def test_version(command: Command) -> None:
    for given in (("--version",), ("compress", "--version")):  # the latter was Hydra's
        assert f"lightning-compress {version('lightning-compress')}, torch " in command(*given)
