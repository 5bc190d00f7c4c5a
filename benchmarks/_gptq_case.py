"""What the sides of `gptq_vs_llmcompressor.py` and `accuracy.py` share: arguments, model, samples, measurements.

Torch and transformers alone. Each side runs in a process and an environment of its own, reads the same model folder and
the same token file, is timed from the loaded model to the solved model, and prints one JSON line.
"""

import argparse
import json
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One run. Tokens file: {"calibration": [n, L], "evaluation": [m, L]} int64."""

    model: str
    tokens: str
    num_samples: int
    batch_size: int
    num_bits: int
    group_size: int  # 0: a scale for each output channel
    preset: str | None  # of compressed-tensors, in place of what describes weights and inputs
    activation_bits: int | None  # of inputs, quantized dynamically for every token; None: left alone
    dampening: float
    scales: str  # of each group: from its range ("minmax"), searched ("mse"), weighted by input energy ("weighted")
    threads: int
    evaluate: bool
    algorithm: str  # ours only: "gptq" or "rtn"
    correct: str  # ours only
    refit: int | None  # ours only; None: chosen
    schedule: str  # ours only
    activation_budget: int | None  # ours only
    host_budget: str | None  # ours only
    device: str  # ours only; the peer takes a GPU where there is one
    device_activation_budget: int | None  # ours only; None: all activations wait on the device
    dtype: str

    @property
    def weights(self) -> dict[str, object]:
        """The scheme of the weights, as compressed-tensors has it."""
        if self.group_size == 0:
            strategy: dict[str, object] = {"strategy": "channel"}
        else:
            strategy = {"strategy": "group", "group_size": self.group_size}
        return {"num_bits": self.num_bits, "type": "int", "symmetric": True, **strategy}

    @property
    def input_activations(self) -> dict[str, object] | None:
        """The scheme of the inputs, as compressed-tensors has it."""
        if self.activation_bits is None:
            return None
        bits = {"num_bits": self.activation_bits, "type": "int", "symmetric": True}
        return {**bits, "strategy": "token", "dynamic": True}


Solve = Callable[[PreTrainedModel, DataLoader[Batch], Case], dict[str, object]]
"""Returns what else it has to tell; `peak_device_bytes` if it resets PyTorch's statistic."""


def read_case() -> Case:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--num-samples", type=int, required=True)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--num-bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--preset")
    parser.add_argument("--activation-bits", type=int)
    parser.add_argument("--dampening", type=float, default=0.01)
    parser.add_argument("--scales", choices=("minmax", "mse", "weighted"), default="minmax")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--algorithm", choices=("gptq", "rtn"), default="gptq")
    parser.add_argument("--correct", default="none")
    parser.add_argument("--refit", type=lambda number: None if number == "null" else int(number), default=0)
    parser.add_argument("--schedule", default="staged")
    parser.add_argument("--activation-budget", type=int)
    parser.add_argument("--host-budget")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--device-activation-budget", type=lambda size: None if size == "null" else int(size), default=0
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    return Case(**vars(parser.parse_args()))


def run(tool: str, case: Case, solve: Solve) -> None:
    """Loads, solves (timed), evaluates if asked, and prints the results as JSON."""
    torch.set_num_threads(case.threads)
    # some versions of transformers run Gemma 2 with an attention that leaves its softcapping out
    has_cap = getattr(AutoConfig.from_pretrained(case.model), "attn_logit_softcapping", None) is not None
    options = {"attn_implementation": "eager"} if has_cap else {}
    model = AutoModelForCausalLM.from_pretrained(case.model, dtype=getattr(torch, case.dtype), **options).eval()
    tokens = torch.load(case.tokens)
    rows = [{"input_ids": row} for row in tokens["calibration"][: case.num_samples]]
    assert len(rows) == case.num_samples, f"{case.tokens} holds {len(rows)} calibration samples only"
    loader: DataLoader[Batch] = DataLoader(rows, batch_size=case.batch_size)  # type: ignore[arg-type]
    original = perplexity(model, tokens["evaluation"], case.batch_size) if case.evaluate else None
    start, cpu_start = time.perf_counter(), time.process_time()
    told = solve(model, loader, case)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    solve_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result: dict[str, object] = {"tool": tool, "solve_s": solve_s, "cpu_s": cpu_s, "peak_rss_bytes": peak_rss_bytes}
    if torch.cuda.is_available():
        result["peak_device_bytes"] = torch.cuda.max_memory_allocated()
        result["pinning_s"] = torch.cuda.host_memory_stats().get("host_alloc_time.total", 0) / 1e6
    result |= told
    if case.evaluate:
        result |= {
            "original_perplexity": original,
            "perplexity": perplexity(model, tokens["evaluation"], case.batch_size),
        }
    print(json.dumps(result))


@torch.no_grad()
def perplexity(model: PreTrainedModel, windows: Tensor, batch_size: int) -> float:
    """exp of the mean negative log-likelihood over all tokens but each window's first, in float64."""
    total = 0.0
    for ids in windows.split(batch_size):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].double()
        total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").item()
    return float(torch.tensor(total / windows[:, 1:].numel()).exp())
