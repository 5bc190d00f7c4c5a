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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _gptq_inputs import build_tokenizer
from gpu_vs_llmcompressor import LENGTH, config_of
from transformers import AutoModelForCausalLM

from lightning_compress.memory.tracker import parse_bytes

COMMAND = """
import os, sys, torch
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as the command does, before a GPU is used
limit = int(sys.argv.pop(1))
if limit:
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
from lightning_compress.command.cli import main
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


@dataclass(frozen=True)
class Case:
    """MODEL:LAYERS:SAMPLES[:DEVICE], and where its files are."""

    text: str
    folder: Path

    @property
    def parts(self) -> tuple[str, int, int, str | None]:
        model, num_layers, num_samples, *device = self.text.split(":")
        return model, int(num_layers), int(num_samples), device[0] if device else None

    @property
    def model(self) -> Path:
        return self.folder / "-".join(self.text.split(":")[:2])

    @property
    def plan(self) -> Path:
        return self.folder / f"{self.text.replace(':', '-')}.json"

    @property
    def data(self) -> tuple[str, ...]:
        files = f"data.files=[{self.folder / 'text.txt'}]"
        return ("data=text", files, f"data.num_samples={self.parts[2]}", f"data.max_length={LENGTH}")


def plan_case(case: Case) -> float:
    """Write the model and its plan; seconds of planning."""
    model, num_layers, _, device = case.parts
    write_model(case.model, model, num_layers)
    choices = ("choices.schedule=[staged]", "choices.batch_size=[8,16,32]", "choices.prefetch_depth=[1]")
    budgets = () if device is None else (f"device={device}",)
    where = (f"json={case.plan}", f"output_dir={case.folder}")
    return command(0, "plan", f"model.path={case.model}", *case.data, *choices, "choices.load=[disk]", *budgets, *where)


def run_case(case: Case) -> dict[str, Any]:
    """Follow the plan; what was foreseen and found."""
    device, out = case.parts[3], case.folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    limit = 0 if device is None else parse_bytes(device) - CONTEXT
    given = (f"model.path={case.model}", *case.data, f"plan={case.plan}", f"output_dir={out}")
    command_s = command(limit, "compress", *given)
    report, plan = (json.loads(file.read_text()) for file in (out / "report.json", case.plan))
    best = {key: plan["best"][key] for key in ("choice", "waiting")}
    return {"case": case.text, **best, "command_s": command_s, "comparison": report["comparison"], "report": report}


def print_case(found: dict[str, Any]) -> None:
    print(f"{found['case']}: the command took {found['command_s']:.1f} s")
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
    write_text(folder / "text.txt", 6 * 2**20)
    found = []
    for case in (Case(text, folder) for text in arguments.cases):
        print(f"{case.text}: planned in {plan_case(case):.1f} s")
        found.append(run_case(case))
        print_case(found[-1])
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found))
    shutil.rmtree(folder / "out", ignore_errors=True)


if __name__ == "__main__":
    main()
