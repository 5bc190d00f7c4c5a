"""The callback in the configuration of a LightningCLI, which makes it by jsonargparse."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader

from lightning_compress import CompressionCallback

from .conftest import RTN, TinyModule, samples

QUIET: dict[str, Any] = {"save_config_callback": None, "seed_everything_default": False}


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(samples(), batch_size=4)


def _run(options: dict[str, Any], folder: Path) -> LightningCLI:
    trainer = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "callbacks": [{"class_path": "lightning_compress.CompressionCallback", "init_args": options}],
    }
    (folder / "config.yaml").write_text(yaml.safe_dump({"trainer": trainer}), encoding="utf-8")
    args = ["fit", f"--config={folder}/config.yaml"]
    return LightningCLI(TinyModule, Data, **QUIET, args=args)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of jsonargparse itself
@pytest.mark.parametrize("output_dir", [None, "compressed"])
def test_in_a_configuration(
    output_dir: str | None, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to fail: null was refused as left out, and so was every tokenizer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["script.py"])
    options = {"recipe": RTN, "output_dir": output_dir, "tokenizer": str(checkpoint)}
    more = {"memory": {"prefetch_depth": 0}, "sequential_targets": ["Linear"]}
    trainer = _run({**options, **more}, tmp_path).trainer
    (callback,) = [each for each in trainer.callbacks if isinstance(each, CompressionCallback)]
    assert callback.report is not None
    assert callback.report.output_dir == output_dir
    written = {each.name for each in (tmp_path / "compressed").glob("*")}
    assert ({"config.json", "tokenizer.json"} <= written) == (output_dir is not None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of jsonargparse itself
def test_a_saved_configuration_is_the_one_that_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: the recipe was saved as the text of a Python dictionary, whose None no reader of YAML knows."""
    monkeypatch.setattr("sys.argv", ["script.py"])
    recipe = {"modifiers": [{**RTN["modifiers"][0], "group_size": None, "signed_scales": False}]}
    cli = _run({"recipe": recipe, "output_dir": None}, tmp_path)
    saved = yaml.safe_load(cli.parser.dump(cli.config, skip_none=False))
    assert saved["fit"]["trainer"]["callbacks"][0]["init_args"]["recipe"] == recipe


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of jsonargparse itself
@pytest.mark.parametrize("recipe", ["mine.yaml", "w8a16_rtn"])
def test_a_recipe_by_name_or_path_stays_one(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["script.py"])
    modifiers = [{"algorithm": "rtn", "scheme": "W8A16", "targets": ["re:.*down_proj"]}]
    Path("mine.yaml").write_text(yaml.safe_dump({"modifiers": modifiers}), encoding="utf-8")
    parser = LightningCLI(TinyModule, Data, run=False, **QUIET, args=[]).parser
    callback = {"class_path": "lightning_compress.CompressionCallback", "init_args": {"recipe": recipe}}
    parsed = parser.parse_object({"trainer": {"callbacks": [callback]}})
    saved = yaml.safe_load(parser.dump(parsed, skip_none=False))
    assert saved["trainer"]["callbacks"][0]["init_args"]["recipe"] == recipe
