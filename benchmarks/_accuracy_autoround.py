"""AutoRound's side of `accuracy.py`, on the CPU; runs in an environment of its own.

Its defaults (200 steps of signed gradient descent for each layer of the model, batches of 8), but float32 throughout:
by default it would round the model to bfloat16 first. The batches are the calibration tokens themselves, and what is
measured is the model that it leaves in memory.
"""

import logging

from _gptq_case import Batch, Case, read_case, run
from auto_round import AutoRound
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PreTrainedModel

ITERATIONS = 200


def solve(model: PreTrainedModel, loader: DataLoader[Batch], case: Case) -> dict[str, object]:
    """Quantize the model in memory."""
    batches = [batch["input_ids"] for batch in loader]
    scheme = {"bits": case.num_bits, "group_size": case.group_size or -1, "sym": True, "data_type": "int"}
    if case.activation_bits is not None:
        scheme |= {"act_bits": case.activation_bits, "act_group_size": -1, "act_sym": True, "act_dynamic": True}
    rounding = AutoRound(
        model,
        tokenizer=AutoTokenizer.from_pretrained(case.model),
        **scheme,
        scale_dtype="fp32",
        dataset=batches,
        nsamples=case.num_samples,
        seqlen=batches[0].shape[1],
        batch_size=case.batch_size,
        iters=ITERATIONS,
        device_map="cpu",
        amp=False,
        enable_torch_compile=False,
    )
    quantized, _ = rounding.quantize()
    assert quantized is model, "what is measured is not what was quantized"
    return {}


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    run("auto_round", read_case(), solve)
