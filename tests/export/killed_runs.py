"""Compressions that are killed, for `test_resume.py`; prints how many were continued.

    python killed_runs.py each|random memory|disk FOLDER

`each` kills right before and right after every line of the manifest, `random` at 20 times two random instants. Every
run is a fork of this process, which has prepared them all (tracing takes longer than all that can be interrupted), and
so starts from the same state as any other. (tqdm's lock is a semaphore that all forks share; one that is killed while
it holds it, within transformers' `save_pretrained`, would let all later ones wait for ever: seen twice in some hundred
runs.)
"""

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from helpers import contents, manifest, prepare, recipe, run, saved, tiny_llama, token_batches
from tqdm import tqdm

from lightning_compress.calibration import amounts, layout, resume
from lightning_compress.calibration.resume import MANIFEST, Finished
from lightning_compress.export import shards, writer
from lightning_compress.plugin.job import Job
from lightning_compress.report import html


def together(work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """As where torch has three threads; with those of OpenMP a process cannot be forked."""
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(work, items))


layout._SHARD_BYTES = 1  # what no subgraph holds takes several shards
amounts._LEAST_SPLIT_BYTES = 1 << 11  # and so does a subgraph
shards.side_by_side = resume.side_by_side = together
tqdm.monitor_interval = 0
tqdm.set_lock(threading.RLock())
html.error_figure = lambda _: ""  # which takes longer than the run


def prepared(where: str, folder: Path) -> Job:
    """Four layers, of which calibration reaches all but the norm and the head."""
    model = tiny_llama(4)
    batches, given = token_batches(4), recipe(4)
    if where == "memory":
        return prepare(model, batches, given, folder / "unused", verify=False)
    empty = saved(model, folder / "weights", max_shard_size="20KB")
    return prepare(empty, batches, given, folder / "unused", weights=folder / "weights")


def start(job: Job, folder: Path, before: Callable[[], None] = lambda: None) -> int:
    """Run the job in a process of its own, `before` first; returns its id."""
    pid = os.fork()
    if pid == 0:
        sys.stdout = sys.stderr = open(folder.with_suffix(".log"), "w", buffering=1)  # noqa: SIM115
        code = 1
        try:
            before()
            run(replace(job, settings=replace(job.settings, output_dir=folder)))
            code = 0
        finally:
            os._exit(code)
    return pid


def ended(pid: int) -> int:
    """The signal that ended a process (negative), or its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def lines(folder: Path) -> list[list[str]]:
    """The shards in each line of the manifest, in order."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return []
    whole = [line for line in manifest.read_text().splitlines()[1:] if line.endswith("}")]
    return [[shard["name"] for shard in json.loads(line)["shards"]] for line in whole]


def identities(folder: Path, done: list[list[str]]) -> list[tuple[int, int]]:
    """Differ when a file was written again."""
    found = [(folder / name).stat() for names in done for name in names]
    return [(stat.st_ino, stat.st_mtime_ns) for stat in found]


def finish(job: Job, folder: Path, expected: dict[str, bytes]) -> None:
    """Continue, and compare: the files, and that nothing was written twice."""
    done = lines(folder)
    before = identities(folder, done)
    assert ended(start(job, folder)) == 0, folder.with_suffix(".log").read_text()
    assert contents(folder) == expected, (folder.name, sorted(contents(folder)))
    assert manifest(folder) == manifest(folder.with_name("whole")), folder.name
    assert identities(folder, done) == before, f"{folder.name}: {done} were written again"
    report = json.loads((folder / "report.json").read_text())
    assert report["num_resumed"] == min(len(done), len(job.run.flow.subgraphs))


def dies(number: int, moment: str) -> None:
    """Let this process be killed right before or after line `number` of the manifest."""
    append = writer.append_finished
    count = 0

    def last_words(folder: Path, finished: Finished) -> None:
        nonlocal count
        count += 1
        if (count, moment) == (number, "before"):
            os.kill(os.getpid(), signal.SIGKILL)
        append(folder, finished)
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    writer.append_finished = last_words


def each(job: Job, root: Path, expected: dict[str, bytes]) -> int:
    num_continued = 0
    for number in range(1, len(lines(root / "whole")) + 1):
        for moment in ("before", "after"):
            folder = root / f"{moment}-{number}"
            pid = start(job, folder, lambda number=number, moment=moment: dies(number, moment))
            assert ended(pid) == -signal.SIGKILL
            assert len(lines(folder)) == number - (moment == "before")
            assert (folder / writer.INCOMPLETE).is_file()
            assert not (folder / "config.json").exists()
            finish(job, folder, expected)
            num_continued += 1
    return num_continued


def at_random(job: Job, root: Path, expected: dict[str, bytes]) -> int:
    begun = time.perf_counter()
    ended(start(job, root / "timed"))
    took = time.perf_counter() - begun
    num_continued = 0
    for seed in range(20):
        folder, chance = root / str(seed), random.Random(seed)
        for _ in range(2):
            pid = start(job, folder)
            time.sleep(chance.uniform(0, 1) * took)
            os.kill(pid, signal.SIGKILL)
            assert ended(pid) in (0, -signal.SIGKILL)
        num_continued += (folder / writer.INCOMPLETE).exists() and len(lines(folder)) > 0
        finish(job, folder, expected)
    return num_continued


def main() -> None:
    mode, where, root = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    run(prepared(where, root / "first"))  # imports what is imported late
    job = prepared(where, root)
    assert ended(start(job, root / "whole")) == 0, (root / "whole.log").read_text()
    expected = contents(root / "whole")
    assert "config.json" in expected
    print({"each": each, "random": at_random}[mode](job, root, expected))


if __name__ == "__main__":
    main()
