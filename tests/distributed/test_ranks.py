"""Real processes: the same files and the same model, whatever the number of ranks."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import contents

SCRIPT = Path(__file__).with_name("one_rank.py")


def run_ranks(size: int, folder: Path, case: str, stop_after: int = -1) -> list[dict[str, Any]]:
    """What each rank has at the end."""
    store = folder.with_name(f"{folder.name}-store-{size}-{stop_after}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(rank), str(size), store, folder, case, str(stop_after)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    errors = [process.communicate(timeout=240)[1] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(errors)
    return [torch.load(f"{folder}-rank{rank}.pt", weights_only=False) for rank in range(size)]


@pytest.mark.parametrize("case", ["staged", "one batch", "padded", "ragged", "static", "experts", "wide"])
def test_the_same_files_at_every_world_size(case: str, tmp_path: Path) -> None:
    """Seen to fail: with statistics that are not added up."""
    (alone,) = run_ranks(1, tmp_path / "1", case)
    for size in (2, 3):
        ranks = run_ranks(size, tmp_path / str(size), case)
        assert contents(tmp_path / str(size)) == contents(tmp_path / "1")
        for rank in ranks:
            assert all(torch.equal(rank["state"][key], value) for key, value in alone["state"].items())
            assert rank["report"].num_ranks == size
            assert case == "experts" or rank["report"].verification.passed
        assert sorted(number for rank in ranks for number in rank["share"]) == list(alone["share"])
