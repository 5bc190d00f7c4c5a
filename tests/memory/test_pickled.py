"""Weights located in files that `torch.save` wrote, against what `torch.load` makes of the same files."""

import argparse
import collections
import enum
import functools
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Harmful
from omegaconf import OmegaConf
from torch import Tensor, nn

from lightning_compress.errors import CompressionError
from lightning_compress.memory import files
from lightning_compress.memory.files import files_fingerprint, read_tensor, stored_tensors
from lightning_compress.memory.pickled import stored_state_dict


class Size(enum.Enum):
    SMALL = 1


class Names(list[str]):
    pass


HYPER_PARAMETERS = {
    "namespace": argparse.Namespace(a=1),
    "omegaconf": OmegaConf.create({"a": [1, {"b": 2}]}),
    "path": Path("x"),
    "partial": functools.partial(torch.optim.AdamW, lr=1e-3),
    "enum": Size.SMALL,
    "numpy": (np.float64(3), np.arange(3)),
    "defaultdict": collections.defaultdict(list, {1: [2]}),
    "deque": collections.deque([1]),
    "set": {1, 2},
    "list": Names(["a"]),
    "bytes": b"abc",
    "sparse": torch.eye(3).to_sparse(),
}


def tensors() -> dict[str, Tensor]:
    """Contiguous and not, of one storage and of several, and of every kind of dtype."""
    torch.manual_seed(0)
    a = torch.randn(40, 60)
    named = {
        "a": a,
        "tied": a,
        "rows": a[3:7],
        "transposed": a.T,
        "strided": a[::3, 1::2],
        "expanded": a[:1].expand(5, 60),
        "parameter": nn.Parameter(torch.randn(7, 3)),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 3),
        "bool": a > 0,
    }
    return {**named, **{str(dtype): a.to(dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float64)}}


def checkpoint(file: Path, state: dict[str, Any], **others: Any) -> Path:
    torch.save({"epoch": 1, "state_dict": state, **others}, file)
    return file


@pytest.mark.parametrize("wrapped", [True, False], ids=["checkpoint", "state dict"])
def test_every_kind_of_tensor_is_read(tmp_path: Path, wrapped: bool) -> None:
    """Fails when strides or the place in the storage are left out."""
    file = checkpoint(tmp_path / "a.ckpt", tensors())
    if not wrapped:
        torch.save(tensors(), file)
    stored = stored_state_dict(file)
    assert list(stored) == list(tensors())
    for name, tensor in tensors().items():
        read = read_tensor(stored[name])
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor), name
        assert read.is_contiguous()
    assert stored["tied"] == stored["a"]


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("name", HYPER_PARAMETERS)
def test_what_else_is_in_the_file_does_not_matter(tmp_path: Path, name: str, protocol: int) -> None:
    """`torch.load(weights_only=True)` refuses most of these files."""
    file, weight = tmp_path / "a.ckpt", torch.randn(3, 5)
    torch.save(
        {"hyper_parameters": {name: HYPER_PARAMETERS[name]}, "state_dict": {"w": weight}}, file, pickle, protocol
    )
    assert torch.equal(read_tensor(stored_state_dict(file)["w"]), weight)


def test_nothing_in_the_file_is_run(tmp_path: Path) -> None:
    """Fails when unknown classes are imported."""
    file = checkpoint(tmp_path / "a.ckpt", {"w": torch.ones(2)}, harmful=Harmful(tmp_path / "made"))
    assert torch.equal(read_tensor(stored_state_dict(file)["w"]), torch.ones(2))
    assert not (tmp_path / "made").exists()


def test_only_what_is_asked_for_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither optimizer states nor other weights. Fails when the file is loaded, or mapped and copied."""
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 300)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    file = checkpoint(tmp_path / "a.ckpt", model.state_dict(), optimizer_states=[state])
    whole, one = file.stat().st_size, 300 * 300 * 4
    assert whole > 6 * one
    read: list[int] = []
    preadv = os.preadv

    def counted(descriptor: int, buffers: Any, offset: int) -> int:
        read.append(preadv(descriptor, buffers, offset))
        return read[-1]

    monkeypatch.setattr(files.os, "preadv", counted)
    before = int(Path("/proc/self/io").read_text().split()[1])  # rchar: what all reads of this process brought
    stored = stored_state_dict(file)
    located = int(Path("/proc/self/io").read_text().split()[1]) - before
    assert torch.equal(read_tensor(stored["1.weight"]), model[1].weight)
    assert sum(read) == one
    assert located < one / 2, "the pickle and the archive's directory"


def test_the_fingerprint_is_of_the_weights(tmp_path: Path) -> None:
    def fingerprint(state: dict[str, Tensor]) -> str:
        return files_fingerprint(stored_state_dict(checkpoint(tmp_path / "a.ckpt", state)))

    state = {"a": torch.arange(100.0), "b": torch.ones(3)}
    first = fingerprint(state)
    assert fingerprint(state) == first
    state["a"][50] += 1
    assert fingerprint(state) != first
    assert fingerprint({"a": torch.arange(100.0), "c": torch.ones(3)}) != first


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    file = checkpoint(tmp_path / "whole.ckpt", {"w": torch.ones(1000)})

    def refused(match: str, path: Path) -> None:
        with pytest.raises(CompressionError, match=match):
            stored_state_dict(path)

    cut = tmp_path / "cut.ckpt"
    cut.write_bytes(file.read_bytes()[:-100])
    refused(r"or it is cut off.*rewritten by `torch.save\(torch.load", cut)
    legacy = tmp_path / "legacy.ckpt"
    torch.save({"state_dict": {"w": torch.ones(3)}}, legacy, _use_new_zipfile_serialization=False)
    refused(r"of torch 1.6 or later.*rewritten by", legacy)
    torch.save({"epoch": 3, "state_dict": {}}, tmp_path / "none.ckpt")
    refused("holds no weights: there is no `state_dict` with tensors", tmp_path / "none.ckpt")
    torch.save([1, 2], tmp_path / "list.ckpt")
    refused("holds no weights", tmp_path / "list.ckpt")
    with (
        zipfile.ZipFile(file) as source,
        zipfile.ZipFile(tmp_path / "packed.ckpt", "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for record in source.namelist():
            target.writestr(record, source.read(record))
    refused("is compressed or a TorchScript archive", tmp_path / "packed.ckpt")


def test_a_file_that_another_program_packed(tmp_path: Path) -> None:
    """torch computes where the second record begins; where that is not so, fails without the archive's directory."""
    file = checkpoint(tmp_path / "whole.ckpt", {"w": torch.ones(100), "v": torch.zeros(100)})
    other = tmp_path / "repacked.ckpt"
    with zipfile.ZipFile(file) as source, zipfile.ZipFile(other, "w") as target:
        for record in source.namelist():
            target.writestr(record, source.read(record))
    with pytest.raises(CompressionError, match=r"is not laid out as `torch.save` does it. Rewrite it"):
        stored_state_dict(other)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        (".metadata", r"sharded checkpoint: give it as `weights=`"),
        ("latest", r"DeepSpeed checkpoint.*convert_zero_checkpoint_to_fp32_state_dict"),
    ],
)
def test_what_to_do_with_sharded_checkpoints_in_the_place_of_safetensors(tmp_path: Path, name: str, match: str) -> None:
    (tmp_path / "last.ckpt").mkdir()
    (tmp_path / "last.ckpt" / name).touch()
    with pytest.raises(CompressionError, match=match):
        stored_tensors(tmp_path / "last.ckpt")
