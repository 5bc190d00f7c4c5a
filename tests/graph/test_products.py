"""Products in half precision, computed in float32 where a CPU has no instructions for them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import prepare, recipe, run, tiny_llama, token_batches
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention

from lightning_compress.graph import products
from lightning_compress.graph.fakes import fake_like, new_fake_mode
from lightning_compress.graph.products import in_float32, slow_dtypes
from lightning_compress.memory.work import WorkMeter

HALVES = (torch.bfloat16, torch.float16)
ENDS = torch.tensor([3, 3, 20], dtype=torch.int32)


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def grouped(x: Tensor, weights: Tensor) -> Tensor:
    if x.dtype != torch.float64:
        return functional.grouped_mm(x, weights, offs=ENDS)
    parts = torch.tensor_split(x, ENDS[:-1].long())
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


CASES: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "mm": (functional.linear, [(3, 20, 64), (200, 64)]),
    "addmm": (functional.linear, [(20, 64), (200, 64), (200,)]),
    "one bias for all columns": (torch.addmm, [(20, 1), (20, 64), (64, 200)]),
    "scaled": (lambda *args: torch.addmm(*args, beta=0.5, alpha=2.0), [(200,), (20, 64), (64, 200)]),
    "bmm": (torch.matmul, [(2, 3, 20, 64), (2, 3, 64, 200)]),
    "baddbmm": (lambda *args: torch.baddbmm(*args, beta=0.5), [(6, 20, 200), (6, 20, 64), (6, 64, 200)]),
    "einsum": (lambda x, y: torch.einsum("bik,bjk->bij", x, y), [(2, 20, 64), (2, 200, 64)]),
    "grouped": (grouped, [(20, 64), (3, 64, 200)]),
    "convolution": (lambda x, w, b: functional.conv2d(x, w, b, stride=4), [(2, 3, 16, 16), (24, 3, 4, 4), (24,)]),
    "convolution by channel": (lambda x, w: functional.conv1d(x, w, groups=8), [(2, 8, 30), (8, 1, 4)]),
    "no rows": (functional.linear, [(0, 64), (200, 64)]),
    "no columns": (functional.linear, [(5, 64), (0, 64)]),
}


@pytest.mark.parametrize("tile", [2**24, 2**12])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_products_are_rounded_once(case: str, dtype: torch.dtype, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the tiles, a result is the exact one rounded to the operands' type, but for sums in float32.

    Seen to fail: with tiles that leave out a column; with the bias of another tile; with experts left as they are.
    """
    monkeypatch.setattr(products, "TILE", tile)
    run, shapes = CASES[case]
    operands = [numbers(*shape, dtype=dtype) for shape in shapes]
    exact = run(*(operand.double() for operand in operands))
    meter = WorkMeter()
    with meter, in_float32(frozenset({dtype})):
        found = run(*operands)
    assert found.dtype == dtype
    assert found.shape == exact.shape
    assert found.is_contiguous()
    done = {kind for kind, amount in meter.work.items() if kind.startswith("product") and amount}
    assert done <= {"product float32"}
    assert done or not exact.numel()
    eps = torch.finfo(dtype).eps / 2
    sums = run(*(operand.double().abs() for operand in operands))
    assert ((found.double() - exact).abs() <= 1.01 * eps * exact.abs() + 1e-5 * sums).all()


@pytest.mark.parametrize("device", ["cpu", "meta"])
@torch.no_grad()
def test_what_it_leaves_alone(device: str) -> None:
    """Other types, and other devices. Seen to fail: with the type, or the device, not looked at."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x, w = (numbers(*shape).to(device, dtype) for shape in ((4, 64), (3, 64)))
        meter = WorkMeter()
        with meter, in_float32(frozenset({torch.float16} if device == "cpu" else {torch.bfloat16})):
            functional.linear(x, w)
        assert dict(meter.work) == {"call": 1, f"product {str(dtype).removeprefix('torch.')}": 2 * 4 * 64 * 3}


@torch.no_grad()
def test_operands_of_several_types_are_refused_as_ever() -> None:
    """Seen to fail: with the first one's type looked at alone."""
    x, w = numbers(4, 64, dtype=torch.bfloat16), numbers(3, 64, dtype=torch.float32)
    with in_float32(frozenset(HALVES)), pytest.raises(RuntimeError, match="same dtype"):
        functional.linear(x, w)


@torch.no_grad()
def test_a_grouped_product_of_gradients_is_left_alone() -> None:
    """Its groups are rows of the second operand."""
    x, y = numbers(64, 32, dtype=torch.bfloat16), numbers(32, 200, dtype=torch.bfloat16)
    ends = torch.tensor([8, 32], dtype=torch.int32)
    with in_float32(frozenset(HALVES)):
        found = functional.grouped_mm(x, y, offs=ends)
    assert torch.equal(found, functional.grouped_mm(x, y, offs=ends))


@pytest.mark.parametrize("is_slow", [False, True])
def test_runs_use_them_where_the_cpu_is_slow(is_slow: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Calibration, and the comparison of the checkpoint. Seen to fail: with either outside of the context."""
    monkeypatch.setattr(products, "_slow_on_cpu", lambda: frozenset(HALVES if is_slow else ()))
    job = prepare(tiny_llama(2, dtype=torch.bfloat16), token_batches(), recipe(4, group_size=32), tmp_path)
    meter = WorkMeter()
    with meter:
        run(job)
    assert ("product bfloat16" in meter.work) is not is_slow


def test_which_are_slow() -> None:
    """Told by oneDNN, which torch multiplies with where it can; none on a GPU."""
    cpu, cuda = slow_dtypes(torch.device("cpu")), slow_dtypes(torch.device("cuda"))
    assert (torch.bfloat16 in cpu) is not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert not cuda


@torch.no_grad()
def test_fake_tensors() -> None:
    """What is counted and followed on fakes is what runs."""
    mode = new_fake_mode(symbolic=False)
    reals = [torch.zeros(shape, dtype=torch.bfloat16) for shape in ((20, 64), (200, 64))]
    fakes = [fake_like(mode, each) for each in reals]
    real, fake = WorkMeter(), WorkMeter()
    with real, in_float32(frozenset(HALVES)):
        functional.linear(*reals)
    with fake, in_float32(frozenset(HALVES)):
        result = functional.linear(*fakes)
    assert result.shape == (20, 200)
    assert result.dtype == torch.bfloat16
    assert dict(fake.work) == dict(real.work)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_operators_that_take_functions_run_as_they_are() -> None:
    """Seen to fail: an error, of models in float32 too."""
    q = numbers(1, 2, 16, 16, dtype=torch.float32)
    with torch.compiler.set_stance("force_eager"), in_float32(frozenset(HALVES)):
        found = flex_attention(q, q, q)
    torch.testing.assert_close(found, functional.scaled_dot_product_attention(q, q, q))
