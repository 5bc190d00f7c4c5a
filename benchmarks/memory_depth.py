"""Peak host memory of a streamed compression against the model's depth: it should not grow.

    python benchmarks/memory_depth.py [--depths 8 16 32 64] [--num-batches 4 16] [--peer-venv DIR] [--work-dir DIR]

Random Llamas in bfloat16, 1024 wide, intermediate 2816, vocabulary 4096 (26 MB a layer), written by this script;
W4A16 GPTQ in groups of 128, samples of 256 tokens in batches of 4, activations in a file. Every run is a fresh process;
its peak is VmHWM, its idle size that after imports. `finish s` is the time from the last subgraph's shard to the
report; `save.py` looks closer. With --peer-venv (an environment as `gptq_vs_llmcompressor.py` makes one) a second line
is LLM Compressor's with all weights offloaded to disk, its peak that after saving.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

MODEL = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=4096, hidden_size=1024, intermediate_size=2816, num_hidden_layers=int(sys.argv[2]),
                     num_attention_heads=16, max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=None)
torch.manual_seed(0)
LlamaForCausalLM(config).bfloat16().save_pretrained(sys.argv[1], max_shard_size="200MB")
"""


def run(
    model: Path,
    num_batches: int,
    work_dir: Path,
    *options: str,
    keep: bool = False,
    script: tuple[Path | str, str] = (sys.executable, "_streamed.py"),
) -> dict[str, Any]:
    out = work_dir / "out"
    python, file = script
    command = [python, HERE / file, model, out, "--num-batches", num_batches, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([str(word) for word in command], env=environment, capture_output=True, text=True)
    if not keep:
        shutil.rmtree(out, ignore_errors=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, default=Path.home() / ".cache" / "lightning_compress" / "memory_depth")
    parser.add_argument("--depths", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--num-batches", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--activation-budget", type=int, default=0)
    parser.add_argument("--peer-venv", type=Path)
    parser.add_argument("--json", type=Path, default=Path("outputs/memory_depth.json"))
    arguments = parser.parse_args()
    rows = []
    print("layers  model MB  samples  idle MB  peak MB  over idle  trace s  finish s  total s")
    for depth in arguments.depths:
        model = arguments.work_dir / f"llama-{depth}"
        if not (model / "config.json").is_file():
            subprocess.run([sys.executable, "-c", MODEL, str(model), str(depth)], check=True, capture_output=True)
        size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        for num_batches in arguments.num_batches:
            row = {"depth": depth, "model_bytes": size, "num_samples": 4 * num_batches}
            row |= run(model, num_batches, arguments.work_dir, "--activation-budget", str(arguments.activation_budget))
            rows.append(row)
            over = row["peak_bytes"] - row["idle_bytes"]
            print(
                f"{depth:6} {size / 1e6:9.0f} {4 * num_batches:8} {row['idle_bytes'] / 1e6:8.0f}"
                f" {row['peak_bytes'] / 1e6:8.0f} {over / 1e6:10.0f} {row['prepared_s']:8.1f} {row['finish_s']:9.2f}"
                f" {row['total_s']:8.1f}",
                flush=True,
            )
            if arguments.peer_venv is not None:
                script = (arguments.peer_venv / "bin" / "python", "_peer_streamed.py")
                rows[-1]["peer"] = peer = run(model, num_batches, arguments.work_dir, script=script)
                over = peer["peak_bytes"] - peer["idle_bytes"]
                print(
                    f"{'':7}{'LLM Compressor':18} {peer['idle_bytes'] / 1e6:8.0f} {peer['peak_bytes'] / 1e6:8.0f}"
                    f" {over / 1e6:10.0f} {'':18} {peer['total_s']:8.1f}",
                    flush=True,
                )
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
