"""GPTQ on a GPU, here and in LLM Compressor 0.14.0.1: seconds and device memory, on the same machine and inputs.

    python benchmarks/gpu_vs_llmcompressor.py --peer-python PYTHON [--model llama] [--num-layers 2] [--runs 2]

Layers as Llama-3-8B has them (4096 wide, 14336 inside, 32 heads, 8 of keys), or, with `--model qwen3_moe`, as
Qwen3-30B-A3B (2048 wide, 128 experts 768 wide of which 8 run; the peer sends every token to every expert, which is its
default), with random weights in bfloat16 and a vocabulary of 4096; W4A16 in groups of 128; random samples of 2048
tokens in batches of 4, damping 0.01, blocks of 128, static activation order, scales from the range. Seconds from the
model in host memory to the solved model: tracing included; imports, loading and saving apart. Sides alternate, each run
in a fresh process of 8 threads; medians. Ours with activations that wait in host memory, as the peer's do, and with all
of them on the device. PYTHON is that of an environment with llmcompressor.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from _gptq_inputs import build_tokenizer
from gptq_vs_llmcompressor import SCRIPTS, Bench
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

LENGTH, BATCH_SIZE = 2048, 4
SIDES: dict[str, tuple[str, dict[str, object]]] = {
    "ours, waiting on the device": ("ours", {"device": "cuda", "device_activation_budget": "null"}),
    "ours, waiting in host memory": ("ours", {"device": "cuda"}),
    "peer": ("peer", {}),
}


def config_of(model: str, tokenizer: PreTrainedTokenizerFast, num_layers: int) -> PretrainedConfig:
    common = {
        "vocab_size": len(tokenizer),
        "num_hidden_layers": num_layers,
        "num_attention_heads": 32,
        "max_position_embeddings": LENGTH,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if model == "llama":
        return LlamaConfig(**common, hidden_size=4096, intermediate_size=14336, num_key_value_heads=8)
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
    widths = {"hidden_size": 2048, "intermediate_size": 6144, "num_key_value_heads": 4, "head_dim": 128}
    return Qwen3MoeConfig(**common, **widths, **experts)


def write_inputs(folder: Path, model: str, num_layers: int, num_samples: int) -> None:
    """A model with its tokenizer, and tokens."""
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    with torch.device("cuda"):
        made = AutoModelForCausalLM.from_config(config_of(model, tokenizer, num_layers), dtype=torch.bfloat16)
    made.cpu().save_pretrained(folder / "wide")
    tokenizer.save_pretrained(folder / "wide")
    torch.save({"calibration": torch.randint(len(tokenizer), (num_samples, LENGTH))}, folder / "tokens_0.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", type=Path, required=True)
    parser.add_argument("--model", default="llama", choices=["llama", "qwen3_moe"])
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--num-samples", type=int, default=64)
    parser.add_argument("--runs", type=int, default=2)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs a CUDA device.")
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_inputs(folder, arguments.model, arguments.num_layers, arguments.num_samples)
        torch.cuda.empty_cache()
        pythons = {"ours": Path(sys.executable), "peer": arguments.peer_python}
        bench = Bench(pythons, folder, {side: SCRIPTS[side] for side in pythons})
        for _ in range(arguments.runs):
            for name, (side, options) in SIDES.items():
                given = {"dtype": "bfloat16", "batch_size": BATCH_SIZE, "threads": 8, **options}
                taken[name].append(bench.run(side, "wide", arguments.num_samples, **given))
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {arguments.model}, {arguments.num_layers} layers"
    )
    print(f"{'':30}{'seconds':>9}{'of peer':>9}{'device GiB':>12}")
    reference = statistics.median(run["solve_s"] for run in taken["peer"])
    for name, runs in taken.items():
        seconds = statistics.median(run["solve_s"] for run in runs)
        device = statistics.median(run["peak_device_bytes"] for run in runs)
        print(f"{name:30}{seconds:9.2f}{seconds / reference:9.3f}{device / 2**30:12.2f}")
    print(json.dumps(taken))


if __name__ == "__main__":
    main()
