"""LLM Compressor's side of `gptq_vs_llmcompressor.py` and `accuracy.py`; runs in the peer's environment.

As its documentation recommends: sequential pipeline, block size 128, its default activation order ("static"), the same
batches as ours.
"""

from _gptq_case import Batch, Case, read_case, run
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from loguru import logger
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PreTrainedModel

OBSERVERS = {"minmax": "memoryless_minmax", "mse": "memoryless_mse", "weighted": "imatrix_mse"}


def scheme_of(case: Case) -> QuantizationScheme:
    if case.preset is not None:
        return preset_name_to_scheme(case.preset, ["Linear"])
    inputs = None if case.input_activations is None else QuantizationArgs(**case.input_activations)
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**case.weights), input_activations=inputs)


def solve(model: PreTrainedModel, loader: DataLoader[Batch], case: Case) -> dict[str, object]:
    """Quantize the model in memory."""
    tokenizer = AutoTokenizer.from_pretrained(case.model)
    scheme = scheme_of(case)
    assert scheme.weights is not None
    scheme.weights.observer = OBSERVERS[case.scales]
    recipe = GPTQModifier(
        config_groups={"group_0": scheme},
        ignore=["lm_head", "re:.*gate$"],
        dampening_frac=case.dampening,
        block_size=128,
    )
    oneshot(model=model, processor=tokenizer, dataset=loader, recipe=recipe, pipeline="sequential")
    return {}


if __name__ == "__main__":
    case = read_case()
    logger.remove()
    run("llmcompressor", case, solve)
