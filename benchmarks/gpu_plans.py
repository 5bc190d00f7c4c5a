"""Whole models on a GPU: what `plan` says of a compression, beside the run that follows it.

    python benchmarks/gpu_plans.py [--cases llama:32:512 llama:32:128:10GiB qwen3_moe:6:64] [--work-dir DIR]

A case is MODEL:LAYERS:SAMPLES[:DEVICE]: layers as Llama-3-8B has them (vocabulary 128256) or as Qwen3-30B-A3B (128
experts, of which 8 run; vocabulary 151936) with random weights in bfloat16 on disk; samples of 2048 tokens from the
standard library's sources. The machine is measured once (`lightning-compress probe`); then, for every case,
`lightning-compress plan` (`staged`; batches of 8, 16 or 32) and `compress plan=FILE`, with `w4a16_gptq`, in processes
of their own. DEVICE is the card that is planned for; PyTorch is then refused more memory than such a card has
beside its context. Prints, and writes as JSON, seconds and peaks, foreseen and measured, and the seconds of the whole
command.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from _gptq_inputs import build_tokenizer
from gpu_vs_llmcompressor import LENGTH, config_of
from transformers import AutoModelForCausalLM

from lightning_compress.memory.tracker import parse_bytes

COMMAND = """
import sys, torch
limit = int(sys.argv.pop(1))
if limit:
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
from lightning_compress.plugin.cli import main
main()
"""
VOCABULARIES = {"llama": 128256, "qwen3_moe": 151936}
CONTEXT = 600 * 2**20
"""What a plan takes off a card for its context, which PyTorch's limit does not count."""


def command(limit: int, *arguments: str) -> float:
    """Run a command of lightning-compress within `limit` bytes of the allocator (0: all); its seconds."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", COMMAND, str(limit), *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def write_model(folder: Path, model: str, num_layers: int) -> None:
    if (folder / "config.json").is_file():
        return
    tokenizer = build_tokenizer()
    config = config_of(model, tokenizer, num_layers)
    config.vocab_size = VOCABULARIES[model]
    torch.manual_seed(0)
    with torch.device("cuda"):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    made.cpu().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    torch.cuda.empty_cache()


def write_text(file: Path, num_bytes: int) -> None:
    """So much of the standard library's sources."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    packages = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*/*.py"))
    text = "\n".join(source.read_text(errors="replace") for source in sources + packages)
    file.write_text(text[:num_bytes])


def run_case(folder: Path, model: str, num_layers: int, num_samples: int, device: str | None) -> dict[str, Any]:
    source, out, file = folder / f"{model}-{num_layers}", folder / "out", folder / "plan.json"
    write_model(source, model, num_layers)
    shutil.rmtree(out, ignore_errors=True)
    text = folder / "text.txt"
    if not text.exists():
        write_text(text, 12 * 2**20)
    data = ("data=text", f"data.files=[{text}]", f"data.num_samples={num_samples}", f"data.max_length={LENGTH}")
    choices = ("choices.schedule=[staged]", "choices.batch_size=[8,16,32]", "choices.prefetch_depth=[1]")
    budgets, limit = ((), 0) if device is None else ((f"device={device}",), parse_bytes(device) - CONTEXT)
    plan = (f"model.path={source}", *data, *choices, "choices.load=[disk]", *budgets, f"json={file}")
    plan_s = command(0, "plan", *plan, f"output_dir={folder}")
    command_s = command(limit, "compress", f"model.path={source}", *data, f"plan={file}", f"output_dir={out}")
    report = json.loads((out / "report.json").read_text())
    planned = json.loads(file.read_text())
    return {
        "case": ":".join(str(part) for part in (model, num_layers, num_samples, device) if part),
        "choice": planned["best"]["choice"],
        "waiting": planned["best"]["waiting"],
        "plan_s": plan_s,
        "command_s": command_s,
        "comparison": report["comparison"],
        "report": report,
    }


def print_case(found: dict[str, Any]) -> None:
    print(f"{found['case']}: planned in {found['plan_s']:.1f} s, the command took {found['command_s']:.1f} s")
    print(f"  {found['choice']} {found['waiting']}")
    for row in found["comparison"]:
        scale = 2**30 if row["unit"] == "B" else 1
        foreseen, measured = row["foreseen"] / scale, row["measured"] / scale
        error = f"{foreseen / measured - 1:+.1%}" if measured else ""
        print(f"  {row['name']:34}{foreseen:10.2f}{measured:10.2f}  {'GiB' if scale > 1 else row['unit']:4}{error:>9}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = ["llama:32:512", "llama:32:128:10GiB", "qwen3_moe:6:64"]
    parser.add_argument("--cases", nargs="+", default=cases)
    parser.add_argument("--work-dir", type=Path, default=Path.home() / ".cache" / "lightning_compress" / "gpu_plans")
    parser.add_argument("--json", type=Path, default=Path("outputs/gpu_plans.json"))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs a CUDA device.")
    folder: Path = arguments.work_dir
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    print(f"{torch.cuda.get_device_name()}, probed in {command(0, 'probe', f'output_dir={folder}'):.1f} s", flush=True)
    found = []
    for case in arguments.cases:
        model, num_layers, num_samples, *device = case.split(":")
        found.append(run_case(folder, model, int(num_layers), int(num_samples), device[0] if device else None))
        print_case(found[-1])
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found))
    shutil.rmtree(folder / "out", ignore_errors=True)


if __name__ == "__main__":
    main()
