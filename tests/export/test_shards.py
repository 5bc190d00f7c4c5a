"""Shards one by one: read back when they are written, not at the end; what no subgraph holds in shards of its own.

Seen to fail: without comparing, with reading back after the rename, with all shards read at the end, with everything
that no subgraph holds brought at once, with shards of it that divide a layer or are not in the manifest, and with
checksums that are not compared on continuing.
"""

import json
import os
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from helpers import compress, contents, prepare, recipe, run, saved, tiny_llama, token_batches
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM

from lightning_compress.calibration import amounts, layout
from lightning_compress.calibration.footprint import footprint
from lightning_compress.calibration.prepare import calibrating
from lightning_compress.calibration.resume import MANIFEST
from lightning_compress.errors import OutputDirectoryError
from lightning_compress.export.checkpoint import INCOMPLETE
from lightning_compress.export.verify import READ_BACK, verify_files
from lightning_compress.graph.synthesize import flatten_batch
from lightning_compress.memory.files import INDEX
from lightning_compress.memory.store import WeightStore
from lightning_compress.memory.tracker import LiveMemory
from lightning_compress.plugin.run import run_job

SAVE = "lightning_compress.export.shards.save_file"
FIRST_LAYER = recipe(8, "rtn", targets=["re:.*layers.0.*"])


def shards(folder: Path) -> list[dict[str, Any]]:
    """The lines of the manifest that name one."""
    return [json.loads(line) for line in (folder / MANIFEST).read_text().splitlines()[1:]]


@pytest.mark.parametrize("place", [-1, 20], ids=["tensor", "header"])
def test_a_shard_that_comes_back_different(place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets no name and no line; the next run writes it again."""
    out = tmp_path / "out"
    names = []

    def bad(state: Any, path: Path, metadata: Any) -> None:
        save_file(state, path, metadata=metadata)
        names.append(path)
        if len(names) == 3:
            content = bytearray(path.read_bytes())
            content[place] ^= 1
            path.write_bytes(content)

    monkeypatch.setattr(SAVE, bad)
    with pytest.raises(OutputDirectoryError, match=r"00003.* does not hold what was written to it: .* faulty"):
        compress(tiny_llama(2), token_batches(), recipe(4), out)
    assert len(shards(out)) == len(list(out.glob("*.safetensors"))) == 2
    assert not list(out.glob(".*"))
    assert compress(tiny_llama(2), token_batches(), recipe(4), out).num_resumed == 2
    run(prepare(tiny_llama(2), token_batches(), recipe(4), tmp_path / "whole"))
    assert contents(out) == contents(tmp_path / "whole")


def test_whom_the_files_are_for_is_up_to_the_user(tmp_path: Path) -> None:
    """Seen to fail: with the mode that safetensors gives to a file."""
    before = os.umask(0o027)
    try:
        compress(tiny_llama(1), token_batches(), recipe(4), tmp_path / "out")
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode & 0o777) for path in (tmp_path / "out").iterdir() if path.is_file()} == {"0o640"}


def test_the_end_reads_no_shard_again(tmp_path: Path) -> None:
    """Of weights on disk; whoever changes a shard after it was read back is not found out by the run."""
    empty = saved(tiny_llama(3), tmp_path / "in")
    generator = run_job(prepare(empty, token_batches(), recipe(4), tmp_path / "out", weights=tmp_path / "in"))
    for _ in range(4):
        next(generator)
    for shard in (tmp_path / "out").glob("*.safetensors"):
        shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(StopIteration) as stop:
        next(generator)
    assert stop.value.value.verification.passed
    assert stop.value.value.verification.loaded_with == READ_BACK


def test_what_the_end_looks_at(tmp_path: Path) -> None:
    """Sizes, and what the index names."""
    out = tmp_path / "out"
    report = compress(saved(tiny_llama(2), tmp_path / "in"), None, recipe(8, "rtn"), out, weights=tmp_path / "in")
    assert report.verification is not None
    assert report.verification.passed
    assert verify_files(out, ["a"]).passed
    index = json.loads((out / INDEX).read_text())
    first, second = sorted(set(index["weight_map"].values()))[:2]
    key = next(key for key, shard in index["weight_map"].items() if shard == first)
    (out / INDEX).write_text(json.dumps({"weight_map": {**index["weight_map"], key: second}}))
    assert verify_files(out, ["a"]).different_modules == (first,)
    (out / INDEX).write_text(json.dumps(index))
    (out / second).write_bytes((out / second).read_bytes()[:-1])
    assert verify_files(out, ["a"]).different_modules == (second,)
    (out / second).unlink()
    assert not verify_files(out, ["a"]).passed


def test_what_no_subgraph_holds_is_written_by_and_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer at a time, none divided; small ones together; each with its line."""
    whole = compress(tiny_llama(4), None, FIRST_LAYER, tmp_path / "together", verify=False)
    assert len(shards(tmp_path / "together")) == 2 == len(whole.subgraphs) + 1
    layer_bytes = sum(tensor.nbytes for tensor in tiny_llama(1).model.layers[0].state_dict().values())
    for limit, num_shards in ((1, 1 + 7), (2 * layer_bytes, 1 + 3)):
        monkeypatch.setattr(layout, "_SHARD_BYTES", limit)
        out = tmp_path / str(limit)
        compress(tiny_llama(4), None, FIRST_LAYER, out, verify=True)
        lines = shards(out)
        assert len(lines) == num_shards
        assert [line["record"] is None for line in lines] == [False] + [True] * (num_shards - 1)
        written = [shard for line in lines for shard in line["shards"]]
        assert len(written) == num_shards
        assert all(shard["nbytes"] == (out / shard["name"]).stat().st_size for shard in written)
        for shard in written[1:]:
            size = sum(tensor.nbytes for key, tensor in tiny_llama(4).state_dict().items() if key in shard["keys"])
            assert size <= max(limit, layer_bytes)
        holders = {key: shard["name"] for shard in written for key in shard["keys"]}
        assert json.loads((out / INDEX).read_text())["weight_map"] == holders
        assert len({shard for key, shard in holders.items() if ".layers.2." in key}) == 1
        loaded = AutoModelForCausalLM.from_pretrained(out).state_dict()
        for key, tensor in AutoModelForCausalLM.from_pretrained(tmp_path / "together").state_dict().items():
            assert torch.equal(loaded[key], tensor)


def test_memory_does_not_grow_with_what_no_subgraph_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "_SHARD_BYTES", 1)
    peaks = []
    for depth in (3, 9):
        folder = tmp_path / str(depth)
        empty = saved(tiny_llama(depth), folder)
        with LiveMemory() as memory:
            generator = run_job(prepare(empty, None, FIRST_LAYER, tmp_path / f"{depth}-out", weights=folder))
            next(generator)
            memory.reset_peak()
            with pytest.raises(StopIteration):
                next(generator)
        peaks.append(memory.peak_bytes - memory.live_bytes)
    assert peaks[1] <= 1.02 * peaks[0], peaks


def test_stopped_in_what_no_subgraph_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight cannot be read; the next run begins with it. A shard that was changed meanwhile is named."""
    monkeypatch.setattr(layout, "_SHARD_BYTES", 1)
    empty = saved(tiny_llama(4), tmp_path / "in")

    def attempt(folder: Path) -> Any:
        return compress(empty, None, FIRST_LAYER, folder, weights=tmp_path / "in")

    attempt(tmp_path / "whole")
    onload = WeightStore.onload
    brought: list[str] = []

    def fails(self: WeightStore, modules: Any, tensors: Any = (), **options: Any) -> Any:
        brought.extend(tensors)
        if any(".layers.2." in name for name in brought):
            raise OSError("unplugged")
        return onload(self, modules, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(WeightStore, "onload", fails)
        with pytest.raises(OSError, match="unplugged"):
            attempt(tmp_path / "out")
    assert (tmp_path / "out" / INCOMPLETE).exists()
    num_lines = len(shards(tmp_path / "out"))
    shard = tmp_path / "out" / shards(tmp_path / "out")[-1]["shards"][0]["name"]
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + b"\0\0")
    with pytest.raises(OutputDirectoryError, match=r"holds model.layers.1.*, is not what was written .*delete it"):
        attempt(tmp_path / "out")
    shard.write_bytes(content)
    assert 2 < num_lines < len(shards(tmp_path / "whole"))
    written = shard.stat().st_mtime_ns
    assert attempt(tmp_path / "out").num_resumed == 1
    assert shard.stat().st_mtime_ns == written
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_number_that_is_not_one(tmp_path: Path) -> None:
    """Read back bit for bit: NaN is as good as any value, a scalar and an empty tensor as good as a matrix."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.register_buffer("nan", torch.tensor(float("nan")))
            self.register_buffer("none", torch.empty(0, 3))
            self.register_buffer("flags", torch.tensor([True, False]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    compress(Odd(), None, recipe(8, "rtn"), tmp_path / "out", verify=False)
    assert {"nan", "none", "flags"} < {
        key for line in shards(tmp_path / "out") for shard in line["shards"] for key in shard["keys"]
    }


def test_a_large_subgraph_takes_several_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of about equal size, eight at most, with each module in one; read back as from one shard."""
    compress(tiny_llama(2), token_batches(), recipe(4), tmp_path / "one")
    monkeypatch.setattr(amounts, "_LEAST_SPLIT_BYTES", 1 << 11)
    out = tmp_path / "several"
    report = compress(tiny_llama(2), token_batches(), recipe(4), out)
    assert report.verification is not None
    assert report.verification.passed
    first, *_ = layers = [line["shards"] for line in shards(out) if line["record"] and line["record"]["modules"]]
    assert [len(written) for written in layers] == [3, 3]
    sizes = [shard["nbytes"] for shard in first]
    assert max(sizes) <= 3 * min(sizes), sizes
    job = prepare(tiny_llama(2), token_batches(), recipe(4), out)
    with calibrating(job.target.root):
        table = footprint(job.run, [flatten_batch(batch)[0] for batch in token_batches()])
    kinds = ["writing shards" if len(line["shards"]) > 1 else "writing" for line in shards(out) if line["record"]]
    moments = [moment for row in table for moment in row.moments if moment.what == "write"]
    assert [kind for moment in moments for kind in moment.work] == kinds
    homes = {key.rpartition(".")[0]: shard["name"] for shard in first for key in shard["keys"]}
    assert all(homes[key.rpartition(".")[0]] == shard["name"] for shard in first for key in shard["keys"])
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "one").state_dict()
    split = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert split.keys() == whole.keys()
    assert all(torch.equal(split[key], tensor) for key, tensor in whole.items())
    monkeypatch.setattr(amounts, "_LEAST_SPLIT_BYTES", 1)
    compress(tiny_llama(1), token_batches(), recipe(4), tmp_path / "most", verify=False)
    assert 5 <= max(len(line["shards"]) for line in shards(tmp_path / "most")) <= 7


@pytest.mark.parametrize("num_bits", [2, 4])
def test_the_bytes_of_shards_are_foreseen(num_bits: int, tmp_path: Path) -> None:
    """Seconds of writing come from them."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "tie_word_embeddings": True}
    model = tiny_llama(1, dtype=torch.bfloat16, **sizes)
    what = token_batches(), recipe(num_bits, "rtn")
    compress(model, *what, tmp_path / "out", verify=False)
    taken = [sum(shard["nbytes"] for shard in line["shards"]) for line in shards(tmp_path / "out") if line["record"]]
    job = prepare(tiny_llama(1, dtype=torch.bfloat16, **sizes), *what, tmp_path / "again")
    with calibrating(job.target.root):
        table = footprint(job.run, [flatten_batch(batch)[0] for batch in token_batches()])
    foreseen = [sum(moment.work.values()) for row in table for moment in row.moments if moment.what == "write"]
    assert foreseen == pytest.approx(taken, rel=0.02)


def test_shards_are_written_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as torch has threads; one that fails leaves the others whole, and the run goes on. Seen to fail: with one
    after the other, where none comes to meet the first."""
    monkeypatch.setattr(amounts, "_LEAST_SPLIT_BYTES", 1 << 11)
    torch.set_num_threads(3)
    compress(tiny_llama(2), token_batches(), recipe(4), tmp_path / "alone")
    lines = [[shard["name"] for shard in line["shards"]] for line in shards(tmp_path / "alone")]
    first = next(names for names in lines if len(names) > 1)
    out, together = tmp_path / "out", Barrier(3, timeout=60)
    assert len(first) == 3

    def meet(state: Any, path: Path, metadata: Any) -> None:
        save_file(state, path, metadata=metadata)
        if any(name in path.name for name in first):
            together.wait()
        if first[1] in path.name and not fails:
            fails.append(path)
            raise OSError(28, "No space left on device")

    fails: list[Path] = []
    monkeypatch.setattr(SAVE, meet)
    with pytest.raises(OutputDirectoryError, match=rf"{first[1]} .* could not be written.*continues"):
        compress(tiny_llama(2), token_batches(), recipe(4), out)
    before = [name for names in lines[: lines.index(first)] for name in names]
    assert {path.name for path in out.glob("*.safetensors")} == {*before, *first} - {first[1]}
    assert not list(out.glob(".*"))
    compress(tiny_llama(2), token_batches(), recipe(4), out)
    assert contents(out) == contents(tmp_path / "alone")
