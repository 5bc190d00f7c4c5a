"""What a GPU would need if sums of statistics waited in host memory, beside what it needs now: why plans do not ask.

    python benchmarks/statistics_placement.py    # three models' shapes, on fake tensors; minutes on a CPU

Batches of one sample of 2048 tokens, weights on disk, nothing prefetched, activations away from the device: the least
that a way to run takes of it. Sums in host memory would not be there while a batch runs (its products on their way to
them are left out, in their favour), nor while a group is solved, but for those of that group.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3MoeConfig

from lightning_compress.calibration.target import find_target
from lightning_compress.command.measure import measured
from lightning_compress.foresight.jobs import CalibrationJob
from lightning_compress.graph.unfold import unfolded
from lightning_compress.memory.budget import Budgets, peaks
from lightning_compress.memory.needs import Moment, Needs, Waiting
from lightning_compress.memory.source import parameters_on_meta
from lightning_compress.recipe.load import load_recipe
from lightning_compress.recipe.resolve import named_by, resolve
from lightning_compress.statistics.sums import GramSum

CUDA = torch.device("cuda")
LLAMA = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 8192, "dtype": "bfloat16"}
MODELS: dict[str, PretrainedConfig] = {
    "Llama-3-8B": LlamaConfig(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, **LLAMA),
    "Llama-3-70B": LlamaConfig(hidden_size=8192, intermediate_size=28672, num_attention_heads=64, **LLAMA),
    "Qwen3-30B-A3B": Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        moe_intermediate_size=768,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        max_position_embeddings=40960,
        dtype="bfloat16",
    ),
}


def main() -> None:
    """Print a row for each model, schedule and number of parts."""
    print("| model | schedule | experts in parts | GiB now | while | GiB with sums in host memory | while |")
    print("|---|---|---|---|---|---|---|")
    for name, config in MODELS.items():
        config.num_hidden_layers = 4  # the others are like these
        with parameters_on_meta():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for schedule in ("staged", "block"):
            for parts in (1, 4, 16) if "Qwen3" in name else (1,):
                now, away = _least(model, schedule, parts)
                print(f"| {name} | {schedule} | {parts} | {_told(now)} | {_told(away)} |", flush=True)


def _least(model: nn.Module, schedule: str, parts: int) -> list[tuple[int, str]]:
    """The most that a moment takes of the device, and of what kind that is; and the same without other sums."""
    target = find_target(model)
    recipe = load_recipe("w4a16_gptq")
    with unfolded(target.root, named_by(recipe), parts):
        resolved = resolve(recipe, target.root)
        job = CalibrationJob(num_samples=4, batch_size=1, schedule=schedule, expert_parts=parts)
        table = measured(target, resolved, job, CUDA, verifies=False).table
        without = tuple(replace(row, moments=tuple(_without_sums(row, target.root))) for row in table)
    return [_most(rows) for rows in (table, without)]


def _without_sums(row: Needs, root: nn.Module) -> Iterator[Moment]:
    for moment in row.moments:
        if moment.what != "solve":
            yield replace(moment, statistics=0)
            continue
        width = max(root.get_submodule(name).get_parameter("weight").shape[1] for name in moment.of.split(", "))
        yield replace(moment, statistics=GramSum(width, "meta").sum.values.nbytes)


def _most(rows: tuple[Needs, ...]) -> tuple[int, str]:
    found = peaks(rows, CUDA, Budgets(None, 0), "device", 0, Waiting(0, 0))
    most = max(found, key=lambda peak: peak.num_bytes)
    modules = dict.fromkeys(each.rpartition(".")[2] for each in most.moment.of.split(", ") if each)
    return most.num_bytes, f"{most.moment.what} {', '.join(modules)}".strip()


def _told(found: tuple[int, str]) -> str:
    return f"{found[0] / 2**30:.2f} | {found[1]}"


if __name__ == "__main__":
    main()
