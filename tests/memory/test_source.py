"""A model on the meta device whose weights are read from its checkpoint, one subgraph at a time."""

import json
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch
from helpers import CPU, compress, contents, prepare, recipe, saved, tiny_llama, token_batches
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AlbertConfig, AlbertModel, AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from lightning_compress.calibration.loop import calibrate
from lightning_compress.calibration.prepare import calibrating
from lightning_compress.errors import CompressionError, SolveError, UnsupportedModelError
from lightning_compress.export.writer import Unwritten
from lightning_compress.memory import source as source_module
from lightning_compress.memory.files import read_tensor, stored_tensors
from lightning_compress.memory.source import is_on_meta, weight_source
from lightning_compress.memory.store import WeightStore
from lightning_compress.memory.tracker import LiveMemory


def weights_of(folder: Path) -> dict[str, Tensor]:
    return {key: tensor for path in sorted(folder.glob("*.safetensors")) for key, tensor in load_file(path).items()}


def albert() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"embedding_size": 8, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    return AlbertModel(AlbertConfig(vocab_size=64, intermediate_size=16, **sizes)).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("schedule", ["staged", "block"])
def test_the_result_is_that_of_the_model_in_memory(tmp_path: Path, schedule: str, dtype: torch.dtype) -> None:
    model = tiny_llama(3, dtype=dtype).eval()
    empty = saved(model, tmp_path / "in", max_shard_size="20KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 2
    report = compress(empty, token_batches(), recipe(4), tmp_path / "out", weights=tmp_path / "in", schedule=schedule)
    compress(model, token_batches(), recipe(4), tmp_path / "memory", schedule=schedule)
    assert contents(tmp_path / "out") == contents(tmp_path / "memory")
    assert report.verification is not None
    assert report.verification.passed
    assert is_on_meta(empty), "nothing stays"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").lm_head.weight.dtype == dtype


def test_tied_embeddings_and_shared_layers(tmp_path: Path) -> None:
    """A weight of many places is read for all of them; a layer that is solved is read from the output afterwards."""
    for name, model, given in (
        ("tied", tiny_llama(2, tie_word_embeddings=True).eval(), recipe(4)),
        ("albert", albert(), recipe(4, group_size=8)),
    ):
        empty = saved(model, tmp_path / name)
        compress(empty, token_batches(), given, tmp_path / f"{name}-out", weights=tmp_path / name)
        compress(model, token_batches(), given, tmp_path / f"{name}-memory", verify=False)
        assert contents(tmp_path / f"{name}-out") == contents(tmp_path / f"{name}-memory")


def test_fused_and_stacked_weights(tmp_path: Path) -> None:
    """Mixtral's experts: single matrices in the checkpoint, one stacked parameter in the module."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = MixtralForCausalLM(
        MixtralConfig(vocab_size=64, num_hidden_layers=2, num_local_experts=12, num_experts_per_tok=2, **sizes)
    ).eval()
    empty = saved(model, tmp_path / "in")
    assert any(".experts.11." in key for key in stored_tensors(tmp_path / "in"))
    source = weight_source(empty, tmp_path / "in")
    store = WeightStore(empty, CPU, source)
    with store.onload([name for name, _ in model.named_children()]):
        for (name, mine), (_, other) in zip(model.named_parameters(), empty.named_parameters(), strict=True):
            assert torch.equal(mine, other), name
        batch = token_batches(1)[0]
        with torch.no_grad():
            assert torch.equal(model(**batch).logits, empty(**batch).logits)


def test_memory_does_not_grow_with_depth(tmp_path: Path) -> None:
    peaks = []
    for depth in (2, 6):
        empty = saved(tiny_llama(depth), tmp_path / str(depth))
        with LiveMemory() as memory:
            job = prepare(empty, token_batches(), recipe(4), tmp_path / f"{depth}-out", weights=tmp_path / str(depth))
            memory.reset_peak()
            with calibrating(empty):
                for _ in calibrate(job.run, Unwritten()):
                    pass
        peaks.append(memory.peak_bytes - memory.live_bytes)
    assert peaks[1] <= 1.02 * peaks[0], peaks


def test_the_next_subgraph_is_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor is read once, a subgraph's before the one in front of it is done; without prefetch when needed."""
    model = tiny_llama(3)
    empty = saved(model, tmp_path / "in")
    reads: list[str] = []
    offsets = {stored.offset: name for name, stored in stored_tensors(tmp_path / "in").items()}
    monkeypatch.setattr(source_module, "read_tensor", lambda s: (reads.append(offsets[s.offset]), read_tensor(s))[1])
    for prefetch in (True, False):
        reads.clear()
        job = prepare(empty, token_batches(), recipe(4), tmp_path / "out", weights=tmp_path / "in", prefetch=prefetch)
        seen = []
        with calibrating(empty):
            for record in calibrate(job.run, Unwritten()):
                if record.name.startswith("model.layers"):
                    wait(job.run.store._coming.values())
                    seen.append(max(int(name.split(".")[2]) for name in reads if ".layers." in name))
        assert seen == ([1, 2, 2] if prefetch else [0, 1, 2])
        assert len(reads) == len(set(reads)) == 3 * 9 + 1


def test_what_is_missing_or_broken(tmp_path: Path) -> None:
    model = tiny_llama(2)
    empty = saved(model, tmp_path / "in")
    (file,) = (tmp_path / "in").glob("*.safetensors")
    state = load_file(file)

    def attempt() -> None:
        compress(empty, token_batches(), recipe(4), tmp_path / "out", weights=tmp_path / "in")

    save_file({key: value for key, value in state.items() if "layers.1.mlp.up" not in key}, file)
    with pytest.raises(
        CompressionError, match=r"lacks 1 parameters of LlamaForCausalLM: .*layers.1.mlp.up_proj.weight \[64, 32\]"
    ):
        attempt()
    save_file(state, file)
    content = file.read_bytes()
    file.write_bytes(content[:-8])
    with pytest.raises(CompressionError, match=r"is cut off: it has \d+ bytes, and its header speaks of \d+"):
        attempt()
    file.write_bytes(content[:20])
    with pytest.raises(CompressionError, match="is no readable safetensors file"):
        attempt()
    broken = {key: value.clone() for key, value in state.items()}
    broken["model.layers.1.mlp.down_proj.weight"][3] = float("nan")
    save_file(broken, file)
    with pytest.raises(SolveError, match=r"layers.1.mlp.down_proj .*NaN or Inf") as caught:
        attempt()
    assert "2 finished subgraphs" in caught.value.__notes__[0]
    file.unlink()
    with pytest.raises(CompressionError, match="holds no safetensors files"):
        attempt()
    with pytest.raises(UnsupportedModelError, match="are on the meta device, so compressing it needs weights=FOLDER"):
        compress(empty, token_batches(), recipe(4), tmp_path / "out")


def test_a_shard_that_the_index_names_is_missing(tmp_path: Path) -> None:
    saved(tiny_llama(2), tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    name = sorted(set(index["weight_map"].values()))[1]
    (tmp_path / name).unlink()
    with pytest.raises(CompressionError, match=f"lacks {name}, which its index names"):
        stored_tensors(tmp_path)


@pytest.mark.parametrize("count", [0, 1, 5 << 20])
def test_reading(tmp_path: Path, count: int) -> None:
    """Tensors of no, one, and several pieces."""
    state = {"a": torch.arange(3), "b": torch.randn(count), "c": torch.randn(2, 3).bfloat16()}
    save_file(state, tmp_path / "model.safetensors")
    for name, stored in stored_tensors(tmp_path).items():
        assert torch.equal(read_tensor(stored), state[name])
