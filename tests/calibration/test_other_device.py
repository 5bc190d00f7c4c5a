"""Whole runs on a device apart, which is simulated: every tensor has to be where it is used."""

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import other_device
import pytest
import torch
from helpers import (
    CPU,
    ViewsBlock,
    compress,
    contents,
    modifier,
    padded,
    ragged_batches,
    recipe,
    run,
    saved,
    tiny_llama,
    tiny_mixtral,
)
from torch import fx, nn

from lightning_compress.calibration.batches import collect
from lightning_compress.calibration.loop import _Meter
from lightning_compress.errors import CalibrationDataError
from lightning_compress.graph.execute import execute
from lightning_compress.graph.leaf import Leaf
from lightning_compress.graph.stages import Schedule
from lightning_compress.memory import activations
from lightning_compress.memory.placement import MemoryConfig
from lightning_compress.memory.source import parameters_on_meta
from lightning_compress.memory.transfer import Lane
from lightning_compress.plugin.job import prepare_job
from lightning_compress.plugin.settings import Settings
from lightning_compress.recipe.load import load_recipe

STATIC = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "tensor", "dynamic": False}
DYNAMIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
BYTES = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
EMBEDDING = modifier(8, "rtn", symmetric=False, targets=["Embedding"], ignore=[])
THREE_TIERS = {"device_activation_budget": 20_000, "activation_budget": 20_000}


def small(kind: str) -> nn.Module:
    """Attention is written down: what takes its place on a CPU has no operator on other devices."""
    model = tiny_llama(2) if kind == "llama" else tiny_mixtral(2, 4)
    model.config._attn_implementation = "eager"
    return model


@pytest.mark.sampled(6)
@pytest.mark.filterwarnings("ignore:too few tokens for many experts")
@pytest.mark.filterwarnings("ignore::lightning_compress.export.verify.ReadBackWarning")
@pytest.mark.parametrize(
    ("kind", "given", "schedule", "memory"),
    [
        ("llama", {"modifiers": [modifier(symmetric=False, refit=1), EMBEDDING]}, "staged", THREE_TIERS),
        ("llama", recipe(2, correct="residual", refit=None), "recompute", {"device_activation_budget": 20_000}),
        ("llama", recipe(strategy="tensor", correct="gptaq"), "staged", {"prefetch_depth": 0}),
        ("llama", recipe(scheme={"weights": BYTES, "input_activations": STATIC}), "block", {}),
        ("llama", recipe(scheme={"weights": BYTES, "input_activations": DYNAMIC}), "basic", THREE_TIERS),
        ("mixtral", recipe(), "staged", THREE_TIERS),
    ],
    ids=["tiers", "residual", "gptaq", "static", "dynamic", "experts"],
)
def test_a_run_on_another_device_ends_in_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, given: Any, schedule: str, memory: Any
) -> None:
    """Padding, and weights that are on disk and brought in the background.

    Seen to fail: with the order of channels, a scale of inputs, or a statistic's counts left in host memory.
    """
    monkeypatch.setattr(activations, "LEAST_SPILLED", 1)
    monkeypatch.setattr(Lane, "enter_thread", other_device.enter_thread)
    model, batches = small(kind), padded(ragged_batches())
    options: dict[str, Any] = {"memory": MemoryConfig(**memory), "verify": False, "weights": tmp_path / "model"}
    compress(saved(model, tmp_path / "model"), batches, given, tmp_path / "here", schedule=schedule, **options)
    empty = saved(model, tmp_path / "model")
    settings = Settings(load_recipe(given), tmp_path / "there", schedule=Schedule(schedule), **options)
    job = prepare_job(empty, collect(batches), settings, other_device.DEVICE)
    with other_device.simulated(job.target.root):
        report = run(job)
    moved = sum((torch.tensor(list(part.moved_bytes.values())).sum() for part in report.subgraphs), torch.tensor(0))
    assert moved > 0
    assert contents(tmp_path / "there") == contents(tmp_path / "here")


def test_values_that_are_changed_while_views_of_them_wait_in_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to fail: with views that keep what was there before."""
    monkeypatch.setattr(Lane, "enter_thread", other_device.enter_thread)
    torch.manual_seed(0)
    model, batches = ViewsBlock(16).eval(), list(torch.randn(3, 4, 5, 16))
    torch.save({"state_dict": model.state_dict()}, tmp_path / "model.ckpt")
    given, options = recipe(group_size=16), {"verify": False, "weights": tmp_path / "model.ckpt"}
    found = {}
    for place in (CPU, other_device.DEVICE):
        with parameters_on_meta():
            empty = ViewsBlock(16).eval()
        settings = Settings(load_recipe(given), tmp_path / place.type, **options)
        job = prepare_job(empty, collect(batches), settings, place)
        with nullcontext() if place is CPU else other_device.simulated(job.target.root):
            run(job)
        found[place] = contents(tmp_path / place.type)
    assert found[other_device.DEVICE] == found[CPU]


def test_a_phase_waits_for_what_computes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of the next subgraph are on their way meanwhile. Seen to fail: with `torch.cuda.synchronize`, which waits
    for them too."""
    device, streams = torch.device("cuda", 1), mock.MagicMock()
    monkeypatch.setattr(torch.cuda, "current_stream", streams)
    monkeypatch.delattr(torch.cuda, "synchronize")
    _Meter(device, Counter()).lap("run")
    assert streams.mock_calls == [mock.call(device), mock.call().synchronize()]


def test_ids_are_looked_at_where_a_table_would_not_complain() -> None:
    """On a GPU a wrong one makes every later operation fail, and names nothing."""
    table = nn.Embedding(8, 4)
    graph = fx.Graph()
    read = graph.placeholder("ids")
    call = graph.call_function(Leaf("0"), (read,))
    forward = mock.patch.object(nn.Embedding, "forward", return_value=0)
    with other_device.simulated(root := nn.Sequential(table)), forward:
        for first, last in ((0, 8), (-1, 7), (0, 7)):
            values: dict[Any, object] = {read: torch.tensor([[first, last]]).to(other_device.DEVICE)}
            said = pytest.raises(CalibrationDataError, match=r"0 \(Embedding\) has 8 rows, and a batch asks")
            with nullcontext() if (first, last) == (0, 7) else said:
                execute([call], values, root, {}, other_device.DEVICE, {})
