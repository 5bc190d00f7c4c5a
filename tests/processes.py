"""Scripts in processes of their own, forked from one that has imported what they import: that takes 7 s each time.

A process of `multiprocessing`'s fork server is as good as a new one for what is tested here: it has its own memory,
signals, files and connections, and can be killed. What is started by a launcher (Lightning's, torchrun) is new.
"""

import multiprocessing
import os
import runpy
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "lightning_compress.command.cli",
        "matplotlib.backends.backend_svg",
        "matplotlib.figure",
        "transformers.models.llama.modeling_llama",
        "transformers.models.mixtral.modeling_mixtral",
    ]
)


@dataclass(frozen=True)
class Ended:
    """As `subprocess.CompletedProcess`; a negative `returncode` is the signal that ended it."""

    returncode: int
    stdout: str
    stderr: str


@final
class Script:
    """`python script *arguments`, begun; `environment` is in addition to this process's."""

    def __init__(self, script: Path | str, *arguments: str, cwd: Path | None = None, **environment: str) -> None:
        self._said = [tempfile.NamedTemporaryFile("r") for _ in ("stdout", "stderr")]  # noqa: SIM115
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        files = [file.name for file in self._said]
        self._process = SERVER.Process(
            target=_run, args=(str(script), arguments, str(cwd or Path.cwd()), variables, files)
        )
        self._process.start()

    def wait(self, timeout: float = 300) -> Ended:
        """What became of it.

        Raises:
            TimeoutError: it is still at work; it is killed.
        """
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            self.kill()
        stdout, stderr = (file.read() for file in self._said)
        for file in self._said:
            file.close()
        if code is None:
            raise TimeoutError(f"still at work after {timeout} s: {stdout}{stderr}")
        return Ended(code, stdout, stderr)

    def kill(self) -> None:
        """With the signal that cannot be caught."""
        self._process.kill()
        self._process.join()


def _run(script: str, arguments: tuple[str, ...], cwd: str, environment: dict[str, str], said: list[str]) -> None:
    for descriptor, name in enumerate(said, 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
