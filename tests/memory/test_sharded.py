"""Weights located in folders that torch.distributed.checkpoint wrote, against what it was given."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import Harmful
from processes import SERVER
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from lightning_compress.errors import CompressionError
from lightning_compress.memory import sharded
from lightning_compress.memory.files import StoredTensor, files_fingerprint
from lightning_compress.memory.sharded import blocks_of, sharded_state_dict
from lightning_compress.memory.source import parameters_on_meta, weight_source

RANKS = 2


def tensors() -> dict[str, tuple[Tensor, Placement]]:
    """Of every kind of dtype, cut in every direction, evenly and not."""
    torch.manual_seed(0)
    a = torch.randn(41, 60)
    return {
        "rows": (a, Shard(0)),
        "columns": (a, Shard(1)),
        "whole": (a.bfloat16(), Replicate()),
        "fewer": (torch.randn(1, 60), Shard(0)),
        "stack": (torch.randn(5, 6, 7), Shard(0)),
        "inside": (torch.randn(5, 6, 7), Shard(1)),
        "transposed": (a.T, Replicate()),
        "bool": (a > 0, Shard(0)),
        "float8": (a.to(torch.float8_e4m3fn), Shard(0)),
    }


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(30, 50), nn.GELU(), nn.Linear(50, 11, bias=False))


def save(rank: int, folder: Path) -> None:
    """On every rank: as plain tensors, and as FSDP shards a module with its optimizer."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    state: dict[str, Any] = {
        name: distribute_tensor(value, mesh, [how], src_data_rank=None) for name, (value, how) in tensors().items()
    }
    state["scalar"] = torch.tensor(3)
    others = {"epoch": 3, "harmful": Harmful(folder / "made")}
    dcp.save({"state_dict": state, "optimizer_0": {"state": {"rows": {"exp_avg": torch.ones(3)}}}, **others},
             checkpoint_id=folder / "kinds")  # fmt: skip
    module = model()
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.0)
    module(torch.randn(4, 30)).sum().backward()
    optimizer.step()
    named = {f"net.{name}": value for name, value in module.state_dict().items()}
    averages = {f"ema.{name}": value for name, value in named.items()}
    dcp.save({"model": named, "optimizer_0": optimizer.state_dict(), **others}, checkpoint_id=folder / "fsdp")
    dcp.save({"model": named | averages}, checkpoint_id=folder / "twice")
    dcp.save(named, checkpoint_id=folder / "flat")
    distributed.destroy_process_group()
    os._exit(
        0
    )  # the modules keep gloo's threads: `std::terminate` where one outlives the interpreter (pytorch #190489)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sharded")
    ranks = [SERVER.Process(target=save, args=(rank, path)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(100)
    assert [rank.exitcode for rank in ranks] == [0] * RANKS
    shutil.rmtree(path / "made", ignore_errors=True)  # `dcp.save` reads the metadata of others
    return path


def test_every_kind_of_tensor_is_read(folder: Path) -> None:
    """Fails when strides, or the dimension that is cut, are left out."""
    found = sharded_state_dict(folder / "kinds")
    assert found.keys() == {*tensors(), "scalar"}
    for name, (tensor, how) in tensors().items():
        read = found[name].read()
        assert (read.dtype, found[name].shape) == (tensor.dtype, tuple(tensor.shape))
        assert torch.equal(read.float(), tensor.float()), name
        assert read.is_contiguous()
        assert len(found[name].blocks) == (1 if how.is_replicate() or name == "fewer" else RANKS)
    assert found["scalar"].read() == 3
    assert not (folder / "made").exists(), "nothing in the file is run"


@pytest.mark.parametrize("name", ["rows", "columns", "stack", "inside", "transposed"])
def test_parts(folder: Path, name: str) -> None:
    tensor, stored = tensors()[name][0], sharded_state_dict(folder / "kinds")[name]
    for start, stop in [(0, 1), (2, 5), (0, len(tensor)), (len(tensor) - 1, len(tensor))]:
        assert torch.equal(stored.part(start, stop).read(), tensor[start:stop])


def test_only_what_is_asked_for_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows to where they belong, without a copy of them. Fails when blocks are read on their own."""
    stored = sharded_state_dict(folder / "kinds")["rows"]
    read: list[int] = []
    into = sharded.read_into

    def counted(block: StoredTensor, buffer: Tensor) -> None:
        read.append(block.nbytes)
        into(block, buffer)

    monkeypatch.setattr(sharded, "read_into", counted)
    assert torch.equal(stored.part(0, 3).read(), tensors()["rows"][0][:3])
    assert sum(read) == 3 * 60 * 4


@pytest.mark.parametrize("name", ["fsdp", "flat"])
@pytest.mark.parametrize("place", ["net", ""])
def test_a_model_that_fsdp_saved(folder: Path, name: str, place: str) -> None:
    with parameters_on_meta():
        root = model()
    source = weight_source(root, folder / name, place)
    values = {key: value for load in source.loaders.values() for key, value in load().items()}
    expected = model().state_dict()
    assert values.keys() == expected.keys()
    assert all(torch.equal(values[key], expected[key]) for key in expected)


def test_which_of_two_models_is_meant(folder: Path) -> None:
    with parameters_on_meta():
        root = model()
    assert weight_source(root, folder / "twice", "ema.net").loaders
    with pytest.raises(CompressionError, match=r"holds 2 models that Sequential may be: ema.net, net"):
        weight_source(root, folder / "twice")


def test_the_fingerprint_is_of_the_weights(folder: Path, tmp_path: Path) -> None:
    first = files_fingerprint(blocks_of(sharded_state_dict(folder / "kinds")))
    other = shutil.copytree(folder / "kinds", tmp_path / "kinds")
    assert files_fingerprint(blocks_of(sharded_state_dict(other))) == first
    block = sharded_state_dict(other)["rows"].blocks[0][1]
    content = block.file.path.read_bytes()
    for sixteenth in range(16):
        start, end = (block.offset + block.nbytes * place // 16 for place in (sixteenth, sixteenth + 1))
        changed = bytes(byte ^ 1 for byte in content[start:end])
        block.file.path.write_bytes(content[:start] + changed + content[end:])
        assert files_fingerprint(blocks_of(sharded_state_dict(other))) != first


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_folders_that_cannot_be_read(folder: Path, tmp_path: Path) -> None:
    def copied(name: str) -> Path:
        return shutil.copytree(folder / "kinds", tmp_path / name)

    def refused(match: str, path: Path) -> None:
        with pytest.raises(CompressionError, match=match):
            sharded_state_dict(path)

    lacking = copied("lacking")
    (lacking / "__1_0.distcp").unlink()
    refused(r"lacks __1_0.distcp, which its `.metadata` names", lacking)
    cut = copied("cut")
    os.truncate(cut / "__1_0.distcp", (cut / "__1_0.distcp").stat().st_size // 2)
    refused(r"__1_0.distcp is cut off: it has \d+ bytes.*Copy it again", cut)
    broken = copied("broken")
    (broken / ".metadata").write_bytes(b"no pickle")
    refused(r"cannot be read as the metadata of a checkpoint", broken)
    other = copied("other")
    torch.save({"a": 1}, other / ".metadata", _use_new_zipfile_serialization=False)
    refused(r"cannot be read as the metadata|is not what torch.distributed.checkpoint writes", other)
    swapped = copied("swapped")
    (swapped / "__1_0.distcp").write_bytes(bytes((swapped / "__1_0.distcp").stat().st_size))
    refused(r"no file that `torch.save` of torch 1.6 or later wrote, or it is cut off", swapped)
    dcp.save({"epoch": 3}, checkpoint_id=tmp_path / "none", no_dist=True)
    refused(r"holds no weights: its `.metadata` names no tensors", tmp_path / "none")
