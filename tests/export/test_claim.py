"""Two runs on one output folder. Seen to fail without a claim: a checkpoint of two runs' shards, which was taken for
whole, and a manifest that neither could continue."""

import errno
import fcntl
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from helpers import compress, contents, prepare, recipe, tiny_llama, token_batches

from lightning_compress.command import planned_run
from lightning_compress.distributed.collective import SingleProcess
from lightning_compress.errors import OutputDirectoryError, RunWarning
from lightning_compress.export.checkpoint import CLAIM, PLAN
from lightning_compress.export.claim import claimed
from lightning_compress.foresight.planned import Planned
from lightning_compress.plugin.run import run_job

OTHER = """
import fcntl, sys
file = open(sys.argv[1], "a+")
try:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    file.write("process 7 on elsewhere")
    file.flush()
    print("has it", flush=True)
except OSError:
    sys.exit("has it not")
sys.stdin.read()
"""

Other = Callable[[Path], subprocess.Popen[str]]


@pytest.fixture
def other() -> Iterator[Other]:
    """Starts another process that claims a folder, and has it until its input ends."""
    started: list[subprocess.Popen[str]] = []

    def start(folder: Path) -> subprocess.Popen[str]:
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-c", OTHER, str(folder / CLAIM)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, text=True, **pipes)
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_plan_in_use_is_left(other: Other, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another run's with plan=auto could not be continued by it. Seen to fail: with the plan written before the folder
    was asked for."""
    monkeypatch.setattr(planned_run, "claimed", partial(claimed, patience=0.1))
    monkeypatch.setattr(planned_run, "save_planned", lambda _, path: path.write_text("of this one"))
    process, plan, planned = other(tmp_path / "out"), tmp_path / "out" / PLAN, cast(Planned, None)
    plan.write_text("of the other")
    with (
        pytest.warns(RunWarning, match="process 7 on elsewhere"),
        pytest.raises(OutputDirectoryError, match="Another run is writing"),
    ):
        planned_run.keep_plan(planned, plan.parent, SingleProcess())
    assert plan.read_text() == "of the other"
    process.communicate()
    planned_run.keep_plan(planned, plan.parent, SingleProcess())
    assert plan.read_text() == "of this one"


def test_a_folder_is_another_process_s(other: Other, tmp_path: Path) -> None:
    process = other(tmp_path / "out")
    with (
        pytest.warns(RunWarning, match=r"Another run is writing to .*out \(process 7 on elsewhere\). Waiting 0 s"),
        pytest.raises(OutputDirectoryError, match=r"writing to .*out \(process 7 on elsewhere\). Wait for it, end it"),
        claimed(tmp_path / "out", SingleProcess(), patience=0.1),
    ):
        pass
    process.kill()
    process.wait()
    with claimed(tmp_path / "out", SingleProcess(), patience=0):
        assert (tmp_path / "out" / CLAIM).is_file()
    assert not (tmp_path / "out" / CLAIM).exists()
    assert (tmp_path / "out").is_dir()  # which is not of our making


def test_what_another_run_leaves_is_continued(other: Other, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other, and a file that is removed as it ends is not the one that is claimed."""
    process = other(tmp_path / "out")

    def ended(_: float) -> None:
        (tmp_path / "out" / CLAIM).unlink(missing_ok=True)
        process.communicate("")

    monkeypatch.setattr("lightning_compress.export.claim.time.sleep", ended)
    with pytest.warns(RunWarning, match="Another run is writing"):
        compress(tiny_llama(2), token_batches(), recipe(4), tmp_path / "out")
    monkeypatch.undo()
    assert "INCOMPLETE" not in contents(tmp_path / "out")
    run = run_job(prepare(tiny_llama(2), token_batches(), recipe(3), tmp_path / "out"))
    next(run)
    assert other(tmp_path / "out").wait() == 1
    run.close()
    assert other(tmp_path / "out").poll() is None


def test_nothing_stays_of_a_run_that_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "out"
    with claimed(folder, SingleProcess()):
        assert folder.is_dir()
    assert not (tmp_path / "new").exists()


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refused)
    compress(tiny_llama(1), token_batches(), recipe(4), tmp_path / "out")
    assert not (tmp_path / "out" / CLAIM).exists()
