"""A checkpoint of 3 GB, compressed by the command line within a budget of host memory.

    python benchmarks/within_budget.py [--host-budget 1.5GiB] [--num-layers 28] [--work-dir DIR] [KEY=VALUE ...]

A random Llama in bfloat16 (2048 wide, intermediate 5632, 28 layers of 16 heads, vocabulary 32000, untied), written
shard by shard, with a tokenizer trained on the documentation; then, in a process of its own,

    lightning-compress compress model.path=DIR model.load=disk data=docs data.num_samples=16 data.max_length=128
        trainer=cpu memory.host_budget=1.5GiB output_dir=OUT

Prints the budget, what the run foresaw, and the process's peak (VmHWM). KEY=VALUE go to the command.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

MODEL = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from lightning_compress.data.config import load_data_config
from lightning_compress.data.sources import load_documents
from lightning_compress.memory.source import parameters_on_meta

folder, num_layers = Path(sys.argv[1]), int(sys.argv[2])
width, intermediate, heads = map(int, sys.argv[3:] or (2048, 5632, 16))
config = LlamaConfig(vocab_size=32000, hidden_size=width, intermediate_size=intermediate, num_hidden_layers=num_layers,
                     num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=2048,
                     tie_word_embeddings=False, dtype="bfloat16", architectures=["LlamaForCausalLM"])
with parameters_on_meta():
    model = LlamaForCausalLM(config)
torch.manual_seed(0)
shards = {}
for name, parameter in model.named_parameters():
    shard = name.split(".")[2] if ".layers." in name else name.split(".")[0 if name.startswith("lm") else 1]
    shards.setdefault(f"model-{shard}.safetensors", {})[name] = parameter.shape
folder.mkdir(parents=True, exist_ok=True)
for shard, shapes in shards.items():
    tensors = {name: torch.randn(shape, dtype=torch.bfloat16) * 0.02 if len(shape) > 1 else
               torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, folder / shard, metadata={"format": "pt"})
weight_map = {name: shard for shard, shapes in shards.items() for name in shapes}
(folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
trainer = trainers.WordLevelTrainer(vocab_size=32000, special_tokens=["<unk>", "<eos>"], show_progress=False)
tokenizer.train_from_iterator(load_documents(load_data_config({"source": "docs"})), trainer)
PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)
config.save_pretrained(folder)
"""
COMMAND = "from lightning_compress.command.cli import main; main()"
DATA = ("data=docs", "data.num_samples=16", "data.max_length=128", "trainer=cpu")


def high_water(process: int) -> int:
    """VmHWM of a process, 0 when it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def run(command: list[str]) -> tuple[int, int, float]:
    """Exit status, VmHWM (sampled: a high-water mark never falls) and seconds of a command."""
    start = time.perf_counter()
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "2"})
    peaks = [0]

    def watch() -> None:
        while process.poll() is None:
            peaks.append(max(peaks[-1], high_water(process.pid)))
            time.sleep(0.2)

    watcher = threading.Thread(target=watch)
    watcher.start()
    status = process.wait()
    watcher.join()
    return status, peaks[-1], time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, default=Path.home() / ".cache" / "lightning_compress" / "budget")
    parser.add_argument("--host-budget", default="1.5GiB")
    parser.add_argument("--num-layers", type=int, default=28)
    parser.add_argument("--json", type=Path, default=Path("outputs/within_budget.json"))
    arguments, overrides = parser.parse_known_args()
    model, out = arguments.work_dir / f"llama-{arguments.num_layers}", arguments.work_dir / "out"
    if not (model / "config.json").is_file():
        subprocess.run([sys.executable, "-c", MODEL, str(model), str(arguments.num_layers)], check=True)
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    shutil.rmtree(out, ignore_errors=True)
    command = ["lightning-compress", "compress", f"model.path={model}", "model.load=disk", *DATA]
    command += [f"memory.host_budget={arguments.host_budget}", f"output_dir={out}", *overrides]
    print(" ".join(command), flush=True)
    status, peak, seconds = run([sys.executable, "-c", COMMAND, *command[1:]])
    if status:
        raise SystemExit(status)
    report = json.loads((out / "report.json").read_text())
    row = {"model_bytes": size, "peak_bytes": peak, "seconds": seconds, **(report.get("memory") or {})}
    row["high_water"] = [subgraph["peak_bytes"] for subgraph in report["subgraphs"]]
    print(json.dumps(row, indent=2))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(row, indent=2))
    shutil.rmtree(out)


if __name__ == "__main__":
    main()
