"""Activations that wait in a file: the same bits, in the memory that was granted, and nothing left behind."""

import os
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import CPU, compress_in_memory, prepare, ragged_batches, recipe, tiny_llama, token_batches
from torch import fx, nn

from lightning_compress.calibration.loop import calibrate
from lightning_compress.calibration.prepare import calibrating
from lightning_compress.errors import CompressionError, RunWarning
from lightning_compress.export.writer import Unwritten
from lightning_compress.memory import activations, scratch
from lightning_compress.memory.activations import ActivationCache
from lightning_compress.memory.placement import MemoryConfig
from lightning_compress.memory.scratch import ScratchFile, Stored, is_in_memory
from lightning_compress.memory.tracker import LiveMemory, parse_bytes

LARGE = torch.randn(3, 64, 128)
BYTES = LARGE.view(-1).view(torch.uint8)


def keys(count: int) -> list[fx.Node]:
    graph = fx.Graph()
    return [graph.placeholder(f"v{number}") for number in range(count)]


def test_a_temporary_folder_in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files there would take the memory that they are to save: others do, where the user names none. Seen to fail."""
    shared_memory = Path("/dev/shm")
    assert is_in_memory(shared_memory)
    assert not is_in_memory(shared_memory, mounts=tmp_path / "none")
    monkeypatch.setattr(tempfile, "tempdir", str(shared_memory))
    monkeypatch.setattr(scratch, "_DISK", tmp_path)
    place = shared_memory if is_in_memory(tmp_path) else tmp_path
    file = ScratchFile()
    assert os.fstat(file._file.fileno()).st_dev == place.stat().st_dev
    monkeypatch.setattr(scratch, "_DISK", shared_memory)
    file = ScratchFile()
    with pytest.warns(RunWarning, match=r"wait in the temporary folder /dev/shm, .* memory.scratch_dir"):
        stored = file.write(BYTES)
    assert torch.equal(file.read(stored).result(), BYTES)
    ScratchFile(shared_memory).write(BYTES)  # as the user has said


@pytest.mark.parametrize(
    "tensor",
    [
        LARGE,
        LARGE.bfloat16(),
        LARGE.transpose(0, 2),
        LARGE[1:, :, 5:],
        LARGE[:, ::3, ::2],
        LARGE[:1, :1, :1].expand(3, 64, 128),
        torch.tensor(3.5),
        torch.arange(10) > 4,
        torch.empty(0, 7),
    ],
    ids=["plain", "bf16", "transposed", "slice", "strided", "expanded", "scalar", "bool", "empty"],
)
def test_what_is_read_is_what_was_written(tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "LEAST_SPILLED", 1)
    (a,) = keys(1)
    cache = ActivationCache([{}], device=CPU, budget=0)
    cache.store(0, {a: tensor})
    assert cache.num_bytes == 0, "it waits in the file"
    read = cache.load(0, {a})[a]
    assert isinstance(read, torch.Tensor)
    assert torch.equal(read, tensor)
    assert read.dtype == tensor.dtype
    if tensor.untyped_storage().nbytes() <= 1.5 * tensor.nbytes:
        assert read.stride() == tensor.stride(), "kernels may sum in another order for another layout"


def test_space_is_reused_and_order_is_kept(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path)
    for round_ in range(5):
        stored = [file.write(torch.full((4000,), 10 * round_ + number, dtype=torch.uint8)) for number in range(4)]
        reads = [file.read(entry) for entry in stored]
        for entry in stored:
            file.free(entry)
        later = file.write(
            torch.full((4000,), 255, dtype=torch.uint8)
        )  # into the space of one that is still being read
        assert [int(read.result()[0]) for read in reads] == [10 * round_ + number for number in range(4)]
        file.free(later)
    assert file.num_bytes == 4 * 4000
    assert list(tmp_path.iterdir()) == [], "the file has no name"


def test_the_file_is_as_large_as_what_waits_in_it_at_most(tmp_path: Path) -> None:
    """Whatever sizes come and go. Seen to fail: with space reused for as many bytes only, by which it was half as large
    again, and larger than the disk that a plan had room on."""
    draw, file, waiting, most = random.Random(0), ScratchFile(tmp_path), list[tuple[Stored, int]](), 0
    for number in range(400):
        if waiting and draw.random() < 0.48:
            stored, value = waiting.pop(draw.randrange(len(waiting)))
            found = file.read(stored).result()
            assert found.unique().tolist() == [value], "nobody wrote there meanwhile"
            file.free(stored)
        else:
            value = number % 256
            size = draw.choice([1, 3000, 4096, 10_000])
            waiting.append((file.write(torch.full((size,), value, dtype=torch.uint8)), value))
            assert waiting[-1][0].nbytes == size
        most = max(most, sum(stored.nbytes for stored, _ in waiting))
    assert file.num_bytes == most
    for stored, _ in waiting:
        file.free(stored)
    assert len(file.write(torch.zeros(most, dtype=torch.uint8)).pieces) == 1, "what is free is joined"
    assert file.num_bytes == most


def test_the_budget_decides_what_waits_where() -> None:
    a, b, c = keys(3)
    cache = ActivationCache([{}, {}], device=CPU, budget=LARGE.nbytes + 100)
    for batch in (0, 1):
        cache.store(batch, {a: LARGE + batch, b: (LARGE * batch, 7), c: torch.tensor(1.0)})
    assert cache.num_bytes == LARGE.nbytes + 8
    for batch in (0, 1):
        found = cache.load(batch, {a, b})
        assert torch.equal(found[a], LARGE + batch)  # type: ignore[arg-type]
        assert torch.equal(found[b][0], LARGE * batch)  # type: ignore[index]
        assert found[b][1] == 7  # type: ignore[index]
    cache.store(1, {a: LARGE - 1})
    assert torch.equal(cache.load(1, {a})[a], LARGE - 1)  # type: ignore[arg-type]
    cache.retain(0, set())
    assert cache.num_bytes == 4
    cache.store(0, {b: LARGE})
    assert cache.num_bytes == 4 + LARGE.nbytes, "there is room again"


@pytest.mark.parametrize("schedule", ["staged", "recompute", "block"])
@pytest.mark.parametrize("batches", [token_batches, ragged_batches])
def test_the_weights_do_not_depend_on_the_budget(monkeypatch: pytest.MonkeyPatch, batches: Any, schedule: str) -> None:
    monkeypatch.setattr(activations, "LEAST_SPILLED", 1)
    results = []
    for budget in (None, 0, 10_000):
        model = tiny_llama(2)
        compress_in_memory(
            model, batches(), recipe(4), schedule=schedule, memory=MemoryConfig(activation_budget=budget)
        )
        results.append(list(model.parameters()))
    for others in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], others, strict=True))


class Adds(nn.Module):
    """Changes in place what waits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        for layer in self.layers:
            x += torch.tanh(layer(x))
        return x


def test_values_that_are_changed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "LEAST_SPILLED", 1)
    weights = []
    for budget in (None, 0):
        torch.manual_seed(0)
        model = Adds()
        batches = [torch.randn(2, 5, 16) for _ in range(3)]
        compress_in_memory(model, batches, recipe(4), memory=MemoryConfig(activation_budget=budget))
        weights.append(list(model.parameters()))
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))


@pytest.mark.slow
def test_memory_does_not_grow_with_the_samples() -> None:
    """Four times the batches, the same peak but for the batches themselves."""
    peaks = []
    for count in (8, 32):
        model = tiny_llama(2, hidden_size=128, intermediate_size=512)
        job = prepare(model, token_batches(count, rows=8), recipe(4), memory=MemoryConfig(activation_budget=0))
        with calibrating(model), LiveMemory() as memory:
            memory.ignore(*model.state_dict().values())
            for _ in calibrate(job.run, Unwritten()):
                pass
        peaks.append(memory.peak_bytes)
    assert peaks[1] < 1.1 * peaks[0], peaks


def test_no_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(activations, "LEAST_SPILLED", 1)
    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(CompressionError, match=r"could not be kept in .*No space left.*scratch_dir, or raise"):
        compress_in_memory(
            tiny_llama(2), token_batches(), recipe(4), memory=MemoryConfig(activation_budget=0, scratch_dir=tmp_path)
        )


def test_sizes() -> None:
    assert parse_bytes("1.5GiB") == 3 << 29
    assert parse_bytes("500 MB") == 500_000_000
    assert parse_bytes("1e9") == 10**9
    assert parse_bytes("12B") == parse_bytes(12) == 12
    for wrong in ("much", "-1GB", "1.2.3", "5 apples", 1.5, "0.5B", "1e400", "1e400GiB", "1e305TiB"):
        with pytest.raises(ValueError, match="is no size; write bytes"):
            parse_bytes(wrong)


def test_what_could_not_be_written_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor what was there before it: the last write may fail where a value lay that is not needed any more. Seen to fail
    with reads that do not ask how the write before them ended: they gave the old values."""
    file = ScratchFile()
    old = file.write(BYTES)
    file.read(old).result()
    file.free(old)

    def fails(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pwritev", fails)
    stored = file.write(BYTES + 1)
    assert stored.pieces == old.pieces
    with pytest.raises(CompressionError, match=r"could not be kept in .*Input/output error"):
        file.read(stored).result()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    """Seen to fail: whoever gave it was to leave activation_budget out."""
    with pytest.raises(
        CompressionError, match=r"scratch_dir=\S+nowhere cannot hold the activations: no such file or directory\. Name"
    ) as error:
        ScratchFile(tmp_path / "nowhere")
    assert str(error.value).endswith("or leave scratch_dir out.")
