"""LLM Compressor with its disk offload on the model of `memory_depth.py`; runs in the peer's environment.

    python benchmarks/_peer_streamed.py MODEL OUTPUT_DIR [--num-batches 4]

As its documentation has it for models larger than memory: `load_offloaded_model`, all weights on disk. Prints JSON; the
peak is read before and after the checkpoint is saved.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import torch
from compressed_tensors.offload import load_offloaded_model
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from loguru import logger
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--num-batches", type=int, default=4)
    arguments = parser.parse_args()
    logger.remove()
    torch.manual_seed(0)
    idle_bytes = peak_bytes()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=arguments.output_dir.parent) as folder:
        with load_offloaded_model(LlamaForCausalLM):
            model = LlamaForCausalLM.from_pretrained(
                arguments.model, dtype=torch.bfloat16, device_map={"": "disk"}, offload_folder=folder
            )
        tokens = torch.randint(0, model.config.vocab_size, (4 * arguments.num_batches, 256))
        weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=128)
        recipe = GPTQModifier(
            config_groups={"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}, ignore=["lm_head"]
        )
        loader = DataLoader([{"input_ids": row} for row in tokens], batch_size=4)  # type: ignore[var-annotated, arg-type]
        unused = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))
        oneshot(model=model, processor=unused, dataset=loader, recipe=recipe, pipeline="sequential")
        solved_bytes, solved_s = peak_bytes(), time.perf_counter() - start
        model.save_pretrained(arguments.output_dir, save_compressed=True)
    result = {"idle_bytes": idle_bytes, "solved_bytes": solved_bytes, "peak_bytes": peak_bytes()}
    print(json.dumps(result | {"solved_s": solved_s, "total_s": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
