"""Two nodes of two ranks each: network namespaces with an address each, joined by a cable that can be cut."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from helpers import contents
from plugin.conftest import Command, checkpoint, command, rates, texts
from processes import Script

from lightning_compress.calibration.resume import MANIFEST

__all__ = ["checkpoint", "command", "rates", "texts"]  # fixtures
SCRIPT = str(Path(__file__).parents[1] / "plugin" / "trainer_of_ranks.py")
COMMAND = str(Path(__file__).parents[1] / "plugin" / "command_of_ranks.py")
TIMEOUT = 25
LAYERS = "--num-layers=10"
BIND = 'mount --bind "$0" "$1" && shift && exec "$@"'


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def nodes() -> Iterator[tuple[str, str]]:
    """Two namespaces; in each `eth` is the way to the other, 10.77.0.1 and 10.77.0.2."""
    names = (f"lc{os.getpid()}a", f"lc{os.getpid()}b")
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "eth", "netns", names[0], "type", "veth", "peer", "name", "eth", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", "eth")
            ip("-n", name, "link", "set", "eth", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        _remove(names)
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', None) or error}")
    yield names
    _remove(names)


def end(node: str) -> None:
    """Kill what runs there."""
    pids = subprocess.run(["ip", "netns", "pids", node], capture_output=True, text=True, check=False).stdout.split()
    for pid in map(int, pids):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _remove(names: tuple[str, str]) -> None:
    for name in names:
        end(name)
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def start(
    nodes: tuple[str, str],
    folder: Path,
    disks: tuple[Path, Path] | None = None,
    script: Sequence[str] = (),
    ranks: int = 2,
) -> list[subprocess.Popen[str]]:
    """torchrun on each node, where `folder` is one for both, or another one of `disks` on each; of a user's script, or
    of `script`, in so many ranks."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth", "TP_SOCKET_IFNAME": "eth"}
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--rdzv-id=7")
    meeting = (f"--nproc-per-node={ranks}", "--rdzv-backend=c10d", "--rdzv-endpoint=10.77.0.1:29400", "--local-addr")
    of_user = (SCRIPT, str(folder), "--devices=2", "--num-nodes=2", LAYERS, f"--timeout={TIMEOUT}")
    return [
        subprocess.Popen(
            [
                *("ip", "netns", "exec", node),  # with mounts of its own
                *(("sh", "-c", BIND, str(disks[number - 1]), str(folder)) if disks else ()),
                *(*launcher, *meeting, f"10.77.0.{number}"),
                f"--rdzv-conf=is_host={number == 1}",  # the nodes' host names are one, so it cannot tell by itself
                *(script or of_user),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, node in enumerate(nodes, 1)
    ]


def alone(folder: Path) -> None:
    ended = Script(SCRIPT, str(folder), LAYERS).wait()
    assert ended.returncode == 0, ended.stderr


def test_two_nodes_and_a_cut_cable(nodes: tuple[str, str], tmp_path: Path) -> None:
    """The files are those of one process, also on the nodes' own disks; a node that is cut off ends the run within the
    timeout, and it goes on."""
    alone(tmp_path / "alone")
    disks = (tmp_path / "disk a", tmp_path / "disk b")
    for folder in (*disks, tmp_path / "together"):
        folder.mkdir()
    processes = start(nodes, tmp_path / "together", disks)
    said = [process.communicate(timeout=200)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), said
    assert all(f"rank {rank} of 4" in said[rank // 2] for rank in range(4))
    assert not list((tmp_path / "together").iterdir())
    assert all(contents(disk) == contents(tmp_path / "alone") for disk in disks)

    processes = start(nodes, tmp_path / "cut")
    manifest = tmp_path / "cut" / MANIFEST
    try:
        while not manifest.is_file() or manifest.read_bytes().count(b"\n") < 4:
            time.sleep(0.05)
            assert all(process.poll() is None for process in processes)
        ip("-n", nodes[1], "link", "set", "eth", "down")
        here = processes[0].communicate(timeout=4 * TIMEOUT)[0]
    finally:
        for node in nodes:  # on the second one torchrun still looks for the first
            end(node)
        processes[1].communicate()
    assert processes[0].returncode != 0
    assert "of 4 could not go on with" in here, here  # of the first rank to see it; torchrun then ends the other
    assert f"does not come to within {TIMEOUT} s" in here
    assert "Nothing is heard from ranks 2, 3." in here
    assert (tmp_path / "cut" / "INCOMPLETE").is_file()
    alone(tmp_path / "cut")
    assert contents(tmp_path / "cut") == contents(tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.usefixtures("rates")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_a_plan_on_two_nodes(
    nodes: tuple[str, str],
    command: Command,
    checkpoint: Path,
    texts: tuple[str, str],
    tmp_path: Path,
) -> None:
    """Each of one rank and with a disk of its own: one plans, both follow, and the files are those of one process that
    was told the same. Seen to fail: with the plan left on the second one's disk."""
    disks, out = (tmp_path / "disk a", tmp_path / "disk b"), tmp_path / "out"
    for folder in (*disks, out):
        folder.mkdir()
    given = ("compress", f"model.path={checkpoint}", *texts, "data.num_samples=6", "data.max_length=32", "trainer=cpu")
    told = ("data.batch_size=2", "model.load=disk", "calibration.schedule=block")
    planned = (COMMAND, "64", *given, *told, "plan=auto", f"output_dir={out}")
    processes = start(nodes, out, disks, planned, ranks=1)
    said = [process.communicate(timeout=200)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), said
    assert "plan: schedule block, batch size 2" in said[0]
    assert "plan: " not in said[1]
    assert json.loads((disks[0] / "report.json").read_text())["num_copies"] == 2
    command(*given, *told, f"output_dir={tmp_path / 'one'}")
    assert all(contents(disk) == contents(tmp_path / "one") for disk in disks)
