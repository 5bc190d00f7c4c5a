"""The sbatch file of docs/multi_node.md on a Slurm cluster of two nodes, made for the test where Slurm is installed."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import contents
from plugin.conftest import checkpoint, texts
from processes import Script
from test_two_nodes import end, nodes
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lightning_compress.calibration.resume import MANIFEST

__all__ = ["checkpoint", "nodes", "texts"]  # fixtures
DOCS = Path(__file__).parents[2] / "docs" / "multi_node.md"
COMMAND = Path(sys.executable).with_name("lightning-compress")
DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")
OF_NODE = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'
CONFIG = """
ClusterName=test
SlurmctldHost={0}(10.77.0.1)
SlurmUser=root
AuthInfo=socket={folder}/munge,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
NodeName={0} NodeAddr=10.77.0.1 CPUs=2
NodeName={1} NodeAddr=10.77.0.2 CPUs=2
PartitionName=main Nodes={0},{1} Default=YES State=UP
"""
STATE = ("squeue", "--noheader", "--states=all", "--format=%t", "--jobs")
Run = Callable[..., str]


@pytest.fixture
def on_cluster(nodes: tuple[str, str], tmp_path: Path) -> Iterator[Run]:
    """Runs one of Slurm's commands on the first node, and returns what it said."""
    missing = [name for name in DAEMONS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if missing:
        pytest.skip(f"no Slurm here: {', '.join(missing)} not found")
    folder = tmp_path / "slurm"
    for name in (folder, folder / "state", *(folder / node for node in nodes)):
        name.mkdir()
    (folder / "key-file").write_bytes(os.urandom(1024))
    (folder / "key-file").chmod(0o600)
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n10.77.0.1 {nodes[0]}\n10.77.0.2 {nodes[1]}\n")
    (folder / "slurm.conf").write_text(CONFIG.format(*nodes, folder=folder))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{COMMAND.parent}:{environment['PATH']}:/usr/sbin"

    def run(*given: str, node: str = nodes[0]) -> str:
        of_node = ("ip", "netns", "exec", node, "unshare", "--uts", "sh", "-c", OF_NODE, str(folder / "hosts"), node)
        ended = subprocess.run([*of_node, *given], capture_output=True, text=True, env=environment, check=False)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    of_munge = [f"--{name}={folder / name}" for name in ("key-file", "pid-file", "log-file", "seed-file")]
    try:
        run("munged", "--force", f"--socket={folder / 'munge'}", *of_munge)
        run("slurmctld", "-c")
        for node in nodes:
            run("slurmd", "-N", node, node=node)
        yield run
    finally:
        for node in nodes:
            end(node)


def batch_script(*options: str) -> str:
    """As it is documented, for the cluster here and with `options` for the command."""
    script = re.search(r"```bash\n(#!/bin/bash\n.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert script is not None
    lines = [line for line in script[1].splitlines() if not line.startswith("#SBATCH --gpus")]
    changed = "\n".join((*lines[:-1], " ".join((lines[-1], *options))))
    return re.sub(r"(per-node|per-task)=8", lambda found: f"{found[1]}={2 if found[1] == 'per-node' else 1}", changed)


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


@pytest.mark.slow
def test_a_job_that_is_requeued(on_cluster: Run, checkpoint: Path, texts: tuple[str, str], tmp_path: Path) -> None:
    """Two nodes, two tasks each. The requeue signal comes before the model is loaded, and amid; the job goes on when
    Slurm starts it again, and the files are those of one process."""
    model, out, said = tmp_path / "model", tmp_path / "out", tmp_path / "said"
    larger = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12}
    LlamaForCausalLM(LlamaConfig.from_pretrained(checkpoint, **larger)).save_pretrained(model)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(model)
    options = (f"model.path={model}", *texts, "data.num_samples=64", "data.max_length=128", "data.batch_size=2")
    ended = Script(COMMAND, "compress", *options, "model.load=disk", f"output_dir={tmp_path / 'alone'}").wait()
    assert ended.returncode == 0, ended.stderr

    (tmp_path / "job.sbatch").write_text(batch_script(*options, f"output_dir={out}"))
    submit = ("sbatch", "--parsable", "--open-mode=append", f"--output={said}", str(tmp_path / "job.sbatch"))
    said.touch()
    job = on_cluster(*submit)

    def preempt(is_time: Callable[[], bool]) -> None:
        until = time.monotonic() + 300
        while not is_time():
            assert on_cluster(*STATE, job) not in ("CD", "F"), said.read_text()
            assert time.monotonic() < until, said.read_text()
            time.sleep(0.05)
        on_cluster("scancel", "--signal=USR1", job)

    preempt(lambda: said.read_text().count("GLOBAL_RANK") == 4)
    preempt(lambda: "Requeued SLURM job" in said.read_text() and num_lines(out / MANIFEST) > 4)
    until = time.monotonic() + 300
    while (state := on_cluster(*STATE, job)) not in ("CD", "F") and time.monotonic() < until:
        time.sleep(0.5)
    assert state == "CD", said.read_text()
    assert said.read_text().count("Requeued SLURM job") == 2
    assert re.search(r"continued an interrupted run, which had finished [3-9] subgraphs", said.read_text())
    assert contents(out) == contents(tmp_path / "alone")
