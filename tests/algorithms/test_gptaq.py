"""GPTAQ without a walk of its own, against its published equations in float64."""

import pytest
import torch
from reference import scheme
from torch import Tensor

from lightning_compress.algorithms.factor import factorize
from lightning_compress.algorithms.gptaq import pass_on
from lightning_compress.algorithms.gptq import Gptq
from lightning_compress.statistics import Beside, InputDrift, InputGram


def gathered(lack: float, num_channels: int = 48) -> tuple[Tensor, Tensor, Tensor, InputDrift]:
    """A weight [O, I], inputs [T, I], x_ref - x, which the inputs partly explain, and the sums of both."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x = randn(300, num_channels) @ randn(num_channels, num_channels) + 0.3
    difference = lack * (x @ randn(num_channels, num_channels) / num_channels**0.5 + randn(*x.shape))
    drift = InputDrift(num_channels, "cpu")
    for number in range(0, 300, 100):
        drift.update(x[number : number + 100], Beside(difference[number : number + 100], number == 200))
    return randn(40, num_channels), x, difference, drift


def gptaq(
    weight: Tensor, x: Tensor, difference: Tensor, scale: Tensor, damping: float, strength: float, is_ordered: bool
) -> tuple[Tensor, Tensor]:
    """Codes [O, I] and how far each was from a border, channel by channel as published, float64."""
    w, x, difference = weight.double(), x.double(), difference.double()
    gram, crossed = x.t() @ x / len(x), difference.t() @ x / len(x)
    order = gram.diagonal().argsort(descending=True) if is_ordered else torch.arange(len(gram))
    scales = scale.double().repeat_interleave(w.shape[1] // scale.shape[1], 1)[:, order]
    w, crossed = w[:, order], crossed[order][:, order]
    gram = gram + damping * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    upper = torch.linalg.cholesky(torch.linalg.inv(gram[order][:, order]), upper=True)
    passed = strength * (crossed @ upper.t()).triu(1) @ upper
    codes, margin = torch.zeros_like(w), torch.zeros_like(w)
    for k in range(w.shape[1]):
        v = w[:, k].clone()
        exact = v / scales[:, k]
        codes[:, k] = exact.round().clamp(-4, 3)
        margin[:, k] = (exact - exact.floor() - 0.5).abs()
        error = (v - codes[:, k] * scales[:, k]) / upper[k, k]
        w[:, k + 1 :] += v[:, None] * passed[k, k + 1 :] - error[:, None] * upper[k, k + 1 :]
    back = order.argsort()
    return codes[:, back], margin[:, back]


@pytest.mark.parametrize("is_ordered", [True, False])
@pytest.mark.parametrize(("strength", "damping"), [(None, 0.01), (1.0, 0.1)])
def test_codes_are_those_of_the_published_equations(strength: float | None, damping: float, is_ordered: bool) -> None:
    """Seen to fail: with the transpose of D; with pivots for their roots; with N for -N in B; without a."""
    weight, x, difference, drift = gathered(0.2)
    args = scheme(3, group_size=12)
    solver = Gptq(correct="gptaq", strength=strength, damping=damping, activation_order=is_ordered, block_size=16)
    solved = solver.solve(weight, {InputDrift: drift}, args, torch.float32)
    used = 0.25 if strength is None else strength
    expected, margin = gptaq(weight, x, difference, solved.scale, damping, used, is_ordered)
    is_clear = margin.amin(1) > 1e-3
    assert is_clear.float().mean() > 0.5
    assert torch.equal(solved.codes[is_clear].double(), expected[is_clear])
    plain, _ = gptaq(weight, x, difference, solved.scale, damping, 0.0, is_ordered)
    assert (plain != expected).double().mean() > 0.05
    assert solved.correction == {"strength": used, "ridge": pytest.approx(damping)}


def test_where_nothing_lacks_it_is_gptq() -> None:
    weight, _, _, drift = gathered(0.0)
    args = scheme(4, group_size=12)
    solved = Gptq(correct="gptaq").solve(weight, {InputDrift: drift}, args, torch.float32)
    plain = Gptq().solve(weight, {InputGram: drift.inputs}, args, torch.float32)
    assert torch.equal(solved.codes, plain.codes)
    assert torch.equal(solved.scale, plain.scale)


def test_errors_are_against_what_the_original_model_computes() -> None:
    weight, x, difference, drift = gathered(0.2)
    args = scheme(8, group_size=12)
    errors = {}
    for strength in (0.0, 0.25):
        solved = Gptq(correct="gptaq", strength=strength).solve(weight, {InputDrift: drift}, args, torch.float32)
        quantized = solved.codes.double() * solved.scale.double().repeat_interleave(12, 1)
        wanted = (x + difference).double() @ weight.double().t()
        exact = (wanted - x.double() @ quantized.t()).square().mean(0)
        torch.testing.assert_close(solved.row_error, exact, rtol=1e-4, atol=0)
        errors[strength] = solved.error
    assert errors[0.25] < 0.9 * errors[0.0]


def test_what_is_quantized_is_what_is_passed_on_when_nothing_is_rounded() -> None:
    """v (1 - P) = w in float64, with the channels' own order."""
    weight, x, difference, drift = gathered(0.3)
    factor = factorize(drift.inputs.matrix(), 0.01)
    _, correction = pass_on(factor, drift, 0.5, 0.01)
    found = correction.target(weight, weight)
    order = factor.order.flip(0)
    gram = (x.double().t() @ x.double() / len(x))[order][:, order]
    gram += factor.added * torch.eye(len(gram), dtype=torch.float64)
    crossed = (difference.double().t() @ x.double() / len(x))[order][:, order]
    upper = torch.linalg.cholesky(torch.linalg.inv(gram), upper=True)
    passed = 0.5 * (crossed @ upper.t()).triu(1) @ upper
    back = found.double()[:, order] @ (torch.eye(len(gram), dtype=torch.float64) - passed)
    torch.testing.assert_close(back, weight.double()[:, order], rtol=0, atol=1e-3)
    assert float((found - weight).abs().max()) > 0.1


@pytest.mark.parametrize("options", [{"ridge": 0.1}, {"refit": 1}, {"refit": None}])
def test_what_it_has_no_place_for(options: dict[str, float | None]) -> None:
    with pytest.raises(ValueError, match="correct=gptaq corrects channel by channel"):
        Gptq(correct="gptaq", **options)  # type: ignore[arg-type]
