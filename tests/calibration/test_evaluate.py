"""Layer-outer evaluation: the outputs of the model itself, with weights read once and one layer's in memory."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import CPU, ViewsBlock, padded, ragged_batches, tiny_llama, token_batches
from safetensors.torch import save_file
from torch import Tensor, nn

from lightning_compress.calibration.batches import collect
from lightning_compress.calibration.evaluate import outputs, prepare_evaluation
from lightning_compress.calibration.prepare import evaluating
from lightning_compress.calibration.target import find_target
from lightning_compress.data import perplexity
from lightning_compress.errors import UnsupportedModelError
from lightning_compress.graph import products
from lightning_compress.graph.products import in_float32
from lightning_compress.memory import activations
from lightning_compress.memory import files as files_module
from lightning_compress.memory.files import read_tensor
from lightning_compress.memory.placement import Placement
from lightning_compress.memory.source import is_on_meta, parameters_on_meta, weight_source
from lightning_compress.memory.tracker import LiveMemory
from lightning_compress.memory.transfer import Lane, Sent

Batches = list[dict[str, Tensor]]


def by_layer(model: nn.Module, batches: Batches, placement: Placement) -> list[dict[str, object]]:
    with evaluating(model):
        return list(outputs(prepare_evaluation(find_target(model), collect(batches), placement)))


def on_disk(model: nn.Module, folder: Path) -> tuple[nn.Module, Placement]:
    """The model's like on the meta device, and where its weights are."""
    model.save_pretrained(folder)  # type: ignore[operator]
    with parameters_on_meta():
        empty: nn.Module = type(model)._from_config(model.config, dtype=model.dtype).eval()  # type: ignore[attr-defined]
    return empty, Placement(CPU, weight_source(empty, folder), activation_budget=0)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("dtype", "slow"),
    [
        (torch.float32, frozenset()),
        (torch.bfloat16, frozenset()),
        (torch.bfloat16, frozenset({torch.bfloat16})),
    ],
    ids=["float32", "bfloat16", "slow bfloat16"],
)
@pytest.mark.parametrize("make", [token_batches, ragged_batches, lambda: padded(token_batches())])
def test_outputs_are_the_models_own(
    make: Callable[[], Batches],
    dtype: torch.dtype,
    slow: frozenset[torch.dtype],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit, from memory, and from disk with activations in a file, also where the CPU is slow at a type. Seen to
    fail with the last layer's step run twice, with batches taken in reverse, and with products of their own type."""
    monkeypatch.setattr(products, "_slow_on_cpu", lambda: slow)
    model, batches = tiny_llama(2, dtype=dtype), make()
    with torch.no_grad(), in_float32(slow):
        expected = [model(**batch).logits for batch in batches]
    empty, placement = on_disk(model, tmp_path)
    for found in (by_layer(model, batches, Placement(CPU)), by_layer(empty, batches, placement)):
        assert all(torch.equal(mine["logits"], theirs) for mine, theirs in zip(found, expected, strict=True))
    assert is_on_meta(empty)


def test_a_module_that_is_not_of_transformers(tmp_path: Path) -> None:
    """Its layers are the entries of its Sequential; the output is a lone tensor, an early one, and an input."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
            self.scale = nn.Parameter(torch.full((6,), 3.0))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            first = self.layers[0](x)
            return self.layers[2](self.layers[1](first)) * self.scale, first, x

    model = Odd().eval()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with parameters_on_meta():
        empty = Odd().eval()
    batches = list(torch.randn(3, 4, 6))
    with torch.no_grad():
        expected = [model(batch) for batch in batches]
    with evaluating(empty):
        placement = Placement(CPU, weight_source(empty, tmp_path))
        found = list(outputs(prepare_evaluation(find_target(empty), collect(batches), placement)))
    for mine, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.values(), theirs, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [None, 0])
def test_values_that_are_changed_while_views_of_them_wait(budget: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail by 0.1: with parts of them copied; and, in the file, with views that keep what was there before."""
    monkeypatch.setattr(activations, "LEAST_SPILLED", 1)
    torch.manual_seed(0)
    model, batches = ViewsBlock(16).eval(), list(torch.randn(3, 4, 5, 16))
    placement = Placement(CPU, activation_budget=budget)
    with evaluating(model):
        expected = [model(batch) for batch in batches]
        evaluation = prepare_evaluation(find_target(model), collect(batches), placement, sequential_targets=["Linear"])
        found = [returned[""] for returned in outputs(evaluation)]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))  # type: ignore[arg-type]


def test_weights_are_read_once_for_all_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(3)
    empty, placement = on_disk(model, tmp_path)
    reads: list[int] = []
    monkeypatch.setattr(files_module, "read_tensor", lambda s: (reads.append(s.offset), read_tensor(s))[1])
    by_layer(empty, token_batches(5), placement)
    assert len(reads) == len(set(reads)) == len(list(model.parameters()))


@pytest.mark.slow
def test_memory_does_not_grow_with_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a device would hold, with one batch's logits at a time. Seen to fail with weights that stay, and with all
    outputs kept in the cache."""
    monkeypatch.setattr(Lane, "is_away", lambda *_: True)
    monkeypatch.setattr(Lane, "send", lambda _, tensor: Sent(tensor.clone()))
    peaks = {}
    for depth, num_batches in ((2, 2), (8, 2), (2, 8)):
        model = tiny_llama(depth, hidden_size=16)
        at_home = list(model.state_dict().values())
        with evaluating(model):
            data = collect(token_batches(num_batches))
            evaluation = prepare_evaluation(find_target(model), data, Placement(CPU))
            with LiveMemory() as memory:
                memory.ignore(*at_home)
                for _ in outputs(evaluation):
                    pass
                peaks[depth, num_batches] = memory.peak_bytes
    assert peaks[8, 2] <= 1.02 * peaks[2, 2]
    hidden_bytes = 2 * 16 * 16 * 4
    assert peaks[2, 8] <= peaks[2, 2] + 6 * (hidden_bytes + 1536), peaks


def test_perplexity_is_that_of_the_model_in_memory(tmp_path: Path) -> None:
    model = tiny_llama(2)
    batches = ragged_batches()
    empty, placement = on_disk(model, tmp_path)
    assert perplexity(empty, batches, placement) == perplexity(model, batches)


def test_a_model_without_logits_has_no_perplexity() -> None:
    model = tiny_llama(1).model
    with pytest.raises(UnsupportedModelError, match="returns no logits but last_hidden_state"):
        perplexity(model, token_batches(), Placement(CPU))
