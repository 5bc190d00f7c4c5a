"""Data configuration: typed fields, messages for mistakes, and the shipped Hydra groups."""

from dataclasses import MISSING, FrozenInstanceError, fields
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lightning_compress.data import DocsConfig, HfConfig, TextConfig, load_data_config
from lightning_compress.data.config import SOURCES
from lightning_compress.errors import CalibrationDataError

CONFIGS = Path(__file__).parents[2] / "configs"


def test_plain_values_become_the_sources_dataclass() -> None:
    assert load_data_config({}) == DocsConfig()
    assert load_data_config({"source": "text", "files": ["a.txt"], "seed": 3}) == TextConfig(seed=3, files=("a.txt",))
    hf = load_data_config(OmegaConf.create({"source": "hf", "path": "x.csv", "name": None, "num_samples": "7"}))
    assert hf == HfConfig(path="x.csv", num_samples=7)
    with pytest.raises(FrozenInstanceError):
        hf.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"source": "doc"}, "data.source='doc' is unknown; did you mean 'docs'?"),
        ({"num_sample": 3}, "data.num_sample is not a field of the source 'docs'; did you mean 'num_samples'?"),
        ({"files": ["a"]}, "data.files is not a field of the source 'docs'"),
        ({"num_samples": "many"}, "data.num_samples: Value 'many' of type 'str' could not be converted to Integer"),
        ({"num_samples": 0}, "data.num_samples=0: must be at least 1"),
        ({"max_length": 1}, "data.max_length=1: must be at least 2"),
        ({"batch_size": -2}, "data.batch_size=-2: must be at least 1"),
        ({"seed": -1}, "data.seed=-1: must be at least 0"),
        ({"seed": 2**70}, f"data.seed={2**70}: must be below 2**63"),
        ({"split": "valid"}, "data.split='valid': the splits are 'train', 'test' and 'all'"),
        ({"source": "text"}, "data.files is empty"),
        ({"source": "hf", "path": "a.csv", "column": ["q", "a"]}, "; give one, not a list"),
        ({"source": "hf"}, "data.path is missing"),
    ],
)
def test_mistakes_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(CalibrationDataError) as error:
        load_data_config(values)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data=docs"], DocsConfig()),
        (["data=docs_test"], DocsConfig(split="test")),
        (
            ["data=docs", "data.num_samples=16", "data.max_length=64", "data.batch_size=4"],
            DocsConfig(num_samples=16, max_length=64, batch_size=4),
        ),
        (["data=text", "data.files=[a.txt,b.txt]"], TextConfig(files=("a.txt", "b.txt"))),
        (
            ["data=hf", "data.path=c.jsonl", "data.split='train[:9]'", "data.column=messages", "data.packing=false"],
            HfConfig(path="c.jsonl", split="train[:9]", column="messages", packing=False),
        ),
    ],
)
def test_shipped_groups_compose_with_overrides(overrides: list[str], expected: object) -> None:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        composed = compose(overrides=[f"+{overrides[0]}", *overrides[1:]])
    assert load_data_config(composed.data) == expected


def test_a_mandatory_field_left_out_is_named() -> None:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        composed = compose(overrides=["+data=hf"])
    with pytest.raises(CalibrationDataError, match=r"data.path=... has to be given"):
        load_data_config(composed.data)


def test_shipped_groups_list_every_field_with_its_default() -> None:
    """A field added to a dataclass and not to its YAML could not be overridden from the command line."""
    assert {path.stem for path in (CONFIGS / "data").glob("*.yaml")} == {*SOURCES, "docs_test", "audio"}
    for source, config in SOURCES.items():
        group = OmegaConf.to_container(OmegaConf.load(CONFIGS / "data" / f"{source}.yaml"))
        assert isinstance(group, dict)
        assert group.pop("source") == source
        assert set(group) == {field.name for field in fields(config)}
        mandatory = {"text": "files", "hf": "path", "multimodal": "path"}.get(source)
        defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(config)}
        assert all(group[name] == default for name, default in defaults.items() if name != mandatory)
