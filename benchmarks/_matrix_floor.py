"""The time that the matrix products of one GPTQ run take by themselves: the floor for `gptq_vs_llmcompressor.py`.

One forward of every quantized linear and of attention, the lower triangle of one Gram per shared input, one Cholesky
factorization of each, and the products between blocks of the solve: each timed bare, at its own shape, on this machine.
Half of a Gram's full product is counted, as only its lower triangle is needed. Prints one JSON line.
"""

import json
import statistics
import time
from collections.abc import Callable

import torch
from _gptq_case import Case, read_case
from transformers import AutoConfig

BLOCK = 128
REPEATS = 7


def seconds(call: Callable[[], object]) -> float:
    """Median wall time of one call."""
    call()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def product_s(rows: int, inner: int, columns: int) -> float:
    """Seconds of [rows, inner] x [inner, columns]."""
    a, b = torch.randn(rows, inner), torch.randn(columns, inner)
    out = torch.empty(rows, columns)
    return seconds(lambda: torch.mm(a, b.t(), out=out))


def gram_s(num_tokens: int, width: int) -> float:
    """Seconds of a batch's Gram, half of its full product."""
    x = torch.randn(num_tokens, width)
    out = torch.empty(width, width)
    return seconds(lambda: torch.mm(x.t(), x, out=out)) / 2


def solve_s(width: int, rows: int) -> float:
    """Seconds of one factorization and of the products between blocks (on average half the width deep)."""
    x = torch.randn(2 * width, width)
    gram = x.t() @ x
    between = product_s(rows, width // 2, BLOCK) * (width // BLOCK)
    return seconds(lambda: torch.linalg.cholesky(gram)) + between


def attention_s(batch_size: int, heads: int, length: int, head_dim: int) -> float:
    q, k, v = (torch.randn(batch_size, heads, length, head_dim) for _ in range(3))
    return seconds(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))


@torch.no_grad()
def floor_s(case: Case) -> dict[str, float]:
    """Seconds by kind of work, for a Llama without grouped-query attention."""
    config = AutoConfig.from_pretrained(case.model)
    length = torch.load(case.tokens)["calibration"].shape[1]
    num_tokens = case.batch_size * length
    h, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    groups = [(h, 3 * h), (h, h), (h, 2 * inner), (inner, h)]  # of linears that share an input: (width, stacked rows)
    linears = 4 * product_s(num_tokens, h, h) + 2 * product_s(num_tokens, h, inner) + product_s(num_tokens, inner, h)
    per_batch = {
        "linears_s": linears,
        "attention_s": attention_s(case.batch_size, heads, length, h // heads),
        "grams_s": sum(gram_s(num_tokens, width) for width, _ in groups),
    }
    num_batches = case.num_samples / case.batch_size
    per_layer = {name: value * num_batches for name, value in per_batch.items()}
    per_layer["solves_s"] = sum(solve_s(width, rows) for width, rows in groups)
    return {name: value * config.num_hidden_layers for name, value in per_layer.items()}


if __name__ == "__main__":
    case = read_case()
    torch.set_num_threads(case.threads)
    parts = floor_s(case)
    print(json.dumps({"tool": "matrix products", "solve_s": sum(parts.values()), **parts}))
