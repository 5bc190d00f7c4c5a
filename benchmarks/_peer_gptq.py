"""LLM Compressor's side of `gptq_vs_llmcompressor.py`, as its documentation recommends; runs in the peer's environment.

Sequential pipeline, block size 128, its default activation order ("static"), the same batches as ours.
"""

from _gptq_case import Batch, Case, read_case, run
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from loguru import logger
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, LlamaForCausalLM

OBSERVERS = {"minmax": "memoryless_minmax", "mse": "memoryless_mse", "weighted": "imatrix_mse"}


def solve(model: LlamaForCausalLM, loader: DataLoader[Batch], case: Case) -> None:
    """Quantize the model in memory."""
    tokenizer = AutoTokenizer.from_pretrained(case.model)
    weights = QuantizationArgs(
        num_bits=case.num_bits,
        type="int",
        symmetric=True,
        strategy="group",
        group_size=case.group_size,
        observer=OBSERVERS[case.scales],
    )
    recipe = GPTQModifier(
        config_groups={"group_0": QuantizationScheme(targets=["Linear"], weights=weights)},
        ignore=["lm_head"],
        dampening_frac=case.dampening,
        block_size=128,
    )
    oneshot(model=model, processor=tokenizer, dataset=loader, recipe=recipe, pipeline="sequential")


if __name__ == "__main__":
    case = read_case()
    logger.remove()
    run("llmcompressor", case, solve)
