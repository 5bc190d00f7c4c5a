"""Paths on the command line reach the command as they are typed."""

import os
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny_llama
from hydra.core.override_parser.overrides_parser import OverridesParser

from lightning_compress.command import cli
from lightning_compress.command.output_file import until_unread
from lightning_compress.command.paths import with_quoted_paths

from .conftest import Command, refused


@pytest.mark.parametrize(
    ("typed", "is_multirun", "expected"),
    [
        ("output_dir=1.10", False, "1.10"),
        ("+model.weights=1e3", False, "1e3"),
        ("json=true", False, "true"),
        ("graph=007", False, "007"),
        ("output_dir=~/x", False, "/home/me/x"),
        ("model.path=café~1 (copy)", False, "café~1 (copy)"),
        ("output_dir=a=b,c", False, "a=b,c"),
        ("output_dir=a[1]", False, "a[1]"),
        ('output_dir=a"b', False, 'a"b'),
        ("output_dir='a b'", False, "a b"),
        ("output_dir=${oc.env:HOME}/x", False, "${oc.env:HOME}/x"),
        ("output_dir=runs/${now:%Y}", False, "runs/${now:%Y}"),
        ("plan=null", False, None),
        ("plan=NULL", False, None),
        (r"output_dir=step\=3", False, "step=3"),
        ("hydra.run.dir=1.10", False, "1.10"),
        ("model.path=a, b", True, ["a", "b"]),
        ("model.path=[a,b]", False, ["a", "b"]),
        ("data.max_length=64", False, 64),
        ("output_dir=1.10,~/x", True, ["1.10", "/home/me/x"]),
        ("model.path=choice(a,b)", True, ["a", "b"]),
    ],
)
def test_what_is_typed_is_what_is_read(
    typed: str, is_multirun: bool, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Hydra. Seen to fail: numbers of some, and errors of its grammar about others."""
    monkeypatch.setenv("HOME", "/home/me")
    read = OverridesParser.create().parse_override
    (given,) = with_quoted_paths([typed], is_multirun)
    override = read(given)
    assert override.is_sweep_override() == is_multirun
    if is_multirun:
        assert [read(f"key={each}").value() for each in override.sweep_string_iterator()] == expected
    else:
        assert override.value() == expected


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_a_folder_named_like_a_number(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a model without a tokenizer, which needs none as its recipe needs no data. Seen to fail: what was written was
    `1.1`; and the data was read for nobody."""
    tiny_llama(1, hidden_size=128, intermediate_size=128).save_pretrained(tmp_path / "2024")
    monkeypatch.chdir(tmp_path)
    command("compress", "model.path=2024", "model.tokenizer=null", "recipe=w4a16_rtn", "trainer=cpu", "output_dir=1.10")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.10", "2024"]
    assert (tmp_path / "1.10" / "report.json").is_file()


RECIPE = "modifiers: [{algorithm: rtn, scheme: W8A16, targets: [Linear], ignore: [mine]}]"


@pytest.mark.parametrize("name", ["mine", "2024", "1.10", "é", "true", "1_0", "my recipe (v1)", ".hidden"])
def test_a_recipe_of_any_name(name: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: numbers with "Got int", accents as errors of Hydra's grammar."""
    (tmp_path / f"{name}.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    assert "- mine" in command("compress", f"recipe={name}.yaml", "--cfg", "job")


@pytest.mark.parametrize(
    "given",
    [
        ["--config-dir", "{folder}", "recipe=mine.yaml", "data=own"],
        ["--config-dir={folder}", "recipe=mine.yaml", "data=own"],
        ["data=own", "--config-dir", "{folder}", "recipe=mine.yaml"],
        ["recipe=mine.yaml", "hydra.searchpath=[file://{folder}]", "data=own"],
    ],
)
def test_a_recipe_of_a_file_beside_a_folder_of_ones_own(
    given: list[str], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the flags are. Seen to fail: overrides behind them, a folder in quotes, two search paths."""
    (tmp_path / "cfg" / "data").mkdir(parents=True)
    (tmp_path / "cfg" / "data" / "own.yaml").write_text("defaults: [docs]\nnum_samples: 77")
    (tmp_path / "mine.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    said = command("compress", *(each.format(folder=tmp_path / "cfg") for each in given), "--cfg", "job")
    assert "- mine" in said
    assert "num_samples: 77" in said


def test_files_are_known_to_be_writable_before_the_work(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their folder is made. Seen to fail: behind it, and for want of the folder."""
    tiny_llama(1).config.save_pretrained(tmp_path / "model")
    given = ("inspect", f"model.path={tmp_path / 'model'}", "length=8", "recipe.modifiers.0.group_size=16")
    command(*given, f"graph={tmp_path / 'new' / 'graph.svg'}")
    assert (tmp_path / "new" / "graph.svg").stat().st_size > 1000
    monkeypatch.setattr(cli, "run_inspect", lambda config: pytest.fail("worked"))
    for file, message in (
        (tmp_path, "cannot be written"),
        ("/dev/null/x.svg", "cannot be written"),
        ("x.y", "Format 'y' is"),
    ):
        assert message in refused(command, *given, f"graph={file}")
    assert not list(tmp_path.glob("*.y"))


def test_each_run_of_a_multirun_has_its_own_file(command: Command, tmp_path: Path) -> None:
    """Seen to fail: the last one's alone was left."""
    tiny_llama(1).config.save_pretrained(tmp_path / "model")
    of_job = ("job=inference", "job.context=8", "job.new_tokens=1,2", f"output_dir={tmp_path / 'out'}")
    command("estimate", "-m", f"model.path={tmp_path / 'model'}", *of_job, f"json={tmp_path / 'e.json'}")
    files = sorted(tmp_path.glob("*.json"))
    assert [file.name for file in files] == ["0_e.json", "1_e.json"]
    assert ["new_tokens=1" in file.read_text() for file in files] == [True, False]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "given",
    [
        ("plan", "data.num_samples=2", "data.max_length=8", "choices.batch_size=[2]", "json={file}"),
        ("estimate", "job.num_samples=2", "job.max_length=8", "json={file}"),
        ("inspect", "graph={file}"),
        ("inspect", "--help"),
    ],
)
@pytest.mark.parametrize("buffering", [1, -1])
@pytest.mark.usefixtures("rates")
def test_a_reader_that_has_seen_enough(
    given: tuple[str, ...], buffering: int, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`| head`: the file is written, and no word is said of the pipe. Seen to fail: no plan, and tracebacks."""
    file = tmp_path / "found.svg"
    monkeypatch.setattr(
        "sys.argv",
        ["lightning-compress", *(each.format(file=file) for each in given), f"model.path={checkpoint}"],
    )
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", buffering=buffering) as unread:
        monkeypatch.setattr("sys.stdout", unread)
        try:
            cli.main()
        except SystemExit as ended:
            assert ended.code in (0, 1, None)  # noqa: PT017
    assert file.is_file() == (given[-1] != "--help")


def test_another_pipe_that_broke_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    with open(read), open(write, "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        with pytest.raises(BrokenPipeError, match="of a worker"), until_unread():
            raise BrokenPipeError("of a worker")
