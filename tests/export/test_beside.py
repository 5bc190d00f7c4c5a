"""What a checkpoint cannot hold, what it holds once, and what in its folder is the user's."""

from pathlib import Path

import pytest
import torch
from helpers import compress, recipe
from torch import Tensor, nn

from lightning_compress.errors import UnsupportedModelError
from lightning_compress.export.beside import check_exported, partly_written
from lightning_compress.export.packed import load_compressed


class WithBuffers(nn.Module):
    """A Linear, and these."""

    def __init__(self, *buffers: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(16, 16)
        for number, buffer in enumerate(buffers):
            self.register_buffer(f"buffer{number}", buffer)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_types_that_no_file_can_hold() -> None:
    """Are found before the work. Seen to fail: without the refusal."""
    check_exported(WithBuffers(torch.zeros(2, dtype=torch.complex64)))
    with pytest.raises(UnsupportedModelError, match=r"cannot hold buffer0 \(torch.complex128\)\. .*persistent=False"):
        check_exported(WithBuffers(torch.zeros(2, dtype=torch.complex128)))


def test_views_that_overlap(tmp_path: Path) -> None:
    """Each is written whole. Seen to fail: safetensors refused them, for only those with one begin were told apart."""
    base = torch.arange(12.0)
    report = compress(WithBuffers(base[:8], base[4:]), None, recipe(8, "rtn"), tmp_path / "out")
    assert report.verification is not None
    assert report.verification.passed
    read = load_compressed(WithBuffers(torch.zeros(8), torch.zeros(8)), tmp_path / "out")
    assert torch.equal(read.get_buffer("buffer0"), base[:8])
    assert torch.equal(read.get_buffer("buffer1"), base[4:])


@pytest.mark.parametrize(("bits", "num_resumed"), [(8, 1), (4, 0)], ids=["continued", "begun anew"])
def test_files_of_the_user_stay(bits: int, num_resumed: int, tmp_path: Path) -> None:
    """What a run that died was writing goes. Seen to fail: all that begins with `.tmp` went, and a folder was an
    error."""
    out = tmp_path / "out"
    compress(WithBuffers(), None, recipe(8, "rtn", group_size=16), out, verify=False)
    (out / ".x.partial").mkdir()
    mine, leftovers = [out / ".tmpnotes", out / ".tmpAb3dE9.txt"], [out / ".tmpAb3dE9", out / ".a.partial"]
    for file in (*mine, *leftovers):
        file.touch()
    assert sorted(partly_written(out)) == sorted(leftovers)
    report = compress(WithBuffers(), None, recipe(bits, "rtn", group_size=16), out, verify=False)
    assert report.num_resumed == num_resumed
    assert [path for path in leftovers if path.exists()] == []
    assert [path for path in (*mine, out / ".x.partial") if not path.exists()] == []
