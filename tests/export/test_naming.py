"""Names in checkpoints of families that transformers stores in other pieces than it computes with."""

from pathlib import Path

import pytest
import torch
from helpers import compress, linears, recipe, tiny_llama, token_batches
from transformers.core_model_loading import Chunk, WeightConverter, WeightRenaming, WeightTransform

from lightning_compress.export.packed import load_compressed
from lightning_compress.memory import naming
from lightning_compress.memory.files import stored_tensors

LAYER = "model.layers.0"
PARTS = [f"self_attn.{name}_proj" for name in "qkv"]


def conversions() -> list[WeightTransform]:
    """A part of a larger weight, with a pattern that does not say where a name ends (LaraMini); a weight that is no
    module's (Inkling 2); another name of a module."""
    return [
        WeightConverter("self_attn.in_proj", PARTS, [Chunk(dim=0)]),
        WeightRenaming(r"(mlp)\.down_proj", r"\1.down_proj.weight"),
        WeightRenaming(r"feed\.up_proj", "mlp.up_proj"),
    ]


@pytest.mark.filterwarnings("ignore:The checkpoint .* was read back with lightning_compress.load_compressed")
@pytest.mark.filterwarnings("ignore:.*read the same input, and are not all quantized by one scheme")
@pytest.mark.parametrize("ignore", [[], ["re:.*k_proj"]], ids=["all", "but one part"])
def test_what_no_conversion_knows_keeps_its_name(
    ignore: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to fail: the parts' packed tensors were joined, their shapes too, and nobody could read them; so was the
    weight without a module (`mlp.down_proj.weight.weight`); and a part of a weight was stored for the whole."""
    monkeypatch.setattr(naming, "get_model_conversion_mapping", lambda model: conversions())
    model = tiny_llama(1, num_key_value_heads=4)
    model._weight_conversions = conversions()
    report = compress(model, token_batches(), recipe(4, ignore=["lm_head", *ignore]), tmp_path / "out")
    assert report.verification is not None
    assert report.verification.passed, report.verification.verdict
    assert len(report.modules) == 7 - len(ignore)
    stored = stored_tensors(tmp_path / "out")
    kept = {f"{LAYER}.{name}" for name in (*PARTS, "mlp.down_proj")}
    assert {f"{name}.weight_packed" in stored or f"{name}.weight" in stored for name in kept} == {True}
    assert f"{LAYER}.feed.up_proj.weight_packed" in stored
    assert not any("in_proj" in name for name in stored)
    fresh = tiny_llama(1, num_key_value_heads=4)
    torch.nn.init.zeros_(fresh.model.layers[0].self_attn.k_proj.weight)
    load_compressed(fresh, tmp_path / "out")
    expected = linears(model)
    assert all(torch.equal(linear.weight, expected[name].weight) for name, linear in linears(fresh).items())


@pytest.mark.filterwarnings("ignore:The checkpoint .* was read back with lightning_compress.load_compressed")
def test_what_two_shards_hold_is_not_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As biases of ERNIE 4.5 VL's routers, of which text does not reach one. Seen to fail: one norm of two was stored
    for both."""
    norms = ["model.norm.weight", f"{LAYER}.input_layernorm.weight"]
    kept = [WeightConverter("model.norms.weight", norms, [Chunk(dim=0)])]
    monkeypatch.setattr(naming, "get_model_conversion_mapping", lambda model: kept)
    model = tiny_llama(1)
    model._weight_conversions = kept
    report = compress(model, token_batches(), recipe(4), tmp_path / "out")
    assert {*norms} <= stored_tensors(tmp_path / "out").keys()
    assert report.verification is not None
    assert report.verification.passed, report.verification.verdict
