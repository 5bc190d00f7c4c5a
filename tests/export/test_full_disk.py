"""A disk that is really full: a small tmpfs, filled up in mid-run. Skipped where mounting is not permitted.

Seen to fail: with the first files, the manifest's line or the index written without a word about the disk (a bare
OSError), with a partial file left behind, with a scratch file that says nothing, and with a report that cannot be
written ending the run in an error.
"""

import os
import subprocess
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import contents, prepare, recipe, run, saved, tiny_llama, token_batches

from lightning_compress.calibration import layout
from lightning_compress.calibration.resume import MANIFEST
from lightning_compress.command.compress import _save_again
from lightning_compress.distributed.collective import SingleProcess
from lightning_compress.errors import CompressionError, OutputDirectoryError
from lightning_compress.export import writer
from lightning_compress.export.checkpoint import CLAIM, INCOMPLETE
from lightning_compress.memory import activations
from lightning_compress.memory.placement import MemoryConfig
from lightning_compress.plugin.job import Job
from lightning_compress.plugin.run import run_job

SIZE = 1 << 20
PAGE = 4096


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path, pages_left: int = 0) -> Path:
    """A file that takes all room but some pages; delete it to make room."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        free = os.statvfs(disk).f_bavail * PAGE
        file.write(bytes(free - pages_left * PAGE))
    assert os.statvfs(disk).f_bavail == pages_left
    return ballast


@pytest.fixture(params=["memory", "disk"])
def job(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator["Make"]:
    monkeypatch.setattr(layout, "_SHARD_BYTES", 1)
    return Make(request.param, tmp_path)


class Make:
    """Jobs of one model and recipe, with weights in memory or on disk."""

    def __init__(self, where: str, folder: Path) -> None:
        self.weights = folder / "weights" if where == "disk" else None
        if self.weights is not None:
            self.empty = saved(tiny_llama(3), self.weights)

    def __call__(self, output_dir: Path, **settings: object) -> Job:
        model = tiny_llama(3) if self.weights is None else self.empty
        given = {"weights": self.weights, "verify": self.weights is not None, **settings}
        return prepare(model, token_batches(), recipe(4), output_dir, **given)


@pytest.mark.sampled(2)
def test_room_runs_out_behind_every_subgraph(
    job: Make, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says where and how much is free; what is finished stays as it is, and is not computed again."""
    monkeypatch.setattr(writer.CheckpointWriter, "_check_room", lambda _: None)  # as if it was taken since
    num_subgraphs = len(run(job(tmp_path / "whole")).subgraphs)
    out = disk / "out"
    for number in range(num_subgraphs):  # no room at all, and room for half of the shard
        for pages_left in (0, 2):
            generator = run_job(job(out))
            for _ in range(number):
                next(generator)
            before = contents(out) if number else {}
            before.pop(CLAIM, None)  # which ends with the run
            ballast = fill(disk, pages_left)
            with pytest.raises(
                OutputDirectoryError, match=r"out: .* could not be written, 0.0 MB .*No space.*continues"
            ):
                next(generator)
            assert not out.exists() or not list(out.glob(".*"))
            after = contents(out) if out.exists() else {}
            assert {name: content for name, content in after.items() if name in before} == before
            ballast.unlink()
        generator = run_job(job(out))
        for _ in range(number + 1):
            next(generator)
        generator.close()
    report = run(job(out))
    assert report.num_resumed == num_subgraphs
    assert contents(out) == contents(tmp_path / "whole")


def test_room_for_the_shard_and_not_for_its_line(job: Make, disk: Path, tmp_path: Path) -> None:
    """The line that is cut off does not count."""
    report = run(job(tmp_path / "whole"))
    out, failed = disk / "out", []
    for number in range(1, len(report.subgraphs)):
        generator = run_job(job(out))
        for _ in range(number):
            next(generator)
        shard = sorted((tmp_path / "whole").glob("*.safetensors"))[number]
        ballast = fill(disk, -(-shard.stat().st_size // PAGE))
        try:
            next(generator)
        except OutputDirectoryError as error:
            failed.append(str(error).partition(": ")[2].partition(" could")[0])
        ballast.unlink()
    assert set(failed) == {MANIFEST}
    run(job(out))
    assert contents(out) == contents(tmp_path / "whole")


def test_room_runs_out_at_the_end(job: Make, disk: Path, tmp_path: Path) -> None:
    """In what no subgraph holds, the index, the configuration, and the report."""
    num_subgraphs = len(run(job(tmp_path / "whole")).subgraphs)
    out, failed = disk / "out", []
    for pages_left in range(0, 40, 2):
        generator = run_job(job(out))
        for _ in range(num_subgraphs):
            next(generator)
        ballast = fill(disk, pages_left)
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                list(generator)
            break
        except OutputDirectoryError as error:
            failed.append(str(error).partition(": ")[2].partition(" could")[0])
            assert (out / INCOMPLETE).exists()
            assert not list(out.glob(".*"))
        finally:
            ballast.unlink()
    assert failed[0].startswith("model-")
    assert failed[-1] == "index and configuration"
    assert any("is complete, but its report could not be written" in str(warning.message) for warning in warned)
    assert contents(out) == contents(tmp_path / "whole")


def test_no_room_for_what_is_added_to_the_report(disk: Path) -> None:
    """The command's perplexities, when all is done: the report is left as it was, and that is said. Seen to fail: the
    report was emptied, and the command ended in an error."""
    report = run(prepare(tiny_llama(1), token_batches(), recipe(4), disk / "out"))
    before = {name: (disk / "out" / name).read_bytes() for name in ("report.json", "report.html")}
    fill(disk)
    added = replace(report, extra={"perplexity_before": 1.5}, notes=("what was left out " * 1000,))
    with pytest.warns(UserWarning, match="is complete, but its report could not be written there"):
        _save_again(added, disk / "out", SingleProcess())
    assert {name: (disk / "out" / name).read_bytes() for name in before} == before


def test_no_room_for_activations(job: Make, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run names the folder and the remedies, and continues when there is room."""
    monkeypatch.setattr(activations, "LEAST_SPILLED", 1)
    run(job(tmp_path / "whole"))
    generator = run_job(job(tmp_path / "out", memory=MemoryConfig(activation_budget=0, scratch_dir=disk)))
    next(generator)
    ballast = fill(disk)
    with pytest.raises(CompressionError, match=rf"could not be kept in {disk} .*No space left.*scratch_dir, or raise"):
        for _ in generator:
            pass
    ballast.unlink()
    report = run(job(tmp_path / "out", memory=MemoryConfig(activation_budget=0, scratch_dir=disk)))
    assert report.num_resumed == 1
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
