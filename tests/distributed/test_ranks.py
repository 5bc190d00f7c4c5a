"""Real processes: the same files and the same model, whatever the number of ranks."""

import shutil
import signal
import socket
import time
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import contents
from processes import Script

from lightning_compress.calibration.resume import MANIFEST
from lightning_compress.distributed.collective import SingleProcess
from lightning_compress.distributed.folder import shared_folder
from lightning_compress.errors import OutputDirectoryError

SCRIPT = Path(__file__).with_name("one_rank.py")
OFTEN = {
    "staged": (2, 3, 4),
    "corrected": (2, 3),
    "padded": (2, 3),
    "experts": (2, 4),
}
SELDOM = {
    "gptaq": (2,),
    "one batch": (2, 4),
    "ragged": (2, 4),
    "static": (2, 3),
    "floats": (2, 4),
    "parts": (2, 3),
    "listed experts": (2, 4),
    "row tiles": (2, 3),
    "budget": (2, 3),
    "written buffers": (2, 3),
    "own buffers": (2,),
    "no data": (2, 4),
    "disk": (2, 3),
}
"""Each case with the numbers of ranks that are compared with one; three batches on four ranks, two on three."""


def start(size: int, folder: Path, *names: str) -> list[Script]:
    folder.mkdir(exist_ok=True)
    store = folder / f"store-{time.time_ns()}"
    return [Script(SCRIPT, str(rank), str(size), str(store), str(folder), *names) for rank in range(size)]


def run_ranks(size: int, folder: Path, *names: str) -> None:
    ends = [process.wait(400) for process in start(size, folder, *names)]
    assert all(end.returncode == 0 for end in ends), "\n".join(end.stderr for end in ends)


def found(folder: Path, name: str, size: int) -> list[dict[str, Any]]:
    """What each rank had at the end."""
    return [torch.load(folder / f"{name}-rank{rank}.pt", weights_only=False) for rank in range(size)]


@pytest.mark.parametrize("cases", [OFTEN, pytest.param(SELDOM, marks=pytest.mark.slow)], ids=["often", "seldom"])
def test_the_same_at_every_world_size(cases: dict[str, tuple[int, ...]], tmp_path: Path) -> None:
    """All cases in one set of processes of each size. Seen to fail: with statistics that are not added up."""
    run_ranks(1, tmp_path / "1", *cases)
    for size in (2, 3, 4):
        run_ranks(size, tmp_path / str(size), *(case for case, sizes in cases.items() if size in sizes))
    for case, sizes in cases.items():
        (alone,) = found(tmp_path / "1", case, 1)
        for size in sizes:
            ranks = found(tmp_path / str(size), case, size)
            assert contents(tmp_path / str(size) / case) == contents(tmp_path / "1" / case), case
            for rank in ranks:
                assert rank["state"].keys() == alone["state"].keys()
                pairs = ((rank["state"][key], value) for key, value in alone["state"].items() if not value.is_meta)
                assert all(torch.equal(mine, other) for mine, other in pairs), case
                assert rank["report"] == ranks[0]["report"]
            assert ranks[0]["report"].num_ranks == size
            assert ranks[0]["report"].verification == alone["report"].verification
            assert sorted(number for rank in ranks for number in rank["share"]) == list(alone["share"])
        reached = {tokens for layer in alone["report"].coverage for tokens in layer.num_tokens}
        assert {"experts": {0, 1, 2}, "listed experts": {0, 1}}.get(case, set()) <= reached


@pytest.mark.parametrize(
    ("case", "whole", "first", "num_batches"),
    [
        ("staged", "staged", 2, 0),
        pytest.param("kept", "staged", 2, 7, marks=pytest.mark.slow),
        pytest.param("kept corrected", "corrected", 1, 9, marks=pytest.mark.slow),
    ],
)
def test_continued_on_another_number_of_ranks(
    case: str, whole: str, first: int, num_batches: int, tmp_path: Path
) -> None:
    """From 3 to 1 and to 2. Seen to fail: with a manifest that only rank 0 knows; with kept activations that a rank
    takes for those of other batches."""
    run_ranks(1, tmp_path / "whole", whole)
    for size, upto in ((3, first), (1, first + 1), (2, 0)):
        run_ranks(size, tmp_path / "parts", f"{case}:{upto}" if upto else case)
        kept = {path.name: len(list(path.iterdir())) for path in (tmp_path / "parts" / case).glob("activations/*")}
        assert kept == ({f"{upto - 1:05d}": num_batches} if num_batches and upto else {})
    assert contents(tmp_path / "parts" / case) == contents(tmp_path / "whole" / whole)
    assert [rank["report"].num_resumed for rank in found(tmp_path / "parts", case, 2)] == [first + 1] * 2


@pytest.mark.slow
def test_nodes_with_disks_of_their_own(tmp_path: Path) -> None:
    """Of two ranks each: both get all files, also on a disk that is new or behind when the run goes on. Seen to fail:
    with the activations of all batches expected on every disk; without what is copied to the new one."""
    run_ranks(1, tmp_path / "whole", "staged")
    here, there = (tmp_path / "parts" / f"disk-{node}" / "own disks" for node in (0, 1))
    run_ranks(4, tmp_path / "parts", "own disks:2")
    kept = [{path.name for path in folder.glob("activations/*/*")} for folder in (here, there)]
    assert sorted(chain(*kept)) == [f"{number:06d}.pt" for number in range(7)]
    assert all(kept)
    run_ranks(2, tmp_path / "parts", "own disks:3")  # the second node is not there
    lines = [(folder / MANIFEST).read_text().splitlines() for folder in (here, there)]
    assert lines[0][:3] == lines[1]
    assert len(lines[0]) == 4
    run_ranks(4, tmp_path / "parts", "own disks:4")
    shutil.rmtree(here)
    run_ranks(3, tmp_path / "parts", "own disks")
    expected = contents(tmp_path / "whole" / "staged")
    assert contents(here) == expected
    assert contents(there) == expected
    assert [rank["report"].num_resumed for rank in found(tmp_path / "parts", "own disks", 3)] == [4] * 3
    assert all((folder / "report.json").is_file() for folder in (here, there))
    assert (
        f"checkpoint: {here} (all of it on each of 2 nodes)"
        in found(tmp_path / "parts", "own disks", 3)[0]["report"].summary()
    )


@pytest.mark.slow
def test_a_nodes_first_rank_is_late(tmp_path: Path) -> None:
    """What its other ranks write is still there when it has emptied their disk, and what it is sent is there before
    they read it. Five ranks, for gloo's broadcasts make fewer wait for one another. Seen to fail: with a broadcast to
    wait by, in either place."""
    folders = [[tmp_path / f"disk-{node}" / case for node in (0, 1)] for case in ("late at once", "late")]
    run_ranks(5, tmp_path, "late at once", "late:2")
    shutil.rmtree(folders[1][1])
    run_ranks(5, tmp_path, "late")
    for here, there in folders:
        assert contents(here) == contents(there)
        assert len(list(here.glob("*.safetensors"))) > 5
    assert [rank["report"].num_resumed for rank in found(tmp_path, "late", 5)] == [2] * 5


def test_a_folder_that_some_share(tmp_path: Path) -> None:
    """A rank that sees what others write, and they not what it writes."""

    class Some(SingleProcess):
        size = 3

        def __init__(self, rank: int) -> None:
            self.rank = rank

        def gather(self, value: Any, what: str) -> list[Any]:
            if isinstance(value, tuple):
                return [(0, 1), (0, 1), (0, 1, 2)]
            return [value] * 3

    with pytest.raises(OutputDirectoryError, match="neither one folder for all ranks nor one on each node: rank 2"):
        shared_folder(tmp_path / "out", Some(0))
    assert not list((tmp_path / "out").iterdir())


def test_other_data_on_another_rank_is_refused(tmp_path: Path) -> None:
    for process in start(2, tmp_path, "other data"):
        end = process.wait(100)
        assert "The batches (is there a DistributedSampler" in end.stderr
        assert end.returncode != 0
    assert not (tmp_path / "other data").exists()


def test_a_nan_in_the_batches_of_one_rank(tmp_path: Path) -> None:
    """Static ranges would be those of the others. Seen to fail: gloo's minimum and maximum lose it."""
    for process in start(2, tmp_path, "NaN"):
        end = process.wait(100)
        assert "holds NaN or Inf on the calibration data" in end.stderr
        assert end.returncode != 0


@pytest.mark.parametrize("failing", [0, 2])
def test_one_rank_fails(tmp_path: Path, failing: int) -> None:
    """The others end at once, and say what they were doing and what that rank said (rank 0's process holds the store
    that tells them)."""
    since = time.monotonic()
    ends = [process.wait(90) for process in start(3, tmp_path, f"failing {failing}")]
    assert time.monotonic() - since < 90, "the timeout is 100 s"
    assert all(end.returncode != 0 for end in ends)
    for rank, end in enumerate(ends):
        assert "ArithmeticError: of this rank alone" in end.stderr
        if rank != failing:
            assert f"CommunicationError: Rank {rank} of 3 could not go on with" in end.stderr
            assert f"Rank {failing} failed:" in end.stderr
            assert "can be started again, on any number of ranks" in end.stderr


@pytest.mark.parametrize("late", ["reads", "comes"])
def test_who_fails_ends_when_it_was_heard(late: str) -> None:
    """Rank 0's process holds what the others read of it, and does not wait for those that are at work. Seen to fail on
    a busy machine: it was gone before rank 1 had looked, which told of a node that was cut off."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        place = f"tcp://127.0.0.1:{found.getsockname()[1]}"
    processes = [Script(SCRIPT.with_name("slow_to_hear.py"), rank, place, late) for rank in ("0", "1")]
    assert processes[0].wait(100).returncode == 1
    said = processes[1].wait(100).stderr
    if late == "comes":
        assert "Either the process that holds it has ended (rank 0," in said
    else:
        assert "Rank 0 failed:" in said
        assert "ArithmeticError: of the rank that holds the board" in said


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    processes = start(3, tmp_path, "stuck")
    for rank in (0, 2):
        said = processes[rank].wait(90).stderr
        assert "ends all" in said
        assert "could not go on with the first batch at model_layers_0_input_layernorm" in said
        assert "Nothing is heard from ranks 1." in said
        assert "some of model.layers.0, where it failed" in said
    processes[1].kill()
    assert processes[1].wait().returncode == -signal.SIGKILL


def test_ranks_that_do_different_things_say_so(tmp_path: Path) -> None:
    """Seen to fail: it was said to be the connection."""
    script = Path(__file__).with_name("two_things.py")
    processes = [Script(script, rank, f"file://{tmp_path / 'store'}") for rank in ("0", "1")]
    said = [process.wait(100).stderr for process in processes]
    assert "Rank 1 waits in looking for pears." in said[0]
    assert "Rank 0 waits in comparing apples." in said[1]
    assert all("They were given different things to do." in each for each in said)
