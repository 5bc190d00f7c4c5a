"""Host memory beside the C heap."""

import platform
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_compress.memory import store as stores
from lightning_compress.memory.buffers import make_writable
from lightning_compress.memory.store import WeightStore
from lightning_compress.memory.transfer import Lane

NUM_BYTES = 32 << 20


def copied_bytes(path: Path) -> int:
    """Of a file that is mapped here, what has pages of its own."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    return sum(
        1024 * int(next(line for line in lines if line.startswith("Anonymous:")).split()[1])
        for first in lines
        if first.endswith(str(path))
    )


@pytest.mark.skipif(
    tuple(map(int, platform.release().split(".")[:2])) < (5, 14), reason="Linux has what it takes since 5.14"
)
def test_pages_of_a_file_are_there_before_they_are_written_to(tmp_path: Path) -> None:
    path = tmp_path / "weight"
    torch.full((NUM_BYTES // 4,), 3.0).numpy().tofile(path)
    weight = torch.from_file(str(path), size=NUM_BYTES // 4)
    assert weight.sum() == 3 * NUM_BYTES // 4
    assert copied_bytes(path) == 0
    make_writable(weight)
    assert copied_bytes(path) == NUM_BYTES
    weight.fill_(7.0)
    assert torch.from_file(str(path), size=2).tolist() == [3, 3], "the file is as it was"


def test_what_is_solved_is_written_to_such_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: without the call in `write`."""
    made: list[int] = []
    monkeypatch.setattr(stores, "make_writable", lambda tensor: made.append(tensor.data_ptr()))
    model = nn.Linear(2, 2)
    WeightStore(model, Lane(torch.device("cpu"))).write(model.weight, torch.ones(2, 2))
    assert made == [model.weight.data_ptr()]
    assert model.weight.unique().tolist() == [1]


@pytest.mark.parametrize(
    "tensor", [torch.ones(3), torch.ones(1 << 20)[1:], torch.ones(1 << 10, 1 << 10).t(), torch.empty(0)]
)
def test_any_tensor_may_be_made_writable(tensor: Tensor) -> None:
    """And keeps its values. Seen to fail: with MADV_DONTNEED, which drops pages."""
    before = tensor.clone()
    make_writable(tensor)
    assert torch.equal(tensor, before)
