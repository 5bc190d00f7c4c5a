"""A user's script and the command on several ranks, under Lightning's own launchers and torchrun."""

import json
import re
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers import contents, recipe
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities import rank_zero_only
from processes import Ended, Script
from torch import Tensor, nn

from lightning_compress import CompressionCallback
from lightning_compress.calibration.batches import collect
from lightning_compress.distributed.collective import SingleProcess
from lightning_compress.errors import CompressionError, UnsupportedModelError
from lightning_compress.plugin.agreement import check_same, check_settings, unlike_threads
from lightning_compress.plugin.job import prepare_job
from lightning_compress.plugin.settings import Settings
from lightning_compress.plugin.strategy import check_srun
from lightning_compress.recipe.load import load_recipe

from .conftest import Command, TinyModule, refused

SCRIPT = str(Path(__file__).with_name("trainer_of_ranks.py"))
COMMAND = Path(sys.executable).with_name("lightning-compress")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(*arguments: str) -> str:
    """The script on rank 0; Lightning's launcher starts the other ranks, if any."""
    ended = Script(SCRIPT, *arguments).wait()
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a run of one rank writes."""
    folder = tmp_path_factory.mktemp("ranks") / "whole"
    run(str(folder))
    return contents(folder)


@pytest.mark.slow
def test_instead_of_training(whole: dict[str, bytes], tmp_path: Path) -> None:
    """Eleven samples, shuffled: Lightning's own samplers would pad them, and take every second one for a rank. No
    rank draws bars of the checkpoint that is read back (seen to fail: without `no_bars`)."""
    ended = Script(SCRIPT, str(tmp_path / "popen"), "--devices=2").wait()
    assert all(f"rank {rank} of 2, 6 batches" in ended.stdout for rank in (0, 1)), ended.stderr
    assert "Decompressing model" not in ended.stderr
    subprocess.run([*TORCHRUN, SCRIPT, str(tmp_path / "torchrun"), "--devices=2"], check=True, timeout=300)
    assert contents(tmp_path / "popen") == contents(tmp_path / "torchrun") == whole


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_to_one_rank(rank: int, whole: dict[str, bytes], tmp_path: Path) -> None:
    """All end behind the subgraph at hand (with code 0, as Lightning has it), and the run can be continued. Seen to
    hang with Lightning's own handler, which waits for the other ranks."""
    run(str(tmp_path / "out"), "--devices=2", f"--preempted={rank}")
    assert (tmp_path / "out" / "INCOMPLETE").is_file()
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2
    run(str(tmp_path / "out"))
    assert contents(tmp_path / "out") == whole


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def run_by_slurm(folder: Path, *options: str) -> list[str]:
    """The script in the two tasks of a job, whose `scontrol` cannot be found; what they said."""
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
    job |= {
        "SLURM_STEP_ID": "0",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    tasks = [
        Script(SCRIPT, "out", "--devices=2", *options, cwd=folder, **job, SLURM_PROCID=rank, SLURM_LOCALID=rank)
        for rank in ("0", "1")
    ]
    ends = [task.wait() for task in tasks]
    assert [end.returncode for end in ends] == [0, 0], "\n".join(end.stderr for end in ends)
    return [end.stdout for end in ends]


@pytest.mark.slow
def test_preempted_and_requeued_by_slurm(whole: dict[str, bytes], tmp_path: Path) -> None:
    """The requeue signal reaches one rank in the midst of a subgraph; Lightning's handler, which requeues on rank 0,
    is called on both at its end. The requeued job goes on from the shards."""
    run_by_slurm(tmp_path, "--preempted=1", "--signals", "SIGUSR1", "SIGTERM")
    assert not list(tmp_path.glob("*.ckpt"))
    assert (tmp_path / "out" / "INCOMPLETE").is_file()
    said = run_by_slurm(tmp_path)
    assert all(f"rank {rank} of 2, 6 batches" in said[rank] for rank in (0, 1))
    assert contents(tmp_path / "out") == whole


@pytest.mark.slow
def test_requeued_after_a_training(tmp_path: Path) -> None:
    """By two ranks, one of which leaves the trained weights: what the requeued job writes is not twice quantized."""
    options = ("--strategy=ddp", "--when=after_train")
    for folder in ("whole", "requeued"):
        (tmp_path / folder).mkdir()
    run_by_slurm(tmp_path / "whole", *options)
    run_by_slurm(tmp_path / "requeued", *options, "--preempted=1", "--signals", "SIGUSR1", "SIGTERM")
    assert [path.name for path in (tmp_path / "requeued").glob("*.ckpt")] == ["hpc_ckpt_1.ckpt"]
    assert not any("trains" in said for said in run_by_slurm(tmp_path / "requeued", *options))
    assert contents(tmp_path / "requeued" / "out") == contents(tmp_path / "whole" / "out")
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_after_a_training(strategy: str, tmp_path: Path) -> None:
    """The calibration data is the training data, undivided; what is spawned takes its report with it."""
    said = run(str(tmp_path / "out"), "--devices=2", f"--strategy={strategy}", "--when=after_train")
    assert ("rank 1 of 2, 6 batches" if strategy == "ddp" else "no report in this process") in said
    assert (tmp_path / "out" / "report.html").is_file()


def test_what_splits_the_model_is_refused() -> None:
    trainer = pl.Trainer(accelerator="cpu", devices=2, logger=False)
    trainer.strategy.__class__ = FSDPStrategy  # which cannot be made without a GPU
    callback = CompressionCallback("w4a16_gptq", output_dir=None)
    with pytest.raises(UnsupportedModelError, match=r"FSDPStrategy splits the model over 2 ranks.*strategy='ddp'"):
        callback.setup(trainer, TinyModule(), "fit")


@dataclass(frozen=True)
class OfTwo(SingleProcess):
    """Rank 0 of two; the other says `theirs`."""

    theirs: Any = None
    size: int = 2

    def gather(self, value: Any, what: str) -> list[Any]:
        return [value, value | self.theirs]


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"output_dir": "/tmp/out_0807"}, "output_dir is /tmp/out_0807 on rank 1, and /tmp/out on rank 0"),
        ({"output_dir": None}, "output_dir is None on rank 1"),
        ({"verify": False}, "verify is False on rank 1, and True on rank 0"),
        ({"recipe": "{}"}, "The recipe is not the same on ranks 1 as on rank 0"),
    ],
)
def test_ranks_are_given_the_same(theirs: dict[str, Any], message: str) -> None:
    """Seen to fail: a schedule that needs no data beside one that does waited for the timeout, as did `verify`."""
    settings = Settings(load_recipe("w4a16_gptq"), Path("/tmp/out"))
    check_settings(settings, OfTwo(theirs={}))
    with pytest.raises(CompressionError, match=message):
        check_settings(settings, OfTwo(theirs=theirs))


def test_ranks_with_different_numbers_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said, for another run may end in other codes; not of what a GPU computes."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    cpu = torch.device("cpu")
    (note,) = unlike_threads(OfTwo(theirs={"threads": 1}), cpu)
    assert re.search("1 to 2 threads each.*OMP_NUM_THREADS", note)
    assert not unlike_threads(OfTwo(theirs={"threads": 2}), cpu)
    assert not unlike_threads(OfTwo(theirs={"threads": 1}), torch.device("cuda"))


class AsksForTheRank(nn.Module):
    """Its weights are the same on all ranks."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.linear, self.rank = nn.Linear(16, 16), rank

    def forward(self, x: Tensor) -> Any:
        return self.linear(x * (1.0 + self.rank))


def test_code_that_asks_for_the_rank(tmp_path: Path) -> None:
    """Seen to fail: the weights were said to differ."""
    data, settings = collect([torch.randn(4, 16)]), Settings(load_recipe(recipe(4)), tmp_path / "out")
    modules = [AsksForTheRank(rank) for rank in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    ours, theirs = (prepare_job(module, data, settings, torch.device("cpu")).fingerprints for module in modules)
    with pytest.raises(CompressionError, match=r"its code computes \(does it ask for the rank"):
        check_same(ours, OfTwo(theirs=theirs), "comparing")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "messages"),
    [
        ("--failing=1", ["could not go on with comparing the calib", "ArithmeticError: in the data of rank 1"]),
        ("--sharing", ["a stream that gives each rank its share", "takes its own share of the batches by itself"]),
    ],
)
def test_what_is_wrong_with_data_is_known_before_the_training(option: str, messages: list[str], tmp_path: Path) -> None:
    """A rank that fails is heard of on the other one (seen to fail: a connection that was closed, and no more), and a
    stream that shares itself out is refused."""
    ended = Script(SCRIPT, str(tmp_path / "out"), "--devices=2", "--when=after_train", "--strategy=ddp", option)
    end = ended.wait()
    assert end.returncode != 0
    assert all(message in end.stderr for message in messages)
    assert "trains" not in end.stdout


def run_command(*of_ranks: list[str]) -> list[Ended]:
    """The command on as many ranks as it is given arguments for."""
    return run_script(COMMAND, *of_ranks)


def run_script(script: Path, *of_ranks: list[str]) -> list[Ended]:
    """A script on as many ranks as it is given arguments for."""
    shared = {"LOCAL_WORLD_SIZE": str(len(of_ranks)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = [Script(script, *given, LOCAL_RANK=str(rank), **shared) for rank, given in enumerate(of_ranks)]
    return [rank.wait() for rank in ranks]


def test_what_is_alike_on_all_ranks_is_warned_of_once() -> None:
    """Seen to fail: by each of them."""
    ends = run_script(Path(SCRIPT).with_name("warned_rank.py"), [], [])
    assert [end.returncode for end in ends] == [0, 0], ends[-1].stderr
    assert [end.stderr.count("The model writes to its buffers") for end in ends] == [1, 0]


def test_the_command_measures_on_all_of_them(checkpoint: Path, texts: tuple[str, str], tmp_path: Path) -> None:
    """Before and after a compression, and of its checkpoint; one rank says it, and draws bars. Seen to fail: with
    perplexities of rank 0 alone; without `bars_of_first`, of transformers."""
    options = [*texts, "data.num_samples=4", "data.max_length=32", "data.batch_size=2", "recipe=w4a16_rtn"]
    held_out = [
        "data@held_out=text",
        texts[1].replace("data.", "held_out."),
        "held_out.num_samples=11",
        "held_out.max_length=32",
        "held_out.batch_size=2",
    ]
    given = ["compress", f"model.path={checkpoint}", "trainer.accelerator=cpu", *options, *held_out]
    extra, said = [], []
    for size in (1, 2):
        out = tmp_path / str(size)
        ends = run_command(*[[*given, f"output_dir={out}"]] * size)
        assert [end.returncode for end in ends] == [0] * size, ends[-1].stderr
        assert "perplexity before" in ends[0].stdout
        report = json.loads((out / "report.json").read_text())
        assert report["num_ranks"] == size
        extra.append(report["extra"])
        assert ["it/s" in end.stderr for end in ends] == [True, False][:size]
        assert "Loading weights: 100%" in ends[0].stderr
        evaluate = [
            "evaluate",
            f"model.path={out}",
            *texts,
            "data.num_samples=11",
            "data.max_length=32",
            "data.batch_size=2",
        ]
        said.append("".join(end.stdout for end in run_command(*[[*evaluate, "device=cpu"]] * size)))
    assert set(extra[0]) == {"perplexity_before", "perplexity_after"}
    assert extra[0] == extra[1]
    assert said[0] == said[1] == f"perplexity {extra[0]['perplexity_after']:.4f}\n"


def test_an_error_is_said_once(checkpoint: Path, texts: tuple[str, str]) -> None:
    """That of all ranks by one of them, that of one by itself, and by the other why it ends."""
    both = run_command(*[["evaluate", "model.path=/nowhere", "device=cpu"]] * 2)
    assert [end.returncode for end in both] == [1, 1]
    message = "lightning-compress: model.path=/nowhere: there is no such folder."
    assert "".join(end.stderr for end in both).count(message) == 1
    paths = (checkpoint, "/nowhere")
    here, there = run_command(*[["evaluate", f"model.path={path}", *texts, "device=cpu"] for path in paths])
    assert (here.returncode, there.returncode) == (1, 1)
    assert message in there.stderr
    assert "Rank 0 of 2 could not go on with comparing model and data to be evaluated" in here.stderr
    assert "Rank 1 failed:" in here.stderr
    assert message not in here.stderr


def test_data_that_one_rank_cannot_read(checkpoint: Path, texts: tuple[str, str], tmp_path: Path) -> None:
    """Seen to fail: the other one, in an operation of the Trainer's by then, ended in its traceback, and did not say
    why."""
    given = ["compress", f"model.path={checkpoint}", "trainer=cpu", f"output_dir={tmp_path / 'out'}", "data=text"]
    here, there = run_command([*given, texts[1]], [*given, "data.files=[/nowhere.txt]"])
    assert (here.returncode, there.returncode) == (1, 1)
    assert "lightning-compress: Rank 0 of 2 could not go on with reading model and data" in here.stderr
    assert "Rank 1 failed:" in here.stderr
    assert "/nowhere.txt" in there.stderr


def test_a_rank_that_ends_in_the_trainers_own_operations(tmp_path: Path) -> None:
    """Seen to fail: the error was one of gloo, which does not say that it was another rank that ended."""
    here, there = run_script(Path(SCRIPT), *[[str(tmp_path / "out"), "--devices=2", "--leaving=1"]] * 2)
    assert (here.returncode, there.returncode) == (1, 3)
    assert "CommunicationError: Rank 0 of 2 could not go on with a barrier of the Trainer: another rank" in here.stderr


def test_a_job_without_srun_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen in a job of a real cluster: the batch script's own process has the variables of the first task."""
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "2"}
    job |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "MASTER_ADDR": "127.0.0.1"}
    message = "This SLURM job has 4 tasks, but srun did not start this process, so it would wait for 3 others."
    ended = Script(COMMAND, "evaluate", "model.path=/nowhere", "trainer=cpu", **job).wait()
    assert (ended.returncode, message in ended.stderr) == (1, True), ended.stderr
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    trainer = pl.Trainer(accelerator="cpu", devices=2, num_nodes=2, strategy="sequential_onload", max_epochs=1)
    with pytest.raises(CompressionError, match=message):
        trainer.fit(TinyModule())


def test_where_the_port_is_taken_nobody_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 ends those that it has started, who would wait for it."""
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="sequential_onload", logger=False)
    launcher = trainer.strategy.launcher
    with socket.socket() as taken, subprocess.Popen(["sleep", "20"]) as started:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        monkeypatch.setattr(launcher, "procs", [started])
        with pytest.raises(RuntimeError, match="address already in use"):
            trainer.strategy.setup_environment()
        assert started.wait(10) == -signal.SIGKILL


def test_other_devices_than_torchrun_has_started(
    command: Command, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Seen to fail: with a traceback of Lightning's."""
    started = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**started, "TORCHELASTIC_RUN_ID": "7", "GROUP_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    given = (f"model.path={checkpoint}", "trainer=cpu", "trainer.devices=3", f"output_dir={tmp_path / 'out'}")
    message = refused(command, "compress", *given)
    assert "compress: trainer.devices=3 and trainer.num_nodes=1 are not what the launcher" in message
    assert "does not match the world size (2). Leave both out" in message


def test_commands_of_one_process(command: Command, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the processes that a launcher starts the first one does what they do. Seen to fail: with a table of each."""
    given = ("estimate", f"model.path={checkpoint}", "job=inference")
    assert "LlamaForCausalLM" in command(*given)
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    assert command(*given) == ""


@pytest.mark.parametrize("started", [{}, {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}])
def test_an_interactive_slurm_job(
    started: dict[str, str], command: Command, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Seen to fail, without srun: with ranks that waited for others for good."""
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "interactive", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1"}
    for name, value in {**job, "SLURM_NNODES": "2", **started}.items():
        monkeypatch.setenv(name, value)
    given = ("evaluate", f"model.path={checkpoint}", "trainer=cpu", "device=cpu")
    message = refused(command, *given)
    assert "(SLURM_JOB_NAME=interactive) Lightning does not see what srun starts" in message
    assert "Put SLURM_JOB_NAME=compress srun before the command" in message


def test_one_node_of_an_interactive_slurm_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NAME", "bash")
    check_srun(LightningEnvironment(), 1)
    monkeypatch.setenv("NODE_RANK", "0")  # by hand on each
    check_srun(LightningEnvironment(), 2)
