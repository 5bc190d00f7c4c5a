"""`keep_activations`: a continued run reads what its finished subgraphs would compute, and ends in the same bytes.

Seen to fail with the cache of a boundary put in the place of a later one, with activations that are not read, and with
those of a run whose statistics later subgraphs share.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import UNREAD_BY_OLDER, contents, padded, prepare, recipe, run, tiny_llama, token_batches
from test_resume import CASES, stopped, with_weights

from lightning_compress.calibration import boundary, loop
from lightning_compress.calibration.flow import run_step
from lightning_compress.calibration.resume import MANIFEST
from lightning_compress.distributed.folder import SharedFolder
from lightning_compress.errors import OutputDirectoryError
from lightning_compress.memory.placement import MemoryConfig
from lightning_compress.plugin.run import run_job

KEPT = boundary.FOLDER


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the steps that are run."""
    seen: list[int] = []

    def counted(flow: Any, step: Any, number: int, *options: Any) -> Any:
        seen.append(number)
        return run_step(flow, step, number, *options)

    monkeypatch.setattr(loop, "run_step", counted)
    return seen


IN_MEMORY = [(case, "memory") for case in CASES if case not in ("recompute", "bf16")]


@pytest.mark.sampled(5)
@UNREAD_BY_OLDER
@pytest.mark.filterwarnings("ignore:.* is called several times")
@pytest.mark.parametrize(("case", "where"), [*IN_MEMORY, ("block", "disk")])
def test_stopped_after_every_subgraph(case: str, where: str, tmp_path: Path, steps: list[int]) -> None:
    build, batches, options, schedule = CASES[case]
    given = recipe(4, **options) if "scheme" not in options else recipe(**options)
    make = with_weights(where, build, tmp_path / "weights")
    memory = MemoryConfig(activation_budget=0)

    def job(folder: str) -> Any:
        return make(batches(), given, tmp_path / folder, schedule=schedule, keep_activations=True, memory=memory)

    whole = run(job("whole"))
    num_steps = len(steps)
    expected = contents(tmp_path / "whole")
    assert not (tmp_path / "whole" / KEPT).exists()
    for number in range(1, len(whole.subgraphs)):
        stopped(job(str(number)), number)
        steps.clear()
        again = job(str(number))
        assert run(again).num_resumed == number
        finished = sum(len(subgraph.steps) for subgraph in again.run.flow.subgraphs[:number])
        if case != "one statistic for many subgraphs":  # which has to be gathered again
            assert len(steps) == num_steps - finished
        assert contents(tmp_path / str(number)) == expected


def test_nothing_is_kept_behind_the_last_subgraph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would serve nobody. Seen to fail: with all of them kept."""
    kept: list[int] = []

    def save(folder: SharedFolder, index: int, *rest: Any) -> None:
        kept.append(index)
        boundary.save_boundary(folder, index, *rest)

    monkeypatch.setattr(loop, "save_boundary", save)
    report = run(prepare(tiny_llama(1), token_batches(), recipe(4), tmp_path, keep_activations=True))
    assert kept == list(range(len(report.subgraphs) - 1))


@pytest.mark.slow
def test_killed_between_the_manifest_and_the_activations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then one subgraph is run through again, from what was kept before it."""

    def job(folder: str, **options: Any) -> Any:
        batches = padded(token_batches())
        return prepare(tiny_llama(3), batches, recipe(4), tmp_path / folder, keep_activations=True, **options)

    run(job("whole"))
    generator = run_job(job("out"))
    for _ in range(2):
        next(generator)
    monkeypatch.setattr(loop, "save_boundary", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        next(generator)
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "out" / KEPT).iterdir()] == ["00001"]
    assert run(job("out")).num_resumed == 3
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_activations_behind_what_the_manifest_holds_are_not_used(tmp_path: Path) -> None:
    """Seen to fail: with the newest activations, whatever is finished."""

    def job(folder: str) -> Any:
        return prepare(tiny_llama(3), token_batches(), recipe(4), tmp_path / folder, keep_activations=True)

    run(job("whole"))
    stopped(job("out"), 3)
    manifest = tmp_path / "out" / MANIFEST
    manifest.write_text("".join(manifest.read_text().splitlines(keepends=True)[:-1]))
    assert run(job("out")).num_resumed == 2
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_what_cannot_be_kept_or_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def job(folder: str = "out") -> Any:
        return prepare(tiny_llama(3), token_batches(), recipe(4), tmp_path / folder, keep_activations=True)

    def full(*_: Any) -> None:
        raise RuntimeError("PytorchStreamWriter failed writing file: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(boundary.torch, "save", full)
        with pytest.raises(
            OutputDirectoryError, match=r"behind model.embed_tokens could not be kept .*are free.*=false"
        ):
            run(job())
    assert not list((tmp_path / "out" / KEPT).rglob("*.pt"))

    def crowded(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with monkeypatch.context() as patch:  # which has nothing to do with the disk
        patch.setattr(boundary.torch, "save", crowded)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            run(job("crowded"))
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in caught.value.__notes__[-1]
    stopped(job(), 2)
    (file,) = (tmp_path / "out" / KEPT).glob("*/000000.pt")
    whole = file.read_bytes()
    held = max(filter(torch.is_tensor, torch.load(file).values()), key=torch.numel)
    place = whole.index(held.numpy().tobytes())
    changed = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
    for content in (whole[:100], b"", changed):  # the last one seen to end in another checkpoint, without a word
        file.write_bytes(content)
        with pytest.raises(OutputDirectoryError, match=r"cannot be read: \w+: .*Delete the folder") as damaged:
            run(job())
    assert "2 finished subgraphs are in" in damaged.value.__notes__[-1]  # seen to fail: "Nothing was written."
    assert run(prepare(tiny_llama(3), token_batches(), recipe(4), tmp_path / "out")).num_resumed == 2
    assert not (tmp_path / "out" / KEPT).exists()
